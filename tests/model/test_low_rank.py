"""Adapters beside frozen matrices (Hu et al. 2021, arXiv:2106.09685; DoRA, arXiv:2402.09353), held against the model
whose matrices have the sums added to them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.linear.weight_gradients import WeightGradients, splitting
from meshwright.model import Transformer, build
from meshwright.model.layers import Linear
from meshwright.model.low_rank import LoRA, merge_adapter
from meshwright.spec.errors import PlanError
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.weights.inventory import adapter_parts, parameters
from meshwright.training.optimizer.optimizer import Optimizer
from tests.model.shrunk import model, shrink, tokens
from tests.operation_recorder import Recording
from tests.training.tiny import RECIPE, batch, relative, trained, weights

NAMES = ["llama-3.1-8b", "qwen2.5-0.5b", "gpt2", "deepseek-v3", "qwen3-30b-a3b"]
"""Gated and tied, with biases, without a gate, with latent attention and shared experts, with experts alone."""
PLAIN = LoRAShape(rank=3, alpha=1.5)
SCALED = LoRAShape(rank=3, alpha=1.5, dora=True)


def adapted(name: str, lora: LoRAShape = PLAIN) -> tuple[Transformer, Transformer]:
    """A model with adapters that say something, and one with the same matrices put together."""
    base = model(name)
    adapted_model = build(replace(base.shape, lora=lora))
    whole = build(base.shape, initialize=False)
    by_name, places = dict(adapted_model.named_parameters()), whole.state_dict()
    torch.manual_seed(0)
    with torch.no_grad():
        for key, tensor in base.state_dict().items():
            adapted_model.state_dict()[key].copy_(tensor)
        for key, parameter in by_name.items():
            if key.endswith("lora.b"):
                parameter.normal_(0.0, 1.0)
            if key.endswith("magnitude"):
                parameter.uniform_(0.5, 2.0)
        for key, tensor in base.state_dict().items():
            low = adapter_parts(key, by_name)
            places[key].copy_(merge_adapter(tensor, low, lora) if low else tensor)
    return adapted_model, whole


def right_gradients(adapted_model: Transformer, whole: Transformer) -> dict[str, Tensor]:
    """Return gradients by the chain rule from those of the merged matrices."""
    right, scale = {}, PLAIN.scale
    for parameter in parameters(adapted_model.shape):
        if parameter.adapts and parameter.name.endswith("lora.a"):
            gradient = whole.get_parameter(parameter.adapts).grad
            assert gradient is not None
            prefix = parameter.name.removesuffix("a")
            a, b = (adapted_model.get_parameter(prefix + part) for part in "ab")
            right[prefix + "a"] = scale * b.mT @ gradient
            right[prefix + "b"] = scale * gradient @ a.mT
    return right


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", NAMES)
def test_it_computes_and_learns_as_the_sum(name: str, split: bool) -> None:
    """This holds with deferred weight gradients too, as zero-bubble pipelines use them."""
    adapted_model, whole = adapted(name)
    ids = tokens(2, 13)
    expected = whole.loss(ids[:, :-1], ids[:, 1:]).cross_entropy
    expected.backward()
    if split:
        with splitting():
            loss = adapted_model.loss(ids[:, :-1], ids[:, 1:]).cross_entropy
            with WeightGradients() as queue:
                loss.backward()
            assert len(queue)
            queue.run()
    else:
        loss = adapted_model.loss(ids[:, :-1], ids[:, 1:]).cross_entropy
        loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    right = right_gradients(adapted_model, whole)
    by_name = dict(adapted_model.named_parameters())
    assert {name for name, parameter in by_name.items() if parameter.grad is not None} == set(right)
    for key, gradient in right.items():
        mine = by_name[key].grad
        assert mine is not None and relative(mine, gradient) < 1e-4, key


@pytest.mark.parametrize("name", NAMES[:3])
def test_with_lengths_of_rows_it_computes_as_the_sum(name: str) -> None:
    adapted_model, whole = adapted(name, SCALED)
    ids = tokens(2, 13)
    expected = whole.loss(ids[:, :-1], ids[:, 1:]).cross_entropy
    loss = adapted_model.loss(ids[:, :-1], ids[:, 1:]).cross_entropy
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    trained = {parameter.name for parameter in parameters(adapted_model.shape) if parameter.trained}
    assert {key for key, parameter in adapted_model.named_parameters() if parameter.grad is not None} == trained


def test_a_row_of_zeros_has_a_length_that_divides() -> None:
    """Pruning leaves such rows: their outputs are 0, and so are their gradients."""
    adapted_model = adapted("llama-3.1-8b", SCALED)[0]
    layer = next(part for part in adapted_model.modules() if isinstance(part, Linear) and isinstance(part.lora, LoRA))
    assert isinstance(layer.lora, LoRA)
    with torch.no_grad():
        for part in (layer.weight, layer.lora.b, layer.lora.magnitude):
            part[1] = 0.0
    x = torch.randn(3, layer.in_features)
    output = layer(x)
    low = dict(layer.lora.named_parameters())
    torch.testing.assert_close(output, x @ merge_adapter(layer.weight, low, SCALED).T)
    output.square().sum().backward()
    assert not output[:, 1].any() and all(
        bool(part.grad.isfinite().all()) for part in low.values() if part.grad is not None
    )


def test_where_16_bit_products_are_emulated_lengths_of_rows_are_made_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: False)
    adapted_model = adapted("llama-3.1-8b", SCALED)[0].bfloat16()
    layer = next(
        module for module in adapted_model.modules() if isinstance(module, Linear) and isinstance(module.lora, LoRA)
    )
    assert isinstance(layer.lora, LoRA)
    with Recording() as recording:
        lengths = layer.lora.norms(layer.weight)
    assert recording.products() == {torch.float32}
    low = {"a": layer.lora.a.float(), "b": layer.lora.b.float()}
    torch.testing.assert_close(lengths, merge_adapter(layer.weight.float(), low, SCALED).norm(dim=1), rtol=1e-3, atol=0)


def test_a_frozen_weight_costs_its_bytes_and_stays() -> None:
    adapted_model, _ = adapted("llama-3.1-8b")
    before = weights(adapted_model)
    _, optimizer = trained(adapted_model, batch(4, 10), 2)
    adapter_names = {name for name in before if ".lora." in name}
    assert set(optimizer.masters) == adapter_names and set(optimizer.parameters) == adapter_names
    assert {name.partition(".")[2] for name in optimizer.tensors()} == adapter_names
    for name, value in weights(adapted_model).items():
        assert torch.equal(value, before[name]) == (name not in adapter_names), name


def test_dropout_is_of_the_adapter_alone() -> None:
    """Without the adapter's sum, dropout changes nothing. In evaluation there is none."""
    lora = replace(PLAIN, dropout=0.5)
    adapted_model, whole = adapted("llama-3.1-8b", lora)
    ids = tokens(2, 13)
    right = whole.loss(ids[:, :-1], ids[:, 1:]).cross_entropy.item()
    adapted_model.train()
    torch.manual_seed(1)
    dropped = adapted_model.loss(ids[:, :-1], ids[:, 1:]).cross_entropy.item()
    assert abs(dropped - right) > 1e-3
    adapted_model.eval()
    assert adapted_model.loss(ids[:, :-1], ids[:, 1:]).cross_entropy.item() == pytest.approx(right, rel=1e-5)
    adapted_model.train()
    with torch.no_grad():
        for key, parameter in adapted_model.named_parameters():
            if key.endswith("lora.b"):
                parameter.zero_()
    losses = {adapted_model.loss(ids[:, :-1], ids[:, 1:]).cross_entropy.item() for _ in range(3)}
    assert len(losses) == 1


def test_an_adapter_begins_as_nothing() -> None:
    shape = shrink("llama-3.1-8b")
    ids = tokens(2, 13)
    adapted_model = build(replace(shape, lora=PLAIN))
    assert torch.equal(adapted_model(ids), build(shape)(ids))
    a = [matrix for key, matrix in adapted_model.named_parameters() if key.endswith("lora.a")]
    for matrix in a:
        assert matrix.std().item() == pytest.approx((3 * matrix.shape[1]) ** -0.5, rel=0.3)


def test_targets_choose_matrices() -> None:
    shape = shrink("llama-3.1-8b")

    def count(targets: str) -> int:
        adapted = replace(shape, lora=LoRAShape(rank=2, targets=targets))
        return sum(parameter.numel for parameter in parameters(adapted) if parameter.trained)

    assert count("all") == count("attention") + count("mlp")
    assert count("attention") == sum(count(name) for name in "qkvo")
    assert count("q,v") == count("q") + count("v")
    queries = shape.heads * shape.head_dim
    assert count("q") == shape.layers * 2 * (shape.hidden + queries)
    with pytest.raises(PlanError, match=r"model.lora.targets='q,head': 'head' names no matrix"):
        count("q,head")


def test_nothing_to_train_is_legal() -> None:
    """A pipeline's rank may hold frozen layers only."""
    adapted_model = model("llama-3.1-8b").requires_grad_(False)
    optimizer = Optimizer(adapted_model.named_parameters(), RECIPE)
    optimizer.step(1e-2, divide_by=torch.ones(()), skip=torch.zeros(()))
    assert optimizer.tensors() == {}

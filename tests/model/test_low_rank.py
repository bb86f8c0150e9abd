"""Adapters beside frozen matrices (Hu et al. 2021, arXiv:2106.09685; DoRA, arXiv:2402.09353), held against the model
whose matrices have the sums added to them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.weight_gradients import WeightGradients, splitting
from meshwright.model import Transformer, build
from meshwright.model.linear import Linear
from meshwright.model.low_rank import LoRA, merged
from meshwright.spec.errors import PlanError
from meshwright.spec.inventory import adapter_parts, num_trained_parameters, parameters
from meshwright.spec.lora import LoRAShape
from meshwright.training.optimizer import Optimizer
from tests.model.shrunk import model, shrink, tokens
from tests.operation_recorder import Recording
from tests.train.tiny import RECIPE, batch, relative, trained, weights

NAMES = ["llama-3.1-8b", "qwen2.5-0.5b", "gpt2", "deepseek-v3", "qwen3-30b-a3b"]
"""Gated and tied, with biases, without a gate, with latent attention and shared experts, with experts alone."""
PLAIN = LoRAShape(rank=3, alpha=1.5)
SCALED = LoRAShape(rank=3, alpha=1.5, dora=True)


def adapted(name: str, lora: LoRAShape = PLAIN) -> tuple[Transformer, Transformer]:
    """A model with adapters that say something, and one with the same matrices put together."""
    base = model(name)
    found = build(replace(base.shape, lora=lora))
    whole = build(base.shape, initialize=False)
    own, places = dict(found.named_parameters()), whole.state_dict()
    torch.manual_seed(0)
    with torch.no_grad():
        for key, tensor in base.state_dict().items():
            found.state_dict()[key].copy_(tensor)
        for key, parameter in own.items():
            if key.endswith("lora.b"):
                parameter.normal_(0.0, 1.0)
            if key.endswith("magnitude"):
                parameter.uniform_(0.5, 2.0)
        for key, tensor in base.state_dict().items():
            low = adapter_parts(key, own)
            places[key].copy_(merged(tensor, low, lora) if low else tensor)
    return found, whole


def right_gradients(found: Transformer, whole: Transformer) -> dict[str, Tensor]:
    """By the chain rule from those of the matrices put together."""
    right, scale = {}, PLAIN.scale
    for one in parameters(found.shape):
        if one.adapts and one.name.endswith("lora.a"):
            gradient = whole.get_parameter(one.adapts).grad
            assert gradient is not None
            prefix = one.name.removesuffix("a")
            a, b = (found.get_parameter(prefix + part) for part in "ab")
            right[prefix + "a"] = scale * b.mT @ gradient
            right[prefix + "b"] = scale * gradient @ a.mT
    return right


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", NAMES)
def test_it_computes_and_learns_as_the_sum(name: str, split: bool) -> None:
    """Also where products with weights are left for later, as zero-bubble pipelines do."""
    found, whole = adapted(name)
    given = tokens(2, 13)
    expected = whole.loss(given[:, :-1], given[:, 1:]).cross_entropy
    expected.backward()
    if split:
        with splitting():
            loss = found.loss(given[:, :-1], given[:, 1:]).cross_entropy
            with WeightGradients() as queue:
                loss.backward()
            assert len(queue)
            queue.run()
    else:
        loss = found.loss(given[:, :-1], given[:, 1:]).cross_entropy
        loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    right = right_gradients(found, whole)
    own = dict(found.named_parameters())
    assert {name for name, parameter in own.items() if parameter.grad is not None} == set(right)
    for key, gradient in right.items():
        mine = own[key].grad
        assert mine is not None and relative(mine, gradient) < 1e-4, key


@pytest.mark.parametrize("name", NAMES[:3])
def test_with_lengths_of_rows_it_computes_as_the_sum(name: str) -> None:
    found, whole = adapted(name, SCALED)
    given = tokens(2, 13)
    expected = whole.loss(given[:, :-1], given[:, 1:]).cross_entropy
    loss = found.loss(given[:, :-1], given[:, 1:]).cross_entropy
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    trained = {one.name for one in parameters(found.shape) if one.trained}
    assert {key for key, one in found.named_parameters() if one.grad is not None} == trained


def test_a_row_of_zeros_has_a_length_that_divides() -> None:
    """Pruning leaves such rows: their outputs are 0, and so are their gradients."""
    found = adapted("llama-3.1-8b", SCALED)[0]
    layer = next(one for one in found.modules() if isinstance(one, Linear) and isinstance(one.lora, LoRA))
    assert isinstance(layer.lora, LoRA)
    with torch.no_grad():
        for one in (layer.weight, layer.lora.b, layer.lora.magnitude):
            one[1] = 0.0
    x = torch.randn(3, layer.in_features)
    given = layer(x)
    low = dict(layer.lora.named_parameters())
    torch.testing.assert_close(given, x @ merged(layer.weight, low, SCALED).T)
    given.square().sum().backward()
    assert not given[:, 1].any() and all(
        bool(one.grad.isfinite().all()) for one in low.values() if one.grad is not None
    )


def test_where_16_bit_products_are_emulated_lengths_of_rows_are_made_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: False)
    found = adapted("llama-3.1-8b", SCALED)[0].bfloat16()
    layer = next(one for one in found.modules() if isinstance(one, Linear) and isinstance(one.lora, LoRA))
    assert isinstance(layer.lora, LoRA)
    with Recording() as recording:
        lengths = layer.lora.norms(layer.weight)
    assert recording.products() == {torch.float32}
    low = {"a": layer.lora.a.float(), "b": layer.lora.b.float()}
    torch.testing.assert_close(lengths, merged(layer.weight.float(), low, SCALED).norm(dim=1), rtol=1e-3, atol=0)


def test_a_frozen_weight_costs_its_bytes_and_stays() -> None:
    found, _ = adapted("llama-3.1-8b")
    before = weights(found)
    _, optimizer = trained(found, batch(4, 10), 2)
    own = {name for name in before if ".lora." in name}
    assert set(optimizer.masters) == own and set(optimizer.parameters) == own
    assert {name.partition(".")[2] for name in optimizer.tensors()} == own
    for name, value in weights(found).items():
        assert torch.equal(value, before[name]) == (name not in own), name


def test_dropout_is_of_the_adapter_alone() -> None:
    """Without one's sum the model says the same whatever is dropped; in evaluation nothing is."""
    lora = replace(PLAIN, dropout=0.5)
    found, whole = adapted("llama-3.1-8b", lora)
    given = tokens(2, 13)
    right = whole.loss(given[:, :-1], given[:, 1:]).cross_entropy.item()
    found.train()
    torch.manual_seed(1)
    dropped = found.loss(given[:, :-1], given[:, 1:]).cross_entropy.item()
    assert abs(dropped - right) > 1e-3
    found.eval()
    assert found.loss(given[:, :-1], given[:, 1:]).cross_entropy.item() == pytest.approx(right, rel=1e-5)
    found.train()
    with torch.no_grad():
        for key, parameter in found.named_parameters():
            if key.endswith("lora.b"):
                parameter.zero_()
    losses = {found.loss(given[:, :-1], given[:, 1:]).cross_entropy.item() for _ in range(3)}
    assert len(losses) == 1


def test_an_adapter_begins_as_nothing() -> None:
    shape = shrink("llama-3.1-8b")
    given = tokens(2, 13)
    found = build(replace(shape, lora=PLAIN))
    assert torch.equal(found(given), build(shape)(given))
    a = [one for key, one in found.named_parameters() if key.endswith("lora.a")]
    for one in a:
        assert one.std().item() == pytest.approx((3 * one.shape[1]) ** -0.5, rel=0.3)


def test_targets_choose_matrices() -> None:
    shape = shrink("llama-3.1-8b")

    def count(targets: str) -> int:
        return num_trained_parameters(replace(shape, lora=LoRAShape(rank=2, targets=targets)))

    assert count("all") == count("attention") + count("mlp")
    assert count("attention") == sum(count(name) for name in "qkvo")
    assert count("q,v") == count("q") + count("v")
    queries = shape.heads * shape.head_dim
    assert count("q") == shape.layers * 2 * (shape.hidden + queries)
    with pytest.raises(PlanError, match=r"model.lora.targets=q,head: 'head' names no matrix"):
        count("q,head")


def test_nothing_to_train_is_legal() -> None:
    """A pipeline's rank may hold frozen layers only."""
    found = model("llama-3.1-8b").requires_grad_(False)
    optimizer = Optimizer(found.named_parameters(), RECIPE)
    optimizer.step(1e-2, divide_by=torch.ones(()), skip=torch.zeros(()))
    assert optimizer.tensors() == {}

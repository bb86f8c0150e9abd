"""A low-rank sum in the place of a layer's matrix (Hu et al. 2021, arXiv:2106.09685): a Weight of another package."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from meshwright.kernels.weight_gradients import WeightGradients, splitting
from meshwright.model import Transformer
from meshwright.model.linear import Head, Linear
from meshwright.training.optimizer import Optimizer
from tests.model.shrunk import model, tokens
from tests.train.tiny import RECIPE, batch, relative, trained, weights

RANK, SCALE = 3, 0.5
NAMES = ["llama-3.1-8b", "qwen2.5-0.5b", "gpt2", "deepseek-v3"]
"""Gated and tied, with biases, without a gate, with latent attention and shared experts."""


class LowRank(nn.Module):
    """W + SCALE B A, with B (out, RANK) and A (RANK, in)."""

    def __init__(self, layer: Linear) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(RANK, layer.in_features) / layer.in_features**0.5)
        self.b = nn.Parameter(torch.randn(layer.out_features, RANK) / RANK**0.5)

    def matrices(self, weight: Tensor) -> Sequence[Tensor]:
        return weight, self.a

    def result(self, products: Sequence[Tensor], linear: Callable[..., Tensor]) -> Tensor:
        whole, narrow = products
        return whole + SCALE * linear(narrow, self.b)


def adapted(name: str) -> tuple[Transformer, Transformer]:
    """A model whose layers have low-rank sums, alone trained, and one with the same matrices added up."""
    found, merged = model(name), model(name)
    for parameter in found.parameters():
        parameter.requires_grad_(False)
    torch.manual_seed(0)
    for where, layer in list(found.named_modules()):
        if isinstance(layer, Linear) and not isinstance(layer, Head):
            layer.form = LowRank(layer)
            with torch.no_grad():
                merged.get_parameter(where + ".weight").add_(SCALE * layer.form.b @ layer.form.a)
    return found, merged


def right_gradients(found: Transformer, merged: Transformer) -> dict[str, Tensor]:
    """By the chain rule from those of the merged matrices."""
    right = {}
    for where, layer in found.named_modules():
        if isinstance(layer, Linear) and isinstance(layer.form, LowRank):
            whole = merged.get_parameter(where + ".weight").grad
            assert whole is not None
            right[f"{where}.form.a"] = SCALE * layer.form.b.T @ whole
            right[f"{where}.form.b"] = SCALE * whole @ layer.form.a.T
    return right


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", NAMES)
def test_it_computes_and_learns_as_the_sum(name: str, split: bool) -> None:
    """Also where products with weights are left for later, as zero-bubble pipelines do."""
    found, merged = adapted(name)
    given = tokens(2, 13)
    expected = merged.loss(given[:, :-1], given[:, 1:]).cross_entropy
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
    right = right_gradients(found, merged)
    parameters = dict(found.named_parameters())
    assert {name for name, parameter in parameters.items() if parameter.grad is not None} == set(right)
    for key, gradient in right.items():
        mine = parameters[key].grad
        assert mine is not None and relative(mine, gradient) < 1e-4, key


def test_a_frozen_weight_costs_its_bytes_and_stays() -> None:
    found, _ = adapted("llama-3.1-8b")
    before = weights(found)
    _, optimizer = trained(found, batch(4, 10), 2)
    own = {name for name in before if ".form." in name}
    assert set(optimizer.masters) == own and set(optimizer.parameters) == own
    assert {name.partition(".")[2] for name in optimizer.tensors()} == own
    for name, value in weights(found).items():
        assert torch.equal(value, before[name]) == (name not in own), name


def test_nothing_to_train_is_legal() -> None:
    """A pipeline's rank may hold frozen layers only."""
    found = model("llama-3.1-8b").requires_grad_(False)
    optimizer = Optimizer(found.named_parameters(), RECIPE)
    optimizer.step(1e-2, divide_by=torch.ones(()), skip=torch.zeros(()))
    assert optimizer.tensors() == {}

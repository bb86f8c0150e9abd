"""Backward passes in two halves: gradients of inputs now, those of weights later, bit for bit those of autograd."""

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright import compat
from meshwright.kernels import fast
from meshwright.kernels.chooser import simulate_device, simulated_kind
from meshwright.kernels.linear.weight_gradients import WeightGradients, splits, splitting
from meshwright.parallel.blocks.recompute import block_call
from meshwright.spec.layout.layout import RECOMPUTE
from tests.counting import Operations
from tests.kernels.exactness import tensors
from tests.model.shrunk import KINDS, model, tokens

DTYPES = (torch.float32, torch.bfloat16)


def gated_layer(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return fast().linear(fast().linear(x.tanh(), a, bias).relu(), b)


def several(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    first, second = fast().linears(x.tanh(), (a, b.t().contiguous()), (bias, None))
    return first * second


def gated(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    up = fast().linear(x, a, bias)
    return fast().swiglu_linear(up.tanh(), up, b)


def same_weight_twice(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    again = fast().linear(fast().linear(fast().linear(x, a), b), a)
    return fast().linear(again, b)


def recomputed(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    actual: Tensor = checkpoint(gated, x, a, b, bias, use_reentrant=False)
    return actual


def experts(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    """Two stacks of three experts, the middle one of which sees no row."""
    rows = fast().expert_linear(x.flatten(0, 1), a, [4, 0, 6])
    return fast().expert_linear(rows.tanh(), b, torch.tensor([4, 0, 6]))


FUNCTIONS = (gated_layer, several, gated, same_weight_twice, recomputed)


def backward_twice(
    function: Callable[..., Tensor], inputs: list[Tensor], split: bool
) -> tuple[list[Tensor], list[int]]:
    """Gradients of two passes in a row, and how many products waited in each."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    waited = []
    with splitting() if split else nullcontext():
        for step in range(2):
            loss = (function(*leaves).float() ** 2).sum() / (step + 1)
            queue = WeightGradients()
            with queue if split else nullcontext():
                loss.backward()
            waited.append(len(queue))
            queue.run()
            assert len(queue) == 0
    return [leaf.grad for leaf in leaves if leaf.grad is not None], waited


@pytest.mark.parametrize("native", [True, False], ids=["native", "widened"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_gradients_are_those_of_autograd_bit_for_bit(
    function: Callable[..., Tensor], dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: native)
    inputs = tensors((2, 5, 12), (7, 12), (12, 7), (7,), dtype=dtype)
    plain, _ = backward_twice(function, inputs, split=False)
    split, waited = backward_twice(function, inputs, split=True)
    assert len(plain) == len(split) and all(waited)
    for a, b in zip(plain, split, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("native", [True, False], ids=["native", "widened"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts(dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: native)
    _compare_experts(tensors((2, 5, 12), (3, 7, 12), (3, 12, 7), (7,), dtype=dtype))


def _compare_experts(inputs: list[Tensor]) -> None:
    plain, _ = backward_twice(experts, inputs, split=False)
    split, waited = backward_twice(experts, inputs, split=True)
    assert waited == [2, 2] and len(plain) == len(split) == 3
    assert all(torch.equal(a, b) for a, b in zip(plain, split, strict=True))


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped products")
def test_experts_in_grouped_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, in the loop that torch has for a CPU."""
    module = sys.modules["meshwright.kernels.experts.experts"]
    monkeypatch.setattr(module, "groups_on_device", lambda rows, weights: True)
    inputs = tensors((2, 5, 16), (3, 8, 16), (3, 16, 8), (8,), dtype=torch.bfloat16)
    _compare_experts(inputs)


def test_no_expert_sees_a_row() -> None:
    rows, weights = torch.zeros(0, 4, requires_grad=True), torch.ones(3, 5, 4, requires_grad=True)
    queue = WeightGradients()
    with splitting(), queue:
        fast().expert_linear(rows, weights, [0, 0, 0]).sum().backward()
    assert weights.grad is None and rows.grad is not None and rows.grad.shape == (0, 4)
    queue.run()
    assert weights.grad is not None and not weights.grad.any()


def test_only_leaves_wait() -> None:
    inputs = tensors((2, 5, 12), (7, 12), (12, 7), (7,))
    _, waited = backward_twice(several, inputs, split=True)
    assert waited == [1, 1]


def test_the_backward_pass_leaves_the_products_out_and_run_makes_them() -> None:
    x, a, b, bias = (tensor.requires_grad_() for tensor in tensors((2, 5, 12), (7, 12), (12, 7), (7,)))
    queue = WeightGradients()
    with splitting():
        loss = gated_layer(x, a, b, bias).sum()
        with queue, Operations() as first:
            loss.backward()
    assert first.products == 2 and a.grad is None and b.grad is None
    assert x.grad is not None and bias.grad is not None
    with Operations() as second:
        queue.run()
    assert second.products == 2 and a.grad is not None and b.grad is not None


def test_without_a_queue_a_pass_that_could_be_split_is_whole() -> None:
    inputs = tensors((2, 5, 12), (7, 12), (12, 7), (7,))
    plain, _ = backward_twice(gated, inputs, split=False)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    with splitting():
        for step in range(2):
            ((gated(*leaves).float() ** 2).sum() / (step + 1)).backward()
    assert [leaf.grad is not None and torch.equal(leaf.grad, a) for leaf, a in zip(leaves, plain, strict=True)] == [
        True
    ] * 4


def test_frozen_weights_wait_for_nothing() -> None:
    x, a, b, bias = tensors((2, 5, 12), (7, 12), (12, 7), (7,))
    queue = WeightGradients()
    with splitting(), queue:
        gated_layer(x.requires_grad_(), a, b.requires_grad_(), bias).sum().backward()
    assert len(queue) == 1
    queue.run()
    assert a.grad is None and b.grad is not None


def test_outside_nothing_is_changed() -> None:
    x, a = tensors((3, 12), (7, 12))
    assert not splits()
    with splitting():
        assert splits() and type(fast().linear(x, a.requires_grad_()).grad_fn).__name__ != "MmBackward0"
    assert not splits() and "Linears" not in type(fast().linear(x, a).grad_fn).__name__


def test_two_queues_at_once_are_a_mistake() -> None:
    one_at_a_time = pytest.raises(AssertionError, match="one backward pass at a time")
    with splitting(), WeightGradients(), one_at_a_time, WeightGradients():
        pass


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b"])
def test_a_backward_pass_on_another_thread_is_split_too(name: str, recompute: str) -> None:
    """As a GPU's is, whose thread has another context; and only that one, whatever this thread does meanwhile."""
    left = []
    for apart in (False, True):
        actual = model(name)
        actual.seams.call = block_call(recompute)
        queue = WeightGradients()
        with splitting():
            loss = _loss(actual, tokens(2, 9), tokens(2, 9, seed=1), 0)
            with queue:
                if apart:
                    with ThreadPoolExecutor(1) as pool:
                        pool.submit(loss.backward).result()
                else:
                    loss.backward()
        left.append(len(queue))
        _assert_matrices_wait(actual, 0, queue)
    assert left[0] == left[1] > 0


def test_another_thread_is_not_split() -> None:
    with splitting(), ThreadPoolExecutor(1) as pool:
        assert splits() and not pool.submit(splits).result()
        with simulate_device("cuda"):
            assert simulated_kind() == "cuda" and pool.submit(simulated_kind).result() == ""


@pytest.mark.parametrize("name", KINDS)
def test_a_whole_model(name: str) -> None:
    """Every kind of model: all matrices of its layers wait; norms, biases, embedding, router and head do not."""
    plain, split = model(name), model(name)
    ids, targets = tokens(2, 9), tokens(2, 9, seed=1)
    for step in range(2):
        _loss(plain, ids, targets, step).backward()
        queue = WeightGradients()
        with splitting():
            loss = _loss(split, ids, targets, step)
            with queue:
                loss.backward()
        _assert_matrices_wait(split, step, queue)
        queue.run()
    for (key, a), b in zip(plain.named_parameters(), split.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad), key


def _loss(model: nn.Module, ids: Tensor, targets: Tensor, step: int) -> Tensor:
    loss = model.loss(ids, targets, scale=torch.tensor(1.0 / (1 + step)))  # type: ignore[operator]
    balance: Tensor | None = loss.balance
    total: Tensor = loss.cross_entropy
    return total if balance is None else total + balance.sum()


def _assert_matrices_wait(model: nn.Module, step: int, queue: WeightGradients) -> None:
    layers: Iterable[tuple[str, nn.Parameter]] = model.layers.named_parameters()  # type: ignore[union-attr,operator]
    matrices = [p for key, p in layers if p.dim() > 1 and "router" not in key]
    assert len(queue) >= len(matrices)
    if step == 0:
        assert all(matrix.grad is None for matrix in matrices)

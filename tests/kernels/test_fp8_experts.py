"""Grouped products of operands rounded to 8 bits: against the twin, and what a GPU's kernel is given against the sums
that it makes of it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels import fast, in_form, reference
from meshwright.kernels.chooser import simulate_device
from meshwright.kernels.linear import fp8
from meshwright.kernels.linear.linear import FP8_ALL, SAME
from meshwright.kernels.linear.weight_gradients import WeightGradients, splitting
from tests.kernels.exactness import tensors
from tests.kernels.test_fp8 import distance

BF16 = torch.bfloat16
COUNTS = [[20, 0, 13, 17], [0, 0, 50, 0], [16, 16, 16, 2], [0, 0, 0, 0]]


def expert_operands(counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, a stack and the gradient of their products."""
    rows, stack, gradient = tensors((sum(counts), 64), (4, 32, 64), (sum(counts), 32), dtype=BF16)
    return rows.requires_grad_(), stack.requires_grad_(), gradient


def outcome(product: Any, counts: Any, leaves: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    rows, stack, gradient = leaves
    out = product(rows, stack, counts)
    return [out, *torch.autograd.grad(out, [rows, stack], gradient)]


def off(tensor: Tensor, other: Tensor) -> float:
    return distance(tensor, other) if other.any() else tensor.detach().abs().sum().item()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_as_the_twin(counts: list[int]) -> None:
    leaves = expert_operands(counts)
    ours, twin, plain = (
        outcome(in_form(make(), form).expert_linear, counts, leaves)
        for make, form in ((fast, FP8_ALL), (reference, FP8_ALL), (fast, SAME))
    )
    for a, b, same in zip(ours, twin, plain, strict=True):
        assert a.shape == same.shape and a.dtype == BF16
        assert off(a, b) < 4e-3
        assert not same.any() or 0.02 < off(a, same) < 0.06


def grouped_by_hand(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """What torch documents of the kernel, in fp32, beside what it asks of its operands."""
    assert a.stride(-1) == 1 and b.stride(-1) == 1 and a.shape[-1] % 16 == 0 and b.shape[-1] % 16 == 0
    starts, bounds = [0, *ends.tolist()[:-1]], ends.tolist()
    if b.dim() == 3:
        made = a.new_empty(len(a), b.shape[1], dtype=dtype)
        for tensor, scales, start, end in zip(b, b_scales, starts, bounds, strict=True):
            made[start:end] = (a[start:end].float() @ tensor.float().t()) * a_scales[start:end, None] * scales
        return made
    assert all(end % 16 == 0 for end in bounds), "a run along the sum begins at a multiple of 16 bytes"
    parts = [
        (a[:, start:end].float() @ b[:, start:end].float().t()) * of_a[:, None] * of_b
        for start, end, of_a, of_b in zip(
            starts, bounds, a_scales.view(len(bounds), -1), b_scales.view(len(bounds), -1), strict=True
        )
    ]
    return torch.stack(parts).to(dtype)


@pytest.mark.parametrize("counts", COUNTS[:-1], ids=str)
def test_what_a_gpus_kernel_is_given_makes_the_same(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = expert_operands(counts)
    right = outcome(fp8.expert_linear, counts, leaves)
    calls = []

    def product(*operands: Any) -> Tensor:
        calls.append(operands)
        return grouped_by_hand(*operands)

    monkeypatch.setattr(compat, "scaled_grouped_product", product)
    with simulate_device("cuda"):
        actual = outcome(fp8.expert_linear, torch.tensor(counts), leaves)
    assert len(calls) == 3
    assert all(off(a, b) < 3e-3 for a, b in zip(actual, right, strict=True))


@pytest.mark.parametrize("expanded", [False, True])
def test_the_kernel_of_this_torch_takes_such_operands(expanded: bool) -> None:
    """By its own checks, without numbers. `expanded`: the gradient is one number, as of a plain sum."""
    counts = COUNTS[0]
    with compat.fake_tensors(), simulate_device("cuda"):
        rows, stack, gradient = (
            torch.empty(*size, dtype=BF16) for size in ((sum(counts), 64), (4, 32, 64), (sum(counts), 32))
        )
        if expanded:
            gradient = gradient[0, 0].expand(gradient.shape)
        leaves = rows.requires_grad_(), stack.requires_grad_(), gradient
        actual = outcome(fp8.expert_linear, torch.empty(4, dtype=torch.int64), leaves)
    assert [tuple(tensor.shape) for tensor in actual] == [(50, 32), (50, 64), (4, 32, 64)]
    assert {tensor.dtype for tensor in actual} == {BF16}


def test_a_large_stack_is_rounded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    (stack,) = tensors((5, 32, 64), dtype=BF16)
    right = fp8.narrow_stack(stack)
    monkeypatch.setattr(fp8, "PIECE", 2 * 32 * 64)
    actual = fp8.narrow_stack(stack)
    assert torch.equal(actual.values.float(), right.values.float()) and torch.equal(actual.scales, right.scales)


def test_gradients_of_a_stack_can_wait() -> None:
    rows, stack, gradient = expert_operands(COUNTS[0])
    right = outcome(fp8.expert_linear, COUNTS[0], (rows, stack, gradient))[2]
    with splitting():
        made = in_form(fast(), FP8_ALL).expert_linear(rows, stack, COUNTS[0])
        with WeightGradients() as queue:
            made.backward(gradient)
        assert len(queue) == 1 and stack.grad is None
        queue.run()
    assert stack.grad is not None and torch.equal(stack.grad, right)


def test_as_an_operator_of_compiled_code() -> None:
    """What it is made of, called as the compiler would."""
    from meshwright.kernels.experts.experts import expert_product

    leaves, counts = expert_operands(COUNTS[0]), torch.tensor(COUNTS[0])
    right = outcome(fp8.expert_linear, counts, leaves)
    actual = outcome(
        lambda rows, stack, counts: expert_product(rows, stack, counts, "auto", FP8_ALL, False), counts, leaves
    )
    assert all(torch.equal(a, b) for a, b in zip(actual, right, strict=True))

"""Runs of rows times matrices of experts: against a plain loop in fp64, with experts that nobody visits."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.kernels import fast, reference
from meshwright.kernels.chooser import simulate_device
from meshwright.kernels.experts import experts
from meshwright.kernels.experts.experts import expert_linear_grouped, groups_on_device, spread
from meshwright.kernels.linear.fp8 import SAME
from meshwright.kernels.linear.weight_gradients import WeightGradients, splitting
from tests.counting import Operations
from tests.kernels.exactness import LOW, assert_not_worse, assert_single, outcome, tensors

COUNTS = {
    "even": [2, 2, 2, 2],
    "uneven": [1, 5, 0, 2],
    "first-and-last-empty": [0, 3, 5, 0],
    "all-to-one": [0, 0, 8, 0],
}


def loop(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    return torch.stack([weights[expert] @ row for expert, row in zip(owners, rows, strict=True)])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("name", ["fast", "reference"])
def test_value_and_gradients(counts: list[int], name: str) -> None:
    product = partial((fast() if name == "fast" else reference()).expert_linear, counts=counts)
    assert_single(product, partial(loop, counts=counts), tensors((8, 6), (4, 5, 6)))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_first_derivatives_in_fp64(counts: list[int]) -> None:
    inputs = [tensor.double().requires_grad_() for tensor in tensors((8, 3), (4, 2, 3))]
    assert torch.autograd.gradcheck(partial(fast().expert_linear, counts=counts), inputs)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_counts_may_be_a_tensor(counts: list[int]) -> None:
    """And the grouped product that takes them on a GPU equals the loop; here by torch's own plain version of it."""
    inputs = tensors((8, 6), (4, 5, 6))
    for product in (fast().expert_linear, reference().expert_linear):
        assert_single(partial(product, counts=torch.tensor(counts)), partial(loop, counts=counts), inputs)
    if hasattr(torch.nn.functional, "grouped_mm"):
        inputs = tensors((8, 8), (4, 16, 8))  # torch wants rows of a multiple of 16 bytes
        grouped = partial(expert_linear_grouped, counts=torch.tensor(counts))
        assert_single(grouped, partial(loop, counts=counts), inputs)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_the_operator_of_compiled_code(counts: list[int]) -> None:
    """The same values and gradients; and what torch asks of an operator, such as sizes known before it runs."""
    product = partial(experts.expert_product, counts=torch.tensor(counts), prefer="auto", form=SAME, later=False)
    inputs = tensors((8, 6), (4, 5, 6))
    assert_single(product, partial(loop, counts=counts), inputs)
    rows, weights = (tensor.clone().requires_grad_() for tensor in inputs)
    torch.library.opcheck(experts.expert_product, (rows, weights, torch.tensor(counts), "auto", SAME, False))


Refusing = Callable[[], AbstractContextManager[None]]


@pytest.mark.parametrize("wrong", ["", "a wait", "another warning"])
def test_the_mode_that_refuses_waits_is_switched_back(
    monkeypatch: pytest.MonkeyPatch, refusing_waits: Refusing, wrong: str
) -> None:
    """torch warns after it has switched, and the suite makes errors of warnings."""
    modes: list[int | str] = [1]

    def switch(mode: int | str) -> None:
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect", stacklevel=1)
        if wrong == "another warning" and mode == "error":
            warnings.warn("something else", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", switch)
    with pytest.raises((RuntimeError, UserWarning)) if wrong else nullcontext(), refusing_waits():
        if wrong:
            raise RuntimeError("called a synchronizing CUDA operation")
    assert modes == [1, "error", 1]


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[11, 0, 40, 13], [0, 0, 64, 0], [64, 0, 0, 0]])
def test_on_a_gpu_the_host_does_not_wait_for_counts(counts: list[int], refusing_waits: Refusing) -> None:
    rows, weights = (tensor.cuda().bfloat16() for tensor in tensors((64, 48), (4, 32, 48)))
    if not groups_on_device(rows, weights):
        pytest.skip("no grouped product on this device")
    inputs = torch.tensor(counts, device="cuda")
    actual = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    wanted = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    torch.cuda.synchronize()
    with refusing_waits():
        out = fast().expert_linear(*actual, inputs)
        out.backward(torch.ones_like(out))
    expected = reference().expert_linear(*wanted, counts)
    expected.backward(torch.ones_like(expected))
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("k", [1, 3])
def test_spread_rows_and_their_way_back(k: int) -> None:
    """As indexing, whose gradient autograd adds up row by row."""
    order = torch.randperm(5 * k, generator=torch.Generator().manual_seed(0))
    inverse = order.argsort()
    assert_single(lambda x: spread(x, order, inverse, k), lambda x: x[order // k], tensors((5, 4)))
    x = tensors((5 * k, 4))[0]
    assert torch.equal(spread(spread(x, order, inverse), inverse, order), x)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_16_bit_is_no_further_from_fp64_than_plain_code(dtype: torch.dtype) -> None:
    counts = [11, 0, 40, 13]
    plain = partial(reference().expert_linear, counts=counts)
    inputs = tensors((64, 48), (4, 32, 48), dtype=dtype)
    assert_not_worse(partial(fast().expert_linear, counts=counts), plain, partial(loop, counts=counts), inputs)


@pytest.mark.parametrize("name", ["fast", "reference"])
def test_no_rows_at_all(name: str) -> None:
    """A rank may be left without tokens; its weights then get a gradient of zero, not none."""
    product = (fast() if name == "fast" else reference()).expert_linear
    rows, weights = (tensor.requires_grad_() for tensor in tensors((0, 6), (4, 5, 6)))
    out = product(rows, weights, [0, 0, 0, 0])
    assert out.shape == (0, 5)
    out.sum().backward()
    assert weights.grad is not None and not weights.grad.any()
    assert rows.grad is not None and rows.grad.shape == (0, 6)


def test_an_expert_without_rows_gets_a_gradient_of_zero_even_where_its_weights_are_broken() -> None:
    rows, weights = tensors((8, 6), (4, 5, 6))
    weights[2] = torch.nan
    value, _, gradient = outcome(partial(fast().expert_linear, counts=[3, 4, 0, 1]), [rows, weights])
    assert torch.isfinite(value).all() and not gradient[2].any() and torch.isfinite(gradient).all()


def test_the_gradient_of_the_stack_is_written_once() -> None:
    """Not a whole stack of zeros for every expert: with X experts that would be X times the memory traffic."""
    rows, weights = (tensor.requires_grad_() for tensor in tensors((64, 6), (32, 5, 6)))
    out = fast().expert_linear(rows, weights, [2] * 32)
    with Operations() as made:
        out.sum().backward()
    stacks = [shape for shape in made.shapes if torch.Size(shape).numel() == weights.numel()]
    assert len(stacks) <= 4, "the stack itself, and views of it"


class _Careless(torch.autograd.Function):
    """A grouped product as some devices have it: it leaves the gradient of a group without rows as memory was."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices, offs)
        return torch.cat([part @ m for part, m in zip(_runs(rows, offs), matrices, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, matrices, offs = ctx.saved_tensors
        products = [part @ m.t() for part, m in zip(_runs(gradient, offs), matrices, strict=True)]
        return torch.cat(products), _careless_stack(rows.t(), gradient, offs), None


def _runs(rows: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return rows.tensor_split(offs[:-1].tolist())


def _careless_stack(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    parts = zip(_runs(left.t(), offs), _runs(right, offs), strict=True)
    return torch.stack([a.t() @ b if len(a) else torch.full((a.shape[1], b.shape[1]), float("nan")) for a, b in parts])


def careless_grouped_mm(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """As torch's for 2-d with 3-d and 2-d with 2-d."""
    return _Careless.apply(a, b, offs) if b.dim() == 3 else _careless_stack(a, b, offs)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("split", [False, True])
def test_an_expert_without_rows_gets_no_gradient_from_a_careless_device(
    split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a backward pass whole or split, alone and with the product left for later."""
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", careless_grouped_mm, raising=False)
    monkeypatch.setattr(experts, "groups_on_device", lambda rows, weights: True)
    monkeypatch.setattr(experts, "leaves_garbage", lambda device: True)
    counts = torch.tensor([3, 0, 2, 0])
    inputs = [torch.randn(5, 6, requires_grad=True), torch.randn(4, 7, 6, requires_grad=True)]
    loop = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    seed = torch.randn(5, 7)
    experts.expert_linear_reference(loop[0], loop[1], counts).backward(seed)
    for queue in (None, WeightGradients()) if split else (None,):
        inputs[0].grad = inputs[1].grad = None
        with splitting() if split else nullcontext():
            out = experts.expert_linear(inputs[0], inputs[1], counts)
            with nullcontext() if queue is None else queue:
                out.backward(seed)
        if queue is not None:
            assert inputs[1].grad is None and len(queue) == 1
            queue.run()
        for a, b in zip(inputs, loop, strict=True):
            torch.testing.assert_close(a.grad, b.grad)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "one number": lambda x: x.mean().expand(x.shape),
    "one row": lambda x: x[:1].expand(x.shape),
    "columns": lambda x: x.t().contiguous().t(),
    "a part of wider rows": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "odd strides": lambda x: torch.cat((x, x[:, :3]), 1)[:, : x.shape[1]],
    "an odd address": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
}
"""Of a matrix in memory."""


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped products")
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 8, 0]], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_grouped_products_take_any_layout(
    layout: str, counts: list[int], split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the checks of torch's own operator, which this CPU's has as well: it refuses strides of 0, and runs that do
    not lie a multiple of 16 bytes apart."""
    monkeypatch.setattr(experts, "groups_on_device", lambda rows, weights: True)
    rows, weights, gradient = tensors((8, 8), (4, 16, 8), (8, 16))
    laid = LAYOUTS[layout](rows), weights, LAYOUTS[layout](gradient)
    actual = [laid[0].detach().requires_grad_(), weights.clone().requires_grad_()]
    right = [laid[0].detach().clone().requires_grad_(), weights.clone().requires_grad_()]
    with splitting() if split else nullcontext():
        out = experts.expert_linear(*actual, torch.tensor(counts))
        out.backward(laid[2])
    expected = loop(*right, counts=counts)
    expected.backward(laid[2])
    torch.testing.assert_close(out, expected)
    for a, b in zip(actual, right, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    by_rows, by_weights = experts._gradient_functions(laid[2], laid[0], weights, torch.tensor(counts), "auto", SAME)
    torch.testing.assert_close(by_rows(), right[0].grad)
    torch.testing.assert_close(by_weights(), right[1].grad)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped products")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpus_grouped_product_takes_any_layout(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 without numbers, by what torch checks for a GPU; and no row at all."""
    monkeypatch.setattr(experts, "groups_on_device", lambda rows, weights: True)
    for number in (8, 0):
        rows, gradient = (torch.zeros(8, width, dtype=torch.bfloat16, device="meta") for width in (8, 16))
        rows, gradient = (LAYOUTS[layout](x)[:number] for x in (rows, gradient))
        weights = torch.zeros(4, 16, 8, dtype=torch.bfloat16, device="meta").requires_grad_()
        out = experts.expert_linear(rows.detach().requires_grad_(), weights, torch.zeros(4, device="meta"))
        out.backward(gradient)
        assert out.shape == (number, 16) and weights.grad is not None and weights.grad.shape == weights.shape


def test_a_rank_without_rows_leaves_no_counts_on_the_device() -> None:
    """The product would ask the device for them: a wait on a GPU, and the end of a dry run, which has no values."""
    weights = torch.zeros(2, 16, 16, dtype=torch.bfloat16)
    with simulate_device("cuda"):
        assert [groups_on_device(torch.zeros(n, 16, dtype=torch.bfloat16), weights) for n in (0, 4)] == [False, True]

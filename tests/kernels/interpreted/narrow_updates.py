"""Updates of narrow optimizer states in the interpreter, beside their slow twin: all formats, odd sizes, cut pieces."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.kernels.optimizer.adamw import narrow_adamw_reference, read
from meshwright.kernels.triton import trials, updates
from meshwright.kernels.triton.narrow_piece import Moment, NarrowPiece, PositionInWhole, UpdateNumbers, code_books
from tests.kernels.interpreted.poison import nothing_is_left_unwritten  # noqa: F401  # a fixture

BOOKS = code_books(torch.device("cpu"))
NUMBERS = UpdateNumbers(
    rate=1e-2, beta1=0.9, beta2=0.999, epsilon=1e-8, decay=0.1, divide_by=torch.tensor(2.0), skip=torch.zeros(())
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


def made(rows: int, width: int, moments: str, weights: str) -> NarrowPiece:
    """A piece of rows 3.. and columns 64.. of a larger tensor, before its first update."""
    start = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows + width))
    weight = start.to(torch.bfloat16) if weights == "bf16" else start
    copy = start.to(torch.float16) if weights == "copy" else None

    def moment(signed: bool) -> Moment:
        zero = 127 if signed and moments == "int8" else 0
        values = torch.full((rows, width), zero, dtype=DTYPES[moments])
        if moments != "int8":
            return Moment(values, None, signed)
        return Moment(values, torch.zeros(rows, -(-width // 64)), signed, 64)

    position = PositionInWhole(
        seed=2**31 + 5, rows=max(1, rows // 2), whole_rows=2**17, first=1, second=3, width=2**15, column=64
    )
    return NarrowPiece(
        weight=weight,
        copy=copy,
        moments=(moment(True), moment(False)),
        step=torch.ones(()),
        books=BOOKS,
        position=position,
    )


def gradient_of(rows: int, width: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, width, generator=generator) * 10.0 ** (torch.arange(rows) % 4 - 3.0)[:, None]


@pytest.mark.parametrize("weights", ["fp32", "copy", "bf16"])
@pytest.mark.parametrize("moments", DTYPES)
@pytest.mark.parametrize("size", [(1, 1), (6, 64), (5, 131), (9, 40)], ids=str)
def test_the_kernel_equals_its_twin(size: tuple[int, int], moments: str, weights: str) -> None:
    """Numbers to fp32's rounding. Where that decides what is stored, the neighbouring number may be: hardly ever."""
    mine, twin = (made(*size, moments, weights) for _ in range(2))
    for step in range(1, 4):
        for piece in (mine, twin):
            piece.step.fill_(step)
        gradient = gradient_of(*size, step)
        updates.narrow_adamw(mine, gradient, NUMBERS)
        narrow_adamw_reference(twin, gradient, NUMBERS, slice(0, size[0]))
    for ours, theirs in zip(mine.moments, twin.moments, strict=True):
        a, b = (read(moment, BOOKS, slice(0, size[0])) for moment in (ours, theirs))
        off, row = (a - b).abs(), b.abs().amax(1, keepdim=True)
        assert (off <= 1e-5 * b.abs() + 1e-7 * row).double().mean() > 0.99
        assert (off <= 0.2 * b.abs() + 1e-6 * row).all()
    a, b = mine.weight.float(), twin.weight.float()
    assert torch.isclose(a, b, rtol=1e-5, atol=1e-6).double().mean() > 0.99
    assert torch.isclose(a, b, rtol=2**-6, atol=1e-3).all()
    if mine.copy is not None:
        assert torch.equal(mine.copy, mine.weight.half())


@pytest.mark.parametrize("moments", DTYPES)
def test_what_is_skipped_is_not_written(moments: str) -> None:
    piece = made(5, 70, moments, "bf16")
    updates.narrow_adamw(piece, gradient_of(5, 70, 1), NUMBERS)
    held = [piece.weight, *(x for moment in piece.moments for x in (moment.values, moment.scales) if x is not None)]
    before = [x.clone() for x in held]
    updates.narrow_adamw(piece, gradient_of(5, 70, 2), replace(NUMBERS, skip=torch.ones(())))
    assert all(torch.equal(x, y) for x, y in zip(held, before, strict=True))


def test_a_view_of_a_wider_gradient_and_a_beta_of_zero() -> None:
    mine, twin = made(4, 33, "fp32", "fp32"), made(4, 33, "fp32", "fp32")
    numbers = replace(NUMBERS, beta1=0.0)
    gradient = gradient_of(4, 66, 1)[:, ::2]
    updates.narrow_adamw(mine, gradient, numbers)
    narrow_adamw_reference(twin, gradient, numbers, slice(0, 4))
    torch.testing.assert_close(mine.weight, twin.weight, rtol=1e-5, atol=1e-6)


def test_the_trial_of_a_device_passes() -> None:
    assert trials.problem("narrow_adamw", torch.device("cpu"), torch.float32) == ""

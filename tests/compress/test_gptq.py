"""GPTQ against the textbook: one column after the other, with the inverse of what is left, in fp64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from meshwright.compress import calibrated_methods
from meshwright.compress.calibrated_methods import DAMPING, quantize_columns
from meshwright.kernels.quantized.matrix import assembled, nearest
from meshwright.kernels.quantized.quantize import scales_of
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme

WHOLE, REAL = SCHEMES["int4-gptq"], SCHEMES["int3-gptq"]
SIGNED = replace(SCHEMES["int4-sym"], method="gptq", group=0)


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def products(columns: int, rows: int = 200, seed: int = 1) -> Tensor:
    """Of inputs that go together, and are of different strength."""
    x = numbers(rows, columns, seed=seed) @ (
        numbers(columns, columns, seed=seed + 1) / columns**0.5 + torch.eye(columns) / 2
    )
    x = x * torch.linspace(0.3, 3.0, columns)[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
    return x.t() @ x / rows


def textbook(weight: Tensor, gram: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Optimal brain quantization in a fixed order (Frantar et al. 2022, eq. 2 and 3), a weight at a time: the inverse
    of what is left of H is computed anew for each column. -> weights (N, K) that codes stand for."""
    columns, group = weight.shape[1], scheme.group or weight.shape[1]
    damped = gram + DAMPING * gram.diagonal().mean() * torch.eye(columns, dtype=gram.dtype)
    left, rounded = weight.clone(), torch.empty_like(weight)
    remaining = gram.diagonal().argsort(descending=True, stable=True).tolist()
    while remaining:
        column, inverse = remaining[0], torch.linalg.inv(damped[remaining][:, remaining])
        for row in range(len(weight)):
            scale = scales[row, column // group].double()
            lowest, highest = (0, 2**scheme.bits - 1) if zeros is not None else (1 - 2 ** (scheme.bits - 1),) * 2
            highest = highest if zeros is not None else -lowest
            zero = 0.0 if zeros is None else zeros[row, column // group].double()
            code = torch.round(left[row, column] / scale + zero).clamp(lowest, highest)
            rounded[row, column] = (code - zero) * scale
            error = (left[row, column] - rounded[row, column]) / inverse[0, 0]
            for index, other in enumerate(remaining):
                left[row, other] -= error * inverse[0, index]
        remaining = remaining[1:]
    return rounded


def restored(weight: Tensor, gram: Tensor, scheme: Scheme, block: int = 16) -> Tensor:
    scales, zeros = scales_of(weight.float(), scheme)
    codes = quantize_columns(weight, gram, scheme, scales, zeros, block)
    return assembled(scheme, codes, scales, zeros).dequantized()


@pytest.mark.parametrize("scheme", [WHOLE, REAL, SIGNED], ids=["whole zeros", "real zeros", "no zeros"])
def test_it_is_the_textbook(scheme: Scheme) -> None:
    weight, gram = numbers(5, 80) * 0.1, products(80)
    scales, zeros = scales_of(weight.float(), scheme)
    expected = textbook(weight, gram, scheme, scales, zeros)
    assert torch.equal(restored(weight, gram, scheme), expected.float())


def test_blocks_of_columns_change_nothing() -> None:
    weight, gram = numbers(6, 96) * 0.1, products(96)
    first = restored(weight, gram, WHOLE, block=1)
    assert all(torch.equal(restored(weight, gram, WHOLE, block=size), first) for size in (7, 32, 96, 128))


def test_rows_are_on_their_own_and_columns_may_change_places() -> None:
    weight, gram = numbers(8, 64) * 0.1, products(64)
    restored_weight = restored(weight, gram, SIGNED)
    rows, columns = (torch.randperm(size, generator=torch.Generator().manual_seed(3)) for size in (8, 64))
    assert torch.equal(restored(weight[rows], gram, SIGNED), restored_weight[rows])
    moved = restored(weight[:, columns], gram[columns][:, columns], SIGNED)
    assert torch.equal(moved, restored_weight[:, columns]), (
        "one scale per row: the order is that of the inputs' strength"
    )


@pytest.mark.parametrize("scheme", [WHOLE, REAL], ids=["int4", "int3"])
def test_the_error_of_outputs_is_well_below_that_of_rounding(scheme: Scheme) -> None:
    weight, gram = numbers(32, 128) * 0.1, products(128, rows=1000)
    scales, zeros = scales_of(weight.float(), scheme)
    rounded = assembled(scheme, nearest(scheme, weight, scales, zeros), scales, zeros).dequantized()

    def error(tensor: Tensor) -> float:
        wrong = tensor.double() - weight
        return float(((wrong @ gram) * wrong).sum())

    assert error(restored(weight, gram, scheme)) < 0.8 * error(rounded)
    narrow = restored(weight.float(), gram.float(), scheme)
    assert error(narrow) < 1.02 * error(restored(weight, gram, scheme)), "fp32 is enough"


def test_inputs_that_are_always_zero_are_rounded_to_nearest() -> None:
    weight, gram = numbers(4, 64) * 0.1, products(64)
    dead = torch.tensor([3, 40])
    gram[dead], gram[:, dead] = 0.0, 0.0
    actual, scales, zeros = restored(weight, gram, WHOLE), *scales_of(weight.float(), WHOLE)
    plain = assembled(WHOLE, nearest(WHOLE, weight, scales, zeros), scales, zeros).dequantized()
    assert torch.equal(actual[:, dead], plain[:, dead]) and not torch.equal(actual, plain)
    assert torch.equal(restored(weight, torch.zeros(64, 64, dtype=torch.float64), WHOLE), plain)


def test_fewer_rows_than_inputs_are_damped_and_what_is_not_positive_is_refused() -> None:
    weight = numbers(4, 64) * 0.1
    few = products(64, rows=3)
    assert restored(weight, few, WHOLE).isfinite().all()
    assert restored(weight.float(), few.float(), WHOLE).isfinite().all(), "a rank of 3 in fp32"
    with pytest.raises(ArithmeticError, match="not positive"):
        calibrated_methods.order_columns(torch.full((4, 4), 1e30, dtype=torch.float64).fill_diagonal_(1.0))

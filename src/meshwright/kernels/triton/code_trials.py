"""Small runs of kernels that read or write codes, beside plain arithmetic (trials.py)."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.triton import int8_product, narrowing, packed_product, restoring
from meshwright.kernels.triton.code_words import PackedMatrix

Made = Callable[..., Tensor]
"""Returns random numbers of a size, where the trial runs."""


def worst_of(errors: Iterable[float]) -> float:
    """Return the largest error. NaN counts as infinite, while `max` would pass over it."""
    return max(error if error == error else float("inf") for error in errors)


def _rounded(x: Tensor) -> Tensor:
    """Round x (N, K) fp32 to e4m3, with a power of two for each row."""
    scales = torch.exp2(torch.floor(torch.log2(448.0 / x.abs().amax(-1, keepdim=True).float())))
    return (x.float() * scales).to(torch.float8_e4m3fn).float() / scales


def restored(make: Made) -> float:
    """Try 4-bit codes with a real zero for each 32 inputs and without, in rows that end within a word and in whole."""
    return worst_of(_restored_error(make, inputs, real) for inputs in (71, 1024) for real in (True, False))


def _restored_error(make: Made, inputs: int, real: bool) -> float:
    groups, row_bytes = -(-inputs // 32), -(-inputs // 2)
    scales, zeros, out = make(5, groups).float(), make(6, groups)[:5].float(), make(5, inputs)
    codes = (torch.arange(5 * row_bytes, device=out.device) * 37 % 256).view(5, -1).to(torch.uint8)
    weight = restoring.restore(PackedMatrix(codes, scales, zeros if real else None, None, inputs, 32), out)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :inputs].double()
    wide = [x.double().repeat_interleave(32, 1)[:, :inputs] for x in (scales, zeros)]
    exact = (nibbles - (wide[1] if real else 8)) * wide[0]
    error: float = ((weight.double() - exact).norm() / exact.norm()).item()
    return error


def narrowed(make: Made) -> float:
    """Try rounding to fp8: rows, and columns in several runs with gaps between their rows."""
    x = make(700, 90)
    rows, columns = narrowing.rounded(x, torch.float8_e4m3fn), narrowing.turned(x, 704)
    places = torch.arange(700, device=x.device) + 3
    apart = narrowing.turned(x, 720, places)
    exact = _rounded(x), _rounded(x.t())
    pairs = (
        (rows.codes.double() * rows.scales, exact[0]),
        (columns.codes.double() * columns.scales, F.pad(exact[1], (0, 4))),
        (apart.codes.double() * apart.scales, F.pad(exact[1], (3, 17))),
    )
    return worst_of((ours - plain).abs().max().item() for ours, plain in pairs)


def packed(make: Made) -> float:
    """Try codes with zeros of half a byte, without zeros, by a table, and of 8 bits.

    In rows that end within a word and a group, and in whole words; by the kernel of few rows, and by the other with K
    cut and with the matrix second.
    """
    return worst_of(_packed_error(make, inputs, rows) for inputs in (299, 1024) for rows in (1, 2, 3, 70))


def _packed_error(make: Made, inputs: int, rows: int) -> float:
    groups, row_bytes = -(-inputs // 32), -(-inputs // 2)
    x, scales, bias = make(rows, inputs), make(70, groups).float(), make(1, 70)[0]
    codes = (torch.arange(70 * row_bytes, device=x.device) * 37 % 256).view(70, -1).to(torch.uint8)
    zeros = (torch.arange(70 * -(-groups // 2), device=x.device) * 11 % 256).to(torch.uint8).view(70, -1)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :inputs].double()
    zero_nibbles = torch.stack((zeros & 15, zeros >> 4), -1).flatten(1).repeat_interleave(32, 1)[:, :inputs].double()
    table, e4m3_codes = make(16).float(), make(70, inputs).to(torch.float8_e4m3fn)
    cases = (
        (PackedMatrix(codes, scales, zeros, None, inputs, 32), nibbles - zero_nibbles, bias),
        (PackedMatrix(codes, scales, None, None, inputs, 32), nibbles - 8, None),
        (PackedMatrix(codes, scales, None, table, inputs, 32), table.double()[nibbles.long()], None),
        (PackedMatrix(e4m3_codes, scales[:, :1].contiguous(), None, None, inputs, 0), e4m3_codes.double(), bias),
    )
    errors = []
    for matrix, numbers, added in cases:
        wide = matrix.scales.double().repeat_interleave(matrix.group or inputs, 1)[:, :inputs]
        exact = x.double() @ (numbers * wide).t() + (0 if added is None else added.double())
        errors.append(((packed_product.packed_linear(x, matrix, added).double() - exact).norm() / exact.norm()).item())
    return worst_of(errors)


def int8(make: Made) -> float:
    """Try rows rounded beside two outlier columns, times codes.

    By tensor cores with K cut, and by the kernel of few rows.
    """
    return worst_of(_int8_error(make, rows, inputs) for rows, inputs in ((3, 600), (2, 1024)))


def _int8_error(make: Made, rows: int, inputs: int) -> float:
    x, scales, weights = make(rows, inputs), make(70, 1).float(), make(70, 2)
    codes = (torch.arange(70 * inputs, device=x.device) * 37 % 255 - 127).view(70, inputs).to(torch.int8)
    columns = torch.tensor([5, 500], dtype=torch.int32, device=x.device)
    marks = torch.zeros(inputs, dtype=torch.uint8, device=x.device)
    marks[columns.long()] = 1
    narrow = narrowing.rounded(x, torch.int8, marks)
    plain = x.double().index_fill(1, columns.long(), 0.0)
    exact = plain @ (codes.double() * scales.double()).t() + x[:, columns.long()].double() @ weights.double().t()
    product = int8_product.int8_linear(x, narrow, int8_product.Int8Matrix(codes, scales, columns, weights), None)
    error: float = ((product.double() - exact).norm() / exact.norm()).item()
    return error

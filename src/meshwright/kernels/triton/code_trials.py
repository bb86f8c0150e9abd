"""Small runs of kernels that read codes or make them, beside plain arithmetic (trials.py)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.triton import int8_product, narrowing, packed_product, restoring
from meshwright.kernels.triton.code_words import PackedMatrix

Made = Callable[..., Tensor]
"""Makes random numbers of a size, where the trial runs."""


def _rounded(x: Tensor) -> Tensor:
    """x (N, K) fp32 as e4m3 has it, with a power of two for each row."""
    scales = torch.exp2(torch.floor(torch.log2(448.0 / x.abs().amax(-1, keepdim=True).float())))
    return (x.float() * scales).to(torch.float8_e4m3fn).float() / scales


def restored(make: Made) -> float:
    """4-bit codes with a zero for each 32 inputs, the last group short."""
    scales, zeros, out = make(5, 3).float(), make(6, 3)[:5].float(), make(5, 71)
    codes = torch.arange(5 * 36, device=out.device).view(5, 36).to(torch.uint8)
    found = restoring.restore(PackedMatrix(codes, scales, zeros, None, 71, 32), out)
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :71].double()
    wide = [one.double().repeat_interleave(32, 1)[:, :71] for one in (scales, zeros)]
    right = (both - wide[1]) * wide[0]
    error: float = ((found.double() - right).norm() / right.norm()).item()
    return error


def narrowed(make: Made) -> float:
    """Rows, and columns in several runs with places between their rows, as 8-bit floating-point numbers."""
    x = make(700, 90)
    rows, columns = narrowing.rounded(x, torch.float8_e4m3fn), narrowing.turned(x, 704)
    places = torch.arange(700, device=x.device) + 3
    apart = narrowing.turned(x, 720, places)
    right = _rounded(x), _rounded(x.t())
    pairs = (
        (rows.codes.double() * rows.scales, right[0]),
        (columns.codes.double() * columns.scales, F.pad(right[1], (0, 4))),
        (apart.codes.double() * apart.scales, F.pad(right[1], (3, 17))),
    )
    worst: float = max((ours - plain).abs().max().item() for ours, plain in pairs)
    return worst if worst == worst else float("inf")


def packed(make: Made) -> float:
    """Codes with zeros of half a byte, without, by a table, and of 8 bits: in rows that end inside of a word and of a
    group, and in whole words; by the kernel of few rows, and by the other with K cut."""
    return max(_packed_error(make, inputs, rows) for inputs in (299, 1024) for rows in (1, 2, 3))


def _packed_error(make: Made, inputs: int, rows: int) -> float:
    groups, row_bytes = -(-inputs // 32), -(-inputs // 2)
    x, scales, bias = make(rows, inputs), make(70, groups).float(), make(1, 70)[0]
    codes = (torch.arange(70 * row_bytes, device=x.device) * 37 % 256).view(70, -1).to(torch.uint8)
    zeros = (torch.arange(70 * -(-groups // 2), device=x.device) * 11 % 256).to(torch.uint8).view(70, -1)
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :inputs].double()
    every = torch.stack((zeros & 15, zeros >> 4), -1).flatten(1).repeat_interleave(32, 1)[:, :inputs].double()
    table, eight = make(16).float(), make(70, inputs).to(torch.float8_e4m3fn)
    cases = (
        (PackedMatrix(codes, scales, zeros, None, inputs, 32), both - every, bias),
        (PackedMatrix(codes, scales, None, None, inputs, 32), both - 8, None),
        (PackedMatrix(codes, scales, None, table, inputs, 32), table.double()[both.long()], None),
        (PackedMatrix(eight, scales[:, :1].contiguous(), None, None, inputs, 0), eight.double(), bias),
    )
    worst = 0.0
    for matrix, numbers, added in cases:
        wide = matrix.scales.double().repeat_interleave(matrix.group or inputs, 1)[:, :inputs]
        right = x.double() @ (numbers * wide).t() + (0 if added is None else added.double())
        error = ((packed_product.packed_linear(x, matrix, added).double() - right).norm() / right.norm()).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def int8(make: Made) -> float:
    """Rows rounded beside two columns that are not, times codes; K is cut."""
    x, scales, kept = make(3, 600), make(70, 1).float(), make(70, 2)
    codes = (torch.arange(70 * 600, device=x.device) * 37 % 255 - 127).view(70, 600).to(torch.int8)
    columns = torch.tensor([5, 500], dtype=torch.int32, device=x.device)
    marks = torch.zeros(600, dtype=torch.uint8, device=x.device)
    marks[columns.long()] = 1
    narrow = narrowing.rounded(x, torch.int8, marks)
    plain = x.double().index_fill(1, columns.long(), 0.0)
    right = plain @ (codes.double() * scales.double()).t() + x[:, columns.long()].double() @ kept.double().t()
    found = int8_product.int8_linear(x, narrow, int8_product.Int8Matrix(codes, scales, columns, kept), None)
    error: float = ((found.double() - right).norm() / right.norm()).item()
    return error if error == error else float("inf")

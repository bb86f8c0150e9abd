"""Matrices (N, K) as the compiled loops read them: panels of 16 rows, interleaved to fill a vector.

    floats   (N / 16, K, 16) fp32
    bf16     (N / 16, K / 2, 16, 2), the same numbers in 16 bits, where that loses nothing: of models stored so
    int8     (N / 16, K / 4, 16, 4) codes, and the sum of each row's; rows that are multiplied are rounded, too
    codes    (N / 16, K / 2, 16) bytes of two codes of at most 4 bits, the first in the lower ones; a table of the
             numbers they stand for; scales and zeros (N / 16, groups, 16) fp32, or bf16 where that loses nothing

A product reads a panel once for some rows, so with few rows its time is that of its bytes.
"""

import ctypes
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from meshwright.kernels.c.build import structure

LANES, FOUR = 16, 4
"""Rows of a panel, and inputs of 8 bits that a lane adds up at once."""
FLOATS, BF16, INT8, CODES = range(4)
"""Kinds of panels, as in rows.h."""
CHECKED = 2**22
"""Elements that are compared at a time."""


def pointer(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's numbers."""
    return None if tensor is None else tensor.data_ptr()


@dataclass(frozen=True, slots=True, kw_only=True)
class Panels:
    """A matrix (N, K), and the bias of its products."""

    kind: int
    rows: int
    """N."""
    width: int
    """K."""
    numbers: Tensor
    bias: Tensor | None = None
    """(N,) fp32."""
    sums: Tensor | None = None
    """(N,) int32, for int8."""
    scales: Tensor | None = None
    """(N,) fp32 for int8; for codes as above."""
    zeros: Tensor | None = None
    table: Tensor | None = None
    """(16,) fp32."""
    group: int = 0
    """Inputs of a row of codes that share a scale."""
    fields: ctypes.Structure = field(init=False)

    def __post_init__(self) -> None:
        names = "numbers", "sums", "scales", "zeros", "table", "bias"
        fields = structure("Panels")(
            **{name: pointer(getattr(self, name)) for name in names}, columns=self.rows, width=self.width,
            group=self.group, kind=self.kind,
            narrow=self.scales is not None and self.scales.dtype == torch.bfloat16,
        )  # fmt: skip
        object.__setattr__(self, "fields", fields)

    @property
    def bytes(self) -> int:
        """Size of all tensors but the bias."""
        return sum(x.nbytes for x in (self.numbers, self.sums, self.scales, self.zeros) if x is not None)

    @classmethod
    def of_numbers(cls, weight: Tensor, bias: Tensor | None = None) -> Self | None:
        """Build from a matrix in fp32, or bf16 with an even K. None where N is no multiple of 16."""
        rows, width = weight.shape
        if rows % LANES:
            return None
        narrow = not width % 2 and (weight.dtype == torch.bfloat16 or fits_bf16(weight))
        numbers = weight.bfloat16().view(-1, LANES, width // 2, 2) if narrow else weight.view(-1, LANES, width)
        numbers = numbers.transpose(1, 2).contiguous()
        return cls(kind=BF16 if narrow else FLOATS, rows=rows, width=width, numbers=numbers, bias=bias)

    @classmethod
    def of_int8(cls, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Self | None:
        """Build from codes (N, K) int8 and scales (N,) fp32. None where N or K is no multiple of 16 and 4."""
        rows, width = codes.shape
        if rows % LANES or width % FOUR:
            return None
        numbers = codes.reshape(-1, LANES, width // FOUR, FOUR).transpose(1, 2).contiguous()
        sums = codes.sum(1, dtype=torch.int32)
        return cls(kind=INT8, rows=rows, width=width, numbers=numbers, sums=sums, scales=scales, bias=bias)

    @classmethod
    def of_codes(
        cls, codes: Tensor, scales: Tensor, zeros: Tensor | None, table: Tensor, group: int, bias: Tensor | None
    ) -> Self | None:
        """Build from (table[codes] - zeros) * scales: codes (N, K) uint8 below 16, scales and zeros (N, groups) fp32.

        `group`: inputs that share a scale. None where N is no multiple of 16, or K or the group none of 2.
        """
        rows, width = codes.shape
        if rows % LANES or width % 2 or group % 2:
            return None
        pairs = codes[:, ::2] | codes[:, 1::2] << 4
        if all(x is None or fits_bf16(x) for x in (scales, zeros)):
            scales, zeros = scales.bfloat16(), None if zeros is None else zeros.bfloat16()
        numbers, panel_scales, panel_zeros = (_in_panels(x) for x in (pairs, scales, zeros))
        assert numbers is not None
        return cls(
            kind=CODES, rows=rows, width=width, numbers=numbers, scales=panel_scales, zeros=panel_zeros,
            table=table.contiguous(), group=group, bias=bias,
        )  # fmt: skip


def _in_panels(matrix: Tensor | None) -> Tensor | None:
    """Interleave rows: (N, M) -> (N / 16, M, 16)."""
    if matrix is None:
        return None
    return matrix.view(-1, LANES, matrix.shape[1]).transpose(1, 2).contiguous()


def fits_bf16(weight: Tensor) -> bool:
    """Return whether bf16 holds a matrix (N, K) fp32 exactly."""
    rows = max(1, CHECKED // weight.shape[1])
    return all(torch.equal(part.bfloat16().float(), part) for part in weight.split(rows))

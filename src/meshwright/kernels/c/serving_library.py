"""Library of the C loops for a step of serving on a CPU, called with tensors, and matrices as it reads them.

Inside `used`, and without gradients, kernels call its functions for fp32 on a CPU in place of several operations of
torch each. Without a C compiler `loops` returns None, and nothing else changes.

A matrix (N, K) is stored as panels of 16 rows, interleaved to fill a vector.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Self, final

import torch
from torch import Tensor, nn

from meshwright.kernels.c import build
from meshwright.kernels.c.build import structure

LANES, FOUR = 16, 4
"""Rows of a panel, and inputs of 8 bits that a lane adds up at once."""
FLOATS, BF16, INT8, CODES = range(4)
"""Kinds of panels, as in rows.h."""
CHECKED = 2**22
"""Elements that are compared at a time."""
STEPS = ("attention.c", "block.c", "panels.c", "rows.c")
"""C sources of a step of serving."""
ROWS, INT8_ROWS, ROWS_BESIDE_BF16 = 64, 32, 8
"""Rows up to which `multiply` is faster than products of torch's libraries.

With numbers and codes, with int8, and with bf16 where the CPU has units for it.
"""
PLAIN_TYPES = (Tensor, nn.Parameter)
"""Types of tensors that loops take.

The other checks of compat.lies_in_memory take as long as some of these loops, and a server makes no such tensors.
"""


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


def takes(*tensors: Tensor) -> bool:
    """Return whether tensors are torch's own, fp32 on a CPU, with contiguous rows."""
    for x in tensors:
        if type(x) not in PLAIN_TYPES or x.dtype != torch.float32 or x.device.type != "cpu" or x.stride(-1) != 1:
            return False
    return True


def _floats(*size: int) -> Tensor:
    """Allocate numbers that loops write: fp32 on a CPU, whatever torch's defaults are."""
    return torch.empty(size, dtype=torch.float32, device="cpu")


@final
class Loops:
    """The functions of the library. Tensors are as `takes` requires."""

    def __init__(self, library: ctypes.CDLL, any_rows: bool = False) -> None:
        self._library, self._any_rows = library, any_rows
        self.has_int8, self.has_codes = bool(library.has_int8()), bool(library.has_codes())
        """Instructions of this processor: sums of 8-bit products, and table lookups."""

    def use_threads(self, count: int) -> None:
        """Set how many threads share a product or attention from now on, in this process. Initially one."""
        self._library.use_threads(count)

    def for_any_rows(self) -> "Loops":
        """Return loops that multiply any number of rows, whose sums then have one order."""
        return Loops(self._library, any_rows=True)

    def few(self, rows: int, most: int = ROWS) -> bool:
        """Return whether `multiply` takes products of so many rows. `most`: rows up to which it is no slower."""
        return self._any_rows or rows <= most

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalize as kernels.rms_norm."""
        x, out = x.contiguous(), _floats(*x.shape)
        width = x.shape[-1]
        rows = x.numel() // width
        self._library.rms_norm(x.data_ptr(), None, weight.data_ptr(), eps, out.data_ptr(), None, rows, width)
        return out

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add and normalize as kernels.add_rms_norm."""
        x, added, out, total = x.contiguous(), added.contiguous(), _floats(*x.shape), _floats(*x.shape)
        width = x.shape[-1]
        self._library.rms_norm(
            x.data_ptr(), added.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), total.data_ptr(),
            x.numel() // width, width,
        )  # fmt: skip
        return out, total

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, in_place: bool) -> Tensor:
        """Rotate x (1, S, H, E), not interleaved, with cos and sin (1, S, 1, E / 2) contiguous."""
        out = x if in_place else _floats(*x.shape)
        self._library.rotate(
            x.data_ptr(), x.stride(1), x.stride(2), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), out.stride(1),
            out.stride(2), x.shape[1], x.shape[2], x.shape[3] // 2,
        )  # fmt: skip
        return out

    def rotate_pair(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
        """Rotate both, in one call where they lie side by side as parts of one product."""
        heads = q.shape[2]
        # Queries and keys are parts of one product, so the heads of both are often one run of heads.
        beside = q.data_ptr() + heads * q.stride(2) * q.itemsize == k.data_ptr() and q.stride() == k.stride()
        if not in_place or not beside:
            return self.rotate(q, cos, sin, in_place), self.rotate(k, cos, sin, in_place)
        memory = q.data_ptr(), q.stride(1), q.stride(2)
        self._library.rotate(
            *memory, cos.data_ptr(), sin.data_ptr(), *memory, q.shape[1], heads + k.shape[2], q.shape[3] // 2
        )
        return q, k

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute kernels.swiglu of gate and up (..., F) with one stride from row to row."""
        out = _floats(*gate.shape)
        rows = gate.numel() // gate.shape[-1]
        strides = gate.stride(-2), up.stride(-2)
        self._library.swiglu(
            gate.data_ptr(), strides[0], up.data_ptr(), strides[1], out.data_ptr(), rows, gate.shape[-1]
        )
        return out

    def round_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Round rows (M, K) to codes (M, K) uint8, offset by 128, and scales (M, 1)."""
        count, width = rows.shape
        codes, scales = rows.new_empty(count, width, dtype=torch.uint8), _floats(count, 1)
        self._library.round_rows(rows.data_ptr(), rows.stride(0), codes.data_ptr(), scales.data_ptr(), count, width)
        return codes, scales

    def store_floats(self, new: Tensor, slots: Tensor, store: Tensor) -> None:
        """Write new (N, K, E) to slots (N,) of a store (blocks, block, K, E)."""
        rows, heads, width = new.shape
        self._library.store_floats(
            new.data_ptr(), new.stride(0), new.stride(1), slots.data_ptr(), store.data_ptr(), rows, heads, width
        )

    def store_int8(self, new: Tensor, slots: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Write new (N, K, E) to slots (N,) of codes (blocks, block, K, E) int8 and scales (blocks, block, K)."""
        rows, heads, width = new.shape
        self._library.store_int8(
            new.data_ptr(), new.stride(0), new.stride(1), slots.data_ptr(), codes.data_ptr(), scales.data_ptr(), rows,
            heads, width,
        )  # fmt: skip

    def multiply(self, rows: Tensor, panels: Panels) -> Tensor:
        """Multiply rows (M, K) by a matrix (N, K) and add its bias. A sum's order is the same for any M."""
        count = rows.shape[0]
        out = _floats(count, panels.rows)
        if self._library.multiply(rows.data_ptr(), rows.stride(0), ctypes.byref(panels.fields), out.data_ptr(), count):
            raise MemoryError(f"no memory for {count} rows of {panels.width} codes")
        return out

    def restored(self, panels: Panels) -> Tensor:
        """Return panels of codes as numbers (N, K) fp32."""
        out = _floats(panels.rows, panels.width)
        self._library.restore(ctypes.byref(panels.fields), out.data_ptr())
        return out

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, scales: tuple[Tensor, Tensor] | None, tables: Tensor,
        offsets: Tensor, last: Tensor, longest: int, *, width: int, window: int, scale: float,
    ) -> Tensor:  # fmt: skip
        """Attend as kernels.attention.paged.attend_rows: q (R, H, E) -> (R, H, width).

        keys (blocks, block, K, E); values (blocks, block, K, V or more), of which `width` are used; scales (blocks,
        block, K) of each.
        """
        out = _floats(q.shape[0], q.shape[1], width)
        key_scales, value_scales = (None, None) if scales is None else map(pointer, scales)
        fields = structure("Attention")(
            q=q.data_ptr(), q_row=q.stride(0), keys=keys.data_ptr(), values=values.data_ptr(), key_scales=key_scales,
            value_scales=value_scales, tables=tables.data_ptr(), offsets=offsets.data_ptr(), last=last.data_ptr(),
            out=out.data_ptr(), rows=q.shape[0], heads=q.shape[1], key_heads=keys.shape[2], width=q.shape[2],
            value_width=width, value_stride=values.shape[3], block=keys.shape[1], window=window,
            e4m3=keys.dtype != torch.int8, scale=scale,
        )  # fmt: skip
        if self._library.attend(ctypes.byref(fields), longest):
            raise MemoryError(f"no memory for the scores of {longest} keys")
        return out

    def block(
        self, fields: ctypes.Structure, step: ctypes.Structure, beside: ctypes.Structure | None, x: Tensor
    ) -> Tensor:
        """Run x (..., D), contiguous, through a block (kernels/attention/block.py). Returns the same shape."""
        out = _floats(*x.shape)
        low_rank = None if beside is None else ctypes.byref(beside)
        if self._library.block(ctypes.byref(fields), ctypes.byref(step), low_rank, x.data_ptr(), out.data_ptr()):
            raise MemoryError(f"no memory for {x.numel() // x.shape[-1]} rows of a block")
        return out


def compiled() -> Loops | None:
    """Return the library of this process. None where no C compiler accepts it."""
    return _compiled()


@cache
def _compiled() -> Loops | None:
    library = build.load(*STEPS)
    return None if library is None else Loops(library)


_used: ContextVar[Loops | None] = ContextVar("used", default=None)


def loops() -> Loops | None:
    """Return the library, where it is `used` and no gradient is wanted.

    Never in code that torch compiles, which cannot trace a context variable.
    """
    if torch.compiler.is_compiling():
        return None
    library = _used.get()
    return None if library is None or torch.is_grad_enabled() else library


@contextmanager
def used(library: Loops | None) -> Iterator[None]:
    """Let kernels inside call the library, with as many threads as torch. None = they call torch."""
    if library is not None:
        library.use_threads(torch.get_num_threads())
    token = _used.set(library)
    try:
        yield
    finally:
        _used.reset(token)

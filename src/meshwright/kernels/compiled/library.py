"""rows.c, compiled for this processor when it is first asked for, and called with tensors.

Whoever wants it enters `used`: inside, and without gradients, kernels take its functions for fp32 on a CPU in place of
several operations of torch each. Without a C compiler `loops` is None, and nothing else changes.
"""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import final

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("rows.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
)  # fmt: skip
FOR_THIS_CPU = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",))
THREADS: tuple[tuple[str, ...], ...] = (("-fopenmp",), ())
"""Of each the first is taken that the compiler takes."""
ROWS, INT8_ROWS = 64, 32
"""Rows up to which `linear` and `int8_linear` are faster than the products of torch's libraries."""
LANES, FOUR = 16, 4
"""Columns of a panel, and inputs of 8 bits that a lane adds up at once."""

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class AttentionFields(ctypes.Structure):
    """Attention, of rows.c."""

    _fields_ = (
        ("q", _POINTER), ("q_row", _INT), ("keys", _POINTER), ("values", _POINTER), ("key_scales", _POINTER),
        ("value_scales", _POINTER), ("tables", _POINTER), ("offsets", _POINTER), ("last", _POINTER), ("out", _POINTER),
        ("rows", _INT), ("heads", _INT), ("key_heads", _INT), ("width", _INT), ("value_width", _INT),
        ("value_stride", _INT), ("block", _INT), ("window", _INT), ("e4m3", _INT), ("scale", _FLOAT),
    )  # fmt: skip


def pointer(tensor: Tensor | None) -> int | None:
    """Where its numbers lie."""
    return None if tensor is None else tensor.data_ptr()


@dataclass(frozen=True, slots=True)
class Panels:
    """A matrix (N, K) as the loops read it."""

    numbers: Tensor
    """As `float_panels`, or with sums as `int8_panels`."""
    bias: Tensor | None
    """(N,) fp32."""
    sums: Tensor | None = None
    """(N,) int32: of the codes of each of its rows."""
    scales: Tensor | None = None
    """(N,) fp32, of codes."""


_ARGUMENTS: dict[str, list[type]] = {
    "use_threads": [_INT],
    "rms_norm": [_POINTER, _POINTER, _POINTER, _FLOAT, _POINTER, _POINTER, _INT, _INT],
    "rotate": [_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _INT, _INT],
    "swiglu": [_POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _INT],
    "round_rows": [_POINTER, _INT, _POINTER, _POINTER, _INT, _INT],
    "keep_floats": [_POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _INT, _INT],
    "keep_int8": [_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT],
    "linear": [_POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _INT],
    "int8_linear": [_POINTER, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT],
}


def takes(*tensors: Tensor) -> bool:
    """Whether tensors are fp32 on a CPU with the numbers of a row side by side."""
    for one in tensors:  # noqa: SIM110 - a generator costs as much again as what it asks, some hundred times a step
        if one.dtype != torch.float32 or one.device.type != "cpu" or one.stride(-1) != 1:
            return False
    return True


def float_panels(weight: Tensor) -> Tensor | None:
    """(N, K) fp32 -> (N / 16, K, 16); None where N is no multiple of 16."""
    rows, width = weight.shape
    return None if rows % LANES else weight.view(-1, LANES, width).permute(0, 2, 1).contiguous()


def int8_panels(codes: Tensor) -> Tensor | None:
    """(N, K) int8 -> (N / 16, K / 4, 16, 4); None where N or K is no such multiple."""
    rows, width = codes.shape
    if rows % LANES or width % FOUR:
        return None
    return codes.reshape(-1, LANES, width // FOUR, FOUR).permute(0, 2, 1, 3).contiguous()


@final
class Loops:
    """The functions of the library. Tensors are as `takes` says."""

    def __init__(self, library: ctypes.CDLL, rows: int = ROWS) -> None:
        """`rows`: see there."""
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        library.attend.argtypes, library.block.argtypes = [_POINTER, _INT], [_POINTER] * 4
        for name in ("attend", "block", "int8_linear", "has_int8_linear"):
            getattr(library, name).restype = _INT
        self._of, self.rows = library, rows
        """Rows up to which products are `linear`."""
        self.has_int8_linear = bool(library.has_int8_linear())
        """Whether this processor has instructions for sums of 8-bit products."""

    def use_threads(self, count: int) -> None:
        """How many share a product or attention from now on, in all of this process; one at first."""
        self._of.use_threads(count)

    def for_any_rows(self) -> "Loops":
        """The same with products of any number of rows, whose sums then have one order."""
        return Loops(self._of, rows=2**62)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As kernels.rms_norm."""
        x, out = x.contiguous(), torch.empty(x.shape)
        width = x.shape[-1]
        rows = x.numel() // width
        self._of.rms_norm(x.data_ptr(), None, weight.data_ptr(), eps, out.data_ptr(), None, rows, width)
        return out

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """As kernels.add_rms_norm."""
        x, added, out, total = x.contiguous(), added.contiguous(), torch.empty(x.shape), torch.empty(x.shape)
        width = x.shape[-1]
        self._of.rms_norm(
            x.data_ptr(), added.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), total.data_ptr(),
            x.numel() // width, width,
        )  # fmt: skip
        return out, total

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, in_place: bool) -> Tensor:
        """x (1, S, H, E), cos and sin (1, S, 1, E / 2) contiguous: as kernels.rotate, not interleaved."""
        out = x if in_place else torch.empty(x.shape)
        self._of.rotate(
            x.data_ptr(), x.stride(1), x.stride(2), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), out.stride(1),
            out.stride(2), x.shape[1], x.shape[2], x.shape[3] // 2,
        )  # fmt: skip
        return out

    def rotate_pair(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, in_place: bool
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Both, in one call where they are parts of one product, side by side."""
        heads = q.shape[2]
        beside = q.data_ptr() + heads * q.stride(2) * q.itemsize == k.data_ptr() and q.stride() == k.stride()
        if not in_place or not beside:
            return self.rotate(q, cos, sin, in_place), self.rotate(k, cos, sin, in_place)
        given = q.data_ptr(), q.stride(1), q.stride(2)
        self._of.rotate(
            *given, cos.data_ptr(), sin.data_ptr(), *given, q.shape[1], heads + k.shape[2], q.shape[3] // 2
        )  # fmt: skip
        return q, k

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate and up (..., F) with one stride from row to row: as kernels.swiglu."""
        out = torch.empty(gate.shape)
        rows = gate.numel() // gate.shape[-1]
        strides = gate.stride(-2), up.stride(-2)
        self._of.swiglu(
            gate.data_ptr(), strides[0], up.data_ptr(), strides[1], out.data_ptr(), rows, gate.shape[-1]
        )  # fmt: skip
        return out

    def round_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows (M, K) -> codes (M, K) uint8, each 128 more than it stands for, and scales (M, 1)."""
        count, width = rows.shape
        codes, scales = torch.empty(count, width, dtype=torch.uint8), torch.empty(count, 1)
        self._of.round_rows(rows.data_ptr(), rows.stride(0), codes.data_ptr(), scales.data_ptr(), count, width)
        return codes, scales

    def keep_floats(self, new: Tensor, slots: Tensor, store: Tensor) -> None:
        """new (N, K, E) to slots (N,) of a store (blocks, block, K, E)."""
        rows, heads, width = new.shape
        self._of.keep_floats(
            new.data_ptr(), new.stride(0), new.stride(1), slots.data_ptr(), store.data_ptr(), rows, heads, width
        )  # fmt: skip

    def keep_int8(self, new: Tensor, slots: Tensor, codes: Tensor, scales: Tensor) -> None:
        """new (N, K, E) to slots (N,) of codes (blocks, block, K, E) int8 and scales (blocks, block, K)."""
        rows, heads, width = new.shape
        self._of.keep_int8(
            new.data_ptr(), new.stride(0), new.stride(1), slots.data_ptr(), codes.data_ptr(), scales.data_ptr(), rows,
            heads, width,
        )  # fmt: skip

    def linear(self, rows: Tensor, panels: Tensor) -> Tensor:
        """rows (M, K) times a matrix (N, K) as `float_panels` -> (M, N). A sum's order is the same for any M."""
        (count, width), columns = rows.shape, panels.shape[0] * LANES
        out = torch.empty(count, columns)
        self._of.linear(rows.data_ptr(), rows.stride(0), panels.data_ptr(), out.data_ptr(), count, columns, width)
        return out

    def int8_linear(self, rows: Tensor, panels: Tensor, sums: Tensor, matrix_scales: Tensor) -> Tensor:
        """rows (M, K), rounded, times a matrix (N, K) int8 as `int8_panels`, whose rows sum to `sums` (N,) int32 ->
        (M, N): sums are exact, times matrix_scales (N,), then times the scales of the rows."""
        (count, width), columns = rows.shape, panels.shape[0] * LANES
        out = torch.empty(count, columns)
        if self._of.int8_linear(
            rows.data_ptr(), rows.stride(0), panels.data_ptr(), sums.data_ptr(), matrix_scales.data_ptr(),
            out.data_ptr(), count, columns, width,
        ):  # fmt: skip
            raise MemoryError(f"no memory for {count} rows of {width} codes")
        return out

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, scales: tuple[Tensor, Tensor] | None, tables: Tensor,
        offsets: Tensor, last: Tensor, longest: int, *, width: int, window: int, scale: float,
    ) -> Tensor:  # fmt: skip
        """As kernels.paged_attention.attend_rows: q (R, H, E), keys (blocks, block, K, E), values (blocks, block, K, V
        or more), of which `width` are taken, scales (blocks, block, K) of each -> (R, H, width)."""
        out = torch.empty(q.shape[0], q.shape[1], width)
        asked = AttentionFields(
            q.data_ptr(), q.stride(0), keys.data_ptr(), values.data_ptr(),
            *((None, None) if scales is None else map(pointer, scales)),
            tables.data_ptr(), offsets.data_ptr(), last.data_ptr(), out.data_ptr(), q.shape[0], q.shape[1],
            keys.shape[2], q.shape[2], width, values.shape[3], keys.shape[1], window, keys.dtype != torch.int8, scale,
        )  # fmt: skip
        if self._of.attend(ctypes.byref(asked), longest):
            raise MemoryError(f"no memory for the scores of {longest} keys")
        return out

    def block(self, fields: ctypes.Structure, step: ctypes.Structure, x: Tensor) -> Tensor:
        """x (..., D) contiguous through a block (kernels/fused_block.py) -> the same shape."""
        out = torch.empty(x.shape)
        if self._of.block(ctypes.byref(fields), ctypes.byref(step), x.data_ptr(), out.data_ptr()):
            raise MemoryError(f"no memory for {x.numel() // x.shape[-1]} rows of a block")
        return out


def compiled() -> Loops | None:
    """The library, for this process; None where there is no C compiler that takes it."""
    return _compiled()


@cache
def _compiled() -> Loops | None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "rows.so"
        for special, threads in product(FOR_THIS_CPU, THREADS):
            words = [compiler, *FLAGS, *special, *threads, str(SOURCE), "-o", str(library), "-lm"]
            if subprocess.run(words, capture_output=True, check=False).returncode == 0:
                try:
                    return Loops(ctypes.CDLL(str(library)))
                except OSError:  # a folder from which nothing may be run
                    return None
    return None


_used: ContextVar[Loops | None] = ContextVar("used", default=None)


def loops() -> Loops | None:
    """The library, where it is `used` and no gradient is wanted; never in code that torch compiles: it cannot trace a
    context variable."""
    if torch.compiler.is_compiling():
        return None
    found = _used.get()
    return None if found is None or torch.is_grad_enabled() else found


@contextmanager
def used(library: Loops | None) -> Iterator[None]:
    """Inside, kernels take its functions, with as many threads as torch; None = those of torch."""
    if library is not None:
        library.use_threads(torch.get_num_threads())
    token = _used.set(library)
    try:
        yield
    finally:
        _used.reset(token)

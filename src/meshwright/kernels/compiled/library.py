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
from functools import cache
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
"""Of which the first is taken that the compiler takes."""
FEW_ROWS, INT8_INPUTS, INT8_OUTPUTS = 16, 64, 4
"""Rows up to which `int8_linear` is faster than oneDNN's product, and what its inputs and outputs are multiples of."""

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _Attention(ctypes.Structure):
    _fields_ = (
        ("q", _POINTER), ("q_row", _INT), ("keys", _POINTER), ("values", _POINTER), ("key_scales", _POINTER),
        ("value_scales", _POINTER), ("numbers", _POINTER), ("tables", _POINTER), ("offsets", _POINTER),
        ("last", _POINTER), ("out", _POINTER), ("rows", _INT), ("heads", _INT), ("key_heads", _INT), ("width", _INT),
        ("value_width", _INT), ("value_stride", _INT), ("block", _INT), ("window", _INT), ("scale", _FLOAT),
    )  # fmt: skip


_ARGUMENTS: dict[str, list[type]] = {
    "rms_norm": [_POINTER, _POINTER, _POINTER, _FLOAT, _POINTER, _POINTER, _INT, _INT],
    "rotate": [_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _INT, _INT],
    "swiglu": [_POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _INT],
    "round_rows": [_POINTER, _INT, _POINTER, _POINTER, _INT, _INT],
    "keep_int8": [_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT],
    "int8_linear": [_POINTER, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT],
}


def takes(*tensors: Tensor) -> bool:
    """Whether tensors are fp32 on a CPU with the numbers of a row side by side."""
    for one in tensors:  # noqa: SIM110 - a generator costs as much again as what it asks, some hundred times a step
        if one.dtype != torch.float32 or one.device.type != "cpu" or one.stride(-1) != 1:
            return False
    return True


@final
class Loops:
    """The functions of the library. Tensors are as `takes` says."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        library.attend.argtypes = [_POINTER, _INT]
        for name in ("attend", "int8_linear", "has_int8_linear"):
            getattr(library, name).restype = _INT
        self._of = library
        self.has_int8_linear = bool(library.has_int8_linear())
        """Whether this processor has instructions for sums of 8-bit products."""

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

    def keep_int8(self, new: Tensor, slots: Tensor, codes: Tensor, scales: Tensor) -> None:
        """new (N, K, E) to slots (N,) of codes (blocks, block, K, E) int8 and scales (blocks, block, K)."""
        rows, heads, width = new.shape
        self._of.keep_int8(
            new.data_ptr(), new.stride(0), new.stride(1), slots.data_ptr(), codes.data_ptr(), scales.data_ptr(), rows,
            heads, width,
        )  # fmt: skip

    def int8_linear(self, rows: Tensor, matrix: Tensor, sums: Tensor, matrix_scales: Tensor) -> Tensor:
        """rows (M, K), rounded, times matrix (N, K) int8 whose rows sum to `sums` (N,) int32 -> (M, N): sums are exact,
        times matrix_scales (N,), then times the scales of the rows. K is a multiple of 64, N of 4."""
        (count, width), columns = rows.shape, matrix.shape[0]
        out = torch.empty(count, columns)
        if self._of.int8_linear(
            rows.data_ptr(), rows.stride(0), matrix.data_ptr(), sums.data_ptr(), matrix_scales.data_ptr(),
            out.data_ptr(), count, columns, width,
        ):  # fmt: skip
            raise MemoryError(f"no memory for {count} rows of {width} codes")
        return out

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, scales: tuple[Tensor, Tensor] | None, numbers: Tensor | None,
        tables: Tensor, offsets: Tensor, last: Tensor, longest: int, *, width: int, window: int, scale: float,
    ) -> Tensor:  # fmt: skip
        """As kernels.paged_attention.attend_rows: q (R, H, E), keys (blocks, block, K, E), values (blocks, block, K, V
        or more), of which `width` are taken, scales (blocks, block, K) of each -> (R, H, width)."""
        out = torch.empty(q.shape[0], q.shape[1], width)
        asked = _Attention(
            q.data_ptr(), q.stride(0), keys.data_ptr(), values.data_ptr(),
            None if scales is None else scales[0].data_ptr(), None if scales is None else scales[1].data_ptr(),
            None if numbers is None else numbers.data_ptr(), tables.data_ptr(), offsets.data_ptr(), last.data_ptr(),
            out.data_ptr(), q.shape[0], q.shape[1], keys.shape[2], q.shape[2], width, values.shape[3], keys.shape[1],
            window, scale,
        )  # fmt: skip
        if self._of.attend(ctypes.byref(asked), longest):
            raise MemoryError(f"no memory for the scores of {longest} keys")
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
        for special in FOR_THIS_CPU:
            words = [compiler, *FLAGS, *special, str(SOURCE), "-o", str(library), "-lm"]
            if subprocess.run(words, capture_output=True, check=False).returncode == 0:
                try:
                    return Loops(ctypes.CDLL(str(library)))
                except OSError:  # a folder from which nothing may be run
                    return None
    return None


_used: ContextVar[Loops | None] = ContextVar("used", default=None)


def loops() -> Loops | None:
    """The library, where it is `used` and no gradient is wanted."""
    found = _used.get()
    return None if found is None or torch.is_grad_enabled() else found


@contextmanager
def used(library: Loops | None) -> Iterator[None]:
    """Inside, kernels take its functions; None = those of torch."""
    token = _used.set(library)
    try:
        yield
    finally:
        _used.reset(token)

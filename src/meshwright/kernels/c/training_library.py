"""Library of the C loops for a training step on a CPU."""

import ctypes
from functools import cache

import torch

from meshwright.kernels.c import build

STEPS = ("sequence_attention.c", "training_rows.c", "logit_rows.c")
"""C sources of a training step."""
VECTOR = 16
"""Numbers of a vector. Widths of rows and heads must be multiples of it."""
DTYPES = (torch.float32, torch.bfloat16)


@cache
def _library() -> ctypes.CDLL | None:
    return build.load(*STEPS, threads=build.THREADS[:1])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no annotations there
def is_compiled() -> bool:
    """Return whether a C compiler for this processor supports OpenMP: one thread would be slower than all of torch's.

    The first answer on a machine compiles the library: one to two seconds of processor time.
    """
    return _library() is not None


def library() -> ctypes.CDLL:
    """Return the library, where it `is_compiled`."""
    loaded = _library()
    assert loaded is not None, "a loop was chosen without a library"
    return loaded

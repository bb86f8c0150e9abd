"""Library of the C loops for a training step on a CPU."""

import ctypes
from functools import cache

import torch

from meshwright.kernels.c.build import THREADS, built
from meshwright.kernels.c.panels import FLOAT, INT, POINTER

VECTOR = 16
"""Numbers of a vector. Widths of rows and heads must be multiples of it."""
DTYPES = (torch.float32, torch.bfloat16)
_NUMBERS = [INT] * 4
_ARGUMENTS: dict[str, list[type]] = {
    "attend_sequences": [POINTER],
    "sequences_gradients": [POINTER],
    "norm_rows": [POINTER, POINTER, FLOAT, POINTER, POINTER, *_NUMBERS],
    "norm_gradients": [*[POINTER] * 6, INT, *_NUMBERS],
    "gate_rows": [*[POINTER] * 3, *_NUMBERS],
    "gate_gradients": [*[POINTER] * 6, *_NUMBERS],
    "losses_of_rows": [POINTER, INT, POINTER, POINTER, POINTER, *_NUMBERS, FLOAT, FLOAT, INT, INT],
    "gather_rows": [POINTER, INT, POINTER, INT, POINTER, *_NUMBERS],
    "gradient_rows": [POINTER, INT, POINTER, INT, POINTER, POINTER, INT, INT, INT, FLOAT, FLOAT, INT, INT],
    "turn_rows": [POINTER, INT, INT, INT, POINTER, POINTER, INT, FLOAT, POINTER, INT, INT, *_NUMBERS],
}


@cache
def _library() -> ctypes.CDLL | None:
    library = built("sequence_attention.c", "training_rows.c", "logit_rows.c", threads=THREADS[:1])
    for name, arguments in _ARGUMENTS.items() if library is not None else ():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, INT if name == "attend_sequences" else None
    return library


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

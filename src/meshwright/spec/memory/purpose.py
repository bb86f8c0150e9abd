"""Kinds of memory, and the purpose that a part of the program declares for what it allocates.

`@takes("buffers")` decorates code that moves tensors between ranks, `@takes("logits")` the loss. It applies to all
allocations while the function runs, in its own thread. The innermost decorator counts.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

STATES = ("parameters", "shards", "gradients", "masters", "moments", "counters")
"""Memory that a rank keeps from step to step. Counters are the optimizer's step numbers, one per tensor."""
KINDS = (*STATES, "activations", "logits", "buffers", "temporaries", "tokens", "staging")
"""Memory of tensors, by purpose."""
PLANNED = (*KINDS, "reserve")
"""The same, and the memory that the planner reserves for everything but tensors."""
P = ParamSpec("P")
R = TypeVar("R")
Purpose = Literal["", "buffers", "logits", "temporaries", "host"]
"""Kinds of memory (`KINDS`) that only their allocator can tell."""
_purpose: ContextVar[Purpose] = ContextVar("purpose", default="")


def purpose() -> Purpose:
    """Return the purpose that the innermost running function declared. Empty = none."""
    return _purpose.get()


def takes(kind: Purpose) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: memory allocated by the function has this purpose."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            before = _purpose.set(kind)
            try:
                return function(*args, **kwargs)
            finally:
                _purpose.reset(before)

        return inside

    return decorated

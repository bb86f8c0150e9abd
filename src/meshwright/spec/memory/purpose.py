"""Purpose of memory, declared by the part of the program that allocates it and read by trackers of storages.

`@takes("buffers")` decorates code that moves tensors between ranks, `@takes("logits")` the loss. It applies to all
allocations while the function runs, in its own thread. The innermost decorator counts.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Purpose = Literal["", "buffers", "logits", "temporaries", "host"]
"""Kinds of memory (spec.ledger.KINDS) that only their allocator can tell."""
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

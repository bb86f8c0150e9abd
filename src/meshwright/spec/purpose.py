"""What memory is for, told by the part of the program that takes it: read where every storage is followed.

`@takes("buffers")` is put on what moves tensors between ranks, `@takes("logits")` on the loss. Each says it of what is
made while it runs, by whatever it calls, in its own thread; the innermost one counts.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Purpose = Literal["", "buffers", "logits", "temporaries", "host"]
"""Kinds of memory (spec.ledger.KINDS) that nothing but their maker can tell."""
_purpose: ContextVar[Purpose] = ContextVar("purpose", default="")


def purpose() -> Purpose:
    """Of the innermost part that runs; empty where none has said."""
    return _purpose.get()


def takes(kind: Purpose) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: what the function makes is of this kind."""

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

"""The parts of a step as they happen: every pass of every micro-batch under the schedule's own names, then the sums of
gradients, the norm, the optimizer.

The trainer knows nothing of it: while `told` is open, the functions that begin and end a part tell of it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

from meshwright.parallel.engine import Engine
from meshwright.parallel.pipeline import Passes
from meshwright.spec.schedule import Action
from meshwright.training.optimizer import Optimizer
from meshwright.training.step import MicroPass


@dataclass(frozen=True, slots=True)
class Span:
    """`F`, `B`, `W`, `BW` of a stage's micro-batch; or `gradients`, `norm`, `optimizer` with neither."""

    name: str
    stage: int = -1
    micro_batch: int = -1

    def __str__(self) -> str:
        return f"{self.name} {self.stage} {self.micro_batch}" if self.stage >= 0 else self.name


PARTS = {"finish_gradients": "gradients", "gradient_norm": "norm"}
Told = Callable[[Span | None], None]
"""A part begins; None: it has ended."""
Inner = Callable[..., Any]
"""A function that another stands for, see `replaced`."""


@dataclass(slots=True)
class _Order:
    """Micro-batches of a model that is one stage, in the order in which they come."""

    forward: int = 0
    backward: int = 0
    open: bool = field(default=False)


@contextmanager
def told(tell: Told) -> Iterator[None]:
    """Inside, `tell` hears of each part of each step of this process. Parts do not overlap; of nested ones (a stage's
    pass inside an action) the outer one counts."""
    order = _Order()

    def part(span: Span, run: Callable[[], Any]) -> Any:
        if order.open:
            return run()
        order.open = True
        tell(span)
        try:
            return run()
        finally:
            order.open = False
            tell(None)

    def action(inner: Inner, passes: Passes, one: Action) -> None:
        name = one.kind if passes.train else "evaluate"
        part(Span(name, one.stage, one.micro_batch), lambda: inner(passes, one))

    def forward(inner: Inner, *given: Any) -> Any:
        if not torch.is_grad_enabled():
            return part(Span("evaluate"), lambda: inner(*given))
        if not order.open:
            order.forward += 1
        return part(Span("F", 0, order.forward - 1), lambda: inner(*given))

    def backward(inner: Inner, *given: Any, **named: Any) -> Any:
        order.backward += 1
        return part(Span("BW", 0, order.backward - 1), lambda: inner(*given, **named))

    def optimizer(inner: Inner, *given: Any, **named: Any) -> Any:
        order.forward = order.backward = 0
        return part(Span("optimizer"), lambda: inner(*given, **named))

    def engine(inner: Inner, *given: Any) -> Any:
        return part(Span(PARTS[inner.__name__]), lambda: inner(*given))

    with ExitStack() as stack:
        for owner, name, instead in (
            (Passes, "do", action),
            (MicroPass, "__call__", forward),
            (torch.Tensor, "backward", backward),
            (Optimizer, "step", optimizer),
            *((Engine, name, engine) for name in PARTS),
        ):
            stack.enter_context(replaced(owner, name, instead))
        yield


@contextmanager
def replaced(owner: Any, name: str, instead: Callable[..., Any]) -> Iterator[None]:
    """For a while `instead` is called for a function of a class or module, with that function before its arguments."""
    inner = getattr(owner, name)

    @wraps(inner)
    def call(*given: Any, **named: Any) -> Any:
        return instead(inner, *given, **named)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, inner)

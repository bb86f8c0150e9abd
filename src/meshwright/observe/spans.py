"""The parts of a step as they happen.

These are the passes of every micro-batch under the schedule's names, then gradient reduction, norm and optimizer.
The trainer knows nothing of it: inside `report_spans` the functions that begin and end a part are wrapped.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

from meshwright.parallel.engine import Engine
from meshwright.parallel.pipeline.executor import Passes
from meshwright.spec.layout.schedule import Action
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.step.step import MicroPass

PARTS = {"finish_gradients": "gradients", "gradient_norm": "norm"}
Inner = Callable[..., Any]
"""The function that a replacement stands for, see `replaced`."""


@dataclass(frozen=True, slots=True)
class Span:
    """One part: `F`, `B`, `W`, `BW` of a stage's micro-batch, or `gradients`, `norm`, `optimizer` with neither."""

    name: str
    stage: int = -1
    micro_batch: int = -1

    def __str__(self) -> str:
        return f"{self.name} {self.stage} {self.micro_batch}" if self.stage >= 0 else self.name


SpanListener = Callable[[Span | None], None]
"""Called with a part when it begins, and with None when it ends."""


@dataclass(slots=True)
class _Order:
    """Counts of the passes of a model without pipeline stages, in their order."""

    forward: int = 0
    backward: int = 0
    open: bool = field(default=False)


@contextmanager
def report_spans(report: SpanListener) -> Iterator[None]:
    """Report each part of each step of this process. Parts do not overlap: of nested ones the outer one counts."""
    order = _Order()

    def part(span: Span, run: Callable[[], Any]) -> Any:
        # Functions of a part call each other, as the executor's backward calls torch's: the outer one counts.
        if order.open:
            return run()
        order.open = True
        report(span)
        try:
            return run()
        finally:
            order.open = False
            report(None)

    def action(inner: Inner, passes: Passes, pipeline_action: Action) -> None:
        name = pipeline_action.kind if passes.train else "evaluate"
        part(Span(name, pipeline_action.stage, pipeline_action.micro_batch), lambda: inner(passes, pipeline_action))

    # The micro-batch is known by the order of calls where no schedule names it.
    def forward(inner: Inner, *arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return part(Span("evaluate"), lambda: inner(*arguments))
        if not order.open:
            order.forward += 1
        return part(Span("F", 0, order.forward - 1), lambda: inner(*arguments))

    def backward(inner: Inner, *arguments: Any, **keywords: Any) -> Any:
        order.backward += 1
        return part(Span("BW", 0, order.backward - 1), lambda: inner(*arguments, **keywords))

    def optimizer(inner: Inner, *arguments: Any, **keywords: Any) -> Any:
        # The update ends a step, after which micro-batches are counted from 0 again.
        order.forward = order.backward = 0
        return part(Span("optimizer"), lambda: inner(*arguments, **keywords))

    def engine(inner: Inner, *arguments: Any) -> Any:
        return part(Span(PARTS[inner.__name__]), lambda: inner(*arguments))

    with ExitStack() as stack:
        for owner, name, replacement in (
            (Passes, "do", action),
            (MicroPass, "__call__", forward),
            (torch.Tensor, "backward", backward),
            (Optimizer, "step", optimizer),
            *((Engine, name, engine) for name in PARTS),
        ):
            stack.enter_context(replaced(owner, name, replacement))
        yield


@contextmanager
def replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Call `replacement` in place of a function of a class or module, with that function before its arguments."""
    inner = getattr(owner, name)

    @wraps(inner)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return replacement(inner, *arguments, **keywords)

    # Not `inner`, which is bound: a method of torch's C++ classes would get no `self` any more.
    unbound = vars(owner).get(name)
    setattr(owner, name, call)
    try:
        yield
    finally:
        if unbound is None:  # of a base class
            delattr(owner, name)
        else:
            setattr(owner, name, unbound)

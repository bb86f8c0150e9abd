"""One optimizer step on a rank: its passes by the schedule's names, its collectives and its waits.

The same in the planner's words (planner.time.timeline.StepTime):

    compute     passes (F, B, W, BW) less their waits
    exchange    waiting for tensor, context and expert parallelism
    bubble      waiting for the pipeline's messages, and for the other pipeline ranks when all is done
    weights     waiting for gathers of parameters
    gradients   waiting for reductions of gradients, and putting them in place
    optimizer   norm and update, with their waits
    other       the rest

On a CPU, and for the first rank at a collective, waiting for it includes waiting for slower ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from meshwright.observe.profile.clock import Clock, CollectiveCall, CollectiveCalls, Mark, WaitSpan
from meshwright.observe.shared_document import Ran
from meshwright.observe.spans import Span, report_spans

PARTS = ("compute", "exchange", "bubble", "weights", "gradients", "optimizer", "other")
PASSES = ("F", "B", "W", "BW")
OF_SPAN = {**dict.fromkeys(PASSES, "compute"), "gradients": "gradients", "norm": "optimizer", "optimizer": "optimizer"}
"""Part of the step to which a span counts, apart from its waits."""
EXCHANGES = ("tp", "cp", "ep")
REDUCED = ("replicate", "expert_data")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCall:
    """A collective from its call until its wait ended; or a wait, with the part of the step it counts to."""

    axis: str
    collective: str
    sent_bytes: int
    start_s: float
    end_s: float
    part: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One step of one rank, in seconds of the first rank's clock."""

    start_s: float
    end_s: float
    spans: tuple[Ran, ...]
    calls: tuple[TimedCall, ...]
    waits: tuple[TimedCall, ...]

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return self.end_s - self.start_s

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by PARTS, which add up to `seconds`."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for wait in self.waits:
            seconds[wait.part] += wait.end_s - wait.start_s
        for span in self.spans:
            seconds[OF_SPAN[span.name]] += span.end_s - span.start_s
        # A wait inside a pass counts to its own part, and so must not count to the pass again.
        for span, wait in _inside(self.spans, self.waits):
            seconds[OF_SPAN[span.name]] -= wait.end_s - wait.start_s
        # By difference, so that the parts add up to the step.
        seconds["other"] += self.seconds - sum(seconds.values())
        return seconds

    @property
    def streams(self) -> dict[str, float]:
        """Seconds of work, of waits for collectives, and of pipeline waits, which add up to the step.

        `communication_s` is the time in which any collective but the pipeline's was running.
        """
        bubble = self.parts["bubble"]
        exposed = sum(wait.end_s - wait.start_s for wait in self.waits) - bubble
        under_way = [(call.start_s, call.end_s) for call in self.calls if call.axis != "pp"]
        return {
            "compute_s": self.seconds - exposed - bubble,
            "communication_s": covered_s(under_way),
            "exposed_s": exposed,
            "idle_s": bubble,
        }


def _inside(spans: Iterable[Ran], waits: Iterable[TimedCall]) -> Iterator[tuple[Ran, TimedCall]]:
    """Yield the waits inside spans, with their span. Both come in order, and neither overlaps itself."""
    rest = iter(sorted(spans, key=lambda span: span.start_s))
    span = next(rest, None)
    for wait in sorted(waits, key=lambda entry: entry.start_s):
        while span is not None and span.end_s <= wait.start_s:
            span = next(rest, None)
        if span is not None and span.start_s <= wait.start_s:
            yield span, wait


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > until:
            total += end - max(start, until)
            until = end
    return total


def part_of(span: str, axis: str, collective: str, pipeline: bool) -> str:
    """Return the part to which a wait counts, by its span (empty = none) and its collective."""
    # Waits in the optimizer belong to it, whatever they wait for: only passes are split by axis.
    if span in OF_SPAN and span not in PASSES:
        return OF_SPAN[span]
    # Losses are summed once all stages are done, so early stages wait there for the last.
    if axis == "pp" or (axis == "losses" and pipeline):
        return "bubble"
    if axis in EXCHANGES:
        return "exchange"
    if axis in ("shard", "expert_shard"):
        return "weights" if collective == "all_gather" else "gradients"
    if axis in REDUCED or (axis == "data" and span):
        return "gradients"
    return "other"


@dataclass(slots=True)
class StepRecorder:
    """Records the moments of one step. `pipeline` is True if other ranks have other stages."""

    clock: Clock
    pipeline: bool
    spans: list[tuple[Span, Mark, Mark]] = field(default_factory=list)
    waits: list[tuple[WaitSpan, str]] = field(default_factory=list)
    calls: list[CollectiveCall] = field(default_factory=list)
    start: Mark = None
    end: Mark = None
    _open: tuple[Span, Mark] | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record the step that runs inside."""
        calls = CollectiveCalls(self.clock, self._record_wait)
        with calls.listening(), report_spans(self._part):
            self.start = self.clock.mark()
            yield
            self.end = self.clock.mark()
        self.calls = calls.calls

    def _part(self, span: Span | None) -> None:
        now = self.clock.mark()
        if self._open is not None:
            self.spans.append((*self._open, now))
        self._open = None if span is None else (span, now)

    def _record_wait(self, wait: WaitSpan) -> None:
        span = self._open[0].name if self._open else ""
        call = wait.call
        self.waits.append((wait, part_of(span, call.axis, call.collective, self.pipeline)))

    def timed(self, common: Callable[[float], float]) -> TimedStep:
        """Return the step. `common` converts seconds of this rank's settled clock to the first rank's."""

        def at(mark: Mark) -> float:
            return common(self.clock.seconds(mark))

        def timed_call(call: CollectiveCall, start: Mark, end: Mark, part: str = "") -> TimedCall:
            return TimedCall(
                axis=call.axis, collective=call.collective, sent_bytes=call.sent_bytes, start_s=at(start),
                end_s=at(end), part=part,
            )  # fmt: skip

        return TimedStep(
            start_s=at(self.start),
            end_s=at(self.end),
            spans=tuple(
                Ran(name=span.name, stage=span.stage, micro_batch=span.micro_batch, start_s=at(start), end_s=at(end))
                for span, start, end in self.spans
            ),
            calls=tuple(timed_call(c, c.start, c.end if c.end is not None else self.end) for c in self.calls),
            waits=tuple(timed_call(wait.call, wait.start, wait.end, part) for wait, part in self.waits),
        )

"""Slow ranks: those whose own work takes longer than that of ranks with an equal part in the run.

All ranks of a synchronous training have steps of one duration, that of the slowest. So each rank measures its work: the
time of a step in which it does not wait for others (HeartbeatWatch.sample). It travels with the beats.

A rank is slow when its work exceeds TIMES medians in WINDOWS windows in a row, each of WINDOW_STEPS steps and WINDOW_S
at least. What it takes longer must also be a share of the step, or nobody would gain from a faster rank. Ranks are
compared with those of equal role only: stages of a pipeline, and ranks with other experts, differ by design. In a role
of two ranks the faster one is the median.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from meshwright.parallel.health.heartbeat import Beat, SlowRank

WINDOW_S, WINDOW_STEPS, WINDOWS = 5.0, 10, 3
TIMES, RECOVERED = 1.3, 1.15
"""Medians from which on a rank is slow, and below which it no longer is."""
SHARE = 0.1
"""Share of a step by which its work must exceed the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    """Means of a rank over a window."""

    steps: int
    work_s: float
    step_s: float


class SlowRanks:
    """Finds slow ranks in the beats of all, and names each once until it has recovered."""

    def __init__(self) -> None:
        self._begun: Sequence[Beat] = ()
        self._begun_s = 0.0
        self._rows: dict[int, tuple[int, int]] = {}
        """Rank -> windows in a row in which it was slow, and their steps."""
        self._known: set[int] = set()

    def look(self, beats: Sequence[Beat], now_s: float) -> list[SlowRank]:
        """Return ranks that have become slow. A window ends once it is long enough on all ranks."""
        if not self._begun:
            self._begun, self._begun_s = beats, now_s
        steps = [beat.timed - before.timed for beat, before in zip(beats, self._begun, strict=True)]
        if now_s - self._begun_s < WINDOW_S or min(steps) < WINDOW_STEPS:
            return []
        roles: dict[str, dict[int, _Pace]] = {}
        for rank, (n, beat, before) in enumerate(zip(steps, beats, self._begun, strict=True)):
            work_s, step_s = (beat.work_s - before.work_s) / n, (beat.steps_s - before.steps_s) / n
            roles.setdefault(beat.role, {})[rank] = _Pace(steps=n, work_s=work_s, step_s=step_s)
        self._begun, self._begun_s = beats, now_s
        return [slow for role in roles.values() for slow in self._judge(role, beats)]

    def _judge(self, paces: Mapping[int, _Pace], beats: Sequence[Beat]) -> list[SlowRank]:
        median_s = median_low(pace.work_s for pace in paces.values())
        named: list[SlowRank] = []
        if not median_s:  # not known
            return named
        for rank, pace in paces.items():
            excess_s = pace.work_s - median_s
            if excess_s <= (TIMES - 1) * median_s or excess_s <= SHARE * pace.step_s:
                self._rows.pop(rank, None)
                if excess_s <= (RECOVERED - 1) * median_s:
                    self._known.discard(rank)
                continue
            windows, steps = self._rows.get(rank, (0, 0))
            self._rows[rank] = windows, steps = windows + 1, steps + pace.steps
            if windows >= WINDOWS and rank not in self._known:
                self._known.add(rank)
                named.append(
                    SlowRank(rank=rank, host=beats[rank].host, work_s=pace.work_s, median_s=median_s, steps=steps)
                )
        return named

"""Judgement of ranks by their beats: which one hangs, died or was cut off, and which are slow.

A rank in a collective waits for others, so one that makes no progress elsewhere is to blame (`judge`).

All ranks of a synchronous training have steps of one duration, that of the slowest. So each rank measures its work: the
time of a step in which it does not wait for others (HeartbeatWatch.sample). It travels with the beats.

A rank is slow when its work exceeds TIMES medians in WINDOWS windows in a row, each of WINDOW_STEPS steps and WINDOW_S
at least. What it takes longer must also be a share of the step, or nobody would gain from a faster rank. Ranks are
compared with those of equal role only: stages of a pipeline, and ranks with other experts, differ by design. In a role
of two ranks the faster one is the median.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from meshwright.parallel.health.heartbeat import COMPILE, Beat, SlowRank
from meshwright.spec.units import many

HANG_S, TIMES_LONGEST, SLOW_S = 300.0, 10.0, 1800.0
"""Limits in a step, in longest steps, and elsewhere.
Ending a healthy rank costs all ranks the work since the last checkpoint. A rank that hangs costs the limit.
"""
SILENT_S = 120.0
SILENT_AFTER_LOSS_S = 5.0
"""Limit of silence once another rank has lost a connection."""
ADVICE = "every rank was ended; resume=auto goes on from the last checkpoint"
WINDOW_S, WINDOW_STEPS, WINDOWS = 5.0, 10, 3
TIMES, RECOVERED = 1.3, 1.15
"""Medians from which on a rank is slow, and below which it no longer is."""
SHARE = 0.1
"""Share of a step by which its work must exceed the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Longest time without progress. `hang_s`: None = automatic, 0 = no limit."""

    hang_s: float | None = None

    def still_s(self, beat: Beat) -> float:
        """Return the limit: in a step 5 minutes or 10 times the longest step so far, elsewhere half an hour."""
        if self.hang_s == 0:
            return math.inf
        quick = self.hang_s or max(HANG_S, TIMES_LONGEST * beat.longest_s)
        return max(SLOW_S, quick) if beat.may_take_long else quick

    @property
    def silent_s(self) -> float:
        """Limit without a beat: the process was stopped, or the machine is gone."""
        return math.inf if self.hang_s == 0 else min(SILENT_S, self.hang_s or SILENT_S)


@dataclass(frozen=True, slots=True)
class Blame:
    """A rank and the sentence about it."""

    rank: int
    sentence: str


def judge(beats: Sequence[Beat], silent_s: Sequence[float], limits: Limits) -> Blame | None:
    """Return the culprit, or None. `silent_s`: for how long the beats of each rank have not changed."""
    going = [rank for rank, beat in enumerate(beats) if not beat.done]
    if not going:
        return None
    lost = any(beats[rank].lost for rank in going)
    # Silence comes first: a rank that sends nothing cannot be judged by what it sent last.
    quietest = max(going, key=lambda rank: silent_s[rank])
    if silent_s[quietest] > (min(SILENT_AFTER_LOSS_S, limits.silent_s) if lost else limits.silent_s):
        return _blame_silent(quietest, beats, silent_s)
    # A rank in a collective waits for another one. So blame a rank that does not wait, the one without progress for
    # longest. If all wait for each other, blame the one farthest behind: it did not enter the others' collective.
    blamed = min(going, key=lambda rank: _order(beats[rank]))
    # Compiling takes minutes, and ranks that wait for a compiling one may take as long.
    takes_long = beats[blamed].may_take_long or any(beats[rank].phase == COMPILE for rank in going)
    beat = beats[blamed]
    if beat.still_s <= limits.still_s(replace(beat, may_take_long=takes_long)):
        return None
    how = f"has made no progress for {beat.still_s:.0f} s"
    if beat.waits:
        how = f"is the farthest behind of ranks that have waited for each other for {beat.still_s:.0f} s"
    recorded = _recorded(beat, [beats[rank] for rank in going if rank != blamed])
    return Blame(blamed, f"{name_rank(blamed, beat)} {how} at {beat.position} ({beat.where}){recorded}; {ADVICE}")


def _order(beat: Beat) -> tuple[float, ...]:
    if beat.waits:
        # Hosts run ahead of their GPUs, so equal positions of hosts say little about the devices.
        return True, beat.step, beat.calls, math.inf if beat.oldest < 0 else beat.oldest, -beat.still_s
    return False, -beat.still_s


def _recorded(beat: Beat, others: Sequence[Beat]) -> str:
    """Return what torch's flight recorder says of a rank and of those that wait for it. Empty = nothing."""
    waiting = Counter(other.open_collective for other in others)
    waiting.pop("", None)
    parts = [f"its oldest open collective is {beat.open_collective}"] if beat.open_collective else []
    for collective, ranks in waiting.most_common(1):
        parts.append(f"{many(ranks, 'other rank')} {'waits' if ranks == 1 else 'wait'} in {collective}")
    return f"; by torch's flight recorder {', and '.join(parts)}" if parts else ""


def _blame_silent(rank: int, beats: Sequence[Beat], silent_s: Sequence[float]) -> Blame:
    """Blame a rank whose beats have stopped. Its step is that of the ranks that wait for it."""
    # A machine that is cut off takes all its ranks with it: they fell silent together.
    others = sum(not beat.done and s > silent_s[rank] / 2 for beat, s in zip(beats, silent_s, strict=True)) - 1
    more = f" (and {others} more)" if others else ""
    step, seconds = max(beat.step for beat in beats), silent_s[rank]
    return Blame(
        rank,
        f"{name_rank(rank, beats[rank])}{more} has been silent for {seconds:.0f} s in step {step}, stopped or cut "
        f"off; its last beat was at {beats[rank].position}"
        f"{_recorded(Beat(), [beat for other, beat in enumerate(beats) if other != rank])}; {ADVICE}",
    )


def name_rank(rank: int, beat: Beat) -> str:
    """Return `rank 3`, with its machine if there are several."""
    return f"rank {rank} on {beat.host}" if beat.host else f"rank {rank}"


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

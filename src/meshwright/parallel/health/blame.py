"""The rank to blame when a world stands still: from the beats of all ranks to one rank and a sentence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.parallel.health.heartbeat import COMPILE, Beat

HANG_S, TIMES_LONGEST, SLOW_S = 300.0, 10.0, 1800.0
"""Limits in a step, in longest steps, and elsewhere.
Ending a healthy rank costs all ranks the work since the last checkpoint. A rank that hangs costs the limit.
"""
SILENT_S = 120.0
LOST_S = 5.0
"""Limit of silence once another rank has lost a connection."""
ADVICE = "every rank was ended; resume=auto goes on from the last checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Longest time without progress. `hang_s`: None = automatic, 0 = no limit."""

    hang_s: float | None = None

    def still_s(self, beat: Beat) -> float:
        """Return the limit: in a step 5 minutes or 10 times the longest step so far, elsewhere half an hour."""
        if self.hang_s == 0:
            return math.inf
        quick = self.hang_s or max(HANG_S, TIMES_LONGEST * beat.longest_s)
        return max(SLOW_S, quick) if beat.slow else quick

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
    quietest = max(going, key=lambda rank: silent_s[rank])
    if silent_s[quietest] > (min(LOST_S, limits.silent_s) if lost else limits.silent_s):
        return silent(quietest, beats, silent_s)
    # A rank in a collective waits for another one. So blame a rank that does not wait, the one that has stood still
    # longest. If all wait for each other, blame the one farthest behind: it did not enter the others' collective.
    blamed = min(going, key=lambda rank: _order(beats[rank]))
    # Compiling takes minutes, and ranks that wait for a compiling one may take as long.
    slow = beats[blamed].slow or any(beats[rank].phase == COMPILE for rank in going)
    limit_s = limits.still_s(replace(beats[blamed], slow=slow))
    return still(blamed, beats[blamed]) if beats[blamed].still_s > limit_s else None


def _order(beat: Beat) -> tuple[float, ...]:
    if beat.waits:
        return True, beat.step, beat.calls, -beat.still_s
    return False, -beat.still_s


def silent(rank: int, beats: Sequence[Beat], silent_s: Sequence[float]) -> Blame:
    """Blame a rank whose beats have stopped. Its step is that of the ranks that wait for it."""
    others = sum(not beat.done and s > silent_s[rank] / 2 for beat, s in zip(beats, silent_s, strict=True)) - 1
    more = f" (and {others} more)" if others else ""
    step, seconds = max(beat.step for beat in beats), silent_s[rank]
    return Blame(
        rank,
        f"{who(rank, beats[rank])}{more} has been silent for {seconds:.0f} s in step {step}, stopped or cut off; "
        f"its last beat was at {beats[rank].position}; {ADVICE}",
    )


def still(rank: int, beat: Beat) -> Blame:
    """Blame a rank that sends beats but makes no progress."""
    how = f"has stood still for {beat.still_s:.0f} s"
    if beat.waits:
        how = f"is the farthest behind of ranks that have waited for each other for {beat.still_s:.0f} s"
    return Blame(rank, f"{who(rank, beat)} {how} at {beat.position} ({beat.where}); {ADVICE}")


def died(rank: int, beat: Beat, observer: int, observer_beat: Beat) -> Blame:
    """Blame a rank whose process is gone without a message: its last beat, and where an observer was at the time."""
    return Blame(
        rank,
        f"{who(rank, beat)} died without a word (killed?) in {observer_beat.position} of rank {observer}; "
        f"its own last beat was at {beat.position}; {ADVICE}",
    )


def who(rank: int, beat: Beat) -> str:
    """Return `rank 3`, with its machine if there are several."""
    return f"rank {rank} on {beat.host}" if beat.host else f"rank {rank}"

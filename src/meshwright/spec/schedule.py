"""Pipeline schedules as data: for each pipeline rank the order of its forward and backward passes.

Letters: p ranks, m micro-batches, v stages of one rank. A pass is F (forward), B (gradient of the input), W (gradients
of the weights, which B left) or BW (both at once). The planner, the executor and the report read the same lists.
Which schedules there are says spec/schedule_kinds.py.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Literal

from meshwright.spec.errors import IllegalLayout
from meshwright.spec.schedule_kinds import KINDS, NAMES, V_PLACED, Rounds, Words

Kind = Literal["F", "B", "W", "BW"]


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One pass of one stage over one micro-batch; stages are numbered from the embedding to the head."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"


PASSES = {"F": "forward", "BW": "backward", "B": "backward for inputs", "W": "backward for weights"}
"""Kinds of passes in words."""


def phase_words(phase: str) -> str:
    """`step 2, F 0 1` as people read it: `step 2, forward of stage 0, micro-batch 1`."""
    return re.sub(
        r"\b(F|BW|B|W) (\d+) (\d+)\b", lambda one: f"{PASSES[one[1]]} of stage {one[2]}, micro-batch {one[3]}", phase
    )


Actions = tuple[tuple[Action, ...], ...]
"""The actions of each pipeline rank, in their order."""


@cache
def schedule(name: str, ranks: int, micro_batches: int, virtual: int = 1) -> Actions:
    """The actions of each rank; IllegalLayout where the schedule does not exist for these numbers."""
    check(name, ranks, micro_batches, virtual)
    order = KINDS[name].order
    if isinstance(order, Rounds):
        return tuple(_rounds(order, rank, ranks, micro_batches, virtual) for rank in range(ranks))
    placement = stage_rank(name, ranks, virtual)
    return tuple(_spell(order, rank, ranks, micro_batches, stages_of(placement, rank)) for rank in range(ranks))


def stage_rank(name: str, ranks: int, virtual: int = 1) -> tuple[int, ...]:
    """The rank that holds each stage: round and round, or down and up again for those of V_PLACED."""
    down = tuple(range(ranks))
    return down + down[::-1] if name in V_PLACED else down * virtual


def stages_of(placement: Sequence[int], rank: int) -> tuple[int, ...]:
    """The stages that a rank holds, in ascending order; placement as from `stage_rank`."""
    return tuple(stage for stage, holder in enumerate(placement) if holder == rank)


@cache
def stages_of_ranks(name: str, ranks: int, virtual: int = 1) -> tuple[tuple[int, ...], ...]:
    """The stages of each pipeline rank, ascending; without a pipeline there is one."""
    placement = stage_rank(name, ranks, virtual) if ranks > 1 else (0,)
    return tuple(stages_of(placement, rank) for rank in range(ranks))


def refusal(name: str, ranks: int, micro_batches: int, virtual: int = 1) -> str | None:
    """Why there is no such schedule, in one sentence with what to change; None where there is."""
    if name not in NAMES:
        return f"layout.schedule={name!r} is unknown: take one of {', '.join(NAMES)}"
    if min(ranks, micro_batches, virtual) < 1:
        numbers = f"{ranks} ranks, {micro_batches} micro-batches and {virtual} stages a rank"
        return f"a pipeline of {numbers} cannot be: all must be 1 or more"
    kind = KINDS[name]
    if not kind.deeper and virtual != kind.stages:
        usual, instead = ("one stage", " or schedule=interleaved") if kind.stages == 1 else ("two stages", "")
        return f"layout.schedule={name} has {usual} a rank, not vp={virtual}: take vp={kind.stages}{instead}"
    if micro_batches < kind.fewest * ranks:
        fewest = f"{kind.fewest} x pp = {kind.fewest * ranks}"
        return (
            f"layout.schedule={name} wants {fewest} micro-batches or more, not {micro_batches}: "
            f"make them smaller (layout.micro_batch), or take schedule=zb-v"
        )
    rounds = max(1, micro_batches // ranks)
    if virtual > 1 and isinstance(kind.order, Rounds) and micro_batches % rounds:
        lower, upper = micro_batches - micro_batches % ranks, micro_batches - micro_batches % ranks + ranks
        return (
            f"layout.schedule={name} with vp={virtual} runs {micro_batches} micro-batches in {rounds} rounds (one for "
            f"each pp={ranks}), which must be equal: take {lower} or {upper} micro-batches"
        )
    return None


def check(name: str, ranks: int, micro_batches: int, virtual: int = 1) -> None:
    """Raise IllegalLayout where `refusal` has a sentence."""
    sentence = refusal(name, ranks, micro_batches, virtual)
    if sentence is not None:
        raise IllegalLayout(sentence)


def _rounds(order: Rounds, rank: int, p: int, m: int, v: int) -> tuple[Action, ...]:
    width = m // max(1, m // p)
    turns = [(n // width % v, n // (width * v) * width + n % width) for n in range(v * m)]
    forward = [Action("F", chunk * p + rank, i) for chunk, i in turns]
    backward = [((v - 1 - chunk) * p + rank, i) for chunk, i in turns]
    ahead = min((v - 1) * width + order.hop * (p - 1 - rank), v * m)
    found = forward[:ahead]
    for n, place in enumerate(backward):
        found += forward[ahead + n : ahead + n + 1]
        found.append(Action("B" if order.late else "BW", *place))
        if order.late and n >= rank:
            found.append(Action("W", *backward[n - rank]))
    if order.late:
        found += [Action("W", *place) for place in backward[max(0, v * m - rank) :]]
    return tuple(found)


def _spell(order: Words, rank: int, p: int, m: int, stages: tuple[int, ...]) -> tuple[Action, ...]:
    whole = max(m, order.fewest.of(p, m, rank))
    seen: Counter[tuple[str, int]] = Counter()
    left: deque[tuple[int, int]] = deque()
    found, turn = [], 1
    said = ((word, times.of(p, whole, rank)) for word, times in order.said)
    for letter in (letter for word, times in said for _ in range(times) for letter in word.split()):
        if letter == "W":
            found.append(Action("W", *left.popleft()))
            continue
        kind, digit = letter[:-1], letter[-1]
        if digit == "~":
            digit, turn = str(turn), 1 - turn
        stage = stages[int(digit)]
        counted = "B" if kind == "BW" else kind
        place = stage, seen[counted, stage]
        seen[counted, stage] += 1
        if kind == "B":
            left.append(place)
        found.append(Action(kind, *place))  # type: ignore[arg-type]  # letters of the words that schedules are written in
    return tuple(action for action in found if action.micro_batch < m)


def forward_only(placement: Sequence[int], micro_batches: int) -> Actions:
    """The forward passes of each rank for an evaluation, for any number of micro-batches.

    Greedy in unit time: a rank takes, of what has arrived, the deepest stage, then the first micro-batch.
    """
    stages = len(placement)
    waiting: list[set[tuple[int, int]]] = [set() for _ in range(max(placement) + 1)]
    waiting[placement[0]] = {(0, i) for i in range(micro_batches)}
    found: list[list[Action]] = [[] for _ in waiting]
    while any(waiting):
        taken = [min(ready, key=lambda place: (-place[0], place[1])) if ready else None for ready in waiting]
        for rank, place in enumerate(taken):
            if place is None:
                continue
            waiting[rank].remove(place)
            found[rank].append(Action("F", *place))
            if place[0] + 1 < stages:
                waiting[placement[place[0] + 1]].add((place[0] + 1, place[1]))
    return tuple(map(tuple, found))


def last_of(actions: Iterable[Action], kinds: Sequence[Kind]) -> dict[int, Action]:
    """The last action of these kinds of each stage: of ("B", "BW") the last backward pass, of ("W", "BW") the action
    after which the stage's gradients are whole."""
    return {action.stage: action for action in actions if action.kind in kinds}


def stage_layers(layers: int, stages: int) -> list[range]:
    """The layers of each stage, as even as can be when embedding and head count as one layer each.

    Both weigh on the stage that has them. What does not divide goes to the ends first, then to the others from the
    front: a number of layers that divides is simply divided, since no other split has a lighter heaviest stage.
    """
    if not 1 <= stages <= layers:
        raise IllegalLayout(
            f"layout.pp x vp = {stages} stages need a layer each, and the model has {layers}: take pp x vp <= {layers}"
        )
    share, left = divmod(layers + 2, stages)
    order = sorted(range(stages), key=lambda stage: (stage not in (0, stages - 1), stage))
    sizes = [share] * stages
    for stage in order[:left]:
        sizes[stage] += 1
    sizes[0] -= 1
    sizes[-1] -= 1
    return ranges(sizes)


def ranges(sizes: Sequence[int]) -> list[range]:
    """Runs of these lengths, one after another from 0."""
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]

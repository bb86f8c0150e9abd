"""Pipeline schedules as data: for each pipeline rank the order of its forward and backward passes.

Letters: p ranks, m micro-batches, v stages of one rank. A pass is F (forward), B (gradient of the input), W (gradients
of the weights, which B left) or BW (both at once). The planner, the executor and the report read the same lists.
spec/layout/schedule_kinds.py declares the schedules.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Literal

from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout.schedule_kinds import KINDS, NAMES, V_PLACED, Rounds, Words

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
    """Spell out passes: `step 2, F 0 1` becomes `step 2, forward of stage 0, micro-batch 1`."""
    return re.sub(
        r"\b(F|BW|B|W) (\d+) (\d+)\b",
        lambda match: f"{PASSES[match[1]]} of stage {match[2]}, micro-batch {match[3]}",
        phase,
    )


Actions = tuple[tuple[Action, ...], ...]
"""Actions of each pipeline rank, in order."""


@cache
def schedule(name: str, ranks: int, micro_batches: int, virtual: int = 1) -> Actions:
    """Return the actions of each rank. Raises IllegalLayout when the schedule does not exist for these numbers."""
    check(name, ranks, micro_batches, virtual)
    order = KINDS[name].order
    if isinstance(order, Rounds):
        return tuple(_actions_of_rounds(order, rank, ranks, micro_batches, virtual) for rank in range(ranks))
    placement = stage_rank(name, ranks, virtual)
    return tuple(
        _actions_of_words(order, rank, ranks, micro_batches, stages_of(placement, rank)) for rank in range(ranks)
    )


def stage_rank(name: str, ranks: int, virtual: int = 1) -> tuple[int, ...]:
    """Return the rank of each stage: round and round, or down and up again for those of V_PLACED."""
    down = tuple(range(ranks))
    return down + down[::-1] if name in V_PLACED else down * virtual


def stages_of(placement: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the stages of a rank in ascending order. The placement is that of `stage_rank`."""
    return tuple(stage for stage, holder in enumerate(placement) if holder == rank)


@cache
def stages_of_ranks(name: str, ranks: int, virtual: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each pipeline rank in ascending order. Without a pipeline there is one."""
    placement = stage_rank(name, ranks, virtual) if ranks > 1 else (0,)
    return tuple(stages_of(placement, rank) for rank in range(ranks))


def refusal(name: str, ranks: int, micro_batches: int, virtual: int = 1) -> str | None:
    """Return why such a schedule does not exist, with the change to make. None = it exists."""
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
    """Raise IllegalLayout if `refusal` has a reason."""
    sentence = refusal(name, ranks, micro_batches, virtual)
    if sentence is not None:
        raise IllegalLayout(sentence)


def _actions_of_rounds(order: Rounds, rank: int, p: int, m: int, v: int) -> tuple[Action, ...]:
    width = m // max(1, m // p)
    turns = [(n // width % v, n // (width * v) * width + n % width) for n in range(v * m)]
    forward = [Action("F", chunk * p + rank, i) for chunk, i in turns]
    backward = [((v - 1 - chunk) * p + rank, i) for chunk, i in turns]
    # Forward passes before the first gradient returns, then one forward and one backward pass in turn.
    ahead = min((v - 1) * width + order.hop * (p - 1 - rank), v * m)
    actions = forward[:ahead]
    for n, backward_pass in enumerate(backward):
        actions += forward[ahead + n : ahead + n + 1]
        actions.append(Action("B" if order.late else "BW", *backward_pass))
        if order.late and n >= rank:
            actions.append(Action("W", *backward[n - rank]))
    if order.late:
        actions += [Action("W", *backward_pass) for backward_pass in backward[max(0, v * m - rank) :]]
    return tuple(actions)


def _actions_of_words(order: Words, rank: int, p: int, m: int, stages: tuple[int, ...]) -> tuple[Action, ...]:
    micro_batches = max(m, order.fewest.times(p, m, rank))
    seen: Counter[tuple[str, int]] = Counter()
    waiting: deque[tuple[int, int]] = deque()
    actions, turn = [], 1
    repeated = ((word, repeats.times(p, micro_batches, rank)) for word, repeats in order.phrases)
    for token in (token for word, times in repeated for _ in range(times) for token in word.split()):
        if token == "W":
            actions.append(Action("W", *waiting.popleft()))
            continue
        kind, digit = token[:-1], token[-1]
        if digit == "~":
            digit, turn = str(turn), 1 - turn
        stage = stages[int(digit)]
        counter = "B" if kind == "BW" else kind
        next_pass = stage, seen[counter, stage]
        seen[counter, stage] += 1
        if kind == "B":
            waiting.append(next_pass)
        actions.append(Action(kind, *next_pass))  # type: ignore[arg-type]  # letters of the words that schedules are written in
    return tuple(action for action in actions if action.micro_batch < m)


def forward_only(placement: Sequence[int], micro_batches: int) -> Actions:
    """Return the forward passes of each rank for an evaluation, for any number of micro-batches.

    Greedy in unit time: of the inputs that have arrived, a rank takes the deepest stage, then the first micro-batch.
    """
    stages = len(placement)
    waiting: list[set[tuple[int, int]]] = [set() for _ in range(max(placement) + 1)]
    waiting[placement[0]] = {(0, i) for i in range(micro_batches)}
    actions: list[list[Action]] = [[] for _ in waiting]
    while any(waiting):
        taken = [
            min(ready, key=lambda waiting_pass: (-waiting_pass[0], waiting_pass[1])) if ready else None
            for ready in waiting
        ]
        for rank, next_pass in enumerate(taken):
            if next_pass is None:
                continue
            waiting[rank].remove(next_pass)
            actions[rank].append(Action("F", *next_pass))
            if next_pass[0] + 1 < stages:
                waiting[placement[next_pass[0] + 1]].add((next_pass[0] + 1, next_pass[1]))
    return tuple(map(tuple, actions))


def last_of(actions: Iterable[Action], kinds: Sequence[Kind]) -> dict[int, Action]:
    """Return stage -> its last action of these kinds. After the last of ("W", "BW"), its gradients are complete."""
    return {action.stage: action for action in actions if action.kind in kinds}


def stage_layers(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage, as even as possible with embedding and head counted as a layer each.

    A remainder goes to the ends first, then to the others from the front. A number of layers that divides is simply
    divided, since no other split has a lighter heaviest stage.
    """
    if not 1 <= stages <= layers:
        raise IllegalLayout(
            f"layout.pp x vp = {stages} stages need a layer each, and the model has {layers}: take pp x vp <= {layers}"
        )
    share, remainder = divmod(layers + 2, stages)
    order = sorted(range(stages), key=lambda stage: (stage not in (0, stages - 1), stage))
    sizes = [share] * stages
    for stage in order[:remainder]:
        sizes[stage] += 1
    sizes[0] -= 1
    sizes[-1] -= 1
    return ranges(sizes)


def ranges(sizes: Sequence[int]) -> list[range]:
    """Return consecutive ranges of these lengths, from 0."""
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]

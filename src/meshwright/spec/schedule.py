"""Pipeline schedules as data: for each pipeline rank the order of its forward and backward passes.

Letters: p ranks, m micro-batches, v stages of one rank. A pass is F (forward), B (gradient of the input), W (gradients
of the weights, which B left) or BW (both at once). The planner, the executor and the report read the same lists.

    afab         all forward, all backward (GPipe, Huang et al. 2019, arXiv:1811.06965)
    1f1b         one forward, one backward (PipeDream-Flush, Narayanan et al. 2020, arXiv:2006.09503)
    interleaved  1f1b with v stages a rank (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)
    zb-h1        weight gradients in the bubble, in the memory of 1f1b (Qi et al. 2023, arXiv:2401.10241, section 2.2)
    zb-v         two stages a rank, placed like a V (Qi et al. 2024, arXiv:2405.15362)
    dualpipe-v   DualPipe (DeepSeek-V3, arXiv:2412.19437, section 3.2.1) cut in half: a V as well
"""

import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Literal

from meshwright.spec.errors import IllegalLayout

Kind = Literal["F", "B", "W", "BW"]

V_PLACED = ("zb-v", "dualpipe-v")
"""Schedules whose rank r holds the stages r and 2p-1-r."""
SINGLE = ("afab", "1f1b")
"""Schedules with one stage a rank."""
SPLIT = ("zb-h1", "zb-v", "dualpipe-v")
"""Schedules that take weight gradients apart from those of the input."""
NAMES = ("afab", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")


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
    p, m = ranks, micro_batches
    if name == "afab":
        return tuple(_afab(rank, m) for rank in range(p))
    if name in V_PLACED:
        make = _zb_v if name == "zb-v" else _dualpipe_v
        return tuple(make(rank, p, m) for rank in range(p))
    hop = 2 if name == "interleaved" else 1
    return tuple(_one_forward_one_backward(rank, p, m, virtual, hop, name == "zb-h1") for rank in range(p))


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
    if name in SINGLE and virtual != 1:
        return f"layout.schedule={name} has one stage a rank, not vp={virtual}: take vp=1 or schedule=interleaved"
    if name in V_PLACED and virtual != 2:
        return f"layout.schedule={name} has two stages a rank, not vp={virtual}: take vp=2"
    if name == "dualpipe-v" and micro_batches < 2 * ranks:
        return (
            f"layout.schedule=dualpipe-v wants 2 x pp = {2 * ranks} micro-batches or more, not {micro_batches}: "
            f"make them smaller (layout.micro_batch), or take schedule=zb-v"
        )
    rounds = max(1, micro_batches // ranks)
    if virtual > 1 and name not in V_PLACED and micro_batches % rounds:
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


def _afab(rank: int, m: int) -> tuple[Action, ...]:
    return tuple(Action(kind, rank, i) for kind in ("F", "BW") for i in range(m))


def _one_forward_one_backward(rank: int, p: int, m: int, v: int, hop: int, split: bool) -> tuple[Action, ...]:
    """Forward passes until the first gradient is back, then one of each, then what is left.

    Micro-batches go in rounds of about p: a round passes all stages of the rank before the next begins. `hop` forward
    passes more are made for each rank that is nearer to the front. Split: W follows B after `rank` others, so that
    every rank holds p micro-batches at most and has weight gradients left for its bubble.
    """
    width = m // max(1, m // p)
    order = [(n // width % v, n // (width * v) * width + n % width) for n in range(v * m)]
    forward = [Action("F", chunk * p + rank, i) for chunk, i in order]
    backward = [((v - 1 - chunk) * p + rank, i) for chunk, i in order]
    ahead = min((v - 1) * width + hop * (p - 1 - rank), v * m)
    found = forward[:ahead]
    for n, place in enumerate(backward):
        found += forward[ahead + n : ahead + n + 1]
        found.append(Action("B" if split else "BW", *place))
        if split and n >= rank:
            found.append(Action("W", *backward[n - rank]))
    if split:
        found += [Action("W", *place) for place in backward[max(0, v * m - rank) :]]
    return tuple(found)


def _zb_v(rank: int, p: int, m: int) -> tuple[Action, ...]:
    """For fewer than 2p-1 micro-batches the schedule of 2p-1 without those that do not exist."""
    n = max(2 * p - 1, m)
    return _spell(
        (rank, 2 * p - 1 - rank),
        m,
        ("F0", 2 * (p - rank) - 1),
        ("F1 F0", rank),
        ("F1 B1 W1", p - rank),
        ("F0 B0 W0 F1 B1 W1", n - 2 * p + rank + 1),
        ("B0 W0 F1 B1 W1", p - rank - 1),
        ("B0 B1", rank),
        ("B0 W0", p - rank),
        ("W1", rank),
        ("W0", rank),
    )


def _dualpipe_v(rank: int, p: int, m: int) -> tuple[Action, ...]:
    """The eight steps of github.com/deepseek-ai/DualPipe; where it overlaps F with BW, they stand one after the other.

    Of the last 2 (rank + 1) backward passes before the tail, the second half is split.
    """
    tail = [f"BW{n % 2 ^ 1}" if n <= rank else f"B{n % 2 ^ 1}" for n in range(2 * (rank + 1))]
    return _spell(
        (rank, 2 * p - 1 - rank),
        m,
        ("F0", 2 * (p - rank - 1)),
        ("F0 F1", rank + 1),
        ("B1 W F1", p - rank - 1),
        ("F0 BW1 F1 BW0", m - 2 * p + rank + 1),
        ("BW1 F1 BW0", p - rank - 1),
        (" ".join(tail), 1),
        ("W B0", p - rank - 1),
        ("W", rank + 1),
    )


def _spell(stages: tuple[int, int], m: int, *words: tuple[str, int]) -> tuple[Action, ...]:
    """Words, each so many times, as actions: a letter's digit is the place in `stages`, its micro-batch the next one.

    W without a digit is the oldest that is left. Micro-batches from m on are left out.
    """
    seen: Counter[tuple[str, int]] = Counter()
    left: deque[tuple[int, int]] = deque()
    found = []
    for letter in (letter for word, times in words for _ in range(times) for letter in word.split()):
        if letter == "W":
            found.append(Action("W", *left.popleft()))
            continue
        kind, stage = letter[:-1], stages[int(letter[-1])]
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
            f"layout.pp x vp = {stages} stages want a layer each, and the model has {layers}: take pp x vp <= {layers}"
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

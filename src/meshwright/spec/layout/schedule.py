"""Pipeline schedules as data: for each pipeline rank the order of its forward and backward passes.

Letters: p ranks, m micro-batches, v stages of one rank. A pass is F (forward), B (gradient of the input), W (gradients
of the weights, which B left) or BW (both at once). `KINDS` declares each schedule once, and `schedule` expands it into
lists of actions. All else reads these: engine, planner, search, report, `verify`, `doctor` and the explorer's page.
"""

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

from meshwright.spec.errors import IllegalLayout

ScheduleName = Literal["afab", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
"""Words of layout.schedule: the keys of KINDS."""


class Repeats(NamedTuple):
    """Number of repeats: base + p * ranks + m * micro-batches + r * rank."""

    base: int = 0
    p: int = 0
    m: int = 0
    r: int = 0

    def times(self, ranks: int, micro_batches: int, rank: int) -> int:
        """Return the number. Below 1 the word is omitted."""
        return self.base + self.p * ranks + self.m * micro_batches + self.r * rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Sequence of words with repeats, in which a word is a list of passes: F0, B1, W0 or BW1.

    The digit is the index among the rank's stages. W alone completes the oldest B whose weight gradients are still
    missing. `~` in place of a digit is 1, then 0, then 1. Each pass takes the next micro-batch of its stage.
    """

    phrases: tuple[tuple[str, Repeats], ...]
    fewest: Repeats = field(default_factory=Repeats)
    """Fewest micro-batches of the order. For fewer, passes of the surplus ones are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Forward passes until the first gradient is back, then one of each, then the remaining backward passes.

    Micro-batches go in rounds of about p. A round passes all stages of the rank before the next begins.
    """

    hop: int = 1
    """Additional early forward passes per rank towards the front."""
    late: bool = False
    """W follows B after r others. Every rank then holds at most p micro-batches and has weight gradients left for its
    bubble. Otherwise backward passes are whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """Declaration of a schedule."""

    order: Words | Rounds
    stages: int = 1
    """Stages of a rank, unless layout.vp gives another number."""
    deeper: bool = False
    """layout.vp may give another number."""
    in_v: bool = False
    """Rank r holds the stages r and 2p-1-r. Otherwise stages go round and round."""
    splits: Literal["none", "some", "all"] = "none"
    """Backward passes that separate gradients of weights from those of the input."""
    holds_all: bool = False
    """Every micro-batch is in flight at once, without repeating rounds."""
    fewest: int = 0
    """Fewest micro-batches per pipeline rank."""
    title: str
    """Name in its paper."""
    meaning: str
    """Description in a sentence or two."""
    formula: str
    """Bubble, with F, B and W for the seconds of passes."""
    source: str


KINDS: Mapping[str, ScheduleKind] = {
    "afab": ScheduleKind(
        order=Words(phrases=(("F0", Repeats(m=1)), ("BW0", Repeats(m=1)))),
        holds_all=True,
        title="All forward, all backward (GPipe)",
        meaning="All micro-batches go forward before the first comes back: every one is in flight.",
        formula="bubble (p - 1) / m; m in flight",
        source="Huang et al. 2019, arXiv:1811.06965",
    ),
    "1f1b": ScheduleKind(
        order=Rounds(),
        title="One forward, one backward",
        meaning="The bubble of afab, but a rank keeps at most p - rank micro-batches.",
        formula="bubble (p - 1) / m; p - rank in flight",
        source="Narayanan et al. 2020, arXiv:2006.09503",
    ),
    "interleaved": ScheduleKind(
        order=Rounds(hop=2),
        stages=2,
        deeper=True,
        title="Interleaved 1F1B",
        meaning="Each rank holds v stages that are not neighbours: the pipeline fills v times faster and sends v times "
        "as often.",
        formula="bubble (p - 1) / (v m)",
        source="Narayanan et al. 2021, arXiv:2104.04473, section 2.2",
    ),
    "zb-h1": ScheduleKind(
        order=Rounds(late=True),
        deeper=True,
        splits="all",
        title="Zero bubble H1",
        meaning="Weight gradients wait, and fill the bubble; the memory of 1f1b.",
        formula="bubble (p - 1)(F + B - W) / (m (F + B + W))",
        source="Qi et al. 2023, arXiv:2401.10241, section 2.2",
    ),
    "zb-v": ScheduleKind(
        order=Words(
            phrases=(
                ("F0", Repeats(-1, p=2, r=-2)),
                ("F1 F0", Repeats(r=1)),
                ("F1 B1 W1", Repeats(p=1, r=-1)),
                ("F0 B0 W0 F1 B1 W1", Repeats(1, p=-2, m=1, r=1)),
                ("B0 W0 F1 B1 W1", Repeats(-1, p=1, r=-1)),
                ("B0 B1", Repeats(r=1)),
                ("B0 W0", Repeats(p=1, r=-1)),
                ("W1", Repeats(r=1)),
                ("W0", Repeats(r=1)),
            ),
            fewest=Repeats(-1, p=2),
        ),
        stages=2,
        in_v=True,
        splits="all",
        title="Zero bubble V",
        meaning="Two stages a rank, placed like a V: the first rank also has the last, so gradients return at once.",
        formula="bubble (p - 1) / (6 m) from 2p - 1 micro-batches on, where F, B and W take equally long",
        source="Qi et al. 2023, arXiv:2401.10241, section 6",
    ),
    "dualpipe-v": ScheduleKind(
        # The eight steps of github.com/deepseek-ai/DualPipe; where it overlaps F with BW, they follow one another. Of
        # the last 2 (r + 1) backward passes before the tail the second half is split.
        order=Words(
            phrases=(
                ("F0", Repeats(-2, p=2, r=-2)),
                ("F0 F1", Repeats(1, r=1)),
                ("B1 W F1", Repeats(-1, p=1, r=-1)),
                ("F0 BW1 F1 BW0", Repeats(1, p=-2, m=1, r=1)),
                ("BW1 F1 BW0", Repeats(-1, p=1, r=-1)),
                ("BW~", Repeats(1, r=1)),
                ("B~", Repeats(1, r=1)),
                ("W B0", Repeats(-1, p=1, r=-1)),
                ("W", Repeats(1, r=1)),
            )
        ),
        stages=2,
        in_v=True,
        splits="some",
        fewest=2,
        title="DualPipe, cut in half",
        meaning="A V as well; forward of one micro-batch and backward of another are meant to overlap. Played here one "
        "after the other.",
        formula="wants 2p micro-batches",
        source="DeepSeek-V3, arXiv:2412.19437, section 3.2.1",
    ),
}

NAMES = tuple(KINDS)
assert get_args(ScheduleName) == NAMES
V_PLACED = tuple(name for name, kind in KINDS.items() if kind.in_v)
"""Schedules whose rank r holds the stages r and 2p-1-r."""
SPLIT = tuple(name for name, kind in KINDS.items() if kind.splits != "none")
"""Schedules that separate weight gradients from those of the input, in some or all passes."""
SPLIT_ALWAYS = tuple(name for name, kind in KINDS.items() if kind.splits == "all")


def stage_numbers(name: str, ranks: int, layers: int) -> tuple[int, ...]:
    """Return the possible numbers of stages per rank for a model of `layers` layers, the usual one first."""
    kind = KINDS[name]
    return (kind.stages, *range(kind.stages + 1, layers // ranks + 1)) if kind.deeper else (kind.stages,)


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
    # without a pipeline a V has a single stage, too
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
        usual, instead = ("one stage", " or layout.schedule=interleaved") if kind.stages == 1 else ("two stages", "")
        return (
            f"layout.schedule={name} has {usual} a rank, not layout.vp={virtual}: take layout.vp={kind.stages}{instead}"
        )
    if micro_batches < kind.fewest * ranks:
        fewest = f"{kind.fewest} x pp = {kind.fewest * ranks}"
        return (
            f"layout.schedule={name} wants {fewest} micro-batches or more, not {micro_batches}: "
            f"make them smaller (layout.micro_batch), or take layout.schedule=zb-v"
        )
    rounds = max(1, micro_batches // ranks)
    if virtual > 1 and isinstance(kind.order, Rounds) and micro_batches % rounds:
        lower, upper = micro_batches - micro_batches % ranks, micro_batches - micro_batches % ranks + ranks
        return (
            f"layout.schedule={name} with layout.vp={virtual} runs {micro_batches} micro-batches in {rounds} rounds "
            f"(one for each layout.pp={ranks}), which must be equal: take {lower} or {upper} micro-batches"
        )
    return None


def check(name: str, ranks: int, micro_batches: int, virtual: int = 1) -> None:
    """Raise IllegalLayout if `refusal` has a reason."""
    sentence = refusal(name, ranks, micro_batches, virtual)
    if sentence is not None:
        raise IllegalLayout(sentence)


def _actions_of_rounds(order: Rounds, rank: int, p: int, m: int, v: int) -> tuple[Action, ...]:
    # A round has p micro-batches or more, if there are as many, and passes all chunks before the next begins.
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
    # An order for too few micro-batches is one for the fewest, without the passes of those that do not exist.
    micro_batches = max(m, order.fewest.times(p, m, rank))
    seen: Counter[tuple[str, int]] = Counter()
    waiting: deque[tuple[int, int]] = deque()
    actions, turn = [], 1
    repeated = ((word, repeats.times(p, micro_batches, rank)) for word, repeats in order.phrases)
    for token in (token for word, times in repeated for _ in range(times) for token in word.split()):
        if token == "W":  # completes the oldest B, whichever its stage
            actions.append(Action("W", *waiting.popleft()))
            continue
        kind, digit = token[:-1], token[-1]
        if digit == "~":
            digit, turn = str(turn), 1 - turn
        stage = stages[int(digit)]
        # B and BW take their micro-batches from one count: a stage has one backward pass for each.
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
    # All ranks choose before any pass ends, so an output is read one time unit later at the earliest.
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
    # The places of the embedding and the head, which were counted as layers.
    sizes[0] -= 1
    sizes[-1] -= 1
    return ranges(sizes)


def ranges(sizes: Sequence[int]) -> list[range]:
    """Return consecutive ranges of these lengths, from 0."""
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]

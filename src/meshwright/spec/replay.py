"""Plays a pipeline schedule without a model: can it run, how long does it take, what is alive, what is sent when."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

from meshwright.spec.errors import IllegalLayout
from meshwright.spec.schedule import Action, Actions


class Timed(Protocol):
    """What has the seconds of one stage and one micro-batch, as Times."""

    @property
    def forward_s(self) -> float: ...
    @property
    def input_s(self) -> float: ...
    @property
    def weight_s(self) -> float: ...


class Times(NamedTuple):
    """Seconds of one stage and one micro-batch; BW takes input_s + weight_s."""

    forward_s: float = 1.0
    input_s: float = 1.0
    """Gradient of the input: B."""
    weight_s: float = 1.0
    """Gradients of the weights: W."""


EVEN = Times()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionSpan:
    """When an action runs."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a schedule does, for each rank."""

    spans: tuple[tuple[ActionSpan, ...], ...]
    in_flight: tuple[int, ...]
    """Most micro-batches (of one stage each) whose forward pass began and whose W or BW did not end."""

    @property
    def total_s(self) -> float:
        """From the first start to the last end."""
        return max((span.end_s for spans in self.spans for span in spans), default=0.0)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds in which each rank computes."""
        return tuple(sum(span.end_s - span.start_s for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """(total - ideal) / ideal; ideal = the busiest rank without a gap. AFAB and 1F1B: (p - 1) / m."""
        ideal = max(self.busy_s)
        return (self.total_s - ideal) / ideal


Place = tuple[Literal["F", "B"], int, int]
"""(pass, stage, micro-batch): a forward pass, or one that makes the gradient of a stage's input."""


def needs(action: Action, stages: int) -> tuple[Place, ...]:
    """The results that an action reads: its own stage's, and its neighbour's."""
    stage, i = action.stage, action.micro_batch
    if action.kind == "F":
        return (("F", stage - 1, i),) if stage else ()
    if action.kind == "W":
        return (("B", stage, i),)
    return (("F", stage, i), ("B", stage + 1, i)) if stage + 1 < stages else (("F", stage, i),)


class Turn(NamedTuple):
    """An action of any rank, in one order of all ranks' actions in which each finds what it reads."""

    what: int
    """4 x stage + KINDS[kind]."""
    rank: int
    waits_for: int
    """Place in the order of the action of another rank whose result it reads; -1: it reads of its own rank only."""


KINDS = {"F": 0, "B": 1, "W": 2, "BW": 3}


def in_order(actions: Actions) -> tuple[Turn, ...]:
    """The lists made ready to be played many times; IllegalLayout where ranks would deadlock."""
    placement = placement_of(actions)
    made: dict[Place, int] = {}
    found: list[Turn] = []
    nexts = [0] * len(actions)
    before = -1
    while before < len(found):
        before = len(found)
        for rank, own in enumerate(actions):
            for action in own[nexts[rank] :]:
                wanted = needs(action, len(placement))
                if not all(map(made.__contains__, wanted)):
                    break
                of_others = [made[place] for place in wanted if placement[place[1]] != rank]
                if action.kind != "W":
                    made["F" if action.kind == "F" else "B", action.stage, action.micro_batch] = len(found)
                found.append(Turn(4 * action.stage + KINDS[action.kind], rank, max(of_others, default=-1)))
                nexts[rank] += 1
    stuck = [f"rank {r} at {own[n]}" for r, (own, n) in enumerate(zip(actions, nexts, strict=True)) if n < len(own)]
    if stuck:
        raise IllegalLayout(f"the pipeline's lists wait for each other: {'; '.join(stuck)}")
    return tuple(found)


def play(order: Sequence[Turn], stages: Sequence[Timed], send_s: float = 0.0) -> tuple[list[float], list[float]]:
    """(start, end) in seconds of every action of `order`; `send_s`: from rank to rank."""
    lengths = [s for t in stages for s in (t.forward_s, t.input_s, t.weight_s, t.input_s + t.weight_s)]
    free = [0.0] * len(stages)
    starts: list[float] = []
    ends: list[float] = []
    for what, rank, waits_for in order:
        start = free[rank]
        if waits_for >= 0 and ends[waits_for] + send_s > start:
            start = ends[waits_for] + send_s
        free[rank] = end = start + lengths[what]
        starts.append(start)
        ends.append(end)
    return starts, ends


def replay(actions: Actions, times: Times | Sequence[Timed] = EVEN, send_s: float = 0.0) -> Replay:
    """Play the lists; `times` of all stages or of each. IllegalLayout if an action is missing, done twice, on two
    ranks, or ranks would deadlock."""
    stages = len(placement_of(actions))
    _check_once(actions, stages)
    each = [times] * stages if isinstance(times, Times) else times
    spans: list[list[ActionSpan]] = [[] for _ in actions]
    for rank, span in _spans(actions, each, send_s):
        spans[rank].append(span)
    return Replay(spans=tuple(map(tuple, spans)), in_flight=tuple(map(_peak, actions)))


def _spans(actions: Actions, stages: Sequence[Timed], send_s: float = 0.0) -> Iterator[tuple[int, ActionSpan]]:
    """(rank, span) of all actions."""
    order, nexts = in_order(actions), [iter(own) for own in actions]
    for turn, start, end in zip(order, *play(order, stages, send_s), strict=True):
        yield turn.rank, ActionSpan(action=next(nexts[turn.rank]), start_s=start, end_s=end)


def placement_of(actions: Actions) -> tuple[int, ...]:
    """The rank of each stage, as the lists say."""
    found = {action.stage: rank for rank, own in enumerate(actions) for action in own}
    missing = set(range(max(found, default=0))) - set(found)
    if missing or not found:
        raise IllegalLayout(f"the pipeline's lists have no action of stage {min(missing, default=0)}")
    return tuple(found[stage] for stage in range(len(found)))


def _check_once(actions: Actions, stages: int) -> None:
    listed = [(action, rank) for rank, own in enumerate(actions) for action in own]
    done: dict[tuple[str, int, int], int] = {}
    holder: dict[int, int] = {}
    for action, rank in listed:
        if holder.setdefault(action.stage, rank) != rank:
            raise IllegalLayout(f"{action} is on pipeline rank {rank}, but its stage is on rank {holder[action.stage]}")
        for letter in action.kind:
            place = letter, action.stage, action.micro_batch
            if place in done:
                raise IllegalLayout(f"pipeline rank {rank} has {action}, which was done already")
            done[place] = rank
    micro_batches = 1 + max(action.micro_batch for action, _ in listed)
    for place in ((k, s, i) for k in "FBW" for s in range(stages) for i in range(micro_batches)):
        if place not in done:
            raise IllegalLayout(f"the pipeline's lists lack {place[0]} of stage {place[1]}, micro-batch {place[2]}")


def _peak(own: Sequence[Action]) -> int:
    alive = peak = 0
    for action in own:
        alive += action.kind == "F"
        peak = max(peak, alive)
        alive -= action.kind in ("W", "BW")
    return peak


@dataclass(frozen=True, slots=True, order=True)
class StageLink:
    """What one pipeline rank sends another: activations (F) or gradients (B)."""

    kind: Literal["F", "B"]
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor from rank to rank, for `stage`: the output of the stage before (F) or the next one's gradient (B)."""

    kind: Literal["F", "B"]
    stage: int
    micro_batch: int
    source: int
    target: int

    @property
    def link(self) -> StageLink:
        """The link that it travels on."""
        return StageLink(self.kind, self.source, self.target)


def links(placement: Sequence[int]) -> tuple[StageLink, ...]:
    """The links of a pipeline whose stages are on these ranks, each once.

    All ranks connect their own in this order. Every second pair of neighbours comes first, so that pairs connect at the
    same time instead of one after the other.
    """
    ranks = 1 + max(placement)
    found = {StageLink("F", a, b) for a, b in pairwise(placement) if a != b}
    found |= {StageLink("B", link.target, link.source) for link in found}

    def place(link: StageLink) -> tuple[int, int, StageLink]:
        first = link.source if (link.target - link.source) % ranks == 1 else link.target
        return first % 2, first, link

    return tuple(sorted(found, key=place))


@lru_cache(maxsize=4)
def numbered(actions: Actions) -> Mapping[Action, int]:
    """The place of every action of all ranks in one order: by the time at which it ends, in unit times.

    What an action reads was made by an action with a smaller number. Ranks that wait, before an action, only for what
    actions with smaller numbers make or read can never wait for each other in a circle, whatever the real times are.
    Forward passes alone are numbered as well.
    """
    ends = [(span.end_s, rank, span.action) for rank, span in _spans(actions, [EVEN] * len(placement_of(actions)))]
    return {action: number for number, (_, _, action) in enumerate(sorted(ends, key=lambda entry: entry[:2]))}


def transfers(actions: Actions) -> tuple[Transfer, ...]:
    """All that is sent between ranks, in the order in which it is made (`numbered`)."""
    placement = placement_of(actions)
    found: list[Transfer] = []
    for action in numbered(actions):
        stage, rank = action.stage + (1 if action.kind == "F" else -1), placement[action.stage]
        if action.kind == "W" or not 0 <= stage < len(placement) or placement[stage] == rank:
            continue
        kind: Literal["F", "B"] = "F" if action.kind == "F" else "B"
        found.append(Transfer(kind, stage, action.micro_batch, rank, placement[stage]))
    return tuple(found)

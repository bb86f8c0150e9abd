"""Replay of a pipeline schedule without a model: deadlocks, duration, micro-batches in flight and transfers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout.schedule import Action, Actions


class Timed(Protocol):
    """Seconds of one stage and one micro-batch. `Times` is one implementation."""

    @property
    def forward_s(self) -> float:
        """Time of the forward pass, in seconds."""

    @property
    def input_s(self) -> float:
        """Time of the backward pass of the inputs, in seconds."""

    @property
    def weight_s(self) -> float:
        """Time of the backward pass of the weights, in seconds."""


class Times(NamedTuple):
    """Seconds of one stage and one micro-batch. BW takes input_s + weight_s."""

    forward_s: float = 1.0
    input_s: float = 1.0
    """Gradient of the input: B."""
    weight_s: float = 1.0
    """Gradients of the weights: W."""


EVEN = Times()


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionSpan:
    """Start and end of an action."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Timing of a schedule on each rank."""

    spans: tuple[tuple[ActionSpan, ...], ...]
    in_flight: tuple[int, ...]
    """Most micro-batches (of one stage each) between the start of their forward pass and the end of their W or BW."""

    @property
    def total_s(self) -> float:
        """Seconds from the first start to the last end."""
        return max((span.end_s for spans in self.spans for span in spans), default=0.0)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds in which each rank computes."""
        return tuple(sum(span.end_s - span.start_s for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """(total - ideal) / ideal. ideal = the busiest rank without a gap. AFAB and 1F1B: (p - 1) / m."""
        ideal = max(self.busy_s)
        return (self.total_s - ideal) / ideal


PassKey = tuple[Literal["F", "B"], int, int]
"""(pass, stage, micro-batch): a forward pass, or one that computes the gradient of a stage's input."""


def needs(action: Action, stages: int) -> tuple[PassKey, ...]:
    """Return the results that an action reads: those of its own stage and of its neighbour."""
    stage, i = action.stage, action.micro_batch
    if action.kind == "F":
        return (("F", stage - 1, i),) if stage else ()
    if action.kind == "W":
        return (("B", stage, i),)
    return (("F", stage, i), ("B", stage + 1, i)) if stage + 1 < stages else (("F", stage, i),)


class Turn(NamedTuple):
    """An action of any rank, in a common order in which each action follows those whose results it reads."""

    what: int
    """4 x stage + KINDS[kind]."""
    rank: int
    waits_for: int
    """Index in the order of the action of another rank whose result it reads. -1 = it reads from its own rank only."""


KINDS = {"F": 0, "B": 1, "W": 2, "BW": 3}


def order_turns(actions: Actions) -> tuple[Turn, ...]:
    """Return the actions in an order that can be replayed often. Raises IllegalLayout if ranks would deadlock."""
    placement = placement_of(actions)
    positions: dict[PassKey, int] = {}
    turns: list[Turn] = []
    next_index = [0] * len(actions)
    previous = -1
    # Every pass runs each rank until it waits. A pass without progress means that all wait for each other.
    while previous < len(turns):
        previous = len(turns)
        for rank, rank_actions in enumerate(actions):
            for action in rank_actions[next_index[rank] :]:
                wanted = needs(action, len(placement))
                if not all(map(positions.__contains__, wanted)):
                    break
                # What the rank made itself comes before on its list: only another rank's result can delay it.
                foreign = [positions[needed] for needed in wanted if placement[needed[1]] != rank]
                if action.kind != "W":
                    positions["F" if action.kind == "F" else "B", action.stage, action.micro_batch] = len(turns)
                turns.append(Turn(4 * action.stage + KINDS[action.kind], rank, max(foreign, default=-1)))
                next_index[rank] += 1
    stuck = [
        f"rank {r} at {rank_actions[n]}"
        for r, (rank_actions, n) in enumerate(zip(actions, next_index, strict=True))
        if n < len(rank_actions)
    ]
    if stuck:
        raise IllegalLayout(f"the pipeline's lists wait for each other: {'; '.join(stuck)}")
    return tuple(turns)


def play(order: Sequence[Turn], stages: Sequence[Timed], send_s: float = 0.0) -> tuple[list[float], list[float]]:
    """Return (start, end) in seconds of every action of `order`. `send_s` is the time of a transfer between ranks."""
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
    """Replay the lists. Raises IllegalLayout for missing, repeated or misplaced actions, and for deadlocks."""
    stages = len(placement_of(actions))
    _check_complete(actions, stages)
    stage_times = [times] * stages if isinstance(times, Times) else times
    spans: list[list[ActionSpan]] = [[] for _ in actions]
    for rank, span in _spans(actions, stage_times, send_s):
        spans[rank].append(span)
    return Replay(spans=tuple(map(tuple, spans)), in_flight=tuple(map(_count_in_flight, actions)))


def _spans(actions: Actions, stages: Sequence[Timed], send_s: float = 0.0) -> Iterator[tuple[int, ActionSpan]]:
    """Yield (rank, span) of all actions."""
    order, nexts = order_turns(actions), [iter(rank_actions) for rank_actions in actions]
    for turn, start, end in zip(order, *play(order, stages, send_s), strict=True):
        yield turn.rank, ActionSpan(action=next(nexts[turn.rank]), start_s=start, end_s=end)


def placement_of(actions: Actions) -> tuple[int, ...]:
    """Return the rank of each stage, derived from the lists."""
    ranks = {action.stage: rank for rank, rank_actions in enumerate(actions) for action in rank_actions}
    missing = set(range(max(ranks, default=0))) - set(ranks)
    if missing or not ranks:
        raise IllegalLayout(f"the pipeline's lists have no action of stage {min(missing, default=0)}")
    return tuple(ranks[stage] for stage in range(len(ranks)))


def _check_complete(actions: Actions, stages: int) -> None:
    """Raise IllegalLayout unless every pass of every stage is listed once, all those of a stage on one rank."""
    listed = [(action, rank) for rank, rank_actions in enumerate(actions) for action in rank_actions]
    done: dict[tuple[str, int, int], int] = {}
    holder: dict[int, int] = {}
    for action, rank in listed:
        if holder.setdefault(action.stage, rank) != rank:
            raise IllegalLayout(f"{action} is on pipeline rank {rank}, but its stage is on rank {holder[action.stage]}")
        for letter in action.kind:  # BW is a B and a W
            key = letter, action.stage, action.micro_batch
            if key in done:
                raise IllegalLayout(f"pipeline rank {rank} has {action}, which was done already")
            done[key] = rank
    micro_batches = 1 + max(action.micro_batch for action, _ in listed)
    for key in ((k, s, i) for k in "FBW" for s in range(stages) for i in range(micro_batches)):
        if key not in done:
            raise IllegalLayout(f"the pipeline's lists lack {key[0]} of stage {key[1]}, micro-batch {key[2]}")


def _count_in_flight(rank_actions: Sequence[Action]) -> int:
    alive = peak = 0
    for action in rank_actions:
        alive += action.kind == "F"
        peak = max(peak, alive)
        alive -= action.kind in ("W", "BW")  # after B alone, W still needs the activations
    return peak


@dataclass(frozen=True, slots=True, order=True)
class StageLink:
    """Link between two pipeline ranks, for activations (F) or gradients (B)."""

    kind: Literal["F", "B"]
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor sent between ranks for `stage`: the output of the stage before (F), the gradient of the next (B)."""

    kind: Literal["F", "B"]
    stage: int
    micro_batch: int
    source: int
    target: int

    @property
    def link(self) -> StageLink:
        """Link that it travels on."""
        return StageLink(self.kind, self.source, self.target)


def links(placement: Sequence[int]) -> tuple[StageLink, ...]:
    """Return the links of a pipeline whose stages are on these ranks, each once.

    All ranks connect their own links in this order. Every second pair of neighbours comes first, so pairs connect at
    the same time instead of one after the other.
    """
    ranks = 1 + max(placement)
    stage_links = {StageLink("F", a, b) for a, b in pairwise(placement) if a != b}
    stage_links |= {StageLink("B", link.target, link.source) for link in stage_links}

    def order(link: StageLink) -> tuple[int, int, StageLink]:
        # The pair is named by its front rank, whichever way the tensor goes.
        first = link.source if (link.target - link.source) % ranks == 1 else link.target
        return first % 2, first, link

    return tuple(sorted(stage_links, key=order))


@lru_cache(maxsize=4)
def number_actions(actions: Actions) -> Mapping[Action, int]:
    """Return the number of every action of all ranks in one order: by end time, in unit times.

    An action only reads results of actions with smaller numbers. If ranks wait, before an action, only for actions with
    smaller numbers, they can never wait in a circle, whatever the real times are. Forward passes alone are numbered
    too.
    """
    ends = [(span.end_s, rank, span.action) for rank, span in _spans(actions, [EVEN] * len(placement_of(actions)))]
    return {action: number for number, (_, _, action) in enumerate(sorted(ends, key=lambda end: end[:2]))}


def transfers(actions: Actions) -> tuple[Transfer, ...]:
    """Return all transfers between ranks in the order in which the tensors are made (`number_actions`)."""
    placement = placement_of(actions)
    sent: list[Transfer] = []
    for action in number_actions(actions):
        stage, rank = action.stage + (1 if action.kind == "F" else -1), placement[action.stage]
        # W sends nothing, the ends of the pipeline have no neighbour, and a V hands over on its own rank.
        if action.kind == "W" or not 0 <= stage < len(placement) or placement[stage] == rank:
            continue
        kind: Literal["F", "B"] = "F" if action.kind == "F" else "B"
        sent.append(Transfer(kind, stage, action.micro_batch, rank, placement[stage]))
    return tuple(sent)

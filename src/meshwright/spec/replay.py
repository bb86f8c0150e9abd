"""Plays a pipeline schedule without a model: can it run, how long does it take, what is alive, what is sent when."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from meshwright.spec.errors import IllegalLayout
from meshwright.spec.schedule import Action, Actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one stage and one micro-batch; BW takes input_s + weight_s. send_s: from rank to rank."""

    forward_s: float = 1.0
    input_s: float = 1.0
    """Gradient of the input: B."""
    weight_s: float = 1.0
    """Gradients of the weights: W."""
    send_s: float = 0.0

    def of(self, action: Action) -> float:
        """Seconds of an action."""
        parts = {"F": self.forward_s, "B": self.input_s, "W": self.weight_s, "BW": self.input_s + self.weight_s}
        return parts[action.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When an action runs."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a schedule does, for each rank."""

    spans: tuple[tuple[Span, ...], ...]
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


def replay(actions: Actions, times: Times | Sequence[Times] | None = None) -> Replay:
    """Play the lists; `times` of all stages or of each. IllegalLayout if an action is missing, done twice, on two
    ranks, or waits for ever."""
    placement = placement_of(actions)
    _check_once(actions, len(placement))
    every = [times or Times()] * len(placement) if times is None or isinstance(times, Times) else list(times)
    return Replay(spans=_play(actions, placement, every), in_flight=tuple(map(_peak, actions)))


def _play(actions: Actions, placement: Sequence[int], times: Sequence[Times]) -> tuple[tuple[Span, ...], ...]:
    """Each rank goes on as long as what its next action reads has been made."""
    ends: dict[Place, float] = {}
    spans: list[list[Span]] = [[] for _ in actions]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(actions):
            for action in own[len(spans[rank]) :]:
                wanted = needs(action, len(placement))
                if any(place not in ends for place in wanted):
                    break
                took = times[action.stage]
                arrivals = [ends[q] + (took.send_s if placement[q[1]] != rank else 0.0) for q in wanted]
                start = max([spans[rank][-1].end_s if spans[rank] else 0.0, *arrivals])
                spans[rank].append(Span(action=action, start_s=start, end_s=start + took.of(action)))
                if action.kind != "W":
                    ends["F" if action.kind == "F" else "B", action.stage, action.micro_batch] = spans[rank][-1].end_s
                moved = True
    _check_finished(actions, spans)
    return tuple(map(tuple, spans))


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


def _check_finished(actions: Actions, spans: Sequence[Sequence[Span]]) -> None:
    stuck = [f"rank {r} at {own[len(spans[r])]}" for r, own in enumerate(actions) if len(spans[r]) < len(own)]
    if stuck:
        raise IllegalLayout(f"the pipeline's lists wait for each other: {'; '.join(stuck)}")


def _peak(own: Sequence[Action]) -> int:
    alive = peak = 0
    for action in own:
        alive += action.kind == "F"
        peak = max(peak, alive)
        alive -= action.kind in ("W", "BW")
    return peak


@dataclass(frozen=True, slots=True, order=True)
class Link:
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
    def link(self) -> Link:
        """The link that it travels on."""
        return Link(self.kind, self.source, self.target)


def links(placement: Sequence[int]) -> tuple[Link, ...]:
    """The links of a pipeline whose stages are on these ranks, each once.

    All ranks connect their own in this order. Every second pair of neighbours comes first, so that pairs connect at the
    same time instead of one after the other.
    """
    ranks = 1 + max(placement)
    found = {Link("F", a, b) for a, b in pairwise(placement) if a != b}
    found |= {Link("B", link.target, link.source) for link in found}

    def place(link: Link) -> tuple[int, int, Link]:
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
    placement = placement_of(actions)
    spans = _play(actions, placement, [Times()] * len(placement))
    ends = [(span.end_s, rank, span.action) for rank, own in enumerate(spans) for span in own]
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

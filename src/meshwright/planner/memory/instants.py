"""Moments of a step at which a rank of Meshwright's engine may hold most.

Each says what the schedule has in flight, and what the current pass needs beside it.
"""

from collections.abc import Collection, Iterator
from functools import cache
from operator import le
from typing import Literal, NamedTuple

from meshwright.spec.layout.schedule import last_of, schedule

What = Literal["loss", "pass", "sums", "inputs", "split", "embedding", "end", "weights", "reduce"]


class Instant(NamedTuple):
    """Moment in a rank's schedule. Tuples are indexed by the rank's stages, ascending.

    loss       head and loss are computed
    pass       a backward pass begins
    sums       a stage's last backward pass begins, in which its gradients are reduced
    inputs     a backward pass that defers weight gradients begins
    split      such a pass reaches its last layer
    embedding  a pass ends with the gradient of the embedding
    end        a stage's last pass does
    weights    deferred weight gradients are computed
    reduce     with them all gradients of a stage exist, and are reduced next
    """

    what: What
    stage: int
    """Index of the stage among the rank's."""
    alive: tuple[int, ...]
    """Micro-batches between their forward and their backward pass."""
    queued: tuple[int, ...]
    """Micro-batches between their backward pass and its deferred weight gradients."""
    graded: tuple[int, ...]
    """1 = gradients of earlier micro-batches exist, deferred ones included."""
    reduced: tuple[int, ...]
    """1 = all gradients are complete and reduced, and only ZeRO's share is left."""


@cache
def schedule_moments(name: str, ranks: int, micro_batches: int, virtual: int, rank: int) -> tuple[Instant, ...]:
    """Return the instants of a pipeline rank in a step that can be its fullest."""
    kinds: dict[tuple[What, int], set[Instant]] = {}
    for instant in _walk(name, ranks, micro_batches, virtual, rank):
        kinds.setdefault((instant.what, instant.stage), set()).add(instant)
    return tuple(sorted(instant for instants in kinds.values() for instant in _highest(instants)))


def _highest(instants: Collection[Instant]) -> Iterator[Instant]:
    """Yield the instants of one kind that no other exceeds. Reduced gradients are fewer with ZeRO, else as many."""
    flat = {i: (*i.alive, *i.queued, *i.graded, *(-done for done in i.reduced)) for i in instants}
    for instant, counts in flat.items():
        if not any(other is not instant and all(map(le, counts, others)) for other, others in flat.items()):
            yield instant


def _walk(name: str, ranks: int, micro_batches: int, virtual: int, rank: int) -> Iterator[Instant]:
    actions = schedule(name, ranks, micro_batches, virtual)[rank]
    stages = {stage: index for index, stage in enumerate(sorted({action.stage for action in actions}))}
    alive, queued, graded, reduced = ([0] * len(stages) for _ in range(4))
    last = last_of(actions, ("W", "BW"))

    def now(what: What) -> Instant:
        return Instant(what, stage, tuple(alive), tuple(queued), tuple(graded), tuple(reduced))

    for action in actions:
        stage = stages[action.stage]
        if action.kind == "F":
            alive[stage] += 1
            if action.stage == ranks * virtual - 1:
                yield now("loss")
        elif action.kind == "W":
            yield now("weights")
            queued[stage] -= 1
            graded[stage] = 1
            if action == last[action.stage]:
                yield now("reduce")
        else:
            final = action == last[action.stage]
            yield now("inputs" if action.kind == "B" else "sums" if final else "pass")
            # only after the pass: at its worst place its own activations still count
            alive[stage] -= 1
            if action.kind == "B":
                queued[stage] += 1
                yield now("split")
            # only the first stage goes on into the embedding, whose gradient is made last
            if action.stage == 0:
                yield now("end" if final else "embedding")
            if action.kind == "BW":
                graded[stage] = 1
        if action == last[action.stage]:
            # a stage reduces once, after its last weight gradient
            reduced[stage] = 1

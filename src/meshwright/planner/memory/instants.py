"""The moments of a step at which a rank of Meshwright's own engine may hold most: what its schedule has in flight then,
and what the pass under way needs beside it."""

from collections.abc import Collection, Iterator
from functools import cache
from operator import le
from typing import Literal, NamedTuple

from meshwright.spec.schedule import last_of, schedule

What = Literal["loss", "pass", "sums", "inputs", "split", "embedding", "end", "weights", "reduce"]


class Instant(NamedTuple):
    """`loss`: head and loss are made. `pass`: a backward pass begins; `sums`: so does a stage's last, in which its
    gradients are reduced. `inputs`: so does one that leaves gradients of weights; `split`: it comes to its last layer.
    `embedding`: one ends with the gradient of the embedding; `end`: so does a stage's last. `weights`: gradients of
    weights that a split pass has left are made; `reduce`: with them all of a stage are there and are reduced next.
    Numbers are by the rank's stages, ascending."""

    what: What
    place: int
    """Of the stage among the rank's."""
    alive: tuple[int, ...]
    """Micro-batches between their forward and their backward pass."""
    queued: tuple[int, ...]
    """Micro-batches between their backward pass and the gradients of weights that it has left."""
    graded: tuple[int, ...]
    """1 where gradients of earlier micro-batches are there, those of weights that a split pass leaves included."""
    reduced: tuple[int, ...]
    """1 where the last of them is: data-parallel ranks have summed them and keep what ZeRO leaves a rank."""


@cache
def moments_of(name: str, ranks: int, micro_batches: int, virtual: int, rank: int) -> tuple[Instant, ...]:
    """Those of a pipeline rank in a step, none of which is below another of its kind."""
    kinds: dict[tuple[What, int], set[Instant]] = {}
    for one in _walk(name, ranks, micro_batches, virtual, rank):
        kinds.setdefault((one.what, one.place), set()).add(one)
    return tuple(sorted(one for some in kinds.values() for one in _highest(some)))


def _highest(some: Collection[Instant]) -> Iterator[Instant]:
    """Those of one kind below no other. What is reduced is less with ZeRO and as much without."""
    flat = {one: (*one.alive, *one.queued, *one.graded, *(-done for done in one.reduced)) for one in some}
    for one, mine in flat.items():
        if not any(other is not one and all(map(le, mine, its)) for other, its in flat.items()):
            yield one


def _walk(name: str, ranks: int, micro_batches: int, virtual: int, rank: int) -> Iterator[Instant]:
    actions = schedule(name, ranks, micro_batches, virtual)[rank]
    places = {stage: index for index, stage in enumerate(sorted({action.stage for action in actions}))}
    alive, queued, graded, reduced = ([0] * len(places) for _ in range(4))
    last = last_of(actions, ("W", "BW"))

    def now(what: What) -> Instant:
        return Instant(what, place, tuple(alive), tuple(queued), tuple(graded), tuple(reduced))

    for action in actions:
        place = places[action.stage]
        if action.kind == "F":
            alive[place] += 1
            if action.stage == ranks * virtual - 1:
                yield now("loss")
        elif action.kind == "W":
            yield now("weights")
            queued[place] -= 1
            graded[place] = 1
            if action == last[action.stage]:
                yield now("reduce")
        else:
            final = action == last[action.stage]
            yield now("inputs" if action.kind == "B" else "sums" if final else "pass")
            alive[place] -= 1
            if action.kind == "B":
                queued[place] += 1
                yield now("split")
            if action.stage == 0:
                yield now("end" if final else "embedding")
            if action.kind == "BW":
                graded[place] = 1
        if action == last[action.stage]:
            reduced[place] = 1

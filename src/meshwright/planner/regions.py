"""Every legal region of the layout space: all that a rank's computation depends on, without how dp is sharded.

The rules are those of spec/legal.py, asked once per degree instead of once per layout, so that a space of 10^6 layouts
is walked in about a second.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from meshwright.spec.layout import Layout
from meshwright.spec.legal import layout_violations
from meshwright.spec.plan import Plan
from meshwright.spec.recipe import Recipe
from meshwright.spec.schedule import V_PLACED, refusal
from meshwright.spec.shape import ModelShape

Fixed = dict[str, tuple[Any, ...]]
"""Values allowed for a field of Layout (or dp); an absent field is free."""
RECOMPUTE = ("none", "selective", "full")


class Cell(NamedTuple):
    """The degrees of a layout; dp = devices / (tp cp pp)."""

    tp: int
    sp: bool
    cp: int
    ep: int
    pp: int
    dp: int


class Region(NamedTuple):
    """A cell with its micro-batch, schedule and recompute policy."""

    cell: Cell
    micro_batch: int
    schedule: str
    vp: int
    recompute: str

    def layout(self, dp_replicate: int = 0, dp_shard: int = 1, zero: int = 0) -> Layout:
        """The layout with its data parallelism split in this way; replicas by default."""
        cell = self.cell
        return Layout(
            dp_replicate=dp_replicate or cell.dp,
            dp_shard=dp_shard,
            zero=zero,  # type: ignore[arg-type]
            tp=cell.tp,
            sp=cell.sp,
            cp=cell.cp,
            pp=cell.pp,
            vp=self.vp,
            ep=cell.ep,
            schedule=self.schedule,  # type: ignore[arg-type]
            micro_batch=self.micro_batch,
            recompute=self.recompute,  # type: ignore[arg-type]
        )


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def keep(fixed: Fixed, name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of these values the allowed ones."""
    return tuple(value for value in values if value in fixed[name]) if name in fixed else values


def cells(plan: Plan, devices: int, fixed: Fixed) -> Iterator[Cell]:
    """All legal degrees for so many devices, with `plan`'s model and recipe."""
    shape, batch = plan.model, plan.recipe.global_batch
    for tp, sp, cp in _inside(shape, plan.recipe, devices, fixed):
        for pp in keep(fixed, "pp", divisors(devices // (tp * cp))):
            dp = devices // (tp * cp * pp)
            if pp > shape.layers or batch % dp or not keep(fixed, "dp", (dp,)):
                continue
            for ep in _experts(shape, tp, sp, dp * cp * tp, fixed):
                yield Cell(tp, sp, cp, ep, pp, dp)


def _inside(shape: ModelShape, recipe: Recipe, devices: int, fixed: Fixed) -> Iterator[tuple[int, bool, int]]:
    """(tp, sp, cp) that the shape and the sequence allow."""
    for tp in keep(fixed, "tp", divisors(devices)):
        for sp in keep(fixed, "sp", (True, False) if tp > 1 else (False,)):
            for cp in keep(fixed, "cp", divisors(devices // tp)):
                if not layout_violations(shape, recipe, Layout(tp=tp, sp=sp, cp=cp)):
                    yield tp, sp, cp


def _experts(shape: ModelShape, tp: int, sp: bool, ranks: int, fixed: Fixed) -> tuple[int, ...]:
    if shape.moe is None or (tp > 1 and not sp):
        return keep(fixed, "ep", (1,))
    return keep(fixed, "ep", tuple(e for e in divisors(shape.moe.experts) if ranks % e == 0))


def pipelines(shape: ModelShape, cell: Cell, micro_batches: int, fixed: Fixed) -> list[tuple[str, int]]:
    """(schedule, virtual stages) that exist for a cell and so many micro-batches."""
    pp = cell.pp
    if pp == 1:
        return [("1f1b", 1)] if keep(fixed, "vp", (1,)) else []
    tied_ends = shape.tied and cell.dp * cell.cp > 1
    return [
        (name, vp)
        for name, vp in _schedules(shape.layers, pp)
        if keep(fixed, "schedule", (name,))
        and keep(fixed, "vp", (vp,))
        and not (tied_ends and name in V_PLACED)
        and _exists(name, pp, micro_batches, vp)
    ]


@cache
def _exists(name: str, pp: int, micro_batches: int, vp: int) -> bool:
    return refusal(name, pp, micro_batches, vp) is None


@cache
def _schedules(layers: int, pp: int) -> tuple[tuple[str, int], ...]:
    """Of interleaved ones that leave equally many layers to the largest stage, the one with fewer virtual stages."""
    deepest: dict[int, int] = {}
    for vp in range(2, layers // pp + 1):
        deepest.setdefault(-(-(layers + 2) // (pp * vp)), vp)
    found = [("1f1b", 1), ("afab", 1), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)]
    found += [("interleaved", vp) for vp in deepest.values()]
    return tuple((name, vp) for name, vp in found if pp * vp <= layers)


def splits(cell: Cell, fixed: Fixed) -> tuple[tuple[int, int, int], ...]:
    """(dp_replicate, dp_shard, zero) of a cell. Under a pipeline ZeRO 2 and 3 are as 1 (spec/held.py): left out."""
    found = _splits(cell.dp, cell.cp, cell.tp, cell.ep, cell.pp > 1)
    if not {"dp_replicate", "dp_shard", "zero"} & fixed.keys():
        return found
    names = ("dp_replicate", "dp_shard", "zero")
    return tuple(v for v in found if all(keep(fixed, name, (n,)) for name, n in zip(names, v, strict=True)))


@cache
def _splits(dp: int, cp: int, tp: int, ep: int, piped: bool) -> tuple[tuple[int, int, int], ...]:
    stages = (1,) if piped else (1, 2, 3)
    found = [(dp, 1, 0)]
    for shard in divisors(dp):
        if shard * cp > 1:
            found += [(dp // shard, shard, zero) for zero in stages]
    return tuple(v for v in found if cp * tp * v[1] % ep == 0)

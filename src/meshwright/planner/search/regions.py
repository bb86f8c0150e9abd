"""Every legal region of the layout space: all that a rank's computation depends on, without how dp is sharded. A family
is the regions that differ in their pipeline's schedule only.

The rules are those of spec/legal.py, asked once per degree instead of once per layout, so that a space of 10^6 layouts
is walked in about a second.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from math import gcd
from typing import Any, NamedTuple

from meshwright.spec.capturing_rules import CAPTURED
from meshwright.spec.distillation_rules import SAMPLES_UNDER
from meshwright.spec.layout import Layout
from meshwright.spec.legal import divisors, layout_violations
from meshwright.spec.plan import Plan
from meshwright.spec.recipe import Recipe
from meshwright.spec.schedule import refusal
from meshwright.spec.schedule_kinds import KINDS, V_PLACED, stage_numbers
from meshwright.spec.shape import ModelShape

Fixed = dict[str, tuple[Any, ...]]
"""Values allowed for a field of Layout (or dp); an absent field is free."""
SPLIT_RULES = "split rules"
"""Key of Fixed: functions of a shape and a layout that say why there is no such split of data parallelism, or nothing.
They look at degrees, ZeRO and the split; the layout's pipeline is any."""
PIPELINE_RULES = "pipeline rules"
"""The same of schedules: they look at degrees, schedule, virtual stages and micro-batch; the split is any."""
FULL_ROUNDS = "full rounds"
"""Key of Fixed: several stages of a rank want as many micro-batches as pipeline ranks."""


class Cell(NamedTuple):
    """The degrees of a layout; dp = devices / (tp cp pp)."""

    tp: int
    sp: bool
    cp: int
    ep: int
    pp: int
    dp: int


class Region(NamedTuple):
    """A cell with its micro-batch, recompute policy and schedule."""

    cell: Cell
    micro_batch: int
    schedule: str
    vp: int
    recompute: str

    def layout(self, dp_replicate: int = 0, dp_shard: int = 1, zero: int = 0, base: Layout | None = None) -> Layout:
        """The layout with its data parallelism split in this way; replicas by default. `base` has what is not
        searched: kernels, compilation, the kind of context parallelism, how many layers recompute, stages by hand where
        their number is this."""
        cell, base = self.cell, base or DEFAULT
        by_hand = cell.pp > 1 and len(base.stages) == cell.pp * self.vp
        given = _fields(base) | dict(  # dataclasses.replace takes twice as long
            dp_replicate=dp_replicate or cell.dp,
            dp_shard=dp_shard,
            zero=zero,
            tp=cell.tp,
            sp=cell.sp,
            cp=cell.cp,
            pp=cell.pp,
            vp=self.vp,
            ep=cell.ep,
            schedule=self.schedule,
            micro_batch=self.micro_batch,
            recompute=self.recompute,
            recompute_layers=base.recompute_layers if self.recompute != "none" else 0,
            stages=base.stages if by_hand else (),
        )
        return Layout(**given)


@cache
def _fields(layout: Layout) -> dict[str, Any]:
    """Name -> value."""
    return {field.name: getattr(layout, field.name) for field in fields(layout)}


DEFAULT = Layout()


class RegionFamily(NamedTuple):
    """All regions of a cell with one micro-batch and recompute policy: (schedule, virtual stages) of each."""

    cell: Cell
    micro_batch: int
    recompute: str
    pipelines: tuple[tuple[str, int], ...]

    def regions(self) -> Iterator[Region]:
        """One by one."""
        for name, vp in self.pipelines:
            yield Region(self.cell, self.micro_batch, name, vp, self.recompute)


def search_base(plan: Plan, fixed: Fixed) -> Plan:
    """The plan, whose layers recompute as many as are fixed, else all of them; what they keep is where it is fixed.
    Passes are graphs where that is fixed; else what is listed may have them (planner/step/execution.py)."""
    layers, offload = fixed.get("recompute_layers", (0,))[0], fixed.get("offload", (plan.layout.offload,))[0]
    graphs = fixed.get("cuda_graphs", ("off" if plan.layout.cuda_graphs == "off" else "auto",))[0]
    return replace(plan, layout=replace(plan.layout, recompute_layers=layers, offload=offload, cuda_graphs=graphs))


def graph_variants(plan: Plan, fixed: Fixed) -> Iterator[tuple[Layout, Fixed]]:
    """What is fixed of layouts whose passes may be CUDA graphs, where a plan leaves that open, and how they run:
    compiled and uncompiled, where that is open, too."""
    if plan.layout.cuda_graphs != "auto" or plan.model.moe is not None:
        return
    alone = {key: allowed(fixed, key, legal) for key, legal in CAPTURED.items()}
    asked = replace(plan.layout, cuda_graphs="on")
    ways = [replace(asked, compile="on"), replace(asked, compile="off")] if asked.compile == "auto" else [asked]
    for layout in ways:
        yield layout, {**fixed, **alone}


def with_sampling_rules(plan: Plan, fixed: Fixed) -> Fixed:
    """What is fixed, with what a student needs that samples inside of training."""
    if not plan.recipe.distillation_on_policy:
        return fixed
    return {**{key: (legal,) for key, legal in SAMPLES_UNDER.items()}, **fixed}


def allowed(fixed: Fixed, name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of these values the allowed ones."""
    return tuple(value for value in values if value in fixed[name]) if name in fixed else values


def batches(recipe: Recipe) -> tuple[int, ...]:
    """Sequences of the steps of a run: a ramp has several."""
    return tuple(sorted(set(recipe.global_batches)))


def cells(plan: Plan, devices: int, fixed: Fixed) -> Iterator[Cell]:
    """All legal degrees for so many devices, with `plan`'s model and recipe."""
    shape, batch = plan.model, gcd(*batches(plan.recipe))
    for tp, sp, cp in _inside(plan, devices, fixed):
        for pp in allowed(fixed, "pp", divisors(devices // (tp * cp))):
            dp = devices // (tp * cp * pp)
            if plan.beside is not None and pp > plan.beside.layers:
                continue
            if pp > shape.layers or batch % dp or not allowed(fixed, "dp", (dp,)):
                continue
            for ep in _experts(shape, tp, sp, dp * cp * tp, fixed):
                yield Cell(tp, sp, cp, ep, pp, dp)


def _refused(plan: Plan, layout: Layout, fixed: Fixed, rules: str) -> bool:
    """Whether any of these rules has a sentence."""
    return any(rule(plan.model, layout) for rule in fixed[rules])


def offered_splits(plan: Plan, cell: Cell, fixed: Fixed) -> tuple[tuple[int, int, int], ...]:
    """As `splits`, those that no rule refuses."""
    found = splits(cell, fixed)
    if SPLIT_RULES not in fixed:
        return found
    any_region = Region(cell, 1, DEFAULT.schedule, 1, DEFAULT.recompute)
    return tuple(one for one in found if not _refused(plan, any_region.layout(*one), fixed, SPLIT_RULES))


def micro_batches(plan: Plan, cell: Cell, fixed: Fixed) -> tuple[int, ...]:
    """Sizes that cut the step of every rank, in each stage of a ramp: a size of more than a rank's sequences means all
    of them (spec/layout.py)."""
    sizes = {batch // cell.dp for batch in batches(plan.recipe)}
    found = {d for size in sizes for d in divisors(size)}
    legal = [d for d in sorted(found) if all(size % min(d, size) == 0 for size in sizes)]
    if plan.recipe.noise_scale_every:  # of one device: it compares micro-batches of a step
        legal = [d for d in legal if d < max(sizes)]
    return allowed(fixed, "micro_batch", tuple(legal))


def _inside(plan: Plan, devices: int, fixed: Fixed) -> Iterator[tuple[int, bool, int]]:
    """(tp, sp, cp) that the shape and the sequence allow."""
    shapes = [plan.model] if plan.beside is None else [plan.model, plan.beside]
    recipe = replace(plan.recipe, noise_scale_every=0)
    split = plan.layout.context_split
    for tp in allowed(fixed, "tp", divisors(devices)):
        for sp in allowed(fixed, "sp", (True, False) if tp > 1 else (False,)):
            for cp in allowed(fixed, "cp", divisors(devices // tp)):
                layout = Layout(tp=tp, sp=sp, cp=cp, context_split=split)
                if not any(layout_violations(shape, recipe, layout) for shape in shapes):
                    yield tp, sp, cp


def _experts(shape: ModelShape, tp: int, sp: bool, ranks: int, fixed: Fixed) -> tuple[int, ...]:
    if shape.moe is None or (tp > 1 and not sp):
        return allowed(fixed, "ep", (1,))
    return allowed(fixed, "ep", tuple(e for e in divisors(shape.moe.experts) if ranks % e == 0))


def pipelines(plan: Plan, cell: Cell, micro_batch: int, fixed: Fixed) -> tuple[tuple[str, int], ...]:
    """(schedule, virtual stages) that exist for a cell and such micro-batches, and that no rule refuses."""
    found = _legal_pipelines(plan, cell, micro_batch, fixed)
    if FULL_ROUNDS in fixed and min(_times(plan, cell, micro_batch)) < cell.pp:
        found = tuple((name, vp) for name, vp in found if vp == 1)
    if PIPELINE_RULES not in fixed:
        return found
    laid = ((one, Region(cell, micro_batch, *one, DEFAULT.recompute).layout()) for one in found)
    return tuple(one for one, layout in laid if not _refused(plan, layout, fixed, PIPELINE_RULES))


def _times(plan: Plan, cell: Cell, micro_batch: int) -> tuple[int, ...]:
    """Micro-batches of a rank, in each stage of a ramp."""
    return tuple(size // min(size, micro_batch) for size in (b // cell.dp for b in batches(plan.recipe)))


def _legal_pipelines(plan: Plan, cell: Cell, micro_batch: int, fixed: Fixed) -> tuple[tuple[str, int], ...]:
    shape, pp = plan.model, cell.pp
    if pp == 1:
        return (("1f1b", 1),) if allowed(fixed, "vp", (1,)) and allowed(fixed, "schedule", ("1f1b",)) else ()
    tied_ends = shape.tied and cell.dp * cell.cp > 1
    times = _times(plan, cell, micro_batch)
    if not {"schedule", "vp"} & fixed.keys():
        return _pipelines(shape.layers, pp, times, tied_ends)
    deep = tuple(fixed.get("vp", ())) if any(KINDS[name].deeper for name in fixed.get("schedule", ())) else ()
    return tuple(
        (name, vp)
        for name, vp in _pipelines(shape.layers, pp, times, tied_ends, deep)
        if allowed(fixed, "schedule", (name,)) and allowed(fixed, "vp", (vp,))
    )


def _deeper(name: str, pp: int, layers: int, deep: tuple[int, ...]) -> tuple[int, ...]:
    """More stages than one of a rank: all there can be where that is what a schedule is for, else those asked for."""
    return stage_numbers(name, pp, layers) if KINDS[name].stages > 1 else tuple(vp for vp in deep if vp > 1)


@cache
def _pipelines(
    layers: int, pp: int, times: tuple[int, ...], tied_ends: bool, deep: tuple[int, ...] = ()
) -> tuple[tuple[str, int], ...]:
    """Of a model of so many layers, for steps of so many micro-batches. `deep`: virtual stages of ZB-H1 and the
    like, which have one unless more are asked for."""
    found = [(name, kind.stages) for name, kind in KINDS.items() if kind.stages == 1 or not kind.deeper]
    found.sort(key=lambda one: one[0] != DEFAULT.schedule)  # of two that are equally good the plain one
    found += [(name, vp) for name, kind in KINDS.items() if kind.deeper for vp in _deeper(name, pp, layers, deep)]
    return tuple(
        (name, vp)
        for name, vp in found
        if pp * vp <= layers
        and not (tied_ends and name in V_PLACED)
        and all(refusal(name, pp, m, vp) is None for m in times)
    )


def splits(cell: Cell, fixed: Fixed) -> tuple[tuple[int, int, int], ...]:
    """(dp_replicate, dp_shard, zero) of a cell. Under a pipeline ZeRO 2 and 3 are as 1 (spec/held.py): left out, unless
    they are asked for."""
    piped = cell.pp > 1 and not {2, 3} & set(fixed.get("zero", ()))
    found = _splits(cell.dp, cell.cp, cell.tp, cell.ep, piped)
    if not {"dp_replicate", "dp_shard", "zero"} & fixed.keys():
        return found
    names = ("dp_replicate", "dp_shard", "zero")
    return tuple(v for v in found if all(allowed(fixed, name, (n,)) for name, n in zip(names, v, strict=True)))


@cache
def _splits(dp: int, cp: int, tp: int, ep: int, piped: bool) -> tuple[tuple[int, int, int], ...]:
    stages = (1,) if piped else (1, 2, 3)
    found = [(dp, 1, 0)]
    for shard in divisors(dp):
        if shard * cp > 1:
            found += [(dp // shard, shard, zero) for zero in stages]
    return tuple(v for v in found if cp * tp * v[1] % ep == 0)

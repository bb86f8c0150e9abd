"""Legal regions of the layout space: everything that a rank's computation depends on, except the split of dp.

A family is the set of regions that differ only in their pipeline schedule. The rules are those of spec/rules/legal.py,
evaluated once per degree instead of once per layout, so that 10^6 layouts take about a second.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from math import gcd
from typing import Any, NamedTuple

from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule import KINDS, V_PLACED, refusal, stage_numbers
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.spec.recipe.recipe import Recipe
from meshwright.spec.rules.legal import SAMPLES_UNDER, divisors, layout_violations
from meshwright.spec.rules.passes import CAPTURED

Fixed = dict[str, tuple[Any, ...]]
"""Values allowed for a field of Layout (or dp). An absent field is free."""
SPLIT_RULES = "split rules"
"""Key of Fixed: functions (shape, layout) -> reason why a split of data parallelism is refused, or nothing.

They look at degrees, ZeRO and the split. The layout's pipeline is arbitrary.
"""
PIPELINE_RULES = "pipeline rules"
"""Key of Fixed: such functions for schedule, virtual stages and micro-batch. The layout's split is arbitrary."""
FULL_ROUNDS = "full rounds"
"""Key of Fixed: several stages per rank need at least as many micro-batches as pipeline ranks."""


class Cell(NamedTuple):
    """Degrees of a layout. dp = devices / (tp cp pp)."""

    tp: int
    sp: bool
    cp: int
    ep: int
    pp: int
    dp: int


class Region(NamedTuple):
    """Cell with micro-batch, recompute policy and schedule."""

    cell: Cell
    micro_batch: int
    schedule: str
    vp: int
    recompute: str

    def layout(self, dp_replicate: int = 0, dp_shard: int = 1, zero: int = 0, base: Layout | None = None) -> Layout:
        """Return the layout with this split of data parallelism, by default replicas only.

        `base` supplies the fields that are not searched: kernels, compilation, the kind of context parallelism, the
        number of layers that recompute, and manual stages if their number matches.
        """
        cell, base = self.cell, base or DEFAULT
        # Stages by hand fit only pipelines with as many.
        by_hand = cell.pp > 1 and len(base.stages) == cell.pp * self.vp
        values = _fields(base) | dict(  # dataclasses.replace takes twice as long
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
        return Layout(**values)


@cache
def _fields(layout: Layout) -> dict[str, Any]:
    return {field.name: getattr(layout, field.name) for field in fields(layout)}


DEFAULT = Layout()


class RegionFamily(NamedTuple):
    """Regions of a cell with one micro-batch and recompute policy, one per (schedule, virtual stages)."""

    cell: Cell
    micro_batch: int
    recompute: str
    pipelines: tuple[tuple[str, int], ...]

    def regions(self) -> Iterator[Region]:
        """Yield the regions."""
        for name, vp in self.pipelines:
            yield Region(self.cell, self.micro_batch, name, vp, self.recompute)


def search_base(plan: Plan, fixed: Fixed) -> Plan:
    """Return the plan whose layout is the base of every searched one.

    All layers recompute unless their number is fixed, and activations stay on the device unless offload is fixed. CUDA
    graphs are used if they are fixed, else the listed layouts may use them (planner/step/prediction.py).
    """
    layers, offload = fixed.get("recompute_layers", (0,))[0], fixed.get("offload", (plan.layout.offload,))[0]
    graphs = fixed.get("cuda_graphs", ("off" if plan.layout.cuda_graphs == "off" else "auto",))[0]
    return replace(plan, layout=replace(plan.layout, recompute_layers=layers, offload=offload, cuda_graphs=graphs))


def graph_variants(plan: Plan, fixed: Fixed) -> Iterator[tuple[Layout, Fixed]]:
    """Yield (base layout, fixed values) of layouts whose passes may be CUDA graphs, if the plan leaves that open.

    Compiled and uncompiled ones, if that is open as well.
    """
    if plan.layout.cuda_graphs != "auto" or plan.model.moe is not None:
        return
    rules = {key: allowed(fixed, key, legal) for key, legal in CAPTURED.items()}
    captured = replace(plan.layout, cuda_graphs="on")
    layouts = (
        [replace(captured, compile="on"), replace(captured, compile="off")]
        if captured.compile == "auto"
        else [captured]
    )
    for layout in layouts:
        yield layout, {**fixed, **rules}


def with_sampling_rules(plan: Plan, fixed: Fixed) -> Fixed:
    """Return the fixed values, with those that a student needs who generates samples during training."""
    if not plan.recipe.distillation_on_policy:
        return fixed
    return {**{key: (legal,) for key, legal in SAMPLES_UNDER.items()}, **fixed}


def allowed(fixed: Fixed, name: str, candidates: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return those of `candidates` that `fixed` allows."""
    return tuple(candidate for candidate in candidates if candidate in fixed[name]) if name in fixed else candidates


def batches(recipe: Recipe) -> tuple[int, ...]:
    """Return the batch sizes of a run in ascending order. A ramp has several."""
    return tuple(sorted(set(recipe.global_batches)))


def cells(plan: Plan, devices: int, fixed: Fixed) -> Iterator[Cell]:
    """Yield all legal degrees on this number of devices."""
    # `dp` must divide every batch of a ramp.
    shape, batch = plan.model, gcd(*batches(plan.recipe))
    for tp, sp, cp in _inside(plan, devices, fixed):
        for pp in allowed(fixed, "pp", divisors(devices // (tp * cp))):
            dp = devices // (tp * cp * pp)
            if plan.online_teacher is not None and pp > plan.online_teacher.layers:
                continue
            if pp > shape.layers or batch % dp or not allowed(fixed, "dp", (dp,)):
                continue
            for ep in _experts(shape, tp, sp, dp * cp * tp, fixed):
                yield Cell(tp, sp, cp, ep, pp, dp)


def _refused(plan: Plan, layout: Layout, fixed: Fixed, rules: str) -> bool:
    """Return True if any of these rules refuses the layout."""
    return any(rule(plan.model, layout) for rule in fixed[rules])


def offered_splits(plan: Plan, cell: Cell, fixed: Fixed) -> tuple[tuple[int, int, int], ...]:
    """Return the splits of data parallelism that no rule refuses."""
    legal = splits(cell, fixed)
    if SPLIT_RULES not in fixed:
        return legal
    any_region = Region(cell, 1, DEFAULT.schedule, 1, DEFAULT.recompute)
    return tuple(split for split in legal if not _refused(plan, any_region.layout(*split), fixed, SPLIT_RULES))


def micro_batches(plan: Plan, cell: Cell, fixed: Fixed) -> tuple[int, ...]:
    """Return the micro-batch sizes that divide every rank's share of the batch in each stage of a ramp.

    A size beyond a rank's share means the whole share (spec/layout/layout.py).
    """
    sizes = {batch // cell.dp for batch in batches(plan.recipe)}
    # Larger sizes mean the whole share of a small batch, so divisors of any share are candidates.
    divisors_of_shares = {d for size in sizes for d in divisors(size)}
    legal = [d for d in sorted(divisors_of_shares) if all(size % min(d, size) == 0 for size in sizes)]
    if plan.recipe.noise_scale_every:  # it compares the micro-batches of a step
        legal = [d for d in legal if d < max(sizes)]
    return allowed(fixed, "micro_batch", tuple(legal))


def _inside(plan: Plan, devices: int, fixed: Fixed) -> Iterator[tuple[int, bool, int]]:
    """Yield (tp, sp, cp) that the shape and the sequence allow."""
    shapes = [plan.model] if plan.online_teacher is None else [plan.model, plan.online_teacher]
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
    """Return the (schedule, virtual stages) that are possible for a cell and micro-batch and that no rule refuses."""
    legal = _legal_pipelines(plan, cell, micro_batch, fixed)
    if FULL_ROUNDS in fixed and min(_times(plan, cell, micro_batch)) < cell.pp:
        legal = tuple((name, vp) for name, vp in legal if vp == 1)
    if PIPELINE_RULES not in fixed:
        return legal
    layouts = ((pipeline, Region(cell, micro_batch, *pipeline, DEFAULT.recompute).layout()) for pipeline in legal)
    return tuple(pipeline for pipeline, layout in layouts if not _refused(plan, layout, fixed, PIPELINE_RULES))


def _times(plan: Plan, cell: Cell, micro_batch: int) -> tuple[int, ...]:
    """Return the micro-batches of a rank in each stage of a ramp."""
    return tuple(size // min(size, micro_batch) for size in (b // cell.dp for b in batches(plan.recipe)))


def _legal_pipelines(plan: Plan, cell: Cell, micro_batch: int, fixed: Fixed) -> tuple[tuple[str, int], ...]:
    shape, pp = plan.model, cell.pp
    if pp == 1:
        return (("1f1b", 1),) if allowed(fixed, "vp", (1,)) and allowed(fixed, "schedule", ("1f1b",)) else ()
    # A V puts both ends on one rank, whose tied matrix data parallelism cannot share.
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
    """Return the possible stages per rank beyond one: all if the schedule exists for that, else the requested ones."""
    return stage_numbers(name, pp, layers) if KINDS[name].stages > 1 else tuple(vp for vp in deep if vp > 1)


@cache
def _pipelines(
    layers: int, pp: int, times: tuple[int, ...], tied_ends: bool, deep: tuple[int, ...] = ()
) -> tuple[tuple[str, int], ...]:
    """Return the pipelines of a model of `layers` layers for steps of `times` micro-batches.

    `deep` lists virtual stages for schedules like ZB-H1, which have one stage unless more are requested.
    """
    candidates = [(name, kind.stages) for name, kind in KINDS.items() if kind.stages == 1 or not kind.deeper]
    candidates.sort(
        key=lambda pipeline: pipeline[0] != DEFAULT.schedule
    )  # among equally good ones the plain one comes first
    candidates += [(name, vp) for name, kind in KINDS.items() if kind.deeper for vp in _deeper(name, pp, layers, deep)]
    return tuple(
        (name, vp)
        for name, vp in candidates
        if pp * vp <= layers
        and not (tied_ends and name in V_PLACED)
        and all(refusal(name, pp, m, vp) is None for m in times)
    )


def splits(cell: Cell, fixed: Fixed) -> tuple[tuple[int, int, int], ...]:
    """Return (dp_replicate, dp_shard, zero) of a cell.

    Under a pipeline ZeRO 2 and 3 equal ZeRO 1 (spec/memory/held.py), so they are left out unless fixed.
    """
    piped = cell.pp > 1 and not {2, 3} & set(fixed.get("zero", ()))
    legal = _splits(cell.dp, cell.cp, cell.tp, cell.ep, piped)
    if not {"dp_replicate", "dp_shard", "zero"} & fixed.keys():
        return legal
    names = ("dp_replicate", "dp_shard", "zero")
    return tuple(
        split for split in legal if all(allowed(fixed, name, (n,)) for name, n in zip(names, split, strict=True))
    )


@cache
def _splits(dp: int, cp: int, tp: int, ep: int, piped: bool) -> tuple[tuple[int, int, int], ...]:
    stages = (1,) if piped else (1, 2, 3)
    candidates = [(dp, 1, 0)]
    for shard in divisors(dp):
        if shard * cp > 1:
            candidates += [(dp // shard, shard, zero) for zero in stages]
    return tuple(split for split in candidates if cp * tp * split[1] % ep == 0)

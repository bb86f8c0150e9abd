"""The search against looking at every layout, one by one, with the rules of spec/rules/legal.py and no bound."""

import gc
from dataclasses import replace
from itertools import product
from random import Random
from statistics import median
from typing import Any

import pytest

from meshwright.planner.cost.stack import MESHWRIGHT, Stack
from meshwright.planner.memory.engine_peak import enough, schedule_moments
from meshwright.planner.memory.rank_memory import DRIVER_BYTES, in_flight, leading
from meshwright.planner.search.bounds import CellBounds, CellTerms, families
from meshwright.planner.search.ranking import Ranking, fullest_rank, search
from meshwright.planner.search.regions import Fixed, search_base
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.planner.step.prediction import usable_bytes
from meshwright.spec import Cluster, Layout, ModelShape, Plan, Recipe, presets
from meshwright.spec.errors import IllegalLayout, PlanError
from meshwright.spec.layout.layout import OFFLOADED, RECOMPUTE
from meshwright.spec.layout.schedule import NAMES, V_PLACED, refusal
from meshwright.spec.model.shape import LoRAShape, MoEShape
from meshwright.spec.model.unbuilt_parts import LinearAttention, UnbuiltParts
from meshwright.spec.rules.passes import keeps_no_norms
from meshwright.stacks.trainers.nanotron import NANOTRON

LOOKED_AT = Layout(compile="on", cuda_graphs="off")
"""How a search looks at layouts that leave both open, before those that it lists are settled (test_execution.py)."""


def plan(shape: ModelShape, devices: int, gib: float, batch: int = 16, **recipe: Any) -> Plan:
    device = replace(presets.device("h100"), memory_bytes=int(gib * 2**30))
    cluster = Cluster(device=device, devices_per_node=min(devices, 4), nodes=max(1, devices // 4))
    asked = Recipe(sequence=2048, global_batch=batch, precision="bf16", **recipe)
    return Plan(model=shape, recipe=asked, cluster=cluster, layout=LOOKED_AT)


def every_layout(plan: Plan, fixed: dict[str, tuple[Any, ...]]) -> list[Layout]:
    """All legal ones: no shortcut, but ZeRO 2 and 3 under a pipeline, shards that nothing is sharded over, norms
    where compiled blocks make them again by themselves, and selective where no S x S weights are stored, which the
    search leaves out on purpose."""
    devices, batch, shape = plan.cluster.devices, plan.recipe.global_batch, plan.model
    degrees = [d for d in range(1, devices + 1) if devices % d == 0]
    layouts = []
    [offload] = fixed.get("offload", ("off",))
    for tp, cp, pp, shard, sp in product(degrees, degrees, degrees, degrees, (False, True)):
        if devices % (tp * cp * pp * shard) or (sp and tp == 1) or pp > shape.layers:
            continue
        replicate = devices // (tp * cp * pp * shard)
        if batch % (replicate * shard):
            continue
        experts = range(1, shape.moe.experts + 1) if shape.moe else [1]
        for zero, ep, (name, vp), micro, recompute in product(
            range(2 if pp > 1 else 4), experts, deals(shape, pp), range(1, batch // (replicate * shard) + 1),
            RECOMPUTE,
        ):  # fmt: skip
            if (zero == 0 and shard > 1) or batch // (replicate * shard) % micro:
                continue
            layout = Layout(
                dp_replicate=replicate, dp_shard=shard, tp=tp, cp=cp, pp=pp, sp=sp, zero=zero, ep=ep, schedule=name,
                vp=vp, micro_batch=micro, recompute=recompute, offload=offload, compile=plan.layout.compile,
                cuda_graphs=plan.layout.cuda_graphs,
            )  # type: ignore[arg-type]  # fmt: skip
            if any(getattr(layout, name) not in values for name, values in fixed.items()):
                continue
            idle = recompute == "selective" or (recompute == "norms" and keeps_no_norms(layout, shape, "cuda"))
            if idle and "recompute" not in fixed:
                continue
            try:
                if not replace(plan, layout=layout).violations():
                    layouts.append(layout)
            except (IllegalLayout, PlanError):
                continue
    return layouts


def deals(shape: ModelShape, pp: int) -> list[tuple[str, int]]:
    """(schedule, stages of a rank)."""
    if pp == 1:
        return [("1f1b", 1)]
    pipelines = [(name, 2 if name in V_PLACED else 1) for name in NAMES if name != "interleaved"]
    return [(n, v) for n, v in [*pipelines, *(("interleaved", v) for v in range(2, shape.layers + 1))]
            if pp * v <= shape.layers]  # fmt: skip


def random_plan(dice: Random) -> tuple[Plan, dict[str, tuple[Any, ...]]]:
    """A small model whose ends weigh much or little, on a few devices, with some of the layout fixed."""
    heads, layers = dice.choice([4, 8]), dice.choice([3, 4, 6, 8, 9])
    hidden = heads * dice.choice([32, 64, 128])
    moe = None
    if dice.random() < 0.3:
        moe = MoEShape(experts=4, top_k=2, ffn=hidden, first_dense=dice.choice([0, 1, layers // 2]))
    shape = ModelShape(
        name="random", vocab=dice.choice([64, 4096, 65536]), layers=layers, hidden=hidden, heads=heads,
        kv_heads=dice.choice([heads, heads // 4]), ffn=hidden * dice.choice([2, 4]), max_positions=4096,
        tied=dice.random() < 0.3, moe=moe,
    )  # fmt: skip
    recipe = Recipe(
        sequence=dice.choice([128, 1024, 2048]), global_batch=dice.choice([4, 6, 8]),
        precision=dice.choice(["bf16", "bf16", "fp32"]), reduce_dtype=dice.choice(["fp32", "model"]),
    )  # type: ignore[arg-type]  # fmt: skip
    per_node, nodes = dice.choice([(2, 1), (4, 1), (4, 1), (2, 2), (3, 1), (4, 2)])
    cluster = Cluster(device=presets.device(dice.choice(["h100", "a100-40"])), devices_per_node=per_node, nodes=nodes)
    fixed: dict[str, tuple[Any, ...]] = {"cp": (1,)} if dice.random() < 0.9 else {}
    if dice.random() < 0.9:
        fixed["recompute"] = (dice.choice(RECOMPUTE),)
    if dice.random() < 0.6:
        fixed["pp"] = (2, 3, 4, 8)
    if dice.random() < 0.4:
        fixed["tp"] = (dice.choice([1, 2]),)
    return Plan(model=shape, recipe=recipe, cluster=cluster, layout=LOOKED_AT), fixed


def counted(estimator: Estimator, asked: Plan, layouts: list[Layout]) -> list[tuple[float, float]]:
    """(seconds, bytes) of each."""
    made = [estimator.predict(replace(asked, layout=layout)) for layout in layouts]
    return [(prediction.step_s, prediction.peak_bytes) for prediction in made]


CASES = [*(("off", seed) for seed in range(20)), *(("activations", seed) for seed in range(4))]


def with_offload(asked: Plan, fixed: Fixed, offload: str) -> tuple[Plan, Fixed]:
    """The same with activations in host memory, under a policy that goes with it; or as it is."""
    if offload == "off":
        return asked, fixed
    policies = [policy for policy in fixed.get("recompute", OFFLOADED) if policy in OFFLOADED] or OFFLOADED
    return asked, {**fixed, "recompute": tuple(policies), "offload": (offload,)}


@pytest.mark.parametrize(("offload", "seed"), CASES)
@pytest.mark.long
def test_search_lists_what_looking_at_every_layout_lists(offload: str, seed: int) -> None:
    """Ten models of each seed; of each, devices whose memory is enough for some of the layouts, or for all."""
    dice = Random(seed)
    for _ in range(10):
        asked, fixed = with_offload(*random_plan(dice), offload)
        every = every_layout(asked, fixed)
        truth = counted(build_estimator(asked), asked, every)
        if not truth:
            assert search(build_estimator(asked), asked, fixed=fixed).legal == 0
            continue
        peaks = sorted(peak for _, peak in truth)
        room = peaks[int(dice.random() ** 2 * len(peaks))] * dice.choice([1.0, 0.999999])
        device = replace(asked.cluster.device, memory_bytes=int(room + DRIVER_BYTES) + 1)
        asked = replace(asked, cluster=replace(asked.cluster, device=device))
        listed = dice.choice([1, 5, 20])
        ranking = search(build_estimator(asked), asked, fixed=fixed, listed=listed)
        fitting = sorted(step_s for step_s, peak in truth if peak <= usable_bytes(asked))
        assert sorted(prediction.step_s for prediction in ranking.best) == pytest.approx(fitting[:listed], rel=1e-9), (
            asked,
            fixed,
        )
        assert ranking.legal == len(every) == ranking.too_large + ranking.slower + len(ranking.best)
        if not fitting:
            assert ranking.nearest is not None and ranking.nearest.peak_bytes == pytest.approx(peaks[0], rel=1e-12)


@pytest.mark.parametrize(("offload", "seed"), CASES[10:])
def test_no_layout_is_below_the_least_of_its_kind(offload: str, seed: int) -> None:
    dice = Random(100 + seed)
    asked, fixed = with_offload(*random_plan(dice), offload)
    estimator = build_estimator(asked)
    for least, family in families(estimator, search_base(asked, fixed), fixed):
        family_s, family_bytes = least.family_s(family), least.family_bytes(family)
        whole_s = least.whole_family_s(family)
        for region in family.regions():
            region_s, region_bytes = least.region_s(region), least.region_bytes(region)
            assert family_s <= region_s * (1 + 1e-9) and family_bytes <= region_bytes
            bounds = zip(least.splits_s(region), least.splits, strict=True)
            for split_s, split in list(bounds)[:: max(1, len(least.splits) - 1)]:
                prediction = estimator.predict(replace(asked, layout=region.layout(*split, base=least.base)))
                assert max(region_s, whole_s, split_s) <= prediction.step_s * (1 + 1e-9), prediction.plan.layout
                assert region_bytes <= prediction.peak_bytes, prediction.plan.layout


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize(
    "parts", [{"linear": LinearAttention(full_every=3, key_heads=4, value_heads=8)}, {"predicts": 1}]
)
def test_no_layout_is_below_the_least_of_its_kind_with_parts_of_other_families(
    parts: dict[str, Any], experts: int
) -> None:
    moe = MoEShape(experts=experts, top_k=2, ffn=512) if experts else None
    shape = ModelShape(
        vocab=4096, layers=6, hidden=1024, heads=8, ffn=2048, max_positions=4096, moe=moe, unbuilt=UnbuiltParts(**parts)
    )
    asked = Plan(
        model=shape, recipe=Recipe(sequence=2048, global_batch=16, precision="bf16"), cluster=presets.cluster("h100x4"),
        layout=LOOKED_AT,
    )  # fmt: skip
    estimator, seen = build_estimator(asked), 0
    for least, family in list(families(estimator, search_base(asked, {}), {}))[::7]:
        for region in list(family.regions())[:2]:
            region_bytes, bounds = least.region_bytes(region), zip(least.splits_s(region), least.splits, strict=True)
            for split_s, split in list(bounds)[:: max(1, len(least.splits) - 1)]:
                prediction = estimator.predict(replace(asked, layout=region.layout(*split, base=least.base)))
                assert split_s <= prediction.step_s * (1 + 1e-9) and region_bytes <= prediction.peak_bytes, (
                    prediction.plan.layout
                )
                seen += 1
    assert seen > 20


BOUNDED: dict[str, tuple[Plan, Stack, float]] = {
    "a teacher": (
        replace(
            plan(presets.model("llama-3.2-1b"), 8, 80.0, objective="distill"), teacher=presets.model("llama-3.2-3b")
        ), MESHWRIGHT, 1.0,
    ),
    "Muon": (plan(presets.model("llama-3.2-1b"), 8, 80.0, optimizer="muon"), MESHWRIGHT, 1.0),
    "Muon and experts": (plan(presets.model("deepseek-v3"), 32, 80.0, optimizer="muon"), MESHWRIGHT, 1.0),
    "flat buffers, stages by cost": (plan(presets.model("llama-3.2-1b"), 8, 80.0), NANOTRON.stack({}), 1.0),
    "windows": (plan(presets.model("gemma-3-1b"), 8, 80.0), MESHWRIGHT, 1.0),
    "experts": (plan(presets.model("qwen3-30b-a3b"), 16, 80.0), MESHWRIGHT, 1.0),
    "experts in every other layer": (
        plan(replace(presets.model("qwen3-30b-a3b"), unbuilt=UnbuiltParts(routed_every=2)), 64, 80.0, batch=64),
        MESHWRIGHT, 1.0,
    ),
    "LoRA": (plan(replace(presets.model("llama-3.2-1b"), lora=LoRAShape(rank=16)), 8, 80.0), MESHWRIGHT, 1.0),
    "ranks that share cores": (plan(presets.model("llama-tiny"), 8, 80.0), MESHWRIGHT, 2.0),
    "many micro-batches": (plan(presets.model("llama-3.1-8b"), 8, 80.0, batch=512), MESHWRIGHT, 1.0),
    "long pipelines": (plan(presets.model("llama-3.1-405b"), 4096, 80.0, batch=256), MESHWRIGHT, 1.0),
    "rounded weights": (
        plan(presets.model("llama-3.2-1b"), 8, 80.0, fake_quantize="int4-rtn"), MESHWRIGHT, 1.0,
    ),
    "narrow states": (plan(presets.model("llama-3.2-1b"), 8, 80.0, optimizer_states="int8"), MESHWRIGHT, 1.0),
    "CPUs": (
        replace(plan(presets.model("llama-tiny"), 8, 80.0), cluster=Cluster(device=presets.device("local"), nodes=8)),
        MESHWRIGHT, 1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BOUNDED)
def test_no_layout_is_below_what_its_family_and_split_take_with_data_parallelism(case: str) -> None:
    """Nor has any less memory. And the bounds are worth their name: of half the layouts that of their split is above
    89 % of the truth, that of their family above 70 %."""
    asked, stack, ranks_per_core = BOUNDED[case]
    estimator = build_estimator(asked, stack)
    speeds = replace(estimator.speeds, ranks_per_core=ranks_per_core)
    estimator = replace(estimator, costs=replace(estimator.costs, speeds=speeds))
    dice = Random(7)
    shares: list[tuple[float, float]] = []
    every = list(families(estimator, search_base(asked, {}), {}))
    for least, family in dice.sample(every, min(len(every), 600)):
        region = dice.choice(list(family.regions()))
        family_s, fullest = least.whole_family_s(family), region.layout(*least.splits[0], base=least.base)
        assert least.region_bytes(region) <= fullest_rank(estimator, fullest).total_bytes, region
        for least_s, split in zip(least.splits_s(region), least.splits, strict=True):
            step_s = estimator.time(region.layout(*split, base=least.base)).total_s
            assert max(family_s, least_s) <= step_s * (1 + 1e-9), (region, split)
            shares.append((least_s / step_s, family_s / step_s))
    assert median(share for share, _ in shares) > 0.89 and median(share for _, share in shares) > 0.7


@pytest.mark.parametrize("name", NAMES)
def test_what_leads_is_a_moment_of_the_schedule(name: str) -> None:
    for p, m, v in product((2, 3, 4, 8), (1, 2, 3, 4, 6, 8, 11, 16, 17, 32), (1, 2, 3, 5)):
        if refusal(name, p, m, v):
            continue
        for rank in range(p):
            alive = leading(name, p, m, v, rank)
            assert any(
                all(x <= y for x, y in zip(alive, moment, strict=True))
                for moment in in_flight(Layout(schedule=name, pp=p, vp=v), m, rank)
            ), (p, m, v, rank)


@pytest.mark.parametrize(("p", "v", "m"), [(8, 4, 63), (16, 2, 95), (8, 3, 36), (4, 5, 64), (4, 5, 84)])
def test_a_short_step_has_as_much_in_flight_as_a_long_one(p: int, v: int, m: int) -> None:
    few = enough("interleaved", p, m, v)
    most = [max(sum(moment.alive) for moment in schedule_moments("interleaved", p, n, v, 0)) for n in (few, m)]
    assert most[0] == most[1]


def test_the_least_memory_of_a_cell_does_not_depend_on_cells_before_it() -> None:
    """Cells share what blocks keep. With a pipeline, sums take products of weights, and less stands inside a block."""
    asked = Plan(
        model=presets.model("llama-3.1-8b"), recipe=Recipe(sequence=4096, global_batch=64, precision="bf16"),
        cluster=presets.cluster("h100x8", 2),
    )  # fmt: skip
    estimator, pipelines = build_estimator(asked), set()
    for least, family in families(estimator, asked, {"tp": (2,)}):
        alone = CellBounds(estimator, asked, least.cell, least.splits, CellTerms())
        assert least.kept_bytes(family.recompute) == alone.kept_bytes(family.recompute)
        pipelines.add(least.cell.pp)
    assert {1, 2} <= pipelines


def test_interleaved_stages_of_every_number_are_looked_at() -> None:
    """Of a step of as many micro-batches as ranks, the most virtual stages that divide the layers wait least."""
    asked = replace(plan(presets.model("llama-3.1-8b"), 4, 200.0, batch=4), cluster=presets.cluster("h100x4", 1))
    fixed = {"pp": (4,), "schedule": ("interleaved",), "micro_batch": (1,), "recompute": ("full",)}
    asked = replace(asked, cluster=replace(asked.cluster, device=replace(asked.cluster.device, memory_bytes=2**40)))
    best = search(build_estimator(asked), asked, fixed=fixed)
    assert {prediction.plan.layout.vp for prediction in best.best} == set(range(2, 9))
    assert min(best.best, key=lambda prediction: prediction.step_s).plan.layout.vp > 5


def test_the_end_of_the_list_is_ranked_as_blocks_will_run() -> None:
    """Two layouts gain 0.2 % by compiled blocks, and a short run takes none: a third one is faster."""
    asked = Plan(
        model=presets.model("gpt2-124m"), cluster=presets.cluster("h200x8"), layout=Layout(),
        recipe=Recipe(sequence=1024, global_batch=64, precision="bf16"),
    )  # fmt: skip
    fixed = {"schedule": ("1f1b",), "recompute": ("none",)}
    short, long = (search(build_estimator(asked), asked, fixed=fixed, listed=number).best for number in (20, 60))
    assert [prediction.plan.layout for prediction in short] == [prediction.plan.layout for prediction in long[:20]]
    compiled_s = [
        build_estimator(asked).time(replace(prediction.plan.layout, compile="on")).total_s for prediction in long
    ]
    assert min(compiled_s[20:]) < max(compiled_s[:20]), "by compiled blocks alone the list would end otherwise"


def test_every_listed_layout_is_legal_and_fits() -> None:
    asked = plan(presets.model("llama-3.1-8b"), 32, 80.0, batch=64)
    ranking = search(build_estimator(asked), asked)
    assert ranking.best
    for prediction in ranking.best:
        assert prediction.plan.violations() == []
        assert prediction.peak_bytes <= usable_bytes(asked)
        assert prediction.plan.layout.world == 32
    times = [prediction.step_s for prediction in ranking.best]
    assert times == pytest.approx(sorted(times), rel=1e-2)
    assert ranking.legal >= ranking.too_large + ranking.slower + len(ranking.best)


def test_what_is_fixed_stays() -> None:
    asked = plan(presets.model("llama-3.1-8b"), 16, 80.0, batch=64)
    ranking = search(build_estimator(asked), asked, fixed={"tp": (4,), "recompute": ("full",), "dp": (4,)})
    assert {(p.plan.layout.tp, p.plan.layout.recompute, p.plan.layout.dp) for p in ranking.best} == {(4, "full", 4)}


def test_where_nothing_fits_the_nearest_is_told() -> None:
    asked = plan(presets.model("llama-3.1-70b"), 4, 80.0)
    ranking: Ranking = search(build_estimator(asked), asked)
    assert not ranking.best
    assert ranking.nearest is not None
    assert ranking.nearest.peak_bytes > usable_bytes(asked)
    assert ranking.too_large == ranking.legal


@pytest.mark.parametrize("on", [True, False])
def test_pythons_collection_of_cycles_is_left_as_it_was(on: bool) -> None:
    asked = plan(presets.model("llama-3.1-8b"), 4, 80.0)
    (gc.enable if on else gc.disable)()
    try:
        search(build_estimator(asked), asked)
        assert gc.isenabled() == on
    finally:
        gc.enable()

"""The search against looking at every layout, one by one, with the rules of spec/legal.py and no bound."""

from dataclasses import replace
from itertools import product

import pytest

from meshwright.planner.predict import Estimator, estimator
from meshwright.planner.regions import cells, pipelines, splits
from meshwright.planner.search import Found, search, usable_bytes
from meshwright.spec import Cluster, Layout, ModelShape, Plan, Recipe, presets
from meshwright.spec.errors import IllegalLayout, PlanError
from meshwright.spec.schedule import NAMES

DENSE = replace(presets.model("llama-3.2-1b"), layers=6, tied=False)
ROUTED = replace(presets.model("mixtral-8x7b"), layers=4, hidden=1024, heads=8, kv_heads=2, head_dim=128, ffn=2048)


def plan(shape: ModelShape, devices: int, gib: float, batch: int = 16) -> Plan:
    device = replace(presets.device("h100"), memory_bytes=int(gib * 2**30))
    cluster = Cluster(device=device, devices_per_node=min(devices, 4), nodes=max(1, devices // 4))
    return Plan(model=shape, recipe=Recipe(sequence=2048, global_batch=batch, precision="bf16"), cluster=cluster)


def every_layout(of: Plan) -> list[Layout]:
    """All legal ones: no shortcut, but those that the search leaves out on purpose (said in regions.py)."""
    devices, batch, shape = of.cluster.devices, of.recipe.global_batch, of.model
    degrees = [d for d in range(1, devices + 1) if devices % d == 0]
    experts = [e for e in range(1, shape.moe.experts + 1)] if shape.moe else [1]
    found = []
    for tp, cp, pp, shard in product(degrees, repeat=4):
        if devices % (tp * cp * pp * shard):
            continue
        replicate = devices // (tp * cp * pp * shard)
        for sp, zero, ep, name, vp, micro, recompute in product(
            (False, True), range(4), experts, NAMES, range(1, shape.layers + 1), range(1, batch + 1),
            ("none", "selective", "full"),
        ):  # fmt: skip
            if (pp == 1 and (name != "1f1b" or vp > 1)) or (pp > 1 and zero > 1) or (zero == 0 and shard > 1):
                continue
            if name == "interleaved" and any(deepest(shape, pp, v) == deepest(shape, pp, vp) for v in range(2, vp)):
                continue
            if (name == "interleaved" and vp == 1) or (name == "zb-h1" and vp > 1) or pp * vp > shape.layers:
                continue
            layout = Layout(
                dp_replicate=replicate, dp_shard=shard, tp=tp, cp=cp, pp=pp, sp=sp, zero=zero, ep=ep, schedule=name,
                vp=vp, micro_batch=micro, recompute=recompute,
            )  # type: ignore[arg-type]  # fmt: skip
            if batch % layout.dp or batch // layout.dp % micro:
                continue
            try:
                if not replace(of, layout=layout).violations():
                    found.append(layout)
            except (IllegalLayout, PlanError):
                continue
    return found


def deepest(shape: ModelShape, pp: int, vp: int) -> int:
    """Layers of the largest stage, an end counted as one."""
    return -(-(shape.layers + 2) // (pp * vp))


def brute(of: Estimator, asked: Plan, layouts: list[Layout]) -> list[float]:
    """Seconds of those that fit, ascending."""
    made = (of.predict(replace(asked, layout=layout)) for layout in layouts)
    return sorted(one.step_s for one in made if one.peak_bytes <= usable_bytes(asked))


@pytest.mark.parametrize(("shape", "devices", "gib"), [(DENSE, 4, 80.0), (DENSE, 8, 5.0), (ROUTED, 4, 12.0)])
def test_search_finds_what_looking_at_every_layout_finds(shape: ModelShape, devices: int, gib: float) -> None:
    asked = plan(shape, devices, gib, batch=8)
    of = estimator(asked)
    found = search(of, asked, listed=5)
    every = every_layout(asked)
    assert found.legal == len(every) == legal(asked)
    expected = brute(of, asked, every)
    assert bool(found.best) == bool(expected)
    if expected:
        assert found.best[0].step_s == pytest.approx(expected[0], rel=2e-3)
        assert len(found.best) == min(5, len(expected))


def legal(of: Plan) -> int:
    """Counted region by region."""
    number = 0
    for cell in cells(of, of.cluster.devices, {}):
        per_rank = of.recipe.global_batch // cell.dp
        for micro in (d for d in range(1, per_rank + 1) if per_rank % d == 0):
            number += 3 * len(pipelines(of.model, cell, per_rank // micro, {})) * len(splits(cell, {}))
    return number


def test_every_listed_layout_is_legal_and_fits() -> None:
    asked = plan(presets.model("llama-3.1-8b"), 32, 80.0, batch=64)
    found = search(estimator(asked), asked)
    assert found.best
    for one in found.best:
        assert one.plan.violations() == []
        assert one.peak_bytes <= usable_bytes(asked)
        assert one.plan.layout.world == 32
    times = [one.step_s for one in found.best]
    assert times == pytest.approx(sorted(times), rel=1e-2)
    assert found.legal >= found.too_large + found.slower + len(found.best)


def test_what_is_fixed_stays() -> None:
    asked = plan(presets.model("llama-3.1-8b"), 16, 80.0, batch=64)
    found = search(estimator(asked), asked, fixed={"tp": (4,), "recompute": ("full",), "dp": (4,)})
    assert {(p.plan.layout.tp, p.plan.layout.recompute, p.plan.layout.dp) for p in found.best} == {(4, "full", 4)}


def test_where_nothing_fits_the_nearest_is_told() -> None:
    asked = plan(presets.model("llama-3.1-70b"), 4, 80.0)
    found: Found = search(estimator(asked), asked)
    assert not found.best
    assert found.nearest is not None
    assert found.nearest.peak_bytes > usable_bytes(asked)
    assert found.too_large == found.legal

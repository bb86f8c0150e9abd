"""What layouts share is counted once (planner/step/shared_costs.py): no answer may depend on what was asked before."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, cast

import pytest

from meshwright.planner.cost.stage_costs import FirstHalves
from meshwright.planner.step.predict import build_estimator, predict
from meshwright.planner.step.shared_costs import Memo, SharedCosts
from meshwright.spec import Layout, ModelShape, Plan, Recipe, presets
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout.layout import WORDS
from meshwright.spec.model.shape import LoRAShape

LLAMA, MOE, DEEPSEEK = (presets.model(name) for name in ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3"))
RANKS, RING = Layout(dp_shard=16, micro_batch=1), Layout(dp_shard=8, cp=2, micro_batch=1)
V = Layout(dp_shard=8, pp=2, vp=2, ep=8, zero=1, schedule="dualpipe-v", micro_batch=1)
SMALL = replace(presets.model("moe-tiny"), max_positions=4096)
SHARED: dict[str, tuple[Any, Layout, dict[str, Any]]] = {
    "pieces of experts": (MOE, V, {"schedule": "interleaved"}),
    "a ring": (LLAMA, RING, {"context": "all-gather"}),
    "how positions are cut": (LLAMA, RING, {"context_split": "chunks"}),
    "kernels that keep no norms": (DEEPSEEK, RANKS, {"kernels": "reference"}),
    "graphs": (SMALL, replace(RANKS, dp_shard=1, dp_replicate=16, compile="off"), {"cuda_graphs": "on"}),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_prediction_does_not_depend_on_what_was_predicted_before(name: str) -> None:
    model, layout, change = SHARED[name]
    recipe = Recipe(sequence=4096, global_batch=64, precision="bf16")
    plan = Plan(model=model, recipe=recipe, layout=layout, cluster=presets.cluster("h100x8", nodes=2))
    other = replace(plan, layout=replace(layout, **change))
    assert not plan.violations() and not other.violations()
    fresh = predict(plan)
    shared = build_estimator(plan)
    shared.predict(other)
    prediction = shared.predict(plan)
    assert (prediction.step_s, prediction.peak_bytes) == (fresh.step_s, fresh.peak_bytes)


CASES: dict[str, tuple[ModelShape, dict[str, Any], tuple[Layout, ...]]] = {
    "dense": (
        replace(LLAMA, layers=8), {}, (
            Layout(dp_shard=8, micro_batch=2, zero=1),
            Layout(dp_replicate=2, dp_shard=4, micro_batch=2, zero=3, recompute="norms"),
            Layout(dp_shard=2, tp=2, sp=True, cp=2, micro_batch=2, zero=2),
            Layout(dp_shard=2, tp=2, pp=2, vp=2, schedule="interleaved", micro_batch=2, zero=1, recompute="full"),
        ),
    ),
    "experts": (
        replace(MOE, layers=8), {}, (
            Layout(dp_shard=4, tp=2, sp=True, ep=4, micro_batch=2, zero=1),
            Layout(dp_shard=8, pp=2, vp=2, ep=8, zero=1, schedule="dualpipe-v", micro_batch=1),
            Layout(dp_shard=2, pp=2, vp=2, ep=2, cp=2, schedule="interleaved", micro_batch=2, zero=1),
        ),
    ),
    "windows, Muon, fp32": (
        replace(presets.model("gemma-3-1b"), layers=12), {"optimizer": "muon", "precision": "fp32"}, (
            Layout(dp_shard=8, micro_batch=2, zero=1), Layout(dp_shard=4, pp=2, micro_batch=2),
        ),
    ),
    "graphs": (SMALL, {}, (Layout(dp_replicate=8, micro_batch=1, compile="off"),)),
    "a teacher": (
        replace(LLAMA, layers=8), {"objective": "distill"}, (
            Layout(dp_shard=8, micro_batch=2, zero=3), Layout(dp_shard=4, pp=2, micro_batch=2, zero=1),
        ),
    ),
    "codes of adapters": (
        replace(LLAMA, layers=8, lora=LoRAShape(rank=16, base="nf4")), {}, (
            Layout(dp_shard=8, micro_batch=2, zero=3), Layout(dp_shard=2, tp=2, pp=2, micro_batch=2, zero=1),
        ),
    ),
}  # fmt: skip


def variants(layout: Layout) -> Iterator[Layout]:
    """The layout, and others that differ from it in one field: of each field, so that a new one is not forgotten."""
    yield layout
    for field in fields(Layout):
        now = getattr(layout, field.name)
        numbers = (not now,) if isinstance(now, bool) else (0, 1, 2, 4, 8) if isinstance(now, int) else ((5, 3), (3, 5))
        for other in WORDS.get(field.name, numbers):
            with suppress(IllegalLayout):
                yield replace(layout, **{field.name: other})


def cached(plan: Plan) -> Iterator[tuple[str, object, object]]:
    """(memo, key, what it keeps) of an estimator that was asked for this plan alone."""
    asked = build_estimator(plan)
    asked.measure(plan.layout, exact=False)
    asked.predict(plan)
    for memo in fields(Memo):
        known = getattr(asked._known, memo.name)
        known = known.operations if isinstance(known, FirstHalves) else known
        for key, entry in known.items() if isinstance(known, dict) else [known]:
            yield memo.name, key, entry


def conflicts(case: str) -> dict[str, tuple[Layout, Layout]]:
    """Memos whose keys lack something -> two layouts that have one key and not the same entry."""
    model, asked, layouts = CASES[case]
    recipe = Recipe(sequence=4096, global_batch=64, **{"precision": "bf16", **asked})
    seen: dict[tuple[str, object], tuple[object, Layout]] = {}
    pairs: dict[str, tuple[Layout, Layout]] = {}
    for layout in (other for base in layouts for other in variants(base)):
        nodes, teacher = layout.world // 8, LLAMA if recipe.objective == "distill" else None
        cluster = presets.cluster("h100x8", nodes or 1)
        plan = Plan(model=model, recipe=recipe, layout=layout, cluster=cluster, teacher=teacher)
        if layout.world % 8 or plan.violations():
            continue
        for memo, key, entry in cached(plan):
            before, first = seen.setdefault((memo, key), (entry, layout))
            if before != entry:
                pairs[memo] = first, layout
    assert len(seen) > 100
    return pairs


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_keys_have_all_that_an_entry_depends_on(case: str) -> None:
    """Layouts that differ in any one field, on any number of nodes: where they have a key in common, each by itself
    makes the same entry."""
    assert not conflicts(case)


@pytest.mark.parametrize(("case", "keys", "forgotten"), [
    ("dense", "_key", "context_split"), ("dense", "_key", "tp_chunks"), ("dense", "_stages_key", "offload"),
    ("experts", "_key", "ep_chunks"), ("graphs", "_key", "cuda_graphs"),
])  # fmt: skip
def test_a_field_that_a_key_forgets_is_told(
    case: str, keys: str, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = getattr(SharedCosts, keys)

    def without(costs: SharedCosts, layout: Layout) -> tuple[object, ...]:
        return cast(tuple[object, ...], whole(costs, replace(layout, **{forgotten: getattr(Layout(), forgotten)})))

    monkeypatch.setattr(SharedCosts, keys, without)
    told = conflicts(case)
    assert any(getattr(layout, forgotten) != getattr(other, forgotten) for layout, other in told.values())

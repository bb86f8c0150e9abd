"""Costs that layouts share are counted once (planner/cost/recorded.py): no answer may depend on an earlier question."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import pytest

from meshwright.planner.cost.recorded import Memo, recorded, with_fields
from meshwright.planner.step.predict import build_estimator, predict
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
    "products in 8 bits": (
        replace(LLAMA, layers=8), {"products": "fp8-all"}, (
            Layout(dp_shard=8, micro_batch=2, zero=1), Layout(dp_shard=2, tp=2, pp=2, micro_batch=2, zero=1),
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_shared_answers_equal_fresh_ones(case: str) -> None:
    """Layouts that differ in any one field, in random order, all asked of one estimator and each of its own."""
    model, options, layouts = CASES[case]
    recipe = Recipe(sequence=4096, global_batch=64, **{"precision": "bf16", **options})
    plans = []
    for layout in (other for base in layouts for other in variants(base)):
        cluster = presets.cluster("h100x8", nodes=max(1, layout.world // 8))
        teacher = LLAMA if recipe.objective == "distill" else None
        plan = Plan(model=model, recipe=recipe, layout=layout, cluster=cluster, teacher=teacher)
        if layout.world % 8 == 0 and not plan.violations():
            plans.append(plan)
    assert len(plans) > 10
    Random(case).shuffle(plans)
    shared = build_estimator(plans[0])
    for plan in plans:
        fresh, asked = build_estimator(plan), shared.on_nodes(plan.cluster.nodes)
        assert asked.measure(plan.layout, exact=False) == fresh.measure(plan.layout, exact=False), plan.layout
        assert asked.measure(plan.layout) == fresh.measure(plan.layout), plan.layout
        assert asked.least_s(plan.layout) == fresh.least_s(plan.layout), plan.layout


@dataclass(frozen=True)
class Degrees:
    """A small layout."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0

    @property
    def shards(self) -> int:
        """Ranks that share the states."""
        return self.dp if self.zero else 1

    def chunks(self, parts: int) -> int:
        """Parts of a pipeline."""
        return self.pp * parts


def rule(degrees: Degrees, extra: int = 0) -> tuple[int, ...]:
    """Read pp only behind a condition, a property, and a method."""
    return degrees.tp, degrees.shards, extra, *((degrees.pp, degrees.chunks(2)) if degrees.tp > 1 else ())


def drawn(dice: Random) -> Degrees:
    return Degrees(dice.choice((1, 2)), dice.choice((1, 2, 3)), dice.choice((1, 2, 3)), dice.choice((0, 1)))


def test_a_rule_that_reads_another_field_gets_no_stale_answer() -> None:
    dice, calls = Random(1), 0

    def counted(degrees: Degrees, extra: int) -> tuple[int, ...]:
        nonlocal calls
        calls += 1
        return rule(degrees, extra)

    memo = Memo(counted)
    for _ in range(2000):
        degrees, extra = drawn(dice), dice.choice((0, 1))
        assert memo(degrees, extra) == rule(degrees, extra)
    # 2 x 3 answers of (tp, shards), with 3 of pp where it is read, and 2 of the argument. A key that widens drops the
    # few answers before it.
    assert calls <= 2 * (3 + 3 * 3) + 15


def test_a_memo_inside_a_memo_passes_on_what_it_depends_on() -> None:
    dice, inner = Random(2), Memo(rule)
    outer = Memo(lambda degrees: (degrees.zero > 5, inner(degrees, 1)))
    changed = Memo(lambda degrees: inner(with_fields(degrees, zero=1), 1))
    for _ in range(2000):
        degrees = drawn(dice)
        assert outer(degrees) == (False, rule(degrees, 1))
        assert changed(degrees) == rule(replace(degrees, zero=1), 1)


def test_what_is_not_read_does_not_matter() -> None:
    calls: list[Degrees] = []
    memo = Memo(lambda degrees: calls.append(degrees) or degrees.shards)
    assert [memo(Degrees(tp=tp, dp=dp)) for tp in (1, 2, 4) for dp in (1, 2)] == [1] * 6 and len(calls) == 1
    assert [memo(Degrees(dp=dp, zero=1)) for dp in (1, 2)] == [1, 2] and len(calls) == 2


def test_a_replaced_stand_in_depends_on_all_fields() -> None:
    memo = Memo(lambda degrees: replace(degrees, tp=7))
    for degrees in (Degrees(), Degrees(dp=2), Degrees(tp=3), Degrees(dp=2)):
        assert memo(degrees) == replace(degrees, tp=7)


def test_a_stand_in_is_no_key_and_ends_with_its_rule() -> None:
    escaped: list[Degrees] = []
    Memo(lambda degrees: escaped.append(degrees))(Degrees())
    with pytest.raises(AttributeError):
        _ = escaped[0].tp
    with pytest.raises(TypeError, match="unhashable"):
        Memo(lambda degrees: {degrees})(Degrees())
    with pytest.raises(TypeError, match="compares fields"):
        Memo(lambda degrees: degrees == Degrees())(Degrees())


def test_instances_share_no_answers_and_old_ones_are_dropped() -> None:
    class Costs:
        def __init__(self, factor: int) -> None:
            self.factor, self.calls = factor, 0

        def scaled(self, degrees: Degrees) -> int:
            self.calls += 1
            return degrees.tp * self.factor

        recent = recorded(scaled, most=2)

    first, second = Costs(1), Costs(10)
    assert [costs.recent(Degrees(tp=3)) for costs in (first, second)] == [3, 30]
    assert [first.recent(Degrees(tp=tp)) for tp in (3, 4, 5, 5, 3)] == [3, 4, 5, 5, 3] and first.calls == 4

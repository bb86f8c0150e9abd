"""Seconds of this engine's steps on a GPU: against the steps, kernels and limits that one H200 measured."""

import json
from collections import Counter
from dataclasses import replace
from statistics import mean
from typing import Literal

import pytest

from benchmarks.measured_steps import MEASURED_STACK, TABLE, MeasuredStep, left_out, read
from meshwright.planner.cost.block import embedding, head, layer
from meshwright.planner.cost.speeds import ARCHITECTURES, attention_of, engine_speeds, speeds_of
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.cost.work import MemoryPass
from meshwright.planner.explain import BEST_MFU, caveats, document
from meshwright.planner.kernels.kernel_operations import AttentionCore, Product
from meshwright.planner.step.predict import build_estimator, predict
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.plan.plan import Cluster


@pytest.fixture(scope="module")
def steps() -> list[MeasuredStep]:
    return read()


def test_steps_are_planned_as_they_were_measured(steps: list[MeasuredStep]) -> None:
    errors = [abs(step.planned_s() / step.step_s - 1) for step in steps]
    assert len(errors) == 20 and mean(errors) < 0.025 and max(errors) < 0.06


def test_constants_fitted_without_a_row_plan_it(steps: list[MeasuredStep]) -> None:
    errors = [abs(error) for error in left_out(steps)]
    assert mean(errors) < 0.025 and max(errors) < 0.06


KERNELS_MS = {
    "llama-3.1-8b/20, 8,192 x 1, compile=on": {"products": 305.2, "attention": 146.2, "optimizer": 83.5},
    "qwen3-30b-a3b/6, 4,096 x 2, compile=on": {"products": 55.3, "attention": 23.2, "optimizer": 65.3},
    "gpt2-124m, 1,024 x 32, compile=on": {"products": 88.1, "attention": 11.6},
}
"""Time by kernel of whole steps, torch's profiler: aten::mm, addmm and _grouped_mm; flash attention; fused AdamW,
copies that widen gradients, new weights and the norm."""


@pytest.mark.parametrize("words", KERNELS_MS)
def test_each_part_of_a_step_takes_what_its_kernels_took(words: str, steps: list[MeasuredStep]) -> None:
    """By kernels alone, as a profiled step after a pause has them: power does not bound it yet."""
    step = next(candidate for candidate in steps if candidate.words == words)
    estimator = build_estimator(step.plan, MEASURED_STACK)
    local, _ = estimator.costs.parts(step.plan.layout)
    shape, parts = step.plan.model, Counter[str]()
    blocks = [(embedding(local), 1), (head(local), 1), (layer(local, routed=bool(shape.moe)), shape.layers)]
    for block, times in blocks:
        for op in block.operations:
            for work in (*op.forward, *op.inputs, *op.weights):
                kind = {Product: "products", AttentionCore: "attention", MemoryPass: "passes"}[type(work)]
                parts[kind] += times * estimator.speeds.seconds(work) * 1e3
    parts["optimizer"] = estimator.time(step.plan.layout).optimizer_s * 1e3
    for kind, took in KERNELS_MS[words].items():
        assert parts[kind] == pytest.approx(took, rel=0.06), kind


def test_power_bounds_products_by_their_share_of_the_time() -> None:
    speeds = engine_speeds(presets.device("h200"))
    assert speeds.power is not None
    dynamic, static = speeds.power
    slower = {share: speeds.slowed(share, 1 - share) for share in (0.3, 0.5, 0.7, 0.9, 1.0)}
    assert slower[0.3] == 1 and sorted(slower.values()) == list(slower.values()) and slower[1.0] > 1.2
    for share, slow in slower.items():
        spared = dynamic / slow**2 - static * slow  # what products draw above the limit, over what others spare
        assert slow == 1 or spared == pytest.approx((1 - share) / share, abs=2e-3)
    assert speeds_of(presets.device("h200")).slowed(1.0, 0.0) == 1


def test_published_software_on_hopper_is_at_the_same_limit() -> None:
    """Nobody fitted these two to one another: runs of Megatron-LM and others on H100, 85 % products, and our steps."""
    published, ours = (source(presets.device("h100")) for source in (speeds_of, engine_speeds))
    bound = ours.product_share / ours.slowed(0.85, 0.15)
    assert bound == pytest.approx(ARCHITECTURES["H100"]["product_share"], rel=0.06) and published.power is None


def test_other_software_and_devices_keep_their_rates() -> None:
    for name in ("a100", "b200", "l40s", "mi300x"):
        assert engine_speeds(presets.device(name)) == speeds_of(presets.device(name)), name


def plan(model: str = "llama-3.2-1b", cluster: str = "h200x1", **recipe: object) -> Plan:
    asked = {"sequence": 4096, "global_batch": 4, "precision": "bf16", "document_mask": False, **recipe}
    return Plan(
        model=presets.model(model), cluster=Cluster(device=presets.cluster(cluster).device),
        layout=Layout(micro_batch=4), recipe=Recipe(**asked),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("row", "took"),
    [("llama-3.1-8b/20, 8,192 x 1, compile=on", 0.530), ("llama-3.2-1b, 32,768 x 1, compile=on", 1.007)],
)
def test_steps_with_cudnns_attention(row: str, took: float, steps: list[MeasuredStep]) -> None:
    """The same steps of the same H200 with that kernel switched on: products slow down as attention speeds up."""
    step = next(candidate for candidate in steps if candidate.words == row)
    estimators = {flash: build_estimator(step.plan, replace(MEASURED_STACK, flash=flash)) for flash in (2, 3)}
    assert estimators[3].time(step.plan.layout).total_s == pytest.approx(took, rel=0.04)
    alone = estimators[3].speeds.attention_forward / estimators[2].speeds.attention_forward
    assert alone > 1.8 and estimators[3].speeds.parted == estimators[2].speeds.parted


def test_plans_take_the_attention_that_the_engine_takes() -> None:
    kernels = {
        (cluster, *changes.items()): attention_of(MESHWRIGHT, plan(cluster=cluster, **changes))
        for cluster in ("h100x1", "h200x1", "b200x1", "a100x1")
        for changes in ({}, {"dropout": 0.1}, {"deterministic": True}, {"sequence": 512})
    }
    assert {name for name, flash in kernels.items() if flash == 3} == {("h100x1",), ("h200x1",), ("b200x1",)}
    whole, packed = (predict(plan(document_mask=mask)).step_s for mask in (False, True))
    assert packed > 1.05 * whole  # a document that fills its row takes the kernel that reads where each begins


def test_documents_take_what_their_lengths_ask_for() -> None:
    packed = plan(document_mask=True)
    by_length = {tokens: predict(packed, document_tokens=tokens).step_s for tokens in (64, 512, 2048, 4096, 0)}
    whole = predict(plan()).step_s
    assert by_length[64] < by_length[512] < by_length[2048] < by_length[4096] == by_length[0]
    assert predict(plan(), document_tokens=64).step_s == whole < by_length[0]  # no mask; the plain kernel
    pairs = {  # keys that a query sees, on average, against the FLOP that is planned
        tokens: sum(
            work.flop
            for op in layer(build_estimator(packed, document_tokens=tokens).costs.parts(packed.layout)[0]).operations
            for work in op.forward
            if isinstance(work, AttentionCore)
        )
        for tokens in (512, 4096)
    }
    assert pairs[4096] == 8 * pairs[512] == 4 * 4 * 4096 * (4096 / 2) * 2048


def test_experts_compute_the_tiles_that_their_rows_begin() -> None:
    speeds = engine_speeds(presets.device("h200"))
    even, each = Product(512, 2048, 768, 128.0), Product(512, 2048, 768, 128.0, grouped=True)
    assert speeds.seconds(each) > 1.2 * speeds.seconds(even)
    routed = plan("qwen3-30b-a3b")
    local, _ = build_estimator(routed).costs.parts(routed.layout)
    rows = {
        work.m for op in layer(local, routed=True).operations if op.name.startswith("experts") and op.forward
        for work in op.forward if isinstance(work, Product)
    }  # fmt: skip
    assert rows == {4 * 4096 * 8 / 128 + 64}


def test_odd_widths_fall_off_the_fast_kernels() -> None:
    speeds = engine_speeds(presets.device("h200"))
    fast, slow = (speeds.seconds(Product(2521, 768, vocab)) for vocab in (50304, 50257))
    assert 4 < slow / fast < 8 and speeds.is_bound(Product(1, 8, 8)) and not speeds.is_bound(Product(1, 8, 50257))
    odd = replace(plan("gpt2-124m", sequence=1024, global_batch=32), layout=Layout(micro_batch=32))
    padded, plain = (predict(odd, stack).step_s for stack in (MESHWRIGHT, MEASURED_STACK))
    assert plain > 1.4 * padded


def test_gradients_of_later_micro_batches_are_added() -> None:
    single, four = (replace(plan(), recipe=replace(plan().recipe, global_batch=4 * times)) for times in (1, 4))
    more = predict(four).time.optimizer_s - predict(single).time.optimizer_s
    assert more > 3 * 1.2e9 * 10 / 4.8e12  # 10 bytes of each parameter, at the memory's rate


def test_what_was_not_measured_and_what_nobody_reached_is_said() -> None:
    a100 = presets.device("a100")
    dense = Plan(
        model=presets.model("llama-2-13b"), cluster=Cluster(device=a100, devices_per_node=4),
        layout=Layout(dp_shard=4, zero=3, micro_batch=1),
        recipe=Recipe(sequence=2048, global_batch=4, precision="bf16"),
    )  # fmt: skip
    prediction = predict(dense)
    best, source = BEST_MFU["A100"]
    faster = replace(
        prediction,
        time=replace(prediction.time, compute_s=prediction.time.compute_s * prediction.mfu(causal=False) / 0.75),
    )
    faster = replace(faster, time=replace(faster.time, weights_s=0.0, gradients_s=0.0, optimizer_s=0.0))
    assert faster.mfu(causal=False) > best > 0
    (above,) = (line for line in caveats(faster) if "above the best published" in line)
    assert f"{best:.0%}" in above and source in above
    assert above in document(faster)["caveats"] and json.dumps(document(faster))
    slower = replace(faster, time=replace(faster.time, compute_s=2 * faster.time.compute_s))
    assert not any("above the best" in line for line in caveats(slower))
    assert any("prediction" in line for line in caveats(prediction)) and any(
        "Documents" in line for line in caveats(prediction)
    )
    there = caveats(predict(plan(document_mask=True), document_tokens=512))
    assert not any("prediction" in line or "Documents" in line for line in there)


def test_the_table_says_what_it_is() -> None:
    assert TABLE.is_file() and {step.plan.cluster.device.name for step in read()} == {"H200-SXM"}


@pytest.mark.parametrize(
    ("name", "products", "count"),
    [("qwen3-30b-a3b", "fp8-all", 1), ("qwen3-30b-a3b", "fp8", 0), ("llama-3.1-8b", "fp8-all", 0)],
)
def test_experts_in_8_bits_are_said_to_be_slow(name: str, products: Literal["fp8", "fp8-all"], count: int) -> None:
    """fp8 leaves them as they are; only who asks for fp8-all has them rounded."""
    plan = Plan(
        model=presets.model(name), cluster=Cluster(device=presets.device("h200-sxm"), devices_per_node=8),
        layout=Layout(dp_shard=8, zero=1, micro_batch=1),
        recipe=Recipe(sequence=2048, global_batch=8, precision="bf16", products=products),
    )  # fmt: skip
    assert sum("leaves experts in bf16" in line for line in caveats(predict(plan))) == count

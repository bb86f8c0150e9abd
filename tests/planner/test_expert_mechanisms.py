"""Experts of other software: what waits for the host, what runs behind what, and recipes that say which."""

import random
from dataclasses import replace

import pytest

from meshwright.planner.accuracy.published_stacks import COUNTS_S, MEGATRON_CORE, TORCHTITAN, as_recipe_ran
from meshwright.planner.cost.exchanges import nodes_reached
from meshwright.planner.cost.speeds import FP8_SHARE, speeds_of
from meshwright.planner.cost.stack import Stack
from meshwright.planner.cost.stage_costs import mean_window
from meshwright.planner.step.predict import predict
from meshwright.planner.time.timeline import StepTime
from meshwright.spec import presets
from meshwright.spec.layout.layout import Layout
from meshwright.spec.plan.plan import Plan
from meshwright.spec.recipe.recipe import Recipe

MXFP8 = replace(MEGATRON_CORE, product_bytes=1.0)


def plan(ep: int = 8) -> Plan:
    return Plan(
        model=presets.model("qwen3-30b-a3b"),
        recipe=Recipe(sequence=4096, global_batch=128, precision="bf16"),
        layout=Layout(dp_shard=8, zero=1, ep=ep, micro_batch=4),
        cluster=presets.cluster("b200x8", 1),
    )


def time_with(**changes: object) -> StepTime:
    return predict(plan(), replace(MXFP8, **changes)).time  # type: ignore[arg-type]  # fields of Stack


def test_the_host_is_paid_once_a_pass_and_once_an_expert() -> None:
    """4 micro-batches of 48 layers, forward and backward, with 16 experts a rank."""
    none = time_with(expert_launch_s=0.0).total_s
    passes = 2 * 4 * 48
    assert time_with(expert_launch_s=1e-4).total_s - none == pytest.approx(passes * 16e-4, rel=1e-6)
    assert time_with(expert_launch_s=0.0, counts_s=1e-3).total_s - none == pytest.approx(passes * 1e-3, rel=1e-6)


def test_hidden_exchanges_cost_what_they_slow() -> None:
    shown, hidden = time_with(), time_with(hides_experts=1.0)
    assert shown.exchange_s > 0 and hidden.exchange_s == pytest.approx(0, abs=1e-9)
    assert hidden.compute_s - shown.compute_s == pytest.approx(MXFP8.contention * shown.exchange_s)


def test_no_more_is_hidden_than_is_computed() -> None:
    slow = plan().cluster
    slow = replace(slow, device=replace(slow.device, link_bytes_per_s=2e9))
    shown, hidden = (
        predict(replace(plan(), cluster=slow), replace(MXFP8, hides_experts=share)).time for share in (0.0, 1.0)
    )
    assert shown.exchange_s > shown.compute_s
    assert 0 < shown.exchange_s - hidden.exchange_s <= shown.compute_s * 1.001


def test_experts_multiply_at_the_width_of_the_recipe_and_fuse_what_surrounds_them() -> None:
    wide, narrow, fused = (
        predict(plan(), stack).time.compute_s for stack in (MEGATRON_CORE, MXFP8, replace(MXFP8, fused_experts=True))
    )
    assert fused < narrow < wide


def columns(release: str, gpu: str, model: str, precision: str) -> dict[str, str]:
    source = f"NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md, {release} NeMo Container, Pre-Training"
    return {"source": source, "gpu": gpu, "model": model, "precision": precision}


@pytest.mark.parametrize(
    ("row", "graph", "hidden", "counts"),
    [
        (columns("26.06", "DGX-GB300", "DeepSeekV3", "MXFP8"), True, True, False),
        (columns("26.08", "DGX-GB200", "Qwen3_30B_a3B", "MXFP8"), True, True, False),
        (columns("26.06", "DGX-B300", "Qwen3_30B_a3B", "MXFP8"), True, True, False),
        (columns("26.06", "DGX-B300", "GPT OSS 120B", "MXFP8"), False, False, False),
        (columns("26.06", "DGX-H100", "GPT OSS 120B", "BF16"), False, False, True),
        (columns("26.04", "DGX-GB300", "GPT OSS 120B", "BF16"), False, False, True),
        (columns("26.06", "DGX-GB300", "Kimi_K2", "MXFP8"), False, False, False),
        (columns("26.04", "DGX-GB300", "DeepSeekV3", "MXFP8"), False, False, False),
        (columns("26.04.01", "DGX-B200", "DeepSeekV3", "MXFP8"), False, True, False),
        (columns("26.04", "DGX-B200", "Qwen3_235B_a22B", "MXFP8"), False, False, True),
        (columns("26.04", "DGX-GB300", "Qwen3_235B_a22B", "BF16"), False, False, False),
        (columns("25.11", "DGX-H100", "Qwen3_30B_a3B", "FP8-CS"), False, False, True),
    ],
    ids=lambda value: value["source"].split(", ")[1][:8] + value["gpu"][3:] if isinstance(value, dict) else "",
)
def test_recipes_of_releases(row: dict[str, str], graph: bool, hidden: bool, counts: bool) -> None:
    """Against scripts/performance/configs at v0.2.0 to v0.5.0 and perf_recipes at v0.6.0, read by hand."""
    stack: Stack = as_recipe_ran(MEGATRON_CORE, row)
    assert (stack.host_s == 0, stack.fused_experts, stack.hides_experts == 1) == (graph, graph, hidden)
    assert stack.counts_s == (COUNTS_S if counts else 0.0)
    assert stack.routes_once is not counts


def test_other_rows_are_left_alone() -> None:
    row = {**columns("26.06", "DGX-GB300", "DeepSeekV3", "MXFP8"), "source": "NVIDIA/NeMo"}
    assert as_recipe_ran(MEGATRON_CORE, row) is MEGATRON_CORE


def test_fp8_without_a_measured_product_reaches_a_little_less_than_bf16_does() -> None:
    """The rule, on devices whose fp8 products were measured too: within a tenth."""
    for name in ("h100", "b200", "gb200", "b300"):
        device = presets.device(name)
        share = device.bf16_matmul_flop_per_s / device.bf16_flop_per_s
        guessed = speeds_of(replace(device, fp8_matmul_flop_per_s=0.0)).low_flop_per_s
        assert guessed == pytest.approx(FP8_SHARE * share * device.fp8_flop_per_s)
        assert guessed == pytest.approx(device.fp8_matmul_flop_per_s, rel=0.1)


def test_biases_of_experts_are_paid_for_each_row() -> None:
    """72 bytes of each element of the experts' results, at the share of the memory's rate, and launches."""
    oss = replace(plan(), model=presets.model("gpt-oss-120b"))
    without, added = (predict(oss, replace(MXFP8, adds_expert_biases=on)).time.compute_s for on in (False, True))
    speeds = speeds_of(oss.cluster.device, MXFP8.flash)
    rows = 4 * 4 * 4096 * 4
    moved_s = 36 * rows * 2880 * 72 / (speeds.memory_bytes_per_s * speeds.memory_share)
    launches_s = 36 * 4 * 10 * 16 * (speeds.launch_s + MXFP8.expert_launch_s / 6)
    assert added - without == pytest.approx(moved_s + launches_s, rel=0.02)
    qwen = [predict(plan(), replace(MXFP8, adds_expert_biases=on)).time.compute_s for on in (False, True)]
    assert qwen[0] == qwen[1], "its experts have none"


@pytest.mark.parametrize(
    ("window", "sequence", "every"), [(128, 4096, 2), (512, 2048, 4), (4096, 4096, 2), (64, 512, 1)]
)
def test_layers_of_two_kinds_see_the_mean_of_both(window: int, sequence: int, every: int) -> None:
    def seen(span: int) -> float:
        return sum(min(query + 0.5, span) for query in range(sequence)) / sequence

    mean = (seen(sequence) + (every - 1) * seen(window)) / every
    assert seen(mean_window(window, sequence, every)) == pytest.approx(mean, rel=2e-3)


def test_ring_attention_of_torch_pays_for_each_part_and_each_head() -> None:
    """Merging is by bytes: of the rank that is busiest, cp parts. Without context parallelism nothing is merged."""
    long = replace(
        plan(1), model=presets.model("llama-3.1-8b"),
        recipe=Recipe(sequence=131072, global_batch=1, precision="bf16"),
    )  # fmt: skip
    alone, over = Layout(zero=0), Layout(cp=8, zero=0)
    eager, fused = TORCHTITAN, replace(TORCHTITAN, merges="fused")
    times = {
        (layout.cp, stack.merges): predict(replace(long, layout=layout), stack).time
        for layout in (alone, over)
        for stack in (eager, fused)
    }
    assert times[1, "eager"] == times[1, "fused"]
    speeds = speeds_of(long.cluster.device)
    elements = 131072 / 8 * 4096
    moved = 28 + 7 * 38 + 46 + 8 * (10 + 2 * 21)
    slower = times[8, "eager"].compute_s - times[8, "fused"].compute_s
    least = 32 * elements * moved / (speeds.memory_bytes_per_s * speeds.memory_share)
    assert least < slower < 2 * least, "shorter parts also take the kernel longer"


@pytest.mark.parametrize(
    ("routes", "nodes", "groups", "top"),
    [(8, 8, 1, 1), (8, 8, 8, 4), (4, 2, 1, 1), (8, 4, 8, 4), (8, 3, 8, 4), (8, 3, 8, 1), (8, 5, 8, 4), (9, 3, 16, 1)],
)
def test_a_token_reaches_as_many_nodes_as_drawn_ones_do(routes: int, nodes: int, groups: int, top: int) -> None:
    """Drawn: groups without repeats, then experts among them, many to a node. Groups that lie across a border are
    counted as if they did not."""
    dice, drawn = random.Random(7), 0
    for _ in range(4000):
        within = dice.sample(range(groups), top) if groups > 1 else [0]
        each = nodes / groups
        nodes_of_experts = [dice.choice(within) * each + dice.random() * each for _ in range(routes)]
        drawn += len({int(node) for node in nodes_of_experts})
    expected = nodes_reached(routes, nodes, groups, top)
    assert expected == pytest.approx(drawn / 4000, rel=0.02 if nodes % groups == 0 or groups % nodes == 0 else 0.2)


def test_tokens_that_travel_in_fewer_bytes_take_less_of_the_network_one_way() -> None:
    """Two of the four exchanges of a layer carry half the bytes."""
    far = replace(plan(), cluster=replace(presets.cluster("b200x8", 1), devices_per_node=1, nodes=8))
    wide, narrow = (predict(far, replace(MXFP8, dispatch_bytes=each)).time.exchange_s for each in (0.0, 1.0))
    assert narrow == pytest.approx(0.75 * wide, rel=0.02)

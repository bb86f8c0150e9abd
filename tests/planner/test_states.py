"""States by layout.

To the byte what spec/memory/held.py counts parameter by parameter, and the lectures' table. Real tensors
of both: tests/training/test_memory.py."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.cost.stack import MESHWRIGHT, Stack
from meshwright.planner.cost.states import ElementCounts, counts, states
from meshwright.spec import presets
from meshwright.spec.layout.layout import Layout, layers_of_stages, own_stages, pipeline_ranks
from meshwright.spec.memory.held import memory
from meshwright.spec.model.shape import MLAShape, ModelShape, MoEShape
from meshwright.spec.weights.boxes import FP32_STATES, StateStorage
from meshwright.spec.weights.inventory import num_parameters
from meshwright.verbs.verify.cases import random_case

LLAMA = ModelShape(
    name="small", family="llama", vocab=320, layers=8, hidden=64, heads=8, kv_heads=4, ffn=176, norm="rmsnorm",
    mlp="swiglu", positions="rope", max_positions=64,
)  # fmt: skip
GPT = replace(
    LLAMA, family="gpt2", kv_heads=8, norm="layernorm", mlp="gelu_tanh", positions="learned", ffn=256, qkv_bias=True,
    out_bias=True, mlp_bias=True, tied=True,
)  # fmt: skip
ROUTED = replace(LLAMA, family="mixtral", moe=MoEShape(experts=8, top_k=2, ffn=48))
LATENT = replace(
    LLAMA, family="deepseek", kv_heads=8, mla=MLAShape(q_rank=32, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=8),
    moe=MoEShape(experts=8, top_k=2, ffn=48, shared_experts=1, first_dense=2),
)  # fmt: skip
SHAPES = {"llama": LLAMA, "gpt2": GPT, "mixtral": ROUTED, "deepseek": LATENT}
LAYOUTS = [
    Layout(),
    Layout(dp_replicate=4),
    *(Layout(dp_shard=3, zero=zero) for zero in (1, 2, 3)),
    *(Layout(dp_shard=2, cp=2, zero=zero) for zero in (1, 2, 3)),
    Layout(dp_replicate=2, dp_shard=2, zero=3),
    Layout(tp=2, sp=True),
    Layout(tp=4, dp_shard=2, zero=1),
    Layout(pp=4),
    *(Layout(pp=2, dp_shard=2, zero=zero) for zero in (1, 2, 3)),
    Layout(pp=2, vp=2, schedule="interleaved", tp=2),
    Layout(pp=2, vp=2, schedule="zb-v", dp_shard=2, zero=2),
]
EXPERT_LAYOUTS = [
    Layout(dp_shard=4, ep=4, zero=1),
    Layout(dp_shard=4, ep=2, zero=3),
    Layout(dp_shard=2, tp=2, ep=4, zero=2),
    Layout(dp_shard=2, ep=2, pp=2, zero=1),
]


def planned(
    shape: ModelShape, layout: Layout, precision: str, pp_rank: int, storage: StateStorage = FP32_STATES, **batch: Any
) -> dict[str, dict[str, float]]:
    """Of a pipeline place, as the estimator asks for it: {phase: {kind: bytes}} without those that have nothing."""
    count = stage_counts(shape, layout, pp_rank, storage)
    bytes_by_kind = states(MESHWRIGHT, layout, precision, count, storage=storage, **batch)
    phases = {"step": bytes_by_kind.step, "update": bytes_by_kind.update}
    return {phase: {kind: size for kind, size in kinds.items() if size} for phase, kinds in phases.items()}


def stage_counts(shape: ModelShape, layout: Layout, pp_rank: int, storage: StateStorage = FP32_STATES) -> ElementCounts:
    split, stages = layers_of_stages(shape.layers, layout), own_stages(layout, pp_rank)
    layers = tuple(layer for stage in stages for layer in split[stage])
    return counts(shape, layout, layers, first=0 in stages, last=len(split) - 1 in stages, storage=storage)


@pytest.mark.parametrize(
    "storage",
    [FP32_STATES, StateStorage("bf16", False), StateStorage("int8"), StateStorage("int8", True, "muon")],
    ids=str,
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_states_are_those_of_the_inventory(name: str, precision: str, storage: StateStorage) -> None:
    shape = SHAPES[name]
    layouts = LAYOUTS + (EXPERT_LAYOUTS if shape.moe else [])
    for layout in layouts:
        for stage in range(layout.pp):
            rank = stage * layout.dp * layout.cp * layout.tp
            ledger = memory(shape, layout, precision, rank, storage=storage)
            assert planned(shape, layout, precision, stage, storage) == ledger, (layout, stage)


@pytest.mark.parametrize("seed", range(4))
def test_states_of_random_plans_are_those_of_the_inventory(seed: int) -> None:
    """Shapes whose sizes divide nothing, and every axis; of each pipeline place the rank that holds most."""
    for index in range(100):
        drawn = random_case(seed, index)
        case, layout = drawn.case, drawn.layout
        batch = {"micro_batches": layout.micro_batches(case.global_batch)}
        for pp_rank, rank in enumerate(pipeline_ranks(layout)):
            storage = case.recipe.storage
            want = memory(case.shape, layout, case.precision, rank, storage=storage, **batch)
            assert planned(case.shape, layout, case.precision, pp_rank, storage, **batch) == want, (drawn, pp_rank)


@pytest.mark.parametrize(
    ("storage", "per_parameter"),
    [
        (FP32_STATES, 12.0), (StateStorage("bf16"), 8.0), (StateStorage("int8"), 6.03),
        (StateStorage("bf16", False), 4.0), (StateStorage("int8", False), 2.03),
        (StateStorage(optimizer="muon"), 8.523), (StateStorage("bf16", False, "muon"), 2.262),
    ],
    ids=str,
)  # fmt: skip
def test_bytes_of_an_8b_model_for_each_parameter(storage: StateStorage, per_parameter: float) -> None:
    """Masters and moments of Llama-3.1-8B in bf16: a scale for 256 elements is 1/64 byte of each moment; 13 % of the
    model are embedding, head and norms, of which Muon has none."""
    shape = presets.model("llama-3.1-8b")
    held = memory(shape, Layout(), "bf16", storage=storage)["update"]
    assert (held.get("masters", 0) + held["moments"]) / num_parameters(shape) == pytest.approx(per_parameter, abs=0.005)


def test_sixteen_bytes_a_parameter_and_the_table_of_zero() -> None:
    """Rajbhandari et al. 2020, figure 1: 2 + 2 + 12 bytes, of which ZeRO shares 12, 14 and 16 by n."""
    n, table = 4, {0: (16.0, 0.0), 1: (4.0, 12.0), 2: (2.0, 14.0), 3: (0.0, 16.0)}
    flat = Stack(name="flat")
    for zero, (whole, shared) in table.items():
        layout = Layout(dp_shard=n, zero=zero) if zero else Layout(dp_replicate=n)  # type: ignore[arg-type]
        count = stage_counts(LLAMA, layout, 0)
        held = {kind: size for kind, size in states(flat, layout, "bf16", count).step.items() if kind != "counters"}
        assert sum(held.values()) == whole * count.whole + shared * count.whole / n


def test_fp32_runs_hold_sixteen_bytes_too() -> None:
    count = stage_counts(LLAMA, Layout(), 0)
    held = states(MESHWRIGHT, Layout(), "fp32", count)
    assert sum(size for kind, size in held.step.items() if kind != "counters") == 16 * count.whole
    assert held.step["masters"] == 0


def test_a_shard_may_be_the_master() -> None:
    """fully_shard over fp32 parameters: 4 + 4 + 8 bytes of each, shared, and 2 of what is gathered."""
    layout = Layout(dp_shard=4, zero=3)
    count = stage_counts(LLAMA, layout, 0)
    held = states(Stack(name="x", sharding="fully_shard", shard_bytes=4.0, gradient_bytes=4.0), layout, "bf16", count)
    assert held.step["parameters"] == 4 * count.shard
    assert held.step["masters"] == 0
    assert held.parameter_bytes == 2

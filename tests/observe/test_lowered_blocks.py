"""Compiled blocks in a dry run of a GPU: what the compiler's own code keeps and takes, beside the planner."""

from dataclasses import replace

import pytest

from meshwright.observe.dryrun.simulate import dry_run
from meshwright.planner.cost.stack import TUNING_BYTES
from meshwright.planner.step.predict import predict
from meshwright.spec import Cluster, Layout, Plan, Recipe, presets
from meshwright.spec.model.shape import ModelShape

LLAMA = ModelShape(
    name="small", family="llama", vocab=2048, layers=3, hidden=256, heads=4, kv_heads=2, ffn=1024, norm="rmsnorm",
    mlp="swiglu", positions="rope", max_positions=2048,
)  # fmt: skip
GPT = replace(
    LLAMA, family="gpt2", kv_heads=4, norm="layernorm", mlp="gelu_tanh", positions="learned", qkv_bias=True,
    out_bias=True, mlp_bias=True, tied=True,
)  # fmt: skip
CASES = {
    "llama": (LLAMA, {}, {}),
    "documents": (LLAMA, {}, {"document_mask": True}),
    "gpt2": (GPT, {}, {}),
    "fp32": (LLAMA, {}, {"precision": "fp32"}),
    "selective": (LLAMA, {"recompute": "selective"}, {}),
}


def plan(name: str, compiled: str) -> Plan:
    shape, layout, recipe = CASES[name]
    words = {"sequence": 2048, "global_batch": 32, "precision": "bf16", "document_mask": False, **recipe}
    return Plan(
        model=shape, cluster=Cluster(device=presets.device("H200-SXM")), recipe=Recipe(**words),  # type: ignore[arg-type]
        layout=Layout(micro_batch=32, compile=compiled, **layout),  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_lowered_blocks_hold_what_was_planned(name: str, caplog: pytest.LogCaptureFixture) -> None:
    lowered = dry_run(plan(name, "on"), device="cuda").worst
    prediction = predict(plan(name, "on"))
    planned = prediction.peak_bytes - prediction.worst.kinds["reserve"]
    assert planned == pytest.approx(lowered.peak_bytes, rel=0.03)
    uncompiled = dry_run(plan(name, "off"), device="cuda").worst
    assert lowered.kinds["activations"] < uncompiled.kinds["activations"]


@pytest.mark.long
def test_only_the_first_call_of_a_kernel_is_tuned() -> None:
    passes = [part for part in dry_run(plan("llama", "on"), device="cuda").worst.passes if part.name.startswith("BW")]
    first, second = (part.peak_bytes for part in passes)
    assert 0 < first - second <= TUNING_BYTES

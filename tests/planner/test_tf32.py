"""What the planner makes of recipe.tf32."""

from dataclasses import replace

import pytest

from meshwright.planner.cost.speeds import speeds_of
from meshwright.planner.step.predict import predict
from meshwright.spec import Layout, Plan, Recipe, presets


@pytest.mark.parametrize(("device", "tflop_per_s"), [("a100-80", 156), ("h100", 494.7)])
def test_products_run_at_the_data_sheets_rate_or_less(device: str, tflop_per_s: float) -> None:
    """Against NVIDIA's data sheets, dense TF32; a real product reaches 70 to 95 % of that."""
    speeds = speeds_of(presets.device(device)).in_tf32()
    assert 0.6 < speeds.rate(4) / (tflop_per_s * 1e12) <= 1.0
    assert speeds.rate(2) == speeds_of(presets.device(device)).rate(2)


def test_a_step_in_fp32_is_between_plain_fp32_and_bf16() -> None:
    plan = Plan(
        model=presets.model("llama-3.2-1b"),
        recipe=Recipe(sequence=2048, global_batch=8, document_mask=False),
        layout=Layout(micro_batch=1, recompute="full"),
        cluster=presets.cluster("h100x1"),
    )
    plain, tf32, bf16 = (
        predict(replace(plan, recipe=replace(plan.recipe, **changes))).step_s  # type: ignore[arg-type]
        for changes in ({}, {"tf32": True}, {"precision": "bf16"})
    )
    assert plain > 1.5 * tf32 > bf16
    assert predict(replace(plan, recipe=replace(plan.recipe, precision="bf16", tf32=True))).step_s == bf16

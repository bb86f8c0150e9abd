"""Throughput over tp on 64 H100, inside a node and beyond it, as the planner predicts it."""

from typing import Any

from meshwright.planner.step.predict import build_estimator
from meshwright.planner.step.prediction import usable_bytes
from meshwright.spec import Layout, Plan, Recipe, presets

TITLE = "Tensor parallelism beyond a node"
MODELS = ("llama-3.1-8b", "llama-3.1-70b")
TENSOR = (1, 2, 4, 8, 16, 32)
RECOMPUTE = ("none", "full")
GPUS, NODES = 8, 8


def record(model: str, tp: int, recompute: Any) -> dict[str, Any]:
    """One layout: tp x dp_shard = 64, ZeRO-1, one sequence per micro-batch."""
    layout = Layout(
        tp=tp, sp=tp > 1, dp_shard=GPUS * NODES // tp, zero=1, micro_batch=1, recompute=recompute,
        cuda_graphs="off",
    )  # fmt: skip
    recipe = Recipe(sequence=8192, global_batch=512, precision="bf16")
    plan = Plan(
        model=presets.model(model), recipe=recipe, layout=layout, cluster=presets.cluster(f"h100x{GPUS}", NODES)
    )
    prediction = build_estimator(plan).predict(plan)
    time, step_s = prediction.time, prediction.step_s
    return {
        "tokens": round(512 * 8192 / step_s / (GPUS * NODES), 1),
        "mfu": round(prediction.mfu(causal=False), 4),
        "exposed": round((time.exchange_s + time.weights_s + time.gradients_s) / step_s, 4),
        "gib": round(prediction.peak_bytes / 2**30, 2),
        "fits": prediction.peak_bytes <= usable_bytes(plan),
    }


def data() -> dict[str, Any]:
    """Model -> recomputation -> tp -> its figures."""
    return {
        "tensor": TENSOR, "gpus": GPUS,
        "models": {
            model: {word: {tp: record(model, tp, word) for tp in TENSOR} for word in RECOMPUTE} for model in MODELS
        },
    }  # fmt: skip

"""Small plans whose real steps a calibration looks at: few, unlike each other, and of no use but this."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.planner.machine.clusterfile import ClusterFile
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.recipe import Recipe
from meshwright.spec.shape import ModelShape, MoEShape

LLAMA = ModelShape(
    name="calibration-llama", vocab=5000, layers=4, hidden=224, heads=4, kv_heads=4, ffn=608, max_positions=2048
)
WIDE = replace(
    LLAMA, name="calibration-wide", layers=2, hidden=448, heads=7, kv_heads=7, head_dim=64, ffn=1280, vocab=3000
)
NARROW = replace(
    LLAMA, name="calibration-narrow", layers=8, hidden=144, heads=4, kv_heads=2, head_dim=36, ffn=400, vocab=9000
)
GPT = ModelShape(
    name="calibration-gpt", family="gpt2", vocab=7000, layers=4, hidden=240, heads=6, ffn=960, max_positions=1024,
    tied=True, norm="layernorm", mlp="gelu_tanh", positions="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
MOE = replace(
    LLAMA, name="calibration-moe", family="mixtral", layers=3, ffn=448, moe=MoEShape(experts=6, top_k=2, ffn=224)
)

PLANS: tuple[tuple[ModelShape, int, int, dict[str, Any]], ...] = (
    (LLAMA, 192, 4, {}),
    (LLAMA, 640, 4, {"micro_batch": 1}),
    (WIDE, 320, 3, {}),
    (NARROW, 192, 6, {"micro_batch": 2, "recompute": "full"}),
    (GPT, 320, 4, {"micro_batch": 2}),
    (MOE, 192, 4, {"recompute": "selective"}),
    (LLAMA, 192, 8, {"dp_replicate": 2, "micro_batch": 2}),
    (NARROW, 320, 6, {"dp_shard": 2, "zero": 3}),
    (GPT, 192, 6, {"dp_shard": 2, "zero": 1}),
    (NARROW, 192, 4, {"tp": 2, "sp": True}),
    (LLAMA, 320, 4, {"tp": 2}),
    (NARROW, 640, 2, {"cp": 2}),
    (LLAMA, 192, 6, {"pp": 2, "micro_batch": 1}),
    (MOE, 192, 4, {"dp_shard": 2, "ep": 2, "zero": 2}),
    (LLAMA, 192, 8, {"dp_shard": 2, "tp": 2, "zero": 1}),
    (NARROW, 192, 8, {"pp": 4, "micro_batch": 1}),
    (WIDE, 192, 8, {"dp_shard": 4, "zero": 3}),
    (GPT, 320, 4, {"pp": 2, "dp_replicate": 2, "micro_batch": 1}),
    (LLAMA, 320, 4, {"cp": 2, "dp_shard": 2, "zero": 2}),
)
"""(shape, sequence, sequences of a step, layout)."""


def jobs(machine: ClusterFile, worlds: Sequence[int], precision: str) -> list[Plan]:
    """Those that have as many ranks as were measured."""
    found = []
    for shape, sequence, batch, layout in PLANS:
        plan = Plan(
            model=shape,
            recipe=Recipe(sequence=sequence, global_batch=batch, precision=precision),  # type: ignore[arg-type]  # one of the words of Recipe
            layout=Layout(compile="off", cuda_graphs="off", **layout),
        )
        if plan.layout.world in worlds:
            plan = replace(plan, cluster=machine.cluster(plan.layout.world))
            plan.check()
            found.append(plan)
    return found

"""Features of layouts by name, with the settings that each needs, and published models at tiny sizes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.spec import MLAShape, ModelShape, presets
from meshwright.spec.layout.schedule import KINDS

LARGEST_WORLD = 8
"""Processes of the largest layout that is tried."""
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "replicas": {"dp_replicate": 2},
    "zero 0": {"dp_shard": 2, "zero": 0},
    "zero 1": {"dp_shard": 2, "zero": 1},
    "zero 2": {"dp_shard": 2, "zero": 2},
    "zero 3": {"dp_shard": 2, "zero": 3},
    "tp": {"tp": 2, "sp": False},
    "tp 4": {"tp": 4, "sp": False},
    "tp + sp": {"tp": 2, "sp": True},
    "cp ring": {"cp": 2, "context": "ring"},
    "cp gather": {"cp": 2, "context": "all-gather"},
    "cp striped": {"cp": 2, "context_split": "striped"},
    "cp plain": {"cp": 2, "context_split": "chunks"},
    **{f"pp {name}": {"pp": 2, "vp": kind.stages, "schedule": name} for name, kind in KINDS.items()},
    "ep": {"ep": 2},
    "norms": {"recompute": "norms"},
    "selective": {"recompute": "selective", "kernels": "reference"},
    "all-but-attention": {"recompute": "all-but-attention"},
    "full": {"recompute": "full"},
    "micro-batches of 1": {"micro_batch": 1},
    "packed": {"packed": True},
    "bf16": {"precision": "bf16", "products": "same"},
    "fp8": {"precision": "bf16", "products": "fp8"},
    "compiled": {"compile": "on"},
    "muon": {"optimizer": "muon"},
}
"""Settings of a layout (and of the packed case) that use each feature."""
ONE_RANK: Mapping[str, Mapping[str, Any]] = {
    "torch's kernels": {"kernels": "eager"},
    "fp16": {"precision": "fp16", "products": "same"},
    "bf16 states": {"optimizer_states": "bf16"},
    "int8 states": {"optimizer_states": "int8"},
    "no masters": {"precision": "bf16", "products": "same", "master_weights": "none"},
}
"""More features, tried only on one rank. `--random` draws what differs over ranks in them."""
ALL = {**FEATURES, **ONE_RANK}


VOCAB = 61
"""A prime, so that vocabulary-parallel ranks have unequal parts."""


def shrink(name: str) -> ModelShape:
    """Return the shape of a preset reduced to some ten thousand parameters."""
    shape = presets.model(name)
    scaling = shape.rope_scaling and replace(shape.rope_scaling, original_positions=16)
    moe = shape.moe and replace(
        shape.moe, experts=8, top_k=min(shape.moe.top_k, 3), ffn=12, groups=min(shape.moe.groups, 4),
        top_groups=min(shape.moe.top_groups, 2), first_dense=min(shape.moe.first_dense, 1),
    )  # fmt: skip
    mla = MLAShape(q_rank=12, kv_rank=10, nope_dim=6, rope_dim=4, v_dim=5) if shape.mla else None
    # Heads of some models, such as Qwen3's, are not hidden / heads wide. That must stay so at tiny sizes.
    own_width = shape.head_dim * shape.heads != shape.hidden
    return replace(
        shape,
        vocab=VOCAB, layers=3, hidden=24, heads=4, kv_heads=4 if shape.kv_heads == shape.heads else 2,
        head_dim=10 if own_width else 6, ffn=40, max_positions=64, window=5 if shape.window else 0,
        window_from_layer=min(shape.window_from_layer, 1), rope_scaling=scaling, moe=moe, mla=mla,
    )  # fmt: skip

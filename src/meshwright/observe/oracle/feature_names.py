"""Features of layouts by name, with the settings that each needs."""

from collections.abc import Mapping
from typing import Any

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

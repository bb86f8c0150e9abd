"""The shapes of the training benchmarks, by name: two presets, one of 300M, and a vocabulary of 128k."""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.spec.model.shape import ModelShape

BATCH = {"10m": (8, 512), "100m": (4, 512), "300m": (2, 512), "10m-128k": (4, 512)}
"""Rows and tokens of a step, by shape."""
SMALL_BATCH = {"10m": (8, 512), "100m": (1, 256), "300m": (1, 128), "10m-128k": (1, 256)}
"""For 16 bit where torch multiplies it in a scalar loop, and transformers' compiled 100M model needs minutes a step."""
LARGE = frozenset({"300m"})
"""Four processes of these at once do not fit into 24 GiB."""


def batch_of(name: str, precision: str) -> tuple[int, int]:
    """Rows of a step and tokens of each, on this machine."""
    import torch

    vectors = precision != "bf16" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (BATCH if vectors else SMALL_BATCH)[name]


def shape_of(name: str) -> "ModelShape":
    """`10m` and `100m` are presets; `300m` is 1024 wide and 24 deep; `10m-128k` has 131,072 words."""
    from meshwright.spec.presets import model as preset

    if name == "300m":
        wide = replace(preset("llama-100m"), layers=24, hidden=1024, heads=16, kv_heads=4, head_dim=64, ffn=2816)
        return replace(wide, tied=False)
    if name == "10m-128k":
        return replace(preset("llama-10m"), vocab=131072)
    return preset(f"llama-{name}")

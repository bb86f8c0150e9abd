"""Rotary frequencies and tables, plain or stretched (linear, Llama-3, YaRN)."""

import math

import torch
from torch import Tensor

from meshwright.spec.model.shape import ModelShape, RopeScaling, temperature


def frequencies(shape: ModelShape) -> Tensor:
    """Return the angle per position of each pair (E/2,) fp32: theta^(-2i/E), stretched as the shape says."""
    half = torch.arange(0, shape.rope_dim, 2, dtype=torch.int64).float() / shape.rope_dim
    plain = 1.0 / (shape.rope_theta**half)
    scaling = shape.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, scaling, shape)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide frequencies of waves longer than original/low, keep those shorter than original/high, and blend."""
    wave = 2 * math.pi / plain
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    blend = ((scaling.original_positions / wave - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / scaling.factor + blend * plain


def _yarn(plain: Tensor, scaling: RopeScaling, shape: ModelShape) -> Tensor:
    """Keep pairs that turn over beta_fast times in the original length, divide those that turn under beta_slow."""

    def pair_of(turns: float) -> float:
        return (
            shape.rope_dim
            * math.log(scaling.original_positions / (turns * 2 * math.pi))
            / (2 * math.log(shape.rope_theta))
        )

    # Pairs between the two bounds are blended linearly.
    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), shape.rope_dim - 1)
    ramp = ((torch.arange(shape.rope_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def table_factor(shape: ModelShape) -> float:
    """Return the factor of cos and sin. It is 1 except for YaRN."""
    scaling = shape.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return temperature(scaling.factor, scaling.mscale) / temperature(scaling.factor, scaling.mscale_all_dim)
    return temperature(scaling.factor, 1.0)


def softmax_factor(shape: ModelShape) -> float:
    """Return the factor of the softmax scale: DeepSeek's mscale_all_dim, squared. It is 1 elsewhere."""
    scaling = shape.rope_scaling
    if shape.mla is None or scaling is None or scaling.kind != "yarn" or not scaling.mscale_all_dim:
        return 1.0
    return temperature(scaling.factor, scaling.mscale_all_dim) ** 2


def tables(inverse: Tensor, positions: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of positions (B or 1, S), both (B or 1, S, 1, E/2) fp32."""
    angles = (positions.float().unsqueeze(-1) * inverse).unsqueeze(2)
    return angles.cos() * factor, angles.sin() * factor

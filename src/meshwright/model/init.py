"""Initial weights: every tensor's distribution as a table. They depend on (seed, parameter name) alone, so any layout
of any size starts from the same numbers."""

import hashlib
import math

import torch
from torch import Tensor

from meshwright.spec.shape import ModelShape


def width_deviation(hidden: int) -> float:
    """sqrt(2 / (5 D)), "small init" (Nguyen and Salazar 2019, arXiv:1910.05895): 0.02 at D = 1000, 0.056 at D = 128.

    GPT-2's fixed 0.02 is the same at its width, and far too small for a narrow model, which then learns late.
    """
    return math.sqrt(2 / (5 * hidden))


def standard_deviation(name: str, shape: ModelShape) -> float | None:
    """Standard deviation of a parameter's normal distribution; None = ones or zeros (norms, biases).

    The two matrices that write into the residual stream are scaled by 1/sqrt(2 L), as in GPT-2.
    """
    if name.endswith(".bias") or "norm.weight" in name:
        return None
    into_residual = name.endswith((".o.weight", ".down.weight", ".experts.down"))
    deviation = width_deviation(shape.hidden)
    return deviation / math.sqrt(2 * shape.layers) if into_residual else deviation


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator seeded by a hash of (seed, name), whatever the order or number of layers."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def initial_value(name: str, size: torch.Size, shape: ModelShape, seed: int) -> Tensor:
    """The initial value of a parameter, fp32 on the CPU."""
    deviation = standard_deviation(name, shape)
    if deviation is None:
        return torch.zeros(size) if name.endswith(".bias") else torch.ones(size)
    return torch.empty(size).normal_(0.0, deviation, generator=generator_for(seed, name))

"""Initial weights.

They depend only on the seed, the parameter's name and the position in the tensor, so any layout starts from the same
numbers. They are drawn on the tensor's device, and a GPU's generator differs from a CPU's.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.spec.model.shape import ModelShape


def width_deviation(hidden: int) -> float:
    """Return sqrt(2 / (5 D)), "small init" (Nguyen and Salazar 2019, arXiv:1910.05895).

    It is 0.02 at D = 1000 and 0.056 at D = 128. GPT-2's fixed 0.02 is far too small for a narrow model, which then
    learns late.
    """
    return math.sqrt(2 / (5 * hidden))


ZERO = ("lora.b", "lora.magnitude")
"""Adapter parameters that start at zero: B, so an adapter is nothing at first, and magnitudes, measured later."""


def standard_deviation(name: str, shape: ModelShape) -> float | None:
    """Return the standard deviation of a parameter's normal distribution. None = ones or zeros (norms, biases).

    The two matrices that write into the residual stream are scaled by 1/sqrt(2 L), as in GPT-2.
    """
    if name.endswith((".bias", *ZERO)) or "norm.weight" in name:
        return None
    into_residual = name.endswith((".o.weight", ".down.weight", ".experts.down"))
    deviation = width_deviation(shape.hidden)
    return deviation / math.sqrt(2 * shape.layers) if into_residual else deviation


BLOCK_ELEMENTS = 2**20
"""Elements drawn at a time, in whole rows. Each block has its own generator, so a rank can draw only its rows."""


LAUNCH_ELEMENTS = 2**15
"""Elements drawn per launch on a GPU. No GPU splits such a launch, so all GPUs draw the same numbers."""


def generator_for(seed: int, name: str, block: int = 0, device: torch.device | None = None) -> torch.Generator:
    """Return a generator seeded by a hash of (seed, name, block of rows), independent of the order of layers."""
    key = f"{seed}:{name}:{block}" if block else f"{seed}:{name}"
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return torch.Generator(device or "cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


def _normal(size: Sequence[int], deviation: float, generator: torch.Generator) -> Tensor:
    whole = torch.empty(size, device=generator.device)
    pieces = (whole,) if whole.device.type == "cpu" else whole.view(-1).split(LAUNCH_ELEMENTS)
    for piece in pieces:
        piece.normal_(0.0, deviation, generator=generator)
    return whole


def fill_initial(
    part: Tensor, name: str, shape: ModelShape, seed: int, *, whole: Sequence[int], offsets: Sequence[int] | None = None
) -> None:
    """Fill `part`, the box at `offsets` of a parameter of size `whole`, with initial values, block by block."""
    deviation = standard_deviation(name, shape)
    if deviation is None:
        part.fill_(0.0 if name.endswith((".bias", *ZERO)) else 1.0)
        return
    # The deviation of torch's kaiming_uniform with a = sqrt(5), as LoRA initializes A.
    if name.endswith("lora.a"):
        deviation = (3 * whole[-1]) ** -0.5
    offsets = offsets or [0] * len(whole)
    # A block is drawn whole, even if this rank keeps a few rows of it: its numbers must not depend on the layout.
    rows = max(1, BLOCK_ELEMENTS // math.prod(whole[1:]))
    inside = tuple(slice(start, start + size) for start, size in zip(offsets[1:], part.shape[1:], strict=True))
    first, last = offsets[0], offsets[0] + len(part)
    for block in range(first // rows, -(-last // rows)):
        start, end = block * rows, min((block + 1) * rows, whole[0])
        block_values = _normal((end - start, *whole[1:]), deviation, generator_for(seed, name, block, part.device))
        overlap = slice(max(start, first), min(end, last))
        part[overlap.start - first : overlap.stop - first] = block_values[overlap.start - start : overlap.stop - start][
            :, *inside
        ]

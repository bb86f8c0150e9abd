"""Small runs of the kernels of a serving engine's step beside plain code, as those of trials.py."""

from collections.abc import Callable

import torch
from torch import Tensor

from meshwright.kernels.triton import keeping, likeliest, paged
from meshwright.kernels.triton.code_trials import worst_of


def kept(make: Callable[..., Tensor]) -> float:
    """Three rows of two key heads, in a buffer with others beside them, at slots in another order."""
    x = make(3, 8, 32)
    q, k, v = x.split((4, 2, 2), 1)
    turn = make(3, 16).float()
    keys, values = (torch.zeros(2, 4, 2, 32, dtype=x.dtype, device=x.device) for _ in range(2))
    slots = torch.tensor([5, 0, 3], device=x.device)
    first, second = x[:, :6].double().chunk(2, -1)
    cos, sin = (turn.double().cos()[:, None], turn.double().sin()[:, None])
    right = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    stores = paged.BlockStore(keys, None), paged.BlockStore(values, None)
    keeping.turn_and_keep(q, k, v, turn.cos(), turn.sin(), slots, *stores, interleaved=False, norms=None)
    stored = keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots]
    pairs = (x[:, :6], right), (stored[0], right[:, 4:]), (stored[1], x[:, 6:])
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
    return worst_of(errors)


def likeliest_token(make: Callable[..., Tensor]) -> float:
    """Rows of several blocks."""
    logits = make(3, 9000)
    found, right = likeliest.likeliest(logits), logits.double().log_softmax(-1).max(-1)
    wrong = float((found[:, 0] != right.indices).any())
    error: float = ((found[:, 1].double() - right.values).norm() / right.values.norm()).item()
    return worst_of((wrong, error))

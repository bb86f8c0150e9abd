"""How near a token came to another choice of experts: two layouts may then choose differently, and both are right.

Routing is the only step of a model that rounding can change by more than rounding.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.model.moe import Router
from meshwright.spec.shape import MoEShape


class Margins:
    """The smallest margin of all choices that routers made while they were watched; inf before the first."""

    def __init__(self) -> None:
        self.smallest = float("inf")

    def see(self, router: nn.Module, inputs: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        """A forward hook of a router."""
        assert isinstance(router, Router)
        _, experts, probabilities = out
        self.smallest = min(self.smallest, margin(router.moe, probabilities, experts))


def margin(moe: MoEShape, scores: Tensor, experts: Tensor) -> float:
    """The smallest change of one of scores (N, X) that gives any token other experts than (N, k); inf where a token has
    no other choice."""
    scores = scores.detach()
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, experts, True)
    allowed, found = torch.ones_like(chosen), []
    if moe.top_groups < moe.groups:
        grouped = scores.view(len(scores), moe.groups, -1)
        strength = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        ranked = strength.sort(dim=-1, descending=True)
        found.append(ranked.values[:, moe.top_groups - 1] - ranked.values[:, moe.top_groups])
        best = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, ranked.indices[:, : moe.top_groups], True)
        allowed = best.repeat_interleave(grouped.shape[-1], dim=1)
    taken = scores.masked_fill(~chosen, float("inf")).amin(1)
    left = scores.masked_fill(chosen | ~allowed, float("-inf")).amax(1)
    found.append(taken - left)
    return min(float(one.min()) for one in found)


def watch_margins(stages: Iterable[nn.Module]) -> Margins:
    """Watch every router of a model from now on."""
    margins = Margins()
    for module in (module for stage in stages for module in stage.modules()):
        if isinstance(module, Router):
            module.register_forward_hook(margins.see)
    return margins

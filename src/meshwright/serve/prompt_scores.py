"""What a model says of a prompt's own tokens: a pass of its own, since a cached prefix has no logits."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from meshwright.model.generate import check_prompt
from meshwright.model.transformer import Transformer

ROWS = 256
"""Positions whose logits are in memory at once."""


@dataclass(slots=True)
class PromptScores:
    """Of each token but the first, which nothing comes before."""

    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens at each place and their log-probabilities."""


@torch.no_grad()
def score_prompt(model: Transformer, prompt: Sequence[int], top: int) -> PromptScores:
    """Log-probabilities of a prompt's tokens behind those before, and the `top` likeliest. PlanError."""
    check_prompt(model, prompt)
    found = PromptScores()
    if len(prompt) < 2:
        return found
    tokens = torch.tensor([list(prompt)], device=model.embed.weight.device)
    x, _ = model.hidden(tokens[:, :-1])
    for states, targets in zip(x[0].split(ROWS), tokens[0, 1:].split(ROWS), strict=True):
        logs = model.kernels.linear(states, model.head_weight).float().log_softmax(-1)
        found.logprobs += logs.gather(1, targets[:, None])[:, 0].tolist()
        best = logs.topk(min(top, logs.shape[1]))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found.top += [list(zip(ids, values, strict=True)) for ids, values in pairs]
    return found

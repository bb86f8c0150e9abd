"""Text generation, one token at a time, with cached keys and values."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.model.kv_cache import Cache
from meshwright.model.transformer import Transformer
from meshwright.spec.errors import PlanError, RunError

LEAST_TEMPERATURE = 1e-6
"""Least temperature. Below it, differences vanish in the rounding of fp32 logits, and the division overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Choice of the next token. temperature 0 = greedy."""

    temperature: float = 0.0
    top_k: int = 0
    """Number of likeliest tokens to choose from. 0 = all."""
    top_p: float = 1.0
    """Probability that the likeliest tokens to choose from must reach (Holtzman et al. 2020, arXiv:1904.09751)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise PlanError(f"temperature={self.temperature} must be 0 (greedy) or above")
        if self.top_k < 0:
            raise PlanError(f"top_k={self.top_k} must be 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise PlanError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise PlanError(f"seed={self.seed} must lie between 0 and 2**63 - 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """New tokens and the model's log-probability (untempered) of each."""

    ids: list[int]
    logprobs: list[float]


def pick(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Choose the next token from logits (V,) fp32. Raises RunError when they are not numbers."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    # The largest becomes 0, so that a division by a small temperature cannot overflow.
    logits = (logits - logits.max()) / max(sampling.temperature, LEAST_TEMPERATURE)
    if sampling.top_k and sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, index = logits.softmax(0).sort(descending=True)
        # A token stays if those before it do not reach top_p yet. So the likeliest always stays.
        beyond = ordered.cumsum(0) - ordered >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(0, index, beyond), float("-inf"))
    probabilities = logits.softmax(0).cpu()
    if probabilities.isnan().any():
        raise broken()
    return int(torch.multinomial(probabilities, 1, generator=generator))


def broken() -> RunError:
    """Return the error for a model whose logits are not numbers."""
    return RunError(
        "the model's logits are no numbers (NaN or infinite): its weights are broken; take another checkpoint"
    )


@torch.no_grad()
def generate(
    model: Transformer,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] = (),
    on_token: Callable[[int], None] | None = None,
) -> Generation:
    """Continue a prompt of at least one token.

    Ends at max_new_tokens, at a stop token (included), or at the model's last position. Runs without dropout and
    restores the model's mode afterwards. Raises PlanError, and RunError as `pick` does.
    """
    check_prompt(model, prompt_ids, max_new_tokens)
    sampling, device, training = sampling or Sampling(), model.embed.weight.device, model.training
    generator = torch.Generator().manual_seed(sampling.seed)
    cache = Cache(model.shape.layers)
    fed = torch.tensor([list(prompt_ids)], device=device)
    generation = Generation(ids=[], logprobs=[])
    # The last new token is not fed again, so it needs no position.
    room = model.shape.max_positions - len(prompt_ids) + 1
    model.eval()
    try:
        for _ in range(min(max_new_tokens, room)):
            x, _ = model.hidden(fed, cache=cache)
            logits = model.kernels.linear(x[:, -1], model.head_weight)[0].float()
            token = pick(logits, sampling, generator)
            # Of the untempered logits. Greedy choice would not notice NaN, so this also catches a broken model.
            logprob = float(logits.log_softmax(0)[token])
            if math.isnan(logprob):
                raise broken()
            generation.ids.append(token)
            generation.logprobs.append(logprob)
            if on_token:
                on_token(token)
            if token in stop_ids:
                break
            fed = torch.tensor([[token]], device=device)
        return generation
    finally:
        model.train(training)


def check_prompt(model: Transformer, prompt_ids: Sequence[int], max_new_tokens: int = 0) -> None:
    """Raise PlanError if the model cannot continue the prompt."""
    if not prompt_ids:
        raise PlanError("the prompt is empty: give at least one token")
    if max_new_tokens < 0:
        raise PlanError(f"max_new_tokens={max_new_tokens} must be 0 or more")
    outside = [token for token in prompt_ids if not 0 <= token < model.shape.vocab]
    if outside:
        raise PlanError(f"prompt token {outside[0]} is outside the model's vocabulary of {model.shape.vocab}")
    if len(prompt_ids) > model.shape.max_positions:
        raise PlanError(
            f"the prompt has {len(prompt_ids)} tokens, the model {model.shape.max_positions} positions: shorten it"
        )

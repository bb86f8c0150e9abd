"""Text from a model, one token at a time, with cached keys and values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.model.cache import Cache
from meshwright.model.transformer import Transformer
from meshwright.spec.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. temperature 0 = greedy."""

    temperature: float = 0.0
    top_k: int = 0
    """Only the k likeliest; 0 = all."""
    top_p: float = 1.0
    """Only the likeliest that together reach p (Holtzman et al. 2020, arXiv:1904.09751)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise PlanError(f"temperature={self.temperature} must be 0 (greedy) or above")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise PlanError(f"top_k={self.top_k} must be 0 or more and top_p={self.top_p} lie in (0, 1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """New tokens, and the log-probability the model (untempered) gave each."""

    ids: list[int]
    logprobs: list[float]


def pick(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token from logits (V,) fp32."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if sampling.top_k and sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, index = logits.softmax(0).sort(descending=True)
        beyond = ordered.cumsum(0) - ordered >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(0, index, beyond), float("-inf"))
    return int(torch.multinomial(logits.softmax(0).cpu(), 1, generator=generator))


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
    """Continue a prompt of at least one token; ends at max_new_tokens, a stop token (kept), or the last position."""
    _check(model, prompt_ids, max_new_tokens)
    sampling = sampling or Sampling()
    device = model.embed.weight.device
    generator = torch.Generator().manual_seed(sampling.seed)
    cache = Cache(model.shape.layers)
    training = model.training
    model.eval()
    fed = torch.tensor([list(prompt_ids)], device=device)
    ids: list[int] = []
    logprobs: list[float] = []
    room = model.shape.max_positions - len(prompt_ids) + 1
    for _ in range(min(max_new_tokens, room)):
        x, _ = model.hidden(fed, cache=cache)
        logits = model.kernels.linear(x[:, -1], model.head_weight)[0].float()
        token = pick(logits, sampling, generator)
        ids.append(token)
        logprobs.append(float(logits.log_softmax(0)[token]))
        if on_token:
            on_token(token)
        if token in stop_ids:
            break
        fed = torch.tensor([[token]], device=device)
    model.train(training)
    return Generation(ids=ids, logprobs=logprobs)


def _check(model: Transformer, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    if not prompt_ids:
        raise PlanError("the prompt is empty: give at least one token")
    if max_new_tokens < 0:
        raise PlanError(f"max_new_tokens={max_new_tokens} must be 0 or more")
    largest = max(prompt_ids)
    if largest >= model.shape.vocab or min(prompt_ids) < 0:
        raise PlanError(f"prompt token {largest} is outside the model's vocabulary of {model.shape.vocab}")
    if len(prompt_ids) > model.shape.max_positions:
        raise PlanError(
            f"the prompt has {len(prompt_ids)} tokens, the model {model.shape.max_positions} positions: shorten it"
        )

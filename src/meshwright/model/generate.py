"""Text generation with cached keys and values, for one prompt token by token, or for several prompts at once.

Several prompts are padded in front, so all end at the same position and share one cache. Padding is a separate document
that no token of a prompt attends to, so every row is computed as if it were alone.

Letters: B rows, S new positions, T positions so far, D hidden, V vocab, N scored tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from meshwright.model.attention import Cache
from meshwright.model.transformer import Transformer
from meshwright.spec.errors import PlanError, RunError, argument

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
            raise PlanError(f"{argument('temperature', self.temperature)} must be 0 (greedy) or above")
        if self.top_k < 0:
            raise PlanError(f"{argument('top_k', self.top_k)} must be 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise PlanError(f"{argument('top_p', self.top_p)} must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise PlanError(f"{argument('seed', self.seed)} must lie between 0 and 2**63 - 1")


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
        raise broken_model_error()
    return int(torch.multinomial(probabilities, 1, generator=generator))


def broken_model_error() -> RunError:
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
                raise broken_model_error()
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
        raise PlanError(f"{argument('max_new_tokens', max_new_tokens)} must be 0 or more")
    outside = [token for token in prompt_ids if not 0 <= token < model.shape.vocab]
    if outside:
        raise PlanError(f"prompt token {outside[0]} is outside the model's vocabulary of {model.shape.vocab}")
    if len(prompt_ids) > model.shape.max_positions:
        raise PlanError(
            f"the prompt has {len(prompt_ids)} tokens, the model {model.shape.max_positions} positions: shorten it"
        )


LOGITS = 2**24
"""Logits computed at once while continuations are scored: 64 MiB in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuationScore:
    """Model's score of a continuation."""

    logprob: float
    """Sum of the log-probabilities of its tokens, in nats."""
    greedy: bool
    """True if each of its tokens is the likeliest."""


@final
class PromptBatch:
    """Rows that share one cache. Use under `torch.no_grad`, with the model in evaluation mode."""

    def __init__(self, model: Transformer, prompts: Sequence[Sequence[int]]) -> None:
        """Feed the prompts. Each has at least one token and at most the model's positions. Raises PlanError."""
        for prompt in prompts:
            check_prompt(model, prompt)
        self._model, self._device = model, model.embed.weight.device
        longest = max(len(prompt) for prompt in prompts)
        self._cache: Final = Cache(model.shape.layers)
        self._padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=self._device)
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self.last = self.feed(torch.tensor(padded, device=self._device))[:, -1]
        """Hidden states (B, D) after the last token of each row."""

    def feed(self, tokens: Tensor) -> Tensor:
        """Return hidden states (B, S, D) at the head for the next tokens (B, S) of the rows."""
        past, new = self._cache.length, tokens.shape[1]
        offsets = torch.arange(past + new, device=self._device) - self._padding[:, None]
        # Padding is document 0 and the prompt document 1, so neither attends to the other.
        documents = (offsets >= 0).int() if bool(self._padding.any()) else None
        positions = offsets[:, past:].clamp(0, self._model.shape.max_positions - 1)  # any position will do for padding
        x, _ = self._model.hidden(tokens, positions=positions, documents=documents, cache=self._cache)
        self.last = x[:, -1]
        return x

    def select(self, rows: Tensor) -> None:
        """Continue with these rows (B',) of the batch. A row may repeat."""
        self._cache.select(rows)
        self._padding, self.last = self._padding[rows], self.last[rows]

    def logits(self) -> Tensor:
        """Return the logits (B, V) fp32 of the next token of each row."""
        return self._model.kernels.linear(self.last, self._model.head_weight).float()


@torch.no_grad()
def score(
    model: Transformer, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
) -> list[list[ContinuationScore]]:
    """Score each continuation (one token at least) of each prompt. A prompt is read once for all its continuations.

    Raises PlanError for a token outside the vocabulary, or a text longer than the model's positions.
    """
    _check(model, prompts, continuations)
    batch = PromptBatch(model, prompts)
    owners = [row for row, row_continuations in enumerate(continuations) for _ in row_continuations]
    texts = [list(continuation) for row_continuations in continuations for continuation in row_continuations]
    longest, device = max(map(len, texts)), model.embed.weight.device
    rows = torch.tensor(owners, device=device)
    # The prompt's last state scores the first token of each of its continuations.
    states = batch.last[rows].unsqueeze(1)
    if longest > 1:
        batch.select(rows)
        fed = torch.tensor([text[:-1] + [0] * (longest - len(text)) for text in texts], device=device)
        states = torch.cat((states, batch.feed(fed)), dim=1)
    # Continuations are padded behind, where padding influences nothing before it.
    real = torch.tensor([[position < len(text) for position in range(longest)] for text in texts], device=device)
    targets = torch.tensor([token for text in texts for token in text], device=device)
    logprobs, likeliest = _score_tokens(model, states[real], targets)
    lengths = [len(text) for text in texts]
    scores = [
        ContinuationScore(logprob=float(row_logprobs.sum()), greedy=bool(hits.all()))
        for row_logprobs, hits in zip(
            logprobs.double().cpu().split(lengths), likeliest.cpu().split(lengths), strict=True
        )
    ]
    scores_by_prompt: list[list[ContinuationScore]] = [[] for _ in prompts]
    for owner, continuation_score in zip(owners, scores, strict=True):
        scores_by_prompt[owner].append(continuation_score)
    return scores_by_prompt


def _score_tokens(model: Transformer, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p (N,) fp32 of targets (N,) after hidden states (N, D), and whether each is the likeliest (N,)."""
    logprobs, likeliest = [], []
    size = max(1, LOGITS // model.shape.vocab)
    for chunk, chunk_targets in zip(states.split(size), targets.split(size), strict=True):
        logits = model.kernels.linear(chunk, model.head_weight).float()
        logprobs.append(logits.log_softmax(-1).gather(1, chunk_targets[:, None])[:, 0])
        likeliest.append(logits.argmax(-1) == chunk_targets)
    return torch.cat(logprobs), torch.cat(likeliest)


def _check(
    model: Transformer, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
) -> None:
    for prompt, row_continuations in zip(prompts, continuations, strict=True):
        for text in row_continuations:
            # The last token is only scored, never fed, so it needs no position.
            check_prompt(model, text[:1])
            check_prompt(model, [*prompt, *text[:-1]])
            check_prompt(model, text[-1:])


@torch.no_grad()
def greedy(
    model: Transformer, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_ids: Sequence[int] = ()
) -> list[list[int]]:
    """Return the likeliest new tokens of each prompt, as `generate` does. Raises PlanError, RunError."""
    batch = PromptBatch(model, prompts)
    room = [min(max_new_tokens, model.shape.max_positions - len(prompt) + 1) for prompt in prompts]
    generated: list[list[int]] = [[] for _ in prompts]
    active = {row for row, most in enumerate(room) if most > 0}
    # Rows that are done run along with the others: their tokens are dropped.
    while active:
        logits = batch.logits()
        if not bool(logits.logsumexp(-1).isfinite().all()):
            raise broken_model_error()
        tokens = logits.argmax(-1)
        for row in sorted(active):
            generated[row].append(int(tokens[row]))
            if len(generated[row]) == room[row] or generated[row][-1] in stop_ids:
                active.discard(row)
        if active:
            batch.feed(tokens[:, None])
    return generated

"""Several prompts of a model at once: scores of continuations, and greedy continuations.

Prompts are padded in front, so all end at the same position and share one cache of keys and values. Padding is a
separate document that no token of a prompt attends to, so every row is computed as if it were alone.

Letters: B rows, S new positions, T positions so far, D hidden, V vocab, N scored tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from meshwright.model.generate import broken, check_prompt
from meshwright.model.kv_cache import Cache
from meshwright.model.transformer import Transformer

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
            raise broken()
        tokens = logits.argmax(-1)
        for row in sorted(active):
            generated[row].append(int(tokens[row]))
            if len(generated[row]) == room[row] or generated[row][-1] in stop_ids:
                active.discard(row)
        if active:
            batch.feed(tokens[:, None])
    return generated

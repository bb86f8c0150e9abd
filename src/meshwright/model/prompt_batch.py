"""Several prompts of a model at once: what it says of given continuations, and how it continues them.

Prompts are padded in front, so that all of them end at one place and share one cache of keys and values. Padding is a
document of its own, which no token of a prompt sees: every row is computed as if it were alone.

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
"""Logits that are made at once while continuations are scored: 64 MiB in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuationScore:
    """What a model says of a continuation."""

    logprob: float
    """Sum over its tokens, nats."""
    greedy: bool
    """Whether each of its tokens is the likeliest."""


@final
class PromptBatch:
    """Rows that share one cache. Use under `torch.no_grad`, with the model in evaluation mode."""

    def __init__(self, model: Transformer, prompts: Sequence[Sequence[int]]) -> None:
        """`prompts`: at least one, each of at least one token and at most the model's positions. PlanError."""
        for prompt in prompts:
            check_prompt(model, prompt)
        self._model, self._device = model, model.embed.weight.device
        longest = max(len(prompt) for prompt in prompts)
        self._cache: Final = Cache(model.shape.layers)
        self._padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=self._device)
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self.last = self.feed(torch.tensor(padded, device=self._device))[:, -1]
        """Hidden states (B, D) behind the last token of each row."""

    def feed(self, tokens: Tensor) -> Tensor:
        """Hidden states (B, S, D) at the head for the next tokens (B, S) of the rows."""
        past, new = self._cache.length, tokens.shape[1]
        places = torch.arange(past + new, device=self._device) - self._padding[:, None]
        documents = (places >= 0).int() if bool(self._padding.any()) else None
        positions = places[:, past:].clamp(0, self._model.shape.max_positions - 1)  # of padding any will do
        x, _ = self._model.hidden(tokens, positions=positions, documents=documents, cache=self._cache)
        self.last = x[:, -1]
        return x

    def select(self, rows: Tensor) -> None:
        """Go on with these rows (B',) of the batch; one may be there several times."""
        self._cache.select(rows)
        self._padding, self.last = self._padding[rows], self.last[rows]

    def logits(self) -> Tensor:
        """Of the next token of each row, (B, V) fp32."""
        return self._model.kernels.linear(self.last, self._model.head_weight).float()


@torch.no_grad()
def score(
    model: Transformer, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
) -> list[list[ContinuationScore]]:
    """What the model says of each continuation (one token at least) of each prompt; a prompt is read once for all of
    its continuations. PlanError where one is not of the model's vocabulary, or prompt and continuation but for its last
    token have more tokens than the model positions."""
    _check(model, prompts, continuations)
    batch = PromptBatch(model, prompts)
    owners = [row for row, some in enumerate(continuations) for _ in some]
    texts = [list(one) for some in continuations for one in some]
    longest, device = max(map(len, texts)), model.embed.weight.device
    rows = torch.tensor(owners, device=device)
    states = batch.last[rows].unsqueeze(1)
    if longest > 1:
        batch.select(rows)
        fed = torch.tensor([text[:-1] + [0] * (longest - len(text)) for text in texts], device=device)
        states = torch.cat((states, batch.feed(fed)), dim=1)
    real = torch.tensor([[place < len(text) for place in range(longest)] for text in texts], device=device)
    targets = torch.tensor([token for text in texts for token in text], device=device)
    logprobs, likeliest = _of_tokens(model, states[real], targets)
    lengths = [len(text) for text in texts]
    scores = [
        ContinuationScore(logprob=float(own.sum()), greedy=bool(hits.all()))
        for own, hits in zip(logprobs.double().cpu().split(lengths), likeliest.cpu().split(lengths), strict=True)
    ]
    found: list[list[ContinuationScore]] = [[] for _ in prompts]
    for owner, one in zip(owners, scores, strict=True):
        found[owner].append(one)
    return found


def _of_tokens(model: Transformer, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """log p (N,) fp32 of targets (N,) behind hidden states (N, D), and whether each is the likeliest (N,)."""
    logprobs, likeliest = [], []
    size = max(1, LOGITS // model.shape.vocab)
    for some, wanted in zip(states.split(size), targets.split(size), strict=True):
        logits = model.kernels.linear(some, model.head_weight).float()
        logprobs.append(logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0])
        likeliest.append(logits.argmax(-1) == wanted)
    return torch.cat(logprobs), torch.cat(likeliest)


def _check(
    model: Transformer, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[Sequence[int]]]
) -> None:
    for prompt, some in zip(prompts, continuations, strict=True):
        for text in some:
            check_prompt(model, text[:1])
            check_prompt(model, [*prompt, *text[:-1]])
            check_prompt(model, text[-1:])


@torch.no_grad()
def greedy(
    model: Transformer, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, stop_ids: Sequence[int] = ()
) -> list[list[int]]:
    """The likeliest new tokens of each prompt, as `generate` finds them for each by itself. PlanError; RunError: the
    logits are no numbers."""
    batch = PromptBatch(model, prompts)
    room = [min(max_new_tokens, model.shape.max_positions - len(prompt) + 1) for prompt in prompts]
    found: list[list[int]] = [[] for _ in prompts]
    inside = {row for row, most in enumerate(room) if most > 0}
    while inside:
        logits = batch.logits()
        if not bool(logits.logsumexp(-1).isfinite().all()):
            raise broken()
        tokens = logits.argmax(-1)
        for row in sorted(inside):
            found[row].append(int(tokens[row]))
            if len(found[row]) == room[row] or found[row][-1] in stop_ids:
                inside.discard(row)
        if inside:
            batch.feed(tokens[:, None])
    return found

"""The next token of each of many sequences.

Rows are computed together, and none depends on another: its random number is a hash of its own seed and position, and
each function below treats a row by itself. Letters: R rows, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.kernels.chooser import uses_triton
from meshwright.model.generate import LEAST_TEMPERATURE
from meshwright.serve.grammar import GrammarState
from meshwright.serve.request_options import RequestOptions

FEW = 1024
"""Likeliest tokens that are looked at first; a row whose top_k, top_p or min_p leave more is sorted whole."""


@dataclass(slots=True)
class SampledRow:
    """What is known of a sequence that is sampled from."""

    options: RequestOptions
    seed: int
    prompt: Sequence[int]
    made: Sequence[int]
    """New tokens so far."""
    grammar: GrammarState | None = None
    """What the answer must keep to."""
    counts: Tensor | None = field(default=None, init=False)
    """(2, V): how often the prompt has each token, and the answer. Of rows with penalties."""
    counted: int = field(default=0, init=False)


class SampledTokens(NamedTuple):
    """Of R rows."""

    tokens: list[int]
    logprobs: list[float]
    """Of the model's own logits, before anything changed them."""
    top: list[list[tuple[int, float]]]
    """The likeliest tokens of the model and their log-probabilities, as many as each row wants."""
    broken: list[bool]
    """Whether a row's logits are no numbers."""


def sample(logits: Tensor, rows: Sequence[SampledRow]) -> SampledTokens:
    """Tokens from logits (R, V) fp32, which are not changed. The host waits once for tokens and log-probabilities; on a
    GPU they are found in one kernel where all rows want their likeliest token and nothing more."""
    if uses_triton("likeliest", logits) and all(map(_is_plain, rows)):
        from meshwright.kernels.triton.likeliest import likeliest

        return _on_host(likeliest(logits), [[] for _ in rows])
    logs = logits.log_softmax(-1)
    changed = _changed(logits, rows)
    tokens = changed.argmax(-1)
    drawn = [place for place, row in enumerate(rows) if row.options.temperature > 0]
    if drawn:
        tokens[drawn] = _draw(changed[drawn], [rows[place] for place in drawn])
    chosen = logs.gather(1, tokens[:, None])[:, 0]
    return _on_host(torch.stack((tokens.double(), chosen.double()), dim=1), _top(logs, rows))


def _on_host(found: Tensor, top: list[list[tuple[int, float]]]) -> SampledTokens:
    """Of tokens and log-probabilities (R, 2), in one copy."""
    pairs = found.tolist()
    broken = [logprob != logprob for _, logprob in pairs]
    tokens = [0 if token != token else int(token) for token, _ in pairs]
    return SampledTokens(tokens, [logprob for _, logprob in pairs], top, broken)


def _is_plain(row: SampledRow) -> bool:
    """Whether a row gets the likeliest token of the model's own logits."""
    options = row.options
    changes = options.temperature > 0 or options.penalizes or options.logit_bias or options.logprobs
    return not changes and row.grammar is None


def _top(logs: Tensor, rows: Sequence[SampledRow]) -> list[list[tuple[int, float]]]:
    most = max(row.options.logprobs for row in rows)
    if not most:
        return [[] for _ in rows]
    found = logs.topk(min(most, logs.shape[1]))
    pairs = (zip(*pair, strict=True) for pair in zip(found.indices.tolist(), found.values.tolist(), strict=True))
    return [list(some)[: row.options.logprobs] for some, row in zip(pairs, rows, strict=True)]


def _changed(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Logits with penalties, bias, and grammars, or the same tensor where no row has any. A row whose grammar allows no
    token is left as it is: its grammar's `failure` says so."""
    penalized = [place for place, row in enumerate(rows) if row.options.penalizes]
    biased = [(place, pair) for place, row in enumerate(rows) for pair in row.options.logit_bias.items()]
    bound = [place for place, row in enumerate(rows) if row.grammar is not None]
    if not penalized and not biased and not bound:
        return logits
    logits = logits.clone()
    if penalized:
        logits[penalized] = _penalized(logits[penalized], [rows[place] for place in penalized])
    if biased:
        where = [place for place, _ in biased], [token for _, (token, _) in biased]
        logits[where] += torch.tensor([amount for _, (_, amount) in biased], device=logits.device)
    if bound:
        allowed = torch.stack([grammar.allowed() for row in rows if (grammar := row.grammar) is not None])
        allowed |= ~allowed.any(1, keepdim=True)
        logits[bound] = logits[bound].masked_fill(~allowed.to(logits.device), float("-inf"))
    return logits


def _penalized(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    counts = torch.stack([_counts(row, logits.shape[1]) for row in rows]).to(logits.device)
    numbers = [
        (one.repetition_penalty, one.presence_penalty, one.frequency_penalty) for one in (row.options for row in rows)
    ]
    asked = torch.tensor(numbers, device=logits.device)
    repetition, presence, frequency = asked[:, :1], asked[:, 1:2], asked[:, 2:]
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    seen: Tensor = torch.where(counts.sum(1) > 0, scaled, logits)
    return seen - frequency * counts[:, 1] - presence * (counts[:, 1] > 0)


def _counts(row: SampledRow, vocab: int) -> Tensor:
    if row.counts is None:
        row.counts = torch.stack((torch.bincount(torch.tensor(row.prompt), minlength=vocab), torch.zeros(vocab).long()))
    for token in row.made[row.counted :]:
        row.counts[1, token] += 1
    row.counted = len(row.made)
    return row.counts


def _draw(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Tokens (R,) by inverting the cumulated probabilities at each row's random number."""
    heat = torch.tensor([max(row.options.temperature, LEAST_TEMPERATURE) for row in rows], device=logits.device)
    logits = (logits - logits.amax(-1, keepdim=True)) / heat[:, None]
    chance = torch.tensor([_chance(row) for row in rows], dtype=torch.float64, device=logits.device)[:, None]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    cut = [place for place, row in enumerate(rows) if _truncates(row.options, logits.shape[1])]
    whole = [place for place, row in enumerate(rows) if not _truncates(row.options, logits.shape[1])]
    if whole:
        tokens[whole] = _invert(logits[whole].softmax(-1), chance[whole])
    for width in (FEW, logits.shape[1]):
        if cut:
            width = min(width, logits.shape[1])
            drawn, ends = _draw_of(logits[cut], width, [rows[place].options for place in cut], chance[cut])
            tokens[cut] = drawn
            cut = [place for place, inside in zip(cut, ends, strict=True) if not inside]
    return tokens


def _truncates(options: RequestOptions, vocab: int) -> bool:
    return 0 < options.top_k < vocab or options.top_p < 1 or options.min_p > 0


def _draw_of(
    logits: Tensor, width: int, options: Sequence[RequestOptions], chance: Tensor
) -> tuple[Tensor, list[bool]]:  # fmt: skip
    """Tokens (R,) of the likeliest `width`, and whether a row's choice lies within them for certain."""
    vocab = logits.shape[1]
    if width < vocab:
        ordered, index = logits.topk(width)
    else:
        ordered, index = logits.sort(descending=True, stable=True)
    limits = [(one.top_k or vocab, one.top_p, one.min_p) for one in options]
    top_k, top_p, min_p = torch.tensor(limits, dtype=torch.float64, device=logits.device).t()[:, :, None]
    inside = torch.arange(width, device=logits.device) < top_k
    among_few = ordered.masked_fill(~inside, float("-inf")).exp().sum(-1, keepdim=True).double()
    total = torch.where(top_k <= width, among_few, logits.exp().sum(-1, keepdim=True).double())
    shares = ordered.double().exp() / total
    kept = inside & (shares.cumsum(-1) - shares < top_p) & (shares >= min_p * shares[:, :1])
    known = (top_k[:, 0] <= width) | (top_k[:, 0] >= vocab)  # what the shares are of
    ends = (known & ~kept[:, -1] | (width == vocab)).tolist()
    return index.gather(1, _invert(shares * kept, chance)[:, None])[:, 0], ends


def _invert(shares: Tensor, chance: Tensor) -> Tensor:
    """The first place (R,) at which the cumulated shares (R, W) pass `chance` (R, 1) of their sum."""
    sums = shares.double().cumsum(-1)
    places = torch.searchsorted(sums, chance * sums[:, -1:], right=True)[:, 0]
    last = (shares > 0).long().mul_(torch.arange(1, shares.shape[1] + 1, device=shares.device)).amax(-1) - 1
    return torch.minimum(places, last.clamp(min=0))


def _chance(row: SampledRow) -> float:
    """In [0, 1): of the row's seed and how many tokens it has made."""
    digest = blake2b(f"{row.seed} {len(row.made)}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53

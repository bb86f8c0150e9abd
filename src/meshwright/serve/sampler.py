"""The next token of each of many sequences.

Rows are computed together, and none depends on another: its random number is a hash of its own seed and position, and
each function below treats a row by itself. Letters: R rows, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, final

import torch
from torch import Tensor

from meshwright.kernels.chooser import uses_triton
from meshwright.model.generate import LEAST_TEMPERATURE
from meshwright.serve.grammar import GrammarState
from meshwright.serve.host_copies import HostReading, to_device
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
    unread: int = field(default=0, init=False)
    """Tokens behind `made` that are drawn on the device, and that the host has not read yet."""
    counts: Tensor | None = field(default=None, init=False)
    """(2, V): how often the prompt has each token, and the answer. Of rows with penalties."""
    counted: int = field(default=0, init=False)

    @property
    def needs_host(self) -> bool:
        """Whether all tokens before must be known to the host: a grammar or penalties read them."""
        return self.grammar is not None or self.options.penalizes


class SampledTokens(NamedTuple):
    """Of R rows."""

    tokens: list[int]
    logprobs: list[float]
    """Of the model's own logits, before anything changed them."""
    top: list[list[tuple[int, float]]]
    """The likeliest tokens of the model and their log-probabilities, as many as each row wants."""
    broken: list[bool]
    """Whether a row's logits are no numbers."""
    redrawn: frozenset[int] = frozenset()
    """Rows whose token is another one than the device has: more than FEW tokens had to be looked at."""


@final
class DrawnTokens:
    """Tokens that the device draws, on their way to the host."""

    def __init__(
        self, tokens: Tensor, packed: Tensor, rows: Sequence[SampledRow], likeliest: Sequence[Tensor],
        few: "_FewDraws | None",
    ) -> None:  # fmt: skip
        """`tokens` (R,) int64; `packed` (R, 2): each as a floating number, and its log-probability by the model;
        `likeliest`: indices and values (R, most) of the model's tokens, or nothing; `few`: rows drawn among few."""
        self.tokens = tokens
        """(R,) int64 on the device, for the next step."""
        self._rows, self._few = rows, few
        self._reading = HostReading((packed, *(() if few is None else (few.sure,)), *likeliest))

    def read(self) -> SampledTokens:
        """Wait until they are there."""
        packed, *more = self._reading.read()
        pairs, redrawn = packed.tolist(), dict[int, int]()
        if self._few is not None:
            sure, *more = more
            redrawn = self._few.redrawn(sure.tolist())
            for place, token in redrawn.items():
                pairs[place] = token, self._few.logprob(place, token)
        broken = [logprob != logprob for _, logprob in pairs]
        tokens = [0 if token != token else int(token) for token, _ in pairs]
        top = _top(self._rows, *(one.tolist() for one in more)) if more else [[] for _ in self._rows]
        return SampledTokens(tokens, [logprob for _, logprob in pairs], top, broken, frozenset(redrawn))


def sample(logits: Tensor, rows: Sequence[SampledRow]) -> SampledTokens:
    """Tokens from logits (R, V) fp32, which are not changed."""
    return draw(logits, rows).read()


def draw(logits: Tensor, rows: Sequence[SampledRow]) -> DrawnTokens:
    """Begin to draw tokens from logits (R, V) fp32, which are not changed. The host waits for nothing, but where rows
    have penalties, a bias or a grammar. On a GPU likeliest tokens are found in one kernel where no row wants more."""
    if uses_triton("likeliest", logits) and all(map(_is_plain, rows)):
        from meshwright.kernels.triton.likeliest import likeliest

        pairs = likeliest(logits)
        return DrawnTokens(pairs[:, 0].long(), pairs, rows, (), None)
    logs = logits.log_softmax(-1)
    changed, few = _changed(logits, rows), None
    tokens = changed.argmax(-1)
    drawn = [place for place, row in enumerate(rows) if row.options.temperature > 0]
    if drawn:
        tokens, few = _draw(changed, logits, tokens, rows, drawn)
    most = min(max(row.options.logprobs for row in rows), logs.shape[1])
    found = logs.topk(most) if most else None
    packed = torch.stack((tokens.double(), logs.gather(1, tokens[:, None])[:, 0].double()), dim=1)
    return DrawnTokens(tokens, packed, rows, () if found is None else (found.indices, found.values), few)


def _is_plain(row: SampledRow) -> bool:
    """Whether a row gets the likeliest token of the model's own logits."""
    options = row.options
    changes = options.temperature > 0 or options.penalizes or options.logit_bias or options.logprobs
    return not changes and row.grammar is None


def _top(
    rows: Sequence[SampledRow], tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]
) -> list[list[tuple[int, float]]]:
    pairs = (zip(*pair, strict=True) for pair in zip(tokens, logprobs, strict=True))
    return [list(likeliest)[: row.options.logprobs] for likeliest, row in zip(pairs, rows, strict=True)]


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
        where = to_device([(place, token) for place, (token, _) in biased], logits.device).unbind(1)
        amounts = to_device([amount for _, (_, amount) in biased], logits.device, logits.dtype)
        logits.index_put_(where, amounts, accumulate=True)
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


def _draw(
    changed: Tensor, logits: Tensor, tokens: Tensor, rows: Sequence[SampledRow], drawn: list[int]
) -> tuple[Tensor, "_FewDraws | None"]:  # fmt: skip
    """Tokens (R,) of which those of the rows `drawn` come from inverting the cumulated probabilities at each row's
    random number."""
    vocab, device = logits.shape[1], logits.device
    asked = [rows[place] for place in drawn]
    numbers = [
        (max(one.temperature, LEAST_TEMPERATURE), _chance(row), one.top_k or vocab, one.top_p, one.min_p)
        for row, one in ((row, row.options) for row in asked)
    ]
    heat, *limits = to_device(numbers, device, torch.float64).t()[:, :, None]
    some = _taken(changed, drawn)
    some = (some - some.amax(-1, keepdim=True)) / heat.float()
    cut = [place for place, row in enumerate(asked) if _truncates(row.options, vocab)]
    whole = [place for place, row in enumerate(asked) if not _truncates(row.options, vocab)]
    found, few = torch.empty(len(drawn), dtype=torch.int64, device=device), None
    if whole:
        found = _put(found, whole, _invert(_taken(some, whole).softmax(-1), _taken(limits[0], whole)))
    if cut:
        few = _FewDraws(_taken(some, cut), [_taken(one, cut) for one in limits], logits, [drawn[one] for one in cut])
        found = _put(found, cut, few.tokens)
    return _put(tokens, drawn, found), few


def _taken(x: Tensor, places: list[int]) -> Tensor:
    """Rows of a tensor at increasing places."""
    return x if len(places) == len(x) else x.index_select(0, to_device(places, x.device))


def _put(x: Tensor, places: list[int], rows: Tensor) -> Tensor:
    """Rows in the places of those of a tensor."""
    return rows if len(places) == len(x) else x.index_copy(0, to_device(places, x.device), rows)


@final
class _FewDraws:
    """Rows that top_k, top_p or min_p cut, drawn among their FEW likeliest tokens. Where these are too few, which the
    host learns when it reads them, a row is drawn once more among all."""

    def __init__(self, heated: Tensor, limits: Sequence[Tensor], logits: Tensor, places: list[int]) -> None:
        """`heated` (C, V): logits by the temperature, the largest 0; `limits`: random number, top_k, top_p and min_p,
        (C, 1) each; `logits` (R, V) of all rows, of which these are at `places`."""
        self._limits, self._places = limits, places
        self.tokens, self.sure = _draw_of(heated, min(FEW, heated.shape[1]), *limits)
        self._heated, self._logits = heated, logits

    def redrawn(self, sure: list[bool]) -> dict[int, int]:
        """Tokens of the rows that were too few, by their places."""
        again = [place for place, is_sure in enumerate(sure) if not is_sure]
        if not again:
            return {}
        limits = (_taken(one, again) for one in self._limits)
        tokens, _ = _draw_of(_taken(self._heated, again), self._heated.shape[1], *limits)
        return dict(zip((self._places[place] for place in again), tokens.tolist(), strict=True))

    def logprob(self, place: int, token: int) -> float:
        """That the model gives a token in a row."""
        return float(self._logits[place].log_softmax(-1)[token])


def _truncates(options: RequestOptions, vocab: int) -> bool:
    return 0 < options.top_k < vocab or options.top_p < 1 or options.min_p > 0


def _draw_of(
    logits: Tensor, width: int, chance: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens (R,) of the likeliest `width`, and whether (R,) a row's choice lies within them for certain."""
    vocab = logits.shape[1]
    if width < vocab:
        ordered, index = logits.topk(width)
    else:
        ordered, index = logits.sort(descending=True, stable=True)
    inside = torch.arange(width, device=logits.device) < top_k
    among_few = ordered.masked_fill(~inside, float("-inf")).exp().sum(-1, keepdim=True).double()
    total = torch.where(top_k <= width, among_few, logits.exp().sum(-1, keepdim=True).double())
    shares = ordered.double().exp() / total
    kept = inside & (shares.cumsum(-1) - shares < top_p) & (shares >= min_p * shares[:, :1])
    known = (top_k[:, 0] <= width) | (top_k[:, 0] >= vocab)  # what the shares are of
    sure = known & ~kept[:, -1] | (width == vocab)
    return index.gather(1, _invert(shares * kept, chance)[:, None])[:, 0], sure


def _invert(shares: Tensor, chance: Tensor) -> Tensor:
    """The first place (R,) at which the cumulated shares (R, W) pass `chance` (R, 1) of their sum."""
    sums = shares.double().cumsum(-1)
    places = torch.searchsorted(sums, chance * sums[:, -1:], right=True)[:, 0]
    last = (shares > 0).long().mul_(torch.arange(1, shares.shape[1] + 1, device=shares.device)).amax(-1) - 1
    return torch.minimum(places, last.clamp(min=0))


def _chance(row: SampledRow) -> float:
    """In [0, 1): of the row's seed and how many tokens it has."""
    digest = blake2b(f"{row.seed} {len(row.made) + row.unread}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53

"""The next token of each of many sequences.

Rows are computed together, and none depends on another: its random number is a hash of its own seed and position, and
each function treats rows independently. Letters: R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, final

import torch
from torch import Tensor

from meshwright.kernels.chooser import uses_triton
from meshwright.model.generate import LEAST_TEMPERATURE
from meshwright.serving.engine.answers.grammar import GrammarState
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.cache.paged_cache import HostReading, to_device

FEW = 1024
"""Likeliest tokens that are examined first. A row whose top_k, top_p or min_p leave more is sorted completely."""


@dataclass(slots=True)
class SampledRow:
    """State of a sequence that is sampled."""

    options: RequestOptions
    seed: int
    prompt: Sequence[int]
    made: Sequence[int]
    """New tokens so far."""
    grammar: GrammarState | None = None
    """Grammar that the answer must follow."""
    unread: int = field(default=0, init=False)
    """Tokens behind `made` that the device has drawn and the host has not read."""
    counts: Tensor | None = field(default=None, init=False)
    """(2, V): how often the prompt and the answer have each token. Only of rows with penalties."""
    counted: int = field(default=0, init=False)

    @property
    def needs_host(self) -> bool:
        """True when the host must know all earlier tokens, for a grammar or penalties."""
        return self.grammar is not None or self.options.penalizes


class SampledTokens(NamedTuple):
    """Outcome of R rows."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probabilities by the model's own logits, before any change."""
    top: list[list[tuple[int, float]]]
    """The model's likeliest tokens and log-probabilities, as many as each row wants."""
    broken: list[bool]
    """True for rows whose logits are not finite."""
    redrawn: frozenset[int] = frozenset()
    """Rows whose token differs from the device's, because more than FEW tokens had to be examined."""


@final
class _FewDraws:
    """Rows with top_k, top_p or min_p, drawn among their FEW likeliest tokens.

    If these are too few, which the host learns when it reads them, a row is drawn once more among all.
    """

    def __init__(self, heated: Tensor, limits: Sequence[Tensor], logits: Tensor, rows_in_step: list[int]) -> None:
        """Draw tokens of C rows.

        Args:
            heated: (C, V) logits divided by the temperature, the largest 0.
            limits: Random number, top_k, top_p and min_p, (C, 1) each.
            logits: (R, V) of all rows of the step.
            rows_in_step: Rows of `logits` that these are.
        """
        self._limits, self._rows_in_step = limits, rows_in_step
        self.tokens, self.sure = _draw_among(heated, min(FEW, heated.shape[1]), *limits)
        self._heated, self._logits = heated, logits

    def redrawn(self, sure: list[bool]) -> dict[int, int]:
        """Return new tokens of the rows with too few candidates, by row."""
        # Rare: FEW tokens hold nearly all probability unless the temperature is high.
        again = [number for number, is_sure in enumerate(sure) if not is_sure]
        if not again:
            return {}
        limits = (_select_rows(limit, again) for limit in self._limits)
        tokens, _ = _draw_among(_select_rows(self._heated, again), self._heated.shape[1], *limits)
        return dict(zip((self._rows_in_step[number] for number in again), tokens.tolist(), strict=True))

    def logprob(self, row: int, token: int) -> float:
        """Return the model's log-probability of a token in a row."""
        return float(self._logits[row].log_softmax(-1)[token])


@final
class DrawnTokens:
    """Tokens drawn by the device, on their way to the host."""

    def __init__(
        self, tokens: Tensor, packed: Tensor, rows: Sequence[SampledRow], likeliest: Sequence[Tensor],
        few: _FewDraws | None,
    ) -> None:  # fmt: skip
        """Start the copies to the host.

        Args:
            tokens: (R,) int64.
            packed: (R, 2): each token as a floating number, and its log-probability by the model.
            likeliest: Indices and log-probabilities (R, most) of the model's tokens, or nothing.
            few: Rows that were drawn among FEW tokens.
        """
        self.tokens = tokens
        """(R,) int64 on the device, for the next step."""
        self._rows, self._few = rows, few
        self._reading = HostReading((packed, *(() if few is None else (few.sure,)), *likeliest))

    def read(self) -> SampledTokens:
        """Wait for the tokens and return them."""
        packed, *more = self._reading.read()
        pairs, redrawn = packed.tolist(), dict[int, int]()
        if self._few is not None:
            sure, *more = more
            redrawn = self._few.redrawn(sure.tolist())
            for row, token in redrawn.items():
                pairs[row] = token, self._few.logprob(row, token)
        broken = [logprob != logprob for _, logprob in pairs]
        tokens = [0 if token != token else int(token) for token, _ in pairs]
        top = (
            _likeliest_of_rows(self._rows, *(indices.tolist() for indices in more))
            if more
            else [[] for _ in self._rows]
        )
        return SampledTokens(tokens, [logprob for _, logprob in pairs], top, broken, frozenset(redrawn))


def sample(logits: Tensor, rows: Sequence[SampledRow]) -> SampledTokens:
    """Draw tokens from logits (R, V) fp32, which are not changed."""
    return draw(logits, rows).read()


def draw(logits: Tensor, rows: Sequence[SampledRow]) -> DrawnTokens:
    """Start to draw tokens from logits (R, V) fp32, which are not changed.

    The host waits only for rows with penalties, a bias or a grammar. On a GPU one kernel finds the likeliest tokens if
    no row wants more.
    """
    if uses_triton("likeliest", logits) and all(map(_is_plain, rows)):
        from meshwright.kernels.triton.logit_rows import likeliest

        # One pass over the logits, where log_softmax and argmax would take several.
        pairs = likeliest(logits)
        return DrawnTokens(pairs[:, 0].long(), pairs, rows, (), None)
    logs = logits.log_softmax(-1)
    changed, few = _with_penalties_and_bias(logits, rows), None
    tokens = changed.argmax(-1)
    drawn = [row for row, sampled in enumerate(rows) if sampled.options.temperature > 0]
    if drawn:
        tokens, few = _draw(changed, logits, tokens, rows, drawn)
    most = min(max(sampled.options.logprobs for sampled in rows), logs.shape[1])
    likeliest_tokens = logs.topk(most) if most else None
    packed = torch.stack((tokens.double(), logs.gather(1, tokens[:, None])[:, 0].double()), dim=1)
    return DrawnTokens(
        tokens,
        packed,
        rows,
        () if likeliest_tokens is None else (likeliest_tokens.indices, likeliest_tokens.values),
        few,
    )


def _is_plain(row: SampledRow) -> bool:
    """Return whether a row gets the likeliest token of the model's own logits."""
    options = row.options
    changes = options.temperature > 0 or options.penalizes or options.logit_bias or options.logprobs
    return not changes and row.grammar is None


def _likeliest_of_rows(
    rows: Sequence[SampledRow], tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]
) -> list[list[tuple[int, float]]]:
    pairs = (zip(*pair, strict=True) for pair in zip(tokens, logprobs, strict=True))
    return [list(likeliest)[: row.options.logprobs] for likeliest, row in zip(pairs, rows, strict=True)]


def _with_penalties_and_bias(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Return logits with penalties, bias, and grammars; the same tensor if no row has any.

    A row whose grammar allows no token is left unchanged: the grammar's `failure` says so.
    """
    penalized = [number for number, row in enumerate(rows) if row.options.penalizes]
    biased = [(number, pair) for number, row in enumerate(rows) for pair in row.options.logit_bias.items()]
    bound = [number for number, row in enumerate(rows) if row.grammar is not None]
    if not penalized and not biased and not bound:
        return logits
    # Rows without options must keep the model's own numbers, which logprobs report.
    logits = logits.clone()
    if penalized:
        logits[penalized] = _apply_penalties(logits[penalized], [rows[number] for number in penalized])
    if biased:
        where = to_device([(number, token) for number, (token, _) in biased], logits.device).unbind(1)
        amounts = to_device([amount for _, (_, amount) in biased], logits.device, logits.dtype)
        logits.index_put_(where, amounts, accumulate=True)
    if bound:
        allowed = torch.stack([grammar.find_allowed() for row in rows if (grammar := row.grammar) is not None])
        # A row of -inf alone would become NaN, and look like a broken model.
        allowed |= ~allowed.any(1, keepdim=True)
        logits[bound] = logits[bound].masked_fill(~allowed.to(logits.device), float("-inf"))
    return logits


def _apply_penalties(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    counts = torch.stack([_count_tokens(row, logits.shape[1]) for row in rows]).to(logits.device)
    rows_of_penalties = [
        (options.repetition_penalty, options.presence_penalty, options.frequency_penalty)
        for options in (row.options for row in rows)
    ]
    penalties = torch.tensor(rows_of_penalties, device=logits.device)
    repetition, presence, frequency = penalties[:, :1], penalties[:, 1:2], penalties[:, 2:]
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    seen: Tensor = torch.where(counts.sum(1) > 0, scaled, logits)
    return seen - frequency * counts[:, 1] - presence * (counts[:, 1] > 0)


def _count_tokens(row: SampledRow, vocab: int) -> Tensor:
    if row.counts is None:
        row.counts = torch.stack((torch.bincount(torch.tensor(row.prompt), minlength=vocab), torch.zeros(vocab).long()))
    # Only new tokens are counted, so a long answer costs no more per step than a short one.
    for token in row.made[row.counted :]:
        row.counts[1, token] += 1
    row.counted = len(row.made)
    return row.counts


def _draw(
    changed: Tensor, logits: Tensor, tokens: Tensor, rows: Sequence[SampledRow], drawn: list[int]
) -> tuple[Tensor, _FewDraws | None]:  # fmt: skip
    """Replace the tokens (R,) of the rows `drawn` by inverting cumulated probabilities at each row's random number."""
    vocab, device = logits.shape[1], logits.device
    sampled_rows = [rows[number] for number in drawn]
    numbers = [
        (
            max(options.temperature, LEAST_TEMPERATURE),
            _random_number(row),
            options.top_k or vocab,
            options.top_p,
            options.min_p,
        )
        for row, options in ((row, row.options) for row in sampled_rows)
    ]
    heat, *limits = to_device(numbers, device, torch.float64).t()[:, :, None]
    scaled = _select_rows(changed, drawn)
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / heat.float()
    truncated = [number for number, row in enumerate(sampled_rows) if _truncates(row.options, vocab)]
    whole = [number for number, row in enumerate(sampled_rows) if not _truncates(row.options, vocab)]
    chosen, few = torch.empty(len(drawn), dtype=torch.int64, device=device), None
    if whole:
        chosen = _replace_rows(
            chosen, whole, _invert(_select_rows(scaled, whole).softmax(-1), _select_rows(limits[0], whole))
        )
    if truncated:
        few = _FewDraws(
            _select_rows(scaled, truncated),
            [_select_rows(limit, truncated) for limit in limits],
            logits,
            [drawn[number] for number in truncated],
        )
        chosen = _replace_rows(chosen, truncated, few.tokens)
    return _replace_rows(tokens, drawn, chosen), few


def _select_rows(x: Tensor, rows: list[int]) -> Tensor:
    """Return rows of a tensor at increasing places."""
    return x if len(rows) == len(x) else x.index_select(0, to_device(rows, x.device))


def _replace_rows(x: Tensor, rows: list[int], new_rows: Tensor) -> Tensor:
    """Return the tensor with rows replaced."""
    return new_rows if len(rows) == len(x) else x.index_copy(0, to_device(rows, x.device), new_rows)


def _truncates(options: RequestOptions, vocab: int) -> bool:
    return 0 < options.top_k < vocab or options.top_p < 1 or options.min_p > 0


def _draw_among(
    logits: Tensor, width: int, random_numbers: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Return tokens (R,) of the likeliest `width`, and whether (R,) each row's choice certainly lies within them."""
    vocab = logits.shape[1]
    if width < vocab:
        ordered, index = logits.topk(width)
    else:
        # stable: equal logits keep the order of ids, as argmax has it.
        ordered, index = logits.sort(descending=True, stable=True)
    inside = torch.arange(width, device=logits.device) < top_k
    # float64 sums: cumulated fp32 shares would be off by more than rare tokens have.
    among_few = ordered.masked_fill(~inside, float("-inf")).exp().sum(-1, keepdim=True).double()
    total = torch.where(top_k <= width, among_few, logits.exp().sum(-1, keepdim=True).double())
    shares = ordered.double().exp() / total
    allowed = inside & (shares.cumsum(-1) - shares < top_p) & (shares >= min_p * shares[:, :1])
    # A top_k between `width` and V leaves tokens out of the sum that shares refer to, which only a full sort knows.
    has_total = (top_k[:, 0] <= width) | (top_k[:, 0] >= vocab)
    sure = has_total & ~allowed[:, -1] | (width == vocab)
    return index.gather(1, _invert(shares * allowed, random_numbers)[:, None])[:, 0], sure


def _invert(shares: Tensor, random_numbers: Tensor) -> Tensor:
    """Return the first index (R,) at which the cumulated shares (R, W) pass `random_numbers` (R, 1) of their sum."""
    sums = shares.double().cumsum(-1)
    positions = torch.searchsorted(sums, random_numbers * sums[:, -1:], right=True)[:, 0]
    # A random number next to 1 may pass all sums by rounding: the last possible token is meant.
    last = (shares > 0).long().mul_(torch.arange(1, shares.shape[1] + 1, device=shares.device)).amax(-1) - 1
    return torch.minimum(positions, last.clamp(min=0))


def _random_number(row: SampledRow) -> float:
    """Return a number in [0, 1) given by the row's seed and number of tokens."""
    digest = blake2b(f"{row.seed} {len(row.made) + row.unread}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53

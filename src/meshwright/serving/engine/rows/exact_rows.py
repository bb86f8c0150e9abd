"""Numbers of rows with which a row's bits do not depend on the other rows of a pass.

A matrix product's library chooses the order of its sums by the number of rows, and elementwise functions may finish
with other instructions than they begin with. So passes are padded to a few numbers of rows. Before a number is used,
rows of random tokens are computed with it and compared, bit for bit, with passes of TILE rows: with this model's
weights, on this machine, in its number of threads. Numbers that differ are not used. If even the order within TILE rows
matters, rows are computed one by one. Attention is not compared: it is called row by row (packed_step).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from meshwright.kernels.attention.attend import Mask
from meshwright.model.attention import Cache
from meshwright.model.feed_forward import Experts
from meshwright.model.transformer import Transformer

TILE = 16
"""Rows of the pass that all others are compared with."""
ORDERS = 4
"""Random orders of rows that are compared."""


class SeesItself:
    """Past in which each row sees itself alone, and so gets its own value."""

    length = 0

    def __init__(self, low_rank: bool) -> None:
        self.low_rank = low_rank

    def turn(self, *_: object, **__: object) -> bool:
        """Return False: the caller norms and rotates q and k."""
        return False

    def attend(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> Tensor:
        """Return v of each row, for every query head."""
        return v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)

    def select(self, rows: Tensor) -> None:
        """Do nothing."""


@final
class ExactRows:
    """Numbers of rows that give equal bits for one model. Use under `torch.no_grad`."""

    def __init__(
        self, model: Transformer, most: int, head: Callable[[Tensor], Tensor], *, low_rank: bool, seed: int = 0
    ) -> None:
        """Compare passes of up to `most` rows.

        `head` maps hidden states (R, D) to logits (R, V).
        """
        self._model, self._head, self._low_rank = model, head, low_rank
        self._random = torch.Generator().manual_seed(seed)
        self._known: dict[int, bool] = {}
        self._tokens = torch.randint(model.shape.vocab, (TILE,), generator=self._random)
        self._positions = torch.randint(model.shape.max_positions, (TILE,), generator=self._random)
        with self.exact_experts():
            self._right = self._logits(torch.arange(TILE))
        self.tile = TILE if self._agrees(TILE) else 1
        self._sizes = [self.tile]
        while self.tile > 1 and self._sizes[-1] < most and self._agrees(2 * self._sizes[-1]):
            self._sizes.append(2 * self._sizes[-1])

    @property
    def most(self) -> int:
        """Rows of the largest pass."""
        return self._sizes[-1]

    def round_up(self, rows: int) -> int:
        """Return the number of rows that a pass of `rows` <= `most` is padded to."""
        return next(size for size in self._sizes if size >= rows)

    @contextmanager
    def exact_experts(self) -> Iterator[None]:
        """Let the model's experts compute padded numbers of rows within the context."""
        seams = self._model.seams
        dispatch = seams.dispatch
        seams.dispatch = replace(dispatch, compute=self._experts)
        try:
            yield
        finally:
            seams.dispatch = dispatch

    def _experts(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute rows (R, D) sorted by expert, counts (X,) -> (R, D), padding each expert's rows.

        See Dispatch.compute.
        """
        expert_rows: list[int] = counts.tolist()
        padded_counts = [-(-count // TILE) * TILE for count in expert_rows]
        slots = torch.cat(
            [torch.arange(count) + sum(padded_counts[:number]) for number, count in enumerate(expert_rows)]
        )
        padded = rows.new_zeros(sum(padded_counts), rows.shape[1]).index_copy_(0, slots, rows)
        parts = padded.split(TILE)
        owners = [number for number, count in enumerate(padded_counts) for _ in range(count // TILE)]
        counts_of_tile = [[TILE if expert == number else 0 for expert in range(len(expert_rows))] for number in owners]
        return torch.cat(
            [experts.feed_forward(tile, count) for tile, count in zip(parts, counts_of_tile, strict=True)]
        )[slots]

    def _agrees(self, rows: int) -> bool:
        """Return whether rows in several orders get the same bits as in a pass of TILE."""
        with self.exact_experts():
            for _ in range(ORDERS):
                order = torch.randint(TILE, (rows,), generator=self._random)
                if not torch.equal(self._logits(order), self._right[order]):
                    return False
        return True

    def _logits(self, order: Tensor) -> Tensor:
        layers = len(self._model.blocks)
        cache = Cache(layers, lambda: SeesItself(self._low_rank))
        device = self._model.embed.weight.device
        tokens, positions = self._tokens[order][None].to(device), self._positions[order][None].to(device)
        x, _ = self._model.hidden(tokens, positions=positions, cache=cache)
        return self._head(x[0])

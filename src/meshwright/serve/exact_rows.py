"""How many rows a forward pass may have so that a row's bits do not depend on the others.

A matrix product sums in an order that its library chooses by the number of rows; elementwise functions may end in other
instructions than they begin with. So passes are padded to a few numbers of rows. Before a number is used, rows of
random tokens are computed with it and compared with passes of TILE rows, bit for bit, with this model's weights, on
this machine, in its number of threads. Numbers that differ are not used; if even the order of TILE rows matters, rows
are computed one by one. Attention is left out of the comparison: it is called row by row (packed_step).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from meshwright.kernels.attention import Mask
from meshwright.model.kv_cache import Cache
from meshwright.model.moe import Experts
from meshwright.model.transformer import Transformer

TILE = 16
"""Rows of a pass that all others are compared with."""
ORDERS = 4
"""Random orders of rows that are compared."""


class SeesItself:
    """As Past: each row sees itself alone, so that it gets its own value."""

    length = 0

    def __init__(self, low_rank: bool) -> None:
        self.low_rank = low_rank

    def turn(self, *_: object, **__: object) -> bool:
        """As Past: never."""
        return False

    def attend(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float
    ) -> Tensor:
        """v of each row, for every query head."""
        return v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)

    def select(self, rows: Tensor) -> None:
        """There is nothing to select from."""


@final
class ExactRows:
    """Numbers of rows that give equal bits for one model. Use under `torch.no_grad`."""

    def __init__(
        self, model: Transformer, most: int, head: Callable[[Tensor], Tensor], *, low_rank: bool, seed: int = 0
    ) -> None:
        """`most`: rows of the largest pass that is asked for; `head`: hidden states (R, D) -> logits (R, V)."""
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

    def padded(self, rows: int) -> int:
        """The number of rows that a pass of so many, at most `most`, is padded to."""
        return next(size for size in self._sizes if size >= rows)

    @contextmanager
    def exact_experts(self) -> Iterator[None]:
        """While it lasts, the model's experts compute numbers of rows that give equal bits too."""
        seams = self._model.seams
        kept = seams.dispatch
        seams.dispatch = replace(kept, compute=self._experts)
        try:
            yield
        finally:
            seams.dispatch = kept

    def _experts(self, experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
        """As Dispatch.compute: rows (R, D) sorted by expert, counts (X,) -> (R, D). Each expert's are padded."""
        known: list[int] = counts.tolist()
        room = [-(-count // TILE) * TILE for count in known]
        places = torch.cat([torch.arange(count) + sum(room[:number]) for number, count in enumerate(known)])
        padded = rows.new_zeros(sum(room), rows.shape[1]).index_copy_(0, places, rows)
        parts = padded.split(TILE)
        owners = [number for number, count in enumerate(room) for _ in range(count // TILE)]
        only = [[TILE if one == number else 0 for one in range(len(known))] for number in owners]
        return torch.cat([experts.feed_forward(*one) for one in zip(parts, only, strict=True)])[places]

    def _agrees(self, rows: int) -> bool:
        """Whether rows in several orders get the bits that they get in a pass of TILE."""
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
        fed = self._tokens[order][None].to(device), self._positions[order][None].to(device)
        x, _ = self._model.hidden(fed[0], positions=fed[1], cache=cache)
        return self._head(x[0])

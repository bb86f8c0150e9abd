"""Low-rank adapters, of which each request may have another: its rows get (x A^T) (s B)^T beside x W^T.

They stand where an adapter in training stands, as the layer's Weight (model/linear.py), while a pass has rows of
theirs. Prepared products give x W^T as ever, and what is added here follows. Rows of one adapter are a product each, so
a pass may mix adapters and rows without. In exact mode a row's bits do not depend on how many rows its adapter has:
compiled loops sum in one order for any number; else products have TILE rows, which are compared in several orders.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from meshwright.kernels.compiled import library
from meshwright.model.attention import LatentAttention
from meshwright.model.linear import Linear, Matrix
from meshwright.model.transformer import Transformer
from meshwright.serve.exact_rows import ORDERS, TILE
from meshwright.spec.errors import ArgumentError
from meshwright.spec.lora import LoRAShape

Rows = slice | Tensor
"""Rows of a pass: a run of them, or their numbers."""
LORA, STACK = ".lora.", "_lora."
"""In names of tensors: beside a layer, and beside a stack of experts."""
MERGED = "merge it (`meshwright export`) and serve that model"


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter as it was read."""

    lora: LoRAShape
    tensors: Mapping[str, Tensor]
    """A (rank, in) and B (out, rank) by the names of the model that is trained with one."""

    @property
    def layers(self) -> list[str]:
        """Names of the layers that have one."""
        return [name.removesuffix(f"{LORA}a") for name in self.tensors if name.endswith(f"{LORA}a")]

    def check(self, name: str, model: Transformer) -> None:
        """ArgumentError where requests cannot have it beside others, under its name."""
        refused = f"adapter={name} cannot be served by request"
        if self.lora.dora:
            raise ArgumentError(f"{refused}: DoRA changes the lengths of the model's own rows; {MERGED}")
        stack = next((one for one in self.tensors if STACK in one), None)
        if stack is not None:
            raise ArgumentError(f"{refused}: it adapts experts ({stack.partition(STACK)[0]}); {MERGED}")
        for layer in self.layers:
            found = model.get_submodule(layer)
            above = model.get_submodule(layer.rpartition(".")[0])
            if isinstance(above, LatentAttention) and found is above.kv_up:
                raise ArgumentError(f"{refused}: {layer} is multiplied into queries, not rows; {MERGED}")
            if not isinstance(found, Linear) or found.lora is not None:
                raise ArgumentError(f"{refused}: {layer} has an adapter of its own; {MERGED}")


@final
class LowRankProduct:
    """rows (R, in) -> (R, out): times A, then times s B."""

    def __init__(self, a: Tensor, b: Tensor, *, exact: bool) -> None:
        """`a` (rank, in), `b` (out, rank) with s. `exact`: a row's bits are its own, however many there are."""
        self._a, self._b = a.t().contiguous(), b.t().contiguous()
        self._panels = _panels(a, b) if library.takes(a, b) else None
        self._tile = self._checked_tile() if exact else 0

    def __call__(self, rows: Tensor) -> Tensor:
        """One product after the other."""
        loops = library.loops()
        if loops is not None and self._panels is not None and len(rows) <= loops.rows and library.takes(rows):
            return loops.linear(loops.linear(rows, self._panels[0]), self._panels[1])
        if not self._tile:
            return self._plain(rows)
        room = -(-len(rows) // self._tile) * self._tile
        padded = rows.new_zeros(room, rows.shape[1])
        padded[: len(rows)] = rows
        return torch.cat([self._plain(some) for some in padded.split(self._tile)])[: len(rows)]

    def _plain(self, rows: Tensor) -> Tensor:
        return torch.mm(torch.mm(rows, self._a), self._b)

    def _checked_tile(self) -> int:
        """TILE, where the order of so many rows does not matter; else 1."""
        chance = torch.Generator().manual_seed(0)
        rows = torch.randn(TILE, len(self._a), generator=chance).to(self._a)
        right = self._plain(rows)
        orders = (torch.randint(TILE, (TILE,), generator=chance) for _ in range(ORDERS))
        return TILE if all(torch.equal(self._plain(rows[order]), right[order]) for order in orders) else 1


def _panels(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both for compiled loops, with a rank that is filled up with zeros; None where they do not take them."""
    missing = -len(a) % library.LANES
    wide = torch.cat((a, a.new_zeros(missing, a.shape[1])))
    narrow = torch.cat((b, b.new_zeros(len(b), missing)), dim=1)
    panels = library.float_panels(wide), library.float_panels(narrow)
    return None if panels[0] is None or panels[1] is None else (panels[0], panels[1])


@final
class BesideRows:
    """The Weight of one layer while a pass has rows with adapters of it."""

    adds_bias = False

    def __init__(self) -> None:
        self.products: dict[str, LowRankProduct] = {}
        """By adapter."""
        self.now: list[tuple[LowRankProduct, Rows]] = []
        """Of the pass."""

    def read(self, x: Tensor) -> Tensor:
        """As Weight: the input."""
        return x

    def matrices(self, weight: Matrix) -> Sequence[Matrix]:
        """As Weight: the layer's own."""
        return (weight,)

    def alone(self, weight: Tensor) -> Tensor | None:
        """As Weight: never."""
        return None

    def result(self, layer: Linear, x: Tensor, products: Sequence[Tensor]) -> Tensor:
        """As Weight."""
        return self.added(x, products[0])

    def added(self, x: Tensor, found: Tensor) -> Tensor:
        """x (..., in) and the layer's own product (..., out), to which those of adapters are added in place."""
        rows, out = x.reshape(-1, x.shape[-1]), found.view(-1, found.shape[-1])
        for product, where in self.now:
            if isinstance(where, slice):
                out[where].add_(product(rows[where]))
            else:
                out.index_add_(0, where, product(rows[where]))
        return found


@final
class RequestAdapters:
    """All adapters of one engine. Use under `torch.no_grad`."""

    def __init__(self, model: Transformer, adapters: Mapping[str, ServedAdapter], *, exact: bool) -> None:
        """ArgumentError: one cannot be served."""
        self.names = tuple(adapters)
        self._layers: dict[Linear, BesideRows] = {}
        like = model.embed.weight
        for name, adapter in adapters.items():
            adapter.check(name, model)
            for key in adapter.layers:
                layer = model.get_submodule(key)
                assert isinstance(layer, Linear)
                a, b = adapter.tensors[f"{key}{LORA}a"], adapter.tensors[f"{key}{LORA}b"] * adapter.lora.scale
                product = LowRankProduct(a.to(like), b.to(like), exact=exact)
                self._layers.setdefault(layer, BesideRows()).products[name] = product

    def check(self, name: str | None) -> None:
        """ArgumentError: there is none of that name."""
        if name is not None and name not in self.names:
            known = f"take one of {', '.join(self.names)}" if self.names else "the engine was given none"
            raise ArgumentError(f"adapter={name} is not here: {known}")

    @contextmanager
    def over(self, rows: Mapping[str, Rows]) -> Iterator[None]:
        """While it lasts, these rows of a pass have these adapters."""
        touched = []
        for layer, beside in self._layers.items() if rows else ():
            beside.now = [(beside.products[name], some) for name, some in rows.items() if name in beside.products]
            if beside.now:
                layer.lora = beside
                touched.append(layer)
        try:
            yield
        finally:
            for layer in touched:
                layer.lora = None


def needs_one_rank(names: Iterable[str]) -> ArgumentError:
    """Why none of them is served over several ranks, which have parts of its layers."""
    return ArgumentError(f"adapter={next(iter(names))} is served by one rank alone: take tp=1, or {MERGED}")


def rows_of(spans: Mapping[str, Sequence[tuple[int, int]]], device: torch.device) -> dict[str, Rows]:
    """Of each adapter's spans of rows (begin, end), in order: one slice where they follow each other."""
    found: dict[str, Rows] = {}
    for name, some in spans.items():
        begin, end = some[0][0], some[-1][1]
        if sum(to - since for since, to in some) == end - begin:
            found[name] = slice(begin, end)
        else:
            found[name] = torch.tensor([row for span in some for row in range(*span)], device=device)
    return found

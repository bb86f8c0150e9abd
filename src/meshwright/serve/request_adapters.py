"""Low-rank adapters, of which each request may have another: its rows get (x A^T) (s B)^T beside x W^T.

They stand where an adapter in training stands, as the layer's Weight (model/linear.py), while a pass has rows of
theirs. Prepared products give x W^T as ever, and what is added here follows. Rows of one adapter are a product each, so
a pass may mix adapters and rows without. In exact mode a row's bits do not depend on how many rows its adapter has:
compiled loops sum in one order for any number; else products have TILE rows, which are compared in several orders.

A rank with a part of a layer has the same part of its adapters (adapter_shares.py): what is added is part of the sum
that the layer's own product is part of, or of its outputs. Adapters have numbers here, the same on all ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from meshwright.model.attention import LatentAttention
from meshwright.model.linear import Linear, Matrix
from meshwright.model.low_rank import LoRA
from meshwright.model.transformer import Transformer
from meshwright.serve.adapter_shares import possible_parts
from meshwright.serve.expert_adapters import ExpertAdapters
from meshwright.serve.host_copies import to_device
from meshwright.serve.low_rank_product import LowRankProduct, Rows
from meshwright.spec.errors import ArgumentError
from meshwright.spec.lora import LoRAShape

LORA = ".lora."
"""In names of tensors beside a layer."""
MERGED = "merge it (`meshwright export`) and serve that model"


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter as it was read."""

    lora: LoRAShape
    tensors: Mapping[str, Tensor]
    """A (rank, in) and B (out, rank), of experts (X, rank, in) and (X, out, rank), by the names of the model that is
    trained with one."""

    @property
    def layers(self) -> list[str]:
        """Names of the layers that have one; not of experts."""
        return [name.removesuffix(f"{LORA}a") for name in self.tensors if name.endswith(f"{LORA}a")]

    def check(self, name: str, model: Transformer) -> None:
        """ArgumentError where requests cannot have it beside others, under its name."""
        refused = f"adapter={name} cannot be served by request"
        if self.lora.dora:
            raise ArgumentError(f"{refused}: DoRA changes the lengths of the model's own rows; {MERGED}")
        sizes = {one.name: one.shape for one in possible_parts(model.shape, self.lora.rank)}
        for part, tensor in self.tensors.items():
            if sizes.get(part) != tensor.shape:  # other ranks make room for the sizes of the model
                raise ArgumentError(f"{refused}: {part} {list(tensor.shape)} is no part of {model.shape.name}")
            if not tensor.isfinite().all():  # keys and values of its requests would spoil blocks for others
                raise ArgumentError(f"{refused}: {part} has numbers that are not finite; it is damaged")
        for layer in self.layers:
            found = model.get_submodule(layer)
            above = model.get_submodule(layer.rpartition(".")[0])
            if isinstance(above, LatentAttention) and found is above.kv_up:
                raise ArgumentError(f"{refused}: {layer} is multiplied into queries, not rows; {MERGED}")
            if not isinstance(found, Linear) or isinstance(found.lora, LoRA):
                raise ArgumentError(f"{refused}: {layer} has an adapter of its own; {MERGED}")

    def scaled(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Its tensors as they are multiplied: B with s, all in a dtype."""
        scale = self.lora.scale
        return {
            name: (tensor * scale if name.endswith("b") else tensor).to(dtype)
            for name, tensor in self.tensors.items()
        }  # fmt: skip


@final
class BesideRows:
    """The Weight of one layer while a pass has rows with adapters of it."""

    adds_bias = False

    def __init__(self, *, gathers: bool) -> None:
        """`gathers`: whether the layer's product reads more rows than the layer is given, those of other ranks."""
        self._gathers = gathers
        self.products: dict[int, LowRankProduct] = {}
        """By adapter."""
        self.now: list[tuple[LowRankProduct, Rows]] = []
        """Of the pass."""

    def read(self, x: Tensor) -> Tensor:
        """As Weight: the input."""
        return x

    def matrices(self, weight: Matrix) -> Sequence[Matrix]:
        """As Weight: the layer's own; and each A, where rows come with the product alone."""
        return (weight, *(product.a for product, _ in self.now)) if self._gathers else (weight,)

    def sole_matrix(self, weight: Tensor) -> Tensor | None:
        """As Weight: never."""
        return None

    def combine(self, layer: Linear, x: Tensor, products: Sequence[Tensor]) -> Tensor:
        """As Weight."""
        if not self._gathers:
            return self.added(x, products[0])
        out = products[0].view(-1, products[0].shape[-1])
        for (product, where), narrow in zip(self.now, products[1:], strict=True):
            _add(out, where, product.widened(narrow.view(-1, narrow.shape[-1])[where]))
        return products[0]

    def added(self, x: Tensor, found: Tensor) -> Tensor:
        """x (..., in) and the layer's own product (..., out), to which those of adapters are added in place."""
        rows, out = x.reshape(-1, x.shape[-1]), found.view(-1, found.shape[-1])
        for product, where in self.now:
            _add(out, where, product(rows[where]))
        return found


def _add(out: Tensor, where: Rows, some: Tensor) -> None:
    """To these rows of `out`."""
    if isinstance(where, slice):
        out[where].add_(some)
    else:
        out.index_add_(0, where, some)


@final
class RequestAdapters:
    """All adapters that a model, or this rank's part of one, has beside it. Use under `torch.no_grad`."""

    def __init__(self, model: Transformer, *, exact: bool, multiple: int = 1) -> None:
        """`multiple`: among how many ranks the rows of a pass are cut, where they are."""
        self._model, self._exact = model, exact
        self._layers: dict[Linear, BesideRows] = {}
        self._experts = ExpertAdapters(model, exact=exact, multiple=multiple)

    def put(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Have an adapter, of which `tensors` is what is here, B with s."""
        like, gathers = self._model.embed.weight, self._model.seams.dense.gathers
        for name, a in tensors.items():
            layer_name, is_layer, part = name.partition(LORA)
            if is_layer and part == "a":
                layer = self._model.get_submodule(layer_name)
                assert isinstance(layer, Linear)
                product = LowRankProduct(a.to(like), tensors[f"{layer_name}{LORA}b"].to(like), exact=self._exact)
                self._layers.setdefault(layer, BesideRows(gathers=gathers)).products[number] = product
        self._experts.put(number, tensors)

    def drop(self, number: int) -> None:
        """Have it no more."""
        for beside in self._layers.values():
            beside.products.pop(number, None)
        self._layers = {layer: beside for layer, beside in self._layers.items() if beside.products}
        self._experts.drop(number)

    @property
    def bytes(self) -> int:
        """Of all adapters, on this rank. Another thread may ask."""
        products = (product for beside in list(self._layers.values()) for product in list(beside.products.values()))
        return sum(one.bytes for one in products) + self._experts.bytes

    @contextmanager
    def over(self, rows: Mapping[int, Rows]) -> Iterator[None]:
        """While it lasts, these rows of a pass have these adapters."""
        touched = []
        for layer, beside in self._layers.items() if rows else ():
            beside.now = [(beside.products[number], some) for number, some in rows.items() if number in beside.products]
            if beside.now:
                layer.lora = beside
                touched.append(layer)
        try:
            with self._experts.over(rows):
                yield
        finally:
            for layer in touched:
                layer.lora = None


def rows_of(spans: Mapping[int, Sequence[tuple[int, int]]], device: torch.device) -> dict[int, Rows]:
    """Of each adapter's spans of rows (begin, end), in order: one slice where they follow each other."""
    found: dict[int, Rows] = {}
    for number, some in spans.items():
        begin, end = some[0][0], some[-1][1]
        if sum(to - since for since, to in some) == end - begin:
            found[number] = slice(begin, end)
        else:
            found[number] = to_device([row for span in some for row in range(*span)], device)
    return found

"""Low-rank adapters that may differ from request to request: their rows get (x A^T) (s B)^T beside x W^T.

They take the place of an adapter in training, as the layer's Weight (model/linear.py), while a pass has rows of theirs.
Prepared products give x W^T as usual, and adapters are added after that. Rows of one adapter are one product, so a pass
may mix adapters and rows without one. In exact mode a row's bits do not depend on how many rows its adapter has.
Compiled loops sum in one order for any number; otherwise products have TILE rows, which are compared in several orders.

A rank with a part of a layer has the same part of its adapters (adapter_shares.py). So an addition is part of the same
sum, or of the same outputs, as the layer's own product. Adapters have numbers here, the same on all ranks.
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
from meshwright.serving.engine.cache.host_copies import to_device
from meshwright.serving.engine.rows.adapter_shares import possible_parts
from meshwright.serving.engine.rows.expert_adapters import ExpertAdapters
from meshwright.serving.engine.rows.low_rank_product import LowRankProduct, Rows
from meshwright.spec.errors import ArgumentError
from meshwright.spec.model.shape import LoRAShape

LORA = ".lora."
"""Marker in names of tensors beside a layer."""
MERGED = "merge it (`meshwright export`) and serve that model"


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter as it was read."""

    lora: LoRAShape
    tensors: Mapping[str, Tensor]
    """A (rank, in) and B (out, rank), of experts (X, rank, in) and (X, out, rank).

    Names are those of the model when it is trained with one.
    """

    @property
    def layers(self) -> list[str]:
        """Names of the layers with an adapter, without experts."""
        return [name.removesuffix(f"{LORA}a") for name in self.tensors if name.endswith(f"{LORA}a")]

    def check(self, name: str, model: Transformer) -> None:
        """Raise ArgumentError, under the adapter's name, if requests cannot use it beside others."""
        refused = f"adapter={name} cannot be served by request"
        if self.lora.dora:
            raise ArgumentError(f"{refused}: DoRA changes the lengths of the model's own rows; {MERGED}")
        sizes = {part.name: part.shape for part in possible_parts(model.shape, self.lora.rank)}
        for part, tensor in self.tensors.items():
            if sizes.get(part) != tensor.shape:  # other ranks make room for the sizes of the model
                raise ArgumentError(f"{refused}: {part} {list(tensor.shape)} is no part of {model.shape.name}")
            if not tensor.isfinite().all():  # keys and values of its requests would spoil blocks for others
                raise ArgumentError(f"{refused}: {part} has numbers that are not finite; it is damaged")
        for layer in self.layers:
            module = model.get_submodule(layer)
            parent = model.get_submodule(layer.rpartition(".")[0])
            if isinstance(parent, LatentAttention) and module is parent.kv_up:
                raise ArgumentError(f"{refused}: {layer} is multiplied into queries, not rows; {MERGED}")
            if not isinstance(module, Linear) or isinstance(module.lora, LoRA):
                raise ArgumentError(f"{refused}: {layer} has an adapter of its own; {MERGED}")

    def scaled(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors in a dtype, B multiplied by s."""
        scale = self.lora.scale
        return {
            name: (tensor * scale if name.endswith("b") else tensor).to(dtype)
            for name, tensor in self.tensors.items()
        }  # fmt: skip


@final
class LayerAdapters:
    """The Weight of one layer while a pass has rows with adapters of it."""

    adds_bias = False

    def __init__(self, *, gathers: bool) -> None:
        """Set `gathers` if the layer's product reads rows of other ranks too."""
        self._gathers = gathers
        self.products: dict[int, LowRankProduct] = {}
        """Products by adapter."""
        self.current: list[tuple[LowRankProduct, Rows]] = []
        """Products and rows of the pass."""

    def read(self, x: Tensor) -> Tensor:
        """Return the input. See Weight."""
        return x

    def matrices(self, weight: Matrix) -> Sequence[Matrix]:
        """Return the layer's matrix, and each A if rows come only with the product. See Weight."""
        return (weight, *(product.a for product, _ in self.current)) if self._gathers else (weight,)

    def sole_matrix(self, weight: Tensor) -> Tensor | None:
        """Return None: rows with adapters need more than one matrix."""
        return None

    def combine(self, layer: Linear, x: Tensor, products: Sequence[Tensor]) -> Tensor:
        """Add the rows' adapters to the layer's product."""
        if not self._gathers:
            return self.added(x, products[0])
        out = products[0].view(-1, products[0].shape[-1])
        for (product, where), narrow in zip(self.current, products[1:], strict=True):
            _add(out, where, product.widened(narrow.view(-1, narrow.shape[-1])[where]))
        return products[0]

    def added(self, x: Tensor, product_out: Tensor) -> Tensor:
        """Add the adapters' products of x (..., in) to the layer's own (..., out), in place."""
        rows, out = x.reshape(-1, x.shape[-1]), product_out.view(-1, product_out.shape[-1])
        for product, where in self.current:
            _add(out, where, product(rows[where]))
        return product_out


def _add(out: Tensor, where: Rows, addend: Tensor) -> None:
    if isinstance(where, slice):
        out[where].add_(addend)
    else:
        out.index_add_(0, where, addend)


@final
class RequestAdapters:
    """All adapters beside a model, or beside this rank's part of one. Use under `torch.no_grad`."""

    def __init__(self, model: Transformer, *, exact: bool, multiple: int = 1) -> None:
        """Take the number of ranks (`multiple`) that split the rows of a pass."""
        self._model, self._exact = model, exact
        self._layers: dict[Linear, LayerAdapters] = {}
        self._experts = ExpertAdapters(model, exact=exact, multiple=multiple)

    def put(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Add an adapter. `tensors`: this rank's part, B with s."""
        like, gathers = self._model.embed.weight, self._model.seams.dense.gathers
        for name, a in tensors.items():
            layer_name, is_layer, part = name.partition(LORA)
            if is_layer and part == "a":
                layer = self._model.get_submodule(layer_name)
                assert isinstance(layer, Linear)
                product = LowRankProduct(a.to(like), tensors[f"{layer_name}{LORA}b"].to(like), exact=self._exact)
                self._layers.setdefault(layer, LayerAdapters(gathers=gathers)).products[number] = product
        self._experts.put(number, tensors)

    def drop(self, number: int) -> None:
        """Remove an adapter."""
        for adapters in self._layers.values():
            adapters.products.pop(number, None)
        self._layers = {layer: adapters for layer, adapters in self._layers.items() if adapters.products}
        self._experts.drop(number)

    @property
    def bytes(self) -> int:
        """Memory of all adapters on this rank. Another thread may read it."""
        products = (product for adapters in list(self._layers.values()) for product in list(adapters.products.values()))
        return sum(product.bytes for product in products) + self._experts.bytes

    @contextmanager
    def over(self, rows: Mapping[int, Rows]) -> Iterator[None]:
        """Give these rows of a pass these adapters within the context."""
        touched = []
        for layer, adapters in self._layers.items() if rows else ():
            adapters.current = [
                (adapters.products[number], adapter_rows)
                for number, adapter_rows in rows.items()
                if number in adapters.products
            ]
            if adapters.current:
                layer.lora = adapters
                touched.append(layer)
        try:
            with self._experts.over(rows):
                yield
        finally:
            for layer in touched:
                layer.lora = None


def rows_of(spans: Mapping[int, Sequence[tuple[int, int]]], device: torch.device) -> dict[int, Rows]:
    """Return the rows of each adapter's ordered spans (begin, end): one slice if they are consecutive."""
    rows: dict[int, Rows] = {}
    for number, adapter_spans in spans.items():
        begin, end = adapter_spans[0][0], adapter_spans[-1][1]
        if sum(to - since for since, to in adapter_spans) == end - begin:
            rows[number] = slice(begin, end)
        else:
            rows[number] = to_device([row for span in adapter_spans for row in range(*span)], device)
    return rows

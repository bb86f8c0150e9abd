"""Low-rank adapters that may differ from request to request: their rows get (x A^T) (s B)^T in addition to x W^T.

They take the place of an adapter in training, as the layer's Weight (model/layers.py), while a pass has rows of theirs.
Prepared products give x W^T as usual, and adapters are added after that. Rows of one adapter are one product, so a pass
may mix adapters and rows without one. In exact mode a row's bits do not depend on how many rows its adapter has.
Compiled loops sum in one order for any number; otherwise products have TILE rows, which are compared in several orders.

Rows come to experts sorted by expert, from any rank. So a row that leaves for its expert carries the index of its
adapter within the pass, in two extra numbers at its end. They travel with the row (Dispatch in model/seams.py), and are
cut off where the experts begin. Passes without adapters of experts send plain rows.

A rank with a part of a layer has the same part of its adapters (serving_ranks.py). So an addition is part of the same
sum, or of the same outputs, as the layer's own product. Adapters have numbers here, the same on all ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import Structure, addressof
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from meshwright.kernels.c import serving_library
from meshwright.kernels.c.build import structure
from meshwright.kernels.c.serving_library import LANES, Loops, Panels
from meshwright.kernels.experts.experts import Counts
from meshwright.kernels.linear.linear import product_dtype
from meshwright.model.attention import LatentAttention
from meshwright.model.feed_forward import Experts, ExpertStack
from meshwright.model.layers import Linear, Matrix
from meshwright.model.low_rank import LoRA
from meshwright.model.transformer import Transformer
from meshwright.serving.engine.cache.paged_cache import to_device
from meshwright.serving.engine.rows.exact_rows import ORDERS, TILE
from meshwright.spec.errors import ArgumentError, argument
from meshwright.spec.model.shape import LoRAShape, ModelShape
from meshwright.spec.weights.inventory import Parameter, parameters

Rows = slice | Tensor
"""Rows of a pass: a slice, or their numbers."""


@final
class LowRankProduct:
    """rows (R, in) -> (R, out): times A, then times s B."""

    def __init__(self, a: Tensor, b: Tensor, *, exact: bool) -> None:
        """Take `a` (rank, in) and `b` (out, rank) with s. `exact`: a row's bits do not depend on the number of rows."""
        self._dtype, inner = a.dtype, product_dtype(a)
        a, b = a.to(inner), b.to(inner)
        self._a, self._b = a.t().contiguous(), b.t().contiguous()
        self._panels = _panels(a, b) if serving_library.takes(a, b) else None
        self._addresses = None if self._panels is None else [addressof(panels.fields) for panels in self._panels]
        self._tile = self._find_exact_tile() if exact else 0

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply by A, then by s B."""
        return self._multiply(rows.to(self._a.dtype)).to(rows.dtype)

    def _multiply(self, rows: Tensor) -> Tensor:
        loops = serving_library.loops()
        if loops is not None and self._panels is not None and loops.few(len(rows)) and serving_library.takes(rows):
            # Compiled loops sum in one order for any number of rows, so exact mode needs no tiles.
            return loops.multiply(loops.multiply(rows, self._panels[0]), self._panels[1])
        if not self._tile:
            return self._plain(rows)
        room = -(-len(rows) // self._tile) * self._tile
        padded = rows.new_zeros(room, rows.shape[1])
        padded[: len(rows)] = rows
        tiles = (tile.clone() for tile in padded.split(self._tile))  # equal alignment: each starts an allocation
        return torch.cat([self._plain(tile) for tile in tiles])[: len(rows)]

    def fields(self, rows: Rows, column: int, loops: Loops) -> Structure | None:
        """Return the struct LowRank with which a fused block adds this product for rows of a step, from a `column` on.

        None = loops cannot compute it.
        """
        if self._addresses is None:
            return None
        a, b = self._addresses
        if isinstance(rows, slice):
            begin, count, numbers = rows.start, rows.stop - rows.start, None
        else:
            begin, count, numbers = 0, len(rows), rows.data_ptr()
        if not loops.few(count):
            return None
        return structure("LowRank")(a=a, b=b, rows=numbers, begin=begin, count=count, column=column)

    @property
    def bytes(self) -> int:
        """Memory of its matrices, in every stored order."""
        return self._a.nbytes + self._b.nbytes + sum(panels.bytes for panels in self._panels or ())

    @property
    def a(self) -> Tensor:
        """(rank, in)."""
        return self._a.t().to(self._dtype)

    def widen(self, narrow: Tensor) -> Tensor:
        """Return rows times A (R, rank) -> (R, out)."""
        return torch.mm(narrow.to(self._b.dtype), self._b).to(narrow.dtype)

    def _plain(self, rows: Tensor) -> Tensor:
        return torch.mm(torch.mm(rows, self._a), self._b)

    def _find_exact_tile(self) -> int:
        """Return TILE if the order of that many rows does not matter, else 1."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(TILE, len(self._a), generator=generator).to(self._a)
        right = self._plain(rows)
        orders = (torch.randint(TILE, (TILE,), generator=generator) for _ in range(ORDERS))
        return TILE if all(torch.equal(self._plain(rows[order]), right[order]) for order in orders) else 1


def _panels(a: Tensor, b: Tensor) -> tuple[Panels, Panels] | None:
    """Return both matrices for compiled loops, with the rank padded by zeros. None = loops do not take them."""
    # Zeros change no sum, and loops then need no case for a rank between multiples.
    missing = -len(a) % LANES
    wide = torch.cat((a, a.new_zeros(missing, a.shape[1])))
    narrow = torch.cat((b, b.new_zeros(len(b), missing)), dim=1)
    panels = Panels.of_numbers(wide), Panels.of_numbers(narrow)
    return None if panels[0] is None or panels[1] is None else (panels[0], panels[1])


STACK = "_lora."
"""Marker in names of an adapter's tensors on a stack of experts."""
DIGIT = 256
"""Integers below it are exact in any dtype."""


@final
class StackProducts:
    """One adapter of one stack of experts: rows of each expert times its A, then times its s B."""

    def __init__(self, a: Tensor, b: Tensor, *, exact: bool, apart: bool) -> None:
        """Take `a` (X, rank, in) and `b` (X, out, rank) with s.

        `exact`: see LowRankProduct. `apart` multiplies experts one by one, if the host knows counts; else all in one
        call.
        """
        pairs = zip(a, b, strict=True) if apart else ()
        self._products = [LowRankProduct(*pair, exact=exact) for pair in pairs]
        self.a, self.b = (a.new_empty(0), b.new_empty(0)) if apart else (a, b)

    def __getitem__(self, expert: int) -> LowRankProduct:
        return self._products[expert]

    @property
    def bytes(self) -> int:
        """Memory of the products."""
        return self.a.nbytes + self.b.nbytes + sum(product.bytes for product in self._products)


@dataclass(frozen=True, slots=True)
class TaggedRows:
    """Rows at their experts, with their adapters."""

    adapters: Sequence[Mapping[str, StackProducts]]
    """Stacks by name, for each adapter of the pass."""
    tags: Tensor
    """(R,) int64: 1 + the index of each row's adapter, 0 = none."""
    counts: Counts
    linear: Callable[..., Tensor]
    """Product of rows at their experts, as kernels.expert_linear."""
    runs: Sequence[Sequence[tuple[int, Tensor]]] = ()
    """(expert, row numbers) of the rows of each adapter. Empty = the host does not know counts."""

    def add(self, stack: ExpertStack, rows: Tensor, out: Tensor) -> Tensor:
        """Add the adapters' products of rows (R, in) to the experts' own (R, out), in place."""
        for index, adapter in enumerate(self.adapters):
            products = adapter.get(stack.name)
            if products is not None and self.runs:
                for expert, row_numbers in self.runs[index]:
                    out.index_add_(0, row_numbers, products[stack.first + expert](rows[row_numbers]))
            elif products is not None:
                self._add_masked(products, stack, index, rows, out)
        return out

    def _add_masked(self, products: StackProducts, stack: ExpertStack, index: int, rows: Tensor, out: Tensor) -> None:
        """Multiply all rows by A and B, and add only those of the adapter, without a wait for the device.

        Other rows are masked and not multiplied by zero: an adapter that overflows must not harm other requests.
        """
        local_experts = slice(stack.first, stack.first + len(self.counts))
        narrow = self.linear(rows, products.a[local_experts], self.counts)
        others = (self.tags != 1 + index).unsqueeze(1)
        out.add_(self.linear(narrow, products.b[local_experts], self.counts).masked_fill_(others, 0.0))


def find_tagged_runs(tags: Tensor, counts: Sequence[int], tag: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each expert that has rows with a tag, and their numbers."""
    begin = 0
    for expert, expert_tags in enumerate(tags.split(list(counts))):
        row_numbers = (expert_tags == tag).nonzero().flatten()
        if len(row_numbers):
            yield expert, row_numbers + begin
        begin += len(expert_tags)


@final
class LayerStacks:
    """Adapters on the stacks of one layer's experts."""

    def __init__(self) -> None:
        self.adapters: dict[int, dict[str, StackProducts]] = {}
        """Stacks by adapter number, then by name."""
        self.current: list[Mapping[str, StackProducts]] = []
        """Stacks of each adapter of the pass."""

    def __call__(self, experts: Experts, rows: Tensor, counts: Counts) -> tuple[Tensor, TaggedRows]:
        """Split arriving rows (R, D + 2) into (R, D) and what is added to their products."""
        # Rows may be of any dtype, in which only integers below DIGIT are sure to be exact: two digits.
        rows, digits = rows[:, :-2].contiguous(), rows[:, -2:].float()
        tags = (digits[:, 0] * DIGIT + digits[:, 1]).long()
        runs = list[list[tuple[int, Tensor]]]()
        if isinstance(counts, list) and rows.is_cpu:
            runs = [list(find_tagged_runs(tags, counts, 1 + index)) for index in range(len(self.current))]
        return rows, TaggedRows(self.current, tags, counts, experts.kernels.expert_linear, runs)


@final
class ExpertAdapters:
    """Adapters of all experts on this rank."""

    def __init__(self, model: Transformer, *, exact: bool, multiple: int) -> None:
        """Take the number of ranks (`multiple`) that split the rows of a pass."""
        self._model, self._exact, self._multiple = model, exact, multiple
        self._layers: dict[Experts, LayerStacks] = {}

    def put(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Add the stacks of an adapter under its number."""
        like = self._model.embed.weight
        for name, a in tensors.items():
            stack_name, is_stack, part = name.partition(STACK)
            if is_stack and part == "a":
                path, _, stack = stack_name.rpartition(".")
                experts = self._model.get_submodule(path)
                assert isinstance(experts, Experts)
                pair = a.to(like), tensors[f"{stack_name}{STACK}b"].to(like)
                products = StackProducts(*pair, exact=self._exact, apart=like.is_cpu)
                self._layers.setdefault(experts, LayerStacks()).adapters.setdefault(number, {})[stack] = products

    def drop(self, number: int) -> None:
        """Remove the stacks of an adapter."""
        for stacks in self._layers.values():
            stacks.adapters.pop(number, None)
        # Replaced, not changed in place: another thread may be counting bytes.
        self._layers = {experts: stacks for experts, stacks in self._layers.items() if stacks.adapters}

    @property
    def bytes(self) -> int:
        """Memory of all adapters on this rank. Another thread may read it."""
        stacks = (stacks for layer in list(self._layers.values()) for stacks in list(layer.adapters.values()))
        return sum(product.bytes for products in stacks for product in list(products.values()))

    @contextmanager
    def apply_to(self, rows: Mapping[int, Rows]) -> Iterator[None]:
        """Give these rows of a pass these adapters within the context."""
        touched = [
            (experts, stacks) for experts, stacks in self._layers.items() if not rows.keys().isdisjoint(stacks.adapters)
        ]  # fmt: skip
        # No row is tagged then, and rows keep their width: the usual pass costs nothing.
        if not touched:
            yield
            return
        for experts, stacks in touched:
            stacks.current = [stacks.adapters.get(number, {}) for number in rows]
            experts.adapters = stacks
        seams = self._model.seams
        dispatch, tagging = seams.dispatch, _Tagging(self._model, list(rows.values()), self._multiple)
        seams.dispatch = replace(dispatch, ordered=tagging.ordered, send=tagging.send)
        try:
            yield
        finally:
            seams.dispatch = dispatch
            for experts, _ in touched:
                experts.adapters = None


@final
class _Tagging:
    """Appends adapter indices to rows that leave for experts, in one pass."""

    def __init__(self, model: Transformer, rows: list[Rows], multiple: int) -> None:
        """Take the rows of each adapter in the whole pass."""
        self._seams, self._inner, self._rows, self._multiple = model.seams, model.seams.dispatch, rows, multiple
        assert model.shape.moe is not None
        self._choices = model.shape.moe.top_k
        self._order = torch.empty(0)
        self._tag_digits: Tensor | None = None

    def ordered(self, choices: Tensor) -> Tensor:
        """Order rows by expert, and remember where each row goes."""
        order = self._inner.ordered(choices)
        # Rows leave in this order, so a row's tag is found by where it goes.
        self._order = order.argsort(stable=True)
        return order

    def send(self, experts: Experts, rows: Tensor, counts: Tensor) -> Any:
        """Send rows to the ranks of their experts, with the tags of their adapters."""
        if experts.adapters is None:
            return self._inner.send(experts, rows, counts)
        # Tags of a pass are the same in all layers: only the order of rows differs.
        if self._tag_digits is None:
            self._tag_digits = self._digits(len(rows) // self._choices, rows)
        digits = self._tag_digits[self._order // self._choices]
        return self._inner.send(experts, torch.cat((rows, digits), dim=1), counts)

    def _digits(self, tokens: int, like: Tensor) -> Tensor:
        """Return (N, 2) for the tokens of this rank."""
        tags = torch.zeros(tokens * self._multiple, dtype=torch.int64, device=like.device)
        for index, row_numbers in enumerate(self._rows, 1):
            tags[row_numbers] = index
        local_tags = self._seams.in_routed(tags.unsqueeze(0)).flatten()
        return torch.stack((local_tags // DIGIT, local_tags % DIGIT), dim=1).to(like.dtype)


LORA = ".lora."
"""Marker in names of an adapter's tensors on a layer."""
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
        """Raise ArgumentError, under the adapter's name, if requests cannot use it together with others."""
        refused = f"{argument('adapter', name)} cannot be served by request"
        # Each of these is refused before the engine changes: a damaged adapter must not stop it.
        if self.lora.dora:
            raise ArgumentError(
                "adapter", name, sentence=f"{refused}: DoRA changes the lengths of the model's own rows; {MERGED}"
            )
        sizes = {part.name: part.shape for part in possible_parts(model.shape, self.lora.rank)}
        for part, tensor in self.tensors.items():
            if sizes.get(part) != tensor.shape:  # other ranks make room for the sizes of the model
                raise ArgumentError(
                    "adapter", name, sentence=f"{refused}: {part} {list(tensor.shape)} is no part of {model.shape.name}"
                )
            if not tensor.isfinite().all():  # keys and values of its requests would spoil blocks for others
                raise ArgumentError(
                    "adapter", name, sentence=f"{refused}: {part} has numbers that are not finite; it is damaged"
                )
        for layer in self.layers:
            module = model.get_submodule(layer)
            parent = model.get_submodule(layer.rpartition(".")[0])
            if isinstance(parent, LatentAttention) and module is parent.kv_up:
                raise ArgumentError(
                    "adapter", name, sentence=f"{refused}: {layer} is multiplied into queries, not rows; {MERGED}"
                )
            if not isinstance(module, Linear) or isinstance(module.lora, LoRA):
                raise ArgumentError("adapter", name, sentence=f"{refused}: {layer} has an adapter of its own; {MERGED}")

    def scale_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors in a dtype, B multiplied by s."""
        scale = self.lora.scale
        return {
            # s is multiplied once here, in the adapter's own dtype, and not in every pass.
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

    def combine(self, layer: Linear, x: Tensor, products: Sequence[Tensor], keys: Tensor | None = None) -> Tensor:
        """Add the rows' adapters to the layer's product."""
        if not self._gathers:
            return self.add(x, products[0])
        out = products[0].view(-1, products[0].shape[-1])
        # Rows are gathered over the ranks here, so A was multiplied before the gathering.
        for (product, where), narrow in zip(self.current, products[1:], strict=True):
            _add(out, where, product.widen(narrow.view(-1, narrow.shape[-1])[where]))
        return products[0]

    def add(self, x: Tensor, product_out: Tensor) -> Tensor:
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
    """All adapters on a model, or on this rank's part of one. Use under `torch.no_grad`."""

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
    def apply_to(self, rows: Mapping[int, Rows]) -> Iterator[None]:
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
            with self._experts.apply_to(rows):
                yield
        finally:
            for layer in touched:
                layer.lora = None


def rows_of(spans: Mapping[int, Sequence[tuple[int, int]]], device: torch.device) -> dict[int, Rows]:
    """Return the rows of each adapter's ordered spans (begin, end): one slice if they are consecutive."""
    rows: dict[int, Rows] = {}
    for number, adapter_spans in spans.items():
        begin, end = adapter_spans[0][0], adapter_spans[-1][1]
        # A slice needs no index on the device, and its rows are read in place.
        if sum(to - since for since, to in adapter_spans) == end - begin:
            rows[number] = slice(begin, end)
        else:
            rows[number] = to_device([row for span in adapter_spans for row in range(*span)], device)
    return rows


def possible_parts(shape: ModelShape, width: int) -> list[Parameter]:
    """List all parts that an adapter of this rank (`width`) may have, in order."""
    return [part for part in parameters(replace(shape.base, lora=LoRAShape(rank=width))) if part.adapts]

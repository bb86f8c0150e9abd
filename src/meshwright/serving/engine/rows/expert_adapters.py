"""Low-rank adapters of experts, which may differ from request to request.

Rows come to experts sorted by expert, from any rank. So a row that leaves for its expert carries the index of its
adapter within the pass, in two extra numbers at its end. They travel with the row (Dispatch in model/seams.py), and are
cut off where the experts begin. Passes without adapters of experts send plain rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from meshwright.kernels.experts.experts import Counts
from meshwright.model.moe import Experts, ExpertStack
from meshwright.model.transformer import Transformer
from meshwright.serving.engine.rows.low_rank_product import LowRankProduct, Rows

STACK = "_lora."
"""Marker in names of tensors beside a stack of experts."""
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

    def added(self, stack: ExpertStack, rows: Tensor, out: Tensor) -> Tensor:
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


def tagged_runs(tags: Tensor, counts: Sequence[int], tag: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each expert that has rows with a tag, and their numbers."""
    begin = 0
    for expert, expert_tags in enumerate(tags.split(list(counts))):
        row_numbers = (expert_tags == tag).nonzero().flatten()
        if len(row_numbers):
            yield expert, row_numbers + begin
        begin += len(expert_tags)


@final
class LayerStacks:
    """Adapters beside the stacks of one layer's experts."""

    def __init__(self) -> None:
        self.adapters: dict[int, dict[str, StackProducts]] = {}
        """Stacks by adapter number, then by name."""
        self.current: list[Mapping[str, StackProducts]] = []
        """Stacks of each adapter of the pass."""

    def __call__(self, experts: Experts, rows: Tensor, counts: Counts) -> tuple[Tensor, TaggedRows]:
        """Split arriving rows (R, D + 2) into (R, D) and what is added to their products."""
        rows, digits = rows[:, :-2].contiguous(), rows[:, -2:].float()
        tags = (digits[:, 0] * DIGIT + digits[:, 1]).long()
        runs = list[list[tuple[int, Tensor]]]()
        if isinstance(counts, list) and rows.is_cpu:
            runs = [list(tagged_runs(tags, counts, 1 + index)) for index in range(len(self.current))]
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
        self._layers = {experts: stacks for experts, stacks in self._layers.items() if stacks.adapters}

    @property
    def bytes(self) -> int:
        """Memory of all adapters on this rank. Another thread may read it."""
        stacks = (stacks for layer in list(self._layers.values()) for stacks in list(layer.adapters.values()))
        return sum(product.bytes for products in stacks for product in list(products.values()))

    @contextmanager
    def over(self, rows: Mapping[int, Rows]) -> Iterator[None]:
        """Give these rows of a pass these adapters within the context."""
        touched = [
            (experts, stacks) for experts, stacks in self._layers.items() if not rows.keys().isdisjoint(stacks.adapters)
        ]  # fmt: skip
        if not touched:
            yield
            return
        for experts, stacks in touched:
            stacks.current = [stacks.adapters.get(number, {}) for number in rows]
            experts.beside = stacks
        seams = self._model.seams
        dispatch, tagging = seams.dispatch, _Tagging(self._model, list(rows.values()), self._multiple)
        seams.dispatch = replace(dispatch, ordered=tagging.ordered, send=tagging.send)
        try:
            yield
        finally:
            seams.dispatch = dispatch
            for experts, _ in touched:
                experts.beside = None


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
        self._order = order.argsort(stable=True)
        return order

    def send(self, experts: Experts, rows: Tensor, counts: Tensor) -> Any:
        """Send rows to the ranks of their experts, with the tags of their adapters."""
        if experts.beside is None:
            return self._inner.send(experts, rows, counts)
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

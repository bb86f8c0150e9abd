"""Low-rank adapters of experts, of which each request may have another.

Rows come to experts sorted by expert, from whichever rank. So while a pass has rows with adapters of experts, each
row that leaves for its expert has the place of its adapter in the pass at its end, as two more numbers: they go where
the row goes (Dispatch in model/seams.py), and are cut off where the experts begin.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from meshwright.kernels.experts import Counts
from meshwright.model.moe import Experts, ExpertStack
from meshwright.model.transformer import Transformer
from meshwright.serve.low_rank_product import LowRankProduct, Rows

STACK = "_lora."
"""In names of tensors beside a stack of experts."""
DIGIT = 256
"""Whole numbers below it are exact in any dtype."""


@final
class StackProducts:
    """One adapter of one stack of experts: rows of each expert times its A, then times its s B."""

    def __init__(self, a: Tensor, b: Tensor, *, exact: bool, apart: bool) -> None:
        """`a` (X, rank, in), `b` (X, out, rank) with s. `exact`: as LowRankProduct. `apart`: experts are multiplied one
        by one, where the host knows counts; else all in one call."""
        pairs = zip(a, b, strict=True) if apart else ()
        self._of = [LowRankProduct(*pair, exact=exact) for pair in pairs]
        self.a, self.b = (a.new_empty(0), b.new_empty(0)) if apart else (a, b)

    def __getitem__(self, expert: int) -> LowRankProduct:
        return self._of[expert]

    @property
    def bytes(self) -> int:
        """As LowRankProduct."""
        return self.a.nbytes + self.b.nbytes + sum(one.bytes for one in self._of)


@dataclass(frozen=True, slots=True)
class TaggedRows:
    """Rows at their experts, which know their adapters."""

    adapters: Sequence[Mapping[str, StackProducts]]
    """Of the pass, by place: stacks by name."""
    tags: Tensor
    """(R,) int64: 1 + the place of each row's adapter, 0 = none."""
    counts: Counts
    linear: Callable[..., Tensor]
    """As kernels.expert_linear."""
    runs: Sequence[Sequence[tuple[int, Tensor]]] = ()
    """By place: each expert that has rows of the adapter, and their numbers; where the host knows counts."""

    def added(self, stack: ExpertStack, rows: Tensor, found: Tensor) -> Tensor:
        """rows (R, in) and their experts' own products (R, out), to which those of adapters are added in place."""
        for place, adapter in enumerate(self.adapters):
            products = adapter.get(stack.name)
            if products is not None and self.runs:
                for expert, some in self.runs[place]:
                    found.index_add_(0, some, products[stack.first + expert](rows[some]))
            elif products is not None:
                self._add_masked(products, stack, place, rows, found)
        return found

    def _add_masked(self, products: StackProducts, stack: ExpertStack, place: int, rows: Tensor, found: Tensor) -> None:
        """All rows times A and B, of which only the adapter's own are added: the host waits for no device. The rest is
        left out and not made zero, since an adapter that is no number, or too large for one, must harm nobody else."""
        here = slice(stack.first, stack.first + len(self.counts))
        narrow = self.linear(rows, products.a[here], self.counts)
        others = (self.tags != 1 + place).unsqueeze(1)
        found.add_(self.linear(narrow, products.b[here], self.counts).masked_fill_(others, 0.0))


def tagged_runs(tags: Tensor, counts: Sequence[int], tag: int) -> Iterator[tuple[int, Tensor]]:
    """Each expert that has rows with a tag, and their numbers."""
    begin = 0
    for expert, some in enumerate(tags.split(list(counts))):
        mine = (some == tag).nonzero().flatten()
        if len(mine):
            yield expert, mine + begin
        begin += len(some)


@final
class BesideExperts:
    """What stands beside the stacks of one layer's experts."""

    def __init__(self) -> None:
        self.adapters: dict[int, dict[str, StackProducts]] = {}
        """By number, then by the name of the stack."""
        self.now: list[Mapping[str, StackProducts]] = []
        """Of the pass, by place."""

    def __call__(self, experts: Experts, rows: Tensor, counts: Counts) -> tuple[Tensor, TaggedRows]:
        """Rows (R, D + 2) as they arrive -> (R, D), and what is added to their products."""
        rows, digits = rows[:, :-2].contiguous(), rows[:, -2:].float()
        tags = (digits[:, 0] * DIGIT + digits[:, 1]).long()
        runs = list[list[tuple[int, Tensor]]]()
        if isinstance(counts, list) and rows.is_cpu:
            runs = [list(tagged_runs(tags, counts, 1 + place)) for place in range(len(self.now))]
        return rows, TaggedRows(self.now, tags, counts, experts.kernels.expert_linear, runs)


@final
class ExpertAdapters:
    """Adapters of all experts that are here."""

    def __init__(self, model: Transformer, *, exact: bool, multiple: int) -> None:
        """`multiple`: among how many ranks the rows of a pass are cut, where they are."""
        self._model, self._exact, self._multiple = model, exact, multiple
        self._beside: dict[Experts, BesideExperts] = {}

    def put(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """As RequestAdapters."""
        like = self._model.embed.weight
        for name, a in tensors.items():
            where, is_stack, part = name.partition(STACK)
            if is_stack and part == "a":
                path, _, stack = where.rpartition(".")
                experts = self._model.get_submodule(path)
                assert isinstance(experts, Experts)
                pair = a.to(like), tensors[f"{where}{STACK}b"].to(like)
                products = StackProducts(*pair, exact=self._exact, apart=like.is_cpu)
                self._beside.setdefault(experts, BesideExperts()).adapters.setdefault(number, {})[stack] = products

    def drop(self, number: int) -> None:
        """As RequestAdapters."""
        for beside in self._beside.values():
            beside.adapters.pop(number, None)
        self._beside = {experts: beside for experts, beside in self._beside.items() if beside.adapters}

    @property
    def bytes(self) -> int:
        """Of all of them, on this rank. Another thread may ask."""
        stacks = (stacks for beside in list(self._beside.values()) for stacks in list(beside.adapters.values()))
        return sum(one.bytes for some in stacks for one in list(some.values()))

    @contextmanager
    def over(self, rows: Mapping[int, Rows]) -> Iterator[None]:
        """While it lasts, these rows of a pass have these adapters."""
        touched = [
            (experts, beside) for experts, beside in self._beside.items() if not rows.keys().isdisjoint(beside.adapters)
        ]  # fmt: skip
        if not touched:
            yield
            return
        for experts, beside in touched:
            beside.now = [beside.adapters.get(number, {}) for number in rows]
            experts.beside = beside
        seams = self._model.seams
        kept, tagging = seams.dispatch, _Tagging(self._model, list(rows.values()), self._multiple)
        seams.dispatch = replace(kept, ordered=tagging.ordered, send=tagging.send)
        try:
            yield
        finally:
            seams.dispatch = kept
            for experts, _ in touched:
                experts.beside = None


@final
class _Tagging:
    """Puts places of adapters at the ends of rows that leave for experts, in one pass."""

    def __init__(self, model: Transformer, rows: list[Rows], multiple: int) -> None:
        """`rows`: of the whole pass, of each of its adapters."""
        self._seams, self._inner, self._rows, self._multiple = model.seams, model.seams.dispatch, rows, multiple
        assert model.shape.moe is not None
        self._choices = model.shape.moe.top_k
        self._order = torch.empty(0)
        self._known: Tensor | None = None

    def ordered(self, choices: Tensor) -> Tensor:
        """As Dispatch."""
        found = self._inner.ordered(choices)
        self._order = found.argsort(stable=True)
        return found

    def send(self, experts: Experts, rows: Tensor, counts: Tensor) -> Any:
        """As Dispatch."""
        if experts.beside is None:
            return self._inner.send(experts, rows, counts)
        if self._known is None:
            self._known = self._digits(len(rows) // self._choices, rows)
        digits = self._known[self._order // self._choices]
        return self._inner.send(experts, torch.cat((rows, digits), dim=1), counts)

    def _digits(self, tokens: int, like: Tensor) -> Tensor:
        """(N, 2) of the tokens that are here."""
        tags = torch.zeros(tokens * self._multiple, dtype=torch.int64, device=like.device)
        for place, some in enumerate(self._rows, 1):
            tags[some] = place
        mine = self._seams.in_routed(tags.unsqueeze(0)).flatten()
        return torch.stack((mine // DIGIT, mine % DIGIT), dim=1).to(like.dtype)

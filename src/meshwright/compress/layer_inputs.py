"""Inputs of matrices while a model runs on text: observed, gathered as statistics, and searched for outlier columns."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.kernels import Kernels
from meshwright.kernels.experts.experts import Counts
from meshwright.model import Transformer
from meshwright.model.feed_forward import Experts
from meshwright.model.layers import Linear
from meshwright.spec.errors import PlanError
from meshwright.training.step.batches import Batch

InputCallback = Callable[[str, Tensor, Counts | None], None]
"""(name of a matrix, its inputs (..., in), rows per expert of a stack) -> None."""
MOST = 1 / 8
"""Largest share of outlier columns. Beyond it, those with the largest activations are taken."""


@contextmanager
def observe_inputs(model: Transformer, names: Iterable[str], seen: InputCallback) -> Iterator[None]:
    """Call `seen` with the inputs of the named matrices, including experts, inside `with`."""
    wanted = set(names)
    hooks: list[Any] = []
    kernels: dict[str, Kernels] = {}
    try:
        for name in wanted:
            where = name.rpartition(".")[0]
            module = model.get_submodule(where)
            if isinstance(module, Linear):
                hooks.append(module.register_forward_pre_hook(_hook(name, seen)))
            # Experts have no module of their own each: their products pass through one kernel.
            elif isinstance(module, Experts):
                kernels.setdefault(where, module.kernels)
                watched = partial(_expert_linear, module, where, wanted, seen, kernels[where].expert_linear)
                module.kernels = replace(kernels[where], expert_linear=watched)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for where, before in kernels.items():
            setattr(model.get_submodule(where), "kernels", before)  # noqa: B010  (a module's attributes have no types)


def _hook(name: str, seen: InputCallback) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen(name, arguments[0], None)

    return hook


def _expert_linear(
    experts: Experts, where: str, wanted: Container[str], seen: InputCallback, product: Any, rows: Tensor,
    weights: Tensor, counts: Any,
) -> Tensor:  # fmt: skip
    """Compute kernels.expert_linear of one stack and report its inputs."""
    leaf = next(leaf for leaf in ("gate", "up", "down") if getattr(experts, leaf, None) is weights)
    if f"{where}.{leaf}" in wanted:
        seen(f"{where}.{leaf}", rows, counts)
    outputs: Tensor = product(rows, weights, counts)
    return outputs


@torch.no_grad()
def column_peaks(model: Transformer, batches: Iterable[Batch], names: Iterable[str]) -> dict[str, Tensor]:
    """Return the largest magnitude (in,) fp32 of each input column, by matrix."""
    peaks: dict[str, Tensor] = {}

    def seen(name: str, x: Tensor, _: Counts | None) -> None:
        if x.numel():
            peak = x.detach().flatten(0, -2).abs().amax(0).float()
            peaks[name] = torch.maximum(peaks[name], peak) if name in peaks else peak

    with observe_inputs(model, names, seen):
        for batch in batches:
            run(model, batch)
    return peaks


def run(model: Transformer, batch: Batch) -> Tensor:
    """Return the last hidden states (B, S, D) of a batch."""
    hidden, _ = model.hidden(batch.tokens, positions=batch.positions, documents=batch.documents)
    return hidden


def outlier_columns(peaks: Mapping[str, Tensor], threshold: float) -> dict[str, Tensor]:
    """Return the input columns (O,) int32 whose peak exceeds `threshold` times the median peak, by matrix.

    Matrices without outliers are left out. The measure is relative, so the scale of the model does not matter.
    """
    outliers = {}
    for name, peak in peaks.items():
        usual = peak.median()
        # More than half of the columns may be dead.
        usual = peak.mean() if usual == 0 else usual
        columns = (peak > threshold * usual).nonzero().squeeze(1)
        most = int(len(peak) * MOST)
        if len(columns) > most:
            columns = peak.topk(most).indices.sort().values
        if len(columns):
            outliers[name] = columns.to(torch.int32)
    return outliers


Wanted = Literal["products", "sample"]
"""Statistics gathered in addition to magnitudes and peaks."""
SAMPLE, BATCH_SAMPLE = 256, 32
"""Most sampled rows in total, and approximate number per batch."""
PRODUCTS_BYTES = 2 * 2**30
"""Most bytes of products of a stack of experts in memory at once, unless one expert needs more."""


@dataclass(slots=True)
class InputStatistics:
    """Statistics of the inputs (K) of one matrix, in fp32."""

    name: str
    wanted: Wanted
    rows: int = 0
    """Rows seen."""
    products: Tensor = field(default_factory=lambda: torch.empty(0))
    """Sum of x x^T (K, K)."""
    magnitudes: Tensor = field(default_factory=lambda: torch.empty(0))
    """Sum of |x| (K,)."""
    peaks: Tensor = field(default_factory=lambda: torch.empty(0))
    """Largest |x| (K,)."""
    sample: list[Tensor] = field(default_factory=list)
    """Sampled rows (R, K) of each batch."""

    def add(self, x: Tensor) -> None:
        """Add rows x (R, K), R at least 1. Raises PlanError for infinities and NaN."""
        rows, size = x.float(), x.shape[1]
        if not self.rows:
            self.magnitudes, self.peaks = rows.new_zeros(size), rows.new_zeros(size)
            self.products = rows.new_zeros(size, size) if self.wanted == "products" else self.products
        self.rows += len(rows)
        self.magnitudes += rows.abs().sum(0)
        self.peaks = torch.maximum(self.peaks, rows.abs().amax(0))
        if self.wanted == "products":
            self.products.addmm_(rows.t(), rows)
        else:
            self.sample.append(rows[:: max(1, len(rows) // BATCH_SAMPLE)].clone())
        if not bool(self.magnitudes.isfinite().all() & self.products.isfinite().all()):
            raise PlanError(
                f"{self.name} reads activations that are infinite or NaN, so it cannot be calibrated: take a "
                "scheme without text, as int4-hqq"
            )

    @property
    def sampled_rows(self) -> Tensor:
        """At most SAMPLE rows (R, K), spread over the batches."""
        all_rows = torch.cat(self.sample)
        return all_rows[:: -(-len(all_rows) // SAMPLE)]

    @property
    def gram(self) -> Tensor:
        """Mean of x x^T (K, K)."""
        return self.products / self.rows

    @property
    def mean(self) -> Tensor:
        """Mean of |x| (K,)."""
        return self.magnitudes / self.rows


Gather = Callable[[str, Callable[[Tensor, Counts | None], None]], None]
"""(name of a matrix, callback for its inputs of every batch) -> None."""


class Inputs:
    """Input statistics of a matrix, or of each matrix of a stack, gathered on demand.

    A pass over the text gathers as many matrices of a stack as PRODUCTS_BYTES hold.
    """

    def __init__(self, name: str, wanted: Wanted, number: int, columns: int, gather: Gather) -> None:
        self.name, self.wanted, self.number, self.gather = name, wanted, number, gather
        self.at_once = max(1, PRODUCTS_BYTES // (4 * columns**2)) if wanted == "products" else number
        self._gathered: dict[int, InputStatistics] = {}

    def statistics(self, number: int = 0) -> InputStatistics:
        """Return the statistics of one matrix. `rows` is 0 for an expert that received no tokens."""
        if number not in self._gathered:
            window = range(number, min(number + self.at_once, self.number))
            self._gathered = {index: InputStatistics(self.name, self.wanted) for index in window}
            self.gather(self.name, self._add)
        return self._gathered[number]

    def _add(self, x: Tensor, counts: Counts | None) -> None:
        flat = x.detach().reshape(-1, x.shape[-1])
        sizes = [len(flat)] if counts is None else counts if isinstance(counts, list) else counts.tolist()
        for number, rows in enumerate(flat.split(sizes)):
            if number in self._gathered and len(rows):
                self._gathered[number].add(rows)

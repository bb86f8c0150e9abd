"""Statistics of a matrix's inputs on calibration text: mean products, magnitudes, peaks, and sampled rows."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from meshwright.kernels.experts.experts import Counts
from meshwright.spec.errors import PlanError

Wanted = Literal["products", "sample"]
"""Statistics gathered beside magnitudes and peaks."""
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
        every = torch.cat(self.sample)
        return every[:: -(-len(every) // SAMPLE)]

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

"""What a matrix reads on text, summed up: mean products of its inputs, their magnitudes and peaks, and some rows."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from meshwright.kernels.experts import Counts
from meshwright.spec.errors import PlanError

Wanted = Literal["products", "sample"]
"""What is kept beside magnitudes and peaks."""
SAMPLE, OF_BATCH = 256, 32
"""Rows that are kept as they are, at most, and about how many of each batch."""
PRODUCTS_BYTES = 2 * 2**30
"""Of the products of a stack of experts that are in memory at once; one expert's are in any case."""


@dataclass(slots=True)
class InputStatistics:
    """Of the inputs (K) of one matrix, fp32."""

    name: str
    wanted: Wanted
    rows: int = 0
    """That were seen."""
    products: Tensor = field(default_factory=lambda: torch.empty(0))
    """(K, K), the sum of x x^T."""
    magnitudes: Tensor = field(default_factory=lambda: torch.empty(0))
    """(K,), the sum of |x|."""
    peaks: Tensor = field(default_factory=lambda: torch.empty(0))
    """(K,), the largest |x|."""
    sample: list[Tensor] = field(default_factory=list)
    """Some rows of each batch, (R, K) each."""

    def add(self, x: Tensor) -> None:
        """x (R, K), R of at least 1. PlanError for what is not finite."""
        own, size = x.float(), x.shape[1]
        if not self.rows:
            self.magnitudes, self.peaks = own.new_zeros(size), own.new_zeros(size)
            self.products = own.new_zeros(size, size) if self.wanted == "products" else self.products
        self.rows += len(own)
        self.magnitudes += own.abs().sum(0)
        self.peaks = torch.maximum(self.peaks, own.abs().amax(0))
        if self.wanted == "products":
            self.products.addmm_(own.t(), own)
        else:
            self.sample.append(own[:: max(1, len(own) // OF_BATCH)].clone())
        if not bool(self.magnitudes.isfinite().all() & self.products.isfinite().all()):
            raise PlanError(
                f"{self.name} reads activations that are infinite or NaN on the calibration text: such a model cannot "
                "be calibrated; take a scheme without text, as int4-hqq"
            )

    @property
    def some_rows(self) -> Tensor:
        """At most SAMPLE (R, K), spread over the batches."""
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
"""(name of a matrix, what hears its inputs of every batch)."""


class Inputs:
    """Of a matrix, or of each of a stack: gathered when they are asked for, as many of a stack at once as
    PRODUCTS_BYTES hold."""

    def __init__(self, name: str, wanted: Wanted, number: int, columns: int, gather: Gather) -> None:
        self.name, self.wanted, self.number, self.gather = name, wanted, number, gather
        self.at_once = max(1, PRODUCTS_BYTES // (4 * columns**2)) if wanted == "products" else number
        self.found: dict[int, InputStatistics] = {}

    def of(self, number: int = 0) -> InputStatistics:
        """One matrix's. `rows` is 0 where an expert was given none."""
        if number not in self.found:
            some = range(number, min(number + self.at_once, self.number))
            self.found = {one: InputStatistics(self.name, self.wanted) for one in some}
            self.gather(self.name, self._hear)
        return self.found[number]

    def _hear(self, x: Tensor, counts: Counts | None) -> None:
        flat = x.detach().reshape(-1, x.shape[-1])
        sizes = [len(flat)] if counts is None else counts if isinstance(counts, list) else counts.tolist()
        for number, rows in enumerate(flat.split(sizes)):
            if number in self.found and len(rows):
                self.found[number].add(rows)

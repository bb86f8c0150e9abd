"""Which way of multiplying with codes is the fastest here: tried and timed once for each shape, scheme and rows.

Some ways read the codes as they lie. Others have an order of their own, or a copy in 16 bits: a second layout, whose
memory is counted. They take part only where that was asked for. A way that raises, or is wrong beside sums in fp64, is
out. The way that a rule names is taken unless another one is clearly faster, so that noise does not choose.

A contest is held where somebody opened one (device_products.open_contest), before a CUDA graph is captured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.compat.device_time import device_seconds
from meshwright.kernels.quantized_matrix import QuantizedMatrix

CLASSES = (2, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Rows that are timed; a product takes the way of the next larger number, and above the last one the rule's."""
GAIN = 0.95
"""Share of the time of the rule's way that another one may take at most."""
LARGEST_ERROR = 0.02
"""Of the length of the result: some roundings to bf16."""
CHECKED = 64
"""Outputs that are compared."""


@dataclass(frozen=True, slots=True)
class ProductWay:
    """One way of multiplying x (M, K) with a matrix of codes (N, K), transposed."""

    name: str
    missing: Callable[[QuantizedMatrix, torch.dtype], str]
    """Why it cannot here; empty = it can."""
    multiply: Callable[[Tensor, QuantizedMatrix, Tensor | None, Any], Tensor]
    """Rows, matrix, bias and layout -> (M, N)."""
    layout: Callable[[QuantizedMatrix, torch.dtype], tuple[Any, int]] | None = None
    """Makes a second layout of the matrix, and says its bytes. None = it reads the codes as they lie."""


class ClassResult(NamedTuple):
    """Result for up to so many rows."""

    rows: int
    way: ProductWay
    seconds: dict[str, float]
    """Of every way that was right."""
    dropped: dict[str, str]
    """Why others are out."""


Ready = list[tuple[int, ProductWay, Any]]
"""Of a matrix, in order of rows: most rows, way, and its layout."""


@dataclass(slots=True)
class ProductContest:
    """Results, and second layouts, for the rest of an engine's life."""

    ways: Sequence[ProductWay]
    rule: Callable[[int], str]
    """Name of the way that is taken for a number of rows where nothing was timed."""
    copies: bool
    """Whether second layouts take part."""
    seconds: Callable[[Callable[[], object]], float] = device_seconds
    say: Callable[[str], None] = print
    copied_bytes: int = 0
    """Of all second layouts."""
    layouts: dict[tuple[Any, ...], tuple[Tensor, Any]] = field(default_factory=dict)
    """Codes and their second layout, by way, dtype and place in memory: another matrix of the same codes reads it, too.
    The codes stay as long, so that no others can come to lie there."""
    results: dict[tuple[Any, ...], list[ClassResult]] = field(default_factory=dict)
    _name: object = field(default_factory=object)
    """Stands in matrices for this contest, which they must not hold."""
    _filled: list[dict[str, Any]] = field(default_factory=list)
    """Where matrices have their ways."""

    def close(self) -> None:
        """Give all second layouts back, those that matrices have, too."""
        for prepared in self._filled:
            if "ways" in prepared and prepared["ways"][0] is self._name:
                del prepared["ways"]
        self._filled.clear()
        self.layouts.clear()

    def product(self, rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor | None:
        """rows (M, K) -> (M, N); None where no way was tried for so many rows."""
        ready = matrix.prepared.get("ways")
        if ready is None or ready[0] is not self._name or ready[1] != rows.dtype:
            if rows.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            if ready is None or ready[0] is not self._name:
                self._filled.append(matrix.prepared)
            ready = matrix.prepared["ways"] = self._name, rows.dtype, self._ready(matrix, rows.dtype)
        for most, way, layout in ready[2]:
            if len(rows) <= most:
                return way.multiply(rows, matrix, bias, layout)
        return None

    def _ready(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> Ready:
        key = matrix.codes.device, dtype, matrix.scheme, matrix.size_out, matrix.size_in
        if key not in self.results:
            with torch.no_grad():
                self.results[key] = self._held(matrix, dtype)
            self.say(told(matrix, dtype, self.results[key]))
        return [(one.rows, one.way, self._layout(one.way, matrix, dtype)) for one in self.results[key]]

    def _layout(self, way: ProductWay, matrix: QuantizedMatrix, dtype: torch.dtype) -> Any:
        if way.layout is None:
            return None
        key = way.name, dtype, matrix.codes.device, matrix.codes.data_ptr(), matrix.codes.shape
        if key not in self.layouts:
            made, size = way.layout(matrix, dtype)
            self.layouts[key] = matrix.codes, made
            self.copied_bytes += size
        return self.layouts[key][1]

    def _held(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> list[ClassResult]:
        entered, dropped, layouts = list[ProductWay](), dict[str, str](), dict[str, Any]()
        for way in self.ways:
            reason = "" if self.copies or way.layout is None else "it needs a second layout in memory"
            reason = reason or way.missing(matrix, dtype)
            try:
                if not reason and way.layout is not None:
                    layouts[way.name] = way.layout(matrix, dtype)[0]
            except Exception as failure:  # libraries refuse in many ways
                reason = _first_line(failure)
            if reason:
                dropped[way.name] = reason
            else:
                entered.append(way)
        _, weight = next(matrix.restored_rows())
        right_weight = weight[:CHECKED].double()
        results = []
        for rows in CLASSES:
            generator = torch.Generator().manual_seed(rows)
            x = torch.randn(rows, matrix.size_in, generator=generator).to(matrix.codes.device, dtype)
            right = x.double() @ right_weight.t()
            seconds, out = dict[str, float](), dict(dropped)
            for way in entered:
                layout = layouts.get(way.name)
                wrong = _wrong(way, x, matrix, layout, right)
                if wrong:
                    out[way.name] = wrong
                else:
                    seconds[way.name] = self.seconds(partial(way.multiply, x, matrix, None, layout))
            if seconds:
                by_rule, best = self.rule(rows), min(seconds, key=lambda name: seconds[name])
                if by_rule in seconds and seconds[best] > GAIN * seconds[by_rule]:
                    best = by_rule
                results.append(ClassResult(rows, next(way for way in entered if way.name == best), seconds, out))
        return results


def _wrong(way: ProductWay, x: Tensor, matrix: QuantizedMatrix, layout: Any, right: Tensor) -> str:
    try:
        y = way.multiply(x, matrix, None, layout)[:, :CHECKED].double()
    except Exception as failure:  # compilers, drivers and launches fail in many ways
        return _first_line(failure)
    error = ((y - right).norm() / right.norm()).item()
    return "" if error < LARGEST_ERROR else f"off by {error:.2g}"


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__} {(str(failure).splitlines() or [''])[0]}".strip()


def told(matrix: QuantizedMatrix, dtype: torch.dtype, results: Sequence[ClassResult]) -> str:
    """One line: the way of each run of rows, with its time at the last of them, and who was not there."""
    runs: list[str] = []
    for place, one in enumerate(results):
        if place + 1 == len(results) or results[place + 1].way is not one.way:
            runs.append(f"{one.way.name} up to {one.rows:,} rows ({one.seconds[one.way.name] * 1e6:.0f} us)")
    out = {name: reason for one in results for name, reason in one.dropped.items()}
    absent = "".join(f"; not {name}: {reason}" for name, reason in out.items())
    name = str(dtype).removeprefix("torch.")
    return f"products {matrix.size_out:,} x {matrix.size_in:,}, {matrix.scheme.name}, {name}: {', '.join(runs)}{absent}"

"""Contest of the ways to multiply with codes: each is tried and timed once per shape, scheme and number of rows.

Some ways read the codes as stored. Others need their own order, or a copy in 16 bits: a second layout, whose memory is
counted. They take part only where that was asked for.

A way that raises, or is wrong beside sums in fp64, is out. The default way stays unless another one is clearly faster,
so noise does not decide. A contest is held where one is open (device_products.open_contest), before a CUDA graph is
captured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.compat import device_seconds
from meshwright.kernels.quantized.matrix import QuantizedMatrix

CLASSES = (2, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Rows that are timed. A product takes the way of the next larger number, and above the last one the default."""
GAIN = 0.95
"""Largest share of the default way's time at which another way replaces it."""
LARGEST_ERROR = 0.02
"""Largest relative error of the result: some roundings to bf16."""
CHECKED = 64
"""Outputs that are compared."""


@dataclass(frozen=True, slots=True)
class ProductWay:
    """One way to multiply x (M, K) by a matrix of codes (N, K), transposed."""

    name: str
    missing: Callable[[QuantizedMatrix, torch.dtype], str]
    """Returns why the way cannot run here. Empty = it can."""
    multiply: Callable[[Tensor, QuantizedMatrix, Tensor | None, Any], Tensor]
    """Maps rows, matrix, bias and layout to (M, N)."""
    layout: Callable[[QuantizedMatrix, torch.dtype], tuple[Any, int]] | None = None
    """Makes a second layout of the matrix, and returns it with its bytes. None = codes are read as stored."""


class ClassResult(NamedTuple):
    """Result for up to so many rows."""

    rows: int
    way: ProductWay
    seconds: dict[str, float]
    """Time of each way that was right."""
    dropped: dict[str, str]
    """Reason why each other way is out."""


Ready = list[tuple[int, ProductWay, Any]]
"""Ways of a matrix in order of rows: most rows, way, and its layout."""


@dataclass(slots=True)
class ProductContest:
    """Results, and second layouts, for the rest of an engine's life."""

    ways: Sequence[ProductWay]
    rule: Callable[[int], str]
    """Returns the name of the default way for a number of rows."""
    copies: bool
    """Include ways with a second layout."""
    seconds: Callable[[Callable[[], object]], float] = device_seconds
    say: Callable[[str], None] = print
    copied_bytes: int = 0
    """Size of all second layouts."""
    layouts: dict[tuple[Any, ...], tuple[Tensor, Any]] = field(default_factory=dict)
    """Codes and their second layout, by way, dtype and address. Another matrix of the same codes reads it, too.

    The codes are held as long, so no others can get their address.
    """
    results: dict[tuple[Any, ...], list[ClassResult]] = field(default_factory=dict)
    _name: object = field(default_factory=object)
    """Identifies this contest in matrices, which must not hold the contest itself."""
    _filled: list[dict[str, Any]] = field(default_factory=list)
    """`prepared` of the matrices that have ways of this contest."""

    def close(self) -> None:
        """Free all second layouts, including those that matrices hold."""
        for prepared in self._filled:
            if "ways" in prepared and prepared["ways"][0] is self._name:
                del prepared["ways"]
        self._filled.clear()
        self.layouts.clear()

    def product(self, rows: Tensor, matrix: QuantizedMatrix, bias: Tensor | None) -> Tensor | None:
        """Multiply rows (M, K). Returns (M, N), or None where no way was tried for so many rows."""
        ready = matrix.prepared.get("ways")
        if ready is None or ready[0] is not self._name or ready[1] != rows.dtype:
            # Timing waits for the device, which a capture forbids.
            if rows.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            if ready is None or ready[0] is not self._name:
                self._filled.append(matrix.prepared)
            ready = matrix.prepared["ways"] = self._name, rows.dtype, self._best_ways(matrix, rows.dtype)
        for most, way, layout in ready[2]:
            if len(rows) <= most:
                return way.multiply(rows, matrix, bias, layout)
        return None

    def _best_ways(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> Ready:
        key = matrix.codes.device, dtype, matrix.scheme, matrix.size_out, matrix.size_in
        if key not in self.results:
            with torch.no_grad():
                self.results[key] = self._time_ways(matrix, dtype)
            self.say(summary(matrix, dtype, self.results[key]))
        return [(timed.rows, timed.way, self._layout(timed.way, matrix, dtype)) for timed in self.results[key]]

    def _layout(self, way: ProductWay, matrix: QuantizedMatrix, dtype: torch.dtype) -> Any:
        if way.layout is None:
            return None
        key = way.name, dtype, matrix.codes.device, matrix.codes.data_ptr(), matrix.codes.shape
        if key not in self.layouts:
            laid_out, size = way.layout(matrix, dtype)
            self.layouts[key] = matrix.codes, laid_out
            self.copied_bytes += size
        return self.layouts[key][1]

    def _time_ways(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> list[ClassResult]:
        candidates, dropped, layouts = list[ProductWay](), dict[str, str](), dict[str, Any]()
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
                candidates.append(way)
        # The outputs of every way are compared with sums in fp64 before they are timed.
        _, weight = next(matrix.restored_rows())
        exact_weight = weight[:CHECKED].double()
        results = []
        for rows in CLASSES:
            generator = torch.Generator().manual_seed(rows)
            x = torch.randn(rows, matrix.size_in, generator=generator).to(matrix.codes.device, dtype)
            exact = x.double() @ exact_weight.t()
            seconds, out = dict[str, float](), dict(dropped)
            for way in candidates:
                layout = layouts.get(way.name)
                error = _error_of(way, x, matrix, layout, exact)
                if error:
                    out[way.name] = error
                else:
                    seconds[way.name] = self.seconds(partial(way.multiply, x, matrix, None, layout))
            if seconds:
                default, best = self.rule(rows), min(seconds, key=lambda name: seconds[name])
                # Noise must not decide between ways that are about as fast.
                if default in seconds and seconds[best] > GAIN * seconds[default]:
                    best = default
                results.append(ClassResult(rows, next(way for way in candidates if way.name == best), seconds, out))
        return results


def _error_of(way: ProductWay, x: Tensor, matrix: QuantizedMatrix, layout: Any, exact: Tensor) -> str:
    try:
        y = way.multiply(x, matrix, None, layout)[:, :CHECKED].double()
    except Exception as failure:  # compilers, drivers and launches fail in many ways
        return _first_line(failure)
    relative_error = ((y - exact).norm() / exact.norm()).item()
    return "" if relative_error < LARGEST_ERROR else f"off by {relative_error:.2g}"


def _first_line(failure: Exception) -> str:
    return f"{type(failure).__name__} {(str(failure).splitlines() or [''])[0]}".strip()


def summary(matrix: QuantizedMatrix, dtype: torch.dtype, results: Sequence[ClassResult]) -> str:
    """Describe results in one line: the way of each run of rows with its time at the last of them, and who is out."""
    runs: list[str] = []
    for index, timed in enumerate(results):
        if index + 1 == len(results) or results[index + 1].way is not timed.way:
            microseconds = timed.seconds[timed.way.name] * 1e6
            runs.append(f"{timed.way.name} up to {timed.rows:,} rows ({microseconds:.0f} us)")
    dropped = {name: reason for timed in results for name, reason in timed.dropped.items()}
    absent = "".join(f"; not {name}: {reason}" for name, reason in dropped.items())
    name = str(dtype).removeprefix("torch.")
    return f"products {matrix.size_out:,} x {matrix.size_in:,}, {matrix.scheme.name}, {name}: {', '.join(runs)}{absent}"

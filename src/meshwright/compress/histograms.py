"""Histograms of the weights and inputs of matrices, before and after rounding, and the columns with outliers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.compress.layer_inputs import observe_inputs, outlier_columns, run
from meshwright.kernels.experts.experts import Counts
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantized_linear import activation_codes, outliers
from meshwright.model import Transformer
from meshwright.model.layers import Linear
from meshwright.spec.model.quantization_schemes import PUBLISHED_THRESHOLD
from meshwright.training.step.batches import Batch

BINS = 61
"""Bins of a histogram. They are odd in number, so that the middle one holds zero where both ends are equally far."""
STRIPS = 128
"""Most numbers that stand for the columns of a matrix. Of more columns, each is the largest of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Numbers counted in BINS bins of one width."""

    low: float
    high: float
    counts: tuple[int, ...]
    zeros: float
    """Share of numbers that are exactly 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixHistograms:
    """One matrix and what it reads, before and after rounding."""

    name: str
    weights: tuple[Histogram, Histogram]
    inputs: tuple[Histogram, Histogram]
    """The second is of the rounded model, whose inputs may have been scaled."""
    columns: int
    column_peaks: tuple[float, ...]
    """Largest magnitude of the inputs of each column before, or of each run of columns (STRIPS)."""
    outliers: tuple[int, ...]
    """Columns that stay in 16 bits, else those with 6 times the peak of the median column."""
    kept_apart: bool
    """The scheme multiplies outliers in 16 bits."""


@torch.no_grad()
def matrix_histograms(
    before: Transformer, after: Transformer, names: Iterable[str], batch: Batch
) -> Sequence[MatrixHistograms]:
    """Count numbers of each matrix but experts, on the inputs of one batch."""
    layers = [name for name in names if name.endswith(".weight")]
    if not layers:
        return []
    plain: dict[str, tuple[Histogram, Tensor]] = {}
    rounded: dict[str, tuple[Histogram, list[int] | None]] = {}

    def see_plain(name: str, x: Tensor, _: Counts | None) -> None:
        rows = x.detach().flatten(0, -2).float()
        plain[name] = count_numbers(rows), rows.abs().amax(0)

    def see_rounded(name: str, x: Tensor, _: Counts | None) -> None:
        rows, matrix = x.detach().flatten(0, -2), _layer(after, name).quantized
        restored, columns = (rows, None) if matrix is None else rounded_inputs(rows, matrix.matrix)
        rounded[name] = count_numbers(restored), columns

    for model, seen in ((before, see_plain), (after, see_rounded)):
        with observe_inputs(model, layers, seen):
            run(model, batch)
    histograms = []
    for name in layers:
        (inputs, peaks), (inputs_after, exact_columns) = plain[name], rounded[name]
        layer = _layer(after, name)
        weight = layer.weight if layer.quantized is None else layer.quantized.matrix.dequantized()
        usual = outlier_columns({name: peaks}, PUBLISHED_THRESHOLD).get(name)
        marked = exact_columns if exact_columns is not None else [] if usual is None else usual.tolist()
        run_length = -(-len(peaks) // STRIPS)
        histograms.append(MatrixHistograms(
            name=name, weights=(count_numbers(_layer(before, name).weight), count_numbers(weight)),
            inputs=(inputs, inputs_after), columns=len(peaks), outliers=tuple(marked),
            kept_apart=exact_columns is not None,
            column_peaks=tuple(float(part.max()) for part in peaks.split(run_length)),
        ))  # fmt: skip
    return histograms


def _layer(model: Transformer, name: str) -> Linear:
    layer = model.get_submodule(name.removesuffix(".weight"))
    assert isinstance(layer, Linear)
    return layer


def rounded_inputs(rows: Tensor, matrix: QuantizedMatrix) -> tuple[Tensor, list[int] | None]:
    """Return rows (M, K) as a product takes them, fp32, and the columns in 16 bits; None = the scheme has none."""
    scheme = matrix.scheme
    if scheme.activations != "int8":
        return rows, None
    columns, _ = outliers(rows, matrix)
    codes, scales, zeros = activation_codes(rows, scheme, columns)
    restored = (codes if zeros is None else codes - zeros) * scales
    if columns is not None:
        restored[:, columns.long()] = rows[:, columns.long()].float()
    exact_columns = [] if columns is None else columns.tolist()
    return restored, None if scheme.outliers == "none" else exact_columns


def count_numbers(numbers: Tensor) -> Histogram:
    """Count numbers of any size, all finite, between the smallest and the largest."""
    flat = numbers.detach().float().flatten()
    low, high = float(flat.min()), float(flat.max())
    counts = flat.cpu().histc(BINS, low, high) if low < high else torch.full((BINS,), 0.0)
    counts[BINS // 2] += len(flat) if low == high else 0
    zeros = float((flat == 0).float().mean())
    return Histogram(low=low, high=high, counts=tuple(int(count) for count in counts.tolist()), zeros=zeros)

"""Quantization of a model into a folder of codes, with one matrix in memory at a time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.compress.original import OriginalModel
from meshwright.formats.hub.directory import fresh_folder, write_beside_weights
from meshwright.formats.quantized.interface import QuantizedFormat, QuantizedModel, Weights
from meshwright.formats.safetensors import ShardWriter, file_bytes
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import quantize_matrix, relative_error
from meshwright.spec.errors import PlanError
from meshwright.spec.units import GB

MAX_SHARD_BYTES = 5 * GB


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLayer:
    """Report of one quantized matrix."""

    name: str
    scheme: str
    bytes: int
    weight_error: float
    """Relative error of the weights, |W - W'| / |W|."""
    outliers: float
    """Share of input columns that stay in 16 bit."""
    uncalibrated: int = 0
    """Number of experts with too few calibration rows, which were rounded to nearest."""
    output_error: float | None = None
    """Output error |y - y'|^2 / |y|^2 on the calibration text. None unless its inputs were scaled."""


def layer_of(
    name: str, matrix: QuantizedMatrix, weight_error: float, *, uncalibrated: int = 0, output_error: float | None = None
) -> QuantizedLayer:  # fmt: skip
    """Build the report of a matrix."""
    outlier_columns = 0 if matrix.columns is None else len(matrix.columns)
    return QuantizedLayer(
        name=name,
        scheme=matrix.scheme.name,
        bytes=sum(part.numel() * part.element_size() for part in matrix.tensors.values()),
        weight_error=weight_error,
        outliers=outlier_columns / matrix.size_in,
        uncalibrated=uncalibrated,
        output_error=output_error,
    )


def predicted_bytes(form: QuantizedFormat, model: QuantizedModel) -> int:
    """Predict the size of all weight files with headers. Raises PlanError when the format cannot hold the model."""
    why = form.refusal(model)
    if why:
        raise PlanError(why)
    return file_bytes(form.planned(model), MAX_SHARD_BYTES)


def write_quantized(
    out: Path,
    original: OriginalModel,
    model: QuantizedModel,
    form: QuantizedFormat,
    columns: Mapping[str, Tensor],
    seen: Callable[[QuantizedLayer], None],
    calibrated: Weights | None = None,
) -> int:
    """Write the folder and return the size of its weight files. It appears complete or not at all.

    Args:
        out: Folder to create.
        original: Source of the weights.
        model: Schemes and dtype of the parameters.
        form: File format.
        columns: Outlier columns of each matrix, stored unquantized.
        seen: Called with the report of each matrix.
        calibrated: All parameters, if they were quantized beforehand.

    Raises:
        HubError: `out` exists.
        PlanError: Weights are not finite.
    """
    weights = _quantized(original, model, columns, seen) if calibrated is None else calibrated
    with fresh_folder(out) as partial:
        # Tensors may come in any order, and each is freed once it is written.
        with ShardWriter(partial, form.planned(model), MAX_SHARD_BYTES) as writer:
            for name, tensor in form.encoded(model, weights):
                writer.write(name, tensor)
        # Config and tokenizer come last: a folder with them is whole.
        write_beside_weights(
            partial, model.shape, tokenizer=original.tokenizer, dtype=model.dtype,
            chat_template=original.chat_template, generation=original.generation, dropout=original.dropout,
            quantization=form.config(model),
        )  # fmt: skip
        return sum(path.stat().st_size for path in partial.glob("*.safetensors"))


def _quantized(
    original: OriginalModel, model: QuantizedModel, columns: Mapping[str, Tensor],
    seen: Callable[[QuantizedLayer], None],
) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:  # fmt: skip
    for name, tensor in original.weights(model.dtype):
        scheme = model.schemes.get(name)
        if scheme is None:
            yield name, tensor
            continue
        matrix = quantize_matrix(name, tensor, scheme, columns.get(name), model.dtype)
        seen(layer_of(name, matrix, relative_error(tensor, matrix)))
        yield name, matrix


def model_bytes(model: QuantizedModel) -> int:
    """Return the bytes of all parameters before quantization, in the model's dtype."""
    from meshwright.formats.hub.weight_names import tensor_sizes

    return sum(torch.Size(size).numel() for size in tensor_sizes(model.shape).values()) * model.dtype.itemsize

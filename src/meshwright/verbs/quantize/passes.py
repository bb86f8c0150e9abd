"""Passes of `quantize`: the text to calibrate and to score on, the folder that is written, and the comparison."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from meshwright.compress.calibrated_model import FinishedBlocks, calibrate
from meshwright.compress.histograms import MatrixHistograms, matrix_histograms
from meshwright.compress.original import OriginalModel, open_original
from meshwright.compress.quality import Quality, compare, output_errors
from meshwright.compress.stream import QuantizedLayer, write_quantized
from meshwright.formats.hub.weight_names import tensor_sizes
from meshwright.formats.quantized.interface import QuantizedFormat, QuantizedModel, Weights
from meshwright.interface.trained.opening import load
from meshwright.interface.trained.trained_model import TrainedModel
from meshwright.model import Transformer
from meshwright.spec import num_parameters
from meshwright.spec.errors import DataError, argument
from meshwright.training.device import pick_device
from meshwright.training.step.batches import Batch
from meshwright.training.step.evaluate import HeldOutRows
from meshwright.verbs.quantize.options import check_room

OUTLIER_WINDOWS = 16
"""Windows to find outlier columns on. Schemes without outliers set as many aside."""
CALIBRATION_WINDOWS = 128
"""Windows that a calibrated method reads by default."""
MOST_FP32 = 2**30
"""Most parameters of a model that is calibrated and compared in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationText:
    """Disjoint batches to calibrate on and to score."""

    calibration: list[Batch]
    scored: list[Batch]
    source: str
    """Source of the calibration part, in words."""

    @property
    def calibration_tokens(self) -> int:
        """Predicted tokens of the calibration part."""
        return sum(batch.valid for batch in self.calibration)


def quantization_text(
    opened: TrainedModel, data: str | Path | None, sequences: int, windows: int | None
) -> QuantizationText:  # fmt: skip
    """Return `sequences` windows to score, and `windows` to calibrate on.

    Scored windows are of `data`, or of the held-out part of a run; the others of `data` too, or of the training text.
    `windows`: None = those for outlier columns. Raises DataError for a text that is too short.
    """
    if data is None and opened.plan is None:
        data = "stdlib"
    if windows is not None and data is None:
        text = quantization_text(opened, None, sequences, None)
        rows = opened.held_out_rows(None, windows, trained=True)
        return replace(text, calibration=_batches(rows), source="what the run trained on")
    # One reading of the text serves both parts, which are then cut so that they never overlap.
    beside = OUTLIER_WINDOWS if windows is None else windows
    rows = opened.held_out_rows(data, sequences + beside)
    # Small batches, so that the cut between both parts falls near the wanted share even for short texts.
    batches = _batches(replace(rows, at_once=max(1, min(rows.at_once, sequences // 8, len(rows.rows) // 2))))
    if len(batches) < 2:
        window = max((batch.tokens.shape[1] for batch in batches), default=0)
        part = "what the run held out" if data is None else data
        raise DataError(
            f"{part} is too short: it has {rows.stream.num_tokens:,} tokens, and calibrating and measuring "
            f"take 2 windows of {window:,}, which are {window + 2:,} tokens. Give a longer text as "
            f"{argument('data', 'PATH')}"
        )
    # Both parts keep at least one batch, however short the text is.
    used = min(len(batches) - 1, max(1, round(len(batches) * beside / (sequences + beside))))
    source = "what the run held out" if data is None else str(data)
    return QuantizationText(calibration=batches[:used], scored=batches[used:], source=source)


def _batches(rows: HeldOutRows) -> list[Batch]:
    return [batch for batch in rows.batches(pick_device()) if batch.valid]


class QuantizedFolder:
    """The folder being written, and the records of its matrices."""

    def __init__(self, target: Path, original: OriginalModel, model: QuantizedModel, form: QuantizedFormat) -> None:
        self.target, self.original, self.model, self.form = target, original, model, form
        self.layers: list[QuantizedLayer] = []
        self.bytes = self.resumed = 0

    def check_room(self, predicted: int, *, calibrated: bool) -> None:
        """Raise RunError unless the disk has room for files of this size.

        A calibrated method also keeps its unfinished blocks in addition until the end.
        """
        # Only blocks are kept unfinished: embeddings and head go straight into the folder.
        outside = sum(prod(size) for name, size in tensor_sizes(self.model.shape).items() if "layers." not in name)
        blocks = predicted - outside * self.model.dtype.itemsize - FinishedBlocks(self.target).bytes
        check_room(self.target, predicted + (max(0, blocks) if calibrated else 0))

    def rounded(self, columns: Mapping[str, Tensor]) -> None:
        """Quantize each matrix by itself."""
        self._write(columns, None)

    def calibrated(self, text: QuantizationText, dtype: torch.dtype, done: Callable[[int, int], None]) -> None:
        """Quantize block by block, each on its inputs. `done` is called after each."""
        calibrated = calibrate(self.target, self.original, self.model, text.calibration, dtype, done)
        self.layers, self.resumed = list(calibrated.layers), calibrated.resumed
        self._write({}, calibrated.weights)
        # Not before the folder is complete: a killed run continues from these blocks.
        calibrated.finished.remove()

    def _write(self, columns: Mapping[str, Tensor], calibrated: Weights | None) -> None:
        self.bytes = write_quantized(
            self.target, self.original, self.model, self.form, columns, self.layers.append, calibrated
        )


def compute_dtype(original: OriginalModel) -> torch.dtype:
    """Return the dtype in which a model runs here."""
    return torch.float32 if num_parameters(original.shape) <= MOST_FP32 else original.dtype


class BeforeQuantized:
    """The original, in memory once it is needed, and the text that quality is measured on."""

    def __init__(self, path: Path, checkpoint: str, text: QuantizationText) -> None:
        self.path, self.checkpoint, self.scored = path, checkpoint, text.scored

    @cached_property
    def dtype(self) -> str | None:
        """Dtype in which both models are compared. None = as stored."""
        small = num_parameters(open_original(self.path, self.checkpoint).shape) <= MOST_FP32
        return "fp32" if small else None

    @cached_property
    def opened(self) -> TrainedModel:
        """The original."""
        return load(self.path, self.dtype, checkpoint=self.checkpoint)

    def model(self) -> Transformer:
        """Return the transformer of the original."""
        return self.opened.model

    def against(
        self, target: Path, same: Iterable[str], drawn: Iterable[str] = ()
    ) -> tuple[Quality, Mapping[str, float], Sequence[MatrixHistograms]]:
        """Compare with the written model, read back.

        Also return output errors of layers with the `same` inputs in both, and histograms of the matrices `drawn`.
        """
        # Read back from disk, so that the comparison also covers the format and its reader.
        after = load(target, self.dtype).model
        # Errors of layers need inputs of every layer, so they are measured on a few batches only.
        before = self.opened.model
        errors = output_errors(before, after, same, self.scored[:4])
        return compare(before, after, self.scored), errors, matrix_histograms(before, after, drawn, self.scored[0])

"""Passes of `quantize` over a model: writing the folder, and comparing it with the original."""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from meshwright.compress.calibrated_model import FinishedBlocks, calibrate
from meshwright.compress.original import OriginalModel, open_original
from meshwright.compress.quality import Quality, compare, output_errors
from meshwright.compress.stream import QuantizedLayer, write_quantized
from meshwright.formats.hub.weight_names import tensor_sizes
from meshwright.formats.quantized.interface import QuantizedFormat, QuantizedModel, Weights
from meshwright.interface.trained.opening import load
from meshwright.interface.trained.trained_model import TrainedModel
from meshwright.model import Transformer
from meshwright.spec import num_parameters
from meshwright.verbs.quantize.options import check_room
from meshwright.verbs.quantize.text import QuantizationText

MOST_FP32 = 2**30
"""Most parameters of a model that is calibrated and compared in fp32."""


class QuantizedFolder:
    """The folder being written, and the records of its matrices."""

    def __init__(self, target: Path, original: OriginalModel, model: QuantizedModel, form: QuantizedFormat) -> None:
        self.target, self.original, self.model, self.form = target, original, model, form
        self.layers: list[QuantizedLayer] = []
        self.bytes = self.resumed = 0

    def check_room(self, predicted: int, *, calibrated: bool) -> None:
        """Raise RunError unless the disk has room for files of this size.

        A calibrated method also keeps its unfinished blocks beside them until the end.
        """
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

    def against(self, target: Path, same: Iterable[str]) -> tuple[Quality, Mapping[str, float]]:
        """Compare with the written model, read back.

        Also return output errors of layers with the same inputs in both.
        """
        after = load(target, self.dtype).model
        return compare(self.opened.model, after, self.scored), output_errors(
            self.opened.model, after, same, self.scored[:4]
        )

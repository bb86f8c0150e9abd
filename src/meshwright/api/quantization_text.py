"""The text of `quantize`, in two parts: what it calibrates on, and what it scores both models on."""

from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.api.trained_model import TrainedModel
from meshwright.spec.errors import DataError
from meshwright.training.batches import Batch
from meshwright.training.device import pick_device

OUTLIER_WINDOWS = 16
"""Windows that outlier columns are found on; as many are left aside by schemes that find none."""
CALIBRATION_WINDOWS = 128
"""That a calibrated method reads, unless another number is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationText:
    """Batches, none of them twice."""

    calibration: list[Batch]
    scored: list[Batch]

    @property
    def calibration_tokens(self) -> int:
        """That are predicted in the first part."""
        return sum(batch.valid for batch in self.calibration)


def quantization_text(
    opened: TrainedModel, data: str | Path | None, sequences: int, windows: int | None
) -> QuantizationText:  # fmt: skip
    """`sequences` windows to score, of `data` or what a run held out. `windows` to calibrate on: of `data` too, or of
    what a run trained on; None = those for outlier columns, beside the scored ones. DataError where there is too
    little."""
    if data is None and opened.plan is None:
        data = "stdlib"
    if windows is not None and data is None:
        found = quantization_text(opened, None, sequences, None)
        return replace(found, calibration=_batches(opened, None, windows, sequences, trained=True))
    beside = OUTLIER_WINDOWS if windows is None else windows
    batches = _batches(opened, data, sequences + beside, sequences, trained=False)
    if len(batches) < 2:
        raise DataError("the text has too few windows to calibrate and measure on: at least 2 are needed; give more")
    used = min(len(batches) - 1, max(1, round(len(batches) * beside / (sequences + beside))))
    return QuantizationText(calibration=batches[:used], scored=batches[used:])


def _batches(
    opened: TrainedModel, data: str | Path | None, limit: int, sequences: int, *, trained: bool
) -> list[Batch]:  # fmt: skip
    rows = opened.held_out_rows(data, limit, trained=trained)
    rows = replace(rows, at_once=max(1, min(rows.at_once, sequences // 8)))
    return [batch for batch in rows.batches(pick_device()) if batch.valid]

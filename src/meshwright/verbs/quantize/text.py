"""The text of `quantize` in two parts: one to calibrate on, one to score both models on."""

from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.interface.trained.trained_model import TrainedModel
from meshwright.spec.errors import DataError, argument
from meshwright.training.device import pick_device
from meshwright.training.step.batches import Batch
from meshwright.training.step.evaluate import HeldOutRows

OUTLIER_WINDOWS = 16
"""Windows to find outlier columns on. Schemes without outliers set as many aside."""
CALIBRATION_WINDOWS = 128
"""Windows that a calibrated method reads by default."""


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
    beside = OUTLIER_WINDOWS if windows is None else windows
    rows = opened.held_out_rows(data, sequences + beside)
    batches = _batches(replace(rows, at_once=max(1, min(rows.at_once, sequences // 8, len(rows.rows) // 2))))
    if len(batches) < 2:
        window = max((batch.tokens.shape[1] for batch in batches), default=0)
        part = "what the run held out" if data is None else data
        raise DataError(
            f"{part} is too short: it has {rows.stream.num_tokens:,} tokens, and calibrating and measuring "
            f"take 2 windows of {window:,}, which are {window + 2:,} tokens. Give a longer text as "
            f"{argument('data', 'PATH')}"
        )
    used = min(len(batches) - 1, max(1, round(len(batches) * beside / (sequences + beside))))
    source = "what the run held out" if data is None else str(data)
    return QuantizationText(calibration=batches[:used], scored=batches[used:], source=source)


def _batches(rows: HeldOutRows) -> list[Batch]:
    return [batch for batch in rows.batches(pick_device()) if batch.valid]

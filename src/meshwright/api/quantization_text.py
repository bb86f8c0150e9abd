"""The text of `quantize`, in two parts: what it calibrates on, and what it scores both models on."""

from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.api.trained_model import TrainedModel
from meshwright.spec.errors import DataError
from meshwright.training.batches import Batch
from meshwright.training.device import pick_device
from meshwright.training.evaluate import HeldOutRows

OUTLIER_WINDOWS = 16
"""Windows that outlier columns are found on; as many are left aside by schemes that find none."""
CALIBRATION_WINDOWS = 128
"""That a calibrated method reads, unless another number is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationText:
    """Batches, none of them twice."""

    calibration: list[Batch]
    scored: list[Batch]
    of: str
    """Where the first part comes from, in words."""

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
        rows = opened.held_out_rows(None, windows, trained=True)
        return replace(found, calibration=_batches(rows), of="what the run trained on")
    beside = OUTLIER_WINDOWS if windows is None else windows
    rows = opened.held_out_rows(data, sequences + beside)
    batches = _batches(replace(rows, at_once=max(1, min(rows.at_once, sequences // 8, len(rows.rows) // 2))))
    if len(batches) < 2:
        window = max((one.tokens.shape[1] for one in batches), default=0)
        part = "what the run held out" if data is None else data
        raise DataError(
            f"{part} is too short: it has {rows.stream.num_tokens:,} tokens, and calibrating and measuring "
            f"take 2 windows of {window:,}, which are {window + 2:,} tokens. Give a longer text as data=PATH"
        )
    used = min(len(batches) - 1, max(1, round(len(batches) * beside / (sequences + beside))))
    of = "what the run held out" if data is None else str(data)
    return QuantizationText(calibration=batches[:used], scored=batches[used:], of=of)


def _batches(rows: HeldOutRows) -> list[Batch]:
    return [batch for batch in rows.batches(pick_device()) if batch.valid]

"""`quantize`: a smaller model, and how far its predictions moved."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.api.answer import Answer
from meshwright.api.arguments import Place, checked, folder_of
from meshwright.api.documents import plain
from meshwright.api.markup import line, table, whole
from meshwright.api.model_opening import described
from meshwright.api.quantization_budget import within_budget
from meshwright.api.quantization_options import bytes_of, check_request, check_room, matrices_left
from meshwright.api.quantization_passes import BeforeQuantized, QuantizedFolder, compute_dtype
from meshwright.api.quantization_text import CALIBRATION_WINDOWS, quantization_text
from meshwright.compress.bit_budget import bits_of
from meshwright.compress.gguf_stream import plan_gguf, write_gguf
from meshwright.compress.layer_inputs import column_peaks, outlier_columns
from meshwright.compress.original import OriginalModel, open_original
from meshwright.compress.quality import Quality
from meshwright.compress.stream import QuantizedLayer, model_bytes, predicted_bytes
from meshwright.model.quantized_formats.folder_format import QuantizedModel
from meshwright.model.quantized_formats.format_table import DEFAULT, FORMATS, FP16_SCALES
from meshwright.model.quantized_weights import quantizable
from meshwright.observe.quality_page.quality_page import page
from meshwright.spec.errors import OutsideTolerance
from meshwright.spec.gguf_schemes import GGUF, GGUF_SCHEMES
from meshwright.spec.quantization_schemes import Scheme
from meshwright.spec.units import gib
from meshwright.store.durable import one_line
from meshwright.store.model_place import LAST
from meshwright.training.precision import DTYPES

SEQUENCES = 64
"""Windows of held-out text that quality is measured on."""
BLAMED = 5
"""Layers that are named as the worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """One quantized matrix."""

    name: str
    scheme: str
    bytes: int
    weight_error: float
    """|W - W'| / |W|."""
    output_error: float | None
    """|y - y'|^2 / |y|^2 on held-out text, or, where inputs were scaled, on the calibration text; None = not
    measured."""
    outliers: float
    """Share of its inputs that stay in 16 bit."""
    uncalibrated: int = 0
    """Experts that the calibration text hardly reached: they are rounded to nearest."""


@dataclass(frozen=True, kw_only=True, repr=False)
class QuantizeAnswer(Answer):
    """What was written, and what it cost."""

    run: Path
    """The quantized folder."""
    original: Path
    scheme: str
    format: str
    bytes: int
    """Of its files of weights."""
    predicted_bytes: int
    bytes_before: int
    quality: Quality | None
    """None = it was not asked for."""
    max_kl: float
    layers: tuple[LayerRecord, ...]
    skipped: tuple[str, ...]
    """Matrices that were left as they are, and could be quantized."""
    quantized_parameters: int
    calibration_tokens: int = 0
    """That a calibrated method read."""
    calibration_text: str = ""
    """Of which text."""
    budget_bytes: int | None = None
    """What the files may have together, where bits were chosen by it."""
    bits: Mapping[int, int] = field(default_factory=dict)
    """How many matrices have how many."""
    resumed_blocks: int = 0
    """Of those, the ones that an earlier run of the same command had made before it was killed."""
    other_formats: tuple[str, ...] = ()
    """Of a folder in Meshwright's own format: formats of other software that hold the same scheme."""
    note: str = ""
    """What a user of the file must know; empty = nothing."""

    @property
    def passed(self) -> bool:
        """Whether the divergence is within its limit; true where it was not measured."""
        return self.quality is None or self.quality.kl <= self.max_kl

    def check(self) -> None:
        """OutsideTolerance where the divergence is beyond its limit."""
        if self.quality is not None and not self.passed:
            worst = self.blamed[0].name if self.blamed else "none"
            raise OutsideTolerance(
                f"{self.scheme} is too lossy: it moves predictions by {self.quality.kl:.4g} nats per token, and "
                f"the limit is {self.max_kl:g}. Take a scheme with more bits, keep={worst}, or another max_kl="
            )

    @property
    def outlier_share(self) -> float:
        """Of all inputs of quantized matrices, those in 16 bit."""
        return sum(one.outliers for one in self.layers) / len(self.layers)

    @property
    def blamed(self) -> tuple[LayerRecord, ...]:
        """The layers whose outputs moved most, the worst first."""
        known = [one for one in self.layers if one.output_error is not None]
        return tuple(sorted(known, key=lambda one: -(one.output_error or 0.0))[:BLAMED])

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        size = f"{self.bytes_before / self.bytes:.2f}x smaller ({gib(self.bytes_before)} to {gib(self.bytes)})"
        if self.quality is None:
            return f"{self.scheme}: {size}, quality not measured"
        found = self.quality
        return (
            f"{self.scheme}: {size}, KL {found.kl:.4g} nats per token, the same likeliest token for "
            f"{100 * found.top1:.1f}%, perplexity {found.perplexity_before:.4g} to {found.perplexity_after:.4g}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The document that `meshwright quantize --json` prints."""
        found = self.quality
        figures = [one.name for one in fields(Quality)]
        return {
            name: plain(value)
            for name, value in {
                "scheme": self.scheme, "format": self.format, "out": self.run, "bytes": self.bytes,
                "predicted_bytes": self.predicted_bytes, "bytes_before": self.bytes_before,
                **{name: None if found is None else getattr(found, name) for name in figures},
                "max_kl": self.max_kl, "passed": self.passed, "outlier_share": self.outlier_share,
                "layers": self.layers, "skipped": self.skipped, "calibration_tokens": self.calibration_tokens,
                "calibration_text": self.calibration_text,
                "resumed_blocks": self.resumed_blocks, "budget_bytes": self.budget_bytes, "bits": self.bits,
                "note": self.note,
            }.items()
        }  # fmt: skip

    def page(self) -> str:
        """All of it as one HTML page with pictures, for a browser offline."""
        return page(self.to_dict())

    def rows(self) -> list[dict[str, Any]]:
        """A row for each quantized matrix."""
        return [plain(one) for one in self.layers]

    def __repr__(self) -> str:
        return f"{self.run}: {self.headline}"

    def _repr_html_(self) -> str:
        rows = [
            (one.name, f"{one.output_error:.2e}", f"{one.weight_error:.2e}", f"{100 * one.outliers:.2f}%")
            for one in self.blamed
        ]
        return whole(
            line(self.headline, "good" if self.passed else "alarm"),
            *([table(("moved most", "output error", "weight error", "outliers"), rows)] if rows else []),
        )


@checked
def quantize(
    model: Place,
    scheme: str,
    out: str | Path,
    *,
    format: str = DEFAULT,
    group: int | None = None,
    keep: Sequence[str] = (),
    outliers: str | None = None,
    threshold: float | None = None,
    data: str | Path | None = None,
    sequences: int = SEQUENCES,
    calibration: int = CALIBRATION_WINDOWS,
    budget: str | int | None = None,
    max_kl: float | None = None,
    dtype: str | None = None,
    checkpoint: str = LAST,
    quality: bool = True,
    on_block: Callable[[int, int], None] | None = None,
) -> QuantizeAnswer:
    """Write a run or a Hugging Face directory with fewer bits per weight, and compare both on held-out text.

    `scheme`: a name of meshwright.spec.quantization_schemes, or of gguf_schemes, with which `out` is one GGUF file;
    `group`: another number of inputs that share a scale;
    `keep`: names of matrices, or patterns of them, that are left as they are. `outliers` of llm-int8: `calibrated`
    columns, or those above `threshold` in each batch. `data`: the text, None = what the run held out; of it `sequences`
    windows are scored. `calibration`: windows that a calibrated method reads, none of them scored; without `data` they
    are of the text that the run trained on. `budget`: bytes that the files may have, as 1.2GiB: each matrix has 3 to 8
    bits of the scheme's method, more where its rounding was measured to move predictions most. `max_kl`: the limit that
    `passed` is about, None = the scheme's. `dtype`: of what is not quantized, None = as it is stored.
    `on_block` hears how many blocks a calibrated method has done, of how many. ArgumentError, PlanError, RunError,
    HubError, DataError.
    """
    path, target = folder_of(model), Path(out)
    taken = check_request(
        path, target, scheme, format=format, group=group, outliers=outliers, threshold=threshold, data=data,
        sequences=sequences, calibration=calibration, budget=budget, max_kl=max_kl, dtype=dtype,
        checkpoint=checkpoint,
    )  # fmt: skip
    if taken is None:
        return _as_gguf(
            path, target, scheme, data=data, sequences=sequences, max_kl=max_kl, dtype=dtype,
            checkpoint=checkpoint, quality=quality, keep=keep,
        )  # fmt: skip
    if format in FP16_SCALES:
        taken = replace(taken, scales="float16")
    limit = None if budget is None else bytes_of(budget)
    original = open_original(path, checkpoint)
    whole_model = _chosen(original, taken, keep, DTYPES[dtype] if dtype else original.dtype)
    reads = quality or taken.calibrated or limit is not None or taken.outliers == "calibrated"
    windows = calibration if taken.calibrated else None
    text = quantization_text(described(path, checkpoint), data, sequences, windows) if reads else None
    before = BeforeQuantized(path, checkpoint, text) if text else None
    columns: Mapping[str, Tensor] = {}
    if taken.outliers == "calibrated":
        assert before is not None and text is not None
        peaks = column_peaks(before.opened.model, text.calibration, whole_model.schemes)
        columns = outlier_columns(peaks, taken.threshold)
        whole_model = replace(whole_model, outlier_columns={name: len(found) for name, found in columns.items()})
    if limit is not None:
        assert before is not None and text is not None
        whole_model = within_budget(whole_model, taken, limit, FORMATS[format], before.model, text.calibration)
    predicted = predicted_bytes(FORMATS[format], whole_model)
    made = QuantizedFolder(target, original, whole_model, FORMATS[format])
    made.check_room(predicted, calibrated=taken.calibrated)
    with one_line(target, "OUT"):
        if taken.calibrated:
            assert text is not None
            made.calibrated(text, compute_dtype(original), on_block or (lambda block, blocks: None))
        else:
            made.rounded(columns)
    same = [name for name, scheme in whole_model.schemes.items() if not scheme.scales_inputs]
    measured, errors = (None, {}) if before is None or not quality else before.against(target, same)
    return QuantizeAnswer(
        run=target, original=path, scheme=taken.name, format=format, bytes=made.bytes, predicted_bytes=predicted,
        bytes_before=model_bytes(whole_model), quality=measured, max_kl=taken.max_kl if max_kl is None else max_kl,
        layers=tuple(_record(one, errors) for one in made.layers), skipped=tuple(whole_model.skipped),
        quantized_parameters=sum(prod(quantizable(original.shape)[name]) for name in whole_model.schemes),
        calibration_tokens=text.calibration_tokens if text and taken.calibrated else 0,
        calibration_text=text.of if text and taken.calibrated else "", resumed_blocks=made.resumed,
        budget_bytes=limit, bits=bits_of(whole_model.schemes),
        other_formats=tuple(name for name in FORMATS if name != DEFAULT and not FORMATS[name].refusal(whole_model))
        if format == DEFAULT else (),
    )  # fmt: skip


def _as_gguf(
    path: Path, target: Path, name: str, *, data: str | Path | None, sequences: int, max_kl: float | None,
    dtype: str | None, checkpoint: str, quality: bool, keep: Sequence[str],
) -> QuantizeAnswer:  # fmt: skip
    """The same as one GGUF file."""
    taken = GGUF_SCHEMES[name]
    original = open_original(path, checkpoint)
    wanted, names = DTYPES[dtype] if dtype else original.dtype, matrices_left(original, keep)
    kept = tuple(one for one in quantizable(original.shape) if one not in names)
    plan = plan_gguf(original, wanted, taken, kept)
    check_room(target, plan.bytes)
    text = quantization_text(described(path, checkpoint), data, sequences, None) if quality else None
    layers: list[QuantizedLayer] = []
    with one_line(target, "OUT"):
        written = write_gguf(target, original, plan, layers.append)
    measured, errors = BeforeQuantized(path, checkpoint, text).against(target, names) if text else (None, {})
    return QuantizeAnswer(
        run=target, original=path, scheme=name, format=GGUF, bytes=written, predicted_bytes=plan.bytes,
        bytes_before=model_bytes(QuantizedModel(shape=original.shape, schemes={}, outlier_columns={}, dtype=wanted)),
        quality=measured, max_kl=taken.max_kl if max_kl is None else max_kl, skipped=kept,
        layers=tuple(_record(one, errors) for one in layers), quantized_parameters=plan.coded, note=plan.note,
    )  # fmt: skip


def _chosen(original: OriginalModel, scheme: Scheme, keep: Sequence[str], dtype: torch.dtype) -> QuantizedModel:
    """Every matrix but those that are kept; ArgumentError for a pattern without one."""
    schemes = dict.fromkeys(matrices_left(original, keep), scheme)
    return QuantizedModel(shape=original.shape, schemes=schemes, outlier_columns={}, dtype=dtype)


def _record(one: QuantizedLayer, errors: Mapping[str, float]) -> LayerRecord:
    return LayerRecord(
        name=one.name, scheme=one.scheme, bytes=one.bytes, weight_error=one.weight_error,
        output_error=errors.get(one.name, one.output_error), outliers=one.outliers, uncalibrated=one.uncalibrated,
    )  # fmt: skip

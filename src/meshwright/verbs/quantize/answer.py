"""`quantize`: a smaller model, and how far its predictions moved."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.compress.bit_budget import bits_of, choose_within, ladder
from meshwright.compress.gguf_stream import plan_gguf, write_gguf
from meshwright.compress.histograms import MatrixHistograms
from meshwright.compress.layer_inputs import column_peaks, outlier_columns
from meshwright.compress.original import open_original
from meshwright.compress.quality import Quality, measure_groups
from meshwright.compress.stream import QuantizedLayer, model_bytes, predicted_bytes
from meshwright.formats.quantized.interface import QuantizedFormat, QuantizedModel
from meshwright.formats.quantized.table import DEFAULT, FORMATS, FP16_SCALES
from meshwright.interface.answers.answer import Answer, Place, checked, folder_of, plain
from meshwright.interface.answers.markup import line, table, whole
from meshwright.interface.trained.opening import described
from meshwright.model import Transformer
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import OutsideTolerance, PlanError, argument
from meshwright.spec.model.quantization_schemes import Scheme
from meshwright.spec.units import gib
from meshwright.spec.weights.gguf_schemes import GGUF, GGUF_SCHEMES
from meshwright.store.durable import report_in_one_line
from meshwright.store.run_folder import LAST
from meshwright.training.optimizer.precision import DTYPES
from meshwright.training.step.batches import Batch
from meshwright.verbs.quantize.options import bytes_of, check_request, check_room, matrices_to_quantize
from meshwright.verbs.quantize.page import page
from meshwright.verbs.quantize.passes import (
    CALIBRATION_WINDOWS,
    BeforeQuantized,
    QuantizedFolder,
    compute_dtype,
    quantization_text,
)

SEQUENCES = 64
"""Windows of held-out text that quality is measured on."""
BLAMED = 5
"""Layers named as the worst."""
SENSITIVITY_TOKENS = 4096
"""Tokens of the calibration text that sensitivities are measured on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """One quantized matrix."""

    name: str
    scheme: str
    bytes: int
    weight_error: float
    """|W - W'| / |W|."""
    output_error: float | None
    """|y - y'|^2 / |y|^2 on held-out text, or on the calibration text if inputs were scaled. None = not measured."""
    outliers: float
    """Share of its inputs in 16 bit."""
    uncalibrated: int = 0
    """Experts that the calibration text hardly reached. They are rounded to nearest."""


@dataclass(frozen=True, kw_only=True, repr=False)
class QuantizeAnswer(Answer):
    """A quantized model, and its cost in quality."""

    run: Path
    """The quantized folder."""
    original: Path
    scheme: str
    format: str
    bytes: int
    """Size of its weight files."""
    predicted_bytes: int
    bytes_before: int
    quality: Quality | None
    """Comparison with the original. None = not requested."""
    max_kl: float
    layers: tuple[LayerRecord, ...]
    skipped: tuple[str, ...]
    """Matrices that could be quantized and were left as they are."""
    quantized_parameters: int
    calibration_tokens: int = 0
    """Tokens that a calibrated method read."""
    calibration_text: str = ""
    """Source of these tokens."""
    budget_bytes: int | None = None
    """Budget of all files. None = bits were not chosen by one."""
    bits: Mapping[int, int] = field(default_factory=dict)
    """Bits -> number of matrices."""
    resumed_blocks: int = 0
    """Blocks that an earlier run of the same command had finished before it was killed."""
    other_formats: tuple[str, ...] = ()
    """Formats of other software that hold the same scheme, for a folder in Meshwright's own format."""
    histograms: tuple[MatrixHistograms, ...] = ()
    """Weights and inputs of each matrix before and after. Empty = not requested, or quality was not measured."""
    note: str = ""
    """A note for users of the file. Empty = none."""

    @property
    def passed(self) -> bool:
        """Is the divergence within its limit? True if it was not measured."""
        return self.quality is None or self.quality.kl <= self.max_kl

    def check(self) -> None:
        """Raise OutsideTolerance for a divergence beyond its limit."""
        if self.quality is not None and not self.passed:
            worst = self.blamed[0].name if self.blamed else "none"
            raise OutsideTolerance(
                f"{self.scheme} is too lossy: it moves predictions by {self.quality.kl:.4g} nats per token, and "
                f"the limit is {self.max_kl:g}. Take a scheme with more bits, {argument('keep', worst)}, or "
                f"another {argument('max_kl')}"
            )

    @property
    def outlier_share(self) -> float:
        """Share of all inputs of quantized matrices in 16 bit."""
        return sum(layer.outliers for layer in self.layers) / len(self.layers)

    @property
    def blamed(self) -> tuple[LayerRecord, ...]:
        """The layers whose outputs moved most, the worst first."""
        compared = [layer for layer in self.layers if layer.output_error is not None]
        return tuple(sorted(compared, key=lambda layer: -(layer.output_error or 0.0))[:BLAMED])

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        size = f"{self.bytes_before / self.bytes:.2f}x smaller ({gib(self.bytes_before)} to {gib(self.bytes)})"
        if self.quality is None:
            return f"{self.scheme}: {size}, quality not measured"
        quality = self.quality
        return (
            f"{self.scheme}: {size}, KL {quality.kl:.4g} nats per token, the same likeliest token for "
            f"{100 * quality.top1:.1f}%, perplexity {quality.perplexity_before:.4g} to {quality.perplexity_after:.4g}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `meshwright quantize --json` prints."""
        quality = self.quality
        figures = [figure.name for figure in fields(Quality)]
        return {
            key: plain(value)
            for key, value in {
                "scheme": self.scheme, "format": self.format, "out": self.run, "bytes": self.bytes,
                "predicted_bytes": self.predicted_bytes, "bytes_before": self.bytes_before,
                **{key: None if quality is None else getattr(quality, key) for key in figures},
                "max_kl": self.max_kl, "passed": self.passed, "outlier_share": self.outlier_share,
                "layers": self.layers, "skipped": self.skipped, "calibration_tokens": self.calibration_tokens,
                "calibration_text": self.calibration_text,
                "resumed_blocks": self.resumed_blocks, "budget_bytes": self.budget_bytes, "bits": self.bits,
                "note": self.note, "histograms": self.histograms,
            }.items()
        }  # fmt: skip

    def page(self) -> str:
        """Return everything as one HTML page with figures, for offline use."""
        return page(self.to_dict())

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each quantized matrix."""
        return [plain(layer) for layer in self.layers]

    def __repr__(self) -> str:
        return f"{self.run}: {self.headline}"

    def _repr_html_(self) -> str:
        rows = [
            (layer.name, f"{layer.output_error:.2e}", f"{layer.weight_error:.2e}", f"{100 * layer.outliers:.2f}%")
            for layer in self.blamed
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
    zero_point: str | None = None,
    data: str | Path | None = None,
    sequences: int = SEQUENCES,
    calibration: int = CALIBRATION_WINDOWS,
    budget: str | int | None = None,
    max_kl: float | None = None,
    dtype: str | None = None,
    checkpoint: str = LAST,
    quality: bool = True,
    histograms: bool = False,
    on_block: Callable[[int, int], None] | None = None,
) -> QuantizeAnswer:
    """Write a run or a Hugging Face directory with fewer bits per weight, and compare both on held-out text.

    Raises ArgumentError, PlanError, RunError, HubError or DataError.

    Args:
        model: A run or a Hugging Face directory.
        scheme: A name of meshwright.spec.model.quantization_schemes, or of gguf_schemes, for which `out` is one
            GGUF file.
        out: Folder or file to write.
        format: Format of the folder.
        group: Inputs that share a scale. None = as the scheme says.
        keep: Names of matrices, or patterns of them, to leave unquantized.
        outliers: For llm-int8: `calibrated` columns, or those above the `threshold` in each batch.
        threshold: Activations above it are outliers.
        zero_point: For schemes with zeros: whether `both` sides have some, or only `weights` or `activations`.
        data: The text. None = the held-out part of the run.
        sequences: Windows of the text to score.
        calibration: Windows that a calibrated method reads. None of them is scored, and without `data` they are of the
            training text.
        budget: Size of all files, as 1.2GiB. Each matrix gets 3 to 8 bits of the scheme's method, more where rounding
            moves predictions most.
        max_kl: Limit of the divergence for `passed`. None = as the scheme says.
        dtype: Dtype of unquantized weights. None = as stored.
        checkpoint: Checkpoint of the run: last, best, or a step.
        quality: Compare both models.
        histograms: Also count weights and activations before and after, which the page draws. Needs `quality`.
        on_block: Called with the numbers of finished and of all blocks of a calibrated method.
    """
    path, target = folder_of(model), Path(out)
    folder_scheme = check_request(
        path, target, scheme, format=format, group=group, outliers=outliers, threshold=threshold,
        zero_point=zero_point, data=data, sequences=sequences, calibration=calibration, budget=budget, max_kl=max_kl,
        dtype=dtype, checkpoint=checkpoint,
    )  # fmt: skip
    if folder_scheme is None:
        return _quantize_to_gguf(
            path, target, scheme, data=data, sequences=sequences, max_kl=max_kl, dtype=dtype,
            checkpoint=checkpoint, quality=quality, histograms=histograms, keep=keep,
        )  # fmt: skip
    # Readers of these formats take fp16 scales only; the scheme must say so before sizes are predicted.
    if format in FP16_SCALES:
        folder_scheme = replace(folder_scheme, scales="float16")
    limit = None if budget is None else bytes_of(budget)
    original = open_original(path, checkpoint)
    whole_model = QuantizedModel(
        shape=original.shape, schemes=dict.fromkeys(matrices_to_quantize(original, keep), folder_scheme),
        outlier_columns={},
        dtype=DTYPES[dtype] if dtype else original.dtype,
    )  # fmt: skip
    # Text is read only to measure, to calibrate, or to find outliers.
    reads = quality or folder_scheme.calibrated or limit is not None or folder_scheme.outliers == "calibrated"
    windows = calibration if folder_scheme.calibrated else None
    text = quantization_text(described(path, checkpoint), data, sequences, windows) if reads else None
    before = BeforeQuantized(path, checkpoint, text) if text else None
    columns: Mapping[str, Tensor] = {}
    if folder_scheme.outliers == "calibrated":
        assert before is not None and text is not None
        # Which columns hold outliers is a property of the model, so a few windows of text are enough.
        peaks = column_peaks(before.opened.model, text.calibration, whole_model.schemes)
        columns = outlier_columns(peaks, folder_scheme.threshold)
        whole_model = replace(whole_model, outlier_columns={name: len(numbers) for name, numbers in columns.items()})
    if limit is not None:
        assert before is not None and text is not None
        # Sensitivities are measured on the calibration text: scored text must stay unseen.
        whole_model = _within_budget(whole_model, folder_scheme, limit, FORMATS[format], before.model, text.calibration)
    # The size is known before a byte is written, so a disk that is too small is refused now.
    predicted = predicted_bytes(FORMATS[format], whole_model)
    folder = QuantizedFolder(target, original, whole_model, FORMATS[format])
    folder.check_room(predicted, calibrated=folder_scheme.calibrated)
    with report_in_one_line(target, argument("out")):
        if folder_scheme.calibrated:
            assert text is not None
            folder.calibrated(text, compute_dtype(original), on_block or (lambda block, blocks: None))
        else:
            folder.rounded(columns)
    # Scaled inputs differ from those of the original: such layers keep the errors of the calibration.
    same = [name for name, scheme in whole_model.schemes.items() if not scheme.scales_inputs]
    drawn = whole_model.schemes if histograms else ()
    measured, errors, counted = (None, {}, ()) if before is None or not quality else before.against(target, same, drawn)
    return QuantizeAnswer(
        run=target, original=path, scheme=folder_scheme.name, format=format, bytes=folder.bytes,
        predicted_bytes=predicted,
        bytes_before=model_bytes(whole_model), quality=measured, histograms=tuple(counted),
        max_kl=folder_scheme.max_kl if max_kl is None else max_kl,
        layers=tuple(_record(layer, errors) for layer in folder.layers), skipped=tuple(whole_model.skipped),
        quantized_parameters=sum(prod(quantizable(original.shape)[name]) for name in whole_model.schemes),
        calibration_tokens=text.calibration_tokens if text and folder_scheme.calibrated else 0,
        calibration_text=text.source if text and folder_scheme.calibrated else "", resumed_blocks=folder.resumed,
        budget_bytes=limit, bits=bits_of(whole_model.schemes),
        # The native folder can be read by Meshwright alone, so the answer names the formats that others read.
        other_formats=tuple(name for name in FORMATS if name != DEFAULT and not FORMATS[name].refusal(whole_model))
        if format == DEFAULT else (),
    )  # fmt: skip


def _quantize_to_gguf(
    path: Path, target: Path, name: str, *, data: str | Path | None, sequences: int, max_kl: float | None,
    dtype: str | None, checkpoint: str, quality: bool, histograms: bool, keep: Sequence[str],
) -> QuantizeAnswer:  # fmt: skip
    gguf_scheme = GGUF_SCHEMES[name]
    original = open_original(path, checkpoint)
    rest_dtype, names = DTYPES[dtype] if dtype else original.dtype, matrices_to_quantize(original, keep)
    unquantized = tuple(layer for layer in quantizable(original.shape) if layer not in names)
    plan = plan_gguf(original, rest_dtype, gguf_scheme, unquantized)
    # GGUF is written in one pass without unfinished blocks next to it, so the file itself is all it needs.
    check_room(target, plan.bytes)
    text = quantization_text(described(path, checkpoint), data, sequences, None) if quality else None
    layers: list[QuantizedLayer] = []
    with report_in_one_line(target, argument("out")):
        written = write_gguf(target, original, plan, layers.append)
    drawn = names if histograms else ()
    measured, errors, counted = (
        BeforeQuantized(path, checkpoint, text).against(target, names, drawn) if text else (None, {}, ())
    )
    return QuantizeAnswer(
        run=target, original=path, scheme=name, format=GGUF, bytes=written, predicted_bytes=plan.bytes,
        bytes_before=model_bytes(
            QuantizedModel(shape=original.shape, schemes={}, outlier_columns={}, dtype=rest_dtype)
        ),
        quality=measured, histograms=tuple(counted), max_kl=gguf_scheme.max_kl if max_kl is None else max_kl,
        skipped=unquantized,
        layers=tuple(_record(layer, errors) for layer in layers), quantized_parameters=plan.coded, note=plan.note,
    )  # fmt: skip


def _within_budget(
    model: QuantizedModel, scheme: Scheme, budget: int, form: QuantizedFormat, before: Callable[[], Transformer],
    batches: Sequence[Batch],
) -> QuantizedModel:  # fmt: skip
    """Choose a scheme for each matrix, so that the files stay within a budget of bytes. `before` opens the original.

    Raises PlanError, with the bytes, if even the fewest bits are too many, and if the format holds one scheme only.
    """
    rungs = ladder(scheme)

    def with_schemes(schemes: Mapping[str, Scheme]) -> QuantizedModel:
        return replace(model, schemes={name: schemes[name] for name in model.schemes})

    first, *others = model.schemes
    why = form.refusal(with_schemes({first: rungs[0], **dict.fromkeys(others, rungs[1])}))
    if why:
        raise PlanError(why)
    least = predicted_bytes(form, with_schemes(dict.fromkeys(model.schemes, rungs[0])))
    if least > budget:
        raise PlanError(
            f"{argument('budget', gib(budget))} is too small: with {rungs[0].bits} bits for every matrix the "
            f"files take {gib(least)}. Give at least that, or a smaller model"
        )
    groups = measure_groups(before(), list(model.schemes), rungs, first_batches(batches))
    beside = least - sum(group.choices[0].bytes for group in groups)
    # Headers differ by some bytes between schemes: repeat with the excess until the files fit.
    while True:
        numbers = choose_within([group.choices for group in groups], budget - beside)
        pairs = zip(groups, numbers, strict=True)
        candidate = with_schemes({name: rungs[number] for group, number in pairs for name in group.names})
        excess = predicted_bytes(form, candidate) - budget
        if excess <= 0:
            return candidate
        beside += excess


def first_batches(batches: Sequence[Batch]) -> list[Batch]:
    """Return the first batches that together hold SENSITIVITY_TOKENS."""
    first: list[Batch] = []
    for batch in batches:
        if sum(earlier.valid for earlier in first) >= SENSITIVITY_TOKENS:
            break
        first.append(batch)
    return first


def _record(layer: QuantizedLayer, errors: Mapping[str, float]) -> LayerRecord:
    return LayerRecord(
        name=layer.name, scheme=layer.scheme, bytes=layer.bytes, weight_error=layer.weight_error,
        output_error=errors.get(layer.name, layer.output_error), outliers=layer.outliers,
        uncalibrated=layer.uncalibrated,
    )  # fmt: skip

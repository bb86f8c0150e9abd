"""Calibrated quantization beside round-to-nearest and HQQ, and GPTQ beside other programs' GPTQ, on a model trained
here.

    python -m benchmarks.calibrated_quantization [--json] [--run RUN] [--steps 800] [--strength 16]

Two models: as it was trained, and with outlier channels put in by rescaling that changes no logit
(benchmarks/quantization_table.py). All schemes see the same windows of the training text, and are scored on the same
held-out ones. GPTQ is also run with its rounding of one matrix done by

    textbook         optimal brain quantization, column by column in fp64, the inverse of what is left computed anew
    llm-compressor   its `quantize_weight`, where the package is installed

with the same scales, the same inputs and the same order of columns.
"""

import argparse
import copy
import importlib
import importlib.util
import json
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import meshwright as mw
from benchmarks.quantization_table import Codes, inject, layers, trained
from meshwright.compress import calibrated_methods
from meshwright.compress.bit_budget import choose_within, ladder
from meshwright.compress.calibrated_model import calibrate
from meshwright.compress.original import OriginalModel
from meshwright.compress.quality import Quality, compare, measure_groups
from meshwright.formats.quantized.interface import QuantizedModel
from meshwright.kernels.quantized.matrix import QuantizedMatrix, nearest
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model import Transformer
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme
from meshwright.training.step.batches import Batch
from meshwright.verbs.quantize.answer import first_batches
from meshwright.verbs.quantize.passes import quantization_text

PLAIN = ("int4-rtn", "int4-hqq", "int4-awq", "int4-gptq", "int4-awq-gptq", "int3", "int3-gptq", "int8", "int8-smooth")
STRONG = ("int4-rtn", "int4-hqq", "int4-awq", "int4-gptq", "int4-awq-gptq", "int8", "int8-smooth")
MIXED = "mixed gptq"
"""Bits chosen for each matrix, with the bytes of int4-gptq."""
PEER = "llmcompressor"
Columns = Callable[..., Tensor]
"""As calibrated_methods.quantize_columns."""


@dataclass(frozen=True, slots=True)
class Row:
    """One scheme's quality."""

    kl: float
    kl_error: float
    top1: float
    perplexity: float
    seconds: float
    """To quantize."""


def textbook(weight: Tensor, gram: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Codes by optimal brain quantization in the order of inputs' strength (arXiv:2210.17323, eq. 2 and 3)."""
    wide, damped = weight.double(), gram.double()
    damped = damped + calibrated_methods.DAMPING * damped.diagonal().mean() * torch.eye(
        len(damped), dtype=torch.float64
    )
    remaining = gram.diagonal().argsort(descending=True, stable=True)
    group = scheme.group or weight.shape[1]
    rounded = torch.empty_like(wide)
    while len(remaining):
        column = int(remaining[0])
        inverse = torch.linalg.inv(damped[remaining][:, remaining])
        scale = scales[:, column // group].double()
        zero = torch.zeros_like(scale) if zeros is None else zeros[:, column // group].double()
        low, high = (
            (1 - 2 ** (scheme.bits - 1), 2 ** (scheme.bits - 1) - 1) if zeros is None else (0, 2**scheme.bits - 1)
        )
        rounded[:, column] = ((wide[:, column] / scale + zero).round().clamp(low, high) - zero) * scale
        error = (wide[:, column] - rounded[:, column]) / inverse[0, 0]
        wide[:, remaining] -= error.unsqueeze(1) * inverse[0]
        remaining = remaining[1:]
    return nearest(scheme, rounded, scales, zeros)


def peer() -> Columns | None:
    """llm-compressor's rounding of one matrix; None where it is not installed. Its modules are loaded without those
    of its packages, which need all of its dependencies."""
    spec = importlib.util.find_spec(PEER)
    if spec is None or spec.origin is None:
        return None
    for name in (PEER, f"{PEER}.modifiers", f"{PEER}.modifiers.gptq"):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(spec.origin).parent.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    theirs: Any = importlib.import_module(f"{PEER}.modifiers.gptq.gptq_quantize")
    quantization: Any = importlib.import_module("compressed_tensors.quantization")

    def columns(weight: Tensor, gram: Tensor, scheme: Scheme, scales: Tensor, zeros: Tensor | None) -> Tensor:
        assert zeros is not None and scheme.zeros == "whole"
        arguments = quantization.QuantizationArgs(
            num_bits=scheme.bits, symmetric=False, strategy="group", group_size=scheme.group, actorder="weight"
        )
        shifted = (zeros - 2 ** (scheme.bits - 1)).unsqueeze(0)
        rounded, *_ = theirs.quantize_weight(
            weight.clone().unsqueeze(0), gram.clone().unsqueeze(0), scales.unsqueeze(0), shifted, None, arguments
        )
        return nearest(scheme, rounded[0], scales, zeros)

    return columns


@torch.no_grad()
def quantized(model: Transformer, schemes: Mapping[str, Scheme], batches: Sequence[Batch]) -> Transformer:
    """A copy whose matrices are codes and scales, by the same code as `meshwright quantize`."""
    rounded = copy.deepcopy(model)
    if any(scheme.calibrated for scheme in schemes.values()):
        weights = dict(model.named_parameters())
        original = OriginalModel(
            shape=model.shape, dtype=torch.float32, tokenizer=None, chat_template=None, generation=None, dropout=0.0,
            weights=lambda dtype: iter(weights.items()),
        )  # fmt: skip
        described = QuantizedModel(shape=model.shape, schemes=schemes, outlier_columns={}, dtype=torch.float32)
        with tempfile.TemporaryDirectory() as made:
            parts = dict(calibrate(Path(made) / "q", original, described, batches, torch.float32).weights)
    else:
        parts = {name: quantize_matrix(name, model.get_parameter(name), scheme) for name, scheme in schemes.items()}
    for name, part in parts.items():
        if isinstance(part, QuantizedMatrix):
            layers(rounded)[name].lora = Codes(part)
        else:
            rounded.get_parameter(name).copy_(part)
    return rounded


def table(
    model: Transformer, names: Sequence[str], batches: Sequence[Batch], scored: Sequence[Batch]
) -> dict[str, Row]:
    """Of one model, each scheme."""
    return {name: measured(model, uniform(model, SCHEMES[name]), batches, scored) for name in names}


def uniform(model: Transformer, scheme: Scheme) -> dict[str, Scheme]:
    """One scheme for all matrices."""
    return dict.fromkeys(quantizable(model.shape), scheme)


def mixed(model: Transformer, scheme: Scheme, batches: Sequence[Batch]) -> dict[str, Scheme]:
    """Bits of each matrix, chosen so that codes and scales have no more bytes than with one scheme for all."""
    rungs, names = ladder(scheme), list(quantizable(model.shape))
    groups = measure_groups(model, names, rungs, first_batches(batches))
    scheme_rung = next(number for number, rung in enumerate(rungs) if rung.bits == scheme.bits)
    budget = sum(group.choices[scheme_rung].bytes for group in groups)
    numbers = choose_within([group.choices for group in groups], budget)
    rung_by_matrix = {name: rungs[n] for group, n in zip(groups, numbers, strict=True) for name in group.names}
    return {name: rung_by_matrix[name] for name in names}


def measured(
    model: Transformer, schemes: Mapping[str, Scheme], batches: Sequence[Batch], scored: Sequence[Batch]
) -> Row:
    """Of one model."""
    started = time.perf_counter()
    after = quantized(model, schemes, batches)
    seconds = time.perf_counter() - started
    quality: Quality = compare(model, after, scored)
    return Row(quality.kl, quality.kl_error, quality.top1, quality.perplexity_after, seconds)


def others(model: Transformer, batches: Sequence[Batch], scored: Sequence[Batch]) -> dict[str, Row]:
    """GPTQ by other programs."""
    rows = {}
    for name, columns in (("textbook", textbook), ("llm-compressor", peer())):
        if columns is not None:
            with patch.object(calibrated_methods, "quantize_columns", columns):
                rows[name] = measured(model, uniform(model, SCHEMES["int4-gptq"]), batches, scored)
    return rows


def shown(tables: dict[str, dict[str, Row]]) -> dict[str, float]:
    """The figures that claims read."""
    plain, strong, by_others = tables["as trained"], tables["with outliers"], tables["others"]
    gptq_kl = plain["int4-gptq"].kl
    figures = {
        "gptq_over_rtn": gptq_kl / plain["int4-rtn"].kl,
        "gptq_over_hqq": gptq_kl / plain["int4-hqq"].kl,
        "int3_top1": plain["int3-gptq"].top1,
        "awq_over_rtn": strong["int4-awq"].kl / strong["int4-rtn"].kl,
        "awq_gptq_over_gptq": strong["int4-awq-gptq"].kl / strong["int4-gptq"].kl,
        "smooth_over_int8": strong["int8-smooth"].kl / strong["int8"].kl,
        "mixed_over_uniform": plain[MIXED].kl / gptq_kl,
        "gptq_off_textbook": abs(gptq_kl / by_others["textbook"].kl - 1),
    }
    if "llm-compressor" in by_others:
        figures["gptq_over_llm_compressor"] = gptq_kl / by_others["llm-compressor"].kl
    return figures


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--run", type=Path, help="a run of a dense model, in place of training one")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--strength", type=float, default=16.0, help="of the outliers that are put in")
    parser.add_argument("--sequences", type=int, default=64, help="windows that are scored")
    parser.add_argument("--calibration", type=int, default=128, help="windows to calibrate on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        opened = mw.load(options.run) if options.run else trained(Path(made) / "run", options.steps)
        text = quantization_text(opened, None, options.sequences, options.calibration)
        model, both = opened.model, (text.calibration, text.scored)
        chosen_bits = mixed(model, SCHEMES["int4-gptq"], text.calibration)
        tables = {
            "as trained": table(model, PLAIN, *both) | {MIXED: measured(model, chosen_bits, *both)},
            "with outliers": table(inject(model, options.strength), STRONG, *both),
            "others": others(model, *both),
        }
    figures = shown(tables)
    if options.json:
        print(
            json.dumps(
                {"rows": {name: {k: asdict(v) for k, v in rows.items()} for name, rows in tables.items()}, **figures}
            )
        )
        return
    print("  ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    for name, rows in tables.items():
        print(f"\n{name:<16}{'KL':>12}{'±':>10}{'top 1':>9}{'perplexity':>12}{'seconds':>9}")
        for scheme, row in rows.items():
            print(
                f"{scheme:<16}{row.kl:>12.5f}{row.kl_error:>10.5f}{100 * row.top1:>8.2f}%{row.perplexity:>12.4f}"
                f"{row.seconds:>9.1f}"
            )


if __name__ == "__main__":
    main()

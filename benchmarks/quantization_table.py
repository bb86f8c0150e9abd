"""The lectures' table of 8-bit methods (LLM.int8(), arXiv:2208.07339, table 1) as a pattern, on a model trained here.

    python -m benchmarks.quantization_table [--json] [--run RUN] [--steps 800] [--scales 1,4,16,64,256] [--picture PNG]
        [--save FOLDER]

Large models have a few channels with activations many times larger than the rest. A small one has none, so they are put
in by rescaling that changes no logit: a channel times s, a power of two, and the weights that read it divided by s.

    norm gain of channel c * s            columns c of q, k, v or of gate, up / s
    row c of up * s                       column c of down / s
    row c of v * s                        columns of o that read it, of every query head of its group, / s

Then each of the paper's rows is a scheme of `meshwright quantize`. Matrices are those that the verb writes, products
those that `eval`, `generate` and `serve` run.
"""

import argparse
import copy
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from meshwright.compress.layer_inputs import column_peaks, outlier_columns
from meshwright.compress.quality import compare
from meshwright.formats.hub.directory import export_folder
from meshwright.interface.trained.trained_model import TrainedModel
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model import Transformer
from meshwright.model.layers import Linear, Matrix
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme

TRAINING = [
    "model.layers=4", "model.hidden=128", "model.heads=4", "model.kv_heads=2", "model.ffn=352",
    "model.max_positions=512", "data.path=stdlib", "data.tokenizer=bytes", "recipe.sequence=128",
    "recipe.global_batch=16", "recipe.learning_rate=3e-3",
]  # fmt: skip
CHANNELS = 2
"""With outliers, at each place that may have some."""
LLM = "LLM.int8()"
METHODS: Mapping[str, str] = {
    "absmax": "int8-tensor",
    "zero-point": "int8-zeropoint",
    "absmax row-wise": "int8-row",
    "absmax vector-wise": "int8",
    "zero-point vector-wise": "int8-vector-zeropoint",
    "row-wise + decomposition": "llm-int8-row",
    LLM: "llm-int8",
    f"zero-point {LLM}": "llm-int8-zeropoint",
}
"""Rows of the paper's table after fp32, and the scheme of each."""


@dataclass(slots=True)
class Codes:
    """A Weight (model/layers.py) that is a matrix as `quantize` writes it."""

    matrix: QuantizedMatrix
    adds_bias: bool = False

    def read(self, x: Tensor) -> Tensor:
        """The input."""
        return x

    def matrices(self, weight: Matrix) -> Sequence[Matrix]:
        """The codes."""
        return (self.matrix,)

    def sole_matrix(self, weight: Tensor) -> Tensor | None:
        """As Weight: never."""
        return None

    def combine(self, layer: Linear, x: Tensor, products: Sequence[Tensor], keys: Tensor | None = None) -> Tensor:
        """The product with them."""
        return products[0]


ORDERED = ("absmax", "zero-point", "absmax row-wise", "absmax vector-wise", "zero-point vector-wise", LLM)
"""Rows that fall in this order where outliers are strong."""


def layers(model: Transformer) -> dict[str, Linear]:
    """Those that are rounded, by the name of their weight."""
    linear_layers = {}
    for name in quantizable(model.shape):
        layer = model.get_submodule(name.removesuffix(".weight"))
        assert isinstance(layer, Linear), "the table is of a dense model"
        linear_layers[name] = layer
    return linear_layers


@torch.no_grad()
def inject(model: Transformer, scale: float, seed: int = 0) -> Transformer:
    """A copy with outlier channels. Of a dense gated model with RMS norms."""
    strong, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    shape = model.shape

    def chosen(width: int) -> list[int]:
        return torch.randperm(width, generator=generator)[:CHANNELS].tolist()

    block: Any
    for block in strong.blocks:
        attention, mlp = block.attention, block.mlp
        for norm, readers in ((block.attention_norm, ("q", "k", "v")), (block.mlp_norm, ("gate", "up"))):
            part = attention if readers[0] == "q" else mlp
            for channel in chosen(shape.hidden):
                norm.weight[channel] *= scale
                for reader in readers:
                    getattr(part, reader).weight[:, channel] /= scale
        for channel in chosen(shape.ffn):
            mlp.up.weight[channel] *= scale
            mlp.down.weight[:, channel] /= scale
        for channel in chosen(shape.kv_heads * shape.head_dim):
            attention.v.weight[channel] *= scale
            head, within_head = divmod(channel, shape.head_dim)
            group = shape.heads // shape.kv_heads
            for query in range(head * group, (head + 1) * group):
                attention.o.weight[:, query * shape.head_dim + within_head] /= scale
    return strong


def rounded(model: Transformer, scheme: Scheme, columns: Mapping[str, Tensor]) -> Transformer:
    """A copy in codes of a scheme. `columns`: outlier columns of each matrix, which the scheme may not use."""
    copied = copy.deepcopy(model)
    for name, layer in layers(copied).items():
        unrounded = columns.get(name) if scheme.outliers == "calibrated" else None
        layer.lora = Codes(quantize_matrix(name, layer.weight, scheme, unrounded, torch.bfloat16))
    return copied


@torch.no_grad()
def neighbour_difference(model: Transformer, tokens: Tensor) -> float:
    """The largest |logit - logit| of rows (B, S) alone and among the others."""
    whole = model(tokens)
    return max(float((model(tokens[row : row + 1]) - whole[row : row + 1]).abs().max()) for row in range(len(tokens)))


def table(opened: TrainedModel, scales: Sequence[float], sequences: int) -> dict[str, object]:
    """All rows, and what they show."""
    model, held_out = opened.model, replace(opened.held_out_rows(None, sequences + 8), at_once=8)
    calibration, *scored = list(held_out.batches(torch.device("cpu")))
    dynamic = replace(SCHEMES["llm-int8"], outliers="threshold")
    names, tokens = quantizable(model.shape), scored[0].tokens
    rows: dict[str, dict[str, float]] = {}
    facts: dict[str, dict[str, float]] = {}
    for scale in scales:
        strong = inject(model, scale)
        exact = compare(model, strong, scored)
        columns = outlier_columns(column_peaks(strong, [calibration], names), dynamic.threshold)
        rows[f"{scale:g}"] = {"fp32": exact.perplexity_after} | {
            row: compare(strong, rounded(strong, SCHEMES[name], columns), scored).perplexity_after
            for row, name in METHODS.items()
        }
        facts[f"{scale:g}"] = {
            "injection_kl": exact.kl,
            "columns": sum(map(len, columns.values())) / sum(size[-1] for size in names.values()),
            "neighbours_calibrated": neighbour_difference(rounded(strong, SCHEMES["llm-int8"], columns), tokens),
            "neighbours_threshold": neighbour_difference(rounded(strong, dynamic, {}), tokens),
        }
    return {"perplexity": rows, "facts": facts, **shown(rows, facts)}


def shown(rows: Mapping[str, Mapping[str, float]], facts: Mapping[str, Mapping[str, float]]) -> dict[str, object]:
    """The figures that claims read."""
    figures: dict[str, object] = {
        "neighbours": max(facts_of_scale["neighbours_calibrated"] for facts_of_scale in facts.values())
    }
    for scale, row in rows.items():
        order = [row[name] for name in ORDERED]
        figures[f"ordered_{scale}"] = int(all(worse > better for worse, better in pairwise(order)))
        figures[f"gap_{scale}"] = abs(row[LLM] / row["fp32"] - 1)
        figures[f"worst_{scale}"] = max(row.values()) / row["fp32"] - 1
    return figures


def save(opened: TrainedModel, scale: float, folder: Path) -> None:
    """Write the model with outliers of a strength as a Hugging Face folder, for `meshwright quantize`."""
    assert opened.tokenizer is not None
    export_folder(
        folder, model_tensors=inject(opened.model, scale).state_dict().items(), shape=opened.model.shape,
        tokenizer=opened.tokenizer, dtype=torch.float32, chat_template=None,
    )  # fmt: skip
    print(f"{folder}: outliers {scale:g} times as strong; read it with `meshwright quantize {folder} ...`")


COLOURS = ("#c2354f", "#d9661f", "#b0892b", "#1f5fa8", "#8a4fae", "#808080", "#2a8a57", "#15a0a0")
"""Of METHODS."""


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """A PNG of perplexity by strength, one line for each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.6), layout="constrained", facecolor="white")
    axes, rows = figure.subplots(), figures["perplexity"]
    strengths = [float(scale) for scale in rows]
    exact = next(iter(rows.values()))["fp32"]
    for name, colour in zip(METHODS, COLOURS, strict=True):
        lost = [max(100 * (row[name] / exact - 1), 1e-3) for row in rows.values()]
        axes.plot(strengths, lost, color=colour, marker="o", linewidth=2, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(strengths, [f"{scale:g}x" for scale in strengths])
    axes.set_xlabel("injected outlier strength (1x: the model as trained)")
    axes.set_ylabel("perplexity above fp32, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    axes.set_title("8-bit weights and activations: outliers decide", loc="left")
    figure.savefig(path, format="png", dpi=140)


def trained(folder: Path, steps: int) -> TrainedModel:
    """A model of 0.9M parameters on the Python standard library."""
    more = [f"recipe.steps={steps}", f"run={folder}", "recipe.eval_every=0", f"recipe.checkpoint_every={steps}"]
    mw.train(*TRAINING, *more, dry_run=False, watchers=())
    return mw.load(folder)


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--run", type=Path, help="a run of a dense model, in place of training one")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--scales", default="1,4,16,64,256")
    parser.add_argument("--save", type=Path, help="write the model with the strongest outliers as a folder, and end")
    parser.add_argument("--picture", type=Path, help="draw the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    scales = [float(scale) for scale in options.scales.split(",")]
    with tempfile.TemporaryDirectory() as made:
        opened = mw.load(options.run) if options.run else trained(Path(made) / "run", options.steps)
        if options.save:
            save(opened, max(scales), options.save)
            return
        figures = table(opened, scales, options.sequences)
    if options.picture:
        draw(figures, options.picture)
    if options.json:
        print(json.dumps(figures))
        return
    print(f"logits of a sample alone and among others differ by at most {figures['neighbours']:g} (calibrated columns)")
    rows = figures["perplexity"]
    assert isinstance(rows, dict)
    print(f"\n{'perplexity, by strength of outliers':38}" + "".join(f"{scale:>12}" for scale in rows))
    for name in next(iter(rows.values())):
        print(f"{name:38}" + "".join(f"{row[name]:>12.4f}" for row in rows.values()))
    for scale, fact in figures["facts"].items():  # type: ignore[attr-defined]  # as `table` makes it
        print(
            f"strength {scale}: {100 * fact['columns']:.2f} % of columns in 16 bit; logits by neighbours: calibrated "
            f"{fact['neighbours_calibrated']:g}, threshold {fact['neighbours_threshold']:.3g}"
        )


if __name__ == "__main__":
    main()

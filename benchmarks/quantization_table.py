"""The lectures' table of 8-bit methods (LLM.int8(), arXiv:2208.07339, table 1) as a pattern, on a model trained here.

    python -m benchmarks.quantization_table [--json] [--run RUN] [--steps 800] [--scales 1,4,16,64,256] [--picture PNG]

Large models have a few channels with activations many times larger than the rest. A small one has none, so they are put
in by rescaling that changes no logit: a channel times s, a power of two, and the weights that read it divided by s.

    norm gain of channel c * s            columns c of q, k, v or of gate, up / s
    row c of up * s                       column c of down / s
    row c of v * s                        columns of o that read it, of every query head of its group, / s

Then each method rounds weights and activations of all matrices between hidden states to 8 bits, as the lecture has it.
"""

import argparse
import copy
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import meshwright as mw
from meshwright.compress.layer_inputs import column_peaks, outlier_columns
from meshwright.compress.quality import compare
from meshwright.interface.trained.trained_model import TrainedModel
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.kernels.quantized.rounding import Quantized, Share, absmax, product, zero_point
from meshwright.model import Transformer
from meshwright.model.layers import Linear, Matrix
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme
from meshwright.training.step.batches import Batch

TRAINING = [
    "model.layers=4", "model.hidden=128", "model.heads=4", "model.kv_heads=2", "model.ffn=352",
    "model.max_positions=512", "data.path=stdlib", "data.tokenizer=bytes", "recipe.sequence=128",
    "recipe.global_batch=16", "recipe.learning_rate=3e-3",
]  # fmt: skip
CHANNELS = 2
"""With outliers, at each place that may have some."""
LLM = "LLM.int8()"
Round = Callable[[Tensor], Quantized]


@dataclass(slots=True)
class Rounded:
    """A Weight (model/layers.py): the product of activations and weights that were both rounded."""

    weight: Quantized
    of_x: Round
    adds_bias: bool = False

    def read(self, x: Tensor) -> Tensor:
        """The input."""
        return x

    def matrices(self, weight: Matrix) -> Sequence[Matrix]:
        """None: the product is its own."""
        return ()

    def sole_matrix(self, weight: Tensor) -> Tensor | None:
        """As Weight: never."""
        return None

    def combine(self, layer: Linear, x: Tensor, products: Sequence[Tensor], keys: Tensor | None = None) -> Tensor:
        """x (..., in) -> (..., out)."""
        outputs = product(self.of_x(x.reshape(-1, x.shape[-1])), self.weight)
        return outputs.view(*x.shape[:-1], -1)


@dataclass(slots=True)
class Decomposed:
    """The same with a matrix as `quantize` writes it."""

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


def rounding(how: Callable[..., Quantized], share: Share) -> Round:
    """Of a matrix to 8 bits."""
    return lambda x: how(x, 8, share)


METHODS: Mapping[str, tuple[Round, Round]] = {
    "absmax": (rounding(absmax, "tensor"), rounding(absmax, "tensor")),
    "zero-point": (rounding(zero_point, "tensor"), rounding(zero_point, "tensor")),
    "absmax row-wise": (rounding(absmax, "row"), rounding(absmax, "tensor")),
    "absmax vector-wise": (rounding(absmax, "row"), rounding(absmax, "row")),
    "zero-point vector-wise": (rounding(zero_point, "row"), rounding(zero_point, "row")),
}
"""(of activations, of weights), in the order of the lecture."""


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


def rounded(model: Transformer, of_x: Round, of_weight: Round) -> Transformer:
    """A copy by one of METHODS."""
    copied = copy.deepcopy(model)
    for layer in layers(copied).values():
        layer.lora = Rounded(of_weight(layer.weight.detach()), of_x)
    return copied


def decomposed(model: Transformer, calibration: Sequence[Batch], scheme: Scheme) -> tuple[Transformer, float]:
    """A copy by LLM.int8(), and the share of columns that stay in 16 bit."""
    copied, columns = copy.deepcopy(model), {}
    if scheme.outliers == "calibrated":
        columns = outlier_columns(column_peaks(model, calibration, quantizable(model.shape)), scheme.threshold)
    for name, layer in layers(copied).items():
        matrix = quantize_matrix(name, layer.weight, scheme, columns.get(name), torch.bfloat16)
        layer.lora = Decomposed(matrix)
    outliers = sum(len(indices) for indices in columns.values())
    return copied, outliers / sum(size[-1] for size in quantizable(model.shape).values())


@torch.no_grad()
def neighbour_difference(model: Transformer, tokens: Tensor) -> float:
    """The largest |logit - logit| of rows (B, S) alone and among the others."""
    whole = model(tokens)
    return max(float((model(tokens[row : row + 1]) - whole[row : row + 1]).abs().max()) for row in range(len(tokens)))


def table(opened: TrainedModel, scales: Sequence[float], sequences: int) -> dict[str, object]:
    """All rows, and what they show."""
    model, held_out = opened.model, replace(opened.held_out_rows(None, sequences + 8), at_once=8)
    calibration, *scored = list(held_out.batches(torch.device("cpu")))
    static, dynamic = SCHEMES["llm-int8"], replace(SCHEMES["llm-int8"], outliers="threshold")
    tokens = scored[0].tokens
    rows: dict[str, dict[str, float]] = {}
    facts: dict[str, dict[str, float]] = {}
    for scale in scales:
        strong = inject(model, scale)
        exact = compare(model, strong, scored)
        split, share = decomposed(strong, [calibration], static)
        perplexities = {
            name: compare(strong, rounded(strong, *how), scored).perplexity_after for name, how in METHODS.items()
        }
        perplexities[LLM] = compare(strong, split, scored).perplexity_after
        rows[f"{scale:g}"] = {"fp32": exact.perplexity_after, **perplexities}
        facts[f"{scale:g}"] = {
            "injection_kl": exact.kl,
            "columns": share,
            "neighbours_calibrated": neighbour_difference(split, tokens),
            "neighbours_threshold": neighbour_difference(decomposed(strong, [], dynamic)[0], tokens),
        }
    return {"perplexity": rows, "facts": facts, **shown(rows, facts)}


def shown(rows: Mapping[str, Mapping[str, float]], facts: Mapping[str, Mapping[str, float]]) -> dict[str, object]:
    """The figures that claims read."""
    figures: dict[str, object] = {
        "neighbours": max(facts_of_scale["neighbours_calibrated"] for facts_of_scale in facts.values())
    }
    for scale, row in rows.items():
        order = [row[name] for name in (*METHODS, LLM)]
        figures[f"ordered_{scale}"] = int(all(facts_of_scale > two for facts_of_scale, two in pairwise(order)))
        figures[f"gap_{scale}"] = abs(row[LLM] / row["fp32"] - 1)
        figures[f"worst_{scale}"] = max(order) / row["fp32"] - 1
    return figures


COLOURS = ("#c2354f", "#d9661f", "#b0892b", "#1f5fa8", "#8a4fae", "#2a8a57")
"""Of METHODS and LLM.int8()."""


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """A PNG of perplexity by strength, one line for each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 4.6), layout="constrained", facecolor="white")
    axes, rows = figure.subplots(), figures["perplexity"]
    strengths = [float(scale) for scale in rows]
    exact = next(iter(rows.values()))["fp32"]
    for name, colour in zip((*METHODS, LLM), COLOURS, strict=True):
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
    parser.add_argument("--picture", type=Path, help="draw the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    scales = [float(scale) for scale in options.scales.split(",")]
    with tempfile.TemporaryDirectory() as made:
        opened = mw.load(options.run) if options.run else trained(Path(made) / "run", options.steps)
        figures = table(opened, scales, options.sequences)
    if options.picture:
        draw(figures, options.picture)
    if options.json:
        print(json.dumps(figures))
        return
    print(f"logits of a sample alone and among others differ by at most {figures['neighbours']:g} (calibrated columns)")
    rows = figures["perplexity"]
    assert isinstance(rows, dict)
    print("\nstrength " + "".join(f"{name:>24}" for name in next(iter(rows.values()))))
    for scale, row in rows.items():
        print(f"{scale:>8} " + "".join(f"{value:>24.4f}" for value in row.values()))
    for scale, fact in figures["facts"].items():  # type: ignore[attr-defined]  # as `table` makes it
        print(
            f"strength {scale}: {100 * fact['columns']:.2f} % of columns in 16 bit; logits by neighbours: calibrated "
            f"{fact['neighbours_calibrated']:g}, threshold {fact['neighbours_threshold']:.3g}"
        )


if __name__ == "__main__":
    main()

"""Memory by the formulas of papers, row by row, next to what this engine keeps for the same operation.

Activations: Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1, of a GPT in 16 bit with dropout, b sequences of s
positions, hidden size h and a heads: 34 s b h + 5 a s^2 b bytes per layer. Parameters of a GPT: h v + L (12 h^2 + 13 h)
+ 2 h, without learned positions. States: 16 bytes per parameter, in fp32 and in 16 bit with fp32 masters.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.planner.cost.block import LayerWork
from meshwright.planner.cost.micro_batch import LocalShape
from meshwright.spec.memory.held import WIDTHS
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.inventory import parameters


class PaperTerm(NamedTuple):
    """Operation of a layer, its bytes as `linear` x s b h + `scores` x a s^2 b, and the engine's tensors for it."""

    part: str
    operation: str
    linear: int
    scores: int
    tensors: tuple[str, ...]


LAYER = (
    PaperTerm("attention", "input of Q, K, V", 2, 0, ("attention norm output",)),
    PaperTerm("attention", "Q and K", 4, 0, (
        "queries, keys, values", "queries, keys, values in fp32", "queries, keys and values of all heads",
        "queries, keys before their norms", "low ranks", "normed low ranks", "queries", "keys",
    )),
    PaperTerm("attention", "softmax", 0, 2, ("softmax", "hidden pairs", "log-sum-exp")),
    PaperTerm("attention", "mask of the softmax's dropout", 0, 1, ("softmax mask and dropout",)),
    PaperTerm("attention", "softmax after dropout", 0, 2, ()),
    PaperTerm("attention", "V", 2, 0, ("keys and values",)),
    PaperTerm("attention", "input of the projection", 2, 0, (
        "attention output", "attention gate", "gated attention output",
    )),
    PaperTerm("attention", "mask of dropout", 1, 0, ("attention dropout mask",)),
    PaperTerm("MLP", "input of the first matrix", 2, 0, ("mlp norm output", "router input in fp32", "dispatched")),
    PaperTerm("MLP", "input of GELU", 8, 0, ("mlp up", "experts up", "shared up")),
    PaperTerm("MLP", "input of the second matrix", 8, 0, (
        "mlp activation", "mlp product", "experts activation", "shared activation",
    )),
    PaperTerm("MLP", "mask of dropout", 1, 0, ("mlp dropout mask",)),
    PaperTerm("norms", "input of the first", 2, 0, ("attention norm input",)),
    PaperTerm("norms", "input of the second", 2, 0, ("mlp norm input",)),
)  # fmt: skip
"""34 s b h + 5 a s^2 b. Tensors are those of planner/cost/activations.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRow:
    """One operation of a layer on paper and in this engine."""

    part: str
    operation: str
    formula: str
    numbers: str
    """The formula with numbers put in."""
    paper_bytes: int
    engine_bytes: int
    why: str
    """Reason why the engine keeps as much, more or less."""


def kept_rows(local: LocalShape, block: LayerWork) -> Iterator[KeptRow]:
    """Yield the rows of a layer without recomputation, then one for tensors that a GPT does not have."""
    sizes = {tensor.name: tensor.none for tensor in block.tensors if block.keeps_norms or tensor.part != "norm"}
    shape, s, b = local.shape, local.sequence, local.batch
    for term in LAYER:
        engine = round(sum(sizes.pop(name, 0.0) for name in term.tensors))
        if term.linear:
            formula, numbers = (
                f"{term.linear} s b h".removeprefix("1 "),
                f"{term.linear} x {s:,} x {b} x {shape.hidden:,}",
            )
            paper = term.linear * s * b * shape.hidden
        else:
            formula, numbers = (
                f"{term.scores} a s^2 b".removeprefix("1 "),
                f"{term.scores} x {shape.heads} x {s:,}^2 x {b}",
            )
            paper = term.scores * shape.heads * s**2 * b
        yield KeptRow(
            part=term.part, operation=term.operation, formula=formula, numbers=numbers.removeprefix("1 x "),
            paper_bytes=paper, engine_bytes=engine,
            why="the same" if engine == paper else _reason(term, local, engine, keeps_norms=block.keeps_norms),
        )  # fmt: skip
    if others := {name: size for name, size in sizes.items() if size}:
        yield KeptRow(
            part="others", operation="not in a GPT", formula="-", numbers="-", paper_bytes=0,
            engine_bytes=round(sum(others.values())), why=", ".join(others),
        )  # fmt: skip


def _reason(term: PaperTerm, local: LocalShape, engine: int, *, keeps_norms: bool) -> str:
    shape, routed = local.shape, "dispatched" in term.tensors and local.shape.moe is not None
    flash = local.stack.attention == "flash"
    wide = "fp32 takes 4 bytes per element" if local.width == 4 else ""
    if "dropout" in term.operation:
        if engine:
            return "plain attention keeps the mask and fp32 weights after it" if term.scores else wide
        return "no dropout" if not local.dropout else "kept with the mask" if not flash else "drawn again from a seed"
    match term.operation:
        case "softmax":
            return "flash attention: one fp32 sum per row" if flash else "plain attention: fp32, and the hidden pairs"
        case "Q and K" | "V" if shape.mla:
            return "latent attention: low ranks, and what is made of them" if engine else "with Q and K"
        case "V":
            return "with Q and K"
        case "Q and K":
            heads = f"{shape.heads} query and {shape.kv_heads} key heads of {shape.head_dim}, V too"
            return heads + ("" if flash else "; plain attention: fp32 copies")
        case "input of the projection" if local.width == 2:
            return f"{shape.heads} heads of {shape.mla.v_dim if shape.mla else shape.head_dim}"
        case "input of GELU" if shape.moe or local.gates == 2 or shape.ffn != 4 * shape.hidden:
            width = (
                f"{shape.moe.top_k + shape.moe.shared_experts} experts of {shape.moe.ffn:,}"
                if shape.moe
                else f"{shape.ffn:,}"
            )
            return f"{'SwiGLU: 2 matrices' if local.gates == 2 else 'one matrix'} of {width}"
        case "input of the second matrix" if not engine:
            return "the backward pass makes it from the row above"
        case "input of the second matrix":
            return "width of the row above" + (", and its parts" if local.stack.activation_kept > 2 else "")
    if routed:
        return f"each token goes to {shape.moe.top_k} experts" if shape.moe else ""
    if not engine and not keeps_norms and "norm" in term.tensors[0]:
        return "compiled blocks make norms again"
    return wide or ("the norm computes in fp32" if engine else "the norm before it keeps enough")


@dataclass(frozen=True, slots=True)
class ComponentRow:
    """Parameters of one component."""

    component: str
    formula: str
    """Formula of a GPT. Empty for others."""
    formula_count: int
    count: int
    """Parameters in this package's inventory."""


def component_rows(shape: ModelShape) -> list[ComponentRow]:
    """Return N by component."""
    counts: Counter[str] = Counter()
    for parameter in parameters(shape):
        counts["positions" if "position" in parameter.name else parameter.group] += parameter.numel
    h, layers, v = shape.hidden, shape.layers, shape.vocab
    gpt = {
        "embedding": ("h v", h * v), "attention": ("L (4 h^2 + 4 h)", layers * (4 * h * h + 4 * h)),
        "mlp": ("L (8 h^2 + 5 h)", layers * (8 * h * h + 5 * h)), "norm": ("L 4 h + 2 h", layers * 4 * h + 2 * h),
    }  # fmt: skip
    formulas = gpt if is_gpt(shape) else {}
    return [ComponentRow(name, *formulas.get(name, ("", 0)), count) for name, count in counts.items()]


def is_gpt(shape: ModelShape) -> bool:
    """Return whether h v + L (12 h^2 + 13 h) + 2 h counts this model, learned positions aside."""
    biased = shape.qkv_bias and shape.out_bias and shape.mlp_bias
    plain = shape.moe is None and shape.mla is None and shape.unbuilt is None and shape.lora is None
    square = shape.kv_heads == shape.heads and shape.heads * shape.head_dim == shape.hidden
    return plain and biased and square and shape.tied and shape.norm == "layernorm" and shape.ffn == 4 * shape.hidden


def state_rows(count: int, precisions: Sequence[str] = ("fp32", "bf16")) -> dict[str, dict[str, int]]:
    """Return bytes of weights, gradients, masters and moments of `count` parameters, by precision: 16 N each time."""
    rows: dict[str, dict[str, int]] = {}
    for precision in precisions:
        widths = WIDTHS[precision]
        per = {"weights": widths.parameter, "gradients": widths.gradient, "masters": widths.master, "moments": 8}
        rows[precision] = {name: width * count for name, width in per.items()}
    return rows

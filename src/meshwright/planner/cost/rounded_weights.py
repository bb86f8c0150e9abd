"""What weights that are rounded in every product (recipe.fake_quantize) add to a stage: a rounded copy of each matrix
is kept from its pass forward to its pass back. Layers that are computed again make theirs again, all of one layer's at
once. Rounding passes over memory in each pass forward. Tensor-parallel ranks find some scales together."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from meshwright.planner.cost.activations import HeadWidths
from meshwright.planner.cost.micro_batch_cost import MicroBatchCost
from meshwright.planner.cost.work import Exchange, Exchanges, KeptBytes, LayerOperation, MemoryPass
from meshwright.spec.boxes import Box, boxes_of
from meshwright.spec.inventory import Parameter
from meshwright.spec.layout import Layout
from meshwright.spec.quantization_schemes import PIECE, Scheme
from meshwright.spec.shape import ModelShape
from meshwright.spec.shared_scales import rounded_matrices, shared_scales

if TYPE_CHECKING:
    from meshwright.planner.cost.local_shape import Local

AGAIN = ("full", "all-but-attention")
"""Policies that make rounded copies again."""
FOUND_BYTES = 4
"""Of a number that scales are made of."""
ROWS = "rows"
PASSES = {
    "int8": (66.0, 70.0, 21), "int4-rtn": (80.1, 84.1, 52), "int4-sym": (76.6, 80.6, 29), "nf4": (56.6, 60.6, 22),
    "nf4-double": (57.9, 61.9, 41), "int4-hqq": (3456.0, 3460.0, 436), "int3": (3545.0, 3549.0, 445),
    ROWS: (48.0, 60.0, 12),
}  # fmt: skip
"""Bytes read and written for an element in fp32 and in 16 bits, and kernels for each PIECE of elements: counted on
meshwright.model.fake_quantized by tests/planner/test_rounded_weights.py. HQQ looks for its zeros 20 times. On a GPU one
Triton kernel restores codes of 4 bits: about a tenth less than is counted here."""


@cache
def _by_name(shape: ModelShape) -> dict[str, Parameter]:
    """One of each kind of matrix: attention.q, mlp.up, mlp.experts.up."""
    return {
        one.name.removeprefix(f"layers.{one.layer}.").removesuffix(".weight"): one for one in rounded_matrices(shape)
    }


@cache
def _boxes(shape: ModelShape, tp: int, ep: int) -> dict[str, Box]:
    """Of each kind of matrix, what the first rank holds."""
    layout = Layout(tp=tp, sp=ep > 1 and tp > 1, dp_shard=ep, ep=ep)
    return boxes_of(_by_name(shape).values(), shape, layout, 0)


@cache
def _elements(shape: ModelShape, tp: int, ep: int, routed: bool) -> int:
    """Of the matrices of a layer that a rank holds."""
    apart, boxes = ("mlp.experts.", "mlp.shared."), _boxes(shape, tp, ep)
    return sum(
        boxes[one.name].numel
        for name, one in _by_name(shape).items()
        if name.startswith("attention.") or name.startswith(apart) == routed
    )


def rounding(of: "Local", operations: Sequence[LayerOperation]) -> tuple[LayerOperation, ...]:
    """The operations of a layer, each product behind what rounds its matrices and its rows."""
    if of.rounded is None:
        return tuple(operations)
    return tuple(one for op in operations for one in (*_rounding(of, of.rounded, op.name), op))


def _rounding(of: "Local", scheme: Scheme, name: str) -> Iterator[LayerOperation]:
    """What comes before a product of that name; nothing where it has no matrix that is rounded."""
    part, _, last = name.rpartition(" ")
    matrices = {"qkv": ("q", "k", "v"), "up": ("gate", "up")[2 - of.gates :]}.get(last, (last,))
    where = {"": "attention.", "mlp": "mlp.", "experts": "mlp.experts.", "shared": "mlp.shared."}.get(part)
    known = [one for one in (_by_name(of.shape).get(f"{where}{one}") for one in matrices) if one is not None]
    if not known:
        return
    tokens = of.tokens * (of.shape.moe.top_k if part == "experts" and of.shape.moe else 1)
    boxes = _boxes(of.shape, of.tp, of.ep)
    passes = [_pass_over(scheme.name, boxes[one.name].numel, of.width) for one in known]
    shared = [shared_scales(one, of.shape, scheme, of.tp, of.ep) for one in known] if of.tp > 1 else []
    numbers = [float(one.numbers) for one in shared if one.numbers]
    if scheme.activations == "int8":
        passes.append(_pass_over(ROWS, tokens * boxes[known[0].name].sizes[-1], of.width))
        numbers += [tokens] if any(one.rows for one in shared) else []
    together = tuple(Exchange("tp", "all-reduce", number * FOUND_BYTES) for number in numbers)
    yield LayerOperation(
        name=f"rounding of {name}", forward=tuple(passes), exchanges=Exchanges(together, ()), again=True
    )


def _pass_over(what: str, elements: float, width: float) -> MemoryPass:
    fp32, narrow, launches = PASSES[what]
    return MemoryPass(elements * (narrow if width < 4 else fp32), launches * max(1, round(elements / PIECE)))


def kept(of: "Local", widths: HeadWidths, routed: bool, plain: Sequence[KeptBytes]) -> tuple[KeptBytes, ...]:
    """What a layer keeps, of what it keeps where nothing is rounded: of activations that are rounded, rounded copies.
    No norm made these, and no kernel makes the product of a gated MLP again."""
    if of.rounded is None or of.rounded.activations == "same":
        return tuple(plain)
    shape, moe = of.shape, of.shape.moe
    inner = moe.shared_experts * moe.ffn if routed and moe else 0 if routed else shape.ffn
    gated = of.tokens * inner / of.tp * of.width * (of.gates == 2)
    more = (("rounded attention output", of.tokens * widths.out * of.width), ("rounded product", gated))
    return (
        *(one._replace(of="") if one.of == "norm" else one for one in plain),
        *(KeptBytes(*one, 0.0) for one in more),
    )


def with_rounded(cost: MicroBatchCost, of: "Local", policies: Sequence[tuple[str, int, int]]) -> MicroBatchCost:
    """A stage; `policies`: how layers recompute, and how many dense and routed ones do so."""
    if of.rounded is None:
        return cost
    plain, routed = (_elements(of.shape, of.tp, of.ep, kind) * of.width for kind in (False, True))
    standing = sum(dense * plain + experts * routed for policy, dense, experts in policies if policy not in AGAIN)
    again = [(dense, experts) for policy, dense, experts in policies if policy in AGAIN]
    made = max((max(plain * (dense > 0), routed * (experts > 0)) for dense, experts in again), default=0)
    return cost._replace(
        kept_bytes=cost.kept_bytes + standing,
        mlp_bytes=cost.mlp_bytes + made,
        attention_bytes=cost.attention_bytes + made,
    )

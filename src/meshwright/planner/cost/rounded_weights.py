"""What weights that are rounded in every product (recipe.fake_quantize) add to a stage: a rounded copy of each matrix
is kept from its pass forward to its pass back. Layers that are computed again make theirs again, all of one layer's at
once. Tensor-parallel ranks find some scales together. The time of rounding itself is left out."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from meshwright.planner.cost.activations import HeadWidths
from meshwright.planner.cost.micro_batch_cost import MicroBatchCost
from meshwright.planner.cost.work import Exchange, KeptBytes, LayerOperation
from meshwright.spec.boxes import boxes_of
from meshwright.spec.inventory import Parameter
from meshwright.spec.layout import Layout
from meshwright.spec.shape import ModelShape
from meshwright.spec.shared_scales import rounded_matrices, shared_scales

if TYPE_CHECKING:
    from meshwright.planner.cost.local_shape import Local

AGAIN = ("full", "all-but-attention", "selective")
"""Policies that make rounded copies again."""
FOUND_BYTES = 4
"""Of a number that scales are made of."""


@cache
def _by_name(shape: ModelShape) -> dict[str, Parameter]:
    """One of each kind of matrix: attention.q, mlp.up, mlp.experts.up."""
    return {
        one.name.removeprefix(f"layers.{one.layer}.").removesuffix(".weight"): one for one in rounded_matrices(shape)
    }


@cache
def _elements(shape: ModelShape, tp: int, ep: int, routed: bool) -> int:
    """Of the matrices of a layer that a rank holds."""
    apart = ("mlp.experts.", "mlp.shared.")
    names = [name for name in _by_name(shape) if name.startswith("attention.") or name.startswith(apart) == routed]
    layout = Layout(tp=tp, sp=ep > 1 and tp > 1, dp_shard=ep, ep=ep)
    found = boxes_of((_by_name(shape)[name] for name in names), shape, layout, 0)
    return sum(box.numel for box in found.values())


def exchanging(of: "Local", operations: Sequence[LayerOperation]) -> tuple[LayerOperation, ...]:
    """The operations of a layer, with what ranks find together behind the products that need it."""
    if of.rounded is None or of.tp == 1:
        return tuple(operations)
    found = ((op, _together(of, op.name)) for op in operations)
    return tuple(
        replace(op, exchanges=op.exchanges._replace(forward=(*op.exchanges.forward, *more))) if more else op
        for op, more in found
    )


def _together(of: "Local", name: str) -> tuple[Exchange, ...]:
    """Of each matrix of a product, and of the rows that it multiplies."""
    part, _, last = name.rpartition(" ")
    matrices = {"qkv": ("q", "k", "v"), "up": ("gate", "up")[2 - of.gates :]}.get(last, (last,))
    where = {"": "attention.", "mlp": "mlp.", "experts": "mlp.experts.", "shared": "mlp.shared."}.get(part)
    known = [_by_name(of.shape).get(f"{where}{one}") for one in matrices]
    assert of.rounded is not None
    shared = [shared_scales(one, of.shape, of.rounded, of.tp, of.ep) for one in known if one is not None]
    numbers = [float(one.numbers) for one in shared if one.numbers]
    if of.rounded.activations == "int8" and any(one.rows for one in shared):
        numbers.append(of.tokens * (of.shape.moe.top_k if part == "experts" and of.shape.moe else 1))
    return tuple(Exchange("tp", "all-reduce", number * FOUND_BYTES) for number in numbers)


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

"""Cost of weights that are rounded in every product (recipe.fake_quantize).

A rounded copy of each matrix is kept from forward to backward. Layers that are recomputed round theirs again, all of
one layer at once. Each forward pass adds rounding passes over memory, and tensor-parallel ranks share some scales.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from meshwright.planner.cost.activations import HeadWidths
from meshwright.planner.cost.micro_batch_cost import MicroBatchCost
from meshwright.planner.cost.work import Exchange, Exchanges, KeptBytes, LayerOperation, MemoryPass
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.quantization_schemes import PIECE, Scheme
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.boxes import Box, boxes_of, rounded_matrices, shared_scales
from meshwright.spec.weights.inventory import Parameter

if TYPE_CHECKING:
    from meshwright.planner.cost.local_shape import LocalShape

AGAIN = ("full", "all-but-attention")
"""Policies that round copies again."""
FOUND_BYTES = 4
"""Bytes of a number from which scales are computed."""
ROWS = "rows"
PASSES = {
    "int8": (66.0, 70.0, 21), "int4-rtn": (80.1, 84.1, 52), "int4-sym": (76.6, 80.6, 29), "nf4": (56.6, 60.6, 22),
    "nf4-double": (57.9, 61.9, 41), "int4-hqq": (3456.0, 3460.0, 436), "int3": (3545.0, 3549.0, 445),
    ROWS: (48.0, 60.0, 12),
}  # fmt: skip
"""Bytes read and written per element, in fp32 and in 16 bits, and kernels per PIECE of elements.

Counted on meshwright.model.fake_quantized by tests/planner/test_rounded_weights.py. HQQ searches its zeros 20 times. On
a GPU one Triton kernel restores 4-bit codes: about a tenth less than is counted here.
"""


@cache
def _by_name(shape: ModelShape) -> dict[str, Parameter]:
    """Return one matrix of each kind: attention.q, mlp.up, mlp.experts.up."""
    matrices = rounded_matrices(shape)
    return {matrix.name.removeprefix(f"layers.{matrix.layer}.").removesuffix(".weight"): matrix for matrix in matrices}


@cache
def _boxes(shape: ModelShape, tp: int, ep: int) -> dict[str, Box]:
    """Return the first rank's part of each kind of matrix."""
    layout = Layout(tp=tp, sp=ep > 1 and tp > 1, dp_shard=ep, ep=ep)
    return boxes_of(_by_name(shape).values(), shape, layout, 0)


@cache
def _elements(shape: ModelShape, tp: int, ep: int, routed: bool) -> int:
    """Return the elements of a layer's matrices on a rank."""
    apart, boxes = ("mlp.experts.", "mlp.shared."), _boxes(shape, tp, ep)
    return sum(
        boxes[matrix.name].numel
        for name, matrix in _by_name(shape).items()
        if name.startswith("attention.") or name.startswith(apart) == routed
    )


def rounding(local: "LocalShape", operations: Sequence[LayerOperation]) -> tuple[LayerOperation, ...]:
    """Return a layer's operations, each product preceded by the rounding of its matrices and rows."""
    if local.rounded is None:
        return tuple(operations)
    return tuple(part for op in operations for part in (*_rounding(local, local.rounded, op.name), op))


def _rounding(local: "LocalShape", scheme: Scheme, name: str) -> Iterator[LayerOperation]:
    """Yield the rounding before the named product. Nothing if none of its matrices is rounded."""
    part, _, last = name.rpartition(" ")
    # one operation may multiply by several matrices, each rounded with scales of its own
    names = {"qkv": ("q", "k", "v"), "up": ("gate", "up")[2 - local.gates :]}.get(last, (last,))
    where = {"": "attention.", "mlp": "mlp.", "experts": "mlp.experts.", "shared": "mlp.shared."}.get(part)
    by_name = _by_name(local.shape)
    matrices = [by_name[f"{where}{name}"] for name in names if f"{where}{name}" in by_name]
    if not matrices:
        return
    tokens = local.tokens * (local.shape.moe.top_k if part == "experts" and local.shape.moe else 1)
    boxes = _boxes(local.shape, local.tp, local.ep)
    passes = [_pass_over(scheme.name, boxes[matrix.name].numel, local.width) for matrix in matrices]
    # where tensor parallelism cuts a row or block of scales, ranks agree on its largest number
    shared = (
        [shared_scales(matrix, local.shape, scheme, local.tp, local.ep) for matrix in matrices] if local.tp > 1 else []
    )
    numbers = [float(scales.numbers) for scales in shared if scales.numbers]
    if scheme.activations == "int8":
        passes.append(_pass_over(ROWS, tokens * boxes[matrices[0].name].sizes[-1], local.width))
        numbers += [tokens] if any(scales.rows for scales in shared) else []
    sums = tuple(Exchange("tp", "all-reduce", number * FOUND_BYTES) for number in numbers)
    yield LayerOperation(name=f"rounding of {name}", forward=tuple(passes), exchanges=Exchanges(sums, ()), again=True)


def _pass_over(what: str, elements: float, width: float) -> MemoryPass:
    fp32, narrow, launches = PASSES[what]
    return MemoryPass(elements * (narrow if width < 4 else fp32), launches * max(1, round(elements / PIECE)))


def with_rounded_activations(
    local: "LocalShape", widths: HeadWidths, routed: bool, plain: Sequence[KeptBytes]
) -> tuple[KeptBytes, ...]:
    """Return what a layer keeps if activations are rounded, from what it keeps otherwise.

    Rounded copies are not outputs of a norm, and no kernel recomputes the product of a gated MLP.
    """
    if local.rounded is None or local.rounded.activations == "same":
        return tuple(plain)
    shape, moe = local.shape, local.shape.moe
    inner = moe.shared_experts * moe.ffn if routed and moe else 0 if routed else shape.ffn
    gated = local.tokens * inner / local.tp * local.width * (local.gates == 2)
    more = (("rounded attention output", local.tokens * widths.out * local.width), ("rounded product", gated))
    return (
        *(tensor._replace(part="") if tensor.part == "norm" else tensor for tensor in plain),
        *(KeptBytes(*tensor, 0.0) for tensor in more),
    )


def with_rounded_weights(
    cost: MicroBatchCost, local: "LocalShape", policies: Sequence[tuple[str, int, int]]
) -> MicroBatchCost:
    """Add rounded copies to a stage. `policies`: (recompute policy, its dense layers, its routed layers)."""
    if local.rounded is None:
        return cost
    plain, routed = (_elements(local.shape, local.tp, local.ep, kind) * local.width for kind in (False, True))
    # copies live as long as activations do: until the backward pass, or within one repeated block
    standing = sum(dense * plain + experts * routed for policy, dense, experts in policies if policy not in AGAIN)
    again = [(dense, experts) for policy, dense, experts in policies if policy in AGAIN]
    made = max((max(plain * (dense > 0), routed * (experts > 0)) for dense, experts in again), default=0)
    return cost._replace(
        kept_bytes=cost.kept_bytes + standing,
        mlp_bytes=cost.mlp_bytes + made,
        attention_bytes=cost.attention_bytes + made,
    )

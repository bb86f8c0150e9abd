"""Numbers from which the explorer's page counts memory by itself: coefficients linear in tokens or in elements.

Bytes that a part of the model keeps are linear in the tokens of a rank. Masks of documents are also linear in the
positions of a sequence. Bytes of the head are the lower of two lines, since it runs chunk by chunk. Bytes of matrices
that are restored from codes are the higher of two. Bytes of states are linear in a rank's elements. The page counts all
else by itself (padding of shards, micro-batches in flight, gathered layers, the worst moment): explorer/memory.js and
explorer/peaks.js.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from math import isclose
from typing import Any

from meshwright.planner.cost.micro_batch import MicroBatchCost
from meshwright.planner.cost.stage_costs import CostsByPolicy
from meshwright.planner.cost.states import ElementCounts, pieces
from meshwright.planner.step.predict import Estimator
from meshwright.planner.time.update_passes import UPDATED_AT_ONCE_BYTES
from meshwright.spec.layout.layout import RECOMPUTE, Layout
from meshwright.spec.memory.matrix_exchange import ROUND_ELEMENTS
from meshwright.spec.rules.legal import divisors, layout_violations

FEW, MANY = 64, 2**26
"""Tokens at which the lines are taken: fewer than any chunk of the head has, and more."""
SIZES: dict[str, Callable[[MicroBatchCost], float]] = {
    "kept": lambda cost: cost.kept_bytes,
    "queued": lambda cost: cost.queued_bytes,
    "mlp": lambda cost: cost.mlp_bytes - cost.new_bytes,
    "attention": lambda cost: cost.attention_bytes,
    "after": lambda cost: cost.after_bytes,
    "outside": lambda cost: cost.outside_bytes,
    "inner": lambda cost: cost.inner_bytes,
    "logits_kept": lambda cost: cost.logits.kept_bytes,
    "logits_held": lambda cost: cost.logits.held_bytes,
    "logits_chunk": lambda cost: cost.logits.chunk,
    "logits_matrix": lambda cost: cost.logits.matrix,
}
"""Bytes of a part."""
PARTS = ("embedding", "dense", "routed", "head")
ELEMENTS = tuple(field.name for field in fields(ElementCounts))


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees that decide how a layer is cut."""

    tp: int
    sp: bool
    ep: int
    cp: int = 1
    pp: int = 1
    splits: bool = False
    """True if backward passes are split."""

    @property
    def key(self) -> str:
        """Key of the degrees on the page. For the tensors of a layer, only ep, cp and pp above 1 matter."""
        alone = self.tp == self.ep == self.cp == 1
        words = ("s" * self.sp, "e" * (self.ep > 1), "c" * (self.cp > 1), "p" * (self.pp > 1 and alone))
        return f"{self.tp}{''.join(words)}{'z' * self.splits}"

    @property
    def every(self) -> "tuple[Degrees, ...]":
        """These degrees, also with context parallelism, and if no other axis cuts a layer, with a pipeline.

        Compiled blocks of one device are counted in another way (spec/rules/passes.py).
        """
        pipelined = (replace(self, pp=2),) if self.tp == self.ep == 1 else ()
        return self, replace(self, cp=2), *pipelined

    @property
    def every_split(self) -> "tuple[Degrees, ...]":
        """The degrees with split backward passes, counted in another way if operands are rounded to 8 bits."""
        split = replace(self, pp=2, splits=True)
        return split, replace(split, cp=2)


def coefficients(estimator: Estimator, devices: int) -> dict[str, Any]:
    """Return the coefficients of every degree that the devices and the shape allow."""
    degrees = legal_degrees(estimator, devices)
    return {
        "sizes": list(SIZES),
        "kept": {
            cut.key: _parts(estimator, cut)
            for each in degrees
            for cut in (*each.every, *(each.every_split if estimator.recipe.products != "same" else ()))
        },
        "elements": ELEMENTS,
        "pieces": {
            f"{tp},{ep}": _pieces(estimator, tp, ep) for tp, ep in sorted({(each.tp, each.ep) for each in degrees})
        },
        "sums_products": _sums_products(estimator),
        "states": [
            [[_states(estimator, zero, pp, sums) for sums in (False, True)] for pp in (1, 2)] for zero in range(4)
        ],
    }


def legal_degrees(estimator: Estimator, devices: int) -> list[Degrees]:
    """Return the ways in which the devices may cut a layer of the shape, without context parallelism."""
    shape = (
        estimator.shape
        if estimator.shape.lora is None
        else replace(estimator.shape, lora=replace(estimator.shape.lora, dropout=0.0))
    )
    experts = divisors(shape.moe.experts) if shape.moe else (1,)
    degrees = []
    for tp in divisors(devices):
        if layout_violations(shape, replace(estimator.recipe, dropout=0.0), Layout(tp=tp)):
            continue
        degrees += [Degrees(tp, False, 1)] + ([Degrees(tp, True, 1)] if tp > 1 else [])
        degrees += [Degrees(tp, tp > 1, ep) for ep in experts if ep > 1]
    return degrees


def _parts(estimator: Estimator, degrees: Degrees) -> dict[str, dict[str, list[list[float]]]]:
    """Return recompute -> part -> numbers for each of SIZES.

    The numbers are (bytes, bytes a token, bytes a token and position of its sequence), or two lines (bytes, bytes a
    token). Of two lines the lower holds, or if the second rises faster, the higher.
    """
    at = {tokens: _costs(estimator, degrees, tokens) for tokens in (FEW, 2 * FEW, 3 * FEW, MANY, 2 * MANY)}
    return {
        recompute: {
            part: [_lines([(tokens, size(getattr(policies[recompute], part))) for tokens, policies in at.items()])
                   for size in SIZES.values()]
            for part in PARTS
        }
        for recompute in RECOMPUTE
    }  # fmt: skip


def _costs(estimator: Estimator, degrees: Degrees, tokens: int) -> CostsByPolicy:
    layout = Layout(
        dp_shard=degrees.ep, tp=degrees.tp, sp=degrees.sp, ep=degrees.ep, cp=degrees.cp, pp=degrees.pp, micro_batch=1,
        schedule="zb-h1" if degrees.splits else "1f1b",
    )  # fmt: skip
    recipe = replace(estimator.recipe, sequence=degrees.cp * tokens, global_batch=layout.dp, batch_ramp=())
    return replace(estimator.costs, recipe=recipe).policies(layout)


def _lines(points: list[tuple[int, float]]) -> list[float]:
    """Fit one or two lines through five points, of which the first three lie FEW apart."""
    (n0, y0), (n1, y1), (_, y), (n2, y2), (n3, y3) = points
    bend = (y - 2 * y1 + y0) / (2 * FEW**2)
    slope = (y1 - y0) / FEW - bend * (n0 + n1)
    first = [y0 - slope * n0 - bend * n0**2, slope, bend]
    if isclose(first[0] + slope * n3 + bend * n3**2, y3, rel_tol=1e-9, abs_tol=1e-6):
        return first if any((y0, y1)) else [0.0, 0.0, 0.0]
    slope, far = (y1 - y0) / (n1 - n0), (y3 - y2) / (n3 - n2)
    return [y0 - slope * n0, slope, y2 - far * n2, far]


def _pieces(estimator: Estimator, tp: int, ep: int) -> dict[str, list[Any]]:
    """Return part -> tensors of a rank.

    Each is (sizes, 1 for an expert's, number of such tensors, bytes of the moments, 1 if trained, bytes of its codes,
    lines of their run). Bytes of the moments are those of an element and of a block, and the length of a block.
    """
    tensors = pieces(estimator.shape, tp, ep, estimator.recipe.storage)
    return {
        field.name: [[sizes, int(expert), times, [moments.element_bytes, moments.block_bytes, moments.block or 1],
                      int(trained), codes, lines]
                     for (sizes, expert, moments, trained, codes, lines), times
                     in Counter(getattr(tensors, field.name)).items()]
        for field in fields(tensors)
    }  # fmt: skip


def _sums_products(estimator: Estimator) -> list[list[list[list[bool]]]]:
    """Return whether sums of gradients take products.

    By stage of ZeRO, then without and with a pipeline, in steps of one micro-batch and of several, with whole backward
    passes and with split ones.
    """
    return [
        [
            [
                [estimator.costs.sums_products(Layout(dp_shard=2, pp=pp, zero=zero, schedule=schedule), m)  # type: ignore[arg-type]  # words, checked by Layout
                 for schedule in ("1f1b", "zb-h1")]
                for m in (1, 2)
            ]
            for pp in (1, 2)
        ]
        for zero in range(4)
    ]  # fmt: skip


def _states(estimator: Estimator, zero: int, pp: int, sums: bool) -> dict[str, Any]:
    """Return phase -> kind -> bytes of an element of each of ELEMENTS. `sums`: gradients are sums of several."""
    layout = Layout(dp_shard=2 if sums else 1, pp=pp, zero=zero)  # type: ignore[arg-type]  # 0 to 3
    units = [ElementCounts(**{name: int(name == counted) for name in ELEMENTS}) for counted in ELEMENTS]
    made = [estimator.states(layout, unit, 1) for unit in units]
    return {
        "step": {kind: [bytes_.step[kind] for bytes_ in made] for kind in made[0].step},
        "update": {kind: [bytes_.update[kind] for bytes_ in made] for kind in made[0].update},
        "parameter_bytes": made[0].parameter_bytes,
        "gradient_bytes": made[0].gradient_bytes,
    }


def matrix_tables(estimator: Estimator, degrees: list[Degrees]) -> dict[str, Any] | None:
    """Return all tables that matrices.js reads. None = the recipe has AdamW."""
    costs = estimator.matrices
    if costs is None:
        return None
    layers, devices = costs.layers, estimator.cluster.devices
    return {
        "width": costs.width,
        "largest": layers.largest,
        "widest": layers.widest,
        "sizes": layers.sizes,
        "round": ROUND_ELEMENTS,
        "at_once_bytes": UPDATED_AT_ONCE_BYTES,
        "moved": {
            key: [costs.moved(layout, dense=1, routed=0), costs.moved(layout, dense=0, routed=1)]
            for key, layout in _layouts(sorted({(cut.tp, cut.ep) for cut in degrees}), devices)
        },
    }


def _layouts(cuts: list[tuple[int, int]], devices: int) -> Iterator[tuple[str, Layout]]:
    """Yield (`tp,ep,sharers,ranks of a stage`, a layout with these). sharers 1 = no ZeRO."""
    for tp, ep in cuts:
        for ranks in divisors(devices):
            for sharers in divisors(ranks // tp) if ranks % tp == 0 else ():
                spread = sharers if sharers > 1 else ranks // tp
                if spread * tp % ep == 0:
                    replicas = ranks // tp // spread
                    layout = Layout(
                        dp_replicate=replicas, dp_shard=spread, tp=tp, sp=ep > 1 and tp > 1, ep=ep,
                        zero=int(sharers > 1),  # type: ignore[arg-type]  # 0 or 1
                    )  # fmt: skip
                    yield f"{tp},{ep},{sharers},{ranks}", layout

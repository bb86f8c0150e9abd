"""What the explorer's page needs to count memory by itself: what is linear in tokens or in elements, as numbers.

Bytes that a part of the model keeps are linear in the tokens of a rank, masks of documents also in the positions of a
sequence; those of the head are the lower of two lines, since it runs chunk by chunk, and those of matrices that are
restored from codes the higher of two. Bytes of states are linear in a rank's elements. All else (padding of shards,
micro-batches in flight, gathered layers, the worst moment) the page counts by itself: explorer/memory.js and
explorer/peaks.js.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import isclose
from typing import Any

from meshwright.planner.cost.micro_batch_cost import MicroBatchCost
from meshwright.planner.cost.stage_costs import CostsByPolicy
from meshwright.planner.cost.states import ElementCounts, pieces
from meshwright.planner.step.predict import Estimator
from meshwright.spec.layout import RECOMPUTE, Layout
from meshwright.spec.legal import divisors, layout_violations

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
    """What decides how a layer is cut."""

    tp: int
    sp: bool
    ep: int
    cp: int = 1
    pp: int = 1
    splits: bool = False
    """Backward passes are split."""

    @property
    def key(self) -> str:
        """As the page writes it; of ep, cp and pp it matters to a layer's tensors only whether there is any."""
        alone = self.tp == self.ep == self.cp == 1
        words = ("s" * self.sp, "e" * (self.ep > 1), "c" * (self.cp > 1), "p" * (self.pp > 1 and alone))
        return f"{self.tp}{''.join(words)}{'z' * self.splits}"

    @property
    def every(self) -> "tuple[Degrees, ...]":
        """With context parallelism, too, and where no other axis cuts a layer with a pipeline: compiled blocks of one
        device are counted in another way (spec/compiled_blocks.py)."""
        pipelined = (replace(self, pp=2),) if self.tp == self.ep == 1 else ()
        return self, replace(self, cp=2), *pipelined

    @property
    def every_split(self) -> "tuple[Degrees, ...]":
        """The same of split backward passes, which are counted in another way where operands are rounded to 8 bits."""
        split = replace(self, pp=2, splits=True)
        return split, replace(split, cp=2)


def coefficients(of: Estimator, devices: int) -> dict[str, Any]:
    """For every degree that so many devices and the shape allow."""
    degrees = legal_degrees(of, devices)
    return {
        "sizes": list(SIZES),
        "kept": {
            one.key: _parts(of, one)
            for each in degrees
            for one in (*each.every, *(each.every_split if of.recipe.products != "same" else ()))
        },
        "elements": ELEMENTS,
        "pieces": {f"{tp},{ep}": _pieces(of, tp, ep) for tp, ep in sorted({(one.tp, one.ep) for one in degrees})},
        "sums_products": _sums_products(of),
        "states": [[[_states(of, zero, pp, sums) for sums in (False, True)] for pp in (1, 2)] for zero in range(4)],
    }


def legal_degrees(of: Estimator, devices: int) -> list[Degrees]:
    """How so many devices may cut a layer of the shape, without context parallelism."""
    shape = of.shape if of.shape.lora is None else replace(of.shape, lora=replace(of.shape.lora, dropout=0.0))
    experts = divisors(shape.moe.experts) if shape.moe else (1,)
    found = []
    for tp in divisors(devices):
        if layout_violations(shape, replace(of.recipe, dropout=0.0), Layout(tp=tp)):
            continue
        found += [Degrees(tp, False, 1)] + ([Degrees(tp, True, 1)] if tp > 1 else [])
        found += [Degrees(tp, tp > 1, ep) for ep in experts if ep > 1]
    return found


def _parts(of: Estimator, one: Degrees) -> dict[str, dict[str, list[list[float]]]]:
    """recompute -> part -> for each of SIZES (bytes, bytes a token, bytes a token and position of its sequence), or two
    lines (bytes, bytes a token) of which the lower holds, or, where the second rises faster, the higher."""
    at = {tokens: _costs(of, one, tokens) for tokens in (FEW, 2 * FEW, 3 * FEW, MANY, 2 * MANY)}
    return {
        recompute: {
            part: [_lines([(tokens, size(getattr(policies[recompute], part))) for tokens, policies in at.items()])
                   for size in SIZES.values()]
            for part in PARTS
        }
        for recompute in RECOMPUTE
    }  # fmt: skip


def _costs(of: Estimator, one: Degrees, tokens: int) -> CostsByPolicy:
    """By recompute policy."""
    layout = Layout(dp_shard=one.ep, tp=one.tp, sp=one.sp, ep=one.ep, cp=one.cp, pp=one.pp, micro_batch=1,
                    schedule="zb-h1" if one.splits else "1f1b")  # fmt: skip
    recipe = replace(of.recipe, sequence=one.cp * tokens, global_batch=layout.dp, batch_ramp=())
    alone = replace(of, recipe=recipe)
    return alone.policies(layout)


def _lines(points: list[tuple[int, float]]) -> list[float]:
    """The first three lie FEW apart."""
    (n0, y0), (n1, y1), (_, y), (n2, y2), (n3, y3) = points
    bend = (y - 2 * y1 + y0) / (2 * FEW**2)
    slope = (y1 - y0) / FEW - bend * (n0 + n1)
    first = [y0 - slope * n0 - bend * n0**2, slope, bend]
    if isclose(first[0] + slope * n3 + bend * n3**2, y3, rel_tol=1e-9, abs_tol=1e-6):
        return first if any((y0, y1)) else [0.0, 0.0, 0.0]
    slope, far = (y1 - y0) / (n1 - n0), (y3 - y2) / (n3 - n2)
    return [y0 - slope * n0, slope, y2 - far * n2, far]


def _pieces(of: Estimator, tp: int, ep: int) -> dict[str, list[Any]]:
    """part -> (sizes, 1 for an expert's, how many such tensors, bytes of the moments: of an element, of a block,
    and its length; 1 where it is trained; bytes of its codes and lines of their run, where it is held as such)."""
    found = pieces(of.shape, tp, ep, of.recipe.storage)
    return {
        field.name: [[sizes, int(expert), times, [one.element_bytes, one.block_bytes, one.block or 1],
                      int(trained), codes, lines]
                     for (sizes, expert, one, trained, codes, lines), times
                     in Counter(getattr(found, field.name)).items()]
        for field in fields(found)
    }  # fmt: skip


def _sums_products(of: Estimator) -> list[list[list[list[bool]]]]:
    """By stage of ZeRO, then without and with a pipeline, in steps of one micro-batch and of several, with whole
    backward passes and with split ones: whether sums of gradients take products."""
    return [
        [
            [
                [of.sums_products(Layout(dp_shard=2, pp=pp, zero=zero, schedule=schedule), m)  # type: ignore[arg-type]  # words, checked by Layout
                 for schedule in ("1f1b", "zb-h1")]
                for m in (1, 2)
            ]
            for pp in (1, 2)
        ]
        for zero in range(4)
    ]  # fmt: skip


def _states(of: Estimator, zero: int, pp: int, sums: bool) -> dict[str, Any]:
    """phase -> kind -> bytes of an element of each of ELEMENTS. `sums`: gradients are sums of several."""
    layout = Layout(dp_shard=2 if sums else 1, pp=pp, zero=zero)  # type: ignore[arg-type]  # 0 to 3
    units = [ElementCounts(**{name: int(name == one) for name in ELEMENTS}) for one in ELEMENTS]
    made = [of.states(layout, unit, 1) for unit in units]
    return {
        "step": {kind: [one.step[kind] for one in made] for kind in made[0].step},
        "update": {kind: [one.update[kind] for one in made] for kind in made[0].update},
        "parameter_bytes": made[0].parameter_bytes,
        "gradient_bytes": made[0].gradient_bytes,
    }

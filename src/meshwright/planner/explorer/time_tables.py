"""What the explorer's page needs to say about how long a step takes for any legal layout, as tables of seconds.

Seconds of a layer's passes are almost linear in the tokens of a rank and in the length of the sequence between two of
a few sizes: a table holds them for each pair of these. Seconds of data parallelism depend on four degrees and on the
layers that a rank holds. explorer/time.js adds them up; a test holds the sum against the planner's own step time.
Left out: idle steps of a schedule that no closed form counts, and what is not linear between two sizes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from meshwright.planner.cost.local_shape import local_shape
from meshwright.planner.cost.micro_batch_cost import MicroBatchCost
from meshwright.planner.cost.stage_costs import Costs, CostsByPolicy, costs
from meshwright.planner.cost.states import ElementCounts
from meshwright.planner.explorer.coefficients import Degrees
from meshwright.planner.explorer.legal_tables import SEQUENCES
from meshwright.planner.step.predict import Estimator
from meshwright.planner.time.collectives import StageContents, sharing
from meshwright.planner.time.update_passes import GradientSums, update_seconds
from meshwright.spec.held import WIDTHS
from meshwright.spec.layout import RECOMPUTE, Layout, Recompute
from meshwright.spec.legal import divisors

TOKENS = (1 / 16, 1 / 4, 1 / 2, 1, 4, 16)
"""Sizes at which passes are timed, times the recipe's sequence; close to each other where the host begins to wait."""
MANY = 200
"""Cuts of a layer beyond which every other length is left out, for the size of the page."""
STACK = ("hides_gradients", "hides_weights", "hides_sends", "send_s", "contention", "step_s", "micro_batch_s")
Known = dict[int, dict[tuple[object, ...], dict[str, MicroBatchCost]]]
"""Length of the sequence -> parts that were timed already."""
LARGE = 10**9
"""Elements of an optimizer step from which seconds per element are taken."""


def time_tables(of: Estimator, degrees: list[Degrees]) -> dict[str, Any]:
    """All that time.js reads; seconds, and seconds per byte or element."""
    devices, stack = of.cluster.devices, of.stack
    send = [of.links.send_seconds(size, devices // 2, 2) for size in (2**20, 2**30)]
    slope = (send[1] - send[0]) / (2**30 - 2**20)
    contexts = list(_with_context(degrees, devices))
    known: Known = {}
    sequences = sorted({*SEQUENCES[:: 2 if len(contexts) > MANY else 1], of.recipe.sequence})
    parts = ["dense"] if of.shape.routed_layers < of.shape.layers else []
    parts += ["routed"] if of.shape.routed_layers else []
    layers = {
        part: {
            _key(one): _layers(of, one, part, sequences, known) for one in contexts if part == "routed" or one.ep == 1
        }
        for part in parts
    }
    return {
        "tokens": _tokens(of),
        "sequences": sequences,
        "layers": layers,
        "ends": {_key(one): _ends(of, one, known) for one in degrees if one.ep == 1},
        "sharing": _sharing(of, sorted({(one.tp, one.ep) for one in degrees})),
        "send": [send[0] - slope * 2**20, slope],
        **_update(of),
        "per_node": of.links.per_node,
        "ranks_per_core": of.speeds.ranks_per_core,
        "ends_apart": stack.ends_apart,
        "policies": list(RECOMPUTE),
        "stack": {name: getattr(stack, name) for name in STACK},
    }


def _update(of: Estimator) -> dict[str, float]:
    """Of the optimizer: seconds of an element beside its moments, of a byte of these; of an element, widening its
    gradient, and adding that of one more micro-batch: to a sum of all, or to that of a shard."""
    width = WIDTHS[of.recipe.precision].gradient
    plain, beside = (
        update_seconds(of.speeds, of.stack, of.recipe, LARGE, size, width, at_once=of.stack.updates_at_once)
        for size in (0.0, LARGE)
    )
    widened, added, shards = (
        GradientSums(LARGE, LARGE, times, at_once).seconds(of.speeds, of.stack, of.recipe, width)
        for times, at_once in ((1, False), (2, False), (2, True))
    )
    return {
        "update_s": plain / LARGE,
        "moment_s": (beside - plain) / LARGE,
        "widened_s": widened / LARGE,
        "added_s": (added - widened) / LARGE,
        "shards_s": (shards - 2 * widened) / LARGE,
    }


def _with_context(degrees: list[Degrees], devices: int) -> Iterator[Degrees]:
    for one in degrees:
        for cp in divisors(devices // one.tp)[:12]:
            if (devices // one.tp) % one.ep == 0 or devices % one.ep == 0:
                yield replace(one, cp=cp)


def _key(one: Degrees) -> str:
    return f"{one.tp},{int(one.sp)},{one.cp},{one.ep}"


def _tokens(of: Estimator) -> list[int]:
    return [max(16, round(of.recipe.sequence * factor)) for factor in TOKENS]


def _timed(of: Estimator, one: Degrees, tokens: int, sequence: int, known: Known) -> CostsByPolicy:
    """By recompute policy, for so many tokens of a rank in sequences of this length, which need not come out even."""
    layout = Layout(dp_shard=one.ep, tp=one.tp, sp=one.sp, ep=one.ep, cp=one.cp, micro_batch=1)
    width, recipe = 4 if of.recipe.precision == "fp32" else 2, of.recipe
    counted = local_shape(
        of.shape,
        of.stack,
        layout,
        sequence,
        1,
        width,
        recipe.dropout,
        recipe.document_mask,
        of._gpu,
        recipe.products,
        recipe.traits.pairs,
        recipe.fake_quantize,
        of.document_tokens,
    )
    counted = replace(counted, batch=tokens * one.cp / sequence)  # type: ignore[arg-type]  # a share of a sequence
    return costs(counted, layout, of.speeds, of.links, known.setdefault(sequence, {}))


def _seconds(costs: Mapping[Recompute, MicroBatchCost]) -> tuple[float, ...]:
    """Forward, weights, inputs, exposed exchanges; then what each further policy adds to both of the last."""
    none, *others = (costs[policy] for policy in RECOMPUTE)
    found = [none.forward_s, none.weight_s, none.input_s, none.exchange_s]
    for some in others:
        found += [some.input_s - none.input_s, some.exchange_s - none.exchange_s]
    return tuple(found)


def _mean(of: Estimator, costs: Costs) -> MicroBatchCost:
    """Of a dense layer; of a model whose later layers have a window, the mean of both kinds."""
    dense = of.shape.layers - of.shape.routed_layers
    windowed = of.windowed(range(of.shape.layers))
    if not windowed or not dense:
        return costs.dense
    return MicroBatchCost().plus(costs.dense, 1 - windowed / dense).plus(costs.windowed, windowed / dense)


def _layers(
    of: Estimator, one: Degrees, part: str, sequences: list[int], known: Known
) -> list[list[float | list[float]]]:
    """Each of _seconds -> for each number of tokens microseconds of each length, or one number where all are equal."""
    found: list[list[float | list[float]]] = []
    for tokens in _tokens(of):
        rows = []
        for sequence in sequences:
            timed = _timed(of, one, tokens, sequence, known)
            policies = {policy: timed[policy] for policy in RECOMPUTE}
            parts = {policy: _mean(of, c) if part == "dense" else c.routed for policy, c in policies.items()}
            rows.append(_micro(_seconds(parts)))
        found.append([row[0] if len(set(row)) == 1 else list(row) for row in zip(*rows, strict=True)])
    return [list(row) for row in zip(*found, strict=True)]


def _ends(of: Estimator, one: Degrees, known: Known) -> dict[str, list[list[float]]]:
    """Embedding and head: for each number of tokens microseconds forward, weights, inputs, exchanges."""
    found: dict[str, list[list[float]]] = {"embedding": [], "head": []}
    for tokens in _tokens(of):
        timed = _timed(of, one, tokens, of.recipe.sequence, known)["none"]
        for part, kept in found.items():
            kept.append(_micro(_seconds(dict.fromkeys(RECOMPUTE, getattr(timed, part)))[:4]))
    return found


def _sharing(of: Estimator, cuts: list[tuple[int, int]]) -> dict[str, list[list[float]]]:
    """`tp,ep,sharers,replicas` -> of a dense layer, a routed one, the first end, the last, both: seconds of summing all
    gradients without ZeRO; with it of reducing, gathering and summing over replicas."""
    shape, devices = of.shape, of.cluster.devices
    layers = range(shape.layers)
    dense = next((n for n in layers if not shape.is_moe_layer(n)), None)
    routed = next((n for n in layers if shape.is_moe_layer(n)), None)
    parts = [
        StageContents((dense,) if dense is not None else (), False, False),
        StageContents((routed,) if routed is not None else (), False, False),
        *(StageContents((), *ends) for ends in ((True, False), (False, True), (True, True))),
    ]
    found = {}
    for tp, ep in cuts:
        for sharers in divisors(devices // tp) if devices % tp == 0 else ():
            if sharers * tp % ep:
                continue
            for replicas in divisors(devices // (tp * sharers)):
                plain = Layout(dp_replicate=replicas, dp_shard=sharers, tp=tp, sp=ep > 1 and tp > 1, ep=ep)
                found[f"{tp},{ep},{sharers},{replicas}"] = [_of_part(of, plain, part) for part in parts]
    return found


def _of_part(of: Estimator, plain: Layout, part: StageContents) -> list[float]:
    if not (part.layers or part.first or part.last):
        return [0.0] * 4
    none = ElementCounts(**{field.name: 0 for field in fields(ElementCounts)})
    word = of.states(plain, none, 2)
    summed = of.stack.gradient_exchange_bytes or word.gradient_bytes
    flat = of.stack.sharding == "flat"
    whole = sharing(of.shape, plain, part, of.links, word.parameter_bytes, summed, flat)
    shared = sharing(of.shape, replace(plain, zero=1), part, of.links, word.parameter_bytes, summed, flat)
    return [float(f"{seconds:.4g}") for seconds in (whole.reduce_s, *shared)]


def _micro(seconds: Iterable[float]) -> list[float]:
    """In microseconds, to three digits: shorter to write."""
    found = [float(f"{1e6 * one:.3g}") for one in seconds]
    return [int(one) if one == int(one) else one for one in found]

"""Tables of seconds from which the explorer's page counts the time of a step for any legal layout.

Seconds of a layer's passes are almost linear in the tokens of a rank and in the length of the sequence, between two of
a few sizes: a table holds them for each pair of these. Seconds of data parallelism depend on four degrees and on the
layers that a rank holds. explorer/time.js adds them up; a test compares the sum with the planner's own step time. Left
out: idle steps of a schedule that no closed form counts, and nonlinearity between two sizes.
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
from meshwright.planner.time.matrix_costs import UPDATED_AT_ONCE_BYTES
from meshwright.planner.time.update_passes import GradientSums, update_seconds
from meshwright.spec.layout.layout import RECOMPUTE, Layout, Recompute
from meshwright.spec.memory.held import WIDTHS
from meshwright.spec.memory.matrix_exchange import ROUND_ELEMENTS
from meshwright.spec.rules.legal import divisors

TOKENS = (1 / 16, 1 / 4, 1 / 2, 1, 4, 16)
"""Sizes at which passes are timed, times the recipe's sequence, closer where the host begins to wait."""
MANY = 200
"""Cuts of a layer beyond which every other length is left out, to limit the size of the page."""
STACK = ("hides_gradients", "hides_weights", "hides_sends", "send_s", "contention", "step_s", "micro_batch_s")
Known = dict[int, dict[tuple[object, ...], dict[str, MicroBatchCost]]]
"""Length of the sequence -> parts that are already timed."""
LARGE = 10**9
"""Elements of an optimizer step at which seconds per element are taken."""


def time_tables(estimator: Estimator, degrees: list[Degrees]) -> dict[str, Any]:
    """Return all tables that time.js reads: seconds, and seconds per byte or element."""
    devices, stack = estimator.cluster.devices, estimator.stack
    send = [estimator.links.send_seconds(size, devices // 2, 2) for size in (2**20, 2**30)]
    slope = (send[1] - send[0]) / (2**30 - 2**20)
    contexts = list(_with_context(degrees, devices))
    known: Known = {}
    sequences = sorted({*SEQUENCES[:: 2 if len(contexts) > MANY else 1], estimator.recipe.sequence})
    parts = ["dense"] if estimator.shape.routed_layers < estimator.shape.layers else []
    parts += ["routed"] if estimator.shape.routed_layers else []
    layers = {
        part: {
            _key(cut): _layers(estimator, cut, part, sequences, known)
            for cut in contexts
            if part == "routed" or cut.ep == 1
        }
        for part in parts
    }
    return {
        "tokens": _tokens(estimator),
        "sequences": sequences,
        "layers": layers,
        "ends": {_key(cut): _ends(estimator, cut, known) for cut in degrees if cut.ep == 1},
        "sharing": _sharing(estimator, sorted({(cut.tp, cut.ep) for cut in degrees})),
        "send": [send[0] - slope * 2**20, slope],
        **_update(estimator),
        "per_node": estimator.links.per_node,
        "ranks_per_core": estimator.speeds.ranks_per_core,
        "ends_apart": stack.ends_apart,
        "policies": list(RECOMPUTE),
        "stack": {name: getattr(stack, name) for name in STACK},
    }


def _update(estimator: Estimator) -> dict[str, float]:
    """Return the coefficients of the optimizer.

    Seconds of an element beside its moments, of a byte of these, of widening the gradient of an element, and of adding
    that of one more micro-batch: to a sum of all, or to that of a shard.
    """
    width = WIDTHS[estimator.recipe.precision].gradient
    plain, beside = (
        update_seconds(
            estimator.speeds,
            estimator.stack,
            estimator.recipe,
            LARGE,
            size,
            width,
            at_once=estimator.stack.updates_at_once,
        )
        for size in (0.0, LARGE)
    )
    widened, added, shards = (
        GradientSums(LARGE, LARGE, times, at_once).seconds(estimator.speeds, estimator.stack, estimator.recipe, width)
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
    for cut in degrees:
        for cp in divisors(devices // cut.tp)[:12]:
            if (devices // cut.tp) % cut.ep == 0 or devices % cut.ep == 0:
                yield replace(cut, cp=cp)


def _key(cut: Degrees) -> str:
    return f"{cut.tp},{int(cut.sp)},{cut.cp},{cut.ep}"


def _tokens(estimator: Estimator) -> list[int]:
    return [max(16, round(estimator.recipe.sequence * factor)) for factor in TOKENS]


def _timed(estimator: Estimator, cut: Degrees, tokens: int, sequence: int, known: Known) -> CostsByPolicy:
    """Return the costs by recompute policy of `tokens` in sequences of this length, whole or not."""
    layout = Layout(dp_shard=cut.ep, tp=cut.tp, sp=cut.sp, ep=cut.ep, cp=cut.cp, micro_batch=1)
    width, recipe = 4 if estimator.recipe.precision == "fp32" else 2, estimator.recipe
    counted = local_shape(
        estimator.shape,
        estimator.stack,
        layout,
        sequence,
        1,
        width,
        recipe.dropout,
        recipe.document_mask,
        estimator._gpu,
        recipe.products,
        recipe.traits.pairs,
        recipe.fake_quantize,
        estimator.document_tokens,
    )
    counted = replace(counted, batch=tokens * cut.cp / sequence)  # type: ignore[arg-type]  # a share of a sequence
    return costs(counted, layout, estimator.speeds, estimator.links, known.setdefault(sequence, {}))


def _seconds(costs: Mapping[Recompute, MicroBatchCost]) -> tuple[float, ...]:
    """Return forward, weights, inputs, exposed exchanges; then the addition of each further policy to the last two."""
    none, *others = (costs[word] for word in RECOMPUTE)
    seconds = [none.forward_s, none.weight_s, none.input_s, none.exchange_s]
    for policy in others:
        seconds += [policy.input_s - none.input_s, policy.exchange_s - none.exchange_s]
    return tuple(seconds)


def _mean(estimator: Estimator, costs: Costs) -> MicroBatchCost:
    """Return the cost of a dense layer. If later layers have a window: the mean of both kinds."""
    dense = estimator.shape.layers - estimator.shape.routed_layers
    windowed = estimator.windowed(range(estimator.shape.layers))
    if not windowed or not dense:
        return costs.dense
    return MicroBatchCost().plus(costs.dense, 1 - windowed / dense).plus(costs.windowed, windowed / dense)


def _layers(
    estimator: Estimator, cut: Degrees, part: str, sequences: list[int], known: Known
) -> list[list[float | list[float]]]:
    """Return for each of _seconds, by tokens, the microseconds of each length, or one number if all are equal."""
    columns: list[list[float | list[float]]] = []
    for tokens in _tokens(estimator):
        rows = []
        for sequence in sequences:
            timed = _timed(estimator, cut, tokens, sequence, known)
            policies = {policy: timed[policy] for policy in RECOMPUTE}
            parts = {policy: _mean(estimator, c) if part == "dense" else c.routed for policy, c in policies.items()}
            rows.append(_micro(_seconds(parts)))
        columns.append([row[0] if len(set(row)) == 1 else list(row) for row in zip(*rows, strict=True)])
    return [list(row) for row in zip(*columns, strict=True)]


def _ends(estimator: Estimator, cut: Degrees, known: Known) -> dict[str, list[list[float]]]:
    """Return for embedding and head, by number of tokens, microseconds forward, weights, inputs, exchanges."""
    ends: dict[str, list[list[float]]] = {"embedding": [], "head": []}
    for tokens in _tokens(estimator):
        timed = _timed(estimator, cut, tokens, estimator.recipe.sequence, known)["none"]
        for part, rows in ends.items():
            rows.append(_micro(_seconds(dict.fromkeys(RECOMPUTE, getattr(timed, part)))[:4]))
    return ends


def _sharing(estimator: Estimator, cuts: list[tuple[int, int]]) -> dict[str, list[list[float]]]:
    """Return `tp,ep,sharers,replicas` -> seconds of data parallelism of parts of a stage.

    Parts: a dense layer, a routed one, the first end, the last, both. Seconds: of summing all gradients without ZeRO;
    with it of reducing, gathering and summing over replicas.
    """
    shape, devices = estimator.shape, estimator.cluster.devices
    layers = range(shape.layers)
    dense = next((n for n in layers if not shape.is_moe_layer(n)), None)
    routed = next((n for n in layers if shape.is_moe_layer(n)), None)
    parts = [
        StageContents((dense,) if dense is not None else (), False, False),
        StageContents((routed,) if routed is not None else (), False, False),
        *(StageContents((), *ends) for ends in ((True, False), (False, True), (True, True))),
    ]
    seconds = {}
    for tp, ep in cuts:
        for sharers in divisors(devices // tp) if devices % tp == 0 else ():
            if sharers * tp % ep:
                continue
            for replicas in divisors(devices // (tp * sharers)):
                plain = Layout(dp_replicate=replicas, dp_shard=sharers, tp=tp, sp=ep > 1 and tp > 1, ep=ep)
                seconds[f"{tp},{ep},{sharers},{replicas}"] = [_of_part(estimator, plain, part) for part in parts]
    return seconds


def _of_part(estimator: Estimator, plain: Layout, part: StageContents) -> list[float]:
    if not (part.layers or part.first or part.last):
        return [0.0] * 4
    none = ElementCounts(**{field.name: 0 for field in fields(ElementCounts)})
    word = estimator.states(plain, none, 2)
    summed = estimator.stack.gradient_exchange_bytes or word.gradient_bytes
    flat = estimator.stack.sharding == "flat"
    whole = sharing(estimator.shape, plain, part, estimator.links, word.parameter_bytes, summed, flat)
    shared = sharing(estimator.shape, replace(plain, zero=1), part, estimator.links, word.parameter_bytes, summed, flat)
    return [float(f"{seconds:.4g}") for seconds in (whole.reduce_s, *shared)]


def _micro(seconds: Iterable[float]) -> list[float]:
    """Convert to microseconds with three digits, which are shorter to write."""
    microseconds = [float(f"{1e6 * each:.3g}") for each in seconds]
    return [int(each) if each == int(each) else each for each in microseconds]


SMALL_BYTES, LARGE_BYTES = 2**20, 2**30
"""Bytes between which the line of an all-to-all is taken."""


def matrix_tables(estimator: Estimator, degrees: list[Degrees]) -> dict[str, Any] | None:
    """Return all tables that matrices.js reads. None = the recipe has AdamW."""
    costs = estimator.matrices
    if costs is None:
        return None
    layers, devices = costs.layers, estimator.cluster.devices
    return {
        "width": costs.width,
        "products": [layers.dense_s, layers.routed_s, layers.longest_s],
        "largest": layers.largest,
        "widest": layers.widest,
        "sizes": layers.sizes,
        "round": ROUND_ELEMENTS,
        "at_once_bytes": UPDATED_AT_ONCE_BYTES,
        "copied_s": estimator.speeds.update_seconds(1e9) / 1e9,
        "links": {ranks: _line(estimator, ranks) for ranks in divisors(devices) if ranks > 1},
        "moved": {
            key: [costs.moved(layout, dense=1, routed=0), costs.moved(layout, dense=0, routed=1)]
            for key, layout in _layouts(sorted({(cut.tp, cut.ep) for cut in degrees}), devices)
        },
    }


def _line(estimator: Estimator, ranks: int) -> list[float]:
    """Return seconds of an all-to-all of nothing, and of a byte that a rank sends."""
    small_s, large_s = (estimator.links.seconds("all-to-all", size, ranks) for size in (SMALL_BYTES, LARGE_BYTES))
    slope = (large_s - small_s) / (LARGE_BYTES - SMALL_BYTES)
    return [small_s - slope * SMALL_BYTES, slope * ranks / (ranks - 1)]


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

"""Tables of the legal states of the explorer's page, and of how a step's sequences become micro-batches.

They are made by the rules of spec/rules/legal.py, for all values that the page's controls can have.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, product
from typing import Any

from meshwright.planner.explorer.coefficients import Degrees
from meshwright.planner.explorer.decision_tables import Domain, Relation, Tables, TracedReads, Unread, Values, template
from meshwright.planner.step.predict import Estimator
from meshwright.spec.layout.layout import RECOMPUTE, Layout
from meshwright.spec.layout.schedule import KINDS, refusal, stage_numbers
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.rules.legal import RULES, batch_refusals, divisors, position_refusals

SEQUENCES = tuple(2**n for n in range(9, 18))
"""Lengths of the control, in addition to the recipe's own."""
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
BATCHES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)
"""Global batches of the control, times the recipe's own."""
RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
MICRO_BATCHES_DRAWN = (*range(1, 17), 20, 24, 32, 48, 64)
STAGES = tuple(range(2, 9))
"""Stages of a rank in the timelines."""
DEFAULT = Layout()
CONTEXTS = 12
"""Most degrees of context parallelism."""
LAYOUT = {
    name: name
    for name in ("tp", "sp", "cp", "pp", "vp", "ep", "dp_shard", "dp_replicate", "dp", "zero", "schedule",
                 "micro_batch", "recompute")
}  # fmt: skip
"""Attributes of a layout that the controls decide. All others are a layout's defaults."""
RECIPE = {"sequence": "sequence", "global_batch": "global_batch"}


def controls(estimator: Estimator, degrees: list[Degrees], layouts: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the values of each control, including those of the `layouts` of the map.

    `vp`: schedule -> pp -> values, the usual one first. `dp`: the devices that a product of tp, cp and pp leaves.
    """
    devices, layers, batch = estimator.cluster.devices, estimator.shape.layers, estimator.recipe.global_batch
    seen = list(layouts)
    pipelines = [pp for pp in divisors(devices) if pp <= layers]
    stages = {name: {pp: _numbers(seen, name, pp, layers) for pp in pipelines if pp > 1} for name in KINDS}
    return {
        "sequence": sorted({*SEQUENCES, estimator.recipe.sequence}),
        "global_batch": sorted(
            {round(batch * share) for share in BATCHES if float(batch * share).is_integer()}
            | {devices * times for times in (1, 2, 4, 8)}
        ),
        "micro_batch": sorted({*MICRO_BATCHES, *(layout["micro_batch"] for layout in seen)}),
        "tp": sorted({cut.tp for cut in degrees}),
        "cp": sorted({*divisors(devices)[:CONTEXTS], *(layout["cp"] for layout in seen)}),
        "pp": pipelines,
        "ep": list(divisors(estimator.shape.moe.experts)) if estimator.shape.moe else [1],
        "vp": stages,
        "zero": [0, 1, 2, 3],
        "schedule": list(KINDS),
        "recompute": list(RECOMPUTE),
        "dp": {product: devices // product for product in divisors(devices)},
        "indivisible": f"tp x cp x pp = {{product}} does not divide the {devices} devices: take degrees whose product "
        "does",
    }


def _numbers(layouts: list[dict[str, Any]], name: str, pp: int, layers: int) -> list[int]:
    """Return the numbers of a rank's stages: the usual one, then the others."""
    usual, *others = stage_numbers(name, pp, layers)
    more = {layout["vp"] for layout in layouts if layout["schedule"] == name and layout["pp"] == pp} - {usual}
    return [usual, *sorted({*others, *more})]


def legal_tables(
    estimator: Estimator, values: dict[str, Any], refusals: Iterable[Callable[[ModelShape, Layout], str]] = ()
) -> dict[str, Any]:
    """Return the tables of refusals and micro-batches.

    `rules`: for each rule of spec/rules/legal.py, and of another software, the table of its sentences. `size` and
    `count`: of a rank's micro-batches, 0 = they do not come out even.
    """
    tables = Tables(domain(estimator, values))
    shape, recipe = estimator.shape, estimator.recipe

    def rule(refusals: Callable[..., Iterator[str]], kinds: tuple[type[TracedReads], type[TracedReads]]) -> int:
        def sentences(state: Values) -> list[str]:
            refused = refusals(shape, kinds[0](recipe, state, RECIPE), kinds[1](Layout(), state, LAYOUT))
            return [template(sentence, state, (*LAYOUT, *RECIPE)) for sentence in refused]

        return tables.add(sentences)

    def of_software(refusal: Callable[[ModelShape, Layout], str]) -> int:
        def sentences(state: Values) -> list[str]:
            sentence = refusal(shape, TracedReads(Layout(), state, LAYOUT))  # type: ignore[arg-type]  # reads as one does
            return [template(sentence, state, (*LAYOUT,))] if sentence else []

        return tables.add(sentences)

    def micro_batches(count: Callable[[Layout, int], int]) -> int:
        return tables.add(
            lambda state: count(
                TracedReads(Layout(), state, LAYOUT),  # type: ignore[arg-type]  # reads as a layout does
                TracedReads(recipe, state, RECIPE).global_batch,
            )
        )

    return {
        "rules": [rule(each, (_AnyBatch, _Counted)) for each in RULES]
        + [rule(each, (TracedReads, TracedReads)) for each in (batch_refusals, position_refusals)]
        + [of_software(each) for each in refusals],
        "size": micro_batches(Layout.micro_batch_of),
        "count": micro_batches(Layout.even_micro_batches),
        "nodes": tables.nodes,
    }


class _Counted(TracedReads):
    """A layout whose number of micro-batches is an axis: rules read it directly."""

    def even_micro_batches(self, global_batch: int) -> int:
        """Return the axis's number of micro-batches."""
        if "count" not in self._state:
            raise Unread("count")
        return int(self._state["count"])


class _AnyBatch(TracedReads):
    """A recipe of one batch: rules ask only for its number of micro-batches."""

    global_batches = (0,)


def timeline_tables(values: dict[str, Any], counts: Iterable[int]) -> dict[str, Any]:
    """Return the table of reasons why a schedule has no timeline, for the values of all controls."""
    deep = {
        vp for name, by_pp in values["vp"].items() if _is_free(name) for numbers in by_pp.values() for vp in numbers
    }
    stages = [
        (name, vp) for name, kind in KINDS.items() for vp in ({*STAGES, *deep} if _is_free(name) else {kind.stages})
    ]
    most = max(MICRO_BATCHES_DRAWN)
    tables = Tables(
        Domain([
            Relation(("schedule", "vp"), tuple(stages)),
            Relation(("pp",), tuple((pp,) for pp in {*RANKS, *values["pp"]} - {1})),
            Relation(("count",), tuple((m,) for m in {*MICRO_BATCHES_DRAWN, *(n for n in counts if 0 < n < most)})),
        ])
    )  # fmt: skip

    def refused(state: Values) -> str | None:
        axes = {name: name for name in ("schedule", "pp", "count", "vp")}
        reads = TracedReads(None, state, axes)
        sentence = refusal(reads.schedule, reads.pp, reads.count, reads.vp)
        return None if sentence is None else template(sentence, state, tuple(axes))

    drawn = {"ranks": RANKS, "micro_batches": MICRO_BATCHES_DRAWN, "stages": STAGES}
    return {**drawn, "refused": tables.add(refused), "nodes": tables.nodes}


def stage_runs(estimator: Estimator, values: dict[str, Any]) -> dict[int, list[tuple[int, int]]]:
    """Return number of pipeline stages -> runs of (number of stages, layers of each), from embedding to head."""
    deep = (pp * vp for by_pp in values["vp"].values() for pp, numbers in by_pp.items() for vp in numbers)
    runs = {}
    for number in sorted({1, *(stages for stages in deep if stages <= estimator.shape.layers)}):
        sizes = map(len, estimator.costs.split(Layout(pp=number)))
        runs[number] = [(len(list(run)), size) for size, run in groupby(sizes)]
    return runs


def _is_free(name: str) -> bool:
    """Return whether the timeline of a schedule has as many stages of a rank as its control says."""
    return KINDS[name].deeper and KINDS[name].stages > 1


def domain(estimator: Estimator, values: dict[str, Any]) -> Domain:
    """Return all states that the controls can reach and whose degrees divide the devices, relation by relation."""
    devices = estimator.cluster.devices
    inside = product(values["tp"], values["cp"], values["pp"])
    whole = [(tp, cp, pp, devices // (tp * cp * pp)) for tp, cp, pp in inside if devices % (tp * cp * pp) == 0]
    degrees = [(tp, cp, pp, dp, shard, dp // shard) for tp, cp, pp, dp in whole for shard in divisors(dp)]
    deep = [(pp, name, vp) for name, by_pp in values["vp"].items() for pp, numbers in by_pp.items() for vp in numbers]
    pipelines = [(1, DEFAULT.schedule, 1), *deep]
    return Domain([
        Relation(("tp", "cp", "pp", "dp", "dp_shard", "dp_replicate"), tuple(degrees)),
        Relation(("tp", "sp"), tuple((tp, sp) for tp in values["tp"] for sp in (False, True)[: 1 if tp == 1 else 2])),
        Relation(("pp", "schedule", "vp"), tuple(pipelines)),
        Relation(("count",), tuple((count,) for count in counts_of(estimator, values))),
        *(Relation((name,), tuple((x,) for x in values[name]))
          for name in ("sequence", "global_batch", "micro_batch", "ep", "zero", "recompute")),
    ])  # fmt: skip


def counts_of(estimator: Estimator, values: dict[str, Any]) -> list[int]:
    """Return the possible numbers of micro-batches of a rank in a step. 0 = its sequences do not come out even."""
    degrees = {dp for dp in divisors(estimator.cluster.devices)}
    return sorted({
        Layout(dp_shard=dp, micro_batch=size).even_micro_batches(batch)
        for dp, size, batch in product(degrees, values["micro_batch"], values["global_batch"])
    })  # fmt: skip

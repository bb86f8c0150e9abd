"""Which states of the explorer's page are legal, and how a step's sequences become micro-batches: tables that are made
by spec/legal.py's own rules, for all values that the page's controls can have."""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, product
from typing import Any

from meshwright.planner.explorer.coefficients import Degrees
from meshwright.planner.explorer.decision_tables import Domain, Relation, Tables, TracedReads, Unread, Values, template
from meshwright.planner.step.predict import Estimator
from meshwright.spec.layout import RECOMPUTE, Layout
from meshwright.spec.legal import RULES, batch_refusals, divisors, position_refusals
from meshwright.spec.schedule import refusal
from meshwright.spec.schedule_kinds import KINDS, stage_numbers
from meshwright.spec.shape import ModelShape

SEQUENCES = tuple(2**n for n in range(9, 18))
"""Beside the recipe's own."""
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
BATCHES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)
"""Times the recipe's own."""
RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
MICRO_BATCHES_DRAWN = (*range(1, 17), 20, 24, 32, 48, 64)
STAGES = tuple(range(2, 9))
"""Of the timelines."""
DEFAULT = Layout()
CONTEXTS = 12
"""Degrees of context parallelism, at most."""
LAYOUT = {
    name: name
    for name in ("tp", "sp", "cp", "pp", "vp", "ep", "dp_shard", "dp_replicate", "dp", "zero", "schedule",
                 "micro_batch", "recompute")
}  # fmt: skip
"""Attributes of a layout that the controls decide. All others are a layout's defaults."""
RECIPE = {"sequence": "sequence", "global_batch": "global_batch"}


def controls(of: Estimator, degrees: list[Degrees], layouts: Iterable[dict[str, Any]] = ()) -> dict[str, Any]:
    """The values of each control; those of the `layouts` of the map are among them. `vp`: schedule -> pp -> values, the
    usual one first; `dp`: what a product of tp, cp and pp leaves of the devices."""
    devices, layers, batch = of.cluster.devices, of.shape.layers, of.recipe.global_batch
    seen = list(layouts)
    pipelines = [pp for pp in divisors(devices) if pp <= layers]
    stages = {name: {pp: _numbers(seen, name, pp, layers) for pp in pipelines if pp > 1} for name in KINDS}
    return {
        "sequence": sorted({*SEQUENCES, of.recipe.sequence}),
        "global_batch": sorted(
            {round(batch * share) for share in BATCHES if float(batch * share).is_integer()}
            | {devices * times for times in (1, 2, 4, 8)}
        ),
        "micro_batch": sorted({*MICRO_BATCHES, *(one["micro_batch"] for one in seen)}),
        "tp": sorted({one.tp for one in degrees}),
        "cp": sorted({*divisors(devices)[:CONTEXTS], *(one["cp"] for one in seen)}),
        "pp": pipelines,
        "ep": list(divisors(of.shape.moe.experts)) if of.shape.moe else [1],
        "vp": stages,
        "zero": [0, 1, 2, 3],
        "schedule": list(KINDS),
        "recompute": list(RECOMPUTE),
        "dp": {product: devices // product for product in divisors(devices)},
        "indivisible": f"tp x cp x pp = {{product}} does not divide the {devices} devices: take degrees whose product "
        "does",
    }


def _numbers(layouts: list[dict[str, Any]], name: str, pp: int, layers: int) -> list[int]:
    """Of a rank's stages: the usual number, then the others."""
    usual, *others = stage_numbers(name, pp, layers)
    more = {one["vp"] for one in layouts if one["schedule"] == name and one["pp"] == pp} - {usual}
    return [usual, *sorted({*others, *more})]


def legal_tables(
    of: Estimator, values: dict[str, Any], refusals: Iterable[Callable[[ModelShape, Layout], str]] = ()
) -> dict[str, Any]:
    """`rules`: for each of spec/legal.py the table of its sentences, and for each of another software's. `dp`: what tp,
    cp and pp leave of the devices, 0 where they do not divide them. `size` and `count`: of a rank's micro-batches, 0
    where they do not come out even."""
    tables = Tables(domain(of, values))
    shape, recipe = of.shape, of.recipe

    def rule(refusals: Callable[..., Iterator[str]], kinds: tuple[type[TracedReads], type[TracedReads]]) -> int:
        def sentences(given: Values) -> list[str]:
            asked = refusals(shape, kinds[0](recipe, given, RECIPE), kinds[1](Layout(), given, LAYOUT))
            return [template(one, given, (*LAYOUT, *RECIPE)) for one in asked]

        return tables.add(sentences)

    def of_software(refusal: Callable[[ModelShape, Layout], str]) -> int:
        def sentences(given: Values) -> list[str]:
            said = refusal(shape, TracedReads(Layout(), given, LAYOUT))  # type: ignore[arg-type]  # reads as one does
            return [template(said, given, (*LAYOUT,))] if said else []

        return tables.add(sentences)

    def micro_batches(count: Callable[[Layout, int], int]) -> int:
        return tables.add(
            lambda given: count(
                TracedReads(Layout(), given, LAYOUT),  # type: ignore[arg-type]  # reads as a layout does
                TracedReads(recipe, given, RECIPE).global_batch,
            )
        )

    return {
        "rules": [rule(one, (_AnyBatch, _Counted)) for one in RULES]
        + [rule(one, (TracedReads, TracedReads)) for one in (batch_refusals, position_refusals)]
        + [of_software(one) for one in refusals],
        "size": micro_batches(Layout.micro_batch_of),
        "count": micro_batches(Layout.even_micro_batches),
        "nodes": tables.nodes,
    }


class _Counted(TracedReads):
    """A layout whose number of micro-batches is an axis of its own: rules read it and not what it follows from."""

    def even_micro_batches(self, global_batch: int) -> int:
        """Of the page's batch."""
        if "count" not in self._given:
            raise Unread("count")
        return int(self._given["count"])


class _AnyBatch(TracedReads):
    """A recipe of one batch, whose number of micro-batches is all that a rule asks for."""

    global_batches = (0,)


def timeline_tables(values: dict[str, Any], counts: Iterable[int]) -> dict[str, Any]:
    """Why a schedule has no timeline, for the values of the timelines' own controls and those of layouts; null where it
    has one."""
    deep = {vp for name, some in values["vp"].items() if _own(name) for numbers in some.values() for vp in numbers}
    stages = [(name, vp) for name, kind in KINDS.items() for vp in ({*STAGES, *deep} if _own(name) else {kind.stages})]
    most = max(MICRO_BATCHES_DRAWN)
    tables = Tables(
        Domain([
            Relation(("schedule", "vp"), tuple(stages)),
            Relation(("pp",), tuple((pp,) for pp in {*RANKS, *values["pp"]} - {1})),
            Relation(("count",), tuple((m,) for m in {*MICRO_BATCHES_DRAWN, *(n for n in counts if 0 < n < most)})),
        ])
    )  # fmt: skip

    def refused(given: Values) -> str | None:
        axes = {name: name for name in ("schedule", "pp", "count", "vp")}
        asked = TracedReads(None, given, axes)
        sentence = refusal(asked.schedule, asked.pp, asked.count, asked.vp)
        return None if sentence is None else template(sentence, given, tuple(axes))

    drawn = {"ranks": RANKS, "micro_batches": MICRO_BATCHES_DRAWN, "stages": STAGES}
    return {**drawn, "refused": tables.add(refused), "nodes": tables.nodes}


def stage_runs(of: Estimator, values: dict[str, Any]) -> dict[int, list[tuple[int, int]]]:
    """Number of pipeline stages -> runs of (how many stages, layers of each), from the embedding to the head."""
    deep = (pp * vp for some in values["vp"].values() for pp, numbers in some.items() for vp in numbers)
    found = {}
    for number in sorted({1, *(stages for stages in deep if stages <= of.shape.layers)}):
        sizes = map(len, of.split(Layout(pp=number)))
        found[number] = [(len(list(run)), size) for size, run in groupby(sizes)]
    return found


def _own(name: str) -> bool:
    """Whether the timeline of a schedule has as many stages of a rank as its control says."""
    return KINDS[name].deeper and KINDS[name].stages > 1


def domain(of: Estimator, values: dict[str, Any]) -> Domain:
    """All states that the controls can reach and whose degrees divide the devices, relation by relation."""
    devices = of.cluster.devices
    inside = product(values["tp"], values["cp"], values["pp"])
    whole = [(tp, cp, pp, devices // (tp * cp * pp)) for tp, cp, pp in inside if devices % (tp * cp * pp) == 0]
    degrees = [(*one, shard, one[3] // shard) for one in whole for shard in divisors(one[3])]
    deep = [(pp, name, vp) for name, some in values["vp"].items() for pp, numbers in some.items() for vp in numbers]
    pipelines = [(1, DEFAULT.schedule, 1), *deep]
    return Domain([
        Relation(("tp", "cp", "pp", "dp", "dp_shard", "dp_replicate"), tuple(degrees)),
        Relation(("tp", "sp"), tuple((tp, sp) for tp in values["tp"] for sp in (False, True)[: 1 if tp == 1 else 2])),
        Relation(("pp", "schedule", "vp"), tuple(pipelines)),
        Relation(("count",), tuple((count,) for count in counts_of(of, values))),
        *(Relation((name,), tuple((value,) for value in values[name]))
          for name in ("sequence", "global_batch", "micro_batch", "ep", "zero", "recompute")),
    ])  # fmt: skip


def counts_of(of: Estimator, values: dict[str, Any]) -> list[int]:
    """How many micro-batches a rank can have in a step; 0 where its sequences do not come out even."""
    degrees = {dp for dp in divisors(of.cluster.devices)}
    return sorted({
        Layout(dp_shard=dp, micro_batch=size).even_micro_batches(batch)
        for dp, size, batch in product(degrees, values["micro_batch"], values["global_batch"])
    })  # fmt: skip

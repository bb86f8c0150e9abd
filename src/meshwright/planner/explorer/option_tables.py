"""Tables of how another software's files state the layout of the explorer's page: one table of words per option.

Which controls an option depends on is found by trial. Each control is turned in turn at some layouts of the map, and
an option's table branches on those that changed it. A number that equals one of the page's own is written as its name,
so that one word covers all its values. tests/planner/test_explorer_stacks.py compares the words with the writer of the
files.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from meshwright.planner.explorer.decision_tables import Domain, Relation, Tables, Unread, Values
from meshwright.planner.explorer.half import SoftwareRules
from meshwright.planner.step.predict import Estimator
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.plan.plan import Plan
from meshwright.spec.rules.legal import divisors

BASES = 24
"""Layouts at which controls are turned."""
TURNED = 6
"""Values of a control that are tried at each layout."""
STEPS = (1, 2, 3, 8)
"""Micro-batches of a step that are tried, in addition to those that the page can have."""
DEGREES = ("tp", "sp", "cp", "pp", "vp", "ep", "dp_shard", "dp_replicate", "zero", "schedule", "recompute")
AXES = (*DEGREES, "micro_batch", "count", "sequence")
"""Names of the axes. The batch of a step follows: micro-batch x ranks of data parallelism x their number."""
NAMED = ("sequence", "global_batch", "local_batch", "count", "micro_batch", "dp", "dp_shard", "dp_replicate",
         "tp", "cp", "pp", "ep", "vp")  # fmt: skip
"""Numbers that the page knows by name."""
Option = tuple[str, str]
"""(file, option)."""


def option_tables(
    estimator: Estimator,
    values: dict[str, Any],
    layouts: list[dict[str, Any]],
    counts: Iterable[int],
    rules: SoftwareRules,
) -> dict[str, Any]:
    """Return all nodes, and for each file [option, root of its table] of options that a control changes."""
    writer = _StatedOptions(estimator, rules)
    domain = _domain(estimator, values, counts, rules)
    bases = [_state(layout, n) for n, layout in enumerate(layouts[:: max(1, len(layouts) // BASES)][:BASES])]
    tables = Tables(domain)
    files: dict[str, list[tuple[str, int]]] = {}
    for (file, option), axes in _turned(writer, domain, bases).items():
        root = tables.add(_question(writer, (file, option), axes, bases))
        files.setdefault(file, []).append((option, root))
    return {"files": files, "nodes": tables.nodes}


class _StatedOptions:
    def __init__(self, estimator: Estimator, rules: SoftwareRules) -> None:
        self._estimator, self._rules = estimator, rules
        self._known: dict[tuple[Any, ...], dict[Option, str]] = {}

    def options(self, state: Values) -> dict[Option, str]:
        """Return the options at a state. Empty = the software has no such plan."""
        key = tuple(state[axis] for axis in AXES)
        if key not in self._known:
            self._known[key] = self._stated(state)
        return self._known[key]

    def always(self, option: Option, names: list[str]) -> str:
        """Return the words with the one of `names` that holds at all known states. Empty = none does."""
        asked = [(dict(zip(AXES, key, strict=True)), texts) for key, texts in self._known.items() if texts]
        for name in names:
            if all(_value(texts.get(option)) == str(numbers(state)[name]) for state, texts in asked):
                return _named(asked[0][1][option], name)
        return ""

    def _stated(self, state: Values) -> dict[Option, str]:
        layout = Layout(**{name: state[name] for name in (*DEGREES, "micro_batch")})
        recipe = replace(
            self._estimator.recipe, sequence=state["sequence"], global_batch=numbers(state)["global_batch"]
        )
        plan = Plan(model=self._estimator.shape, recipe=recipe, layout=layout, cluster=self._estimator.cluster)
        try:
            files = self._rules.settings(plan)
        except PlanError:
            return {}
        return {(file, option): text for file, options in files.items() for option, text in options.items()}


def numbers(state: Values) -> dict[str, int]:
    """Return the numbers of NAMED."""
    dp, local = state["dp_shard"] * state["dp_replicate"], state["micro_batch"] * state["count"]
    return {**state, "dp": dp, "local_batch": local, "global_batch": dp * local}


def _state(layout: dict[str, Any], seed: int) -> Values:
    dice = Random(seed)
    drawn = {"count": dice.choice(STEPS), "sequence": 2 ** dice.randrange(9, 15)}
    return {**{name: layout[name] for name in (*DEGREES, "micro_batch")}, "sp": bool(layout["sp"]), **drawn}


def _domain(estimator: Estimator, values: dict[str, Any], counts: Iterable[int], rules: SoftwareRules) -> Domain:
    """Return all values of each control that the software offers, and which go together."""
    degrees = list(divisors(estimator.cluster.devices))
    stages = [(1, "1f1b", 1)]
    stages += [
        (pp, name, vp) for name, by_pp in values["vp"].items() for pp, numbers in by_pp.items() for vp in numbers
    ]
    offered = [row for row in stages if row[1] in rules.fixed.get("schedule", (row[1],))]
    free = {
        "cp": values["cp"], "ep": values["ep"], "dp_shard": degrees, "dp_replicate": degrees, "zero": values["zero"],
        "recompute": values["recompute"], "micro_batch": values["micro_batch"], "sequence": values["sequence"],
        "count": sorted({*STEPS, *(count for count in counts if count)}),
    }  # fmt: skip
    return Domain([
        Relation(("tp", "sp"), tuple((tp, sp) for tp in values["tp"] for sp in (False, True)[: 1 if tp == 1 else 2])),
        Relation(("pp", "schedule", "vp"), tuple(offered)),
        *(Relation((name,), tuple((x,) for x in choices if x in rules.fixed.get(name, (x,))))
          for name, choices in free.items()),
    ])  # fmt: skip


def _turned(writer: _StatedOptions, domain: Domain, bases: list[Values]) -> dict[Option, tuple[str, ...]]:
    """Return {option: axes that it follows, in the order of AXES}. Options that follow none are left out."""
    followed: dict[Option, set[str]] = {}
    for n, base in enumerate(bases):
        before = writer.options(base)
        for axis, state in _neighbours(domain, base, n) if before else ():
            after = writer.options(state)
            for option in {**before, **after} if after else ():  # in their order, which a set would not keep
                if before.get(option) != after.get(option):
                    followed.setdefault(option, set()).add(axis)
    order = list(before) if bases else []
    ranked = sorted(followed, key=lambda option: order.index(option) if option in order else len(order))
    return {option: tuple(axis for axis in AXES if axis in followed[option]) for option in ranked}


def _neighbours(domain: Domain, base: Values, seed: int) -> Iterator[tuple[str, Values]]:
    """Yield (axis, state) with one control turned, and nothing else."""
    dice = Random(seed)
    for axis in AXES:
        every = domain.values(axis, {})
        for value in dice.sample(every, min(TURNED, len(every))):
            yield axis, {**base, axis: value}


def _names(writer: _StatedOptions, option: Option, bases: list[Values]) -> list[str]:
    """Return the names of numbers that equal the option's number at some bases, the most frequent first."""
    hits = dict.fromkeys(NAMED, 0)
    for state in bases:
        word, known = _value(writer.options(state).get(option)), numbers(state)
        for name in NAMED:
            hits[name] += word == str(known[name])
    return [name for name in sorted(NAMED, key=lambda name: -hits[name]) if hits[name]]


def _value(text: str | None) -> str:
    """Return the last word of `--key 8` or `key=8`."""
    return "" if text is None else text.replace("=", " ").rsplit(" ", 1)[-1]


def _named(text: str, name: str) -> str:
    return f"{text.removesuffix(_value(text))}{{{name}}}"


def _question(
    writer: _StatedOptions, option: Option, axes: tuple[str, ...], bases: list[Values]
) -> Callable[[Values], Any]:
    """Return the function of axis values that gives the words of an option. None = the option is not written."""
    names = _names(writer, option, bases)
    always = writer.always(option, names)

    def words(known_values: Values) -> str | None:
        for axis in axes:
            if axis not in known_values:
                raise Unread(axis)
        state = {**bases[0], **known_values}
        text, known = writer.options(state).get(option), numbers(state)
        word = _value(text)
        name = next((name for name in names if word == str(known[name]) and (name in axes or _follows(name, axes))), "")
        return text if text is None or not name else _named(text, name)

    return (lambda _: always) if always else words


def _follows(name: str, axes: tuple[str, ...]) -> bool:
    """Return whether these axes determine a number that is a product of several."""
    made = {"local_batch": {"micro_batch", "count"}, "dp": {"dp_shard", "dp_replicate"}}
    made["global_batch"] = made["local_batch"] | made["dp"]
    return made.get(name, {""}) <= {*axes}

"""How another software's files state the layout of the explorer's page: for each option a table of its words.

Nobody says which option follows from what. Each control is turned in turn at some layouts of the map, and an option's
table branches on those that changed it. A number that equals one of the page's own is written as its name, so that one
word stands for all its values. tests/planner/test_explorer_stacks.py holds the words against the files' own writer.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from meshwright.planner.explorer.decision_tables import Domain, Relation, Tables, Unread, Values
from meshwright.planner.explorer.half import SoftwareRules
from meshwright.planner.step.predict import Estimator
from meshwright.spec.errors import PlanError
from meshwright.spec.layout import Layout
from meshwright.spec.legal import divisors
from meshwright.spec.plan import Plan

BASES = 24
"""Layouts at which controls are turned."""
TURNED = 6
"""Values of a control that are tried there."""
STEPS = (1, 2, 3, 8)
"""Micro-batches of a step, beside those that the page can have."""
DEGREES = ("tp", "sp", "cp", "pp", "vp", "ep", "dp_shard", "dp_replicate", "zero", "schedule", "recompute")
AXES = (*DEGREES, "micro_batch", "count", "sequence")
"""The batch of a step follows: micro-batch x ranks of data parallelism x their number."""
NAMED = ("sequence", "global_batch", "local_batch", "count", "micro_batch", "dp", "dp_shard", "dp_replicate",
         "tp", "cp", "pp", "ep", "vp")  # fmt: skip
"""Numbers that the page knows by name."""
Option = tuple[str, str]
"""File, option."""


def option_tables(
    of: Estimator, values: dict[str, Any], layouts: list[dict[str, Any]], counts: Iterable[int], rules: SoftwareRules
) -> dict[str, Any]:
    """`files`: for each file of the software [option, root of its table] of those that a control changes."""
    writer = _StatedOptions(of, rules)
    domain = _domain(of, values, counts, rules)
    bases = [_state(layout, n) for n, layout in enumerate(layouts[:: max(1, len(layouts) // BASES)][:BASES])]
    tables = Tables(domain)
    files: dict[str, list[tuple[str, int]]] = {}
    for (file, option), axes in _turned(writer, domain, bases).items():
        root = tables.add(_question(writer, (file, option), axes, bases))
        files.setdefault(file, []).append((option, root))
    return {"files": files, "nodes": tables.nodes}


class _StatedOptions:
    """What the files say at a state, by option."""

    def __init__(self, of: Estimator, rules: SoftwareRules) -> None:
        self._of, self._rules = of, rules
        self._known: dict[tuple[Any, ...], dict[Option, str]] = {}

    def said(self, state: Values) -> dict[Option, str]:
        """Empty where the software has no such plan."""
        key = tuple(state[axis] for axis in AXES)
        if key not in self._known:
            self._known[key] = self._said(state)
        return self._known[key]

    def always(self, option: Option, names: list[str]) -> str:
        """The option's words with a number's name in place of the number, if they hold at all states that were asked
        about; else empty."""
        asked = [(dict(zip(AXES, key, strict=True)), said) for key, said in self._known.items() if said]
        for name in names:
            if all(_value(said.get(option)) == str(numbers(state)[name]) for state, said in asked):
                return _named(asked[0][1][option], name)
        return ""

    def _said(self, state: Values) -> dict[Option, str]:
        layout = Layout(**{name: state[name] for name in (*DEGREES, "micro_batch")})
        recipe = replace(self._of.recipe, sequence=state["sequence"], global_batch=numbers(state)["global_batch"])
        plan = Plan(model=self._of.shape, recipe=recipe, layout=layout, cluster=self._of.cluster)
        try:
            files = self._rules.settings(plan)
        except PlanError:
            return {}
        return {(file, option): text for file, said in files.items() for option, text in said.items()}


def numbers(state: Values) -> dict[str, int]:
    """Those of NAMED."""
    dp, local = state["dp_shard"] * state["dp_replicate"], state["micro_batch"] * state["count"]
    return {**state, "dp": dp, "local_batch": local, "global_batch": dp * local}


def _state(layout: dict[str, Any], place: int) -> Values:
    dice = Random(place)
    drawn = {"count": dice.choice(STEPS), "sequence": 2 ** dice.randrange(9, 15)}
    return {**{name: layout[name] for name in (*DEGREES, "micro_batch")}, "sp": bool(layout["sp"]), **drawn}


def _domain(of: Estimator, values: dict[str, Any], counts: Iterable[int], rules: SoftwareRules) -> Domain:
    """All values of each control that the software offers, and which go together."""
    degrees = list(divisors(of.cluster.devices))
    stages = [(1, "1f1b", 1)]
    stages += [(pp, name, vp) for name, some in values["vp"].items() for pp, every in some.items() for vp in every]
    offered = [row for row in stages if row[1] in rules.fixed.get("schedule", (row[1],))]
    free = {
        "cp": values["cp"], "ep": values["ep"], "dp_shard": degrees, "dp_replicate": degrees, "zero": values["zero"],
        "recompute": values["recompute"], "micro_batch": values["micro_batch"], "sequence": values["sequence"],
        "count": sorted({*STEPS, *(count for count in counts if count)}),
    }  # fmt: skip
    return Domain([
        Relation(("tp", "sp"), tuple((tp, sp) for tp in values["tp"] for sp in (False, True)[: 1 if tp == 1 else 2])),
        Relation(("pp", "schedule", "vp"), tuple(offered)),
        *(Relation((name,), tuple((one,) for one in some if one in rules.fixed.get(name, (one,))))
          for name, some in free.items()),
    ])  # fmt: skip


def _turned(writer: _StatedOptions, domain: Domain, bases: list[Values]) -> dict[Option, tuple[str, ...]]:
    """Option -> the axes that it follows, in the order of AXES; options that follow none are left out."""
    found: dict[Option, set[str]] = {}
    for n, base in enumerate(bases):
        before = writer.said(base)
        for axis, state in _neighbours(domain, base, n) if before else ():
            after = writer.said(state)
            for option in {*before, *after} if after else ():
                if before.get(option) != after.get(option):
                    found.setdefault(option, set()).add(axis)
    order = list(before) if bases else []
    ranked = sorted(found, key=lambda one: order.index(one) if one in order else len(order))
    return {option: tuple(axis for axis in AXES if axis in found[option]) for option in ranked}


def _neighbours(domain: Domain, base: Values, seed: int) -> Iterator[tuple[str, Values]]:
    """(axis, state): one control turned, and nothing that follows from it."""
    dice = Random(seed)
    for axis in AXES:
        every = domain.values(axis, {})
        for value in dice.sample(every, min(TURNED, len(every))):
            yield axis, {**base, axis: value}


def _names(writer: _StatedOptions, option: Option, bases: list[Values]) -> list[str]:
    """Of the numbers that equal the option's at some bases, those that do so most often first."""
    hits = dict.fromkeys(NAMED, 0)
    for state in bases:
        word, known = _value(writer.said(state).get(option)), numbers(state)
        for name in NAMED:
            hits[name] += word == str(known[name])
    return [name for name in sorted(NAMED, key=lambda name: -hits[name]) if hits[name]]


def _value(text: str | None) -> str:
    """The last word of `--key 8` or `key=8`."""
    return "" if text is None else text.replace("=", " ").rsplit(" ", 1)[-1]


def _named(text: str, name: str) -> str:
    return f"{text.removesuffix(_value(text))}{{{name}}}"


def _question(
    writer: _StatedOptions, option: Option, axes: tuple[str, ...], bases: list[Values]
) -> Callable[[Values], Any]:
    """The words at values of these axes; None where the option is not written."""
    names = _names(writer, option, bases)
    always = writer.always(option, names)

    def words(given: Values) -> str | None:
        for axis in axes:
            if axis not in given:
                raise Unread(axis)
        state = {**bases[0], **given}
        text, known = writer.said(state).get(option), numbers(state)
        word = _value(text)
        name = next((name for name in names if word == str(known[name]) and (name in axes or _follows(name, axes))), "")
        return text if text is None or not name else _named(text, name)

    return (lambda given: always) if always else words


def _follows(name: str, axes: tuple[str, ...]) -> bool:
    """Whether these axes decide a number that is a product of several."""
    made = {"local_batch": {"micro_batch", "count"}, "dp": {"dp_shard", "dp_replicate"}}
    made["global_batch"] = made["local_batch"] | made["dp"]
    return made.get(name, {""}) <= {*axes}

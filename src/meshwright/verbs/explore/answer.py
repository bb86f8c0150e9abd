"""`explore`: every layout as one offline HTML page with sliders, also of two clusters or stacks side by side."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.interface.answers.answer import Answer, HasPlan, check_page, checked, write_page
from meshwright.interface.answers.markup import table, whole
from meshwright.interface.planning.layouts import as_trained, chosen_software, none_offered
from meshwright.interface.planning.plan_reading import Section, section_words
from meshwright.interface.planning.plan_request import asked_estimator, requested_plan
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.explain import layout_words
from meshwright.planner.explorer.explorer_page import assemble, data
from meshwright.planner.explorer.half import Half, SoftwareRules
from meshwright.planner.rent.prices import shipped
from meshwright.planner.search.landscape import FIELDS
from meshwright.planner.step.prediction import Prediction, usable_bytes
from meshwright.spec import Layout, Plan
from meshwright.spec.errors import ArgumentError, IllegalLayout, PlanError
from meshwright.spec.presets import suggest
from meshwright.stacks.config_files import option_words
from meshwright.stacks.declaration.software import TrainingSoftware, error_sentences

BESIDE = ("cluster", "nodes", "stack", "price")
"""Keys of `beside`. `for` means `stack`."""
KEYS = ("cluster", "nodes", "for", "price")
"""The keys as users type them."""
MOST_USD = 1e6
"""Highest price of a device-hour, in dollars."""
COMPARED = ("tokens_per_second", "peak_bytes", "usd_per_billion_tokens")


@dataclass(frozen=True, kw_only=True, repr=False)
class ExploreAnswer(Answer):
    """The page, and the first layout of each half."""

    halves: tuple[Half, ...]
    """One half, or two side by side."""

    @cached_property
    def contents(self) -> tuple[dict[str, Any], ...]:
        """All numbers of each half, as the page reads them."""
        first, *others = self.halves
        with _blame_second_half(first.plan):
            other_contents = [_data(half) for half in others]
        return (_data(first), *other_contents)

    @cached_property
    def best(self) -> tuple[Prediction, ...]:
        """Fastest layout of each half that leaves some memory free, else the nearest on the map."""
        return tuple(map(_start, self.halves, self.contents))

    @property
    def html(self) -> str:
        """The page: one file that needs no network."""
        return assemble(*self.contents)

    def write(self, file: str | Path = "explorer.html") -> Path:
        """Write the page. Raises ArgumentError if it cannot be written."""
        out = Path(file)
        check_page(out, "explorer.html")
        write_page(out, self.html, "out")
        return out

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `meshwright explore --json` prints."""
        rows = self.rows()
        document: dict[str, Any] = {"kind": "explore", "model": self.halves[0].plan.model.name, "halves": rows}
        if len(rows) > 1:
            document["b_over_a"] = {name: _ratio(rows, name) for name in COMPARED}
        return document

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each half, on its first layout."""
        return [_row(*half) for half in zip(self.halves, self.contents, self.best, strict=True)]

    def __repr__(self) -> str:
        rows = self.rows()
        lines = [f"{row['title']}: {row['tokens_per_second']:,.0f} tokens/s, {row['layout_words']}" for row in rows]
        return f"{self.halves[0].plan.model.name} on " + "; on ".join(lines)

    def _repr_html_(self) -> str:
        cells = [
            (row["title"], row["layout_words"], f"{row['tokens_per_second']:,.0f}", f"{row['peak_bytes'] / 2**30:.1f}",
             "-" if row["usd_per_billion_tokens"] is None else f"${row['usd_per_billion_tokens']:,.0f}")
            for row in self.rows()
        ]  # fmt: skip
        return whole(table(("cluster", "layout", "tokens/s", "GiB", "per 1e9 tokens"), cells))


def _ratio(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    first, second = rows[0][name], rows[1][name]
    return None if first is None or second is None else second / first


def _row(half: Half, content: Mapping[str, Any], best: Prediction) -> dict[str, Any]:
    cluster, tokens_per_s = half.plan.cluster, best.tokens_per_step / best.step_s
    hourly = half.usd_per_hour * cluster.devices
    return {
        "title": half.title, "device": cluster.device.name, "nodes": cluster.nodes, "devices": cluster.devices,
        "for": half.software.word if half.software else "meshwright",
        "sequence": half.plan.recipe.sequence, "global_batch": half.plan.recipe.global_batch,
        "legal_layouts": content["landscape"]["legal"],
        "layout": {name: getattr(best.plan.layout, name) for name in FIELDS},
        "layout_words": layout_words(best.plan.layout),
        "fits": best.peak_bytes <= usable_bytes(half.plan), "step_seconds": best.step_s,
        "tokens_per_second": tokens_per_s, "mfu_full": best.mfu(causal=False), "peak_bytes": round(best.peak_bytes),
        "usd_per_device_hour": half.usd_per_hour or None, "price": half.price_words,
        "usd_per_billion_tokens": hourly * 1e9 / tokens_per_s / 3600 if hourly else None,
        "known_errors": list(half.software.known_errors) if half.software else [],
    }  # fmt: skip


def _data(half: Half) -> dict[str, Any]:
    try:
        return data(half)
    except IllegalLayout:
        if half.software is None:
            raise
        software = chosen_software(half.software.word)
        assert software is not None
        # The error of the page knows no software; this one names what the software lacks.
        raise none_offered(software, half.estimator, half.plan, {}) from None


def _start(half: Half, content: Mapping[str, Any]) -> Prediction:
    land = content["landscape"]
    fields = dict(zip(FIELDS, land["points"][land["start"]][0], strict=True))
    ours = half.estimator.stack.is_meshwright and half.plan.cluster.device.is_gpu
    # The page computes every layout with these settings.
    counted = {"compile": "on", "cuda_graphs": "off"} if ours else {}
    layout = Layout(**{**fields, **counted, "sp": bool(fields["sp"])})
    return half.estimator.predict(replace(half.plan, layout=layout))


@checked
def explore(
    model: str | Path | Plan | HasPlan,
    *,
    cluster: str | None = None,
    nodes: int | None = None,
    recipe: Section = None,
    stack: str = "",
    price: float | None = None,
    beside: Section = None,
) -> ExploreAnswer:
    """Compute every layout of a model on a cluster, for one HTML page with sliders; `write` writes it.

    Args:
        price: Dollars of a device-hour. None = the lowest shipped list price.
        beside: A second cluster or stack on the same page, by what differs: {"cluster": "h200x8"}, "nodes=4",
            {"stack": "torchtitan", "price": 2.5}.

    All other arguments are those of `plan`.

    Raises:
        IllegalLayout: There is no layout.
        PlanError: An argument makes no sense.
    """
    words, changes = section_words(recipe), _parse_beside(section_words(beside))
    first = _half(model, cluster, nodes, words, stack, price)
    parts = first.plan.model.unbuilt
    if parts and (parts.linear or parts.predicts):
        raise PlanError(
            "the explorer cannot draw this model: its page takes one kind of dense layer, one kind of expert "
            "layer, and no extra blocks at the end. `meshwright plan` counts all of them"
        )
    if not changes:
        return ExploreAnswer(halves=(first,))
    batch = first.plan.recipe  # both make the same step
    same = (f"sequence={batch.sequence}", f"global_batch={batch.global_batch}")
    # A price belongs to a device: on another cluster the first one would be wrong.
    other = changes.get("cluster", cluster)
    count = int(changes["nodes"]) if "nodes" in changes else nodes
    paid = float(changes["price"]) if "price" in changes else price if other == cluster else None
    with _blame_second_half(first.plan):
        second = _half(model, other, count, words, changes.get("stack", stack), paid, same)
    return ExploreAnswer(halves=(first, second))


@contextmanager
def _blame_second_half(first: Plan) -> Iterator[None]:
    """Attribute errors to the second half. If it has no layout, its batch may be the reason."""
    try:
        yield
    except IllegalLayout as error:
        batch = first.recipe.global_batch
        hint = f"both halves make steps of {batch} sequences: give a global_batch that suits both"
        raise error.reworded("beside: ", f"; {hint}") from None
    except PlanError as error:
        raise error.reworded("beside: ") from None


def _parse_beside(words: Sequence[str]) -> dict[str, str]:
    """Parse `cluster=h200x8,nodes=4` into {key: text}.

    Raises ArgumentError for unknown or repeated keys and malformed values.
    """
    changes = {}
    for word in ",".join(words).split(",") if words else ():
        key, equals, text = (part.strip() for part in word.partition("="))
        key = "stack" if key == "for" else key
        if not equals or not text:
            raise ArgumentError("beside", word, "is not KEY=VALUE, as 'cluster=h200x8'")
        if key not in BESIDE:
            raise ArgumentError("beside", word, remedy=f"{key!r} is not known; {suggest(key, KEYS, 1)}")
        if key in changes:
            raise ArgumentError("beside", rule=f"has {key} twice", remedy="take one of them")
        changes[key] = text
    if not changes.get("nodes", "1").isdecimal():
        raise ArgumentError("beside", f"nodes={changes['nodes']}", "must be a whole number")
    if not changes.get("price", "1").replace(".", "", 1).isdecimal():
        raise ArgumentError("beside", f"price={changes['price']}", "must be a number of dollars per device-hour")
    return changes


def _half(
    model: Any, cluster: str | None, nodes: int | None, words: Sequence[str], stack: str, price: float | None,
    same: Sequence[str] = (),
) -> Half:  # fmt: skip
    """Return one half. `same`: words of the recipe that both halves share."""
    if price is not None and not 0 < price < MOST_USD:
        raise ArgumentError("price", price, f"must be above 0 and below {MOST_USD:,.0f} dollars per device-hour")
    plan, software = requested_plan(model, cluster, nodes, [*words, *same]), chosen_software(stack)
    if software is not None:
        plan = as_trained(software, plan)
    estimator = asked_estimator(plan, cluster, software.stack({}) if software else MESHWRIGHT)
    usd_per_hour, price_words = 0.0, ""  # 0 where nobody lists the device
    if price is not None:
        usd_per_hour, price_words = price, "as given"
    elif offer := shipped().lowest(plan.cluster.device.name, many=plan.cluster.nodes > 1):
        usd_per_hour, price_words = offer.usd_per_hour, offer.words
    return Half(
        plan=plan, estimator=estimator, command=_command(model, plan, cluster, nodes, words, stack),
        software=rules_of(software) if software else None, usd_per_hour=usd_per_hour, price_words=price_words,
    )  # fmt: skip


def rules_of(software: TrainingSoftware) -> SoftwareRules:
    """Return what the page needs to know about a training software."""

    def settings(plan: Plan) -> dict[str, dict[str, str]]:
        facts = software.all_facts(plan)
        return {file.name: option_words(file, facts) for file in software.files}

    return SoftwareRules(
        word=software.word, title=software.title, fixed=software.fixed(), refusals=software.refusals(),
        settings=settings, known_errors=tuple(error_sentences(software)),
    )  # fmt: skip


def _command(model: Any, plan: Plan, cluster: str | None, nodes: int | None, recipe: Sequence[str], stack: str) -> str:
    """Return the `plan` command of the same question. The page appends sequence, batch and layout, which then count."""
    words = ["meshwright", "plan", str(model) if isinstance(model, str | Path) else plan.model.name]
    words += ["--cluster", cluster] if cluster else []
    words += ["--nodes", str(nodes)] if nodes else []
    words += ["--for", stack] if stack else []
    return shlex.join([*words, *(part for word in recipe for part in ("--recipe", word))])

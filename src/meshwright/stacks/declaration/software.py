"""A training software: the layouts that it offers, its memory and time, its files, and errors of its predictions."""

import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any

from meshwright.planner.cost.stack import Stack
from meshwright.planner.search.regions import FULL_ROUNDS, PIPELINE_RULES, SPLIT_RULES, Fixed
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.spec.units import many
from meshwright.stacks.declaration.option import ConfigFile, Entry, Facts
from meshwright.stacks.declaration.plan_facts import facts_of

Refusal = Callable[[ModelShape, Layout], str]
"""Rule that returns why a software lacks a layout, as a sentence, or an empty string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """Command in launch.sh that starts the program on each node."""

    command: str
    """Command of torchrun or another launcher. The script sets $NNODES, $GPUS, $NODE_RANK, $HEAD and $PORT."""
    before: tuple[str, ...] = ()
    """Lines above the command."""
    yours: tuple[str, ...] = ()
    """Words in capitals that the user has to replace in these files."""


def not_written(plan: Plan) -> LaunchCommand:
    """Raise PlanError: files of this software are only read."""
    raise PlanError("its files are read, and none is written")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSoftware:
    """Description of a training software."""

    word: str
    """Value of --for."""
    title: str
    """Name with the version of the described files."""
    stack: Callable[[Facts], Stack]
    """Memory and time model, chosen by the facts of a file."""
    offered: dict[str, tuple[Any, ...]]
    """Offered values of each restricted field of a layout. Fields that are absent are free."""
    reasons: dict[str, str]
    """Reason why a field has no other values."""
    split_refusal: Refusal = lambda shape, layout: ""
    """Rule that reads degrees, ZeRO and the split of data parallelism only."""
    pipeline_refusal: Refusal = lambda shape, layout: ""
    """Rule that reads degrees, schedule, virtual stages and micro-batch only."""
    full_rounds: bool = False
    """True if several stages per pipeline rank need at least as many micro-batches as ranks."""
    files: tuple[ConfigFile, ...]
    """Files that are written and read. Empty = the software is not public, and only planned for."""
    also_read: tuple[ConfigFile, ...] = ()
    """Files of programs built on this software, which are read but not written."""
    named_files: tuple[ConfigFile, ...] = ()
    """Files that another file names. Advice covers them too."""
    facts: Callable[[Plan], Facts] = lambda plan: {}
    """Facts of this software alone, for its options. Raises PlanError for a model that it lacks."""
    resolve: Callable[[Facts], Facts] = lambda facts: facts
    """Inverse of `facts`: common facts from those of this software."""
    noticed: Callable[[Sequence[Entry]], Facts] = lambda entries: {}
    """Facts that a file contains without an option of the table."""
    objections: Callable[[Facts], Iterable[str]] = lambda facts: ()
    """Reasons why facts cannot be counted, one each, before they are resolved."""
    bounds: Callable[[Facts], Iterable[str]] = lambda facts: ()
    """Sentences about savings that are not counted, so that the figures are a bound."""
    variant: "Callable[[TrainingSoftware, Facts], TrainingSoftware] | None" = None
    """Variant that resolved facts select, such as sharding by another library with other options to advise."""
    shape: Callable[[Facts], ModelShape | None] = lambda facts: None
    """Model that facts name. None = the software has no names of its own, or the file none of them."""
    trained_shape: Callable[[ModelShape], ModelShape] = lambda shape: shape
    """Model with the parts that this software trains in addition."""
    launch: Callable[[Plan], LaunchCommand] = not_written
    binds_devices: bool = False
    """True if its files fix the number of devices of a run, and a step's batch covers all of them."""
    measured: tuple[str, ...] = ()
    """Sources of published rows that this software was scored on, as named in docs/accuracy.md."""
    unknown: tuple[str, ...] = ()
    """Limits of the prediction, a sentence each."""
    axes: dict[str, str]
    """Option that states each field of a layout, for advice in the words of the software."""

    def all_facts(self, plan: Plan) -> Facts:
        """Return all facts of a plan for its options. Raises PlanError for a model that it lacks."""
        return {**facts_of(plan), **self.facts(plan)}

    def fixed(self) -> Fixed:
        """Return what restricts a search to its layouts."""
        rules = {SPLIT_RULES: (self.split_refusal,), PIPELINE_RULES: (self.pipeline_refusal,)}
        rounds = {FULL_ROUNDS: (True,)} if self.full_rounds else {}
        return {**self.offered, **rules, **rounds}

    def plan_refusal(self, plan: Plan) -> str:
        """Return why it lacks a plan, or an empty string. Covers `refusal` and the number of micro-batches."""
        return self.refusal(plan.model, plan.layout) or self.round_refusal(plan)

    def round_refusal(self, plan: Plan) -> str:
        """Return why there are too few micro-batches for its interleaved schedule, or an empty string."""
        layout = plan.layout
        # While a batch grows, its first and smallest size decides.
        fewest = min(map(layout.micro_batches, plan.recipe.global_batches))
        if not self.full_rounds or layout.vp == 1 or fewest >= layout.pp:
            return ""
        return f"{self.word} interleaves stages in rounds of pp={layout.pp} micro-batches or more: a rank has {fewest}"

    def refusal(self, shape: ModelShape, layout: Layout) -> str:
        """Return why it lacks a layout, or an empty string."""
        return next(filter(None, (rule(shape, layout) for rule in self.refusals())), "")

    def refusals(self) -> tuple[Refusal, ...]:
        """Return all rules: one per restricted field, one for the split of data parallelism, one for the pipeline."""
        return (*(partial(self._no_value, field) for field in self.offered), self.split_refusal, self.pipeline_refusal)

    def _no_value(self, field: str, shape: ModelShape, layout: Layout) -> str:
        value, values = getattr(layout, field), self.offered[field]
        if value in values:
            return ""
        why = self.reasons.get(field, "")
        offered_words = ", ".join(str(word).lower() for word in values)
        return f"{self.word} has no {field}={str(value).lower()}: take {offered_words}" + (f" ({why})" if why else "")


@cache
def _errors() -> dict[str, Any]:
    # `python -m docs.stack_errors` writes the file from docs/accuracy.md; a test compares the two.
    text = files("meshwright.stacks").joinpath("published_errors.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["source"]  # type: ignore[no-any-return]  # a table of tables


def published_errors(software: TrainingSoftware) -> list[tuple[str, dict[str, Any]]]:
    """Return (source, row with rows, step, peaks, memory) for each source that the software was scored on."""
    return [(name, _errors()[name]) for name in software.measured if name in _errors()]


def error_sentences(software: TrainingSoftware) -> list[str]:
    """Return sentences on the known errors and on what cannot be predicted."""
    lines = []
    for name, row in published_errors(software):
        parts = []
        if row.get("step"):
            parts.append(f"step time {_mean(row['step'])} on {many(int(row['rows']), 'row')}")
        if row.get("memory"):
            parts.append(f"memory {_mean(row['memory'])} on {many(int(row['peaks']), 'peak')}")
        lines.append(f"Mean error on published rows of {name}: {', '.join(parts)}.")
    return lines + list(software.unknown)


def _mean(cell: str) -> str:
    return f"{cell.split(' / ')[0]}%"

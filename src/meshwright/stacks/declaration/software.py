"""A training software: which layouts it offers, how it spends memory and time, its files."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshwright.planner.cost.stack import Stack
from meshwright.planner.search.regions import FULL_ROUNDS, PIPELINE_RULES, SPLIT_RULES, Fixed
from meshwright.spec.errors import PlanError
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.shape import ModelShape
from meshwright.stacks.declaration.option import ConfigFile, Facts
from meshwright.stacks.declaration.plan_facts import facts_of
from meshwright.stacks.text.option_text import Entry

Refusal = Callable[[ModelShape, Layout], str]
"""Why a software has no such layout, as a sentence; empty = it has."""


def no_refusal(shape: ModelShape, layout: Layout) -> str:
    """It has all."""
    return ""


def nothing_more(plan: Plan) -> Facts:
    """No facts of its own."""
    return {}


def nothing_noticed(entries: Sequence[Entry]) -> Facts:
    """None."""
    return {}


def no_shape(facts: Facts) -> ModelShape | None:
    """It names models as everybody does."""
    return None


def no_sentences(facts: Facts) -> Iterable[str]:
    """None."""
    return ()


def as_read(facts: Facts) -> Facts:
    """Nothing to resolve."""
    return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """How its program is started on each node: what stands in launch.sh."""

    command: str
    """Of torchrun or another launcher; $NNODES, $GPUS, $NODE_RANK, $HEAD and $PORT are set by the script."""
    before: tuple[str, ...] = ()
    """Lines before it."""
    yours: tuple[str, ...] = ()
    """What the user has to give: words in capitals of these files."""
    processes_per_node: int = 0
    """Of srun: 0 = one, which starts the others."""


def not_written(plan: Plan) -> LaunchCommand:
    """Of a software whose files are read alone."""
    raise PlanError("its files are read, and none is written")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSoftware:
    """What is known of one."""

    word: str
    """Of --for."""
    title: str
    """With the version that the files are of."""
    stack: Callable[[Facts], Stack]
    """Its memory and time, as its file has it."""
    offered: dict[str, tuple[Any, ...]]
    """Fields of a layout with the values that it offers; an absent one is free."""
    reasons: dict[str, str]
    """Field -> why it offers no other value."""
    split_refusal: Refusal = no_refusal
    """Looks at degrees, ZeRO and the split of data parallelism only."""
    pipeline_refusal: Refusal = no_refusal
    """Looks at degrees, schedule, virtual stages and micro-batch only."""
    full_rounds: bool = False
    """Several stages of a pipeline rank want as many micro-batches as there are ranks."""
    files: tuple[ConfigFile, ...]
    """Those that it writes and reads."""
    also_read: tuple[ConfigFile, ...] = ()
    """Files of programs on top of it, which are read and not written."""
    named_files: tuple[ConfigFile, ...] = ()
    """Files that an option of its own names: advice speaks of them too."""
    facts: Callable[[Plan], Facts] = nothing_more
    """Facts of its own, for its options; PlanError where it has no such model."""
    resolve: Callable[[Facts], Facts] = as_read
    """The other way: common facts from its own."""
    noticed: Callable[[Sequence[Entry]], Facts] = nothing_noticed
    """Facts that stand in a file without being an option of the table."""
    objections: Callable[[Facts], Iterable[str]] = no_sentences
    """Why facts cannot be counted, each by itself, before they are resolved."""
    bounds: Callable[[Facts], Iterable[str]] = no_sentences
    """What facts save that is not counted: the figures are a bound, and each is named."""
    variant: "Callable[[TrainingSoftware, Facts], TrainingSoftware] | None" = None
    """The same software as resolved facts have it: sharded by another library, with other options to advise."""
    shape: Callable[[Facts], ModelShape | None] = no_shape
    """The model that facts name, where the software has names of its own."""
    launch: Callable[[Plan], LaunchCommand]
    binds_devices: bool = False
    """Its files say how many devices the run has, and a step's batch is over these."""
    measured: tuple[str, ...] = ()
    """Sources of published rows that it was scored on, as docs/accuracy.md names them."""
    unknown: tuple[str, ...] = ()
    """What the planner cannot predict of it, a sentence each."""
    axes: dict[str, str]
    """Field of a layout -> the option that states it, for advice in its own words."""

    def all_facts(self, plan: Plan) -> Facts:
        """What its options state of a plan; PlanError where it has no such model."""
        return {**facts_of(plan), **self.facts(plan)}

    def fixed(self) -> Fixed:
        """What restricts a search to its layouts."""
        rules = {SPLIT_RULES: (self.split_refusal,), PIPELINE_RULES: (self.pipeline_refusal,)}
        rounds = {FULL_ROUNDS: (True,)} if self.full_rounds else {}
        return {**self.offered, **rules, **rounds}

    def plan_refusal(self, plan: Plan) -> str:
        """Why it has no such plan; empty = it has. As `refusal`, and by the number of micro-batches."""
        return self.refusal(plan.model, plan.layout) or self.round_refusal(plan)

    def round_refusal(self, plan: Plan) -> str:
        """Why so few micro-batches do not go with its interleaved schedule; empty = they do."""
        layout = plan.layout
        fewest = min(map(layout.micro_batches, plan.recipe.global_batches))
        if not self.full_rounds or layout.vp == 1 or fewest >= layout.pp:
            return ""
        return f"{self.word} interleaves stages in rounds of pp={layout.pp} micro-batches or more: a rank has {fewest}"

    def refusal(self, shape: ModelShape, layout: Layout) -> str:
        """Why it has no such layout; empty = it has."""
        return next(filter(None, (one(shape, layout) for one in self.refusals())), "")

    def refusals(self) -> tuple[Refusal, ...]:
        """One for each field that it restricts, one for the split of data parallelism, one for the pipeline."""
        return (*(partial(self._no_value, field) for field in self.offered), self.split_refusal, self.pipeline_refusal)

    def _no_value(self, field: str, shape: ModelShape, layout: Layout) -> str:
        value, values = getattr(layout, field), self.offered[field]
        if value in values:
            return ""
        why = self.reasons.get(field, "")
        taken = ", ".join(str(one).lower() for one in values)
        return f"{self.word} has no {field}={str(value).lower()}: take {taken}" + (f" ({why})" if why else "")

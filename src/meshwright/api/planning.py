"""`plan`: the layouts of a model on a cluster, ranked, with what each would cost. Needs no torch, no GPU."""

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api.amounts import tokens_of
from meshwright.api.answer import Answer
from meshwright.api.arguments import HasPlan, checked
from meshwright.api.layout_argument import SEARCHED, Fixed, carried_layout, fixed_layout
from meshwright.api.markup import LISTED, line, table, whole
from meshwright.api.plan_reading import Section, section_words
from meshwright.api.plan_request import as_typed, asked_estimator, asked_plan, within
from meshwright.api.planned_layout import PlannedLayout, layout_cells, layout_html
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.explain import bill, failure, half_machine, limit, reasons, scale_warnings, unfit
from meshwright.planner.plan_document import document, ranked
from meshwright.planner.search.changes import enough_nodes
from meshwright.planner.search.ranking import Ranking, search
from meshwright.planner.search.recommend import recommend
from meshwright.planner.search.refused import rank_candidates
from meshwright.planner.step.budget import Budget, budget
from meshwright.planner.step.predict import Estimator
from meshwright.spec import Layout, Plan
from meshwright.spec.errors import ArgumentError, DoesNotFit, MeshwrightError

if TYPE_CHECKING:
    from meshwright.stacks.declaration.software import TrainingSoftware


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanAnswer(Answer):
    """The layouts that fit, the recommended one first, and why."""

    found: Ranking
    """As the search gave it."""
    estimator: Estimator
    fixed: Fixed
    """What of the layout was given, and not searched."""
    tokens: float = 0.0
    price: float = 0.0
    software: "TrainingSoftware | None" = None
    """Whose layouts these are; None = this package's own engine."""

    @property
    def best(self) -> PlannedLayout:
        """The recommended one: the fastest that fits with a probability of 95 %, where there is one."""
        return PlannedLayout(prediction=self.found.best[0], tokens=self.tokens)

    @property
    def alternatives(self) -> tuple[PlannedLayout, ...]:
        """The others that are listed, the fastest first."""
        return tuple(PlannedLayout(prediction=one, tokens=self.tokens) for one in self.found.best[1:])

    @property
    def plan(self) -> Plan:
        """Of the recommended layout."""
        return self.best.plan

    @cached_property
    def why(self) -> tuple[str, ...]:
        """Sentences: what each technique of the recommended layout is for."""
        return tuple(reasons(self.estimator, self.found.best[0]))

    @cached_property
    def outlook(self) -> tuple[str, ...]:
        """Sentences: a longer sequence, half the devices, the batch, the token budget."""
        best = self.found.best[0]
        half = () if self.fixed else half_machine(self.estimator, best)  # whose layout is searched freely
        said = [limit(self.estimator, best), *half]
        said += scale_warnings(self.estimator, best, self.tokens)
        return tuple(filter(None, [*said, bill(best, self.tokens, self.price) if self.tokens else ""]))

    @property
    def budget(self) -> Budget | None:
        """What the token budget takes; None = none was given."""
        best = self.found.best[0]
        if not self.tokens:
            return None
        return budget(self.tokens, best.tokens_per_step, best.step_s, best.plan.layout.world, self.price)

    @property
    def known_errors(self) -> tuple[str, ...]:
        """Sentences: how far the planner is off on published rows of that software, and what it cannot predict."""
        if self.software is None:
            return ()
        from meshwright.stacks.stack_errors import sentences

        return tuple(sentences(self.software))

    def write(self, folder: str | Path) -> list[Path]:
        """Write the software's configuration and launch scripts for the recommended layout. PlanError where a file of
        somebody else would be replaced; ArgumentError where no `stack` was asked for."""
        if self.software is None:
            raise ArgumentError("write() is for another training software: ask with stack=, or take save(FILE)")
        from meshwright.stacks.config_writing import write

        return write(self.software, self.plan, Path(folder))

    def save(self, file: str | Path) -> Path:
        """Write the recommended plan, to be run by `train`."""
        return self.best.save(file)

    def to_dict(self) -> dict[str, Any]:
        """The document that `meshwright plan --json` prints."""
        bill = self.budget
        return {
            **document(self.found.best[0]),
            **ranked(self.found),
            **({} if bill is None else {"budget": asdict(bill)}),
            **({"for": self.software.word, "known_errors": list(self.known_errors)} if self.software else {}),
        }

    def rows(self) -> list[dict[str, Any]]:
        """A row for each layout that is listed, the recommended one first."""
        return [one.row() for one in (self.best, *self.alternatives)]

    def __repr__(self) -> str:
        cluster = self.plan.cluster
        machine = f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}"
        return (
            f"{self.plan.model.name} on {machine}: {self.best} "
            f"(best of {self.found.legal:,} legal layouts, {len(self.alternatives)} alternatives)"
        )

    def _repr_html_(self) -> str:
        plan, cluster = self.plan, self.plan.cluster
        recipe = plan.recipe
        asked = (
            f"{plan.model.name} on {cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}, "
            f"{recipe.global_batch} sequences of {recipe.sequence:,} tokens per step, {recipe.precision}"
        )
        others = self.alternatives[: LISTED - 1]
        rows = [layout_cells(one) for one in (self.best, *others)]
        searched = f"{self.found.legal:,} legal layouts; {self.found.too_large:,} do not fit."
        return whole(
            line(asked),
            layout_html(self.best),
            table(("layout", "step", "tokens/s per device", "MFU (full)", "memory", "bubble"), rows) if others else "",
            *map(line, (*self.why, searched)),
        )


@checked
def plan(
    model: str | Path | Plan | HasPlan,
    *,
    cluster: str | None = None,
    nodes: int | None = None,
    layout: Section | Layout = None,
    recipe: Section = None,
    tune: str = "",
    teacher: str | Path = "",
    tokens: str | float | None = None,
    price: float = 0.0,
    listed: int | None = None,
    memory: float | None = None,
    stack: str = "",
    document_tokens: float = 0.0,
) -> PlanAnswer:
    """Rank the layouts of a model on a cluster by predicted step time.

    `model`: a preset's name, a Hugging Face folder, a plan file or a plan. `cluster`: a device and how many of it a
    node has, as "h100x8", or a file of `calibrate`. `layout` fixes some degrees: {"tp": 8}, "tp=8,zero=3", a Layout.
    `recipe`: {"sequence": 8192}. `tune`: "full", "lora", "qlora" or "lora:64", for fine-tuning's batch and adapters.
    `teacher`: of a distillation, as `model`: its weights and forward passes are counted.
    `tokens`: the budget, as "15T"; `price` of a device hour. `listed`: so many layouts.
    `memory`: GiB of each device that a layout may take (by default all that a program can have).
    `stack`: training software whose layouts, memory and time are asked about: "torchtitan", "megatron-lm", ...
    (by default this package's engine); `write` makes its files. `document_tokens`: of the document that a token is in,
    on average, where rows are packed (by default one fills its row).

    DoesNotFit where no layout does; its `answer` is the nearest one (PlannedLayout). PlanError for what makes no sense.
    """
    from meshwright.planner.search.ranking import LISTED

    asked = asked_plan(model, cluster, nodes, section_words(recipe), tune, str(teacher))
    asked = asked if memory is None else within(asked, memory)
    budget = tokens_of(tokens)
    _check_price(price, budget)
    if listed is not None and listed < 1:
        raise ArgumentError(f"listed={listed} must be at least 1")
    if isinstance(layout, Layout):
        layout = {name: getattr(layout, name) for name in SEARCHED}
    words = section_words(layout)
    with as_typed("layout", words):
        asked, searched = carried_layout(asked, words)
    fixed_degrees = fixed_layout(asked, searched)
    software, fixed = (None, fixed_degrees) if stack in ("", MESHWRIGHT.name) else _offered(stack, asked, fixed_degrees)
    if document_tokens < 0:
        raise ArgumentError(f"document_tokens={document_tokens:g} must be 0 (a document fills its row) or more")
    of = asked_estimator(asked, cluster, software.stack({}) if software else MESHWRIGHT, document_tokens)
    of = replace(of, run_steps=int(budget) // (asked.recipe.global_batch * asked.recipe.sequence))
    with as_typed("layout", words):
        found = search(of, asked, fixed=fixed, listed=listed or LISTED)
        if not found.legal and software is not None:
            from meshwright.api.stack_choice import none_offered

            raise none_offered(software, of, asked, fixed_degrees)
        if not found.legal:
            found = rank_candidates(of, asked, fixed)
    if not found.best:
        every = software.fixed() if software else {}
        free = not (fixed_degrees and search(of, asked, fixed=every, listed=1).best)
        adapted = None
        if not (tune or teacher or words) and asked.model.lora is None:
            with suppress(MeshwrightError):  # what a user would ask next, answered with its own figure
                shared: dict[str, Any] = {"nodes": nodes, "recipe": recipe, "memory": memory, "stack": stack}
                adapted = plan(model, cluster=cluster, tune="lora", listed=1, **shared).best.peak_bytes
        raise _does_not_fit(of, found, every, free=free, adapted_bytes=adapted)
    found = recommend(of, asked, found, fixed)
    del found.best[listed or LISTED :]
    return PlanAnswer(found=found, estimator=of, fixed=fixed, tokens=budget, price=price, software=software)


def _offered(stack: str, plan: Plan, given: Fixed) -> "tuple[TrainingSoftware, Fixed]":
    """The software of a word, and what is fixed of the layouts that it offers. PlanError where it has no such model or
    layout, before anything is searched."""
    from meshwright.api.stack_choice import checked_model, restricted
    from meshwright.stacks.trainer_table import software

    checked_model(software(stack), plan)
    return software(stack), restricted(software(stack), given)


def _does_not_fit(
    of: Estimator, found: Ranking, every: Fixed, *, free: bool, adapted_bytes: float | None = None
) -> Exception:
    """With the nearest layout, and its document. `every`: what any layout is restricted to. `adapted_bytes`: what
    adapters alone would need, where they fit."""
    one = found.nearest
    assert one is not None
    error = DoesNotFit(
        unfit(of, one)
        if found.legal == 1
        else failure(found, enough_nodes(of, one.plan, every) if free else 0, free=free, adapted_bytes=adapted_bytes)
    )
    error.answer, error.document = PlannedLayout(prediction=one), {**document(one), **ranked(found)}
    return error


def _check_price(price: float, tokens: float) -> None:
    if not 0 <= price < float("inf"):
        raise ArgumentError(f"price={price} must be a number of 0 (none) or more")
    if price and not tokens:
        raise ArgumentError(f"price={price} is for the bill of a run: say how long it is, as tokens=15T")

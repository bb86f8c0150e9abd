"""`plan`: the layouts of a model on a cluster, ranked, with their cost. Needs no torch, no GPU."""

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.interface.answers.answer import Answer, HasPlan, checked
from meshwright.interface.answers.markup import LISTED, line, table, whole
from meshwright.interface.planning.layouts import (
    SEARCHED,
    Fixed,
    PlannedLayout,
    as_trained,
    carried_layout,
    chosen_software,
    fixed_layout,
    layout_cells,
    layout_html,
    restricted,
)
from meshwright.interface.planning.plan_reading import Section, section_words, tokens_of
from meshwright.interface.planning.plan_request import asked_estimator, requested_plan, within
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.explain import (
    bill,
    document,
    failure,
    half_machine,
    limit,
    ranked,
    reasons,
    scale_warnings,
    unfit,
)
from meshwright.planner.search.ranking import LISTED as LISTED_LAYOUTS
from meshwright.planner.search.ranking import Ranking, search
from meshwright.planner.search.recommend import enough_nodes, rank_candidates, recommend
from meshwright.planner.step.predict import Estimator
from meshwright.planner.step.prediction import Budget, budget
from meshwright.spec import Layout, Plan, Recipe
from meshwright.spec.errors import ArgumentError, DoesNotFit, MeshwrightError, argument
from meshwright.spec.units import duration

if TYPE_CHECKING:
    from meshwright.planner.rent.goodput import Conditions, RunTiming
    from meshwright.stacks.declaration.software import TrainingSoftware


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanAnswer(Answer):
    """The layouts that fit, the recommended one first, and the reasons."""

    ranking: Ranking
    """The result of the search."""
    estimator: Estimator
    fixed: Fixed
    """Fields of the layout that were given, not searched."""
    tokens: float = 0.0
    price: float = 0.0
    software: "TrainingSoftware | None" = None
    """The training software of these layouts. None = this package's own engine."""
    conditions: "Conditions | None" = None
    """Failures, restarts and storage of the run. None = its length is not known, or other software trains it."""

    @property
    def best(self) -> PlannedLayout:
        """The recommended layout: the fastest that fits with a probability of 95 %, if there is one."""
        return PlannedLayout(prediction=self.ranking.best[0], tokens=self.tokens)

    @property
    def alternatives(self) -> tuple[PlannedLayout, ...]:
        """The other listed layouts, the fastest first."""
        return tuple(PlannedLayout(prediction=prediction, tokens=self.tokens) for prediction in self.ranking.best[1:])

    @property
    def plan(self) -> Plan:
        """Plan of the recommended layout."""
        return self.best.plan

    @cached_property
    def why(self) -> tuple[str, ...]:
        """Sentences on the purpose of each technique of the recommended layout."""
        return tuple(reasons(self.estimator, self.ranking.best[0]))

    @cached_property
    def outlook(self) -> tuple[str, ...]:
        """Sentences on the longest sequence, half the devices, warnings of scale, and the bill of the token budget."""
        best = self.ranking.best[0]
        half = () if self.fixed else half_machine(self.estimator, best)  # only of a free search
        sentences = [limit(self.estimator, best), *half]
        sentences += scale_warnings(self.estimator, best, self.tokens)
        return tuple(filter(None, [*sentences, bill(best, self.tokens, self.price) if self.tokens else ""]))

    @property
    def budget(self) -> Budget | None:
        """Time and cost of the token budget. None = none was given."""
        best = self.ranking.best[0]
        if not self.tokens:
            return None
        return budget(self.tokens, best.tokens_per_step, best.step_s, best.plan.layout.world, self.price)

    @cached_property
    def timing(self) -> "RunTiming | None":
        """Wall time of the whole run with its saves and failures."""
        if self.conditions is None:
            return None
        from meshwright.planner.rent.goodput import time_run
        from meshwright.planner.rent.run_on import checkpoint_of, steps_of

        best = self.ranking.best[0]
        steps_s = steps_of(self.tokens, best.tokens_per_step) * best.step_s
        saves, cluster = checkpoint_of(best.plan, self.conditions), best.plan.cluster
        return time_run(steps_s, best.step_s, best.plan.layout.world, cluster.nodes, saves, self.conditions)

    @property
    def weeks(self) -> str:
        """A sentence on the time with failures, and on how often to save. Empty = the length is not known."""
        if self.timing is None or self.conditions is None:
            return ""
        from meshwright.planner.rent.run_on import days

        advice = self.timing.advice(self.ranking.best[0].step_s, self.conditions.rate)
        return f"With failures, evaluation and checkpoints {days(self.timing.wall_s)}. {advice}"

    @property
    def known_errors(self) -> tuple[str, ...]:
        """Sentences on the planner's errors on published rows of that software, and on what it cannot predict."""
        if self.software is None:
            return ()
        from meshwright.stacks.declaration.software import error_sentences

        return tuple(error_sentences(self.software))

    def write(self, folder: str | Path) -> list[Path]:
        """Write the software's configuration and launch scripts for the recommended layout.

        Raises PlanError instead of replacing a user's file, ArgumentError without `stack`.
        """
        if self.software is None:
            raise ArgumentError(
                "stack",
                sentence=f"write() is for another training software: ask with {argument('stack')}, or take save(FILE)",
            )
        from meshwright.stacks.config_files import write_files

        return write_files(self.software, self.plan, Path(folder))

    def save(self, file: str | Path) -> Path:
        """Write the recommended plan, for `train`, with the interval of saves that `weeks` proposes."""
        best, recipe, timing = self.best, self.plan.recipe, self.timing
        if timing is not None and recipe.checkpoint_every == Recipe().checkpoint_every:
            # Nobody has chosen an interval of saves: the answer proposes one.
            recipe = replace(recipe, checkpoint_every=timing.save_every(best.step_seconds))
            best = replace(best, prediction=replace(best.prediction, plan=replace(self.plan, recipe=recipe)))
        return best.save(file)

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `meshwright plan --json` prints."""
        bill = self.budget
        return {
            **document(self.ranking.best[0]),
            **ranked(self.ranking),
            **({} if bill is None else {"budget": asdict(bill)}),
            **({} if self.timing is None else {"goodput": self.timing.document(self.ranking.best[0].step_s)}),
            **({"for": self.software.word, "known_errors": list(self.known_errors)} if self.software else {}),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each listed layout, the recommended one first."""
        return [layout.row() for layout in (self.best, *self.alternatives)]

    def __repr__(self) -> str:
        cluster = self.plan.cluster
        machine = f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}"
        return (
            f"{self.plan.model.name} on {machine}: {self.best} "
            f"(best of {self.ranking.legal:,} legal layouts, {len(self.alternatives)} alternatives)"
        )

    def _repr_html_(self) -> str:
        plan, cluster = self.plan, self.plan.cluster
        recipe = plan.recipe
        asked = (
            f"{plan.model.name} on {cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}, "
            f"{recipe.global_batch} sequences of {recipe.sequence:,} tokens per step, {recipe.precision}"
        )
        others = self.alternatives[: LISTED - 1]
        rows = [layout_cells(layout) for layout in (self.best, *others)]
        searched = f"{self.ranking.legal:,} legal layouts; {self.ranking.too_large:,} do not fit."
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
    mtbf: float | None = None,
    restart: float | None = None,
    repair: float | None = None,
    storage: float | None = None,
    spares: int | None = None,
) -> PlanAnswer:
    """Rank the layouts of a model on a cluster by predicted step time.

    Args:
        model: A preset, a Hugging Face folder, a plan file or a plan.
        cluster: Device and number per node, as "h100x8", or a file of `calibrate`.
        nodes: Number of nodes.
        layout: Fixed fields: {"tp": 8}, "tp=8,zero=3", or a Layout.
        recipe: Changes of the recipe, as {"sequence": 8192}.
        tune: "full", "lora", "qlora" or "lora:64": take fine-tuning's batch and adapters.
        teacher: Teacher of a distillation, given as `model`. Its weights and forward passes are counted.
        tokens: Token budget, as "15T".
        price: Dollars of a device-hour.
        listed: Number of layouts to list.
        memory: GiB of each device that a layout may use. None = all usable memory.
        stack: Training software to plan for: "torchtitan", "megatron-lm", ... `write` makes its files. Empty = this
            package's engine.
        document_tokens: Average length of the packed document around a token. 0 = the whole row.
        mtbf: Hours of a device between failures. None = as in Llama 3's run. This and what follows need `tokens`.
        restart: Seconds from a failure to the next step.
        repair: Hours until a failed node is back.
        storage: GB/s of a node, for checkpoints.
        spares: Nodes beyond those that train.

    Raises:
        DoesNotFit: No layout fits. Its `answer` is the nearest one (PlannedLayout).
        PlanError: An argument makes no sense.
    """
    asked = requested_plan(model, cluster, nodes, section_words(recipe), tune, str(teacher))
    # A lower limit is a smaller device to every rule, so the search needs no second notion of room.
    asked = asked if memory is None else within(asked, memory)
    budget = tokens_of(tokens)
    _check_price(price, budget)
    conditions = None
    failures: dict[str, Any] = {
        "mtbf": mtbf, "restart": restart, "repair": repair, "storage": storage, "spares": spares,
    }  # fmt: skip
    if budget and stack in ("", MESHWRIGHT.name):
        from meshwright.planner.rent.goodput import asked_conditions

        conditions = asked_conditions(**{**failures, "spares": spares or 0})
    elif option := next((name for name, setting in failures.items() if setting is not None), ""):
        rule = "is for the length of a run by this package's engine"
        raise ArgumentError(option, failures[option], rule, f"give {argument('tokens', '15T')}, or leave it out")
    if listed is not None and listed < 1:
        raise ArgumentError("listed", listed, "must be at least 1")
    if isinstance(layout, Layout):
        layout = {name: getattr(layout, name) for name in SEARCHED}
    words = section_words(layout)
    asked, searched = carried_layout(asked, words, stack)
    fixed_degrees = fixed_layout(asked, searched)
    software, fixed = chosen_software(stack), fixed_degrees
    if software is not None:
        asked, fixed = as_trained(software, asked), restricted(software, fixed_degrees)
    if document_tokens < 0:
        raise ArgumentError("document_tokens", document_tokens, "must be 0 (a document fills its row) or more")
    estimator = asked_estimator(asked, cluster, software.stack({}) if software else MESHWRIGHT, document_tokens)
    estimator = replace(estimator, run_steps=int(budget) // (asked.recipe.global_batch * asked.recipe.sequence))
    ranking = search(estimator, asked, fixed=fixed, listed=listed or LISTED_LAYOUTS)
    if not ranking.legal and software is not None:
        from meshwright.interface.planning.layouts import none_offered

        raise none_offered(software, estimator, asked, fixed_degrees)
    if not ranking.legal:
        ranking = rank_candidates(estimator, asked, fixed)
    if not ranking.best:
        every = software.fixed() if software else {}
        # If another layout fits, the fixed fields are to blame, and more nodes would be bad advice.
        # The refusal of a single layout names its cheapest changes instead, and a free search can take a minute.
        free = ranking.legal != 1 and not (fixed_degrees and search(estimator, asked, fixed=every, listed=1).best)
        adapted = None
        if not (tune or teacher or words) and asked.model.lora is None:
            with suppress(MeshwrightError):  # answer the next question: would adapters fit?
                shared: dict[str, Any] = {"nodes": nodes, "recipe": recipe, "memory": memory, "stack": stack}
                adapted = plan(model, cluster=cluster, tune="lora", listed=1, **shared).best.peak_bytes
        raise _does_not_fit(estimator, ranking, every, free=free, adapted_bytes=adapted)
    ranking = recommend(estimator, asked, ranking, fixed)
    # After the recommendation, which may come from below the listed ones.
    del ranking.best[listed or LISTED_LAYOUTS :]
    answer = PlanAnswer(
        ranking=ranking, estimator=estimator, fixed=fixed, tokens=budget, price=price, software=software,
        conditions=conditions,
    )  # fmt: skip
    if answer.timing is not None and answer.timing.is_endless:
        timing = answer.timing
        between, back = (duration(seconds) for seconds in (timing.mtbf_s, timing.repair_s))
        rule = f"lets no run end: the cluster fails every {between}, and a node is back after {back}"
        remedy = f"give {argument('mtbf')} of one device, not of the cluster, or more {argument('spares')}"
        name, hours = ("repair", repair) if mtbf is None else ("mtbf", mtbf)
        raise ArgumentError(name, hours, rule, remedy)
    return answer


def _does_not_fit(
    estimator: Estimator, ranking: Ranking, every: Fixed, *, free: bool, adapted_bytes: float | None = None
) -> Exception:
    """Return the error with the nearest layout.

    `every`: restrictions of all layouts. `adapted_bytes`: need of adapters.
    """
    nearest = ranking.nearest
    assert nearest is not None
    error = DoesNotFit(
        unfit(estimator, nearest)
        if ranking.legal == 1
        else failure(
            ranking, enough_nodes(estimator, nearest.plan, every) if free else 0, free=free, adapted_bytes=adapted_bytes
        )
    )
    error.answer, error.document = PlannedLayout(prediction=nearest), {**document(nearest), **ranked(ranking)}
    return error


def _check_price(price: float, tokens: float) -> None:
    if not 0 <= price < float("inf"):
        raise ArgumentError("price", price, "must be a number of 0 (none) or more")
    if price and not tokens:
        raise ArgumentError(
            "price", price, "is for the bill of a run", f"give its length, as {argument('tokens', '15T')}"
        )

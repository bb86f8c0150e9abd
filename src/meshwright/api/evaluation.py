"""`evaluate`: a model on tasks or on held-out text, alone or before and after, with the noise of each figure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api.adapters_in_turn import AdaptersInTurn
from meshwright.api.answer import Answer
from meshwright.api.arguments import Place, checked, folder_of
from meshwright.api.documents import plain
from meshwright.api.evaluation_request import check_request
from meshwright.api.markup import line, table, whole
from meshwright.api.model_opening import described, load
from meshwright.api.trained_model import TrainedModel
from meshwright.compress.gguf_reading import is_gguf_path
from meshwright.data import Tokenizer
from meshwright.data.rendering import ROLES
from meshwright.model.hub.adapter import base_folder, is_adapter
from meshwright.observe.tasks.paired_statistics import (
    Aggregate,
    Estimate,
    Verdict,
    difference,
    estimate,
    verdict,
    weighted_mean,
)
from meshwright.parallel import on_one_device
from meshwright.spec.errors import ArgumentError, DataError, PlanError
from meshwright.spec.units import many
from meshwright.store.model_place import LAST
from meshwright.training.evaluate import row_losses

if TYPE_CHECKING:
    from meshwright.observe.tasks.run_tasks import TaskFigure

HELD_OUT = "held-out"
"""What a figure on held-out text has as its task."""
TOKENS_PER_PASS = {"cpu": 8192, "cuda": 65536}
"""Of one forward pass over items of tasks."""
Progress = Callable[[int, int], None]
Loader = Callable[[], TrainedModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedFigure:
    """One metric of one task, on the same items of both models where there are two."""

    task: str
    metric: str
    items: int
    higher_is_better: bool | None
    value: Estimate
    """Of the model."""
    before: Estimate | None = None
    """Of the one it is held against."""
    difference: Estimate | None = None
    """value - before, paired by item."""
    adapter: str = ""
    """Name of the one beside the base, which is `before`; empty = a whole model."""
    verdict: Verdict | None = None
    """Whether the difference is beyond noise (two-sided 95 %)."""


@dataclass(frozen=True, kw_only=True, repr=False)
class EvaluationAnswer(Answer):
    """Figures of a model, and of another one beside."""

    run: Path
    """Where the model is."""
    against: Path | None
    figures: tuple[EvaluatedFigure, ...]

    @property
    def head(self) -> tuple[str, ...]:
        """What the `cells` of each figure are."""
        named = ("adapter",) if any(one.adapter for one in self.figures) else ()
        two = ("before", "after", "difference", "") if self.against is not None else ("value",)
        return (*named, "task", "metric", *two, "items")

    def counted(self, *kinds: Verdict) -> int:
        """Figures with one of these verdicts."""
        return sum(one.verdict in kinds for one in self.figures)

    @property
    def headline(self) -> str:
        """What the difference is, in one sentence; empty for one model."""
        if self.against is None:
            return ""
        rest: tuple[Verdict, ...] = ("worse", "changed", "within noise", "too few items")
        others = "".join(f", {self.counted(kind)} {kind}" for kind in rest if self.counted(kind))
        return f"{self.counted('better')} of {many(len(self.figures), 'figure')} better{others}"

    def to_dict(self) -> dict[str, Any]:
        """The document that `meshwright eval --json` prints."""
        found = {"model": self.run, "against": self.against, "figures": self.figures}
        return {name: plain(value) for name, value in found.items()}

    def rows(self) -> list[dict[str, Any]]:
        """A row for each figure."""
        return [
            {
                **({"adapter": one.adapter} if one.adapter else {}),
                "task": one.task, "metric": one.metric, "items": one.items, "value": one.value.value,
                "error": one.value.error, "before": one.before and one.before.value,
                "before_error": one.before and one.before.error,
                "difference": one.difference and one.difference.value,
                "difference_error": one.difference and one.difference.error, "verdict": one.verdict,
            }
            for one in self.figures
        ]  # fmt: skip

    def __repr__(self) -> str:
        return f"{self.run}: {self.headline or many(len(self.figures), 'figure')}"

    def _repr_html_(self) -> str:
        return whole(
            *([line(self.headline)] if self.against else ()),
            table(self.head, [tuple(cells(one)) for one in self.figures]),
            line("figures ± standard error; differences are paired by item"),
        )


def cells(one: EvaluatedFigure) -> Iterator[str]:
    """A figure as the cells of a row: adapter, task, metric, before, after, difference, verdict and items."""
    yield from (one.adapter, one.task, one.metric) if one.adapter else (one.task, one.metric)
    if one.before is not None:
        yield shown(one.before)
    yield shown(one.value)
    if one.difference is not None:
        yield from (shown(one.difference, sign="+"), one.verdict or "")
    yield f"{one.items:,}"


def shown(found: Estimate, sign: str = "") -> str:
    """`0.583 ± 0.149`."""
    form = f"{sign}.3f" if abs(found.value) < 1000 else f"{sign}.4g"
    error = "?" if found.error is None else format(found.error, form.lstrip("+"))
    return f"{found.value:{form}} ± {error}"


@checked
def evaluate(
    model: Place,
    *,
    tasks: str | Path | Sequence[str] = (),
    against: Place | None = None,
    adapters: Mapping[str, Place] | None = None,
    data: str | Path | None = None,
    dtype: str | None = None,
    sequences: int = 0,
    limit: int | None = None,
    shots: int | None = None,
    chat: bool = False,
    checkpoint: str = LAST,
    progress: Progress | None = None,
) -> EvaluationAnswer:
    """Score a model, a run or a Hugging Face directory, and another one (`against`) on the same items. `checkpoint` of
    the run: last, best, or a step; of `against` it is the last. `adapters`, by name, are held against the model: it is
    loaded once, and each in turn is merged into it.

    `tasks`: YAML files of lm-evaluation-harness, or folders of them, with local data; without: the held-out part of
    either run, or all of `data`. `limit`: items of a task, `sequences`: rows of text, 0 = all. `shots`: examples of an
    item, None = the task's. `chat`: the model's template. ArgumentError, DataError, PlanError without extra `eval`.
    """
    places = [str(tasks)] if isinstance(tasks, str | Path) else [str(one) for one in tasks]
    path, other = folder_of(model), None if against is None else folder_of(against)
    configs = check_request(
        path, tasks=places, against=other, adapters=adapters, data=data, dtype=dtype, sequences=sequences, limit=limit,
        shots=shots, checkpoint=checkpoint,
    )  # fmt: skip
    models: dict[str, Loader] = {"": lambda: load(path, dtype, checkpoint=checkpoint)}
    before: Loader | None = None if other is None else partial(load, other, dtype)
    if adapters:
        folders = {name: folder_of(place) for name, place in adapters.items()}
        turns = AdaptersInTurn(load(path, dtype, checkpoint=checkpoint), folders)
        models, before, other = {name: partial(turns.with_adapter, name) for name in folders}, turns.plain, path
    if configs:
        figures = _on_tasks(models, before, configs, limit, shots, chat, progress)
    else:
        if other is not None:
            _check_tokenizers(path, other)
        figures = _on_held_out(models, before, other, data, sequences)
    return EvaluationAnswer(run=path, against=other, figures=tuple(figures))


def _on_tasks(
    models: Mapping[str, Loader], before: Loader | None, configs: Sequence[dict[str, Any]], limit: int | None,
    shots: int | None, chat: bool, progress: Progress | None,
) -> list[EvaluatedFigure]:  # fmt: skip
    from meshwright.observe.tasks.run_tasks import run_tasks

    def scored(loaded: Loader) -> "list[TaskFigure]":
        return run_tasks(configs, _text_model(loaded(), chat=chat), limit=limit, shots=shots, progress=progress)

    after = [(name, one) for name, loaded in models.items() for one in scored(loaded)]  # one at a time has room
    twins = {(one.task, one.metric, one.filter): one.items for one in (scored(before) if before else ())}
    found = []
    for name, one in after:
        metric = one.metric if one.filter == "none" else f"{one.metric} ({one.filter})"
        first = twins.get((one.task, one.metric, one.filter), {}) if before else None
        figure = _figure(one.task, metric, one.figure, one.items, first, one.higher_is_better)
        found.append(replace(figure, adapter=name))
    return found


def _text_model(opened: TrainedModel, *, chat: bool) -> Any:
    from meshwright.observe.tasks.harness_model import TextModel

    if opened.tokenizer is None:
        raise PlanError(f"{opened.path} has no tokenizer.json to read a task with: put its tokenizer there")
    tokenizer, template = opened.chat_template()
    return TextModel(
        model=opened.model, tokenizer=tokenizer, begin=opened.encode, stop_ids=opened.stop_ids,
        template=template if chat else None, tokens_per_pass=TOKENS_PER_PASS[opened.model.embed.weight.device.type],
    )  # fmt: skip


def _on_held_out(
    models: Mapping[str, Loader], before: Loader | None, other: Path | None, data: str | Path | None, sequences: int
) -> list[EvaluatedFigure]:
    """Nats per token, of all and of each role; items are conversations, or windows of a text, of `other` where the
    model is no run. Of a mixture their means by weight, as the run has them, and then those of each source."""
    opening, *others = models.values()
    opened = opening()
    theirs = None if other is None or opened.plan is not None else _run_of(other)
    reads = described(theirs) if theirs is not None and (theirs / "plan.yaml").is_file() else opened
    parts = reads.held_out_rows(data, sequences, apart=True).parts

    def scored(found: TrainedModel) -> list[_ByMetric]:
        engine, device = on_one_device(found.model), found.model.embed.weight.device
        return [_by_role(row_losses(engine, one.batches(device, by_role=True)).tolist(), one.items) for one in parts]

    after = [scored(opened)]
    sources = reads.plan.data.mixture if reads.plan and len(parts) > 1 else ()
    del opened, reads  # two models need not have room at once
    after += [scored(one()) for one in others]
    own: Sequence[_ByMetric | None] = scored(before()) if before else [None] * len(parts)
    named = [(f"{HELD_OUT} {one.path}", one.weight) for one in sources] or [(HELD_OUT, 1.0)]
    found = []
    for name, scores in zip(models, after, strict=True):
        each = [_of_source(task, one, first) for (task, _), one, first in zip(named, scores, own, strict=True)]
        means = _by_weight(each, [weight for _, weight in named]) if sources else ()
        found += [replace(one, adapter=name) for one in (*means, *chain.from_iterable(each))]
    return found


_ByMetric = Mapping[str, Mapping[str, tuple[float, float]]]
"""Metric -> item -> (nats, tokens)."""


def _of_source(task: str, after: _ByMetric, before: _ByMetric | None) -> list[EvaluatedFigure]:
    return [
        _figure(task, metric, Aggregate(kind="ratio"), items, None if before is None else before[metric], False)
        for metric, items in after.items()
        if items
    ]


def _by_weight(each: Sequence[Sequence[EvaluatedFigure]], weights: Sequence[float]) -> Iterator[EvaluatedFigure]:
    """Of each metric the mean over the sources that have it."""
    for metric in dict.fromkeys(one.metric for figures in each for one in figures):
        pairs = [(one, w) for figures, w in zip(each, weights, strict=True) for one in figures if one.metric == metric]
        shares, items = [weight for _, weight in pairs], sum(one.items for one, _ in pairs)
        changes = [one.difference for one, _ in pairs if one.difference is not None]
        befores = [one.before for one, _ in pairs if one.before is not None]
        change = weighted_mean(changes, shares) if changes else None
        yield EvaluatedFigure(
            task=HELD_OUT, metric=metric, items=items, higher_is_better=False,
            value=weighted_mean([one.value for one, _ in pairs], shares),
            before=weighted_mean(befores, shares) if befores else None, difference=change,
            verdict=None if change is None else verdict(change, items, False),
        )  # fmt: skip


def _check_tokenizers(path: Path, other: Path) -> None:
    """Nats per token of two models compare where their tokens are the same."""
    one, two = (_fingerprint(place) for place in (path, other))
    if one != two:
        raise ArgumentError(
            f"against={other} has another tokenizer than {path}, so losses per token cannot be compared: "
            "compare them on tasks=, or score each alone in bits per byte"
        )


def _fingerprint(place: Path) -> str | None:
    found = described(place).tokenizer if is_gguf_path(place) else Tokenizer.load(_run_of(place))
    return found.fingerprint if found else None


def _run_of(place: Path) -> Path:
    """The folder of a run, also of one of its checkpoints; that of an adapter's model."""
    if is_adapter(place):
        return base_folder(place)
    return place if (place / "tokenizer.json").is_file() else place.resolve().parent.parent


def _by_role(found: Sequence[Sequence[Sequence[float]]], items: Sequence[int] | None) -> _ByMetric:
    """(nats, counts) of rows by role -> metric -> item -> (nats, tokens) of items that have any; of each role where
    there are several. `items`: which item each row is of, None = its own; rows behind the last are empty."""
    nats, counts = found
    present = [role for role in range(len(ROLES)) if any(row[role] for row in counts)]
    wanted = {"loss": present} | ({f"loss of {ROLES[role]}": [role] for role in present} if len(present) > 1 else {})
    sums: dict[str, dict[str, tuple[float, float]]] = {metric: {} for metric in wanted}
    for number, (own, row) in enumerate(zip(nats, counts, strict=True)):
        if not any(row):
            continue
        item = str(number if items is None else items[number])
        for metric, roles in wanted.items():
            if weight := sum(row[role] for role in roles):
                before = sums[metric].get(item, (0.0, 0.0))
                sums[metric][item] = before[0] + sum(own[role] for role in roles), before[1] + weight
    return sums


def _figure(
    task: str, metric: str, figure: Aggregate, after: Mapping[str, Any], before: Mapping[str, Any] | None,
    higher_is_better: bool | None,
) -> EvaluatedFigure:  # fmt: skip
    """DataError where two models were not asked the same."""
    if not after:
        raise DataError(f"{task}: nothing was scored for {metric}: the data is empty")
    value = estimate(list(after.values()), figure)
    if before is None:
        return EvaluatedFigure(
            task=task, metric=metric, items=len(after), higher_is_better=higher_is_better, value=value
        )
    if before.keys() != after.keys():
        raise DataError(f"{task}: {metric} has other items for one model than for the other: they cannot be paired")
    first = [before[name] for name in after]
    change = difference(first, list(after.values()), figure)
    return EvaluatedFigure(
        task=task, metric=metric, items=len(after), higher_is_better=higher_is_better, value=value,
        before=estimate(first, figure), difference=change, verdict=verdict(change, len(after), higher_is_better),
    )  # fmt: skip

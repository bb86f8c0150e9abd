"""`evaluate`: a model on tasks or held-out text, alone or before and after, with the noise of each figure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.compress.original import is_gguf_path
from meshwright.data import Tokenizer
from meshwright.data.chat.rendering import ROLES
from meshwright.formats.hub.adapter import base_folder, is_adapter
from meshwright.interface.answers.answer import Answer, Place, checked, folder_of, plain
from meshwright.interface.answers.markup import line, table, whole
from meshwright.interface.trained.opening import described, load
from meshwright.interface.trained.trained_model import TrainedModel, opened_adapter
from meshwright.model.low_rank import merge_adapter
from meshwright.parallel import on_one_device
from meshwright.spec.errors import ArgumentError, DataError, PlanError, argument
from meshwright.spec.units import many
from meshwright.spec.weights.inventory import adapter_parts
from meshwright.store.run_folder import LAST
from meshwright.training.step.evaluate import row_losses
from meshwright.verbs.eval.paired_statistics import (
    Aggregate,
    Estimate,
    Verdict,
    difference,
    estimate,
    verdict,
    weighted_mean,
)
from meshwright.verbs.eval.request import check_request

if TYPE_CHECKING:
    from meshwright.verbs.eval.run_tasks import TaskFigure

HELD_OUT = "held-out"
"""Task name of figures on held-out text."""
TOKENS_PER_PASS = {"cpu": 8192, "cuda": 65536}
"""Tokens of one forward pass over items of tasks, by device."""
Progress = Callable[[int, int], None]
Loader = Callable[[], TrainedModel]
_ByMetric = Mapping[str, Mapping[str, tuple[float, float]]]
"""Metric -> item -> (nats, tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedFigure:
    """One metric of one task, on the same items of both models if there are two."""

    task: str
    metric: str
    items: int
    higher_is_better: bool | None
    value: Estimate
    """Estimate of the model."""
    before: Estimate | None = None
    """Estimate of the model that it is compared with."""
    difference: Estimate | None = None
    """value - before, paired by item."""
    adapter: str = ""
    """Name of the adapter; `before` is then the base alone. Empty = a whole model."""
    verdict: Verdict | None = None
    """Verdict on the difference: beyond noise or not (two-sided 95 %)."""


@dataclass(frozen=True, kw_only=True, repr=False)
class EvaluationAnswer(Answer):
    """Figures of a model, alone or compared with another one."""

    run: Path
    """Path of the model."""
    against: Path | None
    figures: tuple[EvaluatedFigure, ...]

    @property
    def head(self) -> tuple[str, ...]:
        """Titles of the `cells` of a figure."""
        adapter_title = ("adapter",) if any(figure.adapter for figure in self.figures) else ()
        two = ("before", "after", "difference", "") if self.against is not None else ("value",)
        return (*adapter_title, "task", "metric", *two, "items")

    def counted(self, *kinds: Verdict) -> int:
        """Count the figures with one of these verdicts."""
        return sum(figure.verdict in kinds for figure in self.figures)

    @property
    def headline(self) -> str:
        """The difference in one sentence. Empty = one model."""
        if self.against is None:
            return ""
        rest: tuple[Verdict, ...] = ("worse", "changed", "within noise", "too few items")
        others = "".join(f", {self.counted(kind)} {kind}" for kind in rest if self.counted(kind))
        return f"{self.counted('better')} of {many(len(self.figures), 'figure')} better{others}"

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `meshwright eval --json` prints."""
        document = {"model": self.run, "against": self.against, "figures": self.figures}
        return {name: plain(value) for name, value in document.items()}

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each figure."""
        return [
            {
                **({"adapter": figure.adapter} if figure.adapter else {}),
                "task": figure.task, "metric": figure.metric, "items": figure.items, "value": figure.value.value,
                "error": figure.value.error, "before": figure.before and figure.before.value,
                "before_error": figure.before and figure.before.error,
                "difference": figure.difference and figure.difference.value,
                "difference_error": figure.difference and figure.difference.error, "verdict": figure.verdict,
            }
            for figure in self.figures
        ]  # fmt: skip

    def __repr__(self) -> str:
        return f"{self.run}: {self.headline or many(len(self.figures), 'figure')}"

    def _repr_html_(self) -> str:
        return whole(
            *([line(self.headline)] if self.against else ()),
            table(self.head, [tuple(cells(figure)) for figure in self.figures]),
            line("figures ± standard error; differences are paired by item"),
        )


def cells(figure: EvaluatedFigure) -> Iterator[str]:
    """Yield the cells of a figure: adapter, task, metric, before, after, difference, verdict and items."""
    yield from (figure.adapter, figure.task, figure.metric) if figure.adapter else (figure.task, figure.metric)
    if figure.before is not None:
        yield shown(figure.before)
    yield shown(figure.value)
    if figure.difference is not None:
        yield from (shown(figure.difference, sign="+"), figure.verdict or "")
    yield f"{figure.items:,}"


def shown(figure: Estimate, sign: str = "") -> str:
    """Format as `value ± standard error`, such as `0.583 ± 0.149`. An unknown error is `?`."""
    form = f"{sign}.3f" if abs(figure.value) < 1000 else f"{sign}.4g"
    error = "?" if figure.error is None else format(figure.error, form.lstrip("+"))
    return f"{figure.value:{form}} ± {error}"


@dataclass(slots=True)
class AdaptersInTurn:
    """Several adapters of one base in memory: each in turn is merged into its matrices and taken out again."""

    base: TrainedModel
    folders: Mapping[str, Path]
    _plain: dict[str, Tensor] = field(default_factory=dict)
    """Original matrices, on the host, of those that the current adapter changed."""

    def plain(self) -> TrainedModel:
        """Return the base as it was loaded, to the bit."""
        weights_by_name = self.base.model.state_dict()
        with torch.no_grad():
            for name, tensor in self._plain.items():
                weights_by_name[name].copy_(tensor)
        self._plain.clear()
        return self.base

    def with_adapter(self, name: str) -> TrainedModel:
        """Return the base with one adapter merged, until the next is asked for.

        Raises ArgumentError, HubError or CheckpointError when it cannot be opened, or belongs to another base.
        """
        weights_by_name = self.plain().model.state_dict()
        adapter = opened_adapter(name, self.folders[name], self.base.model, self.base.path)
        adapted = {key: parts for key in weights_by_name if (parts := adapter_parts(key, adapter.tensors))}
        # Quantized matrices are no weights of the state dict, so their adapters find nothing to merge into.
        if sum(map(len, adapted.values())) < len(adapter.tensors):
            raise ArgumentError(
                "adapter",
                name,
                "cannot be merged",
                (f"{self.base.path} holds the adapted matrices as codes. Evaluate it on the model before quantization"),
            )
        with torch.no_grad():
            for key, parts in adapted.items():
                weight = weights_by_name[key]
                # A copy, since subtracting the adapter again would leave rounding errors in the base.
                self._plain[key] = weight.to("cpu", copy=True)
                low = {part: tensor.to(weight.device) for part, tensor in parts.items()}
                weight.copy_(merge_adapter(weight.float(), low, adapter.lora))
        if not self._plain:
            raise ArgumentError("adapter", name, remedy=f"{self.folders[name]} adapts no matrix of {self.base.path}")
        return replace(self.base, path=self.folders[name])


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
    """Score a model, and another one (`against`) on the same items.

    Args:
        model: A run or a Hugging Face directory.
        tasks: YAML files of lm-evaluation-harness with local data, or folders of them. Empty = held-out text.
        against: The model to compare with, at its last checkpoint.
        adapters: Adapters by name, compared with the model. It is loaded once, and each is merged in turn.
        data: Text to score in full. None = the held-out part of either run.
        dtype: Dtype of the weights. None = as trained or stored.
        sequences: Most rows of text, 0 = all.
        limit: Most items of a task. None = all.
        shots: Examples before each item. None = as the task says.
        chat: Write prompts with the model's chat template.
        checkpoint: Checkpoint of the run: last, best, or a step.
        progress: Called with the numbers of finished and of all requests.

    Raises:
        ArgumentError, DataError: Arguments or data make no sense.
        PlanError: The extra `eval` is not installed.
    """
    task_paths = [str(tasks)] if isinstance(tasks, str | Path) else [str(task) for task in tasks]
    path, other = folder_of(model, checkpoint), None if against is None else folder_of(against)
    configs = check_request(
        path, tasks=task_paths, against=other, adapters=adapters, data=data, dtype=dtype, sequences=sequences,
        limit=limit, shots=shots, checkpoint=checkpoint,
    )  # fmt: skip
    models: dict[str, Loader] = {"": lambda: load(path, dtype, checkpoint=checkpoint)}
    before: Loader | None = None if other is None else partial(load, other, dtype)
    if adapters:
        folders = {name: folder_of(adapter) for name, adapter in adapters.items()}
        in_turn = AdaptersInTurn(load(path, dtype, checkpoint=checkpoint), folders)
        models, before, other = {name: partial(in_turn.with_adapter, name) for name in folders}, in_turn.plain, path
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
    from meshwright.verbs.eval.run_tasks import run_tasks

    def scored(loaded: Loader) -> "list[TaskFigure]":
        return run_tasks(configs, _text_model(loaded(), chat=chat), limit=limit, shots=shots, progress=progress)

    # One model at a time, since two may not have room.
    after = [(name, scores) for name, loaded in models.items() for scores in scored(loaded)]
    twins = {(scores.task, scores.metric, scores.filter): scores.items for scores in (scored(before) if before else ())}
    figures = []
    for name, scores in after:
        metric = scores.metric if scores.filter == "none" else f"{scores.metric} ({scores.filter})"
        items_before = twins.get((scores.task, scores.metric, scores.filter), {}) if before else None
        figure = _figure(scores.task, metric, scores.figure, scores.items, items_before, scores.higher_is_better)
        figures.append(replace(figure, adapter=name))
    return figures


def _text_model(opened: TrainedModel, *, chat: bool) -> Any:
    from meshwright.verbs.eval.harness_model import TextModel

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
    """Return nats per token, of all tokens and of each role; of a mixture the weighted means, then each source.

    Items are conversations, or windows of a text, taken from `other` when the model is no run.
    """
    open_first, *others = models.values()
    opened = open_first()
    # Both models read the same rows, held out by whichever of them is a run.
    theirs = None if other is None or opened.plan is not None else _run_of(other)
    reads = described(theirs) if theirs is not None and (theirs / "plan.yaml").is_file() else opened
    parts = reads.held_out_rows(data, sequences, apart=True).parts

    def scored(loaded: TrainedModel) -> list[_ByMetric]:
        engine, device = on_one_device(loaded.model), loaded.model.embed.weight.device
        return [_by_role(row_losses(engine, part.batches(device, by_role=True)).tolist(), part.items) for part in parts]

    after = [scored(opened)]
    sources = reads.plan.data.mixture if reads.plan and len(parts) > 1 else ()
    del opened, reads  # frees the memory, since two models may not have room
    after += [scored(open_other()) for open_other in others]
    scores_before: Sequence[_ByMetric | None] = scored(before()) if before else [None] * len(parts)
    titles_and_weights = [(f"{HELD_OUT} {source.path}", source.weight) for source in sources] or [(HELD_OUT, 1.0)]
    figures = []
    for name, scores in zip(models, after, strict=True):
        figures_by_source = [
            _source_figures(task, metrics, first)
            for (task, _), metrics, first in zip(titles_and_weights, scores, scores_before, strict=True)
        ]
        means = _weighted_means(figures_by_source, [weight for _, weight in titles_and_weights]) if sources else ()
        figures += [replace(figure, adapter=name) for figure in (*means, *chain.from_iterable(figures_by_source))]
    return figures


def _source_figures(task: str, after: _ByMetric, before: _ByMetric | None) -> list[EvaluatedFigure]:
    return [
        _figure(task, metric, Aggregate(kind="ratio"), items, None if before is None else before[metric], False)
        for metric, items in after.items()
        if items
    ]


def _weighted_means(each: Sequence[Sequence[EvaluatedFigure]], weights: Sequence[float]) -> Iterator[EvaluatedFigure]:
    """Yield the mean of each metric over the sources that have it."""
    for metric in dict.fromkeys(figure.metric for figures in each for figure in figures):
        pairs = [
            (figure, weight)
            for figures, weight in zip(each, weights, strict=True)
            for figure in figures
            if figure.metric == metric
        ]
        shares, items = [weight for _, weight in pairs], sum(figure.items for figure, _ in pairs)
        changes = [figure.difference for figure, _ in pairs if figure.difference is not None]
        befores = [figure.before for figure, _ in pairs if figure.before is not None]
        change = weighted_mean(changes, shares) if changes else None
        yield EvaluatedFigure(
            task=HELD_OUT, metric=metric, items=items, higher_is_better=False,
            value=weighted_mean([figure.value for figure, _ in pairs], shares),
            before=weighted_mean(befores, shares) if befores else None, difference=change,
            verdict=None if change is None else verdict(change, items, False),
        )  # fmt: skip


def _check_tokenizers(path: Path, other: Path) -> None:
    """Raise ArgumentError for models whose nats per token do not compare, since their tokens differ."""
    fingerprint, other_fingerprint = _fingerprint(path), _fingerprint(other)
    if fingerprint != other_fingerprint:
        raise ArgumentError(
            "against",
            other,
            f"has another tokenizer than {path}, so losses per token cannot be compared",
            f"compare them on {argument('tasks')}, or score each alone in bits per byte",
        )


def _fingerprint(path: Path) -> str | None:
    tokenizer = described(path).tokenizer if is_gguf_path(path) else Tokenizer.load(_run_of(path))
    return tokenizer.fingerprint if tokenizer else None


def _run_of(path: Path) -> Path:
    if is_adapter(path):
        return base_folder(path)
    return path if (path / "tokenizer.json").is_file() else path.resolve().parent.parent


def _by_role(losses: Sequence[Sequence[Sequence[float]]], items: Sequence[int] | None) -> _ByMetric:
    """Sum losses, (nats, counts) of rows by role: metric -> item -> (nats, tokens). Each of several roles is a metric.

    `items`: the item of each row, None = each row is an item. Empty rows are skipped.
    """
    nats, counts = losses
    present = [role for role in range(len(ROLES)) if any(row[role] for row in counts)]
    wanted = {"loss": present} | ({f"loss of {ROLES[role]}": [role] for role in present} if len(present) > 1 else {})
    sums: dict[str, dict[str, tuple[float, float]]] = {metric: {} for metric in wanted}
    for number, (row_nats, row) in enumerate(zip(nats, counts, strict=True)):
        if not any(row):
            continue
        name = str(number if items is None else items[number])
        for metric, roles in wanted.items():
            if weight := sum(row[role] for role in roles):
                before = sums[metric].get(name, (0.0, 0.0))
                sums[metric][name] = before[0] + sum(row_nats[role] for role in roles), before[1] + weight
    return sums


def _figure(
    task: str, metric: str, figure: Aggregate, after: Mapping[str, Any], before: Mapping[str, Any] | None,
    higher_is_better: bool | None,
) -> EvaluatedFigure:  # fmt: skip
    """Return the figure of a metric. Raises DataError if two models were scored on different items."""
    if not after:
        raise DataError(f"{task}: nothing was scored for {metric}: the data is empty")
    after_estimate = estimate(list(after.values()), figure)
    if before is None:
        return EvaluatedFigure(
            task=task, metric=metric, items=len(after), higher_is_better=higher_is_better, value=after_estimate
        )
    if before.keys() != after.keys():
        raise DataError(f"{task}: {metric} has different items for the two models: they cannot be paired")
    first = [before[name] for name in after]
    change = difference(first, list(after.values()), figure)
    return EvaluatedFigure(
        task=task, metric=metric, items=len(after), higher_is_better=higher_is_better,
        value=after_estimate, before=estimate(first, figure), difference=change,
        verdict=verdict(change, len(after), higher_is_better),
    )  # fmt: skip

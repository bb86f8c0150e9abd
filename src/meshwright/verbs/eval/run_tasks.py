"""A model on the items of tasks, scored by lm-evaluation-harness item by item.

This module imports lm_eval (`pip install meshwright[eval]`), so import it only to run a task.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import lm_eval.api.task
from lm_eval.api.metrics import mean
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from meshwright.spec.errors import DataError, MeshwrightError
from meshwright.verbs.eval.harness_model import HarnessModel, TextModel
from meshwright.verbs.eval.paired_statistics import Aggregate
from meshwright.verbs.eval.request import write_task

SEED = 1234
"""Seed of the examples in prompts; lm_eval's own."""
_QUIET = ("lm_eval", "datasets", "fsspec", "filelock", "urllib3")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFigure:
    """One metric of one task, by item."""

    task: str
    metric: str
    filter: str
    """Filter applied to answers before. `none` = no filter."""
    items: Mapping[str, Any]
    """Contribution of each item, by its number and content: equal names are the same item."""
    figure: Aggregate
    higher_is_better: bool | None


def run_tasks(
    configs: Sequence[Mapping[str, Any]],
    text: TextModel,
    *,
    limit: int | None = None,
    shots: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[TaskFigure]:
    """Run every task on the model.

    Raises DataError when the harness cannot read a task or its data.

    Args:
        limit: First items of each task. None = all.
        shots: Examples before each prompt. None = the task's default.
    """
    with _silenced(), TemporaryDirectory(prefix="meshwright-tasks-") as folder:
        loaded = [_load(config, Path(folder)) for config in configs]
        tasks = {name: task for entry in loaded for name, task in entry["tasks"].items()}
        for task in tasks.values():
            if shots is not None or task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=shots or 0)
            task.set_fewshot_seed(seed=SEED)
        # Bootstrap is off in the harness: errors are computed here, paired by item.
        evaluation = _evaluate(tasks, HarnessModel(text, progress=progress), limit, chat=text.template is not None)
    return [figure for name, task in tasks.items() for figure in _figures(name, task, evaluation)]


def _load(config: Mapping[str, Any], folder: Path) -> Any:
    if "dataset_kwargs" in config:  # a temporary cache: no leftovers, no stale data
        config = {**config, "dataset_kwargs": {**config["dataset_kwargs"], "cache_dir": str(folder / "data")}}
    try:
        return TaskManager(include_defaults=False).load([str(write_task(config, folder))])
    except Exception as error:  # errors of a task's code, YAML or data
        raise _failure(f"task {config['task']} ({config['include']}) cannot be loaded", error) from error


def _evaluate(tasks: Mapping[str, Any], model: HarnessModel, limit: int | None, *, chat: bool) -> Any:
    try:
        return evaluate(
            model, {"tasks": dict(tasks), "groups": {}}, limit=limit, bootstrap_iters=0, log_samples=True,
            apply_chat_template=chat, fewshot_as_multiturn=chat,
        )  # fmt: skip
    except MeshwrightError:
        raise
    except Exception as error:
        raise _failure(f"the tasks {', '.join(tasks)} fail", error) from error


def _failure(what: str, error: Exception) -> DataError:
    return DataError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}")


def _figures(name: str, task: Any, evaluation: Any) -> Iterator[TaskFigure]:
    samples: dict[tuple[str, str], dict[str, Any]] = {}
    for sample in evaluation["samples"][name]:
        # The hash of the content guards against pairing items of two versions of a data set.
        item_name = f"{sample['doc_id']} {sample['doc_hash']}"
        for metric in sample["metrics"]:
            samples.setdefault((metric, sample["filter"]), {})[item_name] = sample[metric]
    better = evaluation["higher_is_better"].get(name) or {}
    for (metric, chosen), items in samples.items():
        combine = task.aggregation().get(metric, mean)
        figure = Aggregate(kind="mean") if combine is mean else Aggregate(kind="other", combine=combine)
        yield TaskFigure(
            task=name, metric=metric, filter=chosen, items=items,
            figure=figure, higher_is_better=better.get(metric),
        )  # fmt: skip


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Suppress notes and progress bars of the harness and its data sets."""
    loggers = [logging.getLogger(name) for name in _QUIET]
    levels = [logger.level for logger in loggers]
    bars, requests_bar = datasets.are_progress_bars_disabled(), lm_eval.api.task.tqdm
    lm_eval.api.task.tqdm = lambda items, **_: items  # no public switch
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other libraries
            yield
    finally:
        lm_eval.api.task.tqdm = requests_bar
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()

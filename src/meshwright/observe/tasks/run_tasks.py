"""A model on the items of tasks: what lm-evaluation-harness makes of its answers, item by item.

Imports lm_eval (`pip install meshwright[eval]`): import this module only where a task is to be run.
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

from meshwright.observe.tasks.harness_model import HarnessModel, TextModel
from meshwright.observe.tasks.paired_statistics import Aggregate
from meshwright.observe.tasks.task_files import write_task
from meshwright.spec.errors import DataError, MeshwrightError

SEED = 1234
"""Of the choice of examples in prompts; lm_eval's own."""
_QUIET = ("lm_eval", "datasets", "fsspec", "filelock", "urllib3")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFigure:
    """One metric of one task, by item."""

    task: str
    metric: str
    filter: str
    """What was taken out of answers before; `none` = nothing."""
    items: Mapping[str, Any]
    """What each item gave, by its number and content: equal names are the same item."""
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
    """Every task on the model. `limit`: the first items of each task alone; `shots`: examples in front of each prompt,
    None = as the task says. DataError: a task, or data of it, that the harness cannot read."""
    with _quiet(), TemporaryDirectory(prefix="meshwright-tasks-") as folder:
        loaded = [_loaded(config, Path(folder)) for config in configs]
        tasks = {name: task for one in loaded for name, task in one["tasks"].items()}
        for task in tasks.values():
            if shots is not None or task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=shots or 0)
            task.set_fewshot_seed(seed=SEED)
        found = _evaluated(tasks, HarnessModel(text, progress=progress), limit, chat=text.template is not None)
    return [figure for name, task in tasks.items() for figure in _figures(name, task, found)]


def _loaded(config: Mapping[str, Any], folder: Path) -> Any:
    if "dataset_kwargs" in config:  # nothing is left behind, nothing old is taken
        config = {**config, "dataset_kwargs": {**config["dataset_kwargs"], "cache_dir": str(folder / "data")}}
    try:
        return TaskManager(include_defaults=False).load([str(write_task(config, folder))])
    except Exception as error:  # whatever a task's own code, YAML and data fail with
        raise _failed(f"task {config['task']} ({config['include']}) cannot be loaded", error) from error


def _evaluated(tasks: Mapping[str, Any], model: HarnessModel, limit: int | None, *, chat: bool) -> Any:
    try:
        return evaluate(
            model, {"tasks": dict(tasks), "groups": {}}, limit=limit, bootstrap_iters=0, log_samples=True,
            apply_chat_template=chat, fewshot_as_multiturn=chat,
        )  # fmt: skip
    except MeshwrightError:
        raise
    except Exception as error:
        raise _failed(f"the tasks {', '.join(tasks)} fail", error) from error


def _failed(what: str, error: Exception) -> DataError:
    return DataError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}")


def _figures(name: str, task: Any, found: Any) -> Iterator[TaskFigure]:
    """Every metric of a task with every filter."""
    samples: dict[tuple[str, str], dict[str, Any]] = {}
    for sample in found["samples"][name]:
        item = f"{sample['doc_id']} {sample['doc_hash']}"
        for metric in sample["metrics"]:
            samples.setdefault((metric, sample["filter"]), {})[item] = sample[metric]
    better = found["higher_is_better"].get(name) or {}
    for (metric, chosen), items in samples.items():
        yield TaskFigure(
            task=name, metric=metric, filter=chosen, items=items,
            figure=_figure(task.aggregation().get(metric, mean)), higher_is_better=better.get(metric),
        )  # fmt: skip


def _figure(combine: Callable[[Sequence[Any]], float]) -> Aggregate:
    return Aggregate(kind="mean") if combine is mean else Aggregate(kind="other", combine=combine)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the notes and bars of the harness and of its data sets."""
    loggers = [logging.getLogger(name) for name in _QUIET]
    levels = [logger.level for logger in loggers]
    bars, requests_bar = datasets.are_progress_bars_disabled(), lm_eval.api.task.tqdm
    lm_eval.api.task.tqdm = lambda items, **_: items  # has no switch of its own
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other people's libraries
            yield
    finally:
        lm_eval.api.task.tqdm = requests_bar
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()

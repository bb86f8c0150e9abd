"""Arguments of `evaluate` and its task files, read and checked before torch and the harness are imported.

Tasks are YAML files of lm-evaluation-harness with data next to them: paths of data are relative to the file. Nothing is
downloaded, so data of the hub is refused at the start.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from meshwright.data.preparation import check_text
from meshwright.spec.errors import ArgumentError, DataError, argument
from meshwright.spec.extras import require
from meshwright.store.run_folder import LAST, check_model

BUILDERS: Final = ("json", "csv", "parquet", "text", "arrow")
"""Values of `dataset_path` besides a folder: formats whose files `dataset_kwargs.data_files` names."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no annotations
    """YAML loader that allows `!function module.name` without following it."""


# Task files name Python functions by tags. Resolving them would run code of the file while it is only read.
_Loader.add_multi_constructor("!", lambda loader, tag, node: f"{tag} {getattr(node, 'value', '')}")


def task_configs(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Return `include`, `task` and the location of its data for each task in files and folders.

    A folder means every task in it. Raises DataError: no such path, no task in it, two of one name, data that is not
    local.
    """
    configs: dict[str, dict[str, Any]] = {}
    for given_path in paths:
        path = Path(given_path).expanduser()
        if not path.exists():
            raise DataError(
                f"{argument('tasks', given_path)} does not exist: name a task's YAML file, or a folder of them"
            )
        files = sorted(path.glob("**/*.yaml")) if path.is_dir() else [path]
        tasks = [(file, content) for file in files if isinstance((content := _read(file)).get("task"), str)]
        if not tasks:
            what = "holds no task: no .yaml file there" if path.is_dir() else "is no task: it"
            raise DataError(f"{argument('tasks', given_path)} {what} names one with 'task: NAME'")
        for file, content in tasks:
            name = content["task"]
            if name in configs:
                raise DataError(
                    f"{argument('tasks')}: two tasks are named {name}, in {configs[name]['include']} and in {file}"
                )
            configs[name] = {"include": str(file.resolve()), "task": name, **_data_location(file, content)}
    return list(configs.values())


def write_task(config: Mapping[str, Any], folder: Path) -> Path:
    """Write a task as the next numbered YAML file in `folder`, for the harness, and return its path."""
    path = folder / f"{len(list(folder.iterdir()))}.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return path


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a file and its includes, with absolute file names. Raises DataError."""
    try:
        content = _Loader(file.read_text(encoding="utf-8")).get_single_data()
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{argument('tasks', file)} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise DataError(f"{argument('tasks', file)} is no task: a YAML mapping with 'task: NAME' is needed")
    # Before includes are joined: paths are relative to the file that states them.
    content = {**content, **_resolve_data_paths(file, content)}
    included = content.pop("include", ())
    for name in reversed([included] if isinstance(included, str) else list(included)):
        content = {**_read(file.parent / name), **content}
    return content


def _resolve_data_paths(file: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return absolute paths of the data files, or of the data folder, that the file names."""
    resolved: dict[str, Any] = {}
    options = content.get("dataset_kwargs")
    if isinstance(options, dict) and "data_files" in options:
        resolved["dataset_kwargs"] = {**options, "data_files": _absolute(file, options["data_files"])}
    data_path = content.get("dataset_path")
    if isinstance(data_path, str) and (file.parent / data_path).is_dir():
        resolved["dataset_path"] = str((file.parent / data_path).resolve())
    return resolved


def _absolute(file: Path, names: Any) -> Any:
    """Make file names absolute: one, a list, or a table of splits."""
    if isinstance(names, dict):
        return {split: _absolute(file, part) for split, part in names.items()}
    if isinstance(names, list):
        return [_absolute(file, part) for part in names]
    path = (file.parent / str(names)).resolve()
    if "*" not in str(names) and not path.is_file():
        raise DataError(f"{argument('tasks', file)}: data_files names {names}, and there is no {path}")
    return str(path)


def _data_location(file: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the location of the task's data. Raises DataError when it is not on this machine."""
    data_path, options = content.get("dataset_path"), content.get("dataset_kwargs") or {}
    makes_its_own = "class" in content or "custom_dataset" in content
    names_files = data_path in BUILDERS and isinstance(options, dict) and options.get("data_files")
    if not (makes_its_own or names_files or (isinstance(data_path, str) and Path(data_path).is_dir())):
        raise DataError(
            f"{argument('tasks', file)}: its data (dataset_path: {data_path}) is not on this machine: give a "
            "folder, or dataset_path: json with dataset_kwargs.data_files. Nothing is downloaded"
        )
    return {name: content[name] for name in ("dataset_path", "dataset_kwargs") if name in content}


def check_request(
    model: Path, *, tasks: Sequence[str] = (), against: Path | None = None, adapters: Mapping[str, Any] | None = None,
    data: str | Path | None = None, dtype: str | None = None, sequences: int = 0, limit: int | None = None,
    shots: int | None = None, checkpoint: str = LAST,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the names and configurations of the tasks for the harness.

    Raises ArgumentError for arguments out of range or in conflict, RunError without a model, DataError for `tasks` and
    `data`, PlanError without the extra `eval`.
    """
    if tasks and data is not None:
        raise ArgumentError(
            "tasks", tasks[0], f"and {argument('data', data)} cannot be scored together", "give one of them"
        )
    for name, number, least in (("limit", limit, 1), ("shots", shots, 0), ("sequences", sequences, 0)):
        if number is not None and number < least:
            raise ArgumentError(name, number, f"must be {least} or more")
    check_model(model, dtype=dtype, checkpoint=checkpoint)
    if against is not None:
        check_model(against, named="against")
        if adapters:
            raise ArgumentError(
                "against",
                against,
                "cannot be combined with adapters",
                "leave one of them out. Adapters are compared with the model itself",
            )
    if data is not None:
        check_text(data)
    if tasks:
        require("eval", f"tasks={tasks[0]}")
    return task_configs(tasks) if tasks else []

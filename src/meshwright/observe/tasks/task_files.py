"""Tasks of lm-evaluation-harness from local files: YAML as the harness reads it, with data beside it.

Paths of data in a YAML file are those beside that file. Nothing is downloaded: data of the hub is refused at the start.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from meshwright.spec.errors import DataError

BUILDERS: Final = ("json", "csv", "parquet", "text", "arrow")
"""What `dataset_path` may be beside a folder: a format whose files `dataset_kwargs.data_files` names."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no annotations
    """YAML in which `!function module.name` is allowed and not followed."""


_Loader.add_multi_constructor("!", lambda loader, tag, node: f"{tag} {getattr(node, 'value', '')}")


def task_configs(places: Sequence[str]) -> list[dict[str, Any]]:
    """Of each task in files and folders, what tells the harness where it is: `include`, `task`, and where its data is.

    A folder means every task in it. DataError: no such place, no task in it, two of one name, data that is not local.
    """
    found: dict[str, dict[str, Any]] = {}
    for place in places:
        path = Path(place).expanduser()
        if not path.exists():
            raise DataError(f"--tasks {place} does not exist: name a task's YAML file, or a folder of them")
        files = sorted(path.glob("**/*.yaml")) if path.is_dir() else [path]
        tasks = [(file, said) for file in files if isinstance((said := _read(file)).get("task"), str)]
        if not tasks:
            what = "holds no task: no .yaml file there" if path.is_dir() else "is no task: it"
            raise DataError(f"--tasks {place} {what} names one with 'task: NAME'")
        for file, said in tasks:
            name = said["task"]
            if name in found:
                raise DataError(f"--tasks: two tasks are named {name}, in {found[name]['include']} and in {file}")
            found[name] = {"include": str(file.resolve()), "task": name, **_data(file, said)}
    return list(found.values())


def write_task(config: Mapping[str, Any], folder: Path) -> Path:
    """A YAML file that the harness reads."""
    path = folder / f"{len(list(folder.iterdir()))}.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return path


def _read(file: Path) -> dict[str, Any]:
    """What a file and those that it includes say, each file name in it made absolute. DataError."""
    try:
        said = _Loader(file.read_text(encoding="utf-8")).get_single_data()
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"--tasks {file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(said, dict):
        raise DataError(f"--tasks {file} is no task: a YAML mapping with 'task: NAME' is needed")
    said = {**said, **_local(file, said)}
    included = said.pop("include", ())
    for name in reversed([included] if isinstance(included, str) else list(included)):
        said = {**_read(file.parent / name), **said}
    return said


def _local(file: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    """Names of data files, and a folder of data, where the file itself names them."""
    found: dict[str, Any] = {}
    given = said.get("dataset_kwargs")
    if isinstance(given, dict) and "data_files" in given:
        found["dataset_kwargs"] = {**given, "data_files": _beside(file, given["data_files"])}
    place = said.get("dataset_path")
    if isinstance(place, str) and (file.parent / place).is_dir():
        found["dataset_path"] = str((file.parent / place).resolve())
    return found


def _beside(file: Path, names: Any) -> Any:
    """File names made absolute: one, a list of them, or a table of splits."""
    if isinstance(names, dict):
        return {split: _beside(file, some) for split, some in names.items()}
    if isinstance(names, list):
        return [_beside(file, some) for some in names]
    path = (file.parent / str(names)).resolve()
    if "*" not in str(names) and not path.is_file():
        raise DataError(f"--tasks {file}: data_files names {names}, and there is no {path}")
    return str(path)


def _data(file: Path, said: Mapping[str, Any]) -> dict[str, Any]:
    """Where the task's data is. DataError where that is not on this machine."""
    place, given = said.get("dataset_path"), said.get("dataset_kwargs") or {}
    makes_its_own = "class" in said or "custom_dataset" in said
    named = place in BUILDERS and isinstance(given, dict) and given.get("data_files")
    if not (makes_its_own or named or (isinstance(place, str) and Path(place).is_dir())):
        raise DataError(
            f"--tasks {file}: its data (dataset_path: {place}) is not on this machine: give a folder, or "
            "dataset_path: json with dataset_kwargs.data_files. Nothing is downloaded"
        )
    return {name: said[name] for name in ("dataset_path", "dataset_kwargs") if name in said}

"""Relative paths: in a plan file they start at the file's folder, in a Plan and on a command line at the current one.

A plan file therefore names the same files from any current folder. A run's own plan.yaml always names the run that
contains it, even after the folder was moved or renamed.
"""

import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from meshwright.planfile.text import Node
from meshwright.spec import presets
from meshwright.spec.plan.plan import CHAT_FORMATS, RANDOM, Plan

PLAN_FILE = "plan.yaml"
"""File name of the plan in a run folder."""
DEFAULT_RUN = next(str(field.default) for field in fields(Plan) if field.name == "run")
WORDS = {
    "data.path": ("stdlib",), "data.tokenizer": ("auto", "bytes"), "data.template": ("auto", *CHAT_FORMATS),
    "model.init": (RANDOM,), "teacher.init": (RANDOM,), "run": (),
}  # fmt: skip
DATA_PATHS = ("path", "tokenizer", "template")
PRESETS = ("model.preset", "teacher.preset")
"""Keys whose value is the name of a preset or a path."""
PREFIXES = {"data.path": ("hub:",), "data.tokenizer": ("bpe:",)}
"""Prefixes of values that are not paths, by key."""


def located(tree: Node, file: Path) -> Node:
    """Return the tree of a plan file with its relative paths rewritten for the current folder."""
    if not isinstance(tree.value, dict):
        return tree
    items = dict(tree.value)
    # ".." and symbolic links mean what the file system says, not what the words say
    folder = Path(os.path.realpath(file.parent))
    run = items.get("run")
    named = run is not None and isinstance(run.value, str)
    started = _started_in(folder, run) if run is not None and named and file.name == PLAN_FILE else None
    base = started or folder
    # the plan of a run may have been moved with its folder: the run is where the file is
    if started is not None and run is not None:
        items["run"] = Node(shown(folder), run.where)
    elif run is None or named:
        items["run"] = _moved(run or Node(DEFAULT_RUN, ""), "run", base)
    for section, key in (("data", "path"), ("model", "preset"), ("teacher", "preset")):
        node = items.get(section)
        if node is not None and isinstance(node.value, str):
            items[section] = _moved(node, f"{section}.{key}", base)
        elif node is not None and isinstance(node.value, dict):
            items[section] = Node({k: _moved_in(v, f"{section}.{k}", base) for k, v in node.value.items()}, node.where)
    return Node(items, tree.where)


def written(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the document of `dump` with paths as they belong into a file in `folder`.

    A relative path stays relative when the file is in the current folder or above the path. Otherwise it becomes
    absolute.
    """
    here = Path.cwd()
    folder = Path(os.path.realpath(folder))
    if folder == Path(os.path.realpath(here)):
        return document

    def full(key: str, path: str) -> str:
        if not _is_path(key, path) or (key == "run" and path == DEFAULT_RUN):
            return path
        whole = Path(os.path.normpath(Path(os.path.realpath(here)) / path))
        return _no_word(key, str(whole.relative_to(folder))) if folder in whole.parents else str(whole)

    data, model = dict(document["data"]), dict(document["model"])
    data |= {key: full(f"data.{key}", data[key]) for key in DATA_PATHS}
    data["mixture"] = [{**source, "path": full("data.path", source["path"])} for source in data["mixture"]]
    model |= {"init": full("model.init", model["init"])} if "init" in model else {}
    moved = {**document, "model": model, "data": data, "run": full("run", document["run"])}
    if "init" in (teacher := document.get("teacher") or {}):
        moved["teacher"] = {**teacher, "init": full("teacher.init", teacher["init"])}
    return moved


def absolute(plan: Plan) -> Plan:
    """Return the plan with absolute paths, so that equal locations compare equal."""
    return _with_paths(plan, lambda value: os.path.realpath(os.path.expanduser(value)))


def without_folders(plan: Plan) -> Plan:
    """Return the plan with only the last part of each path, for readers on other machines."""
    return _with_paths(plan, lambda value: Path(value).name or value)


def _with_paths(plan: Plan, change: Callable[[str], str]) -> Plan:
    def changed(key: str, path: str) -> str:
        return change(path) if _is_name(key, path) else path

    paths: dict[str, Any] = {key: changed(f"data.{key}", getattr(plan.data, key)) for key in DATA_PATHS}
    mixture = tuple(replace(source, path=changed("data.path", source.path)) for source in plan.data.mixture)
    data = replace(plan.data, **paths, mixture=mixture)
    init, teacher = changed("model.init", plan.init), changed("teacher.init", plan.teacher_init)
    return replace(plan, data=data, run=changed("run", plan.run), init=init, teacher_init=teacher)


def shown(path: Path) -> str:
    """Return a path relative to the current folder if it lies below it."""
    here = Path(os.path.realpath(Path.cwd()))
    return str(path.relative_to(here)) if here in path.parents else str(path)


def _moved_in(node: Node, key: str, base: Path) -> Node:
    """Apply `_moved` to a value, and to the path of each source in data.mixture."""
    if key != "data.mixture" or not isinstance(node.value, list):
        return _moved(node, key, base)
    sources = [
        Node({k: _moved(v, f"data.{k}", base) for k, v in source.value.items()}, source.where)
        if isinstance(source.value, dict)
        else source
        for source in node.value
    ]
    return Node(sources, node.where)


def _moved(node: Node, key: str, base: Path) -> Node:
    path = node.value
    if not isinstance(path, str) or base == Path(os.path.realpath(Path.cwd())):
        return node
    if key in PRESETS:
        if not _is_folder(path, base):
            return node
        path = shown(Path(os.path.normpath(base / path)))
        return Node(path if "/" in path else f"./{path}", node.where)
    if not _is_path(key, path):
        return node
    return Node(_no_word(key, shown(Path(os.path.normpath(base / path)))), node.where)


def _no_word(key: str, path: str) -> str:
    """Prefix `./` to a path that would otherwise be read as a keyword."""
    return path if _is_name(key, path) else f"./{path}"


def _is_folder(value: str, base: Path) -> bool:
    """Return whether a model is a relative path: it looks like one, or is a folder there and no preset."""
    if not value or os.path.isabs(value) or value.startswith("~"):
        return False
    return "/" in value or value.startswith(".") or (value not in presets.model_names() and os.path.isdir(base / value))


def _is_name(key: str, value: str) -> bool:
    """Return whether the value of a key names a file or folder."""
    return key in WORDS and bool(value) and value not in WORDS[key] and not value.startswith(PREFIXES.get(key, ("\0",)))


def _is_path(key: str, value: str) -> bool:
    """Return whether the value of a key is a relative path."""
    return _is_name(key, value) and not os.path.isabs(value) and not value.startswith("~")


def _started_in(folder: Path, run: Node) -> Path | None:
    """Return the folder to which a run's own plan refers, or None when the plan belongs to no run."""
    assert isinstance(run.value, str)
    named = os.path.normpath(run.value)
    if os.path.isabs(named) and Path(os.path.realpath(named)) == folder:
        return folder
    if not _holds_run(folder):
        return None
    tail = Path(named).parts
    if folder.parts[-len(tail) :] == tail:  # relative to where it was begun
        return Path(*folder.parts[: -len(tail)])
    return folder


def _holds_run(folder: Path) -> bool:
    """Return whether a run was started there. Its checkpoint folder is created before its plan is written."""
    return (folder / "checkpoints").is_dir() or (folder / "metrics.jsonl").is_file()

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


def resolve_paths(tree: Node, file: Path) -> Node:
    """Return the tree of a plan file with its relative paths rewritten for the current folder."""
    if not isinstance(tree.value, dict):
        return tree
    entries = dict(tree.value)
    # ".." and symbolic links mean what the file system says, not what the words say
    folder = Path(os.path.realpath(file.parent))
    run = entries.get("run")
    is_named = run is not None and isinstance(run.value, str)
    origin = _find_origin(folder, run) if run is not None and is_named and file.name == PLAN_FILE else None
    base = origin or folder
    # the plan of a run may have been moved with its folder: the run is where the file is
    if origin is not None and run is not None:
        entries["run"] = Node(_shorten(folder), run.where)
    elif run is None or is_named:
        entries["run"] = _rebase(run or Node(DEFAULT_RUN, ""), "run", base)
    for section, key in (("data", "path"), ("model", "preset"), ("teacher", "preset")):
        node = entries.get(section)
        if node is not None and isinstance(node.value, str):
            entries[section] = _rebase(node, f"{section}.{key}", base)
        elif node is not None and isinstance(node.value, dict):
            rebased = {k: _rebase_setting(v, f"{section}.{k}", base) for k, v in node.value.items()}
            entries[section] = Node(rebased, node.where)
    return Node(entries, tree.where)


def relocate_paths(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the document of `dump` with paths as they belong into a file in `folder`.

    A relative path stays relative when the file is in the current folder or above the path. Otherwise it becomes
    absolute.
    """
    current, folder = Path(os.path.realpath(Path.cwd())), Path(os.path.realpath(folder))
    if folder == current:
        return document

    def relocate(key: str, path: str) -> str:
        if not _is_path(key, path) or (key == "run" and path == DEFAULT_RUN):
            return path
        whole = Path(os.path.normpath(current / path))
        return _no_word(key, str(whole.relative_to(folder))) if folder in whole.parents else str(whole)

    data, model = dict(document["data"]), dict(document["model"])
    data |= {key: relocate(f"data.{key}", data[key]) for key in DATA_PATHS}
    data["mixture"] = [{**source, "path": relocate("data.path", source["path"])} for source in data["mixture"]]
    model |= {"init": relocate("model.init", model["init"])} if "init" in model else {}
    moved = {**document, "model": model, "data": data, "run": relocate("run", document["run"])}
    if "init" in (teacher := document.get("teacher") or {}):
        moved["teacher"] = {**teacher, "init": relocate("teacher.init", teacher["init"])}
    return moved


def absolute(plan: Plan) -> Plan:
    """Return the plan with absolute paths, so that equal locations compare equal."""
    return _change_paths(plan, lambda path: os.path.realpath(os.path.expanduser(path)))


def without_folders(plan: Plan) -> Plan:
    """Return the plan with only the last part of each path, for readers on other machines."""
    return _change_paths(plan, lambda path: Path(path).name or path)


def _change_paths(plan: Plan, change: Callable[[str], str]) -> Plan:
    def change_value(key: str, path: str) -> str:
        return change(path) if _is_name(key, path) else path

    paths: dict[str, Any] = {key: change_value(f"data.{key}", getattr(plan.data, key)) for key in DATA_PATHS}
    mixture = tuple(replace(source, path=change_value("data.path", source.path)) for source in plan.data.mixture)
    data = replace(plan.data, **paths, mixture=mixture)
    init, teacher = change_value("model.init", plan.init), change_value("teacher.init", plan.teacher_init)
    return replace(plan, data=data, run=change_value("run", plan.run), init=init, teacher_init=teacher)


def _shorten(path: Path) -> str:
    """Return a path relative to the current folder if it lies below it."""
    current = Path(os.path.realpath(Path.cwd()))
    return str(path.relative_to(current)) if current in path.parents else str(path)


def _rebase_setting(node: Node, key: str, base: Path) -> Node:
    """Apply `_rebase` to a value, and to the path of each source in data.mixture."""
    if key != "data.mixture" or not isinstance(node.value, list):
        return _rebase(node, key, base)
    sources = [
        Node({k: _rebase(v, f"data.{k}", base) for k, v in source.value.items()}, source.where)
        if isinstance(source.value, dict)
        else source
        for source in node.value
    ]
    return Node(sources, node.where)


def _rebase(node: Node, key: str, base: Path) -> Node:
    """Return a path of a file in `base` as it is named from the current folder. Other values stay unchanged."""
    path = node.value
    if not isinstance(path, str) or base == Path(os.path.realpath(Path.cwd())):
        return node
    if key in PRESETS:
        if not _is_folder(path, base):
            return node
        path = _shorten(Path(os.path.normpath(base / path)))
        return Node(path if "/" in path else f"./{path}", node.where)
    if not _is_path(key, path):
        return node
    return Node(_no_word(key, _shorten(Path(os.path.normpath(base / path)))), node.where)


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


def _find_origin(folder: Path, run: Node) -> Path | None:
    """Return the folder to which a run's own plan refers, or None when the plan belongs to no run."""
    assert isinstance(run.value, str)
    named = os.path.normpath(run.value)
    if os.path.isabs(named) and Path(os.path.realpath(named)) == folder:
        return folder
    # A run creates its checkpoint folder before it writes its plan.
    if not (folder / "checkpoints").is_dir() and not (folder / "metrics.jsonl").is_file():
        return None
    tail = Path(named).parts
    if folder.parts[-len(tail) :] == tail:  # relative to where it was begun
        return Path(*folder.parts[: -len(tail)])
    return folder

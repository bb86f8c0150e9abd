"""Relative paths: in a plan file they start at the file's folder, in a Plan (and on a command line) at the current one.

So a plan file names the same files from any current folder. A run's own plan.yaml always names the run it is stored
in, even after the folder was moved or renamed.
"""

import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from meshwright.planfile.text import Given
from meshwright.spec import presets
from meshwright.spec.chat_formats import CHAT_FORMATS
from meshwright.spec.plan import RANDOM, Plan

KEPT = "plan.yaml"
"""The plan in a run folder."""
DEFAULT_RUN = next(str(field.default) for field in fields(Plan) if field.name == "run")
WORDS = {
    "data.path": ("stdlib",), "data.tokenizer": ("auto", "bytes"), "data.template": ("auto", *CHAT_FORMATS),
    "model.init": (RANDOM,), "teacher.init": (RANDOM,), "run": (),
}  # fmt: skip
DATA_PATHS = ("path", "tokenizer", "template")
PRESETS = ("model.preset", "teacher.preset")
"""Keys that are the name of a preset, or a path."""
BEGINNINGS = {"data.path": ("hub:",), "data.tokenizer": ("bpe:",)}
"""Values of keys that are no paths, and what such values begin with."""


def located(tree: Given, file: Path) -> Given:
    """The tree of a plan file (by our names) with its relative paths made those of the current folder."""
    if not isinstance(tree.value, dict):
        return tree
    items = dict(tree.value)
    own = Path(os.path.realpath(file.parent))
    run = items.get("run")
    named = run is not None and isinstance(run.value, str)
    started = _started_in(own, run) if run is not None and named and file.name == KEPT else None
    base = started or own
    if started is not None and run is not None:
        items["run"] = Given(shown(own), run.where)
    elif run is None or named:
        items["run"] = _moved(run or Given(DEFAULT_RUN, ""), "run", base)
    for section, key in (("data", "path"), ("model", "preset"), ("teacher", "preset")):
        given = items.get(section)
        if given is not None and isinstance(given.value, str):
            items[section] = _moved(given, f"{section}.{key}", base)
        elif given is not None and isinstance(given.value, dict):
            items[section] = Given(
                {k: _moved_in(v, f"{section}.{k}", base) for k, v in given.value.items()}, given.where
            )
    return Given(items, tree.where)


def written(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The document of `dump`, with paths for a file in `folder`. A relative path stays relative if the file is in the
    current folder or above the path; otherwise it becomes absolute."""
    here = Path.cwd()
    folder = Path(os.path.realpath(folder))
    if folder == Path(os.path.realpath(here)):
        return document

    def full(key: str, value: str) -> str:
        if not _is_path(key, value) or (key == "run" and value == DEFAULT_RUN):
            return value
        whole = Path(os.path.normpath(Path(os.path.realpath(here)) / value))
        return _no_word(key, str(whole.relative_to(folder))) if folder in whole.parents else str(whole)

    data, model = dict(document["data"]), dict(document["model"])
    data |= {key: full(f"data.{key}", data[key]) for key in DATA_PATHS}
    data["mixture"] = [{**one, "path": full("data.path", one["path"])} for one in data["mixture"]]
    model |= {"init": full("model.init", model["init"])} if "init" in model else {}
    found = {**document, "model": model, "data": data, "run": full("run", document["run"])}
    if "init" in (teacher := document.get("teacher") or {}):
        found["teacher"] = {**teacher, "init": full("teacher.init", teacher["init"])}
    return found


def absolute(plan: Plan) -> Plan:
    """The plan with its paths in full: equal for equal places, however they were given."""

    return _with_paths(plan, lambda value: os.path.realpath(os.path.expanduser(value)))


def without_folders(plan: Plan) -> Plan:
    """The plan for other people's eyes: of a path only its last name, for the rest is this machine's."""
    return _with_paths(plan, lambda value: Path(value).name or value)


def _with_paths(plan: Plan, change: Callable[[str], str]) -> Plan:
    def changed(key: str, value: str) -> str:
        return change(value) if _is_name(key, value) else value

    paths: dict[str, Any] = {key: changed(f"data.{key}", getattr(plan.data, key)) for key in DATA_PATHS}
    mixture = tuple(replace(one, path=changed("data.path", one.path)) for one in plan.data.mixture)
    data = replace(plan.data, **paths, mixture=mixture)
    init, teacher = changed("model.init", plan.init), changed("teacher.init", plan.teacher_init)
    return replace(plan, data=data, run=changed("run", plan.run), init=init, teacher_init=teacher)


def shown(path: Path) -> str:
    """Relative to the current folder where it lies below it, as people wrote it."""
    here = Path(os.path.realpath(Path.cwd()))
    return str(path.relative_to(here)) if here in path.parents else str(path)


def _moved_in(given: Given, key: str, base: Path) -> Given:
    """As _moved; of data.mixture the path of each source."""
    if key != "data.mixture" or not isinstance(given.value, list):
        return _moved(given, key, base)
    sources = [
        Given({k: _moved(v, f"data.{k}", base) for k, v in one.value.items()}, one.where)
        if isinstance(one.value, dict)
        else one
        for one in given.value
    ]
    return Given(sources, given.where)


def _moved(given: Given, key: str, base: Path) -> Given:
    value = given.value
    if not isinstance(value, str) or base == Path(os.path.realpath(Path.cwd())):
        return given
    if key in PRESETS:
        if not _is_folder(value, base):
            return given
        path = shown(Path(os.path.normpath(base / value)))
        return Given(path if "/" in path else f"./{path}", given.where)
    if not _is_path(key, value):
        return given
    return Given(_no_word(key, shown(Path(os.path.normpath(base / value)))), given.where)


def _no_word(key: str, path: str) -> str:
    """A path that is read as one: a file may have the name of a word."""
    return path if _is_name(key, path) else f"./{path}"


def _is_folder(value: str, base: Path) -> bool:
    """Whether a model is a relative path: it looks like one, or is a folder there and no preset."""
    if not value or os.path.isabs(value) or value.startswith("~"):
        return False
    return "/" in value or value.startswith(".") or (value not in presets.model_names() and os.path.isdir(base / value))


def _is_name(key: str, value: str) -> bool:
    """Whether the value of a key names a place of the file system."""
    return (
        key in WORDS and bool(value) and value not in WORDS[key] and not value.startswith(BEGINNINGS.get(key, ("\0",)))
    )


def _is_path(key: str, value: str) -> bool:
    """Whether it names one relative to some folder."""
    return _is_name(key, value) and not os.path.isabs(value) and not value.startswith("~")


def _started_in(own: Path, run: Given) -> Path | None:
    """The folder that the other paths of a run's own plan are of; None where the plan is no run's."""
    assert isinstance(run.value, str)
    named = os.path.normpath(run.value)
    if os.path.isabs(named) and Path(os.path.realpath(named)) == own:
        return own
    if not _holds_run(own):
        return None
    tail = Path(named).parts
    if own.parts[-len(tail) :] == tail:  # relative to where it was begun
        return Path(*own.parts[: -len(tail)])
    return own


def _holds_run(folder: Path) -> bool:
    """Whether a run was begun there: the folder of its checkpoints is made before its plan is kept."""
    return (folder / "checkpoints").is_dir() or (folder / "metrics.jsonl").is_file()

"""Words, keywords and plans as one Plan: what a command line and a call in Python may say of it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from meshwright import planfile
from meshwright.planfile.folders import FolderModel
from meshwright.planfile.reading import MUST_SAY
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError, HubError, PlanError
from meshwright.spec.shape import ModelShape

TEXTS = (".jsonl", ".parquet", ".txt")
"""Ends of files that hold what is trained on. A plan is YAML, of which .json is a part."""
Section = str | Sequence[str] | Mapping[str, Any] | None
"""Part of a plan: `sequence=4096,precision=bf16`, such words one by one, or {"sequence": 4096}."""


def read_plan(
    words: Sequence[Any], keys: Mapping[str, Any], *, processes: int | None = 1, notes: list[str] | None = None
) -> tuple[Plan, str]:
    """(plan, resume) of a plan file or a plan, and KEY=VALUE words in any order, with keywords put on top.

    A keyword is a key of a plan file: run="runs/a", recipe={"steps": 5}. `processes`: what a degree that is `auto`
    shares out; None = the devices of the plan's cluster. What was read under another tool's name is said in `notes`,
    or as a warning. PlanError, as on the command line.
    """
    for key in MUST_SAY:
        if isinstance(keys.get(key), Real):
            raise ArgumentError(f"{key}={keys[key]} must be text or a path")
    found = [(word, plan_of(word)) for word in words]
    path, overrides, resume = sort_words([str(word) for word, plan in found if plan is None])
    plans = [plan for _, plan in found if plan is not None]
    if len(plans) > 1 or (plans and path is not None):
        raise PlanError("two plans: give one, and changes as KEY=VALUE")
    base = base_words(plans[0]) if plans else []
    changes = [*base, *overrides, *(word for key, value in keys.items() for word in words_of(key, value))]

    def read(number: int) -> Plan:
        return planfile.read(path, changes, read_folder=read_folder, notes=notes, processes=number)

    if processes is not None:
        return read(processes), resume
    plan = read(1)
    return (read(plan.cluster.devices) if plan.cluster.devices > 1 else plan), resume


def sort_words(words: Sequence[str]) -> tuple[Path | None, list[str], str]:
    """(plan file, KEY=VALUE overrides, resume) from the words of a command line, in any order."""
    files = [word for word in words if "=" not in word]
    pairs = [word for word in words if "=" in word]
    if texts := [file for file in files if Path(file).suffix in TEXTS]:
        raise PlanError(f"{texts[0]} is no plan: give text and conversations as data={texts[0]}")
    if len(files) > 1:
        raise PlanError(f"two plan files, {files[0]} and {files[1]}: give one, and changes as KEY=VALUE")
    resume = [pair.partition("=")[2] for pair in pairs if pair.startswith("resume=")]
    overrides = [pair for pair in pairs if not pair.startswith("resume=")]
    if resume and not resume[-1]:
        raise PlanError("resume= is empty: give resume=auto, resume=no or the path of a checkpoint")
    return (Path(files[0]) if files else None), overrides, resume[-1] if resume else "no"


def read_folder(folder: Path) -> FolderModel:
    """A Hugging Face directory, or a run. HubError, PlanError where it is none, or damaged, or one that nothing is
    trained of but what `ModelShape.plan_only` says."""
    from meshwright.model.hub.folder_config import CONFIG, read_config
    from meshwright.model.quantized_formats.folder_quantization import quantization
    from meshwright.store.run_folder import RunFolder

    if (folder / "plan.yaml").is_file():
        return FolderModel(shape=RunFolder.open(folder).plan.model.base)
    if planned := _planned(folder / "config.json", folder.resolve().name, strictly=False):
        return FolderModel(shape=planned)
    if (folder / CONFIG).is_file() and not quantization(folder):
        return FolderModel(shape=read_config(folder)[1])
    from meshwright.store.base_weights import open_weights  # loads torch: codes are described by those who read them

    found = open_weights(folder)
    return FolderModel(shape=found.hub.shape, codes=found.base, refusal=found.refusal)


def read_to_plan(config: Path, name: str) -> Callable[[Path], FolderModel]:
    """As `read_folder`, for the folder of this config: strictly, since a key that nobody knows could change the answer.
    `name`: what the model is called."""

    def read(folder: Path) -> FolderModel:
        if folder != config.parent or not config.is_file():
            return read_folder(folder)
        shape = _planned(config, name, strictly=True)
        known = FolderModel(shape=shape) if shape and shape.plan_only else None
        if known is None and config.name == "config.json" and not (folder / "plan.yaml").is_file():
            known = read_folder(folder)
        assert shape is not None
        return replace(known or FolderModel(shape=shape), shape=replace(shape, name=name))

    return read


def _planned(config: Path, name: str, *, strictly: bool) -> ModelShape | None:
    """Its shape; None where the engine trains the family and nothing is to be read strictly."""
    from meshwright.model.hub.folder_config import QUANTIZATION, read_json
    from meshwright.model.hub.planned_config import is_planned, planned_shape

    found = read_json(config)
    if found is None or not (strictly or is_planned(found)):
        return None
    if config.name == "config.json":  # codes of a folder are read, or refused, with it
        found = {key: value for key, value in found.items() if key != QUANTIZATION}
    try:
        return replace(planned_shape(found), name=name)
    except HubError as error:
        raise HubError(str(error).replace("config.json", str(config), 1)) from error


def words_of(key: str, value: Any) -> list[str]:
    """KEY=VALUE words of a keyword: a mapping or a dataclass is one for each of its keys, at any depth."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return [word for name, item in value.items() for word in words_of(f"{key}.{name}", item)]
    if isinstance(value, bool):
        return [f"{key}={str(value).lower()}"]
    if isinstance(value, list | tuple):
        return [f"{key}={json.dumps(value, default=asdict)}"]
    return [f"{key}={'' if value is None else value}"]


def section_words(section: Any) -> list[str]:
    """KEY=VALUE words of a part of a plan, without the name of the part."""
    if section is None:
        return []
    if isinstance(section, str):
        return [section]
    if isinstance(section, Mapping) or is_dataclass(section):
        return [word.removeprefix("x.") for word in words_of("x", section)]
    return [str(word) for word in section]


def plan_of(word: Any) -> Plan | None:
    """The plan that a word is or is an answer about; None = it is neither."""
    found = word if isinstance(word, Plan) else getattr(word, "plan", None)
    return found if isinstance(found, Plan) else None


def base_words(plan: Plan) -> list[str]:
    """The words that make a plan again: a section each, whole. A warm-up that follows from the number of steps still
    does."""
    found = planfile.dump(plan)
    if plan.recipe == replace(plan.recipe, warmup_steps=-1):
        found["recipe"]["warmup_steps"] = -1
    write = partial(json.dumps, ensure_ascii=False)
    return [f"{key}={write(value) if isinstance(value, dict) else value}" for key, value in found.items()]

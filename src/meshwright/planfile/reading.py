"""From a plan file and overrides to a Plan: names are made ours, presets unfolded, words given types by pydantic.

Every problem is found before one is reported: the first in one line, and how many more there are.
"""

import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from meshwright.planfile.folders import ReadFolder, fields_of
from meshwright.planfile.keys import (
    INSTEAD,
    MODELS,
    SHORTHAND,
    STARTS_FROM,
    join,
    own_name,
    own_word,
    part_of,
    sections,
    suggestion,
)
from meshwright.planfile.mixtures import MAY_BE_MIXED, mixture_of
from meshwright.planfile.overrides import of_one_length, passed_over
from meshwright.planfile.paths import located
from meshwright.planfile.text import OVERRIDE, Given, parse_file, parse_override, shown
from meshwright.spec import presets
from meshwright.spec.errors import PlanError
from meshwright.spec.hub_names import download_hint, missing
from meshwright.spec.layout import AXES
from meshwright.spec.plan import RANDOM, Plan

DEFAULT_MODEL = "llama-tiny"
FOLDERS = "a preset, a run folder, or a Hugging Face directory"
"""What the name of a model may be."""
MUST_SAY = ("model", "data", "run")
"""Keys that may be left out, but not be empty: an empty shell variable must not mean the default."""
AUTO, MAY_BE_AUTO = "auto", ("dp_shard", "dp_replicate")
"""Degrees that take what is there, so that a run goes on with fewer processes, or more."""
CONFIG, EXPORTED = "config.json", "hf"
"""Of a Hugging Face directory; and where a run holds its own."""
EXPONENT = re.compile(r"[+-]?\d+(\.\d+)?[eE]\+?\d{1,2}")


def read(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    *,
    read_folder: ReadFolder | None = None,
    notes: list[str] | None = None,
    processes: int = 1,
) -> Plan:
    """The plan in a file (None: the default plan) with `key=value` overrides, which win, applied in their order.

    Relative paths in the file are of the file's folder, those of overrides of the current one (planfile/paths.py).
    `read_folder` reads the shape of a Hugging Face folder where `model` is one. Its weights are then taken,
    unless `model.init` says otherwise, and its tokenizer, where `data.tokenizer` is auto. What was read under another
    tool's name is said in `notes`, or as a warning. `layout.dp_shard=auto` (or dp_replicate) is what `processes` leave
    to it. PlanError names the place, the key and the nearest legal value; whether the plan can run is `Plan.check`'s
    question.
    """
    reader = _Reader(read_folder)
    tree = located(reader.named(parse_file(Path(path)), ""), Path(path)) if path is not None else Given({}, "")
    assert isinstance(tree.value, dict)
    tree.value.setdefault("model", Given(DEFAULT_MODEL, ""))
    for override in of_one_length(overrides):
        tree = reader.overridden(tree, override)
    plan = reader.plan(reader.filled(tree, processes))
    for note in reader.notes:
        if notes is None:
            warnings.warn(note, stacklevel=2)
    if notes is not None:
        notes += [*passed_over(overrides), *reader.notes]
    return plan


class _Reader:
    """One reading: collects problems and notes on the way."""

    def __init__(self, read_folder: ReadFolder | None) -> None:
        self.read_folder = read_folder
        self.problems: list[PlanError] = []
        self.notes: list[str] = []
        self.inits = dict.fromkeys(MODELS, RANDOM)
        """Where the weights of each model are."""

    def refuse(self, where: str, sentence: str) -> None:
        self.problems.append(PlanError(_placed(where, sentence)))

    def named(self, given: Given, section: str) -> Given:
        """The same with our names for every key of a section; unknown and doubled keys are noted as problems."""
        if isinstance(given.value, list):
            return Given([self.named(item, section) for item in given.value], given.where)
        if not isinstance(given.value, dict):
            return given
        found: dict[str, Given] = {}
        given_as: dict[str, str] = {}
        for key, item in given.value.items():
            name = own_name(section, key)
            if join(section, name) in MAY_BE_MIXED and (mixture := mixture_of(item)):
                key, name, item = self._mixed(section, mixture)
            if name not in sections()[section]:
                # Only the first problem is told, and a search for the nearest name takes a millisecond.
                advice = "" if self.problems else f": {suggestion(section, key)}"
                self.refuse(item.where, f"{join(section, shown(key))} is not known{advice}")
            elif name in found:
                self.refuse(item.where, f"{join(section, name)} is given twice, as {given_as[name]} and as {key}")
            else:
                given_as[name] = key
                found[name] = self._item(section, key, name, item)
        return Given(found, given.where)

    def _mixed(self, section: str, mixture: Given) -> tuple[str, str, Given]:
        """The key, its name and the value that a mixture in a short form is in a section."""
        if section:
            return "mixture", "mixture", mixture
        return "data", "data", Given({"mixture": mixture}, mixture.where)

    def _item(self, section: str, key: str, name: str, item: Given) -> Given:
        if key.replace("-", "_") != name:
            self.notes.append(_placed(item.where, f"{join(section, key)} is read as {join(section, name)}"))
            if isinstance(item.value, str):
                item = Given(own_word(key, item.value), item.where)
        child = join(section, name)
        return self.named(item, child) if child in sections() else item

    def overridden(self, tree: Given, override: str) -> Given:
        """The tree with the value at one dotted key replaced; data=PATH leaves the other keys of data as they are."""
        path, value = parse_override(override)
        name = own_name("", path[0])
        if len(path) == 1 and isinstance(value.value, str) and name in SHORTHAND and name not in STARTS_FROM:
            path = (name, SHORTHAND[name])
        if len(path) == 1 and isinstance(value.value, list) and name == "data":
            path = (name, "mixture")
        for key in reversed(path):
            value = Given({key: value}, value.where)
        return _put(tree, self.named(value, ""), len(path), "")

    def filled(self, tree: Given, processes: int) -> Given:
        """The tree with a number for a degree that is `auto`: the processes over the other degrees, rounded down; too
        many processes are then refused like those of any other layout. ZeRO has nobody to share with on one rank."""
        if not isinstance(tree.value, dict):
            return tree
        layout = tree.value.get("layout")
        if layout is None or not isinstance(layout.value, dict):
            return tree
        items = dict(layout.value)
        degrees = {axis: str(items[axis].value).lower() if axis in items else "1" for axis in AXES}
        open_axes = [axis for axis in MAY_BE_AUTO if degrees[axis] == AUTO]
        if len(open_axes) != 1:
            if open_axes:
                self.refuse(items[open_axes[0]].where, "layout.dp_shard and layout.dp_replicate: one can be auto")
            return tree
        axis = open_axes[0]
        degrees[axis] = "1"
        if not all(word.isdecimal() and int(word) for word in degrees.values()):
            return tree  # said with the rest of the layout
        number = max(1, processes // math.prod(map(int, degrees.values())))
        items[axis] = Given(str(number), items[axis].where)
        degrees[axis] = str(number)
        zero = items.get("zero")
        if zero is not None and zero.value != "0" and degrees["dp_shard"] == degrees["cp"] == "1":
            items["zero"] = Given("0", zero.where)
            self.notes.append(f"layout.zero={zero.value} has nobody to share with on {processes} process: read as 0")
        return Given({**tree.value, "layout": Given(items, layout.where)}, tree.where)

    def plan(self, tree: Given) -> Plan:
        """The Plan of a named tree; raises the first problem."""
        assert isinstance(tree.value, dict)
        values: dict[str, Any] = {}
        for key, hint in sections()[""].items():
            given = tree.value.get(key)
            if given is not None and (given.value is not None or key in MUST_SAY):
                values[key] = self._section(key, hint, given)
        if self.problems:
            self._raise()
        found = Plan(**values, init=self.inits["model"], teacher_init=self.inits["teacher"])
        found = replace(found, recipe=found.recipe.over()) if found.recipe.tokens else found
        source = found.init if found.init != RANDOM else found.teacher_init  # a student speaks as its teacher does
        own = os.path.join(source, "tokenizer.json")
        if source == RANDOM or found.data.tokenizer != AUTO or not os.path.isfile(own):
            return found
        return replace(found, data=replace(found.data, tokenizer=own))

    def _section(self, key: str, hint: Any, given: Given) -> Any:
        """One top-level value; None where it has problems."""
        from meshwright.planfile.validation import check

        try:
            value, misfits = check(key, hint, self._unfolded(given, key, hint))
        except PlanError as error:
            path = re.split(r"[^a-z_0-9.]", str(error), maxsplit=1)[0].split(".")[1:]
            self.problems.append(type(error)(_placed(_place(given, path), str(error))))
            return None
        for path, sentence in misfits:
            self.refuse(_place(given, path), sentence)
        return value

    def _unfolded(self, given: Given, section: str, hint: Any) -> Any:
        """Plain values for pydantic: presets opened, shorthands written out, words made ready for their type."""
        if isinstance(given.value, str) and section in SHORTHAND:
            given = Given({SHORTHAND[section]: given}, given.where)
        part = part_of(hint)
        if isinstance(given.value, list):
            return [self._unfolded(item, section, part) if part else item.value for item in given.value]
        if not isinstance(given.value, dict):
            return _word(hint, given.value)
        if part is None:
            return {}
        types = sections()[section]
        fields = {key: self._unfolded(item, join(section, key), types[key]) for key, item in given.value.items()}
        return self._started(fields, section) if section in STARTS_FROM else fields

    def _started(self, fields: dict[str, Any], section: str) -> dict[str, Any]:
        """What the preset of a section gives, changed by the other fields."""
        name = fields.pop("preset", None)
        init = fields.pop("init", None) if section in MODELS else None
        self.inits |= {} if init is None else {section: self._init(section, init)}
        if not isinstance(name, str):
            return {"name": "custom", **fields} if section == "cluster.device" else fields
        if section in MODELS:
            base = self._model(section, name, fields, weights=init is None)
            base["name"] = f"{base['name']} (changed)" if fields.keys() - {"lora"} else base["name"]
        elif section == "cluster":
            device, per_node = presets.devices_in_node(name)
            base = {"device": asdict(device), "devices_per_node": per_node}
        else:
            base = asdict(presets.device(name))
        return _merged(base, fields)

    def _init(self, section: str, value: Any) -> str:
        """`model.init` or `teacher.init`; whether the folder is there is asked when its weights are read."""
        if isinstance(value, str) and value:
            return value if value == RANDOM else os.path.expanduser(value)
        raise PlanError(f"{section}.init must be random, or a Hugging Face folder whose weights are taken")

    def _model(self, section: str, name: str, fields: Mapping[str, Any], *, weights: bool) -> dict[str, Any]:
        """Fields of a preset or of the folder at this path: a path that looks like one is one, then names go first.
        `weights`: those of a folder are taken. `fields`: what is put on top."""
        try:
            folder = Path(name).expanduser()
            exists, file = folder.is_dir(), folder.is_file()
        except (OSError, ValueError, RuntimeError):
            folder, exists, file = Path(name), False, False
        if not (name.startswith((".", "/", "~")) or (exists and "/" in name)):
            try:
                return dict(presets.published(name, f"{section}={name[: presets.LONGEST]!r}").fields)
            except PlanError as error:
                if not (exists or file):
                    hint = download_hint(name, f"{section}=")
                    near = presets.nearest(name.rpartition("/")[2].lower(), presets.model_names())
                    # A list of presets helps nobody who names a folder or a model of the hub, unless one is like it.
                    if "/" in name and not (hint and near):
                        raise PlanError(missing(name, FOLDERS, f"{section}=")) from None
                    raise PlanError(f"{error}; no folder of that name is here{hint}") from None
        if not exists:
            if file:
                raise PlanError(
                    f"{section}={name!r} is a file: give a preset, a folder with config.json, or a plan as .yaml"
                )
            raise PlanError(missing(name, FOLDERS, f"{section}="))
        if not (folder / CONFIG).is_file() and (folder / EXPORTED / CONFIG).is_file():
            folder = folder / EXPORTED
        if self.read_folder is None:
            raise PlanError(
                f"{section}={name!r} is a folder, and folders are not read here: give a preset's name or sizes"
            )
        if weights:
            self.inits[section] = str(folder)
        return fields_of(self.read_folder(folder), fields, section, name, weights=weights)

    def _raise(self) -> None:
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        raise type(self.problems[0])(f"{self.problems[0]}{more}")


def _word(hint: Any, word: str | None) -> Any:
    """A word, ready for pydantic: whole numbers may be written 1e6, and numbers among fixed choices are numbers."""
    if word is None or hint is str:
        return word
    if hint is int and EXPONENT.fullmatch(word):
        number = float(word)
        return int(number) if number.is_integer() else word
    if get_origin(hint) is Literal and word.isdecimal() and any(isinstance(choice, int) for choice in get_args(hint)):
        return int(word)
    return word


def _put(tree: Given, over: Given, levels: int, section: str) -> Given:
    """`tree` with what lies `levels` keys deep in `over` put in; a shorthand on the way is written out first."""
    if levels == 0 or not isinstance(over.value, dict):
        return over
    if isinstance(tree.value, str) and section in SHORTHAND:
        tree = Given({SHORTHAND[section]: tree}, tree.where)
    items = dict(tree.value) if isinstance(tree.value, dict) else {}
    for key, item in over.value.items():
        items.pop(INSTEAD.get(join(section, key), ""), None)
        items[key] = _put(items.get(key, Given(None, "")), item, levels - 1, join(section, key))
    return Given(items, tree.where or over.where)


def _merged(base: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """`base` with the fields changed; mappings in both are merged the same way."""
    merged = dict(base)
    for key, value in fields.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _place(given: Given, path: Sequence[str | int]) -> str:
    """The place of the deepest thing along a path that somebody wrote."""
    return next((step.where for step in reversed([given, *_along(given, path)]) if step.where), "")


def _along(given: Given, path: Sequence[str | int]) -> Iterator[Given]:
    for key in path:
        value = given.value
        if isinstance(value, dict) and key in value:
            given = value[str(key)]
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            given = value[key]
        else:
            return
        yield given


def _placed(where: str, sentence: str) -> str:
    return sentence if where in ("", OVERRIDE) else f"{where}: {sentence}"

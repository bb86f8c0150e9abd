"""Plan files and overrides -> Plan: keys become canonical, presets are expanded, pydantic gives words their types.

All problems are collected before one is reported: the first in one line, with the number of others.
"""

import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from meshwright.planfile.keys import (
    INSTEAD,
    MODELS,
    SHORTHAND,
    STARTS_FROM,
    canonical_key,
    canonical_word,
    join,
    note_ignored_lengths,
    part_of,
    resolve_lengths,
    resolve_paths,
    sections,
    suggestion,
)
from meshwright.planfile.text import MAY_BE_MIXED, OVERRIDE, Node, mixture_of, parse_file, parse_override, shown
from meshwright.spec import presets
from meshwright.spec.errors import MeshwrightError, PlanError, argument
from meshwright.spec.hub_cache import find_snapshot
from meshwright.spec.hub_names import download_hint, explain_missing, shape_alone
from meshwright.spec.layout.layout import AXES
from meshwright.spec.model.shape import NO_TARGETS, ModelShape
from meshwright.spec.plan.plan import RANDOM, Plan

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderModel:
    """Shape and quantization of a Hugging Face folder or a run."""

    shape: ModelShape
    codes: str = ""
    """Quantization of the matrices as a value of `model.lora.base`. Empty = plain numbers."""
    refusal: MeshwrightError | None = None
    """Why no adapter can be trained on codes that `model.lora.base` cannot name. None = one can."""


ReadFolder = Callable[[Path], FolderModel]


def _fields_of_folder(folder: FolderModel, fields: Mapping[str, Any], section: str, name: str) -> dict[str, Any]:
    """Return the fields of the model or teacher in a folder `name` whose weights are used. `fields` are set on top.

    Codes are used as they are; those of a teacher without a name in `model.lora.base` are restored to numbers. Raises
    PlanError if nothing can be trained on the codes, or the plan asks for other ones.
    """
    shape = asdict(folder.shape)
    if section == "model" and folder.refusal is not None:
        raise folder.refusal
    if not folder.codes:
        return shape
    # A teacher is never trained, so its codes are held as a frozen base without adapters.
    if section != "model":
        return shape | {"lora": {"rank": 1, "targets": NO_TARGETS, "base": folder.codes}}
    # Codes have no gradient: without adapters nothing would be trained.
    lora = fields.get("lora")
    if not isinstance(lora, Mapping):
        raise PlanError(
            f"{argument('model', name)} holds codes ({folder.codes}), which only adapters can train: give "
            "model.lora.rank=16, or the folder that it was quantized from"
        )
    if lora.get("base", folder.codes) != folder.codes:
        raise PlanError(
            f"{argument('model', name)} is quantized to {folder.codes} already, and "
            f"model.lora.base={lora['base']} would round it again: leave model.lora.base out, or give the "
            "folder that it was quantized from"
        )
    return shape | {"lora": {"base": folder.codes}}


DEFAULT_MODEL = "llama-tiny"
FOLDERS = "a preset, a run folder, or a Hugging Face directory"
"""Description of what a model name may be, for messages."""
MUST_SAY = ("model", "data", "run")
"""Keys that may be omitted but not empty: an empty shell variable must not select the default."""
AUTO, MAY_BE_AUTO = "auto", ("dp_shard", "dp_replicate")
"""Degrees that adapt to the number of processes, so that a run can continue with fewer or more."""
CONFIG, EXPORTED = "config.json", "hf"
"""Config file of a Hugging Face directory, and the folder of a run's export."""
EXPONENT = re.compile(r"[+-]?\d+(\.\d+)?[eE]\+?\d{1,2}")


def read(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    *,
    read_folder: ReadFolder | None = None,
    notes: list[str] | None = None,
    processes: int = 1,
) -> Plan:
    """Read a plan file (None: the default plan) and apply `key=value` overrides in order. Overrides win.

    Relative paths in the file start at the file's folder, those of overrides at the current folder (planfile/keys.py).
    `layout.dp_shard=auto` (or dp_replicate) becomes the number that `processes` leave for it. `Plan.check` decides
    whether the plan can run.

    Args:
        read_folder: Reads the shape of a Hugging Face folder named by `model`. Its weights are used unless `model.init`
            is set, and its tokenizer when `data.tokenizer` is auto.
        notes: Receives a note for each key read under another tool's name. None = these become warnings.

    Raises:
        PlanError: Names the position, the key and the nearest legal value.
    """
    reader = _Reader(read_folder)
    tree = Node({}, "")
    if path is not None:
        tree = resolve_paths(reader.canonicalize(parse_file(Path(path)), ""), Path(path))
    assert isinstance(tree.value, dict)
    tree.value.setdefault("model", Node(DEFAULT_MODEL, ""))
    for override in resolve_lengths(overrides):
        tree = reader.apply_override(tree, override)
    plan = reader.build_plan(reader.fill_auto_degree(tree, processes))
    # Notes of a plan that cannot be read would hide its error, so they come last.
    for note in reader.notes:
        if notes is None:
            warnings.warn(note, stacklevel=2)
    if notes is not None:
        notes += [*note_ignored_lengths(overrides), *reader.notes]
    return plan


class _Reader:
    """Reads one plan, collecting problems and notes on the way."""

    def __init__(self, read_folder: ReadFolder | None) -> None:
        self.read_folder = read_folder
        self.problems: list[PlanError] = []
        self.notes: list[str] = []
        self.inits = dict.fromkeys(MODELS, RANDOM)
        """Source of the weights of each model."""

    def refuse(self, where: str, sentence: str) -> None:
        self.problems.append(PlanError(_with_position(where, sentence)))

    def canonicalize(self, node: Node, section: str) -> Node:
        """Return the node with canonical keys. Unknown and duplicate keys are recorded as problems."""
        if isinstance(node.value, list):
            return Node([self.canonicalize(child, section) for child in node.value], node.where)
        if not isinstance(node.value, dict):
            return node
        by_name: dict[str, Node] = {}
        written_as: dict[str, str] = {}
        for key, child in node.value.items():
            name = canonical_key(section, key)
            if join(section, name) in MAY_BE_MIXED and (mixture := mixture_of(child)):
                if section:
                    key, name, child = "mixture", "mixture", mixture
                else:
                    key, name, child = "data", "data", Node({"mixture": mixture}, mixture.where)
            if name not in sections()[section]:
                # Only the first problem is told, and a search for the nearest name takes a millisecond.
                advice = "" if self.problems else f": {suggestion(section, key)}"
                self.refuse(child.where, f"{join(section, shown(key))} is not known{advice}")
            elif name in by_name:
                self.refuse(child.where, f"{join(section, name)} is given twice, as {written_as[name]} and as {key}")
            else:
                written_as[name] = key
                if key.replace("-", "_") != name:
                    note = f"{join(section, key)} is read as {join(section, name)}"
                    self.notes.append(_with_position(child.where, note))
                    if isinstance(child.value, str):
                        child = Node(canonical_word(key, child.value), child.where)
                subsection = join(section, name)
                by_name[name] = self.canonicalize(child, subsection) if subsection in sections() else child
        return Node(by_name, node.where)

    def apply_override(self, tree: Node, override: str) -> Node:
        """Return the tree with one dotted key replaced. data=PATH leaves the other keys of data unchanged."""
        path, node = parse_override(override)
        name = canonical_key("", path[0])
        if len(path) == 1 and isinstance(node.value, str) and name in SHORTHAND and name not in STARTS_FROM:
            path = (name, SHORTHAND[name])
        if len(path) == 1 and isinstance(node.value, list) and name == "data":
            path = (name, "mixture")
        for key in reversed(path):
            node = Node({key: node}, node.where)
        return _put(tree, self.canonicalize(node, ""), len(path), "")

    def fill_auto_degree(self, tree: Node, processes: int) -> Node:
        """Return the tree with a number for a degree that is `auto`: processes over the other degrees, rounded down.

        Too many processes are refused later, like those of any layout. On one rank ZeRO is set to 0.
        """
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
            return tree  # reported with the rest of the layout
        number = max(1, processes // math.prod(map(int, degrees.values())))
        items[axis] = Node(str(number), items[axis].where)
        degrees[axis] = str(number)
        zero = items.get("zero")
        if zero is not None and zero.value != "0" and degrees["dp_shard"] == degrees["cp"] == "1":
            items["zero"] = Node("0", zero.where)
            self.notes.append(f"layout.zero={zero.value} has nobody to share with on {processes} process: read as 0")
        return Node({**tree.value, "layout": Node(items, layout.where)}, tree.where)

    def build_plan(self, tree: Node) -> Plan:
        """Return the Plan of a tree with canonical keys, or raise the first problem."""
        assert isinstance(tree.value, dict)
        values: dict[str, Any] = {}
        for key, annotation in sections()[""].items():
            node = tree.value.get(key)
            if node is not None and (node.value is not None or key in MUST_SAY):
                values[key] = self._check_section(key, annotation, node)
        # Shapes cannot be built from keys that are wrong, and pydantic's errors would hide these.
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise self.problems[0].reworded(after=more)
        plan = Plan(**values, init=self.inits["model"], teacher_init=self.inits["teacher"])
        plan = replace(plan, recipe=plan.recipe.over()) if plan.recipe.tokens else plan
        source = plan.init if plan.init != RANDOM else plan.teacher_init  # a student speaks as its teacher does
        tokenizer = os.path.join(source, "tokenizer.json")
        if source == RANDOM or plan.data.tokenizer != AUTO or not os.path.isfile(tokenizer):
            return plan
        return replace(plan, data=replace(plan.data, tokenizer=tokenizer))

    def _check_section(self, key: str, annotation: Any, node: Node) -> Any:
        """Return one top-level value, or None after recording its problems."""
        try:
            checked, misfits = _check(key, annotation, self._expand(node, key, annotation))
        except PlanError as error:
            path = re.split(r"[^a-z_0-9.]", str(error), maxsplit=1)[0].split(".")[1:]
            self.problems.append(error.reworded(_with_position(_position(node, path), "")))
            return None
        for path, sentence in misfits:
            self.refuse(_position(node, path), sentence)
        return checked

    def _expand(self, node: Node, section: str, annotation: Any) -> Any:
        """Return plain values for pydantic: presets expanded, shorthands written out, words prepared for their type."""
        if isinstance(node.value, str) and section in SHORTHAND:
            node = Node({SHORTHAND[section]: node}, node.where)
        part = part_of(annotation)
        if isinstance(node.value, list):
            return [self._expand(child, section, part) if part else child.value for child in node.value]
        if not isinstance(node.value, dict):
            return _prepare_word(annotation, node.value)
        # A mapping where a single value belongs: pydantic refuses it, and the message shows {...} only.
        if part is None:
            return {}
        types = sections()[section]
        fields = {key: self._expand(child, join(section, key), types[key]) for key, child in node.value.items()}
        return self._apply_preset(fields, section) if section in STARTS_FROM else fields

    def _apply_preset(self, fields: dict[str, Any], section: str) -> dict[str, Any]:
        """Apply the preset of a section, if any, and record its `init`."""
        name = fields.pop("preset", None)
        init = fields.pop("init", None) if section in MODELS else None
        if init is not None:
            # Whether the folder exists is checked when its weights are read.
            if not isinstance(init, str) or not init:
                raise PlanError(f"{section}.init must be random, or a Hugging Face folder whose weights are taken")
            self.inits[section] = init if init == RANDOM else os.path.expanduser(init)
        if not isinstance(name, str):
            return {"name": "custom", **fields} if section == "cluster.device" else fields
        if section in MODELS:
            base = self._read_model(section, name, fields, weights=init is None)
            base["name"] = f"{base['name']} (changed)" if fields.keys() - {"lora"} else base["name"]
        elif section == "cluster":
            device, per_node = presets.devices_in_node(name)
            base = {"device": asdict(device), "devices_per_node": per_node}
        else:
            base = asdict(presets.device(name))
        return _merge(base, fields)

    def _read_model(self, section: str, name: str, fields: Mapping[str, Any], *, weights: bool) -> dict[str, Any]:
        """Return the fields of a preset or of a folder.

        A name that looks like a path is one; otherwise preset names come first. `weights`: those of a folder are used.
        `fields`: what the plan sets on top.
        """
        try:
            folder = Path(name).expanduser()
            exists, file = folder.is_dir(), folder.is_file()
        # Names too long, with NUL, or of an unknown "~user".
        except (OSError, ValueError, RuntimeError):
            folder, exists, file = Path(name), False, False
        if not (name.startswith((".", "/", "~")) or (exists and "/" in name)):
            try:
                preset = dict(presets.published(name, section).fields)
                self.notes += shape_alone(name, str(preset["name"])) if weights and section == "model" else ()
                return preset
            except PlanError as error:
                cached = None if exists or file else find_snapshot(name)
                if cached is not None:
                    folder, exists = cached, True
                elif not (exists or file):
                    hint = download_hint(name, section)
                    near = presets.find_nearest(name.rpartition("/")[2].lower(), presets.model_names())
                    # A list of presets helps nobody who names a folder or a model of the hub, unless one is like it.
                    if "/" in name and not (hint and near):
                        raise PlanError(explain_missing(name, FOLDERS, section)) from None
                    raise error.reworded(after=f"; no folder of that name is here{hint}") from None
        if not exists:
            if file:
                raise PlanError(
                    f"{argument(section, name)} is a file: give a preset, a folder with config.json, or a plan as .yaml"
                )
            raise PlanError(explain_missing(name, FOLDERS, section))
        # A run folder keeps the model that it exported in a folder of its own.
        if not (folder / CONFIG).is_file() and (folder / EXPORTED / CONFIG).is_file():
            folder = folder / EXPORTED
        if self.read_folder is None:
            raise PlanError(
                f"{argument(section, name)} is a folder, and folders are not read here: give a preset's name or sizes"
            )
        model = self.read_folder(folder)
        if not weights:
            return asdict(model.shape)
        self.inits[section] = str(folder)
        return _fields_of_folder(model, fields, section, name)


def _prepare_word(annotation: Any, word: str | None) -> Any:
    """Prepare a word for pydantic: 1e6 is a whole number, and numbers among fixed choices become numbers."""
    if word is None or annotation is str:
        return word
    if annotation is int and EXPONENT.fullmatch(word):
        number = float(word)
        return int(number) if number.is_integer() else word
    if (
        get_origin(annotation) is Literal
        and word.isdecimal()
        and any(isinstance(choice, int) for choice in get_args(annotation))
    ):
        return int(word)
    return word


def _put(tree: Node, over: Node, levels: int, section: str) -> Node:
    """Return `tree` with the node `levels` keys deep in `over` inserted. Shorthands on the way are written out."""
    if levels == 0 or not isinstance(over.value, dict):
        return over
    if isinstance(tree.value, str) and section in SHORTHAND:
        tree = Node({SHORTHAND[section]: tree}, tree.where)
    items = dict(tree.value) if isinstance(tree.value, dict) else {}
    for key, child in over.value.items():
        items.pop(INSTEAD.get(join(section, key), ""), None)
        items[key] = _put(items.get(key, Node(None, "")), child, levels - 1, join(section, key))
    return Node(items, tree.where or over.where)


def _merge(base: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the fields changed. Mappings in both are merged recursively."""
    merged = dict(base)
    for key, change in fields.items():
        is_nested = isinstance(change, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], change) if is_nested else change
    return merged


def _position(node: Node, path: Sequence[str | int]) -> str:
    """Return the position of the deepest written node along a path."""
    where = node.where
    for key in path:
        below = node.value
        if isinstance(below, dict) and key in below:
            node = below[str(key)]
        elif isinstance(below, list) and isinstance(key, int) and key < len(below):
            node = below[key]
        else:
            break
        where = node.where or where
    return where


def _with_position(where: str, sentence: str) -> str:
    return sentence if where in ("", OVERRIDE) else f"{where}: {sentence}"


EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text", "tuple": "a list"}
"""First word of pydantic's error type -> the expectation as the message words it."""

Misfit = tuple[tuple[str | int, ...], str]
"""Path below the checked key to a value that does not fit, and the message."""


def _check(key: str, annotation: type | UnionType, plain: object) -> tuple[Any, list[Misfit]]:
    """Return `plain` as an instance of `annotation`, and all misfits.

    A dataclass's own PlanError is raised unchanged.
    """
    # Imported when the first plan is read: pydantic takes half of the start-up budget of a verb.
    from pydantic import ValidationError

    try:
        return _adapter(annotation).validate_python(plain), []
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=True)
        return None, [(details["loc"], _explain_misfit(key, dict(details))) for details in errors]


@cache
def _adapter(annotation: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(annotation)


def _explain_misfit(section: str, details: dict[str, Any]) -> str:
    """Return the message of one pydantic error: key, given value, expectation."""
    key = ".".join([section, *map(str, details["loc"])])
    kind = str(details["type"])
    if kind == "missing":
        return f"{key} is missing: give it" + (", or start from a preset" if key.startswith("model.") else "")
    if kind == "literal_error":
        expected = str(details["ctx"]["expected"])
    elif kind == "dataclass_type":
        expected = "one word or a mapping of keys" if key in SHORTHAND else "a mapping of keys"
    else:
        expected = EXPECTED.get(kind.split("_")[0], str(details["msg"]))
    plain = details["input"]
    if plain is None:
        text = "(nothing)"
    elif isinstance(plain, dict | list | tuple):
        text = "{...}" if isinstance(plain, dict) else "[...]"
    else:
        text = shown(str(plain))
    return f"{key}={text} must be {expected}"

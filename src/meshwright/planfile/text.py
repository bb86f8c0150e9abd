"""YAML as keys and words. What a word means (a number, a switch, a name) is decided later, by the field it is given to.

So `1e-4` is a number where a number belongs, `no` is a word where a name belongs, and `run: 007` keeps its zeros: the
guesses of YAML 1.1 are not made. Only mappings, lists and words are read; tags, anchors and aliases are refused, so a
small file cannot become a large one or make an object.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml

from meshwright.spec.errors import PlanError
from meshwright.spec.hub_names import whereabouts

LARGEST_FILE_BYTES = 2**20
DEEPEST = 16
EMPTY_WORDS = ("", "~", "null", "Null", "NULL")
OVERRIDE = "KEY=VALUE"
QUOTE = " (a word with * & # : [ or { needs quotes)"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's parser is ten times faster; some builds of PyYAML lack it."""


@dataclass(frozen=True, slots=True)
class Given:
    """What stands at a place: a word, nothing (None), a list or a mapping."""

    value: "str | list[Given] | dict[str, Given] | None"
    where: str
    """`plan.yaml:7`, OVERRIDE, or empty for what nobody wrote."""


def _hint(error: OSError, path: Path) -> str:
    if isinstance(error, FileNotFoundError):
        return ": make one with `meshwright init > plan.yaml`"
    if not isinstance(error, IsADirectoryError):
        return ""
    inside = path / "plan.yaml"
    if inside.is_file():
        return f": give {inside}"
    return f": give a plan file, or model={path}/ for a model's folder, or data={path}/ for a folder of texts"


def parse_file(path: Path) -> Given:
    """The mapping in a YAML file; PlanError where there is none, or none that can be read."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and path.suffix not in (".yaml", ".yml"):
            near = whereabouts(str(path), "model=")
            raise PlanError(f"{path} does not exist: give a plan file, or a model as model=FOLDER{near}") from error
        raise PlanError(
            f"{path}: cannot be read, {(error.strerror or str(error)).lower()}{_hint(error, path)}"
        ) from error
    except ValueError as error:
        raise PlanError(f"{str(path)!r} is no path: {error}") from error
    if len(data) > LARGEST_FILE_BYTES:
        raise PlanError(f"{path}: larger than {LARGEST_FILE_BYTES} bytes, so it is no plan")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: byte {error.start} is not UTF-8 text, so it is no plan") from error
    found = parse(text, str(path), lines=True)
    if found.value is None:
        raise PlanError(f"{path}: is empty; make a plan with `meshwright init > plan.yaml`")
    if not isinstance(found.value, dict):
        raise PlanError(f"{found.where}: a plan is a mapping such as `model: llama-tiny`")
    return found


def parse_override(text: str) -> tuple[tuple[str, ...], Given]:
    """`recipe.steps=500` -> (("recipe", "steps"), 500). `{...}` and `[...]` are YAML, anything else is a word."""
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path) or len(path) > DEEPEST:
        raise PlanError(f"{shown(text)} is not KEY=VALUE, such as recipe.steps=500")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PlanError(f"{shown(key)} holds bytes that are no UTF-8 text") from error
    return path, _override_value(value.strip())


def _override_value(value: str) -> Given:
    """A glob as `[ab]*.txt` begins like a list but is none; it stays a word, for the field to accept or refuse."""
    if value[:1] in ("{", "["):
        try:
            return parse(value, OVERRIDE)
        except PlanError as error:
            if value[0] == "{":
                raise PlanError(f"{shown(value)}{str(error).removeprefix(OVERRIDE)}") from None
    return Given(None if value in EMPTY_WORDS else value, OVERRIDE)


def parse(text: str, name: str, lines: bool = False) -> Given:
    """One YAML document; PlanError with the line where it cannot be read. `lines` adds line numbers to the places."""
    try:
        return _Builder(text, name, lines).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if lines and mark else ""
        raise PlanError(f"{name}{line}: is not YAML, {error.problem or error.context}{QUOTE}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise PlanError(f"{name}: is not YAML, {' '.join(str(error).split())}") from error


class _Builder:
    """From parser events to Given; recursion is bounded by DEEPEST."""

    def __init__(self, text: str, name: str, lines: bool) -> None:
        self.events: Iterator[yaml.Event] = yaml.parse(text, Loader=LOADER)
        self.name = name
        self.lines = lines

    def document(self) -> Given:
        found = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if found is not None:
                    self.refuse(event, "a second document begins: a plan is one document")
                found = self.node(next(self.events), 0)
        return found or Given(None, self.name)

    def node(self, event: yaml.Event, depth: int) -> Given:
        if isinstance(event, yaml.AliasEvent):
            self.refuse(event, f"*{event.anchor} is a YAML alias, which is not read: put a word with * into quotes")
        if getattr(event, "anchor", None):
            self.refuse(event, f"&{event.anchor} is a YAML anchor, which is not read: put a word with & into quotes")
        if getattr(event, "tag", None):
            self.refuse(event, f"{shown(event.tag)} is a YAML tag, which is not read: put a word with ! into quotes")
        if depth > DEEPEST:
            self.refuse(event, f"nested more than {DEEPEST} deep, so it is no plan")
        if isinstance(event, yaml.MappingStartEvent):
            return Given(self.mapping(depth), self.where(event))
        if isinstance(event, yaml.SequenceStartEvent):
            return Given(self.sequence(depth), self.where(event))
        assert isinstance(event, yaml.ScalarEvent)
        empty = not event.style and event.value in EMPTY_WORDS
        return Given(None if empty else event.value, self.where(event))

    def mapping(self, depth: int) -> dict[str, Given]:
        found: dict[str, Given] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self.node(event, depth + 1)
            if not isinstance(key.value, str):
                self.refuse(event, "a key is missing or is not a word")
            if key.value in found:
                first = found[key.value].where.rpartition(":")[2] if self.lines else ""
                self.refuse(
                    event, f"{shown(key.value)} is given twice" + (f" (first in line {first})" if first else "")
                )
            value = self.node(next(self.events), depth + 1)
            found[key.value] = Given(value.value, key.where)
        return found

    def sequence(self, depth: int) -> list[Given]:
        found = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            found.append(self.node(event, depth + 1))
        return found

    def where(self, event: yaml.Event) -> str:
        return f"{self.name}:{event.start_mark.line + 1}" if self.lines else self.name

    def refuse(self, event: yaml.Event, why: str) -> NoReturn:
        raise PlanError(f"{self.where(event)}: {why}")


def shown(text: str, most: int = 80) -> str:
    """What somebody wrote, fit for one line of a message: cut, and escaped where it would not print."""
    text = text if len(text) <= most else text[:most] + "..."
    return text if text.isprintable() else ascii(text)

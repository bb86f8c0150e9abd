"""YAML as keys and words. The field that receives a word decides whether it is a number, a switch or a name.

So `1e-4` is a number where a number belongs, `no` is a word where a name belongs, and `run: 007` keeps its zeros: the
guesses of YAML 1.1 are not made. Only mappings, lists and words are read. Tags, anchors and aliases are refused, so a
small file can neither expand to a large one nor create objects.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml

from meshwright.spec.errors import PlanError, argument
from meshwright.spec.hub_names import whereabouts

LARGEST_FILE_BYTES = 2**20
DEEPEST = 16
EMPTY_WORDS = ("", "~", "null", "Null", "NULL")
OVERRIDE = "KEY=VALUE"
QUOTE = " (a word with * & # : [ or { needs quotes)"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""YAML parser. libyaml's is ten times faster, but some builds of PyYAML lack it."""


@dataclass(frozen=True, slots=True)
class Node:
    """A YAML node with its position: a word, nothing (None), a list or a mapping."""

    value: "str | list[Node] | dict[str, Node] | None"
    where: str
    """Position such as `plan.yaml:7`, or OVERRIDE. Empty for defaults."""


def _advise(error: OSError, path: Path) -> str:
    if isinstance(error, FileNotFoundError):
        return ": make one with `meshwright init > plan.yaml`"
    if not isinstance(error, IsADirectoryError):
        return ""
    inside = path / "plan.yaml"
    if inside.is_file():
        return f": give {inside}"
    return f": give a plan file, or model={path}/ for a model's folder, or data={path}/ for a folder of texts"


def parse_file(path: Path) -> Node:
    """Parse the mapping in a YAML file. Raises PlanError when the file is missing, unreadable or not a mapping."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        # A model's name in place of a plan file is the usual slip.
        if isinstance(error, FileNotFoundError) and path.suffix not in (".yaml", ".yml"):
            near = whereabouts(str(path), "model")
            raise PlanError(
                f"{path} does not exist: give a plan file, or a model as {argument('model', 'FOLDER')}{near}"
            ) from error
        raise PlanError(
            f"{path}: cannot be read, {(error.strerror or str(error)).lower()}{_advise(error, path)}"
        ) from error
    except ValueError as error:
        raise PlanError(f"{str(path)!r} is no path: {error}") from error
    # Weights given by mistake must not be parsed as YAML for minutes.
    if len(data) > LARGEST_FILE_BYTES:
        raise PlanError(f"{path}: larger than {LARGEST_FILE_BYTES} bytes, so it is no plan")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: byte {error.start} is not UTF-8 text, so it is no plan") from error
    node = parse(text, str(path), lines=True)
    if node.value is None:
        raise PlanError(f"{path}: is empty; make a plan with `meshwright init > plan.yaml`")
    if not isinstance(node.value, dict):
        raise PlanError(f"{node.where}: a plan is a mapping such as `model: llama-tiny`")
    return node


def parse_override(text: str) -> tuple[tuple[str, ...], Node]:
    """Parse `recipe.steps=500` into (("recipe", "steps"), 500). `{...}` and `[...]` are YAML, the rest are words."""
    key, equals, word = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path) or len(path) > DEEPEST:
        raise PlanError(f"{shown(text)} is not KEY=VALUE, such as recipe.steps=500")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PlanError(f"{shown(key)} holds bytes that are no UTF-8 text") from error
    return path, _parse_word(word.strip())


def _parse_word(word: str) -> Node:
    """Parse the value of an override. A glob such as `[ab]*.txt` looks like a list but stays a word."""
    if word[:1] in ("{", "["):
        try:
            return parse(word, OVERRIDE)
        except PlanError as error:
            if word[0] == "{":
                raise PlanError(f"{shown(word)}{str(error).removeprefix(OVERRIDE)}") from None
    return Node(None if word in EMPTY_WORDS else word, OVERRIDE)


def parse(text: str, name: str, lines: bool = False) -> Node:
    """Parse one YAML document. Raises PlanError with the line. `lines` adds line numbers to positions."""
    try:
        return _Builder(text, name, lines).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if lines and mark else ""
        raise PlanError(f"{name}{line}: is not YAML, {error.problem or error.context}{QUOTE}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise PlanError(f"{name}: is not YAML, {' '.join(str(error).split())}") from error


class _Builder:
    """Builds nodes from parser events. Recursion is bounded by DEEPEST."""

    def __init__(self, text: str, name: str, lines: bool) -> None:
        self.events: Iterator[yaml.Event] = yaml.parse(text, Loader=LOADER)
        self.name = name
        self.lines = lines

    def document(self) -> Node:
        root = None
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    self.refuse(event, "a second document begins: a plan is one document")
                root = self.node(next(self.events), 0)
        return root or Node(None, self.name)

    def node(self, event: yaml.Event, depth: int) -> Node:
        # Aliases may expand without end, and tags construct objects: a plan is words alone.
        if isinstance(event, yaml.AliasEvent):
            self.refuse(event, f"*{event.anchor} is a YAML alias, which is not read: put a word with * into quotes")
        if getattr(event, "anchor", None):
            self.refuse(event, f"&{event.anchor} is a YAML anchor, which is not read: put a word with & into quotes")
        if getattr(event, "tag", None):
            self.refuse(event, f"{shown(event.tag)} is a YAML tag, which is not read: put a word with ! into quotes")
        if depth > DEEPEST:
            self.refuse(event, f"nested more than {DEEPEST} deep, so it is no plan")
        if isinstance(event, yaml.MappingStartEvent):
            return Node(self.mapping(depth), self.where(event))
        if isinstance(event, yaml.SequenceStartEvent):
            return Node(self.sequence(depth), self.where(event))
        assert isinstance(event, yaml.ScalarEvent)
        empty = not event.style and event.value in EMPTY_WORDS
        return Node(None if empty else event.value, self.where(event))

    def mapping(self, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self.node(event, depth + 1)
            if not isinstance(key.value, str):
                self.refuse(event, "a key is missing or is not a word")
            # YAML libraries take the last of two: half of such a plan would be ignored silently.
            if key.value in entries:
                first = entries[key.value].where.rpartition(":")[2] if self.lines else ""
                self.refuse(
                    event, f"{shown(key.value)} is given twice" + (f" (first in line {first})" if first else "")
                )
            entry = self.node(next(self.events), depth + 1)
            entries[key.value] = Node(entry.value, key.where)
        return entries

    def sequence(self, depth: int) -> list[Node]:
        entries = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            entries.append(self.node(event, depth + 1))
        return entries

    def where(self, event: yaml.Event) -> str:
        return f"{self.name}:{event.start_mark.line + 1}" if self.lines else self.name

    def refuse(self, event: yaml.Event, why: str) -> NoReturn:
        raise PlanError(f"{self.where(event)}: {why}")


def shown(text: str, most: int = 80) -> str:
    """Return a user's text for a one-line message: truncated, and escaped where it is not printable."""
    text = text if len(text) <= most else text[:most] + "..."
    return text if text.isprintable() else ascii(text)


MAY_BE_MIXED = ("data", "data.path", "data.mixture")
WEIGHTED = r"(.+):(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)"
"""Pattern of a source as one word, PATH:WEIGHT."""
_FORM = "data=a.jsonl:0.7,b.jsonl:0.3"


def mixture_of(node: Node) -> Node | None:
    """Return the `data.mixture` list that a value of one of MAY_BE_MIXED describes, or None for a path or mapping.

    A word is a mixture when it has at least two parts, separated by commas, that end in `:WEIGHT`. Raises PlanError
    when only some of them do.
    """
    if isinstance(node.value, list):
        return Node([_source(source) for source in node.value], node.where) if node.value else None
    if not isinstance(node.value, str) or "," not in node.value:
        return None
    parts = node.value.split(",")
    weighted = [part for part in parts if re.fullmatch(WEIGHTED, part)]
    if not weighted:
        return None
    # A path may contain commas, but not weights: one weight is enough to take the word for a mixture.
    if len(weighted) < len(parts):
        bare = next(part for part in parts if part not in weighted)
        raise PlanError(
            f"{argument('data', node.value)}: {bare or 'one part'} has no weight: give each its own, as {_FORM}"
        )
    return Node([_source(Node(part, node.where)) for part in parts], node.where)


def _source(source: Node) -> Node:
    """Return one source: the keys of `PATH:WEIGHT`, or a mapping unchanged."""
    if not isinstance(source.value, str):
        return source
    match = re.fullmatch(WEIGHTED, source.value)
    if match is None:
        raise PlanError(
            f"data: {source.value} has no weight: give {{path: {source.value}, weight: 1}}, or {source.value}:1"
        )
    path, weight = (Node(word, source.where) for word in match.groups())
    return Node({"path": path, "weight": weight}, source.where)

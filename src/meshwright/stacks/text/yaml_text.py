"""Options in YAML: nested sections with a comment per option."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import yaml

from meshwright.spec.errors import PlanError
from meshwright.stacks.text.option_text import Entry, Setting, nested

VARIABLE = re.compile(r"\$\{(\.?[\w.]+)\}")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""Numbers that PyYAML reads as text: 3e-4 lacks a point."""


def write(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """Return the options, each with its meaning at the end of its line."""
    lines = [f"# {line}".rstrip() for line in title]
    return "\n".join([*lines, *_lines(nested(settings), "")]) + "\n"


def _lines(tree: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
            continue
        line = f"{indent}{key}: {_word(value.value)}"
        yield f"{line}  # {value.meaning}" if value.meaning else line


def _word(value: Any) -> str:
    """Return a value in a single line that YAML and JSON both read."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_./][\w./-]*", value):
        return value if yaml.safe_load(value) == value else json.dumps(value)
    if isinstance(value, float):
        return f"{value:.10f}".rstrip("0") if 1e-9 < abs(value) < 1 else repr(value)
    return json.dumps(value)


def read(text: str) -> list[Entry]:
    """Return every option with its line. Raises PlanError unless the text is a YAML mapping."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise PlanError("line 1: no mapping of keys to values")
        return _interpolated(list(_entries(node, "")))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise PlanError(f"line {mark.line + 1 if mark else 1}: no YAML ({getattr(error, 'problem', error)})") from None


def _interpolated(entries: list[Entry]) -> list[Entry]:
    """Replace `${a.b}` as a whole value by the value of that key, and `${.b}` by that of a sibling (OmegaConf)."""
    values = {entry.key: entry.value for entry in entries}

    def known(entry: Entry) -> Any:
        name = VARIABLE.fullmatch(entry.value) if isinstance(entry.value, str) else None
        if name is None:
            return entry.value
        beside = entry.key.rpartition(".")[0] if name[1].startswith(".") else ""
        return values.get(f"{beside}{name[1]}", entry.value)

    return [replace(entry, value=known(entry)) for entry in entries]


def _entries(node: yaml.MappingNode, prefix: str) -> Iterator[Entry]:
    for name, child in node.value:
        key = f"{prefix}{name.value}"
        if isinstance(child, yaml.MappingNode) and child.value:
            yield from _entries(child, f"{key}.")
        else:
            yield Entry(key=key, value=_plain(child), line=name.start_mark.line + 1)


def _plain(node: yaml.Node) -> Any:
    """Return the value of a node without tags that create objects."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(inner) for inner in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key.value: _plain(inner) for key, inner in node.value}
    if node.tag.startswith("tag:yaml.org,2002:"):
        constructed = yaml.SafeLoader("").construct_object(node)
        return float(constructed) if isinstance(constructed, str) and NUMBER.fullmatch(constructed) else constructed
    return node.value

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
"""Numbers that PyYAML takes for text: 3e-4 has no point."""


def write(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """The options, each with its meaning at the end of its line."""
    lines = [f"# {line}".rstrip() for line in title]
    return "\n".join([*lines, *_lines(nested(settings), "")]) + "\n"


def _lines(found: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in found.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
            continue
        said = f"{indent}{key}: {_word(value.value)}"
        yield f"{said}  # {value.meaning}" if value.meaning else said


def _word(value: Any) -> str:
    """In one line, as YAML and JSON both read it."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_./][\w./-]*", value):
        return value if yaml.safe_load(value) == value else json.dumps(value)
    if isinstance(value, float):
        return f"{value:.10f}".rstrip("0") if 1e-9 < abs(value) < 1 else repr(value)
    return json.dumps(value)


def read(text: str) -> list[Entry]:
    """Every option with its line; PlanError where this is no YAML mapping."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise PlanError("line 1: no mapping of keys to values")
        return _interpolated(list(_entries(node, "")))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise PlanError(f"line {mark.line + 1 if mark else 1}: no YAML ({getattr(error, 'problem', error)})") from None


def _interpolated(entries: list[Entry]) -> list[Entry]:
    """`${a.b}` as a whole value is the value of that key, `${.b}` of one beside it (OmegaConf)."""
    values = {entry.key: entry.value for entry in entries}

    def known(entry: Entry) -> Any:
        name = VARIABLE.fullmatch(entry.value) if isinstance(entry.value, str) else None
        if name is None:
            return entry.value
        beside = entry.key.rpartition(".")[0] if name[1].startswith(".") else ""
        return values.get(f"{beside}{name[1]}", entry.value)

    return [replace(entry, value=known(entry)) for entry in entries]


def _entries(node: yaml.MappingNode, prefix: str) -> Iterator[Entry]:
    for name, value in node.value:
        key = f"{prefix}{name.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _entries(value, f"{key}.")
        else:
            yield Entry(key=key, value=_plain(value), line=name.start_mark.line + 1)


def _plain(node: yaml.Node) -> Any:
    """Without tags that make objects."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(one) for one in node.value]
    if isinstance(node, yaml.MappingNode):
        return {one.value: _plain(other) for one, other in node.value}
    if node.tag.startswith("tag:yaml.org,2002:"):
        value = yaml.SafeLoader("").construct_object(node)
        return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value
    return node.value

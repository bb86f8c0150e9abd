"""Text of a configuration file in its form: YAML, JSON, TOML, shell or Python."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from meshwright.spec.errors import PlanError
from meshwright.stacks.declaration import python_text, shell_text
from meshwright.stacks.declaration.option import Called, ConfigFile, Entry, Facts, Form, Setting, flatten, nest

VARIABLE = re.compile(r"\$\{(\.?[\w.]+)\}")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""Numbers that PyYAML reads as text: 3e-4 lacks a point."""


def write_yaml(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """Return the options, each with its meaning at the end of its line."""
    lines = [f"# {line}".rstrip() for line in title]
    return "\n".join([*lines, *_yaml_lines(nest(settings), "")]) + "\n"


def _yaml_lines(tree: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, indent + "  ")
            continue
        line = f"{indent}{key}: {_yaml_word(value.value)}"
        yield f"{line}  # {value.meaning}" if value.meaning else line


def _yaml_word(value: Any) -> str:
    """Return a value in a single line that YAML and JSON both read."""
    # Words that YAML would read as something else, such as `no`, are quoted.
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_./][\w./-]*", value):
        return value if yaml.safe_load(value) == value else json.dumps(value)
    if isinstance(value, float):
        return f"{value:.10f}".rstrip("0") if 1e-9 < abs(value) < 1 else repr(value)
    return json.dumps(value)


def read_yaml(text: str) -> list[Entry]:
    """Return every option with its line. Raises PlanError unless the text is a YAML mapping."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise PlanError("line 1: no mapping of keys to values")
        return _interpolate(list(_yaml_entries(node, "")))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise PlanError(f"line {mark.line + 1 if mark else 1}: no YAML ({getattr(error, 'problem', error)})") from None


def _interpolate(entries: list[Entry]) -> list[Entry]:
    """Replace `${a.b}` as a whole value by the value of that key, and `${.b}` by that of a sibling (OmegaConf)."""
    values = {entry.key: entry.value for entry in entries}

    def interpolated(entry: Entry) -> Any:
        name = VARIABLE.fullmatch(entry.value) if isinstance(entry.value, str) else None
        if name is None:
            return entry.value
        beside = entry.key.rpartition(".")[0] if name[1].startswith(".") else ""
        return values.get(f"{beside}{name[1]}", entry.value)

    return [replace(entry, value=interpolated(entry)) for entry in entries]


def _yaml_entries(node: yaml.MappingNode, prefix: str) -> Iterator[Entry]:
    for name, child in node.value:
        key = f"{prefix}{name.value}"
        if isinstance(child, yaml.MappingNode) and child.value:
            yield from _yaml_entries(child, f"{key}.")
        else:
            yield Entry(key=key, value=_yaml_value(child), line=name.start_mark.line + 1)


def _yaml_value(node: yaml.Node) -> Any:
    """Return the value of a node without tags that create objects."""
    if isinstance(node, yaml.SequenceNode):
        return [_yaml_value(inner) for inner in node.value]
    if isinstance(node, yaml.MappingNode):
        return {key.value: _yaml_value(inner) for key, inner in node.value}
    if node.tag.startswith("tag:yaml.org,2002:"):
        # PyYAML follows YAML 1.1, where a number with an exponent needs a point.
        constructed = yaml.SafeLoader("").construct_object(node)
        return float(constructed) if isinstance(constructed, str) and NUMBER.fullmatch(constructed) else constructed
    return node.value


def write_json(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """Return the options as one document. The title is omitted."""
    return json.dumps(_json_values(nest(settings)), indent=2) + "\n"


def _json_values(tree: Any) -> Any:
    return {key: _json_values(value) for key, value in tree.items()} if isinstance(tree, dict) else tree.value


def read_json(text: str) -> list[Entry]:
    """Return every option with the line of its last name. Raises PlanError unless the text is a JSON object."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"line {error.lineno}: no JSON ({error.msg})") from None
    if not isinstance(document, dict):
        raise PlanError("line 1: no JSON object")
    return [Entry(key=key, value=value, line=line_of(text, key)) for key, value in flatten(document)]


def line_of(text: str, key: str) -> int:
    """Return the line where the names of a dotted key follow each other. 0 = not in the text."""
    at = 0
    for name in key.split("."):
        match = re.compile(rf'["\[.\s]?\b{re.escape(name)}\b["\]]?').search(text, at)
        if match is None:
            return 0
        at = match.start()
    return text.count("\n", 0, at + 1) + 1


def write_toml(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """Return the options, each with its meaning at the end of its line."""
    lines = [f"# {line}".rstrip() for line in title]
    return "\n".join([*lines, *_toml_tables(nest(settings), "")]) + "\n"


def _toml_tables(tree: dict[str, Any], table: str) -> Iterator[str]:
    plain = {key: setting for key, setting in tree.items() if not isinstance(setting, dict)}
    if table and plain:
        yield ""
        yield f"[{table}]"
    for key, setting in plain.items():
        line = f"{key} = {_toml_word(setting.value)}"
        yield f"{line}  # {setting.meaning}" if setting.meaning else line
    for key, inner in tree.items():
        if isinstance(inner, dict):
            yield from _toml_tables(inner, f"{table}.{key}" if table else key)


def _toml_word(value: Any) -> str:
    return repr(value) if isinstance(value, float) else json.dumps(value)


def read_toml(text: str) -> list[Entry]:
    """Return every option with its line. Raises PlanError unless the text is TOML."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"no TOML ({error})") from None
    return [Entry(key=key, value=value, line=line_of(text, key)) for key, value in flatten(document)]


WRITERS: Mapping[Form, Callable[[Sequence[Setting], Sequence[str]], str]] = {
    "yaml": write_yaml, "json": write_json, "toml": write_toml,
    "shell": shell_text.write, "python": python_text.write,
}  # fmt: skip
READERS: Mapping[Form, Callable[[str], list[Entry]]] = {
    "yaml": read_yaml, "json": read_json, "toml": read_toml,
    "shell": shell_text.read, "python": python_text.read,
}  # fmt: skip
ENDINGS: Mapping[str, Form] = {
    ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".py": "python", ".sh": "shell",
    ".slurm": "shell",
    ".sbatch": "shell", ".bash": "shell", ".sub": "shell", ".args": "shell",
}  # fmt: skip
LARGEST_BYTES = 2**20


def text_of(file: ConfigFile, facts: Facts, title: Sequence[str]) -> str:
    """Return the text of a file for a plan with these facts."""
    body = WRITERS[file.form](file.settings(facts), title)
    if file.head is None:
        return body
    return '"""' + " ".join(title) + '"""\n\n' + file.head(facts) + body + file.tail


def option_words(file: ConfigFile, facts: Facts) -> dict[str, str]:
    """Return `--key value` or `key=value` of each option in a file for these facts, without switches that are off."""
    return {
        setting.key: word
        for setting in file.settings(facts)
        if (word := option_word(file.form, setting.key, setting.value))
    }


def option_word(form: Form, key: str, value: Any) -> str:
    """Return an option as written in prose, or an empty string for a shell switch that is off."""
    shown = value.name if isinstance(value, Called) else str(value).lower() if isinstance(value, bool) else value
    if form == "shell":
        return key if value is True else "" if value is False else f"{key} {shown}"
    return f"{key}={shown}"


def form_of(path: Path) -> Form:
    """Return the form of a file by its ending. Raises PlanError for an unknown ending."""
    if path.suffix not in ENDINGS:
        raise PlanError(f"{path}: a file of options ends in one of {', '.join(ENDINGS)}")
    return ENDINGS[path.suffix]


def entries_of(path: Path, function: str = "") -> list[Entry]:
    """Return every option of a file. Raises PlanError of one line, with the file and the line."""
    form = form_of(path)
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise PlanError(f"larger than {LARGEST_BYTES:,} bytes: no file of options")
        text = path.read_text(encoding="utf-8-sig")
        return python_text.read(text, function) if form == "python" else READERS[form](text)
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path} is no text") from None
    except RecursionError:
        raise PlanError(f"{path} is nested too deeply") from None
    except PlanError as error:
        raise PlanError(f"{path}, {error}") from None

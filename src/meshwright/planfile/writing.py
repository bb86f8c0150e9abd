"""Plan -> file, and the two descriptions of the file: the commented default plan and its JSON Schema.

Both are generated from the dataclasses and the docstrings of their fields, so they cannot become outdated.
"""

import ast
import inspect
import os
import textwrap
from contextlib import suppress
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from meshwright.planfile.keys import MODELS, MOVED, SHORTHAND, STARTS_FROM, join, part_of, relocate_paths, sections
from meshwright.planfile.reading import AUTO, DEFAULT_MODEL, MAY_BE_AUTO
from meshwright.planfile.text import WEIGHTED
from meshwright.spec import presets
from meshwright.spec.errors import PlanError, argument
from meshwright.spec.plan.plan import Plan, as_document

WIDTH = 120
RUN = argument("run")
COMMENT_COLUMN = 34
HEAD = """\
A plan: what is trained, on what, how, and laid out where. Change it here, or on the command line:
  meshwright train plan.yaml model=llama-10m data=./my_texts recipe.steps=2000 run=runs/mine
Every key may be left out; then it has the value given here. `meshwright schema` describes all of them.
A relative path in this file starts at this file's folder; on the command line, at the current folder.
"""
MODEL_HINT = """\
With changes: model: {{preset: {model}, layers: 8}}. All sizes by hand, or any preset: meshwright schema.
A Hugging Face folder gives its weights too: model: ./hf; without them: model: {{preset: ./hf, init: random}}.
"""


def dump(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON-like values with presets expanded, so that it means the same everywhere."""
    return {key: _convert_tuples(value) for key, value in as_document(plan).items()}


def write(plan: Plan, path: Path | str, *, another: str = RUN) -> None:
    """Write the plan to a file atomically, so that `read` returns the same plan. Raises PlanError.

    `another`: the argument that chooses another file, for messages.
    """
    path = Path(path)
    text = content(plan, path.parent)
    # Next to the target, so that the rename stays within one file system.
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            # Else a crash after the rename may leave an empty plan.
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise PlanError(f"{path}: the plan cannot be written, {reason}; choose another {another}") from error
    finally:
        with suppress(OSError):  # of a disk that may only be read
            fresh.unlink(missing_ok=True)


def content(plan: Plan, folder: Path) -> str:
    """Return the text that `write` puts into a file in `folder`."""
    document = relocate_paths(dump(plan), folder)
    return str(yaml.safe_dump(document, sort_keys=False, width=WIDTH))


def commented() -> str:
    """Return the default plan as YAML with a comment on every key. It reads back as `read(None)`."""
    plan = Plan(model=presets.model(DEFAULT_MODEL))
    words = {"model": DEFAULT_MODEL, "cluster": plan.cluster.device.name}
    lines = [f"# {line}" for line in HEAD.splitlines()]
    for key, about in _sentences(Plan).items():
        if key in MOVED:
            continue
        lines.append("")
        setting = getattr(plan, key)
        if key in words or setting is None or part_of(sections()[""][key]) is None:
            lines += _line(f"{key}: {_yaml(words.get(key, setting))}", about)
        else:
            lines += _line(f"{key}:", about)
            defaults = {field.name: field.default for field in fields(setting)}
            for name, sentence in _sentences(type(setting)).items():
                hint = sections()[key][name]
                lines += _line(f"  {name}: {_yaml(_convert_tuples(defaults[name]))}", _choices(hint) + sentence)
        if key == "model":
            lines += [f"# {line}" for line in MODEL_HINT.format(model=DEFAULT_MODEL).splitlines()]
    return "\n".join(lines) + "\n"


def schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the plan file: every key with its docstring, unknown keys refused."""
    from pydantic import TypeAdapter

    document = TypeAdapter(Plan).json_schema()
    kinds = {section: Plan if not section else _kind(section) for section in sections()}
    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **document, "title": "Meshwright plan"}
    # Fields of Plan that the file has in a section.
    for key, (section, name) in MOVED.items():
        document["$defs"][kinds[section].__name__]["properties"][name] = {
            **document["properties"].pop(key),
            "description": _sentences(Plan)[key],
        }
    for section, kind in kinds.items():
        _describe(document if not section else document["$defs"][kind.__name__], kind)
    for section in SHORTHAND:
        _allow_word(document, section, kinds)
    # `data` may be a list of the sources of a mixture, each a mapping or one word, PATH:WEIGHT.
    reference = {"$ref": f"#/$defs/{_kind('data.mixture').__name__}"}
    source = {"anyOf": [{"type": "string", "pattern": f"^{WEIGHTED}$"}, reference]}
    document["$defs"][_kind("data").__name__]["properties"]["mixture"]["items"] = source
    document["properties"]["data"]["anyOf"].append({"type": "array", "items": source})
    for axis in MAY_BE_AUTO:
        degree = document["$defs"]["Layout"]["properties"][axis]
        degree["anyOf"] = [{"type": degree.pop("type")}, {"const": AUTO}]
    # A file may be empty: every key has a default.
    document.pop("required")
    return document


def _convert_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _convert_tuples(item) for key, item in value.items()}
    return [_convert_tuples(item) for item in value] if isinstance(value, tuple) else value


def _yaml(value: Any) -> str:
    """Return one value in YAML's flow style."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("\n").removesuffix("\n...")


def _line(start: str, about: str) -> list[str]:
    """Return `key: value` with its comment next to it, wrapped where it is long."""
    column = max(COMMENT_COLUMN, len(start) + 2)
    wrapped = textwrap.wrap(about, WIDTH - column - 2)
    return [f"{start if i == 0 else '':<{column}}# {text}" for i, text in enumerate(wrapped)] or [start]


def _choices(hint: Any) -> str:
    return f"{' | '.join(map(str, get_args(hint)))}. " if get_origin(hint) is Literal else ""


def _kind(section: str) -> Any:
    """Return the dataclass of a section."""
    parent, _, key = section.rpartition(".")
    return part_of(sections()[parent][key])


def _sentences(kind: Any) -> dict[str, str]:
    """Return {field: docstring}, read from the source of a dataclass."""
    [body] = [node.body for node in ast.parse(textwrap.dedent(inspect.getsource(kind))).body if hasattr(node, "body")]
    sentences = {field.name: "" for field in fields(kind)}
    for above, below in pairwise(body):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            sentences[ast.unparse(above.target)] = " ".join(str(below.value.value).split())
    return sentences


def _describe(part: dict[str, Any], kind: Any) -> None:
    """Add the docstrings of a dataclass to its schema and refuse other keys."""
    part["description"] = inspect.getdoc(kind)
    part["additionalProperties"] = False
    for name, sentence in _sentences(kind).items():
        if sentence and name in part["properties"]:
            part["properties"][name]["description"] = sentence


def _allow_word(document: dict[str, Any], section: str, kinds: dict[str, Any]) -> None:
    """Let a section be one word. With a preset, its other keys become optional."""
    parent, _, key = section.rpartition(".")
    holder = document["$defs"][kinds[parent].__name__] if parent else document
    part = document["$defs"][kinds[section].__name__]
    word: dict[str, Any] = {"type": "string"}
    if section in STARTS_FROM:
        names = presets.model_names() if section in MODELS else presets.device_names()
        word["examples"] = [name + "x8" for name in names[1:]] if section == "cluster" else list(names)
        part["properties"]["preset"] = {**word, "description": f"Start from this {join(section, 'preset')}."}
        if "required" in part:
            part["anyOf"] = [{"required": ["preset"]}, {"required": part.pop("required")}]
    word_type = part["properties"].get(SHORTHAND[section], {}).get("type")
    if word_type and section not in STARTS_FROM:
        word["type"] = word_type
    declared = holder["properties"][key]
    null = [option for option in declared.get("anyOf", ()) if option.get("type") == "null"]
    about = declared.get("description", "")
    whole = {"$ref": f"#/$defs/{kinds[section].__name__}"}
    default = {name: declared[name] for name in ("default",) if null}
    holder["properties"][key] = {"anyOf": [word, whole, *null], **default, "description": about}

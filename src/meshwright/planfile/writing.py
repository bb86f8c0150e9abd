"""From a Plan to a file, and the two descriptions of the file: the commented default plan and its JSON Schema.

Both are made from the dataclasses and the sentences under their fields, so they cannot fall behind.
"""

import ast
import inspect
import os
import textwrap
from contextlib import suppress
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from meshwright.planfile.keys import MODELS, MOVED, SHORTHAND, STARTS_FROM, join, part_of, sections
from meshwright.planfile.mixtures import WEIGHTED
from meshwright.planfile.paths import written
from meshwright.planfile.reading import AUTO, DEFAULT_MODEL, MAY_BE_AUTO
from meshwright.spec import presets
from meshwright.spec.errors import PlanError
from meshwright.spec.plan import Plan, as_document

WIDTH = 120
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
    """The plan as JSON-like values, presets written out, so that it means the same wherever it is read."""
    return {key: _plain(value) for key, value in as_document(plan).items()}


def write(plan: Plan, path: Path | str, *, open_warmup: bool = False, another: str = "run=") -> None:
    """Put the plan into a file, whole or not at all; `read` gives the same plan back. PlanError where it cannot be.

    `open_warmup`: a number of warm-up steps that follows from the number of steps is written as -1, so that it still
    does where that is changed. `another`: what a user names to have the file elsewhere.
    """
    path = Path(path)
    text = content(plan, path.parent, open_warmup=open_warmup)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise PlanError(f"{path}: the plan cannot be written, {reason}; choose another {another}") from error
    finally:
        with suppress(OSError):  # of a disk that may only be read
            fresh.unlink(missing_ok=True)


def content(plan: Plan, folder: Path, *, open_warmup: bool = False) -> str:
    """What `write` puts into a file in `folder`."""
    found = written(dump(plan), folder)
    if open_warmup and plan.recipe == replace(plan.recipe, warmup_steps=-1):
        found["recipe"]["warmup_steps"] = -1
    return str(yaml.safe_dump(found, sort_keys=False, width=WIDTH))


def commented() -> str:
    """The default plan as YAML, a comment on every key; reads back as the plan that `read(None)` gives."""
    plan = Plan(model=presets.model(DEFAULT_MODEL))
    words = {"model": DEFAULT_MODEL, "cluster": plan.cluster.device.name}
    lines = [f"# {line}" for line in HEAD.splitlines()]
    for key, about in _sentences(Plan).items():
        if key in MOVED:
            continue
        lines.append("")
        value = getattr(plan, key)
        if key in words or value is None or part_of(sections()[""][key]) is None:
            lines += _line(f"{key}: {_yaml(words.get(key, value))}", about)
        else:
            lines += _line(f"{key}:", about)
            defaults = {field.name: field.default for field in fields(value)}
            for name, sentence in _sentences(type(value)).items():
                hint = sections()[key][name]
                lines += _line(f"  {name}: {_yaml(_plain(defaults[name]))}", _choices(hint) + sentence)
        if key == "model":
            lines += [f"# {line}" for line in MODEL_HINT.format(model=DEFAULT_MODEL).splitlines()]
    return "\n".join(lines) + "\n"


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the plan file, for editors: every key with its sentence, unknown keys refused."""
    from pydantic import TypeAdapter

    found = TypeAdapter(Plan).json_schema()
    kinds = {section: Plan if not section else _kind(section) for section in sections()}
    found = {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": "Meshwright plan"}
    for key, (section, name) in MOVED.items():
        found["$defs"][kinds[section].__name__]["properties"][name] = {
            **found["properties"].pop(key),
            "description": _sentences(Plan)[key],
        }
    for section, kind in kinds.items():
        _describe(found if not section else found["$defs"][kind.__name__], kind)
    for section in SHORTHAND:
        _allow_word(found, section, kinds)
    _allow_list(found)
    for axis in MAY_BE_AUTO:
        degree = found["$defs"]["Layout"]["properties"][axis]
        degree["anyOf"] = [{"type": degree.pop("type")}, {"const": AUTO}]
    found.pop("required")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _yaml(value: Any) -> str:
    """One value in YAML's flow style."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("\n").removesuffix("\n...")


def _line(start: str, about: str) -> list[str]:
    """`key: value` and its comment beside it, going on below where it is long."""
    column = max(COMMENT_COLUMN, len(start) + 2)
    wrapped = textwrap.wrap(about, WIDTH - column - 2)
    return [f"{start if i == 0 else '':<{column}}# {text}" for i, text in enumerate(wrapped)] or [start]


def _choices(hint: Any) -> str:
    return f"{' | '.join(map(str, get_args(hint)))}. " if get_origin(hint) is Literal else ""


def _kind(section: str) -> Any:
    """The dataclass of a section."""
    parent, _, key = section.rpartition(".")
    return part_of(sections()[parent][key])


def _sentences(kind: Any) -> dict[str, str]:
    """Field -> the string under it in the source of its dataclass."""
    [body] = [node.body for node in ast.parse(textwrap.dedent(inspect.getsource(kind))).body if hasattr(node, "body")]
    found = {field.name: "" for field in fields(kind)}
    for above, below in pairwise(body):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[ast.unparse(above.target)] = " ".join(str(below.value.value).split())
    return found


def _describe(part: dict[str, Any], kind: Any) -> None:
    """Put the sentences of a dataclass into its schema and refuse other keys."""
    part["description"] = inspect.getdoc(kind)
    part["additionalProperties"] = False
    for name, sentence in _sentences(kind).items():
        if sentence and name in part["properties"]:
            part["properties"][name]["description"] = sentence


def _allow_word(found: dict[str, Any], section: str, kinds: dict[str, Any]) -> None:
    """A section may be one word, and where it has a preset its other keys may be left out."""
    parent, _, key = section.rpartition(".")
    holder = found["$defs"][kinds[parent].__name__] if parent else found
    part = found["$defs"][kinds[section].__name__]
    word: dict[str, Any] = {"type": "string"}
    if section in STARTS_FROM:
        names = presets.model_names() if section in MODELS else presets.device_names()
        word["examples"] = [name + "x8" for name in names[1:]] if section == "cluster" else list(names)
        part["properties"]["preset"] = {**word, "description": f"Start from this {join(section, 'preset')}."}
        if "required" in part:
            part["anyOf"] = [{"required": ["preset"]}, {"required": part.pop("required")}]
    of_word = part["properties"].get(SHORTHAND[section], {}).get("type")
    if of_word and section not in STARTS_FROM:
        word["type"] = of_word
    known = holder["properties"][key]
    none = [one for one in known.get("anyOf", ()) if one.get("type") == "null"]
    about = known.get("description", "")
    whole = {"$ref": f"#/$defs/{kinds[section].__name__}"}
    default = {name: known[name] for name in ("default",) if none}
    holder["properties"][key] = {"anyOf": [word, whole, *none], **default, "description": about}


def _allow_list(found: dict[str, Any]) -> None:
    """`data` may be a list of the sources of a mixture, and each of them a word, `PATH:WEIGHT`."""
    one = {
        "anyOf": [{"type": "string", "pattern": f"^{WEIGHTED}$"}, {"$ref": f"#/$defs/{_kind('data.mixture').__name__}"}]
    }
    found["$defs"][_kind("data").__name__]["properties"]["mixture"]["items"] = one
    found["properties"]["data"]["anyOf"].append({"type": "array", "items": one})

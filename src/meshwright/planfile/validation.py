"""Words and mappings against the types of the dataclasses, by pydantic. Imported when the first plan is read: it costs
half of what a verb may take to start."""

from functools import cache
from types import UnionType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from meshwright.planfile.keys import SHORTHAND
from meshwright.planfile.text import shown

EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text", "tuple": "a list"}
"""First word of pydantic's error type -> what is said instead."""

Misfit = tuple[tuple[str | int, ...], str]
"""Where below the checked key something does not fit, and the sentence that says so."""


def check(key: str, hint: type | UnionType, value: object) -> tuple[Any, list[Misfit]]:
    """`value` as an instance of `hint`, or what does not fit. A PlanError of a dataclass itself is raised as it is."""
    try:
        return _adapter(hint).validate_python(value), []
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=True)
        return None, [(details["loc"], _sentence(key, dict(details))) for details in errors]


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def _sentence(section: str, details: dict[str, Any]) -> str:
    """One pydantic error: key, given value, what is expected."""
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
    return f"{key}={_shown(details['input'])} must be {expected}"


def _shown(value: object) -> str:
    if value is None:
        return "(nothing)"
    if isinstance(value, dict | list | tuple):
        return "{...}" if isinstance(value, dict) else "[...]"
    return shown(str(value))

"""Validation of words and mappings against the types of the dataclasses, by pydantic.

Imported only when the first plan is read: it takes half of the start-up budget of a verb.
"""

from functools import cache
from types import UnionType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from meshwright.planfile.keys import SHORTHAND
from meshwright.planfile.text import shown

EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text", "tuple": "a list"}
"""First word of pydantic's error type -> the expectation as the message words it."""

Misfit = tuple[tuple[str | int, ...], str]
"""Path below the checked key to a value that does not fit, and the message."""


def check(key: str, hint: type | UnionType, plain: object) -> tuple[Any, list[Misfit]]:
    """Return `value` as an instance of `hint`, and all misfits. A dataclass's own PlanError is raised unchanged."""
    try:
        return _adapter(hint).validate_python(plain), []
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=True)
        return None, [(details["loc"], _sentence(key, dict(details))) for details in errors]


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def _sentence(section: str, details: dict[str, Any]) -> str:
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
    return f"{key}={_shown(details['input'])} must be {expected}"


def _shown(plain: object) -> str:
    if plain is None:
        return "(nothing)"
    if isinstance(plain, dict | list | tuple):
        return "{...}" if isinstance(plain, dict) else "[...]"
    return shown(str(plain))

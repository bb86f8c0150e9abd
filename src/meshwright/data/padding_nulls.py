"""Nulls that a table gives a row: each object has the fields of all others there.

Parquet has them, and .jsonl files that the datasets library wrote. A template writes them into tools and calls, and a
model would learn to name arguments that a tool does not have. TRL, `trl/data_utils.py`, `remove_none_values`, takes all
of them out; here one stays where the tool's schema takes null.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_AS_IT_IS = ("arguments", "enum")
"""What a message and a tool have with nulls that say something."""


def without_null(value: Any) -> Any:
    """The same within; an argument of a call may be null, and a choice of an enum."""
    if isinstance(value, Mapping):
        kept = {name: one for name, one in value.items() if one is not None}
        return {name: one if name in _AS_IT_IS else without_null(one) for name, one in kept.items()}
    return [without_null(one) for one in value] if isinstance(value, list) else value


def unpadded(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> tuple[Mapping[str, Any], ...]:
    """Messages whose calls have no null but where the called tool takes one."""
    nullable = {name: set(_nullable(function)) for name, function in _functions(tools or ())}
    return tuple(_unpadded(message, nullable) for message in messages)


def _functions(entries: Iterable[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, what has it) of tools: {"function": {"name": ...}} or {"name": ...}."""
    for entry in entries:
        inner = entry.get("function", entry)
        if isinstance(inner, Mapping) and "name" in inner:
            yield str(inner["name"]), inner


def _nullable(function: Mapping[str, Any]) -> Iterator[str]:
    """Arguments whose JSON schema takes null."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    for name, schema in (properties if isinstance(properties, Mapping) else {}).items():
        if isinstance(schema, Mapping):
            kinds = [schema, *(one for key in ("anyOf", "oneOf") for one in schema.get(key) or ())]
            types = [kind.get("type") for kind in kinds if isinstance(kind, Mapping)]
            if schema.get("nullable") or any("null" in (one if isinstance(one, list) else [one]) for one in types):
                yield name


def _unpadded(message: Mapping[str, Any], nullable: Mapping[str, set[str]]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call(call, nullable) for call in calls]} if isinstance(calls, list) else message


def _call(call: Any, nullable: Mapping[str, set[str]]) -> Any:
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    given = inner.get("arguments") if isinstance(inner, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(inner, Mapping):
        return call
    takes = nullable.get(str(inner.get("name")), set())
    arguments = {name: without_null(one) for name, one in given.items() if one is not None or name in takes}
    function = {**inner, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function

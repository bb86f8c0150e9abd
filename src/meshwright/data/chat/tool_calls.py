"""Tool calls of rows in the form that templates of today read: without padding nulls and under their newer names.

`function_call` turns of sharegpt files hold JSON (LLaMA-Factory, `data/formatter.py`). OpenAI's `function_call` of a
message, since replaced by `tool_calls`, holds one call, which the role `function` answers.

A table gives each object the fields of all others, as nulls. Parquet has them, and .jsonl files that the datasets
library wrote. A template would write them into tools and calls, and a model would learn to name arguments that a tool
does not have. TRL, `trl/data_utils.py`, `remove_none_values`, removes all of them. Here one stays if the tool's schema
takes null.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.spec.errors import DataError

CALL = "function_call"
THOUGHT = re.compile(r"\s*(<think>.*?</think>)\s*", re.DOTALL)
_AS_IT_IS = ("arguments", "enum")
"""Fields of messages and tools in which a null has a meaning."""


def read_calls(text: Any, what: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the thought in front of the calls of a turn, and its `tool_calls`: JSON of one call or of a list.

    LLaMA-Factory cuts a thought off before it reads the calls. Raises DataError, which begins with `what`, for
    anything else.
    """
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        thought = THOUGHT.match(text)
        read = json.loads(text[thought.end() :] if thought else text)
        calls = read if isinstance(read, list) else [read]
        if calls and all(isinstance(call, Mapping) and {"name", "arguments"} <= call.keys() for call in calls):
            tool_calls = [{"type": "function", "function": call} for call in calls]
            return thought[1] if thought else "", tool_calls
    raise DataError(
        f"{what} is a {CALL!r}, but its value is not JSON with 'name' and 'arguments': correct it, or use from='gpt' "
        "for plain text"
    )


def renewed(turns: Iterable[Any]) -> list[Any]:
    """Return turns with `tool_calls` in place of each `function_call`, and the role `tool` for its answer."""
    turns = list(turns)
    if not any(isinstance(turn, Mapping) and turn.get(CALL) is not None for turn in turns):
        return turns
    return [_renewed(turn) if isinstance(turn, Mapping) else turn for turn in turns]


def _renewed(turn: Mapping[str, Any]) -> dict[str, Any]:
    others = {name: value for name, value in turn.items() if name != CALL}
    if others.get("role") == "function":
        others["role"] = "tool"
    if turn.get(CALL) is not None and not others.get("tool_calls"):
        others["tool_calls"] = [{"type": "function", "function": turn[CALL]}]
    return others


def without_null(value: Any) -> Any:
    """Return a value without null fields at any depth. Arguments of a call and choices of an enum are unchanged."""
    if isinstance(value, Mapping):
        present = {name: part for name, part in value.items() if part is not None}
        return {name: part if name in _AS_IT_IS else without_null(part) for name, part in present.items()}
    return [without_null(part) for part in value] if isinstance(value, list) else value


def unpadded(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> tuple[Mapping[str, Any], ...]:
    """Return messages whose calls have no null arguments, except where the called tool takes null."""
    nullable = {name: set(_nullable(function)) for name, function in _functions(tools or ())}
    return tuple(_unpadded(message, nullable) for message in messages)


def _functions(entries: Iterable[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (name, function) of tools in the form {"function": {"name": ...}} or {"name": ...}."""
    for entry in entries:
        inner = entry.get("function", entry)
        if isinstance(inner, Mapping) and "name" in inner:
            yield str(inner["name"]), inner


def _nullable(function: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments whose JSON schema takes null."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    for name, schema in (properties if isinstance(properties, Mapping) else {}).items():
        if isinstance(schema, Mapping):
            kinds = [schema, *(option for key in ("anyOf", "oneOf") for option in schema.get(key) or ())]
            types = [kind.get("type") for kind in kinds if isinstance(kind, Mapping)]
            if schema.get("nullable") or any("null" in (kind if isinstance(kind, list) else [kind]) for kind in types):
                yield name


def _unpadded(message: Mapping[str, Any], nullable: Mapping[str, set[str]]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call(call, nullable) for call in calls]} if isinstance(calls, list) else message


def _call(call: Any, nullable: Mapping[str, set[str]]) -> Any:
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    padded = inner.get("arguments") if isinstance(inner, Mapping) else None
    if not isinstance(padded, Mapping) or not isinstance(inner, Mapping):
        return call
    takes = nullable.get(str(inner.get("name")), set())
    arguments = {name: without_null(part) for name, part in padded.items() if part is not None or name in takes}
    function = {**inner, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function

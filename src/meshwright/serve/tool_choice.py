"""Tools that a request offers, and answers that must call one of them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from meshwright.serve.tool_calls import ToolCall, ToolFamily, json_call
from meshwright.spec.errors import ArgumentError

MOST_TOOLS: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedCall:
    """How an answer is made that is a call of a tool."""

    prefix: str
    """What the prompt goes on with: the beginning of a call in the model's own words."""
    json_schema: Mapping[str, Any]
    """Of the answer itself, as `RequestOptions` takes it."""
    name: str = ""
    """Of the tool, where the answer has its arguments alone."""

    def read(self, text: str) -> ToolCall | None:
        """The call that a whole answer makes; None where it was cut off."""
        return json_call(text, self.name or None)


def forced_call(family: ToolFamily, tools: Sequence[Mapping[str, Any]], name: str | None = None) -> ForcedCall:
    """An answer that calls the tool of this name, or any of them. `tools` as of the chat API: {"type": "function",
    "function": {"name": ..., "parameters": a JSON schema}}. ArgumentError where they are none."""
    schemas = tool_schemas(tools)
    if name is not None:
        if name not in schemas:
            raise ArgumentError(f"tool_choice names {name!r}, and the tools are {', '.join(schemas)}: name one of them")
        schemas = {name: schemas[name]}
    if len(schemas) == 1 and family.named_prefix:
        ((only, schema),) = schemas.items()
        return ForcedCall(prefix=family.named_prefix.format(name=only), json_schema=schema, name=only)
    each = [_call_schema(family.arguments, one, place) for place, one in enumerate(schemas)]
    named = {f"tool{place}": _within(f"tool{place}", schema) for place, schema in enumerate(schemas.values())}
    return ForcedCall(prefix=family.prefix, json_schema={"$defs": named, "anyOf": each})


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schema of each tool's arguments by its name. ArgumentError."""
    if not 1 <= len(tools) <= MOST_TOOLS:
        raise ArgumentError(f"tools has {len(tools)} entries: give 1 to {MOST_TOOLS}")
    found: dict[str, Mapping[str, Any]] = {}
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping):
            raise ArgumentError(f'tools[{place}] must be {{"type": "function", "function": {{"name": ...}}}}')
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ArgumentError(f"tools[{place}] has the name {name!r}: give up to 64 of letters, digits, _ . and -")
        if name in found:
            raise ArgumentError(f"tools has {name!r} twice: give each tool a name of its own")
        if schema is not None and not isinstance(schema, Mapping):
            raise ArgumentError(f"tools[{place}] has parameters that are no JSON schema: give an object")
        found[name] = schema or {"type": "object"}
    return found


def _call_schema(arguments: str, name: str, place: int) -> dict[str, Any]:
    """Of a call of one tool."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, arguments: {"$ref": f"#/$defs/tool{place}"}},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _within(name: str, schema: Any) -> Any:
    """A schema that was the root and is a definition now: what it refers to in itself has moved."""
    if isinstance(schema, list):
        return [_within(name, one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _within(name, value) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        found["$ref"] = f"#/$defs/{name}{reference[1:]}"
    return found

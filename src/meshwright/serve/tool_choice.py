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
    """Prompt and schema of an answer that is a call of a tool."""

    prefix: str
    """Continuation of the prompt: the beginning of a call in the model's own notation."""
    json_schema: Mapping[str, Any]
    """Schema of the answer itself, as `RequestOptions` takes it."""
    name: str = ""
    """Name of the tool, if the answer contains only its arguments."""

    def read(self, text: str) -> ToolCall | None:
        """Return the call of a whole answer. None = it was cut off."""
        return json_call(text, self.name or None)


def forced_call(family: ToolFamily, tools: Sequence[Mapping[str, Any]], name: str | None = None) -> ForcedCall:
    """Return prompt and schema for a call of the tool with this name, or of any tool.

    `tools` as in the chat API: {"type": "function", "function": {"name": ..., "parameters": a JSON schema}}. Raises
    ArgumentError for malformed tools or an unknown name.
    """
    schemas = tool_schemas(tools)
    if name is not None:
        if name not in schemas:
            raise ArgumentError(f"tool_choice names {name!r}, and the tools are {', '.join(schemas)}: name one of them")
        schemas = {name: schemas[name]}
    if len(schemas) == 1 and family.named_prefix:
        ((only, schema),) = schemas.items()
        return ForcedCall(prefix=family.named_prefix.format(name=only), json_schema=schema, name=only)
    call_schemas = [_call_schema(family.arguments, name_of_tool, index) for index, name_of_tool in enumerate(schemas)]
    definitions = {f"tool{index}": _within(f"tool{index}", schema) for index, schema in enumerate(schemas.values())}
    return ForcedCall(prefix=family.prefix, json_schema={"$defs": definitions, "anyOf": call_schemas})


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the schema of each tool's arguments by its name. Raises ArgumentError."""
    if not 1 <= len(tools) <= MOST_TOOLS:
        raise ArgumentError(f"tools has {len(tools)} entries: give 1 to {MOST_TOOLS}")
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping):
            raise ArgumentError(f'tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}')
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ArgumentError(f"tools[{index}] has the name {name!r}: give up to 64 of letters, digits, _ . and -")
        if name in schemas:
            raise ArgumentError(f"tools has {name!r} twice: give each tool a name of its own")
        if schema is not None and not isinstance(schema, Mapping):
            raise ArgumentError(f"tools[{index}] has parameters that are no JSON schema: give an object")
        schemas[name] = schema or {"type": "object"}
    return schemas


def _call_schema(arguments: str, name: str, index: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, arguments: {"$ref": f"#/$defs/tool{index}"}},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _within(name: str, schema: Any) -> Any:
    """Return a root schema as a definition, with its references to itself moved."""
    if isinstance(schema, list):
        return [_within(name, entry) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _within(name, child) for key, child in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{name}{reference[1:]}"
    return moved

"""Tools of one request: those that the model is offered, and the calls in its answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.data.chat.template import ChatTemplate
from meshwright.serving.engine.answers.tool_calls import (
    ForcedCall,
    ToolCall,
    ToolFamily,
    ToolReading,
    family_of,
    forced_call,
    read_answer,
    tool_schemas,
)
from meshwright.serving.http.api_error import bad_request
from meshwright.serving.http.request.chat_fields import ChatFields, ChosenTool
from meshwright.spec.errors import MeshwrightError


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Rules by which answers of one request are read."""

    family: ToolFamily
    tools: Sequence[dict[str, Any]]
    forced: ForcedCall | None
    """Call that the answer must be. None = the model may call or answer in words."""
    thought: str = ""
    """Mark of a thought that the prompt leaves open."""

    def read(self, text: str, *, ended: bool) -> ToolReading:
        """Return what is certain of a growing answer, or all of an ended one."""
        if self.forced is None:
            return read_answer(self.family, text, ended=ended, opened=self.thought)
        call = self.forced.read(text) if ended else None
        return ToolReading("" if call or not ended else text, (call,) if call else ())


def tool_use(fields: ChatFields, template: ChatTemplate) -> ToolUse | None:
    """Return the tools of a request, or None. Raises ApiError when the model or the request cannot use them."""
    if not fields.tools or fields.tool_choice == "none":
        return None
    choice = fields.tool_choice
    try:
        family = family_of(template)
        tool_schemas(fields.tools)
        name = choice.function.name if isinstance(choice, ChosenTool) else None
        forced = forced_call(family, fields.tools, name) if name is not None or choice == "required" else None
    except MeshwrightError as error:
        raise bad_request(str(error), "tools") from None
    if forced is not None and (fields.answer_schema is not None or fields.answer_regex is not None):
        raise bad_request(
            "an answer that must call a tool has that tool's form: leave the other out", "response_format"
        )
    if forced is not None and fields.ignore_eos:
        raise bad_request("ignore_eos contradicts an answer that ends with its call", "ignore_eos")
    return ToolUse(family, fields.tools, forced)


@dataclass(slots=True)
class ReadSoFar:
    """Progress of an answer that its reader has received."""

    text: str = ""
    content: int = 0
    """Characters of content so far."""
    calls: int = 0

    def advance(self, use: ToolUse, piece: str, *, ended: bool) -> tuple[str, tuple[ToolCall, ...]]:
        """Add a piece of text, and return the content and calls that became certain with it."""
        self.text += piece
        reading = use.read(self.text, ended=ended)
        content, calls = reading.content[self.content :], reading.calls[self.calls :]
        self.content, self.calls = self.content + len(content), len(reading.calls)
        return content, calls

"""Tools of one request: what the model is offered, and which calls its answers make."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.data.chat_template import ChatTemplate
from meshwright.serve.tool_calls import ToolCall, ToolFamily, ToolReading, family_of, read_answer
from meshwright.serve.tool_choice import ForcedCall, forced_call, tool_schemas
from meshwright.server.api_error import refused
from meshwright.server.chat_fields import ChatFields, ChosenTool
from meshwright.spec.errors import MeshwrightError


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How answers of one request are read."""

    family: ToolFamily
    tools: Sequence[dict[str, Any]]
    forced: ForcedCall | None
    """None = the model may call, or say something."""
    thought: str = ""
    """The mark of a thought that the prompt leaves open."""

    def read(self, text: str, *, ended: bool) -> ToolReading:
        """What is certain of an answer that grows, or all of it."""
        if self.forced is None:
            return read_answer(self.family, text, ended=ended, opened=self.thought)
        call = self.forced.read(text) if ended else None
        return ToolReading("" if call or not ended else text, (call,) if call else ())


def tool_use(fields: ChatFields, template: ChatTemplate) -> ToolUse | None:
    """None where the model is offered none. ApiError: the model knows no tools, or what is asked for makes no sense."""
    if not fields.tools or fields.tool_choice == "none":
        return None
    choice = fields.tool_choice
    try:
        family = family_of(template)
        tool_schemas(fields.tools)
        name = choice.function.name if isinstance(choice, ChosenTool) else None
        forced = forced_call(family, fields.tools, name) if name is not None or choice == "required" else None
    except MeshwrightError as error:
        raise refused(str(error), "tools") from None
    if forced is not None and (fields.schema_wanted is not None or fields.regex_wanted is not None):
        raise refused("an answer that must call a tool has that tool's form: leave the other out", "response_format")
    if forced is not None and fields.ignore_eos:
        raise refused("ignore_eos contradicts an answer that ends with its call", "ignore_eos")
    return ToolUse(family, fields.tools, forced)


@dataclass(slots=True)
class ReadSoFar:
    """How far an answer has been given to its reader."""

    text: str = ""
    content: int = 0
    """Letters of it."""
    calls: int = 0

    def more(self, use: ToolUse, piece: str, *, ended: bool) -> tuple[str, tuple[ToolCall, ...]]:
        """Content and calls that became certain with a piece of text."""
        self.text += piece
        found = use.read(self.text, ended=ended)
        content, calls = found.content[self.content :], found.calls[self.calls :]
        self.content, self.calls = self.content + len(content), len(found.calls)
        return content, calls

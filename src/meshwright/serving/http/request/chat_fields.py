"""Fields of a chat request: turns of a conversation, tools that the model is offered, and calls in its answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field
from pydantic_core import from_json

from meshwright.data.chat.template import ChatTemplate
from meshwright.serving.engine.answers.request_options import MOST_LOGPROBS
from meshwright.serving.engine.answers.tool_calls import (
    MOST_TOOLS,
    ForcedCall,
    ToolCall,
    ToolFamily,
    ToolReading,
    family_of,
    force_call,
    read_answer,
    tool_schemas,
)
from meshwright.serving.http.api_error import bad_request
from meshwright.serving.http.request.request_fields import AnswerFields, CheckedFields
from meshwright.spec.errors import MeshwrightError, printable

Settings = dict[str, Any]
"""Further arguments of a chat template, such as `enable_thinking`."""
RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Arguments that requests set in other fields."""


class TextPart(CheckedFields):
    """Part of a message. Only text is supported."""

    type: Literal["text"]
    text: str


class CalledFunction(CheckedFields):
    """Function that an earlier answer called."""

    name: str = Field(max_length=64)
    arguments: str


class EarlierCall(CheckedFields):
    """Call in an earlier answer."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Index as in a piece of a stream, from which clients assemble a call."""

    @property
    def row(self) -> dict[str, Any]:
        """Call in the form that chat templates read, with arguments as an object. Raises ApiError."""
        try:
            arguments = from_json(self.function.arguments.strip() or "{}")
        except ValueError:
            raise bad_request(f"the arguments of call {printable(self.id)} are not JSON", "messages") from None
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(CheckedFields):
    """Turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    tool_calls: list[EarlierCall] = Field(default_factory=list, max_length=128)
    tool_call_id: str | None = Field(None, max_length=256)
    annotations: list[Any] = Field(default_factory=list, max_length=0)
    """Field of OpenAI's answers, which clients send back. Citations are not supported."""

    @property
    def row(self) -> dict[str, Any]:
        """Message in the form that chat templates read. `developer` is the newer name of `system`."""
        content = self.content or ""
        parts = content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]
        role = "system" if self.role == "developer" else self.role
        named = {
            "name": self.name, "reasoning_content": self.reasoning_content, "tool_call_id": self.tool_call_id,
            "tool_calls": [call.row for call in self.tool_calls] or None,
        }  # fmt: skip
        return {"role": role, "content": parts} | {key: entry for key, entry in named.items() if entry is not None}


class ChosenFunction(CheckedFields):
    """Name of a tool."""

    name: str = Field(max_length=64)


class ChosenTool(CheckedFields):
    """Tool that the answer must call."""

    type: Literal["function"]
    function: ChosenFunction


class ChatFields(AnswerFields):
    """Body of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] = Field(default_factory=list, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    chat_template_kwargs: Settings = Field(default_factory=dict, max_length=64)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    def check_together(self) -> None:
        """Raise ApiError if fields contradict each other."""
        super().check_together()
        _check_turns(self)
        _check_settings(self.chat_template_kwargs)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise bad_request("max_tokens and max_completion_tokens contradict each other: give one", "max_tokens")

    @property
    def with_special(self) -> bool:
        """True also if the model may call tools, since some models write calls in special tokens."""
        return super().with_special or (bool(self.tools) and self.tool_choice != "none")

    @property
    def likeliest(self) -> int | None:
        """Number from `logprobs` and `top_logprobs` together."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_new_tokens(self) -> int | None:
        """Limit under its new name or its old one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeFields(CheckedFields):
    """Body of `/tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    chat_template_kwargs: Settings = Field(default_factory=dict, max_length=64)

    def check_together(self) -> None:
        """Raise ApiError if a setting is reserved."""
        _check_settings(self.chat_template_kwargs)


def _check_turns(fields: ChatFields) -> None:
    if not fields.tools and fields.tool_choice not in (None, "none"):
        raise bad_request("tool_choice needs tools", "tool_choice")
    for index, message in enumerate(fields.messages):
        calls, answers = bool(message.tool_calls), message.tool_call_id is not None
        if calls and message.role != "assistant":
            raise bad_request(f"messages.{index}: only the assistant has tool_calls", "messages")
        if answers != (message.role == "tool"):
            raise bad_request(f"messages.{index}: tool_call_id belongs to the role tool, which needs it", "messages")
        if message.content is None and not calls:
            raise bad_request(f"messages.{index}: content is missing", "messages")


def _check_settings(settings: Settings) -> None:
    reserved = next((name for name in settings if name in RESERVED_NAMES), None)
    if reserved is not None:
        raise bad_request(
            f"chat_template_kwargs.{reserved} is set by other fields: leave it out", "chat_template_kwargs"
        )


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
        forced = force_call(family, fields.tools, name) if name is not None or choice == "required" else None
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

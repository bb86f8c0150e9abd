"""What a chat may ask for: turns of a conversation, and tools."""

from typing import Any, Literal

from pydantic import Field
from pydantic_core import from_json

from meshwright.serve.request_options import MOST_LOGPROBS
from meshwright.serve.tool_choice import MOST_TOOLS
from meshwright.server.api_error import refused
from meshwright.server.checked_fields import CheckedFields
from meshwright.server.request_fields import AnswerFields
from meshwright.spec.errors import printable

Settings = dict[str, Any]
"""What a chat template is told beside the conversation, as `enable_thinking`."""
OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""That requests say in other fields."""


class TextPart(CheckedFields):
    """A part of what is said; there is only text."""

    type: Literal["text"]
    text: str


class CalledFunction(CheckedFields):
    """What an earlier answer called."""

    name: str = Field(max_length=64)
    arguments: str


class EarlierCall(CheckedFields):
    """A call in an earlier answer."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """As in a piece of a stream, from which clients put a call together."""

    @property
    def row(self) -> dict[str, Any]:
        """As chat templates read it: arguments are an object, that of a call without any is empty. ApiError."""
        try:
            arguments = from_json(self.function.arguments.strip() or "{}")
        except ValueError:
            raise refused(f"the arguments of call {printable(self.id)} are not JSON", "messages") from None
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(CheckedFields):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    tool_calls: list[EarlierCall] = Field(default_factory=list, max_length=128)
    tool_call_id: str | None = Field(None, max_length=256)
    annotations: list[Any] = Field(default_factory=list, max_length=0)
    """As in answers of OpenAI, which clients send back; citations are not supported."""

    @property
    def row(self) -> dict[str, Any]:
        """As chat templates read it, which join parts in their own way; `developer` is the newer name of `system`."""
        content = self.content or ""
        parts = content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]
        role = "system" if self.role == "developer" else self.role
        named = {
            "name": self.name, "reasoning_content": self.reasoning_content, "tool_call_id": self.tool_call_id,
            "tool_calls": [call.row for call in self.tool_calls] or None,
        }  # fmt: skip
        return {"role": role, "content": parts} | {key: one for key, one in named.items() if one is not None}


class ChosenFunction(CheckedFields):
    """The name of a tool."""

    name: str = Field(max_length=64)


class ChosenTool(CheckedFields):
    """A tool that the answer must call."""

    type: Literal["function"]
    function: ChosenFunction


class ChatFields(AnswerFields):
    """The body of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] = Field(default_factory=list, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    chat_template_kwargs: Settings = Field(default_factory=dict, max_length=64)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    def check_together(self) -> None:
        """ApiError."""
        super().check_together()
        _check_turns(self)
        _check_settings(self.chat_template_kwargs)
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs needs logprobs=true", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise refused("max_tokens and max_completion_tokens contradict each other: give one", "max_tokens")

    @property
    def with_special(self) -> bool:
        """Also where the model may call tools: some models write calls in special tokens."""
        return super().with_special or (bool(self.tools) and self.tool_choice != "none")

    @property
    def likeliest(self) -> int | None:
        """As `logprobs` and `top_logprobs` say together."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted(self) -> int | None:
        """By its new name or its old one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeFields(CheckedFields):
    """The body of `/tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    chat_template_kwargs: Settings = Field(default_factory=dict, max_length=64)

    def check_together(self) -> None:
        """ApiError."""
        _check_settings(self.chat_template_kwargs)


def _check_turns(fields: ChatFields) -> None:
    if not fields.tools and fields.tool_choice not in (None, "none"):
        raise refused("tool_choice needs tools", "tool_choice")
    for place, message in enumerate(fields.messages):
        calls, answers = bool(message.tool_calls), message.tool_call_id is not None
        if calls and message.role != "assistant":
            raise refused(f"messages.{place}: only the assistant has tool_calls", "messages")
        if answers != (message.role == "tool"):
            raise refused(f"messages.{place}: tool_call_id belongs to the role tool, which needs it", "messages")
        if message.content is None and not calls:
            raise refused(f"messages.{place}: content is missing", "messages")


def _check_settings(settings: Settings) -> None:
    own = next((name for name in settings if name in OWN_NAMES), None)
    if own is not None:
        raise refused(f"chat_template_kwargs.{own} is set by other fields: leave it out", "chat_template_kwargs")

"""Validation of request bodies: fields of completions and chats, those that they share, and their defaults.

A chat has turns of a conversation, tools that the model is offered, and calls in its answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from meshwright.data.chat.template import ChatTemplate
from meshwright.serving.engine.answers.request_options import LONGEST_STOP, MOST_LOGPROBS, MOST_STOPS
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
from meshwright.serving.http.channel import ApiError, bad_request
from meshwright.spec.errors import MeshwrightError, printable
from meshwright.spec.presets import suggest

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (), "function_call": ("none",), "functions": ([],), "logit_processors": (), "metadata": ({},),
    "min_tokens": (0,), "modalities": (["text"],), "parallel_tool_calls": (True,), "prediction": (),
    "prompt_cache_key": (), "prompt_cache_retention": (), "reasoning_effort": (), "safety_identifier": (),
    "service_tier": ("auto", "default"), "store": (False,), "suffix": ("",), "tool_choice": ("none",), "tools": ([],),
    "verbosity": (), "web_search_options": (), "prompt_logprobs": (),
    "chat_template_kwargs": ({},), "chat_template": (), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "moderation": (), "truncate_prompt_tokens": (), "mm_processor_kwargs": (),
    "add_generation_prompt": (True,), "continue_final_message": (False,),
}  # fmt: skip
"""Fields of OpenAI's and vLLM's interfaces that this server lacks -> values that ask for nothing."""
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
MOST_IDS = 64
"""Most token ids that may end an answer."""
MOST_BIASES = 1024
MOST_CHOICES = 256
Choice = Annotated[str, Field(min_length=1, max_length=1024)]
DRAWN: dict[str, tuple[Any, ...]] = {"temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
"""Fields of sampling -> values that ask for nothing."""
LENGTH: Final = "max_new_tokens"
"""Default length of answers in a generation_config.json."""
_SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
Settings = dict[str, Any]
"""Further arguments of a chat template, such as `enable_thinking`."""
RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Arguments that requests set in other fields."""


class CheckedFields(BaseModel):
    """Body of a request, or a part of one. Nothing is converted, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    def check_together(self) -> None:
        """Raise ApiError if fields contradict each other."""


Fields = TypeVar("Fields", bound=CheckedFields)


def check_fields(kind: type[Fields], body: Mapping[str, Any]) -> Fields:
    """Return a body as fields. A null field counts as absent. Raises ApiError for the first field at fault."""
    known, present = kind.model_fields, {}
    for name, content in body.items():
        # OpenAI's clients send null for what their users left out.
        if content is None:
            continue
        if name in known:
            present[name] = _without_nulls(content)
        elif name not in NEUTRAL:
            close = f"; {suggest(name, known, 1)}"
            raise bad_request(f"{printable(name)[:60]} is not known{close}", printable(name)[:60], "unknown_parameter")
        # type() too: 1 == True in Python, and True is no number here.
        elif not any(content == neutral and type(content) is type(neutral) for neutral in NEUTRAL[name]):
            raise bad_request(f"{name} is not supported by this server: leave it out", name, "unsupported_parameter")
    try:
        fields = kind.model_validate(present)
    except ValidationError as error:
        raise _first_fault(error) from None
    fields.check_together()
    return fields


def _without_nulls(content: Any) -> Any:
    """Drop nulls inside messages and stream options, since clients send back all fields of an answer."""
    if isinstance(content, dict):
        return {name: inner for name, inner in content.items() if inner is not None}
    return (
        [_without_nulls(inner) if isinstance(inner, dict) else inner for inner in content]
        if isinstance(content, list)
        else content
    )


def _first_fault(error: ValidationError) -> ApiError:
    """Return the error for the first fault. Of a field with several types, the deepest fault counts."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    name = str(faults[0]["loc"][0]) if faults[0]["loc"] else ""
    first = max(
        (fault for fault in faults if str(fault["loc"][:1]) == str(faults[0]["loc"][:1])),
        key=lambda fault: len(fault["loc"]),
    )
    path = ".".join(str(step) for step in first["loc"] if not (isinstance(step, str) and not step.isidentifier()))
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return bad_request(f"{name} is missing", name, "missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return bad_request(f"{printable(path)[:80]} is not known", name, "unknown_parameter")
    return bad_request(f"{printable(path)[:80]}: {first['msg'][:1].lower()}{first['msg'][1:]}", name)


class StreamFields(CheckedFields):
    """Options of a stream."""

    include_usage: bool = False
    """Send one more event before the last, with the token counts of all answers."""


class SchemaFields(CheckedFields):
    """JSON schema and its name."""

    name: str = Field(max_length=64)
    schema_: dict[str, Any] = Field(alias="schema")
    description: str = ""
    strict: bool | None = True
    """Accepted and ignored: the schema is always enforced."""


class FormatFields(CheckedFields):
    """Form of an answer: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFields | None = None


class StructureFields(CheckedFields):
    """Form of an answer in vLLM's words: a schema, a regular expression, or one of several texts."""

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[Choice] | None = Field(None, min_length=1, max_length=MOST_CHOICES)


class AnswerFields(CheckedFields):
    """Fields that completions and chats share."""

    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    """0 and -1 = all tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1)
    best_of: int | None = Field(None, ge=1)
    use_beam_search: bool = False
    length_penalty: float = Field(1.0, ge=-100, le=100)
    early_stopping: bool | Literal["never"] = False
    seed: int | None = Field(None, ge=0, lt=2**62)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] = Field(default_factory=list)
    stop_token_ids: list[Token] = Field(default_factory=list, max_length=MOST_IDS)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    logit_bias: dict[str, Bias] = Field(default_factory=dict, max_length=MOST_BIASES)
    stream: bool = False
    stream_options: StreamFields | None = None
    cache_salt: str = Field("", max_length=256)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    return_token_ids: bool = False
    user: str = Field("", max_length=256)
    """User for the log."""
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    response_format: FormatFields | None = None
    structured_outputs: StructureFields | None = None

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """JSON schema of the answer. The empty schema allows any object."""
        form, structure = self.response_format, self.structured_outputs
        if form is not None and form.type == "json_object":
            return {}
        if form is not None and form.json_schema is not None:
            return form.json_schema.schema_
        return structure.json_ if structure else None

    @property
    def answer_regex(self) -> str | None:
        """Regular expression that the answer must match."""
        structure = self.structured_outputs
        if structure is not None and structure.choice is not None:
            return f"({'|'.join(map(_literal, structure.choice))})"
        return structure.regex if structure else None

    @property
    def candidates(self) -> int:
        """Number of answers that are generated, of which the best `n` are returned. For beams, the beams followed."""
        return self.n if self.best_of is None else self.best_of

    @property
    def beams(self) -> int:
        """Number of beams. 1 = no beam search."""
        return self.candidates if self.use_beam_search else 1

    @property
    def answers(self) -> int:
        """Number of answers from the engine: the best beams, or all candidates."""
        return self.n if self.use_beam_search else self.candidates

    def check_together(self) -> None:
        """Raise ApiError if fields contradict each other."""
        _check_structure(self)
        _check_best(self)
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream=true", "stream_options")

    @property
    def with_special(self) -> bool:
        """True if special tokens appear in the text of an answer."""
        return not self.skip_special_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def biases(self) -> dict[int, float]:
        """Bias by token."""
        try:
            return {int(token): amount for token, amount in self.logit_bias.items()}
        except ValueError:
            raise bad_request('logit_bias names its tokens by id, as {"50256": -100}', "logit_bias") from None

    @property
    def max_new_tokens(self) -> int | None:
        """Most tokens of an answer. None = not stated."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """Number of likeliest tokens with log-probabilities per position. None = no log-probabilities at all."""
        raise NotImplementedError


class CompletionFields(AnswerFields):
    """Body of `/v1/completions`."""

    prompt: str | list[str] | list[Token] | list[list[Token]]
    max_tokens: int | None = Field(16, ge=0, lt=2**31)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @property
    def likeliest(self) -> int | None:
        """Number from `logprobs`."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts as they were given, one or several. Raises ApiError without any."""
        prompt = self.prompt
        is_single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        prompts: list[Any] = [prompt] if is_single else list(prompt)
        if not prompts:
            raise bad_request("prompt is empty: give a text, or token ids", "prompt")
        return prompts


class DetokenizeFields(CheckedFields):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[Token]


def _check_structure(fields: AnswerFields) -> None:
    form, structure = fields.response_format, fields.structured_outputs
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        raise bad_request(
            "response_format.json_schema belongs to the type json_schema, which needs it", "response_format"
        )
    formats = [form] if form is not None and form.type != "text" else []
    structures = (
        [
            structure_field
            for structure_field in (structure.json_, structure.regex, structure.choice)
            if structure_field is not None
        ]
        if structure
        else []
    )
    if len([*formats, *structures]) > 1 or (structure and not structures):
        raise bad_request(
            "give one of response_format and structured_outputs' json, regex and choice", "structured_outputs"
        )
    if fields.ignore_eos and (formats or structures):
        raise bad_request("ignore_eos contradicts an answer that ends with its form", "ignore_eos")


def _check_best(fields: AnswerFields) -> None:
    if fields.candidates < fields.n:
        raise bad_request(f"best_of={fields.best_of} must be at least n={fields.n}: the best n are given", "best_of")
    if fields.use_beam_search:
        for name, plain in DRAWN.items():
            if getattr(fields, name) not in plain:
                raise bad_request(f"{name} is for tokens that are drawn, and beams draw none: leave it out", name)
    elif fields.stream and fields.candidates > fields.n:
        raise bad_request(
            f"best_of={fields.candidates} answers are ranked when all have ended: leave out stream", "best_of"
        )
    elif fields.length_penalty != 1 or fields.early_stopping is not False:
        name = "length_penalty" if fields.length_penalty != 1 else "early_stopping"
        raise bad_request(f"{name} is for beams: add use_beam_search=true, or leave it out", name)


def _literal(text: str) -> str:
    return "".join(f"\\{character}" if character in r"\.+*?()|[]{}^$" else character for character in text)


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that a request could state (vLLM, `ModelConfig.get_diff_sampling_param`)."""
    defaults = {name: generation[name] for name in _SAMPLING if _is_valid(name, generation.get(name))}
    length = generation.get(LENGTH)
    return defaults | ({LENGTH: length} if type(length) is int and length > 0 else {})


def _is_valid(name: str, value: Any) -> bool:
    try:
        return value is not None and bool(AnswerFields.model_validate({name: value}))
    except ValidationError:
        return False


def with_defaults(body: Mapping[str, Any], sampling: Mapping[str, float]) -> dict[str, Any]:
    """Fill the defaults into a body, except for beams, which draw no tokens."""
    stated = {name: content for name, content in body.items() if content is not None}
    if stated.get("use_beam_search"):
        return stated
    return {name: default for name, default in sampling.items() if name != LENGTH} | stated


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

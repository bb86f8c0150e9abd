"""What the body of a request may ask for. Each field is honoured; a standard one that is not is refused by name."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshwright.serve.request_options import LONGEST_STOP, MOST_LOGPROBS, MOST_STOPS
from meshwright.server.api_error import ApiError, refused
from meshwright.spec.errors import printable
from meshwright.spec.presets import nearest

Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
MOST_IDS = 64
"""Token ids that end an answer."""
MOST_BIASES = 1024

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (), "function_call": ("none",), "functions": ([],), "logit_processors": (), "metadata": ({},),
    "min_tokens": (0,), "modalities": (["text"],), "parallel_tool_calls": (), "prediction": (), "prompt_cache_key": (),
    "prompt_cache_retention": (), "reasoning_effort": (),
    "safety_identifier": (), "service_tier": ("auto", "default"), "store": (False,), "suffix": ("",),
    "tool_choice": ("none",), "tools": ([],),
    "use_beam_search": (False,), "verbosity": (), "web_search_options": (), "prompt_logprobs": (),
    "chat_template_kwargs": ({},), "chat_template": (), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "length_penalty": (1.0,), "moderation": (), "truncate_prompt_tokens": (), "mm_processor_kwargs": (),
    "add_generation_prompt": (True,), "continue_final_message": (False,),
}  # fmt: skip
"""Fields of OpenAI's and vLLM's interfaces that this server has not -> values that ask for nothing."""


class CheckedFields(BaseModel):
    """A body, or a part of one. Nothing is converted, and nothing unknown is passed over."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamFields(CheckedFields):
    """How an answer is streamed."""

    include_usage: bool = False
    """One more event before the last, with the tokens of all answers."""


class SchemaFields(CheckedFields):
    """A JSON schema and its name."""

    name: str = Field(max_length=64)
    schema_: dict[str, Any] = Field(alias="schema")
    description: str = ""
    strict: bool | None = True
    """It is kept to in any case."""


class FormatFields(CheckedFields):
    """What an answer is: any text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFields | None = None


class StructureFields(CheckedFields):
    """The same as vLLM says it: a schema, or a regular expression."""

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None


class AnswerFields(CheckedFields):
    """What a completion and a chat may both ask for."""

    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    """0 and -1 = all."""
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**62)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] = Field(default_factory=list)
    stop_token_ids: list[Token] = Field(default_factory=list, max_length=MOST_IDS)
    ignore_eos: bool = False
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
    """For the log."""
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    response_format: FormatFields | None = None
    structured_outputs: StructureFields | None = None

    @property
    def schema_wanted(self) -> dict[str, Any] | None:
        """JSON schema of the answer; of the empty one any object."""
        form, structure = self.response_format, self.structured_outputs
        if form is not None and form.type == "json_object":
            return {}
        if form is not None and form.json_schema is not None:
            return form.json_schema.schema_
        return structure.json_ if structure else None

    @property
    def regex_wanted(self) -> str | None:
        """What the answer must match."""
        return self.structured_outputs.regex if self.structured_outputs else None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def biases(self) -> dict[int, float]:
        """By token."""
        try:
            return {int(token): amount for token, amount in self.logit_bias.items()}
        except ValueError:
            raise refused('logit_bias names its tokens by id, as {"50256": -100}', "logit_bias") from None

    @property
    def wanted(self) -> int | None:
        """Most tokens of an answer; None = nothing is said."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """Likeliest tokens whose log-probabilities are wanted at each place; None = not even the token's own."""
        raise NotImplementedError


class CompletionFields(AnswerFields):
    """The body of `/v1/completions`."""

    prompt: str | list[str] | list[Token] | list[list[Token]]
    max_tokens: int | None = Field(16, ge=0, lt=2**31)
    best_of: int | None = Field(None, ge=1)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @property
    def likeliest(self) -> int | None:
        """As `logprobs` says."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, as they were given. ApiError: there is none."""
        prompt = self.prompt
        one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        found: list[Any] = [prompt] if one else list(prompt)
        if not found:
            raise refused("prompt is empty: give a text, or token ids", "prompt")
        return found


class TextPart(CheckedFields):
    """A part of what is said; there is only text."""

    type: Literal["text"]
    text: str


class ChatMessage(CheckedFields):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None

    @property
    def row(self) -> dict[str, Any]:
        """As chat templates read it: text in one piece; `developer` is the newer name of `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        named = {"name": self.name, "reasoning_content": self.reasoning_content}
        return {"role": role, "content": text} | {key: value for key, value in named.items() if value is not None}


class ChatFields(AnswerFields):
    """The body of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

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


class DetokenizeFields(CheckedFields):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[Token]


Fields = TypeVar("Fields", bound=CheckedFields)


def checked_fields(kind: type[Fields], body: Mapping[str, Any]) -> Fields:
    """A body as fields; ApiError names the first one at fault. A field that is null is as one that is not there."""
    known, given = kind.model_fields, {}
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            given[name] = _without_nulls(value)
        elif name not in NEUTRAL:
            close = f"; nearest: {nearest(name, known, 1)[0]}"
            raise refused(f"{printable(name)[:60]} is not known{close}", printable(name)[:60], "unknown_parameter")
        elif not any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL[name]):
            raise refused(f"{name} is not supported by this server: leave it out", name, "unsupported_parameter")
    try:
        found = kind.model_validate(given)
    except ValidationError as error:
        raise _explained(error) from None
    _check_together(found)
    return found


def _without_nulls(value: Any) -> Any:
    """A message, or options of a stream, without what is null: clients send back all fields of an answer."""
    if isinstance(value, dict):
        return {name: one for name, one in value.items() if one is not None}
    return (
        [_without_nulls(one) if isinstance(one, dict) else one for one in value] if isinstance(value, list) else value
    )


def _check_together(fields: CheckedFields) -> None:
    if not isinstance(fields, AnswerFields):
        return
    _check_structure(fields)
    if fields.stream_options is not None and not fields.stream:
        raise refused("stream_options needs stream=true", "stream_options")
    if isinstance(fields, CompletionFields) and fields.best_of not in (None, fields.n):
        raise refused(f"best_of={fields.best_of} must be n={fields.n}: answers are not ranked", "best_of")
    if not isinstance(fields, ChatFields):
        return
    if fields.top_logprobs is not None and not fields.logprobs:
        raise refused("top_logprobs needs logprobs=true", "top_logprobs")
    if fields.max_tokens is not None and fields.max_completion_tokens not in (None, fields.max_tokens):
        raise refused("max_tokens and max_completion_tokens contradict each other: give one", "max_tokens")


def _check_structure(fields: AnswerFields) -> None:
    form, structure = fields.response_format, fields.structured_outputs
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        raise refused("response_format has a json_schema exactly where its type is json_schema", "response_format")
    asked = [form] if form is not None and form.type != "text" else []
    given = [one for one in (structure.json_, structure.regex) if one is not None] if structure else []
    if len([*asked, *given]) > 1 or (structure and not given):
        raise refused(
            "give one of response_format, structured_outputs.json and structured_outputs.regex", "structured_outputs"
        )
    if fields.ignore_eos and (asked or given):
        raise refused("ignore_eos contradicts an answer that ends with its form", "ignore_eos")


def _explained(error: ValidationError) -> ApiError:
    """The first fault; of a field that takes several types the one that went furthest."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    name = str(faults[0]["loc"][0]) if faults[0]["loc"] else ""
    first = max((fault for fault in faults if str(fault["loc"][:1]) == str(faults[0]["loc"][:1])), key=_depth)
    place = ".".join(str(step) for step in first["loc"] if not (isinstance(step, str) and not step.isidentifier()))
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return refused(f"{name} is missing", name, "missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return refused(f"{printable(place)[:80]} is not known", name, "unknown_parameter")
    return refused(f"{printable(place)[:80]}: {first['msg'][:1].lower()}{first['msg'][1:]}", name)


def _depth(fault: Any) -> int:
    return len(fault["loc"])

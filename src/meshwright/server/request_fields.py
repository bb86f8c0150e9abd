"""What a completion may ask for, and what it has in common with a chat. Each field is honoured."""

from typing import Annotated, Any, Literal

from pydantic import Field

from meshwright.serve.request_options import LONGEST_STOP, MOST_LOGPROBS, MOST_STOPS
from meshwright.server.api_error import refused
from meshwright.server.checked_fields import CheckedFields

Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
MOST_IDS = 64
"""Token ids that end an answer."""
MOST_BIASES = 1024
MOST_CHOICES = 256
Choice = Annotated[str, Field(min_length=1, max_length=1024)]
DRAWN: dict[str, tuple[Any, ...]] = {"temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
"""Fields of tokens that are drawn -> values that ask for nothing."""


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
    """The same as vLLM says it: a schema, a regular expression, or one of several texts."""

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[Choice] | None = Field(None, min_length=1, max_length=MOST_CHOICES)


class AnswerFields(CheckedFields):
    """What a completion and a chat may both ask for."""

    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    """0 and -1 = all."""
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
        structure = self.structured_outputs
        if structure is not None and structure.choice is not None:
            return f"({'|'.join(map(_literal, structure.choice))})"
        return structure.regex if structure else None

    @property
    def made(self) -> int:
        """Answers that are begun, of which the best `n` are given: of beams all that are followed."""
        return self.n if self.best_of is None else self.best_of

    @property
    def beams(self) -> int:
        """1 = none."""
        return self.made if self.use_beam_search else 1

    @property
    def answers(self) -> int:
        """That the engine gives: of beams the best, else all that are begun."""
        return self.n if self.use_beam_search else self.made

    def check_together(self) -> None:
        """ApiError."""
        _check_structure(self)
        _check_best(self)
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options needs stream=true", "stream_options")

    @property
    def with_special(self) -> bool:
        """Whether special tokens are spelled in the text of an answer."""
        return not self.skip_special_tokens

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


class DetokenizeFields(CheckedFields):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[Token]


def _check_structure(fields: AnswerFields) -> None:
    form, structure = fields.response_format, fields.structured_outputs
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        raise refused("response_format has a json_schema exactly where its type is json_schema", "response_format")
    asked = [form] if form is not None and form.type != "text" else []
    given = (
        [one for one in (structure.json_, structure.regex, structure.choice) if one is not None] if structure else []
    )
    if len([*asked, *given]) > 1 or (structure and not given):
        raise refused(
            "give one of response_format and structured_outputs' json, regex and choice", "structured_outputs"
        )
    if fields.ignore_eos and (asked or given):
        raise refused("ignore_eos contradicts an answer that ends with its form", "ignore_eos")


def _check_best(fields: AnswerFields) -> None:
    if fields.made < fields.n:
        raise refused(f"best_of={fields.best_of} must be at least n={fields.n}: the best n are given", "best_of")
    if fields.use_beam_search:
        for name, plain in DRAWN.items():
            if getattr(fields, name) not in plain:
                raise refused(f"{name} is for tokens that are drawn, and beams draw none: leave it out", name)
    elif fields.stream and fields.made > fields.n:
        raise refused(f"best_of={fields.made} answers are ranked when all have ended: leave out stream", "best_of")
    elif fields.length_penalty != 1 or fields.early_stopping is not False:
        name = "length_penalty" if fields.length_penalty != 1 else "early_stopping"
        raise refused(f"{name} is for beams: add use_beam_search=true, or leave it out", name)


def _literal(text: str) -> str:
    """A regular expression of this very text."""
    return "".join(f"\\{one}" if one in r"\.+*?()|[]{}^$" else one for one in text)

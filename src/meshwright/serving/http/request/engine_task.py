"""Prompts that the engine answers, built from a request's fields. Answers become text here, token by token."""

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple, Protocol, final

from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.answers.tool_calls import AnswerText
from meshwright.serving.http.channel import ModelCard, Top, bad_request
from meshwright.serving.http.request.request_fields import LENGTH, AnswerFields, CompletionFields
from meshwright.serving.http.server_options import ServerLimits, Tenant
from meshwright.spec.errors import MeshwrightError


class TokenScores(NamedTuple):
    """Scores of a prompt's tokens except the first."""

    logprobs: list[float]
    top: list[Top]


class TaskListener(Protocol):
    """Listener to news of a task."""

    def notify(self, *, ended: bool) -> None:
        """Take notice of news. `ended`: the task or one of its answers has ended."""

    def fail(self, error: Exception) -> None:
        """End what waits for the task with an error."""


@final
class GrowingAnswer:
    """Answer that grows, with the part of it that is still unread."""

    __slots__ = ("at", "end_ids", "ending", "ids", "logprobs", "number", "pieces", "task", "text", "tokens", "top")

    def __init__(self, task: "EngineTask", number: int, text: AnswerText | None) -> None:
        """Start empty. `number` identifies it to the engine's process. `text` is None without a tokenizer."""
        self.task, self.number, self.text, self.end_ids = task, number, text, task.end_ids
        self.ending = ""
        """Reason as in `served_request.Ending`. Empty while it grows."""
        self.tokens = 0
        """Number of tokens so far."""
        self.at = 0.0
        """Time of the last token, by the engine's clock."""
        self.pieces: list[str] = []
        """Unread text."""
        self.ids: list[int] = []
        """Unread ids, if the task keeps ids. Likewise the log-probabilities below."""
        self.logprobs: list[float] = []
        self.top: list[Top] = []

    def take(self, token: int) -> None:
        """Add one token. A stop string ends the answer."""
        self.tokens += 1
        if self.task.keeps_ids:
            self.ids.append(token)
        text = self.text
        if text is not None and token not in self.end_ids:
            piece = text.push(token)
            if piece:
                self.pieces.append(piece)
            if text.stopped:
                self.ending = "stop"

    def end(self, ending: str) -> None:
        """End it: no token follows. Text that was held back is released, unless the answer was cancelled."""
        if self.text is not None and ending in ("stop", "length"):
            self.pieces.append(self.text.finish())
            ending = "stop" if self.text.stopped else ending
        self.ending = ending


@dataclass(slots=True, eq=False, kw_only=True)
class EngineTask:
    """Prompt for the engine, with its answers."""

    prompt: list[int]
    options: RequestOptions
    tokenizer: Tokenizer | None
    end_ids: frozenset[int]
    """Tokens that end an answer and are not part of its text."""
    scored: int | None = None
    """Likeliest tokens per position of the prompt. None = the prompt is not scored."""
    with_logprobs: bool = False
    """True if log-probabilities of new tokens are needed."""
    keeps_ids: bool = False
    """True if the ids of new tokens are needed."""
    with_special: bool = False
    """True if special tokens appear in the text."""
    arrived: float = field(default_factory=monotonic)
    listener: TaskListener | None = None
    number: int = -1
    """Number that identifies it to the engine's process."""
    answers: tuple[GrowingAnswer, ...] = ()
    started: bool = False
    """True once the engine works on it."""
    cached: int = 0
    """Tokens of the prompt whose keys and values were cached."""
    scores: TokenScores | None = None
    failure: Exception | None = None
    first_token_at: float | None = None
    """Time of its first new token."""

    def open(self, number: int, answers: Iterable[int]) -> None:
        """Create its answers under these numbers."""
        self.number = number
        self.answers = tuple(GrowingAnswer(self, answer_number, self._text()) for answer_number in answers)

    def _text(self) -> AnswerText | None:
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        hidden = frozenset[int]() if self.with_special else tokenizer.special_ids
        return AnswerText(tokenizer.decode, self.prompt, self.options.stop, tokenizer, hidden)

    @property
    def tokens(self) -> int:
        """New tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def waits(self) -> bool:
        """True while the engine has not started it."""
        return not self.started and not self.ended

    @property
    def ended(self) -> bool:
        """True if no more news come."""
        if self.failure is not None:
            return True
        return bool(self.answers) and all(answer.ending for answer in self.answers)


def build_tasks(
    fields: AnswerFields,
    prompts: Sequence[list[int]],
    card: ModelCard,
    limits: ServerLimits,
    tenant: Tenant,
    schema: Mapping[str, Any] | None = None,
    adapter: str | None = None,
) -> list[EngineTask]:
    """Build a task for each prompt. Raises ApiError beyond a limit, or for an invalid request.

    Args:
        schema: Schema of the answers where the fields have none.
        adapter: Adapter that the model's name in the request means.
    """
    name, candidates = "n" if fields.candidates == fields.n else "best_of", fields.candidates
    if candidates > limits.max_n:
        raise bad_request(f"{name}={candidates} exceeds the limit of {limits.max_n} answers per request", name)
    if candidates > card.most_sequences:
        raise bad_request(f"{name}={candidates} exceeds the limit of {card.most_sequences} answers at once", name)
    most = [_max_answer_tokens(fields, len(ids), card, limits, len(prompts)) for ids in prompts]
    if sum(most) * candidates > limits.max_answer_tokens:
        raise bad_request(
            f"{sum(most) * candidates:,} new tokens (prompts x n x max_tokens) exceed the limit of a request, "
            f"{limits.max_answer_tokens:,}: ask for fewer",
            "max_tokens",
        )
    scored = fields.likeliest if isinstance(fields, CompletionFields) and fields.echo else None
    with_logprobs = fields.likeliest is not None or candidates > fields.n
    model_ends = frozenset() if fields.ignore_eos else frozenset(card.end_ids)
    # A stop string that is a special token ends the answer by its id: its text is left out of answers by default.
    spelled = [card.tokenizer.special_id(stop) for stop in fields.stops] if card.tokenizer else []
    stop_ids = frozenset([*fields.stop_token_ids, *(token for token in spelled if token is not None)])
    return [
        EngineTask(
            prompt=list(ids),
            options=_request_options(fields, tokens, tenant, schema, adapter, stop_ids),
            tokenizer=card.tokenizer,
            end_ids=model_ends | stop_ids,
            scored=scored,
            with_logprobs=with_logprobs,
            keeps_ids=with_logprobs or fields.return_token_ids,
            with_special=fields.with_special,
        )
        for ids, tokens in zip(prompts, most, strict=True)
    ]


def _max_answer_tokens(fields: AnswerFields, prompt: int, card: ModelCard, limits: ServerLimits, prompts: int) -> int:
    """Return the most tokens of an answer: as requested, or as many as fit. Raises ApiError if too few fit."""
    longest = card.longest
    if not prompt:
        raise bad_request("the prompt is empty: give at least one token", "prompt")
    if prompt > min(longest, limits.max_prompt_tokens or longest):
        most = min(longest, limits.max_prompt_tokens or longest)
        raise bad_request(
            f"the prompt has {prompt:,} tokens and may have {most:,}: shorten it", code="context_length_exceeded"
        )
    room = longest - prompt + 1
    if fields.max_new_tokens is None:
        # Without a limit in the request the model's own default counts, then what is left of the context.
        room = min(room, int(card.sampling.get(LENGTH, room)))
        return min(room, limits.max_answer_tokens // (fields.candidates * prompts))
    if fields.max_new_tokens > room:
        raise bad_request(
            f"max_tokens={fields.max_new_tokens:,} and the prompt's {prompt:,} tokens exceed the context of "
            f"{longest:,}: ask for fewer",
            "max_tokens", "context_length_exceeded",
        )  # fmt: skip
    return fields.max_new_tokens


def _request_options(
    fields: AnswerFields, tokens: int, tenant: Tenant, schema: Mapping[str, Any] | None, adapter: str | None,
    stop_ids: Collection[int],
) -> RequestOptions:  # fmt: skip
    """Return the options for the engine. A request without a seed gets a random one."""
    try:
        return RequestOptions(
            max_new_tokens=tokens,
            temperature=0.0 if fields.use_beam_search else fields.temperature,
            top_k=max(0, fields.top_k),
            top_p=fields.top_p,
            min_p=fields.min_p,
            repetition_penalty=fields.repetition_penalty,
            presence_penalty=fields.presence_penalty,
            frequency_penalty=fields.frequency_penalty,
            logit_bias=fields.biases,
            seed=secrets.randbits(62) if fields.seed is None else fields.seed,
            n=fields.answers,
            beams=fields.beams,
            length_penalty=fields.length_penalty,
            early_stopping=fields.early_stopping,
            stop=fields.stops,
            stop_ids=tuple(stop_ids),
            ignore_end=fields.ignore_eos,
            json_schema=fields.answer_schema if schema is None else schema,
            regex=fields.answer_regex,
            logprobs=fields.likeliest or 0,
            priority=fields.priority,
            adapter=adapter,
            # The salt keeps the prefixes of tenants apart in the cache.
            salt=f"{tenant.salt}\0{fields.cache_salt}",
        )
    except MeshwrightError as error:
        raise bad_request(str(error)) from None

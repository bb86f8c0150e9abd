"""Answers as documents of OpenAI's interface, of completions and chats: one complete document, or stream events."""

import json
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from json.encoder import encode_basestring
from string import ascii_letters, digits
from typing import Any, Final, NamedTuple

from meshwright.data.tokens.text_stream import TextStream
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.serving.engine.answers.tool_calls import ToolCall
from meshwright.serving.http.channel import ApiError
from meshwright.serving.http.request.answering import Answering, AnswerPart
from meshwright.serving.http.request.engine_task import EngineTask
from meshwright.serving.http.request.request_fields import ReadSoFar, ToolUse


def spell(tokenizer: Tokenizer | None, token: int) -> str:
    r"""Return a token as text, or part of a character as `bytes:\xe6\x97` (OpenAI), so no two parts look alike."""
    if tokenizer is None:
        return f"token_id:{token}"
    spelled = tokenizer.token_bytes(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class EchoedPrompt(NamedTuple):
    """Prompt that is repeated before its answers."""

    text: str
    task: EngineTask


class CompletionShape:
    """Form of each part of an answer. Echoed prompts precede the answers."""

    whole_object = piece_object = "text_completion"
    prefix_of_id = "cmpl"

    def __init__(
        self, tokenizer: Tokenizer | None, likeliest: int | None, prompts: Sequence[EchoedPrompt], n: int,
        *, with_special: bool = True,
    ) -> None:  # fmt: skip
        """Set the form.

        Args:
            prompts: Prompts to repeat before their answers, `n` to each. Empty = none.
            with_special: Spell special tokens in answers.
        """
        self._tokenizer, self._likeliest, self._prompts, self._n = tokenizer, likeliest, prompts, n
        self._hidden = frozenset[int]() if with_special or tokenizer is None else tokenizer.special_ids
        self._offsets: dict[int, _TextOffsets] = {}

    @property
    def is_plain(self) -> bool:
        """True if a piece of a growing answer differs from the last only in its text."""
        return self._likeliest is None

    def opening(self, choice: int) -> dict[str, Any] | None:
        """Return what precedes the first part of an answer in a stream."""
        if not self._prompts:
            return None
        text, logprobs = self._echo(choice)
        return self._choice(choice, text, logprobs, None)

    def piece(self, part: AnswerPart, reason: str | None, *, always: bool = True) -> dict[str, Any]:
        """Return a part of a stream, whether or not `always` is set."""
        return self._choice(part.choice, part.text, self._logprobs(part), reason)

    def whole(self, part: AnswerPart, reason: str | None) -> dict[str, Any]:
        """Return a complete answer."""
        if not self._prompts:
            return self.piece(part, reason)
        text, before = self._echo(part.choice)
        after = self._logprobs(part)
        joined = {key: before[key] + after[key] for key in after} if before and after else after
        return self._choice(part.choice, text + part.text, joined, reason)

    def _choice(self, choice: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _echo(self, choice: int) -> tuple[str, dict[str, Any] | None]:
        prompt = self._prompts[choice // self._n]
        scores = prompt.task.scores
        if scores is None:
            return prompt.text, None
        logprobs = self._logprobs_document(choice, prompt.task.prompt, [None, *scores.logprobs], [None, *scores.top])
        if self._tokenizer is not None:  # a bos and the space before a first word are not in the given text
            more = self._offsets[choice].set_end(len(prompt.text))
            logprobs["text_offset"] = [max(0, offset - more) for offset in logprobs["text_offset"]]
        return prompt.text, logprobs

    def _logprobs(self, part: AnswerPart) -> dict[str, Any] | None:
        if self._likeliest is None:
            return None
        return self._logprobs_document(part.choice, part.ids, part.logprobs, part.top, self._hidden)

    def _logprobs_document(
        self,
        choice: int,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[list[tuple[int, float]] | None],
        hidden: frozenset[int] = frozenset(),
    ) -> dict[str, Any]:
        spelled = [spell(self._tokenizer, token) for token in ids]
        text_offsets = self._offsets.setdefault(choice, _TextOffsets(self._tokenizer))
        offsets = [
            text_offsets.advance(token, text, in_text=token not in hidden)
            for token, text in zip(ids, spelled, strict=True)
        ]
        rows = zip(ids, logprobs, top, strict=True) if self._likeliest else ()
        likeliest = [
            None if alternatives is None else self._by_text([*alternatives, (token, logprob)])
            for token, logprob, alternatives in rows
        ]
        return {
            "tokens": spelled, "token_logprobs": list(logprobs), "text_offset": offsets,
            "top_logprobs": likeliest,
        }  # fmt: skip

    def _by_text(self, top: Sequence[tuple[int, float | None]]) -> dict[str, float | None]:
        """Return log-probabilities by text. Of several tokens that look alike, the likeliest counts."""
        by_text: dict[str, float | None] = {}
        for token, logprob in top:
            by_text.setdefault(spell(self._tokenizer, token), logprob)
        return by_text


class _TextOffsets:
    """Offsets of tokens in their common text. Parts of a character share its offset."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._stream = TextStream(tokenizer.decode, (), tokenizer.texts) if tokenizer else None
        self._end = 0

    def advance(self, token: int, spelled: str, *, in_text: bool = True) -> int:
        """Return the offset of a token, and advance behind the token if it is in the text."""
        if not in_text:
            return self._end
        begin, piece = self._end, spelled if self._stream is None else self._stream.push(token)
        self._end += len(piece)
        return self._end - len(spelled) if piece.endswith(spelled) else begin  # after bytes that waited for this token

    def set_end(self, end: int) -> int:
        """Set the length of the text. Returns the number of surplus characters in the tokens."""
        more, self._end = self._end - end, end
        return max(0, more)


_LETTERS: Final = ascii_letters + digits
"""Characters of the nine-letter ids of calls. Mistral's chat templates refuse any others."""


class ChatShape:
    """Form of each part of an answer."""

    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"
    prefix_of_id = "chatcmpl"

    def __init__(self, tokenizer: Tokenizer | None, likeliest: int | None, tools: ToolUse | None = None) -> None:
        """Set the form.

        Args:
            likeliest: Number of likeliest tokens with log-probabilities per position. None = no log-probabilities at
            all.
            tools: Tools that the model was offered.
        """
        self._tokenizer, self._likeliest, self._tools = tokenizer, likeliest, tools
        self._read: defaultdict[int, ReadSoFar] = defaultdict(ReadSoFar)

    @property
    def is_plain(self) -> bool:
        """True if a piece of a growing answer differs from the last only in its text."""
        return self._likeliest is None and self._tools is None

    def opening(self, choice: int) -> dict[str, Any] | None:
        """Return what precedes the first part of an answer in a stream: the role."""
        return self._choice(choice, "delta", {"role": "assistant", "content": ""}, None, None)

    def piece(self, part: AnswerPart, reason: str | None, *, always: bool) -> dict[str, Any] | None:
        """Return a part of a stream. None = nothing is certain yet, and `always` is not set."""
        logprobs, read = self._logprobs(part), self._read[part.choice]
        first = read.calls
        text, new_calls = self._read_part(part)
        calls = [{"index": first + index} | _call(call) for index, call in enumerate(new_calls)]
        if not (text or calls or reason or always) and logprobs is None:
            return None
        delta: dict[str, Any] = {"content": text} if text or not (reason or calls) else {}
        delta |= {"tool_calls": calls} if calls else {}
        return self._choice(part.choice, "delta", delta, logprobs, _finish_reason(reason, read.calls))

    def whole(self, part: AnswerPart, reason: str | None) -> dict[str, Any]:
        """Return a complete answer."""
        text, new_calls = self._read_part(part)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if new_calls else ""), "refusal": None}
        message |= {"tool_calls": [_call(call) for call in new_calls]} if new_calls else {}
        return self._choice(
            part.choice, "message", message, self._logprobs(part), _finish_reason(reason, len(new_calls))
        )

    def _read_part(self, part: AnswerPart) -> tuple[str, Sequence[ToolCall]]:
        """Return the text of a part, and the calls that it completes."""
        if self._tools is None:
            return part.text, ()
        return self._read[part.choice].advance(self._tools, part.text, ended=bool(part.ending))

    def _choice(
        self, choice: int, kind: str, content: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {"index": choice, kind: content, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, part: AnswerPart) -> dict[str, Any] | None:
        if self._likeliest is None:
            return None
        rows = zip(part.ids, part.logprobs, part.top, strict=True)
        content = [
            {**self._token(token, logprob), "top_logprobs": [self._token(*pair) for pair in top]}
            for token, logprob, top in rows
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        octets = None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))
        return {"token": spell(self._tokenizer, token), "logprob": logprob, "bytes": octets}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": "".join(secrets.choice(_LETTERS) for _ in range(9)), "type": "function", "function": function}


def _finish_reason(reason: str | None, calls: int) -> str | None:
    return "tool_calls" if reason == "stop" and calls else reason


DONE = b"data: [DONE]\n\n"


class AnswerDocument:
    """Documents of one HTTP request. All events of a stream have one id."""

    def __init__(
        self, shape: CompletionShape | ChatShape, model: str, *, best: int, include_usage: bool, ids: bool,
        logprobs: bool,
    ) -> None:  # fmt: skip
        """Set the form of the documents.

        Args:
            best: Number of answers per prompt that are returned.
            include_usage: End a stream with token counts.
            ids: Add the token ids of prompts and answers.
        """
        self._best = best
        self.id = f"{shape.prefix_of_id}-{secrets.token_hex(12)}"
        self._shape, self._include_usage, self._ids, self._logprobs = shape, include_usage, ids, logprobs
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._opened = set[int]()
        self._envelopes: dict[int, tuple[bytes, bytes]] = {}

    def whole(self, answering: Answering) -> dict[str, Any]:
        """Return all answers, which have ended, as one document."""
        choices = [
            self._shape.whole(part, part.ending) | self._tokens(answering, part) | {"index": index}
            for index, part in enumerate(self._best_parts(answering))
        ]
        return {**self._head, "object": self._shape.whole_object, "choices": choices, "usage": usage(answering.tasks)}

    def _best_parts(self, answering: Answering) -> Iterator[AnswerPart]:
        """Yield each prompt's best answers by mean log-probability, sorted only if some are left out."""
        parts = list(answering.parts())
        for task in answering.tasks:
            task_parts, parts = parts[: task.options.n], parts[task.options.n :]
            yield from task_parts if self._best >= len(task_parts) else sorted(task_parts, key=_mean_loss)[: self._best]

    def events(self, answering: Answering) -> bytes:
        """Return the events of everything new, reusing the bytes around texts where nothing else changed."""
        events = list[bytes]()
        # A copy: reading the last part of an answer removes it.
        for choice, answer in list(answering.unread.items()):
            envelope = self._envelopes.get(choice)
            if envelope is None or answer.ending:
                if answer.pieces or answer.ids or answer.ending:
                    events += self._answer_events(answering.part(choice, answer), answering)
            # By far the most frequent case: one string is encoded, and nothing else.
            elif answer.pieces:
                events.append(envelope[0] + encode_basestring("".join(answer.pieces)).encode() + envelope[1])
                answer.pieces.clear()
        return b"".join(events)

    def _answer_events(self, part: AnswerPart, answering: Answering) -> Iterator[bytes]:
        if part.choice not in self._opened:
            self._opened.add(part.choice)
            opening = self._shape.opening(part.choice)
            if opening is not None:
                yield self._event([opening])
        if part.text or part.ending or (part.ids and (self._logprobs or self._ids)):
            choice = self._shape.piece(part, part.ending or None, always=self._ids)
            if choice is not None:
                yield self._event([choice | self._tokens(answering, part)])
        if self._shape.is_plain and not self._ids:
            self._envelopes[part.choice] = self._envelope(part.choice)

    def _envelope(self, choice: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text in each event of a growing answer."""
        text = secrets.token_hex(16)  # occurs nowhere else in the event
        piece = self._shape.piece(AnswerPart(choice, text, [], [], [], ""), None, always=False)
        before, _, after = self._event([piece or {}]).partition(f'"{text}"'.encode())
        return before, after

    def last_events(self, answering: Answering) -> Iterator[bytes]:
        """Yield the events after the end of the last answer."""
        if self._include_usage:
            yield self._event([], usage(answering.tasks))
        yield DONE

    def _event(self, choices: Sequence[dict[str, Any]], counted: dict[str, Any] | None = None) -> bytes:
        document = {**self._head, "object": self._shape.piece_object, "choices": choices}
        return event(document | ({"usage": counted} if self._include_usage else {}))

    def _tokens(self, answering: Answering, part: AnswerPart) -> dict[str, Any]:
        if not self._ids:
            return {}
        tasks = (task for task in answering.tasks for _ in range(task.options.n))
        prompt = next(task.prompt for choice, task in enumerate(tasks) if choice == part.choice)
        return {"token_ids": part.ids, "prompt_token_ids": prompt}


def _mean_loss(part: AnswerPart) -> float:
    return -sum(part.logprobs) / max(1, len(part.logprobs))


def usage(tasks: Iterable[EngineTask]) -> dict[str, Any]:
    """Return the token counts of prompts, each counted once however many answers it has, and of answers."""
    tasks = list(tasks)
    prompt = sum(len(task.prompt) for task in tasks)
    generated = sum(task.tokens for task in tasks)
    cached = sum(task.cached for task in tasks)
    return {
        "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


def event(document: dict[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Encode the last event of a stream that fails."""
    return event(error.document)

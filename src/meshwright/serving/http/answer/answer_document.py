"""Answers as documents of OpenAI's interface: one complete document, or a stream of events."""

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from json.encoder import encode_basestring
from typing import Any

from meshwright.serving.http.answer.chat_shape import ChatShape
from meshwright.serving.http.answer.completion_shape import CompletionShape
from meshwright.serving.http.api_error import ApiError
from meshwright.serving.http.request.answering import Answering, AnswerPart
from meshwright.serving.http.request.engine_task import EngineTask

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
        for choice, answer in list(answering.unread.items()):
            envelope = self._envelopes.get(choice)
            if envelope is None or answer.ending:
                if answer.pieces or answer.ids or answer.ending:
                    events += self._answer_events(answering.part(choice, answer), answering)
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
    made = sum(task.tokens for task in tasks)
    cached = sum(task.cached for task in tasks)
    return {
        "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


def event(document: dict[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Encode the last event of a stream that fails."""
    return event(error.document)

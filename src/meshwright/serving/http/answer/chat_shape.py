"""JSON of chat completions, complete and in pieces."""

import secrets
from collections import defaultdict
from collections.abc import Sequence
from string import ascii_letters, digits
from typing import Any, Final

from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.serving.engine.answers.tool_calls import ToolCall
from meshwright.serving.http.answer.completion_shape import spell
from meshwright.serving.http.request.answering import AnswerPart
from meshwright.serving.http.request.tool_use import ReadSoFar, ToolUse

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
        known = None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))
        return {"token": spell(self._tokenizer, token), "logprob": logprob, "bytes": known}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": "".join(secrets.choice(_LETTERS) for _ in range(9)), "type": "function", "function": function}


def _finish_reason(reason: str | None, calls: int) -> str | None:
    return "tool_calls" if reason == "stop" and calls else reason

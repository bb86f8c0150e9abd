"""The JSON of chat completions, whole and in pieces."""

import secrets
from collections import defaultdict
from collections.abc import Sequence
from string import ascii_letters, digits
from typing import Any, Final

from meshwright.data.tokenizer import Tokenizer
from meshwright.serve.tool_calls import ToolCall
from meshwright.server.answering import AnswerPart
from meshwright.server.completion_shape import spell
from meshwright.server.tool_use import ReadSoFar, ToolUse

_LETTERS: Final = ascii_letters + digits
"""Of the ids of calls, which have nine: Mistral's chat templates refuse a conversation with any others."""


class ChatShape:
    """What each part of an answer becomes."""

    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"
    prefix_of_id = "chatcmpl"

    def __init__(self, tokenizer: Tokenizer | None, likeliest: int | None, tools: ToolUse | None = None) -> None:
        """`likeliest`: tokens whose log-probabilities stand at each place; None = none, not even the token's own.
        `tools`: that the model was offered."""
        self._tokenizer, self._likeliest, self._tools = tokenizer, likeliest, tools
        self._read: defaultdict[int, ReadSoFar] = defaultdict(ReadSoFar)

    @property
    def is_plain(self) -> bool:
        """Whether a piece of an answer that grows is its text and nothing else."""
        return self._likeliest is None and self._tools is None

    def opening(self, choice: int) -> dict[str, Any] | None:
        """What comes before the first part of an answer in a stream: who speaks."""
        return self._choice(choice, "delta", {"role": "assistant", "content": ""}, None, None)

    def piece(self, part: AnswerPart, reason: str | None, *, always: bool) -> dict[str, Any] | None:
        """A part in a stream; None where nothing is certain yet, unless it is wanted `always`."""
        logprobs, read = self._logprobs(part), self._read[part.choice]
        first = read.calls
        text, found = self._certain(part)
        calls = [{"index": first + place} | _call(one) for place, one in enumerate(found)]
        if not (text or calls or reason or always) and logprobs is None:
            return None
        delta: dict[str, Any] = {"content": text} if text or not (reason or calls) else {}
        delta |= {"tool_calls": calls} if calls else {}
        return self._choice(part.choice, "delta", delta, logprobs, _reason(reason, read.calls))

    def whole(self, part: AnswerPart, reason: str | None) -> dict[str, Any]:
        """An answer that came whole."""
        text, found = self._certain(part)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if found else ""), "refusal": None}
        message |= {"tool_calls": [_call(one) for one in found]} if found else {}
        return self._choice(part.choice, "message", message, self._logprobs(part), _reason(reason, len(found)))

    def _certain(self, part: AnswerPart) -> tuple[str, Sequence[ToolCall]]:
        """What a part says, and calls that became whole with it."""
        if self._tools is None:
            return part.text, ()
        return self._read[part.choice].more(self._tools, part.text, ended=bool(part.ending))

    def _choice(
        self, choice: int, kind: str, said: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {"index": choice, kind: said, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, part: AnswerPart) -> dict[str, Any] | None:
        if self._likeliest is None:
            return None
        rows = zip(part.ids, part.logprobs, part.top, strict=True)
        content = [
            {**self._token(token, logprob), "top_logprobs": [self._token(*one) for one in top]}
            for token, logprob, top in rows
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        known = None if self._tokenizer is None else list(self._tokenizer.token_bytes(token))
        return {"token": spell(self._tokenizer, token), "logprob": logprob, "bytes": known}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": "".join(secrets.choice(_LETTERS) for _ in range(9)), "type": "function", "function": function}


def _reason(reason: str | None, calls: int) -> str | None:
    return "tool_calls" if reason == "stop" and calls else reason

"""The JSON of chat completions, whole and in pieces."""

from typing import Any

from meshwright.server.answering import AnswerPart
from meshwright.server.completion_shape import Spell


class ChatShape:
    """What each part of an answer becomes."""

    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"
    prefix_of_id = "chatcmpl"

    def __init__(self, spell: Spell, likeliest: int | None) -> None:
        """`likeliest`: tokens whose log-probabilities stand at each place; None = none, not even the token's own."""
        self._spell, self._likeliest = spell, likeliest

    def opening(self, choice: int) -> dict[str, Any] | None:
        """What comes before the first part of an answer in a stream: who speaks."""
        return self._choice(choice, "delta", {"role": "assistant", "content": ""}, None, None)

    def piece(self, part: AnswerPart, reason: str | None) -> dict[str, Any]:
        """A part in a stream."""
        delta = {"content": part.text} if part.text or not reason else {}
        return self._choice(part.choice, "delta", delta, self._logprobs(part), reason)

    def whole(self, part: AnswerPart, reason: str | None) -> dict[str, Any]:
        """An answer that came whole."""
        message = {"role": "assistant", "content": part.text, "refusal": None}
        return self._choice(part.choice, "message", message, self._logprobs(part), reason)

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
        text = self._spell(token)
        whole = "\ufffd" not in text  # else it is a part of a character, whose bytes the text does not say
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}

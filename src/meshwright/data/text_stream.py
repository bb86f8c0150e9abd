"""Text while it is being made: tokens in, whole characters out."""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""What a tokenizer writes for bytes that are no whole character yet."""
LOOKBACK = 8
"""Tokens that are decoded again for context: what a token spells may depend on the one before it."""


class TextStream:
    """Turns token ids, one at a time, into pieces of text that join to what decoding them all at once gives."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-LOOKBACK:])
        self._shown = len(self._ids)

    def push(self, token: int) -> str:
        """The text that became certain with this token; empty while a character is incomplete."""
        self._ids.append(token)
        piece = self._new()
        if piece.endswith(UNFINISHED):
            return ""
        self._ids = self._ids[-LOOKBACK:]
        self._shown = len(self._ids)
        return piece

    def rest(self) -> str:
        """What is left at the end, replacement characters included."""
        return self._new()

    def _new(self) -> str:
        before = self._decode(self._ids[: self._shown])
        return self._decode(self._ids)[len(before) :]

"""Text of an answer while it grows: up to a stop string, holding back what may begin one."""

from collections.abc import Callable, Sequence
from typing import final

from meshwright.data.text_stream import TextStream
from meshwright.data.tokenizer import Tokenizer


@final
class AnswerText:
    """Turns tokens into text that is certain: whole characters, and nothing that a stop string may begin with."""

    __slots__ = ("_held", "_stops", "_stream", "stopped")

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int], stops: Sequence[str],
        tokenizer: Tokenizer | None = None,
    ) -> None:  # fmt: skip
        """`decode`: token ids -> text; `tokenizer`: whose `decode` it is, which makes it fast."""
        self._stream, self._stops = TextStream(decode, prompt_ids, tokenizer and tokenizer.texts), stops
        self._held = ""
        self.stopped = False
        """Whether a stop string came: no more text follows."""

    def push(self, token: int) -> str:
        """Text that became certain with a token."""
        piece = self._stream.push(token)
        return self._read(piece) if self._stops else piece

    def finish(self) -> str:
        """What was held back, since no token follows."""
        if self.stopped:
            return ""
        piece = self._read(self._stream.rest())
        held, self._held = self._held, ""
        return piece + held

    def _read(self, piece: str) -> str:
        held, stops = self._held + piece, self._stops
        begin = min((place for place in map(held.find, stops) if place >= 0), default=-1)
        if begin >= 0:
            self._held, self.stopped = "", True
            return held[:begin]
        kept = max((begun(held, stop) for stop in stops), default=0)
        sure = len(held) - kept
        self._held = held[sure:]
        return held[:sure]


def begun(text: str, stop: str) -> int:
    """Letters at the end of a text that a stop string begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

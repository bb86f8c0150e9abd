"""Text of an answer while it grows: up to a stop string, holding back what may begin one."""

from collections.abc import Callable, Sequence
from typing import Final, final

from meshwright.data.text_stream import TextStream
from meshwright.data.tokenizer import Tokenizer

THOUGHTS: Final = {"<think>": "</think>", "[THINK]": "[/THINK]"}
"""Marks around a thought: of Qwen, DeepSeek and others; of Mistral."""


@final
class AnswerText:
    """Turns tokens into text that is certain: whole characters, and nothing that a stop string may begin with."""

    __slots__ = ("_held", "_hidden", "_stops", "_stream", "stopped")

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int], stops: Sequence[str],
        tokenizer: Tokenizer | None = None, hidden: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """`decode`: token ids -> text; `tokenizer`: whose `decode` it is, which makes it fast; `hidden`: tokens to
        leave out."""
        self._stream, self._stops = TextStream(decode, prompt_ids, tokenizer and tokenizer.texts), stops
        self._held, self._hidden = "", hidden
        self.stopped = False
        """Whether a stop string came: no more text follows."""

    def push(self, token: int) -> str:
        """Text that became certain with a token."""
        if token in self._hidden:
            return ""
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


def opened_thought(prompt: str) -> str:
    """The mark of a thought that a prompt leaves open, as templates of DeepSeek-R1 and QwQ do; empty where it does
    not."""
    return next((opener for opener in THOUGHTS if prompt.rstrip().endswith(opener)), "")


def behind_thought(text: str, opened: str = "") -> int:
    """Where an answer goes on behind the thought that it begins with; its length where the thought has no end.
    `opened`: as `opened_thought` says of the prompt."""
    start = text.lstrip()
    opener = opened or next((mark for mark in THOUGHTS if start.startswith(mark)), "")
    if not opener:
        return 0
    end = text.find(THOUGHTS[opener])
    return len(text) if end < 0 else end + len(THOUGHTS[opener])


def begun(text: str, stop: str) -> int:
    """Letters at the end of a text that a stop string begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

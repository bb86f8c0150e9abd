"""Text of a growing answer: cut at a stop string, holding back what may begin one."""

from collections.abc import Callable, Sequence
from typing import Final, final

from meshwright.data.tokens.text_stream import TextStream
from meshwright.data.tokens.tokenizer import Tokenizer

THOUGHTS: Final = {"<think>": "</think>", "[THINK]": "[/THINK]"}
"""Marks around a thought: of Qwen, DeepSeek and others; of Mistral."""


@final
class AnswerText:
    """Converter of tokens into text that is certain: whole characters, and no beginning of a stop string."""

    __slots__ = ("_held", "_hidden", "_stops", "_stream", "stopped")

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int], stops: Sequence[str],
        tokenizer: Tokenizer | None = None, hidden: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """Start the text.

        Args:
            decode: Token ids -> text.
            tokenizer: The tokenizer behind `decode`, which makes it fast.
            hidden: Tokens to leave out.
        """
        self._stream, self._stops = TextStream(decode, prompt_ids, tokenizer and tokenizer.texts), stops
        self._held, self._hidden = "", hidden
        self.stopped = False
        """True once a stop string came. No more text follows."""

    def push(self, token: int) -> str:
        """Return the text that becomes certain with a token."""
        if token in self._hidden:
            return ""
        piece = self._stream.push(token)
        return self._read(piece) if self._stops else piece

    def finish(self) -> str:
        """Return what was held back, once no token follows."""
        if self.stopped:
            return ""
        piece = self._read(self._stream.rest())
        held, self._held = self._held, ""
        return piece + held

    def _read(self, piece: str) -> str:
        text, stops = self._held + piece, self._stops
        start = min((position for position in map(text.find, stops) if position >= 0), default=-1)
        if start >= 0:
            self._held, self.stopped = "", True
            return text[:start]
        held_back = max((partial_length(text, stop) for stop in stops), default=0)
        sure = len(text) - held_back
        self._held = text[sure:]
        return text[:sure]


def opened_thought(prompt: str) -> str:
    """Return the mark of a thought that a prompt leaves open, as DeepSeek-R1 and QwQ do. Empty = none."""
    return next((opener for opener in THOUGHTS if prompt.rstrip().endswith(opener)), "")


def behind_thought(text: str, opened: str = "") -> int:
    """Return where an answer continues behind its first thought: at its end if the thought has no end.

    `opened` is what `opened_thought` returns for the prompt.
    """
    start = text.lstrip()
    opener = opened or next((mark for mark in THOUGHTS if start.startswith(mark)), "")
    if not opener:
        return 0
    end = text.find(THOUGHTS[opener])
    return len(text) if end < 0 else end + len(THOUGHTS[opener])


def partial_length(text: str, stop: str) -> int:
    """Return how many letters at the end of a text begin a stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0

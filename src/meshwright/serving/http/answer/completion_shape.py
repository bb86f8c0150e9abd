"""JSON of text completions, complete and in pieces."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from meshwright.data.tokens.text_stream import TextStream
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.serving.http.request.answering import AnswerPart
from meshwright.serving.http.request.engine_task import EngineTask


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
            text_offsets.next(token, text, in_text=token not in hidden)
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

    def next(self, token: int, spelled: str, *, in_text: bool = True) -> int:
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

"""The JSON of text completions, whole and in pieces."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from meshwright.data.text_stream import TextStream
from meshwright.data.tokenizer import Tokenizer
from meshwright.server.answering import AnswerPart
from meshwright.server.engine_task import EngineTask


def spell(tokenizer: Tokenizer | None, token: int) -> str:
    """A token id as text; a part of a character as `bytes:\\xe6\\x97`, in OpenAI's way: so no two parts look alike."""
    if tokenizer is None:
        return f"token_id:{token}"
    spelled = tokenizer.token_bytes(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class EchoedPrompt(NamedTuple):
    """A prompt that is repeated before its answers."""

    text: str
    task: EngineTask


class CompletionShape:
    """What each part of an answer becomes. `prefix` gives the prompt of a choice where it is echoed."""

    whole_object = piece_object = "text_completion"
    prefix_of_id = "cmpl"

    def __init__(
        self, tokenizer: Tokenizer | None, likeliest: int | None, prompts: Sequence[EchoedPrompt], n: int,
        *, with_special: bool = True,
    ) -> None:  # fmt: skip
        """`prompts`: what is repeated before the answers of each, `n` to one; none = nothing is. `with_special`:
        answers spell special tokens."""
        self._tokenizer, self._likeliest, self._prompts, self._n = tokenizer, likeliest, prompts, n
        self._hidden = frozenset[int]() if with_special or tokenizer is None else tokenizer.special_ids
        self._places: dict[int, _Places] = {}

    @property
    def is_plain(self) -> bool:
        """Whether a piece of an answer that grows is its text and nothing else."""
        return self._likeliest is None

    def opening(self, choice: int) -> dict[str, Any] | None:
        """What comes before the first part of an answer in a stream."""
        if not self._prompts:
            return None
        text, logprobs = self._echo(choice)
        return self._choice(choice, text, logprobs, None)

    def piece(self, part: AnswerPart, reason: str | None, *, always: bool = True) -> dict[str, Any]:
        """A part in a stream, whether or not it is wanted `always`."""
        return self._choice(part.choice, part.text, self._logprobs(part), reason)

    def whole(self, part: AnswerPart, reason: str | None) -> dict[str, Any]:
        """An answer that came whole."""
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
        logprobs = self._listed(choice, prompt.task.prompt, [None, *scores.logprobs], [None, *scores.top])
        if self._tokenizer is not None:  # a bos, and the space before a first word, are in no text that was given
            more = self._places[choice].end_at(len(prompt.text))
            logprobs["text_offset"] = [max(0, place - more) for place in logprobs["text_offset"]]
        return prompt.text, logprobs

    def _logprobs(self, part: AnswerPart) -> dict[str, Any] | None:
        if self._likeliest is None:
            return None
        return self._listed(part.choice, part.ids, part.logprobs, part.top, self._hidden)

    def _listed(
        self,
        choice: int,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[list[tuple[int, float]] | None],
        hidden: frozenset[int] = frozenset(),
    ) -> dict[str, Any]:
        spelled = [spell(self._tokenizer, token) for token in ids]
        places = self._places.setdefault(choice, _Places(self._tokenizer))
        offsets = [
            places.next(token, text, in_text=token not in hidden) for token, text in zip(ids, spelled, strict=True)
        ]
        rows = zip(ids, logprobs, top, strict=True) if self._likeliest else ()
        likeliest = [None if some is None else self._by_text([*some, (token, own)]) for token, own, some in rows]
        return {
            "tokens": spelled, "token_logprobs": list(logprobs), "text_offset": offsets,
            "top_logprobs": likeliest,
        }  # fmt: skip

    def _by_text(self, top: Sequence[tuple[int, float | None]]) -> dict[str, float | None]:
        """The likeliest of several tokens that look alike."""
        found: dict[str, float | None] = {}
        for token, logprob in top:
            found.setdefault(spell(self._tokenizer, token), logprob)
        return found


class _Places:
    """Where tokens begin in the text that they make together: parts of a character begin where it does."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._stream = TextStream(tokenizer.decode, (), tokenizer.texts) if tokenizer else None
        self._end = 0

    def next(self, token: int, spelled: str, *, in_text: bool = True) -> int:
        """The place of a token, which moves on behind it where the token is in the text."""
        if not in_text:
            return self._end
        begin, piece = self._end, spelled if self._stream is None else self._stream.push(token)
        self._end += len(piece)
        return self._end - len(spelled) if piece.endswith(spelled) else begin  # behind bytes that waited for it

    def end_at(self, end: int) -> int:
        """Say how long the text is; the number of characters that tokens had more."""
        more, self._end = self._end - end, end
        return max(0, more)

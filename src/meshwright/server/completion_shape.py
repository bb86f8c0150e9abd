"""The JSON of text completions, whole and in pieces."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from meshwright.server.answering import AnswerPart
from meshwright.server.engine_task import EngineTask

Spell = Callable[[int], str]
"""A token id as text."""


class EchoedPrompt(NamedTuple):
    """A prompt that is repeated before its answers."""

    text: str
    task: EngineTask


class CompletionShape:
    """What each part of an answer becomes. `prefix` gives the prompt of a choice where it is echoed."""

    whole_object = piece_object = "text_completion"
    prefix_of_id = "cmpl"

    def __init__(self, spell: Spell, likeliest: int | None, prompts: Sequence[EchoedPrompt], n: int) -> None:
        """`prompts`: what is repeated before the answers of each, `n` to one; none = nothing is."""
        self._spell, self._likeliest, self._prompts, self._n = spell, likeliest, prompts, n
        self._offsets: dict[int, int] = {}

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
        return prompt.text, self._listed(
            choice, prompt.task.prompt, [None, *scores.logprobs], [None, *scores.top]
        )  # fmt: skip

    def _logprobs(self, part: AnswerPart) -> dict[str, Any] | None:
        return None if self._likeliest is None else self._listed(part.choice, part.ids, part.logprobs, part.top)

    def _listed(
        self,
        choice: int,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[list[tuple[int, float]] | None],
    ) -> dict[str, Any]:
        spelled, offsets, place = list(map(self._spell, ids)), [], self._offsets.get(choice, 0)
        for text in spelled:
            offsets.append(place)
            place += len(text)
        self._offsets[choice] = place
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
            found.setdefault(self._spell(token), logprob)
        return found

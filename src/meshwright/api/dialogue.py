"""A conversation with a model: turns in, answers as they grow, and what was said before at no cost."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from meshwright.api.adapter_opening import named
from meshwright.api.trained_model import TrainedModel
from meshwright.serve.engine_options import EngineOptions
from meshwright.serve.request_options import RequestOptions
from meshwright.spec.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFigures:
    """What the last turn cost."""

    first_seconds: float
    """From the question to the first token of the answer."""
    prompt: int
    """Tokens of the whole conversation before the answer."""
    cached: int
    """Those of them whose keys and values were in the cache."""
    tokens: int
    """Of the answer."""
    ending: str
    """As `ServedAnswer.ending`; cancelled where it was stopped."""


@final
class Dialogue:
    """Turns with one model, by its chat template. For one thread."""

    def __init__(
        self,
        model: TrainedModel,
        options: RequestOptions | None = None,
        *,
        system: str = "",
        engine: EngineOptions | None = None,
        adapter: Path | None = None,
    ) -> None:
        """`system`: what stands before all turns; `engine`: room for one answer by default; `adapter`: the folder of
        one that answers have. ArgumentError; PlanError where the model has no tokenizer."""
        adapters, options = named(adapter), options or RequestOptions()
        self._model, self._options = model, replace(options, adapter=next(iter(adapters), options.adapter))
        if self._options.n > 1:
            raise ArgumentError(f"n={self._options.n} must be 1: a conversation goes on with one answer")
        model.chat_template()
        self._engine = model.engine(engine or EngineOptions(most_sequences=1, warm_start=False), adapters=adapters)
        self._begin = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._begin)
        """Of all turns so far."""
        self.last: TurnFigures | None = None
        """Of the last turn; None before the first."""

    def reset(self) -> None:
        """Begin anew, with the same system prompt."""
        self.messages = list(self._begin)

    def say(self, said: str) -> Iterator[str]:
        """The answer to a turn, in pieces. Left before its end, the answer so far stays in the conversation.
        ArgumentError, PlanError where the conversation is too long, DataError where the template fails; the turn is
        then forgotten."""
        asked = {"role": "user", "content": said}
        began = time.perf_counter()
        ids = self._model.encode_messages([*self.messages, asked])
        request = self._engine.add(ids, replace(self._options, seed=self._options.seed + len(self.messages)))
        (answer,) = request.answers
        self.messages.append(asked)
        first, shown = 0.0, ""
        try:
            for _ in self._engine.stream(request):
                first = first or time.perf_counter() - began
                piece, shown = answer.text[len(shown) :], answer.text
                if piece:
                    yield piece
        finally:
            self._engine.cancel(request)
            self.messages.append({"role": "assistant", "content": answer.text})
            self.last = TurnFigures(
                first_seconds=first, prompt=len(ids), cached=request.cached, tokens=len(answer.ids),
                ending=answer.ending,
            )  # fmt: skip

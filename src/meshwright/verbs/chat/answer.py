"""A conversation with a model: turns in, answers as they grow. Earlier turns stay in the cache."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from meshwright.interface.trained.trained_model import TrainedModel, named_folder
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.spec.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFigures:
    """Cost of the last turn."""

    first_seconds: float
    """Time from the question to the first token of the answer."""
    prompt: int
    """Tokens of the whole conversation before the answer."""
    cached: int
    """Tokens of these whose keys and values were in the cache."""
    tokens: int
    """Tokens of the answer."""
    ending: str
    """`ServedAnswer.ending`; cancelled = the caller stopped the answer."""


@final
class Dialogue:
    """Turns with one model, by its chat template. For one thread.

    `system`: text that precedes all turns. `engine`: by default with room for one answer. `adapter`: folder of a LoRA
    adapter to apply. Raises ArgumentError, and PlanError for a model without a tokenizer.
    """

    def __init__(
        self,
        model: TrainedModel,
        options: RequestOptions | None = None,
        *,
        system: str = "",
        engine: EngineOptions | None = None,
        adapter: Path | None = None,
    ) -> None:
        adapters, options = named_folder(adapter), options or RequestOptions()
        self._model, self._options = model, replace(options, adapter=next(iter(adapters), options.adapter))
        if self._options.n > 1:
            raise ArgumentError("n", self._options.n, "must be 1", "a conversation continues from one answer")
        model.chat_template()
        self._engine = model.engine(engine or EngineOptions(most_sequences=1, warm_start=False), adapters=adapters)
        self._begin = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._begin)
        """Messages of all turns so far."""
        self.last: TurnFigures | None = None
        """Cost of the last turn. None = there was none."""

    def reset(self) -> None:
        """Begin anew, with the same system prompt."""
        self.messages = list(self._begin)

    def say(self, turn: str) -> Iterator[str]:
        """Yield the answer to a turn in pieces.

        When the caller stops early, the answer so far stays in the conversation. Raises ArgumentError, PlanError for a
        conversation that is too long, and DataError when the template fails; the turn is then forgotten.
        """
        message = {"role": "user", "content": turn}
        began = time.perf_counter()
        # The turn is only kept once it is encoded, so that one that is too long can be said again shorter.
        ids = self._model.encode_messages([*self.messages, message])
        # Another seed for each turn: equal questions may get different answers, as people expect of sampling.
        request = self._engine.add(ids, replace(self._options, seed=self._options.seed + len(self.messages)))
        (answer,) = request.answers
        self.messages.append(message)
        first, shown = 0.0, ""
        try:
            for _ in self._engine.stream(request):
                first = first or time.perf_counter() - began
                piece, shown = answer.text[len(shown) :], answer.text
                if piece:
                    yield piece
        finally:
            # Also runs when the caller closes the generator (Ctrl-C), and does nothing to a finished request.
            self._engine.cancel(request)
            self.messages.append({"role": "assistant", "content": answer.text})
            self.last = TurnFigures(
                first_seconds=first, prompt=len(ids), cached=request.cached, tokens=len(answer.ids),
                ending=answer.ending,
            )  # fmt: skip

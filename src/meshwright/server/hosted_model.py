"""The model that a server answers with."""

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.data.tokenizer import Tokenizer
from meshwright.model.transformer import Transformer
from meshwright.serve.engine_options import EngineOptions
from meshwright.serve.request_options import RequestOptions
from meshwright.serve.serving_engine import ServingEngine
from meshwright.serve.serving_ranks import ServingRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedModel:
    """An opened model and its name."""

    name: str
    """As requests and `/v1/models` say it."""
    model: Transformer
    tokenizer: Tokenizer | None
    """None = prompts are token ids, and answers too."""
    end_ids: tuple[int, ...]
    """Tokens that end a text."""
    created: int
    """Seconds since 1970."""
    ranks: ServingRanks | None = None
    """Those that have the other parts of the model; None = it is whole."""

    def engine(self, options: EngineOptions) -> ServingEngine:
        """An engine of it that has answered once, so that the first request does not wait for what is done once."""
        decode = self.tokenizer.decode if self.tokenizer else None
        found = ServingEngine(
            self.model, options, decode=decode, end_ids=self.end_ids, tokenizer=self.tokenizer, ranks=self.ranks
        )  # fmt: skip
        found.run([found.add([0], RequestOptions(max_new_tokens=2, ignore_end=True, salt=None))])
        return found


OpenModel = Callable[[], HostedModel]
"""Reads it; called in the engine's thread."""

"""The model that a server answers with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshwright.data.tokenizer import Tokenizer
from meshwright.model.transformer import Transformer
from meshwright.serve.engine_options import EngineOptions
from meshwright.serve.request_adapters import ServedAdapter
from meshwright.serve.request_options import RequestOptions
from meshwright.serve.serving_engine import ServingEngine
from meshwright.serve.serving_ranks import ServingRanks
from meshwright.server.model_card import ModelCard
from meshwright.spec.errors import ArgumentError


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
    adapters: Mapping[str, ServedAdapter] = field(default_factory=dict)
    """By the names that requests say in the model's place, when the server begins."""
    open_adapter: Callable[[Path, int], ServedAdapter] | None = None
    """Reads one from a folder in PEFT's format, of at most a rank, while the server runs; None = none can be had."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What an answer has where its request says nothing: `sampling_defaults`."""
    draft: Transformer | None = None
    """A small model that guesses, where the engine's options have guesses and no such model."""
    ranks: ServingRanks | None = None
    """Those that have the other parts of the model; None = it is whole."""

    def __post_init__(self) -> None:
        """ArgumentError: an adapter has the model's name."""
        if self.name in self.adapters:
            raise ArgumentError(f"adapter={self.name} is the model's own name: give one of them another")

    def engine(self, options: EngineOptions) -> ServingEngine:
        """An engine of it that has answered once, so that the first request does not wait for what is done once. It
        makes no text: the HTTP process does."""
        if options.speculation is not None and options.speculation.draft is None:
            options = replace(options, speculation=replace(options.speculation, draft=self.draft))
        engine = ServingEngine(
            self.model, options, end_ids=self.end_ids, tokenizer=self.tokenizer, adapters=self.adapters,
            ranks=self.ranks,
        )  # fmt: skip
        engine.run([engine.add([0], RequestOptions(max_new_tokens=2, ignore_end=True, salt=None))])
        return engine

    def card(self, engine: ServingEngine) -> ModelCard:
        """What the HTTP process needs to know of it."""
        return ModelCard(
            name=self.name, tokenizer=self.tokenizer, end_ids=self.end_ids, created=self.created,
            sampling=self.sampling,
            longest=engine.longest, most_sequences=engine.options.most_sequences, adapters=engine.adapters.names,
        )  # fmt: skip


OpenModel = Callable[[], HostedModel]
"""Reads it; called in the engine's thread."""

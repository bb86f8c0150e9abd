"""Model that a server answers with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.model.transformer import Transformer
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.rows.request_adapters import ServedAdapter
from meshwright.serving.engine.rows.serving_ranks import ServingRanks
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.http.channel.engine_messages import ModelCard
from meshwright.spec.errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedModel:
    """Opened model and its name."""

    name: str
    """Name in requests and `/v1/models`."""
    model: Transformer
    tokenizer: Tokenizer | None
    """Tokenizer. None = prompts and answers are token ids."""
    end_ids: tuple[int, ...]
    """Tokens that end a text."""
    created: int
    """Seconds since 1970."""
    adapters: Mapping[str, ServedAdapter] = field(default_factory=dict)
    """Adapters at the start of the server, by the names that requests give in the model's place."""
    open_adapter: Callable[[Path, int], ServedAdapter] | None = None
    """Function (folder, largest rank) that reads an adapter while the server runs. None = impossible."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Defaults of requests: `sampling_defaults`."""
    draft: Transformer | None = None
    """Small draft model, for engine options with speculation but without one."""
    ranks: ServingRanks | None = None
    """Ranks with the other parts of the model. None = it is whole."""

    def __post_init__(self) -> None:
        """Raise ArgumentError if an adapter has the model's name."""
        if self.name in self.adapters:
            raise ArgumentError(f"adapter={self.name} is the model's own name: give one of them another")

    def engine(self, options: EngineOptions) -> ServingEngine:
        """Start an engine that has answered once, so the first request does not wait for one-time work."""
        if options.speculation is not None and options.speculation.draft is None:
            options = replace(options, speculation=replace(options.speculation, draft=self.draft))
        engine = ServingEngine(
            self.model, options, end_ids=self.end_ids, tokenizer=self.tokenizer, adapters=self.adapters,
            ranks=self.ranks,
        )  # fmt: skip
        engine.run([engine.add([0], RequestOptions(max_new_tokens=2, ignore_end=True, salt=None))])
        return engine

    def card(self, engine: ServingEngine) -> ModelCard:
        """Return the facts that the HTTP process needs."""
        return ModelCard(
            name=self.name, tokenizer=self.tokenizer, end_ids=self.end_ids, created=self.created,
            sampling=self.sampling,
            longest=engine.longest, most_sequences=engine.options.most_sequences, adapters=engine.adapters.names,
        )  # fmt: skip


OpenModel = Callable[[], HostedModel]
"""Function that opens the model, called in the engine's thread."""

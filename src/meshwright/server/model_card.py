"""What the HTTP process knows of the model: its name, its tokenizer, and what it can take. No weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model as requests see it."""

    name: str
    """As requests and `/v1/models` say it."""
    tokenizer: Tokenizer | None
    """None = prompts are token ids, and answers too."""
    end_ids: tuple[int, ...]
    """Tokens that end a text."""
    created: int
    """Seconds since 1970."""
    longest: int
    """Most tokens of prompt and answer but the last."""
    most_sequences: int
    """Answers that are made at once."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What an answer has where its request says nothing: `sampling_defaults`."""
    adapters: tuple[str, ...]
    """By the names that requests say in the model's place, when the server begins."""

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request's name means, of those that there are; None = the model alone."""
        return None if name == self.name else name

    def encode(self) -> bytes:
        """As JSON, which `decode` reads."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields | {"tokenizer": self.tokenizer and self.tokenizer.parts}).encode()

    @classmethod
    def decode(cls, text: bytes) -> "ModelCard":
        """What `encode` wrote."""
        fields = json.loads(text)
        parts = fields.pop("tokenizer")
        ends, adapters = tuple(fields.pop("end_ids")), tuple(fields.pop("adapters"))
        return cls(tokenizer=parts and Tokenizer(**parts), end_ids=ends, adapters=adapters, **fields)

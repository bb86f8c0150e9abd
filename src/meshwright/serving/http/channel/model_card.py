"""Facts about the model for the HTTP process: its name, tokenizer and limits. No weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.data.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """Model as requests see it."""

    name: str
    """Name in requests and `/v1/models`."""
    tokenizer: Tokenizer | None
    """Tokenizer. None = prompts and answers are token ids."""
    end_ids: tuple[int, ...]
    """Tokens that end a text."""
    created: int
    """Seconds since 1970."""
    longest: int
    """Most tokens of prompt and answer without the last."""
    most_sequences: int
    """Answers that are generated at once."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Defaults of requests: `sampling_defaults`."""
    adapters: tuple[str, ...]
    """Adapters at the start of the server, by the names that requests give in the model's place."""

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter that a request's name means. None = the model alone."""
        return None if name == self.name else name

    def encode(self) -> bytes:
        """Encode it as JSON."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields | {"tokenizer": self.tokenizer and self.tokenizer.parts}).encode()

    @classmethod
    def decode(cls, text: bytes) -> "ModelCard":
        """Decode what `encode` wrote."""
        fields = json.loads(text)
        parts = fields.pop("tokenizer")
        ends, adapters = tuple(fields.pop("end_ids")), tuple(fields.pop("adapters"))
        return cls(tokenizer=parts and Tokenizer(**parts), end_ids=ends, adapters=adapters, **fields)

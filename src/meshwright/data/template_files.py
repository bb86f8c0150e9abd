"""What a model's files say of its chat template, without running any."""

from collections.abc import Mapping
from typing import Any


def from_files(config: Mapping[str, Any], beside: str | None) -> str | None:
    """The template in a tokenizer_config.json, or in the chat_template.jinja beside it, which is newer; of several
    named ones `default`."""
    found = beside or config.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, Mapping)}
        found = named.get("default")
    return found if isinstance(found, str) and found else None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The spellings of a tokenizer_config.json that templates may name: each `..._token` key."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    spelled = {name: one.get("content") if isinstance(one, Mapping) else one for name, one in named.items()}
    return {name: one for name, one in spelled.items() if isinstance(one, str)}

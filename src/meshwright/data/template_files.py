"""What a model's files say of its chat template, without running any."""

from collections.abc import Mapping
from typing import Any


def from_files(config: Mapping[str, Any], beside: str | None) -> str | None:
    """The template in a tokenizer_config.json, or in the chat_template.jinja beside it, which is newer; of several
    named ones `default`."""
    return beside or _named(config, "default")


def for_tools(config: Mapping[str, Any], beside: str | None, additional: str | None) -> str | None:
    """The template of conversations with tools, where there is one beside the default: `additional_chat_templates/`,
    or a named one of the list. As in transformers, a chat_template.jinja hides the list."""
    return additional or (None if beside else _named(config, "tool_use"))


def _named(config: Mapping[str, Any], name: str) -> str | None:
    """A named template of a list; one alone is the default."""
    found = config.get("chat_template")
    if isinstance(found, list):
        templates = {one.get("name"): one.get("template") for one in found if isinstance(one, Mapping)}
        found = templates.get(name)
    elif name != "default":
        return None
    return found if isinstance(found, str) and found else None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The spellings of a tokenizer_config.json that templates may name: each `..._token` key."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    spelled = {name: one.get("content") if isinstance(one, Mapping) else one for name, one in named.items()}
    return {name: one for name, one in spelled.items() if isinstance(one, str)}

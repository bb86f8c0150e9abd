"""A conversation as the tokens after which a model answers."""

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from meshwright.data.chat_template import DEFAULT, DEFAULT_WITHOUT_BOS, ChatTemplate
from meshwright.data.tokenizer import Tokenizer


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """What writes conversations for a tokenizer, as of today: its own template, or the default one."""
    with_tools = tokenizer.tool_template or ""
    return ChatTemplate(template_text(tokenizer), tokenizer.spelled, date.today(), tool_source=with_tools)


def template_text(tokenizer: Tokenizer) -> str:
    """Its own template, or the default one, which begins with a bos where the tokenizer puts one before a text."""
    return tokenizer.chat_template or (DEFAULT if tokenizer.bos in tokenizer.begins else DEFAULT_WITHOUT_BOS)


def chat_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    begun: str = "",
    settings: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids. `begun`: what the answer begins with; `settings`: other names that the template knows, as
    `enable_thinking`. DataError where the template fails."""
    text = template.render(messages, tools, prompt=True, settings=settings).text + begun
    ids: list[int] = tokenizer.encode(text, special=True).tolist()  # the template writes what begins a text
    return ids

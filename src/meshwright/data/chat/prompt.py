"""Prompts of conversations: the tokens after which a model answers, and those that end its answer."""

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, Final

from meshwright.data.chat.rendering import Policy, conversation
from meshwright.data.chat.samples import Conversation
from meshwright.data.chat.template import DEFAULT, DEFAULT_WITHOUT_BOS, ChatTemplate
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.spec.errors import DataError

_ANSWER: Final = "\ufdd2answer\ufdd2"
"""Answer that no template's own text contains."""


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template of a tokenizer, as of today: its own, or the default one."""
    with_tools = tokenizer.tool_template or ""
    return ChatTemplate(template_text(tokenizer), tokenizer.spelled, date.today(), tool_source=with_tools)


def template_text(tokenizer: Tokenizer) -> str:
    """Return the tokenizer's own template, or the default one, with a bos if the tokenizer puts one before a text."""
    return tokenizer.chat_template or (DEFAULT if tokenizer.bos in tokenizer.begins else DEFAULT_WITHOUT_BOS)


def chat_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    begun: str = "",
    settings: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a prompt. Raises DataError when the template fails.

    Args:
        begun: Beginning of the answer.
        settings: Other variables of the template, such as `enable_thinking`.
    """
    text = template.render(messages, tools, prompt=True, settings=settings).text + begun
    ids: list[int] = tokenizer.encode(text, special=True).tolist()  # the template writes what begins a text
    return ids


def turn_end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the special token that is trained behind an answer. Empty if the template adds none, or fails."""
    sample = Conversation(messages=({"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}))
    try:
        [marked] = conversation(sample, template_of(tokenizer), Policy())
    except DataError:  # a template for other conversations, reported when rows are encoded
        return ()
    behind = ""
    for begin, end in marked.trained:
        start = marked.text.find(_ANSWER, begin, end)
        behind = marked.text[start + len(_ANSWER) : end] if start >= 0 else behind
    special = tokenizer.special_ids | {tokenizer.eos}
    return tuple(token for token in tokenizer.encode(behind, special=True).tolist() if token in special)[:1]

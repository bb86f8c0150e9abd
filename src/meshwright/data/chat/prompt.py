"""Prompts of conversations: their chat template, the tokens after which a model answers, and those that end it."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any, Final

from meshwright.data.chat.rendering import Policy, render_conversation
from meshwright.data.chat.samples import Conversation
from meshwright.data.chat.template import DEFAULT, DEFAULT_WITHOUT_BOS, ChatTemplate
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.spec.errors import DataError
from meshwright.spec.plan.plan import CHAT_FORMATS, EOS, ChatFormat

AUTO: Final = "auto"


def named_template(setting: str) -> str | None:
    """Return the text of `data.template`. None = auto. Raises DataError if it is neither a format nor a file."""
    if setting == AUTO:
        return None
    if setting in CHAT_FORMATS:
        shipped = resources.files("meshwright.data").joinpath("templates", CHAT_FORMATS[setting].file)
        return shipped.read_text(encoding="utf-8")
    try:
        return Path(setting).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(
            f"data.template={setting} cannot be read: {error.strerror}; take auto, the path of a Jinja file, or a "
            f"format: {', '.join(CHAT_FORMATS)}"
        ) from error
    except OSError as error:
        raise DataError(f"data.template={setting} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"data.template={setting} cannot be read: it is not UTF-8 text") from error


def check_format(setting: str, tokenizer: Tokenizer) -> None:
    """Raise DataError when `data.template` is a format whose tokens the vocabulary lacks, naming formats that fit.

    A model would otherwise learn to write these tokens letter by letter, and never to stop.
    """
    form = CHAT_FORMATS.get(setting)
    lacked = list(_find_missing_tokens(form, tokenizer)) if form else []
    if lacked:
        fitting = [*fitting_formats(tokenizer), f"{AUTO} (the tokenizer's own template, else headings)"]
        raise DataError(
            f"data.template={setting} needs {' and '.join(lacked)}, which the tokenizer lacks as one special "
            f"token: take data.template={' or '.join(fitting)}"
        )


def fitting_formats(tokenizer: Tokenizer) -> list[str]:
    """Return the names of the formats whose tokens the vocabulary has."""
    return [name for name, form in CHAT_FORMATS.items() if not any(_find_missing_tokens(form, tokenizer))]


def _find_missing_tokens(form: ChatFormat, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield tokens of a format that are not one id each. Its turn end must also be special."""
    yield from (token for token in form.tokens if len(tokenizer.encode(token, special=True)) != 1)
    if form.turn_end == EOS:
        yield from [] if tokenizer.spelled.get(EOS) else ["an end-of-text token"]
    else:
        ids = tokenizer.encode(form.turn_end, special=True).tolist()
        yield from [] if len(ids) == 1 and ids[0] in tokenizer.special_ids else [form.turn_end]


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
        [marked] = render_conversation(sample, template_of(tokenizer), Policy())
    except DataError:  # a template for other conversations, reported when rows are encoded
        return ()
    behind = ""
    for begin, end in marked.trained:
        start = marked.text.find(_ANSWER, begin, end)
        behind = marked.text[start + len(_ANSWER) : end] if start >= 0 else behind
    special = tokenizer.special_ids | {tokenizer.eos}
    return tuple(token for token in tokenizer.encode(behind, special=True).tolist() if token in special)[:1]

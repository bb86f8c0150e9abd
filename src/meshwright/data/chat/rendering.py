"""Rendering: a sample as text, with its trained spans and the role that says each part.

Trained characters, by the first rule that applies:
- a prompt with an answer: the answer
- a template with `{% generation %}`: the marked spans
- any other: from the end of the words that ask for an answer (`add_generation_prompt`) to the end of the turn

Some templates render a turn differently once others follow it (thoughts are dropped from earlier turns). They give one
sample per answer, as the model will see it.

Prompts of conversations are here too: their chat template, the tokens after which a model answers, and those that end
it.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from meshwright.data.chat.completeness import IncompleteRendering, check_complete, remove_thoughts
from meshwright.data.chat.samples import Continuation, Conversation, Message
from meshwright.data.chat.template import DEFAULT, DEFAULT_WITHOUT_BOS, THOUGHTS, ChatTemplate, Rendered, Span
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.spec.errors import DataError, MalformedRowError
from meshwright.spec.plan import plan
from meshwright.spec.plan.plan import CHAT_FORMATS, EOS, ChatFormat

ROLES = ("other", *plan.ROLES)
"""Roles of tokens. The index of a role is its number on disk."""
_SAME_ROLE = {"developer": "system", "function": "tool", "ipython": "tool", "model": "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """A text and its spans. Text outside all spans is not trained, or belongs to no role."""

    text: str
    trained: tuple[Span, ...]
    roles: tuple[tuple[Span, str], ...] = ()
    """(span, role). Where two overlap, the later one counts."""
    ends: bool = True
    """The template ends the text. Others get an end-of-text token, unless they are cut."""
    is_cut: bool = False
    """The text stops at a limit: nothing that ends it may be added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Choice of what is trained."""

    train_on: str = "auto"
    """`auto`; `last` = the last answer; `all`; or roles, such as `assistant,tool`."""
    thinking: str = "keep"
    """`keep` = as the template writes them, which must include the thoughts of trained answers; `drop` = removed
    first."""


def render_continuation(sample: Continuation, policy: Policy) -> Marked:
    """Return a prompt and its completion as one text."""
    border = 0 if policy.train_on == "all" else len(sample.prompt)
    text = sample.prompt + sample.completion
    return Marked(text=text, trained=((border, len(text)),), ends=False, is_cut=sample.is_cut)


def render_conversation(sample: Conversation, template: ChatTemplate, policy: Policy) -> list[Marked]:
    """Return the rendered conversation, or one text per answer. Raises DataError if the template drops content."""
    marked = _render_complete(sample, template, policy)
    return [*marked[:-1], _without_end(marked[-1], sample.messages[-1])] if sample.is_cut and marked else marked


def _without_end(marked: Marked, answer: Message) -> Marked:
    """Return a text that stops with the last characters of its answer, so that no end of turn is trained."""
    content = answer.get("content")
    words = content.strip() if isinstance(content, str) and role_of(answer) == "assistant" else ""
    end = marked.text.rfind(words) + len(words)
    if not words or end < len(words):
        raise MalformedRowError(
            "the last answer is marked as cut off, and the chat template does not write its text as it is: "
            "remove the row, or take another data.template"
        )
    trained = tuple((begin, min(until, end)) for begin, until in marked.trained if begin < end)
    roles = tuple(((begin, min(until, end)), role) for (begin, until), role in marked.roles if begin < end)
    return replace(marked, text=marked.text[:end], trained=trained, roles=roles, is_cut=True)


def _render_complete(sample: Conversation, template: ChatTemplate, policy: Policy) -> list[Marked]:
    template = template.with_tools if sample.tools else template
    messages = [template.joined(message) for message in sample.messages]
    messages = [_remove_thoughts(message) for message in messages] if policy.thinking == "drop" else messages
    # Templates differ in what they expect; objects are what a server gives them.
    opened = [_parse_arguments(message) for message in messages]
    try:
        return _render_whole(opened, sample, template, policy)
    except DataError as error:
        if opened == messages:
            raise
        try:
            return _render_whole(messages, sample, template, policy)  # some templates write JSON as they are given it
        except DataError as other:  # the form that could be written says more than the one that could not
            raise error if isinstance(error, IncompleteRendering) else other from None


def _render_whole(
    messages: Sequence[Message], sample: Conversation, template: ChatTemplate, policy: Policy
) -> list[Marked]:
    full = template.render(messages, sample.tools)
    trained = _find_trained_spans(messages, sample, full, template, policy)
    # Earlier turns look different once others follow, so one text cannot show all answers.
    if trained is None:
        return _render_by_answer(messages, sample, template, policy)
    answers = _choose_trained_turns(messages, sample, policy) or [len(messages) - 1]
    check_complete(messages, sample.tools, answers, full.text, template)
    _check_roles(messages, template)
    spans = tuple(span for span, _ in trained)
    named = (part for part in trained if part[1])  # includes tool calls and the end-of-turn token
    return [Marked(text=full.text, trained=spans, roles=(*_content_spans(messages, full.text), *named))]


def prompt(messages: Sequence[Message], tools: Any, template: ChatTemplate) -> str:
    """Return the text that a model gets before it answers."""
    return template.render(messages, tools, prompt=True).text


def role_of(message: Message) -> str:
    """Return the role of a message, one of ROLES."""
    name = str(message["role"])
    name = _SAME_ROLE.get(name, name)
    return name if name in ROLES else "other"


Trained = tuple[Span, str]
"""(trained span, role). An empty role = several."""


def _find_trained_spans(
    messages: Sequence[Message], sample: Conversation, full: Rendered, template: ChatTemplate, policy: Policy
) -> list[Trained] | None:
    """Return the trained spans. None = the template renders earlier turns in another form."""
    if policy.train_on == "all":
        return [((0, len(full.text)), "")]
    wanted = _choose_trained_turns(messages, sample, policy)
    # The usual case: all that follows the prompt is trained, also the mark that ends the turn.
    if policy.train_on == "auto" and sample.prompt and wanted == list(range(sample.prompt, len(messages))):
        begin = _prompt_end(messages[: sample.prompt], sample, full.text, template)
        return None if begin is None else [((begin, len(full.text)), "assistant")]
    if not wanted:
        return []
    # Marks are the template's own word on what it generates, and only answers have them.
    if template.marks and all(role_of(messages[turn]) == "assistant" for turn in wanted):
        marked = _find_marked_spans(messages, sample, full, wanted, template)
        return None if marked is None else [(span, "assistant") for span in marked]
    spans = [(_turn_span(messages, turn, sample, full.text, template), role_of(messages[turn])) for turn in wanted]
    return None if any(span is None for span, _ in spans) else [(span, role) for span, role in spans if span]


def _choose_trained_turns(messages: Sequence[Message], sample: Conversation, policy: Policy) -> list[int]:
    """Return the trained turns, without those of a prompt and those with `train: false` or `weight: 0`."""
    roles = {"auto": {"assistant"}, "last": {"assistant"}}.get(policy.train_on) or set(policy.train_on.split(","))
    named = [number for number, message in enumerate(messages) if role_of(message) in roles]
    turns = [turn for turn in named if turn >= sample.prompt or role_of(messages[turn]) != "assistant"]
    turns = turns[-1:] if policy.train_on == "last" else turns
    return [turn for turn in turns if _allows_training(messages[turn])]


def _allows_training(message: Message) -> bool:
    """Return whether a message itself allows training. Raises MalformedRowError for neither yes nor no."""
    for key in ("train", "weight"):
        if message.get(key, 1) not in (None, False, True, 0, 1):
            raise MalformedRowError(
                f"a message has {key}={message[key]!r}: a turn is trained (1, true) or not (0, false)"
            )
    return all(message.get(key, 1) in (None, True, 1) for key in ("train", "weight"))


def _find_marked_spans(
    messages: Sequence[Message], sample: Conversation, full: Rendered, wanted: Sequence[int], template: ChatTemplate
) -> list[Span] | None:
    """Return the template's own spans within these turns. None = earlier turns are rendered in another form."""
    # By prefixes: each turn must be rendered alike with and without its successors.
    ends = {
        turn: template.render(messages[: turn + 1], sample.tools).text for turn in wanted if turn + 1 < len(messages)
    }
    if not all(full.text.startswith(until) for until in ends.values()):
        return None
    # All answers are wanted: no span need be assigned to a turn.
    if list(wanted) == [number for number, message in enumerate(messages) if role_of(message) == "assistant"]:
        return list(full.generated)
    spans = []
    for turn in wanted:
        before, until = template.render(messages[:turn], sample.tools).text if turn else "", ends.get(turn, full.text)
        if not until.startswith(before):
            return None
        spans += [span for span in full.generated if len(before) <= span[0] and span[1] <= len(until)]
    return spans


def _turn_span(
    messages: Sequence[Message], turn: int, sample: Conversation, text: str, template: ChatTemplate
) -> Span | None:
    """Return the span of a turn's own words. That of an answer follows the words that ask for it."""
    until = template.render(messages[: turn + 1], sample.tools).text
    if not text.startswith(until):
        return None
    if role_of(messages[turn]) != "assistant":
        before = template.render(messages[:turn], sample.tools).text if turn else ""
        return (len(before), len(until)) if until.startswith(before) else None
    if turn:
        begin = _prompt_end(messages[:turn], sample, until, template)
    else:  # nothing asks for an answer that opens a conversation: it begins where another answer changes the text
        other = template.render([{**messages[0], "content": "\ufdd2"}], sample.tools).text
        begin = _common_length(other, until)
    # Blanks behind a turn separate it from the next one, and are not the answer's.
    return None if begin is None else (begin, max(begin, len(until.rstrip())))


def _prompt_end(messages: Sequence[Message], sample: Conversation, text: str, template: ChatTemplate) -> int | None:
    """Return the position where the words that ask for an answer end.

    A template may ask with more than it later shows, such as an empty thought. The position is then where both texts
    part, behind the earlier turns.
    """
    asked = prompt(messages, sample.tools, template)
    if text.startswith(asked):
        return len(asked)
    earlier = template.render(messages, sample.tools).text
    common = _common_length(asked, text)
    if not text.startswith(earlier) or common < len(earlier):
        return None
    tag = asked.rfind("<", len(earlier), common)  # both may go on with a tag, `<think>` and `<tool_call>`
    return tag if tag >= 0 and ">" not in asked[tag:common] else common


def _common_length(first: str, second: str) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _render_by_answer(
    messages: Sequence[Message], sample: Conversation, template: ChatTemplate, policy: Policy
) -> list[Marked]:
    """Return one sample per trained answer: the conversation up to it."""
    turns = _choose_trained_turns(messages, sample, policy)
    _check_roles(messages, template)
    marked_texts = []
    for turn in turns:
        until = messages[: turn + 1]
        full = template.render(until, sample.tools)
        spans = _find_last_spans(until, sample, full, template)
        if spans is None:
            raise DataError(
                f"the chat template writes turn {turn + 1} in two forms, so its trained part is not known. Put "
                "{% generation %} around the answers in the template, or take "
                "data.train_on=all"
            )
        check_complete(until, sample.tools, [turn], full.text, template)
        roles = (*_content_spans(until, full.text), *((span, role_of(messages[turn])) for span in spans))
        marked_texts.append(Marked(text=full.text, trained=tuple(spans), roles=roles))
    return marked_texts


def _find_last_spans(
    messages: Sequence[Message], sample: Conversation, full: Rendered, template: ChatTemplate
) -> list[Span] | None:
    """Return the spans of the last turn's own words. None = unknown."""
    if template.marks and role_of(messages[-1]) == "assistant":
        before = template.render(messages[:-1], sample.tools).generated if len(messages) > 1 else ()
        return list(full.generated[len(before) :])
    span = _turn_span(messages, len(messages) - 1, sample, full.text, template)
    return None if span is None else [span]


def _content_spans(messages: Sequence[Message], text: str) -> tuple[tuple[Span, str], ...]:
    """Return the span of each turn's content, in order. Contents that the template changed are skipped."""
    # Searched in order, so that equal contents are found once each.
    contents, begin = [], 0
    for message in messages:
        content = str(message.get("content") or "").strip()
        start = text.find(content, begin) if content else -1
        if start >= 0:
            begin = start + len(content)
            contents.append(((start, begin), role_of(message)))
    return tuple(contents)


def _check_roles(messages: Sequence[Message], template: ChatTemplate) -> None:
    """Raise MalformedRowError for an unknown role: most templates write any, and a misspelled answer is masked."""
    for number, message in enumerate(messages, start=1):
        role = str(message["role"])
        if role_of(message) == "other" and role not in template.source:
            raise MalformedRowError(
                f"message {number} has the role {role!r}, which the chat template does not know: take system, "
                "user, assistant or tool, or another data.template"
            )


def _remove_thoughts(message: Message) -> Message:
    """Return an answer without its thoughts."""
    if role_of(message) != "assistant":
        return message
    remaining: dict[str, Any] = {name: part for name, part in message.items() if name not in THOUGHTS}
    if isinstance(remaining.get("content"), str):
        remaining["content"] = remove_thoughts(remaining["content"]).lstrip("\n")
    return remaining


def _parse_arguments(message: Message) -> Message:
    """Return a message whose calls have their JSON arguments as objects, as a server gives them to templates.

    Templates write arguments as JSON, which would turn a text into a quoted text.
    """
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_parse_call(call) for call in calls]} if isinstance(calls, list) else message


def _parse_call(call: Any) -> Any:
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    arguments = inner.get("arguments") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(arguments, str):
        return call
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(arguments.strip() or "{}")
        if isinstance(parsed, Mapping):
            opened = {**inner, "arguments": parsed}
            return {**call, "function": opened} if "function" in call else opened
    return call


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

"""Rendering: a sample as text, with what of it is trained and who says what.

Which characters are trained, in this order:
- a prompt with an answer: the answer;
- a template with `{% generation %}`: what it marks;
- any other: from where the words end that ask for an answer (`add_generation_prompt`) to the end of the turn.
A template that renders a turn otherwise once others follow it (thinking is dropped from earlier turns) gives one
sample for each answer, as the model will see it.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from meshwright.data.chat_template import THOUGHTS, ChatTemplate, Rendered, Span
from meshwright.data.completeness import IncompleteRendering, check_complete, without_thoughts
from meshwright.data.samples import Continuation, Conversation, Message
from meshwright.spec import plan
from meshwright.spec.errors import DataError, MalformedRowError

ROLES = ("other", *plan.ROLES)
"""Who says a token; its place here is its number on disk."""
_SAME_ROLE = {"developer": "system", "function": "tool", "ipython": "tool", "model": "assistant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """A text and its spans; what is in no span is not trained, or said by nobody."""

    text: str
    trained: tuple[Span, ...]
    said: tuple[tuple[Span, str], ...] = ()
    """Who says what; of two that overlap, the later one is right."""
    ends: bool = True
    """Whether the template ends it; other texts get an end-of-text token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is trained, by choice."""

    train_on: str = "auto"
    """`auto`; `last` = the last answer; `all`; or roles, as `assistant,tool`."""
    thinking: str = "keep"
    """`keep` = as the template has it, which must write those of what is trained; `drop` = taken out before."""


def continuation(one: Continuation, policy: Policy) -> Marked:
    """A text behind a text."""
    border = 0 if policy.train_on == "all" else len(one.prompt)
    text = one.prompt + one.completion
    return Marked(text=text, trained=((border, len(text)),), ends=False)


def conversation(one: Conversation, template: ChatTemplate, policy: Policy) -> list[Marked]:
    """The rendered conversation, or one for each answer. DataError where the template drops what is said."""
    template = template.with_tools if one.tools else template
    messages = [template.joined(message) for message in one.messages]
    messages = [_thoughtless(message) for message in messages] if policy.thinking == "drop" else messages
    opened = [_opened(message) for message in messages]
    try:
        return _conversation(opened, one, template, policy)
    except DataError as error:
        if opened == messages:
            raise
        try:
            return _conversation(messages, one, template, policy)  # some templates write JSON as they are given it
        except DataError as other:  # the form that could be written says more than the one that could not
            raise error if isinstance(error, IncompleteRendering) else other from None


def _conversation(
    messages: Sequence[Message], one: Conversation, template: ChatTemplate, policy: Policy
) -> list[Marked]:
    full = template.render(messages, one.tools)
    trained = _trained(messages, one, full, template, policy)
    if trained is None:
        return _by_answer(messages, one, template, policy)
    answers = _wanted(messages, one, policy) or [len(messages) - 1]
    check_complete(messages, one.tools, answers, full.text, template)
    _check_roles(messages, template)
    spans = tuple(span for span, _ in trained)
    return [Marked(text=full.text, trained=spans, said=(*_said(messages, full.text), *_by_role(trained)))]


def prompt(messages: Sequence[Message], tools: Any, template: ChatTemplate) -> str:
    """What a model is given before it answers."""
    return template.render(messages, tools, prompt=True).text


def role_of(message: Message) -> str:
    """One of ROLES."""
    name = str(message["role"])
    name = _SAME_ROLE.get(name, name)
    return name if name in ROLES else "other"


Trained = tuple[Span, str]
"""What is trained, and who says it; an empty role = several do."""


def _by_role(trained: Sequence[Trained]) -> tuple[Trained, ...]:
    """Those that one role says, its calls of tools and its end-of-turn token included."""
    return tuple(one for one in trained if one[1])


def _trained(
    messages: Sequence[Message], one: Conversation, full: Rendered, template: ChatTemplate, policy: Policy
) -> list[Trained] | None:
    """The spans; None where the template renders earlier turns otherwise."""
    if policy.train_on == "all":
        return [((0, len(full.text)), "")]
    wanted = _wanted(messages, one, policy)
    if policy.train_on == "auto" and one.prompt and wanted == list(range(one.prompt, len(messages))):
        begin = _prompt_end(messages[: one.prompt], one, full.text, template)
        return None if begin is None else [((begin, len(full.text)), "assistant")]
    if not wanted:
        return []
    if template.marks and all(role_of(messages[turn]) == "assistant" for turn in wanted):
        marked = _marked_turns(messages, one, full, wanted, template)
        return None if marked is None else [(span, "assistant") for span in marked]
    found = [(_turn(messages, turn, one, full.text, template), role_of(messages[turn])) for turn in wanted]
    return None if any(span is None for span, _ in found) else [(span, role) for span, role in found if span]


def _wanted(messages: Sequence[Message], one: Conversation, policy: Policy) -> list[int]:
    """Which turns are trained: no answer of a prompt, and none that says so itself (`train: false`, `weight: 0`)."""
    roles = {"auto": {"assistant"}, "last": {"assistant"}}.get(policy.train_on) or set(policy.train_on.split(","))
    named = [number for number, message in enumerate(messages) if role_of(message) in roles]
    turns = [turn for turn in named if turn >= one.prompt or role_of(messages[turn]) != "assistant"]
    turns = turns[-1:] if policy.train_on == "last" else turns
    return [turn for turn in turns if _trains(messages[turn])]


def _trains(message: Message) -> bool:
    """What a message says itself. DataError: neither yes nor no."""
    for key in ("train", "weight"):
        if message.get(key, 1) not in (None, False, True, 0, 1):
            raise MalformedRowError(
                f"a message has {key}={message[key]!r}: a turn is trained (1, true) or not (0, false)"
            )
    return all(message.get(key, 1) in (None, True, 1) for key in ("train", "weight"))


def _marked_turns(
    messages: Sequence[Message], one: Conversation, full: Rendered, wanted: Sequence[int], template: ChatTemplate
) -> list[Span] | None:
    """The template's own spans: all of them, or those inside of some turns; None where it renders earlier turns in
    another form."""
    ends = {turn: template.render(messages[: turn + 1], one.tools).text for turn in wanted if turn + 1 < len(messages)}
    if not all(full.text.startswith(until) for until in ends.values()):
        return None
    if list(wanted) == [number for number, message in enumerate(messages) if role_of(message) == "assistant"]:
        return list(full.generated)
    found = []
    for turn in wanted:
        before, until = template.render(messages[:turn], one.tools).text if turn else "", ends.get(turn, full.text)
        if not until.startswith(before):
            return None
        found += [span for span in full.generated if len(before) <= span[0] and span[1] <= len(until)]
    return found


def _turn(messages: Sequence[Message], turn: int, one: Conversation, text: str, template: ChatTemplate) -> Span | None:
    """Where a turn's own words stand: an answer behind the words that ask for it, its last token included."""
    until = template.render(messages[: turn + 1], one.tools).text
    if not text.startswith(until):
        return None
    if role_of(messages[turn]) != "assistant":
        before = template.render(messages[:turn], one.tools).text if turn else ""
        return (len(before), len(until)) if until.startswith(before) else None
    begin = _prompt_end(messages[:turn], one, until, template) if turn else _unasked(messages[0], one, until, template)
    return None if begin is None else (begin, max(begin, len(until.rstrip())))


def _prompt_end(messages: Sequence[Message], one: Conversation, text: str, template: ChatTemplate) -> int | None:
    """Where the words end that ask for an answer. A template may ask with more than it later shows (an empty thought):
    then it is where both texts part, behind what was said before."""
    asked = prompt(messages, one.tools, template)
    if text.startswith(asked):
        return len(asked)
    said = template.render(messages, one.tools).text
    common = _common(asked, text)
    if not text.startswith(said) or common < len(said):
        return None
    tag = asked.rfind("<", len(said), common)  # both may go on with a tag, `<think>` and `<tool_call>`
    return tag if tag >= 0 and ">" not in asked[tag:common] else common


def _unasked(message: Message, one: Conversation, text: str, template: ChatTemplate) -> int:
    """Where an answer begins that opens a conversation: behind what is written before any other answer too."""
    return _common(template.render([{**message, "content": "\ufdd2"}], one.tools).text, text)


def _common(first: str, second: str) -> int:
    """How many characters both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _by_answer(messages: Sequence[Message], one: Conversation, template: ChatTemplate, policy: Policy) -> list[Marked]:
    """One sample for each trained answer: the conversation up to it."""
    turns = _wanted(messages, one, policy)
    _check_roles(messages, template)
    found = []
    for turn in turns:
        until = messages[: turn + 1]
        full = template.render(until, one.tools)
        spans = _last_turn(until, one, full, template)
        if spans is None:
            raise DataError(
                f"the chat template writes turn {turn + 1} in two forms, so its trained part is not known. Put "
                "{% generation %} around the answers in the template, or take "
                "data.train_on=all"
            )
        check_complete(until, one.tools, [turn], full.text, template)
        said = (*_said(until, full.text), *((span, role_of(messages[turn])) for span in spans))
        found.append(Marked(text=full.text, trained=tuple(spans), said=said))
    return found


def _last_turn(
    messages: Sequence[Message], one: Conversation, full: Rendered, template: ChatTemplate
) -> list[Span] | None:
    """Where the last turn's own words stand; None where that is not known."""
    if template.marks and role_of(messages[-1]) == "assistant":
        before = template.render(messages[:-1], one.tools).generated if len(messages) > 1 else ()
        return list(full.generated[len(before) :])
    span = _turn(messages, len(messages) - 1, one, full.text, template)
    return None if span is None else [span]


def _said(messages: Sequence[Message], text: str) -> tuple[tuple[Span, str], ...]:
    """Where each turn's content stands, in order; a content that was changed is passed over."""
    found, begin = [], 0
    for message in messages:
        content = str(message.get("content") or "").strip()
        place = text.find(content, begin) if content else -1
        if place >= 0:
            begin = place + len(content)
            found.append(((place, begin), role_of(message)))
    return tuple(found)


def _check_roles(messages: Sequence[Message], template: ChatTemplate) -> None:
    """Hard error for a role that nobody knows: most templates write any, and a misspelled answer would be masked."""
    for number, message in enumerate(messages, start=1):
        role = str(message["role"])
        if role_of(message) == "other" and role not in template.source:
            raise MalformedRowError(
                f"message {number} has the role {role!r}, which the chat template does not know: take system, "
                "user, assistant or tool, or another data.template"
            )


def _thoughtless(message: Message) -> Message:
    """An answer without what was thought before it."""
    if role_of(message) != "assistant":
        return message
    kept: dict[str, Any] = {name: value for name, value in message.items() if name not in THOUGHTS}
    if isinstance(kept.get("content"), str):
        kept["content"] = without_thoughts(kept["content"]).lstrip("\n")
    return kept


def _opened(message: Message) -> Message:
    """A message whose calls have the JSON of their arguments as objects: what templates write as JSON, and what a
    server gives them. A text would be written as JSON of a text."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_opened_call(call) for call in calls]} if isinstance(calls, list) else message


def _opened_call(call: Any) -> Any:
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    given = inner.get("arguments") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(given, str):
        return call
    with contextlib.suppress(ValueError, RecursionError):
        read = json.loads(given.strip() or "{}")
        if isinstance(read, Mapping):
            opened = {**inner, "arguments": read}
            return {**call, "function": opened} if "function" in call else opened
    return call

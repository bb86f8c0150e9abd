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
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from meshwright.data.chat_template import THOUGHTS, ChatTemplate, Rendered, Span
from meshwright.data.samples import Continuation, Conversation, Message
from meshwright.spec import plan
from meshwright.spec.errors import DataError

ROLES = ("other", *plan.ROLES)
"""Who says a token; its place here is its number on disk."""
_SAME_ROLE = {"developer": "system", "function": "tool", "ipython": "tool", "model": "assistant"}
_THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


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
    """`keep` = as the template has it; `drop` = taken out before."""


def continuation(one: Continuation, policy: Policy) -> Marked:
    """A text behind a text."""
    border = 0 if policy.train_on == "all" else len(one.prompt)
    text = one.prompt + one.completion
    return Marked(text=text, trained=((border, len(text)),), ends=False)


def conversation(one: Conversation, template: ChatTemplate, policy: Policy) -> list[Marked]:
    """The rendered conversation, or one for each answer. DataError where the template drops what is said."""
    messages = [_thoughtless(message) for message in one.messages] if policy.thinking == "drop" else list(one.messages)
    full = template.render(messages, one.tools)
    trained = _trained(messages, one, full, template, policy)
    if trained is None:
        return _by_answer(messages, one, template, policy)
    _check_complete(messages, one, full.text)
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
            raise DataError(f"a message has {key}={message[key]!r}: a turn is trained (1, true) or not (0, false)")
    return all(message.get(key, 1) in (None, True, 1) for key in ("train", "weight"))


def _marked_turns(
    messages: Sequence[Message], one: Conversation, full: Rendered, wanted: Sequence[int], template: ChatTemplate
) -> list[Span] | None:
    """The template's own spans: all of them, or those inside of some turns; None where it renders earlier turns in
    another form."""
    if list(wanted) == [number for number, message in enumerate(messages) if role_of(message) == "assistant"]:
        return list(full.generated)
    found = []
    for turn in wanted:
        before, until = (template.render(messages[:end], one.tools).text if end else "" for end in (turn, turn + 1))
        if not (until.startswith(before) and full.text.startswith(until)):
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
        text = template.render(messages[: turn + 1], one.tools).text
        span = _turn(messages[: turn + 1], turn, one, text, template)
        if span is None:
            raise DataError(
                f"the chat template shows turn {turn + 1} in another form than it asks for it, so that what is trained "
                "is not known: put {% generation %} around the answers in the template, or take data.train_on=all"
            )
        _check_complete(messages[: turn + 1], one, text)
        said = (*_said(messages[: turn + 1], text), (span, role_of(messages[turn])))
        found.append(Marked(text=text, trained=(span,), said=said))
    return found


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


def _check_complete(messages: Sequence[Message], one: Conversation, text: str) -> None:
    """Hard error where a template leaves out what a message says, a call of a tool or a tool; thoughts aside."""
    squeezed = _squeezed(text)
    said = [_without_thoughts(str(message.get("content") or "")) for message in messages]
    missing = None if _stand_in_order(said, squeezed) else _missing(said, squeezed)
    if missing is not None:
        raise DataError(
            f"the chat template drops what message {missing + 1} ({messages[missing]['role']}) says: "
            f"{said[missing].strip()[:60]!r} is not in the rendered text; take another data.template or another role"
        )
    _check_tools(messages, one, text)


def _stand_in_order(said: Sequence[str], text: str) -> bool:
    """Whether each content has a place behind the one before it, in a text without blanks."""
    for content in said:
        place, size = _place(content, text)
        if place < 0:
            return False
        text = text[place + size :]
    return True


def _missing(said: Sequence[str], text: str) -> int | None:
    """The number of a content without a place of its own, in any order; the longest first: "hi" is in "hi there"."""
    for number in sorted(range(len(said)), key=lambda number: -len(_squeezed(said[number]))):
        place, size = _place(said[number], text)
        if place < 0:
            return number
        text = f"{text[:place]}\0{text[place + size :]}" if size else text
    return None


def _check_tools(messages: Sequence[Message], one: Conversation, text: str) -> None:
    """The same of calls, the texts of their arguments included, and of the tools themselves."""
    squeezed = _squeezed(text)
    for number, message in enumerate(messages, start=1):
        for name in _names(message.get("tool_calls")):
            if name not in text:
                raise DataError(
                    f"the chat template drops a tool call of message {number}: {name!r} is not in the rendered text; "
                    "take a data.template that writes tool_calls"
                )
        for given in _arguments(message.get("tool_calls")):
            if _place(given, squeezed)[0] < 0:
                raise DataError(
                    f"the chat template drops what a tool call of message {number} is given: {given[:60]!r} is not in "
                    "the rendered text; take a data.template that writes arguments"
                )
    for name in _names(one.tools):
        if name not in text:
            raise DataError(
                f"the chat template drops the tool {name!r}: it is not in the rendered text; take a data.template "
                "that writes tools, or remove the column 'tools'"
            )


def _place(content: str, squeezed: str) -> tuple[int, int]:
    """(where a content stands in a text without blanks, as it is or as JSON spells it; its length); -1 = nowhere."""
    spellings = [
        _squeezed(one) for one in (content, *(json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
    ]
    return next(((place, len(one)) for one in spellings if (place := squeezed.find(one)) >= 0), (-1, 0))


def _arguments(calls: Any) -> Iterator[str]:
    """The texts that calls of tools are given, at any depth."""
    for one in calls or ():
        inner = one.get("function", one) if isinstance(one, Mapping) else None
        given = inner.get("arguments") if isinstance(inner, Mapping) else None
        if isinstance(given, str):
            with contextlib.suppress(ValueError):
                given = json.loads(given)
        yield from _texts(given)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for one in value.values() for text in _texts(one))
    elif isinstance(value, list | tuple):
        yield from (text for one in value for text in _texts(one))


def _check_roles(messages: Sequence[Message], template: ChatTemplate) -> None:
    """Hard error for a role that nobody knows: most templates write any, and a misspelled answer would be masked."""
    for number, message in enumerate(messages, start=1):
        role = str(message["role"])
        if role_of(message) == "other" and role not in template.source:
            raise DataError(
                f"message {number} has the role {role!r}, which the chat template does not name: take system, user, "
                "assistant or tool, or a data.template that knows it"
            )


def _names(tools: Any) -> list[str]:
    """Of tools, or of calls of tools, in the form {"function": {"name": ...}} or {"name": ...}."""
    inner = [one.get("function", one) for one in tools or () if isinstance(one, Mapping)]
    return [str(one["name"]) for one in inner if isinstance(one, Mapping) and "name" in one]


def _without_thoughts(content: str) -> str:
    """What is said behind `</think>`; a thought's begin may stand in the prompt."""
    return _THINKING.sub("", content).rpartition("</think>")[2]


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _thoughtless(message: Message) -> Message:
    """An answer without what was thought before it."""
    if role_of(message) != "assistant":
        return message
    kept: dict[str, Any] = {name: value for name, value in message.items() if name not in THOUGHTS}
    if isinstance(kept.get("content"), str):
        kept["content"] = _without_thoughts(kept["content"]).lstrip("\n")
    return kept

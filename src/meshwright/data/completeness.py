"""Completeness: whether a rendered conversation holds what its messages say, its tools and its calls of them."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.data.chat_template import THOUGHTS
from meshwright.data.samples import Message
from meshwright.spec.errors import DataError

_THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_INSIDE = re.compile(r"<think>(.*?)</think>", re.DOTALL)


def check_complete(messages: Sequence[Message], tools: Any, answers: Sequence[int], text: str) -> None:
    """DataError where a text leaves out what a message says, a call of a tool, a tool, or a thought of these `answers`;
    thoughts of other turns are no part of what a model sees."""
    squeezed = _squeezed(text)
    said = [without_thoughts(str(message.get("content") or "")) for message in messages]
    missing = None if _stand_in_order(said, squeezed) else _missing(said, squeezed)
    if missing is not None:
        raise DataError(
            f"the chat template drops what message {missing + 1} ({messages[missing]['role']}) says: "
            f"{said[missing].strip()[:60]!r} is not in the rendered text; take another data.template or another role"
        )
    _check_thoughts(messages, answers, squeezed)
    _check_tools(messages, tools, text)


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


def _check_thoughts(messages: Sequence[Message], answers: Sequence[int], squeezed: str) -> None:
    """The same of what was thought before answers, which a model would learn to give without a thought."""
    for number in answers:
        for thought in _thoughts(messages[number]):
            if _place(thought, squeezed)[0] < 0:
                raise DataError(
                    f"the chat template drops the thoughts of message {number + 1}: {thought.strip()[:60]!r} is not in "
                    "the rendered text; take data.thinking=drop, or a data.template that writes them"
                )


def _thoughts(message: Message) -> list[str]:
    """Beside an answer, under the name that counts; else those within its content."""
    named = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    content = str(message.get("content") or "")
    inside = _INSIDE.findall(content) or [content.rpartition("</think>")[0]]
    return [one for one in (named, *inside) if isinstance(one, str) and one.strip()]


def _check_tools(messages: Sequence[Message], tools: Any, text: str) -> None:
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
    for name in _names(tools):
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


def _names(tools: Any) -> list[str]:
    """Of tools, or of calls of tools, in the form {"function": {"name": ...}} or {"name": ...}."""
    inner = [one.get("function", one) for one in tools or () if isinstance(one, Mapping)]
    return [str(one["name"]) for one in inner if isinstance(one, Mapping) and "name" in one]


def without_thoughts(content: str) -> str:
    """What is said behind `</think>`; a thought's begin may stand in the prompt."""
    return _THINKING.sub("", content).rpartition("</think>")[2]


def _squeezed(text: str) -> str:
    return "".join(text.split())

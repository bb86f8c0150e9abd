"""Completeness: whether a rendered conversation holds what its messages say, its tools and its calls of them."""

import contextlib
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from meshwright.data.chat_template import THOUGHTS, ChatTemplate
from meshwright.data.samples import Message
from meshwright.spec.errors import DataError, MalformedRowError
from meshwright.spec.plan import ROLES

_THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_INSIDE = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_SIGN: Final = f"mw{secrets.randbits(64):x}"
"""Begins what stands for names: letters and digits, which no filter of a template changes."""
_NUMBER: Final = (100_000_000 + secrets.randbelow(900_000_000)) * 10**6
"""Added to the place of a number, it stands for that number: 15 digits, which a float has, too."""
_ANY_SIGN: Final = re.compile(rf"({_SIGN}[an]\d+e|{_NUMBER // 10**6}\d{{6}})")
_MOST_RENDERED: Final = 8
"""Words of a conversation that are changed one by one."""
_GIVEN: Final = (
    "what a tool call of message {number} is given: {shown} is not in the rendered text; take a data.template that "
    "writes arguments"
)


class IncompleteRendering(DataError):
    """A template that leaves out what a conversation says."""


def check_complete(
    messages: Sequence[Message], tools: Any, answers: Sequence[int], text: str, template: ChatTemplate
) -> None:
    """DataError where a text of a template leaves out what a message says, a call of a tool, a tool, or a thought of
    these `answers`; thoughts of other turns are no part of what a model sees."""
    squeezed = _squeezed(text)
    said = [_forms(message) for message in messages]
    missing = None if _stand_in_order(said, squeezed) else _missing(said, squeezed)
    if missing is not None:
        known = messages[missing]["role"] in ROLES
        raise (IncompleteRendering if known else MalformedRowError)(
            f"the chat template drops text of message {missing + 1} ({messages[missing]['role']}): "
            f"{said[missing][-1].strip()[:60]!r} is missing in the rendered text. Take another data.template, "
            "or another role"
        )
    _check_thoughts(messages, answers, squeezed)
    _check_tools(messages, tools, template)


def _forms(message: Message) -> tuple[str, ...]:
    """Contents that a text may have of a message, the whole first: thoughts of an answer alone may be left out. A
    system message may spell `<think>` to say how to think."""
    content = str(message.get("content") or "")
    thinks = message["role"] == "assistant" or message["role"] not in ROLES
    return (content, without_thoughts(content)) if thinks and "</think>" in content else (content,)


def _stand_in_order(said: Sequence[tuple[str, ...]], text: str) -> bool:
    """Whether each content has a place behind the one before it, in a text without blanks."""
    for forms in said:
        place, size = _place(forms, text)
        if place < 0:
            return False
        text = text[place + size :]
    return True


def _missing(said: Sequence[tuple[str, ...]], text: str) -> int | None:
    """The number of a content without a place of its own, in any order; the longest first: "hi" is in "hi there"."""
    for number in sorted(range(len(said)), key=lambda number: -len(_squeezed(said[number][0]))):
        place, size = _place(said[number], text)
        if place < 0:
            return number
        text = f"{text[:place]}\0{text[place + size :]}" if size else text
    return None


def _check_thoughts(messages: Sequence[Message], answers: Sequence[int], squeezed: str) -> None:
    """The same of what was thought before answers, which a model would learn to give without a thought."""
    for number in answers:
        for thought in _thoughts(messages[number]):
            if _place((thought,), squeezed)[0] < 0:
                raise IncompleteRendering(
                    f"the chat template drops the thoughts of message {number + 1}: {thought.strip()[:60]!r} is "
                    "missing in the rendered text. Take data.thinking=drop, or a data.template that writes them"
                )


def _thoughts(message: Message) -> list[str]:
    """Beside an answer, under the name that counts; else those within its content."""
    named = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    content = str(message.get("content") or "")
    inside = _INSIDE.findall(content) or [content.rpartition("</think>")[0]]
    return [one for one in (named, *inside) if isinstance(one, str) and one.strip()]


def _check_tools(messages: Sequence[Message], tools: Any, template: ChatTemplate) -> None:
    """The same of calls, the names and values of their arguments at any depth included, and of the tools themselves. A
    tool may be called `get`, which stands in any text, so the conversation is rendered once more with signs in place
    of these words. What has no sign, as `true`, or none in this template, is lost where another word in its place
    changes nothing. At most _MOST_RENDERED + 3 renderings."""
    if not tools and not any(message.get("tool_calls") for message in messages):
        return

    def rendered(signs: _Signs) -> str:
        signed_tools = [signs.tool(tool) for tool in tools or ()]
        signed = [signs.message(number, message) for number, message in enumerate(messages, start=1)]
        return template.render(signed, signed_tools or None).text

    signs, text = _Signs(), ""
    with contextlib.suppress(DataError):  # a template that looks for an argument by its name finds none
        text = rendered(signs)
    kept = {word.index for word in signs.words if word.sign and word.sign in text}
    if not text or any(sign not in text for sign in (*signs.complaints, *signs.names)):
        signs = _Signs(signs_names=False)
        text = rendered(signs)
    lost = next((complaint for sign, complaint in signs.complaints.items() if sign not in text), None)
    if lost is None:
        lost = _lost_in([word for word in signs.words if word.index not in kept], signs, text, rendered)
    if lost is not None:
        raise IncompleteRendering(f"the chat template drops {lost}")


def _lost_in(words: "Sequence[_Word]", signs: "_Signs", text: str, rendered: "Callable[[_Signs], str]") -> str | None:
    """What a text says of the first of these words, which no sign shows in it, that may be another one. All are changed
    at once: where one stands alone behind a sign, and what is written there changes, it is no more in doubt. Others are
    changed one by one, the last first: a template that takes the first of a list drops those behind it."""
    if len(words) > 1:
        with contextlib.suppress(DataError):
            changed = rendered(_Signs(signs_names=signs.signs_names, changed={word.index for word in words}))
            before, behind = (_behind_signs(one) for one in (text, changed))
            places = [signs.behind(word, before) for word in words]
            alone = Counter(places)
            words = [
                word for word, place in zip(words, places, strict=True)
                if alone[place] > 1 or before.get(place) == behind.get(place)
            ]  # fmt: skip
    for word in list(reversed(words))[:_MOST_RENDERED]:
        with contextlib.suppress(DataError):
            if rendered(_Signs(signs_names=signs.signs_names, changed=(word.index,))) == text:
                return word.complaint
    return None


def _behind_signs(text: str) -> dict[str, str]:
    """Sign -> what stands between it and the next one, wherever it is."""
    parts = _ANY_SIGN.split(text)
    found: dict[str, str] = {}
    for sign, part in zip(parts[1::2], parts[2::2], strict=True):
        found[sign] = f"{found.get(sign, '')}\0{part}"
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    """An argument's name or value that may be changed by itself."""

    index: int
    sign: str
    """Of a name or a number; empty = it has none."""
    place: int
    """Signs that were given before it."""
    complaint: str


@final
class _Signs:
    """Words and numbers that no conversation has, and what it means that a rendered one lacks them."""

    def __init__(self, *, signs_names: bool = True, changed: Container[int] = ()) -> None:
        """`signs_names`: of arguments, too. `changed`: places in `words` of those that are others than elsewhere."""
        self.complaints: dict[str, str] = {}
        self.words: list[_Word] = []
        self.signs_names = signs_names
        self.names: list[str] = []
        """Signs of arguments' names."""
        self._given: list[str] = []
        self._changed = changed

    def _sign(self, complaint: str) -> str:
        sign = f"{_SIGN}n{len(self.complaints)}e"
        self.complaints[sign] = complaint
        self._given.append(sign)
        return sign

    def _word(self, sign: str, complaint: str) -> bool:
        """Whether the next word is changed."""
        index = len(self.words)
        self.words.append(_Word(index=index, sign=sign, place=len(self._given), complaint=complaint))
        self._given += filter(None, (sign,))
        return index in self._changed

    def behind(self, word: _Word, written: Container[str]) -> str:
        """The last sign before a word that is written; empty = none."""
        return next((sign for sign in reversed(self._given[: word.place]) if sign in written), "")

    def tool(self, tool: Any) -> Any:
        """A tool whose name is a sign."""
        complaint = (
            "the tool {name!r}: it is not in the rendered text; take a data.template that writes tools, or remove the "
            "column 'tools'"
        )
        return self._named(tool, complaint)

    def message(self, number: int, message: Message) -> Message:
        """A message whose calls have signs as their names, and as names and texts of their arguments."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list | tuple):
            return message
        complaint = (
            f"a tool call of message {number}: {{name!r}} is not in the rendered text; take a data.template that "
            "writes tool_calls"
        )
        return {**message, "tool_calls": [self._call(self._named(call, complaint), number) for call in calls]}

    def _named(self, entry: Any, complaint: str) -> Any:
        """{"function": {"name": ...}} or {"name": ...} with a sign as its name."""
        inner = entry.get("function", entry) if isinstance(entry, Mapping) else None
        if not isinstance(inner, Mapping) or "name" not in inner:
            return entry
        signed = {**inner, "name": self._sign(complaint.format(name=str(inner["name"])))}
        return {**entry, "function": signed} if "function" in entry else signed

    def _call(self, call: Any, number: int) -> Any:
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(inner, Mapping) or "arguments" not in inner:
            return call
        arguments, opened = inner["arguments"], None
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                opened = json.loads(arguments)
        signed = self._argument(arguments if opened is None else opened, number)
        function = {**inner, "arguments": signed if opened is None else json.dumps(signed)}
        return {**call, "function": function} if "function" in call else function

    def _argument(self, argument: Any, number: int) -> Any:
        """An argument with signs as its names, texts and numbers, at any depth."""
        if isinstance(argument, Mapping):
            return {self._name(str(name), number): self._argument(part, number) for name, part in argument.items()}
        if isinstance(argument, list | tuple):
            return [self._argument(part, number) for part in argument]
        complaint = _GIVEN.format(
            number=number, shown=repr(argument[:60]) if isinstance(argument, str) else json.dumps(argument)
        )
        if isinstance(argument, str):
            return self._sign(complaint)
        if argument is None:
            return _SIGN if self._word("", complaint) else None
        return self._value(argument, complaint)

    def _name(self, name: str, number: int) -> str:
        sign = f"{_SIGN}a{len(self.words)}e"
        self.names += [sign] * self.signs_names
        is_changed = self._word(sign if self.signs_names else "", _GIVEN.format(number=number, shown=repr(name[:60])))
        return f"{sign}z" if is_changed else sign if self.signs_names else name

    def _value(self, argument: float, complaint: str) -> float:
        """A number or boolean: another one, where it is changed."""
        if isinstance(argument, bool):
            return argument != self._word("", complaint)
        index = len(self.words)
        sign = _NUMBER + index + 500_000 * (index in self._changed)
        self._word(str(sign), complaint)
        return sign + 0.5 if isinstance(argument, float) else sign


def _place(forms: Sequence[str], squeezed: str) -> tuple[int, int]:
    """(where a content stands in a text without blanks, in the first of its forms that does, as it is or as JSON spells
    it; its length); -1 = nowhere."""
    spellings = [
        _squeezed(one)
        for content in forms
        for one in (content, *(json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
    ]
    return next(((place, len(one)) for one in spellings if (place := squeezed.find(one)) >= 0), (-1, 0))


def without_thoughts(content: str) -> str:
    """What is said behind `</think>`; a thought's begin may stand in the prompt."""
    return _THINKING.sub("", content).rpartition("</think>")[2]


def _squeezed(text: str) -> str:
    return "".join(text.split())

"""Completeness of a rendered conversation: does it contain all that its messages say, its tools and its tool calls?"""

import contextlib
import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from meshwright.data.chat.samples import Message
from meshwright.data.chat.template import THOUGHTS, ChatTemplate
from meshwright.spec.errors import DataError, MalformedRowError
from meshwright.spec.plan.plan import ROLES

_THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_INSIDE = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_SIGN: Final = f"mw{secrets.randbits(64):x}"
"""Prefix of stand-ins for names: letters and digits, which no filter of a template changes."""
_NUMBER: Final = (100_000_000 + secrets.randbelow(900_000_000)) * 10**6
"""Base of stand-ins for numbers, to which an index is added: 15 digits, which a float can hold."""
_ANY_SIGN: Final = re.compile(rf"({_SIGN}[an]\d+e|{_NUMBER // 10**6}\d{{6}})")
_MOST_RENDERED: Final = 8
"""Most words of a conversation that are changed one by one."""
_LOST_ARGUMENT: Final = (
    "what a tool call of message {number} is given: {shown} is not in the rendered text; take a data.template that "
    "writes arguments"
)


class IncompleteRendering(DataError):
    """A template that leaves out what a conversation says."""


def check_complete(
    messages: Sequence[Message], tools: Any, answers: Sequence[int], text: str, template: ChatTemplate
) -> None:
    """Raise DataError when a text omits what a message says, a tool, a tool call, or a thought of these `answers`.

    Thoughts of other turns are not part of what a model sees.
    """
    squeezed = _remove_blanks(text)
    contents = [_forms(message) for message in messages]
    missing = None if _follow_in_order(contents, squeezed) else _find_missing(contents, squeezed)
    if missing is not None:
        is_known_role = messages[missing]["role"] in ROLES
        raise (IncompleteRendering if is_known_role else MalformedRowError)(
            f"the chat template drops text of message {missing + 1} ({messages[missing]['role']}): "
            f"{contents[missing][-1].strip()[:60]!r} is missing in the rendered text. Take another data.template, "
            "or another role"
        )
    _check_thoughts(messages, answers, squeezed)
    _check_tools(messages, tools, template)


def _forms(message: Message) -> tuple[str, ...]:
    """Return the contents that a text may have of a message, the whole first. Thoughts of an answer may be left out.

    A system message may spell `<think>` to say how to think.
    """
    content = str(message.get("content") or "")
    thinks = message["role"] == "assistant" or message["role"] not in ROLES
    return (content, remove_thoughts(content)) if thinks and "</think>" in content else (content,)


def _follow_in_order(contents: Sequence[tuple[str, ...]], text: str) -> bool:
    """Return whether each content follows the previous one, in a text without blanks."""
    for forms in contents:
        start, length = _locate(forms, text)
        if start < 0:
            return False
        text = text[start + length :]
    return True


def _find_missing(contents: Sequence[tuple[str, ...]], text: str) -> int | None:
    """Return the number of a content that has no part of the text to itself, in any order, or None.

    The longest contents are looked up first: "hi" is in "hi there".
    """
    for number in sorted(range(len(contents)), key=lambda number: -len(_remove_blanks(contents[number][0]))):
        start, length = _locate(contents[number], text)
        if start < 0:
            return number
        text = f"{text[:start]}\0{text[start + length :]}" if length else text
    return None


def _check_thoughts(messages: Sequence[Message], answers: Sequence[int], squeezed: str) -> None:
    """Raise IncompleteRendering when a thought of an answer is missing: a model would learn to answer without one."""
    for number in answers:
        for thought in _list_thoughts(messages[number]):
            if _locate((thought,), squeezed)[0] < 0:
                raise IncompleteRendering(
                    f"the chat template drops the thoughts of message {number + 1}: {thought.strip()[:60]!r} is "
                    "missing in the rendered text. Take data.thinking=drop, or a data.template that writes them"
                )


def _list_thoughts(message: Message) -> list[str]:
    """Return the thoughts beside an answer, under the name that counts, or those within its content."""
    named = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    content = str(message.get("content") or "")
    inside = _INSIDE.findall(content) or [content.rpartition("</think>")[0]]
    return [thought for thought in (named, *inside) if isinstance(thought, str) and thought.strip()]


def _check_tools(messages: Sequence[Message], tools: Any, template: ChatTemplate) -> None:
    """Raise IncompleteRendering when a tool, a call, or a name or value of its arguments is missing, at any depth.

    A tool may be called `get`, which stands in any text. So the conversation is rendered once more with signs in place
    of these words. A word without a sign, such as `true`, is lost when another word in its place changes nothing. At
    most _MOST_RENDERED + 3 renderings.
    """
    if not tools and not any(message.get("tool_calls") for message in messages):
        return

    def render(signs: _Signs) -> str:
        signed_tools = [signs.tool(tool) for tool in tools or ()]
        signed = [signs.message(number, message) for number, message in enumerate(messages, start=1)]
        return template.render(signed, signed_tools or None).text

    signs, text = _Signs(), ""
    with contextlib.suppress(DataError):  # a template that looks for an argument by its name finds none
        text = render(signs)
    rendered_words = {word.index for word in signs.words if word.sign and word.sign in text}
    if not text or any(sign not in text for sign in (*signs.complaints, *signs.names)):
        signs = _Signs(signs_names=False)
        text = render(signs)
    lost = next((complaint for sign, complaint in signs.complaints.items() if sign not in text), None)
    if lost is None:
        lost = _find_lost([word for word in signs.words if word.index not in rendered_words], signs, text, render)
    if lost is not None:
        raise IncompleteRendering(f"the chat template drops {lost}")


def _find_lost(words: "Sequence[_Word]", signs: "_Signs", text: str, render: "Callable[[_Signs], str]") -> str | None:
    """Return the complaint about the first of these words that may be missing, or None.

    All words are changed at once. One that stands alone behind a sign is present when the text behind that sign
    changes. The others are changed one by one, the last first: a template that takes the first of a list drops those
    behind it.
    """
    if len(words) > 1:
        with contextlib.suppress(DataError):
            changed = render(_Signs(signs_names=signs.signs_names, changed={word.index for word in words}))
            before, behind = (_split_at_signs(version) for version in (text, changed))
            preceding = [signs.behind(word, before) for word in words]
            alone = Counter(preceding)
            words = [
                word for word, sign in zip(words, preceding, strict=True)
                if alone[sign] > 1 or before.get(sign) == behind.get(sign)
            ]  # fmt: skip
    for word in list(reversed(words))[:_MOST_RENDERED]:
        with contextlib.suppress(DataError):
            if render(_Signs(signs_names=signs.signs_names, changed=(word.index,))) == text:
                return word.complaint
    return None


def _split_at_signs(text: str) -> dict[str, str]:
    """Return {sign: text between it and the next sign}, joined over all its occurrences."""
    parts = _ANY_SIGN.split(text)
    between: dict[str, str] = {}
    for sign, part in zip(parts[1::2], parts[2::2], strict=True):
        between[sign] = f"{between.get(sign, '')}\0{part}"
    return between


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    """An argument's name or value that can be changed alone."""

    index: int
    sign: str
    """Sign of a name or a number. Empty = none."""
    signs_before: int
    """Number of signs assigned before it."""
    complaint: str


@final
class _Signs:
    """Signs in place of words and numbers, and the complaint for each that a rendered text lacks."""

    def __init__(self, *, signs_names: bool = True, changed: Container[int] = ()) -> None:
        """`signs_names`: names of arguments get signs too. `changed`: indices in `words` of those to change."""
        self.complaints: dict[str, str] = {}
        self.words: list[_Word] = []
        self.signs_names = signs_names
        self.names: list[str] = []
        """Signs of arguments' names."""
        self._assigned: list[str] = []
        self._changed = changed

    def _sign(self, complaint: str) -> str:
        sign = f"{_SIGN}n{len(self.complaints)}e"
        self.complaints[sign] = complaint
        self._assigned.append(sign)
        return sign

    def _word(self, sign: str, complaint: str) -> bool:
        """Record the next word and return whether it is changed."""
        index = len(self.words)
        self.words.append(_Word(index=index, sign=sign, signs_before=len(self._assigned), complaint=complaint))
        self._assigned += filter(None, (sign,))
        return index in self._changed

    def behind(self, word: _Word, written: Container[str]) -> str:
        """Return the last written sign before a word. Empty = none."""
        return next((sign for sign in reversed(self._assigned[: word.signs_before]) if sign in written), "")

    def tool(self, tool: Any) -> Any:
        """Return a tool whose name is a sign."""
        complaint = (
            "the tool {name!r}: it is not in the rendered text; take a data.template that writes tools, or remove the "
            "column 'tools'"
        )
        return self._sign_name(tool, complaint)

    def message(self, number: int, message: Message) -> Message:
        """Return a message whose calls have signs as names, and as names and texts of their arguments."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list | tuple):
            return message
        complaint = (
            f"a tool call of message {number}: {{name!r}} is not in the rendered text; take a data.template that "
            "writes tool_calls"
        )
        return {**message, "tool_calls": [self._sign_call(self._sign_name(call, complaint), number) for call in calls]}

    def _sign_name(self, entry: Any, complaint: str) -> Any:
        """Return {"function": {"name": ...}} or {"name": ...} with a sign as its name."""
        inner = entry.get("function", entry) if isinstance(entry, Mapping) else None
        if not isinstance(inner, Mapping) or "name" not in inner:
            return entry
        signed = {**inner, "name": self._sign(complaint.format(name=str(inner["name"])))}
        return {**entry, "function": signed} if "function" in entry else signed

    def _sign_call(self, call: Any, number: int) -> Any:
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(inner, Mapping) or "arguments" not in inner:
            return call
        arguments, opened = inner["arguments"], None
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                opened = json.loads(arguments)
        signed = self._sign_argument(arguments if opened is None else opened, number)
        function = {**inner, "arguments": signed if opened is None else json.dumps(signed)}
        return {**call, "function": function} if "function" in call else function

    def _sign_argument(self, argument: Any, number: int) -> Any:
        """Return an argument with signs as its names, texts and numbers, at any depth."""
        if isinstance(argument, Mapping):
            return {
                self._sign_argument_name(str(name), number): self._sign_argument(part, number)
                for name, part in argument.items()
            }
        if isinstance(argument, list | tuple):
            return [self._sign_argument(part, number) for part in argument]
        complaint = _LOST_ARGUMENT.format(
            number=number, shown=repr(argument[:60]) if isinstance(argument, str) else json.dumps(argument)
        )
        if isinstance(argument, str):
            return self._sign(complaint)
        if argument is None:
            return _SIGN if self._word("", complaint) else None
        return self._sign_number(argument, complaint)

    def _sign_argument_name(self, name: str, number: int) -> str:
        sign = f"{_SIGN}a{len(self.words)}e"
        self.names += [sign] * self.signs_names
        is_changed = self._word(
            sign if self.signs_names else "", _LOST_ARGUMENT.format(number=number, shown=repr(name[:60]))
        )
        return f"{sign}z" if is_changed else sign if self.signs_names else name

    def _sign_number(self, argument: float, complaint: str) -> float:
        """Return a sign for a number, or a boolean, negated where it is changed."""
        if isinstance(argument, bool):
            return argument != self._word("", complaint)
        index = len(self.words)
        sign = _NUMBER + index + 500_000 * (index in self._changed)
        self._word(str(sign), complaint)
        return sign + 0.5 if isinstance(argument, float) else sign


def _locate(forms: Sequence[str], squeezed: str) -> tuple[int, int]:
    """Return (start, length) of the first form of a content that stands in a text without blanks, or (-1, 0).

    A content may stand as it is or as JSON spells it.
    """
    spellings = [
        _remove_blanks(spelling)
        for content in forms
        for spelling in (content, *(json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
    ]
    return next(((start, len(spelling)) for spelling in spellings if (start := squeezed.find(spelling)) >= 0), (-1, 0))


def remove_thoughts(content: str) -> str:
    """Return the text behind `</think>`. The beginning of a thought may stand in the prompt."""
    return _THINKING.sub("", content).rpartition("</think>")[2]


def _remove_blanks(text: str) -> str:
    return "".join(text.split())

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
_MARKER: Final = f"mw{secrets.randbits(64):x}"
"""Prefix of stand-ins for names: letters and digits, which no filter of a template changes."""
_NUMBER: Final = (100_000_000 + secrets.randbelow(900_000_000)) * 10**6
"""Base of stand-ins for numbers, to which an index is added: 15 digits, which a float can hold."""
_ANY_MARKER: Final = re.compile(rf"({_MARKER}[an]\d+e|{_NUMBER // 10**6}\d{{6}})")
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

    The longest forms are looked up first: "hi" is in "hi there". An answer counts without thoughts that are left out.
    """
    for number in sorted(range(len(contents)), key=lambda number: -_locate(contents[number], text)[1]):
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
    """Return the thoughts given next to an answer, under the name that counts, or those within its content."""
    named = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    content = str(message.get("content") or "")
    inside = _INSIDE.findall(content) or [content.rpartition("</think>")[0]]
    return [thought for thought in (named, *inside) if isinstance(thought, str) and thought.strip()]


def _check_tools(messages: Sequence[Message], tools: Any, template: ChatTemplate) -> None:
    """Raise IncompleteRendering when a tool, a call, or a name or value of its arguments is missing, at any depth.

    A tool may be called `get`, which stands in any text. So the conversation is rendered once more with markers in
    place of these words. A word without a marker, such as `true`, is lost when another word in its place changes
    nothing. At most _MOST_RENDERED + 3 renderings.
    """
    if not tools and not any(message.get("tool_calls") for message in messages):
        return

    def render(markers: _Markers) -> str:
        marked_tools = [markers.tool(tool) for tool in tools or ()]
        marked = [markers.message(number, message) for number, message in enumerate(messages, start=1)]
        return template.render(marked, marked_tools or None).text

    markers, text = _Markers(), ""
    with contextlib.suppress(DataError):  # a template that looks for an argument by its name finds none
        text = render(markers)
    rendered_words = {word.index for word in markers.words if word.marker and word.marker in text}
    if not text or any(marker not in text for marker in (*markers.complaints, *markers.names)):
        markers = _Markers(marks_names=False)
        text = render(markers)
    lost = next((complaint for marker, complaint in markers.complaints.items() if marker not in text), None)
    if lost is None:
        lost = _find_lost([word for word in markers.words if word.index not in rendered_words], markers, text, render)
    if lost is not None:
        raise IncompleteRendering(f"the chat template drops {lost}")


def _find_lost(
    words: "Sequence[_Word]", markers: "_Markers", text: str, render: "Callable[[_Markers], str]"
) -> str | None:
    """Return the complaint about the first of these words that may be missing, or None.

    All words are changed at once. One that stands alone behind a marker is present when the text behind that marker
    changes. The others are changed one by one, the last first: a template that takes the first of a list drops those
    behind it.
    """
    if len(words) > 1:
        with contextlib.suppress(DataError):
            changed = render(_Markers(marks_names=markers.marks_names, changed={word.index for word in words}))
            before, behind = (_split_at_markers(version) for version in (text, changed))
            preceding = [markers.behind(word, before) for word in words]
            alone = Counter(preceding)
            words = [
                word for word, marker in zip(words, preceding, strict=True)
                if alone[marker] > 1 or before.get(marker) == behind.get(marker)
            ]  # fmt: skip
    for word in list(reversed(words))[:_MOST_RENDERED]:
        with contextlib.suppress(DataError):
            if render(_Markers(marks_names=markers.marks_names, changed=(word.index,))) == text:
                return word.complaint
    return None


def _split_at_markers(text: str) -> dict[str, str]:
    """Return {marker: text between it and the next marker}, joined over all its occurrences."""
    parts = _ANY_MARKER.split(text)
    between: dict[str, str] = {}
    for marker, part in zip(parts[1::2], parts[2::2], strict=True):
        between[marker] = f"{between.get(marker, '')}\0{part}"
    return between


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    """An argument's name or value that can be changed alone."""

    index: int
    marker: str
    """Marker of a name or a number. Empty = none."""
    markers_before: int
    """Number of markers assigned before it."""
    complaint: str


@final
class _Markers:
    """Markers in place of words and numbers, and the complaint for each that a rendered text lacks."""

    def __init__(self, *, marks_names: bool = True, changed: Container[int] = ()) -> None:
        """`marks_names`: names of arguments get markers too. `changed`: indices in `words` of those to change."""
        self.complaints: dict[str, str] = {}
        self.words: list[_Word] = []
        self.marks_names = marks_names
        self.names: list[str] = []
        """Markers of arguments' names."""
        self._assigned: list[str] = []
        self._changed = changed

    def _marker(self, complaint: str) -> str:
        marker = f"{_MARKER}n{len(self.complaints)}e"
        self.complaints[marker] = complaint
        self._assigned.append(marker)
        return marker

    def _word(self, marker: str, complaint: str) -> bool:
        """Record the next word and return whether it is changed."""
        index = len(self.words)
        self.words.append(_Word(index=index, marker=marker, markers_before=len(self._assigned), complaint=complaint))
        self._assigned += filter(None, (marker,))
        return index in self._changed

    def behind(self, word: _Word, written: Container[str]) -> str:
        """Return the last written marker before a word. Empty = none."""
        return next((marker for marker in reversed(self._assigned[: word.markers_before]) if marker in written), "")

    def tool(self, tool: Any) -> Any:
        """Return a tool whose name is a marker."""
        complaint = (
            "the tool {name!r}: it is not in the rendered text; take a data.template that writes tools, or remove the "
            "column 'tools'"
        )
        return self._mark_name(tool, complaint)

    def message(self, number: int, message: Message) -> Message:
        """Return a message whose calls have markers as names, and as names and texts of their arguments."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list | tuple):
            return message
        complaint = (
            f"a tool call of message {number}: {{name!r}} is not in the rendered text; take a data.template that "
            "writes tool_calls"
        )
        return {**message, "tool_calls": [self._mark_call(self._mark_name(call, complaint), number) for call in calls]}

    def _mark_name(self, entry: Any, complaint: str) -> Any:
        """Return {"function": {"name": ...}} or {"name": ...} with a marker as its name."""
        inner = entry.get("function", entry) if isinstance(entry, Mapping) else None
        if not isinstance(inner, Mapping) or "name" not in inner:
            return entry
        marked = {**inner, "name": self._marker(complaint.format(name=str(inner["name"])))}
        return {**entry, "function": marked} if "function" in entry else marked

    def _mark_call(self, call: Any, number: int) -> Any:
        """Return a call whose arguments are marked. A JSON string is parsed, and written as JSON again."""
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(inner, Mapping) or "arguments" not in inner:
            return call
        arguments, parsed = inner["arguments"], None
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                parsed = json.loads(arguments)
        marked = self._mark_argument(arguments if parsed is None else parsed, number)
        function = {**inner, "arguments": marked if parsed is None else json.dumps(marked)}
        return {**call, "function": function} if "function" in call else function

    def _mark_argument(self, argument: Any, number: int) -> Any:
        """Return an argument with markers as its names, texts and numbers, at any depth."""
        if isinstance(argument, Mapping):
            return {
                self._mark_argument_name(str(name), number): self._mark_argument(part, number)
                for name, part in argument.items()
            }
        if isinstance(argument, list | tuple):
            return [self._mark_argument(part, number) for part in argument]
        complaint = _LOST_ARGUMENT.format(
            number=number, shown=repr(argument[:60]) if isinstance(argument, str) else json.dumps(argument)
        )
        if isinstance(argument, str):
            return self._marker(complaint)
        if argument is None:
            return _MARKER if self._word("", complaint) else None
        return self._mark_number(argument, complaint)

    def _mark_argument_name(self, name: str, number: int) -> str:
        marker = f"{_MARKER}a{len(self.words)}e"
        self.names += [marker] * self.marks_names
        is_changed = self._word(
            marker if self.marks_names else "", _LOST_ARGUMENT.format(number=number, shown=repr(name[:60]))
        )
        return f"{marker}z" if is_changed else marker if self.marks_names else name

    def _mark_number(self, argument: float, complaint: str) -> float:
        """Return a marker for a number, or a boolean, negated where it is changed."""
        if isinstance(argument, bool):
            return argument != self._word("", complaint)
        index = len(self.words)
        marker = _NUMBER + index + 500_000 * (index in self._changed)
        self._word(str(marker), complaint)
        return marker + 0.5 if isinstance(argument, float) else marker


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

"""Calls of tools in an answer, in the words that the model's own chat template has for them.

A family is one way to write calls, with one declaration; the template's source says which it is. `read_answer` is a
pure function of the text so far. While an answer grows, what may be the beginning of a call is held back: what was
given once stays, and only more follows.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from meshwright.data.chat_template import ChatTemplate
from meshwright.serve.answer_text import begun, behind_thought
from meshwright.spec.errors import ArgumentError

_DECODER: Final = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class ToolReading:
    """An answer, taken apart."""

    content: str
    """What is no call; of the blanks around one only those that part two texts are left."""
    calls: tuple[ToolCall, ...]


Found = tuple[list[ToolCall], int] | None
"""Calls that begin at a place, none where it is written wrongly, and where they end; None = their end is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFamily:
    """One way to write calls."""

    name: str
    signs: tuple[str, ...]
    """Of the template's source: all of them are there."""
    openers: tuple[str, ...]
    """What calls begin with."""
    at: Callable[[str, int, bool], Found]
    """Reads calls of a text from behind an opener; whether the text has ended."""
    only_first: bool = False
    """Whether an opener counts at the beginning of an answer alone."""
    prefix: str = ""
    """Before a JSON object of name and arguments."""
    named_prefix: str = ""
    """Before the arguments alone, with {name}, where calls have their names outside of the JSON."""
    arguments: str = "arguments"
    """What the JSON object calls them."""


class _Unfinished(ValueError):
    """JSON whose end is not there yet."""


def _json(text: str, begin: int) -> tuple[Any, int]:
    """The JSON value at a place, behind blanks, and where it ends. ValueError: it is none; _Unfinished: it may become
    one."""
    begin = _behind_blanks(text, begin)
    try:
        return _DECODER.raw_decode(text, begin)
    except (json.JSONDecodeError, RecursionError) as error:
        if _is_open(text, begin):
            raise _Unfinished from error
        raise ValueError("no JSON") from error


def _is_open(text: str, begin: int) -> bool:
    """Whether brackets or quotes that begin at a place are open at the end of the text."""
    depth, position = 0, begin
    while position < len(text):
        letter = text[position]
        if letter == '"':
            position += 1
            while position < len(text) and text[position] != '"':
                position += 2 if text[position] == "\\" else 1
            if position >= len(text):
                return True
        depth += (letter in "{[") - (letter in "}]")
        if depth <= 0:
            return False
        position += 1
    return True


def _behind_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _call(value: Any, name: str | None = None) -> ToolCall | None:
    """Of a JSON value, with its name inside or given."""
    if not isinstance(value, dict):
        return None
    if name is None:
        name, value = value.get("name"), value.get("arguments", value.get("parameters"))
        value = {} if value is None else value  # a function without parameters
        if isinstance(value, str):  # as some models write them
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return None
    if not isinstance(name, str) or not name or not isinstance(value, dict):
        return None
    try:  # Python reads what is no JSON: NaN, numbers without end, half a surrogate pair; no client could
        arguments = json.dumps(value, ensure_ascii=False, allow_nan=False)
        (name + arguments).encode()
    except (ValueError, RecursionError):
        return None
    return ToolCall(name, arguments)


def json_call(text: str, name: str | None = None) -> ToolCall | None:
    """The call in a text that is one JSON object, with its name inside or given; None where it is none."""
    try:
        return _call(json.loads(text), name)
    except (ValueError, RecursionError):
        return None


def _tagged(closer: str) -> Callable[[str, int, bool], Found]:
    """A JSON object up to a closing tag."""

    def at(text: str, begin: int, ended: bool) -> Found:
        try:
            value, position = _json(text, begin)
        except _Unfinished:
            return None
        except ValueError:  # the tag was only said, as in a thought: a call may follow
            return [], begin
        call, position = _call(value), _behind_blanks(text, position)
        calls = [call] if call else []
        if text.startswith(closer, position):
            return calls, position + len(closer)
        if closer.startswith(text[position:]):
            return (calls, len(text)) if ended and calls else None
        return [], position

    return at


def _bare(text: str, begin: int, ended: bool) -> Found:
    """The whole answer: JSON objects, with semicolons between several."""
    position, calls = _behind_blanks(text, begin), list[ToolCall]()
    if position == len(text):
        return None
    while True:
        try:
            value, position = _json(text, position)
        except _Unfinished:
            return None
        except ValueError:
            return [], len(text)
        whole = isinstance(value, dict) and ("parameters" in value or "arguments" in value)
        call, position = _call(value) if whole else None, _behind_blanks(text, position)
        if call is None:
            return [], len(text)
        calls.append(call)
        if position == len(text):
            return (calls, position) if ended else None
        if text[position] not in ";,":
            return [], len(text)
        position += 1
        if not text[position:].strip():
            return (calls, len(text)) if ended else None


def _mistral(text: str, begin: int, ended: bool) -> Found:
    """A list of JSON objects, or a name and its arguments."""
    begin = _behind_blanks(text, begin)
    if begin == len(text):
        return None
    if text[begin] not in "[{":
        brace = text.find("{", begin)
        if brace < 0:
            return None
        name = text[begin:brace].removesuffix("[ARGS]").split("[CALL_ID]")[0].strip()
        return _one(text, brace, name)
    try:
        value, position = _json(text, begin)
    except _Unfinished:
        return None
    except ValueError:
        return [], len(text)
    calls = [_call(one) for one in (value if isinstance(value, list) else [value])]
    good = [one for one in calls if one is not None]
    return (good if len(good) == len(calls) else []), position


def _one(text: str, begin: int, name: str) -> Found:
    """Arguments of a call whose name is known."""
    try:
        value, position = _json(text, begin)
    except _Unfinished:
        return None
    except ValueError:
        return [], len(text)
    call = _call(value, name)
    return ([call] if call else []), position


_CALL, _SEPARATOR, _CALL_END, _CALLS_END = (
    f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)


def _deepseek(text: str, begin: int, ended: bool) -> Found:
    """Names and arguments between marks; the older form fences the JSON and says the kind before the name."""
    calls, position = list[ToolCall](), _behind_blanks(text, begin)
    while text.startswith(_CALL, position):
        brace, position = text.find("{", position), position + len(_CALL)
        if brace < 0:
            return None
        first, _, second = text[position:brace].partition(_SEPARATOR)
        found = _one(
            text, brace, (second.split("\n")[0].strip() or first.strip()) if _SEPARATOR in text[:brace] else ""
        )
        if found is None:
            return None
        if not found[0]:
            return [], len(text)
        calls += found[0]
        end = text.find(_CALL_END, found[1])
        if end < 0:
            return (calls, len(text)) if ended else None
        position = _behind_blanks(text, end + len(_CALL_END))
    if text.startswith(_CALLS_END, position):
        return calls, position + len(_CALLS_END)
    if ended or not (_CALL.startswith(text[position:]) or _CALLS_END.startswith(text[position:])):
        return calls, position
    return None


FAMILIES: Final = (
    ToolFamily(
        name="hermes", signs=("<tool_call>", '"arguments"'), openers=("<tool_call>",), at=_tagged("</tool_call>"),
        prefix="<tool_call>\n",
    ),
    ToolFamily(
        name="mistral-names", signs=("[TOOL_CALLS]", "[ARGS]"), openers=("[TOOL_CALLS]",), at=_mistral,
        named_prefix="[TOOL_CALLS]{name}[ARGS]",
    ),
    ToolFamily(
        name="mistral", signs=("[TOOL_CALLS]",), openers=("[TOOL_CALLS]",), at=_mistral, prefix="[TOOL_CALLS] [",
    ),
    ToolFamily(
        name="deepseek", signs=("<\uff5ctool\u2581calls\u2581begin\uff5c>", _SEPARATOR),
        openers=("<\uff5ctool\u2581calls\u2581begin\uff5c>",), at=_deepseek,
    ),
    ToolFamily(
        name="llama-json", signs=('"parameters"',), openers=("<|python_tag|>", "{"), at=_bare, only_first=True,
        arguments="parameters",
    ),
)  # fmt: skip
"""In order: the first whose signs a template has."""


def family_of(template: ChatTemplate) -> ToolFamily:
    """How a template writes calls. ArgumentError where it takes no tools, or writes calls in another way."""
    if not template.takes_tools:
        raise ArgumentError(
            "the model's chat template has no place for tools: leave tools out, or take a model whose "
            "template writes them"
        )
    for family in FAMILIES:
        if all(sign in template.with_tools.source for sign in family.signs):
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise ArgumentError(
        f"the model's chat template writes tool calls in an unknown way ({known} are known): leave tools out"
    )


def read_answer(family: ToolFamily, text: str, *, ended: bool = True, opened: str = "") -> ToolReading:
    """Content and calls of an answer, or while it grows (`ended` False) what of them is certain.

    A call that is cut off or written wrongly is content. So is one inside of a thought, as with vLLM's reasoning
    parsers: a model that weighs a call has not made it. `opened`: as `opened_thought` says of the prompt.
    """
    behind = behind_thought(text, opened)
    said = _read_said(family, text[behind:], ended=ended)
    return ToolReading(text[:behind] + said.content, said.calls)


def _read_said(family: ToolFamily, text: str, *, ended: bool) -> ToolReading:
    """The same of a text without a thought."""
    content, calls, after_call, position = "", list[ToolCall](), False, 0
    for begin, behind in _openings(family, text):
        if begin < position:
            continue
        piece = text[position:begin]
        content, position = content + (_behind_call(content, piece) if after_call else piece), begin
        after_call = after_call and not piece.strip()
        found = family.at(text, behind, ended)
        if found is None and not ended:
            return ToolReading(content.rstrip(), tuple(calls))
        good, position = found or ([], len(text))
        if good:
            content, after_call = content.rstrip(), True
        else:
            content += text[begin:position]
        calls += good
    piece = text[position:]
    content += _behind_call(content, piece) if after_call else piece
    return ToolReading(content if ended else _certain(family, content, text), tuple(calls))


def _behind_call(content: str, piece: str) -> str:
    """Text behind a call, whose blanks part it from the text before."""
    return piece if content and piece.strip() else piece.lstrip()


def _openings(family: ToolFamily, text: str) -> Iterator[tuple[int, int]]:
    """Where openers begin and end, in order."""
    if family.only_first:
        first = _behind_blanks(text, 0)
        opener = next((one for one in family.openers if text.startswith(one, first)), None)
        if opener is not None:
            yield first, first + (0 if opener == "{" else len(opener))
        return
    position = 0
    while (
        begin := min((at for at in (text.find(one, position) for one in family.openers) if at >= 0), default=-1)
    ) >= 0:
        opener = next(one for one in family.openers if text.startswith(one, begin))
        position = begin + len(opener)
        yield begin, position


def _certain(family: ToolFamily, content: str, text: str) -> str:
    """Without blanks at the end, which a call may follow, and without what may begin one."""
    if family.only_first:
        start = text.lstrip()
        return "" if any(one.startswith(start) for one in family.openers) else content.rstrip()
    held = max(begun(content, opener) for opener in family.openers)
    return content[: len(content) - held].rstrip()

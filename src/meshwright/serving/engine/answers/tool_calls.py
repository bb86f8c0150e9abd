"""Text of answers: cut at stop strings, with thoughts and tool calls told apart from the rest.

Tool calls are read from an answer in the notation of the model's own chat template, or forced by a schema. A family is
one notation of calls, with one declaration; the template's source shows which it is. `read_answer` is a pure function
of the text so far. While an answer grows, a possible beginning of a call or of a stop string is held back: what was
returned once stays, and only more follows.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from meshwright.data.chat.template import ChatTemplate
from meshwright.data.tokens.text_stream import TextStream
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.spec.errors import ArgumentError

THOUGHTS: Final = {"<think>": "</think>", "[THINK]": "[/THINK]"}
"""Marks around a thought: of Qwen, DeepSeek and others; of Mistral."""


@final
class AnswerText:
    """Converter of tokens into text that is certain: whole characters, and no beginning of a stop string."""

    __slots__ = ("_held", "_hidden", "_stops", "_stream", "stopped")

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int], stops: Sequence[str],
        tokenizer: Tokenizer | None = None, hidden: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """Start the text.

        Args:
            decode: Token ids -> text.
            tokenizer: The tokenizer behind `decode`, which makes it fast.
            hidden: Tokens to leave out.
        """
        self._stream, self._stops = TextStream(decode, prompt_ids, tokenizer and tokenizer.texts), stops
        self._held, self._hidden = "", hidden
        self.stopped = False
        """True once a stop string came. No more text follows."""

    def push(self, token: int) -> str:
        """Return the text that becomes certain with a token."""
        if token in self._hidden:
            return ""
        piece = self._stream.push(token)
        return self._read(piece) if self._stops else piece

    def finish(self) -> str:
        """Return what was held back, once no token follows."""
        if self.stopped:
            return ""
        piece = self._read(self._stream.rest())
        held, self._held = self._held, ""
        return piece + held

    def _read(self, piece: str) -> str:
        text, stops = self._held + piece, self._stops
        start = min((position for position in map(text.find, stops) if position >= 0), default=-1)
        if start >= 0:
            self._held, self.stopped = "", True
            return text[:start]
        held_back = max((partial_length(text, stop) for stop in stops), default=0)
        sure = len(text) - held_back
        self._held = text[sure:]
        return text[:sure]


def find_open_thought(prompt: str) -> str:
    """Return the mark of a thought that a prompt leaves open, as DeepSeek-R1 and QwQ do. Empty = none."""
    return next((opener for opener in THOUGHTS if prompt.rstrip().endswith(opener)), "")


def behind_thought(text: str, opened: str = "") -> int:
    """Return where an answer continues behind its first thought: at its end if the thought has no end.

    `opened` is what `find_open_thought` returns for the prompt.
    """
    start = text.lstrip()
    opener = opened or next((mark for mark in THOUGHTS if start.startswith(mark)), "")
    if not opener:
        return 0
    end = text.find(THOUGHTS[opener])
    return len(text) if end < 0 else end + len(THOUGHTS[opener])


def partial_length(text: str, stop: str) -> int:
    """Return how many letters at the end of a text begin a stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


_DECODER: Final = json.JSONDecoder()
MOST_TOOLS: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants to call."""

    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class ToolReading:
    """An answer split into content and calls."""

    content: str
    """Text outside calls. Of the blanks around a call only those between two texts remain."""
    calls: tuple[ToolCall, ...]


ReadCalls = tuple[list[ToolCall], int] | None
"""Calls that begin at a position (none if malformed), and their end. None = the end has not come yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFamily:
    """One notation of calls."""

    name: str
    signs: tuple[str, ...]
    """Strings that the template's source contains, all of them."""
    openers: tuple[str, ...]
    """Strings that calls begin with."""
    at: Callable[[str, int, bool], ReadCalls]
    """Read calls after an opener: (text, position, whether the text has ended). May raise as `_json` does."""
    only_first: bool = False
    """True when an opener counts only at the beginning of an answer."""
    prefix: str = ""
    """Text before a JSON object of name and arguments."""
    named_prefix: str = ""
    """Text with {name} before the arguments alone, if names stand outside the JSON."""
    arguments: str = "arguments"
    """Key of the arguments in the JSON object."""


class _Unfinished(ValueError):
    """JSON whose end has not come yet."""


def _json(text: str, begin: int) -> tuple[Any, int]:
    """Return the JSON value at a position, after blanks, and its end.

    Raises ValueError if there is none, _Unfinished if it may become one.
    """
    begin = _behind_blanks(text, begin)
    try:
        return _DECODER.raw_decode(text, begin)
    except (json.JSONDecodeError, RecursionError) as error:
        if _is_open(text, begin):
            raise _Unfinished from error
        raise ValueError("no JSON") from error


def _is_open(text: str, begin: int) -> bool:
    """Return whether brackets or quotes that begin at a position are open at the end of the text."""
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


def _call(content: Any, name: str | None = None) -> ToolCall | None:
    """Return the call of a JSON value, with its name inside or given."""
    if not isinstance(content, dict):
        return None
    if name is None:
        name, content = content.get("name"), content.get("arguments", content.get("parameters"))
        content = {} if content is None else content  # a function without parameters
        if isinstance(content, str):  # some models write JSON in a string
            try:
                content = json.loads(content)
            except (ValueError, RecursionError):
                return None
    if not isinstance(name, str) or not name or not isinstance(content, dict):
        return None
    try:  # Python also reads invalid JSON, which no client could: NaN, infinity, half a surrogate pair
        arguments = json.dumps(content, ensure_ascii=False, allow_nan=False)
        (name + arguments).encode()
    except (ValueError, RecursionError):
        return None
    return ToolCall(name, arguments)


def json_call(text: str, name: str | None = None) -> ToolCall | None:
    """Return the call in a text that is one JSON object, with its name inside or given. None = it is no call."""
    try:
        return _call(json.loads(text), name)
    except (ValueError, RecursionError):
        return None


def _tagged_reader(closer: str) -> Callable[[str, int, bool], ReadCalls]:
    """Return a reader of a JSON object up to a closing tag."""

    def at(text: str, begin: int, ended: bool) -> ReadCalls:
        try:
            document, position = _json(text, begin)
        except _Unfinished:
            raise
        except ValueError:  # the tag was only mentioned, as in a thought: a call may follow
            return [], begin
        call, position = _call(document), _behind_blanks(text, position)
        calls = [call] if call else []
        if text.startswith(closer, position):
            return calls, position + len(closer)
        if closer.startswith(text[position:]):
            return (calls, len(text)) if ended and calls else None
        return [], position

    return at


def _bare(text: str, begin: int, ended: bool) -> ReadCalls:
    """Read a whole answer of JSON objects, separated by semicolons."""
    position, calls = _behind_blanks(text, begin), list[ToolCall]()
    if position == len(text):
        return None
    while True:
        document, position = _json(text, position)
        whole = isinstance(document, dict) and ("parameters" in document or "arguments" in document)
        call, position = _call(document) if whole else None, _behind_blanks(text, position)
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


def _mistral(text: str, begin: int, ended: bool) -> ReadCalls:
    """Read a list of JSON objects, or a name and its arguments."""
    begin = _behind_blanks(text, begin)
    if begin == len(text):
        return None
    if text[begin] not in "[{":
        brace = text.find("{", begin)
        if brace < 0:
            return None
        name = text[begin:brace].removesuffix("[ARGS]").split("[CALL_ID]")[0].strip()
        return _read_named_call(text, brace, name)
    document, position = _json(text, begin)
    calls = [_call(entry) for entry in (document if isinstance(document, list) else [document])]
    valid = [entry for entry in calls if entry is not None]
    return (valid if len(valid) == len(calls) else []), position


def _read_named_call(text: str, begin: int, name: str) -> tuple[list[ToolCall], int]:
    document, position = _json(text, begin)
    call = _call(document, name)
    return ([call] if call else []), position


_CALL, _SEPARATOR, _CALL_END, _CALLS_END = (
    f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)


def _deepseek(text: str, begin: int, ended: bool) -> ReadCalls:
    """Read names and arguments between marks. The older form fences the JSON and has the kind before the name."""
    calls, position = list[ToolCall](), _behind_blanks(text, begin)
    while text.startswith(_CALL, position):
        brace, position = text.find("{", position), position + len(_CALL)
        if brace < 0:
            return None
        first, _, second = text[position:brace].partition(_SEPARATOR)
        read, behind = _read_named_call(
            text, brace, (second.split("\n")[0].strip() or first.strip()) if _SEPARATOR in text[:brace] else ""
        )
        if not read:
            return [], len(text)
        calls += read
        end = text.find(_CALL_END, behind)
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
        name="hermes", signs=("<tool_call>", '"arguments"'), openers=("<tool_call>",),
        at=_tagged_reader("</tool_call>"), prefix="<tool_call>\n",
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
"""The first family whose signs a template contains is taken."""


def family_of(template: ChatTemplate) -> ToolFamily:
    """Return a template's notation of calls. Raises ArgumentError if it takes no tools, or has an unknown notation."""
    if not template.takes_tools:
        raise ArgumentError(
            "tools",
            sentence=(
                "the model's chat template has no place for tools: leave tools out, or take a model whose "
                "template writes them"
            ),
        )
    for family in FAMILIES:
        if all(sign in template.with_tools.source for sign in family.signs):
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise ArgumentError(
        "tools",
        sentence=f"the model's chat template writes tool calls in an unknown way ({known} are known): leave tools out",
    )


def read_answer(family: ToolFamily, text: str, *, ended: bool = True, opened: str = "") -> ToolReading:
    """Return content and calls of an answer, or of a growing one (`ended` False) what is certain.

    A call that is cut off or malformed is content. So is one inside a thought, as with vLLM's reasoning parsers: a
    model that considers a call has not made it. `opened` is what `find_open_thought` returns for the prompt.
    """
    behind = behind_thought(text, opened)
    reading = _read_calls(family, text[behind:], ended=ended)
    return ToolReading(text[:behind] + reading.content, reading.calls)


def _read_calls(family: ToolFamily, text: str, *, ended: bool) -> ToolReading:
    """Return content and calls of a text without a thought."""
    content, calls, after_call, position = "", list[ToolCall](), False, 0
    for begin, behind in _find_openers(family, text):
        if begin < position:
            continue
        piece = text[position:begin]
        content, position = content + (_behind_call(content, piece) if after_call else piece), begin
        after_call = after_call and not piece.strip()
        try:
            reading = family.at(text, behind, ended)
        except ValueError as error:
            reading = None if isinstance(error, _Unfinished) else ([], len(text))
        if reading is None and not ended:
            return ToolReading(content.rstrip(), tuple(calls))
        valid, position = reading or ([], len(text))
        if valid:
            content, after_call = content.rstrip(), True
        else:
            content += text[begin:position]
        calls += valid
    piece = text[position:]
    content += _behind_call(content, piece) if after_call else piece
    return ToolReading(content if ended else _certain(family, content, text), tuple(calls))


def _behind_call(content: str, piece: str) -> str:
    """Return the text behind a call, whose blanks separate it from the text before."""
    return piece if content and piece.strip() else piece.lstrip()


def _find_openers(family: ToolFamily, text: str) -> Iterator[tuple[int, int]]:
    if family.only_first:
        first = _behind_blanks(text, 0)
        opener = next((opener_text for opener_text in family.openers if text.startswith(opener_text, first)), None)
        if opener is not None:
            yield first, first + (0 if opener == "{" else len(opener))
        return
    position = 0
    while (
        begin := min(
            (index for index in (text.find(opener_text, position) for opener_text in family.openers) if index >= 0),
            default=-1,
        )
    ) >= 0:
        opener = next(opener_text for opener_text in family.openers if text.startswith(opener_text, begin))
        position = begin + len(opener)
        yield begin, position


def _certain(family: ToolFamily, content: str, text: str) -> str:
    """Return the content without trailing blanks, which a call may follow, and without what may begin one."""
    if family.only_first:
        start = text.lstrip()
        return "" if any(opener.startswith(start) for opener in family.openers) else content.rstrip()
    held = max(partial_length(content, opener) for opener in family.openers)
    return content[: len(content) - held].rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedCall:
    """Prompt and schema of an answer that is a call of a tool."""

    prefix: str
    """Continuation of the prompt: the beginning of a call in the model's own notation."""
    json_schema: Mapping[str, Any]
    """Schema of the answer itself, as `RequestOptions` takes it."""
    name: str = ""
    """Name of the tool, if the answer contains only its arguments."""

    def read(self, text: str) -> ToolCall | None:
        """Return the call of a whole answer. None = it was cut off."""
        return json_call(text, self.name or None)


def force_call(family: ToolFamily, tools: Sequence[Mapping[str, Any]], name: str | None = None) -> ForcedCall:
    """Return prompt and schema for a call of the tool with this name, or of any tool.

    `tools` as in the chat API: {"type": "function", "function": {"name": ..., "parameters": a JSON schema}}. Raises
    ArgumentError for malformed tools or an unknown name.
    """
    schemas = tool_schemas(tools)
    if name is not None:
        if name not in schemas:
            raise ArgumentError(
                "tool_choice",
                name,
                sentence=f"tool_choice names {name!r}, and the tools are {', '.join(schemas)}: name one of them",
            )
        schemas = {name: schemas[name]}
    if len(schemas) == 1 and family.named_prefix:
        ((only, schema),) = schemas.items()
        return ForcedCall(prefix=family.named_prefix.format(name=only), json_schema=schema, name=only)
    call_schemas = [_call_schema(family.arguments, name_of_tool, index) for index, name_of_tool in enumerate(schemas)]
    definitions = {f"tool{index}": _within(f"tool{index}", schema) for index, schema in enumerate(schemas.values())}
    return ForcedCall(prefix=family.prefix, json_schema={"$defs": definitions, "anyOf": call_schemas})


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the schema of each tool's arguments by its name. Raises ArgumentError."""
    if not 1 <= len(tools) <= MOST_TOOLS:
        raise ArgumentError("tools", sentence=f"tools has {len(tools)} entries: give 1 to {MOST_TOOLS}")
    schemas: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping):
            raise ArgumentError(
                "tools", sentence=f'tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}'
            )
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ArgumentError(
                "tools", sentence=f"tools[{index}] has the name {name!r}: give up to 64 of letters, digits, _ . and -"
            )
        if name in schemas:
            raise ArgumentError("tools", sentence=f"tools has {name!r} twice: give each tool a name of its own")
        if schema is not None and not isinstance(schema, Mapping):
            raise ArgumentError(
                "tools", sentence=f"tools[{index}] has parameters that are no JSON schema: give an object"
            )
        schemas[name] = schema or {"type": "object"}
    return schemas


def _call_schema(arguments: str, name: str, index: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, arguments: {"$ref": f"#/$defs/tool{index}"}},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _within(name: str, schema: Any) -> Any:
    """Return a root schema as a definition, with its references to itself moved."""
    if isinstance(schema, list):
        return [_within(name, entry) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _within(name, child) for key, child in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#/$defs/{name}{reference[1:]}"
    return moved

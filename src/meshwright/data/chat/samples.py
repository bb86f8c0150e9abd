"""Samples: the form of a fine-tuning row, recognized by its columns.

text                          a document
prompt + completion           strings, or lists of messages
messages [+ tools]            a conversation
prompt + chosen + rejected    a preference; strings or lists of messages, the prompt may be inside of both
input_ids [+ labels]          token ids
instruction [+ input] + output [+ system]     the alpaca columns
conversations [+ system, tools]               the sharegpt columns

Each form of text takes `cut_off: true` in addition to these: its last answer stops at a limit, before it ends.

Tool calls get the form that templates of today read: their newer names, and no padding nulls. `function_call` turns of
sharegpt files hold JSON (LLaMA-Factory, `data/formatter.py`). OpenAI's `function_call` of a message, since replaced by
`tool_calls`, holds one call, which the role `function` answers.

A table gives each object the fields of all others, as nulls. Parquet has them, and .jsonl files that the datasets
library wrote. A template would write them into tools and calls, and a model would learn to name arguments that a tool
does not have. TRL, `trl/data_utils.py`, `remove_none_values`, removes all of them. Here one stays if the tool's schema
takes null.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from meshwright.data.text.rows import Malformed, Row, readable_location
from meshwright.spec.errors import DataError

CALL = "function_call"
CUT_OFF = "cut_off"
"""Column of rows whose last answer stops at a limit, so that no end is trained behind it."""
THOUGHT = re.compile(r"\s*(<think>.*?</think>)\s*", re.DOTALL)
_AS_IT_IS = ("arguments", "enum")
"""Fields of messages and tools in which a null has a meaning."""


def read_calls(text: Any, what: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the thought in front of the calls of a turn, and its `tool_calls`: JSON of one call or of a list.

    LLaMA-Factory cuts a thought off before it reads the calls. Raises DataError, which begins with `what`, for
    anything else.
    """
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        thought = THOUGHT.match(text)
        read = json.loads(text[thought.end() :] if thought else text)
        calls = read if isinstance(read, list) else [read]
        if calls and all(isinstance(call, Mapping) and {"name", "arguments"} <= call.keys() for call in calls):
            tool_calls = [{"type": "function", "function": call} for call in calls]
            return thought[1] if thought else "", tool_calls
    raise DataError(
        f"{what} is a {CALL!r}, but its value is not JSON with 'name' and 'arguments': correct it, or use from='gpt' "
        "for plain text"
    )


def replace_function_calls(turns: Iterable[Any]) -> list[Any]:
    """Return turns with `tool_calls` in place of each `function_call`, and the role `tool` for its answer."""
    turns = list(turns)
    if not any(isinstance(turn, Mapping) and turn.get(CALL) is not None for turn in turns):
        return turns
    return [_replace_function_call(turn) if isinstance(turn, Mapping) else turn for turn in turns]


def _replace_function_call(turn: Mapping[str, Any]) -> dict[str, Any]:
    others = {name: value for name, value in turn.items() if name != CALL}
    if others.get("role") == "function":
        others["role"] = "tool"
    if turn.get(CALL) is not None and not others.get("tool_calls"):
        others["tool_calls"] = [{"type": "function", "function": turn[CALL]}]
    return others


def remove_nulls(value: Any) -> Any:
    """Return a value without null fields at any depth. Arguments of a call and choices of an enum are unchanged."""
    if isinstance(value, Mapping):
        present = {name: part for name, part in value.items() if part is not None}
        return {name: part if name in _AS_IT_IS else remove_nulls(part) for name, part in present.items()}
    return [remove_nulls(part) for part in value] if isinstance(value, list) else value


def remove_null_arguments(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
) -> tuple[Mapping[str, Any], ...]:
    """Return messages whose calls have no null arguments, except where the called tool takes null."""
    nullable = {name: set(_nullable(function)) for name, function in _functions(tools or ())}
    return tuple(_remove_from_message(message, nullable) for message in messages)


def _functions(entries: Iterable[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (name, function) of tools in the form {"function": {"name": ...}} or {"name": ...}."""
    for entry in entries:
        inner = entry.get("function", entry)
        if isinstance(inner, Mapping) and "name" in inner:
            yield str(inner["name"]), inner


def _nullable(function: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments whose JSON schema takes null."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    for name, schema in (properties if isinstance(properties, Mapping) else {}).items():
        if isinstance(schema, Mapping):
            kinds = [schema, *(option for key in ("anyOf", "oneOf") for option in schema.get(key) or ())]
            types = [kind.get("type") for kind in kinds if isinstance(kind, Mapping)]
            if schema.get("nullable") or any("null" in (kind if isinstance(kind, list) else [kind]) for kind in types):
                yield name


def _remove_from_message(message: Mapping[str, Any], nullable: Mapping[str, set[str]]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    return (
        {**message, "tool_calls": [_remove_from_call(call, nullable) for call in calls]}
        if isinstance(calls, list)
        else message
    )


def _remove_from_call(call: Any, nullable: Mapping[str, set[str]]) -> Any:
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    padded = inner.get("arguments") if isinstance(inner, Mapping) else None
    if not isinstance(padded, Mapping) or not isinstance(inner, Mapping):
        return call
    takes = nullable.get(str(inner.get("name")), set())
    arguments = {name: remove_nulls(part) for name, part in padded.items() if part is not None or name in takes}
    function = {**inner, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


Message = Mapping[str, Any]
"""A turn: `role`, `content` and other fields of the template (`tool_calls`, `name`, `reasoning_content`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns for a template."""

    messages: tuple[Message, ...]
    prompt: int = 0
    """Number of turns at the beginning that form a prompt, which is never trained. 0 = unknown."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    is_cut: bool = False
    """The last answer stops at a limit, before it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A prompt and its completion, as plain text."""

    prompt: str
    """Empty = the whole text is trained."""
    completion: str
    is_cut: bool = False
    """The completion stops at a limit, before it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """Tokens encoded elsewhere."""

    ids: tuple[int, ...]
    labels: tuple[int, ...] | None
    """Labels as in transformers: the token itself, or -100 = not trained. None = all are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers to one prompt. The first is better."""

    chosen: Conversation | Continuation
    rejected: Conversation | Continuation


Sample = Conversation | Continuation | TokenIds | Preference

_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "bard": "assistant"}
_ROLES |= {CALL: "assistant", "observation": "tool", "function_response": "tool"}
_ROLES |= {role: role for role in ("system", "user", "assistant", "tool")}
"""Roles of sharegpt files."""


def sample(row: Row) -> Sample:
    """Return the sample of a row. Raises DataError with location and reason."""
    where, fields = row
    if isinstance(fields, Malformed):
        raise DataError(fields.complaint)
    present = {name: field for name, field in fields.items() if field is not None}
    for needed, optional, make in _FORMS:
        if needed <= present.keys():
            parsed = make(present, readable_location(where))
            if CUT_OFF not in optional or not isinstance(parsed, Conversation | Continuation):
                return parsed
            return replace(parsed, is_cut=_is_cut(present, readable_location(where)))
    forms = "; ".join(" + ".join(sorted(needed)) for needed, _, _ in _FORMS)
    raise DataError(f"{readable_location(where)}: the columns ({_columns(fields) or 'no fields'}) are none of: {forms}")


def _is_cut(row: Mapping[str, Any], where: str) -> bool:
    flag = row.get(CUT_OFF, False)
    if flag not in (True, False):
        raise DataError(f"{where}: {CUT_OFF!r} is {flag!r}: write true for an answer that stops at a limit, else false")
    return bool(flag)


def is_sample(row: Row) -> bool:
    """Return whether a row can be read as a sample."""
    try:
        sample(row)
    except DataError:
        return False
    return True


def _columns(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} (null)" if value is None else str(name) for name, value in fields.items())


def find_unread_columns(fields: Mapping[str, Any]) -> set[str]:
    """Return the non-empty columns of a row that its sample does not use."""
    present = {name for name, value in fields.items() if value is not None}
    used = next((needed | optional for needed, optional, _ in _FORMS if needed <= present), present)
    return {str(name) for name in present - used}


def _preference(row: Mapping[str, Any], where: str) -> Preference:
    """Read a preference. Its prompt is a column, the common beginning of both answers, or both."""
    chosen, rejected = (_part(row[name], name, where) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{where}: 'chosen' and 'rejected' must both be strings or both be lists of messages")
    common = chosen[: _count_common(chosen, rejected)]
    prompt = _part(row["prompt"], "prompt", where) if "prompt" in row else None
    if prompt is None and not common:
        raise DataError(
            f"{where}: 'chosen' and 'rejected' have different prompts: give the prompt as a column 'prompt'"
        )
    if prompt is None or _repeats_prompt(prompt, common):
        prompt = common if prompt is None or isinstance(prompt, str) else prompt
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return Preference(
        chosen=_answer(prompt, chosen, row, where, "chosen"),
        rejected=_answer(prompt, rejected, row, where, "rejected"),
    )


def _repeats_prompt(prompt: str | tuple[Message, ...], common: str | tuple[Message, ...]) -> bool:
    """Return whether the common messages of both answers repeat the prompt, as messages or as the text of one."""
    if isinstance(common, str):
        return False
    if isinstance(prompt, str):
        return any(message.get("content") == prompt for message in common)
    return bool(prompt) and common[: len(prompt)] == prompt


def _count_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the common turns, except the last, or the common characters, without a space at the end."""
    size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    if not isinstance(first, str):
        return min(size, max(0, min(len(first), len(second)) - 1))
    return size - 1 if size > 0 and first[size - 1] == " " else size


def _prompt_completion(row: Mapping[str, Any], where: str) -> Conversation | Continuation:
    prompt, completion = (_part(row[name], name, where) for name in ("prompt", "completion"))
    return _answer(prompt, completion, row, where, "completion")


def _answer(
    prompt: str | tuple[Message, ...],
    answer: str | tuple[Message, ...],
    row: Mapping[str, Any],
    where: str,
    name: str,
) -> Conversation | Continuation:
    if isinstance(prompt, str) and isinstance(answer, str):
        if not answer:
            raise DataError(f"{where}: {name!r} is empty, so nothing can be trained: remove the row")
        return Continuation(prompt=prompt, completion=answer)
    if isinstance(prompt, str) or isinstance(answer, str):
        raise DataError(f"{where}: 'prompt' and {name!r} must both be strings or both be lists of messages")
    if not answer:
        raise DataError(f"{where}: {name!r} has no message, so nothing can be trained: remove the row")
    return _with_tools(prompt + answer, row, where, len(prompt))


def _part(value: Any, name: str, where: str) -> str | tuple[Message, ...]:
    return value if isinstance(value, str) else _turns(value, name, where)


def _conversation(row: Mapping[str, Any], where: str) -> Conversation:
    messages = _require_messages(_turns(row["messages"], "messages", where), where)
    return _with_tools(messages, row, where)


def _with_tools(messages: tuple[Message, ...], row: Mapping[str, Any], where: str, prompt: int = 0) -> Conversation:
    """Return a conversation and its tools without the nulls that a table adds."""
    tools = _tools(row, where)
    return Conversation(messages=remove_null_arguments(messages, tools), prompt=prompt, tools=tools)


def _sharegpt(row: Mapping[str, Any], where: str) -> Conversation:
    turns = row["conversations"]
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise DataError(f"{where}: 'conversations' is not a list of turns")
    named = [_rename_turn(turn, where, number) for number, turn in enumerate(turns, start=1)]
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    messages = _turns(system + named, "conversations", where)
    return _with_tools(_require_messages(messages, where), row, where)


def _rename_turn(turn: Any, where: str, number: int) -> Message:
    """Return a sharegpt turn (`from`, `value`) in the usual form. Turns in that form are unchanged."""
    if not isinstance(turn, Mapping):
        raise DataError(f"{where}: turn {number} of 'conversations' is {type(turn).__name__}, not an object")
    if "from" not in turn:
        return turn
    role = _ROLES.get(str(turn["from"]))
    if role is None:
        raise DataError(
            f"{where}: turn {number} of 'conversations' is from {turn['from']!r}: known are {', '.join(_ROLES)}"
        )
    others = {name: field for name, field in turn.items() if name not in ("from", "value")}
    if turn["from"] == CALL:
        thought, calls = read_calls(turn.get("value"), f"{where}: turn {number} of 'conversations'")
        return {**others, "role": role, **({"content": thought} if thought else {}), "tool_calls": calls}
    return {**others, "role": role, "content": turn.get("value")}


def _alpaca(row: Mapping[str, Any], where: str) -> Conversation:
    """Read the alpaca columns. An empty line separates the input from its instruction."""
    asked = "\n\n".join(_text(row, name, where) for name in ("instruction", "input") if row.get(name))
    system = ({"role": "system", "content": _text(row, "system", where)},) if row.get("system") else ()
    messages = (
        *system,
        {"role": "user", "content": asked},
        {"role": "assistant", "content": _text(row, "output", where)},
    )
    return Conversation(messages=messages, prompt=len(messages) - 1)


def _token_ids(row: Mapping[str, Any], where: str) -> TokenIds:
    ids, labels = (
        None if row.get(name) is None else _integers(row[name], name, where) for name in ("input_ids", "labels")
    )
    assert ids is not None, "this form is chosen by its column"
    if labels is not None and len(labels) != len(ids):
        raise DataError(
            f"{where}: there are {len(ids)} input_ids and {len(labels)} labels: give one label for each token"
        )
    for index, (token, label) in enumerate(zip(ids, labels or (), strict=False)):
        if label not in (token, -100):
            raise DataError(
                f"{where}: label {index} is {label}, and its token is {token}: give the token itself, or -100. "
                "Labels are not shifted"
            )
    return TokenIds(ids=ids, labels=labels)


def _integers(value: Any, name: str, where: str) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(type(number) is int for number in value):
        raise DataError(f"{where}: {name!r} is not a list of integers")
    if not value:
        raise DataError(f"{where}: {name!r} is empty")
    return tuple(value)


def _plain_text(row: Mapping[str, Any], where: str) -> Continuation:
    return Continuation(prompt="", completion=_text(row, "text", where))


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(row[name], str):
        raise DataError(f"{where}: {name!r} is {type(row[name]).__name__}, not text")
    return str(row[name])


def _tools(row: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...] | None:
    """Read tools, given as a list or as its JSON text."""
    tools = row.get("tools")
    if not isinstance(tools, str):
        tools = remove_nulls(tools)
    else:
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise DataError(f"{where}: 'tools' is broken JSON, {error}") from None
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"{where}: 'tools' is not a list of objects")
    return tuple(tools)


def _require_messages(messages: tuple[Message, ...], where: str) -> tuple[Message, ...]:
    if not messages:
        raise DataError(f"{where}: the conversation has no message")
    return messages


def _turns(value: Any, name: str, where: str) -> tuple[Message, ...]:
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise DataError(f"{where}: {name!r} is {type(value).__name__}, not text and not a list of messages")
    turns = enumerate(replace_function_calls(value), start=1)
    return tuple(_turn(turn, f"{where}: message {number} of {name!r}") for number, turn in turns)


def _turn(turn: Any, what: str) -> Message:
    """Return a message without null fields and without an empty list of calls, which some templates take for calls.

    Its content is text, or several parts that are. Next to calls it may be missing and is then the empty text, as a
    server writes it.
    """
    if not isinstance(turn, Mapping):
        raise DataError(f"{what} is {type(turn).__name__}, not an object")
    message = {name: remove_nulls(field) for name, field in turn.items() if field is not None}
    if message.get("tool_calls") == []:
        del message["tool_calls"]
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise DataError(f"{what} has no role, it has: {_columns(turn) or 'nothing'}")
    message["role"] = "assistant" if message["role"] == "model" else message["role"]  # as templates are given it
    if "tool_calls" in message:
        _check_calls(message["tool_calls"], what)
    content = message.get("content")
    if isinstance(content, list):
        texts = [_text_part(part, what) for part in content]
        message["content"] = [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)
        return message
    if content is None and not message.get("tool_calls"):
        raise DataError(f"{what} ({message['role']}) has neither content nor tool_calls")
    if content is not None and not isinstance(content, str):
        raise DataError(f"{what}: the content is {type(content).__name__}, not text")
    return {"content": "", **message}


def _check_calls(calls: Any, what: str) -> None:
    """Raise DataError unless tool calls are a list of objects with a name. A template would ignore others."""
    if not isinstance(calls, list | tuple):
        raise DataError(f"{what}: 'tool_calls' is {type(calls).__name__}, not a list of calls")
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{what}: each entry of 'tool_calls' must be an object with a function that has a name")


def _text_part(part: Any, what: str) -> str:
    """Return one part of a content that is a list. Only text can be trained."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise DataError(f"{what} has a part of type {kind}: only text can be trained")


_FORMS: tuple[tuple[frozenset[str], frozenset[str], Callable[[Mapping[str, Any], str], Sample]], ...] = (
    (frozenset({"chosen", "rejected"}), frozenset({"prompt", "tools"}), _preference),
    (frozenset({"messages"}), frozenset({"tools", CUT_OFF}), _conversation),
    (frozenset({"conversations"}), frozenset({"system", "tools", CUT_OFF}), _sharegpt),
    (frozenset({"prompt", "completion"}), frozenset({"tools", CUT_OFF}), _prompt_completion),
    (frozenset({"instruction", "output"}), frozenset({"input", "system", CUT_OFF}), _alpaca),
    (frozenset({"input_ids"}), frozenset({"labels"}), _token_ids),
    (frozenset({"text"}), frozenset({CUT_OFF}), _plain_text),
)
"""(required columns, optional columns, reader). The first form that fits counts."""

"""Samples: what a row of a fine-tuning file is, found from its columns.

text                          a document
prompt + completion           strings, or lists of messages
messages [+ tools]            a conversation
prompt + chosen + rejected    a preference; strings or lists of messages, the prompt may be inside of both
input_ids [+ labels]          token ids
instruction [+ input] + output [+ system]     the alpaca columns
conversations [+ system, tools]               the sharegpt columns
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from meshwright.data.older_calls import CALL, read_calls, renewed
from meshwright.data.padding_nulls import unpadded, without_null
from meshwright.data.rows import Malformed, Row, spoken
from meshwright.spec.errors import DataError

Message = Mapping[str, Any]
"""A turn: `role`, `content` and what else the template reads (`tool_calls`, `name`, `reasoning_content`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns of a template."""

    messages: tuple[Message, ...]
    prompt: int = 0
    """So many turns at the beginning are a prompt, which is never trained; 0 = the file does not say."""
    tools: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Text behind a text."""

    prompt: str
    """Empty = the whole text is trained."""
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """Tokens that somebody made already."""

    ids: tuple[int, ...]
    labels: tuple[int, ...] | None
    """As transformers has them: the token itself, or -100 where it is not trained; None = all are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers to one prompt, of which the first is better."""

    chosen: Conversation | Continuation
    rejected: Conversation | Continuation


Sample = Conversation | Continuation | TokenIds | Preference

_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant", "bard": "assistant"}
_ROLES |= {CALL: "assistant", "observation": "tool", "function_response": "tool"}
_ROLES |= {role: role for role in ("system", "user", "assistant", "tool")}
"""Of sharegpt files."""


def sample(row: Row) -> Sample:
    """What a row is; DataError names the place and what is wrong there."""
    where, fields = row
    if isinstance(fields, Malformed):
        raise DataError(fields.complaint)
    present = {name: value for name, value in fields.items() if value is not None}
    for needed, _, make in _FORMS:
        if needed <= present.keys():
            return make(present, spoken(where))
    known = "; ".join(" + ".join(sorted(needed)) for needed, _, _ in _FORMS)
    raise DataError(f"{spoken(where)}: the columns ({_columns(fields) or 'no fields'}) are none of: {known}")


def is_sample(row: Row) -> bool:
    """Whether a row can be read as a sample."""
    try:
        sample(row)
    except DataError:
        return False
    return True


def _columns(fields: Mapping[str, Any]) -> str:
    """What a row or a turn has."""
    return ", ".join(f"{name} (null)" if value is None else str(name) for name, value in fields.items())


def unread(fields: Mapping[str, Any]) -> set[str]:
    """Columns of a row with something in them that its sample is not made of."""
    present = {name for name, value in fields.items() if value is not None}
    known = next((needed | beside for needed, beside, _ in _FORMS if needed <= present), present)
    return {str(name) for name in present - known}


def _preference(row: Mapping[str, Any], where: str) -> Preference:
    """The prompt is a column, what both answers begin with, or both."""
    chosen, rejected = (_part(row[name], name, where) for name in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{where}: 'chosen' and 'rejected' must both be strings or both be lists of messages")
    common = chosen[: _common(chosen, rejected)]
    prompt = _part(row["prompt"], "prompt", where) if "prompt" in row else None
    if prompt is None and not common:
        raise DataError(
            f"{where}: 'chosen' and 'rejected' have different prompts: give the prompt as a column 'prompt'"
        )
    if prompt is None or _stands_in(prompt, common):
        prompt = common if prompt is None or isinstance(prompt, str) else prompt
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return Preference(
        chosen=_answer(prompt, chosen, row, where, "chosen"),
        rejected=_answer(prompt, rejected, row, where, "rejected"),
    )


def _stands_in(prompt: str | tuple[Message, ...], common: str | tuple[Message, ...]) -> bool:
    """Whether a prompt is given once more as the messages that both answers begin with, or as the words of one."""
    if isinstance(common, str):
        return False
    if isinstance(prompt, str):
        return any(message.get("content") == prompt for message in common)
    return bool(prompt) and common[: len(prompt)] == prompt


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many turns, but for the last, or characters both begin with; of characters no space at the end."""
    size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    if not isinstance(one, str):
        return min(size, max(0, min(len(one), len(other)) - 1))
    return size - 1 if size > 0 and one[size - 1] == " " else size


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
    messages = _some(_turns(row["messages"], "messages", where), where)
    return _with_tools(messages, row, where)


def _with_tools(messages: tuple[Message, ...], row: Mapping[str, Any], where: str, prompt: int = 0) -> Conversation:
    """A conversation and its tools, both as they were before a table gave each the fields of all."""
    tools = _tools(row, where)
    return Conversation(messages=unpadded(messages, tools), prompt=prompt, tools=tools)


def _sharegpt(row: Mapping[str, Any], where: str) -> Conversation:
    turns = row["conversations"]
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise DataError(f"{where}: 'conversations' is not a list of turns")
    named = [_renamed(turn, where, number) for number, turn in enumerate(turns, start=1)]
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    messages = _turns(system + named, "conversations", where)
    return _with_tools(_some(messages, where), row, where)


def _renamed(turn: Any, where: str, number: int) -> Message:
    """A turn of sharegpt (`from`, `value`) as others have it; those that are already so stay."""
    if not isinstance(turn, Mapping):
        raise DataError(f"{where}: turn {number} of 'conversations' is {type(turn).__name__}, not an object")
    if "from" not in turn:
        return turn
    role = _ROLES.get(str(turn["from"]))
    if role is None:
        raise DataError(
            f"{where}: turn {number} of 'conversations' is from {turn['from']!r}: known are {', '.join(_ROLES)}"
        )
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if turn["from"] == CALL:
        thought, calls = read_calls(turn.get("value"), f"{where}: turn {number} of 'conversations'")
        return {**others, "role": role, **({"content": thought} if thought else {}), "tool_calls": calls}
    return {**others, "role": role, "content": turn.get("value")}


def _alpaca(row: Mapping[str, Any], where: str) -> Conversation:
    """The input stands behind its instruction, with an empty line between."""
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
    for place, (token, label) in enumerate(zip(ids, labels or (), strict=False)):
        if label not in (token, -100):
            raise DataError(
                f"{where}: label {place} is {label}, and its token is {token}: give the token itself, or -100. "
                "Labels are not shifted"
            )
    return TokenIds(ids=ids, labels=labels)


def _integers(value: Any, name: str, where: str) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(type(one) is int for one in value):
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
    """Tools as a list or as the JSON text of one."""
    tools = row.get("tools")
    if not isinstance(tools, str):
        tools = without_null(tools)
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


def _some(messages: tuple[Message, ...], where: str) -> tuple[Message, ...]:
    if not messages:
        raise DataError(f"{where}: the conversation has no message")
    return messages


def _turns(value: Any, name: str, where: str) -> tuple[Message, ...]:
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise DataError(f"{where}: {name!r} is {type(value).__name__}, not text and not a list of messages")
    turns = enumerate(renewed(value), start=1)
    return tuple(_turn(turn, f"{where}: message {number} of {name!r}") for number, turn in turns)


def _turn(turn: Any, what: str) -> Message:
    """A message without fields that are null and without a list of no calls, which some templates take for calls; its
    content is text, or several parts that are. Beside calls it may be missing: then it is the empty text that a server
    writes in its place."""
    if not isinstance(turn, Mapping):
        raise DataError(f"{what} is {type(turn).__name__}, not an object")
    found = {name: without_null(value) for name, value in turn.items() if value is not None}
    if found.get("tool_calls") == []:
        del found["tool_calls"]
    if not isinstance(found.get("role"), str) or not found["role"]:
        raise DataError(f"{what} has no role, it has: {_columns(turn) or 'nothing'}")
    found["role"] = "assistant" if found["role"] == "model" else found["role"]  # as templates are given it
    if "tool_calls" in found:
        _check_calls(found["tool_calls"], what)
    content = found.get("content")
    if isinstance(content, list):
        texts = [_text_part(part, what) for part in content]
        found["content"] = [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)
        return found
    if content is None and not found.get("tool_calls"):
        raise DataError(f"{what} ({found['role']}) has neither content nor tool_calls")
    if content is not None and not isinstance(content, str):
        raise DataError(f"{what}: the content is {type(content).__name__}, not text")
    return {"content": "", **found}


def _check_calls(calls: Any, what: str) -> None:
    """Raise where a message's calls of tools are no list of objects with a name: a template would pass over them."""
    if not isinstance(calls, list | tuple):
        raise DataError(f"{what}: 'tool_calls' is {type(calls).__name__}, not a list of calls")
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"{what}: each entry of 'tool_calls' must be an object with a function that has a name")


def _text_part(part: Any, what: str) -> str:
    """One part of a content that is a list; only text can be trained."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise DataError(f"{what} has a part of type {kind}: only text can be trained")


_FORMS: tuple[tuple[frozenset[str], frozenset[str], Callable[[Mapping[str, Any], str], Sample]], ...] = (
    (frozenset({"chosen", "rejected"}), frozenset({"prompt", "tools"}), _preference),
    (frozenset({"messages"}), frozenset({"tools"}), _conversation),
    (frozenset({"conversations"}), frozenset({"system", "tools"}), _sharegpt),
    (frozenset({"prompt", "completion"}), frozenset({"tools"}), _prompt_completion),
    (frozenset({"instruction", "output"}), frozenset({"input", "system"}), _alpaca),
    (frozenset({"input_ids"}), frozenset({"labels"}), _token_ids),
    (frozenset({"text"}), frozenset(), _plain_text),
)
"""Columns that a row must have, those that are read beside, and what it then is; the first that fits."""

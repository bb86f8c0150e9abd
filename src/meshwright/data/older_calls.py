"""Calls of tools under older names, as the templates of today read them.

`function_call` turns of sharegpt files hold JSON (LLaMA-Factory, `data/formatter.py`). OpenAI's `function_call` of a
message, since replaced by `tool_calls`, holds one call, which the role `function` answers.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from meshwright.spec.errors import DataError

CALL = "function_call"
THOUGHT = re.compile(r"\s*(<think>.*?</think>)\s*", re.DOTALL)


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


def renewed(turns: Iterable[Any]) -> list[Any]:
    """The turns of a conversation with `tool_calls` in place of each `function_call`, and with `tool` answering it."""
    turns = list(turns)
    if not any(isinstance(turn, Mapping) and turn.get(CALL) is not None for turn in turns):
        return turns
    return [_renewed(turn) if isinstance(turn, Mapping) else turn for turn in turns]


def _renewed(turn: Mapping[str, Any]) -> dict[str, Any]:
    others = {name: value for name, value in turn.items() if name != CALL}
    if others.get("role") == "function":
        others["role"] = "tool"
    if turn.get(CALL) is not None and not others.get("tool_calls"):
        others["tool_calls"] = [{"type": "function", "function": turn[CALL]}]
    return others

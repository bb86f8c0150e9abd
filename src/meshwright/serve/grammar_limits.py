"""What a schema or a regular expression may ask for, checked before any grammar is made of it.

The library bounds its own work (`grammar.LIMITS`), but for two things: it writes repetitions of a regular expression
out, so `a{1000000}` takes minutes, and multiples of n take a machine of n states. Here these are counted first. What a
grammar cannot promise is refused too.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from meshwright.spec.errors import ArgumentError

MOST_SCHEMA_LETTERS = 2**16
"""Of a schema as JSON: the library's time grows with its square, and this many take some two seconds at worst."""
MOST_REGEX_LETTERS = 4096
"""Of a regular expression, and of one with its repetitions written out."""
MOST_MULTIPLE = 10_000
"""Largest common multiple of all `multipleOf`, each without its decimal point and zeros behind: 0.25 counts as 25."""
UNKNOWN = ("x-guidance", "additionalItems")
"""Keywords that the library would read in its own way, or pass over though older drafts bind by them."""
ANNOTATIONS = ("const", "enum", "default", "examples")
"""Keywords whose values are data."""
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values are schemas by name."""
_COUNT = re.compile(r"\{\s*(\d+)\s*(,\s*(\d*)\s*)?\}")
_FLAGS = re.compile(r"\(\?[A-Za-z-]*x")
_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|[A-Za-z-]*:?))?")
_ESCAPE = re.compile(r"\\(?:[xuUpP]\{[^}]*\}|.)", re.DOTALL)


def schema_text(schema: Mapping[str, Any]) -> str:
    """A schema as JSON; the empty one is that of any object. ArgumentError where it asks for too much, or for what no
    grammar promises."""
    try:
        text = json.dumps(dict(schema) or {"type": "object"}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"json_schema is no JSON: {error}") from error
    if len(text) > MOST_SCHEMA_LETTERS:
        raise ArgumentError(f"json_schema has {len(text):,} letters: give at most {MOST_SCHEMA_LETTERS:,}")
    multiple = 1
    for node in _nodes(schema):
        _check_node(node)
        multiple = math.lcm(multiple, _digits(node.get("multipleOf")))
        if multiple > MOST_MULTIPLE:
            raise ArgumentError(
                f"json_schema has multipleOf={node['multipleOf']}, with the others a common multiple of {multiple:,}, "
                f"and {MOST_MULTIPLE:,} is the most: leave it out"
            )
    return text


def _digits(number: Any) -> int:
    """Of a number without its decimal point and the zeros behind; 1 for what is none."""
    if not isinstance(number, int | float) or not number:
        return 1
    return abs(int("".join(map(str, Decimal(repr(number)).normalize().as_tuple().digits))))


def _check_node(node: Mapping[str, Any]) -> None:
    unknown = next((name for name in UNKNOWN if name in node), None)
    if unknown is not None:
        raise ArgumentError(f"json_schema has {unknown}, which constrained output does not know: leave it out")
    patterns = [node.get("pattern")] if "pattern" in node else []
    named = node.get("patternProperties")
    for pattern in [*patterns, *(named if isinstance(named, Mapping) else ())]:
        if isinstance(pattern, str):
            check_regex("json_schema's pattern", pattern)
    least, required = node.get("minProperties"), node.get("required")
    sure = len(set(required)) if isinstance(required, list) and all(isinstance(one, str) for one in required) else 0
    if isinstance(least, int) and least > max(1, sure):
        raise ArgumentError(
            f"json_schema has minProperties={least}, and its required names {sure} properties: name as many "
            "under required, or leave minProperties out"
        )


def _nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and those within it."""
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, Mapping):
            yield node
            for key, value in node.items():
                if key in BY_NAME and isinstance(value, Mapping):
                    left += value.values()
                elif key not in ANNOTATIONS:
                    left.append(value)


def check_regex(name: str, regex: str) -> None:
    """ArgumentError where a regular expression is too long, as it is or with its repetitions written out."""
    if len(regex) > MOST_REGEX_LETTERS:
        raise ArgumentError(f"{name} has {len(regex):,} letters: give at most {MOST_REGEX_LETTERS:,}")
    if _FLAGS.search(regex):
        raise ArgumentError(f"{name} has the flag x, which constrained output does not know: leave it out")
    letters = written_out(regex)
    if letters > MOST_REGEX_LETTERS:
        raise ArgumentError(
            f"{name} is too long: it has {letters:,} letters with repetitions written out, and at most "
            f"{MOST_REGEX_LETTERS:,} are allowed. Repeat less, or without a bound"
        )


def written_out(regex: str) -> int:
    """Letters and classes of a regular expression whose counted repetitions are written out."""
    totals, last, place = [0], [0], 0
    while place < len(regex):
        letter, size = regex[place], 1
        if counted := _COUNT.match(regex, place):
            low, _, high = counted.groups()
            times = max(1, int(high or low))
            totals[-1] += last[-1] * (times - 1)
            last[-1] *= times
            place = counted.end()
            continue
        if group := _GROUP.match(regex, place):
            totals.append(0)
            last.append(0)
            place = group.end()
            continue
        if letter == ")" and len(totals) > 1:
            size = totals.pop()
            last.pop()
            place += 1
        elif letter == "\\" and (escape := _ESCAPE.match(regex, place)):
            place = escape.end()
        elif letter == "[":
            place = _behind_class(regex, place)
        else:
            place += 1
        if letter not in "*+?|":
            totals[-1] += size
            last[-1] = size
    return sum(totals)


def _behind_class(regex: str, place: int) -> int:
    """Where a class of letters that begins here has ended; classes may hold others."""
    depth = 0
    while place < len(regex):
        if escape := _ESCAPE.match(regex, place):
            place = escape.end()
            continue
        if regex[place] == "[":
            depth += 1
            place += 1
            place += regex[place : place + 1] == "^"
            place += regex[place : place + 1] == "]"
            continue
        depth -= regex[place] == "]"
        place += 1
        if not depth:
            break
    return place

"""Limits on schemas and regular expressions, checked before a grammar is made of them.

The library bounds its own work (`grammar.LIMITS`) with two exceptions. It writes repetitions of a regular expression
out, so `a{1000000}` takes minutes, and multiples of n take a machine of n states. Both are counted here first. What a
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
"""Letters of a schema as JSON. The library's time grows with their square; this many take two seconds at worst."""
MOST_REGEX_LETTERS = 4096
"""Letters of a regular expression, also with its repetitions written out."""
MOST_MULTIPLE = 10_000
"""Largest common multiple of all `multipleOf`.

Each counts without its decimal point and trailing zeros: 0.25 counts as 25.
"""
UNKNOWN = ("x-guidance", "additionalItems")
"""Keywords that the library reads in its own way, or skips although older drafts are bound by them."""
ANNOTATIONS = ("const", "enum", "default", "examples")
"""Keywords whose values are data."""
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values are schemas by name."""
_COUNT = re.compile(r"\{\s*(\d+)\s*(,\s*(\d*)\s*)?\}")
_FLAGS = re.compile(r"\(\?[A-Za-z-]*x")
_GROUP = re.compile(r"\((?:\?(?:P?<\w+>|[A-Za-z-]*:?))?")
_ESCAPE = re.compile(r"\\(?:[xuUpP]\{[^}]*\}|.)", re.DOTALL)


def schema_text(schema: Mapping[str, Any]) -> str:
    """Return a schema as JSON. The empty schema allows any object.

    Raises ArgumentError when it is too large, or asks for what no grammar promises.
    """
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
    """Return a number without its decimal point and trailing zeros; 1 for anything else."""
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
    sure = len(set(required)) if isinstance(required, list) and all(isinstance(name, str) for name in required) else 0
    if isinstance(least, int) and least > max(1, sure):
        raise ArgumentError(
            f"json_schema has minProperties={least}, and its required names {sure} properties: name as many "
            "under required, or leave minProperties out"
        )


def _nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and those within it."""
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif isinstance(node, Mapping):
            yield node
            for key, child in node.items():
                if key in BY_NAME and isinstance(child, Mapping):
                    left += child.values()
                elif key not in ANNOTATIONS:
                    left.append(child)


def check_regex(name: str, regex: str) -> None:
    """Raise ArgumentError for a regular expression that is too long, also with its repetitions written out."""
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
    """Return the letters and classes of a regular expression with counted repetitions written out."""
    # Per open group: letters so far, and letters of its last element, which a count repeats.
    totals, last, position = [0], [0], 0
    while position < len(regex):
        letter, size = regex[position], 1
        if counted := _COUNT.match(regex, position):
            low, _, high = counted.groups()
            times = max(1, int(high or low))
            totals[-1] += last[-1] * (times - 1)
            last[-1] *= times
            position = counted.end()
            continue
        if group := _GROUP.match(regex, position):
            totals.append(0)
            last.append(0)
            position = group.end()
            continue
        if letter == ")" and len(totals) > 1:
            size = totals.pop()
            last.pop()
            position += 1
        elif letter == "\\" and (escape := _ESCAPE.match(regex, position)):
            position = escape.end()
        elif letter == "[":
            position = _behind_class(regex, position)
        else:
            position += 1
        if letter not in "*+?|":
            totals[-1] += size
            last[-1] = size
    return sum(totals)


def _behind_class(regex: str, position: int) -> int:
    """Return the end of the letter class that begins here. Classes may contain others."""
    depth = 0
    while position < len(regex):
        if escape := _ESCAPE.match(regex, position):
            position = escape.end()
            continue
        if regex[position] == "[":
            depth += 1
            position += 1
            position += regex[position : position + 1] == "^"
            position += regex[position : position + 1] == "]"
            continue
        depth -= regex[position] == "]"
        position += 1
        if not depth:
            break
    return position

"""Options in TOML: a table per section, a comment per option."""

import json
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.spec.errors import PlanError
from meshwright.stacks.text.json_text import line_of
from meshwright.stacks.text.option_text import Entry, Setting, flat, nested


def write(settings: Sequence[Setting], title: Sequence[str]) -> str:
    """Return the options, each with its meaning at the end of its line."""
    lines = [f"# {line}".rstrip() for line in title]
    return "\n".join([*lines, *_tables(nested(settings), "")]) + "\n"


def _tables(tree: dict[str, Any], table: str) -> Iterator[str]:
    plain = {key: setting for key, setting in tree.items() if not isinstance(setting, dict)}
    if table and plain:
        yield ""
        yield f"[{table}]"
    for key, setting in plain.items():
        line = f"{key} = {_word(setting.value)}"
        yield f"{line}  # {setting.meaning}" if setting.meaning else line
    for key, inner in tree.items():
        if isinstance(inner, dict):
            yield from _tables(inner, f"{table}.{key}" if table else key)


def _word(value: Any) -> str:
    return repr(value) if isinstance(value, float) else json.dumps(value)


def read(text: str) -> list[Entry]:
    """Return every option with its line. Raises PlanError unless the text is TOML."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"no TOML ({error})") from None
    return [Entry(key=key, value=value, line=line_of(text, key)) for key, value in flat(document)]

"""Arrays of objects are read as `json` reads them, wherever the blocks end, and in little memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.text import rows
from meshwright.data.text.rows import _ArrayReader, objects
from meshwright.spec.errors import DataError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), max_size=6)


def read(data: bytes, block: int) -> list[Any]:
    """Read with blocks of this size, which end within words, numbers, escapes and characters."""
    blocks = iter([data[begin : begin + block] for begin in range(0, len(data), block)])
    rows = []
    for number, row, complaint in _ArrayReader(Path("x.json"), blocks).objects():
        if complaint:
            raise DataError(f"x.json, row {number}: {complaint}")
        rows.append(row)
    return rows


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_BLOCK", 1)


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, block=st.integers(1, 40), ascii=st.booleans(), indent=st.sampled_from([None, 1]))
def test_the_rows_are_those_of_json(rows: list[Any], block: int, ascii: bool, indent: int | None) -> None:
    text = json.dumps(rows, ensure_ascii=ascii, indent=indent).encode()
    assert read(text, block) == rows
    assert read(b"\xef\xbb\xbf \n" + text + b"\n ", block) == rows


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, block=st.integers(1, 40), data=st.data())
def test_a_broken_array_is_refused_where_json_refuses_it(rows: list[Any], block: int, data: st.DataObject) -> None:
    """Cut off, or with one character changed: what `json` says of it, and where."""
    text = json.dumps(rows, indent=data.draw(st.sampled_from([None, 1])))
    position = data.draw(st.integers(1, len(text) - 1))
    broken = (
        text[:position] + data.draw(st.sampled_from(["", "]", "}", '"', ",", "x", "\n", "1"])) + text[position + 1 :]
    )
    broken = data.draw(st.sampled_from([broken, text[:position]]))
    try:
        expected = json.loads(broken)
    except json.JSONDecodeError as error:
        with pytest.raises(DataError) as refused:
            read(broken.encode(), block)
        message = str(refused.value)
        at = f"x.json, line {error.lineno}, column {error.colno}: broken JSON"
        assert message.startswith(at) or "a row is an object" in message or "not an array" in message
        return
    if isinstance(expected, list) and all(isinstance(row, dict) for row in expected):
        assert read(broken.encode(), block) == expected
    else:
        with pytest.raises(DataError, match=r"a row is an object with fields, not|not an array of objects"):
            read(broken.encode(), block)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b'[{"a": 1},\n {"a": }]', "x.json, line 2, column 8: broken JSON, Expecting value"),
        (b'[{"a": 1}\n {"a": 2}]', "x.json, line 2, column 2: broken JSON, Expecting ',' delimiter"),
        (b'[{"a": 1}', "x.json, line 1, column 10: broken JSON, Expecting ',' delimiter"),
        (b'[{"a": "no end}]', "x.json, line 1, column 8: broken JSON, Unterminated string starting at"),
        (b'[{"a": 1}] {}', "x.json, line 1, column 12: broken JSON, Extra data"),
        (b'[{"a": 1}, 7]', "x.json, row 2: a row is an object with fields, not a number"),
        (b"[null]", "x.json, row 1: a row is an object with fields, not null"),
        (b'{"a": []}', "x.json holds dict, not an array of objects: give one object a line in a .jsonl file"),
        (b"", "x.json, line 1, column 1: broken JSON, Expecting value"),
        (b"[{'a': 1}]", None),
        (b'[{"a": "\xff\xc3\xa9"}]', "x.json, row 1: not UTF-8 text"),
        (b'[{"a": "\xc3', "x.json, line 1, column 8: broken JSON, Unterminated string starting at"),
        (b'[{"a": \xff}]', "x.json, line 1, column 8: broken JSON, not UTF-8 text"),
        (b'[{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}]", None),
        (b'[{"a": ' + b"1" * 5000 + b"}]", None),
    ],
)
@pytest.mark.parametrize("block", [1, 7, 10**6])
def test_what_is_wrong_is_said_with_its_place(text: bytes, sentence: str | None, block: int) -> None:
    if len(text) > 10_000 and block < 100:
        return
    with pytest.raises(DataError) as error:
        read(text, block)
    if sentence is None:
        assert "x.json" in str(error.value) and "broken JSON" in str(error.value)
    else:
        assert str(error.value) == sentence


def test_a_row_without_an_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MOST_CHARACTERS", 1000)

    def endless() -> Any:
        yield b'[{"a": "'
        while True:
            yield b"x" * 100

    with pytest.raises(DataError, match=r"x\.json, row 1 has more than 1,000 characters"):
        list(_ArrayReader(Path("x.json"), endless()).objects())


MEASURE = """
import sys, tracemalloc
from pathlib import Path
from meshwright.data.text.rows import objects
tracemalloc.start()
number = sum(1 for _ in objects(Path(sys.argv[1])))
print(number, tracemalloc.get_traced_memory()[1])
"""


def test_a_file_of_many_megabytes_takes_a_few(tmp_path: Path) -> None:
    row = json.dumps({"text": "word " * 200})
    file = tmp_path / "long.json"
    file.write_text("[" + ",\n".join([row] * 24_000) + "]")
    assert file.stat().st_size > 23 * 2**20
    process = subprocess.run([sys.executable, "-c", MEASURE, str(file)], capture_output=True, text=True, check=True)
    number, peak = map(int, process.stdout.split())
    assert number == 24_000 and peak < 8 * 2**20
    assert next(objects(file))[0] == 1

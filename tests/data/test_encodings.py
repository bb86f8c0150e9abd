"""Files of other encodings: named, with the command that makes them UTF-8, beside what Python's own codecs read."""

import json
import re
from pathlib import Path

import pytest

from meshwright.data.text import rows
from meshwright.data.text.rows import Malformed, wide_encoding
from meshwright.spec.errors import DataError

ROWS = [{"text": "Grüße, \u65e5\u672c — naïve “quotes”"}, {"text": "plain"}]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n"
KINDS = ("rows.jsonl", "rows.json", "rows.txt")


def texts(path: Path) -> list[object]:
    """Return the texts as training reads them."""
    if path.suffix == ".txt":
        return ["".join(rows.read(path))]
    return [row for _, row in (rows.jsonl if path.suffix == ".jsonl" else rows.json_array)(path)]


def content(name: str) -> str:
    return json.dumps(ROWS, ensure_ascii=False, indent=1) if name.endswith(".json") else LINES


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_wide_encodings_are_named_with_a_command_that_makes_them_readable(
    name: str, encoding: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content(name).encode(encoding))
    with pytest.raises(DataError, match=re.escape(f"{path} seems to be UTF-")) as refused:
        texts(path)
    named = re.search(r"convert it \(iconv -f (\S+) -t UTF-8\)", str(refused.value))
    assert named is not None
    path.write_text(path.read_bytes().decode(named[1]), encoding="utf-8")
    assert texts(path) == (ROWS if name != "rows.txt" else [LINES])


@pytest.mark.parametrize("name", KINDS)
def test_a_mark_of_utf8_is_no_part_of_the_text(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content(name), encoding="utf-8-sig")
    assert texts(path) == (ROWS if name != "rows.txt" else [LINES])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("encoding", "text"), [("ISO-8859-1", "naïve café"), ("Windows-1252", "“quotes” naïve")])
def test_narrow_encodings_are_guessed_with_the_command(name: str, encoding: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    row = json.dumps({"text": text}, ensure_ascii=False)
    path.write_bytes((f"[{row}]" if name == "rows.json" else f"{row}\n").encode(encoding))
    hint = f"seems to be {encoding}: convert it (iconv -f {encoding} -t UTF-8)"
    if name == "rows.txt":
        with pytest.raises(DataError, match=re.escape(hint)):
            texts(path)
    else:
        (row,) = texts(path)
        assert isinstance(row, Malformed) and row.complaint.endswith(hint)


@pytest.mark.parametrize(
    "start", [b"\x7fELF\x02\x01\x01\0\0\0", bytes(range(256)), b"\0" * 64, b"GGUF\x03\0\0\0", b"PAR1\x15\0\x15\0"]
)
def test_files_of_programs_are_no_text(start: bytes) -> None:
    assert wide_encoding(start) == ""

"""Long texts are cut where no word is parted, and files are read as a stream."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.text import rows
from meshwright.data.tokens import word_encoder
from meshwright.spec.errors import DataError
from tests.data.tokenizers_for_tests import NAMES, made

LINES = st.lists(
    st.sampled_from(["x = 1", "", "    return None", "# done.", "a b c", "\u65e5\u672c\u3002", "  ", "end\r"]),
    min_size=2,
    max_size=60,
).map("\n".join)


@settings(max_examples=200, deadline=None)
@given(text=st.one_of(st.text(max_size=200), LINES), size=st.integers(1, 50))
def test_pieces_make_up_the_text(text: str, size: int) -> None:
    parts = list(rows.cut(text, size))
    assert "".join(parts) == text
    assert all(0 < len(piece) <= size for piece in parts)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(text=LINES)
def test_pieces_have_the_tokens_of_the_whole(name: str, text: str) -> None:
    """Pieces are long enough to contain a safe position to cut."""
    text = ("value = other\n" + text) * 3
    library = word_encoder.library(made(name))
    encode = word_encoder.encoder(library, 400)
    parts = list(rows.cut(text, 120))
    joined = b"".join(encode(parts, bytes(len(parts))))
    assert np.frombuffer(joined, np.uint16).tolist() == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("line", ["x" * 300, " " * 300, "\u65e5\u672c" * 150, "a b " * 75])
def test_text_without_line_ends_is_cut_too(line: str) -> None:
    parts = list(rows.cut(line, 100))
    assert "".join(parts) == line and len(parts) >= 3


def test_a_file_is_cut_as_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_BLOCK_BYTES", 1000)
    text = "".join(f"zeile {number}: \u00e4\u00f6\u65e5\U0001f600\r\n\n" for number in range(12000))
    path = tmp_path / "long.txt"
    path.write_bytes(text.encode())
    parts = list(rows.read(path))
    assert parts == list(rows.cut(text))
    assert len(parts) > 3


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "bom.txt"
    path.write_bytes(b"\xef\xbb\xbfhello\n")
    assert list(rows.read(path)) == ["hello\n"]


@pytest.mark.parametrize("position", [0, 5, 4096])
def test_binary_and_foreign_files_are_named_with_the_place(
    tmp_path: Path, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_BLOCK_BYTES", 100)
    path = tmp_path / "odd.txt"
    path.write_bytes(b"a" * position + b"\0rest")
    with pytest.raises(DataError, match=f"odd.txt is binary.* {position};"):
        list(rows.read(path))
    path.write_bytes(b"a" * position + b"\xe9rest")
    with pytest.raises(DataError, match=f"odd.txt is not UTF-8 text: byte {position} is 0xe9"):
        list(rows.read(path))


def test_a_character_that_is_broken_off_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "cut.txt"
    path.write_bytes(b"ab\xe6\x97")
    with pytest.raises(DataError, match="byte 2 is 0xe6"):
        list(rows.read(path))

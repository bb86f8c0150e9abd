"""Every kind of path gives its documents in a fixed order; every bad one a sentence."""

import json
import os
import sys
import types
from pathlib import Path

import pytest

from meshwright.data.text import rows
from meshwright.data.text.sources import Source
from meshwright.spec import Data
from meshwright.spec.errors import DataError


def texts(path: Path | str, **settings: object) -> list[tuple[str, str]]:
    return [(Path(d.name).name, d.text) for d in Source(Data(path=str(path), **settings)).documents()]  # type: ignore[arg-type]


def refusal(path: Path | str, **settings: object) -> str:
    with pytest.raises(DataError) as error:
        texts(path, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_text("bee", encoding="utf-8")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.md").write_text("one", encoding="utf-8")
    (tmp_path / "a" / "empty.md").write_text("", encoding="utf-8")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden", encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"text": "row"}\n\n{"text": ""}\n{"text": "last"}', encoding="utf-8")
    return tmp_path


def test_a_file_a_folder_and_a_glob(folder: Path) -> None:
    assert texts(folder / "b.txt") == [("b.txt", "bee")]
    everything = [("one.md", "one"), ("b.txt", "bee"), ("c.jsonl:1", "row"), ("c.jsonl:4", "last")]
    assert texts(folder) == everything
    assert texts(f"{folder}/**/*.md") == [("one.md", "one")]
    assert texts(f"{folder}/*.jsonl") == everything[2:]


def test_rows_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """Not at what Python and Unicode call ends of lines; a mark of byte order before the first row is none of its."""
    first = "one\u2028two\u2029three\u0085four"
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in (first, "last")]
    for mark in ("", "\ufeff"):
        for end in ("\n", "\r\n"):
            (tmp_path / "rows.jsonl").write_bytes((mark + end.join([*rows, ""])).encode())
            assert texts(tmp_path / "rows.jsonl") == [("rows.jsonl:1", first), ("rows.jsonl:2", "last")]


def test_the_standard_library_is_python_without_tests() -> None:
    source = Source(Data(path="stdlib"))
    names = [path.as_posix() for path in source.files]
    assert names == sorted(names, key=lambda name: name.split("/"))
    assert len(names) > 400 and all(name.endswith(".py") for name in names)
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not any(f"/{part}/" in name for name in names for part in ("test", "tests", "site-packages", "idle_test"))
    tables = ("/encodings/cp037.py", "/encodings/cp720.py", "/pydoc_data/topics.py", "/stringprep.py")
    assert not any(name.endswith(tables) for name in names), "written by a program, to be looked up"
    assert any(name.endswith("/encodings/utf_8.py") for name in names)
    first = next(source.documents())
    assert first.text == Path(first.name).read_text(encoding="utf-8")


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    path = tmp_path / "rows.parquet"
    write_table(pyarrow.table({"n": range(200), "body": [f"row {n}" for n in range(200)]}), path, row_group_size=90)
    read = texts(path, text_field="body")
    assert read == [(f"rows.parquet:{n + 1}", f"row {n}") for n in range(200)]
    assert "no field 'text', it has: n, body" in refusal(path)
    assert "row 1: field 'n' is int, not text" in refusal(path, text_field="n")
    path.write_bytes(b"PAR1 and no more")
    assert "rows.parquet is not a readable parquet file" in refusal(path)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    assert "pip install 'meshwright[parquet]'" in refusal(tmp_path / "rows.parquet")


class HubDataset:
    """Stand-in with the used part of a dataset of the hub library."""

    def __init__(self, rows: list[dict[str, object]], file: Path) -> None:
        self._rows = rows
        self.column_names = list(rows[0])
        self.cache_files = [{"filename": str(file)}]

    def select_columns(self, names: list[str]) -> list[dict[str, object]]:
        return [{name: row[name] for name in names} for row in self._rows]


def test_a_hub_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cached.arrow").write_bytes(b"rows")
    asked = []

    def load_dataset(*names: str, split: str) -> HubDataset:
        asked.append((*names, split))
        if "gone" in names:
            raise ConnectionError("no such\ndataset")
        return HubDataset([{"text": "hello"}, {"text": "world"}], tmp_path / "cached.arrow")

    library = types.ModuleType("datasets")
    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert texts("hub:owner/name:raw") == [("name:raw:1", "hello"), ("name:raw:2", "world")]
    assert asked == [("owner/name", "raw", "train")]
    assert Source(Data(path="hub:a")).signature() == Source(Data(path="hub:a")).signature()
    assert "cannot be loaded from the hub: no such dataset" in refusal("hub:gone")
    assert "no field 'x', it has: text" in refusal("hub:a", text_field="x")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'meshwright[hf]'" in refusal("hub:owner/name")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": "a"', "line 2, column 13: broken JSON"),
        ("[1]", "line 2: a row is an object with fields, not list"),
        ('{"body": "a", "id": 1}', "line 2: no field 'text', it has: body, id; set data.text_field"),
        ('{"text": null}', "line 2: field 'text' is null, not text"),
        ('{"text": ["a"]}', "line 2: field 'text' is list, not text"),
        ('{"text": "\\ud800"}', "line 2: field 'text' holds half a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "fine"}\n' + line + "\n", encoding="utf-8")
    assert f"rows.jsonl, {says}" in refusal(tmp_path / "rows.jsonl")


def test_a_line_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "\xe9"}\n')
    assert "rows.jsonl, line 1: not UTF-8 text" in refusal(tmp_path / "rows.jsonl")


def test_a_missing_path_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "my_texts").mkdir()
    assert f"the nearest name is {tmp_path / 'my_texts'}" in refusal(tmp_path / "my_text" / "deep")
    assert f"{tmp_path} exists and holds nothing of that name" in refusal(tmp_path / "zzzzqqq")
    (tmp_path / "o.md").write_text("x")
    assert f"{tmp_path} exists and holds nothing of that name" in refusal(tmp_path / "nope.md")
    assert "did you mean data.path=stdlib?" in refusal("stdllib")
    assert "matches no file" in refusal(f"{tmp_path}/*.txt")
    assert "holds no files" in refusal(tmp_path / "my_texts")


def test_binary_files_of_a_folder_are_passed_over_and_told(folder: Path) -> None:
    (folder / "logo.png").write_bytes(b"\x89PNG\r\n\0\0")
    source = Source(Data(path=str(folder)))
    assert [path.name for path in source.passed_over] == ["logo.png"]
    assert "logo.png is binary" in refusal(folder / "logo.png")
    assert "logo.png is binary" in refusal(f"{folder}/*.png")
    for path in [*folder.rglob("*.md"), folder / "b.txt", folder / "c.jsonl"]:
        path.unlink()
    assert "holds no text, only binary files (logo.png)" in refusal(folder)


def test_a_folder_without_permission(tmp_path: Path) -> None:
    if os.name != "posix" or os.geteuid() == 0:
        pytest.skip("needs a user whom permissions bind")
    (tmp_path / "closed").mkdir(mode=0)
    assert "cannot be read" in refusal(tmp_path)


def test_a_limit_ends_at_a_line(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("line one\nline two\nline three\n", encoding="utf-8")
    whole = "line one\nline two\nline three\n"
    assert texts(tmp_path, limit_bytes=50) == [("0.txt", whole), ("1.txt", "line one\nline two\n")]
    assert texts(tmp_path, limit_bytes=len(whole)) == [("0.txt", whole)]
    assert texts(tmp_path, limit_bytes=5) == [("0.txt", "line ")]
    (tmp_path / "0.txt").write_text("\u65e5\u672c", encoding="utf-8")
    assert texts(tmp_path / "0.txt", limit_bytes=4) == [("0.txt", "\u65e5")]


def test_a_long_file_is_one_document_read_in_pieces(tmp_path: Path) -> None:
    text = "word " * rows.PIECE
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    (document,) = Source(Data(path=str(tmp_path))).documents()
    parts = list(document.pieces)
    assert len(parts) > 4 and "".join(parts) == text


def test_the_signature_changes_with_the_files(folder: Path) -> None:
    def signature(**settings: object) -> str:
        return Source(Data(path=str(folder), **settings)).signature()  # type: ignore[arg-type]

    before = signature()
    assert before == signature()
    assert len({before, signature(limit_bytes=9), signature(text_field="x")}) == 3
    (folder / "b.txt").write_text("bees", encoding="utf-8")
    assert before != signature()


def test_tokenizer_files_in_a_folder_are_not_text(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({}), encoding="utf-8")
    assert "tokenizer.json" not in [name for name, _ in texts(folder)]
    assert Source(Data(path=str(folder))).folder == folder
    assert Source(Data(path=str(folder / "b.txt"))).folder == folder


@pytest.mark.parametrize("name", ["b.tar", "b.mds", "b.jsonl.gz", "B.TAR", "b.tar.gz", "b.jsonl.zst"])
def test_a_shard_beside_plain_files_is_not_passed_over(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "row"}\n')
    (tmp_path / name).write_bytes(b"\0" * 600)
    for path in (tmp_path, f"{tmp_path}/*"):
        message = refusal(path)
        assert f"has shards beside plain files ({name} and a.jsonl)" in message
        assert f"`meshwright data prepare data={path} data.tokenizer=FOLDER -o STORE`, or name one kind" in message
        assert f"data='{tmp_path}/*." in message


def test_rows_in_another_encoding_are_named_and_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "row"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "row"}\n', encoding="utf-16")
    assert "b.jsonl seems to be UTF-16" in refusal(tmp_path)

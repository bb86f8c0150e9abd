"""Malformed rows: all are named, or left out and counted, and what is left is as if they had never been there."""

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from meshwright.data.corpus.corpus import Corpus, TokenStream
from meshwright.data.corpus.sample_cache import _SampleBuild
from meshwright.data.preparation import form_of, holds_pairs, prepare
from meshwright.data.text import rows as data_rows
from meshwright.spec import Data
from meshwright.spec.errors import DataError
from meshwright.spec.plan.plan import MixtureSource
from meshwright.verbs.main import main
from tests.data.test_sample_cache import chats, folder, trained_texts

assert folder, "a fixture"

USER = {"role": "user", "content": "u"}
NO_JSON = {
    b'{"messages": [': ", column 15: broken JSON, Expecting value",
    b'{"messages": [{"role": "user" "content": 1}]}': ", column 31: broken JSON, Expecting ',' delimiter",
    b'{"messages": "\xff\xfe"}': ": not UTF-8 text",
    b'{"messages": [] } x': ", column 19: broken JSON, Extra data",
}
NO_OBJECT = {b"[1]": "not list", b"7": "not int", b"null": "not null", b'"text"': "not str"}
NO_SAMPLE = {
    json.dumps(row).encode(): complaint
    for row, complaint in (
        ({"question": "a"}, "the columns (question) are none of"),
        ({"messages": []}, "the conversation has no message"),
        ({"messages": "hello"}, "message 1 of 'messages' is str, not an object"),
        ({"messages": [{"content": "a"}]}, "message 1 of 'messages' has no role"),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, "the content is int, not text"),
        (
            {"messages": [USER, {"role": "assistant", "content": "a", "tool_calls": "x"}]},
            "'tool_calls' is str, not a list",
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [7]}]},
            "must be an object with a function that has a name",
        ),
        ({"messages": [USER, {"role": "critic", "content": "wrong!"}]}, "drops text of message 2 (critic)"),
        ({"conversations": [{"from": "nobody", "value": "a"}]}, "is from 'nobody': known are"),
        ({"input_ids": [1, 10**7]}, "token 10000000 is outside the tokenizer's vocabulary"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate pair"),
        ({"messages": [USER, {"role": "assistant", "content": "a", "weight": 7}]}, "a message has weight=7"),
        ({"messages": [USER, {"role": "assistant", "content": "a<|im_end|>"}]}, "ends a turn twice"),
    )
}


def mixed(good: list[bytes], bad: list[bytes]) -> list[bytes]:
    """Good and bad rows in one order, each kind in its own."""
    places = random.Random(0).sample(range(len(good) + len(bad)), len(bad))
    rest, wrong = iter(good), iter(bad)
    return [next(wrong) if number in places else next(rest) for number in range(len(good) + len(bad))]


def spelled(rows: list[Any]) -> list[bytes]:
    return [json.dumps(row).encode() for row in rows]


def tokens_of(corpus: Corpus) -> list[list[int]]:
    """Ids and marks of every sample, those that are trained on first."""
    listed = []
    for stream in (corpus.train, corpus.validation):
        assert isinstance(stream, TokenStream)
        for begin, end in pairwise([*stream.starts.tolist(), stream.size]):
            listed.append(stream.read(begin, end).tolist() + np.asarray(stream.marks)[begin:end].tolist())
    return listed


def samples(folder: Path, name: str, *, processes: int = 1, **data: Any) -> Corpus:
    settings = {"validation": 0.25, "malformed": "skip", **data}
    plan = Data(path=str(folder / name), form="samples", tokenizer=str(folder), **settings)
    return prepare(plan, cache_root=folder / f"cache{processes}", processes=processes)


def refused(folder: Path, name: str, **data: Any) -> str:
    with pytest.raises(DataError) as error:
        samples(folder, name, **data)
    return str(error.value)


def test_samples_are_those_of_the_file_without_malformed_rows(folder: Path) -> None:
    """In content, order and split, however many processes encode; rows keep their numbers in the file."""
    bad = [*NO_JSON, *NO_OBJECT, *NO_SAMPLE]
    lines = mixed(spelled(chats(40)), bad)
    (folder / "chat.jsonl").write_bytes(b"\n".join(lines))
    (folder / "clean.jsonl").write_bytes(b"\n".join(spelled(chats(40))))
    clean = samples(folder, "clean.jsonl", malformed="refuse", validation=0.0)
    for processes in (1, 3):
        corpus = samples(folder, "chat.jsonl", processes=processes, validation=0.0)
        assert tokens_of(corpus) == tokens_of(clean)
        assert isinstance(corpus.train, TokenStream) and corpus.train.rows is not None
        assert corpus.train.rows.tolist() == [number for number, line in enumerate(lines) if line not in bad]
        assert (corpus.malformed.malformed, corpus.malformed.rows) == (len(bad), 40 + len(bad))
        complaints = {**NO_JSON, **NO_OBJECT, **NO_SAMPLE}
        for complaint in corpus.malformed.first:
            number = int(complaint.split(", line ")[1].split(":")[0].split(",")[0])
            assert complaints[lines[number - 1]] in complaint
    assert samples(folder, "chat.jsonl", validation=0.0).malformed == corpus.malformed, "of the cache"


def test_malformed_rows_take_no_place_among_those_held_out(folder: Path) -> None:
    (folder / "clean.jsonl").write_bytes(b"\n".join(spelled(chats(40))))
    unrendered = spelled([{"messages": [{"role": "alien", "content": text}]} for text in "abcdefghijkl"])
    bad = [*NO_JSON, *NO_OBJECT, *NO_SAMPLE, *unrendered]
    (folder / "chat.jsonl").write_bytes(b"\n".join(mixed(spelled(chats(40)), bad)))
    corpus, clean = samples(folder, "chat.jsonl"), samples(folder, "clean.jsonl", malformed="refuse")
    assert tokens_of(corpus) == tokens_of(clean)
    assert (corpus.train.num_documents, corpus.validation.num_documents) == (30, 10)


def test_all_kinds_are_named_together(folder: Path) -> None:
    """Twenty of them, and how many there are."""
    bad = [*NO_JSON, *NO_OBJECT, *NO_SAMPLE]
    (folder / "chat.jsonl").write_bytes(b"\n".join([*spelled(chats(2)), *bad * 60]))
    message = refused(folder, "chat.jsonl", malformed="refuse")
    assert message.startswith("1,260 of 1,262 rows are no samples (data.malformed=skip leaves them out): ")
    complaints = [*{**NO_JSON, **NO_OBJECT, **NO_SAMPLE}.values()]
    parts = message.split(f"{folder}/chat.jsonl, line ")[1:]
    assert [int(part.split(":")[0].split(",")[0]) for part in parts] == list(range(3, 23))
    assert all(complaint in part for complaint, part in zip(complaints, parts, strict=False))
    assert message.endswith("; and 1,240 more")


@pytest.mark.parametrize("malformed", ["refuse", "skip"])
def test_rows_that_are_all_malformed_are_refused(folder: Path, malformed: str) -> None:
    (folder / "chat.jsonl").write_bytes(b"\n".join(NO_JSON))
    message = refused(folder, "chat.jsonl", malformed=malformed)
    assert message.startswith(f"4 of 4 rows are no samples: {folder}/chat.jsonl, line 1, column 15: broken JSON")


def test_a_template_that_fails_stops_all(folder: Path) -> None:
    """A refusal by the template is a row's fault. A failure is the template's own."""
    odd = {"messages": [USER, {"role": "assistant", "content": "odd one"}]}
    (folder / "chat.jsonl").write_bytes(b"\n".join(spelled([*chats(6), odd])))
    template = (folder / "chat_template.jinja").read_text()
    refuses = "{% if messages[-1].content == 'odd one' %}{{ raise_exception('too odd') }}{% endif %}"
    (folder / "chat_template.jinja").write_text(refuses + template)
    corpus = samples(folder, "chat.jsonl")
    assert corpus.malformed.first == [
        f"{folder}/chat.jsonl, line 7: the chat template fails in line 1: too odd"
    ] and len(trained_texts(corpus)) == 6  # fmt: skip
    fails = "{% if messages[-1].content == 'odd one' %}{{ messages[7].content.more }}{% endif %}"
    (folder / "chat_template.jinja").write_text(fails + template)
    assert "line 7: the chat template fails in line 1: list object has no element 7" in refused(folder, "chat.jsonl")


def test_arrays_and_tables_likewise(folder: Path) -> None:
    """Elements that are no objects, or no UTF-8; an array that is broken has no row behind the fault."""
    clean = [json.loads(row) for row in spelled(chats(12))]
    (folder / "clean.jsonl").write_bytes(b"\n".join(spelled(clean)))
    expected = tokens_of(samples(folder, "clean.jsonl", malformed="refuse"))
    bad = [*NO_OBJECT, b"-12.5e3", b"true", b'{"messages": "\xff"}', *NO_SAMPLE]
    (folder / "chat.json").write_bytes(b"[" + b", ".join(mixed(spelled(clean), bad)) + b"]")
    corpus = samples(folder, "chat.json")
    assert tokens_of(corpus) == expected and corpus.malformed.malformed == len(bad)
    (folder / "broken.json").write_bytes(b"[" + spelled(clean)[0] + b", {]")
    assert "broken JSON, Expecting property name" in refused(folder, "broken.json")

    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    tabled = [*clean[:6], {"messages": None}, *clean[6:], {"messages": []}]
    write_table(pyarrow.Table.from_pylist(tabled), folder / "chat.parquet")
    corpus = samples(folder, "chat.parquet")
    assert tokens_of(corpus) == expected
    first, second = corpus.malformed.first
    assert "chat.parquet, row 7: the columns (messages (null)) are none of: " in first
    assert second.endswith("chat.parquet, row 14: the conversation has no message")


NO_TEXT = {
    **NO_JSON,
    **NO_OBJECT,
    b'{"body": "a"}': "no field 'text', it has: body",
    b'{"text": null}': "field 'text' is null, not text",
    b'{"text": ["a"]}': "field 'text' is list, not text",
    b'{"text": "\\ud800"}': "half a surrogate pair",
}


def texts(path: Path, **data: Any) -> Corpus:
    settings = {"validation": 0.0, "malformed": "skip", **data}
    return prepare(Data(path=str(path), tokenizer="bytes", **settings), cache_root=path.parent / "cache", processes=1)


def test_texts_are_those_that_json_reads(tmp_path: Path) -> None:
    good = [{"text": f"text {number} \u00fc\n" * (1 + number % 7)} for number in range(50)]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(mixed(spelled(good), [*NO_TEXT])))
    corpus = texts(path)
    expected = []
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
            row["text"].encode()
            expected.append(row["text"])
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
    assert expected == [row["text"] for row in good]
    stream = corpus.train
    assert isinstance(stream, TokenStream)
    ends = [*stream.starts.tolist(), stream.size]
    decoded = [corpus.tokenizer.decode(stream.read(begin, end)) for begin, end in pairwise(ends)]
    assert [text.removeprefix("<|endoftext|>") for text in decoded] == expected
    assert (corpus.malformed.malformed, corpus.malformed.rows) == (len(NO_TEXT), 50 + len(NO_TEXT))
    assert texts(path).malformed == corpus.malformed, "of the cache"
    with pytest.raises(DataError, match=r"^12 of 62 rows are no texts \(data.malformed=skip leaves them out\): "):
        texts(path, malformed="refuse")
    path.write_bytes(b"\n".join(NO_TEXT))
    with pytest.raises(DataError, match=r"^12 of 12 rows are no texts: ") as error:
        texts(path)
    lines = enumerate(NO_TEXT.values(), start=1)
    assert all(f"line {number}" in str(error.value) and what in str(error.value) for number, what in lines)


def test_a_limit_ends_the_reading_of_rows_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([*spelled([{"text": "a" * 100}] * 4), b"{", *spelled([{"text": "b"}]), b"{"]))
    assert texts(path, limit_bytes=100).malformed.malformed == 0
    assert texts(path, limit_bytes=401).malformed.malformed == 1, "the last row is not read"


def test_a_mixture_names_the_rows_of_all_its_sources(folder: Path) -> None:
    for name, bad in (("a", [*NO_JSON]), ("b", [*NO_OBJECT])):
        (folder / f"{name}.jsonl").write_bytes(b"\n".join(mixed(spelled(chats(20)), bad)))
    sources = tuple(MixtureSource(path=str(folder / f"{name}.jsonl"), weight=1) for name in "ab")
    data = Data(mixture=sources, form="samples", tokenizer=str(folder), validation=0.0, malformed="refuse")
    with pytest.raises(DataError) as error:
        prepare(data, cache_root=folder / "cache", processes=1)
    assert str(error.value).count("4 of 24 rows are no samples") == 2
    skips = Data(mixture=sources, form="samples", tokenizer=str(folder), validation=0.0, malformed="skip")
    corpus = prepare(skips, cache_root=folder / "cache", processes=1)
    assert (corpus.malformed.malformed, corpus.malformed.rows, len(corpus.malformed.first)) == (8, 48, 8)
    assert [part.num_documents for part in corpus.train.parts] == [20, 20]


def test_the_first_rows_may_be_malformed(folder: Path) -> None:
    """The first readable row decides the form of a file."""
    pair = {"prompt": "p", "chosen": "a", "rejected": "b"}
    (folder / "pairs.jsonl").write_bytes(b"\n".join([b"{", b"[1]", *spelled([pair])]))
    data = Data(path=str(folder / "pairs.jsonl"))
    assert form_of(data) == "samples" and holds_pairs(data)
    (folder / "text.jsonl").write_bytes(b'{\n{"text": "a"}')
    assert form_of(Data(path=str(folder / "text.jsonl"))) == "text"


@pytest.mark.filterwarnings("ignore")  # of the library, about its own pickling
def test_rows_that_the_datasets_library_pads_are_read_as_what_they_are(folder: Path) -> None:
    """Its .jsonl files give each row the columns of all, null where it has none: `data show` reads samples."""
    datasets = pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    rows = [{"text": None, **chat} for chat in chats(6)] + [{"text": "a plain text", "messages": None}]
    table = pyarrow.Table.from_pylist(rows)
    datasets.Dataset(table, fingerprint="padded").to_json(str(folder / "padded.jsonl"))
    assert b'"text":null' in (folder / "padded.jsonl").read_bytes()
    assert form_of(Data(path=str(folder / "padded.jsonl"))) == "samples"
    corpus = samples(folder, "padded.jsonl", malformed="refuse", validation=0.0)
    assert isinstance(corpus.train, TokenStream) and corpus.train.num_documents == 7


def test_a_null_is_no_text(folder: Path) -> None:
    (folder / "padded.jsonl").write_bytes(b"\n".join(spelled([{**row, "text": None} for row in chats(6)])))
    assert form_of(Data(path=str(folder / "padded.jsonl"))) == "samples"


def test_a_run_says_how_many_rows_were_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the start, at the end, in its record and in `data show`; a resume may not change what is left out."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").write_bytes(b"\n".join(mixed(spelled(chats(20)), [*NO_JSON])))
    words = ["tune", "model=llama-tiny", "model.init=random", "data=chat.jsonl", "recipe.sequence=64", "--no-dry-run"]
    words += ["recipe.global_batch=2", "recipe.epochs=1", "run=runs/a"]
    assert main(words) == 2
    assert "4 of 24 rows are no samples (data.malformed=skip leaves them out): " in capsys.readouterr().err
    assert main([*words, "data.malformed=skip"]) == 0
    out, err = capsys.readouterr()
    assert "4 of 24 rows are left out as malformed: chat.jsonl, line " in out + err
    assert "4 malformed rows left out" in out + err
    assert main([*words, "data.malformed=skip", "resume=auto", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["malformed_rows"] == 4
    assert main(["data", "show", "data=chat.jsonl", "data.malformed=skip", "recipe.sequence=64", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["malformed"]["malformed"], shown["malformed"]["rows"]) == (4, 24)
    assert main(["data", "show", "data=chat.jsonl", "data.malformed=skip", "recipe.sequence=64"]) == 0
    assert "4 of 24 rows are left out as malformed" in " ".join(capsys.readouterr().out.split())
    assert main(["data", "show", "data=chat.jsonl", "data.malformed=skip", "recipe.sequence=64", "--html=p.html"]) == 0
    assert "4 of 24 rows are left out as malformed: chat.jsonl, line " in Path("p.html").read_text()
    capsys.readouterr()
    Path("chat.jsonl").write_bytes(b"\n".join(spelled(chats(20))))
    assert main([*words, "resume=auto"]) == 2
    assert "trained with data.malformed=skip, the plan says data.malformed=refuse" in capsys.readouterr().err


def test_files_with_the_same_texts_have_their_own_malformed_rows(tmp_path: Path) -> None:
    """They share a cache of tokens, and neither a count nor a refusal."""
    texts = spelled([{"text": f"row {number}"} for number in range(20)])
    (tmp_path / "clean.jsonl").write_bytes(b"\n".join(texts))
    (tmp_path / "mixed.jsonl").write_bytes(b"\n".join([*texts, *NO_JSON]))

    def count(name: str, malformed: Literal["refuse", "skip"]) -> int:
        plan = Data(path=str(tmp_path / name), form="text", tokenizer="bytes", malformed=malformed)
        return prepare(plan, cache_root=tmp_path / "cache").malformed.malformed

    for _ in range(2):
        assert (count("mixed.jsonl", "skip"), count("clean.jsonl", "skip")) == (len(NO_JSON), 0)
        assert count("clean.jsonl", "refuse") == 0
        with pytest.raises(DataError, match="rows are no texts"):
            count("mixed.jsonl", "refuse")


def test_files_with_the_same_rows_name_their_own_malformed_rows(folder: Path) -> None:
    """A copy, and a file whose blank line moves the numbers of its lines: tokens and fingerprint are the same."""
    rows = spelled(chats(12))
    broken = [*rows[:6], next(iter(NO_JSON)), *rows[6:]]
    files = {"first.jsonl": broken, "copy.jsonl": broken, "blank.jsonl": [b"", *broken]}
    for name, lines in files.items():
        (folder / name).write_bytes(b"\n".join(lines))
    for _ in range(2):
        corpora = {name: samples(folder, name) for name in files}
        for (name, corpus), line in zip(corpora.items(), (7, 7, 8), strict=True):
            [complaint] = corpus.malformed.first
            assert complaint.startswith(f"{folder / name}, line {line}, ")
            assert corpus.fingerprint == corpora["first.jsonl"].fingerprint
            assert tokens_of(corpus) == tokens_of(corpora["first.jsonl"])


def test_a_dataset_in_memory_is_encoded_once_for_all_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process makes such a dataset anew, and no file tells that it is the same one."""

    class InMemory:
        cache_files: tuple[dict[str, str], ...] = ()
        column_names = ("messages",)

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter([*chats(20), {"messages": 3}])

    monkeypatch.setattr(data_rows, "load_hub", lambda _: InMemory())
    encoded = []
    encode = _SampleBuild._encode
    monkeypatch.setattr(_SampleBuild, "_encode", lambda self, streams: encoded.append(1) or encode(self, streams))
    data = Data(path="hub:made", form="samples", tokenizer=str(folder), validation=0.0, malformed="skip")
    for malformed in [prepare(data, cache_root=folder / "cache", processes=1).malformed for _ in range(2)]:
        assert (malformed.malformed, malformed.rows) == (1, 21) and "hub:made, row 21" in malformed.first[0]
    assert encoded == [1]


def test_rows_with_one_fault_are_named_together(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([b'{"text": "good"}', *[b'{"body": 1}'] * 3, b"[1]", b'{"body": 2}', b'{"text": 1}']))
    with pytest.raises(DataError) as error:
        texts(path, malformed="refuse")
    assert str(error.value) == (
        "6 of 7 rows are no texts (data.malformed=skip leaves them out): "
        f"{path}, 4 lines (2, 3, 4, 6): no field 'text', it has: body; set data.text_field; "
        f"{path}, line 5: a row is an object with fields, not list; "
        f"{path}, line 7: field 'text' is int, not text; set data.text_field or correct the row"
    )
    path.write_bytes(b'{"body": 1}\n' * 100)
    with pytest.raises(DataError, match=r"rows.jsonl, 20 lines \(1, 2, 3, .*, 20\): no field 'text', .*; and 80 more$"):
        texts(path, malformed="refuse")

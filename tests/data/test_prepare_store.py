"""`data prepare`: any number of workers, killed at any time, make the same store, whatever the format of the text."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from meshwright.data import Tokenizer, prepare
from meshwright.data.stored.encoding import prepare_store
from meshwright.data.stored.index import read_index
from meshwright.data.stored.shard_cache import ShardCache
from meshwright.remote.locations import Location
from meshwright.spec import Data
from meshwright.spec.errors import DataError, MalformedRowError
from meshwright.verbs.main import main

RAW = Path(__file__).parent / "raw_shards"
"""MDS by mosaicml-streaming 0.13.0 (MDSWriter, size_limit=400), .tar by webdataset 1.0.2 (TarWriter)."""
MDS_TEXTS = [f"sample {number} \u00e9\u4e2d" + "x" * (5 * number) for number in range(12)]


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def text_lines(number: int, words: int = 12) -> list[str]:
    return [f"{number}: {' '.join(str(number * word) for word in range(words))}" for number in range(number)]


def stored_texts(store: str, tmp_path: Path, side: str = "train") -> list[str]:
    """The documents of a store, decoded."""
    location = Location.at(store)
    index = read_index(location)
    shards = getattr(index, side)
    cache, texts = ShardCache(location, shards, index.vocab, tmp_path / "copies", 2**40), list[str]()
    tokenizer = Tokenizer.bytes()
    for number in range(len(shards.file)):
        stream = cache.open(number)
        ends = np.append(stream.starts[1:], stream.num_tokens)
        for begin, end in zip(stream.starts.tolist(), ends.tolist(), strict=True):
            texts.append(tokenizer.decode(stream.read(begin + 1, end)))
    return texts


def settings(path: Path | str, **keys: object) -> Data:
    return Data(path=str(path), tokenizer="bytes", **{"validation": 0.0, **keys})  # type: ignore[arg-type]


def files_of(store: Path) -> dict[str, bytes]:
    return {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def test_workers_make_the_store_of_one(tmp_path: Path) -> None:
    texts = text_lines(900)
    lines = write_lines(tmp_path / "a.jsonl", texts)
    data = settings(lines, validation=0.1)
    whole = prepare_store(data, str(tmp_path / "one"), processes=1, shard_tokens=2000)
    assert whole.missing == 0 and whole.units > 3 and whole.train_shards > 2 * whole.units - 2
    for part, missing in ((2, True), (3, True), (1, False)):
        shared = prepare_store(data, str(tmp_path / "three"), part=(part, 3), processes=1, shard_tokens=2000)
        assert bool(shared.missing) == missing
    assert files_of(tmp_path / "one") == files_of(tmp_path / "three")
    held = stored_texts(str(tmp_path / "one"), tmp_path, "held")
    assert 60 < len(held) < 120
    assert sorted(held + stored_texts(str(tmp_path / "one"), tmp_path)) == sorted(texts)
    # The corpus of a run: tokens by shard, and the held-out part as one stream.
    corpus = prepare(Data(path=str(tmp_path / "one")), cache_root=tmp_path / "cache")
    assert corpus.train.num_documents + corpus.validation.num_documents == 900
    assert corpus.validation.num_tokens == sum(len(text.encode()) + 1 for text in held)
    stream = corpus.validation.parts[0]
    assert Tokenizer.bytes().decode(stream.read(int(stream.starts[1]) + 1, int(stream.starts[2]))) == held[1]


def test_a_killed_worker_goes_on(tmp_path: Path) -> None:
    """Killed without warning several times: what was finished is not touched, and nothing is lost or doubled."""
    lines, store = write_lines(tmp_path / "a.jsonl", text_lines(20_000)), tmp_path / "store"
    words = ["data", "prepare", f"data={lines}", "data.tokenizer=bytes", "data.validation=0.05", "--processes", "1"]
    command = [*words, "--shard-tokens", "8000", "-o"]
    finished: dict[str, int] = {}
    for attempt in range(3):
        worker = subprocess.Popen([sys.executable, "-m", "meshwright", *command, str(store)])
        enough = len(finished) + 2
        deadline = time.monotonic() + 60
        while len(list(store.glob("units/*.json"))) < enough and worker.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        now = {path.name: path.stat().st_mtime_ns for path in store.glob("units/*.json")}
        assert not (store / "index.json").exists() and len(now) >= enough and finished.items() <= now.items(), attempt
        finished = now
    assert main([*command, str(store)]) == 0
    assert finished.items() <= {path.name: path.stat().st_mtime_ns for path in store.glob("units/*.json")}.items()
    assert main([*command, str(tmp_path / "whole")]) == 0
    assert files_of(store) == files_of(tmp_path / "whole")
    assert not list(store.glob(".unit-*"))


def test_formats_hold_the_same_text(tmp_path: Path) -> None:
    texts = text_lines(40)
    lines = write_lines(tmp_path / "a.jsonl", texts).read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(lines))
    paths = ["a.jsonl", "b.jsonl.gz", "c.json.gz"]
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "d.parquet")
    for name in [*paths, "d.parquet"]:
        prepare_store(settings(tmp_path / name), str(tmp_path / f"{name}.store"), processes=1, shard_tokens=500)
        assert stored_texts(str(tmp_path / f"{name}.store"), tmp_path) == texts, name


def test_zst_is_read(tmp_path: Path) -> None:
    import zstandard

    texts = text_lines(40)
    lines = write_lines(tmp_path / "a.jsonl", texts).read_bytes()
    # Two frames, as tools write that compress in parallel.
    frames = [zstandard.ZstdCompressor().compress(part) for part in (lines[:500], lines[500:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    prepare_store(settings(tmp_path / "a.jsonl.zst"), str(tmp_path / "store"), processes=1)
    assert stored_texts(str(tmp_path / "store"), tmp_path) == texts
    for number, cut in enumerate((b"".join(frames)[:-10], frames[0] + frames[1][:9], frames[0][:-1])):
        path = tmp_path / f"{number}.jsonl.zst"
        path.write_bytes(cut)
        for malformed in ("refuse", "skip"):
            with pytest.raises(DataError, match="is damaged or cut off: its last frame has no end; copy it again"):
                prepare_store(
                    settings(path, malformed=malformed), str(tmp_path / f"cut{number}{malformed}"), processes=1
                )


def test_shards_of_other_trainers(tmp_path: Path) -> None:
    (tmp_path / "mds").mkdir()
    for file in (*RAW.glob("*.mds"), RAW / "index.json"):
        shutil.copy(file, tmp_path / "mds")
    prepare_store(settings(tmp_path / "mds"), str(tmp_path / "a"), processes=1)
    assert stored_texts(str(tmp_path / "a"), tmp_path) == MDS_TEXTS
    (tmp_path / "mds" / "shard.00003.mds").unlink()
    with pytest.raises(
        DataError, match=r"lacks 1 shard of its index\.json, as shard\.00003\.mds: copy the folder again"
    ):
        prepare_store(settings(tmp_path / "mds"), str(tmp_path / "lacking"), processes=1)
    (tmp_path / "wds").mkdir()
    for file in RAW.glob("*.tar.gz"):
        (tmp_path / "wds" / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    prepare_store(settings(tmp_path / "wds"), str(tmp_path / "b"), processes=1)
    expected = [f"web sample {number} \u00e9" for number in range(5)] + [f"in json {number}" for number in range(3)]
    assert stored_texts(str(tmp_path / "b"), tmp_path) == expected
    # Named in a plan, they are encoded on the way to the first step, once.
    for _ in range(2):
        corpus = prepare(settings(tmp_path / "wds"), cache_root=tmp_path / "cache")
        assert corpus.train.num_documents == 8
    assert len(list((tmp_path / "cache" / "stores").glob("raw-*"))) == 1


@pytest.mark.parametrize("size", [0, 1, 37, 38, 39, 200])
def test_lines_are_cut_nowhere(tmp_path: Path, size: int) -> None:
    """Spans may end anywhere, at a line end or beside it: every line is read once."""
    from meshwright.data.text.raw_shards import Span, documents

    texts = ["a" * 20, "b" * 5, "c" * 60, "d"]
    lines = write_lines(tmp_path / "a.jsonl", texts)
    whole = lines.stat().st_size
    step = size or whole
    spans = [
        Span(path=str(lines), begin=begin, end=min(whole, begin + step), file_bytes=whole)
        for begin in range(0, whole, step)
    ]
    data = settings(lines)
    assert [document.text for span in spans for document in documents(span, data)] == texts
    # The same from behind a URL, of which only the span is copied.
    location = Location.open(f"memory://lines-{size}/a.jsonl")
    location.write(lines.read_bytes())
    remote = [Span(path=location.url, begin=span.begin, end=span.end, file_bytes=whole) for span in spans]
    assert [document.text for span in remote for document in documents(span, data)] == texts


def test_malformed_rows_are_named_or_counted(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "good"}\n{"txt": 1}\n{"text": "too"}\n', encoding="utf-8")
    with pytest.raises(MalformedRowError, match=r"a\.jsonl, line 2: no field 'text', it has: txt"):
        prepare_store(settings(lines), str(tmp_path / "refused"), processes=1)
    assert not list((tmp_path / "refused").glob("units/*"))
    prepared = prepare_store(settings(lines, malformed="skip"), str(tmp_path / "store"), processes=1)
    assert prepared.malformed_rows == 1 and prepared.documents == 2
    assert prepare(Data(path=str(tmp_path / "store")), cache_root=tmp_path / "c").malformed.malformed == 1


def test_what_is_refused(tmp_path: Path) -> None:
    lines, store = write_lines(tmp_path / "a.jsonl", text_lines(50)), tmp_path / "store"
    prepare_store(settings(lines), str(store), part=(1, 2), processes=1, shard_tokens=300)
    with pytest.raises(DataError, match=r"store is not finished: run `meshwright data prepare`"):
        prepare(Data(path=str(store)), cache_root=tmp_path / "cache")
    with pytest.raises(DataError, match=r"begun with shard_tokens=300, not 400"):
        prepare_store(settings(lines), str(store), processes=1, shard_tokens=400)
    write_lines(lines, text_lines(51))
    with pytest.raises(DataError, match=r"begun with files of other names or sizes"):
        prepare_store(settings(lines), str(store), processes=1, shard_tokens=300)
    with pytest.raises(DataError, match=r"no tokenizer is named"):
        prepare_store(Data(path=str(lines)), str(tmp_path / "new"))
    with pytest.raises(DataError, match=r"exists and is no token store"):
        prepare_store(settings(lines), str(tmp_path))
    with pytest.raises(DataError, match=r"damaged or cut off"):
        broken = tmp_path / "shard.00000.mds"
        broken.write_bytes((RAW / "shard.00000.mds").read_bytes()[:300])
        prepare_store(settings(broken), str(tmp_path / "other"), processes=1)
    with pytest.raises(DataError, match=r"b\.jsonl\.gz is damaged or cut off"):
        (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(os.urandom(999) + b"\n")[:-40])
        prepare_store(settings(tmp_path / "b.jsonl.gz", malformed="skip"), str(tmp_path / "third"), processes=1)


def test_the_verb_says_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, store = write_lines(tmp_path / "a.jsonl", text_lines(200)), tmp_path / "store"
    words = ["data", "prepare", f"data={lines}", "data.tokenizer=bytes", "-o", str(store), "--shard-tokens", "1000"]
    assert main([*words, "--part", "1/2", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["missing"] == first["units"] - first["encoded"] > 0
    assert main([*words, "--part", "2/2"]) == 0
    assert f"train from it with data={store}" in capsys.readouterr().out
    for part in ("0/2", "3/2", "x"):
        assert main([*words, "--part", part]) == 2
        assert "--part" in capsys.readouterr().err


def test_a_store_is_not_prepared_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, store = write_lines(tmp_path / "a.jsonl", text_lines(40)), tmp_path / "store"
    prepare_store(settings(lines), str(store), processes=1)
    assert main(["data", "prepare", f"data={store}", "data.tokenizer=bytes", "-o", str(tmp_path / "again")]) == 2
    assert capsys.readouterr().err.endswith(
        f"data.path={store} is a token store, so it is prepared already: train with data={store}\n"
    )
    assert not (tmp_path / "again").exists()


def test_a_folder_of_several_kinds_is_prepared_whole(tmp_path: Path) -> None:
    (tmp_path / "mixed").mkdir()
    write_lines(tmp_path / "mixed" / "a.jsonl", text_lines(4))
    shutil.copy(RAW / "shard.00000.mds", tmp_path / "mixed")
    prepare_store(settings(tmp_path / "mixed"), str(tmp_path / "store"), processes=1)
    stored = stored_texts(str(tmp_path / "store"), tmp_path)
    assert set(text_lines(4)) < set(stored) and MDS_TEXTS[0] in stored

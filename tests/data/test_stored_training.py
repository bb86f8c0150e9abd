"""Training from a token store: on disk or behind a URL whose requests fail, by any ranks; refused if damaged."""

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data import Tokenizer, prepare
from meshwright.data.preparation import check_sources
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.data.stored.encoding import prepare_store
from meshwright.remote import locations
from meshwright.remote.locations import Location
from meshwright.spec import Data, Recipe
from meshwright.spec.errors import DataError, StoreError
from meshwright.spec.plan.plan import MixtureSource
from meshwright.training.step.batches import Feed
from meshwright.verbs.main import main
from tests.data.stores_for_tests import numbered_shards, stored_rows, write_store
from tests.data.test_prepare_store import files_of, text_lines, write_lines
from tests.remote import object_store
from tests.remote.object_store import BUCKET, FaultyStore
from tests.verbs import launched, toy

SEQUENCE = 32


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, FaultyStore]]:
    with object_store.serve() as served:
        patch = pytest.MonkeyPatch()
        object_store.use(patch, served[0])
        patch.setattr(locations, "FIRST_PAUSE_S", 0.01)
        yield served
        patch.undo()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of some 40 shards."""
    lines = write_lines(tmp_path / "a.jsonl", text_lines(600))
    data = Data(path=str(lines), tokenizer="bytes", validation=0.1)
    assert prepare_store(data, str(tmp_path / "store"), processes=1, shard_tokens=600).train_shards > 34
    return tmp_path / "store"


def copy_to(url: str, folder: Path) -> Location:
    location = Location.open(url)
    for name, content in files_of(folder).items():
        (location / name).write(content)
    return location


def record_rows(folder: Path, rank: int) -> None:
    """Let the feed of a rank write down what it reads."""
    read = Feed._read

    def note(self: Feed, cursor: int, count: int) -> Any:
        batch = read(self, cursor, count)
        size = count // self.share.parts
        with (folder / f"rows-{rank}.jsonl").open("a") as file:
            for row, tokens in enumerate(batch.tokens.tolist(), start=cursor + size * self.share.index):
                file.write(json.dumps([row, tokens]) + "\n")
        return batch

    Feed._read = note  # type: ignore[method-assign]


def bytes_below(folder: Path) -> int:
    """The bytes of shards in a folder from which another thread may remove some."""
    total = 0
    for file in folder.glob("*.train"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def test_ranks_that_change_read_what_one_reads(store: Path, tmp_path: Path) -> None:
    """Two real ranks, one, and two again, from checkpoints: each row is read by one rank, and is the right one."""
    words = toy.train(store, tmp_path / "run", "layout.dp_replicate=auto", "resume=auto")
    words = [word for word in words if not word.startswith(("recipe.steps", "recipe.eval", "recipe.check"))]
    words += [f"recipe.eval_every={10**6}", f"recipe.checkpoint_every={10**6}"]
    rows = numbered_rows(
        Data(path=str(store)), Recipe(sequence=SEQUENCE, seed=0), (corpus := prepare(Data(path=str(store)))),
        corpus.train, shuffle=True,
    )  # fmt: skip
    steps = 5 * len(rows) // 16  # an epoch and a quarter
    lasts = (steps // 3, 2 * steps // 3, steps)
    read: dict[int, list[int]] = {}
    for part, (last, ranks) in enumerate(zip(lasts, (2, 1, 2), strict=True)):
        folder = tmp_path / f"part-{part}"
        ended = launched.launch(ranks, [*words, f"recipe.steps={last}"], folder, fault=partial(record_rows, folder))
        assert ended.codes == [0] * ranks, ended.errors
        for rank in range(ranks):
            for line in (folder / f"rows-{rank}.jsonl").read_text().splitlines():
                row, tokens = json.loads(line)
                assert row not in read, "a row is read twice"
                read[row] = tokens
    assert sorted(read) == list(range(4 * steps)), "a row is lost"
    assert [read[row] for row in range(4 * steps)] == rows.take(0, 4 * steps).tokens.tolist()


def test_failing_requests_change_nothing(server: tuple[str, FaultyStore], tmp_path: Path) -> None:
    """Text, store and shards behind S3, of whose requests 10 % fail, with room for two blocks of shards only."""
    lines = write_lines(tmp_path / "a.jsonl", text_lines(600))
    Location.open(f"s3://{BUCKET}/raw/a.jsonl").upload(lines)
    data, url = Data(path=f"s3://{BUCKET}/raw/*.jsonl", tokenizer="bytes", validation=0.1), f"s3://{BUCKET}/store"
    server[1].share, failures = 0.1, server[1].failures
    try:
        for part in (1, 2):
            prepared = prepare_store(data, url, part=(part, 2), processes=1, shard_tokens=600)
        assert prepared.missing == 0
        prepare_store(replace(data, path=str(lines)), str(tmp_path / "local"), processes=1, shard_tokens=600)
        remote = {file.name: file.size_bytes for file in Location.open(url).list_files()}
        assert remote == {name: len(content) for name, content in files_of(tmp_path / "local").items()} | {
            name: remote[name] for name in ("store.json", "index.json")
        }
        corpora = [
            prepare(Data(path=path, cache_bytes=48_000), cache_root=tmp_path / f"cache-{number}")
            for number, path in enumerate((url, str(tmp_path / "local")))
        ]
        far, near = (
            numbered_rows(Data(), Recipe(sequence=SEQUENCE, seed=1), corpus, corpus.train, shuffle=True)
            for corpus in corpora
        )
        shards = tmp_path / "cache-0" / "stores" / corpora[0].key / "shards"
        sizes, drawn = [], random.getstate()
        for cursor in range(0, 2 * len(near), 40):
            assert np.array_equal(far.take(cursor, 40).tokens, near.take(cursor, 40).tokens)
            sizes.append(bytes_below(shards))
        assert max(sizes) <= 48_000 < int(corpora[0].train.parts[0].cache.shards.bytes.sum())  # type: ignore[attr-defined]
        assert random.getstate() == drawn, "the state of Python's generator is part of a checkpoint"
        held = [corpus.validation.parts[0] for corpus in corpora]
        assert np.array_equal(held[0].read(0, held[0].size), held[1].read(0, held[1].size))
        assert server[1].failures > failures + 5
    finally:
        server[1].share = 0.0


def test_raw_text_behind_a_url_is_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Encoded on the way to the first step, with the rows of the same files on disk."""
    lines = write_lines(tmp_path / "a.jsonl", text_lines(300))
    Location.open("memory://raw/texts/a.jsonl").upload(lines)
    words = toy.train(tmp_path, tmp_path / "run", "data.tokenizer=bytes", "recipe.steps=2", "recipe.eval_every=2")
    words = [word.replace(f"data={tmp_path}", "data=memory://raw/texts") for word in words]
    assert main(words) == 0, capsys.readouterr().err
    # Encoded once: without the text, only the listing is missing.
    assert toy.call(capsys, *[w for w in words if not w.startswith("data.tokenizer")], f"run={tmp_path}/2")[0] == 2


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (lambda shard: shard.unlink(), "is missing"),
        (lambda shard: shard.write_bytes(shard.read_bytes()[:-8]), "is damaged: it has"),
        (lambda shard: shard.write_bytes(b"?" + shard.read_bytes()[1:]), "is damaged: it has another hash"),
    ],
)
def test_a_damaged_shard_is_named(store: Path, tmp_path: Path, harm: Any, complaint: str) -> None:
    """Missing and short ones at the start, changed ones when they are opened; preparing again makes them anew."""
    before, shard = files_of(store), store / "shards" / "000000-0.train"
    harm(shard)
    with pytest.raises(DataError, match=f"000000-0.train {complaint}.*remove .* and run `meshwright data prepare`"):
        prepare(Data(path=str(store)), cache_root=tmp_path / "cache")
    shard.unlink(missing_ok=True)
    with pytest.raises(DataError, match="is missing"):
        check_sources(Data(path=str(store)))
    data = Data(path=str(tmp_path / "a.jsonl"), tokenizer="bytes", validation=0.1)
    assert prepare_store(data, str(store), processes=1, shard_tokens=600).encoded == 1
    assert files_of(store) == before


def test_a_damaged_copy_is_fetched_again(store: Path, tmp_path: Path) -> None:
    location, folder = copy_to("memory://copies/store", store), tmp_path / "copies"
    whole = stored_rows(str(store), store, sequence=SEQUENCE).take(0, 60).tokens
    assert np.array_equal(stored_rows(location.url, folder, sequence=SEQUENCE).take(0, 60).tokens, whole)
    for copy in (folder / "shards").glob("*.train"):
        copy.write_bytes(bytes(copy.stat().st_size))
    assert np.array_equal(stored_rows(location.url, folder, sequence=SEQUENCE).take(0, 60).tokens, whole)
    # What is damaged in the store itself is refused by name.
    for file in location.list_files():
        if file.name.endswith(".train"):
            (location / file.name).write(bytes(file.size_bytes))
    with pytest.raises(StoreError, match=r"shards/\d+-\d\.train is damaged: its hash differs"):
        stored_rows(location.url, tmp_path / "others", sequence=SEQUENCE).take(0, 60)


def test_what_a_store_refuses(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tokenizer.shipped().save(tmp_path)
    url = copy_to("memory://refusals/store", store).url
    for changes, complaint in (
        ({"tokenizer": str(tmp_path)}, "is not the tokenizer that encoded"),
        ({"tokenizer": "bpe:512"}, "is not the tokenizer that encoded"),
        ({"validation": 0.5}, "holds out 0.1"),
        ({"limit_bytes": 100}, "data.limit_bytes=100 is not read"),
        ({"form": "samples"}, "data.form=samples is not read"),
        ({"path": url, "cache_bytes": 5000}, r"is too little: two blocks .* take data.cache_bytes=\d+ or more"),
    ):
        with pytest.raises(DataError, match=complaint):
            prepare(replace(Data(path=str(store)), **changes), cache_root=tmp_path / "cache")  # type: ignore[arg-type]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(DataError, match=r"has 0.0 MiB free.*take a lower data.cache_bytes, at least \d+"):
        check_sources(Data(path=url))


def test_stores_are_mixed_by_weight(tmp_path: Path) -> None:
    """Windows of two stores, numbered apart: shares hold from the first row on, each store in its own order."""
    windows = [[3] * 40, [5] * 20]
    for name, counts in zip("ab", windows, strict=True):
        write_store(tmp_path / name, numbered_shards(counts, SEQUENCE))
    sources = tuple(
        MixtureSource(path=str(tmp_path / name), weight=weight) for name, weight in (("a", 3.0), ("b", 1.0))
    )
    data = Data(mixture=sources)
    corpus = prepare(data, cache_root=tmp_path / "cache")
    rows = numbered_rows(data, Recipe(sequence=SEQUENCE, seed=2), corpus, corpus.train, shuffle=True)
    batch = rows.take(0, 120)
    alone = [stored_rows(str(tmp_path / name), tmp_path, sequence=SEQUENCE, seed=2) for name in "ab"]
    expected = [alone[0].take(0, 90).tokens[:, 0].tolist(), alone[1].take(0, 30).tokens[:, 0].tolist()]
    chosen = batch.tokens[:, 0].tolist()
    order = [int(source) for source in rows.interleaving.locate(np.arange(120))[0]]  # type: ignore[attr-defined]
    assert [order.count(source) for source in (0, 1)] == [90, 30]
    for source in (0, 1):
        assert [name for name, number in zip(chosen, order, strict=True) if number == source] == expected[source]

"""`hf://`: what other writers do is seen, requests that write are few, and a run goes on from a bucket."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.remote.locations import Location
from meshwright.remote.transfer import download, upload
from meshwright.spec.errors import PlanError, StoreError
from meshwright.spec.plan.plan import Store
from meshwright.store.mirror import StoredRun
from meshwright.training import loop
from meshwright.verbs.main import main
from tests.remote import hub_server
from tests.remote.hub_server import Hub
from tests.training import running
from tests.training.running import Crashed, PowerCut, assert_same_end

BUCKET, MODEL, TEXTS = "hf://buckets/org/runs", "hf://org/model", "hf://datasets/org/texts"


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server.serve() as hub:
        hub_server.use(monkeypatch, hub, tmp_path_factory.mktemp("hub"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield hub


@pytest.mark.parametrize("base", [BUCKET, MODEL, TEXTS])
def test_files_are_read_and_written(hub: Hub, base: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = Location.open(f"{base}/a")
    file = folder / "b" / "x.txt"
    assert file.describe() is None and folder.list_files() == []
    file.write(b"one two" * 3_000)
    first = file.describe()
    assert first is not None and first.size_bytes == 21_000 and first.version
    assert [(entry.name, entry.version) for entry in folder.list_files()] == [("b/x.txt", first.version)]
    assert file.read(4, 7) == b"two" and len(file.read()) == 21_000
    source, pieces = tmp_path / "source", list[int]()
    source.write_bytes(bytes(range(256)) * 9_000)
    (folder / "large").upload(source)
    (folder / "large").download(tmp_path / "copy", lambda: pieces.append(1))
    assert (tmp_path / "copy").read_bytes() == source.read_bytes() and pieces
    file.remove()
    file.remove()
    assert file.describe() is None and [entry.name for entry in folder.list_files()] == ["large"]
    assert capfd.readouterr() == ("", ""), "the library draws a bar for each file"


@pytest.mark.parametrize("base", [BUCKET, MODEL, TEXTS])
def test_what_another_machine_writes_is_seen(hub: Hub, base: str) -> None:
    """Rank 0 waits for the files of other ranks, and a copy is brought again when the file has changed."""
    from huggingface_hub import HfFileSystem

    folder = Location.open(f"{base}/a")
    (folder / "x").write(b"first")
    before = (folder / "x").describe()
    assert len(folder.list_files()) == 1
    other = HfFileSystem(skip_instance_cache=True)
    other.pipe_file(f"{folder.path}/x", b"second!")
    other.pipe_file(f"{folder.path}/y", b"more")
    assert [file.name for file in folder.list_files()] == ["x", "y"]
    after = (folder / "x").describe()
    assert after is not None and before is not None and after.version != before.version and after.size_bytes == 7
    assert (folder / "x").read() == b"second!"


def test_many_files_are_one_request(hub: Hub, tmp_path: Path) -> None:
    names = [f"shard-{number:02d}" for number in range(30)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 100)
    for base in (BUCKET, MODEL):
        folder = Location.open(f"{base}/many")
        upload([(tmp_path / name, folder / name, "") for name in names])
        assert [file.name for file in folder.list_files()] == names
    assert (hub.batches, hub.commits) == (1, 1)
    bucket = Location.open(f"{BUCKET}/many")
    download([(bucket / name, tmp_path / "back" / name, "") for name in names])
    assert all((tmp_path / "back" / name).read_bytes() == name.encode() * 100 for name in names)
    bucket.remove_all(names[:20])
    assert [file.name for file in bucket.list_files()] == names[20:] and hub.batches == 2


def test_a_run_goes_on_from_a_bucket(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.setattr("meshwright.training.plot.loss_plot", lambda records, path, **options: None)
    texts = running.write_texts(tmp_path / "texts")
    options = {"steps": 14, "eval_every": 3, "checkpoint_every": 4}
    loop.run(running.plan(texts, tmp_path / "whole", **options))
    stored = replace(running.plan(texts, tmp_path / "run", **options), store=Store(url=f"{BUCKET}/run"))
    with pytest.raises(PowerCut):
        loop.run(stored, watchers=[Crashed(11)])
    shutil.rmtree(tmp_path / "run")
    assert loop.run(stored, resume="auto").stopped == "done"
    assert_same_end(tmp_path / "run", tmp_path / "whole")
    assert StoredRun(Location.open(f"{BUCKET}/run")).list_checkpoints()[-1].step == 14
    # Two starts with a probe, at most five checkpoints with files, records and COMMIT, and their removal.
    assert hub.batches <= 40 and hub.commits == 0
    assert "Processing Files" not in capfd.readouterr().err


def test_a_model_goes_to_a_repository_in_one_commit(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    texts = running.write_texts(tmp_path / "texts")
    loop.run(running.plan(texts, tmp_path / "run", steps=2))
    assert main(["export", str(tmp_path / "run"), MODEL]) == 0
    assert hub.commits == 1 and {".gitattributes", "config.json"} < hub.stores["models/org/model"].keys()
    assert main(["generate", MODEL, "--prompt", "a", "--max-new-tokens", "2", "--json"]) == 0
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), MODEL]) == 2
    assert "is there already" in capsys.readouterr().err and hub.commits == 1


def test_refusals(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="takes 128 commits an hour: give a bucket"):
        Store(url="hf://org/model/run")
    with pytest.raises(PlanError, match="uploads to the Hub cannot be slowed"):
        Store(url=f"{BUCKET}/run", bandwidth=5)
    for missing in ("hf://buckets/org/none/run", "hf://org/none/a", "hf://datasets/org/none/a"):
        assert Location.open(missing).describe() is None and Location.open(missing).list_files() == []
        with pytest.raises(StoreError, match="does not exist: create it"):
            Location.open(missing).refuse_unwritable("store.url")
    hub.read_only = True
    for base in (BUCKET, MODEL):
        with pytest.raises(StoreError, match="not allowed"):
            Location.open(base).refuse_unwritable("store.url")
    assert (hub.batches, hub.commits) == (0, 0)

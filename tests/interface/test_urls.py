"""URLs in place of paths: what a verb reads is copied once, what it writes is uploaded."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright import load
from meshwright.interface.urls import has_urls, with_local_paths
from meshwright.remote.locations import Location
from meshwright.spec.errors import PlanError, StoreError
from meshwright.spec.plan.plan import Store
from meshwright.store import checkpoint_folder
from meshwright.store.stored_run import StoredRun
from meshwright.training import loop
from meshwright.verbs.main import main
from tests.remote import object_store
from tests.remote.object_store import FaultyStore
from tests.training import running


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyStore]:
    with object_store.serve() as (address, faulty):
        patch = pytest.MonkeyPatch()
        object_store.use(patch, address)
        yield faulty
        patch.undo()


@pytest.fixture(scope="module")
def run(server: FaultyStore, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a run that was trained into the store."""
    from dataclasses import replace

    folder = tmp_path_factory.mktemp("urls")
    url = f"s3://{object_store.BUCKET}/runs/first"
    plan = running.plan(running.write_texts(folder / "texts"), folder / "run", steps=4)
    loop.run(replace(plan, store=Store(url=url)))
    return url


def test_a_run_behind_a_url_is_exported_behind_another_and_answers_from_there(
    run: str, server: FaultyStore, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = f"s3://{object_store.BUCKET}/models/first"
    assert main(["export", run, exported]) == 0, capsys.readouterr().err
    assert re.match(rf"{exported}: step-\d+ of {run}, ", capsys.readouterr().out)
    names = {file.name for file in Location.open(exported).list_files()}
    assert {"config.json", "model.safetensors"} <= names
    capsys.readouterr()
    answers = []
    for model in (run, exported):
        assert main(["generate", model, "--prompt", "3 times", "--greedy", "--max-new-tokens", "4", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out)["ids"])
    assert answers[0] == answers[1]
    assert load(run).plan is not None
    # Nothing is downloaded again, and nothing is overwritten.
    before = server.requests
    assert main(["generate", exported, "--prompt", "3 times", "--greedy", "--max-new-tokens", "1"]) == 0
    assert server.requests - before < 6
    assert main(["export", run, exported]) == 2
    assert "is there already: name another URL" in capsys.readouterr().err


def test_a_page_goes_to_a_url(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = f"s3://{object_store.BUCKET}/pages/first.html"
    assert main(["report", run, "-o", page]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{page}: 1 run; open it"), "not the local file, which is gone by now"
    assert printed.err.splitlines()[-1] == f"uploaded to {page}"
    assert b"<html" in Location.open(page).read()[:200]


def test_a_changed_file_is_copied_again_and_a_removed_one_goes(server: FaultyStore, tmp_path: Path) -> None:
    folder = Location.open(f"s3://{object_store.BUCKET}/texts")
    for name in ("a.txt", "b.txt"):
        (folder / name).write(name.encode())
    words = ["tune", f"data={folder.url}"]
    assert has_urls(words)
    for contents in ({"a.txt": b"a.txt", "b.txt": b"b.txt"}, {"a.txt": b"other"}):
        with with_local_paths(words) as local:
            path = Path(local[-1].partition("=")[2])
            assert {file.name: file.read_bytes() for file in path.iterdir() if file.suffix == ".txt"} == contents
        (folder / "a.txt").write(b"other")
        (folder / "b.txt").remove()


def test_words_that_are_no_paths_stay(server: FaultyStore) -> None:
    words = ["train", "run=s3://bucket/a", "store=s3://bucket/a", "model=llama-tiny"]
    with with_local_paths(words) as local:
        assert local == words
    assert not has_urls(["serve", "--base-url", "http://127.0.0.1:80/v1"])


def test_nothing_is_fetched_for_a_mistyped_key(run: str, server: FaultyStore, capsys: pytest.CaptureFixture) -> None:
    before = server.requests
    assert main(["train", f"store.ulr={run}", "resume=auto"]) == 2
    assert "store.ulr is not known: the nearest known key is store.url" in capsys.readouterr().err
    assert server.requests == before


def test_what_is_not_there_is_said_at_the_start(server: FaultyStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "s3://bucket/nothing", "--prompt", "x"]) == 2
    assert "s3://bucket/nothing is neither a file nor a folder with files" in capsys.readouterr().err
    with pytest.raises(StoreError, match="does not exist"), with_local_paths(["report", "-o", "s3://nobody/x.html"]):
        pass
    with pytest.raises(PlanError, match="s3:// names no bucket: give one, as s3://bucket/runs/a"):
        Location.open("s3://")
    for words in (["runs", "s3://nobody/x"], ["runs", "s3://bucket/nothing"]):
        assert main(words) == 2
        assert f"{words[1]} holds nothing: check the name" in capsys.readouterr().err
    assert main(["data", "show", "data=s3://nobody/x", "data.tokenizer=bytes"]) == 2
    assert "holds no text" in capsys.readouterr().err
    with pytest.raises(PlanError, match=r"needs gcsfs, which is not installed: pip install 'meshwright\[gcs\]'"):
        Location.open("gs://bucket/a")


def test_a_copy_of_a_run_has_the_checkpoint_that_is_asked_for(server: FaultyStore) -> None:
    """The copies of two courses of training lie apart, so that whoever reads one is not disturbed."""
    run = StoredRun(Location.open(f"s3://{object_store.BUCKET}/runs/scores"))

    def put(step: int, score: float) -> None:
        commit = checkpoint_folder.Commit(step=step, score=score, files=())
        (run.checkpoints / f"step-{step:06d}-{step:08x}" / "COMMIT").write(checkpoint_folder.encode_commit(commit))

    def copied(which: str) -> tuple[Path, int, float | None]:
        with with_local_paths(["generate", run.location.url, "--checkpoint", which]) as words:
            (saved,) = checkpoint_folder.list_checkpoints(Path(words[1]) / "checkpoints")
            return Path(words[1]) / "checkpoints" / saved.name, saved.step, saved.score

    put(1, 1.0)
    put(2, 2.0)
    put(3, 3.0)
    assert [copied(which)[1] for which in ("last", "best", "2")] == [3, 1, 2]
    before = copied("last")[0]
    put(3, 0.5)
    assert copied("last")[2] == 0.5 and copied("best")[1] == 3 and before.is_dir()
    with pytest.raises(StoreError, match=r"no checkpoint that can be used \(9\): see `meshwright runs s3://"):
        copied("9")

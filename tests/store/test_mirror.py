"""Checkpoints behind a URL: a run whose disk is wiped is the run whose disk was not."""

import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright import planfile
from meshwright.remote import transfer
from meshwright.remote.locations import Location
from meshwright.spec import Plan
from meshwright.spec.errors import CheckpointError, PlanError, RunError, StoreError
from meshwright.spec.plan.plan import Store
from meshwright.store import checkpoint_folder, mirror
from meshwright.store.mirror import StoredRun
from meshwright.training import loop
from tests.remote import object_store
from tests.remote.object_store import Weather
from tests.store import saving
from tests.training import running
from tests.training.running import Crashed, PowerCut, assert_same_end

OPTIONS: dict[str, Any] = {"steps": 14, "eval_every": 3, "checkpoint_every": 4}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Weather]]:
    with object_store.serve() as served:
        patch = pytest.MonkeyPatch()
        object_store.use(patch, served[0])
        object_store.make_bucket(served[0])
        yield served
        patch.undo()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture, no waiting for the disk, and short pauses before another attempt."""
    monkeypatch.setattr(os, "fsync", lambda number: None)
    monkeypatch.setattr("meshwright.training.plot.loss_plot", lambda records, path, **options: None)
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.01)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return running.write_texts(tmp_path_factory.mktemp("mirror") / "texts")


@pytest.fixture
def url(server: tuple[str, Weather], request: pytest.FixtureRequest) -> Iterator[str]:
    """A place in the store that no other test has."""
    server[1].share = 0.0
    yield f"s3://{object_store.BUCKET}/{request.node.name.replace('[', '-').rstrip(']')}/{time.time_ns()}"
    server[1].share, server[1].statuses = 0.0, object_store.PASSING


def plan(texts: Path, run: Path, url: str, **options: Any) -> Plan:
    store = Store(url=url, keep_last=options.pop("stored", 2))
    return replace(running.plan(texts, run, **{**OPTIONS, **options}), store=store)


def stored(url: str) -> StoredRun:
    return StoredRun(Location.open(url))


def wipe(run: Path) -> None:
    shutil.rmtree(run)


def test_a_wiped_disk_changes_nothing(texts: Path, tmp_path: Path, url: str) -> None:
    """A power cut after step 11, the disk is lost, another machine goes on from the store."""
    loop.run(running.plan(texts, tmp_path / "whole", **OPTIONS))
    with pytest.raises(PowerCut):
        loop.run(plan(texts, tmp_path / "broken", url), watchers=[Crashed(11)])
    wipe(tmp_path / "broken")
    assert loop.run(plan(texts, tmp_path / "broken", url), resume="auto").stopped == "done"
    assert_same_end(tmp_path / "broken", tmp_path / "whole")
    steps = [entry.step for entry in stored(url).list_checkpoints()]
    assert steps[-1] == 14 and set(steps) <= {4, 8, 12, 14} and len(steps) <= 3


def test_failing_requests_cost_time_alone(
    texts: Path, tmp_path: Path, url: str, server: tuple[str, Weather]
) -> None:  # fmt: skip
    loop.run(running.plan(texts, tmp_path / "whole", **OPTIONS))
    weather = server[1]
    weather.share, before = 0.2, weather.failures
    with pytest.raises(PowerCut):
        loop.run(plan(texts, tmp_path / "broken", url), watchers=[Crashed(13)])
    wipe(tmp_path / "broken")
    loop.run(plan(texts, tmp_path / "broken", url), resume="auto")
    assert weather.failures - before > 5, "the weather was fine"
    weather.share = 0.0
    assert_same_end(tmp_path / "broken", tmp_path / "whole")
    assert not stored(url).find_problem(stored(url).list_checkpoints()[-1].name)


def test_a_damaged_tier_is_repaired_from_the_other(texts: Path, tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    loop.run(plan(texts, run, url, steps=8))
    shard = next((run / "checkpoints" / "step-000008").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x00")
    whole = running.plan(texts, tmp_path / "whole", **{**OPTIONS, "steps": 8})
    loop.run(whole)
    loop.run(plan(texts, run, url, steps=8), resume="auto")
    assert_same_end(run, tmp_path / "whole")
    checkpoint_folder.check_hashes(
        shard.parent, checkpoint_folder.read_commit(shard.parent).files
    )  # fmt: skip


def test_a_damaged_copy_is_never_taken(texts: Path, tmp_path: Path, url: str) -> None:
    """A byte changes in the store, sizes stay: the hash tells, and the run says so instead of training on."""
    run = tmp_path / "run"
    loop.run(plan(texts, run, url, steps=8))
    name = stored(url).list_checkpoints()[-1].name
    folder = stored(url).checkpoints / name
    shard = next(file.name for file in folder.list_files() if file.name.startswith("shard-"))
    contents = (folder / shard).read()
    (folder / shard).write(contents[:-1] + bytes([contents[-1] ^ 1]))
    wipe(run)
    with pytest.raises(CheckpointError, match="is damaged: its hash differs"):
        loop.run(plan(texts, run, url, steps=8), resume="auto")


def test_a_checkpoint_is_seen_whole_or_not_at_all(
    texts: Path, tmp_path: Path, url: str, server: tuple[str, Weather]
) -> None:  # fmt: skip
    """A reader lists and compares all the time while a run saves after every step, in bad weather."""
    problems: list[str] = []
    looks, ended = 0, threading.Event()

    def look() -> None:
        nonlocal looks
        reader = stored(url)
        while not ended.is_set():
            for entry in transfer.persist(reader.list_checkpoints):
                problem = reader.find_problem(entry.name)
                # Retention may remove it between two requests, COMMIT first.
                if problem and entry.name in {other.name for other in transfer.persist(reader.list_checkpoints)}:
                    problems.append(f"{entry.name}: {problem}")
                looks += 1

    thread = threading.Thread(target=look)
    thread.start()
    server[1].share = 0.05
    try:
        loop.run(plan(texts, tmp_path / "run", url, checkpoint_every=1, steps=12))
    finally:
        ended.set()
        thread.join()
    assert not problems and looks >= 5


def test_retention_keeps_the_newest_and_the_best(url: str, tmp_path: Path) -> None:
    """Scores fall until step 2, so that step 2 stays beside the newest two; what a killed upload left goes."""
    run = StoredRun(Location.open(url))
    for step, score in enumerate([3.0, 2.0, 2.5, 2.6, 2.7], start=1):
        _put_commit(run, step, score)
    (run.checkpoints / "step-000004-00000000" / "shard-00001").write(b"half")
    removed = run.prune(2)
    assert [entry.step for entry in run.list_checkpoints()] == [2, 4, 5]
    assert "step-000004-00000000" in removed and len(removed) == 3
    # Training went back to step 4 and saved step 5 again: the earlier step 5 and all later ones are of another course.
    _put_commit(run, 9, 1.0)
    run.prune(2, step=5)
    assert [entry.step for entry in run.list_checkpoints()] == [2, 4, 5]


def _put_commit(run: StoredRun, step: int, score: float) -> None:
    commit = checkpoint_folder.Commit(step=step, score=score, files=())
    name = f"step-{step:06d}-{step:08x}"
    (run.checkpoints / name / "COMMIT").write(checkpoint_folder.encode_commit(commit))


def test_what_cannot_be_written_is_refused_before_anything_is_read(texts: Path, tmp_path: Path, url: str) -> None:
    loop.run(plan(texts, tmp_path / "first", url, steps=4))
    with pytest.raises(StoreError, match=r"already holds a run \(last checkpoint: step 4\): resume=auto continues"):
        loop.run(plan(texts, tmp_path / "second", url))
    with pytest.raises(StoreError, match="nobody-has-this does not exist: create the bucket"):
        loop.run(plan(texts, tmp_path / "second", "s3://nobody-has-this"))
    assert not (tmp_path / "second").exists()


def test_without_credentials_a_run_does_not_start(
    texts: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(StoreError, match=r"no credentials: set AWS_PROFILE, or AWS_ACCESS_KEY_ID"):
            loop.run(plan(texts, tmp_path / "run", url))
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


def test_a_full_disk_is_refused_before_the_download(
    texts: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.run(plan(texts, tmp_path / "run", url, steps=4))
    wipe(tmp_path / "run")
    monkeypatch.setattr(mirror, "free_bytes", lambda path: 1000)
    with pytest.raises(RunError, match=r"free, and the checkpoint of step 4 in .* takes .*: free some space"):
        loop.run(plan(texts, tmp_path / "run", url, steps=6), resume="auto")


def test_a_slow_store_delays_uploads_not_steps(texts: Path, tmp_path: Path, url: str) -> None:
    """While one upload is on its way the next checkpoints stay local. The last one is always uploaded."""
    slow = plan(texts, tmp_path / "run", url, checkpoint_every=1, steps=10, keep_last=1)
    slow = replace(slow, store=replace(slow.store, bandwidth=0.05, keep_last=9))
    loop.run(slow)
    steps = [entry.step for entry in stored(url).list_checkpoints()]
    assert steps[-1] == 10 and len(steps) < 10
    wipe(tmp_path / "run")
    loop.run(plan(texts, tmp_path / "run", url, steps=12), resume="auto")


def test_an_upload_that_fails_for_good_ends_the_run_with_one_line(
    texts: Path, tmp_path: Path, url: str, server: tuple[str, Weather]
) -> None:
    class Storm(running.Notes):
        def saved(self, step: int, path: Path) -> None:
            server[1].share, server[1].statuses = 1.0, ("403 AccessDenied",)

    with pytest.raises(StoreError, match=r"the checkpoint of step 4 is on local disk alone: .*"):
        loop.run(plan(texts, tmp_path / "run", url, steps=4, checkpoint_every=2), watchers=[Storm()])
    assert checkpoint_folder.find_latest(tmp_path / "run" / "checkpoints") is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("store=runs/a",), "store.url=runs/a is no URL"),
        (("store=s3://bucket/a", "store.keep_last=0"), "store.keep_last=0 must be 1 or more"),
        (("store=s3://bucket/a", "run=s3://bucket/b"), "give one of them"),
        (("store=s3://bucket/a", "store.bandwidth=-1"), "must be megabytes per second"),
    ],
)
def test_impossible_stores_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planfile.read(None, words)


def test_a_run_behind_a_url_is_a_store_and_a_local_folder(tmp_path: Path) -> None:
    read = planfile.read(None, ["run=s3://bucket/runs/a"])
    assert (read.run, read.store.url) == ("runs/a", "s3://bucket/runs/a")
    planfile.write(read, tmp_path / "plan.yaml")
    assert planfile.read(tmp_path / "plan.yaml").store == read.store
    assert "store" not in planfile.dump(planfile.read(None))


def test_an_unknown_scheme_names_those_that_are_known(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"scheme that is not supported: take one of s3://, gs://"):
        loop.run(plan(texts, tmp_path / "run", "ftp://host/run"))


def kill_and_wipe(texts: Path, folder: Path, url: str, kills: int, ranks: int) -> int:
    """Kill a run at random moments, wiping its disk each time. Returns how often it was alive to be killed."""
    options = {"steps": 60, "eval_every": 7, "checkpoint_every": 2, "dropout": 0.1}
    rng = random.Random(time.time_ns())
    alive_when_killed = 0
    for _ in range(kills):
        process = saving.start(_train_in_child, str(texts), str(folder / "broken"), url, options)
        end = time.monotonic() + 60
        seen = _newest(url)
        while process.is_alive() and _newest(url) <= seen and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.2))
        alive = process.is_alive()
        process.kill()
        assert saving.finish(process) == [-9] or not alive
        alive_when_killed += alive
        shutil.rmtree(folder / "broken", ignore_errors=True)
    loop.run(plan(texts, folder / "broken", url, **options), resume="auto")
    loop.run(running.plan(texts, folder / "whole", **options))
    assert_same_end(folder / "broken", folder / "whole")
    return alive_when_killed


def _newest(url: str) -> int:
    checkpoints = stored(url).list_checkpoints()
    return checkpoints[-1].step if checkpoints else 0


def _train_in_child(texts: str, run: str, url: str, options: dict[str, Any]) -> None:
    os.fsync = lambda number: None
    loop.run(plan(Path(texts), Path(run), url, **options), resume="auto")


@pytest.mark.slow
def test_killed_at_random_moments_with_the_store_alone(texts: Path, tmp_path: Path, url: str) -> None:
    assert kill_and_wipe(texts, tmp_path, url, kills=5, ranks=1) >= 2

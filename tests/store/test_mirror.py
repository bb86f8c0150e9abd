"""Checkpoints behind a URL: a run whose disk is wiped is the run whose disk was not."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright import planfile
from meshwright.observe.ranks import on_ranks
from meshwright.parallel.groups.group import Group
from meshwright.parallel.health.heartbeat import Heartbeat
from meshwright.remote import locations, transfer
from meshwright.remote.locations import Location
from meshwright.spec import Layout, Plan
from meshwright.spec.errors import CheckpointError, PlanError, RunError, StoreError
from meshwright.spec.plan.plan import Store
from meshwright.store import checkpoint_folder, durable, mirror, owner, saver
from meshwright.store.mirror import Mirror, Uploader
from meshwright.store.owner import OWNER, Ownership, Process
from meshwright.store.run_folder import RunLock
from meshwright.store.saver import UPLOADED, Saver
from meshwright.store.stored_run import StoredRun
from meshwright.training import loop
from meshwright.training.job import check_without_common_folder
from meshwright.training.step import spikes
from meshwright.training.step.batches import PackedRows
from meshwright.verbs.main import main
from tests.remote import object_store
from tests.remote.object_store import FaultyStore
from tests.training import running
from tests.training.running import Crashed, CrashedAgain, PowerCut, Terminated, assert_same_end
from tests.verbs.faults import Garbage

HERE = Process.find(os.getpid())
OPTIONS: dict[str, Any] = {"steps": 14, "eval_every": 3, "checkpoint_every": 4}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, FaultyStore]]:
    with object_store.serve() as served:
        patch = pytest.MonkeyPatch()
        object_store.use(patch, served[0])
        yield served
        patch.undo()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture, no waiting for the disk, and short pauses before another attempt."""
    monkeypatch.setattr(os, "fsync", lambda number: None)
    monkeypatch.setattr("meshwright.training.plot.loss_plot", lambda records, path, **options: None)
    monkeypatch.setattr(locations, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(owner, "SETTLE_S", 0.0)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return running.write_texts(tmp_path_factory.mktemp("mirror") / "texts")


@pytest.fixture
def url(server: tuple[str, FaultyStore], request: pytest.FixtureRequest) -> Iterator[str]:
    """A place in the store that no other test has."""
    server[1].share = 0.0
    yield f"s3://{object_store.BUCKET}/{request.node.name.replace('[', '-').rstrip(']')}/{time.time_ns()}"
    server[1].share, server[1].statuses = 0.0, object_store.TRANSIENT


def plan(texts: Path, run: Path, url: str, **options: Any) -> Plan:
    store = Store(url=url, keep_last=options.pop("stored", 2))
    return replace(running.plan(texts, run, **{**OPTIONS, **options}), store=store)


DEEPER = replace(running.SHAPE, layers=3)


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
    texts: Path, tmp_path: Path, url: str, server: tuple[str, FaultyStore]
) -> None:  # fmt: skip
    loop.run(running.plan(texts, tmp_path / "whole", **OPTIONS))
    faulty = server[1]
    faulty.share, before = 0.2, faulty.failures
    with pytest.raises(PowerCut):
        loop.run(plan(texts, tmp_path / "broken", url), watchers=[Crashed(13)])
    wipe(tmp_path / "broken")
    loop.run(plan(texts, tmp_path / "broken", url), resume="auto")
    assert faulty.failures - before > 5, "no request failed"
    faulty.share = 0.0
    assert_same_end(tmp_path / "broken", tmp_path / "whole")
    assert not stored(url).list_checkpoints()[-1].problem


SPIKE: dict[str, Any] = {"steps": 40, "keep_last": 3, "rollback_spikes": 2, "eval_every": 0}
"""With rows without sense in steps 26 to 32: noticed after step 30, back to step 24."""


def leave_out(monkeypatch: pytest.MonkeyPatch, left_out: int, time: int = 1) -> None:
    """Have each checkpoint wait for the upload of the one before: none stays local but one step, at its n-th time."""
    choose, steps = Mirror.choose, []

    def choose_after(uploads: Mirror, step: int, *, last: bool) -> str:
        steps.append(step)
        is_left_out = step == left_out and steps.count(step) == time
        return "" if is_left_out else choose(uploads, step, last=True)

    monkeypatch.setattr(Mirror, "choose", choose_after)


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedRows, "take", PackedRows.take)
    for name in ("ENOUGH_STEPS", "HISTORY_STEPS", "DEVIATIONS"):
        monkeypatch.setattr(spikes, name, getattr(spikes, name))
    Garbage((range(25 * 4, 32 * 4),))(0)


@pytest.mark.usefixtures("spoiled")
@pytest.mark.parametrize(
    ("crash", "stored_steps", "left_out", "steps"),
    [
        (CrashedAgain(25), 9, 0, [4, 8, 12, 16, 20, 24]),
        (CrashedAgain(25), 3, 24, [16, 20, 24]),
        (Crashed(29), 3, 0, [20, 24, 28]),
    ],
    ids=["after the rollback", "that step was not uploaded", "in the spike"],
)
def test_a_rollback_reaches_the_store(
    texts: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, crash: Crashed, stored_steps: int,
    left_out: int, steps: list[int],
) -> None:  # fmt: skip
    """Killed and wiped around it. In the last case, only the store has a checkpoint from before the spike."""
    leave_out(monkeypatch, left_out)
    if isinstance(crash, CrashedAgain):  # as by a kill, nothing that is on its way arrives
        monkeypatch.setattr(saver, "GRACE_S", 0.0)
    loop.run(running.plan(texts, tmp_path / "whole", **{**OPTIONS, **SPIKE}))
    broken = plan(texts, tmp_path / "broken", url, **SPIKE, stored=stored_steps)
    with pytest.raises(PowerCut):
        loop.run(broken, watchers=[crash])
    assert [saved.step for saved in stored(url).list_checkpoints()] == steps
    wipe(tmp_path / "broken")
    loop.run(broken, resume="auto")
    assert_same_end(tmp_path / "broken", tmp_path / "whole")


@pytest.mark.usefixtures("spoiled")
def test_a_rollback_that_the_store_does_not_learn_of_ends_the_run(
    texts: Path, tmp_path: Path, url: str, server: tuple[str, FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is started again then goes back again, and its end is the same."""
    loop.run(running.plan(texts, tmp_path / "whole", **{**OPTIONS, **SPIKE}))
    leave_out(monkeypatch, 0)
    broken, faulty, go_back = plan(texts, tmp_path / "broken", url, **SPIKE, stored=9), server[1], Saver.go_back

    def fail(saving: Saver, path: Path) -> None:
        faulty.share, faulty.statuses = 1.0, ("403 AccessDenied",)
        go_back(saving, path)

    with monkeypatch.context() as patch:
        patch.setattr(Saver, "go_back", fail)
        with pytest.raises(
            StoreError, match=r"went back to step-000024, and its store has later checkpoints: .*allowed"
        ):
            loop.run(broken)
    faulty.share, faulty.statuses = 0.0, object_store.TRANSIENT
    loop.run(broken, resume="auto")
    assert_same_end(tmp_path / "broken", tmp_path / "whole")
    # The new step 28 is the only one.
    assert [saved.step for saved in stored(url).list_checkpoints()] == [*range(8, 44, 4)]


def test_a_store_that_keeps_too_few_to_go_back_is_refused(texts: Path, tmp_path: Path, url: str) -> None:
    short = plan(texts, tmp_path / "run", url, **SPIKE, stored=1)
    assert any("store.keep_last=1: take recipe.checkpoint_every=5 store.keep_last=2" in v for v in short.violations())


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


@pytest.mark.parametrize(("damaged", "taken"), [((8, 12), 4), ((12,), 8), ((8, 12, 14), 4)])
def test_what_the_store_has_is_older_than_the_damaged_ones(
    texts: Path, tmp_path: Path, url: str, damaged: tuple[int, ...], taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Uploads lag behind local saves, and bits flip in files of full length: only reading them shows it."""
    run, notes = tmp_path / "run", running.Notes()
    loop.run(plan(texts, run, url, steps=4))
    loop.run(running.plan(texts, run, **OPTIONS, keep_last=9), resume="auto")
    assert [saved.step for saved in stored(url).list_checkpoints()] == [4]
    for saved in checkpoint_folder.list_checkpoints(run / "checkpoints"):
        if saved.step in damaged:
            shard = next((run / "checkpoints" / saved.name).glob("shard-*"))
            shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
        elif saved.step != taken or taken == 4:
            shutil.rmtree(run / "checkpoints" / saved.name)
    with pytest.raises(PowerCut):
        loop.run(plan(texts, run, url), resume="auto", watchers=[notes, Crashed(taken + 1)])
    assert notes.info is not None and notes.info.first_step == taken
    assert f"step-{max(damaged):06d}" in caplog.text


def test_a_damaged_copy_is_passed_over(texts: Path, tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A byte changes in the store, sizes stay: the hash tells, and the one before is taken while there is one."""
    run = tmp_path / "run"
    loop.run(plan(texts, run, url, steps=4))
    loop.run(plan(texts, run, url, steps=8), resume="auto")
    loop.run(running.plan(texts, tmp_path / "whole", **{**OPTIONS, "steps": 4}))
    loop.run(running.plan(texts, tmp_path / "whole", **{**OPTIONS, "steps": 8}), resume="auto")
    names = [entry.name for entry in stored(url).list_checkpoints()]
    assert len(names) == 2
    damage(url, names[1])
    wipe(run)
    loop.run(plan(texts, run, url, steps=8), resume="auto")
    assert "is damaged: its hash differs" in caplog.text
    assert_same_end(run, tmp_path / "whole")
    for entry in stored(url).list_checkpoints():
        damage(url, entry.name)
    wipe(run)
    with pytest.raises(CheckpointError, match="can be used: see `meshwright runs s3://"):
        loop.run(plan(texts, run, url, steps=8), resume="auto")


def damage(url: str, name: str) -> None:
    """Change a byte of a stored checkpoint, and no size."""
    folder = stored(url).checkpoints / name
    shard = next(file.name for file in folder.list_files() if file.name.startswith("shard-"))
    contents = (folder / shard).read()
    (folder / shard).write(contents[:-1] + bytes([(contents[-1] + 1) % 256]))


def test_what_failed_to_upload_is_uploaded_by_the_next_process(
    texts: Path, tmp_path: Path, url: str, server: tuple[str, FaultyStore]
) -> None:
    run = tmp_path / "run"
    loop.run(running.plan(texts, run, **{**OPTIONS, "steps": 8}))
    loop.run(plan(texts, run, url, steps=8), resume="auto")
    assert [entry.step for entry in stored(url).list_checkpoints()] == [8]
    stored(url).prune(1, step=8)
    assert not stored(url).list_checkpoints()[-1].problem


def test_a_checkpoint_is_seen_whole_or_not_at_all(
    texts: Path, tmp_path: Path, url: str, server: tuple[str, FaultyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader lists and compares after each change of the store while a run saves each step and requests fail."""
    faulty, reader = server[1], stored(url)
    answer, problems, names = faulty.application, list[str](), set[str]()

    def look() -> None:
        for entry in reader.list_checkpoints():
            # Retention may remove it between two requests, COMMIT first.
            if entry.problem and entry.name in {other.name for other in reader.list_checkpoints()}:
                problems.append(f"{entry.name}: {entry.problem}")
            names.add(entry.name)

    def answer_and_look(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = answer(environ, start_response)
        # The writer has no answer yet: its next request comes after the look. Looking itself changes nothing.
        if environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE"):
            try:
                look()
            except Exception as error:  # a thread of the server would lose it
                problems.append(repr(error))
        return body

    monkeypatch.setattr(faulty, "application", answer_and_look)
    faulty.share = 0.05
    loop.run(plan(texts, tmp_path / "run", url, checkpoint_every=1, steps=12))
    assert not problems
    assert names >= {entry.name for entry in reader.list_checkpoints()} > set()


def test_retention_keeps_the_newest_and_the_best(url: str, tmp_path: Path) -> None:
    """Scores fall until step 2, so that step 2 stays beside the newest two; what a killed upload left goes."""
    run = StoredRun(Location.open(url))
    for step, score in enumerate([3.0, 2.0, 2.5, 2.6, 2.7], start=1):
        _put_commit(run, step, score)
    (run.checkpoints / "step-000004-00000000" / "shard-00001").write(b"half")
    removed = run.prune(2, step=5)
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
    with pytest.raises(StoreError, match="nobody-has-this/run does not exist: create it"):
        loop.run(plan(texts, tmp_path / "second", "s3://nobody-has-this/run"))
    assert not (tmp_path / "second").exists()
    shutil.copytree(tmp_path / "first" / "checkpoints" / "step-000004", tmp_path / "kept")
    loop.run(plan(texts, tmp_path / "first", url, steps=8), resume="auto")
    with pytest.raises(StoreError, match="has checkpoints up to step 8, and the run goes back to step 4"):
        loop.run(plan(texts, tmp_path / "first", url, steps=8), resume=str(tmp_path / "kept"))


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
    monkeypatch.setattr(durable, "free_bytes", lambda path: 1000)
    with pytest.raises(StoreError, match=r"a copy of .*step-000004-.* takes .* free: free some space"):
        loop.run(plan(texts, tmp_path / "run", url, steps=6), resume="auto")
    assert not (tmp_path / "run").exists(), "it is refused before the text is prepared"


def test_a_slow_store_delays_uploads_not_steps(texts: Path, tmp_path: Path, url: str) -> None:
    """While one upload is on its way the next checkpoints stay local. The last one is always uploaded."""
    slow = plan(texts, tmp_path / "run", url, checkpoint_every=1, steps=10, keep_last=1)
    slow = replace(slow, store=replace(slow.store, bandwidth=0.05, keep_last=9))
    loop.run(slow, watchers=[notes := running.Notes()])
    steps = [entry.step for entry in stored(url).list_checkpoints()]
    assert steps[-1] == 10 and len(steps) < 10
    assert notes.uploads[-1] == 10 and {*notes.uploads} <= {*steps} and len(notes.saves) == 10
    wipe(tmp_path / "run")
    loop.run(plan(texts, tmp_path / "run", url, steps=12), resume="auto")


def calls_in(work: Callable[[], None]) -> Counter[str]:
    """Calls that the engine makes in this thread, of Python and of C."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, called: Any) -> None:
        if event in ("call", "c_call") and "/meshwright/" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname if event == "call" else called.__qualname__] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_a_save_beside_an_upload_makes_the_calls_of_one_without_a_store(tmp_path: Path, url: str) -> None:
    """So a step waits for the same copy. Time on a machine whose processors the upload shares tells nothing."""
    tensors, counts = {"model.weight": torch.zeros(64_000)}, []
    for bandwidth in (0.0, 0.05):
        folder = tmp_path / f"{bandwidth}" / "checkpoints"
        folder.mkdir(parents=True)
        for name in mirror.RECORDS:
            (folder.parent / name).touch()
        store, ownership = Store(url=url, bandwidth=bandwidth), Ownership(Location.open(url))
        uploads = mirror.Mirror(store, ownership, rank=0, writers=1) if bandwidth else None
        with Saver(folder, keep_last=9, group=Group("saving"), saved=lambda *_: None, mirror=uploads) as saving:
            for step in (1, 2):
                saving.save(step, tensors, {"step": step}, None)
                saving.wait()
            assert uploads is None or uploads.step == 1, "its upload is under way"
            counts.append(calls_in(partial(saving.save, 3, tensors, {"step": 3}, None)))
    assert counts[0] == counts[1] and counts[0]["Staging.copy"] == 1


def test_an_upload_that_fails_for_good_ends_the_run_with_one_line(
    texts: Path, tmp_path: Path, url: str, server: tuple[str, FaultyStore]
) -> None:
    class Storm(running.Notes):
        def saved(self, step: int, path: Path) -> None:
            server[1].share, server[1].statuses = 1.0, ("403 AccessDenied",)

    with pytest.raises(StoreError, match=r"the checkpoint of step 4 is not in the store: .*"):
        loop.run(plan(texts, tmp_path / "run", url, steps=4, checkpoint_every=2), watchers=[Storm()])
    assert checkpoint_folder.find_latest(tmp_path / "run" / "checkpoints") is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("store=runs/a",), "store.url=runs/a is no URL"),
        (("store=s3://bucket",), "names no run"),
        (("store=hf://buckets/org/name",), "names no run"),
        (("store=s3://bucket/a", "store.keep_last=0"), "store.keep_last=0 must be 1 or more"),
        (("store=s3://bucket/a", "run=s3://bucket/b"), "give one of them"),
        (("store=s3://bucket/a", "store.bandwidth=-1"), "must be megabytes per second"),
        (("store=memory://a",), "ends with the process that uploads"),
        (("run=s3://bucket/auto",), "names no run"),
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


def test_a_store_belongs_to_one_run(texts: Path, tmp_path: Path, url: str) -> None:
    """Neither another run folder nor a new run writes into a store that has an owner, even one without checkpoints."""
    with pytest.raises(PowerCut):
        loop.run(plan(texts, tmp_path / "first", url), watchers=[Crashed(1)])
    assert not stored(url).list_checkpoints()
    loop.run(running.plan(texts, tmp_path / "second", **{**OPTIONS, "steps": 4}))
    for run, resume in ("second", "auto"), ("third", "no"):
        with pytest.raises(StoreError, match=r"belongs to another run than run=.*: resume=auto in a new run"):
            loop.run(plan(texts, tmp_path / run, url, steps=8), resume=resume)
    loop.run(plan(texts, tmp_path / "first", url, steps=4), resume="auto")
    wipe(tmp_path / "first")
    loop.run(plan(texts, tmp_path / "first", url, steps=8), resume="auto")
    assert (tmp_path / "first" / "run-id").read_bytes() == (stored(url).location / "run-id").read()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> "list[subprocess.Popen[str]]":
    """All processes that upload in this test."""
    processes: list[subprocess.Popen[str]] = []

    def start_process(*words: Any, **options: Any) -> "subprocess.Popen[str]":
        processes.append(subprocess.Popen(*words, **options))
        return processes[-1]

    monkeypatch.setattr(mirror, "subprocess", SimpleNamespace(Popen=start_process, PIPE=subprocess.PIPE))
    return processes


class TakenOver(running.Notes):
    """Another machine takes the run over after step 6, when the store has step 4."""

    def __init__(self, url: str, every: int) -> None:
        super().__init__()
        self.url, self.every, self.seen = url, every, 0

    def stepped(self, metrics: Any) -> None:
        self.seen = metrics.step
        if metrics.step >= 6:  # as beats do: one of this process may come between
            while self.every and _newest(self.url) < 4:
                time.sleep(0.05)
            other = {**asdict(HERE), "host": "node7", "namespace": "another machine"}
            (Location.open(self.url) / OWNER).write(json.dumps({"process": other, "beat": 0}).encode())
        time.sleep(0.3 * (metrics.step > 8))


@pytest.mark.parametrize(("every", "beat_s"), [(4, 60.0), (0, 0.2)], ids=["at an upload", "at a beat"])
def test_only_one_process_trains_a_run(
    texts: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, every: int, beat_s: float
) -> None:
    """The one that was replaced ends, whether it saves or not, and keeps the mark of the other."""
    monkeypatch.setattr(owner, "BEAT_S", beat_s)
    taken = TakenOver(url, every)
    broken = plan(texts, tmp_path / "run", url, steps=400, checkpoint_every=every, eval_every=0)
    with pytest.raises(
        StoreError, match=r"s3://.* has been taken over by node7 \(process \d+\), so this run ends here"
    ):
        loop.run(broken, watchers=[taken])
    assert taken.seen < 100
    # Step 4 is removed again where the takeover came before its uploader had looked once more.
    assert {saved.step for saved in stored(url).list_checkpoints()} <= {4}
    assert json.loads((Location.open(url) / OWNER).read())["process"]["host"] == "node7"


def test_a_run_that_ends_says_so(texts: Path, tmp_path: Path, url: str) -> None:
    run = plan(texts, tmp_path / "run", url)
    with pytest.raises(PowerCut):
        loop.run(run, watchers=[Crashed(6)])
    assert json.loads((Location.open(url) / OWNER).read())["beat"] is None
    loop.run(run, resume="auto")
    assert json.loads((Location.open(url) / OWNER).read())["beat"] is None


def test_a_killed_process_is_started_again_at_the_next_checkpoint(
    texts: Path, tmp_path: Path, url: str, launched: "list[subprocess.Popen[str]]", caplog: pytest.LogCaptureFixture
) -> None:
    class Killer(running.Notes):
        def saved(self, step: int, path: Path) -> None:
            if step == 4:
                launched[0].kill()

    loop.run(plan(texts, tmp_path / "run", url, steps=8, checkpoint_every=4), watchers=[Killer()])
    assert len(launched) == 2 and "it is started again" in caplog.text
    assert stored(url).list_checkpoints()[-1].step == 8


@pytest.mark.parametrize(
    ("program", "message", "starts"),
    [
        ("raise SystemExit(3)", r"the upload process does not start \(exit code 3\): see its output", 1),
        (
            "print('ready', flush=True); input(); print('[', end='')",
            r"the checkpoint of step 4 is not in the store: the upload process has ended",
            3,
        ),
    ],
)
def test_a_process_that_always_dies_ends_the_run_with_one_line(
    program: str, message: str, starts: int, texts: Path, tmp_path: Path, url: str,
    launched: "list[subprocess.Popen[str]]", monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It is started once more for each checkpoint."""
    monkeypatch.setattr(mirror, "SERVE", program)
    with pytest.raises(StoreError, match=message):
        loop.run(plan(texts, tmp_path / "run", url, steps=4, checkpoint_every=2))
    assert len(launched) == starts


def test_no_process_is_left_of_a_run_that_ends_before_its_first_step(
    texts: Path, tmp_path: Path, url: str, launched: "list[subprocess.Popen[str]]"
) -> None:
    class Unreachable(running.Notes):
        def started(self, run: Any) -> None:
            raise RunError("a service cannot be reached")

    with pytest.raises(RunError, match="service"):
        loop.run(plan(texts, tmp_path / "run", url, steps=4), watchers=[Unreachable()])
    assert set(stored(url).location.list_sizes()) == {OWNER}, "the store is free for another attempt"
    assert not [process for process in launched if process.poll() is None]


def test_a_repair_takes_the_same_course_of_training(texts: Path, tmp_path: Path, url: str) -> None:
    """The step was saved twice, and one of three uploads is cut off."""
    run = stored(url)
    file = checkpoint_folder.FileRecord(name="state.json", size_bytes=1, sha256="0")
    commits = {score: checkpoint_folder.Commit(step=4, score=score, files=(file,)) for score in (1.0, 2.0)}
    for number, (score, contents) in enumerate([(2.0, b"x"), (1.0, b"x"), (2.0, b"")]):
        folder = run.checkpoints / f"step-000004-{number:08x}"
        (folder / "state.json").write(contents)
        (folder / "COMMIT").write(checkpoint_folder.encode_commit(commits[score]))
    local = tmp_path / "step-000004"
    local.mkdir()
    assert run.find_replacements(local, None) == ["step-000004-00000001", "step-000004-00000000"]
    checkpoint_folder.write_commit(local, commits[2.0])
    assert run.find_replacements(local, None) == ["step-000004-00000000"]


def test_a_run_folder_is_locked_until_its_checkpoint_is_there(
    texts: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.run(plan(texts, tmp_path / "run", url, steps=4))
    wipe(tmp_path / "run")
    refused = []

    def try_to_begin(run: StoredRun, name: str, hidden: Path) -> Path:
        with pytest.raises(RunError, match="already runs in"):
            RunLock.take(tmp_path / "run")
        refused.append(name)
        return publish(run, name, hidden)

    publish = StoredRun.publish
    monkeypatch.setattr(StoredRun, "publish", try_to_begin)
    loop.run(plan(texts, tmp_path / "run", url, steps=6), resume="auto")
    assert refused


def test_a_download_reports_to_the_watchdog(texts: Path, tmp_path: Path, url: str) -> None:
    loop.run(plan(texts, tmp_path / "run", url, steps=4))
    wipe(tmp_path / "run")
    pulse = Heartbeat()
    loop.run(plan(texts, tmp_path / "run", url, steps=4), resume="auto", pulse=pulse)
    with_download = pulse.pieces
    pulse = Heartbeat()
    loop.run(plan(texts, tmp_path / "run", url, steps=4), resume="auto", pulse=pulse)
    assert with_download > pulse.pieces


def test_the_last_records_are_those_of_the_finished_run(texts: Path, tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    loop.run(plan(texts, run, url, steps=4))
    for name in ("ledger.json", "goodput.jsonl", "metrics.jsonl"):
        assert (stored(url).location / name).read() == (run / name).read_bytes(), name


def test_the_reason_of_another_ranks_failure_is_told(url: str) -> None:
    uploader = Uploader(Store(url=url), 0, 2, HERE)
    Uploader(Store(url=url), 1, 2, HERE).report_failure("step-000004-00000000", "the disk is gone")
    file = checkpoint_folder.FileRecord(name="shard-00002-of-00002.safetensors", size_bytes=1, sha256="")
    commit = checkpoint_folder.Commit(step=4, score=None, files=(file,))
    with pytest.raises(StoreError, match="rank 1 could not upload its files: the disk is gone"):
        uploader._wait_for_files(uploader.run.checkpoints / "step-000004-00000000", commit)


def test_a_damaged_local_file_is_not_uploaded(texts: Path, tmp_path: Path, url: str) -> None:
    run = tmp_path / "run"
    loop.run(running.plan(texts, run, **{**OPTIONS, "steps": 4}))
    path = run / "checkpoints" / "step-000004"
    shard = next(path.glob("shard-*"))
    contents = shard.read_bytes()
    shard.write_bytes(contents[:-1] + bytes([(contents[-1] + 1) % 256]))
    uploader = Uploader(Store(url=url), 0, 1, HERE)
    with pytest.raises(StoreError, match=f"{shard.name} is damaged: its hash differs"):
        uploader.upload(path, "step-000004-00000000")
    shard.unlink()
    with pytest.raises(StoreError, match=f"{shard.name} is not there any more"):
        uploader.upload(path, "step-000004-00000001")
    assert not uploader.run.list_checkpoints()


def test_parts_of_killed_uploads_go_with_the_next_retention(url: str) -> None:
    import boto3

    run = stored(url)
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    client.create_multipart_upload(Bucket=object_store.BUCKET, Key=f"{run.checkpoints.path.partition('/')[2]}/shard")
    client.create_multipart_upload(Bucket=object_store.BUCKET, Key="elsewhere/shard")
    _put_commit(run, 1, 1.0)
    run.prune(1)
    assert len(client.list_multipart_uploads(Bucket=object_store.BUCKET)["Uploads"]) == 2, "it may be under way"
    run.prune(1, step=1)
    left = client.list_multipart_uploads(Bucket=object_store.BUCKET)["Uploads"]
    assert [upload["Key"] for upload in left] == ["elsewhere/shard"]


WORDS = [
    "model.vocab=257", "model.layers=2", "model.hidden=16", "model.heads=2", "model.kv_heads=1", "model.ffn=24",
    "data.tokenizer=bytes", "data.validation=0.2", "recipe.sequence=12", "recipe.global_batch=4",
    "recipe.eval_every=0", "recipe.eval_sequences=6", "recipe.checkpoint_every=2", "recipe.log_every=100",
    "layout.zero=1",
]  # fmt: skip


def start(ranks: int, *words: str) -> "subprocess.Popen[bytes]":
    """Start a run on some ranks, as a user does."""
    launch = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m", "meshwright", "train"]
    command = [sys.executable, "-m", *launch, "--no-dry-run", *WORDS, f"layout.dp_shard={ranks}", *words]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)


def train_on(machines: list[str], environment: dict[str, str], training: Plan, resume: str, until: int) -> str:
    """Train as one rank whose current folder is its machine: one relative path is another folder on each of them.

    Returns the refusal, empty when the run has ended.
    """
    os.environ.update(environment)
    os.fsync = lambda number: None
    os.chdir(machines[dist.get_rank()])
    try:
        loop.run(training, resume=resume, watchers=[Terminated(until)])
    except (PlanError, RunError) as error:
        return str(error)
    return ""


def start_on(machines: list[Path], training: Plan, resume: str = "auto", until: int = 0) -> list[str]:
    """Train on a rank for each of these machines, `until` a step. Returns refusals by rank."""
    for machine in machines:
        machine.mkdir(exist_ok=True)
    environment = {name: word for name, word in os.environ.items() if name.startswith("AWS_")}
    folders = [str(machine) for machine in machines]
    return on_ranks(len(machines), train_on, folders, environment, training, resume, until)


def test_ranks_upload_and_fetch_their_parts(texts: Path, tmp_path: Path, url: str) -> None:
    """Two ranks train, their disk is lost, two others go on: every bit is as if nothing had happened."""
    data = f"data={texts}"
    assert start(2, data, "recipe.steps=6", f"run={tmp_path / 'whole'}").wait(timeout=120) == 0
    assert start(2, data, "recipe.steps=6", f"run={tmp_path / 'broken'}", f"store={url}").wait(timeout=120) == 0
    name = stored(url).list_checkpoints()[-1].name
    writers = {file.name[:11] for file in (stored(url).checkpoints / name).list_files() if "shard" in file.name}
    assert writers == {"shard-00001", "shard-00002"}
    wipe(tmp_path / "broken")
    assert start(2, data, "recipe.steps=6", f"run={tmp_path / 'broken'}", f"store={url}", "resume=auto").wait(120) == 0
    assert_same_end(tmp_path / "broken", tmp_path / "whole")


def test_machines_without_a_common_folder_meet_in_the_store(texts: Path, tmp_path: Path, url: str) -> None:
    """Each machine holds what its ranks wrote. One is lost, another takes over as the first: every bit is the same."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    layout, options = Layout(dp_shard=4, zero=3, micro_batch=1), {"checkpoint_every": 2, "log_every": 1, "steps": 9}
    training = replace(plan(texts, Path("run"), url, **options), layout=layout)
    # A word of a model that another run began with: ranks would end their samples at different tokens.
    stale = second / "run" / "generation_config.json"
    stale.parent.mkdir(parents=True)
    stale.write_text('{"eos_token_id": 7}')
    assert not any(start_on([first, second] * 2, training, until=6))
    assert not stale.exists()
    for machine in (first, second):
        held = sorted(path.name for path in (machine / "run" / "checkpoints").glob("*step*"))
        # One whose upload is under way stays, too.
        assert held[-2:] == [".parts-step-000004", ".parts-step-000006"]
    for machine, ranks in ((first, {"1", "3"}), (second, {"2", "4"})):
        shards = (machine / "run" / "checkpoints" / ".parts-step-000006").glob("shard-*")
        assert {path.name.removeprefix("shard-0000")[0] for path in shards} == ranks
    shutil.rmtree(first)
    assert not any(start_on([second, third, third, second], training, until=7))
    assert not any(start_on([third, second, third, third], training))
    whole = tmp_path / "whole"
    assert not any(start_on([whole] * 4, replace(training, store=Store())))
    assert_same_end(bring_run(url, tmp_path), whole / "run")


def test_machines_take_no_checkpoint_that_only_one_of_them_has(texts: Path, tmp_path: Path, url: str) -> None:
    """Folders of one name on two machines may be of two courses of training: the store has one course."""
    first, second, whole = (tmp_path / name for name in ("first", "second", "whole"))
    training = replace(
        plan(texts, Path("run"), url, checkpoint_every=2, log_every=1, steps=8),
        layout=Layout(dp_shard=2, micro_batch=2),
    )
    assert not any(start_on([first, second], training, until=3))
    alone = replace(training, store=Store(), recipe=replace(training.recipe, learning_rate=9e-3), layout=Layout())
    assert not any(start_on([first], alone, until=6))
    assert (first / "run" / "checkpoints" / "step-000006").is_dir()
    assert not any(start_on([first, second], training))
    assert not any(start_on([whole] * 2, replace(training, store=Store())))
    assert_same_end(bring_run(url, tmp_path), whole / "run")
    assert not list(first.glob("run/checkpoints/step-*"))


def test_a_machine_whose_folder_holds_another_run_is_refused(texts: Path, tmp_path: Path, url: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    training = replace(plan(texts, Path("run"), url, steps=4), layout=Layout(dp_shard=2, micro_batch=2))
    assert not any(start_on([second], replace(training, store=Store(), layout=Layout()), "no"))
    held = sorted(second.rglob("*"))
    refusals = start_on([first, second], training)
    assert all(re.search(r"run on \S+ holds another run: choose another run", refusal) for refusal in refusals)
    assert sorted(second.rglob("*")) == held


def test_the_last_checkpoint_is_uploaded_although_it_was_left_out(
    texts: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGTERM comes on a step that is saved anyway, while the upload before it is under way."""
    monkeypatch.setattr(mirror.Mirror, "step", property(lambda self: self._step or None))
    loop.run(plan(texts, tmp_path / "run", url, log_every=1), watchers=[Terminated(8)])
    assert "step 8 is not uploaded: the upload of step 4 is under way" in caplog.text
    assert stored(url).list_checkpoints()[-1].step == 8
    assert (tmp_path / "run" / "checkpoints" / UPLOADED).exists()


def bring_run(url: str, tmp_path: Path) -> Path:
    """Bring a run from the store, as a reader does."""
    run = tmp_path / "brought"
    stored(url).fetch_records(run)
    name = stored(url).list_checkpoints()[-1].name
    stored(url).publish(name, stored(url).fetch(name, run / "checkpoints"))
    return run


def test_machines_without_a_common_folder_are_refused_at_the_start(texts: Path, tmp_path: Path) -> None:
    training = replace(plan(texts, Path("run"), ""), layout=Layout(dp_shard=2, micro_batch=2))
    reason = "not every rank sees run='run' of rank 0, and no machine would have a whole checkpoint: choose a folder"
    refusals = start_on([tmp_path / "first", tmp_path / "second"], training, "no")
    assert all(reason in refusal for refusal in refusals)
    assert not list(tmp_path.glob("*/*"))
    stored = replace(training, store=Store(url="s3://bucket/run"))
    check_without_common_folder(stored, "auto")
    back = replace(stored, recipe=replace(stored.recipe, keep_last=3, rollback_spikes=1))
    with pytest.raises(PlanError, match=r"not every rank sees .* and recipe\.rollback_spikes=1 goes back on local"):
        check_without_common_folder(back, "auto")
    pairs = replace(stored, data=replace(stored.data, form="pairs"), recipe=replace(stored.recipe, objective="dpo"))
    with pytest.raises(PlanError, match=r"not every rank sees .* and recipe\.objective=dpo has tables that all ranks"):
        check_without_common_folder(pairs, "auto")


KILLS = int(os.environ.get("MESHWRIGHT_KILLS", "3"))
"""Kills of the slow test. Before a release: 50, about an hour on two cores."""


@pytest.mark.slow
def test_four_ranks_killed_at_random_moments_with_the_store_alone(
    texts: Path, tmp_path: Path, url: str, server: tuple[str, FaultyStore]
) -> None:
    """SIGKILL to all, whatever was under way; local disk wiped; a tenth of all requests fails. The end is the same."""
    words = [f"data={texts}", "recipe.steps=400"]
    assert start(4, *words, f"run={tmp_path / 'whole'}").wait(timeout=600) == 0
    server[1].share = 0.1
    rng = random.Random(time.time_ns())
    kills = 0
    broken = [*words, f"run={tmp_path / 'broken'}", f"store={url}", "resume=auto"]
    while kills < KILLS:
        process = start(4, *broken)
        began, seen = time.monotonic(), _newest(url)
        # Most kills come while steps, saves and uploads are under way, some while processes start.
        until_s = rng.uniform(0, 15) if rng.random() < 0.2 else 240
        while process.poll() is None and _newest(url) <= seen and time.monotonic() - began < until_s:
            time.sleep(0.1)
        time.sleep(rng.uniform(0, 0.5))
        assert process.poll() is None, "the run was over before it could be killed"
        # torchrun starts each rank in a session of its own: one kill for each.
        for child in reversed(_descendants(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.wait()
        kills += 1
        shutil.rmtree(tmp_path / "broken", ignore_errors=True)
        # A request of the killed process may still reach the server.
        time.sleep(1)
        for entry in stored(url).list_checkpoints():
            assert not entry.problem, entry.name
    assert start(4, *broken).wait(timeout=900) == 0
    assert_same_end(tmp_path / "broken", tmp_path / "whole")


@pytest.mark.slow
def test_transfers_are_as_fast_as_the_librarys_own(tmp_path: Path, url: str) -> None:
    """Sixteen files of 8 MiB, there and back, in turns with s3fs's own copy of a folder: at least 0.8 of its speed."""
    source = tmp_path / "files"
    source.mkdir()
    for number in range(16):
        (source / f"{number}").write_bytes(os.urandom(8 * 2**20))
    location = Location.open(url)
    names = [path.name for path in source.iterdir()]
    hashes = {name: transfer.hash_file(source / name) for name in names}
    seconds: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        seconds.setdefault(what, []).append(time.perf_counter() - began)

    def take_turns(number: int) -> None:
        ours, theirs = location / f"ours{number}", location / f"theirs{number}"
        back = tmp_path / f"ours{number}"
        back.mkdir()
        timed("upload", lambda: transfer.upload([(source / name, ours / name, "") for name in names]))
        timed("put", lambda: location.filesystem.put(str(source), theirs.path, recursive=True))
        timed("download", lambda: transfer.download([(ours / name, back / name, hashes[name]) for name in names]))
        timed("get", lambda: location.filesystem.get(theirs.path, str(tmp_path / f"theirs{number}"), recursive=True))

    for number in range(5):
        take_turns(number)
    fastest = {what: min(times) for what, times in seconds.items()}
    shares = fastest["put"] / fastest["upload"], fastest["get"] / fastest["download"]
    print(f"upload {shares[0]:.2f} and download {shares[1]:.2f} of the library's speed; seconds {fastest}")
    assert min(shares) >= 0.8


def _descendants(process: int) -> list[int]:
    """The process and all below it, parents first."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended since
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])

    def below(parent: int) -> list[int]:
        return [parent, *(each for child, other in parents.items() if other == parent for each in below(child))]

    return below(process)


def _newest(url: str) -> int:
    checkpoints = stored(url).list_checkpoints()
    return checkpoints[-1].step if checkpoints else 0


def test_runs_lists_verifies_and_prunes_both_tiers(
    texts: Path, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "first"
    loop.run(plan(texts, run, url, steps=8, checkpoint_every=2, stored=9, keep_last=9))
    for where in (url, url.rpartition("/")[0], str(run), str(tmp_path / "runs")):
        assert main(["runs", where, "--verify"]) == 0
        printed = capsys.readouterr().out
        assert "whole, every byte compared" in printed and re.search(r"\n +8 ", printed), where
    for where in (url, str(run)):
        assert main(["runs", where, "--prune", "1", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        scores = {entry["step"]: entry["score"] for entry in document["checkpoints"]}
        assert 8 in scores and len(scores) <= 2 and document["removed"]
    assert main(["runs", str(tmp_path / "nothing")]) == 2
    assert "is no folder: give a run" in capsys.readouterr().err


def test_runs_names_what_is_damaged(
    texts: Path, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    loop.run(plan(texts, tmp_path / "run", url, steps=4))
    folder = stored(url).checkpoints / stored(url).list_checkpoints()[-1].name
    contents = (folder / "state.json").read()
    (folder / "state.json").write(b"x" * len(contents))
    assert main(["runs", url]) == 0, "sizes are all that a listing shows"
    assert main(["runs", url, "--verify"]) == 4
    (folder / "state.json").write(b"x")
    assert main(["runs", url]) == 4
    printed = capsys.readouterr().out
    assert "state.json is damaged: its hash differs" in printed and "state.json has 1 bytes instead of" in printed


def test_only_a_run_that_is_named_is_pruned(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bucket or a folder above may hold runs that nobody thought of."""
    for name in ("a", "b"):
        for step in (1, 2):
            _put_commit(stored(f"{url}/{name}"), step, -step)
            folder = tmp_path / name / "checkpoints" / f"step-{step:06d}"
            folder.mkdir(parents=True)
            checkpoint_folder.write_commit(folder, checkpoint_folder.Commit(step=step, score=-step, files=()))
    for above in (url, str(tmp_path)):
        assert main(["runs", above, "--prune", "1"]) == 2
        error = capsys.readouterr().err
        assert f"{above} is above 2 runs, so name one: {above}/a, {above}/b" in error and error.count("\n") == 1
    assert main(["runs", f"s3://{object_store.BUCKET}", "--prune", "1"]) == 2
    steps = [[saved.step for saved in stored(f"{url}/{name}").list_checkpoints()] for name in ("a", "b")]
    assert steps == [[1, 2], [1, 2]] and len(list(tmp_path.glob("*/checkpoints/*"))) == 4
    for run in (f"{url}/a/", f"{tmp_path}/a/"):
        assert main(["runs", run, "--prune", "1", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["removed"]) == 1
    assert [saved.step for saved in stored(f"{url}/a").list_checkpoints()] == [2]
    assert len(list((tmp_path / "b" / "checkpoints").iterdir())) == 2


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_checkpoint_that_goes_away_while_it_is_read_is_not_damaged(
    is_stored: bool, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state.json").write_bytes(b"{}")
    record = checkpoint_folder.record_file(tmp_path / "state.json")
    commit = checkpoint_folder.Commit(step=3, score=None, files=(record,))
    name = "step-000003-00000003" if is_stored else "step-000003"
    local, remote = tmp_path / "run" / "checkpoints" / name, stored(url).checkpoints / name
    if is_stored:
        (remote / "state.json").write(b"{}")
        (remote / "COMMIT").write(checkpoint_folder.encode_commit(commit))
    else:
        local.mkdir(parents=True)
        shutil.copy(tmp_path / "state.json", local)
        checkpoint_folder.write_commit(local, commit)
    read_stored, read_local = Location.hash, checkpoint_folder.find_difference

    def prune_then_hash(location: Location) -> str:
        stored(url).remove(name)
        return read_stored(location)

    def prune_then_compare(folder: Path, file: checkpoint_folder.FileRecord) -> str:
        shutil.rmtree(folder)
        return read_local(folder, file)

    where, begin = (url, str(remote)) if is_stored else (str(tmp_path / "run"), str(local))
    assert main(["runs", where, "--verify"]) == 0
    assert "whole, every byte compared" in capsys.readouterr().out
    monkeypatch.setattr(Location, "hash", prune_then_hash)
    monkeypatch.setattr(checkpoint_folder, "find_difference", prune_then_compare)
    assert main(["runs", where, "--verify"]) == 0
    assert f"{begin} was removed meanwhile, so it is not listed" in capsys.readouterr().out


def test_a_lost_file_of_a_checkpoint_that_is_there_is_damage(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _put_commit(stored(url), 3, 1.0)

    def lose(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(StoredRun, "check_hashes", lose)
    assert main(["runs", url, "--verify"]) == 4
    assert "a file is missing" in capsys.readouterr().out


def test_runs_are_found_beside_a_folder_that_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.verbs.runs import answer

    for name in ("a", "b"):
        (tmp_path / name / "checkpoints" / "step-000001").mkdir(parents=True)
    scan = os.scandir

    def scan_late(path: Any) -> Any:
        if os.fspath(path).endswith("step-000001"):
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_late)
    assert answer._local_names(str(tmp_path)) == [str(tmp_path / "a"), str(tmp_path / "b")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": DEEPER}, r" holds a run of another model \(model.layers=2 there and 3 here\)"),
        ({"sequence": 16}, r": step-000004-\w+: trained with recipe.sequence=12, the plan says recipe.sequence=16"),
        ({"optimizer_states": "bf16"}, r": step-000004-\w+ holds optimizer states of recipe.optimizer_states=fp32"),
        ({"precision": "bf16"}, r": step-000004-\w+ holds weights of recipe.precision=fp32,"),
        ({}, r": step-000004-\w+: trained with other text or another split"),
    ],
    ids=["model", "sequence", "optimizer", "precision", "text"],
)
def test_a_store_that_the_plan_cannot_resume_from_is_refused_before_the_download(
    change: dict[str, Any], message: str, texts: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.run(plan(texts, tmp_path / "run", url, steps=4))
    wipe(tmp_path / "run")
    if not change:
        (tmp_path / "other").mkdir()
        for file in texts.iterdir():
            (tmp_path / "other" / file.name).write_text(file.read_text() + "more\n")
        texts = tmp_path / "other"
    monkeypatch.setattr(Location, "download", lambda *_, **__: pytest.fail("a file was downloaded"))
    with pytest.raises(CheckpointError, match=re.escape(f"store.url='{url}'") + message):
        loop.run(plan(texts, tmp_path / "run", url, **{"steps": 6, **change}), resume="auto")

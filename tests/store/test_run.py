"""The run folder: one run at a time, nothing of an earlier one lost, metrics as if nothing had happened."""

import json
import math
import os
import re
import socket
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.data import Tokenizer
from meshwright.spec import ModelShape, Plan, Recipe
from meshwright.spec.errors import CheckpointError, PlanError, RunError
from meshwright.store import checkpoint
from meshwright.store.run_folder import MetricsLog, RunFolder, RunLock
from tests.store import saving


def plan(run: Path, steps: int = 500) -> Plan:
    shape = ModelShape(vocab=257, layers=1, hidden=8, heads=2, ffn=16, max_positions=32)
    return Plan(model=shape, run=str(run), recipe=Recipe(steps=steps))


def create(path: Path, *, resume: bool = False, steps: int = 500) -> RunFolder:
    return RunFolder.create(path, plan(path, steps), Tokenizer.bytes(), resume=resume)


def save(run: RunFolder, step: int) -> Path:
    return checkpoint.save(run.checkpoints, step=step, tensors={"w": torch.ones(2)}, values={}, score=None, keep_last=2)


def refusal(path: Path, **options: bool) -> str:
    with pytest.raises(RunError) as caught:
        create(path, **options)
    text = str(caught.value)
    assert "\n" not in text and "run=" in text
    return text


def test_a_new_run_can_be_opened_while_it_goes_on(tmp_path: Path) -> None:
    with create(tmp_path / "deep" / "run") as run:
        other = RunFolder.open(run.path)
        assert other.plan == run.plan == plan(run.path) and other.lock is None
        assert Tokenizer.load(run.tokenizer).fingerprint == Tokenizer.bytes().fingerprint
        assert run.checkpoints.is_dir() and not run.metrics.exists() and not run.hf.exists()
        assert {p.parent for p in (run.metrics, run.hf, run.tokenizer, run.loss_plot)} == {run.path}


def test_a_second_run_of_this_process_is_refused_until_the_first_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create(tmp_path)
    assert "this process already runs" in refusal(tmp_path, resume=True)
    monkeypatch.chdir(tmp_path)
    assert "this process already runs" in refusal(Path("."), resume=True)
    run.close()
    run.close()
    create(tmp_path).close()


def test_a_second_process_is_told_who_runs_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    (tmp_path / "run").mkdir()
    process = saving.start(saving.hold_lock, tmp_path / "run", ready)
    wait_for(ready)
    text = refusal(tmp_path / "run")
    assert re.search(rf"process {ready.read_text()} on {re.escape(socket.gethostname())} since \d{{4}}-", text)
    assert f"another run is going on in {tmp_path / 'run'}" in text
    process.kill()
    saving.finish(process)
    create(tmp_path / "run").close()


def test_a_lock_holds_against_other_processes_after_it_was_refused_here(tmp_path: Path) -> None:
    """Closing any handle on the file would give a POSIX lock up."""
    first, second = tmp_path / "first", tmp_path / "second"
    lock = RunLock.take(tmp_path)
    with pytest.raises(RunError):
        RunLock.take(tmp_path)
    assert saving.finish(saving.start(saving.try_lock, tmp_path, first)) == [0]
    assert f"process {os.getpid()} on" in first.read_text()
    lock.release()
    assert saving.finish(saving.start(saving.try_lock, tmp_path, second)) == [0]
    assert second.read_text() == "taken"


def wait_for(path: Path) -> None:
    end = time.monotonic() + 30
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.01)


def test_a_run_is_not_overwritten_but_goes_on(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        save(run, 20)
        run.metrics.write_text('{"step": 20}\n')
    assert "already holds a run (last checkpoint: step 20): resume=auto continues it" in refusal(tmp_path)
    with create(tmp_path, resume=True, steps=900) as run:
        assert checkpoint.find_latest(run.checkpoints) == run.checkpoints / "step-000020"
        assert MetricsLog.read(run.metrics) == [{"step": 20}]
        assert RunFolder.open(tmp_path).plan.recipe.steps == 500, "nobody knows yet whether the new plan fits"
        run.keep_plan()
    assert RunFolder.open(tmp_path).plan.recipe.steps == 900, "the plan is the one it goes on with"


@pytest.mark.parametrize("what", ["metrics.jsonl", "hf"])
def test_what_a_run_left_is_a_run(tmp_path: Path, what: str) -> None:
    create(tmp_path).close()
    create(tmp_path).close()  # nothing happened yet: nothing is lost by starting again
    if what == "hf":
        (tmp_path / what).mkdir()
    else:
        (tmp_path / what).write_text('{"step": 1}\n')
    assert "already holds a run: resume=auto" in refusal(tmp_path)


def test_killed_before_the_first_checkpoint_it_starts_again(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        run.metrics.write_text('{"step": 1}\n')
    with create(tmp_path, resume=True) as run:
        assert checkpoint.find_latest(run.checkpoints) is None and not run.metrics.exists()


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("")
    assert refusal(tmp_path / "t.txt") == f"run='{tmp_path / 't.txt'}' is a file, not a folder: choose another run="


def test_resume_with_broken_checkpoints_only_does_not_start_again(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        (save(run, 7) / "state.json").write_text("")
        run.metrics.write_text('{"step": 7}\n')
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of .* can be used; the last one: .*step-000007: state\.json"
    ):
        create(tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 7}\n'
    create(tmp_path / "other").close()


def test_leftovers_of_a_killed_save_are_swept(tmp_path: Path) -> None:
    with create(tmp_path) as run:
        save(run, 1)
        (run.checkpoints / ".saving-step-000002").mkdir()
    with create(tmp_path, resume=True) as run:
        assert [path.name for path in run.checkpoints.iterdir()] == ["step-000001"]


def test_another_tokenizer_is_refused_once_trained(tmp_path: Path) -> None:
    create(tmp_path).close()
    with RunFolder.create(tmp_path, plan(tmp_path), Tokenizer.shipped()) as run:
        save(run, 1)
    assert "trained with another tokenizer" in refusal(tmp_path, resume=True)
    RunFolder.create(tmp_path, plan(tmp_path), Tokenizer.shipped(), resume=True).close()


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no plan\.yaml: give a run folder, which run= named"):
        RunFolder.open(tmp_path)
    with pytest.raises(RunError, match="does not exist: give a run folder, which run= named"):
        RunFolder.open(tmp_path / "nowhere")
    (tmp_path / "plan.yaml").write_text("# mine, with comments\n")
    assert "a plan.yaml that belongs to no training run" in refusal(tmp_path)
    assert (tmp_path / "plan.yaml").read_text() == "# mine, with comments\n"
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / "file").write_text("")
    assert "Not a directory" in refusal(tmp_path / "file" / "run")


def test_a_damaged_plan_is_a_sentence(tmp_path: Path) -> None:
    create(tmp_path).close()
    (tmp_path / "plan.yaml").write_text("model: [\n")
    with pytest.raises(PlanError):
        RunFolder.open(tmp_path)


RECORDS = st.dictionaries(
    st.text(max_size=5).filter(lambda name: name != "step"),
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "eval", "ä\u2028\r\n"]),
    max_size=4,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(RECORDS, max_size=6), st.integers(0, 8), st.binary(max_size=9).filter(lambda torn: b"\n" not in torn))
def test_metrics_are_those_of_an_uninterrupted_run(
    tmp_path: Path, records: list[dict[str, object]], step: int, torn: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    log = MetricsLog(path)
    for number, record in enumerate(records, start=1):
        log.append({"step": number, **record})
    log.close()
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    assert all(json.loads(line, parse_constant=pytest.fail) for line in lines), "valid JSON for every reader"
    heard = MetricsLog.read(path)
    assert repr(heard) == repr([{"step": n, **record} for n, record in enumerate(records, start=1)])
    if path.exists():
        path.write_bytes(path.read_bytes() + torn)
    assert repr(MetricsLog.read(path)) == repr(heard)
    log.truncate_to(step)
    assert repr(MetricsLog.read(path)) == repr(heard[:step])
    log.append({"step": step + 1, "loss": 1.5})
    log.close()
    assert path.read_bytes() == b"".join(
        line + b"\n" for line in [*lines[:step], b'{"step": %d, "loss": 1.5}' % (step + 1)]
    )


def test_records_of_one_step_stay_together(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for record in ({"about": "run"}, {"step": 1}, {"step": 2}, {"step": 2, "kind": "eval"}, {"step": 3}):
        log.append(record)
    log.sync()
    log.truncate_to(2)
    assert MetricsLog.read(log.path) == [{"about": "run"}, {"step": 1}, {"step": 2}, {"step": 2, "kind": "eval"}]
    log.append({"step": 3})
    assert len(MetricsLog.read(log.path)) == 5
    log.close()


def test_numbers_that_are_none_are_written_as_words(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "loss": math.nan, "norm": -math.inf, "deep": [math.inf, {"x": math.nan}]})
    log.close()
    assert json.loads(log.path.read_text()) == {
        "step": 1,
        "loss": "NaN",
        "norm": "-Infinity",
        "deep": ["Infinity", {"x": "NaN"}],
    }


@pytest.mark.parametrize(
    "garbage", [b"{", b"[1]", b"\x00\x00\xff", b'{"step": NaN}', b'{"step": "3"}', b"", b"[" * 100000]
)
def test_garbage_is_refused_by_file_and_line(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + garbage + b'\n{"step": 2}\n')
    before = path.read_bytes()
    for read in (MetricsLog.read, lambda path: MetricsLog(path).truncate_to(2)):
        with pytest.raises(RunError, match=re.escape(f"{path} line 2 is not a record of a run")) as caught:
            read(path)
        assert len(str(caught.value)) < len(str(path)) + 150
        assert path.read_bytes() == before
    MetricsLog(path).truncate_to(1)  # a power cut may leave anything after the records that count
    assert path.read_bytes() == b'{"step": 1}\n'


def test_metrics_that_cannot_be_written_are_a_sentence(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "gone" / "metrics.jsonl")
    with pytest.raises(RunError, match="No such file or directory; fix that"):
        log.append({"step": 1})
    assert MetricsLog.read(log.path) == []
    log.truncate_to(3)
    if Path("/dev/full").exists():
        full = MetricsLog(Path("/dev/full"))
        with pytest.raises(RunError, match="No space left on device"):
            full.append({"step": 1})
        full.close()


def test_the_losses_that_a_curve_goes_on_from(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 7):
        log.append({"step": step, "loss": step / 2})
        log.append({"step": step, "kind": "eval", "loss": 9.0})
    log.close()
    assert MetricsLog.losses(log.path, 2) == (1.0, 2.0, 3.0)
    assert MetricsLog.losses(log.path, 1, most=2) == (2.5, 3.0) and MetricsLog.losses(log.path, 0) == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [("min_learning_rate", "min_learning_rate_ratio"), ("schedule", "learning_rate_schedule")],
)
def test_a_run_with_a_key_of_an_earlier_version_names_file_and_new_key(tmp_path: Path, old: str, new: str) -> None:
    run = create(tmp_path)
    run.keep_plan()
    run.close()
    path = tmp_path / "plan.yaml"
    path.write_text(path.read_text().replace(f"  {new}:", f"  {old}:"))
    with pytest.raises(PlanError) as error:
        RunFolder.open(tmp_path)
    assert re.fullmatch(
        rf"{re.escape(str(path))}:\d+: recipe\.{old} is not known: it is now recipe\.{new}", str(error.value)
    )

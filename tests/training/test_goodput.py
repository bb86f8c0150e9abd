"""Accounts of wall time: parts that sum to the time outside, lost work after a kill, and a plan that foretells them."""

import json
import signal
import time
from math import log1p
from pathlib import Path
from random import Random
from typing import Any

import pytest

from meshwright.planner.rent.goodput import RunTiming
from meshwright.spec.errors import RunError
from meshwright.store.run_folder import MetricsLog
from meshwright.training import loop
from meshwright.training.step.watch import ACCOUNT_BYTES, PARTS, SessionLog, read_goodput
from tests.store import saving
from tests.training import running

NO_TIME = dict.fromkeys(PARTS, 0.0)
OPTIONS: dict[str, Any] = {"steps": 3000, "checkpoint_every": 8, "eval_every": 0}


def write_accounts(path: Path, *changes: dict[str, Any]) -> None:
    """Accounts as they would be after some processes."""
    account = {"begun": 0.0, "first_step": 0, "step": 0, "stopped": "", "saves": 0, "compile": 0.0, "marks": []}
    path.write_text("".join(json.dumps(account | NO_TIME | change) + "\n" for change in changes))


def test_three_processes_by_hand(tmp_path: Path) -> None:
    """The first dies 10 steps after a save, the second is stopped by Ctrl-C, the third ends."""
    path = tmp_path / "goodput.jsonl"
    write_accounts(
        path,
        {"step": 30, "start": 5.0, "steps": 62.0, "compile": 2.0, "save": 1.0, "saves": 1, "marks": [[20, 38.0]]},
        {"begun": 100.0, "first_step": 20, "step": 50, "start": 6.0, "steps": 60.0, "data": 3.0, "compile": 1.0,
         "save": 2.0, "saves": 2, "marks": [[40, 38.0], [50, 59.0]], "stopped": "interrupted"},
        {"begun": 1000.0, "first_step": 50, "step": 60, "start": 4.0, "steps": 20.0, "evaluation": 7.0, "other": 0.5,
         "stopped": "done"},
    )  # fmt: skip
    account = read_goodput(path)
    assert account is not None
    assert account.productive_seconds == pytest.approx(38 + 59 + 20)
    assert account.lost_seconds == pytest.approx(60 - 38)
    assert account.restart_seconds == pytest.approx((100 - 68) + (6 + 1) + 4)
    assert account.idle_seconds == pytest.approx(1000 - 171)
    assert (account.start_seconds, account.save_seconds, account.saves) == (7.0, 3.0, 3)
    assert (account.processes, account.interruptions, account.steps) == (3, 1, 60)
    assert account.wall_seconds == pytest.approx(171 + 31.5)
    assert account.words.startswith("goodput 57.8% of 3 min 22 s in 3 processes, lost work 10.9%, restarts 21.2%")


@pytest.mark.parametrize(("resumed_at", "kept_s"), [(0, 0.0), (10, 5.0), (20, 10.0), (25, 30.0), (30, 50.0)])
def test_lost_work_between_saves_is_a_share_of_its_steps(tmp_path: Path, resumed_at: int, kept_s: float) -> None:
    """An older checkpoint, or none, may be all that is whole; steps after the save were slower."""
    path = tmp_path / "goodput.jsonl"
    write_accounts(
        path, {"step": 30, "steps": 50.0, "marks": [[20, 10.0]]}, {"first_step": resumed_at, "step": resumed_at}
    )
    account = read_goodput(path)
    assert account is not None
    assert (account.productive_seconds, account.lost_seconds) == pytest.approx((kept_s, 50 - kept_s))


def test_a_process_that_died_in_its_first_step_counts_as_restart(tmp_path: Path) -> None:
    """It resumed at 40, and a later one at 20, because 40 was damaged or its spike was rolled back."""
    path = tmp_path / "goodput.jsonl"
    write_accounts(
        path,
        {"step": 45, "steps": 45.0, "marks": [[20, 20.0], [40, 40.0]]},
        {"begun": 50.0, "first_step": 40, "step": 40, "start": 3.0},
        {"begun": 60.0, "first_step": 20, "step": 60, "start": 2.0, "steps": 40.0, "stopped": "done"},
    )
    account = read_goodput(path)
    assert account is not None
    assert (account.productive_seconds, account.lost_seconds) == (60.0, 25.0)
    assert account.restart_seconds == pytest.approx((50 - 45) + 3 + (60 - 53) + 2)


def test_a_line_is_rewritten_and_a_torn_one_replaced(tmp_path: Path) -> None:
    path = tmp_path / "goodput.jsonl"
    for first_step in (0, 4):
        session = SessionLog(path, begun=time.time(), first_step=first_step)
        for step in range(first_step + 1, first_step + 6):
            session.count_step(step, 0.0, 0.0)
            session.end_lap("steps")
        session.mark_save()
        session.close()
        assert [row["step"] for row in MetricsLog.read(path)] == [5, 9][: 1 + first_step // 4]
        with path.open("ab") as file:
            file.write(b'{"begun": 12')
    assert path.stat().st_size == 2 * ACCOUNT_BYTES + 12 and read_goodput(path) is not None
    path.write_text('{"step": 3}\n')
    with pytest.raises(RunError, match="damaged"):
        read_goodput(path)
    assert read_goodput(tmp_path / "none") is None


def test_a_crashed_run_accounts_for_all_its_time(tmp_path: Path) -> None:
    """Against this test's own clock, within 1 %; and lost steps are those between the save and the crash."""
    texts, plan = running.write_texts(tmp_path / "texts"), None
    plan = running.plan(texts, tmp_path / "run", steps=40)
    began = time.monotonic()
    with pytest.raises(running.PowerCut):
        loop.run(plan, watchers=[running.Crashed(15)])
    time.sleep(0.3)
    summary = loop.run(plan, resume="auto")
    wall_s = time.monotonic() - began
    account = summary.goodput
    assert account is not None and account == read_goodput(tmp_path / "run" / "goodput.jsonl")
    assert account.wall_seconds == pytest.approx(wall_s, rel=0.01)
    parts = (
        account.productive_seconds, account.start_seconds, account.evaluation_seconds, account.save_seconds,
        account.data_wait_seconds, account.lost_seconds, account.restart_seconds, account.other_seconds,
    )  # fmt: skip
    assert sum(parts) == pytest.approx(wall_s, rel=0.01) and min(parts) > 0
    assert account.restart_seconds > 0.3 and (account.interruptions, account.processes, account.steps) == (1, 2, 40)
    # The same figures from the records that were not cut, but for what the first steps of a process take longer.
    rows = [row for row in MetricsLog.read(tmp_path / "run" / "metrics.jsonl") if "kind" not in row]
    assert account.productive_seconds <= sum(row["step_seconds"] - row["data_wait_seconds"] for row in rows) * 1.2
    assert loop.run(plan, resume="auto").goodput == account, "a finished run that is started again changes nothing"


def restart_until_done(texts: Path, run: Path, mean_s: float, random: Random, **options: Any) -> list[float]:
    """Train in processes that are killed at random, until one reaches the last step. Returns the times of all ends."""
    ends = []
    while True:
        process = saving.start(running.train_in_child, str(texts), str(run), options)
        process.join(random.expovariate(1 / mean_s))
        process.kill()
        (code,) = saving.finish(process)
        ends.append(time.time())
        if code == 0:
            return ends
        assert code == -signal.SIGKILL


@pytest.mark.slow
def test_plans_foretell_three_drills(tmp_path: Path) -> None:
    """Real processes that train, save, are killed at random and started again: planned and accounted goodput agree.

    Measured are the time of one step with its wait for data, of one save, and of one restart, since other processes
    share the machine; the rate of kills is the killer's. Planned are lost work, and the number of restarts and saves.
    """
    texts = running.write_texts(tmp_path / "texts")
    for drill in range(3):
        run = tmp_path / str(drill)
        ends = restart_until_done(texts, run, 4.0, Random(drill), **OPTIONS)
        account = read_goodput(run / "goodput.jsonl")
        assert account is not None
        # A process that is killed before its first step leaves no line, so the account begins with the first that did.
        began = MetricsLog.read(run / "goodput.jsonl")[0]["begun"]
        # The clock of the file system: a process still takes a while to leave after its last line.
        last = (run / "goodput.jsonl").stat().st_mtime
        wall_s, kills = last - began, sum(began < end < last for end in ends)
        assert account.wall_seconds == pytest.approx(wall_s, rel=0.01)
        assert kills >= account.interruptions >= 2
        mtbf_s, steps_s = wall_s / kills, account.productive_seconds
        # Repeated steps waited for data, too.
        work_s = steps_s * (1 + account.data_wait_seconds / (steps_s + account.lost_seconds))
        planned = RunTiming(
            work_s=work_s, steps_s=steps_s, interval_s=8 * work_s / account.steps,
            save_s=account.save_seconds / account.saves, write_s=0.0,
            start_s=account.start_seconds + account.other_seconds,
            # Kills shortened some restarts: this is the length of a whole one.
            restart_s=-mtbf_s * log1p(-account.restart_seconds / kills / mtbf_s), mtbf_s=mtbf_s,
            hardware=0.0, repair_s=0.0, nodes=1, spares=0,
        )  # fmt: skip
        print(f"drill {drill}: planned {planned.goodput:.1%}, accounted {account.share:.1%}: {account.words}")
        assert account.share == pytest.approx(planned.goodput, abs=0.03), (account, planned)

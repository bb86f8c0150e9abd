"""The mark of the process that trains a run behind a URL: refusals, waits, and what counts as gone."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest

from meshwright.remote.locations import Location
from meshwright.spec.errors import StoreError
from meshwright.store import owner
from meshwright.store.owner import OWNER, Ownership, Process, Superseded

HERE = Process.find(os.getpid())
ELSEWHERE = replace(HERE, host="node7", namespace="another machine")


@pytest.fixture
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Location]:
    for name, seconds in {"BEAT_S": 0.05, "SILENT_S": 0.6, "POLL_S": 0.02}.items():
        monkeypatch.setattr(owner, name, seconds)
    location = Location.open(f"memory://{request.node.name}/{time.time_ns()}")
    yield location
    # Beats of the test end when somebody else holds the run.
    (location / OWNER).write(json.dumps({"process": asdict(replace(HERE, host="end")), "beat": 0}).encode())


def mark(run: Location, process: Process) -> None:
    """A mark without beats, as a killed process leaves it."""
    (run / OWNER).write(json.dumps({"process": asdict(process), "beat": 3}).encode())


def seconds_of_refusal(run: Location) -> float:
    began = time.monotonic()
    Ownership(run, HERE).refuse_another()
    return time.monotonic() - began


def test_a_living_owner_elsewhere_is_refused_by_name(run: Location) -> None:
    Ownership(run, ELSEWHERE).hold()
    with pytest.raises(StoreError, match=rf"is being trained on node7 \(process {os.getpid()}\): end that one first"):
        Ownership(run, HERE).refuse_another()


def test_a_silent_owner_elsewhere_is_waited_for_and_taken_for_dead(
    run: Location, caplog: pytest.LogCaptureFixture
) -> None:
    mark(run, ELSEWHERE)
    assert 0.6 <= seconds_of_refusal(run) < 3
    assert "was trained on node7" in caplog.text and "waiting for 1 s" in caplog.text


def test_an_owner_that_ends_meanwhile_is_waited_for_no_longer(run: Location) -> None:
    mark(run, ELSEWHERE)
    threading.Timer(0.1, Ownership(run, ELSEWHERE).release).start()
    assert 0.1 <= seconds_of_refusal(run) < 0.5


def test_nobody_waits_for_oneself_nor_after_a_process_of_this_machine_that_is_gone(run: Location) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child = Process.find(process.pid)
    assert not child.is_gone and not HERE.is_gone and not ELSEWHERE.is_gone
    process.kill()
    # Not reaped yet: a zombie.
    while not child.is_gone:
        time.sleep(0.01)
    mark(run, child)
    assert seconds_of_refusal(run) < 0.3
    process.communicate()
    assert child.is_gone and seconds_of_refusal(run) < 0.3
    # Its number belongs to another process by now.
    assert replace(HERE, started="1").is_gone
    mark(run, HERE)
    assert seconds_of_refusal(run) < 0.3


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"process": {"host": 1}}', b"\xff"])
def test_a_mark_that_says_nothing_stops_nobody(run: Location, content: bytes) -> None:
    (run / OWNER).write(content)
    assert seconds_of_refusal(run) < 0.3
    Ownership(run, HERE).refuse_lost()


def test_who_lost_the_run_neither_beats_nor_removes_the_mark(run: Location) -> None:
    first, second = Ownership(run, HERE), Ownership(run, ELSEWHERE)
    first.hold()
    first.refuse_lost()
    second.hold()
    time.sleep(0.3)
    assert first.is_lost and not second.is_lost
    with pytest.raises(Superseded, match="has been taken over by another process"):
        first.refuse_lost()
    first.release()
    assert not second.is_lost and (run / OWNER).describe() is not None
    second.release()
    assert (run / OWNER).describe() is None

"""The mark of the process that trains a run behind a URL: refusals, waits, and what counts as gone."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from random import Random

import pytest

from meshwright.remote.locations import Location
from meshwright.spec.errors import StoreError
from meshwright.store import owner
from meshwright.store.owner import OWNER, Ownership, Process, Superseded

HERE = Process.find(os.getpid())
ELSEWHERE = replace(HERE, host="node7", namespace="another machine")


@pytest.fixture
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Location]:
    times = {"BEAT_S": 0.05, "RETRY_S": 0.02, "SILENT_S": 2.0, "POLL_S": 0.02, "SETTLE_S": 0.05, "RELEASE_S": 9.0}
    for name, seconds in times.items():
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
    Ownership(run, ELSEWHERE).claim()
    with pytest.raises(StoreError, match=rf"is being trained on node7 \(process {os.getpid()}\): end that first"):
        Ownership(run, HERE).refuse_another()


def test_a_silent_owner_elsewhere_is_waited_for_and_taken_for_dead(
    run: Location, caplog: pytest.LogCaptureFixture
) -> None:
    mark(run, ELSEWHERE)
    assert seconds_of_refusal(run) >= 2.0
    assert "was last trained on node7" in caplog.text and "Waiting 2 s" in caplog.text


def test_an_owner_that_ends_meanwhile_is_waited_for_no_longer(run: Location) -> None:
    mark(run, ELSEWHERE)
    threading.Timer(0.1, (run / OWNER).remove).start()
    assert 0.05 <= seconds_of_refusal(run) < 1.9


def test_nobody_waits_for_oneself_nor_after_a_process_of_this_machine_that_is_gone(run: Location) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child = Process.find(process.pid)
    assert not child.is_gone and not HERE.is_gone and not ELSEWHERE.is_gone
    process.kill()
    # Not reaped yet: a zombie.
    while not child.is_gone:
        time.sleep(0.01)
    mark(run, child)
    assert seconds_of_refusal(run) < 1.9
    process.communicate()
    assert child.is_gone and seconds_of_refusal(run) < 1.9
    # Its number belongs to another process by now.
    assert replace(HERE, started="1").is_gone
    mark(run, HERE)
    assert seconds_of_refusal(run) < 1.9


NO_NUMBER = b'{"process": {"host": "", "namespace": "", "number": "x", "started": ""}}'


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"process": {"host": 1}}', b"\xff", b"[" * 9999, NO_NUMBER])
def test_a_mark_that_says_nothing_stops_nobody(run: Location, content: bytes) -> None:
    (run / OWNER).write(content)
    assert seconds_of_refusal(run) < 1.9
    Ownership(run, HERE).refuse_lost()


def test_who_lost_the_run_neither_beats_nor_removes_the_mark(run: Location) -> None:
    first = Ownership(run, HERE)
    first.claim()
    first.refuse_lost()
    ends_s = time.monotonic() + 20
    while first.lost is None and time.monotonic() < ends_s:
        mark(run, ELSEWHERE)  # a beat of the first may come between
        time.sleep(0.05)
    assert first.lost is not None
    with pytest.raises(Superseded, match=r"has been taken over by node7 \(process \d+\)"):
        first.refuse_lost()
    first.release()
    Ownership(run, ELSEWHERE).refuse_lost()


def test_who_wakes_after_the_follower_has_ended_is_no_owner(run: Location) -> None:
    first, second = Ownership(run, HERE), Ownership(run, ELSEWHERE)
    first._write(0, first._file)  # and is frozen
    second.claim()
    second.release()
    with pytest.raises(Superseded, match="taken over by node7"):
        first.refuse_lost()
    # A new start waits for nobody.
    assert seconds_of_refusal(run) < 1.9


def test_what_interrupts_a_claim_leaves_no_living_mark(run: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    mine = Ownership(run, ELSEWHERE)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner.time, "sleep", interrupt)
        mine.claim()
    mine.release()
    assert seconds_of_refusal(run) < 1.9


def test_a_mark_beats_through_failing_requests_and_goes_with_its_process(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of all requests fail. Each attempt of a beat is made once, and again after a short pause."""
    mine, random, read = Ownership(run, HERE), Random(3), Location.read
    mine.claim()

    def failing(location: Location, *span: int) -> bytes:
        if location.attempts == 1 and random.random() < 0.5:
            raise StoreError("busy")
        return read(location, *span)

    monkeypatch.setattr(Location, "read", failing)
    beats = []
    for _ in range(20):
        time.sleep(0.1)
        beats.append(json.loads((run / OWNER).read())["beat"])
    assert beats == sorted(beats) and beats[-1] >= 3
    monkeypatch.undo()
    mine.release()
    assert json.loads((run / OWNER).read())["beat"] is None


def test_two_that_start_at_the_same_moment_do_not_both_train(run: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner.time, "sleep", lambda seconds: mark(run, ELSEWHERE))
        with pytest.raises(StoreError, match="was started by another process at the same moment"):
            Ownership(run, HERE).claim()


def test_a_store_that_cannot_be_written_is_an_error_at_the_start(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(location: Location, data: bytes) -> None:
        raise StoreError("away")

    mark(run, replace(HERE, started="1"))
    with monkeypatch.context() as patch:
        patch.setattr(Location, "write", fail)
        with pytest.raises(StoreError, match="away"):
            Ownership(run, HERE).claim()
    mine = Ownership(run, HERE)
    mine.claim()
    mine.refuse_lost()
    mine.release()

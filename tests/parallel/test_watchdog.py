"""Who is to blame, from beats alone; what a watched thread is seen to do; how an attempt gets its name."""

import gc
import importlib
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright import compat
from meshwright.interface.process.launch import PHASES, READS
from meshwright.observe.ranks import on_ranks
from meshwright.parallel.groups.mesh import make_mesh
from meshwright.parallel.health import heartbeat as pulses
from meshwright.parallel.health import watchdog
from meshwright.parallel.health.heartbeat import BACKWARD, Beat, Heartbeat, HeartbeatWatch
from meshwright.parallel.health.judgement import Limits, judge
from meshwright.parallel.health.watchdog import (
    FAILED,
    TERMINATED,
    RankPlace,
    Watchdog,
    _Observed,
    meet,
    name_ranks,
)
from meshwright.spec import Layout
from meshwright.spec.errors import RunError
from meshwright.training.step.interrupt import Interrupt

MOVES = Beat(step=7, phase="forward", may_take_long=False, calls=50, last="all_reduce on data", where="a.py:1 in f")
STILL = replace(MOVES, still_s=301.0)
WAITS = replace(STILL, waits=True)
AWAKE = [0.0] * 3


def blamed(*beats: Beat, silent_s: list[float] = AWAKE, **limits: Any) -> int | None:
    blame = judge(beats, silent_s, Limits(**limits))
    return None if blame is None else blame.rank


def test_all_is_well() -> None:
    assert blamed(MOVES, MOVES, MOVES) is None
    assert blamed(replace(MOVES, still_s=299), replace(WAITS, still_s=299), MOVES) is None


def test_who_works_on_is_not_blamed_and_who_waits_for_him_neither() -> None:
    assert blamed(MOVES, WAITS, WAITS) is None


def test_who_stands_outside_of_a_collective_is_blamed() -> None:
    assert blamed(replace(WAITS, still_s=999), STILL, WAITS) == 1
    assert blamed(replace(STILL, still_s=400), STILL, WAITS) == 0


def test_where_all_wait_the_farthest_behind_is_blamed() -> None:
    assert blamed(WAITS, WAITS, replace(WAITS, step=6)) == 2
    assert blamed(WAITS, replace(WAITS, calls=49), replace(WAITS, still_s=500)) == 1


def test_limits_follow_the_longest_step_and_slow_phases() -> None:
    assert blamed(WAITS, replace(STILL, longest_s=100.0), WAITS) is None
    assert blamed(WAITS, replace(STILL, longest_s=100.0, still_s=1001.0), WAITS) == 1
    saving = replace(STILL, phase="save", may_take_long=True)
    assert blamed(WAITS, saving, WAITS) is None
    assert blamed(WAITS, replace(saving, still_s=1801), WAITS) == 1
    assert blamed(WAITS, STILL, WAITS, hang_s=400.0) is None
    assert blamed(WAITS, replace(STILL, longest_s=10.0), WAITS, hang_s=3.0) == 1
    assert blamed(WAITS, replace(STILL, still_s=1e6), WAITS, silent_s=[0, 1e6, 0], hang_s=0) is None


def test_while_one_compiles_nobody_is_blamed_for_waiting() -> None:
    """A recompilation on one rank; on a GPU it may be in the backward pass, on a thread of autograd."""
    compiles = replace(MOVES, phase="compile", may_take_long=True, still_s=5.0)
    waits = replace(WAITS, still_s=900.0)
    assert blamed(waits, waits, waits) == 0
    assert blamed(waits, compiles, waits) is None
    assert blamed(waits, replace(compiles, waits=True), waits) is None
    assert blamed(waits, replace(compiles, still_s=1801.0), waits) == 1


def test_silence() -> None:
    assert blamed(WAITS, MOVES, MOVES, silent_s=[0, 121, 0]) == 1
    assert blamed(WAITS, MOVES, MOVES, silent_s=[0, 119, 0]) is None
    assert blamed(WAITS, MOVES, MOVES, silent_s=[0, 8, 0]) is None
    assert blamed(replace(WAITS, lost="closed by peer"), MOVES, MOVES, silent_s=[0, 8, 0]) == 1
    assert blamed(MOVES, replace(MOVES, done=True), MOVES, silent_s=[0, 1e6, 0]) is None


def test_the_sentence_names_rank_step_phase_and_collective() -> None:
    blame = judge([WAITS, replace(STILL, host="node17"), WAITS], AWAKE, Limits())
    assert blame is not None
    who = "rank 1 on node17 has made no progress for 301 s at step 7, forward, last collective all_reduce on data "
    assert blame.sentence.startswith(who + "(a.py:1 in f)")


def test_the_flight_recorder_orders_devices_that_hosts_run_ahead_of() -> None:
    """All hosts wait at one place. The device of rank 1 is one collective behind, and the others wait for it there."""
    ahead = replace(WAITS, oldest=512, open_collective="all_gather 12 on shard")
    behind = replace(WAITS, oldest=511, open_collective="all_reduce 40 on data")
    blame = judge([ahead, behind, ahead, WAITS], [0.0] * 4, Limits())
    assert blame is not None and blame.rank == 1
    assert "; by torch's flight recorder its oldest open collective is all_reduce 40 on data, and 2 other ranks wait " \
        "in all_gather 12 on shard; every rank was ended" in blame.sentence  # fmt: skip
    # One that never entered the others' collective has none, and neither has one that was stopped.
    blame = judge([ahead, STILL, WAITS], AWAKE, Limits())
    assert blame is not None and "; by torch's flight recorder 1 other rank waits in all_gather 12" in blame.sentence
    blame = judge([ahead, MOVES, ahead], [0, 121, 0], Limits())
    assert blame is not None and "recorder 2 other ranks wait in all_gather 12 on shard; every" in blame.sentence


def test_the_oldest_open_collective_is_read_while_it_waits() -> None:
    assert on_ranks(2, _read_recorder) == [(True, False), (False, False)]


def _read_recorder() -> tuple[bool, bool]:
    """Rank 0 enters a sum that rank 1 joins once rank 0 has read its recorder."""
    mesh = make_mesh(Layout(dp_shard=2))
    shard, read = mesh["shard"], dist.distributed_c10d._get_default_store()
    # The group's first sum ends before.
    dist.all_reduce(torch.ones(1), group=shard.process_group)
    if mesh.rank:
        read.wait(["read"])
        dist.all_reduce(torch.ones(1), group=shard.process_group)
        return False, _stays_open()
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1), group=shard.process_group))
    thread.start()
    end_s = time.monotonic() + 30
    while not (name := compat.oldest_open_collective()[1]) and time.monotonic() < end_s:
        time.sleep(0.01)
    read.set("read", "")
    thread.join()
    return re.fullmatch(r"all_?reduce \d+ on (world|shard|data)", name) is not None, _stays_open()


def _stays_open() -> bool:
    """Whether a collective is open for good: Gloo retires one a moment after its caller goes on."""
    end_s = time.monotonic() + 30
    while (is_open := bool(compat.oldest_open_collective()[1])) and time.monotonic() < end_s:
        time.sleep(0.01)
    return is_open


def test_an_observer_that_was_stopped_itself_blames_nobody() -> None:
    seen = _Observed(2)
    seen.note([1, 1], 100.0)
    seen.note([2, 1], 101.0)
    assert seen.silent_s == [0.0, 1.0]
    seen.note([2, 1], 500.0)
    assert seen.silent_s == [2.0, 3.0]


def test_who_has_met_and_never_beats_is_blamed_after_a_while() -> None:
    store, seen = dist.HashStore(), _Observed(3)
    for rank in (0, 2):
        store.set(f"beat/{rank}", Beat().encode())
    assert seen.look(store, Limits()) is None
    seen.met_s -= 121
    blame = seen.look(store, Limits())
    assert blame is not None and blame.rank == 1
    assert blame.sentence.startswith("rank 1 joined the others 121 s ago and has sent nothing since; ")
    assert seen.look(store, Limits(hang_s=0)) is None


def test_a_beat_of_a_newer_version_is_read() -> None:
    assert Beat.decode(b'{"step": 3, "mood": "good"}') == Beat(step=3)


def test_a_thread_is_seen_where_it_stands() -> None:
    pulse, go, on = Heartbeat(step=3, ended=5), threading.Event(), threading.Event()
    watches = []

    def deep() -> None:
        on.set()
        go.wait(20)

    def work() -> None:
        watches.append(HeartbeatWatch(pulse, {f"{__name__}:{deep.__qualname__}": "forward"}))
        deep()

    thread = threading.Thread(target=work)
    thread.start()
    on.wait(20)
    time.sleep(0.05)
    first = watches[0].look()
    time.sleep(0.05)
    second = watches[0].look()
    assert (first.step, first.phase, first.may_take_long, first.waits) == (3, "forward", False, False)
    assert second.still_s > first.still_s and "in wait" in second.where
    pulse.calls.tell("data", "all_reduce", 8)
    third = watches[0].look()
    assert third.still_s == 0.0 and third.last == "all_reduce on data" and third.calls == 1
    assert Beat.decode(third.encode().encode()) == third
    go.set()
    thread.join()


@pytest.mark.parametrize(("phase", "moves"), [("save", True), ("forward", False)])
def test_who_waits_for_threads_that_write_does_not_stand_still(phase: str, moves: bool) -> None:
    """A save may take longer than the limit of one that stands; a step is not excused by it."""
    pulse, held, watches = Heartbeat(), threading.Lock(), []

    def joins() -> None:
        watches.append(HeartbeatWatch(pulse, {f"{__name__}:{joins.__qualname__}": phase}))
        held.acquire()

    held.acquire()
    thread = threading.Thread(target=joins)
    thread.start()
    time.sleep(0.05)
    watches[0].look()
    pulse.piece_begun()
    assert (watches[0].look().still_s == 0.0) == moves
    held.release()
    thread.join()


def test_who_reads_a_number_that_all_compute_waits_for_the_others() -> None:
    """On GPUs a collective returns at once: a rank stands where it wants the result."""
    device, on, watches = threading.Lock(), threading.Event(), []

    def reads() -> None:
        on.set()
        device.acquire()  # as Tensor.item: no frame of its own

    def work() -> None:
        watches.extend(
            HeartbeatWatch(Heartbeat(), {}, frozenset(names)) for names in ([], [f"{__name__}:{reads.__qualname__}"])
        )
        reads()

    device.acquire()
    thread = threading.Thread(target=work)
    thread.start()
    on.wait(20)
    time.sleep(0.05)
    assert [watch.look().waits for watch in watches] == [False, True]
    device.release()
    thread.join()


def seen_in(names: list[str], elsewhere: list[str], **kind: Any) -> Beat:
    """How a watch sees a main thread that is in functions of these names (outermost first), with another thread in
    functions of other names: modules are made up, frames are real."""
    on, go, watches = threading.Event(), threading.Event(), []

    def inside(names: list[str], do: Any) -> Any:
        for name in names[::-1]:
            module, _, function = name.partition(":")
            scope: dict[str, Any] = {"__name__": module, "do": do}
            exec(f"def {function}():\n    do()", scope)
            do = scope[function]
        return do

    def begin() -> None:
        watches.append(HeartbeatWatch(Heartbeat(step=3, ended=5), PHASES, READS, **kind))
        inside(names, lambda: go.wait(20))()

    threads = [
        threading.Thread(target=begin),
        threading.Thread(target=inside(elsewhere, lambda: (on.set(), go.wait(20)))),
    ]
    for thread in threads:
        thread.start()
    on.wait(20)
    time.sleep(0.05)
    beat = watches[0].look()
    go.set()
    for thread in threads:
        thread.join()
    return beat


LOOP = "meshwright.training.trainer:step"


def test_a_compilation_on_a_thread_of_autograd_is_one() -> None:
    compiler = ["torch._functorch._aot_autograd.runtime_wrappers:backward", "torch._inductor.compile_fx:compile_fx"]
    assert seen_in([LOOP], []).phase == "step"
    beat = seen_in([LOOP], compiler)
    assert beat.phase == "compile" and beat.may_take_long and not beat.waits
    assert seen_in([LOOP, "torch._dynamo.convert_frame:compile_inner"], []).phase == "compile"
    runs = ["torch._inductor.output_code:call", "torch._inductor.runtime.compile_tasks.key:forward"]
    assert seen_in([LOOP, *runs], runs).phase == "step", "code that was compiled is not compiling"
    idle = ["torch._inductor.compile_worker.subproc_pool:_read_thread"]
    assert seen_in([LOOP], idle).phase == "step", "Inductor's threads wait for work all the time"


def test_every_function_that_waits_exists() -> None:
    for name in pulses.WAITS:
        module, _, path = name.partition(":")
        target: Any = importlib.import_module(module)
        for step in path.split("."):
            target = getattr(target, step)
        assert target.__qualname__ == path


def test_who_runs_ahead_of_a_device_waits_wherever_it_is() -> None:
    """A launch waits where the queue of a GPU is full; a CPU does what it is asked."""
    assert seen_in([LOOP], [], queues=True).waits
    assert not seen_in([LOOP], []).waits


@contextmanager
def watched(store: dist.Store, hang_s: float) -> Iterator[list[int]]:
    """Gives the exit codes with which the watchdog of a single rank wants to end this process."""
    codes: list[int] = []
    watchdog = Watchdog(
        store,
        store,
        RankPlace(rank=0, world=1),
        HeartbeatWatch(Heartbeat(), PHASES, READS),
        limits=Limits(hang_s=hang_s),
        say=lambda line: None,
        end=codes.append,
    )
    watchdog.start()
    yield codes
    watchdog.close()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    monkeypatch.setattr(watchdog, "GRACE_S", 0.1)
    with watched(dist.HashStore(), 0.8) as codes:
        yield codes


def test_a_launcher_that_is_gone_ends_a_rank_without_limits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Connection was likely closed")

    monkeypatch.setattr(watchdog, "BEAT_S", 0.1)
    with watched(Gone(), 0) as codes:
        time.sleep(0.4)
    assert set(codes) == {FAILED}


def test_sigterm_ends_a_run_that_cannot_save_yet(alone: list[int]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    with Interrupt():  # began to train, but never heard of it
        time.sleep(0.6)
    assert set(alone) == {TERMINATED}


def test_sigterm_that_was_heeded_ends_nothing_later(alone: list[int]) -> None:
    """The run has saved and is about to end with 0, which may take longer than the guard's patience."""
    with Interrupt() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
    assert stop.requested == "SIGTERM"
    time.sleep(0.6)
    assert alone == []


def test_every_phase_is_a_function_that_exists() -> None:
    for name in (*PHASES, *READS, BACKWARD):
        module, _, path = name.partition(":")
        target: Any = importlib.import_module(module)
        for step in path.split("."):
            target = getattr(target, step)
        assert callable(target) and target.__qualname__ == path


def test_ranks_meet_in_a_store_that_remembers_a_former_attempt() -> None:
    store, names = dist.HashStore(), set[str]()
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            attempts = set(pool.map(lambda rank: meet(store, rank, 3, 20), (2, 1, 0)))
        assert len(attempts) == 1
        names |= attempts
    assert len(names) == 3, "every attempt has a name of its own"


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(RunError, match="ranks 1 and 2 of 3 did not come"):
        meet(dist.HashStore(), 0, 3, 0.1)
    with pytest.raises(RunError, match="rank 1 waited 0 s for rank 0"):
        meet(dist.HashStore(), 1, 3, 0.1)
    assert name_ranks({4}) == "rank 4" and name_ranks(set(range(8))) == "ranks 0, 1, 2, 3, 4 and 3 more"


def test_a_stack_is_that_of_a_waiting_thread_and_leaves_the_collector_as_it_was() -> None:
    """Against traceback's own walk. Any generator on the stack is part of it."""
    release, entered = threading.Event(), threading.Event()

    def wait_inside() -> Iterator[None]:
        entered.set()
        release.wait()
        yield

    thread = threading.Thread(target=lambda: next(wait_inside()))
    thread.start()
    entered.wait()
    ident = thread.ident
    assert ident is not None
    try:
        for collects in (True, False):
            (gc.enable if collects else gc.disable)()
            # Event.wait may still be on its way down when the event is seen.
            right = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[ident])]
            assert [f.f_code for f in pulses._stack(ident)][-5:] == [f.f_code for f in right][-5:]
            assert any(f.f_code.co_name == "wait_inside" for f in right)
            assert gc.isenabled() == collects
    finally:
        gc.enable()
        release.set()
        thread.join()
    assert pulses._stack(ident) == []

"""Which ranks are slow, from beats alone; and what share of a thread's time counts as work."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from random import Random

import pytest

from meshwright.interface.process.launch import PHASES, READS
from meshwright.parallel.health.heartbeat import WORK, Beat, Heartbeat, HeartbeatWatch, SlowRank
from meshwright.parallel.health.judgement import SlowRanks
from meshwright.parallel.health.watchdog import SAMPLE_S

Work = Callable[[int, int], float]
"""(rank, second) -> seconds of work in each step of that second."""


def told(work: Work, ranks: int, seconds: int, roles: int = 1, step_s: float = 0.25) -> Iterator[tuple[int, SlowRank]]:
    """(second, slow rank) of ranks that send a beat a second. Neighbours have unequal roles."""
    looks = SlowRanks()
    sums = [0.0] * ranks
    for second in range(seconds):
        steps = int(second / step_s)
        beats = [
            Beat(timed=steps, work_s=sums[rank], steps_s=steps * step_s, role=str(rank % roles))
            for rank in range(ranks)
        ]
        yield from ((second, slow) for slow in looks.look(beats, float(second)))
        for rank in range(ranks):
            sums[rank] += work(rank, second) * (int((second + 1) / step_s) - steps)


def test_a_slow_rank_is_named_once_with_its_figures() -> None:
    [(second, slow)] = told(lambda rank, now: 0.18 if rank == 3 else 0.1, 8, 300)
    assert 15 <= second <= 20 and slow.rank == 3
    sentence = "rank 3 is slow: its steps take 1.8 times the median's work (180 ms against 100 ms) for 60 steps; all"
    assert str(slow).startswith(sentence)
    assert str(SlowRank(rank=3, host="a", work_s=1, median_s=1, steps=9)).startswith("rank 3 on a is slow: ")


def test_one_that_recovers_is_named_again_when_it_is_slow_again() -> None:
    named = list(told(lambda rank, now: 0.18 if rank == 3 and now // 50 % 2 else 0.1, 8, 300))
    assert [slow.rank for _, slow in named] == [3, 3, 3]
    assert [second // 50 for second, _ in named] == [1, 3, 5]
    # Between the two borders it has neither recovered nor become slow anew.
    wavering = list(told(lambda rank, now: (0.18 if now // 50 % 2 else 0.12) if rank == 3 else 0.1, 8, 300))
    assert len(wavering) == 1


def test_of_two_ranks_the_faster_one_is_the_median() -> None:
    [(_, slow)] = told(lambda rank, now: 0.1 + 0.05 * rank, 2, 60)
    assert (slow.rank, slow.median_s) == (1, pytest.approx(0.1))


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_noise_is_no_slow_rank(ranks: int) -> None:
    """Every second some rank works for up to twice as long: another program, rows with long documents. Four hours."""
    random = Random(ranks)
    assert not list(told(lambda rank, now: 0.08 * (1 + random.random() ** 3), ranks, 4 * 3600 // ranks))


def test_stages_of_a_pipeline_differ_by_design() -> None:
    work: Work = lambda rank, now: 0.2 if rank % 2 else 0.1  # noqa: E731
    assert {slow.rank for _, slow in told(work, 8, 60)} == {1, 3, 5, 7} - {
        slow.rank for _, slow in told(work, 8, 60, 2)
    }
    assert not list(told(work, 8, 60, roles=2)) and not list(told(work, 2, 60, roles=2))


def test_what_does_not_lengthen_the_step_is_not_told() -> None:
    """A step of 250 ms is spent on exchanges: 8 ms more of work on one rank are not worth a line."""
    assert not list(told(lambda rank, now: 0.018 if rank == 3 else 0.01, 8, 60))
    assert not list(told(lambda rank, now: 0.0, 8, 60)), "on a GPU work is not known"


def test_long_steps_make_long_windows() -> None:
    [(second, slow)] = told(lambda rank, now: 9.0 if rank == 1 else 5.0, 4, 1200, step_s=10.0)
    assert slow.steps == 30 and second == pytest.approx(300, abs=12)


def test_work_is_the_time_in_a_step_outside_of_collectives() -> None:
    """A thread that works for 30 % of the time, waits for 50 %, and evaluates for 20 %."""

    def inside(name: str, do: Callable[[], None]) -> Callable[[], None]:
        module, _, function = name.partition(":")
        scope: dict[str, object] = {"__name__": module, "do": do}
        exec(f"def {function}():\n    do()", scope)
        return scope[function]  # type: ignore[return-value]

    watches, pulse, ready = list[HeartbeatWatch](), Heartbeat(step=3, ended=5), threading.Event()
    loop, evaluates = "meshwright.training.trainer:step", "meshwright.training.trainer:evaluate"
    # A partial has no frame of its own, like a call of C code.
    works = inside(loop, partial(time.sleep, 0.03))
    waits = inside(loop, inside("torch.distributed.c10d:all_reduce", partial(time.sleep, 0.05)))

    def begin() -> None:
        watches.append(HeartbeatWatch(pulse, {**PHASES, evaluates: "evaluate"}, READS))
        ready.set()
        for _ in range(12):
            works()
            waits()
            inside(evaluates, partial(time.sleep, 0.02))()
        pulse.step_ended(1.2)

    thread = threading.Thread(target=begin)
    thread.start()
    ready.wait(20)
    while pulse.ended < 6:
        time.sleep(0.003)
        watches[0].sample()
    thread.join()
    watches[0].sample()
    beat = watches[0].look()
    assert (beat.timed, beat.steps_s) == (6, 1.2)
    assert beat.work_s == pytest.approx(12 * 0.03, rel=0.35)
    assert "evaluate" not in WORK and "save" not in WORK and "data" in WORK


def test_a_sample_makes_few_calls_and_comes_at_most_a_hundred_times_a_second() -> None:
    """What keeps sampling below a thousandth of a step: it takes the interpreter from the thread that computes."""
    assert SAMPLE_S * 0.5 >= 0.01  # the shortest random pause between two samples

    def calls_at(depth: int) -> int:
        """Python and C calls of one sample of a thread that is `depth` functions deep."""
        if depth:
            return calls_at(depth - 1)
        sampler = threading.Thread(target=HeartbeatWatch(Heartbeat(), PHASES, READS).sample)
        events: list[str] = []
        threading.setprofile(lambda frame, event, argument: events.append(event))
        try:
            sampler.start()
            sampler.join()
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]  # what ends it
        return sum(event in ("call", "c_call") for event in events)

    shallow, deep = calls_at(10), calls_at(110)
    assert 0 < deep - shallow <= 5 * 100 and shallow < 600

"""The first signal asks, the second Ctrl-C ends."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from meshwright.observe.ranks import on_ranks
from meshwright.spec import Layout
from meshwright.training import loop, trainer
from meshwright.training.step.interrupt import Interrupt, StopAgreement
from tests.training import running


def handlers() -> tuple[object, ...]:
    return tuple(map(signal.getsignal, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_asks(number: signal.Signals) -> None:
    before = handlers()
    with Interrupt() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number.name
    assert handlers() == before


def test_the_first_ctrl_c_is_answered_once(capfd: pytest.CaptureFixture[str]) -> None:
    """SIGTERM is not: torchrun sends it to all ranks when one has died, and nobody can press Ctrl-C again."""
    with Interrupt(echo_s=60, speaks=True) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not capfd.readouterr().err
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested == "SIGTERM"
    assert capfd.readouterr().err.count("the run ends after this step and saves it") == 1


def test_the_second_ctrl_c_ends() -> None:
    before = handlers()
    with pytest.raises(KeyboardInterrupt), Interrupt() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested == "SIGINT"
        os.kill(os.getpid(), signal.SIGINT)
    assert handlers() == before


def test_the_first_reason_stays_and_sigterm_never_breaks() -> None:
    with Interrupt() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.requested == "SIGTERM"


def test_handlers_of_others_come_back() -> None:
    mine = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(ZeroDivisionError), Interrupt():
            raise ZeroDivisionError
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, mine)


def test_in_another_thread_it_does_nothing() -> None:
    before, seen = handlers(), []

    def work() -> None:
        with Interrupt() as stop:
            seen.append((stop.requested, handlers()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


def test_a_signal_while_ranks_agree_is_heard_at_the_next_step() -> None:
    """They may wait long for each other there: for a rank that saves."""
    with Interrupt() as stop:

        class World:
            size = 2

            def all_reduce(self, told: torch.Tensor, op: str) -> torch.Tensor:
                os.kill(os.getpid(), signal.SIGTERM)
                return told

        saver: Any = SimpleNamespace(failed=lambda: False)
        world: Any = World()
        agreement = StopAgreement(world, torch.device("cpu"), stop, saver)
        assert [agreement.reached(under_way=False) for _ in range(2)] == [False, True]
        assert agreement.agreed == stop.requested == "SIGTERM"


@pytest.mark.parametrize(
    "signals", [("SIGINT", "SIGTERM"), ("SIGTERM", "SIGINT"), ("SIGUSR1", "SIGTERM"), (None, "SIGUSR1"), (None, None)]
)
def test_while_a_step_is_under_way_ranks_hear_each_other_with_its_numbers(signals: tuple[str | None, ...]) -> None:
    """Nothing is sent when it is asked; all ranks name the same signal."""

    class World:
        size = 2

        def all_reduce(self, told: torch.Tensor, op: str) -> torch.Tensor:
            return told

    saver: Any = SimpleNamespace(failed=lambda: False)
    world: Any = World()
    ranks = [
        StopAgreement(world, torch.device("cpu"), cast(Any, SimpleNamespace(requested=signal)), saver)
        for signal in signals
    ]
    most = torch.stack([rank.announce() for rank in ranks]).amax(0).tolist()
    assert not any(rank.reached(under_way=True) for rank in ranks)
    for rank in ranks:
        rank.receive(most)
    named = next((signal for signal in ("SIGINT", "SIGTERM", "SIGUSR1") if signal in signals), None)
    assert [rank.reached(under_way=True) for rank in ranks] == [named is not None] * 2
    assert {rank.stop.requested for rank in ranks} == {rank.agreed for rank in ranks} == {named}


def test_a_rank_that_could_not_save_ends_all() -> None:
    class World:
        size = 2

        def all_reduce(self, told: torch.Tensor, op: str) -> torch.Tensor:
            return told

    gave_up = []
    saver: Any = SimpleNamespace(failed=lambda: OSError("disk"), give_up=lambda: gave_up.append(True))
    other: Any = SimpleNamespace(failed=lambda: None, give_up=lambda: gave_up.append(True))
    world: Any = World()
    stop: Any = SimpleNamespace(requested=None)
    failed, well = (StopAgreement(world, torch.device("cpu"), stop, rank_saver) for rank_saver in (saver, other))
    told = failed.announce().tolist()
    for rank in (failed, well):
        rank.receive(told)
        rank.reached(under_way=True)
    assert gave_up == [True, True]


def _stopped(texts: str, run: str, bad: int) -> tuple[int, str]:
    """How a run of two steps ends for this rank, when rank `bad` alone has Ctrl-C in the last of them."""
    steps = []
    real = trainer.train_step

    def pressed(*arguments: Any, **options: Any) -> Any:
        steps.append(True)
        if len(steps) == 2 and (dist.get_rank() if dist.is_initialized() else 0) == bad:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments, **options)

    plan = running.plan(Path(texts), Path(run), steps=2)
    world = dist.get_world_size() if dist.is_initialized() else 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", pressed)
        summary = loop.run(replace(plan, layout=Layout(dp_replicate=world, micro_batch=2)))
    return summary.step, summary.stopped


@pytest.mark.parametrize("world", [1, 2])
def test_a_signal_in_the_last_step_ends_no_rank_otherwise_than_the_others(tmp_path: Path, world: int) -> None:
    """Nothing was left to stop. One rank that exits with 130 is a failure for a launcher."""
    arguments = str(running.write_texts(tmp_path / "texts")), str(tmp_path / "run"), world - 1
    ranks = on_ranks(world, _stopped, *arguments) if world > 1 else [_stopped(*arguments)]
    assert ranks == [(2, "done")] * world
    assert (tmp_path / "run/loss.png").exists() == (world == 2), "the first rank draws unless it was asked to end"

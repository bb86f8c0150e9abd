"""The first signal asks, the second Ctrl-C ends."""

import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.train.interrupt import Interrupt
from meshwright.train.trainer import Trainer


def handlers() -> tuple[object, object]:
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks(number: signal.Signals) -> None:
    before = handlers()
    with Interrupt() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number.name
    assert handlers() == before


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

        engine = SimpleNamespace(mesh={"world": World()})
        saver = SimpleNamespace(failed=lambda: False)
        rank: Any = SimpleNamespace(state=SimpleNamespace(engine=engine), saver=saver, device="cpu")
        assert [Trainer._stops(rank, stop) for _ in range(2)] == [False, True]
        assert stop.requested == "SIGTERM"

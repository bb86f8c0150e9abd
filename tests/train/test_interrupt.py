"""The first signal asks, the second Ctrl-C ends."""

import os
import signal
import threading

import pytest

from meshwright.train.interrupt import Interrupt


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

"""Functions in processes of their own."""

import os
import signal
import time
from typing import Any

import pytest

from meshwright.observe.ranks import SERVER, TooLong, _serve_task, in_subprocesses
from meshwright.spec.errors import PlanError


def _square(number: int) -> int:
    return number**2


def _fails(kind: str) -> Any:
    if kind == "user":
        raise PlanError("one line")
    if kind == "ends":
        os._exit(3)
    raise KeyError("two\nlines")


def _sleeps() -> None:
    time.sleep(60)


@pytest.mark.parametrize("kind", ["user", "bug", "fine"])
def test_who_was_interrupted_is_told_nothing_more(kind: str) -> None:
    """A child whose parent has gone ends without a traceback: its pipe has nobody at the other end."""
    here, there = SERVER.Pipe()
    here.close()
    before = signal.getsignal(signal.SIGINT)
    try:
        _serve_task(there, _square if kind == "fine" else _fails, (2,) if kind == "fine" else (kind,))
    finally:
        signal.signal(signal.SIGINT, before)


def test_all_answers() -> None:
    assert dict(in_subprocesses(_square, [(n,) for n in range(5)], processes=2)) == {n: n**2 for n in range(5)}


@pytest.mark.parametrize(
    ("kind", "error", "told"),
    [
        ("user", PlanError, "^one line$"),
        ("bug", RuntimeError, "^KeyError: "),
        ("ends", RuntimeError, "without an answer"),
    ],
)
def test_what_goes_wrong(kind: str, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        list(in_subprocesses(_fails, [(kind,)]))


def test_the_limit_ends_what_runs() -> None:
    started = time.monotonic()
    with pytest.raises(TooLong):
        list(in_subprocesses(_sleeps, [()], limit_s=3.0))
    assert time.monotonic() - started < 30

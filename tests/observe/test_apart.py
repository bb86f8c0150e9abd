"""Functions in processes of their own."""

import os
import time
from typing import Any

import pytest

from meshwright.observe.apart import TooLong, apart
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


def test_all_answers() -> None:
    assert dict(apart(_square, [(n,) for n in range(5)], processes=2)) == {n: n**2 for n in range(5)}


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
        list(apart(_fails, [(kind,)]))


def test_the_limit_ends_what_runs() -> None:
    started = time.monotonic()
    with pytest.raises(TooLong):
        list(apart(_sleeps, [()], limit_s=3.0))
    assert time.monotonic() - started < 30

"""The soak of benchmarks/serve_soak.py, small: clients that leave, read slowly, or send nonsense."""

import pytest

from benchmarks.serve_soak import growth, soak

REQUESTS = 1000


def test_a_few_requests() -> None:
    figures = soak(40)
    assert figures["requests"] == 40 and figures["wrong"] == figures["lost_blocks"] == 0
    assert len(figures["ways"]) == 5, "each kind of client was there"


@pytest.mark.slow
def test_many_requests() -> None:
    figures = soak(REQUESTS)
    assert figures["requests"] == REQUESTS and figures["wrong"] == figures["lost_blocks"] == 0
    assert figures["bytes_per_request"] < 10_000


def test_growth_is_found() -> None:
    level = [(at, 10**8 + (at % 3) * 1000) for at in range(0, 1000, 10)]
    assert abs(growth(level)) < 5
    assert growth([(at, 10**8 + 700 * at) for at in range(0, 1000, 10)]) == pytest.approx(700)

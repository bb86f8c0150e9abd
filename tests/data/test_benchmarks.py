"""The benchmarks of this package run at toy size, so that they cannot rot."""

import os

import pytest

from benchmarks import encoding, large_corpus
from meshwright.spec import Data


def test_encoding() -> None:
    figures = encoding.measure(Data(limit_bytes=30_000), rounds=1)
    assert figures["tokens_equal"] is True
    assert 0 < figures["text_bytes"] <= 30_000  # type: ignore[operator]
    assert set(figures["megabytes_per_second"]) == {  # type: ignore[call-overload]
        "ours",
        "ours_one_core_in_memory",
        "encode_batch",
        "encode_batch_fast",
    }


@pytest.mark.slow
def test_large_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_corpus, "ROWS", 2)
    monkeypatch.setattr(large_corpus, "SEQUENCE", 64)
    figures = large_corpus.measure(300_000, steps=2, batches=3)
    assert figures["text_bytes"] == figures["text_bytes_written"]
    assert 290_000 < figures["text_bytes"] <= 300_001  # type: ignore[operator]
    if os.path.exists("/proc/self/statm"):
        assert 2**24 < figures["peak_bytes"] < 2**30  # type: ignore[operator]

"""Times of kernels by counting: what is counted, and that the published rows bear it out."""

import os
from pathlib import Path

import pytest

from benchmarks.kernel_estimate import CHIPS, LAUNCH, held_against, liger_chunk, linear_loss, loss, our_chunk, verdicts

ROOT = Path(__file__).resolve().parents[2]


def table() -> Path:
    name = "kernel_times_liger.csv"
    for location in (os.environ.get("MESHWRIGHT_PUBLISHED"), ROOT.parent / "shared" / "published"):
        if location and (Path(location) / name).exists():
            return Path(location) / name
    pytest.skip(f"{name} is not here: set MESHWRIGHT_PUBLISHED to the folder of published tables")


def test_a_second_read_is_free_where_the_cache_holds_the_rows() -> None:
    chip = CHIPS["A100"]
    short, long = (loss(chip, 1000, vocab, 4) - LAUNCH for vocab in (4096, 131072))
    assert long / short == pytest.approx(32 * 3 / 2)


def test_chunks() -> None:
    assert liger_chunk(8192, 4096, 128256) == 256
    assert our_chunk(8192, 128256) == 1046
    few, many = (linear_loss(CHIPS["A100"], 4096, 4096, 128256, chunk, ours=True) for chunk in (1024, 128))
    assert few < many


def test_published_times_bear_the_count_out() -> None:
    judged = verdicts(list(held_against(table())))
    assert {kind for kind, entry in judged.items() if entry["used"]} == {
        "loss", "linear and loss", "norm forward", "rotary",
    }  # fmt: skip
    assert sum(entry["within"] for entry in judged.values() if entry["used"]) >= 45

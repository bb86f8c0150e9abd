"""The example of docs/learn/collectives.md: what each rank holds, and the bytes, by arithmetic of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "collectives.py"


def outcomes(world: int, chunk: int) -> dict[str, list[list[float] | None]]:
    """Return what each rank should hold after each collective."""
    x = np.array([[10.0 * (rank + 1) + n + 1 for n in range(world * chunk)] for rank in range(world)])
    chunks = x.reshape(world, world, chunk)
    total, mine = x.sum(0), np.concatenate([chunks[rank, rank] for rank in range(world)])
    nothing: list[list[float] | None] = [None] * (world - 1)
    return {
        "broadcast": [x[0].tolist()] * world,
        "reduce": [total.tolist(), *nothing],
        "all-reduce": [total.tolist()] * world,
        "gather": [mine.tolist(), *nothing],
        "scatter": chunks[0].tolist(),
        "all-gather": [mine.tolist()] * world,
        "reduce-scatter": total.reshape(world, chunk).tolist(),
        "all-to-all": chunks.transpose(1, 0, 2).reshape(world, -1).tolist(),
    }


@pytest.mark.parametrize(("world", "chunk"), [(3, 1), pytest.param(4, 3, marks=pytest.mark.long)])
def test_every_rank_holds_and_sends_what_it_should(world: int, chunk: int) -> None:
    command = [sys.executable, str(SCRIPT), "--processes", str(world), "--chunk", str(chunk), "--json"]
    document: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
    expected, size = outcomes(world, chunk), 4 * chunk
    # Bytes of the busiest rank, and of all ranks together, in chunks.
    sent = {
        "broadcast": (world, world * (world - 1)), "reduce": (world, world * (world - 1)),
        "all-reduce": (2 * (world - 1), 2 * world * (world - 1)), "gather": (1, world - 1),
        "scatter": (world - 1, world - 1), "all-gather": (world - 1, world * (world - 1)),
        "reduce-scatter": (world - 1, world * (world - 1)), "all-to-all": (world - 1, world * (world - 1)),
    }  # fmt: skip
    assert [record["collective"] for record in document["collectives"]] == list(expected)
    for record in document["collectives"]:
        name, ranks = record["collective"], record["ranks"]
        assert [rank["after"] for rank in ranks] == expected[name], name
        assert record["equal_to_torch"], name
        assert (record["most_bytes"], sum(rank["bytes"] for rank in ranks)) == tuple(size * n for n in sent[name]), name
        assert record["formula_bytes"] == pytest.approx(record["most_bytes"]), name
    by_broadcasts, in_two, by_root = document["questions"]
    assert all(answer["equal"] for answer in document["questions"])
    hop, tensor = (world - 1) * size, world * (world - 1) * size
    assert by_broadcasts["bytes"] == [
        {"all_ranks": tensor, "in_turn": hop},
        {"all_ranks": tensor, "in_turn": world * hop},
    ]
    assert in_two["bytes"] == [{"all_ranks": 2 * tensor, "in_turn": 2 * hop}]
    assert by_root["bytes"][1] == {"all_ranks": 2 * tensor, "in_turn": 2 * world * hop}


def test_an_unknown_name_is_refused() -> None:
    ended = subprocess.run([sys.executable, str(SCRIPT), "all-round"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "all-round is none of broadcast, reduce" in ended.stderr

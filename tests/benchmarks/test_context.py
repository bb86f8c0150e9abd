"""The benchmark of context parallelism at toy size."""

import pytest

from benchmarks.context import Case, measure


@pytest.mark.slow
def test_every_route_and_split_is_measured() -> None:
    figures = measure([2], Case(sequence=64, heads=2, kv_heads=1, head_dim=8, repeats=2))
    ways = [
        "one device",
        *(f"{route} {split}" for route in ("ring", "gather") for split in ("zig-zag", "striped", "plain")),
    ]
    assert [(row["ranks"], row["way"]) for row in figures["rows"]] == list(zip([1, *[2] * 6], ways, strict=True))
    assert set(figures["zigzag_gain"]) == {"ring-2", "gather-2"}
    assert all(row["wall_s"] > 0 and row["over_ideal"] > 0 and 0 < row["even"] <= 1 for row in figures["rows"])

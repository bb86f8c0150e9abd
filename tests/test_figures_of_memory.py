"""The figures of the page about memories: their numbers by arithmetic of the tests' own, and torch's attention."""

import json
import subprocess
import sys
from math import exp
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from docs import figures
from examples.flash_tiles import compare, tiles

ROOT = Path(__file__).resolve().parents[1]


def level(device: str, name: str) -> tuple[float | None, float | None]:
    _, shown = figures.numbers("hierarchy")
    row = next(each for each in shown[device]["levels"] if each["name"].startswith(name))
    return row["bytes"], row["rate"]


def test_sram_of_an_a100_is_what_the_paper_of_flash_attention_says() -> None:
    """Dao et al. 2022, figure 1: SRAM 20 MB at 19 TB/s, HBM at 1.5 TB/s (40 GB) or 2.0 (80 GB)."""
    size, rate = level("a100", "SRAM")
    assert size == pytest.approx(20e6, rel=0.07) and rate == pytest.approx(19e12, rel=0.03)
    assert level("a100", "HBM")[1] == pytest.approx(2.0e12, rel=0.02)


def test_memories_grow_slower_and_larger() -> None:
    for device in ("v100", "a100", "h100", "h200", "b200"):
        assert level(device, "SRAM")[0] < level(device, "HBM")[0]  # type: ignore[operator]  # both are known
        rates = [level(device, name)[1] for name in ("SRAM", "HBM", "a neighbour", "another node")]
        known = [rate for rate in rates if rate is not None]
        assert len(known) >= 3 and known == sorted(known, reverse=True)


@pytest.mark.parametrize(("m", "bound"), [(1, "memory"), (256, "memory"), (4096, "computing")])
def test_the_roofline_of_an_h100(m: int, bound: str) -> None:
    _, shown = figures.numbers("roofline")
    roof = shown["devices"]["h100"]["roofs"]["bf16"]
    flop, moved, intensity, computing, moving, planned = roof["products"][f"{m} 4096 4096"]
    assert flop == 2 * m * 4096**2 and moved == 2 * (2 * m * 4096 + 4096**2)
    assert roof["ridge"] == pytest.approx(989.4 / 3.35, rel=1e-3)
    assert computing == pytest.approx(flop / 989.4e6, rel=1e-3) and moving == pytest.approx(moved / 3.35e6, rel=1e-3)
    assert ("computing" if intensity > roof["ridge"] else "memory") == bound
    assert planned > max(computing, moving)  # no kernel beats the roof


def test_a_step_of_the_tiles_is_the_softmax_so_far() -> None:
    """Every recorded maximum and sum, in plain Python, over the keys seen until then."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(24, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    out = torch.empty_like(q)
    for step in tiles(q, k, v, 8, out, causal=True):
        query = 8 * step.query_tile + 5
        keys = [key for key in range(8 * (step.key_tile + 1)) if key <= query]
        scores = [sum(float(a * b) for a, b in zip(q[query], k[key], strict=True)) / 2 for key in keys]
        assert float(step.largest[5]) == pytest.approx(max(scores))
        assert float(step.total[5]) == pytest.approx(sum(exp(score - max(scores)) for score in scores))
    for causal in (True, False):
        list(tiles(q, k, v, 8, out, causal=causal))
        torch.testing.assert_close(out, scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal)[0])


@pytest.mark.parametrize("tile", [32, 48])
def test_bytes_of_both_forms_by_their_formulas(tile: int) -> None:
    counted = compare(192, 16, tile, 2, causal=False)
    assert counted["plain_bytes"] == 2 * (4 * 192**2 + 4 * 192 * 16)
    assert counted["tiled_bytes"] == 2 * (2 * 192 * 16 + 2 * 192**2 * 16 // tile)
    assert counted["cached_bytes"] == 2 * 4 * 192 * 16 and counted["stored_bytes"] == 2 * 192**2
    assert counted["difference"] < 1e-12


def test_the_figure_counts_each_step_and_skips_what_a_causal_mask_hides() -> None:
    _, shown = figures.numbers("flash_tiles")
    tile = shown["tile"]
    for name, runs in shown["masks"].items():
        for number, run in runs.items():
            steps = number * (number + 1) // 2 if name == "causal" else number**2
            assert len(run["steps"]) == steps
            # Each step reads a tile of keys and one of values; each tile of queries is read and written once.
            assert run["steps"][-1][4] == 2 * tile * tile * (2 * steps + 2 * number)
            assert run["plain"] == 2 * (4 * (number * tile) ** 2 + 4 * number * tile * tile)


def test_the_example_refuses_sizes_of_nothing() -> None:
    command = [sys.executable, "examples/flash_tiles.py", "--tile", "0"]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "must be at least 1" in refused.stderr


def test_the_page_has_the_numbers_of_the_table() -> None:
    page = (ROOT / "docs/learn/memory-hierarchy.md").read_text(encoding="utf-8")
    for m in (1, 256, 4096):
        flop, moved = 2 * m * 4096**2, 2 * (2 * m * 4096 + 4096**2)
        row = next(line for line in page.splitlines() if line.startswith(f"| {m} |"))
        cells = [cell.strip().replace(",", "") for cell in row.strip("|").split("|")]
        numbers = [flop / 1e9, moved / 1e6, flop / moved, flop / 989.4e6, moved / 3.35e6]
        for cell, number in zip(cells[1:6], numbers, strict=True):
            assert float(cell) == pytest.approx(number, rel=5e-3 if number > 0.1 else 0.15), (m, cell)
        assert cells[6] == ("computing" if flop / 989.4e12 > moved / 3.35e12 else "memory")
    assert f"{32 * 4096**2 * 2 / 1e9:.2f} GB" in page and json.dumps(round(989.4 / 3.35)) in page

"""The pages about serving: bytes of keys and values by hand, and the figure of a recorded run by another replay."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from docs import figures
from docs.learn.figures import kv_cache
from examples import serving
from meshwright.serving.engine.serving_record import memory_use, read_record
from tests.serving.engine.test_serving_record import replayed

LEARN = figures.FOLDER.parent
GIB = 2**30


def test_bytes_of_keys_and_values_are_those_of_the_formula() -> None:
    """2 x layers x key heads x head dimension x bytes; a latent of 512 and a key of 64 in place of both."""
    heads = {"llama-3.1-8b": (32, 32), "llama-3.1-70b": (80, 64)}
    _, shown = figures.numbers("kv_cache")
    for model, (layers, queries) in heads.items():
        for width, size in (("bf16", 2), ("fp8", 1)):
            for row, tokens in zip(shown["bytes"][model][width], shown["tokens"], strict=True):
                for cell, sequences in zip(row, shown["sequences"], strict=True):
                    each = layers * size * tokens * sequences
                    assert cell == [2 * queries * 128 * each, 2 * 8 * 128 * each, 2 * 128 * each, (512 + 64) * each]
    rows = {line.split(" | ")[0].strip("| "): line for line in kv_cache.table().splitlines()}
    assert rows["llama-3.1-70b"].endswith("| 320.0 | 2.50 | 160.0 |")
    assert "| 68.6 | 0.54 |" in rows["deepseek-v3"] and pytest.approx(68.6, abs=0.05) == 61 * 576 * 2 / 1024
    text = " ".join((LEARN / "attention-and-kv-cache.md").read_text(encoding="utf-8").split())
    assert f"2 x 32 x 8 x 128 x 2 = {2 * 32 * 8 * 128 * 2:,} bytes, or 128 KiB per token" in text
    assert "64 sequences of 8,192 tokens have 64 GiB" in text and 64 * GIB == 64 * 8192 * 131072


def test_the_figure_of_a_recorded_run_is_what_the_record_says(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    serving.story(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    states, (_, shown) = replayed(lines), figures.numbers("serving")
    assert len(states) == len(shown["steps"])
    for state, step in zip(states, shown["steps"], strict=True):
        held = Counter(block for table in state["tables"].values() for block in table)
        assert {block: cell["holders"] for block, cell in step["cells"].items()} == held
        assert set(step["cached"]) == state["cached"] and set(step["host"]) == state["host"]
        assert [row[4] for row in step["rows"] if row[4]] == list(state["tables"].values())
        filled = sum(cell["filled"] for cell in step["cells"].values())
        assert filled == len({
            (table[position // 4], position % 4)
            for row, table in zip(step["rows"], state["tables"].values(), strict=False)
            for position in range(row[3])
        })  # fmt: skip
    moves = Counter(move[0] for step in shown["steps"] for move in step["moves"])
    # What the page tells a reader to look for.
    assert min(moves[kind] for kind in ("copy", "save", "load")) > 0
    assert sum(len(step["preempted"]) for step in shown["steps"]) > 0
    prefix = [step for step in shown["steps"] if {tuple(row[4][:3]) for row in step["rows"] if row[4]} >= {(0, 1, 2)}]
    assert max(step["cells"][0]["holders"] for step in prefix) >= 5
    assert [line["n"] for line in lines if "request" in line][2] == 3
    assert [line["beams"] for line in lines if "request" in line][8] == 3


@pytest.mark.parametrize("block", [16, 64])
def test_a_load_as_of_a_chat_wastes_little_in_blocks(block: int, tmp_path: Path) -> None:
    """Sums over the record by hand; no two requests share a block, so each wastes the end of its last one."""
    serving.chat(tmp_path / "chat.jsonl", requests=12, at_once=4, block=block)
    lines = [json.loads(line) for line in (tmp_path / "chat.jsonl").read_text().splitlines()]
    lengths = [computed for line in lines for _, computed, _ in line.get("running", ())]
    use = memory_use(read_record(tmp_path / "chat.jsonl"))
    assert use.blocks == pytest.approx(sum(lengths) / sum(-(-length // block) * block for length in lengths))
    assert use.longest == pytest.approx(sum(lengths) / (2048 * len(lengths)))
    assert use.longest < use.power_of_two < use.final < use.blocks and use.holders == pytest.approx(1)
    assert use.blocks > (0.96 if block == 16 else 0.85)  # Kwon et al.: less than 4 % are wasted


def test_the_page_says_what_its_output_shows() -> None:
    text = (LEARN / "serving.md").read_text(encoding="utf-8")
    shares = {words: float(share) for words, share in re.findall(r"^(\w.+?) {2,}([\d.]+)%", text, re.MULTILINE)}
    mean = round(2048 * shares["contiguous, the longest request"] / 100)
    assert f"7.5 of {mean} + 7.5 positions = {100 * 7.5 / (mean + 7.5):.1f} %" in text
    assert 100 * 7.5 / (mean + 7.5) == pytest.approx(100 - shares["blocks"], abs=0.1)
    lengths = serving.chat_lengths(20_000, 10**6)
    assert sum(prompt for prompt, _ in lengths) / 20_000 == pytest.approx(161.3, rel=0.03)
    assert sum(answer for _, answer in lengths) / 20_000 == pytest.approx(338, rel=0.03)

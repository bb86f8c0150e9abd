"""The order of a token store depends on (seed, epoch, number) alone: any ranks, any restarts, at once from anywhere."""

import json
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.data.sequences.windows import permute
from meshwright.training.step.batches import Feed, PackedRows, Share
from tests.data.stores_for_tests import numbered_shards, stored_rows, write_store

SEQUENCE, BATCH, EPOCHS = 8, 48, 3
CPU = torch.device("cpu")


def small_shards(folder: Path, number: int) -> tuple[Path, int]:
    """A store of shards of 0 to 3 windows, and the number of all windows."""
    windows = np.random.default_rng(1).integers(0, 4, number).tolist()
    return write_store(folder / "store", numbered_shards(windows, SEQUENCE)), sum(windows)


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return small_shards(tmp_path_factory.mktemp("stores"), 1000)


def feed(store: Path, rank: int, ranks: int) -> Feed:
    """What a rank of the engine reads with, as a new process begins."""
    rows = PackedRows(stored_rows(str(store), store, sequence=SEQUENCE), document_mask=False)
    return Feed(rows, CPU, share=Share(index=rank, parts=ranks))


def read_steps(store: Path, ranks: int, first: int, last: int) -> list[int]:
    """The ids of the samples of steps [first, last), in the order of the global batch, read by all ranks in turn."""
    feeds, samples = [feed(store, rank, ranks) for rank in range(ranks)], list[int]()
    for step in range(first, last):
        for reader in feeds:
            batch = reader.take(step * BATCH, BATCH, BATCH)
            assert bool((batch.tokens == batch.tokens[:, :1]).all()), "a window of one shard"
            samples += batch.tokens[:, 0].tolist()
    for reader in feeds:
        reader.close()
    return samples


@pytest.mark.parametrize("shards", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_ranks_and_restarts_read_the_same_order(shards: int, tmp_path: Path) -> None:
    store, windows = small_shards(tmp_path, shards)
    steps, draw = EPOCHS * windows // BATCH, random.Random(3)
    whole = read_steps(store, 1, 0, steps)
    # Every sample once an epoch, in another order each.
    for epoch in range(EPOCHS - 1):
        assert sorted(whole[epoch * windows : (epoch + 1) * windows]) == list(range(windows))
    assert len(set(whole[-(len(whole) % windows) :])) == len(whole) % windows
    assert whole[:windows] != whole[windows : 2 * windows]
    for ranks in (2, 3, 8):
        cuts = sorted([0, steps, *draw.sample(range(1, steps), 3)])
        pieces = [read_steps(store, ranks, *cut) for cut in pairwise(cuts)]
        assert [sample for piece in pieces for sample in piece] == whole
    # Another number of ranks after each restart.
    cuts = [0, 2, 3, steps // 2, steps]
    worlds = zip((8, 3, 1, 2), pairwise(cuts), strict=True)
    assert [sample for ranks, cut in worlds for sample in read_steps(store, ranks, *cut)] == whole


def test_rows_are_those_of_the_definition(thousand: tuple[Path, int]) -> None:
    """An independent walk through the definition: shards shuffled, blocks of 16, the windows of each shuffled."""
    store, windows = thousand
    rows = stored_rows(str(store), store, sequence=SEQUENCE, seed=9)
    counts = np.random.default_rng(1).integers(0, 4, 1000)
    firsts = np.cumsum(counts) - counts
    order = permute(np.arange(1000), 1000, seed=9, epoch=1)
    expected = set[int]()
    begin = 0
    for block in range(0, 1000, 16):
        names = [range(firsts[shard], firsts[shard] + counts[shard]) for shard in order[block : block + 16]]
        expected = {int(name) for window in names for name in window}
        assert set(rows.windows(windows + begin, len(expected)).tolist()) == expected
        begin += len(expected)
    assert begin == windows


def test_golden_order(thousand: tuple[Path, int]) -> None:
    """A run that is resumed with another version must read on in the same order."""
    store, windows = thousand
    rows = stored_rows(str(store), store, sequence=SEQUENCE, seed=5)
    assert windows == len(rows) == 1512
    assert rows.windows(0, 8).tolist() == GOLDEN[0]
    assert rows.windows(7 * windows + 100, 8).tolist() == GOLDEN[1]


GOLDEN: tuple[list[int], list[int]] = (
    [602, 345, 191, 225, 1281, 224, 223, 624],
    [1487, 76, 1284, 496, 1334, 957, 63, 998],
)


RESUME = """
import json, sys, time
from pathlib import Path
from meshwright.data import prepare
from meshwright.spec import Data, Recipe
from meshwright.data.sequences.numbered_rows import numbered_rows

started = time.process_time()  # other processes share the cores
data, recipe = Data(path=sys.argv[1]), Recipe(sequence=1024, seed=3)
corpus = prepare(data)
rows = numbered_rows(data, recipe, corpus, corpus.train, shuffle=True)
batch = rows.take(10**9, 64)
seconds = time.process_time() - started
status = Path("/proc/self/status").read_text().splitlines()
memory = 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(json.dumps([seconds, memory, len(rows), rows.windows(10**9, 64).tolist(), batch.tokens[:, 0].tolist()]))
"""


def test_sample_10_9_is_read_at_once(tmp_path: Path) -> None:
    """120,000 shards of 10,000 windows, which are one file on this disk. Index, order and reads are real."""
    shard = np.append(np.repeat(np.arange(10_000), 1024), 0).astype(np.uint16)
    store = write_store(tmp_path / "store", [shard], vocab=2**16)
    index = json.loads((store / "index.json").read_text(encoding="utf-8"))
    index["train"] = {name: 120_000 * column for name, column in index["train"].items()}
    (store / "index.json").write_text(json.dumps(index), encoding="utf-8")
    run = [sys.executable, "-c", RESUME, str(store)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    seconds, memory, length, windows, tokens = json.loads(done.stdout)
    assert length == 1_200_000_000 and tokens == [window % 10_000 for window in windows] and len(set(windows)) == 64
    print(f"{seconds:.2f} s, {memory / 1e6:.0f} MB")
    assert seconds < 2 and memory < 300e6

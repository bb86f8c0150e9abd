"""Which rows each rank reads: torch's DistributedSampler beside one global cursor.

    python examples/sampler.py [--rows 10] [--ranks 4] [--batch 1]

The sampler gives each rank a list per epoch. Rows that do not divide are read twice, and a resumed run needs its own
count of what was read. Here all ranks share one number, the cursor. Step k reads the shuffled order from k times the
global batch on, over the end of an epoch, and each rank takes its run of them. Another number of ranks reads the
same rows in the same step.
"""

import argparse
from collections import Counter

from torch.utils.data import DistributedSampler

from meshwright.data.sequences.windows import shuffle_rows


def main() -> None:
    """Print the rows of two epochs' steps by both."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1, help="rows of a rank in a step")
    options = parser.parse_args()
    rows, ranks, batch = options.rows, options.ranks, options.batch

    print("DistributedSampler, epoch 0")
    samplers = [DistributedSampler(range(rows), num_replicas=ranks, rank=rank, seed=0) for rank in range(ranks)]
    lists = [list(sampler) for sampler in samplers]  # set_epoch(e) shuffles anew
    for step in range(0, len(lists[0]), batch):
        print(
            f"  step {step // batch}: " + "  ".join(f"rank {r}: {lists[r][step : step + batch]}" for r in range(ranks))
        )
    twice = sorted(row for row, times in Counter(row for each in lists for row in each).items() if times > 1)
    print(f"  rows read twice in the epoch: {twice or 'none'}")

    print("one cursor")
    seen: Counter[int] = Counter()
    for step in range(-(-rows // (ranks * batch))):
        order = shuffle_rows(step * ranks * batch, ranks * batch, rows, 0).tolist()
        seen.update(order[: rows - step * ranks * batch])
        parts = [order[rank * batch : (rank + 1) * batch] for rank in range(ranks)]
        print(f"  step {step}: " + "  ".join(f"rank {rank}: {part}" for rank, part in enumerate(parts)))
    print(f"  rows read twice in the epoch: {[row for row, times in seen.items() if times > 1] or 'none'}; "
          "the last step takes its last rows from the next epoch")  # fmt: skip


if __name__ == "__main__":
    main()

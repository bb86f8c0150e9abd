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

    samplers = [DistributedSampler(range(rows), num_replicas=ranks, rank=rank, seed=0) for rank in range(ranks)]
    for epoch in range(2):
        print(f"DistributedSampler, epoch {epoch}" + (", by set_epoch(1): without that it repeats the first" * epoch))
        for sampler in samplers:
            sampler.set_epoch(epoch)
        lists = [list(sampler) for sampler in samplers]
        for step in range(0, len(lists[0]), batch):
            parts = [each[step : step + batch] for each in lists]
            print(f"  step {step // batch}: " + "  ".join(f"rank {rank}: {part}" for rank, part in enumerate(parts)))
        twice = sorted(row for row, times in Counter(row for each in lists for row in each).items() if times > 1)
        print(f"  rows read twice in the epoch: {twice or 'none'}")

    print("one cursor, over the end of epoch 0")
    read: list[int] = []
    for step in range(-(-2 * rows // (ranks * batch))):
        order = shuffle_rows(step * ranks * batch, ranks * batch, rows, 0).tolist()
        read += order
        parts = [order[rank * batch : (rank + 1) * batch] for rank in range(ranks)]
        print(f"  step {step}: " + "  ".join(f"rank {rank}: {part}" for rank, part in enumerate(parts)))
    for epoch in range(2):
        once = Counter(read[epoch * rows : (epoch + 1) * rows])
        print(f"  epoch {epoch}, rows read twice: {[row for row, times in once.items() if times > 1] or 'none'}")


if __name__ == "__main__":
    main()

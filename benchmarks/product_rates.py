"""fp32 matrix products of this processor by torch's BLAS library and by oneDNN (kernels/linear/cpu_product.py).

    python -m benchmarks.product_rates [--json] [--rounds 9]

The three products of a linear layer, x W^T, g W and g^T x, of sizes from the 10M and 100M shapes. Both libraries take
turns; GFLOP/s of the fastest round, all threads. The last line is the median ratio, and what training takes here.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch

from meshwright import compat
from meshwright.kernels.linear import cpu_product

SIZES = ((4096, 384, 384), (4096, 384, 1024), (2048, 768, 768), (2048, 768, 2048), (2048, 2048, 768), (512, 768, 32000))
"""(rows, in, out)."""


def products(rows: int, size_in: int, size_out: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Product -> (by BLAS, by oneDNN)."""
    x, weight, gradient = torch.randn(rows, size_in), torch.randn(size_out, size_in), torch.randn(rows, size_out)
    onednn = torch.ops.meshwright.cpu_product
    return {
        "x W^T": (lambda: torch.mm(x, weight.t()), lambda: onednn(x, weight, None)),
        "g W": (lambda: torch.mm(gradient, weight), lambda: onednn(gradient, weight.t(), None)),
        "g^T x": (lambda: torch.mm(gradient.t(), x), lambda: onednn(gradient.t(), x.t(), None)),
    }


def rates(size: tuple[int, int, int], rounds: int) -> list[dict[str, object]]:
    """A row a product."""
    flop, times = 2.0 * size[0] * size[1] * size[2], []
    for name, runs in products(*size).items():
        best = [float("inf")] * 2
        for _ in range(rounds):
            best = [min(old, _seconds(run)) for old, run in zip(best, runs, strict=True)]
        blas, onednn = (flop / seconds / 1e9 for seconds in best)
        times.append({"size": size, "product": name, "blas": blas, "onednn": onednn, "ratio": onednn / blas})
    return times


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    rows = [row for size in SIZES for row in rates(size, options.rounds)]
    ratio = statistics.median(float(str(row["ratio"])) for row in rows)
    taken = "oneDNN" if compat.blas_is_slow() else "BLAS"
    if options.json:
        print(json.dumps({"rows": rows, "ratio": ratio, "taken": taken, "least": cpu_product.LEAST}))
        return
    for row in rows:
        print(f"{row['size']!s:20} {row['product']:6} BLAS {row['blas']:6.0f}  oneDNN {row['onednn']:6.0f} GFLOP/s")
    print(f"oneDNN is {ratio:.2f} times as fast (median); training takes {taken}")


if __name__ == "__main__":
    main()

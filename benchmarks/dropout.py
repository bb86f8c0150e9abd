"""Process CPU time of dropout by position beside torch's own, for activations and for weights of attention.

python -m benchmarks.dropout
"""

import time
from collections.abc import Callable

import torch

from meshwright.kernels.norm.dropout import dropout, features, keep_mask, mix

SIZE = (4, 1024, 768)
"""Rows, positions and width of llama-100m's hidden states."""
RATE, REPEATS = 0.1, 7


def ns_per_element(work: Callable[[], object], elements: int) -> float:
    """Return the least process CPU time per element of several calls, after a first one."""
    work()
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times) / elements * 1e9


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(SIZE)
    rows = mix(torch.arange(SIZE[0] * SIZE[1], dtype=torch.int32)).view(SIZE[:2])
    weights, columns = torch.randn(48, 64, 1024), features(0, 1024, x.device)
    tile_rows = mix(torch.arange(48 * 64, dtype=torch.int32)).view(48, 64)
    compiled = torch.compile(lambda x: dropout(x, RATE, rows, 1))
    measured = {
        "hidden states, torch.native_dropout": (lambda: torch.native_dropout(x, RATE, True), x),
        "hidden states, by position": (lambda: dropout(x, RATE, rows, 1), x),
        "hidden states, by position, compiled": (lambda: compiled(x), x),
        "weights, bernoulli_": (lambda: torch.empty_like(weights).bernoulli_(1 - RATE).div_(1 - RATE), weights),
        "weights, by position": (lambda: keep_mask(tile_rows, columns, RATE), weights),
    }
    for name, (work, like) in measured.items():
        print(f"{name:40} {ns_per_element(work, like.numel()):5.1f} ns per element")


if __name__ == "__main__":
    main()

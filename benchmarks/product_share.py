"""The share of a training step that its matrix products take at the machine's own rate.

    python -m benchmarks.product_share [--json] [--shapes 10m,100m,300m] [--precisions fp32,bf16] [--rounds 7]

One step of ours is watched for its matrix products (mm, addmm and their forms that write into or add to a tensor).
Each distinct product is then timed alone: same sizes, strides, dtypes, threads and library. Its time is the least of
the rounds, what the machine gives where nothing else runs. Steps and products take turns. Attention's products run
inside its kernel: they are counted as what they would take at the rate of the others, two forward and five backward
over the pairs that see each other. The share is the sum of these times over the median step; what is missing to 1 is
the softmax, passes over memory, the optimizer, and products slower in the step than alone.
`ONEDNN_MAX_CPU_ISA=AVX512_CORE` switches 16-bit matrix units off.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.train_shapes import batch_of, shape_of
from benchmarks.train_speed import make_ours
from meshwright.kernels.linear import cpu_product  # noqa: F401  # makes the operator that PRODUCTS reads

aten = torch.ops.aten
PRODUCTS = {
    getattr(packet, name)
    for packet in (aten.mm, aten.addmm, aten.addmm_, aten._scaled_mm, torch.ops.meshwright.cpu_product)
    for name in packet.overloads()
}
"""The operators that multiply matrices outside of attention."""
_LIBRARY: Any = torch.backends.mkldnn
SETTING = _LIBRARY.matmul
"""What chooses the library of torch's own products in fp32 (compat/cpu.py). torch makes it when it is imported, where
no type checker sees it."""

Key = tuple[Any, tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...], str]


class Products(TorchDispatchMode):
    """Counts the products of a step, by operator and by sizes, strides and dtypes of its tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self.calls: Counter[Key] = Counter()
        self.rest: dict[Key, dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS:
            plain = {name: value for name, value in kwargs.items() if not isinstance(value, torch.Tensor)}
            inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
            tensors = [*inputs, *(value for value in kwargs.values() if isinstance(value, torch.Tensor))]
            none = (None,) * (len(args) - len(inputs))  # a bias
            key = (func, tuple((tuple(t.shape), t.stride(), t.dtype) for t in tensors), repr((none, plain)))
            self.calls[key] += 1
            names = [name for name in kwargs if name not in plain]
            self.rest[key] = {"args": len(inputs), "none": none, "plain": plain, "names": names}
            self.rest[key]["setting"] = SETTING.fp32_precision
        return func(*args, **kwargs)


def alone(key: Key, rest: dict[str, Any]) -> Callable[[], None]:
    """One product of random numbers."""
    operator, tensors, _ = key
    made = [torch.empty_strided(size, stride, dtype=dtype).normal_() for size, stride, dtype in tensors]
    named = dict(zip(rest["names"], made[rest["args"] :], strict=True))

    def run() -> None:
        before = SETTING.fp32_precision
        SETTING.fp32_precision = rest["setting"]
        operator(*made[: rest["args"]], *rest["none"], **named, **rest["plain"])
        SETTING.fp32_precision = before

    return run


def share(shape: str, precision: str, rounds: int) -> dict[str, Any]:
    """Seconds of a step, of its products, and what one is of the other."""
    torch.set_num_threads(os.cpu_count() or 1)
    rows, sequence = batch_of(shape, precision)
    step = make_ours(shape, precision, rows, sequence, False)
    step()
    with Products() as products:
        step()
    runs = {key: alone(key, products.rest[key]) for key in products.calls}
    steps: list[float] = []
    best = dict.fromkeys(runs, math.inf)
    for _ in range(rounds):
        steps += [_seconds(step) for _ in range(2)]
        for key, run in runs.items():
            best[key] = min(best[key], _seconds(run), _seconds(run))
    linear = sum(best[key] * count for key, count in products.calls.items())
    flop = sum(count * _flop(key) for key, count in products.calls.items())
    total = linear * (1 + _attention_flop(shape, rows, sequence) / flop)
    figures = {"step": statistics.median(steps), "products": total, "calls": products.calls.total()}
    return {**figures, "share": total / figures["step"], "gflops": flop / linear / 1e9, "tokens": rows * sequence}


def _attention_flop(shape: str, rows: int, sequence: int) -> float:
    """Of a step: seven products of heads with the pairs of positions that see each other."""
    model_shape = shape_of(shape)
    pairs = rows * sequence * (sequence + 1) / 2
    return 7 * 2.0 * pairs * model_shape.layers * model_shape.heads * model_shape.head_dim


def _flop(key: Key) -> float:
    """Two for each multiplication: rows x inner x columns of the last two matrices."""
    sizes = [size for size, _, _ in key[1] if len(size) >= 2]
    left, right = (sizes[1], sizes[2]) if "add" in str(key[0]) and len(sizes) > 2 else (sizes[0], sizes[1])
    columns = right[0] if "cpu_product" in str(key[0]) else right[-1]
    return 2.0 * math.prod(left) * columns


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shapes", default="10m,100m")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    figures = {}
    for shape in options.shapes.split(","):
        for precision in options.precisions.split(","):
            row = figures[f"{shape}-{precision}"] = share(shape, precision, options.rounds)
            if not options.json:
                print(f"{shape} {precision}: products {row['products']:.3f} s of {row['step']:.3f} s a step,", end=" ")
                print(f"{row['share']:.1%}; {row['gflops']:.0f} GFLOP/s over {row['calls']} products")
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()

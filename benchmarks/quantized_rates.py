"""Products with quantized matrices beside those of 16 and 32 bits, on this CPU.

    python -m benchmarks.quantized_rates [--json] [--size 3072] [--rows 1,8,32,128] [--rounds 7]

A plain product is the faster one of torch's and Meshwright's: without units for 16 bits torch's own is emulated, and
beside that alone anything is fast. One thread and its own seconds (time.thread_time), all ways in turn, the fastest
round of each; matrices change from call to call, so that they come from memory and not from a cache. Also: the share of
this CPU's copy bandwidth that a 4-bit product of one row reaches, reading codes and scales.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.linear.linear import products
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.kernels.quantized.quantized_linear import quantized_linears
from meshwright.spec.model.quantization_schemes import SCHEMES

OWN = ("int8", "llm-int8", "int4-rtn")
"""Schemes with a product of their own here; the others multiply a restored copy, as bf16 does."""
WAYS = (*OWN, "nf4", "fp8")
COPIES = 4
"""Of a matrix, which take turns."""
FEW, MANY = 8, 32
"""Rows of a few samples at once, measured more often since they are short; and of a prompt."""
OURS = " by Meshwright"
"""Behind the name of a plain product."""
OUTLIERS = 0.01
"""Share of columns that llm-int8 keeps."""


def matrices(size: int, name: str) -> list[QuantizedMatrix]:
    """Of normal weights (size, size)."""
    count = int(size * OUTLIERS) if name == "llm-int8" else 0
    columns = torch.arange(count, dtype=torch.int32) if count else None
    weights = (torch.randn(size, size) * 0.02 for _ in range(COPIES))
    return [quantize_matrix("some", weight, SCHEMES[name], columns, torch.bfloat16) for weight in weights]


def seconds(run: Callable[[int], object], calls: int) -> float:
    """Of this thread, per call."""
    began = time.thread_time()
    for number in range(calls):
        run(number % COPIES)
    return (time.thread_time() - began) / calls


def ways(size: int, rows: int, made: dict[str, list[QuantizedMatrix]]) -> dict[str, Callable[[int], object]]:
    """Name -> a product with one of the copies."""
    by_way: dict[str, Callable[[int], object]] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        x, weights = torch.randn(rows, size).to(dtype), [torch.randn(size, size).to(dtype) for _ in range(COPIES)]
        by_way[name] = _plain(x, weights)
        by_way[name + OURS] = _widened(x, weights)
    for name, quantized in made.items():
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(rows, size).to(dtype)
            by_way[f"{name} {'fp32' if dtype == torch.float32 else 'bf16'}"] = _quantized(x, quantized)
    return by_way


def _plain(x: Tensor, weights: Sequence[Tensor]) -> Callable[[int], object]:
    return lambda number: F.linear(x, weights[number])


def _widened(x: Tensor, weights: Sequence[Tensor]) -> Callable[[int], object]:
    return lambda number: products(x, (weights[number],), (None,))


def _quantized(x: Tensor, matrices_of_scheme: Sequence[QuantizedMatrix]) -> Callable[[int], object]:
    return lambda number: quantized_linears(x, [matrices_of_scheme[number]], [None])


def copy_rate(rounds: int) -> float:
    """Bytes per second that one thread reads and writes."""
    source = torch.empty(2**26, dtype=torch.uint8)
    target = torch.empty_like(source)
    best = min(seconds(lambda number: target.copy_(source), 1) for _ in range(rounds + 2))
    return 2 * source.numel() / best


@torch.no_grad()
def measured(size: int, rows: Sequence[int], rounds: int) -> dict[str, object]:
    """Milliseconds by rows and way, and what the claims read."""
    made = {name: matrices(size, name) for name in WAYS}
    times: dict[str, dict[str, float]] = {}
    for count in rows:
        each = ways(size, count, made)
        best = dict.fromkeys(each, float("inf"))
        for _ in range(rounds * (4 if count <= FEW else 1) + 1):  # the first one packs
            for name, run in each.items():
                best[name] = min(best[name], seconds(run, COPIES))
        fastest = {name: min(least, best.get(name + OURS, least)) for name, least in best.items()}
        times[str(count)] = {name: 1e3 * least for name, least in fastest.items() if not name.endswith(OURS)}
    over = {count: {name: row["bf16"] / row[f"{name} bf16"] for name in WAYS} for count, row in times.items()}
    rate, row_times = copy_rate(rounds), times[str(rows[0])]
    panels = made["int4-rtn"][0].prepared.get("panels")  # which the product of few rows reads, where there is one
    stored = panels.bytes if panels else float("nan")
    return {
        "milliseconds": times,
        "copy_bytes_per_second": rate,
        "int4_bandwidth": stored / (row_times["int4-rtn bf16"] / 1e3) / rate,
        "int4_over_fp16": row_times["fp16"] / row_times["int4-rtn bf16"],
        "over_bf16": over,
        "slowest_over_bf16": min(row[name] for row in over.values() for name in OWN),
        "llm_int8_one_row": over[str(rows[0])]["llm-int8"],
        "llm_int8_many_rows": min(row["llm-int8"] for count, row in over.items() if int(count) >= MANY),
    }


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size", type=int, default=3072)
    parser.add_argument("--rows", default="1,8,32,128")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = measured(options.size, [int(count) for count in options.rows.split(",")], options.rounds)
    if options.json:
        print(json.dumps(figures))
        return
    times = figures["milliseconds"]
    assert isinstance(times, dict)
    print(f"ms per product of {options.size} x {options.size}, rows " + "".join(f"{count:>9}" for count in times))
    for name in next(iter(times.values())):
        print(f"{name:<42} " + "".join(f"{row[name]:9.3f}" for row in times.values()))
    print(f"int4, one row: {figures['int4_over_fp16']:.2f}x fp16, {100 * figures['int4_bandwidth']:.0f} % of copying")  # type: ignore[operator]  # numbers


if __name__ == "__main__":
    main()

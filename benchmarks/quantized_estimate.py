"""Seconds of products with quantized matrices on GPUs by counting, beside bf16's by the planner's formula of kernels.

    python -m benchmarks.quantized_estimate [--json]

Every figure is a prediction. A product in bf16 takes what planner/kernels says, with
matrices from memory and none from the cache. Ours are counted with the same constants of the device: launches, bytes
over the memory's rate, tiles over the processors, and the instructions that make numbers of codes, which are taken to
stand beside no product at all. A layer is the seven matrices of a block; q, k and v share one rounding of x, gate and
up another.
"""

import argparse
import json
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from meshwright.kernels.quantized.device_products import E4M3_ROWS, FUSED_ROWS, slab_rows
from meshwright.kernels.triton import int8_product, packed_product
from meshwright.planner.kernels import fitted_kernel
from meshwright.planner.kernels.fitted_kernel import Kernel, TileChoice, kernel_of
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.spec.presets import device, model

DEVICES = ("a100-80", "h100", "h200", "b200")
MODELS = ("llama-3.2-1b", "llama-3.1-8b")
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
INSTRUCTIONS = {"integer": (5.2, 4.4), "nf4": (9.6, 8.8), "e4m3": (9.5, 8.8)}
"""A weight: all of the loop of packed_rows, in machine code for sm_90 (Triton 3.9), of up to 64 rows and of more."""
ZEROS = 0.6
"""Of reading whole zeros beside it."""
FEW_INSTRUCTIONS = {"integer": (5.9, 7.3), "nf4": (7.8, 9.3), "e4m3": (7.9, 10.2)}
"""The same of few_packed_rows, for one row and for two."""
LANES = 128
"""Instructions of a thread that a processor issues a cycle."""
CACHE = 2.0
"""Of the memory's rate: that of the last-level cache (A100: 5,120 bytes a cycle by its data sheet, 3.5 times)."""
TRITON = 0.85
"""Of the rate of the library's products, with the same tile."""
SHOWN = ("int4-rtn", "int4-sym", "nf4", "int8", "fp8")
WITHOUT_FP8 = ("a100-80",)


class Sizes(NamedTuple):
    """x (rows, inner) times a matrix (columns, inner)."""

    rows: int
    inner: int
    columns: int
    rounded: bool = True
    """Whether x is rounded for it: not where another product of the same x came first."""


def layer(name: str, rows: int) -> list[Sizes]:
    """Its seven matrices."""
    shape = model(name)
    width, ffn, head = shape.hidden, shape.ffn, shape.head_dim
    q, kv = shape.heads * head, shape.kv_heads * head
    return [
        Sizes(rows, width, q), Sizes(rows, width, kv, False), Sizes(rows, width, kv, False), Sizes(rows, q, width),
        Sizes(rows, width, ffn), Sizes(rows, width, ffn, False), Sizes(rows, ffn, width),
    ]  # fmt: skip


def from_memory(name: str, operation: str = "product.bf16") -> Kernel:
    """The planner's constants; every matrix comes from memory, as between two layers."""
    kernel = kernel_of(device(name), operation)
    return kernel._replace(figures={**kernel.figures, "cached": 0.0})


def moved(kernel: Kernel, size: float) -> float:
    """Microseconds of bytes from memory."""
    return size / (kernel.figures["memory"] * kernel.chip.memory)


def bf16(kernel: Kernel, work: Sizes) -> float:
    """Microseconds, as the planner has it."""
    return fitted_kernel.fastest_tile_us(kernel.figures, kernel.chip, work.rows, work.columns, work.inner)


def fused(kernel: Kernel, work: Sizes, scheme: str) -> float:
    """Microseconds of packed_rows, and of sum_parts where K is cut. Programs of a processor take turns at
    making numbers and multiplying. One and two rows are multiplied by few_packed_rows."""
    chip, kind = kernel.chip, SCHEMES[scheme]
    if work.rows <= packed_product.MOST_ROWS:
        return _few(kernel, work, scheme)
    warp_groups = chip.low_best > chip.best  # units for 8 bits came with them
    tile = packed_product.tile_of(work.rows, warp_groups)
    parts = packed_product.parts_of(work.rows, work.columns, work.inner, tile, chip.processors)
    weights = work.columns * work.inner * -(-work.rows // tile.rows)
    cost = INSTRUCTIONS[kind.codes][work.rows > 64] + (ZEROS if kind.zeros == "whole" else 0.0)
    made = weights * cost / (LANES * chip.processors * chip.clock_ghz * 1e3)
    multiplied = _tiles(kernel, work, tile, parts, 2.0, chip.best)
    size = kind.bits_per_weight(work.columns, work.inner) / 8 * work.columns * work.inner
    moving = moved(kernel, size + _around(work))
    # Without warp groups each warp waits for itself: those of a program take turns, too.
    computing = taking_turns(made, multiplied, tile.resident if warp_groups else 2 * tile.resident)
    return fitted_kernel.blended_us(kernel.figures, computing, moving) + _added(kernel, work, parts)


def taking_turns(first_us: float, second_us: float, programs: int) -> float:
    """Of two units that `programs` use one after the other, each at any time: as in a closed queue of two stations with
    times that vary (exponentially). One program waits for both, many for the slower unit alone."""
    longer = max(first_us, second_us)
    share = min(first_us, second_us) / longer
    return longer * sum(share**i for i in range(programs + 1)) / sum(share**i for i in range(programs))


def _few(kernel: Kernel, work: Sizes, scheme: str) -> float:
    """Microseconds of few_packed_rows: its instructions beside the bytes that it waits for."""
    chip, kind = kernel.chip, SCHEMES[scheme]
    weights = work.columns * work.inner
    instructions = weights * FEW_INSTRUCTIONS[kind.codes][work.rows - 1]
    computing = instructions / (LANES * chip.processors * chip.clock_ghz * 1e3)
    moving = moved(kernel, kind.bits_per_weight(work.columns, work.inner) / 8 * weights + _around(work))
    return fitted_kernel.blended_us(kernel.figures, computing, moving)


def slabs(kernel: Kernel, work: Sizes, scheme: str) -> float:
    """Microseconds of restored slabs and of the library's products with them."""
    kind, weights = SCHEMES[scheme], work.columns * work.inner
    step = slab_rows(work.columns, work.inner, 2)
    size = kind.bits_per_weight(work.columns, work.inner) / 8 * weights
    launches = -(-work.columns // step)
    restored = moved(kernel, size + 2 * weights / CACHE) + launches * kernel.figures["launch_us"]
    quicker = kernel._replace(chip=kernel.chip._replace(memory=kernel.chip.memory * CACHE))
    cut = (min(step, work.columns - start) for start in range(0, work.columns, step))
    return restored + sum(bf16(quicker, work._replace(columns=columns_of_slab)) for columns_of_slab in cut)


def packed(kernel: Kernel, work: Sizes, scheme: str) -> float:
    """As device_products.packed chooses."""
    return (fused if work.rows <= FUSED_ROWS else slabs)(kernel, work, scheme)


def int8(kernel: Kernel, work: Sizes) -> float:
    """Microseconds of round_rows and int8_rows: twice the rate of bf16, and half the bytes."""
    tile = int8_product.tile_of(work.rows, work.columns, kernel.chip.processors)
    parts = packed_product.parts_of(work.rows, work.columns, work.inner, tile, kernel.chip.processors)
    computing = _tiles(kernel, work, tile, parts, 1.0, 2 * kernel.chip.best)
    moving = moved(kernel, work.columns * work.inner + _around(work, 1.0))
    product_us = fitted_kernel.blended_us(kernel.figures, computing, moving) + _added(kernel, work, parts)
    return product_us + (_rounding(kernel, work) if work.rounded else 0.0)


def fp8(kernel: Kernel, work: Sizes) -> float:
    """Microseconds of round_rows and of the library's product of 8 bits; of one and two rows, of few_packed_rows."""
    chip = kernel.chip
    if work.rows <= packed_product.MOST_ROWS:
        return _few(kernel, work, "fp8") + (_rounding(kernel, work) if work.rounded else 0.0)
    alone = fitted_kernel.fastest_tile_us(
        kernel.figures, chip, work.rows, work.columns, work.inner, width=1.0, best=chip.low_best
    )
    return alone + (_rounding(kernel, work) if work.rounded else 0.0)


def _rounding(kernel: Kernel, work: Sizes) -> float:
    """x is read twice, the second time from the cache."""
    return kernel.figures["launch_us"] + moved(kernel, 3.0 * work.rows * work.inner)


def _around(work: Sizes, width: float = 2.0) -> float:
    """Bytes of x and of the result."""
    return work.rows * (width * work.inner + 2.0 * work.columns)


def _added(kernel: Kernel, work: Sizes, parts: int) -> float:
    """Of the second kernel: parts are written and read in the cache."""
    if parts == 1:
        return 0.0
    return kernel.figures["launch_us"] + moved(kernel, 8.0 * parts * work.rows * work.columns / CACHE)


def _tiles(
    kernel: Kernel, work: Sizes, tile: packed_product.ProgramTile, parts: int, width: float, best: float
) -> float:  # fmt: skip
    shape = TileChoice(tile.rows, tile.columns, parts)
    figures = {**kernel.figures, "split_us": 0.0, "split_bytes": 0.0}
    figures["step_us"] /= tile.resident
    return fitted_kernel.tiled_us(
        figures, kernel.chip, shape, work.rows, work.columns, work.inner, width=width, best=best * TRITON
    )


@cache
def _layer_in_bf16(name: str, model_name: str, rows: int) -> float:
    kernel = from_memory(name)
    return sum(bf16(kernel, work) for work in layer(model_name, rows))


def speed(name: str, model_name: str, rows: int, scheme: str) -> float:
    """How many times as fast as bf16 a layer's products with so many rows are; below 1 = slower."""
    kernel, works, plain = from_memory(name), layer(model_name, rows), _layer_in_bf16(name, model_name, rows)
    if scheme == "int8":
        ours = sum(int8(kernel, work) for work in works)
    elif scheme == "fp8" and name not in WITHOUT_FP8:
        eight = from_memory(name, "product.fp8")
        ours = sum(fp8(eight, work) for work in works)
    elif scheme == "fp8" and rows > E4M3_ROWS:
        ours = plain  # a copy is restored once, and stays
    else:
        ours = sum(packed(kernel, work, scheme) for work in works)
    return plain / ours


class Speeds(NamedTuple):
    """A row of the table."""

    model: str
    device: str
    scheme: str
    speeds: dict[int, float]
    """By number of rows."""


def table() -> Iterator[Speeds]:
    """Every model, device and scheme."""
    for model_name in MODELS:
        for name in DEVICES:
            for scheme in SHOWN:
                yield Speeds(model_name, name, scheme, {rows: speed(name, model_name, rows, scheme) for rows in ROWS})


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = list(table())
    if options.json:
        print(json.dumps({"rows": [row._asdict() for row in rows]}))
        return
    print(f"| model | GPU | scheme | {' | '.join(f'{rows:,}' for rows in ROWS)} |\n" + "|---" * (3 + len(ROWS)) + "|")
    for row in rows:
        speeds = " | ".join(f"{value:.2f}" for value in row.speeds.values())
        print(f"| {row.model} | {row.device} | `{row.scheme}` | {speeds} |")


if __name__ == "__main__":
    main()

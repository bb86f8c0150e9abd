"""The published kernel times as arrays, and what the fit of each operation needs: formula, axes, split."""

import csv
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from meshwright.planner.kernels import fitted_kernel as times
from meshwright.planner.kernels.fitted_kernel import Chip, chip_of
from meshwright.spec import presets

Array = np.ndarray
DEVICES = {"A100-SXM-80": "a100", "H100-SXM-80": "h100", "H200-SXM": "h200", "B200": "b200", "GB200": "gb200"}
"""The tables' word -> preset."""
GENERATION = {"A100-SXM-80": "Ampere", "H100-SXM-80": "Hopper", "H200-SXM": "Hopper", "B200": "Blackwell",
              "GB200": "Blackwell"}  # fmt: skip
SKEWS = {"balanced": 0.0, "power_law_1.01": 1.01, "power_law_1.2": 1.2}
POWERS = (32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
SIZES = tuple(2**power for power in range(9, 30))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One operation."""

    name: str
    file: str
    columns: tuple[str, ...]
    formula: Callable[[Mapping[str, float], Chip, Array], Array]
    places: Callable[[Array], Array]
    start: Mapping[str, float]
    axes: tuple[Sequence[float], ...]
    split: tuple[int, ...]
    """Columns whose combinations fall into one part of the split whole."""
    smooth: float
    dtype: str = ""
    coupling: tuple[float, ...] = ()
    """How strongly neighbours along an axis are drawn together; none = 1."""
    own_constants: tuple[str, ...] = ()
    """Constants that differ between devices, the others being shared since each device has few combinations; none =
    all differ."""


def chip(gpu: str) -> Chip:
    """Of the tables' word for it."""
    return chip_of(presets.device(DEVICES[gpu]))


def rows_of(kind: Kind, folder: Path) -> dict[str, Array]:
    """By GPU: the kind's columns, then microseconds."""
    rows_by_device: dict[str, list[list[float]]] = defaultdict(list)
    with (folder / kind.file).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not kind.dtype or row["dtype"] == kind.dtype:
                rows_by_device[row["gpu"]].append([_number(kind, name, row) for name in (*kind.columns, "us")])
    return {gpu: np.array(rows) for gpu, rows in rows_by_device.items()}


def software_of(kind: Kind, folder: Path) -> dict[str, str]:
    """By GPU: what measured it."""
    software: dict[str, set[str]] = defaultdict(set)
    with (folder / kind.file).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not kind.dtype or row["dtype"] == kind.dtype:
                words = [row.get("software", ""), row.get("kernel", ""), "NCCL " + row["nccl"] if "nccl" in row else ""]
                software[row["gpu"]].add(" ".join(word for word in words if word))
    return {gpu: ", ".join(sorted(names)) for gpu, names in software.items()}


def _number(kind: Kind, name: str, row: Mapping[str, str]) -> float:
    if name == "distribution":
        return SKEWS[row[name]]
    if name == "collective":
        return times.COLLECTIVES.index(row[name].replace("_", "-").replace("alltoall", "all-to-all"))
    return float(row[name])


def _of_columns(formula: Callable[..., float]) -> Callable[..., Array]:
    """A formula of the planner over columns of a table. Its annotations speak of one shape; of arrays its operators
    compute all rows at once."""
    return cast(Callable[..., Array], formula)


def _product(width: float) -> Callable[[Mapping[str, float], Chip, Array], Array]:
    def formula(fitted: Mapping[str, float], chip: Chip, rows: Array) -> Array:
        m, n, k = rows[:, 0], rows[:, 1], rows[:, 2]
        tiled_us, allowed = _of_columns(times.tiled_us), _of_columns(times.allowed)
        moved_us, blended_us = _of_columns(times.moved_us), _of_columns(times.blended_us)
        best = chip.best if width == 2 else chip.low_best
        least: Array | None = None
        for tile in times.CHOICES:
            time_us = tiled_us(fitted, chip, tile, m, n, k, width, 1.0, best)
            if tile.parts > 1:
                time_us = time_us + times.NEVER_US * (1 - allowed(fitted, chip, tile, m, n, k))
            least = time_us if least is None else np.minimum(least, time_us)
        alone = blended_us(fitted, least, moved_us(fitted, chip, m, n, k, width))
        if width != 2:
            alone = alone + _of_columns(times.quantizing_us)(fitted, chip, m, k)
        return alone

    return formula


def _collective(fitted: Mapping[str, float], chip: Chip, rows: Array) -> Array:
    rounds = np.array(list(times.ROUNDS.values()))[rows[:, 0].astype(int)]
    return _of_columns(times.collective_us)(fitted, chip, rounds, rows[:, 1], rows[:, 2])


def _of_first_columns(formula: Callable[..., float], count: int) -> Callable[[Mapping[str, float], Chip, Array], Array]:
    """The formula over the first `count` columns."""
    return lambda fitted, chip, rows: _of_columns(formula)(fitted, chip, *rows[:, :count].T)


def _stacked(positions_of: Callable[..., tuple[float, ...]], count: int) -> Callable[[Array], Array]:
    """Places on a curve, likewise of all rows at once, side by side."""
    return lambda rows: np.stack(cast(tuple[Array, ...], positions_of(*rows[:, :count].T)), 1)


PRODUCT_START = {
    "launch_us": 2.0, "rate": 0.95, "wave": 0.5, "feed": 100.0, "step_us": 0.06, "inner_half": 200.0, "split_us": 2.0,
    "split_bytes": 4.0, "shortest": 256.0, "cached": 0.4, "cache_rate": 0.7, "memory": 0.85, "blend": 3.0,
}  # fmt: skip
QUANTIZING_START = {"quantize_us": 3.0, "quantize_memory": 0.6}
PREFILL_START = {
    "launch_us": 7.0, "rate": 0.6, "padding": 64.0, "dim64": 0.7, "dim192": 1.0, "dim256": 1.1, "dim512": 0.7,
    "tile_us": 1.0, "tail": 0.5, "memory": 0.5, "row_us": 1.0,
}  # fmt: skip
DECODE_START = {
    "launch_us": 6.0, "memory": 0.85, "cached": 0.3, "cache_rate": 1.2, "rate": 0.2, "step_us": 0.3, "split_us": 1.5,
    "pair_us": 5.0, "row_us": 1.0,
}  # fmt: skip
EXPERTS_START = {
    "launch_us": 30.0, "expert_us": 3.0, "memory": 0.85, "passes": 1.0, "rate": 0.5, "step_us": 0.05, "tile_us": 0.3,
    "wave": 0.8, "uneven": 0.3, "hot": 0.1, "skewed": 0.05, "row_us": 1.0, "blend": 2.0,
}  # fmt: skip
COLLECTIVE_START = {"launch_us": 6.0, "hop": 0.12, "link": 0.8, "small": 2e5, "blend": 1.5}
"""Constants before a fit. `Figures` of fitted_kernel says what each is."""
COLLECTIVE_OWN = ("launch_us", "link")
"""Constants of a collective that each device has of its own. The others are the same for all."""
SHAPE = ("m", "n", "k")
PRODUCT: dict[str, Any] = dict(
    file="kernel_gemm.csv", columns=SHAPE, places=lambda rows: rows[:, :3], split=(1, 2), smooth=0.3,
    axes=((1, 8, 9, 16, 32, 64, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 32768), POWERS, POWERS),
)  # fmt: skip
DIMS = (64, 128, 256, 512)
HEADS = ("heads", "kv_heads", "head_dim")
KINDS = (
    Kind(name="product.bf16", dtype="bfloat16", formula=_product(2.0), start=PRODUCT_START, **PRODUCT),
    Kind(name="product.fp8", dtype="fp8", formula=_product(1.0), start=PRODUCT_START | QUANTIZING_START, **PRODUCT),
    Kind(
        name="prefill", file="kernel_attention_forward.csv", columns=("batch", "seq_len", *HEADS),
        formula=_of_first_columns(times.prefill_us, 5), start=PREFILL_START,
        places=_stacked(times.prefill_place, 5), split=(2, 3), smooth=0.1,
        axes=((1, 4, 16, 64, 256, 1024, 4096, 16384), (1, *(2**power for power in range(4, 15))), (1, 2, 4, 16, 64),
              DIMS),
    ),
    Kind(
        name="decode", file="kernel_attention_decode.csv", columns=("batch", "context", *HEADS),
        formula=_of_first_columns(times.decode_us, 5), start=DECODE_START,
        places=_stacked(times.decode_place, 5), split=(2, 3), smooth=0.1,
        axes=(tuple(2**power for power in range(14)),
              (2, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 32768, 131072), (1, 2, 4, 16, 64), DIMS),
    ),
    Kind(
        name="experts", file="kernel_moe_forward.csv",
        columns=("tokens", "hidden", "ffn", "top_k", "experts", "tp", "ep", "distribution"),
        formula=_of_first_columns(times.experts_us, 8), start=EXPERTS_START,
        places=_stacked(times.experts_place, 8), split=(1, 2, 3, 4, 5, 6), smooth=0.1,
        axes=((1, 4, 16, 64, 256, 1024, 4096, 16384, 65536), (1, 4, 16, 64, 256, 512), (32, 256, 1024, 4096, 14336),
              (1, 16, 256), (1, 2.1)),
    ),
    Kind(
        name="collective", file="kernel_nccl.csv", columns=("collective", "size_bytes", "gpus"), formula=_collective,
        start=COLLECTIVE_START, places=_stacked(times.collective_place, 3), split=(0, 2), smooth=1.0,
        own_constants=COLLECTIVE_OWN, coupling=(0.1, 0.3, 0.3), axes=((1, 2, 4, 8), (2, 4, 8), SIZES),
    ),
)  # fmt: skip

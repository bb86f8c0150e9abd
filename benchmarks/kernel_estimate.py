"""Seconds of kernels by counting, held against Liger's published times; then our kernels by the same count.

    python -m benchmarks.kernel_estimate --json --table published/kernel_times_liger.csv

A kernel's time is LAUNCH for each launch, and the longer of its bytes over the memory's rate and its products over the
tensor cores'. A second read of what the last-level cache holds is free. SHARE, PRODUCT_SHARE and LAUNCH stand for all
kernels and devices; they were set with the published rows in sight. Liger's kernels are counted from their source
(v0.2.1 to v0.7.0). A class of kernels whose published rows the count misses by more than BAR, by the median, is not
predicted by it: there the count is a lower bound only.
"""

import argparse
import csv
import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAME = "kernel_times_liger.csv"
SHARE = 0.85
"""Of a datasheet's bytes per second that a pass over memory reaches."""
PRODUCT_SHARE = 0.8
"""Of a datasheet's FLOP/s that a large matrix product reaches."""
LAUNCH = 8e-6
"""Seconds of a launch, as events around it time it."""
BAR = 0.25
PROGRAMS = 2
"""Programs that a multiprocessor holds at once, of a kernel with 32 warps."""
FIXED = 3e-4
"""Seconds below which autograd's work on the host is what was timed, in rows of a backward pass."""


@dataclass(frozen=True, slots=True)
class Chip:
    """Datasheet figures."""

    bytes_per_s: float
    flop_per_s: float
    cache_bytes: float
    processors: int

    def seconds(self, moved: float, launches: int = 1, flop: float = 0.0) -> float:
        """Of kernels that move so many bytes and multiply so much."""
        return launches * LAUNCH + max(moved / (SHARE * self.bytes_per_s), flop / (PRODUCT_SHARE * self.flop_per_s))


CHIPS = {
    "A100": Chip(2.039e12, 312e12, 40 * 2**20, 108),
    "H100": Chip(3.35e12, 989e12, 50 * 2**20, 132),
    "H200": Chip(4.8e12, 989e12, 50 * 2**20, 132),
}


def norm(chip: Chip, rows: int, width: int, item: int, streams: int) -> float:
    """A norm's pass that reads and writes so many tensors (rows, width)."""
    return chip.seconds(streams * rows * width * item)


def loss(chip: Chip, rows: int, vocab: int, item: int) -> float:
    """Loss and gradient in place: two reads and a write, of which the second read may come from the cache."""
    held = vocab * item * PROGRAMS * chip.processors <= chip.cache_bytes
    return chip.seconds((2 if held else 3) * rows * vocab * item)


def linear_loss(chip: Chip, rows: int, width: int, vocab: int, chunk: int, *, ours: bool) -> float:
    """Three products for each chunk of rows, in bf16, and what is done with the head's gradient: Liger makes each part
    in bf16 and adds it in another pass; ours adds to fp32 inside the product."""
    matrix, total = 2.0 * width * vocab, 0.0
    for start in range(0, rows, chunk):
        n = min(chunk, rows - start)
        flop, logits = 2.0 * n * width * vocab, 2.0 * n * vocab
        total += 2 * chip.seconds(matrix + logits, flop=flop) + loss(chip, n, vocab, 2)
        if ours:
            total += chip.seconds(logits + 4 * matrix, flop=flop)
        else:
            total += chip.seconds(logits + matrix, flop=flop) + chip.seconds(3 * matrix)
    return total


def liger_chunk(rows: int, width: int, vocab: int) -> int:
    """Rows of a chunk in Liger's fused_linear_cross_entropy."""
    parts = -(-vocab // width)
    return 1 << (-(-rows // parts) - 1).bit_length()


def our_chunk(rows: int, vocab: int) -> int:
    """As kernels.cross_entropy.chunk_rows on a GPU."""
    return max(1, min(rows, max(256, 512 * 2**20 // (4 * vocab))))


Count = Callable[[Chip, int, dict[str, Any]], float]

CLASSES: dict[tuple[str, str, str], tuple[str, Count]] = {
    ("rms_norm", "liger", "forward"): ("norm forward", lambda c, x, k: norm(c, k["M"], x, 2, 2)),
    ("layer_norm", "liger", "forward"): ("norm forward", lambda c, x, k: norm(c, k["M"], x, 4, 2)),
    ("fused_add_rms_norm", "liger_fused_add_rms_norm", "forward"): (
        "norm forward", lambda c, x, k: norm(c, k["M"], x, 4, 4),
    ),
    ("rms_norm", "liger", "backward"): ("norm backward", lambda c, x, k: norm(c, k["M"], x, 2, 3)),
    ("layer_norm", "liger", "backward"): ("norm backward", lambda c, x, k: norm(c, k["M"], x, 4, 3)),
    ("fused_add_rms_norm", "liger_fused_add_rms_norm", "backward"): (
        "norm backward", lambda c, x, k: norm(c, k["M"], x, 4, 4),
    ),
    ("rope", "liger", "forward"): ("rotary", lambda c, x, k: rope(c, x, k)),
    ("rope", "liger", "backward"): ("rotary", lambda c, x, k: rope(c, x, k)),
    ("cross_entropy", "liger", "forward"): ("loss", lambda c, x, k: loss(c, k["B"] * k["T"], x, 4)),
    ("cross_entropy", "liger", "full"): (
        "loss", lambda c, x, k: loss(c, k["B"] * k["T"], x, 4) + norm(c, k["B"] * k["T"], x, 4, 2),
    ),
    ("fused_linear_cross_entropy", "liger", "full"): (
        "linear and loss",
        lambda c, x, k: linear_loss(c, x, k["H"], k["V"], liger_chunk(x, k["H"], k["V"]), ours=False),
    ),
}  # fmt: skip
"""Published rows that are counted: (kernel, provider, pass) -> class, and the count of x and the row's settings."""


def rope(chip: Chip, x: int, settings: dict[str, Any]) -> float:
    """Queries and keys read and written in place, bf16; hidden is that of the queries."""
    hidden, tokens = settings.get("hidden_size", x), settings.get("seq_len", x)
    share = 1 + settings["num_kv_heads"] / settings["num_q_heads"]
    return chip.seconds(2 * 2 * tokens * hidden * share)


@dataclass(frozen=True, slots=True)
class Held:
    """A published time beside the count."""

    kind: str
    kernel: str
    mode: str
    x: int
    chip: str
    published: float
    counted: float

    @property
    def error(self) -> float:
        return self.counted / self.published - 1


def held_against(table: Path) -> Iterator[Held]:
    """Every published row that CLASSES counts, but those in which the host's work is what was timed."""
    with table.open(newline="") as lines:
        for row in csv.DictReader(lines):
            known = CLASSES.get((row["kernel"], row["provider"], row["mode"]))
            chip = next((name for name in CHIPS if name in row["gpu"]), None)
            published = float(row["ms_p50"]) / 1e3
            if known is None or chip is None or (row["mode"] != "forward" and published < FIXED):
                continue
            counted = known[1](CHIPS[chip], int(row["x"]), json.loads(row["config"]))
            yield Held(known[0], row["kernel"], row["mode"], int(row["x"]), chip, published, counted)


def verdicts(held: list[Held]) -> dict[str, dict[str, Any]]:
    """Of each class: rows, median and largest error, rows within BAR, and whether the count predicts it."""
    by_kind = {}
    for kind in dict.fromkeys(row.kind for row in held):
        errors = [abs(row.error) for row in held if row.kind == kind]
        by_kind[kind] = {
            "rows": len(errors), "median": statistics.median(errors), "largest": max(errors),
            "within": sum(error <= BAR for error in errors), "used": statistics.median(errors) <= BAR,
        }  # fmt: skip
    return by_kind


def ours_beside(held: list[Held]) -> list[dict[str, Any]]:
    """Our kernels by the count, at the largest published shape of each kernel and device, beside Liger's time."""
    compared = []
    for kernel, mode, count in OURS:
        for chip in CHIPS:
            rows = [row for row in held if (row.kernel, row.mode, row.chip) == (kernel, mode, chip)]
            for row in rows[-1:] if kernel != "fused_linear_cross_entropy" else rows:
                ours = count(CHIPS[chip], row.x)
                compared.append(
                    {"kernel": kernel, "pass": mode, "x": row.x, "chip": chip, "liger_s": row.published,
                     "ours_s": ours, "ratio": row.published / ours, "kind": row.kind}
                )  # fmt: skip
    return compared


OURS: list[tuple[str, str, Callable[[Chip, int], float]]] = [
    ("rms_norm", "forward", lambda c, x: norm(c, 2048, x, 2, 2)),
    ("rms_norm", "backward", lambda c, x: norm(c, 2048, x, 2, 3) + c.seconds(2 * 4 * x * c.processors)),
    ("fused_add_rms_norm", "forward", lambda c, x: norm(c, 2048, x, 4, 4)),
    ("fused_add_rms_norm", "backward", lambda c, x: norm(c, 2048, x, 4, 4) + c.seconds(2 * 4 * x * c.processors)),
    ("cross_entropy", "full", lambda c, x: loss(c, 16384, x, 4)),
    ("rope", "forward", lambda c, x: rope(c, x, {"hidden_size": 8192, "num_q_heads": 32, "num_kv_heads": 8})),
    ("fused_linear_cross_entropy", "full",
     lambda c, x: linear_loss(c, x, 4096, 128256, our_chunk(x, 128256), ours=True)),
]  # fmt: skip
"""Of the same shapes: kernels.triton, and the chunk loop of kernels.cross_entropy. A factor on the loss is 1 in
training, so the gradient that stands in place of the logits needs no further pass."""


def _table() -> Path | None:
    """As the leaderboard finds its tables."""
    places = (os.environ.get("MESHWRIGHT_PUBLISHED"), ROOT.parent / "shared" / "published")
    return next((Path(folder) / NAME for folder in places if folder and (Path(folder) / NAME).exists()), None)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, default=_table(), help="Liger's rows; else in MESHWRIGHT_PUBLISHED")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.table is None:
        hint = f"{NAME} is not here: set MESHWRIGHT_PUBLISHED to the folder of published tables"
        print(json.dumps({"skipped": hint}) if options.json else hint)
        return
    held = list(held_against(options.table))
    judged, ours = verdicts(held), ours_beside(held)
    if options.json:
        used = [abs(row.error) for row in held if judged[row.kind]["used"]]
        figures = {f"{row['kernel']}_{row['pass']}": row["ratio"] for row in ours}
        print(json.dumps({"classes": judged, "median_error": statistics.median(used), "ratios": figures}))
        return
    print("| class | published rows | median error | largest | within 25 % | used |\n|---|---|---|---|---|---|")
    for kind, row in judged.items():
        print(f"| {kind} | {row['rows']} | {100 * row['median']:.0f} % | {100 * row['largest']:.0f} % "
              f"| {row['within']} | {'yes' if row['used'] else '**no**: a lower bound'} |")  # fmt: skip
    print("\n| kernel | pass | size | GPU | Liger, published | ours, predicted | ratio |\n" + "|---" * 7 + "|")
    for row in ours:
        mark = "" if judged[row["kind"]]["used"] else " (bound)"
        print(f"| {row['kernel']} | {row['pass']} | {row['x']:,} | {row['chip']} | {row['liger_s'] * 1e3:.3f} ms | "
              f"{row['ours_s'] * 1e3:.3f} ms{mark} | {row['ratio']:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()

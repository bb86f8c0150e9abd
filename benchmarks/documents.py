"""Training speed on packed documents, beside the same text as one document a row, in one run.

    python -m benchmarks.documents [--json] [--shapes 10m,100m] [--precisions fp32,bf16] [--rounds 12]

One engine takes both kinds of steps in turn, on the same tokens: with the borders of documents (of random lengths, an
eighth of a row on average) and without. Times are of the process, on all of its threads; ratios are of medians.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from meshwright.parallel import build_engine
from meshwright.spec import Layout, Recipe
from meshwright.spec.presets import model as preset
from meshwright.training import device
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.optimizer.precision import DTYPES
from meshwright.training.step.batches import Batch
from meshwright.training.step.step import train_step

SIZES = {"10m": (2, 2048), "100m": (1, 2048)}
"""Sequences of a step and tokens of each."""
DOCUMENTS = 8
"""Of a row, on average."""
WARM_UP = 2


def batch_of(shape_name: str, seed: int) -> Batch:
    """Random tokens in rows of random documents."""
    rows, sequence = SIZES[shape_name]
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, preset(f"llama-{shape_name}").vocab, (rows, sequence + 1), generator=draw)
    begins = torch.rand(rows, sequence, generator=draw) < DOCUMENTS / sequence
    begins[:, 0] = True
    position = torch.arange(sequence).expand(rows, -1)
    first = torch.where(begins, position, 0).cummax(1).values
    return Batch(
        tokens=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous(), valid=rows * sequence,
        documents=begins.int().cumsum(1).int(), positions=(position - first).int(), masked=True,
        documents_of_rows=tuple((number, sequence) for number in begins.sum(1).tolist()),
    )  # fmt: skip


def measure(shape_name: str, precision: str, compiled: bool, rounds: int) -> dict[str, Any]:
    """Tokens a second both ways, and their ratio."""
    device.prepare(torch.device("cpu"), precision)
    layout = Layout(compile="on" if compiled else "off")
    engine = build_engine(preset(f"llama-{shape_name}"), layout, dtype=DTYPES[precision])
    engine.train()
    optimizer = Optimizer(engine.parameters.items(), Recipe())
    seconds: dict[str, list[float]] = {"packed": [], "plain": []}
    for number in range(WARM_UP + rounds):
        packed = batch_of(shape_name, number)
        plain = replace(packed, documents=None, positions=None, documents_of_rows=())
        for name, batch in (("packed", packed), ("plain", plain)):
            before = time.process_time()
            train_step(engine, optimizer, [batch], rate=1e-4, clip=1.0, balance_loss=0.0).loss.item()
            seconds[name].append(time.process_time() - before)
    rows, sequence = SIZES[shape_name]
    per_core = {name: rows * sequence / statistics.median(durations[WARM_UP:]) for name, durations in seconds.items()}
    return {
        "shape": shape_name, "precision": precision, "compiled": compiled, **per_core,
        "ratio": per_core["packed"] / per_core["plain"],
    }  # fmt: skip


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Training on packed documents beside plain rows.")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--shapes", default="10m,100m")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--eager", action="store_true", help="eager code alone")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for shape in options.shapes.split(","):
        for precision in options.precisions.split(","):
            for compiled in (False,) if options.eager else (False, True):
                rows.append(measure(shape, precision, compiled, options.rounds))
                if not options.json:
                    row = rows[-1]
                    way = "compiled" if compiled else "eager"
                    print(
                        f"{shape:>5} {precision} {way:<8} packed {row['packed']:7,.0f}  plain {row['plain']:7,.0f} "
                        f"tokens/s of a core  {row['ratio']:.2f} x",
                        flush=True,
                    )
    if options.json:
        print(json.dumps({"rows": rows, "least_ratio": min(row["ratio"] for row in rows)}))


if __name__ == "__main__":
    main()

"""The gradient norm of each step of a run at fixed weights, by several ways to compute the same gradient.

    python -m benchmarks.gradient_norms [--model llama-tiny] [--steps 30] [--precision fp32] [--json]

A run's norm may jump for a single step while its loss is smooth. Then either the text of that step has such a gradient,
by every way, or one way computes it wrongly. The rows are those that `train` reads with these settings, in its order.
Ways: as `train` runs, uncompiled, and plain code in fp32, which all others are held against. On a GPU take
`--model llama-100m --precision bf16`. Without a GPU plain code takes long: `--ways run` leaves it out.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from meshwright.data import prepare
from meshwright.data.numbered_rows import numbered_rows
from meshwright.parallel import make_mesh
from meshwright.parallel.engine import euclidean_norm
from meshwright.spec import Data, Layout, Plan, Recipe, presets
from meshwright.training import device as machine
from meshwright.training.batches import WHOLE, Batch, PackedRows, split
from meshwright.training.loop import new_state
from meshwright.training.state import TrainState
from meshwright.training.step import MicroPass, Weights

WAYS = {
    "run": ({}, {}),
    "uncompiled": ({"compile": "off"}, {}),
    "plain": ({"compile": "off", "kernels": "reference"}, {"precision": "fp32"}),
}
"""Layout and recipe of each way; the first is what `train` does."""


def plan_of(options: argparse.Namespace, way: str) -> Plan:
    """What one way computes."""
    layout, recipe = WAYS[way]
    settings: dict[str, Any] = {"precision": options.precision, **recipe}
    return Plan(
        model=presets.model(options.model), data=Data(path=options.data), run="-",
        layout=replace(Layout(micro_batch=options.micro_batch), **layout),
        recipe=Recipe(sequence=options.sequence, global_batch=options.batch, **settings),
    )  # fmt: skip


def gradients(state: TrainState, batch: Batch, micro_batch: int) -> dict[str, torch.Tensor]:
    """Of the mean loss of a step, by parameter."""
    parts = split(batch, micro_batch)
    weights = Weights.of(state.engine, parts, 0.0, None)
    state.engine.forward_backward([MicroPass(part, weights) for part in parts])
    state.engine.finish_gradients()
    found = {name: p.grad for name, p in state.optimizer.parameters.items() if p.grad is not None}
    state.optimizer.zero_grad()
    return found


def apart(found: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> tuple[str, float]:
    """The parameter whose gradient is farthest from plain code's, and how far by its length."""
    off = {
        name: float(torch.linalg.vector_norm(gradient.float() - plain[name]) / torch.linalg.vector_norm(plain[name]))
        for name, gradient in found.items()
    }
    worst = max(off, key=lambda name: off[name])
    return worst, off[worst]


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each step's norm by each way, and what is farthest from plain code."""
    target = machine.pick_device()
    machine.prepare(target, options.precision)
    first = plan_of(options, "run")
    corpus = prepare(first.data)
    numbered = numbered_rows(first.data, first.recipe, corpus, corpus.train, shuffle=True)
    source = PackedRows(numbered, True, None, None, padding=False)
    states = {}
    for way in options.ways:  # the same seed, so the same weights
        plan = plan_of(options, way)
        states[way] = new_state(plan, make_mesh(plan.layout), target, initialize=True)
        states[way].engine.train()
    for step in range(1, options.steps + 1):
        batch = source.take((step - 1) * options.batch, options.batch, target, WHOLE)
        found = {way: gradients(state, batch, options.micro_batch) for way, state in states.items()}
        row: dict[str, Any] = {"step": step, "documents": batch.spans.number}
        row["norms"] = {way: float(euclidean_norm(list(each.values()))) for way, each in found.items()}
        if "plain" in found:
            row["off"] = {way: apart(each, found["plain"]) for way, each in found.items() if way != "plain"}
        yield row


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.gradient_norms", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-tiny")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=0, help="0 = the batch")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--ways", default=",".join(WAYS), help="some of " + ", ".join(WAYS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    options.micro_batch = options.micro_batch or options.batch
    options.ways = options.ways.split(",")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Print each step as it comes, then the largest norm over the median of each way."""
    options, found = parsed(words), []
    for row in rows(options):
        found.append(row)
        norms = ", ".join(f"{way} {norm:.3f}" for way, norm in row["norms"].items())
        off = "; ".join(f"{way} {share:.1%} off in {name}" for way, (name, share) in row.get("off", {}).items())
        print(f"step {row['step']}, {row['documents']} documents: {norms}{'; ' + off if off else ''}",
              file=sys.stderr if options.json else sys.stdout, flush=True)  # fmt: skip
    largest = {}
    for way in options.ways:
        norms = [row["norms"][way] for row in found]
        largest[way] = max(norms) / median(norms)
    if options.json:
        print(json.dumps({"steps": found, "largest_over_median": largest}))
    else:
        print(", ".join(f"{way}: largest {ratio:.2f} times the median" for way, ratio in largest.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The gradient norm of each step of a run, by several ways to compute the same gradient, and what is wrong where they
differ.

    python -m benchmarks.gradient_norms [--model llama-tiny] [--steps 30] [--precision fp32] [--fixed] [--json]

A run's norm may jump for a single step while its loss is smooth. Then either the weights and the text of that step have
such a gradient, by every way, or one way computes it wrongly. Each step is the one that `train` makes with these
settings: its rows in its order, its learning rate, its reading of the norm. `--fixed` keeps the first weights. Ways: as
`train` runs, uncompiled, and plain code in fp32 at the same weights, which all others are held against. Beside them:

- the batch on the device against the same rows read again, and borders of documents as the device finds them;
- the run's gradient once more, with memory that nobody has written filled with what is not a number;
- the norm that the step itself found, read as late as `train` reads it.

The last line names the cause. On a GPU take `--model llama-100m --precision bf16`. Without a GPU plain code takes long:
`--ways run` leaves it out.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from meshwright.data import prepare
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.kernels.attention.varlen import borders_of
from meshwright.kernels.optimizer.adamw import euclidean_norm
from meshwright.parallel import make_mesh
from meshwright.spec import Data, Layout, Plan, Recipe, presets
from meshwright.training import device as machine
from meshwright.training.loop import new_state
from meshwright.training.optimizer.optimizer import learning_rate
from meshwright.training.records import Readback, start_readback
from meshwright.training.step.batches import WHOLE, Batch, PackedRows, split
from meshwright.training.step.state import TrainState
from meshwright.training.step.step import MicroPass, Weights, train_step

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "run": ({}, {}),
    "uncompiled": ({"compile": "off"}, {}),
    "plain": ({"compile": "off", "kernels": "reference"}, {"precision": "fp32"}),
}
"""Layout and recipe of each way; the first is what `train` does."""
JUMP = 3.0
"""Times the median, from which on a norm is asked about."""
APART = {"fp32": 1e-2, "bf16": 0.2}
"""Shares of its length that a parameter's gradient may be off plain code or off itself, made again."""
NOT_A_NUMBER = 255
"""A byte of which four are an fp32 number that is none, and two one of 16 bits."""


def plan_of(options: argparse.Namespace, way: str) -> Plan:
    """What one way computes."""
    layout, recipe = WAYS[way]
    settings: dict[str, Any] = {"precision": options.precision, **recipe}
    return Plan(
        model=presets.model(options.model), data=Data(path=options.data), run="-",
        layout=replace(Layout(micro_batch=options.micro_batch), **layout),
        recipe=Recipe(sequence=options.sequence, global_batch=options.batch, **settings),
    )  # fmt: skip


def gradients(state: TrainState, batch: Batch, micro_batch: int) -> dict[str, Tensor]:
    """Of the mean loss of a step, by parameter."""
    parts = split(batch, micro_batch)
    weights = Weights.for_step(state.engine, parts, 0.0, None)
    state.engine.forward_backward([MicroPass(part, weights) for part in parts])
    state.engine.finish_gradients()
    made = {name: p.grad for name, p in state.optimizer.parameters.items() if p.grad is not None}
    state.optimizer.zero_grad()
    return made


def apart(made: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[str, float]:
    """The parameter whose gradient is farthest from another, and how far by its length; infinite = no numbers."""
    off = {}
    for name, gradient in made.items():
        distance = torch.linalg.vector_norm(gradient.float() - exact[name].float())
        share = float(distance / torch.linalg.vector_norm(exact[name].float()))
        off[name] = share if math.isfinite(share) else math.inf
    worst = max(off, key=lambda name: off[name])
    return worst, off[worst]


@contextmanager
def poisoned(target: torch.device) -> Iterator[None]:
    """Memory that is taken inside and read before it is written shows: on a GPU what the allocator holds is filled, on
    a CPU torch fills what it gives."""
    if target.type == "cuda":
        held = torch.cuda.memory_reserved(target) - torch.cuda.memory_allocated(target)
        torch.full((held * 3 // 4,), NOT_A_NUMBER, dtype=torch.uint8, device=target)
        yield
        return
    utilities: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), utilities.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    utilities.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        utilities.fill_uninitialized_memory = before[1]


def difference(batch: Batch, again: Batch) -> str:
    """What of a batch on the device is not what the same rows say; empty = all is."""
    for name in ("tokens", "targets", "documents", "positions"):
        here, there = getattr(batch, name), getattr(again, name)
        if (here is None) != (there is None) or (here is not None and not torch.equal(here.cpu(), there)):
            return name
    if batch.documents is None or again.documents is None:
        return ""
    borders = borders_of(batch.documents, batch.spans.number).cpu()
    if not torch.equal(borders, borders_of(again.documents, 0)):
        return "borders of documents"
    return "" if int(borders.diff().max()) <= batch.spans.longest else "the longest document"


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each step's norm by each way, what is farthest from plain code and from itself, and the step's own norm."""
    target, cpu = machine.pick_device(), torch.device("cpu")
    machine.prepare(target, options.precision)
    first = plan_of(options, "run")
    corpus = prepare(first.data)
    numbered = numbered_rows(first.data, first.recipe, corpus, corpus.train, shuffle=True)
    source = PackedRows(numbered, True, None, None, padding=False)
    states = {}
    for way in options.ways:
        plan = plan_of(options, way)
        states[way] = new_state(plan, make_mesh(plan.layout), target, initialize=True)
        states[way].engine.train()
    waiting: tuple[dict[str, Any], Readback] | None = None
    for step in range(1, options.steps + 1):
        where = (step - 1) * options.batch, options.batch
        batch = source.take(*where, target, WHOLE)
        row: dict[str, Any] = {"step": step, "documents": batch.spans.number}
        row["batch"] = difference(batch, source.take(*where, cpu, WHOLE))
        follow(states, options.ways[0])
        made = {way: gradients(state, batch, options.micro_batch) for way, state in states.items()}
        row["norms"] = {way: float(euclidean_norm(list(each.values()))) for way, each in made.items()}
        if "plain" in made:
            row["off"] = {way: apart(each, made["plain"]) for way, each in made.items() if way != "plain"}
        leader = states[options.ways[0]]
        with poisoned(target):
            row["again"] = apart(gradients(leader, batch, options.micro_batch), made[options.ways[0]])
        del made
        number = None if options.fixed else stepped(leader, first, batch, step, options.micro_batch)
        if waiting is not None:  # the step before is read now, when this one has begun
            waiting[0]["step_norm"] = waiting[1].read()["grad_norm"][0]
            yield waiting[0]
        waiting = None
        if number is None:
            yield row
        else:
            waiting = row, number
    if waiting is not None:
        waiting[0]["step_norm"] = waiting[1].read()["grad_norm"][0]
        yield waiting[0]


def follow(states: dict[str, TrainState], leader: str) -> None:
    """Give all ways the leader's weights."""
    with torch.no_grad():
        for state in states.values():
            for name, parameter in state.engine.parameters.items():
                parameter.copy_(states[leader].engine.parameters[name])


def stepped(state: TrainState, plan: Plan, batch: Batch, step: int, micro_batch: int) -> Readback:
    """The step of a run, and its numbers on their way."""
    result = train_step(
        state.engine, state.optimizer, split(batch, micro_batch), rate=learning_rate(plan.recipe, step),
        clip=plan.recipe.clip, balance_loss=plan.recipe.balance_loss, skipper=state.skipper,
    )  # fmt: skip
    return start_readback(result)


def cause(row: dict[str, Any], ways: Sequence[str], precision: str) -> str:
    """What is wrong with a step; empty = nothing is."""
    run, bar = row["norms"][ways[0]], APART[precision]
    name, share = row["again"]
    if row["batch"]:
        return f"on the device, {row['batch']} is not what the rows say"
    if share > bar:
        return f"the gradient of {name} made again is {share:.1%} off: memory that nobody wrote, or an order of kernels"
    for way, (name, share) in row.get("off", {}).items():
        if share > bar:
            return f"{way} is {share:.1%} off plain code in {name}"
    read_by_step = row.get("step_norm", run)
    return (
        "" if abs(read_by_step / run - 1) < bar else f"the step read {read_by_step:.3f}, and its gradient has {run:.3f}"
    )


def verdict(table: Sequence[dict[str, Any]], ways: Sequence[str], precision: str) -> str:
    """One sentence: the causes, step by step; else whether jumps are the gradient's own."""
    causes = [f"step {row['step']}: {why}" for row in table if (why := cause(row, ways, precision))]
    if causes:
        return "; ".join(causes)
    usual = median(row["norms"][ways[0]] for row in table)
    jumps = [row["step"] for row in table if row["norms"][ways[0]] > JUMP * usual]
    if not jumps:
        return "no norm jumps, and all ways agree"
    steps = ", ".join(map(str, jumps))
    return f"the norm jumps in steps {steps} by every way: weights and text have that gradient"


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
    parser.add_argument("--fixed", action="store_true", help="keep the first weights: no step is made")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    options.micro_batch = options.micro_batch or options.batch
    options.ways = options.ways.split(",")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Print each step as it comes, then the largest norm over the median of each way, and the cause."""
    options, table = parsed(words), []
    for row in rows(options):
        table.append(row)
        norms = ", ".join(f"{way} {norm:.3f}" for way, norm in row["norms"].items())
        off = "; ".join(f"{way} {share:.1%} off in {name}" for way, (name, share) in row.get("off", {}).items())
        print(f"step {row['step']}, {row['documents']} documents: {norms}{'; ' + off if off else ''}",
              file=sys.stderr if options.json else sys.stdout, flush=True)  # fmt: skip
    largest = {}
    for way in options.ways:
        way_norms = [row["norms"][way] for row in table]
        largest[way] = max(way_norms) / median(way_norms)
    why = verdict(table, options.ways, options.precision)
    if options.json:
        print(json.dumps({"steps": table, "largest_over_median": largest, "verdict": why}))
    else:
        print(", ".join(f"{way}: largest {ratio:.2f} times the median" for way, ratio in largest.items()))
        print(why)
    return 0


if __name__ == "__main__":
    sys.exit(main())

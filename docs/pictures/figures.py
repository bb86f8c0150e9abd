"""The numbers of the Learn pages' pictures, from the code that they explain; `draw.py` draws them and keeps them.

Memory by sequence and the line of time are the planner's, the first steps come from a dry run and from torch's own
optimizer. Positions of ranks come from parallel/groups/mesh.py, positions of tokens from parallel/axes/context.py,
pipelines from spec/layout/schedule.py played by spec/layout/replay.py: a picture cannot say what the code does not do.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from docs import bandwidth as bandwidths
from docs.generate import run
from docs.tables import TABLES
from meshwright import compat
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.observe.dryrun.storage_tracker import FakeWatch
from meshwright.parallel.axes.context import places
from meshwright.planner.step.predict import build_estimator, predict
from meshwright.planner.step.prediction import usable_bytes
from meshwright.planner.time.collectives import StageContents, sharing
from meshwright.spec import Plan, Recipe, presets
from meshwright.spec.layout.layout import Layout, place_of
from meshwright.spec.layout.replay import Replay, Times, replay
from meshwright.spec.layout.schedule import KINDS, schedule

KEPT = Path(__file__).resolve().parent / "figures.json"
"""What the pictures of the repository were drawn from."""
GIB = 2**30

BAR_KINDS = {
    "parameters": ("parameters", "shards"),
    "gradients": ("gradients",),
    "masters": ("masters",),
    "moments": ("moments", "counters"),
    "activations": ("activations",),
    "logits": ("logits",),
    "temporaries": ("buffers", "temporaries", "reserve"),
}
"""Bars of memory -> the planner's kinds in each; every bar has the colour that its kind has in the explorer."""
STATES = ("parameters", "gradients", "masters", "moments")
COLUMN_KINDS = {
    "parameters": ("parameters", "shards"),
    "gradients": ("gradients",),
    "optimizer states": ("masters", "moments", "counters"),
    "activations and logits": ("activations", "logits"),
    "temporaries and buffers": ("temporaries", "buffers", "reserve", "tokens"),
}
"""The same for columns."""
Sizes = dict[str, dict[str, float]]
"""Bar or column -> its parts -> GiB."""
RANKS, MICRO_BATCHES = 4, 8
"""Of the pipelines that are drawn."""
MESH = Layout(pp=2, dp_shard=2, cp=2, tp=2)


def gib(kinds: Mapping[str, float], parts: Sequence[str]) -> float:
    """Of these kinds together, to the thousandth: finer than anything that is drawn."""
    return round(sum(kinds.get(part, 0.0) for part in parts) / GIB, 3)


def usable() -> float:
    """GiB that an H100 with 80 GB leaves a program."""
    return round(usable_bytes(one_device(Layout(), "llama-3.2-1b", 1024, 1)) / GIB, 3)


def one_device(layout: Layout, model: str, sequence: int, batch: int) -> Plan:
    """A plan for one H100."""
    recipe = Recipe(sequence=sequence, global_batch=batch, precision="bf16")
    return Plan(model=presets.model(model), recipe=recipe, layout=layout, cluster=presets.cluster("h100x1", 1))


def bars(table: str, shown: Sequence[str], rows: int = 9) -> dict[str, Any]:
    """GiB by kind of the first rows of a table of the pages, and what one device can give."""
    asked, columns = TABLES[table], {}
    for name, row in islice(asked.rows.items(), rows):
        kinds: dict[str, float] = {}
        for memory_row in json.loads(run(asked.words(row))[1])["memory"]:
            kinds[memory_row["kind"]] = kinds.get(memory_row["kind"], 0.0) + memory_row["bytes"]
        columns[name.strip("`")] = {kind: gib(kinds, BAR_KINDS[kind]) for kind in shown}
    return {"usable": usable(), "bars": columns}


def mesh() -> dict[str, Any]:
    """Place of every rank along each axis."""
    return {str(rank): place_of(MESH, rank) for rank in range(MESH.world)}


def sequence() -> dict[str, Any]:
    """A 1B and an 8B model on one GPU, one sequence, for several lengths, without and with recomputation.

    Without CUDA graphs, whose buffers would hide how memory grows.
    """
    panels: dict[str, Sizes] = {}
    for model in ("llama-3.2-1b", "llama-3.1-8b"):
        for recompute in ("none", "all-but-attention", "full"):
            panel: Sizes = {}
            for length in (1024, 2048, 4096, 8192, 16384):
                plan = one_device(Layout(micro_batch=1, recompute=recompute, cuda_graphs="off"), model, length, 1)
                kinds = max(predict(plan).memory, key=lambda rank: rank.total_bytes).kinds
                panel[f"{length:,}"] = {name: gib(kinds, parts) for name, parts in COLUMN_KINDS.items()}
            panels[f"{model}, recompute={recompute}"] = panel
    return {"usable": usable(), "panels": panels}


def steps() -> dict[str, Any]:
    """GiB that a program holds over its first two steps: as torch's own parts do it, and by this engine's dry run."""
    passes = dry_run(one_device(Layout(micro_batch=1), "llama-3.2-1b", 2048, 2), processes=1).ranks[0].passes
    last = [instant.name for instant in passes].index("evaluate")
    return {
        "names": [instant.name for instant in passes[:last]],
        "sizes": [
            {name: gib(instant.kinds, parts) for name, parts in COLUMN_KINDS.items()} for instant in passes[:last]
        ],
        "torch": torch_steps("llama-3.2-1b", 2048),
    }


SLICES = 8
"""Columns of a phase of a step."""


def torch_steps(name: str, length: int) -> dict[str, Any]:
    """Two steps of transformers' Llama with torch.optim.AdamW in fp32, on tensors without values.

    A kind follows from the phase that made a tensor, and from whether the tensor outlives it.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = presets.model(name)
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, tie_word_embeddings=True,
    )  # fmt: skip
    with compat.fake_tensors(), FakeWatch(512) as watch:
        watch.enter("build")
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters())
        for number in (1, 2):
            watch.enter(f"forward {number}")
            tokens = torch.zeros(1, length, dtype=torch.long)
            loss = model(input_ids=tokens, labels=tokens).loss
            watch.enter(f"backward {number}")
            loss.backward()
            watch.enter(f"update {number}")
            optimizer.step()
            watch.enter(f"clear {number}")
            optimizer.zero_grad()
    made = {
        "build": "parameters", "forward": "activations and logits", "backward": "gradients",
        "update": "optimizer states",
    }  # fmt: skip
    for record in watch.records:
        lasts = record.death_phase != record.phase
        phase = watch.phases[record.phase].name.partition(" ")[0]
        record.kind = made.get(phase, "") if lasts else ""
    starts = [phase.start for phase in watch.phases]
    # (phase, slice of it) -> bytes by kind when the total was highest
    columns: dict[tuple[int, int], dict[str, int]] = {}
    held, phase = dict.fromkeys(COLUMN_KINDS, 0), 0
    for event, (record, change) in enumerate(watch.events()):
        while phase + 1 < len(starts) and starts[phase + 1] <= event:
            phase += 1
        held[watch.records[record].kind or "temporaries and buffers"] += change
        length_of_phase = ([*starts, watch.now][phase + 1]) - starts[phase]
        column = phase, (event - starts[phase]) * SLICES // length_of_phase
        if column not in columns or sum(held.values()) > sum(columns[column].values()):
            columns[column] = dict(held)
    names = [watch.phases[phase].name for phase, _ in columns]
    first = names.index("forward 1")
    sizes = [{kind: round(size / GIB, 2) for kind, size in column.items()} for column in columns.values()]
    return {"names": names[first:], "sizes": sizes[first:]}


def bandwidth() -> dict[str, Any]:
    """GB/s of three collectives over nodes: published mean with its band, and planned."""
    return {
        name: {str(nodes): [*band, round(bandwidths.planned(name, nodes), 1)] for nodes, band in rows.items()}
        for name, rows in bandwidths.PUBLISHED.items()
    }


def context() -> dict[str, Any]:
    """Who holds each of 32 positions, and each rank's share of the attention, by split."""
    length, splits = 32, {}
    for split in ("chunks", "zigzag"):
        owner = [0] * length
        for rank in range(RANKS):
            for position in places(length, RANKS, rank, split).positions(0, length // RANKS).tolist():
                owner[position] = rank
        work = [sum(query + 1 for query in range(length) if owner[query] == rank) for rank in range(RANKS)]
        splits[split] = {"owner": owner, "share": [round(pairs / sum(work), 3) for pairs in work]}
    return splits


def played(name: str) -> Replay:
    """A schedule with F = B = W, in forward passes of a rank."""
    unit = 1.0 / KINDS[name].stages
    return replay(schedule(name, RANKS, MICRO_BATCHES, KINDS[name].stages), Times(unit, unit, unit))


def pipeline() -> dict[str, Any]:
    """Bubble of each schedule, and the micro-batches that each rank keeps at most."""
    schedules = {}
    for name, kind in KINDS.items():
        timing = played(name)
        in_flight = [round(count / kind.stages, 2) for count in timing.in_flight]
        schedules[name] = {"bubble": f"{100 * timing.bubble:.1f} %", "kept": in_flight}
    return schedules


class Lines:
    """Two lines of time, computation and communication: each does one thing after the other."""

    def __init__(self) -> None:
        self.free = {"computes": 0.0, "sends": 0.0}
        self.rows: dict[str, list[tuple[str, float, float]]] = {"computes": [], "sends": []}

    def run(self, line: str, ready: float, length: float, label: str) -> float:
        """Begin when it is ready and the line is free; its end."""
        start = max(self.free[line], ready)
        self.free[line] = start + length
        self.rows[line].append((label, round(1e3 * start, 2), round(1e3 * length, 2)))
        return self.free[line]


def zero_stage(zero: int) -> Lines:
    """One micro-batch of four layers on 32 GPUs: seconds of the planner."""
    model, layers = replace(presets.model("llama-3.1-8b"), layers=4), range(4)
    split = {"dp_shard": 32} if zero else {"dp_replicate": 32}
    layout = Layout(**split, zero=zero, micro_batch=1)  # type: ignore[arg-type]  # whole numbers, all of them
    recipe = Recipe(sequence=8192, global_batch=32, precision="bf16")
    estimator = build_estimator(Plan(model=model, recipe=recipe, layout=layout, cluster=presets.cluster("h100x8", 4)))
    block = estimator.costs.parts(layout)[1].dense
    sent = sharing(model, layout, StageContents((0,), False, False), estimator.links, 2.0, 4.0, False)
    lines, ends = Lines(), [0.0]
    for layer in layers:  # a layer's gather waits until the layer two before it has let go of its own
        ready = lines.run("sends", ends[max(0, layer - 1)], sent.gather_s, "gather") if zero == 3 else 0.0
        ends.append(lines.run("computes", ready, block.forward_s, "forward"))
    ready = lines.run("sends", ends[-2], sent.gather_s, "gather") if zero == 3 else 0.0
    for layer in reversed(layers):
        ends.append(lines.run("computes", ready, block.backward_s, "backward"))
        if zero == 3 and layer:  # the next layer's gather goes before this one's sum
            ready = lines.run("sends", ends[-2], sent.gather_s, "gather")
        lines.run("sends", ends[-1], sent.reduce_s, "reduce")
    if zero in (1, 2):
        lines.run("sends", max(lines.free.values()), len(layers) * sent.gather_s, "gather")
    return lines


def overlap() -> dict[str, Any]:
    """Milliseconds of computation and communication of one micro-batch: label, start, length; by ZeRO stage."""
    return {f"ZeRO-{zero}": zero_stage(zero).rows for zero in range(4)}


FIGURES: dict[str, Callable[[], dict[str, Any]]] = {
    "mesh": mesh,
    "one_gpu": lambda: bars("models", STATES, rows=3),
    "memory": lambda: bars("sequence", tuple(BAR_KINDS)),
    "data": lambda: bars("zero", tuple(BAR_KINDS)),
    "context": context,
    "pipeline": pipeline,
    "sequence": sequence,
    "steps": steps,
    "overlap": overlap,
    "bandwidth": bandwidth,
}
"""Picture -> its numbers. The other pictures have none."""


def figures(name: str) -> Any:
    """The numbers of a picture as JSON holds them; empty where it has none."""
    return json.loads(json.dumps(FIGURES.get(name, dict)()))


def recorded() -> dict[str, Any]:
    """The numbers that the pictures of the repository were drawn from."""
    return dict(json.loads(KEPT.read_text(encoding="utf-8")))


def keep(numbers: dict[str, Any]) -> None:
    """Write them, one picture in a line."""
    lines = [f"{json.dumps(name)}: {json.dumps(numbers[name])}" for name in sorted(numbers)]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def alike(left: Any, right: Any, most: float = 1e-3) -> bool:
    """The same words, and numbers within a part of `most`: less than a reader sees."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(alike(left[key], right[key], most) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(alike(a, b, most) for a, b in zip(left, right, strict=True))
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right) <= max(0.02, most * abs(right))
    return bool(left == right)

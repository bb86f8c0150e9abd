"""Draws the pictures of the Learn pages from the code they explain.

    python -m docs.pictures.draw [NAME ...]

Memory by sequence and the line of time are the planner's figures, the first steps a dry run's.
Positions of ranks come from parallel/mesh.py, positions of tokens from parallel/context.py, pipelines from
spec/schedule.py played by spec/replay.py, bytes from the planner: a picture cannot say what the code does not do.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from docs.generate import run
from docs.tables import TABLES
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.parallel.context import places
from meshwright.planner.step.predict import estimator, predict
from meshwright.planner.step.prediction import usable_bytes
from meshwright.planner.time.collectives import StageContents, sharing
from meshwright.spec import Plan, Recipe, presets
from meshwright.spec.layout import Layout
from meshwright.spec.places import place_of
from meshwright.spec.replay import Times, replay
from meshwright.spec.schedule import schedule

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BLUE, ORANGE, GREEN, PURPLE, GREY, PALE = "#1f5fa8", "#d9661f", "#3a8f5c", "#7a4fa3", "#555555", "#e6e6e6"
RANKS = (BLUE, ORANGE, GREEN, PURPLE)
SIZE = 9
"""Font size of labels."""
LIMIT_GIB = 78.4
"""What a program can use of an H100 with 80 GB (planner)."""


def figure(width: float, height: float) -> Figure:
    """A white sheet without pyplot's global state."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def plain(axes: Axes, title: str) -> None:
    """No frame, no ticks, a title on the left."""
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=SIZE + 1, fontweight="bold")


def box(
    axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str, *, filled: bool = True
) -> None:
    """A rounded box with its label."""
    face = color if filled else "white"
    style = "round,pad=0,rounding_size=0.06"
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=face, edgecolor=color, linewidth=1.2)
    )
    axes.text(
        x + width / 2,
        y + height / 2,
        text,
        ha="center",
        va="center",
        fontsize=SIZE - 1,
        color="white" if filled else "black",
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = GREY) -> None:
    """From one point to another."""
    axes.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
    )


def mesh() -> Figure:
    """Sixteen ranks in two nodes: who is neighbour along which axis."""
    layout = Layout(pp=2, dp_shard=2, cp=2, tp=2)
    sheet = figure(8, 3.1)
    axes = sheet.subplots()
    for rank in range(layout.world):
        at = place_of(layout, rank)
        x, y = at["cp"] * 2.3 + at["tp"] + at["pp"] * 5.2, 1 - at["dp_shard"]
        box(axes, x, y * 1.25, 0.9, 0.9, f"rank {rank}", RANKS[2 * at["cp"] + at["tp"]])
    for pp in range(2):
        left = pp * 5.2
        axes.text(left + 2.1, 2.5, f"pp {pp}: one node of 8", ha="center", fontsize=SIZE, fontweight="bold")
        for cp in range(2):
            axes.text(left + cp * 2.3 + 0.95, -0.25, f"cp {cp}: tp 0, tp 1", ha="center", va="top", fontsize=SIZE)
    for dp in range(2):
        axes.text(-0.15, 1.7 - dp * 1.25, f"dp_shard {dp}", ha="right", va="center", fontsize=SIZE)
    axes.set_xlim(-1.6, 9.6)
    axes.set_ylim(-0.7, 2.8)
    plain(axes, "pp=2, dp_shard=2, cp=2, tp=2: numbers run along tp first, so tp groups stay inside a node")
    return sheet


KINDS = {
    "parameters": ("parameters", "shards"),
    "gradients": ("gradients",),
    "masters": ("masters",),
    "moments": ("moments", "counters"),
    "activations": ("activations",),
    "logits": ("logits",),
    "temporaries": ("buffers", "temporaries", "reserve"),
}
"""Bars of memory -> the planner's kinds in each; every bar has the colour that its kind has in the explorer."""
LABELS = {
    "parameters": "weights",
    "masters": "fp32 master weights",
    "moments": "AdamW moments",
    "temporaries": "buffers and other",
}
STATES = ("parameters", "gradients", "masters", "moments")


def colours() -> dict[str, str]:
    """Light colours of the explorer's page, by name."""
    sheet = (ROOT / "src" / "meshwright" / "planner" / "explorer" / "colours.css").read_text(encoding="utf-8")
    return dict(reversed(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", sheet)))


def bars(table: str, shown: Sequence[str], title: str, label: str, rows: int = 9) -> Figure:
    """The first rows of a table of the pages as stacked bars of GiB, beside what one device can give."""
    asked, colour = TABLES[table], colours()
    named = dict(islice(asked.rows.items(), rows))
    sheet = figure(8.6, 0.8 + 0.55 * len(named))
    axes = sheet.subplots()
    most = 0.0
    for place, row in enumerate(named.values()):
        found = json.loads(run(asked.words(row))[1])
        left = 0.0
        for kind in shown:
            width = sum(one["bytes"] for one in found["memory"] if one["kind"] in KINDS[kind]) / 2**30
            text = LABELS.get(kind, kind) if not place else None
            axes.barh(-place, width, left=left, color=colour[kind], label=text, height=0.62)
            left += width
        axes.text(
            left, -place, f" {left:,.0f} GiB" if left >= 99.95 else f" {left:.1f} GiB", va="center", fontsize=SIZE
        )
        most = max(most, left)
    axes.set_yticks([-place for place in range(len(named))], [name.strip("`") for name in named])
    axes.axvline(LIMIT_GIB, color="#b3261e", linewidth=1.2, linestyle="--")
    axes.annotate(
        "usable of 80 GB",
        (LIMIT_GIB, 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, -2),
        textcoords="offset points",
        fontsize=SIZE - 1,
        color="#b3261e",
        va="top",
    )
    axes.set_xlim(0, most * 1.14)
    axes.set_ylim(0.4 - len(named), 0.75)
    axes.set_xlabel(label, fontsize=SIZE)
    axes.tick_params(labelsize=SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=SIZE - 1, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_title(title, loc="left", fontsize=SIZE + 1, fontweight="bold")
    return sheet


def one_gpu() -> Figure:
    """States of four models on one GPU."""
    return bars("models", STATES, "Weights, gradients and optimizer: 18 bytes per parameter", "GiB, predicted", rows=3)


def memory() -> Figure:
    """An 8B model by sequence length, ZeRO-3 on 32 GPUs."""
    title = "Llama-3.1-8B, ZeRO-3 on 32 GPUs: memory per GPU by sequence length"
    return bars("sequence", tuple(KINDS), title, "GiB per GPU at the peak, predicted")


def data() -> Figure:
    """An 8B model by ZeRO stage on 32 GPUs."""
    return bars("zero", tuple(KINDS), "Llama-3.1-8B on 32 GPUs: memory per GPU", "GiB per GPU at the peak, predicted")


def tensor() -> Figure:
    """A block on two tensor-parallel ranks, without and with sequence parallelism."""
    sheet = figure(9, 4.6)
    rows = sheet.subplots(2, 1)
    for axes, sp in zip(rows, (False, True), strict=True):
        into, out = ("g\nall-gather", "g*\nreduce-\nscatter") if sp else ("f\nnothing", "f*\nall-reduce")
        names = (
            "norm",
            into,
            "q k v\nby heads",
            "attention",
            "o\nby rows",
            out,
            "norm",
            into,
            "gate, up\nby columns",
            "down\nby rows",
            out,
        )
        for rank in range(2):
            y = 1.15 * (1 - rank)
            for place, name in enumerate(names):
                moves = name in (into, out)
                local = place in (0, 6)
                color = ORANGE if moves else (GREEN if local and sp else GREY if local else BLUE)
                box(axes, place * 1.1, y, 0.95, 0.85, name, color, filled=not moves)
                if place:
                    arrow(axes, (place * 1.1 - 0.15, y + 0.42), (place * 1.1, y + 0.42))
            axes.text(-0.2, y + 0.42, f"tp {rank}", ha="right", va="center", fontsize=SIZE)
        axes.set_xlim(-0.8, 12.1)
        axes.set_ylim(-0.1, 2.1)
        held = "half of the positions (green)" if sp else "all positions (grey)"
        backward = (
            "backward: g is a reduce-scatter, g* an all-gather" if sp else "backward: f is an all-reduce, f* nothing"
        )
        plain(axes, f"sp={'true' if sp else 'false'}: norms and residuals have {held}; {backward}")
    return sheet


def context() -> Figure:
    """Which keys each rank's queries see, plain and zig-zag, and how much work that is."""
    ranks, sequence = 4, 32
    sheet = figure(9, 3.6)
    panels = sheet.subplots(1, 3, width_ratios=(1, 1, 1.15))
    work = {}
    for axes, zigzag in zip(panels[:2], (False, True), strict=True):
        owner = np.zeros(sequence, dtype=int)
        for rank in range(ranks):
            owner[
                places(sequence, ranks, rank, "zigzag" if zigzag else "chunks").positions(0, sequence // ranks).numpy()
            ] = rank
        work[zigzag] = [sum(int(q) + 1 for q in np.flatnonzero(owner == rank)) for rank in range(ranks)]
        for query in range(sequence):
            axes.add_patch(Rectangle((0, query), query + 1, 1, facecolor=RANKS[owner[query]], linewidth=0))
        axes.set_xlim(0, sequence)
        axes.set_ylim(sequence, 0)
        axes.set_aspect("equal")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel("keys", fontsize=SIZE)
        axes.set_ylabel("queries", fontsize=SIZE)
        title = "zig-zag" if zigzag else "plain"
        axes.set_title(f"{title}: who computes which row", loc="left", fontsize=SIZE + 1, fontweight="bold")
    axes = panels[2]
    whole = sum(work[True])
    for zigzag in (False, True):
        for rank in range(ranks):
            axes.barh(
                rank + (0.2 if zigzag else -0.2),
                work[zigzag][rank] / whole,
                height=0.36,
                color=RANKS[rank],
                alpha=1.0 if zigzag else 0.45,
            )
    axes.axvline(1 / ranks, color=GREY, linewidth=1, linestyle=":")
    axes.set_yticks(range(ranks), [f"cp {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    axes.tick_params(labelsize=SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("share of the attention (pale: plain; full: zig-zag)", fontsize=SIZE)
    axes.set_title("the slowest rank sets the pace", loc="left", fontsize=SIZE + 1, fontweight="bold")
    return sheet


def pipeline() -> Figure:
    """Every schedule for four ranks and eight micro-batches, played with F = B = W."""
    ranks, micro_batches = 4, 8
    names = ("afab", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
    sheet = figure(10, 9.6)
    panels = sheet.subplots(len(names), 1, sharex=True)
    colour = colours()
    colors = {"F": colour["forward"], "B": colour["input"], "BW": colour["both"], "W": colour["weight"]}
    for axes, name in zip(panels, names, strict=True):
        virtual = 2 if name in ("interleaved", "zb-v", "dualpipe-v") else 1
        unit = 1.0 / virtual
        lists = schedule(name, ranks, micro_batches, virtual)
        played = replay(lists, Times(forward_s=unit, input_s=unit, weight_s=unit))
        for rank, spans in enumerate(played.spans):
            for span in spans:
                deep = span.action.stage >= ranks
                width = span.end_s - span.start_s
                axes.add_patch(
                    Rectangle(
                        (span.start_s, ranks - 1 - rank),
                        width,
                        0.92,
                        facecolor=colors[span.action.kind],
                        alpha=0.55 if deep else 1.0,
                        edgecolor="white",
                        linewidth=0.6,
                    )
                )
                axes.text(
                    span.start_s + width / 2,
                    ranks - 0.55 - rank,
                    str(span.action.micro_batch),
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color=colour["forward-ink"],
                )
        axes.set_xlim(0, 3 * (micro_batches + ranks - 1) + 0.5)
        axes.set_ylim(0, ranks)
        axes.set_yticks([ranks - 0.55 - rank for rank in range(ranks)], [f"pp {rank}" for rank in range(ranks)])
        axes.tick_params(labelsize=SIZE - 1)
        axes.spines[["top", "right"]].set_visible(False)
        alive = ", ".join(f"{count * unit:g}" for count in played.in_flight)
        axes.set_title(
            f"{name}: bubble {100 * played.bubble:.1f} % of the work; micro-batches kept at most: {alive}",
            loc="left",
            fontsize=SIZE + 1,
            fontweight="bold",
        )
    panels[-1].set_xlabel(
        "time in forward passes of a rank. Blue: F. Pale green: B. Yellow: W. Dark green: BW. Paler: the second stage",
        fontsize=SIZE,
    )
    return sheet


def expert() -> Figure:
    """Tokens of two ranks on their way to four experts and back."""
    sheet = figure(9, 3.4)
    axes = sheet.subplots()
    routed = {0: (0, 2, 1, 3), 1: (2, 2, 0, 3)}
    for rank in range(2):
        y = 1.9 * (1 - rank)
        axes.text(-0.2, y + 0.65, f"ep {rank}", ha="right", va="center", fontsize=SIZE)
        for token, chosen in enumerate(routed[rank]):
            box(axes, token * 0.62, y + 0.4, 0.52, 0.5, f"t{4 * rank + token}", RANKS[chosen])
        arrived = sorted(
            (e, source, token) for source in routed for token, e in enumerate(routed[source]) if e // 2 == rank
        )
        for place, (chosen, source, token) in enumerate(arrived):
            box(axes, 5.0 + place * 0.62, y + 0.4, 0.52, 0.5, f"t{4 * source + token}", RANKS[chosen])
        for local in range(2):
            chosen = 2 * rank + local
            mine = sum(e == chosen for e, _, _ in arrived)
            before = sum(e < chosen for e, _, _ in arrived)
            if mine:
                label = f"expert {chosen}: {mine} row" + "s" * (mine > 1)
                axes.text(
                    5.0 + (before + mine / 2) * 0.62 - 0.05,
                    y + 0.28 - 0.22 * local,
                    label,
                    ha="center",
                    va="top",
                    fontsize=SIZE - 1,
                    color=RANKS[chosen],
                )
        for token in range(4):
            box(axes, 10.6 + token * 0.62, y + 0.4, 0.52, 0.5, f"t{4 * rank + token}", RANKS[routed[rank][token]])
    for left, title in ((2.6, "all-to-all\nof counts, then rows"), (8.55, "all-to-all back,\nweighted sum")):
        for one, other in ((0, 0), (0, 1), (1, 0), (1, 1)):
            arrow(axes, (left, 1.9 * (1 - one) + 0.65), (left + 1.9, 1.9 * (1 - other) + 0.65))
        axes.text(left + 0.95, 3.0, title, ha="center", va="bottom", fontsize=SIZE)
    axes.set_xlim(-0.8, 13.3)
    axes.set_ylim(-0.2, 3.7)
    plain(axes, "ep=2, four experts, top-1: no token is dropped, an expert may see none")
    return sheet


STACKED = (
    ("parameters", "#16386e", ("parameters", "shards")),
    ("gradients", "#7a5200", ("gradients",)),
    ("optimizer states", "#e3a92b", ("masters", "moments", "counters")),
    ("activations and logits", "#00a087", ("activations", "logits")),
    ("temporaries and buffers", "#e8702a", ("temporaries", "buffers", "reserve", "tokens")),
)
"""Of memory: name, colour as on the pages, the planner's kinds."""
GIB = 2**30


def stacked(axes: Axes, bars: list[tuple[str, dict[str, float]]], limit: float, *, legend: bool) -> None:
    """A column for each of (name, bytes by kind), a line at `limit` bytes."""
    for place, (_, kinds) in enumerate(bars):
        low = 0.0
        for name, color, parts in STACKED:
            size = sum(kinds.get(part, 0.0) for part in parts) / GIB
            axes.bar(place, size, bottom=low, color=color, width=0.7, edgecolor="white", linewidth=0.5,
                     label=name if place == 0 else None)  # fmt: skip
            low += size
        axes.text(place, low * 1.01, f"{low:.0f}", ha="center", va="bottom", fontsize=SIZE)
    if limit:
        axes.axhline(limit / GIB, color="#b3261e", linewidth=1)
        axes.text(-0.45, limit / GIB, f" {limit / GIB:.1f} GiB usable", color="#b3261e", va="bottom", fontsize=SIZE,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
    axes.set_xticks(range(len(bars)), [name for name, _ in bars], fontsize=SIZE)
    axes.set_ylabel("GiB at the peak", fontsize=SIZE)
    axes.tick_params(labelsize=SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(fontsize=SIZE - 1, frameon=False, loc="upper left")


def planned(model: str, layout: Layout, nodes: int, sequence: int, batch: int) -> tuple[dict[str, float], float]:
    """Bytes by kind of the fullest rank, and what an H100 leaves a program."""
    plan = Plan(
        model=presets.model(model),
        recipe=Recipe(sequence=sequence, global_batch=batch, precision="bf16"),
        layout=layout,
        cluster=presets.cluster("h100x8", nodes) if nodes else presets.cluster("h100x1", 1),
    )
    return max(predict(plan).memory, key=lambda one: one.total_bytes).kinds, usable_bytes(plan)


def sequence() -> Figure:
    """A 1B and an 8B model on one GPU, one sequence, for several lengths, without and with recomputation. Where the
    optimizer's step is the peak, there is no activation in it."""
    sheet = figure(10, 6.4)
    rows = sheet.subplots(2, 3, sharey="row")
    for row, model in zip(rows, ("llama-3.2-1b", "llama-3.1-8b"), strict=True):
        for axes, recompute in zip(row, ("none", "selective", "full"), strict=True):
            layout = Layout(micro_batch=1, recompute=recompute)  # type: ignore[arg-type]
            lengths = (1024, 2048, 4096, 8192, 16384)
            found = [planned(model, layout, 0, length, 1) for length in lengths]
            stacked(axes, [(f"{n:,}", kinds) for n, (kinds, _) in zip(lengths, found, strict=True)], found[0][1],
                    legend=axes is rows[0][0])  # fmt: skip
            axes.set_title(f"{model}, recompute={recompute}", loc="left", fontsize=SIZE + 1, fontweight="bold")
            axes.set_xlabel("tokens of the sequence", fontsize=SIZE)
    return sheet


def steps() -> Figure:
    """What a program holds over its first four steps, pass by pass. This engine makes the optimizer's states
    before the first step, so that all steps are equal; others make them in the first optimizer step."""
    plan = Plan(
        model=presets.model("llama-3.2-1b"),
        recipe=Recipe(sequence=2048, global_batch=2, precision="bf16"),
        layout=Layout(micro_batch=1),
        cluster=presets.cluster("h100x1", 1),
    )
    passes = dry_run(plan, processes=1).ranks[0].passes
    names = [one.name for one in passes]
    first, second, last = (names.index(name) for name in ("step 1", "step 2", "evaluate"))
    again = passes[second:last]
    shown = [*passes[:last], *again, *again]
    sheet = figure(9, 3.8)
    axes = sheet.subplots()
    low = [0.0] * len(shown)
    for name, color, parts in STACKED:
        sizes = [sum(one.kinds.get(part, 0) for part in parts) / GIB for one in shown]
        axes.bar(range(len(shown)), sizes, bottom=low, color=color, width=1.0, label=name)
        low = [a + b for a, b in zip(low, sizes, strict=True)]
    starts = [first, *(second + n * len(again) for n in range(3))]
    axes.set_xticks([start - 0.5 for start in starts], [f"step {n + 1}" for n in range(4)], fontsize=SIZE, ha="left")
    axes.set_ylabel("GiB, each part when it held most", fontsize=SIZE)
    axes.set_ylim(0, 1.3 * max(low))
    axes.tick_params(labelsize=SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=SIZE - 1, frameon=False, ncols=3, loc="upper left")
    axes.set_title(
        "llama-3.2-1b, 2 micro-batches of 2,048 tokens per step: dry run of 2 steps, the second repeated",
        loc="left", fontsize=SIZE + 1, fontweight="bold",
    )  # fmt: skip
    return sheet


class Lines:
    """Two lines of time, computation and communication: each does one thing after the other."""

    def __init__(self) -> None:
        self.free = {"computes": 0.0, "sends": 0.0}
        self.rows: tuple[list[tuple[float, float, str]], list[tuple[float, float, str]]] = ([], [])

    def run(self, what: str, ready: float, length: float, label: str) -> float:
        """Begin when it is ready and the line is free; its end."""
        start = max(self.free[what], ready)
        self.free[what] = start + length
        self.rows[what == "sends"].append((start, length, label))
        return self.free[what]


def overlap() -> Figure:
    """Computation and communication of one micro-batch on one line of time, by ZeRO stage: seconds of the planner."""
    model, layers = replace(presets.model("llama-3.1-8b"), layers=4), range(4)
    recipe = Recipe(sequence=8192, global_batch=32, precision="bf16")
    sheet = figure(9, 4.6)
    panels, widest = sheet.subplots(4, 1, sharex=True), 0.0
    for zero, axes in enumerate(panels):
        split = {"dp_shard": 32} if zero else {"dp_replicate": 32}
        layout = Layout(**split, zero=zero, micro_batch=1)  # type: ignore[arg-type]
        plan = Plan(model=model, recipe=recipe, layout=layout, cluster=presets.cluster("h100x8", 4))
        of = estimator(plan)
        block = of.parts(layout)[1].dense
        sent = sharing(model, layout, StageContents((0,), False, False), of.links, 2.0, 4.0, False)
        lines = Lines()
        run, free, rows = lines.run, lines.free, lines.rows
        ends = [0.0]
        for layer in layers:  # a layer's gather waits until the layer two before it has let go of its own
            ready = run("sends", ends[max(0, layer - 1)], sent.gather_s, "gather") if zero == 3 else 0.0
            ends.append(run("computes", ready, block.forward_s, "forward"))
        ready = run("sends", ends[-2], sent.gather_s, "gather") if zero == 3 else 0.0
        for layer in reversed(layers):
            ends.append(run("computes", ready, block.backward_s, "backward"))
            if zero == 3 and layer:  # the next layer's gather goes before this one's sum
                ready = run("sends", ends[-2], sent.gather_s, "gather")
            run("sends", ends[-1], sent.reduce_s, "reduce")
        if zero in (1, 2):
            run("sends", max(free.values()), len(layers) * sent.gather_s, "gather")
        colors = {"forward": BLUE, "backward": ORANGE, "gather": PURPLE, "reduce": GREEN}
        for place, row in enumerate(rows):
            for start, length, label in row:
                axes.add_patch(Rectangle((start * 1e3, 1 - place), length * 1e3, 0.86, facecolor=colors[label],
                                         edgecolor="white", linewidth=0.8))  # fmt: skip
        axes.set_ylim(-0.1, 2)
        widest = max(widest, 1e3 * max(free.values()))
        axes.set_yticks([1.43, 0.43], ["computes", "sends"], fontsize=SIZE - 1)
        axes.tick_params(labelsize=SIZE - 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(f"ZeRO-{zero}: {1e3 * max(free.values()):.0f} ms", loc="left", fontsize=SIZE, fontweight="bold")
    panels[-1].set_xlim(0, widest)
    panels[-1].set_xlabel(
        "ms; four layers of llama-3.1-8b on 32 H100, one sequence of 8,192. Blue forward, orange backward, "
        "green sum of gradients, purple gather of parameters",
        fontsize=SIZE - 1,
    )
    return sheet


PICTURES = {
    "mesh": mesh, "one_gpu": one_gpu, "memory": memory, "data": data, "tensor": tensor, "context": context,
    "pipeline": pipeline, "expert": expert, "sequence": sequence, "steps": steps, "overlap": overlap,
}  # fmt: skip


def main() -> None:
    """Draw all, or those named."""
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]().savefig(HERE / f"{name}.png", dpi=130)


if __name__ == "__main__":
    main()

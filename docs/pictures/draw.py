"""Draws the pictures of the Learn pages, from the numbers of `figures.py`.

    python -m docs.pictures.draw               # those whose numbers have changed
    python -m docs.pictures.draw NAME ...      # these, in any case
    python -m docs.pictures.draw --check       # name the stale ones; exit code 1 if there are any

What a picture was drawn from is kept in figures.json, and its digest in the picture itself.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image

from docs.pictures.figures import MICRO_BATCHES, RANKS, alike, figures, keep, played, recorded

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BLUE, ORANGE, GREEN, PURPLE, GREY, PALE = "#1f5fa8", "#d9661f", "#3a8f5c", "#7a4fa3", "#555555", "#e6e6e6"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
"""Of ranks and experts."""
SIZE = 9
"""Font size of labels."""
DIGEST = "Figures"
"""The entry of a picture that has the digest of its numbers."""


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


def mesh(places: dict[str, dict[str, int]]) -> Figure:
    """Sixteen ranks in two nodes: who is neighbour along which axis."""
    sheet = figure(8, 3.1)
    axes = sheet.subplots()
    for rank, at in places.items():
        x, y = at["cp"] * 2.3 + at["tp"] + at["pp"] * 5.2, 1 - at["dp_shard"]
        box(axes, x, y * 1.25, 0.9, 0.9, f"rank {rank}", COLOURS[2 * at["cp"] + at["tp"]])
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


LABELS = {
    "parameters": "weights",
    "masters": "fp32 master weights",
    "moments": "AdamW moments",
    "temporaries": "buffers and other",
}


def colours() -> dict[str, str]:
    """Light colours of the explorer's page, by name."""
    sheet = (ROOT / "src" / "meshwright" / "planner" / "explorer" / "colours.css").read_text(encoding="utf-8")
    return dict(reversed(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", sheet)))


def bars(numbers: dict[str, Any], title: str, label: str) -> Figure:
    """Stacked bars of GiB, beside what one device can give."""
    named, colour = numbers["bars"], colours()
    sheet = figure(8.6, 0.8 + 0.55 * len(named))
    axes = sheet.subplots()
    most = 0.0
    for row, sizes in enumerate(named.values()):
        left = 0.0
        for kind, width in sizes.items():
            text = LABELS.get(kind, kind) if not row else None
            axes.barh(-row, width, left=left, color=colour[kind], label=text, height=0.62)
            left += width
        axes.text(left, -row, f" {left:,.0f} GiB" if left >= 99.95 else f" {left:.1f} GiB", va="center", fontsize=SIZE)
        most = max(most, left)
    axes.set_yticks([-row for row in range(len(named))], list(named))
    axes.axvline(numbers["usable"], color="#b3261e", linewidth=1.2, linestyle="--")
    axes.annotate(
        "usable of 80 GB",
        (numbers["usable"], 1),
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


def one_gpu(numbers: dict[str, Any]) -> Figure:
    """States of three models on one GPU."""
    return bars(numbers, "Weights, gradients and optimizer: 18 bytes per parameter", "GiB, predicted")


def memory(numbers: dict[str, Any]) -> Figure:
    """An 8B model by sequence length, ZeRO-3 on 32 GPUs."""
    title = "Llama-3.1-8B, ZeRO-3 on 32 GPUs: memory per GPU by sequence length"
    return bars(numbers, title, "GiB per GPU at the peak, predicted")


def data(numbers: dict[str, Any]) -> Figure:
    """An 8B model by ZeRO stage on 32 GPUs."""
    return bars(numbers, "Llama-3.1-8B on 32 GPUs: memory per GPU", "GiB per GPU at the peak, predicted")


def tensor(_: object) -> Figure:
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
            for position, name in enumerate(names):
                moves = name in (into, out)
                local = position in (0, 6)
                color = ORANGE if moves else (GREEN if local and sp else GREY if local else BLUE)
                box(axes, position * 1.1, y, 0.95, 0.85, name, color, filled=not moves)
                if position:
                    arrow(axes, (position * 1.1 - 0.15, y + 0.42), (position * 1.1, y + 0.42))
            axes.text(-0.2, y + 0.42, f"tp {rank}", ha="right", va="center", fontsize=SIZE)
        axes.set_xlim(-0.8, 12.1)
        axes.set_ylim(-0.1, 2.1)
        held = "half of the positions (green)" if sp else "all positions (grey)"
        backward = (
            "backward: g is a reduce-scatter, g* an all-gather" if sp else "backward: f is an all-reduce, f* nothing"
        )
        plain(axes, f"sp={'true' if sp else 'false'}: norms and residuals have {held}; {backward}")
    return sheet


def context(numbers: dict[str, Any]) -> Figure:
    """Which keys each rank's queries see, plain and zig-zag, and how much work that is."""
    sheet = figure(9, 3.6)
    panels = sheet.subplots(1, 3, width_ratios=(1, 1, 1.15))
    named = {"plain": numbers["chunks"], "zig-zag": numbers["zigzag"]}
    for axes, (title, work) in zip(panels[:2], named.items(), strict=True):
        length = len(work["owner"])
        for query, rank in enumerate(work["owner"]):
            axes.add_patch(Rectangle((0, query), query + 1, 1, facecolor=COLOURS[rank], linewidth=0))
        axes.set_xlim(0, length)
        axes.set_ylim(length, 0)
        axes.set_aspect("equal")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel("keys", fontsize=SIZE)
        axes.set_ylabel("queries", fontsize=SIZE)
        axes.set_title(f"{title}: who computes which row", loc="left", fontsize=SIZE + 1, fontweight="bold")
    axes = panels[2]
    for shift, alpha, work in zip((-0.2, 0.2), (0.45, 1.0), named.values(), strict=True):
        for rank, share in enumerate(work["share"]):
            axes.barh(rank + shift, share, height=0.36, color=COLOURS[rank], alpha=alpha)
    axes.axvline(1 / RANKS, color=GREY, linewidth=1, linestyle=":")
    axes.set_yticks(range(RANKS), [f"cp {rank}" for rank in range(RANKS)])
    axes.invert_yaxis()
    axes.tick_params(labelsize=SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("share of the attention (pale: plain; full: zig-zag)", fontsize=SIZE)
    axes.set_title("the slowest rank sets the pace", loc="left", fontsize=SIZE + 1, fontweight="bold")
    return sheet


def pipeline(numbers: dict[str, Any]) -> Figure:
    """Every schedule for four ranks and eight micro-batches, played with F = B = W."""
    sheet = figure(10, 1.6 * len(numbers))
    panels = sheet.subplots(len(numbers), 1, sharex=True)
    colour = colours()
    colors = {"F": colour["forward"], "B": colour["input"], "BW": colour["both"], "W": colour["weight"]}
    for axes, (name, schedule) in zip(panels, numbers.items(), strict=True):
        for rank, spans in enumerate(played(name).spans):
            for span in spans:
                deep = span.action.stage >= RANKS
                width = span.end_s - span.start_s
                axes.add_patch(
                    Rectangle(
                        (span.start_s, RANKS - 1 - rank),
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
                    RANKS - 0.55 - rank,
                    str(span.action.micro_batch),
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color=colour["forward-ink"],
                )
        axes.set_xlim(0, 3 * (MICRO_BATCHES + RANKS - 1) + 0.5)
        axes.set_ylim(0, RANKS)
        axes.set_yticks([RANKS - 0.55 - rank for rank in range(RANKS)], [f"pp {rank}" for rank in range(RANKS)])
        axes.tick_params(labelsize=SIZE - 1)
        axes.spines[["top", "right"]].set_visible(False)
        alive = ", ".join(f"{count:g}" for count in schedule["kept"])
        axes.set_title(
            f"{name}: bubble {schedule['bubble']} of the work; micro-batches kept at most: {alive}",
            loc="left",
            fontsize=SIZE + 1,
            fontweight="bold",
        )
    panels[-1].set_xlabel(
        "time in forward passes of a rank. Blue: F. Pale green: B. Yellow: W. Dark green: BW. Paler: the second stage",
        fontsize=SIZE,
    )
    return sheet


def expert(_: object) -> Figure:
    """Tokens of two ranks on their way to four experts and back."""
    sheet = figure(9, 3.4)
    axes = sheet.subplots()
    routed = {0: (0, 2, 1, 3), 1: (2, 2, 0, 3)}
    for rank in range(2):
        y = 1.9 * (1 - rank)
        axes.text(-0.2, y + 0.65, f"ep {rank}", ha="right", va="center", fontsize=SIZE)
        for token, chosen in enumerate(routed[rank]):
            box(axes, token * 0.62, y + 0.4, 0.52, 0.5, f"t{4 * rank + token}", COLOURS[chosen])
        arrived = sorted(
            (e, source, token) for source in routed for token, e in enumerate(routed[source]) if e // 2 == rank
        )
        for position, (chosen, source, token) in enumerate(arrived):
            box(axes, 5.0 + position * 0.62, y + 0.4, 0.52, 0.5, f"t{4 * source + token}", COLOURS[chosen])
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
                    color=COLOURS[chosen],
                )
        for token in range(4):
            box(axes, 10.6 + token * 0.62, y + 0.4, 0.52, 0.5, f"t{4 * rank + token}", COLOURS[routed[rank][token]])
    for left, title in ((2.6, "all-to-all\nof counts, then rows"), (8.55, "all-to-all back,\nweighted sum")):
        for source_rank, target_rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
            arrow(axes, (left, 1.9 * (1 - source_rank) + 0.65), (left + 1.9, 1.9 * (1 - target_rank) + 0.65))
        axes.text(left + 0.95, 3.0, title, ha="center", va="bottom", fontsize=SIZE)
    axes.set_xlim(-0.8, 13.3)
    axes.set_ylim(-0.2, 3.7)
    plain(axes, "ep=2, four experts, top-1: no token is dropped, an expert may see none")
    return sheet


COLUMN_COLOURS = ("#16386e", "#7a5200", "#e3a92b", "#00a087", "#e8702a")
"""Of the parts of a column, as on the pages."""


def stacked(axes: Axes, columns: dict[str, dict[str, float]], limit: float, *, legend: bool) -> None:
    """A column of GiB for each name, a line at `limit`."""
    for position, sizes in enumerate(columns.values()):
        low = 0.0
        for color, (name, size) in zip(COLUMN_COLOURS, sizes.items(), strict=True):
            axes.bar(position, size, bottom=low, color=color, width=0.7, edgecolor="white", linewidth=0.5,
                     label=name if position == 0 else None)  # fmt: skip
            low += size
        axes.text(position, low * 1.01, f"{low:.0f}", ha="center", va="bottom", fontsize=SIZE)
    axes.axhline(limit, color="#b3261e", linewidth=1)
    axes.text(-0.45, limit, f" {limit:.1f} GiB usable", color="#b3261e", va="bottom", fontsize=SIZE,
              bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
    axes.set_xticks(range(len(columns)), list(columns), fontsize=SIZE)
    axes.set_ylabel("GiB at the peak", fontsize=SIZE)
    axes.tick_params(labelsize=SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(fontsize=SIZE - 1, frameon=False, loc="upper left", bbox_to_anchor=(0, 0.9))


def sequence(numbers: dict[str, Any]) -> Figure:
    """A 1B and an 8B model on one GPU, one sequence, for several lengths, without and with recomputation. Where the
    optimizer's step is the peak, there is no activation in it."""
    sheet = figure(10, 6.4)
    panels = sheet.subplots(2, 3, sharey="row")
    for position, (axes, (name, columns)) in enumerate(zip(panels.flat, numbers["panels"].items(), strict=True)):
        stacked(axes, columns, numbers["usable"], legend=not position)
        # On one line the longest runs into the next panel's.
        axes.set_title(name.replace(", ", ",\n"), loc="left", fontsize=SIZE + 1, fontweight="bold")
        axes.set_xlabel("tokens of the sequence", fontsize=SIZE)
    return sheet


def steps(numbers: dict[str, Any]) -> Figure:
    """Memory over the first four steps. torch.optim makes its states in the first optimizer step, so that this step
    peaks lower than the others; this engine makes them before, so that all steps are equal."""
    sheet = figure(9, 6.4)
    theirs, ours = sheet.subplots(2, 1, sharey=True)
    title = "llama-3.2-1b, a sequence of 2,048 tokens: transformers with torch.optim.AdamW, fp32"
    columns(theirs, numbers["torch"], "forward 1", "forward 2", title)
    title = "llama-3.2-1b, two sequences as two micro-batches: this engine, bf16 beside fp32"
    columns(ours, numbers, "step 1", "step 2", title)
    theirs.legend(fontsize=SIZE - 1, frameon=False, ncols=3, loc="upper left")
    return sheet


def columns(axes: Axes, numbers: dict[str, Any], first: str, second: str, title: str) -> None:
    """Stack kinds of memory over four steps: the first, and the second three times."""
    start, turn = numbers["names"].index(first), numbers["names"].index(second)
    again = numbers["sizes"][turn:]
    shown = [*numbers["sizes"], *again, *again]
    low = [0.0] * len(shown)
    for name, color in zip(shown[0], COLUMN_COLOURS, strict=True):
        sizes = [instant[name] for instant in shown]
        axes.bar(range(len(shown)), sizes, bottom=low, color=color, width=1.0, label=name)
        low = [a + b for a, b in zip(low, sizes, strict=True)]
    starts = [start, *(turn + n * len(again) for n in range(3))]
    axes.set_xticks([start - 0.5 for start in starts], [f"step {n + 1}" for n in range(4)], fontsize=SIZE, ha="left")
    axes.set_ylabel("GiB, each part when it held most", fontsize=SIZE)
    axes.set_ylim(0, 1.35 * max(low))
    axes.tick_params(labelsize=SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=SIZE + 1, fontweight="bold")


def overlap(numbers: dict[str, dict[str, Any]]) -> Figure:
    """Computation and communication of one micro-batch on one line of time, by ZeRO stage."""
    sheet, widest = figure(9, 4.6), 0.0
    panels = sheet.subplots(len(numbers), 1, sharex=True)
    colors = {"forward": BLUE, "backward": ORANGE, "gather": PURPLE, "reduce": GREEN}
    for axes, (name, lines) in zip(panels, numbers.items(), strict=True):
        for position, row in enumerate(lines.values()):
            for label, start, length in row:
                axes.add_patch(Rectangle((start, 1 - position), length, 0.86, facecolor=colors[label],
                                         edgecolor="white", linewidth=0.8))  # fmt: skip
        end = max(start + length for row in lines.values() for _, start, length in row)
        widest = max(widest, end)
        axes.set_ylim(-0.1, 2)
        axes.set_yticks([1.43, 0.43], list(lines), fontsize=SIZE - 1)
        axes.tick_params(labelsize=SIZE - 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(f"{name}: {end:.0f} ms", loc="left", fontsize=SIZE, fontweight="bold")
    panels[-1].set_xlim(0, widest)
    panels[-1].set_xlabel(
        "ms; four layers of llama-3.1-8b on 32 H100, one sequence of 8,192. Blue forward, orange backward, "
        "green sum of gradients, purple gather of parameters",
        fontsize=SIZE - 1,
    )
    return sheet


def bandwidth(numbers: dict[str, dict[str, list[float]]]) -> Figure:
    """Bus bandwidth over nodes: points and bands as published, lines as planned."""
    sheet = figure(9, 3.6)
    panels = sheet.subplots(1, len(numbers), sharey=True)
    for axes, (name, rows) in zip(panels, numbers.items(), strict=True):
        nodes = list(map(int, rows))
        mean, low, high, expected = zip(*rows.values(), strict=True)
        axes.fill_between(nodes, low, high, color=PALE, label="published, 90 % of runs")
        axes.plot(nodes, mean, "o-", color=BLUE, label="published, mean")
        axes.plot(nodes, expected, "--", color=ORANGE, label="planned for a quiet network")
        axes.set_xscale("log", base=2)
        axes.set_xticks(nodes, list(map(str, nodes)))
        axes.set_title(name, loc="left", fontsize=SIZE + 1, fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("nodes of 8 H100", fontsize=SIZE)
        axes.tick_params(labelsize=SIZE - 1)
    panels[0].set_ylabel("GB/s, messages of 256 MiB", fontsize=SIZE)
    panels[0].set_ylim(0)
    panels[-1].legend(fontsize=SIZE - 1, frameon=False)
    return sheet


PICTURES: dict[str, Callable[[Any], Figure]] = {
    "mesh": mesh, "one_gpu": one_gpu, "memory": memory, "data": data, "tensor": tensor, "context": context,
    "pipeline": pipeline, "expert": expert, "sequence": sequence, "steps": steps, "overlap": overlap,
    "bandwidth": bandwidth,
}  # fmt: skip


def digest(numbers: object) -> str:
    """Of a picture's numbers."""
    return sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()


def stale(name: str, recorded: dict[str, Any], numbers: object) -> bool:
    """Whether a picture was drawn from other numbers than those found, or than those kept for it."""
    if not alike(recorded.get(name), numbers):
        return True
    with Image.open(HERE / f"{name}.png") as picture:
        return picture.info.get(DIGEST) != digest(recorded[name])


def draw(name: str, numbers: Any) -> None:
    """Write a picture, with the digest of its numbers."""
    PICTURES[name](numbers).savefig(HERE / f"{name}.png", dpi=130, metadata={DIGEST: digest(numbers)})


def main(words: Sequence[str] | None = None) -> int:
    """Draw those that are named, or that are stale; or only name these."""
    reader = argparse.ArgumentParser(prog="python -m docs.pictures.draw", description="Draw the Learn pages' pictures.")
    reader.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PICTURES)}; none: the stale ones")
    reader.add_argument("--check", action="store_true", help="only name the stale ones; exit code 1 if there are any")
    options = reader.parse_args(words)
    before = recorded()
    numbers = {name: figures(name) for name in options.names or PICTURES}
    old = [name for name in numbers if name in options.names or stale(name, before, numbers[name])]
    print("\n".join(old) or "every picture is up to date")
    if options.check:
        return int(bool(old))
    for name in old:
        draw(name, numbers[name])
        print(f"drawn: {HERE / name}.png, from the numbers of {HERE / 'figures.json'}")
        before[name] = numbers[name]
    keep(before)
    return 0


if __name__ == "__main__":
    sys.exit(main())

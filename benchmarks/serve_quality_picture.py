"""The picture of benchmarks.serve_quality: tokens per second over bits per byte."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.store.durable import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GREY, PALE = "#222222", "#777777", "#e4e4e4"
COLOURS = {"MHA": "#1f5fa8", "GQA": "#d9661f", "MLA": "#7a4fa3", "MoE": "#3a8f5c"}
PEER = "#777777"
APART = 1.1
"""Ratio of the heights of two labels, at least."""


def draw(figures: Mapping[str, Any], path: Path) -> None:
    """A PNG at `path`, whole or not at all, of what serve_quality.measure gives. Better is up and to the right."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    figure = Figure(figsize=(11.5, 5.0), layout="constrained", facecolor="white")
    first, second = figure.subplots(1, 2, sharey=True)
    rows = figures["rows"]
    _implementations(first, [row for row in rows if row["group"] == "implementation"])
    _designs(second, [row for row in rows if row["group"] == "design"])
    for axes in (first, second):
        axes.set_yscale("log")
        axes.grid(color=PALE, linewidth=0.6, which="both")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.3, y=0.12)
        axes.yaxis.set_major_locator(FixedLocator([200, 300, 500, 1000, 2000, 3000, 5000, 10000]))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.invert_xaxis()
        axes.set_xlabel("held-out bits per byte (better to the right)")
    first.set_ylabel("tokens per second, 16 requests, one thread")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=140)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, picture.getvalue())


def _implementations(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    """One model; a label behind each point, as far apart as its letters are high."""
    design = rows[0]["design"]
    ours = [row for row in rows if row["what"].startswith("paged")]
    others = [row for row in rows if row not in ours]
    axes.set_title(f"One model ({design}) by implementation", loc="left")
    for points, colour, marker in ((others, PEER, "s"), (ours, COLOURS[design], "o")):
        x, y = ([row[name] for row in points] for name in ("bits_per_byte", "tokens_per_second"))
        axes.plot(x, y, linestyle="", marker=marker, color=colour, markersize=8)
        last = 0.0
        for row in sorted(points, key=lambda row: row["tokens_per_second"]):
            left = row in ours
            last = max(row["tokens_per_second"], last * APART)
            axes.annotate(
                row["what"], (row["bits_per_byte"], last), (-9 if left else 9, 0), textcoords="offset points",
                ha="right" if left else "left", va="center", fontsize=9, color=INK,
            )  # fmt: skip


def _designs(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    """A line from transformers up to the engine for each design."""
    axes.set_title("Four designs of equal compute", loc="left")
    for design in dict.fromkeys(row["design"] for row in rows):
        design_rows = {row["what"]: row for row in rows if row["design"] == design}
        points = [(row["bits_per_byte"], row["tokens_per_second"]) for row in design_rows.values()]
        axes.plot(*zip(*points, strict=True), color=COLOURS[design], linewidth=1.2, alpha=0.5)
        for what, row in design_rows.items():
            x, y = row["bits_per_byte"], row["tokens_per_second"]
            filled = COLOURS[design] if what == "engine" else "white"
            axes.plot(
                x, y, linestyle="", marker="o" if what == "engine" else "s", color=COLOURS[design],
                markerfacecolor=filled, markersize=9,
            )  # fmt: skip
            if what == "engine":
                axes.annotate(
                    design, (x, y), (0, 9), textcoords="offset points", ha="center", fontsize=10, color=INK
                )  # fmt: skip
    axes.text(
        0.02,
        0.02,
        "filled: engine    hollow: transformers, one by one",
        transform=axes.transAxes,
        fontsize=9,
        color=GREY,
    )

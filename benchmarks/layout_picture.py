"""The picture of benchmarks.layout_curves: all curves on top of each other, and how far each is from one device."""

import io
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.store.durable import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GREY, PALE = "#222222", "#777777", "#e4e4e4"
FAMILIES: Mapping[str, tuple[str, str]] = {
    "one device": ("#222222", "one device, 8 micro-batches"),
    "4 replicas": ("#1f5fa8", "replicas, ZeRO-1, 2, 3"),
    "ZeRO-": ("#1f5fa8", "replicas, ZeRO-1, 2, 3"),
    "TP 2": ("#d9661f", "tensor, sequence parallel"),
    "CP 2": ("#2a8a57", "context parallel"),
    "PP 2": ("#8a4fae", "pipelines"),
}
"""How a layout's name begins (the longest that fits) -> colour, and the line of the legend."""
PRODUCTS = ("#b0892b", "products of up to five axes")
EXPERTS = ("#c2354f", "expert parallel and products")
LEGS = ("#1f5fa8", "#d9661f", "#222222", "#2a8a57")
FLOOR = 4e-8
"""Where a difference of zero is drawn: below one bit of a loss."""
BAR = 1e-4
FP32_BIT = 2.0**-23


def draw(result: Mapping[str, Any], path: Path) -> None:
    """A PNG at `path`, whole or not at all, of what layout_curves.measure gives."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 5.2), layout="constrained", facecolor="white")
    curves, apart = figure.subplots(1, 2, width_ratios=(1, 1.12))
    _draw_curves(curves, result)
    _draw_differences(apart, result)
    for axes in (curves, apart):
        _plain(axes, result["steps"])
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=140)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, picture.getvalue())


def _family(name: str) -> tuple[str, str]:
    """Colour and legend of a layout."""
    if name.startswith("experts"):
        return EXPERTS
    if " x " in name.replace(" x 2", "", 1) or (name.count(",") and "ZeRO" in name) or name.startswith("2 replicas"):
        return PRODUCTS
    fitting = [begin for begin in FAMILIES if name.startswith(begin)]
    return FAMILIES[max(fitting, key=len)]


def _steps(values: list[float]) -> range:
    return range(1, len(values) + 1)


def _draw_curves(axes: "Axes", result: Mapping[str, Any]) -> None:
    """One device as a broad band, on it every layout as dashes between those of the others; the run that changes its
    layout lies lower."""
    right = result["one_device"]["dense"]
    lower = 0.44 * (max(right) - min(right))
    dense = {name: row["losses"] for name, row in result["layouts"].items() if row["shape"] == "dense"}
    axes.plot(_steps(right), right, color=PALE, linewidth=9, solid_capstyle="round", zorder=1)
    for number, (name, losses) in enumerate(dense.items()):
        dashes = (3 * number, (3, 3 * (len(dense) - 1))) if len(dense) > 1 else "-"
        axes.plot(_steps(losses), losses, color=_family(name)[0], linewidth=2, linestyle=dashes, zorder=2)
    at = len(right) // 4
    axes.annotate(
        f"one device: the grey band\n{len(dense)} layouts: a dash of each in turn", (at, right[at - 1]), (18, 26),
        textcoords="offset points", color=INK, fontsize=9, va="bottom",
        arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.8, "shrinkB": 6},
    )  # fmt: skip
    _draw_journey(axes, result, lower)
    axes.set_title(f"{result['steps']} steps on real text", loc="left")
    axes.set_ylabel("loss (nats per token)")


def _draw_journey(axes: "Axes", result: Mapping[str, Any], lower: float) -> None:
    """Below the others: the band again, and on it each part of the resumed run in a colour of its own."""
    right, row = result["one_device"]["dense"], result["resumed"]["dense"]
    band = [loss - lower for loss in right]
    axes.plot(_steps(band), band, color=PALE, linewidth=9, solid_capstyle="round", zorder=1)
    for (begin, until, layout), color in zip(_legs(row), LEGS, strict=False):
        steps = range(max(1, begin), until + 1)
        shown = [row["losses"][step - 1] - lower for step in steps]
        axes.plot(steps, shown, color=color, linewidth=2, zorder=3)
        if begin:
            axes.plot(begin, shown[0], "o", color="white", markeredgecolor=INK, markersize=6, zorder=4)
        middle = (max(1, begin) + until) // 2 if begin else until * 4 // 5
        axes.annotate(
            layout, (middle, row["losses"][middle - 1] - lower), (0, -13) if begin else (-12, -4),
            textcoords="offset points", color=color, fontsize=8.5, ha="center" if begin else "right", va="top",
        )  # fmt: skip
    at = round(0.52 * len(right))
    axes.annotate(
        "one run, resumed under other\nlayouts, on the same band\n(drawn lower)", (at, right[at] - lower / 2),
        color=INK, fontsize=9, va="center",
    )  # fmt: skip
    axes.set_ylim(min(band) - 0.13 * (max(right) - min(band)), None)


def _legs(row: Mapping[str, Any]) -> Iterator[tuple[int, int, str]]:
    """(step it begins after, step it ends with, layout) of each part of a resumed run."""
    begin = 0
    for leg in row["legs"]:
        yield begin, leg["until"], leg["layout"]
        begin = leg["until"]


def _draw_differences(axes: "Axes", result: Mapping[str, Any]) -> None:
    """|loss - loss of one device| / loss of one device, the largest so far, on a log axis."""
    known: set[str] = set()
    for name, row in result["layouts"].items():
        color, label = _family(name)
        shown = list(accumulate((max(value, FLOOR) for value in row["differences"]), max))
        width = 2.4 if name.startswith("one device") else 1.2
        new = None if label in known else label
        axes.plot(_steps(shown), shown, color=color, linewidth=width, alpha=0.8, drawstyle="steps-post", label=new)
        known.add(label)
    for kind, style in (("dense", "--"), ("experts", ":")):
        row = result["resumed"][kind]
        shown = list(accumulate((max(value, FLOOR) for value in row["differences"]), max))
        axes.plot(
            _steps(shown), shown, linestyle=style, linewidth=1.6, color=INK, drawstyle="steps-post", zorder=5,
            label=f"resumed, {kind} (o: other layout)",
        )  # fmt: skip
        ends = [begin for begin, _, _ in _legs(row) if begin]
        axes.plot(
            ends, [shown[end - 1] for end in ends], "o", color="white", markeredgecolor=INK, markersize=5, zorder=6
        )
    axes.set_yscale("log")
    axes.set_ylim(FLOOR, 3e-4)
    for value, height, text in ((BAR, 1.12 * BAR, "the bar: 1e-4"), (FP32_BIT, 1.2 * FLOOR, "dotted: one bit of fp32")):
        axes.axhline(value, color=GREY, linewidth=0.9, linestyle=(0, (1, 2)), zorder=0)
        axes.text(0.99, height, text, transform=axes.get_yaxis_transform(), ha="right", fontsize=8.5, color=INK)
    axes.set_title("Largest difference from one device so far, relative", loc="left")
    axes.legend(frameon=False, fontsize=8.5, ncols=2, loc="upper left", bbox_to_anchor=(0.0, 0.86), columnspacing=1.0)


def _plain(axes: "Axes", steps: int) -> None:
    axes.set_facecolor("white")
    axes.grid(color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.title.set_fontsize(12)
    axes.set_xlim(0.4, steps + 0.6)
    axes.set_xlabel("step")

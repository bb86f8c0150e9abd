"""The picture of benchmarks.layout_curves: all curves on top of each other, and how far each is from one device."""

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.train.durable import replace_file

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
FLOOR = 2e-8
"""Where a difference of zero is drawn: below one bit of a loss."""
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
    """One device as a broad band, every layout a thin line on it; the runs that change their layout lie lower."""
    right = result["one_device"]
    lower = 0.12 * (max(right["dense"]) - min(right["dense"]))
    axes.plot(_steps(right["dense"]), right["dense"], color=PALE, linewidth=9, solid_capstyle="round", zorder=1)
    count = 0
    for name, row in result["layouts"].items():
        if row["shape"] == "dense":
            axes.plot(_steps(row["losses"]), row["losses"], color=_family(name)[0], linewidth=0.8, alpha=0.8, zorder=2)
            count += 1
    first = right["dense"][0]
    axes.annotate(
        f"{count} layouts on one device's\ncurve (the grey band)", (4, right["dense"][3]), (10, first - 0.3),
        color=INK, fontsize=9, va="top", arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.8},
    )  # fmt: skip
    _draw_journey(axes, result, 3 * lower)
    axes.set_title("40 steps under every layout" if result["steps"] == 40 else "Under every layout", loc="left")
    axes.set_ylabel("loss (nats per token)")


def _draw_journey(axes: "Axes", result: Mapping[str, Any], lower: float) -> None:
    """Below the others: the band again, and on it each part of the resumed run in a colour of its own."""
    right, row = result["one_device"]["dense"], result["resumed"]["dense"]
    axes.plot(
        _steps(right), [loss - lower for loss in right], color=PALE, linewidth=9, solid_capstyle="round", zorder=1
    )
    for (begin, until, layout), color in zip(_legs(row), LEGS, strict=False):
        steps = range(max(1, begin), until + 1)
        shown = [row["losses"][step - 1] - lower for step in steps]
        axes.plot(steps, shown, color=color, linewidth=1.8, zorder=3)
        if begin:
            axes.plot(begin, shown[0], "o", color="white", markeredgecolor=INK, markersize=6, zorder=4)
        middle = (max(1, begin) + until) // 2
        axes.annotate(
            layout, (middle, row["losses"][middle - 1] - lower), (0, -13), textcoords="offset points",
            color=color, fontsize=8.5, ha="center", va="top",
        )  # fmt: skip
    axes.annotate(
        "one run, resumed under\nother layouts (drawn lower)", (1, row["losses"][0] - lower), (6, -3),
        textcoords="offset points", color=INK, fontsize=9, va="top",
    )  # fmt: skip
    axes.set_ylim(min(right) - lower - 0.16 * (max(right) - min(right) + lower), None)


def _legs(row: Mapping[str, Any]) -> Iterator[tuple[int, int, str]]:
    """(step it begins after, step it ends with, layout) of each part of a resumed run."""
    begin = 0
    for leg in row["legs"]:
        yield begin, leg["until"], leg["layout"]
        begin = leg["until"]


def _draw_differences(axes: "Axes", result: Mapping[str, Any]) -> None:
    """|loss - loss of one device| / loss of one device, on a log axis."""
    known: set[str] = set()
    for name, row in result["layouts"].items():
        color, label = _family(name)
        shown = [max(value, FLOOR) for value in row["differences"]]
        dense = not name.startswith("one device")
        axes.plot(
            _steps(shown), shown, color=color, linewidth=1.0 if dense else 1.8, alpha=0.75,
            label=None if label in known else label,
        )  # fmt: skip
        known.add(label)
    for kind, style in (("dense", "o"), ("experts", "s")):
        row = result["resumed"][kind]
        shown = [max(value, FLOOR) for value in row["differences"]]
        axes.plot(
            _steps(shown), shown, linestyle="none", marker=style, markersize=3.2, color="white", markeredgecolor=INK,
            markeredgewidth=0.8, label=f"resumed under other layouts, {kind}", zorder=5,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(FLOOR / 1.5, 3e-4)
    for value, text in ((1e-4, "the bar: 1e-4"), (FP32_BIT, "one bit of an fp32 number")):
        axes.axhline(value, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
        axes.text(0.995, value * 1.12, text, transform=axes.get_yaxis_transform(), ha="right", fontsize=8.5, color=INK)
    axes.set_title("Difference from one device, relative", loc="left")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 0.69), columnspacing=1.2)


def _plain(axes: "Axes", steps: int) -> None:
    axes.set_facecolor("white")
    axes.grid(color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.title.set_fontsize(12)
    axes.set_xlim(0.4, steps + 0.6)
    axes.set_xlabel("step")

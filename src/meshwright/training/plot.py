"""Picture that every run leaves behind: smoothed loss over tokens, held-out points, and the rate in a strip below."""

import io
import math
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.spec.units import count
from meshwright.store.durable import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, PALE = "#1f5fa8", "#d9661f", "#555555", "#d9d9d9"
POINTS = 4000
"""Points of a curve at most. Longer runs are thinned, keeping the last; a picture has fewer pixels."""
Row = dict[str, Any]


class Smoothed:
    """Debiased exponential mean: a plain mean at first, later over about the last 1 / (1 - keep) values.

    Non-finite values are left out, so one bad step does not blank the curve.
    """

    def __init__(self, keep: float = 0.9) -> None:
        self.keep = keep
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> float:
        """Add one value and return the mean. nan before the first number."""
        if math.isfinite(value):
            self._sum = self.keep * self._sum + (1 - self.keep) * value
            self._weight = self.keep * self._weight + (1 - self.keep)
        return self.value

    @property
    def value(self) -> float:
        """The current mean."""
        return self._sum / self._weight if self._weight else math.nan


def loss_plot(metrics: Sequence[Row], path: Path, *, title: str = "", bytes_per_token: float | None = None) -> None:
    """Draw the rows of a metrics.jsonl as a PNG at `path`. The file appears complete or not at all.

    Rows of kind `eval` are evaluations on held-out text, those without a kind are steps. `bytes_per_token` adds an axis
    in bits per byte. Without a finite loss the axes stay empty. Raises OSError when the folder cannot be written.
    """
    steps = [row for row in metrics if "kind" not in row and math.isfinite(row["loss"])]
    held_out = [row for row in metrics if row.get("kind") == "eval" and math.isfinite(row["loss"])]
    figure = draw_figure(steps, held_out, title, bytes_per_token)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, picture.getvalue())


def draw_figure(steps: Sequence[Row], held_out: Sequence[Row], title: str, bytes_per_token: float | None) -> "Figure":
    """Return the figure of a run."""
    # pyplot would pick a window system and keep every figure alive.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained", facecolor="white")
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    _draw_loss(loss, steps, held_out)
    _draw_rate(rate, _thin(steps))
    loss.set_title(title, loc="left", fontsize=12, fontweight="bold")
    if bytes_per_token:
        bits = loss.secondary_yaxis(
            "right",
            functions=(lambda nats: nats / bytes_per_token / math.log(2), lambda b: b * bytes_per_token * math.log(2)),
        )
        bits.set_ylabel("bits per byte", color=GREY)
        bits.tick_params(colors=GREY, labelsize=9)
        bits.spines["right"].set_visible(False)
    for axes in (loss, rate):
        _style(axes)
    return figure


def _draw_loss(axes: "Axes", steps: Sequence[Row], held_out: Sequence[Row]) -> None:
    rows = _thin(steps)
    tokens = [row["tokens"] for row in rows]
    # A line through one point is invisible.
    dot = "o" if len(rows) < 3 else ""
    axes.plot(
        tokens, [row["loss"] for row in rows], color=BLUE, alpha=0.25, linewidth=0.8, label="each step", marker=dot
    )
    axes.plot(tokens, _smooth(steps, rows), color=BLUE, linewidth=1.8, label="smoothed")
    points = _place_held_out(steps, held_out)
    cross_entropies = [row["cross_entropy"] for row in rows if points and "cross_entropy" in row]  # a distilled run's
    if cross_entropies and len(cross_entropies) == len(rows):
        axes.plot(tokens, cross_entropies, color=ORANGE, alpha=0.4, linewidth=0.8, label="cross entropy of each step")
    if points:
        axes.plot(
            *zip(*points, strict=True),
            color=ORANGE,
            linestyle="none",
            marker="o",
            markersize=6,
            markeredgecolor="white",
            label=f"held out{', cross entropy' if cross_entropies else ''}: {points[-1][1]:.3f} at the end",
        )
    low, high = _limits([row["loss"] for row in steps] + [loss for _, loss in points] + cross_entropies)
    axes.set_ylim(low, max([high, *(1.05 * loss for _, loss in points if cross_entropies)]))
    axes.set_ylabel("loss (nats per token)")
    if steps:
        axes.legend(frameon=False, loc="upper right")


def _place_held_out(steps: Sequence[Row], held_out: Sequence[Row]) -> list[tuple[int, float]]:
    """Return (training tokens, loss) of each evaluation, placed at the last logged step up to it.

    The `tokens` of an evaluation row are those it scored, not those of the training.
    """
    numbers = [row["step"] for row in steps]
    positions = [(bisect_right(numbers, row["step"]), row["loss"]) for row in held_out]
    return [(steps[position - 1]["tokens"], loss) for position, loss in positions if position]


def _draw_rate(axes: "Axes", steps: Sequence[Row]) -> None:
    axes.plot([row["tokens"] for row in steps], [row["lr"] for row in steps], color=GREY, linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
    axes.set_ylabel("learning rate", fontsize=9)
    axes.set_xlabel("training tokens")
    axes.xaxis.set_major_formatter(lambda tokens, _: count(tokens))


def _style(axes: "Axes") -> None:
    axes.set_facecolor("white")
    axes.grid(color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.margins(x=0.01)


def _thin(rows: Sequence[Row]) -> list[Row]:
    stride = max(1, math.ceil(len(rows) / POINTS))
    # The last row stays, since the picture says where the run ended.
    return [*rows[:-1:stride], rows[-1]] if rows else []


def _smooth(steps: Sequence[Row], rows: Sequence[Row]) -> list[float]:
    """Smooth from both ends over all steps, so that the curve does not lag, and return the values of the shown rows."""
    losses = [row["loss"] for row in steps]
    # A window of a fiftieth of the run, so that long runs are not a band of noise.
    keep = max(0.9, 1 - 50 / max(1, len(steps)))
    forward, backward = Smoothed(keep), Smoothed(keep)
    ahead = [forward.add(loss) for loss in losses]
    back = [backward.add(loss) for loss in reversed(losses)][::-1]
    shown = {id(row) for row in rows}
    return [(a + b) / 2 for row, a, b in zip(steps, ahead, back, strict=True) if id(row) in shown]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    # The tall start is cut at the 98th percentile: what matters is below it.
    ordered = sorted(values)
    low, high = ordered[0], ordered[round(0.98 * (len(ordered) - 1))]
    room = 0.06 * (high - low) or 0.05 * abs(low) or 1.0
    return low - room, high + room

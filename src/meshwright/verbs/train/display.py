"""Two ways to watch a run: a live panel with a loss curve on a terminal, one line per step everywhere else."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Self

from rich import box, panel
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress
from rich.text import Text

from meshwright.interface.terminal import fields
from meshwright.spec.errors import printable
from meshwright.spec.units import MIB, count, duration, text_size
from meshwright.training.plot import Smoothed
from meshwright.training.step.watch import EvalMetrics, RunInfo, StepMetrics, Summary, Watcher

REFRESH_S = 0.2
"""Shortest time between two drawings, in seconds."""
SHARE = 0.01
"""Share of the run's time that drawing may take. Slow drawings happen less often."""
CURVE = "cyan"
POINT = "yellow"
AXIS = 8
"""Characters left of the curve, for a number and the axis."""
CELL = 26
"""Narrowest column of figures, in characters."""
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of the dots of a braille cell, by column and then by row from the top (Unicode block U+2800)."""
BLANK = 0x2800


class Display(Watcher):
    """A watcher that may hold the terminal within `with`. This one shows nothing, for programs that read the summary.

    `rows`: rows of samples are encoded, not bytes of text.
    """

    def __init__(self, *, rows: bool = False) -> None:
        self.rows = rows

    def encoding(self, done: int, whole: int) -> None:
        """Report progress while rows, or bytes of text, become tokens before the run starts."""

    def close(self) -> None:
        """Release the terminal."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def choose(console: Console, *, rows: bool = False) -> Display:
    """Return the live panel if the terminal can move its cursor and show its dots, else lines. `rows`: see Display."""
    if console.quiet:
        return Display(rows=rows)
    if console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf"):
        return LiveDisplay(console, rows=rows)
    return PlainDisplay(console.file, rows=rows)


class PlainDisplay(Display):
    """One line of fixed columns per logged step, for files, pipes and batch systems."""

    def __init__(self, log: IO[str], *, rows: bool = False) -> None:
        super().__init__(rows=rows)
        self._log = log
        self._smooth = Smoothed()
        self._tenth = -1
        self._encoded = ""

    def close(self) -> None:
        """Flush the log."""
        self._log.flush()

    def encoding(self, done: int, whole: int) -> None:
        """Print a line every tenth of the way, or only the last for less than a mebibyte of text."""
        shown = f"rows: {done:,} of {whole:,}" if self.rows else f"text: {text_size(done)} of {text_size(whole)}"
        tenth = 10 * done // max(1, whole)
        is_short = not self.rows and whole < MIB
        if tenth != self._tenth and shown != self._encoded and (done >= whole or not is_short):
            self._tenth, self._encoded = tenth, shown
            self._print(f"encoding {shown}")

    def started(self, info: RunInfo) -> None:
        """Print model, data and the batch equation."""
        self._pace = fields.Pace(info.steps)
        self._digits = len(str(info.steps))
        self._info = info
        for loss in info.losses:
            self._smooth.add(loss)
        for label, sentence in fields.opening(info):
            self._print(f"{label:<6} {sentence}")

    def stepped(self, metrics: StepMetrics) -> None:
        """Print the step in fixed columns."""
        self._smooth.add(metrics.loss)
        self._pace.seen(metrics.step, time.monotonic())
        parts = [
            f"{self._step(metrics.step)} {100 * metrics.step / self._info.steps:5.1f}%",
            f"loss {metrics.loss:7.4f} smoothed {self._smooth.value:7.4f}",
            f"grad {metrics.grad_norm:8.3f}",
            f"lr {metrics.lr:.2e}",
            f"{count(metrics.tokens_per_second):>5} tokens/s",
            fields.utilization(metrics),
            f"mem {fields.memory(metrics, self._info.device)}",
            f"data wait {fields.data_wait(metrics):>5}",
            *(f"{label} {value}" for label, value in fields.extras(metrics, self._info)),
            f"eta {duration(self._pace.left_s(metrics.step_seconds))}",
        ]
        self._print(" | ".join(part for part in parts if part))

    def evaluated(self, metrics: EvalMetrics) -> None:
        """Print the evaluation."""
        self._print(f"{self._step(metrics.step)} held out: {fields.held_out(metrics)} ({duration(metrics.seconds)})")

    def saved(self, step: int, path: Path) -> None:
        """Print the path of the checkpoint."""
        self._print(f"{self._step(step)} saved {path}")

    def stored(self, step: int, url: str) -> None:
        """Print the URL of the store."""
        self._print(f"{self._step(step)} stored in {printable(url)}")

    def ended(self, summary: Summary) -> None:
        """Print the last line."""
        self._print(fields.closing(summary, self._info.device))

    def _step(self, step: int) -> str:
        return f"step {step:>{self._digits}}/{self._info.steps}"

    def _print(self, line: str) -> None:
        print(line, file=self._log, flush=True)


class LiveDisplay(Display):
    """A panel that stays on the screen: loss curve, figures, time left. The run's own thread draws it between steps."""

    def __init__(self, console: Console, *, rows: bool = False) -> None:
        super().__init__(rows=rows)
        self._console = console
        self._live: Live | None = None
        self._bar: Progress | None = None
        self._next_s = 0.0

    def close(self) -> None:
        """Leave the last drawing, with the cursor below it."""
        for widget in (self._live, self._bar):
            if widget is not None:
                widget.stop()
        self._live = self._bar = None

    def encoding(self, done: int, whole: int) -> None:
        """Show a bar until everything is encoded."""
        if self._live is not None:
            return
        if self._bar is None:
            size = MofNCompleteColumn() if self.rows else DownloadColumn(binary_units=True)
            label = "encoding rows" if self.rows else "encoding text"
            self._bar = Progress(label, BarColumn(), size, console=self._console)
            self._bar.add_task("", total=whole)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=whole)
        if done >= whole:
            self._bar.stop()
            self._bar = None

    def started(self, info: RunInfo) -> None:
        """Print model and data, and open the panel."""
        self.close()
        for label, sentence in fields.opening(info):
            self._console.print(f"[dim]{label:<6}[/dim] ", end="")
            self._console.print(sentence, markup=False, highlight=False)
        self._panel = Panel(info)
        # rich would otherwise draw from a thread of its own, next to the thread that launches kernels.
        self._live = Live(self._panel, console=self._console, auto_refresh=False)
        self._live.start()
        self._draw()

    def stepped(self, metrics: StepMetrics) -> None:
        """Add the step, and draw if it is time."""
        self._panel.step(metrics, time.monotonic())
        if time.monotonic() >= self._next_s:
            self._draw()

    def evaluated(self, metrics: EvalMetrics) -> None:
        """Show the evaluation from now on, also as a point on the curve."""
        self._panel.evaluation = metrics
        self._draw()

    def saved(self, step: int, path: Path) -> None:
        """Show the checkpoint from now on."""
        self._panel.checkpoint = (step, path)
        self._draw()

    def stored(self, step: int, url: str) -> None:
        """Show the store from now on."""
        self._panel.stored = (step, url)
        self._draw()

    def ended(self, summary: Summary) -> None:
        """Leave the last state on the screen, with the closing line below it."""
        self._draw()
        self.close()
        self._console.print(fields.closing(summary, self._panel.info.device), markup=False, highlight=False)

    def _draw(self) -> None:
        began = time.monotonic()
        if self._live is not None:
            self._live.refresh()
        took = time.monotonic() - began
        # Drawing over a slow connection may take long; the pause grows with it, so training keeps its speed.
        self._next_s = began + max(REFRESH_S, took / SHARE)


class Panel:
    """State of a run as people see it. Rendering reads the state and changes nothing."""

    def __init__(self, info: RunInfo) -> None:
        self.info = info
        self.curve = Curve()
        self.points: list[tuple[int, float]] = []
        self.metrics: StepMetrics | None = None
        self.checkpoint: tuple[int, Path] | None = None
        self.stored: tuple[int, str] | None = None
        self._evaluation: EvalMetrics | None = None
        self._smooth = Smoothed()
        for loss in info.losses:
            self.curve.add(self._smooth.add(loss))
        self._pace = fields.Pace(info.steps)

    @property
    def evaluation(self) -> EvalMetrics | None:
        """The last evaluation."""
        return self._evaluation

    @evaluation.setter
    def evaluation(self, metrics: EvalMetrics) -> None:
        self._evaluation = metrics
        self.points.append((metrics.step, metrics.loss))

    def step(self, metrics: StepMetrics, now_s: float) -> None:
        """Add a step that ended at `now_s`."""
        self.metrics = metrics
        self.curve.add(self._smooth.add(metrics.loss))
        self._pace.seen(metrics.step, now_s)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        inner = options.max_width - 4
        below = [*self._figures(inner), *self._sentences()]
        height = min(12, (console.height or 24) - len(below) - 6)
        chart = list(self._chart(inner, height)) if height >= 3 and inner >= 30 else []
        plan = self.info.plan
        title = f"[bold]{plan.model.name}[/bold]  {count(self.info.parameters)} parameters  {self.info.device}"
        yield panel.Panel(
            Group(*chart, self._bar(inner), *below),
            title=Text.from_markup(title),
            subtitle=Text(plan.run, style="dim"),
            title_align="left",
            subtitle_align="right",
            border_style="dim",
            box=box.ROUNDED,
        )

    def _chart(self, inner: int, height: int) -> Iterator[Text]:
        width = inner - AXIS
        low, high = span([*self.curve.values, *(loss for _, loss in self.points)])
        rows = [list(row) for row in braille(self.curve.values, width, height, low, high)]
        marks = {self._mark(step, loss, width, height, low, high) for step, loss in self.points}
        for y, row in enumerate(rows):
            share = (y + 0.5) / height
            label = (
                f"{high - share * (high - low):.3f}" if self.curve.values and y in (0, height // 2, height - 1) else ""
            )
            line = Text.assemble((f"{label:>{AXIS - 2}} \u2502", "dim"))
            for x, cell in enumerate(row):
                mark = (y, x) in marks
                line.append("\u25c6" if mark else " " if ord(cell) == BLANK else cell, style=POINT if mark else CURVE)
            yield line
        yield self._ticks(width)

    def _mark(self, step: int, loss: float, width: int, height: int, low: float, high: float) -> tuple[int, int]:
        """Return row and column of an evaluation on the chart."""
        first = self.info.first_step
        done = max(1, (self.metrics.step if self.metrics else step) - first)
        x = round((step - first) / done * (width - 1))
        y = int((high - loss) / (high - low) * height)
        return min(height - 1, max(0, y)), min(width - 1, max(0, x))

    def _ticks(self, width: int) -> Text:
        last = str(self.metrics.step) if self.metrics else ""
        first = str(self.info.first_step + 1) if self.metrics else ""
        middle = "loss (smoothed) over steps" + (", \u25c6 held out" if self.points else "")
        room = max(0, width - len(first) - len(last))
        return Text(" " * AXIS + first + middle[:room].center(room) + last, style="dim")

    def _bar(self, inner: int) -> Text:
        step = self.metrics.step if self.metrics else self.info.first_step
        tail = f"  step {step}/{self.info.steps}  {100 * step / self.info.steps:.0f}%  {self._left()}"
        room = max(0, inner - len(tail))
        full = round(room * step / self.info.steps)
        return Text.assemble(("\u2501" * full, "green"), ("\u2501" * (room - full), "bright_black"), tail)

    def _left(self) -> str:
        if self.metrics is None:
            return "first step"
        if self.metrics.step >= self.info.steps:
            return "done"
        return f"{duration(self._pace.left_s(self.metrics.step_seconds))} left"

    def _figures(self, inner: int) -> list[Text]:
        """Return (label, value) pairs in as many columns as fit."""
        if self.metrics is None:
            return []
        pairs = self._pairs(self.metrics)
        columns = max(1, min(3, inner // CELL))
        wide = inner // columns
        lines = []
        for i in range(0, len(pairs), columns):
            line = Text()
            for label, text, style in pairs[i : i + columns]:
                cell = Text.assemble((f"{label:<10} ", "dim"), (text, style))
                cell.truncate(wide - 1)
                cell.pad_right(wide - cell.cell_len)
                line.append_text(cell)
            lines.append(line)
        return lines

    def _pairs(self, metrics: StepMetrics) -> list[tuple[str, str, str]]:
        pairs = [
            ("loss", f"{metrics.loss:.4f}", "bold"),
            ("smoothed", f"{self._smooth.value:.4f}", CURVE),
            ("grad norm", f"{metrics.grad_norm:.3f}", ""),
            ("speed", f"{count(metrics.tokens_per_second)} tokens/s", "bold"),
            ("lr", f"{metrics.lr:.2e}", ""),
            ("data wait", fields.data_wait(metrics), ""),
            ("tokens", count(metrics.tokens), ""),
            ("memory", fields.memory(metrics, self.info.device), ""),
            ("elapsed", duration(metrics.seconds), ""),
        ]
        return pairs + [(label, value, "") for label, value in fields.extras(metrics, self.info)]

    def _sentences(self) -> list[Text]:
        """Return whole lines: utilization, the last evaluation, the last checkpoint, the last one in the store."""
        lines = []
        if self.metrics is not None and (used := fields.utilization(self.metrics)):
            lines.append(_line("MFU", used.removeprefix("MFU "), ""))
        if self._evaluation is not None:
            lines.append(_line("held out", f"{fields.held_out(self._evaluation)}, step {self._evaluation.step}", POINT))
        if self.checkpoint is not None:
            lines.append(_line("saved", f"{self.checkpoint[1]}", ""))
        if self.stored is not None:
            lines.append(_line("stored", f"step {self.stored[0]} in {printable(self.stored[1])}", ""))
        return lines


def _line(label: str, sentence: str, style: str) -> Text:
    return Text.assemble((f"{label:<10} ", "dim"), (sentence, style), no_wrap=True, overflow="ellipsis")


class Curve:
    """Values in order, in a bounded number of bins. A full store halves itself by averaging pairs."""

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self.values: list[float] = []
        self._stride = 1
        self._open_sum = 0.0
        self._open_count = 0

    def add(self, number: float) -> None:
        """Add a value, unless it is infinite or no number."""
        if not math.isfinite(number):
            return
        self._open_sum += number
        self._open_count += 1
        if self._open_count == self._stride:
            self.values.append(self._open_sum / self._stride)
            self._open_sum, self._open_count = 0.0, 0
        if len(self.values) == self.capacity:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
            self._stride *= 2


def span(values: Sequence[float], keep: float = 0.95) -> tuple[float, float]:
    """Return the lowest and highest value to show. The tall peak of the first steps is cut off at quantile `keep`.

    A flat curve gets room on both sides and is drawn in the middle.
    """
    numbers = sorted(v for v in values if math.isfinite(v))
    if not numbers:
        return 0.0, 1.0
    # Loss falls from its first value within few steps, and the rest of the curve would be a flat line.
    low, high = numbers[0], numbers[round(keep * (len(numbers) - 1))]
    room = 0.05 * (high - low) or 0.05 * abs(low) or 1.0
    return low - room, high + room


def resample(values: Sequence[float], columns: int) -> list[float]:
    """Spread `values` over `columns`: means where there are many, linear interpolation where there are few."""
    if len(values) > columns:
        edges = [i * len(values) // columns for i in range(columns + 1)]
        return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    if len(values) == 1:
        return list(values) * columns
    step = (len(values) - 1) / max(1, columns - 1)
    points = []
    for position in (i * step for i in range(columns)):
        left = min(int(position), len(values) - 2)
        share = position - left
        points.append(values[left] * (1 - share) + values[left + 1] * share)
    return points


def braille(values: Sequence[float], width: int, height: int, low: float, high: float) -> list[str]:
    """Return `height` rows of `width` characters: `values` as one connected line between `low` and `high`."""
    cells = [[0] * width for _ in range(height)]
    numbers = [v for v in values if math.isfinite(v)]
    if not numbers or width < 1 or height < 1 or not high > low:
        return [chr(BLANK) * width for _ in range(height)]
    dots, shares = 4 * height, ((high - value) / (high - low) for value in resample(numbers, 2 * width))
    rows = [min(dots - 1, max(0, int(share * dots))) for share in shares]  # from the top; beyond the span at its edge
    for x, y in enumerate(rows):
        for dot in range(*_stroke(rows[x - 1] if x else y, y)):
            cells[dot // 4][x // 2] |= DOTS[x % 2][dot % 4]
    return ["".join(chr(BLANK + bits) for bits in row) for row in cells]


def _stroke(before: int, now: int) -> tuple[int, int]:
    """Return the range of rows to fill so that a column touches the one before it."""
    if now > before:
        return before + 1, now + 1
    if now < before:
        return now, before
    return now, now + 1

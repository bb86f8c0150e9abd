"""Two ways to watch a run: a live panel on a terminal, one line per step everywhere else."""

import time
from pathlib import Path
from typing import IO, Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress

from meshwright.interface.terminal import fields
from meshwright.spec.units import MIB, count, duration, text_size
from meshwright.training.plot import Smoothed
from meshwright.training.step.watch import EvalMetrics, RunInfo, StepMetrics, Summary, Watcher
from meshwright.verbs.train.panel import Panel

REFRESH_S = 0.2
"""Shortest time between two drawings, in seconds."""
SHARE = 0.01
"""Share of the run's time that drawing may take. Slow drawings happen less often."""


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
        self._steps, self._device = info.steps, info.device
        for loss in info.losses:
            self._smooth.add(loss)
        for label, sentence in fields.opening(info):
            self._print(f"{label:<6} {sentence}")

    def stepped(self, metrics: StepMetrics) -> None:
        """Print the step in fixed columns."""
        self._smooth.add(metrics.loss)
        self._pace.seen(metrics.step, time.monotonic())
        parts = [
            f"{self._step(metrics.step)} {100 * metrics.step / self._steps:5.1f}%",
            f"loss {metrics.loss:7.4f} smoothed {self._smooth.value:7.4f}",
            f"grad {metrics.grad_norm:8.3f}",
            f"lr {metrics.lr:.2e}",
            f"{count(metrics.tokens_per_second):>5} tokens/s",
            fields.utilization(metrics),
            f"mem {fields.memory(metrics, self._device)}",
            f"data wait {fields.data_wait(metrics):>5}",
            *(f"{label} {value}" for label, value in fields.extras(metrics)),
            f"eta {duration(self._pace.left_s(metrics.step_seconds))}",
        ]
        self._print(" | ".join(part for part in parts if part))

    def evaluated(self, metrics: EvalMetrics) -> None:
        """Print the evaluation."""
        self._print(f"{self._step(metrics.step)} held out: {fields.held_out(metrics)} ({duration(metrics.seconds)})")

    def saved(self, step: int, path: Path) -> None:
        """Print the path of the checkpoint."""
        self._print(f"{self._step(step)} saved {path}")

    def ended(self, summary: Summary) -> None:
        """Print the last line."""
        self._print(fields.closing(summary, self._device))

    def _step(self, step: int) -> str:
        return f"step {step:>{self._digits}}/{self._steps}"

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
        self._next_s = began + max(REFRESH_S, took / SHARE)

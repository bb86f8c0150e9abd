"""Ctrl-C and SIGTERM ask a run to end after the current step; a second Ctrl-C ends it at once."""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

STDERR = 2
ENDING = b"""
meshwright: the run ends after this step and saves it; Ctrl-C again ends at once, and only checkpoints stay
"""


class Interrupt:
    """Within `with Interrupt() as stop:`, `stop.requested` is None or the name of the first signal that came.

    SIGTERM (what a cluster sends before it takes the machine) and the first Ctrl-C only set it; the second Ctrl-C
    raises KeyboardInterrupt where the program stands; one within `echo_s` of the first counts as the same. Handlers are
    put back at the end. Python lets only the main thread of a process handle signals: in another thread this does
    nothing.
    """

    def __init__(self, echo_s: float = 0.0, speaks: bool = False) -> None:
        """`speaks`: say at the first Ctrl-C what follows, since a step and its save may take minutes."""
        self.requested: str | None = None
        self.echo_s, self.speaks = echo_s, speaks
        self._presses: list[float] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.speaks and number == signal.SIGINT and not self._presses:
            os.write(STDERR, ENDING)  # print may stand in the middle of another one
        self.requested = self.requested or signal.Signals(number).name
        if number == signal.SIGINT:
            self._presses.append(time.monotonic())
            if len(self._presses) > 1 and self._presses[-1] - self._presses[0] >= self.echo_s:
                raise KeyboardInterrupt

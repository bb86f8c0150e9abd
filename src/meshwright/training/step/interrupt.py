"""Signals that end a run after the current step, and the agreement of all ranks on that step."""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.groups.group import Group
from meshwright.store.saver import Saver

STDERR = 2
ENDING = b"""
meshwright: the run ends after this step and saves it; Ctrl-C again ends at once, and only checkpoints stay
"""
SIGNALS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGUSR1": "preempted"}
"""Signals that may end a run -> what `Summary.stopped` then is. Of two the first is named."""


class Interrupt:
    """Signal handlers within a `with` block; `requested` is the name of the first signal that came, or None.

    SIGTERM, which a cluster sends before it takes the machine, SIGUSR1, which a scheduler sends some time before a
    limit, and the first Ctrl-C only set it. A second Ctrl-C raises KeyboardInterrupt, unless it comes within `echo_s`
    of the first. Handlers are restored at the end. Only the main thread of a process can handle signals; in other
    threads this does nothing.
    """

    def __init__(self, echo_s: float = 0.0, speaks: bool = False) -> None:
        """Set `speaks` to announce at the first Ctrl-C what follows, since a step and its save may take minutes."""
        self.requested: str | None = None
        self.echo_s, self.speaks = echo_s, speaks
        self._presses: list[float] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in map(signal.Signals.__getitem__, SIGNALS):
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
            # A handler may run in the middle of a print, whose lock it would then wait for.
            os.write(STDERR, ENDING)
        self.requested = self.requested or signal.Signals(number).name
        if number == signal.SIGINT:
            self._presses.append(time.monotonic())
            # A launcher forwards the Ctrl-C that this process got from the terminal too: an echo is no second wish.
            if len(self._presses) > 1 and self._presses[-1] - self._presses[0] >= self.echo_s:
                raise KeyboardInterrupt


class StopAgreement:
    """Agreement of ranks to stop after the same step, whichever of them got a signal, failed to save, or lost the run.

    Ranks exchange flags with every step (`announce`) and receive them with the step's numbers (`receive`), so that no
    rank waits. While no step is under way they ask at once.
    """

    def __init__(self, world: Group, device: torch.device, stop: Interrupt, saver: Saver) -> None:
        self.world, self.device, self.stop, self.saver = world, device, stop, saver
        self.agreed: str | None = None
        """The signal for which all ranks end before the last step, the same on every rank."""
        self._received = [0.0] * (1 + len(SIGNALS))

    def announce(self) -> Tensor:
        """Return fp32 flags over all ranks: 1.0 if any must end (`Saver.failed`), and for each signal if any got it."""
        flags = (bool(self.saver.failed()), *(self.stop.requested == signal for signal in SIGNALS))
        tensors = [torch.full((), float(flag), device=self.device) for flag in flags]
        return self.world.all_reduce(torch.stack(tensors), "max")

    def receive(self, flags: list[float]) -> None:
        """Take what `announce` returned, once it is on the host."""
        self._received = flags

    def reached(self, *, under_way: bool) -> bool:
        """Return whether all ranks end now. `under_way`: a step has begun whose numbers were not read.

        Raises CheckpointError or StoreError on all ranks when one could not write, or lost the run.
        """
        asked, failed = self.stop.requested, bool(self.saver.failed())
        if self.world.size > 1:
            flags = self._received if under_way else self.announce().tolist()
            asked = next((signal for signal, any_rank in zip(SIGNALS, flags[1:], strict=True) if any_rank), None)
            failed = bool(flags[0])
        if failed:
            self.saver.give_up()
        # A signal that came meanwhile on this rank is left for the next step, when all ranks know of it.
        if asked is not None:
            self.agreed = self.stop.requested = asked
        return asked is not None

"""The borders between steps, told by the clock of whatever computes them.

A GPU works through its queue long after the host has filled it, so the time at which the host reads a step's numbers
says when the host came to it, not when the step ended. A border is an event in that queue, which the device stamps as
it passes: it costs no waiting, and is read once the host waits for the step anyway. A CPU has computed a step when the
call returns.

    device   ..step 7..|..step 8..|evaluation, checkpoint|..step 9..|
                       border     border                 border     border
"""

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from meshwright.compat import torch_compile


class StepBorder(Protocol):
    """A moment between two steps."""

    def wait(self) -> None:
        """Return once the device has passed it."""

    def seconds_since(self, earlier: "StepBorder") -> float:
        """Seconds from an earlier border of the same device; both have been passed."""


class HostBorder:
    """Now, by the clock of the host."""

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def wait(self) -> None:
        """It is past."""

    def seconds_since(self, earlier: StepBorder) -> float:
        """As StepBorder."""
        assert isinstance(earlier, HostBorder)
        return self.at_s - earlier.at_s


class DeviceBorder:
    """The end of what the current stream of a GPU has been given so far."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """As StepBorder."""
        self.event.synchronize()

    def seconds_since(self, earlier: StepBorder) -> float:
        """As StepBorder."""
        assert isinstance(earlier, DeviceBorder)
        milliseconds: float = earlier.event.elapsed_time(self.event)
        return milliseconds / 1e3


def mark_border(device: torch.device) -> StepBorder:
    """Draw a border behind everything that `device` has been told to compute."""
    return DeviceBorder(device) if device.type == "cuda" else HostBorder()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """Where a step lies. Its seconds may be asked for once the device has passed its end."""

    begun: StepBorder
    ended: StepBorder
    pause_begun: StepBorder | None
    """Where the step before ended, if something came between; None = begun is that border, or nothing was before."""
    compiled: bool
    """Code was compiled for it, or it is the first step of the process."""

    @property
    def seconds(self) -> float:
        """Of the step, its wait for data and for a compiler included."""
        return self.ended.seconds_since(self.begun)

    @property
    def pause_s(self) -> float:
        """What came between it and the step before."""
        return self.begun.seconds_since(self.pause_begun) if self.pause_begun is not None else 0.0


class StepClock:
    """Borders of the steps of a process as they are begun, and sums over those that have been read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps = 0
        """Begun so far."""
        self.starting_steps, self.starting_s = 0, 0.0
        """The first step, and those for which code was compiled."""
        self.tokens, self.seconds = 0, 0.0
        """Of the steps of this process that have been read."""
        self.paused_s = 0.0
        """Between steps."""
        self._steady_tokens, self._steady_s = 0, 0.0
        self._pause_begun: StepBorder | None = None
        self.start()

    def start(self) -> None:
        """The next step begins here, whatever was before."""
        self._edge = mark_border(self.device)
        self._graphs = torch_compile.compiled_graphs()

    def end_step(self, ended: StepBorder) -> StepSpan:
        """A step ends at `ended`, where the next one begins."""
        graphs = torch_compile.compiled_graphs()
        span = StepSpan(
            begun=self._edge, ended=ended, pause_begun=self._pause_begun,
            compiled=not self.steps or graphs > self._graphs,
        )  # fmt: skip
        self.steps += 1
        self._edge, self._graphs, self._pause_begun = ended, graphs, None
        return span

    def end_pause(self) -> None:
        """What came after the last step has ended: the next one begins here."""
        begun = self._pause_begun or self._edge
        self.start()
        self._pause_begun = begun

    def count(self, span: StepSpan, tokens: int) -> None:
        """Add a step that the device has passed."""
        self.paused_s += span.pause_s
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + span.seconds
        if span.compiled:
            self.starting_steps, self.starting_s = self.starting_steps + 1, self.starting_s + span.seconds
        else:
            self._steady_tokens, self._steady_s = self._steady_tokens + tokens, self._steady_s + span.seconds

    def close(self) -> None:
        """Wait for the device, and add a pause that no step came after."""
        if self._pause_begun is not None:
            self._edge.wait()
            self.paused_s += self._edge.seconds_since(self._pause_begun)
            self._pause_begun = None

    @property
    def steady_tokens_per_second(self) -> float | None:
        """Of the steps that neither compiled nor were the first; None = there was none."""
        return self._steady_tokens / self._steady_s if self._steady_s else None

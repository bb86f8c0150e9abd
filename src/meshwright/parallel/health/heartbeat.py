"""The position of a rank: step, phase, last collective, and for how long nothing has moved.

The training reports its step, and groups report each collective. All else is read off the main thread's stack by
another thread, once a second: phases are functions known by name. So the code of a step contains no reporting.
"""

import gc
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate, chain, repeat, takewhile
from operator import call, is_not, methodcaller
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType

from meshwright import compat
from meshwright.parallel.groups.group import Traffic

QUICK = frozenset({"step", "forward", "backward", "gradients", "optimizer", "loss"})
"""Phases of a step. Any other one may take long: shared file systems stall for minutes."""
WORK = QUICK | {"data", "report"}
"""Phases in which all ranks wait for one that takes longer. Evaluations and saves are the work of some ranks more."""
COMPILE = "compile"
"""The phase of a rank that compiles, in whichever thread: others wait for it in their collectives."""
COMPILING = (
    "torch._dynamo.convert_frame",
    "torch._inductor.compile_fx",
    "torch._inductor.runtime.triton_heuristics:CachingAutotuner.benchmark",
    "triton.compiler",
    "triton.runtime.autotuner:Autotuner._bench",
)
"""Functions on a thread's stack while it compiles, or tries variants of a kernel, but not while it runs compiled code.
Autograd compiles the backward pass on the thread of a GPU.
"""
COLLECTIVES = ("torch.distributed.", "meshwright.parallel.pipeline.executor")
"""Modules whose functions, when innermost on the stack, do nothing but wait for other ranks."""
WAITS = ("meshwright.parallel.groups.group:Pending.wait", "meshwright.parallel.axes.ring:_Travelling.wait")
"""Functions of other modules that wait, too: what they call has no frame of its own."""
BACKWARD = "torch.autograd.graph:_engine_run_backward"
"""The function in which the main thread waits while autograd's threads run a backward pass."""
FIRST_STEPS = 2
"""Steps of a process that may take long: memory is taken, code compiled."""
RECORDER_AFTER_S = 2.0
"""Time without progress after which torch's flight recorder is read, then at twice the time, and so on."""
LONGEST_SAMPLE_S = 0.5
"""Most that a sample counts. A process that was stopped did nothing meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank whose own work takes longer than that of its like (judgement.py)."""

    rank: int
    host: str
    work_s: float
    """Its work in a step, without the time in which it waits for others."""
    median_s: float
    steps: int

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        times, work_ms, median_ms = self.work_s / self.median_s, 1e3 * self.work_s, 1e3 * self.median_s
        return (
            f"rank {self.rank}{where} is slow: its steps take {times:.1f} times the median's work ({work_ms:.0f} ms "
            f"against {median_ms:.0f} ms) for {self.steps} steps; all ranks wait for it"
        )


@dataclass(slots=True)
class Heartbeat:
    """Reports of a process to its watchdog, all but `pieces` by its main thread."""

    begun: float = field(default_factory=time.time)
    """Seconds since 1970 at which the work of this process began. A command began with its process."""
    step: int = 0
    """The step under way, or the last one."""
    ended: int = 0
    """Number of steps this process has ended."""
    longest_s: float = 0.0
    """Duration of the longest of them, except the first ones."""
    steps_s: float = 0.0
    """Duration of all of them."""
    role: str = ""
    """Ranks of equal roles do equal work."""
    slow_ranks: deque[SlowRank] = field(default_factory=deque)
    """Slow ranks that this process has noticed and not yet reported. Another thread adds them."""
    calls: Traffic = field(default_factory=Traffic)
    pieces: int = 0
    """Pieces of long work, such as tensors to write, that threads of this process have begun and report here.

    While the main thread waits for them in a slow phase, it counts as progress.
    """

    def piece_begun(self) -> None:
        """Count one more piece."""
        self.pieces += 1

    def step_ended(self, seconds: float) -> None:
        """Count one more step."""
        self.ended += 1
        self.steps_s += seconds
        if self.ended >= FIRST_STEPS:
            self.longest_s = max(self.longest_s, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """State of a rank that it sends to all others once a second."""

    count: int = 0
    """Number of the beat. If it does not rise, the rank is silent."""
    step: int = 0
    phase: str = "start"
    last: str = ""
    """The last collective it began."""
    calls: int = 0
    """Number of collectives it began."""
    still_s: float = 0.0
    """Time since step, collective or stack last changed."""
    oldest: int = -1
    """Number of the oldest collective that has not ended, once the rank makes no progress. -1 = none, or not known."""
    open_collective: str = ""
    """Its name by torch's flight recorder."""
    waits: bool = False
    """True in a collective, in autograd's engine, or while it reads what the device is still computing.

    With a GPU: anywhere in a step, since a launch waits if the device's queue is full.
    """
    may_take_long: bool = True
    """True in the first steps and in any phase but those of QUICK."""
    longest_s: float = 0.0
    where: str = ""
    """file.py:line in function."""
    host: str = ""
    """Name of the machine. Empty = all ranks are on one."""
    machine: str = ""
    """Key of the machine. Ranks of equal machines see each other's processes."""
    pid: int = 0
    lost: str = ""
    """The error of its failed collective: another rank is gone."""
    role: str = ""
    timed: int = 0
    """Steps to whose end `work_s` and `steps_s` reach."""
    work_s: float = 0.0
    """Work of this rank in these steps, without the time in which it waits for others. 0 = not known, on a GPU."""
    steps_s: float = 0.0
    """Duration of these steps."""
    done: bool = False
    """True once it has ended normally, or is about to: silence and death then mean nothing."""

    def encode(self) -> str:
        """Return the beat as text of about 400 bytes."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: bytes) -> "Beat":
        """Parse a beat. Fields of other versions are ignored."""
        fields = Beat.__dataclass_fields__
        return Beat(**{name: entry for name, entry in json.loads(text).items() if name in fields})

    @property
    def position(self) -> str:
        """`step 7, forward, last collective all_reduce on data`."""
        return f"step {self.step}, {self.phase}, last collective {self.last or 'none'}"


class HeartbeatWatch:
    """Observer of one thread of this process. Another thread calls `look` from time to time.

    Args:
        phases: Function -> phase.
        reads: Functions that read what the device is still computing.
        queues: Operations are queued on a device (a GPU), and the thread runs ahead of it.
    """

    def __init__(
        self, pulse: Heartbeat, phases: Mapping[str, str], reads: frozenset[str] = frozenset(), *, queues: bool = False
    ) -> None:
        self.pulse, self.phases, self.reads, self.queues = pulse, phases, reads, queues
        self._thread = threading.get_ident()
        self._seen: object = None
        self._moved_s = self._sampled_s = time.monotonic()
        self._work_s = 0.0
        self._timed = (0, 0.0, 0.0)
        self._recorded, self._recorder_due_s = (-1, ""), RECORDER_AFTER_S

    def look(self) -> Beat:
        """Return where the thread is now. Takes 20 to 50 microseconds, and as much for each other Python thread."""
        frames = _stack(self._thread)
        names = [_name(frame) for frame in frames]
        phase, calls = self.phase(names), self.pulse.calls
        # A backward pass compiles on autograd's thread while the main thread only waits.
        others = (frame for thread in sys._current_frames() if thread != self._thread for frame in _stack(thread))
        if phase in QUICK and any(_name(frame).startswith(COMPILING) for frame in others):
            phase = COMPILE
        # In a step a busy helper thread must not hide that the main thread hangs.
        pieces = 0 if phase in QUICK else self.pulse.pieces
        # The rank moves if its step, its collectives or any instruction on its stack changes.
        seen = (self.pulse.step, calls.calls_begun, pieces, [(id(f.f_code), f.f_lasti) for f in frames])
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._moved_s = seen, now
            self._recorded, self._recorder_due_s = (-1, ""), RECORDER_AFTER_S
        if now - self._moved_s > self._recorder_due_s:
            self._recorder_due_s = 2 * (now - self._moved_s)
            with suppress(Exception):  # its format is torch's own, and a missing diagnosis must not end a run
                self._recorded = compat.oldest_open_collective()
        return Beat(
            oldest=self._recorded[0],
            open_collective=self._recorded[1],
            step=self.pulse.step,
            phase=phase,
            last=calls.last,
            calls=calls.calls_begun,
            still_s=now - self._moved_s,
            waits=bool(names) and phase != COMPILE and self._waits(names[0], phase),
            may_take_long=phase not in QUICK or self.pulse.ended < FIRST_STEPS,
            longest_s=self.pulse.longest_s,
            where=_innermost(frames),
            role=self.pulse.role,
            timed=self._timed[0],
            work_s=self._timed[1],
            steps_s=self._timed[2],
        )

    def sample(self) -> None:
        """Add the time since the last sample to the work of this rank, unless its thread is waiting for others now.

        A CPU works in the thread that calls, and so in a backward pass too. Takes 10 to 20 microseconds.
        """
        now = time.monotonic()
        passed_s, self._sampled_s = min(now - self._sampled_s, LONGEST_SAMPLE_S), now
        if self.pulse.ended != self._timed[0]:
            self._timed = (self.pulse.ended, self._work_s, self.pulse.steps_s)
        names = [_name(frame) for frame in _stack(self._thread)]
        if names and self.phase(names) in WORK and names[0] not in WAITS and not names[0].startswith(COLLECTIVES):
            self._work_s += passed_s

    def _waits(self, innermost: str, phase: str) -> bool:
        reads = innermost in self.reads or innermost in (BACKWARD, *WAITS) or innermost.startswith(COLLECTIVES)
        return reads or (self.queues and phase in QUICK)

    def after(self, trace: TracebackType | None) -> Beat:
        """Return where the thread was when it raised the error that ends it."""
        names = [_name(frame) for frame, _ in walk_tb(trace)]
        calls = self.pulse.calls
        return Beat(step=self.pulse.step, phase=self.phase(names[::-1]), last=calls.last, calls=calls.calls_begun)

    def phase(self, names: list[str]) -> str:
        """Return the phase of the outermost known function, from function names, innermost first."""
        if any(name.startswith(COMPILING) for name in names):
            return COMPILE
        phases = [self.phases[name] for name in names if name in self.phases]
        return phases[-1] if phases else "step" if self.pulse.step else "start"


def _stack(thread: int) -> list[FrameType]:
    """Return the frames of a thread, innermost first. Empty = it has ended.

    All is done by one call of C code, from CPython's view of a thread (`sys._current_frames`) to the outermost frame.
    Between two instructions of Python the other thread could run on. `f_back` of a frame that it has left may be no
    frame any more: met with 3.11 on a busy machine. A collection of garbage could also let it run.
    """
    innermost = map(methodcaller("get", thread), map(call, (sys._current_frames,)))
    chained = accumulate(chain(innermost, repeat("f_back")), getattr)
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(takewhile(partial(is_not, None), chained))
    finally:
        if collects:
            gc.enable()


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _name(frame: FrameType) -> str:
    return f"{_module(frame)}:{frame.f_code.co_qualname}"


def _innermost(frames: list[FrameType]) -> str:
    """Return the innermost position outside of torch."""
    for frame in frames:
        if not _module(frame).startswith("torch"):
            path = Path(frame.f_code.co_filename)
            return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def boot_id() -> str:
    """Return a key that is equal for all processes of a machine, in containers too."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename


def namespace_id() -> str:
    """Return a key that is equal for processes that see each other: boot and process namespace."""
    try:
        return f"{boot_id()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return boot_id()

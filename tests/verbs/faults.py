"""Faults that disturb a rank in the middle of its work."""

import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.verbs.drill import faults as drill

BAD = 1
"""The rank that is disturbed."""


@dataclass(frozen=True, slots=True)
class In:
    """In the forward pass of a step, rank `bad` does `act`: a function here, or of the drill."""

    step: int
    act: str
    bad: int = BAD

    def __call__(self, rank: int) -> None:
        if rank == self.bad:
            act = globals().get(self.act) or getattr(drill, self.act)
            mark = Path(tempfile.mkdtemp()) / "mark"
            drill.disturb(drill.Fault(name=self.act, what="", says="", act=act), self.step, mark, Path())


@dataclass(frozen=True, slots=True)
class Slow:
    """In each forward pass rank `bad` sleeps; windows in which work is compared are short on all ranks."""

    seconds: float
    bad: int = BAD
    window_s: float = 0.8

    def __call__(self, rank: int) -> None:
        from meshwright.model import Transformer
        from meshwright.parallel.health import judgement, watchdog

        judgement.WINDOW_S, watchdog.BEAT_S = self.window_s, 0.2
        stage = Transformer.stage

        def slowly(model: Any, *args: Any, **named: Any) -> Any:
            time.sleep(self.seconds)
            return stage(model, *args, **named)

        if rank == self.bad and self.seconds:
            Transformer.stage = slowly  # type: ignore[method-assign, assignment]  # in this process alone


@dataclass(frozen=True, slots=True)
class SlowToEnd:
    """Rank `bad` takes its time to leave the process group, after all its work."""

    seconds: float
    bad: int = BAD

    def __call__(self, rank: int) -> None:
        import torch.distributed as dist

        leave = dist.destroy_process_group

        def slowly(group: dist.ProcessGroup | None = None) -> None:
            time.sleep(self.seconds)
            leave(group)

        if rank == self.bad:
            dist.destroy_process_group = slowly


@dataclass(frozen=True, slots=True)
class ClosedStdout:
    """Nothing reads what rank `bad` prints, as behind `| head`."""

    bad: int = 0

    def __call__(self, rank: int) -> None:
        if rank == self.bad:
            read, write = os.pipe()
            os.dup2(write, 1)
            os.close(read)


@dataclass(frozen=True, slots=True)
class Garbage:
    """Other tokens in some rows of the data, by their numbers, on every rank; and few steps tell a spike."""

    spans: tuple[range, ...]
    steps: int = 6

    def __call__(self, rank: int) -> None:
        import torch

        from meshwright.training.step import spikes
        from meshwright.training.step.batches import PackedRows

        take = PackedRows.take

        def spoiled(rows: Any, cursor: int, count: int, *more: Any) -> Any:
            batch = take(rows, cursor, count, *more)
            for row in range(count):
                if any(cursor + row in span for span in self.spans):
                    for stream in (batch.tokens, batch.targets):
                        stream[row] = torch.where(stream[row] >= 0, 255 - stream[row] * 7 % 256, stream[row])
            return batch

        PackedRows.take = spoiled  # type: ignore[method-assign, assignment]  # in this process alone
        spikes.ENOUGH_STEPS, spikes.HISTORY_STEPS, spikes.DEVIATIONS = self.steps, 8, 4.0


def terminate(keywords: drill.Keywords, run: Path) -> None:
    """Receive SIGTERM, as from a cluster that wants its machine back."""
    os.kill(os.getpid(), signal.SIGTERM)

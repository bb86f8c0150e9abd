"""Faults that disturb a rank in the middle of its work."""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BAD = 1
"""The rank that is disturbed."""


@dataclass(frozen=True, slots=True)
class In:
    """In the forward pass of a step, rank `bad` does `act` (a name of this module)."""

    step: int
    act: str
    bad: int = BAD
    once: str = ""
    """A file that is made: where it exists, nothing happens."""

    def __call__(self, rank: int) -> None:
        from meshwright.model import Transformer
        from meshwright.training import trainer

        if rank != self.bad or (self.once and Path(self.once).exists()):
            return
        act: Callable[[dict[str, Any]], None] = globals()[self.act]
        stage, train_step = Transformer.stage, trainer.train_step
        steps = [0]

        def disturbed(model: Any, *args: Any, **named: Any) -> Any:
            if steps[0] == self.step:
                if self.once:
                    Path(self.once).touch()
                act(named)
            return stage(model, *args, **named)

        def counted(*args: Any, **named: Any) -> Any:
            steps[0] += 1
            return train_step(*args, **named)

        Transformer.stage, trainer.train_step = disturbed, counted  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class Slow:
    """In each forward pass rank `bad` sleeps; windows in which work is compared are short on all ranks."""

    seconds: float
    bad: int = BAD
    window_s: float = 0.8

    def __call__(self, rank: int) -> None:
        from meshwright.model import Transformer
        from meshwright.parallel.health import slow_ranks, watchdog

        slow_ranks.WINDOW_S, watchdog.BEAT_S = self.window_s, 0.2
        stage = Transformer.stage

        def slowly(model: Any, *args: Any, **named: Any) -> Any:
            time.sleep(self.seconds)
            return stage(model, *args, **named)

        if rank == self.bad and self.seconds:
            Transformer.stage = slowly  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class SlowToEnd:
    """Rank `bad` takes its time to leave the process group, after all its work."""

    seconds: float
    bad: int = BAD

    def __call__(self, rank: int) -> None:
        import torch.distributed as dist

        leave = dist.destroy_process_group

        def slowly() -> None:
            time.sleep(self.seconds)
            leave()

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

        PackedRows.take = spoiled  # type: ignore[method-assign]
        spikes.ENOUGH_STEPS, spikes.HISTORY_STEPS, spikes.DEVIATIONS = self.steps, 8, 4.0


def die(named: dict[str, Any]) -> None:
    """Die as when the kernel kills a process that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(named: dict[str, Any]) -> None:
    """Stop all threads."""
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep(named: dict[str, Any]) -> None:
    """Halt the main thread alone."""
    time.sleep(1000)


def break_down(named: dict[str, Any]) -> None:
    """Raise an unforeseen error."""
    raise ZeroDivisionError("a fault of this machine")


def lose_number(named: dict[str, Any]) -> None:
    """Turn the loss of this rank into NaN."""
    named["scale"] = named["scale"] * float("nan")


def terminate(named: dict[str, Any]) -> None:
    """Receive SIGTERM, as from a cluster that wants its machine back."""
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":  # torchrun ... -m tests.verbs.faults STEP ACT RANK ONCE WORDS ...
    from meshwright.verbs.main import main

    step, act, bad, once = sys.argv[1:5]
    In(int(step), act, int(bad), once)(int(os.environ["RANK"]))
    sys.exit(main(sys.argv[5:]))

"""Faults of a drill, and the program that has them: `meshwright` with a disturbance in the middle of a step.

    python -m meshwright.verbs.drill.faults NAME STEP RANK MARK WORDS ...

In the forward pass of STEP, rank RANK does what the fault NAME says. MARK is a file that is written then. Where it
exists nothing happens, so that a restarted run is sound.
"""

import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

SLOW_S, SLOW_STEPS = 0.5, 45
"""Delay of a slow rank in each of its steps, and their number: three windows of parallel/health/slow_ranks.py."""
LARGEST_FILE_BYTES = 2**14
"""Limit that stands for a full disk: records of a short run fit, tensors do not."""
COMMIT_S = 20.0
"""Longest wait for the checkpoint that is about to be damaged."""
Passed = dict[str, Any]
"""Keywords of the forward pass that is disturbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that breaks, and what the run has to say about it."""

    name: str
    what: str
    says: str
    """Pattern of the line that names the fault. Empty = none is needed."""
    act: Callable[[Passed, Path], None]
    """Done by one rank in the forward pass, given its keywords and the run folder."""
    steps: int = 1
    """Steps in which it happens."""
    launcher: signal.Signals | None = None
    """Signal that the launcher gets at the same time. The act gives it time to arrive."""
    weather: str = ""
    """Behaviour of the object store during the whole run. Empty = the run has no store."""
    rank: int = 1


def die(passed: Passed, run: Path) -> None:
    """Die as when the kernel kills a process that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(passed: Passed, run: Path) -> None:
    """Stop all threads, as a machine that freezes does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def hang(passed: Passed, run: Path) -> None:
    """Halt the main thread alone, as a device that does not answer does."""
    time.sleep(100_000)


def break_down(passed: Passed, run: Path) -> None:
    """Raise an error that nobody foresaw."""
    raise ZeroDivisionError("a fault of this machine")


def lose_number(passed: Passed, run: Path) -> None:
    """Turn the loss of this rank into NaN."""
    passed["scale"] = passed["scale"] * float("nan")


def fill_disk(passed: Passed, run: Path) -> None:
    """Let the kernel refuse files of more than a few kilobytes, as a full disk or a quota does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def delay(passed: Passed, run: Path) -> None:
    """Take longer than the other ranks, as a device that is too hot does."""
    time.sleep(SLOW_S)


def damage(passed: Passed, run: Path) -> None:
    """Change the last byte of the newest checkpoint, then die."""
    end_s = time.monotonic() + COMMIT_S
    while not (committed := sorted(run.glob("checkpoints/step-*/COMMIT"))) and time.monotonic() < end_s:
        time.sleep(0.1)
    shard = max(committed[-1].parent.glob("shard-*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    die(passed, run)


def wipe(passed: Passed, run: Path) -> None:
    """Lose the run folder, as with a machine that is taken away, then die."""
    shutil.rmtree(run, ignore_errors=True)
    die(passed, run)


DIED = r"rank \d+.* died without a word|has been silent|lost the others"
FAULTS = (
    Fault(name="kill", what="a rank is killed (SIGKILL)", says=DIED, act=die),
    Fault(name="stop", what="a rank is frozen (SIGSTOP)", says="has been silent", act=stop),
    Fault(name="hang", what="a rank stands still", says="has stood still", act=hang),
    Fault(name="error", what="a rank meets an unforeseen error", says="failed at step", act=break_down),
    Fault(name="nan", what="a loss is no number", says="the loss is nan", act=lose_number),
    Fault(name="disk", what="the disk refuses a checkpoint", says="could not be saved", act=fill_disk),
    Fault(name="damage", what="the newest checkpoint is damaged", says="passed over|damaged", act=damage, rank=0),
    Fault(
        name="slow", what="a rank is slow", says=r"rank \d+.* is slow", act=delay, steps=SLOW_STEPS
    ),
    Fault(
        name="launcher", what="the launcher is killed (SIGKILL)", says="launcher's store does not answer|" + DIED,
        act=delay, steps=SLOW_STEPS, launcher=signal.SIGKILL,
    ),
    Fault(
        name="preempt", what="the machines are taken back (SIGTERM)", says="", act=delay, steps=SLOW_STEPS,
        launcher=signal.SIGTERM,
    ),
    Fault(
        name="store-errors", what="a fifth of the store's answers are errors, then the disk is lost", says=DIED,
        act=wipe, weather="errors",
    ),
    Fault(name="store-slow", what="the store is slow, then the disk is lost", says=DIED, act=wipe, weather="slow"),
    Fault(name="store-torn", what="uploads break off, then the disk is lost", says=DIED, act=wipe, weather="torn"),
)  # fmt: skip


def disturb(fault: Fault, step: int, mark: Path, run: Path) -> None:
    """Let this process have a fault in the forward pass of a step and those after it. `mark`: written at the first."""
    from meshwright.model import Transformer

    trainer: Any = import_module("meshwright.training.trainer")
    stage, train_step = Transformer.stage, trainer.train_step
    steps = [0]

    def disturbed(model: Any, *args: Any, **passed: Any) -> Any:
        if step <= steps[0] < step + fault.steps:
            if not mark.exists():
                mark.write_text(f"{time.time()} {steps[0]}")
            fault.act(passed, run)
        return stage(model, *args, **passed)

    def counted(*args: Any, **passed: Any) -> Any:
        steps[0] += 1
        return train_step(*args, **passed)

    trainer.train_step = counted
    Transformer.stage = disturbed  # type: ignore[method-assign, assignment]  # a disturbance from outside


def main() -> int:
    """Run `meshwright` with the fault that the command line names."""
    from meshwright.verbs.main import main as run_verb

    name, step, rank, mark, *words = sys.argv[1:]
    fault = next((fault for fault in FAULTS if fault.name == name), None)
    run = next(word.removeprefix("run=") for word in words if word.startswith("run="))
    if fault is not None and int(os.environ["RANK"]) == int(rank) and not Path(mark).exists():
        disturb(fault, int(step), Path(mark), Path(run))
    return run_verb(words)


if __name__ == "__main__":
    sys.exit(main())

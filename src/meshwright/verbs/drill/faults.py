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
"""Delay of a slow rank in each of its steps, and their number: three windows of parallel/health/judgement.py."""
LARGEST_FILE_BYTES = 2**14
"""Limit that stands for a full disk: records of a short run fit, tensors do not."""
COMMIT_S = 20.0
"""Longest wait for the checkpoint that is about to be damaged."""
Keywords = dict[str, Any]
"""Keyword arguments of the forward pass that is disturbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that breaks, and the line by which the run must name it."""

    name: str
    what: str
    says: str
    """Pattern of the line that names the fault. Empty = none is needed."""
    act: Callable[[Keywords, Path], None]
    """Act of one rank in the forward pass, given its keyword arguments and the run folder."""
    steps: int = 1
    """Steps in which it happens."""
    launcher: signal.Signals | None = None
    """Signal that the launcher gets at the same time. The act gives it time to arrive."""
    store_mode: str = ""
    """Fault of the object store during the whole run (FaultyStore.set_mode). Empty = the run has no store."""
    rank: int = 1


def die(keywords: Keywords, run: Path) -> None:
    """Die as when the kernel kills a process that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(keywords: Keywords, run: Path) -> None:
    """Stop all threads, as a machine that freezes does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def hang(keywords: Keywords, run: Path) -> None:
    """Halt the main thread alone, as a device that does not answer does."""
    time.sleep(100_000)


def raise_error(keywords: Keywords, run: Path) -> None:
    """Raise an error that no code handles."""
    raise ZeroDivisionError("a fault of this machine")


def make_loss_nan(keywords: Keywords, run: Path) -> None:
    """Turn the loss of this rank into NaN."""
    keywords["scale"] = keywords["scale"] * float("nan")


def fill_disk(keywords: Keywords, run: Path) -> None:
    """Let the kernel refuse files of more than a few kilobytes, as a full disk or a quota does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def delay(keywords: Keywords, run: Path) -> None:
    """Take longer than the other ranks, as a device that overheats does."""
    time.sleep(SLOW_S)


def damage(keywords: Keywords, run: Path) -> None:
    """Change the last byte of the newest checkpoint, then die."""
    end_s = time.monotonic() + COMMIT_S
    while not (committed := sorted(run.glob("checkpoints/step-*/COMMIT"))) and time.monotonic() < end_s:
        time.sleep(0.1)
    shard = max(committed[-1].parent.glob("shard-*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    die(keywords, run)


def wipe(keywords: Keywords, run: Path) -> None:
    """Lose the run folder, as with a machine that is taken away, then die."""
    shutil.rmtree(run, ignore_errors=True)
    die(keywords, run)


DIED = r"rank \d+.* died without a message|has been silent|lost the others"
FAULTS = (
    Fault(name="kill", what="a rank is killed (SIGKILL)", says=DIED, act=die),
    Fault(name="stop", what="a rank is frozen (SIGSTOP)", says="has been silent", act=stop),
    Fault(name="hang", what="a rank hangs", says="has made no progress", act=hang),
    Fault(name="error", what="a rank meets an unforeseen error", says="failed at step", act=raise_error),
    Fault(name="nan", what="a loss is NaN", says="the loss is nan", act=make_loss_nan),
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
        name="preempt", what="the machines are preempted (SIGTERM)", says="", act=delay, steps=SLOW_STEPS,
        launcher=signal.SIGTERM,
    ),
    Fault(
        name="store-errors", what="a fifth of the store's answers are errors, then the disk is lost", says=DIED,
        act=wipe, store_mode="errors",
    ),
    Fault(name="store-slow", what="the store is slow, then the disk is lost", says=DIED, act=wipe, store_mode="slow"),
    Fault(name="store-torn", what="uploads break off, then the disk is lost", says=DIED, act=wipe, store_mode="torn"),
)  # fmt: skip


def disturb(fault: Fault, step: int, mark: Path, run: Path) -> None:
    """Patch this process so that a fault comes in the forward pass of a step. `mark`: file that is written then."""
    from meshwright.model import Transformer

    trainer: Any = import_module("meshwright.training.trainer")
    stage, train_step = Transformer.stage, trainer.train_step
    steps = 0

    def disturbed(model: Any, *args: Any, **keywords: Any) -> Any:
        if step <= steps < step + fault.steps:
            if not mark.exists():
                mark.write_text(f"{time.time()} {steps}")
            fault.act(keywords, run)
        return stage(model, *args, **keywords)

    def counted(*args: Any, **keywords: Any) -> Any:
        nonlocal steps
        steps += 1
        return train_step(*args, **keywords)

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

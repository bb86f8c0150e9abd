"""Whether the watchdog ends a healthy run, and how soon it names a rank that is dead or hangs: two real processes each.

python -m benchmarks.false_alarms [--json] [--seconds 90] [--pause 20] [--limit 20]

No alarm: the file system stalls on one rank, one rank compiles, a process is paused; all with the default limits.
Alarm: one rank is killed; one hangs, with `--hang-after LIMIT` (the default would take five minutes).
"""

import argparse
import json
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.verbs.drill import faults as drill
from tests.verbs import toy
from tests.verbs.faults import In
from tests.verbs.launched import launch

STEP = 5
"""In which a rank is disturbed; the first two may be slow anyway."""
BAD = 1


@dataclass(frozen=True, slots=True)
class StalledReads:
    """On one rank the reading of a batch takes so long."""

    seconds: float

    def __call__(self, rank: int) -> None:
        """Before the rank starts."""
        from meshwright.training.step.batches import Feed

        read, done = Feed._read, [0]

        def slowly(feed: Feed, cursor: int, count: int) -> Any:
            done[0] += 1
            if done[0] == STEP:
                time.sleep(self.seconds)
            return read(feed, cursor, count)

        if rank == BAD:
            Feed._read = slowly  # type: ignore[method-assign, assignment]  # in this process alone


@dataclass(frozen=True, slots=True)
class SlowCompiler:
    """One rank compiles in its forward pass, for so long: torch's own compiler, with a backend that takes its time."""

    seconds: float

    def __call__(self, rank: int) -> None:
        """Before the rank starts."""
        import torch

        from meshwright.model import Transformer
        from meshwright.training import trainer
        from meshwright.training.step.step import train_step

        stage, steps = Transformer.stage, [0]

        def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            time.sleep(self.seconds)
            return module.forward

        def compiled(model: Any, *arguments: Any, **named: Any) -> Any:
            if steps[0] == STEP:
                steps[0] += 1
                torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
            return stage(model, *arguments, **named)

        def counted(*arguments: Any, **named: Any) -> Any:
            steps[0] += 1
            return train_step(*arguments, **named)

        if rank == BAD:
            Transformer.stage = compiled  # type: ignore[method-assign, assignment]  # in this process alone
            trainer.train_step = counted  # type: ignore[attr-defined]  # the trainer looks it up among its own names


@dataclass(frozen=True, slots=True)
class Paused:
    """One rank is stopped whole and goes on after a while, as when a machine is moved."""

    seconds: float

    def __call__(self, rank: int) -> None:
        """Before the rank starts."""
        if rank != BAD:
            return
        reading, writing = os.pipe()
        if os.fork() == 0:  # who wakes it up must run on
            os.setsid()
            os.close(writing)  # so that the end of the rank ends the wait
            if os.read(reading, 1):
                time.sleep(self.seconds)
                os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)

        def pause(passed: drill.Keywords, run: Path) -> None:
            os.write(writing, b"x")
            os.kill(os.getpid(), signal.SIGSTOP)

        mark = Path(tempfile.mkdtemp()) / "mark"
        drill.disturb(drill.Fault(name="pause", what="", says="", act=pause), STEP, mark, Path())


def run(fault: Callable[[int], None], folder: Path, *options: str) -> tuple[list[int], str, float]:
    """(exit codes, what was written, seconds of the whole run) of two processes with a fault."""
    texts = toy.write_texts(folder / "texts")
    changes = (
        "recipe.checkpoint_every=0",
        "recipe.eval_every=0",
        "layout.zero=1",
        "layout.dp_shard=2",
        "recipe.global_batch=6",
    )
    began = time.monotonic()
    ended = launch(2, [*toy.train(texts, folder / "run", *changes), *options], folder, fault=fault)
    return ended.codes, ended.errors.strip(), time.monotonic() - began


def measure(stall_s: float, pause_s: float, limit_s: float) -> dict[str, Any]:
    """Every case; `false_alarms` and `missed` count."""
    figures: dict[str, Any] = {"false_alarms": 0, "missed": 0}
    with tempfile.TemporaryDirectory() as folder:
        healthy: dict[str, tuple[Any, float]] = {
            "file system": (StalledReads(stall_s), stall_s),
            "compilation": (SlowCompiler(stall_s), stall_s),
            "pause": (Paused(pause_s), pause_s),
        }
        threads = []
        for name, (fault, least_s) in healthy.items():

            def try_one(name: str = name, fault: Any = fault, least_s: float = least_s) -> None:
                codes, errors, seconds = run(fault, Path(folder, name))
                # A run that did not even wait so long was not disturbed, and proves nothing.
                figures[name] = {
                    "codes": codes,
                    "seconds": round(seconds, 1),
                    "disturbed": seconds > least_s,
                    "said": errors,
                }

            threads.append(threading.Thread(target=try_one))
            threads[-1].start()
        for thread in threads:
            thread.join()
        figures["false_alarms"] = sum(
            figures[name]["codes"] != [0, 0] or not figures[name]["disturbed"] for name in healthy
        )
        for name, act, options, pattern in (
            ("dead", "die", (), "rank 1 died without a message"),
            ("hung", "hang", (f"--hang-after={limit_s:g}",), r"rank 1 has made no progress for (\d+) s"),
        ):
            codes, errors, seconds = run(In(STEP, act, BAD), Path(folder, name), *options)
            seen = re.search(pattern, errors)
            figures[name] = {"codes": codes, "seconds": round(seconds, 1), "said": errors}
            figures["missed"] += seen is None
            if name == "hung" and seen:
                figures["late_s"] = float(seen[1]) - limit_s
    return figures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--pause", type=float, default=20.0)
    parser.add_argument("--limit", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    print(json.dumps(measure(options.seconds, options.pause, options.limit), indent=None if options.json else 2))


if __name__ == "__main__":
    main()

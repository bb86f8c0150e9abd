"""Fine-tuning speed and peak memory beside TRL's SFTTrainer, on a chat file of the lengths that people's chats have.

    python -m benchmarks.tune_speed [--json] [--shapes 10m,100m] [--precisions fp32] [--steps 8] [--cpu-time]

Both train the same model folder on the same file: answers alone, rows of 1,024 tokens, AdamW, clipping at 1. Ours is
`meshwright tune` with its defaults (eager on a CPU) and compiled; TRL comes at every setting of `tune_ways.TRL`, each a
process of its own. First each of TRL's takes a few steps alone; the fastest then takes turns with ours, step by step,
so that whatever else the machine does hits both alike. Tokens per second count tokens of conversations, not what fills
rows or batches up: of all measured steps together, since batches differ. Memory is the peak resident size over what the
process held after its imports, with the reading of the file. `--cpu-time` counts seconds of the process on all its
threads, for a machine that is not quiet. TRL's bf16 is autocast over fp32 weights; ours keeps bf16 weights with fp32
masters. Where TRL is not installed there is nothing to compare with, and that is said.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.tune_ways import OURS, TRL

CONVERSATIONS = 1200
"""Of the file: more than any contestant reads."""
WARM_UP = 3
"""Steps before those that count: code is compiled for some lengths in each."""
NO_TRL = (
    "TRL is not installed, so there is nothing to compare with: pip install trl accelerate datasets, "
    "which are no dependency of Meshwright"
)


@dataclass(slots=True, kw_only=True)
class Result:
    """One contestant on one shape and precision."""

    way: str
    tokens: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    error: str = ""
    """Its last line, where it ended by itself."""

    @property
    def tokens_per_second(self) -> float:
        """0 where it did not run."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Contestant:
    """A process of `tune_ways`."""

    def __init__(self, way: str, folder: Path, precision: str, threads: int) -> None:
        self.result = Result(way=way)
        self._errors = (folder / f"{way}.log").open("w+")
        home = {"HF_HOME": str(folder / "hf"), "XDG_CACHE_HOME": str(folder / "cache")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.tune_ways", way, str(folder), precision, str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, **home, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        self._read()

    @property
    def runs(self) -> bool:
        """False once it has ended by itself."""
        return not self.result.error

    def step(self, clock: str | None) -> None:
        """One step; `clock` names the seconds that count, None = a step that does not count."""
        if not self.runs:
            return
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answer = self._read()
        if answer is None:
            return
        self.result.peak_bytes = max(self.result.peak_bytes, int(answer["peak"]))
        self.result.losses.append(answer["loss"])
        if clock is not None:
            self.result.tokens += int(answer["tokens"])
            self.result.seconds += answer[clock]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            lines = self._errors.read().strip().splitlines()
            self.result.error = lines[-1] if lines else "ended without a word"
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer


def race(ways: Iterable[str], folder: Path, precision: str, threads: int, steps: int, clock: str) -> list[Result]:
    """Contestants turn by turn, after steps that warm them up."""
    contestants = []
    try:
        for way in ways:
            contestants.append(Contestant(way, folder, precision, threads))
        for turn in range(WARM_UP + steps):
            for contestant in contestants:
                contestant.step(None if turn < WARM_UP else clock)
    finally:
        for contestant in contestants:
            contestant.close()
    return [contestant.result for contestant in contestants]


def report(shape: str, precision: str, threads: int, steps: int, clock: str) -> dict[str, object]:
    """All contestants, and the ratios that the claims read."""
    from benchmarks.chat_file import write_chat, write_model

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_chat(folder / "chat.jsonl", CONVERSATIONS)
        write_model(folder / "model", shape)
        tried = [race([way], folder, precision, threads, max(2, steps // 2), clock)[0] for way in TRL]
        best = max(tried, key=lambda contestant: contestant.tokens_per_second)
        if not best.tokens:
            sys.exit(f"no setting of TRL ran: {best.error}")
        final = race([*OURS, best.way], folder, precision, threads, steps, clock)
    ours, compiled, theirs = final
    return {
        "shape": shape,
        "precision": precision,
        "best_of_trl": best.way,
        "speed": ours.tokens_per_second / theirs.tokens_per_second,
        "speed_compiled": compiled.tokens_per_second / theirs.tokens_per_second,
        "memory": ours.peak_bytes / theirs.peak_bytes,
        "memory_compiled": compiled.peak_bytes / theirs.peak_bytes,
        "memory_over_least": ours.peak_bytes / min(contestant.peak_bytes for contestant in tried if contestant.tokens),
        "tried": list(map(_row, tried)),
        "final": list(map(_row, final)),
    }


def _row(result: Result) -> dict[str, Any]:
    return {**asdict(result), "tokens_per_second": result.tokens_per_second}


def show(figures: dict[str, Any]) -> None:
    """For people."""
    print(
        f"\n{figures['shape']} {figures['precision']}: {figures['speed']:.2f} x the tokens/s of TRL's best setting, ",
        end="",
    )
    print(
        f"{figures['memory']:.2f} x its memory ({figures['memory_over_least']:.2f} x the least of any of its settings)"
    )
    for name in ("tried", "final"):
        for row in figures[name]:
            speed, peak = row["tokens_per_second"], row["peak_bytes"] / 2**20
            how = row["error"] or f"{speed:9.0f} tokens/s  {peak:7.0f} MiB peak"
            print(f"  {'alone' if name == 'tried' else 'in turn':8} {row['way']:22} {how}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shapes", default="10m")
    parser.add_argument("--precisions", default="fp32")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a contestant")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the process instead of the clock's")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("trl") is None:
        print(json.dumps({"skipped": NO_TRL}) if options.json else NO_TRL)
        return
    figures = {}
    for shape in options.shapes.split(","):
        for precision in options.precisions.split(","):
            clock = "cpu" if options.cpu_time else "seconds"
            row = figures[f"{shape}-{precision}"] = report(shape, precision, options.threads, options.steps, clock)
            if not options.json:
                show(row)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()

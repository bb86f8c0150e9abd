"""A corpus larger than the memory that is allowed: made, encoded, trained on, sampled; how much memory that takes.

    python -m benchmarks.large_corpus [--json] [--size-gb 3] [--steps 20] [--batches 200]

The default text is repeated into files of about 100 MB (every copy with its number in front, so that no two are equal)
until there are `--size-gb` GB of it. `meshwright train` encodes it and trains on it; then a fresh process reads batches
of 32 x 1024 tokens at random from what was encoded. Memory is the largest sum of resident bytes over a process and its
children, looked at 20 times a second; a page that several of them share is counted once (proportional set size).
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS, SEQUENCE = 32, 1024
FILE_BYTES = 10**8
PERIOD_S = 0.05

SAMPLE = """
import json, sys, time
from pathlib import Path
from meshwright.data import Sampler, prepare
from meshwright.spec import Data

folder, batches, rows, sequence = Path(sys.argv[1]), *map(int, sys.argv[2:])
corpus = prepare(Data(path=str(folder)))
sampler = Sampler(corpus.train, sequence=sequence, tokenizer_separator=corpus.tokenizer.separator, seed=0)
started = time.perf_counter()
checksum = sum(int(sampler.take(number * rows, rows).tokens.sum()) for number in range(batches))
print(json.dumps({
    "sample_seconds": time.perf_counter() - started,
    "tokens": corpus.train.num_tokens + corpus.validation.num_tokens,
    "text_bytes": corpus.train.num_bytes + corpus.validation.num_bytes,
    "held_out_share": corpus.validation.num_bytes / (corpus.train.num_bytes + corpus.validation.num_bytes),
    "checksum": checksum,
}))
"""
RECIPE = ("model=llama-tiny", "recipe.sequence=256", "recipe.global_batch=8", "recipe.checkpoint_every=0")


def make(folder: Path, size_bytes: int) -> int:
    """Write text files of `size_bytes` in all; gives the bytes written."""
    from meshwright.data.text.sources import Source
    from meshwright.spec import Data

    text = "\n".join(document.text for document in Source(Data(path="stdlib")).documents()).encode()
    written = number = 0
    while written < size_bytes:
        copies = [b"# copy %d\n%b" % (number + offset, text) for offset in range(max(1, FILE_BYTES // len(text)))]
        content = b"".join(copies)[: size_bytes - written].rsplit(b"\n", 1)[0] + b"\n"
        (folder / f"{number:06}.txt").write_bytes(content)
        written += len(content)
        number += len(copies)
    return written


def resident_bytes(pid: int) -> int:
    """Resident bytes of a process and its descendants, shared pages once (PSS); Linux only, 0 elsewhere."""
    total = 0
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            total += sum(resident_bytes(int(child)) for child in children.read_text().split())
    return total


@dataclass(frozen=True, slots=True)
class Watched:
    """What a command printed, and per phase the seconds it took and the most bytes it held."""

    document: dict[str, Any]
    seconds: dict[str, float]
    peaks: dict[str, int]


def watch(command: Sequence[str], cache: Path, phase: Callable[[], str]) -> Watched:
    """Run a command that prints one JSON document; `phase` names what it is at now."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    seconds: dict[str, float] = {}
    peaks: dict[str, int] = {}
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen([sys.executable, *command], stdout=out, env=environment)
        before = time.perf_counter()
        while child.poll() is None:
            name, now = phase(), time.perf_counter()
            peaks[name] = max(peaks.get(name, 0), resident_bytes(child.pid))
            seconds[name] = seconds.get(name, 0.0) + now - before
            before = now
            time.sleep(PERIOD_S)
        if child.returncode:
            sys.exit(f"{' '.join(command[:3])} ended with {child.returncode}")
        out.seek(0)
        return Watched(json.load(out), seconds, peaks)


def measure(size_bytes: int, steps: int, batches: int) -> dict[str, Any]:
    """Seconds of each part, and the most memory held in it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, cache, run = Path(temporary, "text"), Path(temporary, "cache"), Path(temporary, "run")
        folder.mkdir()
        written = make(folder, size_bytes)
        settings = (f"data.path={folder}", f"run={run}", f"recipe.steps={steps}", *RECIPE)
        train = watch(
            ("-m", "meshwright", "train", *settings, "--json"),
            cache,
            lambda: "training" if (run / "metrics.jsonl").exists() else "encoding",
        )
        sizes = (str(folder), str(batches), str(ROWS), str(SEQUENCE))
        sample = watch(("-c", SAMPLE, *sizes), cache, lambda: "sampling")
    peaks = {**train.peaks, **sample.peaks}
    return {
        "text_bytes_written": written,
        **sample.document,
        "loss": train.document["loss"],
        "encode_seconds": train.seconds["encoding"],
        "megabytes_per_second": written / train.seconds["encoding"] / 1e6,
        "batches_per_second": batches / sample.document["sample_seconds"],
        **{f"peak_{phase}_bytes": peak for phase, peak in peaks.items()},
        "peak_bytes": max(peaks.values()),
    }


def main() -> None:
    """Print the figures, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size-gb", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batches", type=int, default=200)
    options = parser.parse_args()
    result = measure(round(options.size_gb * 1e9), options.steps, options.batches)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        shown = f"{value / 2**20:,.0f} MiB" if name.startswith("peak") else f"{value:,.4g}"
        print(f"{name:<22} {shown}")


if __name__ == "__main__":
    main()

"""How long the verbs that need no torch take from the shell to their last line, and what starts count.

    python -m benchmarks.startup [--json] [--repeats 7]

Median wall time of fresh processes. The machine's file cache is warm: the first run of each verb is not counted.
Counts: verbs and refusals that load torch, and C compilers that a training starts, with an empty cache and once more.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VERBS: dict[str, tuple[str, ...]] = {
    "help": ("--help",),
    "version": ("--version",),
    "init": ("init",),
    "schema": ("schema",),
    "train_help": ("train", "--help"),
}
"""Verbs that only read, print or check; the ones that compute may load torch."""

PROBE = """
import sys
from meshwright.verbs.main import main
sys.argv[0] = "meshwright"
status = main()
print("TORCH" if "torch" in sys.modules else "CLEAN", file=sys.stderr)
sys.exit(status)
"""


REFUSED: dict[str, tuple[str, ...]] = {
    "no path": ("train", "data=nowhere"),
    "an empty folder": ("train", "data=empty"),
    "binary junk": ("train", "data=junk.bin"),
    "a row without text": ("train", "data=rows.jsonl"),
    "a broken row behind a good one": ("tune", "model=llama-tiny", "model.init=random", "data=chat.jsonl"),
    "no model": ("train", "model=./nowhere"),
    "no tokenizer": ("train", "data.tokenizer=./nowhere"),
    "no checkpoint": ("train", "resume=nowhere"),
    "a wrong layout": ("train", "layout.tp=3"),
    "a mistyped key of profile": ("profile", "recpe.steps=1"),
}
"""Starts of a run that something in the plan, a path or a row forbids."""
TRAINING = (
    "train",
    "model=llama-tiny",
    "recipe.sequence=64",
    "recipe.global_batch=2",
    "recipe.steps=1",
    "data=text.txt",
)
"""Of one step."""


def write_inputs(folder: Path) -> None:
    """What the commands read."""
    (folder / "empty").mkdir()
    (folder / "junk.bin").write_bytes(b"\1\0\2" * 100)
    (folder / "rows.jsonl").write_text('{"a": 1}\n')
    chat = '{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}'
    (folder / "chat.jsonl").write_text(f"{chat}\n{{\n")
    (folder / "text.txt").write_text("".join(f"line {number} of a short text\n" for number in range(400)))


def refusals_with_torch(folder: Path) -> list[str]:
    """Which refusals load torch, or are none."""
    command = [sys.executable, "-c", PROBE]
    names = []
    for name, arguments in REFUSED.items():
        ended = subprocess.run([*command, *arguments], cwd=folder, check=False, capture_output=True, text=True)
        if ended.returncode != 2 or ended.stderr.strip().splitlines()[-1] == "TORCH":
            names.append(name)
    return names


def compilers_started(folder: Path) -> tuple[int, int]:
    """How many C compilers a training starts with an empty cache, and the next training."""
    program = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if program is None:
        raise SystemExit("benchmarks.startup: needs a C compiler")
    log, wrapper = folder / "compilers", folder / "bin" / "cc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec {program} "$@"\n')
    wrapper.chmod(0o755)
    path = f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}"
    counts = [0]
    for run in ("runs/first", "runs/second"):
        subprocess.run(
            [sys.executable, "-m", "meshwright", *TRAINING, f"run={run}", "--no-dry-run"],
            cwd=folder, check=True, capture_output=True,
            env={**os.environ, "PATH": path, "XDG_CACHE_HOME": str(folder / "cache")},
        )  # fmt: skip
        counts.append(len(log.read_text().splitlines()) if log.exists() else 0)
    return counts[1], counts[2] - counts[1]


def seconds(arguments: tuple[str, ...], folder: Path) -> float:
    """Wall time of one fresh process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "meshwright", *arguments], cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - start


def loads_torch(arguments: tuple[str, ...], folder: Path) -> bool:
    """Whether the verb has torch among its modules when it ends."""
    command = [sys.executable, "-c", PROBE, *arguments]
    finished = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return finished.stderr.strip().splitlines()[-1] == "TORCH"


def measure(repeats: int) -> dict[str, Any]:
    """Median seconds of each verb, the slowest of them, and how many load torch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        verbs = {}
        for verb, arguments in VERBS.items():
            torch = loads_torch(arguments, folder)
            verbs[verb] = {
                "seconds": statistics.median(seconds(arguments, folder) for _ in range(repeats)),
                "torch": torch,
            }
        first, second = compilers_started(folder)
        refusals = refusals_with_torch(folder)
    return {
        "verbs": verbs,
        "slowest_seconds": max(verb["seconds"] for verb in verbs.values()),
        "verbs_with_torch": sum(verb["torch"] for verb in verbs.values()),
        "refusals_with_torch": len(refusals),
        "compilers_at_first_start": first,
        "compilers_at_second_start": second,
        "repeats": repeats,
    }


def main() -> None:
    """Print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    result = measure(options.repeats)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for verb, row in result["verbs"].items():
        line = f"meshwright {' '.join(VERBS[verb]):<16} {row['seconds'] * 1000:6.0f} ms"
        print(line + ("  loads torch" if row["torch"] else ""))
    print(f"refusals that load torch: {result['refusals_with_torch']} of {len(REFUSED)}")
    first, second = (result[f"compilers_at_{start}_start"] for start in ("first", "second"))
    print(f"C compilers that a training starts: {first}, and {second} at the second start")


if __name__ == "__main__":
    main()

"""How long the verbs that need no torch take from the shell to their last line, and that they load no torch.

    python -m benchmarks.startup [--json] [--repeats 7]

Median wall time of fresh processes. The machine's file cache is warm: the first run of each verb is not counted.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
from meshwright.cli.main import main
sys.argv[0] = "meshwright"
status = main()
print("TORCH" if "torch" in sys.modules else "CLEAN", file=sys.stderr)
sys.exit(status)
"""


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


def measure(repeats: int) -> dict[str, object]:
    """Median seconds of each verb, the slowest of them, and how many load torch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        verbs = {}
        for verb, arguments in VERBS.items():
            torch = loads_torch(arguments, folder)
            verbs[verb] = {
                "seconds": statistics.median(seconds(arguments, folder) for _ in range(repeats)),
                "torch": torch,
            }
    return {
        "verbs": verbs,
        "slowest_seconds": max(verb["seconds"] for verb in verbs.values()),
        "verbs_with_torch": sum(verb["torch"] for verb in verbs.values()),
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


if __name__ == "__main__":
    main()

"""All benchmarks of the serving engine, in short or in full; what is not installed is said.

    python -m benchmarks.serve [--json] [--full] [--only speed,quantized,forms,operations,http]

Each is a process of its own, one after another. In short they take some minutes, and their figures are of one round.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.serve_peers import PEERS, installed

PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "speed": ("serve_speed", ("--rounds", "1")),
    "quantized": ("serve_quantized", ("--rounds", "1", "--new", "8")),
    "forms": ("serve_forms", ("--steps", "60", "--rounds", "1")),
    "operations": ("serve_operations", ("--operations", "20000")),
    "http": ("serve_http", ("--seconds", "2")),
}
"""Name -> module, and what makes it short."""


def figures(name: str, *, full: bool) -> dict[str, Any]:
    """What one benchmark prints. RuntimeError with the end of what it said where it fails."""
    module, short = PARTS[name]
    command = [sys.executable, "-m", f"benchmarks.{module}", "--json", *(() if full else short)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"benchmarks.{module} ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def flat(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document whose parts are documents: their figures by names with a point."""
    pairs = ((key, entry if isinstance(entry, dict) else {"": entry}) for key, entry in document.items())
    return {f"{key}.{name}".rstrip("."): entry for key, entries in pairs for name, entry in entries.items()}


def main(words: Sequence[str] | None = None) -> int:
    """Print a table for each; status 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--full", action="store_true", help="as many rounds and steps as the claims are made with")
    parser.add_argument("--only", default=",".join(PARTS), help="some of them, with commas")
    asked = parser.parse_args(words)
    names = asked.only.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"--only {unknown[0]} is not known: take of {', '.join(PARTS)}")
    there = installed()
    document: dict[str, Any] = {"installed": there}
    if not asked.json:
        print(f"{'peer':16}{'version':16}takes part with")
        for name, version in there.items():
            print(f"{name:16}{version or 'not installed':16}{PEERS[name]}", flush=True)
    failed = False
    for name in names:
        try:
            document[name] = figures(name, full=asked.full)
        except RuntimeError as error:
            failed, document[name] = True, {"error": str(error)}
        if not asked.json:
            print(f"\n{name} (benchmarks.{PARTS[name][0]})")
            for key, value in flat(document[name]).items():
                print(f"  {key:34} {value if isinstance(value, str) else format(value, ',.4g')}", flush=True)
    if asked.json:
        print(json.dumps(document))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

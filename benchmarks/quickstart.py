"""`meshwright quickstart` as a user meets it: a fresh process, an empty cache; its time, memory and result.

python -m benchmarks.quickstart [--json] [KEY=VALUE ...]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.resident import watch


def measure(overrides: list[str]) -> dict[str, Any]:
    """Wall seconds, most bytes held, bits per byte on held-out text, and the sample after training."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "meshwright", "quickstart", "--json", f"run={folder}/run", *overrides]
        seen = watch(command, environment={"XDG_CACHE_HOME": f"{folder}/cache"}, cwd=Path(folder))
        if seen.status:
            sys.exit(f"quickstart failed: {seen.stderr.strip()}")
        outcome = json.loads(seen.stdout)
    return {
        "seconds": seen.seconds,
        "peak_bytes": seen.peak_bytes,
        "bits_per_byte": outcome["bits_per_byte"],
        "tokens_per_second": outcome["summary"]["tokens_per_second"],
        "sample": outcome["after"],
    }


def main() -> None:
    """Print the figures, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    result = measure(options.overrides)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{result['seconds']:.0f} s in all, {result['peak_bytes'] / 2**30:.2f} GiB at most")
    print(f"{result['bits_per_byte']:.3f} bits per byte, {result['tokens_per_second']:.0f} tokens/s")
    print(result["sample"])


if __name__ == "__main__":
    main()

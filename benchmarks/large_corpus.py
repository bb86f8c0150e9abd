"""A corpus larger than the memory that is allowed: made, encoded, sampled; how much memory that takes.

    python -m benchmarks.large_corpus [--json] [--size-gb 3] [--batches 200]

The default text is repeated into files of about 100 MB (every copy with its number in front, so that no two are equal)
until there are `--size-gb` GB of it. One fresh process encodes it and reads batches of 32 x 1024 tokens at random. Its
memory is the largest sum of resident bytes over that process and its children, looked at 20 times a second; memory that
they share is counted for each.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS, SEQUENCE = 32, 1024
FILE_BYTES = 10**8
PERIOD_S = 0.05
PAGE_BYTES = 4096

CHILD = """
import json, sys, time
from pathlib import Path
from meshwright.data import Sampler, prepare
from meshwright.spec import Data

folder, cache, batches = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
start = time.perf_counter()
corpus = prepare(Data(path=str(folder)), cache_root=cache)
encoded = time.perf_counter()
print("SAMPLING", flush=True)
sampler = Sampler(corpus.train, sequence=int(sys.argv[5]), tokenizer_separator=corpus.tokenizer.separator, seed=0)
checksum = sum(int(sampler.take(number * int(sys.argv[4]), int(sys.argv[4])).tokens.sum()) for number in range(batches))
sampled = time.perf_counter()
print(json.dumps({
    "encode_seconds": encoded - start,
    "sample_seconds": sampled - encoded,
    "tokens": corpus.train.num_tokens + corpus.validation.num_tokens,
    "text_bytes": corpus.train.num_bytes + corpus.validation.num_bytes,
    "held_out_share": corpus.validation.num_bytes / (corpus.train.num_bytes + corpus.validation.num_bytes),
    "checksum": checksum,
}))
"""


def make(folder: Path, size_bytes: int) -> int:
    """Write text files of `size_bytes` in all; gives the bytes written."""
    from meshwright.data import documents
    from meshwright.spec import Data

    text = "\n".join(document.text for document in documents(Data(path="stdlib"))).encode()
    written = number = 0
    while written < size_bytes:
        copies = [b"# copy %d\n%b" % (number + place, text) for place in range(max(1, FILE_BYTES // len(text)))]
        content = b"".join(copies)[: size_bytes - written].rsplit(b"\n", 1)[0] + b"\n"
        (folder / f"{number:06}.txt").write_bytes(content)
        written += len(content)
        number += len(copies)
    return written


def resident_bytes(pid: int) -> int:
    """Resident bytes of a process and its descendants; Linux only, 0 elsewhere."""
    total = 0
    with contextlib.suppress(OSError):
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            total += sum(resident_bytes(int(child)) for child in children.read_text().split())
    return total


def measure(size_bytes: int, batches: int) -> dict[str, object]:
    """Seconds of each part, and the most memory held while encoding and while sampling."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "text")
        folder.mkdir()
        written = make(folder, size_bytes)
        arguments = [str(folder), f"{place}/cache", str(batches), str(ROWS), str(SEQUENCE)]
        started, log = time.perf_counter(), Path(place, "log")
        with log.open("w") as out:
            child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stdout=out)
        peaks = {"encoding": 0, "sampling": 0}
        while child.poll() is None:
            phase = "sampling" if log.stat().st_size else "encoding"
            peaks[phase] = max(peaks[phase], resident_bytes(child.pid))
            time.sleep(PERIOD_S)
        seconds = time.perf_counter() - started
        if child.returncode:
            sys.exit(f"the encoding process ended with {child.returncode}")
        found = json.loads(log.read_text().splitlines()[-1])
    return {
        "text_bytes_written": written,
        **found,
        "seconds": seconds,
        "megabytes_per_second": written / found["encode_seconds"] / 1e6,
        "batches_per_second": batches / found["sample_seconds"],
        "peak_encoding_bytes": peaks["encoding"],
        "peak_sampling_bytes": peaks["sampling"],
        "peak_bytes": max(peaks.values()),
    }


def main() -> None:
    """Print the figures, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size-gb", type=float, default=3.0)
    parser.add_argument("--batches", type=int, default=200)
    options = parser.parse_args()
    result = measure(round(options.size_gb * 1e9), options.batches)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        shown = f"{value / 2**20:,.0f} MiB" if name.startswith("peak") else f"{value:,.4g}"  # type: ignore[operator]
        print(f"{name:<22} {shown}")


if __name__ == "__main__":
    main()

"""A token store: encoded by two workers that are killed and started again, then read beside steps of a fixed time.

    python -m benchmarks.token_store [--json] [--size-gb 0.5] [--kills 3] [--steps 400] [--step-ms 50]

The default text is repeated into .jsonl files, every document with a number in front, until there are `--size-gb` GB.
Two `meshwright data prepare --part I/2 --processes 1` encode it with the tokenizer of 2,048 tokens. After every quarter
both are killed (SIGKILL). Memory is the largest sum of resident bytes over a worker and its children, looked at 20
times a second. Then one process on one core reads batches of 64 x 1,024 tokens, as the engine does, beside steps that
sleep: the share of the time that it waits for data is what a step on a device would lose. Other processes on the
machine lengthen single waits, so the median is given, too.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.large_corpus import PERIOD_S

ROWS, SEQUENCE = 64, 1024
FILE_BYTES = 10**8


def make(folder: Path, size_bytes: int) -> int:
    """Write .jsonl files of `size_bytes` in all; return the number of documents."""
    from meshwright.data.text.sources import Source
    from meshwright.spec import Data

    texts = [document.text for document in Source(Data(path="stdlib")).documents()]
    written = documents = number = 0
    while written < size_bytes:
        with (folder / f"{number:06}.jsonl").open("w", encoding="utf-8") as file:
            while file.tell() < FILE_BYTES and written + file.tell() < size_bytes:
                text = texts[documents % len(texts)]
                file.write(json.dumps({"text": f"# document {documents}\n{text}"}) + "\n")
                documents += 1
            written, number = written + file.tell(), number + 1
    return documents


def resident(process: int) -> int:
    """Return the bytes that a process and its children keep in memory; shared pages count once (PSS)."""
    total, waiting = 0, [process]
    while waiting:
        pid = waiting.pop()
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
            waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())
        except OSError:  # it has just ended
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def encode(text: Path, store: Path, tokenizer: Path, kills: int, units: int) -> dict[str, Any]:
    """Encode with two workers, killed `kills` times on the way."""
    command = [
        sys.executable, "-m", "meshwright", "data", "prepare", f"data={text}", f"data.tokenizer={tokenizer}", "-o",
        str(store), "--processes", "1",
    ]  # fmt: skip
    started, peak, finished, redone = time.perf_counter(), 0, dict[str, int](), 0
    for attempt in range(kills + 1):
        workers = [subprocess.Popen([*command, "--part", f"{part}/2"], stdout=subprocess.DEVNULL) for part in (1, 2)]
        is_last = attempt == kills
        while any(worker.poll() is None for worker in workers):
            peak = max(peak, *(resident(worker.pid) for worker in workers))
            done = len(list(store.glob("units/*.json")))
            if not is_last and done >= units * (attempt + 1) // (kills + 1):
                for worker in workers:
                    worker.send_signal(signal.SIGKILL)
            time.sleep(PERIOD_S)
        codes = [worker.wait() for worker in workers]
        if any(code not in ((0,) if is_last else (0, -signal.SIGKILL)) for code in codes):
            raise SystemExit(f"a worker ended with {codes}")
        now = {path.name: path.stat().st_mtime_ns for path in store.glob("units/*.json")}
        redone, finished = redone + sum(now.get(name) != written for name, written in finished.items()), now
    seconds = time.perf_counter() - started
    return {"encode_seconds": seconds, "worker_bytes": peak, "kills": kills, "units_done_again": redone}


def read(store: Path, steps: int, step_s: float) -> dict[str, Any]:
    """Read batches beside steps that sleep, on one core."""
    import torch

    from meshwright.data import prepare
    from meshwright.data.sequences.numbered_rows import numbered_rows
    from meshwright.spec import Data, Recipe
    from meshwright.training.step.batches import Feed, PackedRows

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    data, recipe = Data(path=str(store)), Recipe(sequence=SEQUENCE, seed=1)
    corpus = prepare(data)
    rows = numbered_rows(data, recipe, corpus, corpus.train, shuffle=True)
    feed = Feed(PackedRows(rows, document_mask=True), torch.device("cpu"))
    feed.take(0, ROWS, ROWS)
    waits, used, started = list[float](), time.process_time(), time.perf_counter()
    for step in range(1, steps + 1):
        time.sleep(step_s)
        asked = time.perf_counter()
        feed.take(step * ROWS, ROWS, ROWS)
        waits.append(time.perf_counter() - asked)
    whole, used = time.perf_counter() - started, time.process_time() - used
    feed.close()
    return {
        "data_wait": sum(waits) / whole, "median_wait": statistics.median(waits) / step_s, "reader_core": used / whole,
        "tokens_per_second": steps * ROWS * SEQUENCE / whole, "train_tokens": corpus.train.num_tokens,
        "documents": corpus.train.num_documents, "batches_of_an_epoch": len(rows) / ROWS,
    }  # fmt: skip


def measure(size_gb: float, kills: int, steps: int, step_s: float) -> dict[str, Any]:
    """Return all figures."""
    from meshwright.data import Tokenizer
    from meshwright.data.stored.encoding import SHARD_TOKENS
    from meshwright.data.text.raw_shards import list_spans

    with tempfile.TemporaryDirectory(prefix="token-store-") as name:
        text, store, tokenizer = (Path(name) / part for part in ("text", "store", "tokenizer"))
        text.mkdir()
        tokenizer.mkdir()
        Tokenizer.shipped().save(tokenizer)
        documents = make(text, int(size_gb * 1e9))
        # As many units as the verb makes of it: files of 100 MB are larger than half a unit.
        units = len(list_spans(str(text), 8 * SHARD_TOKENS))
        figures = encode(text, store, tokenizer, kills, units)
        held = json.loads((store / "index.json").read_text(encoding="utf-8"))["held"]
        done = read(store, steps, step_s)
        if done["documents"] + sum(held["documents"]) != documents:
            raise SystemExit(f"{documents} documents went in, and {done['documents']} came out")
    return {"text_gb": size_gb, **figures, **done}


def main(words: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=0.5)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(words)
    figures = measure(asked.size_gb, asked.kills, asked.steps, asked.step_ms / 1000)
    print(json.dumps(figures) if asked.json else "\n".join(f"{name:18} {value:.6g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()

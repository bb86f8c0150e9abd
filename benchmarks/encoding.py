"""Text to tokens beside the batch mode of `tokenizers` on all cores: the same text, one run, in turns.

    python -m benchmarks.encoding [--json] [--rounds 3] [--path stdlib] [--tokenizer auto]

Ours is `meshwright.data.prepare` as a run meets it, with an empty cache: find and read the files, hash them, start
processes, encode, write tokens to disk. The library gets the text ready in memory and leaves its ids there as numpy
arrays: `encode_batch`, and `encode_batch_fast`, which keeps no offsets. Both are given one document per text. The best
round of each counts; the token streams are compared. Ours is also timed alone in this process, text in memory too.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding

from meshwright.data import Corpus, prepare
from meshwright.data.corpus.pool import count_cores
from meshwright.data.text.sources import Source
from meshwright.data.tokens.word_encoder import library
from meshwright.spec import Data


def timed(run: Callable[[], object]) -> tuple[float, object]:
    """(seconds, what it gave)."""
    start = time.perf_counter()
    tokens = run()
    return time.perf_counter() - start, tokens


def prepared(data: Data, processes: int | None) -> Corpus:
    """The corpus, from nothing."""
    with tempfile.TemporaryDirectory() as folder:
        return prepare(data, cache_root=Path(folder), processes=processes)


def measure(data: Data, rounds: int) -> dict[str, Any]:
    """Best MB/s of each contestant, the ratios, and whether all tokens are equal."""
    texts = [document.text for document in Source(data).documents()]
    size = sum(len(text.encode()) for text in texts)
    tokenizer = prepared(data, 1).tokenizer
    batch = library(tokenizer.json)

    def ids(method: Callable[..., Sequence[Encoding]]) -> list[np.ndarray]:
        return [np.array(encoding.ids, dtype=tokenizer.dtype) for encoding in method(texts, add_special_tokens=False)]

    contestants: dict[str, Callable[[], object]] = {
        "ours": lambda: prepared(data, None),
        "ours_one_core_in_memory": lambda: [tokenizer.encode(text) for text in texts],
        "encode_batch": lambda: ids(batch.encode_batch),
        "encode_batch_fast": lambda: ids(batch.encode_batch_fast),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    results: dict[str, Any] = {}
    for _ in range(rounds):
        for name, run in contestants.items():
            took, results[name] = timed(run)
            seconds[name].append(took)
    speed = {name: size / min(times) / 1e6 for name, times in seconds.items()}
    return {
        "text_bytes": size,
        "documents": len(texts),
        "cores": count_cores(),
        "rounds": rounds,
        "megabytes_per_second": speed,
        "seconds": {name: min(times) for name, times in seconds.items()},
        "ours_over_encode_batch": speed["ours"] / speed["encode_batch"],
        "ours_over_encode_batch_fast": speed["ours"] / speed["encode_batch_fast"],
        "ours_over_best": speed["ours"] / max(speed["encode_batch"], speed["encode_batch_fast"]),
        "tokens_equal": _equal(results),
    }


def _equal(results: dict[str, Any]) -> bool:
    """Whether ours and the library's ids are the same, document by document."""
    ours, theirs = results["ours_one_core_in_memory"], results["encode_batch"]
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    """Print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", default="stdlib")
    parser.add_argument("--tokenizer", default="auto")
    parser.add_argument("--limit-bytes", type=int, default=0)
    options = parser.parse_args()
    data = Data(path=options.path, tokenizer=options.tokenizer, limit_bytes=options.limit_bytes)
    result = measure(data, options.rounds)
    if options.json:
        print(json.dumps(result, indent=1))
        return
    print(f"{result['text_bytes'] / 1e6:.1f} MB in {result['documents']} documents, {result['cores']} cores")
    for name, speed in result["megabytes_per_second"].items():
        print(f"{name:<24} {speed:7.2f} MB/s {result['seconds'][name]:7.2f} s")
    print(f"ours over the best of tokenizers: {result['ours_over_best']:.2f}x, tokens equal: {result['tokens_equal']}")


if __name__ == "__main__":
    main()

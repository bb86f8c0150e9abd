"""Keys and values in 8 bits, and guessed tokens: what they change, and what they save.

    python -m benchmarks.serve_forms [--json] [--steps 200] [--rounds 3]

A model of 4 layers is trained here on the standard library's source, in bytes. Cache: held-out windows are read by the
engine's own forward pass over a cache of each form; KL(model's dtype || form) in nats per token, the share of equal
likeliest tokens, and bytes of a position. Guesses: the engine continues windows of that source, greedy, one at a time
and eight at once, with guesses that are looked up and without; each pair of answers is compared token by token. Seconds
are those of the processor, of each contestant the fewest of all rounds.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.data.corpus.corpus import TokenStream
from meshwright.kernels.c import serving_library
from meshwright.model import Transformer
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.cache.blocks import CachedSequence
from meshwright.serving.engine.cache.paged_cache import PagedCache, bytes_per_block
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.rows.packed_step import RowPacker, Run
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.engine.speculation import Speculation
from meshwright.spec.plan.execution import CACHE_FORMS, CacheForm

LEARNER = {
    "layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 512, "vocab": 257, "max_positions": 1024,
    "tied": True,
}  # fmt: skip
RECIPE = {
    "sequence": 256, "global_batch": 4, "learning_rate": 2e-3, "warmup_steps": 10, "eval_every": 0,
    "eval_sequences": 0, "checkpoint_every": 0, "log_every": 10**6,
}  # fmt: skip
WINDOWS, LENGTH, NEW = 32, 256, 256


def trained(folder: Path, steps: int) -> tuple[Transformer, list[list[int]]]:
    """The model, and windows that it has not seen."""
    data = {"path": "stdlib", "tokenizer": "bytes", "limit_bytes": 4_000_000, "validation": 0.01}
    mw.train(
        model=LEARNER, data=data, run=str(folder), watchers=(), dry_run=False, recipe={**RECIPE, "steps": steps}
    )  # fmt: skip
    opened = mw.load(folder)
    rows = opened.held_out_rows(None, 0)
    assert isinstance(rows.stream, TokenStream), "the text has a single source"
    text = [int(token) for token in rows.stream.read(0, WINDOWS * LENGTH)]
    return opened.model.eval(), [text[begin : begin + LENGTH] for begin in range(0, len(text), LENGTH)]


@torch.no_grad()
def logits(model: Transformer, tokens: Sequence[int], form: CacheForm) -> Tensor:
    """(S, V) behind each token, over a cache of a form: each row reads what is kept."""
    cache = PagedCache(model, -(-len(tokens) // 16), 16, form=form, loops=serving_library.compiled())
    sequence = CachedSequence(number=0, tokens=list(tokens), limit=len(tokens), first=b"")
    sequence.table = list(range(cache.number))
    packed = RowPacker(cache, len(tokens), exact=True, copies_bytes=0).pack(
        [Run(sequence, 0, len(tokens))], len(tokens)
    )
    x, _ = model.hidden(packed.tokens, positions=packed.positions, cache=cache.at(packed.places))
    return model.kernels.linear(x[0], model.head_weight).float()


def of_cache(model: Transformer, windows: Sequence[Sequence[int]]) -> dict[str, float]:
    """What each form costs."""
    sums = {form: [0.0, 0.0] for form in CACHE_FORMS[1:]}
    loss = 0.0
    for window in windows:
        full = logits(model, window, "model").log_softmax(-1)
        loss += float(F.nll_loss(full[:-1], torch.tensor(window[1:])))
        for form, total in sums.items():
            predictions = logits(model, window, form).log_softmax(-1)
            total[0] += float(F.kl_div(predictions, full, log_target=True, reduction="batchmean"))
            total[1] += float((predictions.argmax(-1) == full.argmax(-1)).float().mean())
    count = len(windows)
    result = {"loss": loss / count}
    for form, (divergence, equal) in sums.items():
        result[f"{form}_kl"], result[f"{form}_top1"] = divergence / count, equal / count
        result[f"{form}_smaller"] = bytes_per_block(model, 16) / bytes_per_block(model, 16, form)
    return result


def of_guesses(model: Transformer, windows: Sequence[Sequence[int]], rounds: int) -> dict[str, float]:
    """What guesses save."""
    result: dict[str, float] = {}
    differing = 0
    for batch in (1, 8):
        prompts = windows[:8]
        engines = {
            name: ServingEngine(model, EngineOptions(speculation=speculation, most_sequences=batch, exact=exact))
            for name, speculation, exact in (
                ("plain", None, False), ("guessed", Speculation(), False), ("plain exact", None, True),
                ("guessed exact", Speculation(), True),
            )
        }  # fmt: skip
        seconds, answers = dict.fromkeys(engines, float("inf")), dict[str, list[list[int]]]()
        for turn in range(rounds):
            for name, engine in engines.items():
                wanted = RequestOptions(max_new_tokens=NEW, salt=str(turn))
                asked = [engine.add(prompt, wanted) for prompt in prompts]
                began = time.process_time()
                engine.run(asked)
                seconds[name] = min(seconds[name], time.process_time() - began)
                answers[name] = [request.answers[0].ids for request in asked]
        differing += sum(a != b for a, b in zip(answers["plain exact"], answers["guessed exact"], strict=True))
        counts = engines["guessed"].guesses
        assert counts is not None
        result[f"guessed_over_plain_{batch}"] = seconds["plain"] / seconds["guessed"]
        result[f"exact_guessed_over_plain_{batch}"] = seconds["plain exact"] / seconds["guessed exact"]
        result[f"accepted_{batch}"] = counts.accepted / max(1, counts.guessed)
    return result | {"differing": differing}


def main(words: Sequence[str] | None = None) -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model, windows = trained(Path(folder) / "run", asked.steps)
    figures = of_cache(model, windows) | of_guesses(model, windows, asked.rounds)
    print(
        json.dumps(figures) if asked.json else "\n".join(f"{name:34} {value:,.4g}" for name, value in figures.items())
    )


if __name__ == "__main__":
    main()

"""The serving engine beside transformers, on requests of mixed lengths; and what its parts cost.

    python -m benchmarks.serve_speed [--json] [--rounds 3] [--part load|prefix|cache|arrival|blocks|scheduler]

Load: the same 32 requests (prompts of 16 to 256 tokens, answers of 16 to 128, greedy) to the same random llama-10m in
fp32, answered by transformers one after another, in batches of 8 with left padding, and by its continuous batching; by
vLLM where it is installed; and by the engine in both of its modes. They take turns in one process with one thread;
seconds are those of the processor, and of each contestant the fewest of all rounds count. A token counts if it was
asked for: what a batch computes beyond that is its own loss. Answers are compared token by token; where transformers'
own two likeliest tokens are within 1e-4 of the logit, either is right, and that is counted.

Prefix: seconds until the first token behind a prefix of 1,024 tokens and 32 more, with the prefix in the cache over
without; also where it had to make way, and comes from host memory. Cache: the load with hits looked for over without,
none being there; and the share of positions in held blocks that hold nothing, of that load and of one whose lengths are
those of people's chats. Arrival: eight sequences of a llama-100m decode while a prompt of 2,048 arrives; the 99th
percentile of the seconds between their tokens over the median of the same steps without it, and seconds until its first
token, with some numbers of tokens that prompts may have in such a step. Blocks: seconds per operation of a pool of
100,000 blocks over those of 1,000. Scheduler: seconds of a step with 64 sequences that decode, without the model.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.chat_file import ANSWER, PROMPT, SIGMA, TURNS
from benchmarks.serve_peers import continuous, exported, vllm_engine
from meshwright.model import Transformer, build
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.cache.blocks import BlockPool, BlockTables
from meshwright.serving.engine.cache.paged_cache import bytes_per_block
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.scheduler import Scheduler
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec import presets

REQUESTS, BATCH = 32, 8
STEADY = (0, 32, 8, 4)
"""Tokens of prompts in a step in which others decode; 0 = the engine's default."""
TIE = 1e-4
"""Of the logit: two tokens as near as this are as likely."""
Answers = list[list[int]]
Load = list[tuple[list[int], int]]
"""Prompts, and how many tokens are asked for."""


def requests(vocab: int, number: int, seed: int = 0) -> Load:
    """Of mixed lengths."""
    chance = random.Random(seed)
    prompts = [[chance.randrange(vocab) for _ in range(chance.randint(16, 256))] for _ in range(number)]
    return [(prompt, chance.randint(16, 128)) for prompt in prompts]


def peer_of(model: Transformer) -> Any:
    """The same model of transformers."""
    import transformers

    with exported(model) as folder:
        return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def theirs(peer: Any, load: Load, batch: int) -> Answers:
    """transformers, so many requests at a time, as long as the longest of them asks for."""
    answers = []
    for begin in range(0, len(load), batch):
        part = load[begin : begin + batch]
        longest = max(len(prompt) for prompt, _ in part)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in part])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in part])
        most = max(count for _, count in part)
        generated = peer.generate(
            ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False, pad_token_id=0
        )
        answers += [row[longest : longest + count].tolist() for row, (_, count) in zip(generated, part, strict=True)]
    return answers


def ours(engine: ServingEngine, load: Load, salt: int) -> Answers:
    """The engine; of a salt that is new nothing is in its cache."""
    asked = [engine.add(prompt, RequestOptions(max_new_tokens=count, salt=str(salt))) for prompt, count in load]
    engine.run(asked)
    assert not any(request.cached for request in asked)
    return [request.answers[0].ids for request in asked]


@torch.no_grad()
def differences(peer: Any, load: Load, right: Answers, answers: Answers) -> tuple[int, int]:
    """Answers that differ from transformers' own at a place that is no tie, and those that do at a tie."""
    wrong = ties = 0
    for (prompt, _), expected, actual in zip(load, right, answers, strict=True):
        index = next(
            (index for index, pair in enumerate(zip(expected, actual, strict=True)) if pair[0] != pair[1]), None
        )
        if index is not None:
            logits = peer(torch.tensor([prompt + expected[:index]])).logits[0, -1]
            gap = abs(float(logits[expected[index]] - logits[actual[index]]))
            near = gap < TIE * float(logits[expected[index]].abs())
            wrong, ties = wrong + (not near), ties + near
    return wrong, ties


def cpu_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Of the processor, and what it gave."""
    began = time.process_time()
    answer = call()
    return time.process_time() - began, answer


def race(rounds: int) -> dict[str, float]:
    """All contestants in turns."""
    model = build(presets.model("llama-10m")).eval()
    peer, load = peer_of(model), requests(model.shape.vocab, REQUESTS)
    fast, exact = (ServingEngine(model, EngineOptions(exact=exact, cache_bytes=2**28)) for exact in (False, True))
    ways: dict[str, Callable[[int], Answers]] = {
        "one_by_one": lambda _: theirs(peer, load, 1),
        "static": lambda _: theirs(peer, load, BATCH),
        "continuous": lambda _: continuous(peer, load),
        "engine": lambda turn: ours(fast, load, turn),
        "exact": lambda turn: ours(exact, load, turn),
    }
    if find_spec("vllm"):
        other = vllm_engine(model)
        ways["vllm"] = lambda _: other(load)
    seconds, answers = dict.fromkeys(ways, float("inf")), dict[str, Answers]()
    for turn in range(rounds):
        for name, way in ways.items():
            took, answers[name] = cpu_seconds(partial(way, turn))
            seconds[name] = min(seconds[name], took)
    tokens = sum(count for _, count in load)
    compared = [differences(peer, load, answers["one_by_one"], answers[name]) for name in ("engine", "exact")]
    wrong, ties = map(sum, zip(*compared, strict=True))
    return {
        **{f"{name}_tokens_per_second": tokens / took for name, took in seconds.items()},
        "over_one_by_one": seconds["one_by_one"] / seconds["engine"],
        "over_static": seconds["static"] / seconds["engine"],
        **{f"over_{name}": seconds[name] / seconds["engine"] for name in ("continuous", "vllm") if name in ways},
        "exact_over_one_by_one": seconds["one_by_one"] / seconds["exact"],
        "exact_over_static": seconds["static"] / seconds["exact"],
        "exact_costs": seconds["exact"] / seconds["engine"] - 1,
        "wrong": wrong,
        "ties": ties,
    }


UNITS = {
    "prefix_sooner": "times sooner comes the first token behind a cached prefix, by CPU time",
    "prefix_hit_tokens": "tokens of each prompt were found in the cache",
    "prefix_host_sooner": "times sooner, where the prefix is loaded from host memory",
}
"""Figure -> what its number counts, where the name does not say it."""


def prefix(rounds: int) -> dict[str, float]:
    """The first token behind a long prefix."""
    model = build(presets.model("llama-10m")).eval()
    chance = random.Random(1)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    engine = ServingEngine(model, EngineOptions(cache_bytes=2**28, most_tokens=2048))
    hits = 0
    for _ in range(2 * rounds):
        shared = [chance.randrange(model.shape.vocab) for _ in range(1024)]
        for hit in (False, True):
            prompt = shared + [chance.randrange(model.shape.vocab) for _ in range(32)]
            asked = engine.add(prompt, RequestOptions(max_new_tokens=1))
            took, _ = cpu_seconds(partial(engine.run, [asked]))
            seconds[hit].append(took)
            hits += asked.cached if hit else 0
    return {
        "prefix_sooner": min(seconds[False]) / min(seconds[True]), "prefix_hit_tokens": hits / (2 * rounds),
        "prefix_host_sooner": min(seconds[False]) / _from_host(model, chance, rounds),
    }  # fmt: skip


def _from_host(model: Transformer, chance: random.Random, rounds: int) -> float:
    """Seconds of the first token behind a prefix that had to make way for another one and comes from host memory."""
    each = bytes_per_block(model, 16)
    engine = ServingEngine(
        model, EngineOptions(cache_bytes=80 * each, host_cache_bytes=400 * each, most_tokens=2048)
    )  # fmt: skip
    shared = [[chance.randrange(model.shape.vocab) for _ in range(1024)] for _ in range(2)]
    best = float("inf")
    for turn in range(4 * rounds):
        prompt = shared[turn % 2] + [chance.randrange(model.shape.vocab) for _ in range(32)]
        asked = engine.add(prompt, RequestOptions(max_new_tokens=1))
        took, _ = cpu_seconds(partial(engine.run, [asked]))
        best = min(best, took) if asked.cached else best
    assert engine.tables.host_hits, "all of it was in blocks"
    return best


def cache(rounds: int) -> dict[str, float]:
    """What looking for hits costs where there are none, and how much of held blocks is empty."""
    model = build(presets.model("llama-10m")).eval()
    load = requests(model.shape.vocab, REQUESTS, seed=7)
    best = {"": float("inf"), None: float("inf")}
    for _ in range(4 * rounds):
        best = {salt: min(seconds, _of_load(model, load, salt)) for salt, seconds in best.items()}
    return {
        "no_hit_costs": best[""] / best[None] - 1,
        "cache_waste": _waste(load),
        "chat_waste": _waste(chats(4 * REQUESTS)),
    }


def chats(number: int, seed: int = 8) -> Load:
    """Last turns of conversations: prompts with all turns before, and answers, as long as people's (`chat_file`)."""
    chance, mean = np.random.default_rng(seed), SIGMA**2 / 2

    def length(median: float) -> int:
        return max(1, round(float(chance.lognormal(np.log(median) - mean, SIGMA))))

    def prompt() -> int:
        return length(PROMPT) + sum(length(PROMPT) + length(ANSWER) for _ in range(chance.geometric(1 / TURNS) - 1))

    return [([1] * min(prompt(), 3000), min(length(ANSWER), 1000)) for _ in range(number)]


def _waste(load: Load, block: int = 16) -> float:
    """Share of the positions of held blocks that hold nothing, over all steps of a load."""
    scheduler = Scheduler(BlockTables(BlockPool(2**14), block), most_tokens=512, most_sequences=64, prompt_tokens=128)
    for prompt, count in load:
        scheduler.add(prompt, len(prompt) + count, salt=None)
    held = filled = 0
    while not scheduler.idle:
        plan = _stepped(scheduler)
        held += sum(len(running.table) * block for running in scheduler.running)
        filled += sum(running.computed for running in scheduler.running)
        for sequence in plan.chunks:
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(0)
                if len(sequence.tokens) == sequence.limit:
                    scheduler.end(sequence)
    return 1 - filled / held


def _of_load(model: Transformer, load: Load, salt: str | None) -> float:
    """Seconds; `salt` None = hits are not looked for."""
    engine = ServingEngine(model, EngineOptions(cache_bytes=2**28, most_tokens=2048))
    asked = [engine.add(prompt, RequestOptions(max_new_tokens=count, salt=salt)) for prompt, count in load]
    return cpu_seconds(lambda: engine.run(asked))[0]


def arrival(rounds: int) -> dict[str, float]:
    """Of sequences that decode while a long prompt arrives."""
    model = build(replace(presets.model("llama-100m"), max_positions=4096)).eval()
    intervals: dict[int, list[tuple[float, float]]] = {number: [] for number in STEADY}
    for _ in range(1 + rounds // 3):
        for number, rows in intervals.items():
            options = EngineOptions(cache_bytes=2**28, prompt_tokens=number)
            gaps = _arrival(model, options)
            quiet = _arrival(model, options, steps=len(gaps))
            rows.append((sorted(gaps)[len(gaps) * 99 // 100] / median(quiet), sum(gaps)))
    return {
        f"arrival_{number or 'default'}_{name}": median(figures)
        for number, rows in intervals.items()
        for name, figures in zip(("p99_over_p50", "first_token_s"), zip(*rows, strict=True), strict=True)
    }


def _arrival(model: Transformer, options: EngineOptions, *, steps: int = 0, sequences: int = 8) -> list[float]:
    """Seconds of each step of sequences that decode, while a prompt of 2,048 is read beside them; of so many `steps`
    without it."""
    chance, engine = random.Random(2), ServingEngine(model, options)
    prompts = [[chance.randrange(model.shape.vocab) for _ in range(length)] for length in (32,) * sequences + (2048,)]
    for prompt in prompts[:-1]:
        engine.add(prompt, RequestOptions(max_new_tokens=2000))
    for _ in range(20):
        engine.step()
    if steps:
        return [cpu_seconds(engine.step)[0] for _ in range(steps)]
    late, gaps = engine.add(prompts[-1], RequestOptions(max_new_tokens=1)), list[float]()
    while not late.answers[0].ids:
        gaps.append(cpu_seconds(engine.step)[0])
    return gaps


def block_operations(rounds: int) -> dict[str, float]:
    """A mixture of all operations of a pool, most of whose blocks have content."""
    best = dict.fromkeys((1000, 100_000), float("inf"))
    for _ in range(3 * rounds):
        best = {size: min(seconds, _of_pool(size)) for size, seconds in best.items()}
    return {
        "block_operation_nanoseconds": best[1000] * 1e9,
        "block_operation_nanoseconds_100k": best[100_000] * 1e9,
        "blocks_100k_over_1k": best[100_000] / best[1000],
    }


def _of_pool(size: int, operations: int = 20_000) -> float:
    """Seconds of the processor for one."""
    pool, chance = BlockPool(size), random.Random(0)
    for number in range(size):
        pool.publish(pool.take(), number.to_bytes(32))
    for block in range(size):
        pool.release(block)
    # the same few hundred blocks in every pool, far apart: else this would time the processor's cache
    blocks = [chance.randrange(1000) * (size // 1000) for _ in range(operations // 4)]

    def mixed() -> None:
        for number, block in enumerate(blocks):
            pool.hold(block)
            taken = pool.take()
            pool.publish(taken, (size + number).to_bytes(32))
            pool.release(block)
            pool.release(taken)

    return cpu_seconds(mixed)[0] / (5 * len(blocks))


def scheduler_step(rounds: int, sequences: int = 64) -> dict[str, float]:
    """Median seconds of a step in which all sequences decode."""
    tables = BlockTables(BlockPool(8192), 16)
    scheduler = Scheduler(tables, most_tokens=512, most_sequences=sequences)
    for number in range(sequences):
        scheduler.add([number] * (16 + number), 1000)
    took = []
    for step in range(300 * rounds):
        seconds, plan = cpu_seconds(lambda: _stepped(scheduler))
        for sequence in plan.chunks:
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(step)
                if len(sequence.tokens) == sequence.limit:
                    scheduler.end(sequence)
        if len(plan.chunks) == sum(plan.chunks.values()) == sequences:
            took.append(seconds)
    return {
        "scheduler_step_microseconds": median(took) * 1e6,
        "scheduler_mean_microseconds": sum(took) / len(took) * 1e6,
    }


def _stepped(scheduler: Scheduler) -> Any:
    plan = scheduler.plan()
    scheduler.advance(plan)
    return plan


PARTS: dict[str, Callable[[int], dict[str, float]]] = {
    "load": race, "prefix": prefix, "cache": cache, "arrival": arrival, "blocks": block_operations,
    "scheduler": scheduler_step,
}  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=PARTS)
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    for name, part in PARTS.items():
        if asked.part in (None, name):
            figures |= part(asked.rounds)
    if asked.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:34} {value:,.4g}  {UNITS.get(name, '')}".rstrip())


if __name__ == "__main__":
    main()

"""Loads of the serving engine on one GPU, and the same of vLLM where it is installed.

A load is requests that come at once, of random tokens, answered greedily to their full length: so many prompts of one
length, or nano-vllm's 256 requests of 100 to 1,024 tokens in and out (github.com/GeeeekExplorer/nano-vllm, bench.py).
Each load is run once before it counts. Weights are random: what tokens come changes no time.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu.errors import reason
from benchmarks.gpu.timing import Timer
from benchmarks.serve_peers import vllm_engine
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model import Transformer, build
from meshwright.model.quantized_weights import quantizable, quantized_name
from meshwright.model.transformer import build_quantized
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec import presets
from meshwright.spec.model.quantization_schemes import SCHEMES

Lengths = list[tuple[int, int]]
"""Tokens of each prompt, and of its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeEntry:
    """A model, its weights, and loads that it answers one after another."""

    model: str
    loads: tuple[tuple[int, int, int], ...] = ()
    """(requests, tokens of a prompt, of an answer)."""
    mixed: tuple[int, int, int] = (0, 0, 0)
    """(requests, fewest tokens, most tokens) of prompts and answers alike; no requests = none."""
    scheme: str = ""
    """Of quantized weights; empty = bf16."""
    rank: int
    expected_s: float

    @property
    def name(self) -> str:
        """For people."""
        return f"serving {self.model}, {self.scheme or 'as trained'}"

    def lengths(self) -> Iterator[tuple[str, Lengths]]:
        """Each load with its title."""
        for number, prompt, answer in self.loads:
            yield f"{number} x {prompt:,} + {answer:,}", [(prompt, answer)] * number
        number, least, most = self.mixed
        if number:
            chance = random.Random(0)
            each = [(chance.randint(least, most), chance.randint(least, most)) for _ in range(number)]
            yield f"{number} x {least:,} to {most:,}, in and out", each


DECODING = ((1, 32, 128), (64, 128, 128))
SERVE = [
    ServeEntry(model="llama-3.1-8b", rank=1, expected_s=150, loads=(
        *DECODING, (8, 128, 128), (1, 8000, 32), (32, 2000, 64), (256, 128, 128), (256, 1000, 1000))),
    ServeEntry(model="qwen3-0.6b", rank=2, expected_s=90, mixed=(256, 100, 1024)),
    ServeEntry(model="llama-3.2-1b", rank=3, expected_s=40, loads=DECODING),
]  # fmt: skip
QUANTIZED = [
    ServeEntry(model="llama-3.1-8b", scheme=scheme, rank=rank, expected_s=60, loads=DECODING)
    for rank, scheme in enumerate(("", "int4-rtn", "int8", "fp8", "nf4", "llm-int8"), start=2)
]
"""Weights in bf16 first: what the others are held against."""
TINY_SERVE = [ServeEntry(model="llama-tiny", rank=1, expected_s=5, loads=((2, 8, 4),), mixed=(3, 4, 8))]
TINY_QUANTIZED = [ServeEntry(model="llama-tiny", scheme="int4-rtn", rank=2, expected_s=5, loads=((1, 8, 4),))]


@torch.no_grad()
def model_of(entry: ServeEntry, device: torch.device, dtype: torch.dtype) -> Transformer:
    """The model with random weights, quantized where the entry says so."""
    shape = presets.model(entry.model)
    plain = build(shape, dtype=dtype, device=device).eval()
    if not entry.scheme:
        return plain
    scheme, sizes = SCHEMES[entry.scheme], quantizable(shape)
    model = build_quantized(shape, dict.fromkeys(sizes, scheme), outlier_columns={}, dtype=dtype, device=device)
    named = dict(model.named_parameters())
    for name, weight in plain.named_parameters():
        if name in sizes:
            model.get_submodule(quantized_name(name)).take(quantize_matrix(name, weight, scheme))  # type: ignore[operator]  # it is one that has codes
        else:
            named[name].copy_(weight)
    return model.eval()


def answered(engine: ServingEngine, lengths: Lengths, timer: Timer, salt: str, vocabulary: int = 0) -> dict[str, float]:
    """Seconds until every answer has begun, of a step from then on, and tokens per second of all. `salt`: no prefix is
    found in the cache; `vocabulary`: below which the tokens of prompts lie, 0 = the model's."""
    chance, vocab = random.Random(salt), vocabulary or engine.model.shape.vocab
    asked = [
        engine.add(
            [chance.randrange(vocab) for _ in range(prompt)],
            RequestOptions(max_new_tokens=answer, ignore_end=True, salt=salt),
        )
        for prompt, answer in lengths
    ]
    timer.settle()
    started = time.perf_counter()
    while not all(request.answers[0].ids for request in asked):
        engine.step()
    timer.settle()
    begun, before = time.perf_counter(), sum(len(request.answers[0].ids) for request in asked)
    steps = 0
    while not all(request.ended for request in asked):
        engine.step()
        steps += 1
    timer.settle()
    ended = time.perf_counter()
    tokens = sum(len(request.answers[0].ids) for request in asked)
    return {
        "first_s": begun - started, "step_s": (ended - begun) / max(1, steps), "tokens": tokens,
        "decode_tokens_per_s": (tokens - before) / (ended - begun), "tokens_per_s": tokens / (ended - started),
    }  # fmt: skip


def row(entry: ServeEntry, device: torch.device, timer: Timer, late: Callable[[], bool]) -> dict[str, Any]:
    """All loads of a model, each twice, of which the second counts."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = model_of(entry, device, dtype)
    loads: dict[str, dict[str, Any]] = {}
    engine = ServingEngine(model, EngineOptions(cache_bytes=0 if device.type == "cuda" else 2**26))
    for title, lengths in entry.lengths():
        try:
            if late():
                loads[title] = {"left_out": "no time left"}
                continue
            answered(engine, lengths, timer, f"warm {title}")
            loads[title] = answered(engine, lengths, timer, title)
        except Exception as failure:
            loads[title] = {"failed": reason(failure)}
    graphs = str(engine.cuda_graphs)
    del engine
    gc.collect()
    timer.release()
    if entry.mixed[0] and not entry.scheme and find_spec("vllm") and not late():
        loads["vLLM, mixed"] = _vllm(model, entry)
    return {"model": entry.model, "scheme": entry.scheme, "loads": loads, "graphs": graphs}


def _vllm(model: Transformer, entry: ServeEntry) -> dict[str, Any]:
    """The mixed load, answered by vLLM with the same weights."""
    try:
        other, chance = vllm_engine(model, dtype="bfloat16"), random.Random(1)
        _, lengths = list(entry.lengths())[-1]
        load = [([chance.randrange(model.shape.vocab) for _ in range(prompt)], answer) for prompt, answer in lengths]
        other(load)
        started = time.perf_counter()
        tokens = sum(map(len, other(load)))
        return {"tokens": tokens, "tokens_per_s": tokens / (time.perf_counter() - started)}
    except Exception as failure:
        return {"failed": reason(failure)}

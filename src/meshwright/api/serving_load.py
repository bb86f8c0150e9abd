"""A load run through the serving engine on this machine, beside what was planned and what a dry run of it holds."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import torch

from meshwright.model import Transformer, build
from meshwright.model.transformer import skeleton
from meshwright.planner.serving.cached_layers import sequence_bytes
from meshwright.planner.serving.closed_loop import Load, Served, serve
from meshwright.planner.serving.serving_memory import copies_bytes, weights_bytes
from meshwright.planner.serving.step_times import StepTimes
from meshwright.serve.engine_options import EngineOptions
from meshwright.serve.paged_cache import PagedCache
from meshwright.serve.request_options import RequestOptions
from meshwright.serve.served_request import ServedRequest
from meshwright.serve.serving_engine import ServingEngine
from meshwright.spec.shape import ModelShape

BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingColumns:
    """Three answers to one question. A dry run knows no time."""

    planned_weights_bytes: float
    dry_weights_bytes: float
    measured_weights_bytes: float
    planned_cache_bytes: float
    """Of the blocks that all requests in flight hold at their longest."""
    dry_cache_bytes: float
    measured_cache_bytes: float
    planned_copies_bytes: float
    """Of matrices in the order in which few rows read them."""
    measured_copies_bytes: float
    planned: Served
    measured: Served

    @property
    def errors(self) -> Mapping[str, float]:
        """Planned over measured, minus 1."""
        held = self.planned_weights_bytes + self.planned_cache_bytes + self.planned_copies_bytes
        there = self.measured_weights_bytes + self.measured_cache_bytes + self.measured_copies_bytes
        return {
            "memory": held / there - 1,
            "first_token": self.planned.first_token_s / self.measured.first_token_s - 1,
            "per_token": self.planned.per_token_s / self.measured.per_token_s - 1,
            "tokens_per_second": self.planned.output_tokens_per_s / self.measured.output_tokens_per_s - 1,
        }


def columns(times: StepTimes, load: Load, model: Transformer | None = None) -> ServingColumns:
    """Plan a load, count it dry, and run it here with `model`, or with weights of chance, in fp32 on the CPU."""
    of = times.of
    shape, places = of.model.shape, round(load.concurrency)
    blocks = places * _blocks(load)
    model = model or build(shape, dtype=torch.float32, device=torch.device("cpu"))
    dry_weights, dry_cache = dry(shape, blocks)
    measured, held, copies = run(model, load)
    return ServingColumns(
        planned_weights_bytes=weights_bytes(of), dry_weights_bytes=dry_weights,
        measured_weights_bytes=sum(one.nbytes for one in model.parameters()),
        planned_cache_bytes=blocks * sequence_bytes(of.model, BLOCK, of.cache_width),
        dry_cache_bytes=dry_cache, measured_cache_bytes=held, planned_copies_bytes=copies_bytes(of),
        measured_copies_bytes=copies, planned=serve(times, load), measured=measured,
    )  # fmt: skip


def _blocks(load: Load) -> int:
    """Of the longest sequence: the last token of an answer is never read."""
    return ceil((load.input_tokens + load.output_tokens - 1) / BLOCK)


def dry(shape: ModelShape, blocks: int) -> tuple[int, int]:
    """(bytes of weights, of the blocks of a cache) of the real model and cache, on tensors without memory."""
    model = skeleton(shape)
    weights = sum(one.numel() for one in model.parameters()) * 4
    with torch.device("meta"):
        cache = PagedCache(model, blocks, BLOCK)
    width = 4 / model.embed.weight.element_size()
    return weights, round(cache.bytes * width * blocks / (blocks + 2))


def run(model: Transformer, load: Load) -> tuple[Served, int, int]:
    """The closed loop, in wall time; bytes of the blocks that were held at once, and of copies of matrices."""
    places = round(load.concurrency)
    blocks = places * (_blocks(load) + 1)
    number, each = PagedCache(model, 1, BLOCK).bytes // 3, load.waves * places
    engine = ServingEngine(model, EngineOptions(most_sequences=places, cache_bytes=blocks * number, block=BLOCK))
    engine.run([_sent(engine, load, 10**6 + one, tokens=2) for one in range(2)])
    began = time.perf_counter()
    sent: dict[ServedRequest, tuple[float, float]] = {}
    growing, done, most = dict[ServedRequest, float](), list[tuple[float, float, float, float]](), 0
    while len(sent) < each or growing:
        while len(growing) < places and len(sent) < each:
            request = _sent(engine, load, len(sent))
            sent[request] = (time.perf_counter(), 0.0)
            growing[request] = 0.0
        engine.step()
        now = time.perf_counter()
        most = max(most, engine.tables.pool.size - engine.tables.pool.free)
        for request in [one for one in growing if one.answers[0].ids and not growing[one]]:
            growing[request] = now
        for request in [one for one in growing if one.ended]:
            first, begun, count = growing.pop(request), sent[request][0], len(request.answers[0].ids)
            done.append((first - begun, (now - first) / max(1, count - 1), now - begun, float(count)))
    whole = time.perf_counter() - began
    first_s, token_s, request_s = (sum(row[place] for row in done) / len(done) for place in range(3))
    tokens = sum(row[3] for row in done)
    served = Served(first_token_s=first_s, per_token_s=token_s, request_s=request_s, output_tokens_per_s=tokens / whole)
    return served, most * number, engine.copies_bytes


def _sent(engine: ServingEngine, load: Load, number: int, tokens: int = 0) -> ServedRequest:
    """One request, whose prompt is like no other's from its first token on."""
    prompt, output = load.lengths(number)
    vocab = engine.model.shape.vocab
    words = [(7 * place + 131 * number + 1) % vocab for place in range(round(prompt))]
    words[0] = number % vocab
    return engine.add(words, RequestOptions(max_new_tokens=tokens or round(output), salt=None, ignore_end=True))

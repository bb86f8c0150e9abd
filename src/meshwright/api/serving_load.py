"""A load run through the serving engine on this machine, beside what was planned and what a dry run of it holds."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from statistics import mean
from typing import final

import torch

from meshwright.api.serving_calibration import Clock
from meshwright.kernels.compiled.panels import fits_bf16
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
    run = LoadRun(model or build(times.of.model.shape, dtype=torch.float32, device=torch.device("cpu")), load)
    return columns_of(times, load, run, run.play(time.perf_counter))


def columns_of(times: StepTimes, load: Load, run: "LoadRun", seconds: Sequence[float]) -> ServingColumns:
    """As `columns`, of a load that has run; `seconds` of its steps."""
    of = times.of
    blocks = round(load.concurrency) * _blocks(load)
    matrices = (one for one in run.engine.model.parameters() if one.dim() == 2)
    width = 2.0 if all(map(fits_bf16, matrices)) else 4.0
    dry_weights, dry_cache = dry(of.model.shape, blocks)
    return ServingColumns(
        planned_weights_bytes=weights_bytes(of), dry_weights_bytes=dry_weights,
        measured_weights_bytes=sum(one.nbytes for one in run.engine.model.parameters()),
        planned_cache_bytes=blocks * sequence_bytes(of.model, BLOCK, of.cache_width),
        dry_cache_bytes=dry_cache, measured_cache_bytes=run.cache_bytes, planned_copies_bytes=copies_bytes(of, width),
        measured_copies_bytes=run.engine.copies_bytes, planned=serve(times, load), measured=run.served(seconds),
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


@dataclass(slots=True, eq=False)
class _LoadRequest:
    """A request, and the steps behind which it was sent, had its first token, and ended."""

    request: ServedRequest
    sent: int
    first: int = 0
    ended: int = 0


@final
class LoadRun:
    """A closed loop through an engine. Each play of it makes the same steps, whatever they take."""

    def __init__(self, model: Transformer, load: Load) -> None:
        """In fp32 on the CPU."""
        self._load, places = load, round(load.concurrency)
        self._block_bytes = PagedCache(model, 1, BLOCK).bytes // 3
        room = places * (_blocks(load) + 1) * self._block_bytes
        self.engine = ServingEngine(model, EngineOptions(most_sequences=places, cache_bytes=room, block=BLOCK))
        self.engine.run([_sent(self.engine, load, 10**6 + one, tokens=2) for one in range(2)])
        self._most, self._requests = 0, list[_LoadRequest]()

    @property
    def cache_bytes(self) -> int:
        """Of the blocks that were held at once."""
        return self._most * self._block_bytes

    def play(self, clock: Clock) -> list[float]:
        """Seconds of each step, with what is sent before it."""
        load, engine, places = self._load, self.engine, round(self._load.concurrency)
        growing, seconds, self._requests = list[_LoadRequest](), list[float](), []
        began = clock()
        while len(self._requests) < load.waves * places or growing:
            while len(growing) < places and len(self._requests) < load.waves * places:
                growing.append(_LoadRequest(_sent(engine, load, len(self._requests)), len(seconds)))
                self._requests.append(growing[-1])
            engine.step()
            seconds.append((now := clock()) - began)
            began = now
            self._most = max(self._most, engine.tables.pool.size - engine.tables.pool.free)
            growing = [one for one in growing if not _has_ended(one, len(seconds))]
        return seconds

    def served(self, seconds: Sequence[float]) -> Served:
        """What the requests of the last play had, if its steps took so long."""
        at = [0.0, *accumulate(seconds)]
        rows = [
            (at[one.first] - at[one.sent], at[one.ended] - at[one.first], at[one.ended] - at[one.sent],
             len(one.request.answers[0].ids))
            for one in self._requests
        ]  # fmt: skip
        return Served(
            first_token_s=mean(first for first, *_ in rows),
            per_token_s=mean(later / max(1, count - 1) for _, later, _, count in rows),
            request_s=mean(whole for *_, whole, _ in rows),
            output_tokens_per_s=sum(count for *_, count in rows) / at[-1],
        )


def _has_ended(one: _LoadRequest, step: int) -> bool:
    if one.request.answers[0].ids and not one.first:
        one.first = step
    if one.request.ended:
        one.ended = step
    return one.request.ended


def _sent(engine: ServingEngine, load: Load, number: int, tokens: int = 0) -> ServedRequest:
    """One request, whose prompt is like no other's from its first token on."""
    prompt, output = load.lengths(number)
    vocab = engine.model.shape.vocab
    words = [(7 * place + 131 * number + 1) % vocab for place in range(round(prompt))]
    words[0] = number % vocab
    return engine.add(words, RequestOptions(max_new_tokens=tokens or round(output), salt=None, ignore_end=True))

"""A load run through the serving engine on this machine, compared with its plan and the memory of a dry run."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from statistics import mean
from typing import final

import torch

from meshwright.kernels.c.serving_library import fits_bf16
from meshwright.model import Transformer, build
from meshwright.model.transformer import skeleton
from meshwright.observe.compare.comparison import ComparedRow, Values
from meshwright.planner.serving.cached_layers import sequence_bytes
from meshwright.planner.serving.closed_loop import Load, Served, serve
from meshwright.planner.serving.serving_memory import copies_bytes, weights_bytes
from meshwright.planner.serving.step_times import StepTimes
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.cache.paged_cache import PagedCache
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.served_request import ServedRequest
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec.model.shape import ModelShape

BLOCK = 16
TIMELESS = "a dry run knows no time"
UNCOPIED = "a dry run reads no matrix"
WEIGHTS, CACHE, COPIES = "weights", "keys and values", "copies of matrices"


Clock = Callable[[], float]
"""Returns seconds. Other programs hardly affect one thread's processor time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingColumns:
    """Planned, dry run and measured of one load. A dry run knows no time."""

    planned_weights_bytes: float
    dry_weights_bytes: float
    measured_weights_bytes: float
    planned_cache_bytes: float
    """Blocks that all requests in flight hold at their longest."""
    dry_cache_bytes: float
    measured_cache_bytes: float
    planned_copies_bytes: float
    """Copies of matrices in the order that products of few rows read."""
    measured_copies_bytes: float
    planned: Served
    measured: Served

    @property
    def errors(self) -> Mapping[str, float]:
        """Planned over measured, minus 1."""
        planned_bytes = self.planned_weights_bytes + self.planned_cache_bytes + self.planned_copies_bytes
        measured_bytes = self.measured_weights_bytes + self.measured_cache_bytes + self.measured_copies_bytes
        return {
            "memory": planned_bytes / measured_bytes - 1,
            "first_token": self.planned.first_token_s / self.measured.first_token_s - 1,
            "per_token": self.planned.per_token_s / self.measured.per_token_s - 1,
            "tokens_per_second": self.planned.output_tokens_per_s / self.measured.output_tokens_per_s - 1,
        }

    def rows(self, tolerance: float) -> tuple[ComparedRow, ...]:
        """Return rows of memory, then time, then use, each judged by `tolerance`."""
        measured_bytes = self.measured_weights_bytes + self.measured_cache_bytes + self.measured_copies_bytes
        sizes: Mapping[str, Values] = {
            WEIGHTS: (self.planned_weights_bytes, self.dry_weights_bytes, self.measured_weights_bytes),
            CACHE: (self.planned_cache_bytes, self.dry_cache_bytes, self.measured_cache_bytes),
            COPIES: (self.planned_copies_bytes, None, self.measured_copies_bytes),
        }
        speeds = (
            ("time", "first token", "seconds", self.planned.first_token_s, self.measured.first_token_s),
            ("time", "per token", "seconds", self.planned.per_token_s, self.measured.per_token_s),
            ("use", "tokens/s", "tokens/s", self.planned.output_tokens_per_s, self.measured.output_tokens_per_s),
        )
        return (
            *(
                ComparedRow(
                    section="memory", what=what, unit="bytes", values=values, tolerance=tolerance, whole=measured_bytes,
                    missing=("", UNCOPIED, ""),
                )
                for what, values in sizes.items()
            ),
            *(
                ComparedRow(
                    section=section, what=what, unit=unit, values=(planned, None, measured), tolerance=tolerance,
                    missing=("", TIMELESS, ""),
                )
                for section, what, unit, planned, measured in speeds
            ),
        )  # fmt: skip


def columns(times: StepTimes, load: Load, model: Transformer | None = None) -> ServingColumns:
    """Plan a load, count it dry, and run it here in fp32 on the CPU. `model`: None = random weights."""
    run = LoadRun(model or build(times.deployment.model.shape, dtype=torch.float32, device=torch.device("cpu")), load)
    return columns_of(times, load, run, run.play(time.perf_counter))


def columns_of(times: StepTimes, load: Load, run: "LoadRun", seconds: Sequence[float]) -> ServingColumns:
    """Return the columns of a load that has run, with the `seconds` of its steps."""
    deployment = times.deployment
    blocks = round(load.concurrency) * _blocks(load)
    matrices = (parameter for parameter in run.engine.model.parameters() if parameter.dim() == 2)
    # The engine stores its copies in 16 bits exactly where this loses nothing.
    width = 2.0 if all(map(fits_bf16, matrices)) else 4.0
    dry_weights, dry_cache = dry(deployment.model.shape, blocks)
    return ServingColumns(
        planned_weights_bytes=weights_bytes(deployment), dry_weights_bytes=dry_weights,
        measured_weights_bytes=sum(parameter.nbytes for parameter in run.engine.model.parameters()),
        planned_cache_bytes=blocks * sequence_bytes(deployment.model, BLOCK, deployment.cache_width),
        dry_cache_bytes=dry_cache, measured_cache_bytes=run.cache_bytes,
        planned_copies_bytes=copies_bytes(deployment, width),
        measured_copies_bytes=run.engine.copies_bytes, planned=serve(times, load), measured=run.served(seconds),
    )  # fmt: skip


def _blocks(load: Load) -> int:
    """Return the cache blocks of the longest sequence. The last token of an answer is never read."""
    return ceil((load.input_tokens + load.output_tokens - 1) / BLOCK)


def dry(shape: ModelShape, blocks: int) -> tuple[int, int]:
    """Return (bytes of weights, bytes of cache blocks) of the real model and cache, on tensors without memory."""
    model = skeleton(shape)
    weights = sum(parameter.numel() for parameter in model.parameters()) * 4
    with torch.device("meta"):
        cache = PagedCache(model, blocks, BLOCK)
    # The skeleton has torch's default dtype, which the cache follows, and the engine serves in fp32.
    width = 4 / model.embed.weight.element_size()
    return weights, round(cache.bytes * width * blocks / (blocks + 2))


@dataclass(slots=True, eq=False)
class _LoadRequest:
    """A request, and the numbers of steps after which it was sent, had its first token, and ended."""

    request: ServedRequest
    sent: int
    first: int = 0
    ended: int = 0


@final
class LoadRun:
    """A closed loop of requests through an engine. Each play makes the same steps, whatever they take."""

    def __init__(self, model: Transformer, load: Load) -> None:
        """In fp32 on the CPU."""
        self._load, slots = load, round(load.concurrency)
        # A cache of one block has two more, which the engine keeps for itself.
        self._block_bytes = PagedCache(model, 1, BLOCK).bytes // 3
        room = slots * (_blocks(load) + 1) * self._block_bytes
        self.engine = ServingEngine(model, EngineOptions(most_sequences=slots, cache_bytes=room, block=BLOCK))
        # Warm up, so that no timed step pays for copies of matrices or for memory that is touched first.
        self.engine.run([_send_request(self.engine, load, 10**6 + number, tokens=2) for number in range(2)])
        self._most, self._requests = 0, list[_LoadRequest]()

    @property
    def cache_bytes(self) -> int:
        """Most cache blocks that were held at once, in bytes."""
        return self._most * self._block_bytes

    def play(self, clock: Clock) -> list[float]:
        """Return the seconds of each step, including the sending of requests before it."""
        load, engine, slots = self._load, self.engine, round(self._load.concurrency)
        growing, seconds, self._requests = list[_LoadRequest](), list[float](), []
        began = clock()
        while len(self._requests) < load.waves * slots or growing:
            while len(growing) < slots and len(self._requests) < load.waves * slots:
                growing.append(_LoadRequest(_send_request(engine, load, len(self._requests)), len(seconds)))
                self._requests.append(growing[-1])
            engine.step()
            seconds.append((now := clock()) - began)
            began = now
            self._most = max(self._most, engine.tables.pool.size - engine.tables.pool.free)
            growing = [request for request in growing if not _note_progress(request, len(seconds))]
        return seconds

    def served(self, seconds: Sequence[float]) -> Served:
        """Return the figures of the last play for these seconds of its steps."""
        at = [0.0, *accumulate(seconds)]
        rows = [
            (at[request.first] - at[request.sent], at[request.ended] - at[request.first],
             at[request.ended] - at[request.sent], len(request.request.answers[0].ids))
            for request in self._requests
        ]  # fmt: skip
        return Served(
            first_token_s=mean(first for first, *_ in rows),
            per_token_s=mean(later / max(1, count - 1) for _, later, _, count in rows),
            request_s=mean(request_s for *_, request_s, _ in rows),
            output_tokens_per_s=sum(count for *_, count in rows) / at[-1],
        )


def _note_progress(request: _LoadRequest, step: int) -> bool:
    """Record the first token and the end of a request. Returns if it has ended."""
    if request.request.answers[0].ids and not request.first:
        request.first = step
    if request.request.ended:
        request.ended = step
    return request.request.ended


def _send_request(engine: ServingEngine, load: Load, number: int, tokens: int = 0) -> ServedRequest:
    """Send a request whose prompt differs from all others in its first token."""
    prompt, output = load.lengths(number)
    vocab = engine.model.shape.vocab
    ids = [(7 * position + 131 * number + 1) % vocab for position in range(round(prompt))]
    # Equal beginnings would share blocks of the cache, and prompts would be read in no time.
    ids[0] = number % vocab
    return engine.add(ids, RequestOptions(max_new_tokens=tokens or round(output), salt=None, ignore_end=True))

"""Measures what the serving engine reaches on this machine: real steps of models that have little to compute, a long
context, and products of few rows. A part of `calibrate`."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product

import torch
from torch import Tensor

from meshwright.kernels import fast
from meshwright.model import Transformer, build
from meshwright.planner.kernels.rate_grid import RateGrid
from meshwright.planner.serving.engine_rates import EngineRates
from meshwright.serve.engine_options import EngineOptions
from meshwright.serve.request_options import RequestOptions
from meshwright.serve.serving_engine import ServingEngine
from meshwright.spec.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEffort:
    """How much is measured."""

    rows: tuple[float, ...] = (1, 2, 4, 8, 16, 64, 256, 512)
    dims: tuple[float, ...] = (64, 256, 1024, 4096)
    steps: int = 40
    rounds: int = 5
    window_s: float = 0.004
    pool: int = 2**25
    """Numbers of all weights that products take in turn, fp32: more than caches hold."""
    long: int = 1024
    """Tokens of the long context."""


QUICK = ServingEffort(rows=(1, 16), dims=(64, 256), steps=6, rounds=1, window_s=0.001, pool=2**18, long=128)


def engine_rates(effort: ServingEffort | None = None) -> EngineRates:
    """Some ten seconds; a second with QUICK. On the CPU, with the threads that torch has."""
    effort = effort or ServingEffort()
    grid = _products(effort)

    def rest(layers: int, batch: int, context: int, hidden: int = 64) -> float:
        """Of a decoding step, without its products."""
        shape = _shape(layers, hidden, 2 * context + effort.steps + 64)
        return max(1e-7, _step_s(shape, batch, context, effort) - _products_s(shape, batch, grid))

    one, deep = rest(1, 1, 16), rest(5, 1, 16)
    wide = rest(1, 8, 16)
    layer_s = max(1e-7, (deep - one) / 4)
    sequence_s = max(1e-8, (wide - one) / 7)
    long, short = rest(4, 8, effort.long, 256), rest(4, 8, 16, 256)
    read = 4 * 8 * (effort.long - 16) * 2 * 128 * 4.0
    chunk = _shape(4, 256, 600)
    prompt_s = _prompt_s(chunk, 256, effort) - _products_s(chunk, 256, grid)
    token_layer_s = max(0.0, prompt_s - one - 4 * layer_s) / (4 * 256 * 256)
    return EngineRates(
        step_s=max(1e-7, one - layer_s - sequence_s), sequence_s=sequence_s, layer_s=layer_s,
        token_layer_s=token_layer_s, cached_bytes_per_s=read / max(1e-6, long - short), products=grid,
    )  # fmt: skip


def _shape(layers: int, hidden: int, positions: int) -> ModelShape:
    return ModelShape(
        name="probe", vocab=256, layers=layers, hidden=hidden, heads=hidden // 32, kv_heads=hidden // 64,
        ffn=2 * hidden, max_positions=positions, tied=True,
    )  # fmt: skip


def _products_s(shape: ModelShape, rows: int, grid: RateGrid) -> float:
    """Of all products of a step with so many tokens, read from the grid as the planner reads it."""
    hidden, ffn = shape.hidden, shape.ffn
    key = shape.kv_heads * shape.head_dim
    layer = [
        (hidden, hidden),
        (hidden, key),
        (hidden, key),
        (hidden, hidden),
        (hidden, ffn),
        (hidden, ffn),
        (ffn, hidden),
    ]
    sizes = [*(layer * shape.layers), (hidden, shape.vocab)]
    return sum(2.0 * rows * k * n / grid.at(rows, k, n) for k, n in sizes)


def _products(effort: ServingEffort) -> RateGrid:
    """By the kernel that the engine's model calls, inputs (m, k) and weights (n, k). Each call takes the next of many
    weights: those of a model have left the cache when its next step begins."""
    linear, rates = fast().linear, dict[tuple[float, float, float], float]()
    pool = torch.randn(effort.pool)
    with torch.no_grad():
        for k, n in product(effort.dims, effort.dims):
            weights = pool[: pool.numel() // int(k * n) * int(k * n)].view(-1, int(n), int(k)).unbind()
            for m in effort.rows:
                call = partial(_next_product, linear, torch.randn(int(m), int(k)), cycle(weights))
                rates[m, k, n] = 2 * m * k * n / _quartile(call, effort)
    places = product(effort.rows, effort.dims, effort.dims)
    return RateGrid((effort.rows, effort.dims, effort.dims), tuple(rates[place] for place in places))


def _next_product(linear: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Iterator[Tensor]) -> Tensor:
    return linear(x, next(weights))


def _quartile(run: Callable[[], object], effort: ServingEffort) -> float:
    """Lower quartile over rounds of the mean of a window."""
    run()
    found = []
    for _ in range(effort.rounds):
        count, start = 0, time.perf_counter()
        while (now := time.perf_counter() - start) < effort.window_s or not count:
            run()
            count += 1
        found.append(now / max(1, count))
    return sorted(found)[len(found) // 4]


def _step_s(shape: ModelShape, batch: int, context: int, effort: ServingEffort) -> float:
    """Of a step in which `batch` sequences get a token: the mean, as some steps begin blocks; the least of rounds."""
    engine = _engine(shape, batch)
    found = []
    for turn in range(min(3, effort.rounds)):
        asked = RequestOptions(max_new_tokens=effort.steps + 2 + context * batch // 256, salt=None)
        requests = [engine.add(_prompt(context, turn * batch + number), asked) for number in range(batch)]
        while not all(request.answers[0].ids for request in requests):
            engine.step()
        start = time.perf_counter()
        for _ in range(effort.steps):
            engine.step()
        found.append((time.perf_counter() - start) / effort.steps)
        engine.run(requests)
    return min(found)


def _prompt_s(shape: ModelShape, tokens: int, effort: ServingEffort) -> float:
    """Of a step that reads a prompt of so many tokens."""
    engine = _engine(shape, 1)
    found = []
    for number in range(max(3, effort.steps // 4)):
        request = engine.add(_prompt(tokens, number), RequestOptions(max_new_tokens=1, salt=None))
        start = time.perf_counter()
        engine.run([request])
        found.append(time.perf_counter() - start)
    return sorted(found)[len(found) // 4]


def _engine(shape: ModelShape, batch: int) -> ServingEngine:
    return ServingEngine(_model(shape), EngineOptions(most_sequences=batch))


def _model(shape: ModelShape) -> Transformer:
    torch.manual_seed(0)
    return build(shape, dtype=torch.float32, device=torch.device("cpu"))


def _prompt(tokens: int, number: int) -> list[int]:
    """Unlike others from its first token on."""
    return [(7 * place + 31 * number + 1) % 255 for place in range(tokens)]

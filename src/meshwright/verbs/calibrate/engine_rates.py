"""Rates of the serving engine on this machine, a part of `calibrate`.

It measures real steps of models with little to compute, of a long context and of prompts, and products as the engine
makes them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from statistics import mean

import torch
from torch import Tensor

from meshwright.kernels.c import serving_library
from meshwright.kernels.linear.linear import linear
from meshwright.kernels.quantized.prepared_product import PreparedProduct, prepared_product
from meshwright.model import build
from meshwright.observe.compare.served_load import Clock
from meshwright.planner.kernels.fitted_kernel import RateGrid
from meshwright.planner.serving.engine_rates import EngineRates
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.weights.inventory import num_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEffort:
    """Amount of measuring."""

    rows: tuple[float, ...] = (1, 2, 4, 8, 16, 32, 64, 65, 128, 512)
    """Rows of products, on both sides of the number at which the engine switches to another library."""
    dims: tuple[float, ...] = (64, 256, 1024, 4096)
    pools: tuple[int, ...] = (2**18, 2**21, 2**23, 2**25)
    """fp32 numbers of all weights that products take in turn: from the size of a core's cache to beyond all caches."""
    steps: int = 40
    rounds: int = 5
    window_s: float = 0.003
    long: int = 1024
    """Tokens of the long context."""
    prompts: tuple[int, int, int] = (72, 192, 512)
    """Tokens of prompts of one step each."""
    vocab: int = 8192
    """Vocabulary of the model with many logits."""


QUICK = ServingEffort(
    rows=(1, 16), dims=(64, 256), pools=(2**16, 2**18), steps=6, rounds=1, window_s=0.001, long=128,
    prompts=(64, 96, 128), vocab=1024,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Probe:
    """Measures times of steps without their products."""

    effort: ServingEffort
    clock: Clock
    grid: RateGrid

    def step(self, layers: int, batch: int, context: int, hidden: int = 64, vocab: int = 256) -> float:
        """Return the time of a decoding step."""
        shape = _shape(layers, hidden, 2 * context + self.effort.steps + 64, vocab)
        seconds = _step_s(shape, batch, context, self.effort, self.clock)
        return max(1e-7, seconds - _products_s(shape, batch, batch, self.grid))

    def prompt(self, layers: int, tokens: int, hidden: int) -> float:
        """Return the time of reading a prompt."""
        shape = _shape(layers, hidden, tokens + 64, 256)
        return _prompt_s(shape, tokens, self.effort, self.clock) - _products_s(shape, tokens, 1, self.grid)


def engine_rates(effort: ServingEffort | None = None, clock: Clock = time.perf_counter) -> EngineRates:
    """Measure on the CPU with the threads that torch has, for half a minute, or a second with QUICK."""
    effort = effort or ServingEffort()
    probe = _Probe(effort, clock, _products(effort, clock))
    # Steps that differ in one size isolate its cost. Logits come first: 256 of them are in the time of each sequence.
    base, deep, wide = probe.step(1, 1, 16), probe.step(5, 1, 16), probe.step(1, 8, 16)
    logit_s = max(0.0, probe.step(1, 8, 16, vocab=effort.vocab) - wide) / (8 * (effort.vocab - 256))
    layer_s = max(1e-7, (deep - base) / 4)
    sequence_s = max(1e-8, (wide - base) / 7 - 256 * logit_s)
    # Reading the cache is the only part of a step that grows with the context.
    long, short = probe.step(4, 8, effort.long, 256), probe.step(4, 8, 16, 256)
    # Layers x sequences x positions x (keys, values) x numbers of all query heads x 4 bytes, as the planner counts
    # reads.
    read = 4 * 8 * (effort.long - 16) * 2 * 256 * 4.0
    pair_flop = 2.0 * 4 * 256
    once_s, linear_s, square_s = _fit_prompts(
        [(n, probe.prompt(4, n, 256) - base - 4 * layer_s) for n in effort.prompts],
        least_pair_s=pair_flop / max(probe.grid.values),  # attention is no faster than the best product
    )
    return EngineRates(
        step_s=max(1e-7, base - layer_s - sequence_s - 256 * logit_s), sequence_s=sequence_s, logit_s=logit_s,
        layer_s=layer_s, token_layer_s=linear_s / (4 * 256), cached_bytes_per_s=read / max(1e-6, long - short),
        prompt_flop_per_s=pair_flop / square_s, products=probe.grid, prompt_layer_s=once_s / 4,
    )  # fmt: skip


def _fit_prompts(prompts: Sequence[tuple[int, float]], least_pair_s: float) -> tuple[float, float, float]:
    """Fit the seconds of three prompts by their tokens: (constant, per token, per pair of tokens).

    Short prompts measured in a hurry may show no cost per pair at all, so it is at least `least_pair_s`.
    """
    (few, first), (medium, second), (many, third) = prompts
    lower, upper = (second - first) / (medium - few), (third - second) / (many - medium)
    square = max(least_pair_s, (upper - lower) / (many - few))
    per_token = max(0.0, (third - first) / (many - few) - square * (many + few))
    return max(0.0, first - per_token * few - square * few**2), per_token, square


def _shape(layers: int, hidden: int, positions: int, vocab: int) -> ModelShape:
    return ModelShape(
        name="probe", vocab=vocab, layers=layers, hidden=hidden, heads=max(2, hidden // 64),
        kv_heads=max(1, hidden // 128), ffn=2 * hidden, max_positions=positions, tied=True,
    )  # fmt: skip


def _products_s(shape: ModelShape, rows: int, logits: int, grid: RateGrid) -> float:
    """Return the seconds of all products of a step, read from the grid as the planner does.

    `logits`: rows of the head.
    """
    hidden, ffn, weights = shape.hidden, shape.ffn, 4.0 * num_parameters(shape)
    inner = hidden + 2 * shape.kv_heads * shape.head_dim
    layer = [(rows, hidden, inner), (rows, hidden, hidden), (rows, hidden, 2 * ffn), (rows, ffn, hidden)]
    sizes = [*(layer * shape.layers), (logits, hidden, shape.vocab)]
    return sum(2.0 * m * k * n / grid.at(weights, m, k, n) for m, k, n in sizes)


def _products(effort: ServingEffort, clock: Clock) -> RateGrid:
    """Measure products as the engine prepares them, with inputs (m, k) and weights (n, k).

    Each call takes the next of many weights, as a step of a model of that size does. Products of few rows exclude the
    cost of a call, since a step makes them inside the call of a block, whose cost belongs to the layer.
    """
    rates = dict[tuple[float, ...], float]()
    numbers = torch.randn(max(effort.pools))
    with torch.no_grad(), serving_library.used(serving_library.compiled()):
        call_s = _least(partial(_product(numbers[:256].view(16, 16)), torch.randn(1, 16)), effort, clock)
        for k, n in product(effort.dims, effort.dims):
            weights = numbers[: max(1, numbers.numel() // int(k * n)) * int(k * n)].view(-1, int(n), int(k))
            ready = [_product(weight) for weight in weights]
            for m in effort.rows:
                beside_s = call_s if m <= serving_library.ROWS else 0.0
                rates.update(_rates_by_pool(ready, torch.randn(int(m), int(k)), (m, k, n), effort, clock, beside_s))
    grid_points = product((4.0 * pool for pool in effort.pools), effort.rows, effort.dims, effort.dims)
    return RateGrid(
        (tuple(4.0 * pool for pool in effort.pools), effort.rows, effort.dims, effort.dims),
        tuple(rates[point] for point in grid_points),
    )


def _rates_by_pool(
    ready: list[Callable[[Tensor], Tensor]], x: Tensor, sizes: tuple[float, ...], effort: ServingEffort, clock: Clock,
    beside_s: float,
) -> Iterator[tuple[tuple[float, ...], float]]:  # fmt: skip
    """Yield FLOP per second of one product, by the bytes of all weights and its sizes.

    `beside_s`: time of a call without the product, which is taken for at least a tenth of the measured time.
    """
    m, k, n = sizes
    rates_by_count = dict[int, float]()
    for pool in effort.pools:
        count = min(len(ready), max(1, pool // int(k * n)))
        if count not in rates_by_count:
            call_s = _least(partial(_multiply_next, x, cycle(ready[:count])), effort, clock)
            rates_by_count[count] = 2 * m * k * n / max(call_s - beside_s, call_s / 10)
        yield (4.0 * pool, *sizes), rates_by_count[count]


def _product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    prepared: PreparedProduct | None = prepared_product([weight], [None])
    return prepared or partial(linear, weight=weight)


def _multiply_next(x: Tensor, products: Iterator[Callable[[Tensor], Tensor]]) -> Tensor:
    return next(products)(x)


def _least(run: Callable[[], object], effort: ServingEffort, clock: Clock) -> float:
    """Return the least, over rounds, of the mean time in a window."""
    run()
    means = []
    for _ in range(effort.rounds):
        count, start = 0, clock()
        while (now := clock() - start) < effort.window_s or not count:
            run()
            count += 1
        means.append(now / max(1, count))
    return min(means)


def _step_s(shape: ModelShape, batch: int, context: int, effort: ServingEffort, clock: Clock) -> float:
    """Return the mean step in which `batch` sequences get a token, since some steps begin blocks; of each the least."""
    engine = _engine(shape, batch)
    # The least of each step over rounds: the same steps begin new cache blocks in every round.
    least = [float("inf")] * effort.steps
    for turn in range(min(4, effort.rounds)):
        options = RequestOptions(max_new_tokens=effort.steps + 2 + context * batch // 256, salt=None)
        requests = [engine.add(_prompt(context, turn * batch + number), options) for number in range(batch)]
        while not all(request.answers[0].ids for request in requests):
            engine.step()
        for step, before in enumerate(least):
            start = clock()
            engine.step()
            least[step] = min(before, clock() - start)
        engine.run(requests)
    return mean(least)


def _prompt_s(shape: ModelShape, tokens: int, effort: ServingEffort, clock: Clock) -> float:
    engine = _engine(shape, 1)
    seconds = []
    for number in range(max(3, effort.steps // 4)):
        # A different prompt each time, since a cached prefix would not be computed again.
        request = engine.add(_prompt(tokens, number), RequestOptions(max_new_tokens=1, salt=None))
        start = clock()
        engine.run([request])
        seconds.append(clock() - start)
    return min(seconds)


def _engine(shape: ModelShape, batch: int) -> ServingEngine:
    torch.manual_seed(0)
    model = build(shape, dtype=torch.float32, device=torch.device("cpu"))
    return ServingEngine(model, EngineOptions(most_sequences=batch))


def _prompt(tokens: int, number: int) -> list[int]:
    """Return a prompt that differs from others in its first token."""
    return [(7 * position + 31 * number + 1) % 255 for position in range(tokens)]

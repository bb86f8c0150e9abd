"""Rates of one rank's device and links while the others of its world do the same.

Cases are products, passes over memory, attention, the optimizer's pass, and the engine's collectives. Every case runs
for a window of time, all cases in turn, for several rounds. The lower quartile of the rounds counts, since other load
of the machine only adds.

Collectives are measured as training meets them: each rank computes for a while before each. Ranks then come late,
threads of the library have gone to sleep, and ranks that share cores may have to wait for their turn. The time of the
computation alone, on all ranks at once, is subtracted.
"""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from meshwright.kernels import fast
from meshwright.kernels.attention.attend import Mask
from meshwright.kernels.linear import cpu_product
from meshwright.parallel.groups.group import Group
from meshwright.planner.cost.speeds import DeviceCurves
from meshwright.planner.cost.work import MemoryPass
from meshwright.planner.kernels.fitted_kernel import RateGrid
from meshwright.planner.kernels.kernel_operations import Product

Case = Callable[[], Any]
DTYPES = {4.0: torch.float32, 2.0: torch.bfloat16}
"""Dtype by bytes of an operand."""
HEADS = 4


LEAST_S = 2e-5
"""Least time of an exchange that hides in the noise of the computation before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Sizes and durations of the measurements."""

    dims: tuple[float, ...] = (16, 64, 256, 1024)
    """Sizes of products along each of m, k, n."""
    bytes_moved: tuple[float, ...] = (3e3, 3e4, 3e5, 3e6, 3e7, 1.5e8)
    sequences: tuple[float, ...] = (128, 512, 1024)
    head_dims: tuple[float, ...] = (32, 64)
    tokens: int = 1024
    """Tokens of attention, split into sequences."""
    messages: tuple[float, ...] = (4096, 65536, 2**20, 2**23)
    """Bytes of exchanges."""
    between_s: float = 1.5e-3
    """Seconds of computation before each exchange on a CPU."""
    rounds: int = 5
    window_s: float = 0.008


ON_GPU = Effort(
    dims=(128, 512, 2048, 8192), bytes_moved=(3e5, 3e6, 3e7, 3e8, 3e9), sequences=(512, 2048, 8192),
    head_dims=(64, 128), tokens=16384, messages=(65536, 2**20, 2**24, 2**28),
)  # fmt: skip
QUICK = Effort(
    dims=(16, 128), bytes_moved=(3e4, 3e6), sequences=(64, 256), head_dims=(32,), messages=(4096, 2**20), rounds=1,
    window_s=0.002, between_s=0.0,
)  # fmt: skip


def seconds_of(cases: dict[Any, Case], effort: Effort, device: torch.device) -> dict[Any, float]:
    """Return seconds per case: the lower quartile over rounds of the mean over a window. Ranks start together."""
    times: dict[Any, list[float]] = {name: [] for name in cases}
    # The first run of a size allocates, plans and compiles.
    for run in cases.values():
        run()
    for _ in range(effort.rounds):
        # Cases take turns within a round, so that a busy minute of the machine spoils one round, not one case.
        for name, run in cases.items():
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.barrier()
            times[name].append(_mean_over_window(run, effort.window_s, device))
    return {name: sorted(means)[len(means) // 4] for name, means in times.items()}


def _mean_over_window(run: Case, window_s: float, device: torch.device) -> float:
    synchronize(device)
    count, start, now = 0, time.perf_counter(), 0.0
    while not count or now < window_s:
        # A GPU is waited for after ten calls: waiting after each would time the launch.
        for _ in range(1 if device.type == "cpu" else 10):
            run()
            count += 1
        synchronize(device)
        now = time.perf_counter() - start
    return now / count


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_curves(effort: Effort, device: torch.device, widths: Sequence[float]) -> DeviceCurves:
    """Measure all rates. `widths` are the bytes of the operands of products; the first is also attention's."""
    products = {width: _measure_products(effort, device, DTYPES[width]) for width in widths}
    attention = _measure_attention(effort, device, DTYPES[widths[0]])
    return DeviceCurves(
        products=products,
        passes=_measure_passes(effort, device),
        attention=attention,
        update=_measure_update(effort, device),
    )


def _measure_products(effort: Effort, device: torch.device, dtype: torch.dtype) -> RateGrid:
    def case(m: int, k: int, n: int) -> Case:
        x, weight = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
        return lambda: cpu_product.linear(x, weight)

    sizes = list(product(effort.dims, repeat=3))
    took = seconds_of({size: case(*map(int, size)) for size in sizes}, effort, device)
    return RateGrid((effort.dims,) * 3, tuple(2 * m * k * n / took[m, k, n] for m, k, n in sizes))


def _measure_passes(effort: Effort, device: torch.device) -> RateGrid:
    """Measure a sum of two tensors into a third."""

    def case(moved: float) -> Case:
        # 12 bytes per element: two fp32 numbers are read and one is written.
        left = torch.ones(int(moved // 12), device=device)
        right = left.clone()
        return lambda: left + right

    took = seconds_of({moved: case(moved) for moved in effort.bytes_moved}, effort, device)
    return RateGrid((effort.bytes_moved,), tuple(moved / took[moved] for moved in effort.bytes_moved))


def _measure_attention(effort: Effort, device: torch.device, dtype: torch.dtype) -> tuple[RateGrid, RateGrid]:
    """Measure causal attention of training. FLOP as the planner counts: half of all pairs, backward 2.5 times."""
    kernels = fast()

    def tensors(sequence: int, dim: int) -> list[Tensor]:
        batch = max(1, effort.tokens // sequence)
        return [
            torch.randn(batch, sequence, HEADS, dim, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
        ]

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernels.attend(q, k, v, Mask(), scale=0.1)

    def backward(inputs: list[Tensor], out: Tensor, gradient: Tensor) -> Any:
        return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    cases: dict[Any, Case] = {}
    for sequence, dim in product(effort.sequences, effort.head_dims):
        inputs = tensors(int(sequence), int(dim))
        out = forward(*inputs)
        gradient = torch.randn_like(out)
        cases["forward", sequence, dim] = partial(forward, *inputs)
        cases["backward", sequence, dim] = partial(backward, inputs, out, gradient)
    took = seconds_of(cases, effort, device)
    rates: list[list[float]] = [[], []]
    for sequence, dim in product(effort.sequences, effort.head_dims):
        flop = 4 * max(1, effort.tokens // sequence) * sequence * (sequence / 2) * HEADS * dim
        rates[0].append(flop / took["forward", sequence, dim])
        rates[1].append(2.5 * flop / took["backward", sequence, dim])
    axes = effort.sequences, effort.head_dims
    return RateGrid(axes, tuple(rates[0])), RateGrid(axes, tuple(rates[1]))


def _measure_update(effort: Effort, device: torch.device) -> RateGrid:
    """Measure the optimizer's pass with the gradient norm, in the planner's bytes: 32 per parameter."""

    def case(moved: float) -> Case:
        # Four tensors, as a fused update takes many at once.
        weights = [torch.ones(max(1, int(moved // 32 // 4)), device=device, requires_grad=True) for _ in range(4)]
        optimizer = torch.optim.AdamW(weights, fused=True)
        for weight in weights:
            weight.grad = torch.full_like(weight, 1e-3)

        def run() -> None:
            torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
            optimizer.step()

        return run

    took = seconds_of({moved: case(moved) for moved in effort.bytes_moved}, effort, device)
    return RateGrid((effort.bytes_moved,), tuple(moved / took[moved] for moved in effort.bytes_moved))


def measure_eager_passes(effort: Effort, device: torch.device, rates: DeviceCurves) -> dict[str, float]:
    """Measure passes over memory of training's kernels, relative to the planner's count.

    Covers forward and backward of activations, norms, a rotation and the loss. Keys are fields of
    planner.cost.stack.Stack.
    """
    kernels, tokens, width, vocab = fast(), 512, 256, 4096

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, device=device, requires_grad=True)

    gate, up, x, weight, table = (
        drawn(tokens, width),
        drawn(tokens, width),
        drawn(tokens, width),
        drawn(width),
        drawn(vocab, width),
    )
    heads = drawn(1, tokens, 4, width // 4)
    cos = sin = torch.rand(tokens, 1, width // 8, device=device)
    targets = torch.randint(vocab, (tokens,), device=device)
    cases: dict[str, tuple[Case, tuple[Tensor, ...]]] = {
        "swiglu_passes": (lambda: kernels.swiglu(gate, up), (gate, up)),
        "gelu_passes": (lambda: functional.gelu(up, approximate="tanh"), (up,)),
        "norm_passes": (lambda: kernels.rms_norm(x, weight, 1e-6), (x, weight)),
        "layer_norm_passes": (lambda: functional.layer_norm(x, (width,), weight, weight), (x, weight)),
        "rope_passes": (lambda: kernels.rotate(heads, cos, sin), (heads,)),
        "loss_passes": (lambda: kernels.linear_cross_entropy(x, table, targets), (x, table)),
    }
    counts = {
        "swiglu_passes": 8.0, "gelu_passes": 5.0, "norm_passes": 6.0, "layer_norm_passes": 6.0, "rope_passes": 4.0,
        "loss_passes": 3.0 * vocab / width,
    }  # fmt: skip

    def both(run: Case, inputs: tuple[Tensor, ...]) -> Case:
        gradient = torch.ones_like(run())
        return lambda: torch.autograd.grad(run(), inputs, gradient)

    took = seconds_of({name: both(run, inputs) for name, (run, inputs) in cases.items()}, effort, device)
    sizes = (tokens, width, vocab), (tokens, vocab, width), (width, tokens, vocab)
    # The fused loss also multiplies and passes over the table, which the planner counts on their own.
    took["loss_passes"] -= sum(rates.product_s(Product(*size, 1.0, 4.0)) for size in sizes)
    took["loss_passes"] -= rates.pass_s(MemoryPass(8.0 * vocab * width))
    moved = tokens * width * 4.0
    return {name: max(0.5, took[name] / (count * moved) * rates.passes.at(2 * moved)) for name, count in counts.items()}


def exchange_grids(effort: Effort, device: torch.device) -> dict[tuple[str, int], RateGrid]:
    """Return (collective, ranks of a group) -> seconds by bytes of the whole tensor. Neighbours form a group."""
    world = dist.get_world_size()
    sizes = [size for size in (2, 4, 8) if size < world and world % size == 0] + [world]
    grids: dict[tuple[str, int], RateGrid] = {}
    for size in sizes:
        group = _group_of_this_rank(size, world)
        cases: dict[Any, Case] = {}
        for message in effort.messages:
            cases |= {(name, message): case for name, case in _collective_cases(group, int(message), device).items()}
        took = _measure_in_step(cases, effort, device)
        for name in dict.fromkeys(name for name, _ in cases):
            grids[name, size] = RateGrid((effort.messages,), tuple(took[name, message] for message in effort.messages))
    return grids


def _group_of_this_rank(size: int, world: int) -> Group:
    ranks_here: tuple[int, ...] = ()
    group_here = None
    for start in range(0, world, size):
        ranks = tuple(range(start, start + size))
        # Every rank makes every group: torch demands it.
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            ranks_here, group_here = ranks, group
    return Group("measured", ranks_here, ranks_here.index(dist.get_rank()), group_here)


def _collective_cases(group: Group, size_bytes: int, device: torch.device) -> dict[str, Case]:
    """Return the collectives as the engine calls them, on a whole tensor of `size_bytes`."""
    elements = max(group.size, size_bytes // 4 // group.size * group.size)
    whole = torch.zeros(elements, device=device)
    part = torch.zeros(elements // group.size, device=device)
    rows = [elements // group.size] * group.size

    def send() -> None:
        """Exchange with the neighbour in both directions, one after the other: half a round trip each."""
        other = group.index ^ 1
        if group.index % 2 == 0:
            _wait(group.exchange([(whole, other)], []))
            _wait(group.exchange([], [(whole, other)]))
        else:
            _wait(group.exchange([], [(whole, other)]))
            _wait(group.exchange([(whole, other)], []))

    cases: dict[str, Case] = {
        "all-reduce": lambda: group.all_reduce(whole),
        "all-gather": lambda: group.all_gather(part),
        "reduce-scatter": lambda: group.reduce_scatter(whole),
        "all-to-all": lambda: group.all_to_all(whole, rows, rows),
    }
    return cases | ({"send": send} if group.size == 2 else {})


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _measure_in_step(cases: dict[Any, Case], effort: Effort, device: torch.device) -> dict[Any, float]:
    """Measure like seconds_of, but with equal calls on all ranks: a window would end at a different call on each."""
    work = _computation(effort, device)
    counts = {}
    for name, run in cases.items():
        # All ranks must make the same number of calls, so they agree on the slowest rank's time.
        once = seconds_of({name: _repeat(run, work, 2)}, Effort(rounds=1, window_s=0.0), device)[name] / 2
        counts[name] = int(max(3, min(200, effort.window_s * 2 / _agree(once, device))))
    single = Effort(rounds=min(4, effort.rounds), window_s=0.0)
    alone = {("work", count): _repeat(_nothing, work, count) for count in {max(counts.values())}}
    took = seconds_of(alone | {name: _repeat(run, work, counts[name]) for name, run in cases.items()}, single, device)
    before = sum(took[key] / key[1] for key in alone)
    seconds = {}
    for name in cases:
        agreed_s = _agree(max(LEAST_S, took[name] / counts[name] - before), device)
        seconds[name] = agreed_s / (2 if name[0] == "send" else 1)
    return seconds


def _computation(effort: Effort, device: torch.device) -> Case:
    """Return products and passes that take about effort.between_s on a rank with its own core."""
    if device.type != "cpu" or not effort.between_s:
        return _nothing
    x, weight = torch.randn(128, 256), torch.randn(256, 256)

    def unit() -> None:
        y = torch.nn.functional.linear(x, weight)
        for _ in range(4):
            y = y * 0.5

    # The quickest rank has a core of its own, and its time sets the count for all.
    once = seconds_of({"unit": unit}, effort, device)["unit"]
    count = max(1, round(effort.between_s / _agree(once, device, dist.ReduceOp.MIN)))

    def several() -> None:
        for _ in range(count):
            unit()

    return several


def _agree(seconds: float, device: torch.device, how: Any = dist.ReduceOp.MAX) -> float:
    """Return the longest time of all ranks."""
    agreed = torch.tensor(max(1e-6, seconds), device=device)
    dist.all_reduce(agreed, how)
    return float(agreed.item())


def _nothing() -> None:
    pass


def _repeat(run: Case, work: Case, count: int) -> Case:
    def several() -> None:
        for _ in range(count):
            work()
            run()

    return several


def processor() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()

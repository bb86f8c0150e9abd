"""Seconds of real training steps of small plans on processes of this machine, as a launch would run them."""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.observe.calibrate.rates import synchronize
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.mesh import Made
from meshwright.spec.held import shards_are_masters
from meshwright.spec.plan import Plan
from meshwright.training import device as train_device
from meshwright.training.batches import Batch, Share, select, split
from meshwright.training.optimizer import Optimizer
from meshwright.training.precision import DTYPES, reduce_dtype
from meshwright.training.step import train_step

LIMIT_S = 120.0
"""Time limit of the start, and of each plan, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Duration of a measurement: one step to warm up, then steps for `seconds`, within these numbers."""

    seconds: float = 1.0
    least: int = 3
    most: int = 12


def threads_of(world: int) -> int:
    """Return torch's threads in each of `world` processes: the cores shared evenly."""
    return max(1, len(os.sched_getaffinity(0)) // world)


def measure_steps(plans: Sequence[Plan], timing: Timing, device: str = "cpu") -> list[float]:
    """Return the median step of each plan in seconds. Plans with equal ranks share processes."""
    medians = [0.0] * len(plans)
    for world in sorted({plan.layout.world for plan in plans}):
        numbers = [n for n, plan in enumerate(plans) if plan.layout.world == world]
        limit = LIMIT_S * (1 + len(numbers))
        ranks = on_ranks(world, _all_steps, [plans[n] for n in numbers], timing, device, limit_s=limit, device=device)
        for index, n in enumerate(numbers):
            medians[n] = max(rank[index] for rank in ranks)
    return medians


def _all_steps(plans: list[Plan], timing: Timing, kind: str) -> list[float]:
    torch.set_num_threads(threads_of(dist.get_world_size()))
    made: Made = {}
    return [step_s(plan, timing, kind, made) for plan in plans]


def step_s(plan: Plan, timing: Timing, kind: str = "cpu", made: Made | None = None) -> float:
    """Return the median step of a plan on this rank, on random tokens."""
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    recipe, layout = plan.recipe, plan.layout
    train_device.prepare(
        device, recipe.precision, tf32=recipe.tf32, deterministic=recipe.deterministic, products=recipe.products
    )
    mesh = make_mesh(layout, made=made)
    engine = build_engine(
        plan.model, layout, mesh=mesh, device=device, dtype=DTYPES[recipe.precision],
        reduce_dtype=reduce_dtype(recipe), micro_batches=layout.micro_batches(recipe.global_batch),
        products=recipe.products,
        masters=shards_are_masters(recipe.precision, layout, recipe.storage, recipe.reduce_dtype),
    )  # fmt: skip
    engine.train()
    optimizer = Optimizer.of(engine, recipe)
    share = Share(index=mesh.reader, parts=layout.dp, columns=engine.columns(recipe.sequence))
    size = layout.micro_batch_of(recipe.global_batch)
    generator = torch.Generator().manual_seed(0)
    taken: list[float] = []
    while True:
        tokens = torch.randint(plan.model.vocab, (recipe.global_batch, recipe.sequence + 1), generator=generator)
        batch = Batch(tokens=tokens[:, :-1].to(device), targets=tokens[:, 1:].to(device))
        passes = split(select(batch, share), size)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()
        # The clock runs from the barrier on, so that no rank times the lateness of another.
        start = time.perf_counter()
        outcome = train_step(engine, optimizer, passes, rate=1e-4, clip=1.0, balance_loss=recipe.balance_loss)
        outcome.loss.item()
        synchronize(device)
        taken.append(time.perf_counter() - start)
        if _is_done(taken[1:], timing, device):
            return statistics.median(taken[1:])


def _is_done(taken: list[float], timing: Timing, device: torch.device) -> bool:
    """Decide together, so that all ranks stop at once."""
    done = torch.tensor(
        float(len(taken) >= timing.most or (len(taken) >= timing.least and sum(taken) > timing.seconds))
    )
    if dist.is_initialized() and dist.get_world_size() > 1:
        done = done.to(device)
        dist.all_reduce(done, dist.ReduceOp.MAX)
    return bool(done.item())

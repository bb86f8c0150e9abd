"""Seconds of real training steps of small plans on processes of this machine, as a launch would run them.

Plans of models with almost nothing to compute give the host's time per layer, micro-batch and step.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from meshwright.observe.ranks import on_ranks
from meshwright.observe.rates import synchronize
from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.planner.cost.speeds import Host, Triple
from meshwright.planner.cost.stack import Stack
from meshwright.planner.machine.clusterfile import ClusterFile
from meshwright.spec.layout.layout import Layout
from meshwright.spec.memory.held import shards_are_masters
from meshwright.spec.model.shape import ModelShape, MoEShape
from meshwright.spec.plan.plan import Plan
from meshwright.spec.recipe.recipe import Recipe
from meshwright.training import device as train_device
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.optimizer.precision import DTYPES, reduce_dtype
from meshwright.training.step.batches import Batch, Share, select, split
from meshwright.training.step.step import train_step

LIMIT_S = 120.0
"""Time limit of the start, and of each plan, in seconds."""
SEQUENCE = 32
FEW, MANY, MICRO_BATCHES = 1, 4, 2
"""Layers of the two models of a kind, which differ in nothing else, and micro-batches."""
FEW_EXPERTS, MANY_EXPERTS = 2, 8
SWIGLU = ModelShape(
    name="floor-swiglu", vocab=64, layers=FEW, hidden=32, heads=2, kv_heads=2, ffn=64, max_positions=SEQUENCE
)
GELU = replace(
    SWIGLU, name="floor-gelu", family="gpt2", norm="layernorm", mlp="gelu_tanh", positions="learned", qkv_bias=True,
    out_bias=True, mlp_bias=True, tied=True,
)  # fmt: skip
ROUTED = {
    experts: replace(SWIGLU, name="floor-moe", family="mixtral", moe=MoEShape(experts=experts, top_k=2, ffn=32))
    for experts in (FEW_EXPERTS, MANY_EXPERTS)
}
KINDS: dict[str, ModelShape] = {
    "swiglu": SWIGLU, "gelu": GELU, "few": ROUTED[FEW_EXPERTS], "many": ROUTED[MANY_EXPERTS]
}  # fmt: skip
FLOOR_LIMIT_S = 300.0
"""Time limit of all tiny plans with one number of threads, in seconds."""
Key = tuple[str, int, int, str]
"""(kind, layers, micro-batches, recomputation)."""
LEAST_FORWARD, MOST_FORWARD = 0.25, 0.5
"""Bounds of the forward pass's share of a layer's host time."""
ROUNDS = 3
StepSeconds = dict[Key, float]


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
            # A step is as long as on its slowest rank.
            medians[n] = max(rank[index] for rank in ranks)
    return medians


def _all_steps(plans: list[Plan], timing: Timing, kind: str) -> list[float]:
    torch.set_num_threads(threads_of(dist.get_world_size()))
    process_groups: ProcessGroups = {}
    return [step_s(plan, timing, kind, process_groups) for plan in plans]


def step_s(plan: Plan, timing: Timing, kind: str = "cpu", process_groups: ProcessGroups | None = None) -> float:
    """Return the median step of a plan on this rank, on random tokens."""
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    recipe, layout = plan.recipe, plan.layout
    train_device.prepare(
        device, recipe.precision, tf32=recipe.tf32, deterministic=recipe.deterministic, products=recipe.products
    )
    mesh = make_mesh(layout, process_groups=process_groups)
    engine = build_engine(
        plan.model, layout, mesh=mesh, device=device, dtype=DTYPES[recipe.precision],
        reduce_dtype=reduce_dtype(recipe), micro_batches=layout.micro_batches(recipe.global_batch),
        products=recipe.products,
        masters=shards_are_masters(recipe.precision, layout, recipe.storage, recipe.reduce_dtype),
    )  # fmt: skip
    engine.train()
    optimizer = Optimizer.for_engine(engine, recipe)
    share = Share(index=mesh.reader, parts=layout.dp, columns=engine.columns(recipe.sequence))
    size = layout.micro_batch_of(recipe.global_batch)
    generator = torch.Generator().manual_seed(0)
    # The first step warms up, and is left out of the median.
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


TIMING = Timing(seconds=0.06, least=2, most=8)


def measure_floors(machine: ClusterFile, worlds: Sequence[int]) -> dict[int, StepSeconds]:
    """Return threads of a process -> seconds per step of each tiny plan, for all thread counts of `worlds`.

    The least of three medians counts: other load of the machine only adds.
    """
    plans = tiny_plans(machine)
    by_threads = {}
    for threads in sorted({threads_of(world) for world in worlds}):
        (steps,) = on_ranks(1, _time_plans, list(plans.values()), threads, limit_s=FLOOR_LIMIT_S)
        by_threads[threads] = dict(zip(plans, steps, strict=True))
    return by_threads


def _time_plans(plans: list[Plan], threads: int) -> list[float]:
    torch.set_num_threads(threads)
    rounds = [[step_s(plan, TIMING) for plan in plans] for _ in range(ROUNDS)]
    # Rounds over all plans, not each plan in a row: a busy minute then spoils one round of each.
    return [min(several) for several in zip(*rounds, strict=True)]


def with_floors(machine: ClusterFile, measured: Mapping[int, StepSeconds]) -> ClusterFile:
    """Return the machine with its host times: measured steps less what the planner counts for them."""
    plans = tiny_plans(machine)
    together = {}
    stack = machine.stack
    for ranks, world in sorted(machine.rates.items()):
        step_seconds = measured[threads_of(ranks)]

        def beside(*key: Any, step_seconds: StepSeconds = step_seconds) -> float:
            """Return the seconds that the planner does not account for."""
            plan = plans[key]
            return step_seconds[key] - machine.estimator(plan).predict(plan).step_s

        kinds = {kind: _fit_layer(kind, beside) for kind in KINDS}
        expert, routed = _fit_line(kinds["few"], kinds["many"])
        host = Host(swiglu=kinds["swiglu"], gelu=kinds["gelu"], routed=routed, expert=expert)
        together[ranks] = replace(world, speeds=replace(world.speeds, host=host, launch_s=0.0))
        stack = _fit_step(machine.stack, beside, kinds["swiglu"])
    return replace(machine, rates=together, stack=stack)


def tiny_plans(machine: ClusterFile) -> dict[Key, Plan]:
    """Return the tiny plans, of one process each."""
    keys: list[Key] = [("swiglu", FEW, 1, "none")]
    for kind in KINDS:
        keys += [(kind, FEW, MICRO_BATCHES, "none")]
        keys += [(kind, MANY, MICRO_BATCHES, recompute) for recompute in ("none", "full")]
    return {
        (kind, layers, micro, recompute): Plan(
            model=replace(KINDS[kind], layers=layers),
            recipe=Recipe(sequence=SEQUENCE, global_batch=micro, document_mask=False),
            layout=Layout(micro_batch=1, recompute=recompute, compile="off", cuda_graphs="off"),  # type: ignore[arg-type]  # one of the words that Layout allows
            cluster=machine.cluster(1),
        )
        for kind, layers, micro, recompute in keys
    }


def _fit_layer(kind: str, beside: Callable[..., float]) -> Triple:
    """Return (forward, backward, recomputation) host time of a layer.

    Full recomputation repeats the forward pass, so the difference is that pass, within plausible shares of both passes.
    Selective recomputation repeats no more than that.
    """
    plain = beside(kind, MANY, MICRO_BATCHES, "none")
    both_s = max(0.0, plain - beside(kind, FEW, MICRO_BATCHES, "none")) / (MANY - FEW) / MICRO_BATCHES
    again = (beside(kind, MANY, MICRO_BATCHES, "full") - plain) / MANY / MICRO_BATCHES
    # The difference of two medians is noisy, so it is held within plausible shares.
    forward = min(max(again, LEAST_FORWARD * both_s), MOST_FORWARD * both_s)
    return forward, both_s - forward, forward


def _fit_line(few: Triple, many: Triple) -> tuple[Triple, Triple]:
    """Return (time of each expert, time of all else) from layers with few and with many experts."""
    slopes = [max(0.0, b - a) / (MANY_EXPERTS - FEW_EXPERTS) for a, b in zip(few, many, strict=True)]
    rests = [max(0.0, a - FEW_EXPERTS * slope) for a, slope in zip(few, slopes, strict=True)]
    return (slopes[0], slopes[1], slopes[2]), (rests[0], rests[1], rests[2])


def _fit_step(stack: Stack, beside: Callable[..., float], layer: Triple) -> Stack:
    # One plan has one micro-batch and one has two: their difference is a micro-batch, less its layers.
    layers = FEW * (layer[0] + layer[1])
    once, several = beside("swiglu", FEW, 1, "none"), beside("swiglu", FEW, MICRO_BATCHES, "none")
    micro_s = max(0.0, (several - once) / (MICRO_BATCHES - 1) - layers)
    step_s = stack.step_s + max(0.0, once - micro_s - layers)
    return replace(stack, micro_batch_s=stack.micro_batch_s + micro_s, step_s=step_s)

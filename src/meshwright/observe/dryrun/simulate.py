"""The real training program on tensors without values, in a world that is not there: what it holds and what it sends.

Every rank that differs is run in a process of its own (one of each pipeline place: the others hold as much), as rank R
of N in a process group whose collectives do nothing. Time grows with what one rank computes, not with N.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from meshwright import compat
from meshwright.compat.torch_compile import compiled_by
from meshwright.kernels.target import acting_as
from meshwright.observe.dryrun.lowered_blocks import LoweredBlocks
from meshwright.observe.dryrun.op_cache import cached_calls
from meshwright.observe.dryrun.rank_run import Watched, WatchedRank
from meshwright.observe.dryrun.staged_copy import assigned_of
from meshwright.observe.dryrun.storage_tracker import ROUNDING_BYTES, FakeWatch
from meshwright.observe.dryrun.workspaces import cpu_workspace_bytes, workspace_bytes
from meshwright.observe.program import TrainingProgram, at_whole, shortened, without_values
from meshwright.observe.subprocesses import in_subprocesses
from meshwright.parallel import make_mesh
from meshwright.parallel.traffic import Counts
from meshwright.planner.step.predict import predict
from meshwright.spec import Plan
from meshwright.spec.compiled_blocks import compiles_blocks, is_lowered
from meshwright.spec.places import check_ranks, pipeline_ranks
from meshwright.training.device import resident_peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunCost:
    """What the dry run of one rank itself took: time of a core, and memory of its process."""

    seconds: float
    resident_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a plan's program would hold and send."""

    plan: Plan
    """With the largest step of its batch ramp as every step."""
    device: str
    """Whose kernels and allocator are stood in for: cuda or cpu."""
    ranks: tuple[WatchedRank, ...]
    run: dict[int, tuple[int, int]]
    """Micro-batches of the two steps that were made, by rank."""
    costs: dict[int, DryRunCost]
    notes: tuple[str, ...]

    @property
    def worst(self) -> WatchedRank:
        """The rank that needs most."""
        return max(self.ranks, key=lambda seen: seen.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Of the worst rank."""
        return self.worst.peak_bytes

    def traffic(self, rank: int) -> Counts:
        """(axis, collective) -> calls and bytes that a rank sends in a whole step."""
        seen = next(one for one in self.ranks if one.rank == rank)
        layout, batch = self.plan.layout, self.plan.recipe.global_batch
        first, second = seen.sent
        counts, whole = self.run[rank], layout.micro_batches(batch)
        found = {}
        for key in second:
            calls = [at_whole(first.get(key, (0, 0))[n], second[key][n], counts, whole) for n in (0, 1)]
            found[key] = calls[0], calls[1]
        return found


def dry_run(
    plan: Plan,
    *,
    ranks: Sequence[int] = (),
    device: str = "",
    load: float = 1.0,
    whole: bool = False,
    processes: int = 0,
    limit_s: float | None = None,
    told: Callable[[int, int], None] | None = None,
) -> DryRun:
    """Run the program of some ranks of a plan (default: one of each pipeline place) on tensors without values.

    `load`: rows that a rank's experts get over an even share. `whole`: every micro-batch of a step, instead of as many
    as it takes until nothing new comes. `told` of ranks done and of all. PlanError: a plan that cannot run; a model
    whose sizes depend on values. TooLong after `limit_s`.
    """
    device = device or device_of(plan)
    plan.check()
    if device == "cuda":
        plan = predict(plan).settled
    if not compiles_blocks(plan.layout, plan.model, device, plan.recipe.fake_quantize):
        plan = replace(plan, layout=replace(plan.layout, compile="off"))
    if plan.cluster.device.is_gpu and not plan.cluster.device.runs_triton:
        plan = replace(plan, layout=replace(plan.layout, kernels="eager"))
    ramp, plan = plan.recipe.batch_ramp, replace(plan, recipe=plan.recipe.largest)
    ranks = tuple(ranks) or tuple(pipeline_ranks(plan.layout))
    check_ranks(plan.layout, ranks)
    counts = {rank: _counts(plan, rank, whole) for rank in ranks}
    longest_first = sorted(counts, key=lambda rank: -sum(counts[rank]))
    tasks = [(plan, rank, device, load, counts[rank]) for rank in longest_first]
    found: dict[int, WatchedRank] = {}
    costs: dict[int, DryRunCost] = {}
    for number, (seen, cost) in in_subprocesses(_task, tasks, processes=processes, limit_s=limit_s):
        found[longest_first[number]], costs[longest_first[number]] = seen, cost
        if told is not None:
            told(len(found), len(counts))
    return DryRun(
        plan=plan,
        device=device,
        ranks=tuple(found[rank] for rank in counts),
        run=counts,
        costs=costs,
        notes=tuple(_notes(plan, ramped=bool(ramp))),
    )


def device_of(plan: Plan) -> str:
    """cuda for a plan on a GPU that it describes or on a machine that has one, else cpu."""
    return "cuda" if plan.cluster.device.is_gpu or torch.cuda.is_available() else "cpu"


def see(plan: Plan, rank: int, device: str, load: float, counts: Sequence[int]) -> WatchedRank:
    """One rank, in this process; a process can do this once (torch keeps groups by name)."""
    with compat.fake_world(rank, plan.layout.world), compat.fake_tensors() as fake, acting_as(device):
        program = TrainingProgram(
            plan=plan, mesh=make_mesh(plan.layout), device=torch.device("cpu"), told=lambda part: None, routing=load,
            documents=plan.recipe.document_mask and plan.layout.cp == 1, acts_as=device,
            assigned=partial(assigned_of, plan, rank),
        )  # fmt: skip
        within = workspace_bytes if device == "cuda" else cpu_workspace_bytes
        watch = FakeWatch(ROUNDING_BYTES[device], cached_calls(fake), within)
        blocks = LoweredBlocks(fake, watch)
        lowers = device == "cuda" and is_lowered(plan.layout, plan.model, plan.recipe.fake_quantize)
        with without_values(), compiled_by(blocks.compiled) if lowers else nullcontext():
            return Watched(program, watch).run(counts)


def _counts(plan: Plan, rank: int, whole: bool) -> tuple[int, int]:
    every = plan.layout.micro_batches(plan.recipe.global_batch)
    return (every, every) if whole else shortened(plan, rank)


def _task(plan: Plan, rank: int, device: str, load: float, counts: tuple[int, int]) -> tuple[WatchedRank, DryRunCost]:
    torch.set_num_threads(1)
    found = see(plan, rank, device, load, counts)
    return found, DryRunCost(seconds=time.process_time(), resident_bytes=resident_peak_bytes())


def _notes(plan: Plan, *, ramped: bool) -> list[str]:
    found = []
    if ramped:
        found.append(f"of the batch ramp the largest step is run: {plan.recipe.global_batch} sequences")
    if plan.recipe.document_mask and plan.layout.cp > 1:
        found.append("document masks over context-parallel ranks depend on the text and are not counted")
    if plan.model.moe is not None:
        found.append("tokens are taken to go to experts evenly, or by the load that was given")
    return found

"""Traces of all ranks of a plan.

Every rank runs. In a small world each rank runs its steps in full. In a larger one each runs a brief form of the plan:
the same layout and schedule, one layer of each kind per stage, the fewest micro-batches that the schedule takes, short
sequences. Ranks of one pipeline stage with equal brief traces then share one full trace. Each rank's groups are
recorded from that rank.

Assumption: two ranks of one pipeline stage that do the same in the brief form do the same in the full one. More layers
of the same kind and more micro-batches repeat what was compared. A test records worlds both ways.
"""

import gc
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from meshwright import compat
from meshwright.kernels.chooser import simulate_device
from meshwright.observe.check.events import Communicator, RankTrace, Trace
from meshwright.observe.check.recorder import TraceRecorder
from meshwright.observe.dryrun.op_cache import cached_calls
from meshwright.observe.program import TrainingProgram, without_values
from meshwright.observe.ranks import in_subprocesses
from meshwright.parallel import make_mesh
from meshwright.spec import Plan
from meshwright.spec.errors import IllegalLayout, PlanError
from meshwright.spec.layout.layout import Layout, layers_of_stages, place_of
from meshwright.spec.layout.schedule import refusal

FEW_RANKS = 16
"""Largest world whose ranks all run in full."""
ROUNDS = 3
"""Micro-batches per pipeline rank after which a schedule only repeats itself."""
SHORT = 16
"""Tokens per rank in a brief run's sequence."""
AT_ONCE = 32
"""Most ranks that one process runs, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Traces and groups of recorded ranks."""

    traces: dict[str, Trace]
    """Full traces by digest. Empty for a brief recording."""
    ranks: dict[int, tuple[str, tuple[Communicator, ...]]]
    """Digest and groups of each rank."""

    def world(self) -> list[RankTrace]:
        """Return the ranks of a full recording, in order."""
        return [RankTrace(rank, self.traces[digest], groups) for rank, (digest, groups) in sorted(self.ranks.items())]


def record_world(
    plan: Plan,
    *,
    device: str = "cpu",
    load: float = 1.0,
    processes: int = 0,
    in_full: bool | None = None,
    whole: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[RankTrace]:
    """Record all ranks of a plan.

    Raises PlanError when the plan cannot run or its sizes depend on values.

    Args:
        in_full: Run each rank in full. None = if they are few.
        whole: Run every micro-batch of a step.
        progress: Called with the number of ranks done and of all.
    """
    plan = replace(plan, layout=replace(plan.layout, compile="off"))
    plan.check()
    plan = plan if whole else limit_rounds(plan)
    world = plan.layout.world
    if in_full is None:
        in_full = world <= FEW_RANKS
    if world == 1:
        raise PlanError("a plan of one rank sends nothing: there is nothing to check")
    if in_full:
        return _record_in_processes(plan, range(world), device, load, processes, full=True, progress=progress).world()
    briefs = _record_in_processes(
        abbreviate_plan(plan), range(world), device, load, processes, full=False, progress=progress
    )
    ranks_alike: dict[tuple[int, str], list[int]] = {}
    for rank, (digest, _) in sorted(briefs.ranks.items()):
        ranks_alike.setdefault((place_of(plan.layout, rank)["pp"], digest), []).append(rank)
    full = _record_in_processes(
        plan, [ranks[0] for ranks in ranks_alike.values()], device, load, processes, full=True, progress=progress
    )
    world_traces: dict[int, RankTrace] = {}
    for ranks in ranks_alike.values():
        digest, groups = full.ranks[ranks[0]]
        # A trace names groups by their order of creation, so a shared trace needs the same groups.
        if _names_and_ranks(groups) != _names_and_ranks(briefs.ranks[ranks[0]][1]):
            raise PlanError(f"rank {ranks[0]} makes other groups in a brief run than in a full one")
        for rank in ranks:
            # Only the full run shows which axis used a group.
            groups_here = tuple(
                replace(mine, axis=same.axis) for mine, same in zip(briefs.ranks[rank][1], groups, strict=True)
            )
            world_traces[rank] = RankTrace(rank, full.traces[digest], groups_here)
    return [world_traces[rank] for rank in range(world)]


def _names_and_ranks(groups: Sequence[Communicator]) -> list[tuple[str, tuple[int, ...]]]:
    return [(communicator.name, communicator.ranks) for communicator in groups]


def _record_in_processes(
    plan: Plan, ranks: Iterable[int], device: str, load: float, processes: int, *, full: bool,
    progress: Callable[[int, int], None] | None,
) -> Recording:  # fmt: skip
    ranks = list(ranks)
    workers = processes or len(os.sched_getaffinity(0))
    # Two tasks per worker, so that an early worker takes a part of a late one's share.
    size = min(AT_ONCE, -(-len(ranks) // (2 * workers)))
    tasks = [(plan, ranks[start : start + size], device, load, full) for start in range(0, len(ranks), size)]
    recording = Recording(traces={}, ranks={})
    for _, part in in_subprocesses(record_ranks, tasks, processes=processes):
        for digest, trace in part.traces.items():
            recording.traces.setdefault(digest, trace)
        recording.ranks.update(part.ranks)
        if progress is not None:
            progress(len(recording.ranks), len(ranks))
    return recording


def record_ranks(plan: Plan, ranks: Sequence[int], device: str, load: float, full: bool) -> Recording:
    """Record ranks in this process, one after the other."""
    torch.set_num_threads(1)
    # gc.collect runs after every rank. Freezing spares it the objects of torch and this package.
    gc.freeze()
    traces: dict[str, Trace] = {}
    recorded: dict[int, tuple[str, tuple[Communicator, ...]]] = {}
    with compat.fake_tensors() as fake, simulate_device(device):
        call = cached_calls(fake)
        for rank in ranks:
            with compat.fake_world(rank, plan.layout.world):
                rank_trace = _record(plan, rank, load, TraceRecorder(call), full)
            digest = hashlib.blake2b(repr(rank_trace.trace).encode(), digest_size=16).hexdigest()
            recorded[rank] = digest, rank_trace.communicators
            if full:
                traces.setdefault(digest, rank_trace.trace)
            del rank_trace
            # torch finds groups by name: those of this rank must be gone before the next makes its own.
            gc.collect()
    return Recording(traces=traces, ranks=recorded)


def _record(plan: Plan, rank: int, load: float, recorder: TraceRecorder, full: bool) -> RankTrace:
    """Record one rank; world and tensors are fake already."""

    def set_part(name: str) -> None:
        recorder.part = name

    mesh = make_mesh(plan.layout)
    documents = plan.recipe.document_mask and plan.layout.cp == 1
    program = TrainingProgram(
        plan=plan, mesh=mesh, device=torch.device("cpu"), on_part=set_part, routing=load, documents=documents
    )  # fmt: skip
    with without_values(), recorder.listening():
        program.build()
        # A batch ramp has steps of several sizes, and the schedule of each is another trace.
        every_size = dict.fromkeys(map(plan.layout.micro_batches, plan.recipe.global_batches))
        counts = list(every_size) if full else [fewest_micro_batches(plan)]
        for number, count in enumerate(counts, start=1):
            program.step(number, count)
        if full:
            program.rest()
            program.step(len(counts) + 1, fewest_micro_batches(plan))
    return RankTrace(rank, recorder.trace(), recorder.communicators(mesh))


def fewest_micro_batches(plan: Plan) -> int:
    """Return the smallest number of micro-batches that the schedule takes."""
    return _legal(plan.layout, 1, plan.micro_batches)


def limit_rounds(plan: Plan) -> Plan:
    """Limit steps to ROUNDS micro-batches per pipeline rank, which still show all that a schedule does."""
    layout, recipe = plan.layout, plan.recipe

    def fewer(batch: int) -> int:
        count = layout.micro_batches(batch)
        return batch // count * _legal(layout, ROUNDS * layout.pp, count)

    ramp = tuple(replace(stage, global_batch=fewer(stage.global_batch)) for stage in recipe.batch_ramp)
    return replace(plan, recipe=replace(recipe, global_batch=fewer(recipe.global_batch), batch_ramp=ramp))


def _legal(layout: Layout, least: int, most: int) -> int:
    legal = (
        count for count in range(least, most)
        if layout.pp == 1 or refusal(layout.schedule, layout.pp, count, layout.vp) is None
    )  # fmt: skip
    return next(legal, most)


def _with_micro_batches(plan: Plan, count: int) -> Plan:
    rows = plan.recipe.global_batch // plan.layout.micro_batches(plan.recipe.global_batch)
    size = plan.layout.micro_batch_of(plan.recipe.global_batch)
    return replace(
        plan, recipe=replace(plan.recipe, global_batch=rows * count), layout=replace(plan.layout, micro_batch=size)
    )


def abbreviate_plan(plan: Plan) -> Plan:
    """Return the plan with few layers and micro-batches; the plan itself where that would be illegal."""
    shape, layout, recipe = plan.model, plan.layout, plan.recipe
    dense, unwindowed = shape.moe.first_dense if shape.moe else 0, shape.window_from_layer
    kinds = [
        [kind for kind, _ in groupby((layer >= dense, layer >= unwindowed) for layer in layers)]
        for layers in layers_of_stages(shape.layers, layout)
    ]
    kinds_of_layers = [kind for stage in kinds for kind in stage]
    moe = shape.moe and replace(shape.moe, first_dense=sum(not routed for routed, _ in kinds_of_layers))
    windowed = sum(not window for _, window in kinds_of_layers)
    sequence = min(recipe.sequence, SHORT * layout.cp * layout.tp)
    changed = replace(
        plan,
        model=replace(shape, layers=len(kinds_of_layers), moe=moe, window_from_layer=windowed),
        layout=replace(layout, stages=tuple(map(len, kinds)) if layout.pp > 1 else ()),
        recipe=replace(recipe.largest, noise_scale_every=0, sequence=sequence),
    )
    # zb-v places the same stages, and takes fewer micro-batches.
    if layout.schedule == "dualpipe-v":
        changed = replace(changed, layout=replace(changed.layout, schedule="zb-v"))
    changed = _with_micro_batches(changed, fewest_micro_batches(changed))
    try:
        changed.check()
    except IllegalLayout:
        return plan
    return changed

"""The traces of all ranks of a plan.

Every rank runs. In a world of few ranks each runs its steps in full. In a larger one each runs a brief form of the
plan: the same layout and schedule, one layer of each kind per stage, as few micro-batches as the schedule takes, short
sequences. Ranks of one pipeline place whose brief traces are equal, event by event, then share one full trace. Each
rank's groups are recorded from that rank.

Assumed: two ranks of one pipeline place that do the same in the brief form do the same in the full one. More layers of
the same kind and more micro-batches repeat what was compared; a test records worlds both ways.
"""

import gc
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from meshwright import compat
from meshwright.kernels.target import acting_as
from meshwright.observe.check.events import Communicator, RankTrace, Trace
from meshwright.observe.check.recorder import TraceRecorder
from meshwright.observe.dryrun.op_cache import cached_calls
from meshwright.observe.program import TrainingProgram, without_values
from meshwright.observe.subprocesses import in_subprocesses
from meshwright.parallel import make_mesh
from meshwright.spec import Plan
from meshwright.spec.errors import IllegalLayout, PlanError
from meshwright.spec.layout import Layout
from meshwright.spec.places import layers_of_stages, place_of
from meshwright.spec.schedule import refusal

FEW_RANKS = 16
"""Worlds of so many ranks or fewer run all of them in full."""
ROUNDS = 3
"""Micro-batches for each pipeline rank after which a schedule only repeats itself."""
SHORT = 16
"""Tokens per rank of a brief run's sequence."""
AT_ONCE = 32
"""The most ranks that one process runs, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What `record_ranks` gives of some ranks."""

    traces: dict[str, Trace]
    """By digest; none of a brief recording."""
    ranks: dict[int, tuple[str, tuple[Communicator, ...]]]
    """Digest and groups of each."""

    def world(self) -> list[RankTrace]:
        """The ranks of a full recording, in order."""
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
    """All ranks of a plan.

    `in_full` = run each of them in full (default: where they are few). `whole` = every micro-batch of a step.
    `progress` hears of ranks done and of all. PlanError: a plan that cannot run, or whose sizes depend on values.
    """
    plan = replace(plan, layout=replace(plan.layout, compile="off"))
    plan.check()
    plan = plan if whole else rounds(plan)
    world = plan.layout.world
    if in_full is None:
        in_full = world <= FEW_RANKS
    if world == 1:
        raise PlanError("a plan of one rank sends nothing: there is nothing to check")
    if in_full:
        return _recorded(plan, range(world), device, load, processes, full=True, progress=progress).world()
    found = _recorded(brief(plan), range(world), device, load, processes, full=False, progress=progress)
    alike: dict[tuple[int, str], list[int]] = {}
    for rank, (digest, _) in sorted(found.ranks.items()):
        alike.setdefault((place_of(plan.layout, rank)["pp"], digest), []).append(rank)
    full = _recorded(
        plan, [ranks[0] for ranks in alike.values()], device, load, processes, full=True, progress=progress
    )
    world_traces: dict[int, RankTrace] = {}
    for ranks in alike.values():
        digest, groups = full.ranks[ranks[0]]
        if _named(groups) != _named(found.ranks[ranks[0]][1]):
            raise PlanError(f"rank {ranks[0]} makes other groups in a brief run than in a full one")
        for rank in ranks:
            own = tuple(
                replace(one, axis=same.axis) for one, same in zip(found.ranks[rank][1], groups, strict=True)
            )  # which axis used a group is seen in full only
            world_traces[rank] = RankTrace(rank, full.traces[digest], own)
    return [world_traces[rank] for rank in range(world)]


def _named(groups: Sequence[Communicator]) -> list[tuple[str, tuple[int, ...]]]:
    return [(one.name, one.ranks) for one in groups]


def _recorded(
    plan: Plan, ranks: Iterable[int], device: str, load: float, processes: int, *, full: bool,
    progress: Callable[[int, int], None] | None,
) -> Recording:  # fmt: skip
    ranks = list(ranks)
    workers = processes or len(os.sched_getaffinity(0))
    size = min(AT_ONCE, -(-len(ranks) // (2 * workers)))
    tasks = [(plan, ranks[start : start + size], device, load, full) for start in range(0, len(ranks), size)]
    found = Recording(traces={}, ranks={})
    for _, part in in_subprocesses(record_ranks, tasks, processes=processes):
        for digest, trace in part.traces.items():
            found.traces.setdefault(digest, trace)
        found.ranks.update(part.ranks)
        if progress is not None:
            progress(len(found.ranks), len(ranks))
    return found


def record_ranks(plan: Plan, ranks: Sequence[int], device: str, load: float, full: bool) -> Recording:
    """Some ranks in this process, one after the other."""
    torch.set_num_threads(1)
    gc.freeze()
    traces: dict[str, Trace] = {}
    found: dict[int, tuple[str, tuple[Communicator, ...]]] = {}
    with compat.fake_tensors() as fake, acting_as(device):
        call = cached_calls(fake)
        for rank in ranks:
            with compat.fake_world(rank, plan.layout.world):
                one = _record(plan, rank, load, TraceRecorder(call), full)
            digest = hashlib.blake2b(repr(one.trace).encode(), digest_size=16).hexdigest()
            found[rank] = digest, one.communicators
            if full:
                traces.setdefault(digest, one.trace)
            del one
            gc.collect()  # torch finds groups by name: those of this rank must be gone before the next makes its own
    return Recording(traces=traces, ranks=found)


def _record(plan: Plan, rank: int, load: float, recorder: TraceRecorder, full: bool) -> RankTrace:
    """In a world and on tensors that are fake already."""

    def part(name: str) -> None:
        recorder.part = name

    mesh = make_mesh(plan.layout)
    documents = plan.recipe.document_mask and plan.layout.cp == 1
    program = TrainingProgram(
        plan=plan, mesh=mesh, device=torch.device("cpu"), told=part, routing=load, documents=documents
    )  # fmt: skip
    with without_values(), recorder.listening():
        program.build()
        counts = _counts(plan) if full else [fewest(plan)]
        for number, count in enumerate(counts, start=1):
            program.step(number, count)
        if full:
            program.rest()
            program.step(len(counts) + 1, fewest(plan))
    return RankTrace(rank, recorder.trace(), recorder.communicators(mesh))


def _counts(plan: Plan) -> list[int]:
    """Micro-batches of the steps: of each size that the batch ramp brings, in its order."""
    return list(dict.fromkeys(map(plan.layout.micro_batches, plan.recipe.global_batches)))


def fewest(plan: Plan) -> int:
    """The smallest number of micro-batches that the schedule takes."""
    return _legal(plan.layout, 1, plan.micro_batches)


def rounds(plan: Plan) -> Plan:
    """With fewer micro-batches where a step has more than ROUNDS for each pipeline rank: then what a schedule begins
    with, repeats and ends with has all been seen. Each size of a batch ramp is shortened by itself."""
    layout, recipe = plan.layout, plan.recipe

    def fewer(batch: int) -> int:
        whole = layout.micro_batches(batch)
        return batch // whole * _legal(layout, ROUNDS * layout.pp, whole)

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
        plan,
        recipe=replace(plan.recipe, global_batch=rows * count),
        layout=replace(plan.layout, micro_batch=size),
    )


def brief(plan: Plan) -> Plan:
    """The same layout and schedule with few layers and micro-batches; the plan itself where that would be illegal."""
    shape, layout, recipe = plan.model, plan.layout, plan.recipe
    dense, unwindowed = shape.moe.first_dense if shape.moe else 0, shape.window_from_layer
    kinds = [
        [kind for kind, _ in groupby((layer >= dense, layer >= unwindowed) for layer in layers)]
        for layers in layers_of_stages(shape.layers, layout)
    ]
    kept = [kind for stage in kinds for kind in stage]
    moe = shape.moe and replace(shape.moe, first_dense=sum(not routed for routed, _ in kept))
    windowed = sum(not window for _, window in kept)
    sequence = min(recipe.sequence, SHORT * layout.cp * layout.tp)
    changed = replace(
        plan,
        model=replace(shape, layers=len(kept), moe=moe, window_from_layer=windowed),
        layout=replace(layout, stages=tuple(map(len, kinds)) if layout.pp > 1 else ()),
        recipe=replace(recipe.largest, noise_scale_every=0, sequence=sequence),
    )
    if layout.schedule == "dualpipe-v":  # zb-v places the same stages, and takes fewer micro-batches
        changed = replace(changed, layout=replace(changed.layout, schedule="zb-v"))
    changed = _with_micro_batches(changed, fewest(changed))
    try:
        changed.check()
    except IllegalLayout:
        return plan
    return changed

"""A few real steps of a plan's program, measured: memory by two independent methods, traffic, time.

Each rank builds and runs the program three times, since watching storages slows it down:

    record    the allocator's own account of memory (observe.profile.allocator)
    watch     every storage, by kind (observe.dryrun.storage_tracker); never compiled, since compiled code takes memory
              unseen
    time      one step to warm up, then the steps that count, with clocks only; then one more under torch's profiler,
              for the time of each operation

Tokens are drawn at random. `profile` starts the processes on this machine; `measure` is one rank's part in an existing
world.
"""

import gc
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from statistics import median_low
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from meshwright import compat
from meshwright.observe.dryrun.rank_run import Watched, WatchedRank
from meshwright.observe.dryrun.storage_tracker import ROUNDING_BYTES, StorageWatch
from meshwright.observe.profile.allocator import AllocatorAccount, Stretch, patient, recorder_of
from meshwright.observe.profile.clock import Aligned, align, clock_of
from meshwright.observe.profile.step_record import StepRecorder, TimedStep, covered_s
from meshwright.observe.program import TrainingProgram
from meshwright.observe.ranks import RankError, on_ranks
from meshwright.observe.spans import Span, report_spans
from meshwright.parallel import Mesh, make_mesh
from meshwright.parallel.blocks.compiling import is_compiled
from meshwright.parallel.groups.group import Counts
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.parallel.health.heartbeat import Heartbeat
from meshwright.planner.step.predict import predict
from meshwright.spec import Layout, Plan
from meshwright.spec.errors import DoesNotFit, PlanError, RunError
from meshwright.spec.presets import device, device_names
from meshwright.spec.rules.passes import can_be_compiled
from meshwright.spec.units import many
from meshwright.spec.weights.inventory import token_flop
from meshwright.training import device as devices
from meshwright.training.device import pick_device
from meshwright.training.fits import check_fits

LISTED = 30
COMMUNICATION = "nccl"
"""Lower-case name of NCCL's kernels."""
FIRST = 4
"""Steps whose memory is measured: the first may differ, the last ones are alike."""
STEPS = 4
PER_CORE = 8
"""Processes per core that still make progress; more would only wait for each other."""
LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOperation:
    """One of the most expensive operations of a step."""

    name: str
    calls: int
    seconds: float
    """Its own time without nested operations; of the GPU if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKernels:
    """Seconds of a GPU in one step, under torch's profiler, which lengthens it."""

    compute_s: float
    communication_s: float
    exposed_s: float
    """Communication while nothing computes, including waits for other ranks."""
    idle_s: float
    """Neither computation nor communication."""


def time_operations(
    step: Callable[[], None], device: torch.device
) -> tuple[tuple[TimedOperation, ...], GpuKernels | None]:
    """Run a step under the profiler. Return its most expensive operations, and a GPU's kernels."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch_profile(activities=activities) as profile:
        step()
    kernels = overlap(compat.profiled_kernels(profile)) if cuda else None
    return most_expensive(profile.key_averages(), cuda=cuda), kernels


def most_expensive(rows: Iterable[Any], *, cuda: bool) -> tuple[TimedOperation, ...]:
    """Return the most expensive of torch's averages.

    A GPU's time appears up to three times: in the row of the operation that launched a kernel, of the kernel, and of
    each named range. The first one counts.
    """
    timed = [
        TimedOperation(
            name=row.key,
            calls=row.count,
            seconds=(row.self_device_time_total if cuda else row.self_cpu_time_total) / 1e6,
        )
        for row in rows
        if row.device_type == DeviceType.CPU and not row.is_user_annotation
    ]
    return tuple(sorted((row for row in timed if row.seconds), key=lambda row: -row.seconds)[:LISTED])


def overlap(kernels: Sequence[tuple[str, float, float]]) -> GpuKernels:
    """Compute the overlap of kernels (name, start, end) on any streams."""
    sent = [(start, end) for name, start, end in kernels if COMMUNICATION in name.lower()]
    rest = [(start, end) for name, start, end in kernels if COMMUNICATION not in name.lower()]
    compute, communication, either = covered_s(rest), covered_s(sent), covered_s([*rest, *sent])
    span_s = max((end for _, _, end in kernels), default=0.0) - min((start for _, start, _ in kernels), default=0.0)
    return GpuKernels(
        compute_s=compute, communication_s=communication, exposed_s=either - compute, idle_s=span_s - either
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePeak(Stretch):
    """A part of the program that changes memory, at its peak: `build`, `F 0 3`, `gradients`, `update 1` ...

    Parts are those of StorageWatch.phases. If the allocator's run had other parts, `allocated_bytes` are the watch's.
    """

    step: int
    """Number of the step. 0 = before the first one."""
    kinds: dict[str, int]


def memory_timeline(seen: WatchedRank, watch: StorageWatch, account: AllocatorAccount) -> tuple[TimelinePeak, ...]:
    """Combine the parts of one watched and one recorded run of the same program, in order."""
    starts = [*(phase.start for phase in watch.phases), watch.now]
    stretches = _stretches_by_phase(watch, account)
    parts = iter(seen.passes)
    peaks, step = [], 0
    for index, phase in enumerate(watch.phases):
        word, _, number = phase.name.partition(" ")
        step = int(number) if word == "step" else step
        if starts[index] == starts[index + 1]:
            continue
        part = next(parts)
        assert part.name == phase.name
        stretch = stretches[index] or Stretch(name=part.name, allocated_bytes=part.peak_bytes, reserved_bytes=0)
        peaks.append(TimelinePeak(step=step, kinds=part.kinds, **asdict(stretch)))
    return tuple(peaks)


def _stretches_by_phase(watch: StorageWatch, account: AllocatorAccount) -> list[Stretch | None]:
    """Return the allocator's figures of each phase of the watch, or None if the runs differed."""
    # Both runs follow the same schedule, but nothing forces it, and figures of other parts would mislead.
    names = [phase.name for phase in watch.phases]
    if [stretch.name for stretch in account.stretches] == names:
        return list(account.stretches)
    return [None] * len(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """Measurements of one rank."""

    rank: int
    device: str
    host: str
    account: AllocatorAccount
    seen: WatchedRank
    memory: tuple[TimelinePeak, ...]
    """The parts of the first steps, in order."""
    traffic: Counts
    steps: tuple[TimedStep, ...]
    operations: tuple[TimedOperation, ...]
    kernels: GpuKernels | None
    clock: Aligned
    peak_flop_per_s: float | None
    compiled: bool = False
    """True if the recorded and the timed program were compiled. The watched one never is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measurements of all ranks."""

    plan: Plan
    ranks: tuple[RankProfile, ...]

    @property
    def worst(self) -> RankProfile:
        """The rank that held most."""
        return max(self.ranks, key=lambda rank: rank.account.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak of that rank, by the allocator."""
        return self.worst.account.peak_bytes

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Seconds of each timed step, on its slowest rank."""
        return tuple(
            max(step.seconds for step in same) for same in zip(*(rank.steps for rank in self.ranks), strict=True)
        )

    @property
    def chosen(self) -> int:
        """Index of the timed step of median length, which stands for all."""
        lengths = self.step_seconds
        return lengths.index(median_low(lengths))

    @property
    def step_s(self) -> float:
        """Seconds of that step."""
        return self.step_seconds[self.chosen]

    @property
    def busiest(self) -> RankProfile:
        """The rank that computed longest in it."""
        return max(self.ranks, key=lambda rank: rank.steps[self.chosen].parts["compute"])

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of that rank by step_record.PARTS. The excess of slower ranks is `other`, so that they add up."""
        step = self.busiest.steps[self.chosen]
        return {**step.parts, "other": step.parts["other"] + self.step_s - step.seconds}

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks together."""
        return self.plan.recipe.global_batch * self.plan.recipe.sequence / self.step_s

    @property
    def bubble_fraction(self) -> float:
        """Pipeline waits of the busiest rank over its work, as in planner.step.predict.Prediction."""
        parts = self.parts
        busy = parts["compute"] + parts["exchange"]
        return parts["bubble"] / busy if busy else 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes needed to read the figures."""
        if not self.worst.compiled:
            return ()
        return (
            "kinds of memory and the largest tensors are of the program uncompiled, peaks and times of it compiled",
        )

    @property
    def residual_s(self) -> float:
        """Uncertainty of the common clock."""
        return max(rank.clock.residual_s for rank in self.ranks)

    def utilization(self, *, causal: bool, hardware: bool = False) -> float | None:
        """Return MFU (with `hardware`: HFU). None = the device's peak is not known."""
        peak = self.ranks[0].peak_flop_per_s
        if not peak:
            return None
        flop = token_flop(self.plan.model, self.plan.recipe.sequence, causal=causal)
        flop_per_token = (
            flop.hardware(self.plan.layout.acting_recompute, self.plan.recomputed_share) if hardware else flop.training
        )
        return flop_per_token * self.tokens_per_s / self.plan.layout.world / peak


class _MeasuredProgram(TrainingProgram):
    """A program with random tokens, equal on ranks that read the same."""

    def build(self) -> None:
        """Build with initialized weights and tokens of the whole vocabulary."""
        self.initialize = True
        TrainingProgram.build(self)
        # Ranks that read the same rows, such as those of one tp group, must draw the same tokens.
        places = self.mesh.places
        generator = torch.Generator(self.device).manual_seed(self.mesh.reader * self.plan.layout.cp + places["cp"])
        for batch in self.batches:
            for tokens in (batch.tokens, batch.targets):
                tokens.random_(0, self.plan.model.vocab, generator=generator)


def measure(
    plan: Plan,
    *,
    steps: int = STEPS,
    pulse: Heartbeat | None = None,
    progress: Callable[[str], None] | None = None,
    process_groups: ProcessGroups | None = None,
) -> RankProfile:
    """Measure one rank, in a process group of layout.world ranks or alone.

    Args:
        progress: Called at the start of each round.
        process_groups: Groups of this process that exist already (parallel.groups.mesh).
    """
    pulse, progress = pulse or Heartbeat(), progress or (lambda line: None)
    target = devices.pick_device()
    if target.type == "cuda":
        cluster = devices.cluster_of(plan, devices.known_device(target), 1)
        plan = replace(plan, layout=predict(replace(plan, cluster=cluster)).settled.layout)
    check_fits(plan, target)
    devices.prepare(target, plan.recipe.precision)
    mesh = make_mesh(plan.layout, traffic=pulse.calls, process_groups=process_groups)
    rounds = _Rounds(plan, mesh, target, pulse)
    progress(f"{FIRST} steps before the allocator's recorder")
    account = rounds.record()
    progress(f"{FIRST} steps with every storage watched, not compiled")
    watched, watch = rounds.watch()
    progress(f"{steps + 2} steps against the clock")
    timed, traffic, table, kernels, aligned = rounds.time(steps)
    return RankProfile(
        rank=mesh.rank,
        device=devices.title(target),
        host=platform.node(),
        account=account,
        seen=watched,
        memory=memory_timeline(watched, watch, account),
        traffic=traffic,
        steps=timed,
        operations=table,
        kernels=kernels,
        clock=aligned,
        peak_flop_per_s=devices.peak_flop_per_s(target, plan.recipe.precision, plan.cluster.device),
        compiled=is_compiled(plan.layout, target) and can_be_compiled(plan.model, plan.recipe.fake_quantize),
    )


class _Rounds:
    def __init__(self, plan: Plan, mesh: Mesh, device: torch.device, pulse: Heartbeat) -> None:
        self.plan, self.mesh, self.device, self.pulse = plan, mesh, device, pulse
        self.count = plan.layout.micro_batches(plan.recipe.global_batch)

    def _program(self, on_part: Callable[[str], None], layout: Layout | None = None) -> TrainingProgram:
        plan, mesh = self.plan, self.mesh
        if layout is not None:
            plan, mesh = replace(plan, layout=layout), replace(mesh, layout=layout)
        # The program of the round before must be gone: its memory would be in this one's peak.
        self.pulse.step = 0
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        masked = plan.recipe.document_mask and plan.layout.cp == 1
        return _MeasuredProgram(plan=plan, mesh=mesh, device=self.device, on_part=on_part, documents=masked)

    def record(self) -> AllocatorAccount:
        """Run build, the first steps, evaluation and checkpoint under the allocator's recorder."""
        recorder = recorder_of(self.device)
        part = ["start"]

        def begin(name: str) -> None:
            part[0] = name
            recorder.begin(name)

        def begin_span(span: Span | None) -> None:
            recorder.begin(str(span) if span else part[0])

        with recorder, report_spans(begin_span), patient() if self.device.type == "cpu" else nullcontext():
            program = self._program(begin)
            program.build()
            for number in range(1, FIRST + 1):
                program.step(number, self.count)
            program.rest()
            del program
        return recorder.account()

    def watch(self) -> tuple[WatchedRank, StorageWatch]:
        """Run the same under a watch, not compiled."""
        watch = StorageWatch(ROUNDING_BYTES[self.device.type])
        program = self._program(lambda name: None, replace(self.plan.layout, compile="off"))
        return Watched(program, watch).run([self.count] * FIRST), watch

    def time(
        self, steps: int
    ) -> tuple[tuple[TimedStep, ...], Counts, tuple[TimedOperation, ...], GpuKernels | None, Aligned]:
        """Run a step to warm up, the steps that count, and one for the table of operations."""
        program = self._program(lambda name: None)
        program.build()
        self._step(program, 1)
        first = align(self.mesh.rank, self.mesh.layout.world)
        clock = clock_of(self.device)
        recorders = []
        # Taken again before each step: what remains is the traffic of the last one.
        before = self.mesh.traffic.snapshot()
        for number in range(2, steps + 2):
            before = self.mesh.traffic.snapshot()
            recorders.append(recorder := StepRecorder(clock, self.plan.layout.pp > 1))
            with recorder.step():
                self._step(program, number)
        sent = self.mesh.traffic.since(before)
        # Clocks drift, so ranks align again after the steps: the line between both corrects moments in between.
        clock.settle()
        last = align(self.mesh.rank, self.mesh.layout.world)
        aligned = Aligned(first=first, last=last, device_residual_s=clock.residual_s)
        timed = tuple(recorder.timed(aligned.seconds) for recorder in recorders)
        table, kernels = time_operations(lambda: self._step(program, steps + 2), self.device)
        self.pulse.step = 0
        return timed, sent, table, kernels, aligned

    def _step(self, program: TrainingProgram, number: int) -> None:
        started, self.pulse.step = perf_counter(), number
        program.step(number, self.count)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.pulse.step_ended(perf_counter() - started)


def gather_profile(mine: RankProfile, plan: Plan) -> Profile | None:
    """Gather all ranks' profiles on the first one; None on the others. Every rank calls this."""
    if plan.layout.world == 1:
        return Profile(plan=plan, ranks=(mine,))
    profiles: list[RankProfile] | None = [mine] * plan.layout.world if mine.rank == 0 else None
    dist.gather_object(mine, profiles, dst=0)
    return None if profiles is None else Profile(plan=plan, ranks=tuple(profiles))


def profile(plan: Plan, *, steps: int = STEPS, progress: Callable[[str], None] | None = None) -> Profile:
    """Measure a plan on processes of this machine: on its GPUs if it has some (one each), else on its cores.

    Raises PlanError or IllegalLayout when it cannot run, or not here, DoesNotFit, and RunError when a process fails.
    """
    plan.check()
    refuse_elsewhere(plan)
    # Before processes start: a rank that the system kills for its memory leaves no message.
    check_fits(plan, pick_device())
    if plan.layout.world == 1:
        return Profile(plan=plan, ranks=(measure(plan, steps=steps, progress=progress),))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if progress is not None:
        progress(f"{plan.layout.world} processes of this machine, each three times over")
    try:
        ranks = on_ranks(plan.layout.world, _measure_rank, plan, steps, limit_s=LIMIT_S, device=kind)
    except RankError as error:
        raise _short_error(error) from error
    return Profile(plan=plan, ranks=tuple(ranks))


def _measure_rank(plan: Plan, steps: int) -> RankProfile:
    return measure(plan, steps=steps)


def refuse_elsewhere(plan: Plan) -> None:
    """Raise PlanError for a plan made for absent hardware, or with more ranks than this machine can run."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name, world = plan.cluster.device.name, plan.layout.world
    meant = plan.cluster.device.memory_bytes and any(
        name == device(preset).name for preset in device_names() if preset != "local"
    )
    if meant and not gpus:
        raise PlanError(
            f"this machine has no GPU, and the plan is for {many(plan.cluster.devices, 'device')} of the kind "
            f"{name}: start it there with torchrun, or take meshwright dryrun, which needs none"
        )
    if gpus and world > gpus:
        raise PlanError(
            f"this machine has too few GPUs: the layout has {many(world, 'rank')}, and there are "
            f"{many(gpus, 'GPU')}. Start it with torchrun on enough GPUs, or take meshwright dryrun, which "
            "needs none"
        )
    cores = len(os.sched_getaffinity(0))
    if not gpus and world > PER_CORE * cores:
        raise PlanError(
            f"this machine is too small: the layout has {many(world, 'rank')}, and {many(cores, 'core')} run "
            f"at most {PER_CORE * cores} processes. Start it on more machines with torchrun, or take "
            "meshwright dryrun"
        )


def _short_error(error: RankError) -> Exception:
    # The traceback of another process came as text, and its last line says what happened.
    head, _, rest = str(error).partition(":\n")
    last = next((line for line in reversed(rest.splitlines()) if line.strip()), head).strip()
    kind, _, words = last.partition(": ")
    if kind.endswith("DoesNotFit") or "out of memory" in last.lower() or "can't allocate memory" in last:
        return DoesNotFit(f"{head}: {words or last}")
    is_foreseen = ".errors." in kind
    return RunError(f"{head} failed: {words if is_foreseen else f'{last} (run with --debug for the traceback)'}")

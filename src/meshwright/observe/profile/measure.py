"""A few real steps of a plan's program, measured: memory by two who do not know each other, traffic, time.

Each rank builds and runs the program three times over, since whoever looks at storages slows it down:

    recorded   the allocator's own account of what was held (observe.profile.allocator)
    watched     every storage, by kind (observe.dryrun.storage_tracker); never compiled, since compiled code takes
    memory unseen
    timed       one step to warm up, then the steps that count, under nobody's eyes but a clock's; then one more under
                torch's profiler, for the time of each operation

Tokens are drawn at random. `profile` starts the processes itself; `measure` is one rank's part, for a world that is
there already.
"""

import gc
import platform
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median_low
from time import perf_counter

import torch
import torch.distributed as dist

from meshwright.observe.dryrun.rank_run import Watched, WatchedRank
from meshwright.observe.dryrun.storage_tracker import ROUNDING_BYTES, StorageWatch
from meshwright.observe.profile.allocator import AllocatorAccount, recorder_of
from meshwright.observe.profile.clock import Aligned, align, clock_of
from meshwright.observe.profile.cpu_allocator import patient
from meshwright.observe.profile.memory_timeline import TimelinePeak, moments
from meshwright.observe.profile.operations import GpuKernels, TimedOperation, operations
from meshwright.observe.profile.step_record import StepRecorder, TimedStep
from meshwright.observe.program import TrainingProgram
from meshwright.observe.spans import Span, told
from meshwright.parallel import Mesh, make_mesh
from meshwright.parallel.compiling import is_compiled
from meshwright.parallel.health.heartbeat import Heartbeat
from meshwright.parallel.mesh import Made
from meshwright.parallel.traffic import Counts
from meshwright.planner.step.predict import predict
from meshwright.spec import Layout, Plan
from meshwright.spec.compiled_blocks import can_be_compiled
from meshwright.spec.flop import token_flop
from meshwright.training import device as devices
from meshwright.training.fits import check_fits

FIRST = 4
"""Steps whose memory is looked at: the first may differ, the last ones are alike."""
STEPS = 4
"""Steps that are timed, unless somebody wants more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """What one rank measured of itself."""

    rank: int
    device: str
    host: str
    account: AllocatorAccount
    seen: WatchedRank
    memory: tuple[TimelinePeak, ...]
    """The parts of the first steps, in order."""
    traffic: Counts
    """Of one step."""
    steps: tuple[TimedStep, ...]
    operations: tuple[TimedOperation, ...]
    kernels: GpuKernels | None
    """Of a GPU."""
    clock: Aligned
    peak_flop_per_s: float | None
    compiled: bool = False
    """Whether the recorded and the timed program were: the watched one never is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What all ranks measured."""

    plan: Plan
    ranks: tuple[RankProfile, ...]

    @property
    def worst(self) -> RankProfile:
        """The rank that held most."""
        return max(self.ranks, key=lambda one: one.account.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Of that rank, by the recorder."""
        return self.worst.account.peak_bytes

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Of each timed step, by the rank that took longest."""
        return tuple(
            max(step.seconds for step in same) for same in zip(*(one.steps for one in self.ranks), strict=True)
        )

    @property
    def chosen(self) -> int:
        """The timed step that stands for all: the one in the middle by its length."""
        lengths = self.step_seconds
        return lengths.index(median_low(lengths))

    @property
    def step_s(self) -> float:
        """Of that step."""
        return self.step_seconds[self.chosen]

    @property
    def busiest(self) -> RankProfile:
        """The rank that computed longest in it."""
        return max(self.ranks, key=lambda one: one.steps[self.chosen].parts["compute"])

    @property
    def parts(self) -> dict[str, float]:
        """What that rank spent the step on, by steps.PARTS; what others took longer is `other`: they add up."""
        step = self.busiest.steps[self.chosen]
        return {**step.parts, "other": step.parts["other"] + self.step_s - step.seconds}

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together."""
        return self.plan.recipe.global_batch * self.plan.recipe.sequence / self.step_s

    @property
    def bubble_fraction(self) -> float:
        """As planner.step.predict.Prediction: what the busiest rank waited in the pipeline, over its work."""
        parts = self.parts
        busy = parts["compute"] + parts["exchange"]
        return parts["bubble"] / busy if busy else 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be known to read the figures."""
        if not self.worst.compiled:
            return ()
        return (
            "kinds of memory and the largest tensors are of the program uncompiled, peaks and times of it compiled",
        )

    @property
    def residual_s(self) -> float:
        """How wrong the common clock can be."""
        return max(one.clock.residual_s for one in self.ranks)

    def utilization(self, *, causal: bool, hardware: bool = False) -> float | None:
        """MFU (with `hardware`: HFU) of the peak of the device; None = that is not known."""
        peak = self.ranks[0].peak_flop_per_s
        if not peak:
            return None
        flop = token_flop(self.plan.model, self.plan.recipe.sequence, causal=causal)
        each = (
            flop.hardware(self.plan.layout.acting_recompute, self.plan.recomputed_share) if hardware else flop.training
        )
        return each * self.tokens_per_s / self.plan.layout.world / peak


class _Real(TrainingProgram):
    """A program whose tokens are drawn: the same on ranks that read the same."""

    def build(self) -> None:
        """As Program, with weights that count and tokens of the whole vocabulary."""
        self.initialize = True
        TrainingProgram.build(self)
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
    said: Callable[[str], None] | None = None,
    made: Made | None = None,
) -> RankProfile:
    """One rank's part, in a process group of layout.world ranks (or alone); `said` hears of each round. `made`: groups
    of this process that exist already (parallel.mesh)."""
    pulse, said = pulse or Heartbeat(), said or (lambda line: None)
    target = devices.pick_device()
    if target.type == "cuda":
        here = devices.cluster_of(plan, devices.known_device(target), 1)
        plan = replace(plan, layout=predict(replace(plan, cluster=here)).settled.layout)
    check_fits(plan, target)
    devices.prepare(target, plan.recipe.precision)
    mesh = make_mesh(plan.layout, traffic=pulse.calls, made=made)
    rounds = _Rounds(plan, mesh, target, pulse)
    said(f"{FIRST} steps before the allocator's recorder")
    account = rounds.recorded()
    said(f"{FIRST} steps with every storage watched, not compiled")
    seen, watch = rounds.watched()
    said(f"{steps + 2} steps against the clock")
    timed, traffic, table, kernels, aligned = rounds.timed(steps)
    return RankProfile(
        rank=mesh.rank,
        device=devices.title(target),
        host=platform.node(),
        account=account,
        seen=seen,
        memory=moments(seen, watch, account),
        traffic=traffic,
        steps=timed,
        operations=table,
        kernels=kernels,
        clock=aligned,
        peak_flop_per_s=devices.peak_flop_per_s(target, plan.recipe.precision, plan.cluster.device),
        compiled=is_compiled(plan.layout, target) and can_be_compiled(plan.model, plan.recipe.fake_quantize),
    )


class _Rounds:
    """The program, as often as it takes."""

    def __init__(self, plan: Plan, mesh: Mesh, device: torch.device, pulse: Heartbeat) -> None:
        self.plan, self.mesh, self.device, self.pulse = plan, mesh, device, pulse
        self.count = plan.layout.micro_batches(plan.recipe.global_batch)

    def _program(self, heard: Callable[[str], None], layout: Layout | None = None) -> TrainingProgram:
        plan, mesh = self.plan, self.mesh
        if layout is not None:
            plan, mesh = replace(plan, layout=layout), replace(mesh, layout=layout)
        self.pulse.step = 0
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        masked = plan.recipe.document_mask and plan.layout.cp == 1
        return _Real(plan=plan, mesh=mesh, device=self.device, told=heard, documents=masked)

    def recorded(self) -> AllocatorAccount:
        """Build, the first steps, evaluation, what a checkpoint reads."""
        recorder = recorder_of(self.device)
        part = ["start"]

        def begin(name: str) -> None:
            part[0] = name
            recorder.begin(name)

        def span(one: Span | None) -> None:
            recorder.begin(str(one) if one else part[0])

        with recorder, told(span), patient() if self.device.type == "cpu" else nullcontext():
            program = self._program(begin)
            program.build()
            for number in range(1, FIRST + 1):
                program.step(number, self.count)
            program.rest()
            del program
        return recorder.account()

    def watched(self) -> tuple[WatchedRank, StorageWatch]:
        """The same under a watch, not compiled."""
        watch = StorageWatch(ROUNDING_BYTES[self.device.type])
        program = self._program(lambda name: None, replace(self.plan.layout, compile="off"))
        return Watched(program, watch).run([self.count] * FIRST), watch

    def timed(
        self, steps: int
    ) -> tuple[tuple[TimedStep, ...], Counts, tuple[TimedOperation, ...], GpuKernels | None, Aligned]:
        """A step that does not count, the ones that do, one for the table of operations."""
        program = self._program(lambda name: None)
        program.build()
        self._step(program, 1)
        first = align(self.mesh.rank, self.mesh.layout.world)
        clock = clock_of(self.device)
        recorders = []
        before = self.mesh.traffic.snapshot()
        for number in range(2, steps + 2):
            before = self.mesh.traffic.snapshot()
            recorders.append(recorder := StepRecorder(clock, self.plan.layout.pp > 1))
            with recorder.step():
                self._step(program, number)
        sent = self.mesh.traffic.since(before)
        clock.settle()
        last = align(self.mesh.rank, self.mesh.layout.world)
        aligned = Aligned(first=first, last=last, device_residual_s=clock.residual_s)
        timed = tuple(one.timed(aligned.seconds) for one in recorders)
        table, kernels = operations(lambda: self._step(program, steps + 2), self.device)
        self.pulse.step = 0
        return timed, sent, table, kernels, aligned

    def _step(self, program: TrainingProgram, number: int) -> None:
        """One step, to its end."""
        started, self.pulse.step = perf_counter(), number
        program.step(number, self.count)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.pulse.step_ended(perf_counter() - started)


def gathered(mine: RankProfile, plan: Plan) -> Profile | None:
    """All ranks' profiles on the first one, None on the others; every rank calls this."""
    if plan.layout.world == 1:
        return Profile(plan=plan, ranks=(mine,))
    found: list[RankProfile] | None = [mine] * plan.layout.world if mine.rank == 0 else None
    dist.gather_object(mine, found, dst=0)
    return None if found is None else Profile(plan=plan, ranks=tuple(found))

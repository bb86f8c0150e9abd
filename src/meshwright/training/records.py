"""Records of a run and of its steps: for watchers, metrics, and RUN/ledger.json with its traffic and memory.

A step is recorded once its numbers have reached the host. A GPU works through its queue long after the host has filled
it. The time at which the host reads a step's numbers says when the host got there, not when the step ended. A border is
an event in that queue, which the device stamps as it passes. It costs no waiting, and is read once the host waits for
the step anyway. A CPU has computed a step when the call returns.

    device   ..step 7..|..step 8..|evaluation, checkpoint|..step 9..|
                       border     border                 border     border
"""

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright import __version__
from meshwright.compat import torch_compile
from meshwright.data import Corpus
from meshwright.data.report import note_plain_template, note_unscored
from meshwright.formats.hub import unwritable
from meshwright.parallel.apply import layout_notes
from meshwright.parallel.blocks.compiling import compile_notes, is_compiled
from meshwright.parallel.groups.group import Counts, Group, broadcast_object
from meshwright.spec import Plan, num_parameters
from meshwright.spec.layout.layout import pipeline_ranks
from meshwright.spec.recipe.recipe import DataRead
from meshwright.spec.rules.passes import can_be_compiled
from meshwright.spec.units import many
from meshwright.spec.weights.inventory import token_flop
from meshwright.training import device as devices
from meshwright.training.objectives.teacher import teacher_tensors
from meshwright.training.optimizer.optimizer import held_bytes, learning_rate
from meshwright.training.optimizer.precision import REASONS
from meshwright.training.step.state import TrainState
from meshwright.training.step.step import Objective, StepResult
from meshwright.training.step.watch import Forecast, RunInfo, StepMetrics


@dataclass(slots=True)
class StepLedger:
    """Ledger of a step. Traffic is the difference of two counts, memory is read in the first step: 10 us per step."""

    state: TrainState
    objective: Objective
    step: int = 0
    """The step that `sent` belongs to. 0 = none yet."""
    sent: Counts = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    _before: Counts = field(default_factory=dict)

    def begin(self) -> None:
        """Note that a step begins."""
        self._before = self.state.engine.mesh.traffic.snapshot()

    def look(self) -> None:
        """Read the memory while gradients exist, just before the optimizer's update."""
        if not self.held:
            self.held = held_bytes(self.state.engine, self.state.optimizer, teacher_tensors(self.objective))

    def end(self, step: int) -> None:
        """Note that the step has ended."""
        self.step, self.sent = step, self.state.engine.mesh.traffic.since(self._before)

    def document(self, target: torch.device, plan: Plan) -> dict[str, Any]:
        """Return the ledger as JSON on every rank. All ranks must call this.

        It holds what rank 0 sends in the last step and holds at the optimizer's update, the same of one rank per
        pipeline place, and every rank's peak on a GPU.
        """
        mesh = self.state.engine.mesh
        local_rank, world = self._rank_document(), mesh["world"]
        ranks = [local_rank]
        if world.size > 1:
            ranks = [
                broadcast_object(number, local_rank, world.process_group) for number in pipeline_ranks(mesh.layout)
            ]
        document: dict[str, Any] = {"source": "measured", **ranks[0], "step": self.step, "ranks": ranks}
        if target.type == "cuda":
            use = devices.memory(target)
            local_peaks = torch.tensor([[use.allocated_bytes, use.reserved_bytes]], device=target)
            peaks = world.all_gather(local_peaks).tolist()
            document["peaks"] = [allocated for allocated, _ in peaks]
            for rank in ranks:
                rank["peak_bytes"], rank["reserved_bytes"] = peaks[rank["rank"]]
        machine = environment(target, world.size) | {"attention": devices.attention_kernel(plan, target)}
        return document | {"device": target.type, "environment": machine}

    def _rank_document(self) -> dict[str, Any]:
        return {
            "rank": self.state.engine.mesh.rank,
            "traffic": [
                {"axis": axis, "collective": collective, "bytes": sent, "calls": calls}
                for (axis, collective), (calls, sent) in sorted(self.sent.items())
            ],
            "memory": [{"kind": kind, "bytes": size} for kind, size in self.held.items()],
        }


def environment(target: torch.device, processes: int) -> dict[str, Any]:
    """Return what figures of this machine depend on, without names of hosts or people."""
    return {
        "device": devices.title(target),
        "processes": processes,
        "meshwright": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "system": f"{platform.system()} {platform.machine()}",
    }


def run_info(
    plan: Plan,
    corpus: Corpus,
    device: torch.device,
    *,
    read: DataRead,
    losses: tuple[float, ...],
    forecast: Forecast,
    notes: tuple[str, ...],
) -> RunInfo:
    """Return what watchers get before the first step."""
    layout, batch, validation = plan.layout, plan.recipe.global_batch, corpus.validation
    largest = max(plan.recipe.global_batches)
    rise = f", rising to {largest * plan.recipe.sequence:,}" if largest > batch else ""
    return RunInfo(
        plan=plan,
        parameters=num_parameters(plan.model),
        device=devices.title(device),
        first_step=read.steps,
        steps=plan.recipe.steps,
        batch_equation=(
            f"global batch {many(batch, 'sequence')} = micro-batch {layout.micro_batch_of(batch)} "
            f"x accumulation {layout.micro_batches(batch)} x dp {layout.dp}: "
            f"{batch * plan.recipe.sequence:,} tokens a step{rise}"
        ),
        train_tokens=corpus.train.size,
        run_tokens=plan.recipe.tokens_of_run(read),
        bytes_per_token=(validation if validation.num_tokens else corpus.train).bytes_per_token,
        peak_flop_per_s=devices.peak_flop_per_s(device, plan.recipe.precision, plan.cluster.device),
        losses=losses,
        foreseen=forecast.sentences,
        notes=(
            *notes,
            *note_plain_template(plan.data, corpus),
            *(note_unscored(plan.data, plan.recipe, corpus) if plan.recipe.eval_every else ()),
        ),
    )


def run_notes(
    plan: Plan, device: torch.device, *extra_notes: str, steps_done: int, length: str, changes: str
) -> list[str]:
    """Return sentences about what is slower, different or less than the plan may suggest.

    Args:
        length: The recipe key that sets how long the run is.
        changes: What differs from the run that it resumes.
    """
    compiled = is_compiled(plan.layout, device) and can_be_compiled(plan.model, plan.recipe.fake_quantize)
    notes = compile_notes(plan.layout, device, plan.model)
    if compiled:
        notes.append("the first step compiles blocks, which may take a minute; later runs find the code on disk")
    notes += [plan.beyond_positions] if plan.beyond_positions else []
    notes += [*layout_notes(plan.layout), *extra_notes]
    notes += devices.kernel_notes(plan, device, compiled)
    notes += devices.deterministic_notes(plan, device, compiled)
    if device.type == "cuda" and plan.recipe.precision == "fp32" and not plan.recipe.tf32:
        notes.append("fp32 products use no tensor cores: recipe.precision=bf16 or recipe.tf32=true is far faster")
    notes += devices.product_notes(plan, device, compiled)
    if problem := unwritable(plan.model.base):
        notes.append(f"this model cannot be exported to a Hugging Face directory: {problem}")
    if steps_done >= plan.recipe.steps and changes:
        notes.append(
            f"the run has made {steps_done} steps, so that no step is left for {changes}: raise recipe.{length}, or "
            "choose another run= to train anew"
        )
    elif steps_done >= plan.recipe.steps:
        notes.append(f"all {plan.recipe.steps} steps were already done: raise recipe.{length} to go on")
    elif changes:
        notes.append(f"resuming with changes: {changes}")
    return notes


class StepBorder(Protocol):
    """A moment between two steps."""

    def wait(self) -> None:
        """Return once the device has passed the border."""

    def seconds_since(self, earlier: "StepBorder") -> float:
        """Return the seconds from an earlier border of the same device. Both have been passed."""


class HostBorder:
    """The present, by the clock of the host."""

    def __init__(self) -> None:
        self.at_s = time.perf_counter()

    def wait(self) -> None:
        """Return at once."""

    def seconds_since(self, earlier: StepBorder) -> float:
        """Return the seconds between two readings of the host's clock."""
        assert isinstance(earlier, HostBorder)
        return self.at_s - earlier.at_s


class DeviceBorder:
    """The end of the work in the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Return once the device has passed the event."""
        self.event.synchronize()

    def seconds_since(self, earlier: StepBorder) -> float:
        """Return the seconds between two events by the device's clock."""
        assert isinstance(earlier, DeviceBorder)
        milliseconds: float = earlier.event.elapsed_time(self.event)
        return milliseconds / 1e3


def mark_border(device: torch.device) -> StepBorder:
    """Return a border behind all work that `device` has been given."""
    return DeviceBorder(device) if device.type == "cuda" else HostBorder()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """The borders of a step. Its seconds can be read once the device has passed its end."""

    begun: StepBorder
    ended: StepBorder
    pause_begun: StepBorder | None
    """End of the step before, if something came between. None = `begun` is that border, or this is the first step."""
    fed: StepBorder
    """The device passed this when the host had the batch."""
    compiled: bool
    """True when code was compiled for the step, or it is the first of the process."""

    @property
    def seconds(self) -> float:
        """Duration of the step with its wait for data and for a compiler."""
        return self.ended.seconds_since(self.begun)

    @property
    def idle_s(self) -> float:
        """Time before the step had work. On a GPU shorter than the host's wait for the batch, or none."""
        return self.fed.seconds_since(self.begun)

    @property
    def pause_s(self) -> float:
        """Time between this step and the one before."""
        return self.begun.seconds_since(self.pause_begun) if self.pause_begun is not None else 0.0


class StepClock:
    """Borders of the steps of a process, and sums over the steps that have been read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps = 0
        """Steps begun."""
        self.starting_steps, self.starting_s = 0, 0.0
        """The first step, and those for which code was compiled."""
        self.tokens, self.seconds = 0, 0.0
        """Sums over the steps of this process that have been read."""
        self.paused_s = 0.0
        """Time between steps."""
        self._steady_steps, self._steady_tokens, self._steady_s = 0, 0, 0.0
        self._pause_begun: StepBorder | None = None
        self.start()

    def start(self) -> None:
        """Begin the next step here, whatever came before."""
        self._edge = self._fed = mark_border(self.device)
        self._graphs = torch_compile.compiled_graphs()

    def feed(self) -> None:
        """Note that the host has the batch of the step. Costs a GPU an event in its queue, and no waiting."""
        self._fed = mark_border(self.device)

    def end_step(self, ended: StepBorder) -> StepSpan:
        """End a step at `ended`, where the next one begins."""
        graphs = torch_compile.compiled_graphs()
        span = StepSpan(
            begun=self._edge, ended=ended, pause_begun=self._pause_begun, fed=self._fed,
            compiled=not self.steps or graphs > self._graphs,
        )  # fmt: skip
        self.steps += 1
        self._edge, self._fed, self._graphs, self._pause_begun = ended, ended, graphs, None
        return span

    def end_pause(self) -> None:
        """End what came after the last step. The next one begins here."""
        # An evaluation and a checkpoint after the same step are one pause.
        begun = self._pause_begun or self._edge
        self.start()
        self._pause_begun = begun

    def count(self, span: StepSpan, tokens: int) -> None:
        """Add a step that the device has passed."""
        self.paused_s += span.pause_s
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + span.seconds
        if span.compiled:
            self.starting_steps, self.starting_s = self.starting_steps + 1, self.starting_s + span.seconds
        else:
            self._steady_steps += 1
            self._steady_tokens, self._steady_s = self._steady_tokens + tokens, self._steady_s + span.seconds

    def close(self) -> None:
        """Wait for the device, and add a pause that no step follows."""
        if self._pause_begun is not None:
            self._edge.wait()
            self.paused_s += self._edge.seconds_since(self._pause_begun)
            self._pause_begun = None

    @property
    def compile_s(self) -> float:
        """Time by which the first step and those that compiled were longer than the others. 0 = only they are known."""
        if not self._steady_steps:
            return 0.0
        return max(0.0, self.starting_s - self.starting_steps * self._steady_s / self._steady_steps)

    @property
    def steady_tokens_per_second(self) -> float | None:
        """Speed of the steps that neither compiled nor were the first. None = there was none."""
        return self._steady_tokens / self._steady_s if self._steady_s else None


class Readback:
    """Small fp32 tensors by name. A training step waits for the device only in `read`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        # One copy for all numbers: each of its own would be a launch and a transfer.
        packed = torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])
        # From a GPU this is page-locked memory, which the copy fills while the host goes on.
        self._host = packed.to("cpu", non_blocking=True)
        self.border = mark_border(packed.device)
        """The end of the step and of the copy."""

    def read(self) -> dict[str, list[float]]:
        """Wait until the device has computed the numbers, and return them by name."""
        self.border.wait()
        numbers, values = self._host.tolist(), {}
        for name, size in self._sizes.items():
            values[name], numbers = numbers[:size], numbers[size:]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A step that the device may still be computing."""

    step: int
    global_batch: int
    tokens: int
    """Tokens of the run, including this step."""
    span: StepSpan
    data_wait_s: float
    part: Tensor
    """This rank's part of the loss, still times the loss scale."""
    micro_tokens: tuple[float, ...]
    numbers: Readback


def start_readback(outcome: StepResult, **more: Tensor | None) -> Readback:
    """Start copying a step's numbers to the host, with `more` by name. None is left out."""
    tensors = {
        "loss": outcome.loss,
        "grad_norm": outcome.grad_norm,
        "reason": outcome.reason,
        "balance": outcome.balance,
        "micro_squared": torch.stack(outcome.micro_squared) if outcome.micro_squared else None,
        "figures": outcome.figures if len(outcome.figures) else None,
        **more,
    }
    return Readback({name: tensor for name, tensor in tensors.items() if tensor is not None})


def name_non_finite_rank(world: Group, part: Tensor) -> str:
    """Name the first rank whose part of the loss is not finite. All ranks call this once the sum is not."""
    finite = world.all_gather(torch.isfinite(part).reshape(1)).tolist()
    return "all ranks" if all(finite) else f"rank {finite.index(False)}"


def build_metrics(
    plan: Plan,
    pending: PendingStep,
    values: dict[str, list[float]],
    *,
    device_used: torch.device,
    run_s: float,
    noise_scale_tokens: float | None,
) -> StepMetrics:
    """Return the record of a step from the values of its readback."""
    use = devices.memory(device_used)
    rate = pending.global_batch * plan.recipe.sequence / pending.span.seconds
    peak = devices.peak_flop_per_s(device_used, plan.recipe.precision, plan.cluster.device)
    peak = peak * plan.layout.world if peak else None
    causal, full = (token_flop(plan.model, plan.recipe.sequence, causal=causal) for causal in (True, False))
    skipped = int(values["skipping"][3])
    return StepMetrics(
        step=pending.step,
        loss=values["loss"][0],
        grad_norm=values["grad_norm"][0],
        lr=learning_rate(plan.recipe, pending.step),
        tokens=pending.tokens,
        tokens_per_second=rate,
        seconds=run_s,
        step_seconds=pending.span.seconds,
        data_wait_seconds=pending.data_wait_s,
        pause_seconds=pending.span.pause_s or None,
        allocated_bytes=use.allocated_bytes,
        reserved_bytes=use.reserved_bytes,
        mfu_causal=rate * causal.training / peak if peak else None,
        mfu_full=rate * full.training / peak if peak else None,
        hfu=rate * causal.hardware(plan.layout.acting_recompute, plan.recomputed_share) / peak if peak else None,
        noise_scale_tokens=noise_scale_tokens,
        balance_loss=values["balance"][0] if "balance" in values else None,
        loss_scale=values["loss_scale"][0] if "loss_scale" in values else None,
        global_batch=pending.global_batch,
        skipped=REASONS[int(values["reason"][0])],
        skipped_steps=skipped or None,
        figures=dict(zip(plan.recipe.traits.figures, values.get("figures", ()), strict=True)),
    )

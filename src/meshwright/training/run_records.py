"""Facts about a run: for watchers before its first step, and for RUN/ledger.json its traffic and memory."""

import platform
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright import __version__
from meshwright.data import Corpus
from meshwright.data.report import note_plain_template, note_unscored
from meshwright.formats.hub import unwritable
from meshwright.parallel.apply import layout_notes
from meshwright.parallel.graphs.compiling import compile_notes, is_compiled
from meshwright.parallel.groups.agree import broadcast_object
from meshwright.parallel.groups.traffic import Counts
from meshwright.spec import Plan, num_parameters
from meshwright.spec.layout.layout import pipeline_ranks
from meshwright.spec.recipe.recipe import DataRead
from meshwright.spec.rules.compilation import can_be_compiled
from meshwright.spec.units import many
from meshwright.training import device as devices
from meshwright.training.optimizer.optimizer import held_bytes
from meshwright.training.resume.state import TrainState
from meshwright.training.step.step import Objective
from meshwright.training.step.watch import Forecast, RunInfo
from meshwright.training.teachers.teacher import teacher_tensors


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
    return RunInfo(
        plan=plan,
        parameters=num_parameters(plan.model),
        device=devices.title(device),
        first_step=read.steps,
        steps=plan.recipe.steps,
        batch_equation=(
            f"global batch {many(batch, 'sequence')} = micro-batch {layout.micro_batch_of(batch)} "
            f"x accumulation {layout.micro_batches(batch)} x dp {layout.dp}"
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

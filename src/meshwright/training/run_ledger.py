"""Traffic and memory of a run's steps for RUN/ledger.json, under the keys that plan and dry run use."""

import platform
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright import __version__
from meshwright.parallel.groups.agree import broadcast_object
from meshwright.parallel.groups.traffic import Counts
from meshwright.spec import Plan
from meshwright.spec.layout.layout import pipeline_ranks
from meshwright.training import device
from meshwright.training.optimizer.kept_bytes import memory
from meshwright.training.resume.state import TrainState
from meshwright.training.step.step import Objective
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
            self.held = memory(self.state.engine, self.state.optimizer, teacher_tensors(self.objective))

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
            use = device.memory(target)
            local_peaks = torch.tensor([[use.allocated_bytes, use.reserved_bytes]], device=target)
            peaks = world.all_gather(local_peaks).tolist()
            document["peaks"] = [allocated for allocated, _ in peaks]
            for rank in ranks:
                rank["peak_bytes"], rank["reserved_bytes"] = peaks[rank["rank"]]
        machine = environment(target, world.size) | {"attention": device.attention_kernel(plan, target)}
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
        "device": device.title(target),
        "processes": processes,
        "meshwright": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "system": f"{platform.system()} {platform.machine()}",
    }

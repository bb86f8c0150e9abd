"""What a run's steps send and hold, for RUN/ledger.json: the keys `traffic` and `memory` of plan and dry run."""

import platform
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright import __version__
from meshwright.parallel.agree import broadcast_object
from meshwright.parallel.traffic import Counts
from meshwright.spec import Plan
from meshwright.spec.places import pipeline_ranks
from meshwright.training import device
from meshwright.training.kept_bytes import memory
from meshwright.training.state import TrainState
from meshwright.training.step import Objective
from meshwright.training.teacher import teacher_tensors


@dataclass(slots=True)
class StepLedger:
    """Costs ten microseconds a step: traffic is the difference of two counts, memory is looked at in the first step."""

    state: TrainState
    objective: Objective
    step: int = 0
    """The step that `sent` is of, 0 = none yet."""
    sent: Counts = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    _before: Counts = field(default_factory=dict)

    def begin(self) -> None:
        """A step begins."""
        self._before = self.state.engine.mesh.traffic.snapshot()

    def look(self) -> None:
        """Gradients are there and reduced, the optimizer is about to update."""
        if not self.held:
            self.held = memory(self.state.engine, self.state.optimizer, teacher_tensors(self.objective))

    def end(self, step: int) -> None:
        """The step has ended."""
        self.step, self.sent = step, self.state.engine.mesh.traffic.since(self._before)

    def document(self, target: torch.device, plan: Plan) -> dict[str, Any]:
        """As JSON, on every rank, all of which must ask: what the first rank sends in the last step that was made, and
        holds at the optimizer's update; the same of one rank of each pipeline place; every rank's peak on a GPU."""
        mesh = self.state.engine.mesh
        own, world = self._own(), mesh["world"]
        ranks = [own]
        if world.size > 1:
            ranks = [broadcast_object(rank, own, world.process_group) for rank in pipeline_ranks(mesh.layout)]
        found: dict[str, Any] = {"source": "measured", **ranks[0], "step": self.step, "ranks": ranks}
        if target.type == "cuda":
            use = device.memory(target)
            mine = torch.tensor([[use.allocated_bytes, use.reserved_bytes]], device=target)
            peaks = world.all_gather(mine).tolist()
            found["peaks"] = [allocated for allocated, _ in peaks]
            for one in ranks:
                one["peak_bytes"], one["reserved_bytes"] = peaks[one["rank"]]
        known = environment(target, world.size) | {"attention": device.attention_kernel(plan, target)}
        return found | {"device": target.type, "environment": known}

    def _own(self) -> dict[str, Any]:
        return {
            "rank": self.state.engine.mesh.rank,
            "traffic": [
                {"axis": axis, "collective": collective, "bytes": sent, "calls": calls}
                for (axis, collective), (calls, sent) in sorted(self.sent.items())
            ],
            "memory": [{"kind": kind, "bytes": size} for kind, size in self.held.items()],
        }


def environment(target: torch.device, processes: int) -> dict[str, Any]:
    """What a figure of this machine needs beside it; no names of hosts or people."""
    return {
        "device": device.title(target),
        "processes": processes,
        "meshwright": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "system": f"{platform.system()} {platform.machine()}",
    }

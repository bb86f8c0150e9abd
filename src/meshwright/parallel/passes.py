"""The pipeline of an engine: its stages as the executor calls them, and when their gradients are reduced."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from meshwright import compat
from meshwright.model import Transformer
from meshwright.parallel import data
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline import Pipeline, Stage, WarmUp
from meshwright.parallel.replicas import Replicas
from meshwright.spec.schedule import Action, last_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Pass(Protocol):
    """One micro-batch on its way through the stages."""

    @property
    def size(self) -> tuple[int, int]:
        """Sequences, and positions of each that this rank has."""

    def forms(self) -> "Mapping[Hashable, Pass]":
        """Passes of this size that run code of their own, this one among them, by what tells them apart."""

    def __call__(self, model: Transformer, x: Tensor | None) -> tuple[Tensor, Tensor]:
        """Through one stage: x (B, S, D) of the stage before -> (its output, its part of the loss ())."""


def make_pipeline(
    stages: Sequence[Transformer], mesh: Mesh, replicas: Sequence[Replicas] = (), dtype: torch.dtype | None = None, *,
    warms_up: bool = False,
) -> Pipeline:  # fmt: skip
    """The executor of this rank's stages, which give each other tensors of `dtype` (None = the parameters').
    `warms_up`: their code is compiled, or loaded when it is first launched."""
    layout = mesh.layout
    parameter = next(stages[0].parameters())
    slices = layout.tp if layout.sp else 1

    def receive_like(one: Pass) -> Tensor:
        rows, positions = one.size
        size = (rows, positions // slices, stages[0].shape.hidden)
        return torch.empty(size, dtype=dtype or parameter.dtype, device=parameter.device)

    reduction = Reduction(stages, replicas)
    pipeline = Pipeline(
        layout.schedule,
        mesh["pp"],
        [_stage(model) for model in stages],
        receive_like,
        links=mesh.links,
        before=reduction.before,
        after=reduction.after,
        warm_up=WarmUp(forms=lambda one: one.forms(), undone=lambda: undone(stages, mesh)) if warms_up else None,
    )
    reduction.pipeline = pipeline
    return pipeline


@contextmanager
def undone(stages: Sequence[Transformer], mesh: Mesh) -> Iterator[None]:
    """Inside, stages may run forward and backward without reducing gradients; there must be no gradients before.

    Afterwards there are no gradients, parameters are sharded, and random state and the traffic by axis are what they
    were. What a watchdog reads (`last`, `calls_begun`) goes on, since a warm-up communicates. FSDP's flags stay off:
    Reduction turns them off at the first action of a step anyway, and on where it reduces.
    """
    modules = [module for stage in stages for module in data.sharded_modules(stage)]
    data.set_reducing(modules, False)
    before = mesh.traffic.snapshot()
    devices = {parameter.device for stage in stages for parameter in stage.parameters()}
    try:
        with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
            yield
    finally:
        compat.fsdp_drop_gradients(modules)
        for module in modules:
            module.reshard()
        for stage in stages:
            stage.zero_grad()
        mesh.traffic.restore(before)


def _stage(model: Transformer) -> Stage:
    def run(x: Tensor | None, one: Pass) -> tuple[Tensor | None, Tensor | None]:
        out, loss = one(model, x)
        return (None if model.last else out), (loss if model.last or loss.requires_grad else None)

    return run


class Reduction:
    """Data parallelism under a pipeline: a stage's gradients stay whole until its last micro-batch and are reduced
    once: block by block while the stage's last backward pass goes on (BW), or after the last weight gradients, which
    come outside of any pass that FSDP watches (W). ZeRO 2 and 3 cost the memory of ZeRO 1 for gradients, and 3 keeps
    parameters whole between a stage's passes of a step.
    """

    pipeline: Pipeline

    def __init__(self, stages: Sequence[Transformer], replicas: Sequence[Replicas]) -> None:
        self.modules = [data.sharded_modules(stage) for stage in stages]
        self.replicas = replicas
        self.last: dict[int, Action] = {}

    def before(self, action: Action) -> None:
        """At a stage's first action of a step, and at the last that makes gradients."""
        if action.kind == "F" and not action.micro_batch:
            self.last[action.stage] = last_of(self.pipeline.current, ("W", "BW"))[action.stage]
            data.set_reducing(self._modules_of(action.stage), False)
        elif action.kind == "BW" and action == self.last[action.stage]:
            if self.replicas:
                self.replicas[self._place_of(action.stage)].expect(last=True)
            elif modules := self._modules_of(action.stage):
                data.set_reducing(modules, True)

    def after(self, action: Action) -> None:
        """When a stage's gradients are whole."""
        if action != self.last.get(action.stage):
            return
        if self.replicas:
            self.replicas[self._place_of(action.stage)].start()
        elif action.kind == "W" and (modules := self._modules_of(action.stage)):
            data.reduce_now(modules)

    def _modules_of(self, stage: int) -> list["FSDPModule"]:
        return self.modules[self._place_of(stage)]

    def _place_of(self, stage: int) -> int:
        return sorted(self.pipeline.stages).index(stage)

"""Pipeline stages of a model: how they are cut, how the executor calls them, and when their gradients are reduced."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from meshwright import compat
from meshwright.model import Transformer
from meshwright.parallel.axes import data
from meshwright.parallel.axes.data import Replicas
from meshwright.parallel.groups.mesh import Mesh
from meshwright.parallel.pipeline.executor import Pipeline, Stage, WarmUp
from meshwright.spec.layout.layout import Layout, layers_of_stages
from meshwright.spec.layout.schedule import Action, last_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Pass(Protocol):
    """One micro-batch on its way through the stages."""

    @property
    def size(self) -> tuple[int, int]:
        """Number of sequences, and of the positions of each that this rank has."""

    def forms(self) -> "Mapping[Hashable, Pass]":
        """Return passes of this size that run different code, by a key. This pass is among them."""

    def __call__(self, model: Transformer, x: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run one stage on x (B, S, D) of the stage before -> (its output, its part of the loss ())."""


def cut(model: Transformer, layout: Layout, stage: int) -> Transformer:
    """Remove from a whole model (a skeleton) all but one stage. The last stage of a tied head keeps the embedding."""
    ranges = layers_of_stages(model.shape.layers, layout)
    layers = ranges[stage]
    model.first, model.last = stage == 0, stage == len(ranges) - 1
    for name in [name for name in model.layers if int(name) not in layers]:
        del model.layers[name]
    if not model.first:
        # The tied head of the last stage is the embedding matrix.
        if not (model.last and model.shape.tied):
            del model.embed
        if model.shape.positions == "learned":
            del model.positions
    if not model.last:
        del model.norm
        if not model.shape.tied:
            del model.head
    return model


def share_embedding(stages: Sequence[Transformer]) -> None:
    """Share a tied matrix if both ends are on one rank (the V placements). Autograd adds up its gradient."""
    if len(stages) > 1 and stages[0].first and stages[-1].last and stages[-1].shape.tied:
        embed: nn.Embedding = stages[0].embed
        stages[-1].embed.weight = embed.weight


def make_pipeline(
    stages: Sequence[Transformer], mesh: Mesh, replicas: Sequence[Replicas] = (), dtype: torch.dtype | None = None, *,
    warms_up: bool = False,
) -> Pipeline:  # fmt: skip
    """Make the executor of stages that send `dtype` (None = theirs). `warms_up`: code is compiled or loaded late."""
    layout = mesh.layout
    parameter = next(stages[0].parameters())
    slices = layout.tp if layout.sp else 1

    def receive_like(micro_pass: Pass) -> Tensor:
        rows, positions = micro_pass.size
        # With sp a stage passes on this rank's slice of the sequence only.
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
        warm_up=WarmUp(forms=lambda micro_pass: micro_pass.forms(), undone=lambda: undo_passes(stages, mesh))
        if warms_up
        else None,
    )
    reduction.pipeline = pipeline
    return pipeline


@contextmanager
def undo_passes(stages: Sequence[Transformer], mesh: Mesh) -> Iterator[None]:
    """Undo all effects of forward and backward passes that stages run inside. There must be no gradients before.

    Gradients are not reduced inside. Afterwards there are none, parameters are sharded, and random state and the
    traffic by axis are restored. The counters for a watchdog (`last`, `calls_begun`) go on, since a warm-up
    communicates. FSDP's flags stay off: Reduction turns them off at the first action of a step anyway, and on where it
    reduces.
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
    def run(x: Tensor | None, micro_pass: Pass) -> tuple[Tensor | None, Tensor | None]:
        out, loss = micro_pass(model, x)
        # Before the last stage there is a loss only where experts are balanced.
        return (None if model.last else out), (loss if model.last or loss.requires_grad else None)

    return run


class Reduction:
    """Data parallelism under a pipeline: each stage's gradients are reduced once, after its last micro-batch.

    With BW this happens block by block during the stage's last backward pass. With W it happens after the last weight
    gradients, which are made outside of any pass that FSDP watches. For gradients, ZeRO 2 and 3 take the memory of ZeRO
    1. ZeRO 3 keeps parameters whole between a stage's passes of a step.
    """

    pipeline: Pipeline

    def __init__(self, stages: Sequence[Transformer], replicas: Sequence[Replicas]) -> None:
        self.modules = [data.sharded_modules(stage) for stage in stages]
        self.replicas = replicas
        self.last: dict[int, Action] = {}

    def before(self, action: Action) -> None:
        """Prepare for a stage's first action of a step, or for the last that makes gradients."""
        if action.kind == "F" and not action.micro_batch:
            self.last[action.stage] = last_of(self.pipeline.current, ("W", "BW"))[action.stage]
            data.set_reducing(self._modules_of(action.stage), False)
        elif action.kind == "BW" and action == self.last[action.stage]:
            if self.replicas:
                self.replicas[self._index_of(action.stage)].expect(last=True)
            elif modules := self._modules_of(action.stage):
                data.set_reducing(modules, True)

    def after(self, action: Action) -> None:
        """Start the sums once a stage's gradients are complete."""
        if action != self.last.get(action.stage):
            return
        if self.replicas:
            self.replicas[self._index_of(action.stage)].start()
        elif action.kind == "W" and (modules := self._modules_of(action.stage)):
            data.reduce_now(modules)

    def _modules_of(self, stage: int) -> list["FSDPModule"]:
        return self.modules[self._index_of(stage)]

    def _index_of(self, stage: int) -> int:
        return sorted(self.pipeline.stages).index(stage)

"""A model laid over the mesh, and the operations that all ranks do together in a step."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from meshwright.kernels.linear.gradient_sums import GradientSum, gradient_dtype
from meshwright.kernels.optimizer.adamw import euclidean_norm
from meshwright.model import Transformer
from meshwright.model.quantized_weights import is_run
from meshwright.parallel.axes.context import places
from meshwright.parallel.graphs.pass_graphs import Capturable, PassGraphs
from meshwright.parallel.groups.group import Group
from meshwright.parallel.groups.mesh import Mesh
from meshwright.parallel.pipeline.executor import Pipeline
from meshwright.parallel.pipeline.passes import Pass
from meshwright.parallel.zero import data
from meshwright.parallel.zero.replicas import Replicas
from meshwright.spec.memory.held import Common
from meshwright.spec.weights.boxes import Box

P = TypeVar("P", bound=Pass)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Engine:
    """This rank's stages of a model, with everything that ranks must agree on. Made by `parallelize`.

    Sums over ranks follow one rule: a rank's loss is its part of the step's loss, and gradients are summed. On one
    device every method computes the same and communicates nothing.
    """

    stages: tuple[Transformer, ...]
    mesh: Mesh
    boxes: dict[str, Box]
    """The part of each parameter that tensor and expert parallelism leave here."""
    common: tuple[tuple[Common, Group], ...]
    """Parameters that this rank holds in common with others along each axis, with their group."""
    reduce_dtype: torch.dtype | None = None
    """The dtype of gradient sums. None = the gradients' own."""
    gathered_dtype: torch.dtype | None = None
    """The dtype of computation when parameters are shards of their fp32 masters. None = the parameters' own."""
    replicas: tuple[Replicas, ...] = ()
    """The sums of gradients over ranks under ZeRO-0, one for each stage."""
    sums: tuple[GradientSum, ...] = ()
    """Sums of widened gradients that are in no bucket."""
    pipeline: Pipeline | None = None
    """The executor of the stages. None = one stage."""
    graphs: PassGraphs | None = None
    """The captured passes (layout.cuda_graphs=on)."""

    @property
    def model(self) -> Transformer:
        """The only stage of a rank without a pipeline."""
        return self.stages[0]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in the whole model, without bytes of codes. A tied matrix has one name."""
        named = chain.from_iterable(stage.named_parameters() for stage in self.stages)
        return {name: parameter for name, parameter in named if not is_run(name)}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers (a router's correction), by name."""
        parameters = self.parameters
        named = chain.from_iterable(stage.state_dict().items() for stage in self.stages)
        return {name: tensor for name, tensor in named if name not in parameters and not is_run(name)}

    def local_boxes(self) -> dict[str, Box]:
        """Return the box of this rank's part of each parameter, ZeRO's cut included."""
        return {name: data.local_box(parameter, self.boxes[name]) for name, parameter in self.parameters.items()}

    def columns(self, sequence: int) -> tuple[int, ...] | None:
        """Return the positions of a sequence that this rank reads. None = all."""
        cp = self.mesh["cp"]
        if cp.size == 1:
            return None
        mine = places(sequence, cp.size, cp.index, self.mesh.layout.context_split)
        return tuple(start + at * mine.step for start in mine.starts for at in range(mine.length))

    def total(self, number: float, device: torch.device) -> Tensor:
        """Sum a number that each rank knows over all data-parallel ranks: () float64. No rank waits for it."""
        return self.mesh["data"].all_reduce(torch.full((), float(number), dtype=torch.float64, device=device))

    def sum_loss(self, loss: Tensor) -> Tensor:
        """Sum each rank's parts of losses (...) to those of the step, on every rank. tp ranks have the same parts."""
        return self.mesh["losses"].all_reduce(loss.detach().clone())

    def train(self) -> None:
        """Set training mode, as nn.Module.train."""
        for stage in self.stages:
            stage.train()

    def eval(self) -> None:
        """Set evaluation mode, as nn.Module.eval."""
        for stage in self.stages:
            stage.eval()

    def reshard(self) -> None:
        """Shard the parameters that an evaluation has gathered. Only then is a parameter this rank's part."""
        for stage in self.stages:
            for module in data.sharded_modules(stage):
                module.reshard()

    def forward_backward(self, passes: Sequence[P], after: Callable[[P], None] | None = None) -> None:
        """Run every micro-batch forward and backward. Without a pipeline `after` is called after each pass."""
        if self.pipeline is not None:
            self.pipeline.run(passes)
            return
        if self.graphs is not None:
            assert after is None, "a plan refuses recipe.noise_scale_every beside layout.cuda_graphs"
            self.graphs.run(cast(Sequence[Capturable], passes))
        else:
            for index, micro_pass in enumerate(passes):
                last = index == len(passes) - 1
                data.before_micro_batch(self.model, self.mesh.layout.zero, last=last)
                for replicas in self.replicas:
                    replicas.expect(last=last, only=len(passes) == 1)
                _, loss = micro_pass(self.model, None)
                loss.backward()
                if after is not None:
                    after(micro_pass)
        for replicas in self.replicas:
            replicas.start()

    def evaluate(self, passes: Sequence[Pass]) -> Tensor:
        """Run micro-batches forward and return this rank's part of their loss ()."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(passes)
        with torch.no_grad():
            return torch.stack([micro_pass(self.model, None)[1] for micro_pass in passes]).sum()

    def finish_gradients(self) -> None:
        """Wait for the sums over replicas, then sum the gradients that are only a part on this rank.

        These belong to parameters that tp ranks, or both ends of a pipeline, hold in common (`common`).
        """
        for replicas in self.replicas:
            replicas.finish()
        named = self.parameters
        for shared, group in self.common:
            if shared.late:
                self._sum([named[name] for name in shared.names], group)

    def _sum(self, parameters: Iterable[nn.Parameter], group: Group) -> None:
        """Sum gradients over a group, in one all-reduce for each dtype.

        A rank without a gradient adds zero and gets the sum. Sums are rounded once if gradients are narrower.
        """
        held = [parameter for parameter in parameters if parameter.requires_grad]
        for dtype in dict.fromkeys(p.dtype for p in held):
            same_dtype = [p for p in held if p.dtype == dtype]
            for parameter in same_dtype:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
            grads = [data.local(p.grad) for p in same_dtype if p.grad is not None]
            parts = torch.cat([g.reshape(-1) for g in grads])
            flat = group.all_reduce(parts.to(self.reduce_dtype or parts.dtype))
            for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def gradient_norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """Return the norm () fp32 of all gradients of the model. The first rank with an element counts it."""
        elsewhere = {name for shared, group in self.common if group.index for name in shared.names}
        counted = [data.local(gradient) for name, gradient in gradients.items() if name not in elsewhere]
        norm = (
            euclidean_norm(counted, self.model.kernels.prefer)
            if counted
            else torch.zeros((), device=next(self.model.parameters()).device)
        )
        return norm if self.mesh["world"].size == 1 else self.mesh["world"].all_reduce(norm**2).sqrt()

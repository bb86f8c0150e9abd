"""A model laid over the mesh, and what a step asks of all ranks together."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from meshwright.kernels.gradient_sums import GradientSum, gradient_dtype
from meshwright.kernels.wide_states import euclidean_norm
from meshwright.model import Transformer
from meshwright.model.quantized_weights import is_run
from meshwright.parallel import data
from meshwright.parallel.context import places
from meshwright.parallel.group import Group
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pass_graphs import Capturable, PassGraphs
from meshwright.parallel.passes import Pass
from meshwright.parallel.pipeline import Pipeline
from meshwright.parallel.replicas import Replicas
from meshwright.spec.boxes import Box
from meshwright.spec.held import Common

P = TypeVar("P", bound=Pass)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Engine:
    """What `parallelize` gives: this rank's stages of the model, with everything that must be agreed on.

    Sums over ranks follow one rule: a rank's loss is its part of the step's loss, gradients are summed. On one device
    every method computes what it says and communicates nothing.
    """

    stages: tuple[Transformer, ...]
    mesh: Mesh
    boxes: dict[str, Box]
    """What tensor and expert parallelism leave of each parameter here."""
    common: tuple[tuple[Common, Group], ...]
    """What this rank holds in common with others along each axis, with their group."""
    reduce_dtype: torch.dtype | None = None
    """In what gradients are summed; None = in their own."""
    gathered_dtype: torch.dtype | None = None
    """In what weights are computed with, where parameters are shards of their fp32 masters; None = in their own."""
    replicas: tuple[Replicas, ...] = ()
    """Of each stage under ZeRO-0, what sums its gradients over the ranks."""
    sums: tuple[GradientSum, ...] = ()
    """Of gradients that no bucket of those has, where they are widened."""
    pipeline: Pipeline | None = None
    """What runs the stages; None where there is one."""
    graphs: PassGraphs | None = None
    """What captures passes (layout.cuda_graphs=on)."""

    @property
    def model(self) -> Transformer:
        """The only stage of a rank without a pipeline."""
        return self.stages[0]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """By their names in the whole model; bytes of codes are not among them. A tied head's matrix on both ends of a
        pipeline has one name."""
        named = chain.from_iterable(stage.named_parameters() for stage in self.stages)
        return {name: one for name, one in named if not is_run(name)}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Kept buffers (a router's correction), by name."""
        known = self.parameters
        named = chain.from_iterable(stage.state_dict().items() for stage in self.stages)
        return {name: one for name, one in named if name not in known and not is_run(name)}

    def local_boxes(self) -> dict[str, Box]:
        """What this rank holds of each of its parameters, ZeRO's cut included."""
        return {name: data.local_box(parameter, self.boxes[name]) for name, parameter in self.parameters.items()}

    def columns(self, sequence: int) -> tuple[int, ...] | None:
        """The positions of a sequence that this rank reads; None = all."""
        cp = self.mesh["cp"]
        if cp.size == 1:
            return None
        mine = places(sequence, cp.size, cp.index, self.mesh.layout.context_split)
        return tuple(start + at * mine.step for start in mine.starts for at in range(mine.length))

    def total(self, number: float, device: torch.device) -> Tensor:
        """The sum over all data-parallel ranks of a number that each knows () float64; no rank waits for it."""
        return self.mesh["data"].all_reduce(torch.full((), float(number), dtype=torch.float64, device=device))

    def sum_loss(self, loss: Tensor) -> Tensor:
        """Each rank's parts of losses (...) -> those of the step, on every rank. tp ranks have the same parts."""
        return self.mesh["losses"].all_reduce(loss.detach().clone())

    def train(self) -> None:
        """As nn.Module.train."""
        for stage in self.stages:
            stage.train()

    def eval(self) -> None:
        """As nn.Module.eval."""
        for stage in self.stages:
            stage.eval()

    def reshard(self) -> None:
        """Put what an evaluation has gathered back into shards: only then is a parameter what this rank holds."""
        for stage in self.stages:
            for module in data.sharded_modules(stage):
                module.reshard()

    def forward_backward(self, passes: Sequence[P], after: Callable[[P], None] | None = None) -> None:
        """Every micro-batch forward and backward through all stages; `passes` keep what they want to tell. Without a
        pipeline `after` is called after each."""
        if self.pipeline is not None:
            self.pipeline.run(passes)
            return
        if self.graphs is not None:
            assert after is None, "spec.legal refuses recipe.noise_scale_every beside layout.cuda_graphs"
            self.graphs.run(cast(Sequence[Capturable], passes))
        else:
            self._one_by_one(passes, after)
        for replicas in self.replicas:
            replicas.start()

    def _one_by_one(self, passes: Sequence[P], after: Callable[[P], None] | None) -> None:
        for index, one in enumerate(passes):
            last = index == len(passes) - 1
            data.before_micro_batch(self.model, self.mesh.layout.zero, last=last)
            for replicas in self.replicas:
                replicas.expect(last=last, only=len(passes) == 1)
            _, loss = one(self.model, None)
            loss.backward()
            if after is not None:
                after(one)

    def evaluate(self, passes: Sequence[Pass]) -> Tensor:
        """Some micro-batches forward: this rank's part of their loss ()."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(passes)
        with torch.no_grad():
            return torch.stack([one(self.model, None)[1] for one in passes]).sum()

    def finish_gradients(self) -> None:
        """Wait for the sums over replicas; sum what is only a part on this rank: of parameters that tp ranks, or both
        ends of a pipeline, hold in common (spec.held.common)."""
        for replicas in self.replicas:
            replicas.finish()
        named = self.parameters
        for one, group in self.common:
            if one.late:
                self._sum([named[name] for name in one.names], group)

    def _sum(self, parameters: Iterable[nn.Parameter], group: Group) -> None:
        """All gradients in one all-reduce for each dtype; a rank without one adds zero, and all end with the sum,
        which is rounded once where gradients are narrower than it."""
        held = [parameter for parameter in parameters if parameter.requires_grad]
        for dtype in dict.fromkeys(p.dtype for p in held):
            some = [p for p in held if p.dtype == dtype]
            for parameter in some:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
            grads = [data.local(p.grad) for p in some if p.grad is not None]
            parts = torch.cat([g.reshape(-1) for g in grads])
            flat = group.all_reduce(parts.to(self.reduce_dtype or parts.dtype))
            for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def gradient_norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """Euclidean norm () fp32 over the gradients of the whole model, each element counted once: by the first
        of the ranks that hold it."""
        elsewhere = {name for one, group in self.common if group.index for name in one.names}
        counted = [data.local(gradient) for name, gradient in gradients.items() if name not in elsewhere]
        norm = (
            euclidean_norm(counted, self.model.kernels.prefer)
            if counted
            else torch.zeros((), device=next(self.model.parameters()).device)
        )
        return norm if self.mesh["world"].size == 1 else self.mesh["world"].all_reduce(norm**2).sqrt()

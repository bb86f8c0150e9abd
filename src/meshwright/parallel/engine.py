"""A model laid over the mesh, and the operations that all ranks do together in a step.

Ranks with common parameters (spec/memory/held.py) must hold equal copies. A rank whose copy differs (a flipped bit, a
kernel that rounds otherwise) trains on, and a checkpoint saves the copy of whichever rank writes. So a check runs
before each checkpoint: one pass over the parameters that are held more than once, and a collective of 16 bytes a
parameter for each axis.

Copies whose gradient is one sum over their ranks are equal to the bit. Other copies get the same gradient computed by
each tp rank (norms between the blocks). Those are as equal as the ranks' kernels are: GPUs may choose different ones,
so these copies may be DRIFT apart.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from meshwright.kernels.linear.weight_gradients import GradientSum, gradient_dtype
from meshwright.kernels.optimizer.adamw import euclidean_norm
from meshwright.model import Transformer
from meshwright.model.quantized_weights import is_run
from meshwright.parallel.axes import data
from meshwright.parallel.axes.context import places
from meshwright.parallel.axes.data import Replicas, local
from meshwright.parallel.groups.group import Group, gather_objects
from meshwright.parallel.groups.mesh import Mesh
from meshwright.parallel.pipeline.executor import Pipeline
from meshwright.parallel.pipeline.pass_graphs import Capturable, PassGraphs
from meshwright.parallel.pipeline.passes import Pass
from meshwright.spec.errors import RunError
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
        named_parameters = chain.from_iterable(stage.named_parameters() for stage in self.stages)
        return {name: parameter for name, parameter in named_parameters if not is_run(name)}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers (a router's correction), by name."""
        parameters = self.parameters
        named_tensors = chain.from_iterable(stage.state_dict().items() for stage in self.stages)
        return {name: tensor for name, tensor in named_tensors if name not in parameters and not is_run(name)}

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
            assert after is None, "a plan refuses recipe.noise_scale_every together with layout.cuda_graphs"
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
        parameters = self.parameters
        for shared, group in self.common:
            if shared.late:
                self._sum([parameters[name] for name in shared.names], group)

    def _sum(self, parameters: Iterable[nn.Parameter], group: Group) -> None:
        """Sum gradients over a group, in one all-reduce for each dtype.

        A rank without a gradient adds zero and gets the sum. Sums are rounded once if gradients are narrower.
        """
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        for dtype in dict.fromkeys(p.dtype for p in trainable):
            same_dtype = [p for p in trainable if p.dtype == dtype]
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


CHUNK = 2**18
"""Words that are multiplied at a time."""
FACTOR = 6364136223846793005
"""An odd number: multiplied by it, the sum so far loses no chunk."""
DRIFT = 1e-3
"""Allowed difference, relative to the largest element.
Rounding may add up to this over a whole run. A missing update exceeds it in a few steps.
"""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

log = logging.getLogger(__name__)


def checksum(x: Tensor) -> Tensor:
    """Return a checksum () int64 of the bits. Any one changed word changes it: weights are odd, sums wrap."""
    if not x.numel():  # a small parameter may have fewer rows than ranks
        return torch.zeros((), dtype=torch.int64, device=x.device)
    flat = x.detach().contiguous().view(-1)
    # Read eight bytes at a time where size and alignment allow it.
    by_words = flat.nbytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0
    words = flat.view(torch.int64 if by_words else WORDS[flat.element_size()])
    weights = torch.arange(1, 2 * min(CHUNK, len(words)), 2, device=x.device)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in words.split(CHUNK):
        total = total * FACTOR + (part * weights[: len(part)]).sum()
    return total


def check_replicas(engine: Engine, step: int) -> None:
    """Raise RunError on every rank, with parameter and rank, when a copy differs. Every rank makes this call."""
    world = engine.mesh["world"]
    if world.size == 1:
        return
    engine.reshard()  # shards are what a checkpoint saves
    copies = {name: local(parameter.detach()) for name, parameter in engine.parameters.items()}
    sums = {
        name: checksum(copies[name]) for name in dict.fromkeys(n for shared, _ in engine.common for n in shared.names)
    }
    device = next(iter(copies.values())).device
    differing = []
    for shared, group in engine.common:
        mine = torch.stack([sums[name] for name in shared.names])
        # ~ reverses the order of integers without overflow, so one maximum gives the smallest sum, too.
        largest, smallest = group.all_reduce(torch.stack((mine, ~mine)), "max").unbind()
        differing.append(largest != ~smallest)
    # Copies that tp ranks compute by themselves need not be equal to the bit, so these are compared by value.
    suspects = [
        (
            shared.names,
            group,
            differ if shared.partial or not differ.any() else _find_drift(shared.names, differ, copies, group),
        )
        for (shared, group), differ in zip(engine.common, differing, strict=True)
    ]
    # The host waits for one number here. Names are compared only after a failure.
    bad = sum((differ.any().long() for _, _, differ in suspects), torch.zeros((), dtype=torch.int64, device=device))
    if not world.all_reduce(bad, "max").item():
        return
    complaints = [
        _describe_copies(names[int(differ.nonzero()[0])], copies, group)
        for names, group, differ in suspects
        if differ.any()
    ]
    sentences = [sentence for rank in gather_objects(complaints, world.process_group) for sentence in rank]
    error = RunError(
        f"step {step}: {sentences[0]}; this checkpoint was not written. "
        "Take resume=auto to go on from the last one, and look at the memory and the kernels of that rank"
    )
    error.reported_elsewhere = world.index > 0
    raise error


def _find_drift(names: Sequence[str], differ: Tensor, copies: dict[str, Tensor], group: Group) -> Tensor:
    """Return which of the differing copies (N,) are more than DRIFT apart, or not finite."""
    apart = torch.zeros_like(differ)
    for number in differ.nonzero().flatten().tolist():
        x = copies[names[number]].float()
        largest, smallest = group.all_reduce(torch.stack((x, -x)), "max").unbind()
        spread, size = (largest + smallest).max(), torch.maximum(largest, smallest).abs().max()
        apart[number] = ~(spread <= DRIFT * size)  # true for NaN, too
        if not apart[number] and group.index == 0:
            log.warning("copies of %s differ by %.1e of its largest element", names[number], float(spread / size))
    return apart


def _describe_copies(name: str, tensors: dict[str, Tensor], group: Group) -> str:
    """Describe which ranks of a group hold the wrong copy."""
    mine = torch.stack((checksum(tensors[name]), torch.isfinite(tensors[name]).all().long()))
    copies = group.all_gather(mine.unsqueeze(0)).tolist()
    # Numbers that are not finite name the culprit; otherwise the majority is taken to be right.
    broken = [rank for rank, (_, finite) in zip(group.ranks, copies, strict=True) if not finite]
    if broken and len(broken) < group.size:
        return f"{_ranks(broken)} a {name} with numbers that are not finite, and other ranks do not"
    (usual, times), *_ = Counter(total for total, _ in copies).most_common(1)
    others = [rank for rank, (total, _) in zip(group.ranks, copies, strict=True) if total != usual]
    if 2 * times > group.size:
        return f"{_ranks(others)} another {name} than the other {times} ranks that share it"
    return f"{_ranks(group.ranks)} different copies of {name}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} holds" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} hold"

"""torch's own parallel machinery around our own model, put together as torch's examples do.

Each peer has `forward_backward` (gradients of the mean loss in `.grad`, ready for the optimizer) and `named`, so that
tests can compare every gradient, and `step`, which clips and updates.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.parallel_work import CLIP, Work, adamw
from meshwright.kernels import Kernels
from meshwright.kernels.linear.linear import SummedProduct, linear_reference, linears_reference
from meshwright.kernels.loss.cross_entropy import linear_cross_entropy_reference
from meshwright.model import Transformer, build
from meshwright.model.layers import Linear
from meshwright.parallel.pipeline.passes import cut
from meshwright.spec import Layout
from meshwright.spec.layout.layout import own_stages
from meshwright.spec.layout.schedule import SPLIT, stage_rank

SCHEDULES = {
    "afab": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""Ours and the class of torch.distributed.pipelining with the same list of actions."""
VIRTUAL = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}
"""Stages a rank; the others have one."""


class Peer:
    """What every peer does after the backward pass. `sharded`: ranks hold different plain parameters."""

    sharded = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.named = {name.split("model.", 1)[1]: p for name, p in module.named_parameters()}
        self.optimizer = adamw(list(self.named.values()))

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """This rank's part () of the mean loss; gradients lie in `.grad`."""
        raise NotImplementedError

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward, clip, update."""
        loss = self.forward_backward(tokens, targets)
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def clip(self) -> None:
        """At the norm over the whole model."""
        parameters = list(self.named.values())
        if not self.sharded and len({isinstance(p, DTensor) for p in parameters}) == 1:
            nn.utils.clip_grad_norm_(parameters, CLIP)
            return
        squares = [_norm([p for p in parameters if isinstance(p, DTensor) == spread]) ** 2 for spread in (False, True)]
        square = squares[0] + squares[1]
        if self.sharded:
            dist.all_reduce(square)
        for spread in (False, True):
            group = [p for p in parameters if isinstance(p, DTensor) == spread]
            if group:
                nn.utils.clip_grads_with_norm_(group, CLIP, square.sqrt())


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    if not parameters:
        return torch.zeros(())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class WithLoss(nn.Module):
    """A model as torch's wrappers want it: called with a batch, gives the mean loss ()."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Tokens and targets (B, S), all targets valid."""
        return self.model.loss(tokens, targets, scale=torch.tensor(1.0 / targets.numel())).cross_entropy


class _DataParallel(Peer):
    """Each rank takes its run of the sequences; gradients are the mean of the ranks' means."""

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        rank, world = dist.get_rank(), dist.get_world_size()
        loss: Tensor = self.module(tokens.chunk(world)[rank], targets.chunk(world)[rank])
        loss.backward()
        return loss.detach() / world


class TorchDDP(_DataParallel):
    """DistributedDataParallel with its defaults."""

    def __init__(self, work: Work) -> None:
        super().__init__(DistributedDataParallel(WithLoss(build(work.shape, seed=0))))


class TorchFSDP2(_DataParallel):
    """fully_shard of each block, then of the rest, as torch's examples/distributed/FSDP2."""

    def __init__(self, work: Work) -> None:
        module = WithLoss(build(work.shape, seed=0))
        for block in module.model.layers.values():
            fully_shard(block)
        fully_shard(module)
        super().__init__(module)


class TorchTP(Peer):
    """parallelize_module as torch's tensor-parallel tutorial: one gather of gradients for queries, keys and values and
    one for gate and up, logits left split by vocabulary under loss_parallel."""

    def __init__(self, work: Work) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        module = WithLoss(build(work.shape, seed=0))
        _parallelize(module.model, mesh)
        self.model = module.model
        super().__init__(module)

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden, _ = self.model.hidden(tokens)
        logits = self.model.head(hidden)
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        total = loss.detach()
        return (total.full_tensor() if isinstance(total, DTensor) else total) / dist.get_world_size()


def _with_torch_linears(model: Transformer) -> None:
    """Put torch's own Linear, which its tensor parallelism hangs hooks on, in the place of each of ours in a block."""
    for module in list(model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Linear):
                plain = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
                plain.weight = child.weight
                setattr(module, name, plain)


def _parallelize(model: Transformer, mesh: DeviceMesh) -> None:
    _with_torch_linears(model)
    once = PrepareModuleInput(
        input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None)
    )  # one conversion of the input, so that its gradient is summed over the ranks once
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "layers.*.attention": once,
            "layers.*.attention.q": ColwiseParallel(),
            "layers.*.attention.k": ColwiseParallel(),
            "layers.*.attention.v": ColwiseParallel(),
            "layers.*.attention.o": RowwiseParallel(),
            "layers.*.mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
            "layers.*.mlp.gate": ColwiseParallel(),
            "layers.*.mlp.up": ColwiseParallel(),
            "layers.*.mlp.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )


class _StageModule(nn.Module):
    """A stage as PipelineStage wants it: tokens (B, S) or hidden states (B, S, D) -> hidden states."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """The last stage ends in the norm; head and loss are in the loss function."""
        model = self.model
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        attention_metadata = model.attention_metadata(positions, x.shape[1], None)
        x, _ = model.run_layers(model.enter(x, positions) if model.first else x, attention_metadata)
        out: Tensor = model.norm(x) if model.last else x
        return out


class TorchPipeline(Peer):
    """A schedule of torch.distributed.pipelining over the same stages as ours.

    Schedules that split the backward pass ask autograd for some gradients only, which fused linears cannot give: their
    stages have torch's plain ones.
    """

    sharded = True

    def __init__(self, work: Work, schedule: str) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        layout = Layout(
            pp=world,
            vp=VIRTUAL.get(schedule, 1),
            schedule=schedule,  # type: ignore[arg-type]  # the keys of SCHEDULES are its words
            compile="off",
        )
        numbers = own_stages(layout, rank)
        models = [cut(build(work.shape, seed=0), layout, number) for number in numbers]
        if schedule in SPLIT:
            for module in (module for model in models for module in model.modules()):
                kernels = getattr(module, "kernels", None)
                if isinstance(kernels, Kernels):
                    module.kernels = _plain_linears(kernels)  # type: ignore[assignment]  # torch expects tensors there
        total = len(stage_rank(schedule, world, len(numbers)))
        stages = [
            pipelining.PipelineStage(_StageModule(model), number, total, torch.device("cpu"))
            for number, model in zip(numbers, models, strict=True)
        ]
        scale = torch.tensor(1.0 / work.tokens)
        last = models[-1]

        def loss(out: Tensor, targets: Tensor) -> Tensor:
            summed: Tensor = last.kernels.linear_cross_entropy(
                out.flatten(0, 1), last.head_weight, targets.flatten(), scale
            )
            return summed

        kind = getattr(pipelining, SCHEDULES[schedule], None) or getattr(pipelining.schedules, SCHEDULES[schedule])
        single_stage = schedule in ("afab", "1f1b")
        self.schedule = kind(stages[0] if single_stage else stages, work.micro_batches, loss_fn=loss, scale_grads=False)
        self.first, self.last = any(m.first for m in models), any(m.last for m in models)
        super().__init__(nn.ModuleDict({f"s{n}": stage.submod for n, stage in zip(numbers, stages, strict=True)}))

    def forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        inputs: dict[str, Any] = {"target": targets, "losses": losses} if self.last else {}
        self.schedule.step(*([tokens] if self.first else []), return_outputs=False, **inputs)
        return torch.stack(losses).sum().detach() if losses else torch.zeros(())


def _plain_linears(kernels: Kernels) -> Kernels:
    def swiglu_linear(
        gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None, summed: SummedProduct | None = None
    ) -> Tensor:
        assert summed is None, "torch's own tensor parallelism is around these stages"
        return F.linear(kernels.swiglu(gate, up), weight, bias)

    return replace(
        kernels,
        linear=linear_reference,
        linears=linears_reference,
        swiglu_linear=swiglu_linear,
        linear_cross_entropy=linear_cross_entropy_reference,
    )

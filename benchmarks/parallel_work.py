"""What the contestants of parallel_speed and parallel_memory do: one training step of one small model, ours first.

A contestant is given the whole batch of a step and takes its own part of it. All start from the same weights and do the
same arithmetic (our model), clip at the same norm and update with the same fused AdamW: only what makes many processes
of it differs.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout, ModelShape, Recipe
from meshwright.spec.layout.schedule import Action
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.step.batches import Batch, Share, select, split
from meshwright.training.step.step import train_step

RATE, CLIP = 1e-4, 1.0
SHAPE = ModelShape(
    family="llama",
    vocab=2048,
    layers=8,
    hidden=256,
    heads=8,
    kv_heads=4,
    head_dim=32,
    ffn=704,
    max_positions=4096,
    tied=False,
)
"""7 million parameters: heads and layers divide by four, and no head is tied, since torch's pipelines cannot tie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One step: `rows` sequences of `sequence` tokens in all, `micro_rows` of them a forward pass (0 = all at once)."""

    shape: ModelShape = SHAPE
    rows: int = 8
    sequence: int = 128
    micro_rows: int = 0

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.sequence

    @property
    def micro_batches(self) -> int:
        """Forward passes of a step, data parallelism apart."""
        return self.rows // self.micro_rows if self.micro_rows else 1

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets (rows, sequence) of a step, the same on every rank."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, self.shape.vocab, (self.rows, self.sequence + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Contestant(Protocol):
    """One way to take a step on all ranks together."""

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward, clip, update; this rank's part () of the mean loss."""


@dataclass(slots=True)
class Played:
    """What a rank's pipeline did in one step: its actions with their processor seconds, and the wall time of all."""

    actions: list[tuple[str, int, int, float]] = field(default_factory=list)
    wall_s: float = 0.0


class Ours:
    """Meshwright's own training step under a layout."""

    def __init__(self, work: Work, process_groups: ProcessGroups | None = None, **layout: Any) -> None:
        self.layout = Layout(micro_batch=work.micro_rows, **{"compile": "off", **layout})
        self.mesh = make_mesh(self.layout, rank=0 if self.layout.world == 1 else None, process_groups=process_groups)
        self.engine = build_engine(work.shape, self.layout, mesh=self.mesh)
        self.engine.train()
        self.optimizer = Optimizer(self.engine.parameters.items(), Recipe())
        self.share = Share(
            index=self.mesh.reader,
            parts=self.layout.dp,
            columns=self.engine.columns(work.sequence),
        )
        self.size = self.layout.micro_batch_of(work.rows)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of the step is known to every rank: its part of it is one rank's share."""
        batches = split(select(Batch(tokens=tokens, targets=targets), self.share), self.size)
        result = train_step(self.engine, self.optimizer, batches, rate=RATE, clip=CLIP, balance_loss=0.0)
        return result.loss / self.layout.world


class OursPlayed(Ours):
    """The same with a pipeline, whose actions are timed: two readings of the thread's clock around each."""

    def __init__(self, work: Work, process_groups: ProcessGroups | None = None, **layout: Any) -> None:
        super().__init__(work, process_groups, **layout)
        self.played = Played()
        pipeline = self.engine.pipeline
        assert pipeline is not None
        before, after, run = pipeline.before, pipeline.after, pipeline.run

        def timed_before(action: Action) -> None:
            if before is not None:
                before(action)
            self.begun = time.thread_time()

        def timed_after(action: Action) -> None:
            took = time.thread_time() - self.begun
            self.played.actions.append((action.kind, action.stage, action.micro_batch, took))
            if after is not None:
                after(action)

        def timed_run(micro_batches: Sequence[Any]) -> Tensor:
            self.played = Played()
            start = time.perf_counter()
            outcome = run(micro_batches)
            self.played.wall_s = time.perf_counter() - start
            return outcome

        pipeline.before, pipeline.after = timed_before, timed_after
        pipeline.run = timed_run  # type: ignore[method-assign]  # of this pipeline alone


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """The peers' optimizer: ours' settings. The fused update takes plain tensors or DTensors, not both at once."""
    recipe = Recipe()
    groups = [
        {
            "params": [p for p in parameters if isinstance(p, DTensor) == spread and (p.dim() > 1) == decayed],
            "weight_decay": recipe.weight_decay if decayed else 0.0,
        }
        for spread in (False, True)
        for decayed in (False, True)
    ]
    betas = recipe.beta1, recipe.beta2
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=RATE, betas=betas, eps=recipe.epsilon, fused=True)

"""One optimizer step. The same function runs on fake tensors: no `.item()`, no data-dependent shape."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from meshwright.kernels.wide_states import euclidean_norm
from meshwright.model import Transformer
from meshwright.model.predictions import Predictions
from meshwright.parallel import Engine
from meshwright.spec.errors import IllegalLayout
from meshwright.training.batches import PADDING, Batch, forms
from meshwright.training.optimizer import Optimizer
from meshwright.training.precision import LossScaler
from meshwright.training.skipping import StepSkipper
from meshwright.training.standing_batch import form_of, standing, take


class Objective(Protocol):
    """What a micro-batch computes: a sum over it, and what the sum over all micro-batches and ranks is divided by."""

    @property
    def by_position(self) -> bool:
        """Ranks may have a part of every sequence (cp): the sum is one over positions, each by itself, or it takes its
        sums over a sequence from `predictions.whole_sums`."""

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of further sums over a batch, which are reported over the same divisor."""

    def count(self, batch: Batch) -> float:
        """What this batch adds to the divisor; known on the host. Each cp rank counts what it has a part of."""

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """The sum () fp32 over a batch, times scale () (None = 1); with figures, (1 + F,) of it and of theirs, these
        without scale and gradient. Only the last pipeline stage asks; every rank of it makes the same calls of
        `predictions`."""


@runtime_checkable
class BeginsStep(Protocol):
    """An objective that wants to see the micro-batches of a step before their passes."""

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """All ranks together, each with its own."""


class CrossEntropy:
    """-log p of every valid target; their mean is what pretraining minimizes."""

    by_position = True
    figures = ()

    def count(self, batch: Batch) -> float:
        """Valid targets."""
        return batch.valid

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """In nats."""
        return predictions.cross_entropy(batch.targets, scale)


CROSS_ENTROPY = CrossEntropy()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step found, as tensors () on the device."""

    loss: Tensor
    """Of the whole step: nats per valid token where the objective is cross-entropy."""
    part: Tensor
    """What this rank's stages added to it, before the loss scale was taken out."""
    grad_norm: Tensor
    """Before clipping, loss scale taken out."""
    balance: Tensor | None
    """Mean balance loss a sequence."""
    skipped: Tensor
    """1.0 where nothing was changed."""
    reason: Tensor
    """Why, as a number of training.skipping.REASONS, fp32."""
    figures: Tensor
    """What the objective reports beside the loss, (F,)."""
    micro_squared: tuple[Tensor, ...] = ()
    """Squared norm of each micro-batch's mean gradient, when noise is measured."""
    micro_tokens: tuple[float, ...] = ()


def train_step(
    engine: Engine,
    optimizer: Optimizer,
    micro_batches: Sequence[Batch],
    *,
    rate: float,
    clip: float,
    balance_loss: float,
    scaler: LossScaler | None = None,
    skipper: StepSkipper | None = None,
    spike_factor: float = 0.0,
    measure_noise: bool = False,
    before_update: Callable[[], None] | None = None,
    objective: Objective = CROSS_ENTROPY,
) -> StepResult:
    """Forward and backward over this rank's micro-batches, clip, update; `before_update` is called between.

    Loss = the objective's sum over all micro-batches and ranks / its count, so that no split changes it; the balance
    loss is the mean over sequences, times `balance_loss`. `skipper` is what skips a step, by the norms of
    earlier ones where `spike_factor` is given. IllegalLayout: an objective of whole sequences under cp.
    """
    cp = engine.mesh.layout.cp
    if cp > 1 and not objective.by_position:
        raise IllegalLayout(f"cp={cp} splits the sequences, which this objective needs whole: try cp=1")
    device = micro_batches[0].tokens.device
    if isinstance(objective, BeginsStep):
        objective.begin_step(micro_batches)
    weights = Weights.of(engine, micro_batches, balance_loss, scaler, objective)
    token = weights.token
    assert token is not None, "Weights.of gives all"
    gradients = _Gradients(optimizer, measure_noise)
    passes = [MicroPass(batch, weights, objective) for batch in micro_batches]
    engine.forward_backward(
        passes,
        after=(lambda one: gradients.collect(objective.count(one.batch) * token)) if measure_noise else None,
    )
    loss = sum((one.cross_entropy for one in passes), torch.zeros((), device=device))
    balance = sum((one.balance for one in passes), torch.zeros((), device=device))
    figures = sum((one.figures for one in passes), torch.zeros(len(objective.figures), device=device)) * token
    part, sums = loss, engine.sum_loss(torch.cat((torch.stack((loss, balance)), figures)))
    loss, balance = sums[0], sums[1]
    engine.finish_gradients()
    norm = engine.gradient_norm(gradients.finish()) / weights.scale
    loss = loss / weights.scale
    may_overflow = scaler.can_halve() if scaler else None
    reason = (skipper or StepSkipper(device)).judge(loss, norm, spike_factor=spike_factor, may_overflow=may_overflow)
    skipped = (reason > 0).float()
    shrink = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones((), device=device)
    if before_update is not None:
        before_update()
    optimizer.step(rate, divide_by=weights.scale / shrink, skip=skipped)
    optimizer.zero_grad()
    if scaler:
        scaler.update(~torch.isfinite(norm + loss))
    return StepResult(
        loss=loss,
        part=part,
        grad_norm=norm,
        balance=balance if engine.model.shape.moe else None,
        skipped=skipped,
        reason=reason,
        figures=sums[2:] / weights.scale,
        micro_squared=tuple(gradients.squared),
        micro_tokens=tuple(objective.count(batch) for batch in micro_batches) if measure_noise else (),
    )


@dataclass(frozen=True, slots=True)
class Weights:
    """What a token's, a sequence's and the balance loss count in the step, as tensors () fp32; `scale` is the loss
    scale that the step began with."""

    token: Tensor | None
    sequence: Tensor | None = None
    balance: Tensor | float = 0.0
    scale: Tensor | float = 1.0

    @staticmethod
    def of(
        engine: Engine,
        micro_batches: Sequence[Batch],
        balance_loss: float,
        scaler: LossScaler | None,
        objective: Objective = CROSS_ENTROPY,
    ) -> "Weights":
        """Counts of all ranks together. Every tp rank goes through all of a router's loss, and gradients are summed:
        each takes its share of that."""
        device = micro_batches[0].tokens.device
        tokens = engine.total(sum((objective.count(batch) for batch in micro_batches), 0.0), device)
        tokens = tokens.where(tokens > 0, 1.0)
        sequences = sum(len(batch.tokens) for batch in micro_batches) * engine.mesh["data"].size  # equally many on each
        scale = scaler.scale.clone() if scaler else torch.ones((), device=device)  # the step may change it in place
        return Weights(
            (1.0 / tokens).float() * scale,
            torch.full((), 1.0 / sequences, device=device),
            balance_loss / engine.mesh["tp"].size * scale,
            scale,
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """Those of a training step."""
        return tuple(one for one in self._each() if isinstance(one, Tensor))

    def copied(self) -> "Weights":
        """The same in memory of their own."""
        return Weights(*(one.clone() if isinstance(one, Tensor) else one for one in self._each()))

    def _each(self) -> tuple[Any, ...]:
        return self.token, self.sequence, self.balance, self.scale


EVALUATION = Weights(None)
"""Plain sums."""


class MicroPass:
    """A micro-batch on its way through the stages (parallel.passes.Pass); keeps what this rank's stages found."""

    def __init__(self, batch: Batch, weights: Weights, objective: Objective = CROSS_ENTROPY) -> None:
        self.batch, self.weights, self.objective = batch, weights, objective
        zero = torch.zeros((), device=batch.tokens.device)
        self.cross_entropy, self.balance = zero, zero
        self.figures = torch.zeros(len(objective.figures), device=batch.tokens.device)

    @property
    def size(self) -> tuple[int, int]:
        """Sequences, and positions of each that this rank has."""
        rows, positions = self.batch.tokens.shape
        return rows, positions

    def forms(self) -> dict[Hashable, "MicroPass"]:
        """With documents and without, where both may come (parallel.passes.Pass)."""
        return {
            (*self.size, packed): MicroPass(one, self.weights, self.objective)
            for packed, one in forms(self.batch).items()
        }

    def form(self) -> Hashable:
        """As Capturable. An objective may read what it likes of a batch; cross-entropy reads tensors."""
        return form_of(self.batch) if isinstance(self.objective, CrossEntropy) else None

    def standing(self) -> "MicroPass":
        """As Capturable (parallel.pass_graphs)."""
        return MicroPass(standing(self.batch), self.weights.copied(), self.objective)

    def take(self, one: "MicroPass") -> None:
        """As Capturable."""
        take(self.batch, one.batch)
        for own, given in zip(self.weights.tensors(), one.weights.tensors(), strict=True):
            own.copy_(given)

    def give(self, one: "MicroPass") -> None:
        """As Capturable."""
        one.cross_entropy, one.balance = self.cross_entropy.clone(), self.balance.clone()
        one.figures = self.figures.clone()

    def __call__(self, model: Transformer, x: Tensor | None) -> tuple[Tensor, Tensor]:
        """Through one stage: (its output, its part of the step's loss times the loss scale)."""
        batch, weights = self.batch, self.weights
        out, found = model.stage(
            x,
            batch.tokens,
            batch.targets,
            scale=weights.token,
            positions=batch.positions,
            documents=batch.documents,
            spans=batch.spans,
            padding=batch.more.get(PADDING),
            objective=self._sum,
        )
        total = found.cross_entropy
        self.cross_entropy = self.cross_entropy + total.detach()
        if found.balance is not None and weights.sequence is not None:
            mean = found.balance.sum() * weights.sequence
            self.balance = self.balance + mean.detach()
            total = total + mean * weights.balance
        return out, total

    def _sum(self, predictions: Predictions, targets: Tensor, scale: Tensor | None) -> Tensor:
        """The objective's sum (); its figures are kept."""
        found = self.objective.loss(predictions, self.batch, scale)
        if not self.objective.figures:
            return found
        self.figures = self.figures + found[1:].detach()
        return found[0].clone()  # FSDP warns of what is a view


class _Gradients:
    """Plain accumulation in `.grad`; or, to measure noise, each micro-batch alone and then summed (one more copy)."""

    def __init__(self, optimizer: Optimizer, apart: bool) -> None:
        self.parameters = optimizer.parameters
        self.apart = apart
        self.sums: dict[str, Tensor] = {}
        self.squared: list[Tensor] = []

    def collect(self, share: Tensor) -> None:
        """After a micro-batch whose loss was multiplied by share / its tokens."""
        if not self.apart:
            return
        grads = self._present()
        self.squared.append((euclidean_norm(list(grads.values())) / share) ** 2)
        for name, grad in grads.items():
            self.sums[name] = self.sums[name].add_(grad) if name in self.sums else grad
            self.parameters[name].grad = None

    def finish(self) -> dict[str, Tensor]:
        """The gradients of the step by name, back in `.grad`."""
        for name, total in self.sums.items():
            self.parameters[name].grad = total
        return self._present()

    def _present(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

"""One optimizer step. It also runs on fake tensors: no `.item()`, no data-dependent shape."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from meshwright.kernels.optimizer.adamw import euclidean_norm
from meshwright.model import Transformer
from meshwright.model.transformer import Predictions
from meshwright.parallel import Engine
from meshwright.spec.errors import IllegalLayout
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.optimizer.precision import LossScaler, StepSkipper
from meshwright.training.step.batches import PADDING, TOKEN_KEYS, Batch, copy_into, forms, graph_form, static_copy


class PassLoss(Protocol):
    """A sum over a micro-batch, which its pass takes. Some only record predictions, and return zero."""

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of further sums over a batch."""

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """Return the sum () fp32 over a batch, times scale () (None = 1).

        With figures it is (1 + F,): the sum, then the figures without scale and gradient. Only the last pipeline stage
        calls this. All its ranks make the same calls of `predictions`.
        """


class Objective(PassLoss, Protocol):
    """A sum over a micro-batch, and the divisor of it and of its figures over all micro-batches and ranks."""

    @property
    def by_position(self) -> bool:
        """True when ranks may have a part of every sequence (cp).

        The sum is then one over independent positions, or takes its sums over a sequence from `predictions.whole_sums`.
        """

    def count(self, batch: Batch) -> float:
        """Return what this batch adds to the divisor, known on the host. Each cp rank counts its own part."""


@runtime_checkable
class BeginsStep(Protocol):
    """An objective that sees the micro-batches of a step before their passes."""

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Prepare the step. All ranks call this together, each with its own batches."""


class CrossEntropy:
    """-log p of every valid target. Pretraining minimizes its mean."""

    by_position = True
    figures = ()

    def count(self, batch: Batch) -> float:
        """Return the number of valid targets."""
        return batch.valid

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        """Return the sum in nats."""
        return predictions.cross_entropy(batch.targets, scale)


CROSS_ENTROPY = CrossEntropy()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Outcome of a step, as tensors () on the device."""

    loss: Tensor
    """Loss of the whole step: nats per valid token for cross-entropy."""
    part: Tensor
    """This rank's part of the loss, still times the loss scale."""
    grad_norm: Tensor
    """Gradient norm before clipping, without the loss scale."""
    balance: Tensor | None
    """Mean balance loss per sequence. None = no experts."""
    skipped: Tensor
    """1.0 when nothing was changed."""
    reason: Tensor
    """Why, as a number of training.skipping.REASONS, fp32."""
    figures: Tensor
    """Figures of the objective, (F,)."""
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
    """Run forward and backward over this rank's micro-batches, clip, and update.

    Loss = the objective's sum over all micro-batches and ranks / its count, so no split changes it. The balance loss is
    the mean over sequences, times `balance_loss`.

    Args:
        skipper: Decides whether the step is skipped, by the norms of earlier ones when `spike_factor` is set.
        before_update: Called between the backward passes and the update.

    Raises:
        IllegalLayout: The objective needs whole sequences, and cp splits them.
    """
    cp = engine.mesh.layout.cp
    if cp > 1 and not objective.by_position:
        raise IllegalLayout(f"cp={cp} splits the sequences, which this objective needs whole: try cp=1")
    device = micro_batches[0].tokens.device
    if isinstance(objective, BeginsStep):
        # Outside of the passes: it may hold collectives, which a pipeline's stages would run apart.
        objective.begin_step(micro_batches)
    weights = Weights.for_step(engine, micro_batches, balance_loss, scaler, objective)
    token = weights.token
    assert token is not None, "Weights.for_step sets it"
    gradients = _Gradients(optimizer, measure_noise)
    passes = [MicroPass(batch, weights, objective) for batch in micro_batches]
    engine.forward_backward(
        passes,
        after=(lambda done: gradients.collect(objective.count(done.batch) * token)) if measure_noise else None,
    )
    loss = sum((done.cross_entropy for done in passes), torch.zeros((), device=device))
    balance = sum((done.balance for done in passes), torch.zeros((), device=device))
    figures = sum((done.figures for done in passes), torch.zeros(len(objective.figures), device=device)) * token
    # One collective for loss, balance and figures. This rank's own part names the culprit of a loss that is not finite.
    part, sums = loss, engine.sum_loss(torch.cat((torch.stack((loss, balance)), figures)))
    loss, balance = sums[0], sums[1]
    # Sums over ranks that backward passes have begun must be complete before the norm.
    engine.finish_gradients()
    norm = engine.gradient_norm(gradients.finish()) / weights.scale
    loss = loss / weights.scale
    # Decided on the device: the host neither waits nor branches, and all ranks agree.
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
    """Scalar fp32 weights of one step: per token, per sequence, and of the balance loss.

    `scale` is the loss scale at the start of the step.
    """

    token: Tensor | None
    sequence: Tensor | None = None
    balance: Tensor | float = 0.0
    scale: Tensor | float = 1.0

    @staticmethod
    def for_step(
        engine: Engine,
        micro_batches: Sequence[Batch],
        balance_loss: float,
        scaler: LossScaler | None,
        objective: Objective = CROSS_ENTROPY,
    ) -> "Weights":
        """Compute the weights from the counts of all ranks together.

        Every tp rank computes all of a router's loss, and gradients are summed, so each takes its share of that loss.
        """
        device = micro_batches[0].tokens.device
        tokens = engine.total(sum((objective.count(batch) for batch in micro_batches), 0.0), device)
        # A step whose rows have no target has the loss 0, not 0 / 0.
        tokens = tokens.where(tokens > 0, 1.0)
        sequences = sum(len(batch.tokens) for batch in micro_batches) * engine.mesh["data"].size  # equal on all ranks
        scale = scaler.scale.clone() if scaler else torch.ones((), device=device)  # the step may change it in place
        return Weights(
            (1.0 / tokens).float() * scale,
            torch.full((), 1.0 / sequences, device=device),
            balance_loss / engine.mesh["tp"].size * scale,
            scale,
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the weights that are tensors: all of a training step, none of an evaluation."""
        return tuple(weight for weight in self._fields() if isinstance(weight, Tensor))

    def copied(self) -> "Weights":
        """Return a copy with its own memory."""
        return Weights(*(weight.clone() if isinstance(weight, Tensor) else weight for weight in self._fields()))

    def _fields(self) -> tuple[Any, ...]:
        return self.token, self.sequence, self.balance, self.scale


EVALUATION = Weights(None)
"""Weights of plain sums."""


class MicroPass:
    """A micro-batch on its way through the stages (parallel.pipeline.passes.Pass), with the sums of this rank."""

    def __init__(self, batch: Batch, weights: Weights, objective: PassLoss = CROSS_ENTROPY) -> None:
        self.batch, self.weights, self.objective = batch, weights, objective
        zero = torch.zeros((), device=batch.tokens.device)
        self.cross_entropy, self.balance = zero, zero
        self.figures = torch.zeros(len(objective.figures), device=batch.tokens.device)

    @property
    def size(self) -> tuple[int, int]:
        """Sequences, and positions of each on this rank."""
        rows, positions = self.batch.tokens.shape
        return rows, positions

    def forms(self) -> dict[Hashable, "MicroPass"]:
        """Return the pass with and without documents, if both may come (parallel.pipeline.passes.Pass)."""
        return {
            (*self.size, packed): MicroPass(batch, self.weights, self.objective)
            for packed, batch in forms(self.batch).items()
        }

    def form(self) -> Hashable:
        """Return the key of the graph. None = no graph: only cross-entropy reads nothing but the batch's tensors."""
        return graph_form(self.batch) if isinstance(self.objective, CrossEntropy) else None

    def static_copy(self) -> "MicroPass":
        """Return a copy whose memory stays where it is, for a graph (Capturable in parallel.pipeline.pass_graphs)."""
        return MicroPass(static_copy(self.batch), self.weights.copied(), self.objective)

    def take(self, source: "MicroPass") -> None:
        """Copy the tensors of another pass into this one's memory."""
        copy_into(self.batch, source.batch)
        for target, weight in zip(self.weights.tensors(), source.weights.tensors(), strict=True):
            target.copy_(weight)

    def give(self, target: "MicroPass") -> None:
        """Copy the sums of this pass to the pass that the graph ran for."""
        target.cross_entropy, target.balance = self.cross_entropy.clone(), self.balance.clone()
        target.figures = self.figures.clone()

    def __call__(self, model: Transformer, x: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run one stage and return its output and its part of the step's loss times the loss scale."""
        batch, weights = self.batch, self.weights
        out, losses = model.stage(
            x,
            batch.tokens,
            batch.targets,
            scale=weights.token,
            positions=batch.positions,
            documents=batch.documents,
            spans=batch.spans,
            padding=batch.more.get(PADDING),
            keys=batch.more.get(TOKEN_KEYS),
            objective=self._objective_sum,
        )
        total = losses.cross_entropy
        self.cross_entropy = self.cross_entropy + total.detach()
        if losses.balance is not None and weights.sequence is not None:
            mean = losses.balance.sum() * weights.sequence
            self.balance = self.balance + mean.detach()
            total = total + mean * weights.balance
        return out, total

    def _objective_sum(self, predictions: Predictions, targets: Tensor, scale: Tensor | None) -> Tensor:
        """Return the objective's sum () and add up its figures."""
        sums = self.objective.loss(predictions, self.batch, scale)
        if not self.objective.figures:
            return sums
        self.figures = self.figures + sums[1:].detach()
        return sums[0].clone()  # FSDP warns about views


class _Gradients:
    """Accumulation in `.grad`. To measure noise, each micro-batch alone, then summed, at the cost of one more copy."""

    def __init__(self, optimizer: Optimizer, apart: bool) -> None:
        self.parameters = optimizer.parameters
        self.apart = apart
        self.sums: dict[str, Tensor] = {}
        self.squared: list[Tensor] = []

    def collect(self, share: Tensor) -> None:
        """Take the gradient of a micro-batch whose loss was multiplied by share / its tokens."""
        if not self.apart:
            return
        grads = self._present()
        self.squared.append((euclidean_norm(list(grads.values())) / share) ** 2)
        for name, grad in grads.items():
            # The first micro-batch's gradient becomes the buffer of the sum.
            self.sums[name] = self.sums[name].add_(grad) if name in self.sums else grad
            self.parameters[name].grad = None

    def finish(self) -> dict[str, Tensor]:
        """Return the gradients of the step by name, back in `.grad`."""
        for name, total in self.sums.items():
            self.parameters[name].grad = total
        return self._present()

    def _present(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

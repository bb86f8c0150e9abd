"""One optimizer step. The same function runs on fake tensors: no `.item()`, no data-dependent shape."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.model import Transformer
from meshwright.parallel import Engine
from meshwright.parallel.engine import euclidean_norm
from meshwright.train.batches import Batch, valid_tokens
from meshwright.train.optimizer import AdamW
from meshwright.train.precision import LossScaler


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step found, as tensors () on the device."""

    loss: Tensor
    """Nats per valid token of the whole step."""
    grad_norm: Tensor
    """Before clipping, loss scale taken out."""
    balance: Tensor | None
    """Mean balance loss a sequence."""
    skipped: Tensor
    """1.0 where the gradient was not finite and nothing was changed."""
    micro_squared: tuple[Tensor, ...] = ()
    """Squared norm of each micro-batch's mean gradient, when noise is measured."""
    micro_tokens: tuple[int, ...] = ()


def train_step(
    engine: Engine,
    optimizer: AdamW,
    micro_batches: Sequence[Batch],
    *,
    rate: float,
    clip: float,
    balance_loss: float,
    scaler: LossScaler | None = None,
    measure_noise: bool = False,
) -> StepResult:
    """Forward and backward over this rank's micro-batches, clip, update.

    Loss = sum over valid targets of all micro-batches and ranks / their number, so that no split changes it; the
    balance loss is the mean over sequences, times `balance_loss`.
    """
    device = micro_batches[0].tokens.device
    weights = _Weights(engine, micro_batches, balance_loss, scaler)
    gradients = _Gradients(optimizer, measure_noise)
    loss = torch.zeros((), device=device)
    balance: Tensor | None = None
    for index, batch in enumerate(micro_batches):
        engine.before_micro_batch(last=index == len(micro_batches) - 1)
        found, even = forward_backward(engine.model, batch, weights)
        loss += found
        if even is not None:
            balance = even if balance is None else balance + even
        gradients.collect(batch.valid * weights.token)
    loss = engine.sum_loss(loss) / weights.scale
    engine.finish_gradients()
    norm = engine.gradient_norm(gradients.finish()) / weights.scale
    skipped = (~torch.isfinite(norm)).float()
    shrink = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones((), device=device)
    optimizer.step(rate, divide_by=weights.scale / shrink, skip=skipped)
    optimizer.zero_grad()
    if scaler:
        scaler.update(skipped.bool())
    return StepResult(
        loss=loss,
        grad_norm=norm,
        balance=None if balance is None else engine.sum_loss(balance),
        skipped=skipped,
        micro_squared=tuple(gradients.squared),
        micro_tokens=tuple(batch.valid for batch in micro_batches) if measure_noise else (),
    )


class _Weights:
    """What a token's and a sequence's loss count in the step, as tensors () fp32."""

    def __init__(
        self, engine: Engine, micro_batches: Sequence[Batch], balance_loss: float, scaler: LossScaler | None
    ) -> None:
        device = micro_batches[0].tokens.device
        tokens = engine.total(valid_tokens(micro_batches), device).clamp(min=1)
        sequences = engine.total(sum(len(batch.tokens) for batch in micro_batches), device)
        self.scale = scaler.scale if scaler else torch.ones((), device=device)
        self.token = (1.0 / tokens).float() * self.scale
        self.sequence = (1.0 / sequences).float()
        self.balance = balance_loss / engine.mesh["tp"].size * self.scale
        """Every tp rank goes through all of a router's loss, and their gradients are summed."""


def forward_backward(model: Transformer, batch: Batch, weights: _Weights) -> tuple[Tensor, Tensor | None]:
    """One micro-batch through a whole model: its part of the step's loss (times the loss scale) and of the balance."""
    found = model.loss(
        batch.tokens, batch.targets, scale=weights.token, positions=batch.positions, documents=batch.documents
    )
    total, mean = found.cross_entropy, None
    if found.balance is not None:
        mean = found.balance.sum() * weights.sequence
        total = total + mean * weights.balance
    total.backward()
    return found.cross_entropy.detach(), None if mean is None else mean.detach()


class _Gradients:
    """Plain accumulation in `.grad`; or, to measure noise, each micro-batch alone and then summed (one more copy)."""

    def __init__(self, optimizer: AdamW, apart: bool) -> None:
        self.parameters = optimizer.parameters
        self.apart = apart
        self.sums: dict[str, Tensor] = {}
        self.squared: list[Tensor] = []

    def collect(self, share: Tensor) -> None:
        """After a micro-batch whose loss was multiplied by share / its tokens."""
        if not self.apart:
            return
        grads = self._present()
        self.squared.append((euclidean_norm(grads.values()) / share) ** 2)
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

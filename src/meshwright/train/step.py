"""One optimizer step. The same function runs on fake tensors: no `.item()`, no data-dependent shape."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.model import Transformer
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


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all gradients, in fp32 whatever their dtype."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
    return torch.linalg.vector_norm(torch.stack(norms))


def train_step(
    model: Transformer,
    optimizer: AdamW,
    micro_batches: Sequence[Batch],
    *,
    rate: float,
    clip: float,
    balance_loss: float,
    scaler: LossScaler | None = None,
    measure_noise: bool = False,
) -> StepResult:
    """Forward and backward over the micro-batches, clip, update.

    Loss = sum over valid targets of all micro-batches / their number, so that no split changes it; the balance loss is
    the mean over sequences, times `balance_loss`.
    """
    device = micro_batches[0].tokens.device
    sequences = sum(len(batch.tokens) for batch in micro_batches)
    factor = torch.full((), 1.0 / max(1, valid_tokens(micro_batches)), dtype=torch.float32, device=device)
    loss_scale = scaler.scale if scaler else torch.ones((), device=device)
    gradients = _Gradients(optimizer, measure_noise)
    loss = torch.zeros((), device=device)
    balance: Tensor | None = None
    for batch in micro_batches:
        found = model.loss(
            batch.tokens,
            batch.targets,
            scale=factor * loss_scale,
            positions=batch.positions,
            documents=batch.documents,
        )
        total = found.cross_entropy
        if found.balance is not None:
            mean = found.balance.sum() / sequences
            total = total + mean * balance_loss * loss_scale
            balance = mean.detach() if balance is None else balance + mean.detach()
        total.backward()
        loss += found.cross_entropy.detach()
        gradients.collect(batch.valid * factor * loss_scale)
    norm = gradient_norm(gradients.finish()) / loss_scale
    skipped = (~torch.isfinite(norm)).float()
    shrink = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones((), device=device)
    optimizer.step(rate, divide_by=loss_scale / shrink, skip=skipped)
    optimizer.zero_grad()
    loss = loss / loss_scale
    if scaler:
        scaler.update(skipped.bool())
    return StepResult(
        loss=loss,
        grad_norm=norm,
        balance=balance,
        skipped=skipped,
        micro_squared=tuple(gradients.squared),
        micro_tokens=tuple(batch.valid for batch in micro_batches) if measure_noise else (),
    )


class _Gradients:
    """Plain accumulation in `.grad`; or, to measure noise, each micro-batch alone and then summed (one more copy)."""

    def __init__(self, optimizer: AdamW, apart: bool) -> None:
        self.parameters = list(optimizer.parameters.values())
        self.apart = apart
        self.sums: list[Tensor] | None = None
        self.squared: list[Tensor] = []

    def collect(self, share: Tensor) -> None:
        """After a micro-batch whose loss was multiplied by share / its tokens."""
        if not self.apart:
            return
        grads = [p.grad for p in self.parameters if p.grad is not None]
        self.squared.append((gradient_norm(grads) / share) ** 2)
        self.sums = grads if self.sums is None else [a.add_(b) for a, b in zip(self.sums, grads, strict=True)]
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self) -> list[Tensor]:
        """The gradients of the step, back in `.grad`."""
        if self.sums is not None:
            for parameter, total in zip(self.parameters, self.sums, strict=True):
                parameter.grad = total
        return [p.grad for p in self.parameters if p.grad is not None]

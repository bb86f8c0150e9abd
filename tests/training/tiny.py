"""Small models and batches for the tests of the training step."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.model import Transformer
from meshwright.parallel import on_one_device
from meshwright.spec import Recipe
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.step.batches import Batch, split
from meshwright.training.step.step import StepResult, train_step
from tests.model.shrunk import VOCAB, model

RECIPE = Recipe(learning_rate=1e-2, beta2=0.9, weight_decay=0.1, epsilon=1e-5)
"""Epsilon above the rounding of a gradient: where the true one is 0 (biases of keys), Adam steps by noise alone."""


def batch(rows: int, length: int, *, valid: Sequence[int] | None = None, seed: int = 0, borders: bool = False) -> Batch:
    """`valid`: how many targets of each row count; `borders`: a document ends in the middle of every row."""
    drawn = torch.randint(VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    targets = drawn[:, 1:].clone()
    for row, count in enumerate(valid or []):
        targets[row, count:] = -100
    documents = (torch.arange(length) >= length // 2).int().expand(rows, -1)
    positions = (torch.arange(length) % (length - length // 2)).int().expand(rows, -1)
    return Batch(
        tokens=drawn[:, :-1],
        targets=targets,
        documents=documents if borders else None,
        positions=positions if borders else None,
        valid=int((targets >= 0).sum()),
    )


class Watched(Optimizer):
    """Remembers the gradients it was given, divided as asked."""

    def step(self, rate: float, *, divide_by: Tensor, skip: Tensor) -> None:
        self.seen = {
            name: parameter.grad.detach().double() / divide_by.double()
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        }
        super().step(rate, divide_by=divide_by, skip=skip)


def trained(model: Transformer, whole: Batch, size: int, **changes: Any) -> tuple[StepResult, Watched]:
    """One step over micro-batches of `size` sequences."""
    optimizer = Watched(model.named_parameters(), replace(RECIPE, **changes.pop("recipe", {})))
    options = {"rate": 1e-2, "clip": 1.0, "balance_loss": 0.01, **changes}
    return train_step(on_one_device(model), optimizer, split(whole, size), **options), optimizer


def weights(model: Transformer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def relative(measured: Tensor, right: Tensor) -> float:
    """Difference over the size of the right one, Euclidean."""
    return ((measured.double() - right.double()).norm() / right.double().norm().clamp(min=1e-30)).item()


def small(name: str = "llama-3.1-8b", **options: Any) -> Transformer:
    return model(name, louder=4.0, **options)

"""Observation of the inputs of matrices while a model runs on text, and the outlier columns among them."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.kernels import Kernels
from meshwright.kernels.experts.experts import Counts
from meshwright.model import Transformer
from meshwright.model.linear import Linear
from meshwright.model.moe import Experts
from meshwright.training.step.batches import Batch

InputCallback = Callable[[str, Tensor, Counts | None], None]
"""(name of a matrix, its inputs (..., in), rows per expert of a stack) -> None."""
MOST = 1 / 8
"""Largest share of outlier columns. Beyond it, those with the largest activations are taken."""


@contextmanager
def reading(model: Transformer, names: Iterable[str], seen: InputCallback) -> Iterator[None]:
    """Call `seen` with the inputs of the named matrices, including experts, inside `with`."""
    wanted = set(names)
    hooks: list[Any] = []
    kernels: dict[str, Kernels] = {}
    try:
        for name in wanted:
            where = name.rpartition(".")[0]
            module = model.get_submodule(where)
            if isinstance(module, Linear):
                hooks.append(module.register_forward_pre_hook(_hook(name, seen)))
            # experts have no module of their own each: their products pass through one kernel
            elif isinstance(module, Experts):
                kernels.setdefault(where, module.kernels)
                watched = partial(_expert_linear, module, where, wanted, seen, kernels[where].expert_linear)
                module.kernels = replace(kernels[where], expert_linear=watched)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for where, before in kernels.items():
            setattr(model.get_submodule(where), "kernels", before)  # noqa: B010  (a module's attributes have no types)


def _hook(name: str, seen: InputCallback) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen(name, arguments[0], None)

    return hook


def _expert_linear(
    experts: Experts, where: str, wanted: Container[str], seen: InputCallback, product: Any, rows: Tensor,
    weights: Tensor, counts: Any,
) -> Tensor:  # fmt: skip
    """Compute kernels.expert_linear of one stack and report its inputs."""
    leaf = next(leaf for leaf in ("gate", "up", "down") if getattr(experts, leaf, None) is weights)
    if f"{where}.{leaf}" in wanted:
        seen(f"{where}.{leaf}", rows, counts)
    outputs: Tensor = product(rows, weights, counts)
    return outputs


@torch.no_grad()
def column_peaks(model: Transformer, batches: Iterable[Batch], names: Iterable[str]) -> dict[str, Tensor]:
    """Return the largest magnitude (in,) fp32 of each input column, by matrix."""
    peaks: dict[str, Tensor] = {}

    def seen(name: str, x: Tensor, _: Counts | None) -> None:
        if x.numel():
            peak = x.detach().flatten(0, -2).abs().amax(0).float()
            peaks[name] = torch.maximum(peaks[name], peak) if name in peaks else peak

    with reading(model, names, seen):
        for batch in batches:
            run(model, batch)
    return peaks


def run(model: Transformer, batch: Batch) -> Tensor:
    """Return the last hidden states (B, S, D) of a batch."""
    hidden, _ = model.hidden(batch.tokens, positions=batch.positions, documents=batch.documents)
    return hidden


def outlier_columns(peaks: Mapping[str, Tensor], threshold: float) -> dict[str, Tensor]:
    """Return the input columns (O,) int32 whose peak exceeds `threshold` times the median peak, by matrix.

    Matrices without outliers are left out. The measure is relative, so the scale of the model does not matter.
    """
    outliers = {}
    for name, peak in peaks.items():
        usual = peak.median()
        # more than half of the columns may be dead
        usual = peak.mean() if usual == 0 else usual
        columns = (peak > threshold * usual).nonzero().squeeze(1)
        most = int(len(peak) * MOST)
        if len(columns) > most:
            columns = peak.topk(most).indices.sort().values
        if len(columns):
            outliers[name] = columns.to(torch.int32)
    return outliers

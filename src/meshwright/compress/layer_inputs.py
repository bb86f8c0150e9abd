"""What matrices read: activations of a model on text, gathered as it runs."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.kernels import Kernels
from meshwright.kernels.experts import Counts
from meshwright.model import Transformer
from meshwright.model.linear import Linear
from meshwright.model.moe import Experts
from meshwright.training.batches import Batch

InputCallback = Callable[[str, Tensor, Counts | None], None]
"""(name of a matrix, what it reads (..., in), of a stack of experts: rows of each)."""
MOST = 1 / 8
"""Share of columns that outliers may be; beyond it those with the largest activations are taken."""


@contextmanager
def reading(model: Transformer, names: Iterable[str], seen: InputCallback) -> Iterator[None]:
    """Inside, `seen` hears what the matrices of these names read, experts' too."""
    wanted = set(names)
    hooks: list[Any] = []
    kernels: dict[str, Kernels] = {}
    try:
        for name in wanted:
            where = name.rpartition(".")[0]
            module = model.get_submodule(where)
            if isinstance(module, Linear):
                hooks.append(module.register_forward_pre_hook(_heard(name, seen)))
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


def _heard(name: str, seen: InputCallback) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hear(module: nn.Module, given: tuple[Any, ...]) -> None:
        seen(name, given[0], None)

    return hear


def _expert_linear(
    experts: Experts, where: str, wanted: Container[str], seen: InputCallback, product: Any, rows: Tensor,
    weights: Tensor, counts: Any,
) -> Tensor:  # fmt: skip
    """As kernels.expert_linear, of one of the stacks."""
    leaf = next(leaf for leaf in ("gate", "up", "down") if getattr(experts, leaf, None) is weights)
    if f"{where}.{leaf}" in wanted:
        seen(f"{where}.{leaf}", rows, counts)
    found: Tensor = product(rows, weights, counts)
    return found


@torch.no_grad()
def column_peaks(model: Transformer, batches: Iterable[Batch], names: Iterable[str]) -> dict[str, Tensor]:
    """The largest magnitude (in,) fp32 that each input of a matrix had."""
    peaks: dict[str, Tensor] = {}

    def seen(name: str, x: Tensor, _: Counts | None) -> None:
        if x.numel():
            own = x.detach().flatten(0, -2).abs().amax(0).float()
            peaks[name] = torch.maximum(peaks[name], own) if name in peaks else own

    with reading(model, names, seen):
        for batch in batches:
            run(model, batch)
    return peaks


def run(model: Transformer, batch: Batch) -> Tensor:
    """Last hidden states (B, S, D) of a batch."""
    hidden, _ = model.hidden(batch.tokens, positions=batch.positions, documents=batch.documents)
    return hidden


def outlier_columns(peaks: Mapping[str, Tensor], threshold: float) -> dict[str, Tensor]:
    """Inputs (O,) int32 whose peak is more than `threshold` times that of the median input, of each matrix that has
    any. The measure is relative: a model may have any scale."""
    found = {}
    for name, peak in peaks.items():
        usual = peak.median()
        usual = peak.mean() if usual == 0 else usual
        columns = (peak > threshold * usual).nonzero().squeeze(1)
        most = int(len(peak) * MOST)
        if len(columns) > most:
            columns = peak.topk(most).indices.sort().values
        if len(columns):
            found[name] = columns.to(torch.int32)
    return found

"""Seams: every point where a layout may replace the arithmetic of one device.

A `Transformer` makes one `Seams` and shares it with its parts. Whoever lays the model out fills in fields
(parallel/apply.py); no method of a model is ever replaced. With no field filled in, the model runs on one device.

Letters: B batch, S sequence, D hidden, N tokens, X experts, k experts per token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.attention.attend import Mask, causal_mask
from meshwright.kernels.linear.linear import SummedProduct
from meshwright.kernels.loss.linear_divergence import DistillationLoss, KnownTop

BlockCall = Callable[..., tuple[Tensor, Tensor | None]]
"""Function that runs a block, its first argument. The other arguments and the results are those of Block.compute."""


def same(x: Tensor) -> Tensor:
    """Return the tensor unchanged."""
    return x


def compute(part: Any, *arguments: Any) -> Any:
    """Run the part's own arithmetic."""
    return part.compute(*arguments)


def look_up(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return rows (B, S, D) of weight (V, D) for tokens (B, S)."""
    return F.embedding(tokens, weight)


def counts_on_host(counts: Tensor, rows: int) -> list[list[int]]:
    """Return tables of counts (T, X) as lists. The host waits for the device. `rows` is the sum of the first table.

    Only here does the host learn how tokens were routed, once per layer. A dry run, without values, replaces it.
    """
    tables: list[list[int]] = counts.tolist()
    return tables


@dataclass(slots=True, kw_only=True)
class Border:
    """Entry and exit of a part of a block: attention, an MLP or a mixture of experts."""

    read: Callable[..., tuple[Tensor, ...]] | None = None
    """Products of the part's input with its first matrices, which also enter the part. None = kernels.linears."""
    gathers: bool = False
    """True if `read` gathers its input from other ranks, so products alone cannot replace it."""
    enter: Callable[[Tensor], Tensor] = same
    """Residual stream (B, S, D) -> input of the part, where `read` does not enter it: for codes, or other layers."""
    leave: Callable[[Tensor], Tensor] = same
    """Output of the part -> residual stream (B, S, D)."""
    write: SummedProduct | None = None
    """Product with the part's last matrix and `leave` in one, where that is better than one after the other."""
    prepared: Callable[[Tensor, Sequence[Any]], tuple[Tensor, ...] | None] | None = None
    """Products of x (..., in) with matrices that an engine prepared for its steps. Returns None for other layers."""


def pass_through(experts: Any, *arguments: Any) -> Any:
    """Return the arguments after the experts unchanged."""
    return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Transport of rows (N k, D), each for one expert, to the expert and back. By default all experts are here."""

    ordered: Callable[[Tensor], Tensor] = same
    """Experts (N k,) of the rows -> keys by which the rows are sorted."""
    send: Callable[..., Any] = pass_through
    """(experts, sorted rows (N k, D), counts (X,) of each expert) -> arguments of `compute` after the experts.

    With dropout of adapters, keys of the rows (N k,) follow the counts.
    """
    compute: Callable[..., Any] = compute
    """(experts, ...) -> argument of `receive`."""
    receive: Callable[[Any], Tensor] = same
    """Return the experts' outputs (N k, D) in the sorted order."""
    travels: bool = False
    """True if `send` and `compute` start transfers that the next function waits for."""


@dataclass(slots=True, kw_only=True)
class Seams:
    """Seams of one model. None = the model's own kernel."""

    tp_index: int = 0
    """Number of this rank among those that share heads, and so the number of its first head over its heads."""
    look_up: Callable[[Tensor, Tensor], Tensor] = look_up
    """Tokens (B, S) and the embedding's weight -> first hidden states."""
    positions: Callable[[Tensor], Tensor] = same
    """Positions (B, S) -> those at which learned positions are added."""
    mask: Callable[..., Mask] = causal_mask
    """Visibility of keys to queries. Signature of kernels.attention.attend.causal_mask."""
    call: BlockCall = compute
    """Function that runs a block. Hooks on the block itself stay outside."""
    dense: Border = field(default_factory=Border)
    """Border of attention, and of a dense MLP of the block."""
    routed: Border = field(default_factory=Border)
    """Border of a whole mixture of experts."""
    shared: Border = field(default_factory=Border)
    """Border of the shared experts inside it."""
    attend: Callable[..., Tensor] | None = None
    """Replacement of kernels.attend."""
    dispatch: Dispatch = Dispatch()
    """Dispatch of every mixture of experts."""
    counts_on_host: Callable[[Tensor, int], list[list[int]]] = counts_on_host
    in_routed: Callable[[Tensor], Tensor] = same
    """Mask (B, S) over the model's positions -> over the positions that a mixture of experts receives."""
    over_sequence: Callable[[Tensor], Tensor] = same
    """Means (2, B, ...) over the positions held here -> over whole sequences."""
    whole_sums: Callable[[Tensor], Tensor] = same
    """Sums over the positions held here -> over whole sequences, for objectives that need these."""
    enter_head: Callable[[Tensor], Tensor] = same
    """Normed hidden states (B, S, D) -> input of the head."""
    loss: Callable[..., Tensor] | None = None
    """Replacement of kernels.linear_cross_entropy."""
    log_probabilities: Callable[..., Tensor] | None = None
    """Replacement of kernels.linear_log_probabilities."""
    divergence: Callable[..., DistillationLoss] | None = None
    """Replacement of kernels.linear_divergence."""
    top: Callable[..., KnownTop] | None = None
    """Replacement of kernels.linear_top."""

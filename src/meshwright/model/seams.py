"""Seams: every place at which a model may be given something else to do than one device's arithmetic.

A `Transformer` makes one `Seams` and shares it with its parts. Whoever lays the model out fills fields in
(parallel/apply.py); no method of a model is ever replaced. A layout that fills none in is one device.

Letters: B batch, S sequence, D hidden, N tokens, X experts, k choices of a token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.attention import Mask, causal_mask
from meshwright.kernels.divergence_rows import DistillationLoss, KnownTop
from meshwright.kernels.linear import SummedProduct

BlockCall = Callable[..., tuple[Tensor, Tensor | None]]
"""What runs a block, which is its first argument; the others and the results are those of Block.compute."""


def same(x: Tensor) -> Tensor:
    """The tensor itself."""
    return x


def compute(part: Any, *given: Any) -> Any:
    """The part's own arithmetic."""
    return part.compute(*given)


def look_up(tokens: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight (V, D) for tokens (B, S) -> (B, S, D)."""
    return F.embedding(tokens, weight)


def counts_on_host(counts: Tensor, rows: int) -> list[list[int]]:
    """Tables of counts (T, X) as lists; the host waits for the device. `rows` is the sum of the first table.

    The only place where the host learns how tokens were routed, once a layer. Where tensors have no values (a dry run)
    another function of this signature gives the counts.
    """
    known: list[list[int]] = counts.tolist()
    return known


@dataclass(slots=True, kw_only=True)
class Border:
    """Where a part of a block begins and ends: attention, an MLP, a mixture of experts."""

    read: Callable[..., tuple[Tensor, ...]] | None = None
    """Products of the part's input with its first matrices, as kernels.linears, which None is. A part that begins with
    such products is entered by them."""
    gathers: bool = False
    """Whether `read` makes of its input more than is here: products alone do not take its place."""
    enter: Callable[[Tensor], Tensor] = same
    """(B, S, D) of the residual stream -> what the part reads, where it begins with something else than products, or
    with those of codes."""
    leave: Callable[[Tensor], Tensor] = same
    """What the part gives -> (B, S, D) of the residual stream."""
    write: SummedProduct | None = None
    """The product with the part's last matrix and `leave` in one, where that is better than one after the other."""
    prepared: Callable[[Tensor, Sequence[Any]], tuple[Tensor, ...] | None] | None = None
    """Products of x (..., in) with layers whose matrices an engine has prepared for its steps; None for layers that it
    has not."""


def as_given(experts: Any, *given: Any) -> Any:
    """What was given."""
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """How rows (N k, D), each for one expert, come to it and back. By default all experts are here."""

    ordered: Callable[[Tensor], Tensor] = same
    """Experts (N k,) of the rows -> numbers in whose order the rows leave."""
    send: Callable[..., Any] = as_given
    """(experts, rows (N k, D) in that order, counts (X,) of each expert) -> what `compute` takes behind the experts."""
    compute: Callable[..., Any] = compute
    """(experts, ...) -> what `receive` takes."""
    receive: Callable[[Any], Tensor] = same
    """-> what the rows' experts made of them (N k, D), in that order."""
    travels: bool = False
    """Whether `send` and `compute` start what the next one waits for."""


@dataclass(slots=True, kw_only=True)
class Seams:
    """The seams of one model. None = the model's own kernel."""

    look_up: Callable[[Tensor, Tensor], Tensor] = look_up
    """Tokens (B, S) and the embedding's weight -> the first hidden states."""
    positions: Callable[[Tensor], Tensor] = same
    """Positions (B, S) -> those that learned positions are added at."""
    mask: Callable[..., Mask] = causal_mask
    """What queries see of keys; signature of kernels.attention.causal_mask."""
    call: BlockCall = compute
    """Runs a block; what hangs on the block itself stays outside."""
    dense: Border = field(default_factory=Border)
    """Of attention, and of an MLP that is the block's."""
    routed: Border = field(default_factory=Border)
    """Of a whole mixture of experts."""
    shared: Border = field(default_factory=Border)
    """Of the shared experts inside of it."""
    attend: Callable[..., Tensor] | None = None
    """As kernels.attend."""
    dispatch: Dispatch = Dispatch()
    """Of every mixture of experts."""
    counts_on_host: Callable[[Tensor, int], list[list[int]]] = counts_on_host
    in_routed: Callable[[Tensor], Tensor] = same
    """(B, S) of the positions that a model is given -> of those that a mixture of experts is."""
    over_sequence: Callable[[Tensor], Tensor] = same
    """Means (2, B, ...) over the positions that are here -> over whole sequences."""
    whole_sums: Callable[[Tensor], Tensor] = same
    """Sums over the positions that are here -> over whole sequences, for an objective that needs these."""
    enter_head: Callable[[Tensor], Tensor] = same
    """Normed hidden states (B, S, D) -> what the head reads."""
    loss: Callable[..., Tensor] | None = None
    """As kernels.linear_cross_entropy."""
    log_probabilities: Callable[..., Tensor] | None = None
    """As kernels.linear_log_probabilities."""
    divergence: Callable[..., DistillationLoss] | None = None
    """As kernels.linear_divergence."""
    top: Callable[..., KnownTop] | None = None
    """As kernels.linear_top."""

"""Tensor and sequence parallelism (Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198).

Attention is split by heads, the MLP by its inner width, embedding and head by vocabulary. The model's own layers do the
local products; what communicates stands at the borders of attention and MLP:

    without sp    f: identity, backward all-reduce          f*: all-reduce, backward identity
    with sp       g: all-gather along the sequence,         g*: reduce-scatter along the sequence,
                     backward reduce-scatter                    backward all-gather

so that with sp norms, residuals and dropout work on S / tp positions. Per layer and pass two collectives of B S D
elements either way (an all-reduce being one reduce-scatter and one all-gather).

f and g are one with the products that read what they give (`columns.py`): in the backward pass those of the weights'
gradients run while the collective does, and g keeps its slice only and gathers once more. Where something else reads
it too (a router, experts), and before the head, they stand alone.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.kernels.cross_entropy import IGNORED, chunk_rows
from meshwright.kernels.linear import needs_wide
from meshwright.kernels.target import kind
from meshwright.model import Transformer
from meshwright.model.linear import Linear
from meshwright.parallel import operators
from meshwright.parallel.column_parallel import Columns
from meshwright.parallel.group import Group
from meshwright.parallel.operators import SEQUENCE
from meshwright.parallel.rank_boxes import share

SUMMED = ("o", "down")
"""Linears whose product is a part of a sum over tp: one rank adds the bias."""


class _Enter(torch.autograd.Function):
    """f, or g with sp: (B, S or S/tp, D) -> (B, S, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sp: bool) -> Tensor:
        ctx.group, ctx.sp = group, sp
        return group.all_gather(x, SEQUENCE) if sp else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        group = ctx.group
        found = group.reduce_scatter(gradient, SEQUENCE) if ctx.sp else group.all_reduce(gradient.clone())
        return found, None, None


class _Leave(torch.autograd.Function):
    """f*, or g* with sp: each rank's part of a sum (B, S, D) -> the sum (B, S or S/tp, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sp: bool) -> Tensor:
        ctx.group, ctx.sp = group, sp
        return group.reduce_scatter(x, SEQUENCE) if sp else group.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (ctx.group.all_gather(gradient, SEQUENCE) if ctx.sp else gradient), None, None


def enter(x: Tensor, group: Group, sp: bool) -> Tensor:
    """Before a product whose matrix is split by rows (outputs)."""
    if torch.compiler.is_compiling():
        return operators.enter(x, group.number, sp)
    found: Tensor = _Enter.apply(x, group, sp)  # type: ignore[no-untyped-call]
    return found


def leave(x: Tensor, group: Group, sp: bool) -> Tensor:
    """After a product whose matrix is split by columns (inputs)."""
    if torch.compiler.is_compiling():
        return operators.leave(x, group.number, sp)
    found: Tensor = _Leave.apply(x, group, sp)  # type: ignore[no-untyped-call]
    return found


def apply_tensor_parallel(model: Transformer, group: Group, *, sp: bool, own_tokens_in_experts: bool) -> None:
    """Give the seams of a model, whose parameters are this rank's boxes, the collectives.

    `own_tokens_in_experts`: routed layers are expert parallel and keep their slice of the sequence.
    """
    seams, enters, leaves = model.seams, partial(enter, group=group, sp=sp), partial(leave, group=group, sp=sp)
    seams.dense.read, seams.dense.leave = Columns(group, sp).linears, leaves
    if own_tokens_in_experts:
        seams.shared.read, seams.shared.leave = seams.dense.read, leaves
    else:
        seams.routed.enter, seams.routed.leave = enters, leaves
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name.rsplit(".", 1)[-1] in SUMMED:
            module.adds_bias = group.index == 0
    first, number = share(model.shape.vocab, group.size, group.index)
    seams.look_up = partial(_look_up, first=first, number=number, group=group, sp=sp)
    if sp:
        seams.positions = lambda positions: positions.chunk(group.size, 1)[group.index]
    seams.enter_head = enters
    seams.loss = VocabularyParallelLoss(group, model.shape.vocab)


def _look_up(tokens: Tensor, weight: Tensor, *, first: int, number: int, group: Group, sp: bool) -> Tensor:
    """A rank looks up the tokens of its rows, others give zero; the sum is the embedding."""
    local = tokens - first
    outside = (local < 0) | (local >= number)
    rows = nn.functional.embedding(local.masked_fill(outside, 0), weight)
    return leave(rows.masked_fill(outside.unsqueeze(-1), 0.0), group, sp)


class VocabularyParallelLoss:
    """Head and loss in one (kernels/cross_entropy.py) where each rank holds some rows of the head.

    Per chunk of rows two small collectives (maximum; sum of exponentials with the target's logit); no rank
    ever sees another's logits. The gradient of x is a rank's part; `enter` before the head sums it.
    """

    def __init__(self, group: Group, vocab: int) -> None:
        self.group = group
        self.first, self.number = share(vocab, group.size, group.index)
        self.most = share(vocab, group.size, 0)[1]

    def __call__(self, x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None = None) -> Tensor:
        """x (N, D) whole, weight (V/tp, D), targets (N,) -> summed loss (), the same on every rank."""
        if not torch.is_grad_enabled():
            x, weight = x.detach(), weight.detach()
        loss: Tensor = _SplitCrossEntropy.apply(x, weight, targets, scale, self)  # type: ignore[no-untyped-call]
        return loss

    def chunk(self, logits: Tensor, targets: Tensor, scale: Tensor | None, want_gradient: bool) -> Tensor:
        """Loss of a chunk; `logits` (R, V/tp) fp32 becomes its gradient in place."""
        valid = targets != IGNORED
        local = targets - self.first
        mine = valid & (local >= 0) & (local < self.number)
        index = local.clamp(0, self.number - 1).unsqueeze(1)
        peak = self.group.all_reduce(logits.amax(1), "max").unsqueeze(1)
        chosen = (logits.gather(1, index) - peak).squeeze(1) * mine
        logits.sub_(peak).exp_()
        total, chosen = self.group.all_reduce(torch.stack((logits.sum(1), chosen))).unbind(0)
        loss = ((total.log() - chosen) * valid).sum()
        if want_gradient:
            factor = valid.to(logits.dtype) if scale is None else valid * scale
            logits.mul_((factor / total).unsqueeze(1))
            logits.scatter_add_(1, index, -(factor * mine).unsqueeze(1))
        return loss


class _SplitCrossEntropy(torch.autograd.Function):
    """As kernels.cross_entropy's, chunk by chunk, both gradients made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None, head: VocabularyParallelLoss
    ) -> Tensor:
        want_x, want_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        weights = weight.float() if needs_wide(x) else weight
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        ctx.x_gradient = torch.empty_like(x) if want_x else None
        ctx.weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
        ctx.dtype = weight.dtype
        rows = chunk_rows(len(x), head.most, kind(x))  # equally many chunks on every rank
        for start in range(0, len(x), rows):
            part = x[start : start + rows].to(weights.dtype)
            logits = torch.mm(part, weights.t()).float()
            loss += head.chunk(logits, targets[start : start + rows], scale, want_x or want_weight)
            logits = logits.to(part.dtype)
            if want_x:
                ctx.x_gradient[start : start + rows] = logits @ weights
            if want_weight:
                ctx.weight_gradient += logits.t() @ part
            del logits, part  # else a chunk stands beside the next
        return loss if scale is None else loss * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x_gradient = None if ctx.x_gradient is None else ctx.x_gradient.mul_(gradient)
        weight_gradient = None if ctx.weight_gradient is None else ctx.weight_gradient.mul_(gradient).to(ctx.dtype)
        ctx.x_gradient = ctx.weight_gradient = None
        return x_gradient, weight_gradient, None, None, None

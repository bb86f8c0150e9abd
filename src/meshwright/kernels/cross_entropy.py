"""Head and loss in one: sum over valid targets of -log softmax(x W^T)[target], without the whole logits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.linear import needs_wide
from meshwright.kernels.target import kind
from meshwright.spec.purpose import takes

IGNORED = -100
CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
MIN_CHUNK_ROWS = 256


@takes("logits")
def linear_cross_entropy_reference(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None = None) -> Tensor:
    """Summed loss in nats, fp32. x (N, D), weight (V, D), targets (N,) with -100 = ignored; times scale ()."""
    logits = F.linear(x, weight).float()
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return loss if scale is None else loss * scale


def chunk_rows(rows: int, vocab: int, device: str) -> int:
    """Rows of one chunk: about CHUNK_BYTES of fp32 logits, at least 256 rows so that the product stays efficient.

    Each chunk reads and writes the whole fp32 gradient of the head, so a GPU takes larger ones.
    """
    return max(1, min(rows, max(MIN_CHUNK_ROWS, CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) // (4 * vocab))))


def _chunk(logits: Tensor, targets: Tensor, scale: Tensor | None, want_gradient: bool) -> Tensor:
    """Loss of a chunk; `logits` (R, V) fp32 becomes (softmax - onehot) * scale in place (0 where ignored)."""
    valid = targets != IGNORED
    index = targets.clamp(min=0).unsqueeze(1)
    peak = logits.amax(1, keepdim=True)
    chosen = logits.gather(1, index) - peak
    logits.sub_(peak).exp_()
    total = logits.sum(1, keepdim=True)
    loss = ((total.log() - chosen).squeeze(1) * valid).sum()
    if want_gradient:
        factor = valid.unsqueeze(1).to(logits.dtype) if scale is None else valid.unsqueeze(1) * scale
        logits.mul_(factor / total)
        logits.scatter_add_(1, index, -factor)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Makes both gradients during the forward pass, chunk by chunk: three products in all and never more than a chunk
    of logits alive. The gradient of W is summed in fp32 whatever the dtype of W. The backward pass multiplies them by
    the incoming gradient in place, so it can run once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None) -> Tensor:
        want_x, want_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        wide = needs_wide(x)
        weights = weight.float() if wide else weight
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        ctx.x_gradient = torch.empty_like(x) if want_x else None
        ctx.weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
        ctx.dtype = weight.dtype
        rows = chunk_rows(len(x), len(weight), kind(x))
        for start in range(0, len(x), rows):
            part = x[start : start + rows].to(weights.dtype)
            logits = F.linear(part, weights).float()
            loss += _chunk(logits, targets[start : start + rows], scale, want_x or want_weight)
            logits = logits.to(part.dtype)
            if want_x:
                ctx.x_gradient[start : start + rows] = logits @ weights
            if want_weight and part.dtype == torch.float32:
                ctx.weight_gradient.addmm_(logits.t(), part)
            elif want_weight:
                ctx.weight_gradient += logits.t() @ part
            del logits, part  # else a chunk stands beside the next
        return loss if scale is None else loss * scale

    @staticmethod
    @takes("logits")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.dtype is None:
            raise RuntimeError("linear_cross_entropy keeps its gradients for one backward pass only")
        x_gradient, weight_gradient = ctx.x_gradient, ctx.weight_gradient
        if x_gradient is not None:
            x_gradient.mul_(gradient)
        if weight_gradient is not None:
            weight_gradient = weight_gradient.mul_(gradient).to(ctx.dtype)
        ctx.x_gradient = ctx.weight_gradient = ctx.dtype = None
        return x_gradient, weight_gradient, None, None


@takes("logits")
def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, scale: Tensor | None = None) -> Tensor:
    """As the reference; one backward pass."""
    if not torch.is_grad_enabled():  # an autograd function is not told, and would make gradients for nothing
        x, weight = x.detach(), weight.detach()
    result: Tensor = _LinearCrossEntropy.apply(x, weight, targets, scale)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return result

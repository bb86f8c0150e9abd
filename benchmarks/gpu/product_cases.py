"""Matrix products with what stands around them: head and loss, and the three steps of a mixture of experts."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import exact_forms, liger
from benchmarks.gpu.case import HEAD, ROWS, Case, Count, Leaf, Run, implementations, taken
from meshwright.kernels import chooser
from meshwright.kernels.experts import experts
from meshwright.kernels.loss import cross_entropy
from meshwright.kernels.loss.cross_entropy import IGNORED


def _targets(rows: int, vocab: int, device: torch.device) -> Tensor:
    """Every eighth is ignored."""
    targets = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(rows))
    targets[::8] = IGNORED
    return targets.to(device)


def head_and_loss(rows: int, width: int, vocab: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """Three products. Ours makes both gradients in the forward pass."""
    targets, scale = _targets(rows, vocab, device), width**-0.5
    flop, item = 2.0 * rows * width * vocab, dtype.itemsize
    least = Count(item * (rows * width + width * vocab), flop)

    def torch_own(x: Tensor, weight: Tensor) -> Tensor:
        loss_sum: Tensor = F.linear_cross_entropy(x, weight, targets, reduction="sum")
        return loss_sum

    rivals: dict[str, Run] = {"torch": torch_own} if hasattr(F, "linear_cross_entropy") else {}
    return Case(
        operation="linear + cross-entropy", size=f"{rows:,} x {width:,} x {vocab:,}", dtype=dtype,
        leaves=(Leaf((rows, width)), Leaf((vocab, width), scale)),
        exact=partial(exact_forms.linear_cross_entropy, targets=targets),
        eager=partial(cross_entropy.linear_cross_entropy_reference, targets=targets),
        ours=implementations("loss_rows", partial(cross_entropy.linear_cross_entropy, targets=targets), device, dtype),
        chosen=taken("loss_rows", device, dtype), rivals=rivals | liger.linear_loss(targets),
        counts={"forward": least, "backward": Count(2 * least.bytes_moved, 2 * flop)}, kinds=(ROWS, ROWS, HEAD),
    )  # fmt: skip


def loss(rows: int, vocab: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """Loss of logits and their gradient: read twice, written once."""
    targets = _targets(rows, vocab, device)

    def eager(logits: Tensor) -> tuple[Tensor, Tensor]:
        leaf = logits.detach().requires_grad_()
        wide = leaf if leaf.dtype == torch.float64 else leaf.float()
        losses = F.cross_entropy(wide, targets, reduction="sum")
        return losses.detach(), torch.autograd.grad(losses, leaf)[0]

    def ours(logits: Tensor) -> tuple[Tensor, Tensor]:
        from meshwright.kernels.triton import logit_rows

        losses = logit_rows.losses(logits, targets, None, ignored=IGNORED, gradient=True, smoothing=0.0, z=0.0)
        return losses.sum(), logits

    return Case(
        operation="loss of logits and its gradient", size=f"{rows:,} x {vocab:,}", dtype=dtype,
        leaves=(Leaf((rows, vocab)),), exact=eager, eager=eager, ours=_only_triton("loss_rows", ours, device, dtype),
        chosen="ours, Triton", rivals=liger.loss(targets),
        counts={"forward": Count(3 * rows * vocab * dtype.itemsize)}, kinds=(ROWS,) * 2, learns=False, compiles=False,
    )  # fmt: skip


def _only_triton(operation: str, run: Run, device: torch.device, dtype: torch.dtype) -> dict[str, Run]:
    chosen = chooser.choice(operation, device, dtype, prefer="triton")
    return {"ours, Triton": run} if chosen.by == "triton" else {}


class Routing:
    """Tokens to top_k of so many experts, unevenly: order of the copies, its inverse, and rows of each expert."""

    def __init__(self, tokens: int, top_k: int, number: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(tokens)
        liking = torch.randn(number, generator=generator)
        chosen = (torch.randn(tokens, number, generator=generator) + liking).topk(top_k, dim=1).indices.flatten()
        self.order = chosen.argsort(stable=True).to(device)
        self.inverse = self.order.argsort()
        self.counts = torch.bincount(chosen, minlength=number).to(device)


def permute(
    tokens: int, width: int, number: int, top_k: int, *, dtype: torch.dtype, device: torch.device
) -> Case:  # fmt: skip
    """Copies of rows in the order of their experts; the gradient is summed over copies."""
    to, item = Routing(tokens, top_k, number, device), dtype.itemsize
    moved = Count(tokens * width * item * (1 + top_k))

    def copied(x: Tensor) -> Tensor:
        return x.index_select(0, to.order // top_k)

    def ours(x: Tensor, prefer: str) -> Tensor:
        return experts.spread(x, to.order, to.inverse, top_k, prefer)

    return Case(
        operation="MoE permute", size=f"{tokens:,} x {width:,}, {top_k} of {number}", dtype=dtype,
        leaves=(Leaf((tokens, width)),), exact=copied, eager=copied,
        ours=implementations("permute", ours, device, dtype), chosen=taken("permute", device, dtype),
        counts={"forward": moved, "backward": moved}, kinds=(ROWS,) * 2,
    )  # fmt: skip


def combine(
    tokens: int, width: int, number: int, top_k: int, *, dtype: torch.dtype, device: torch.device
) -> Case:  # fmt: skip
    """Of each token the weighted sum of its copies."""
    to, item = Routing(tokens, top_k, number, device), dtype.itemsize

    def ours(rows: Tensor, weights: Tensor, prefer: str) -> Tensor:
        return experts.combine(rows, weights, to.order, to.inverse, prefer)

    return Case(
        operation="MoE combine", size=f"{tokens:,} x {width:,}, {top_k} of {number}", dtype=dtype,
        leaves=(Leaf((tokens * top_k, width)), Leaf((tokens, top_k), dtype=torch.float32)),
        exact=partial(experts.combine_reference, inverse=to.inverse),
        eager=partial(experts.combine_reference, inverse=to.inverse),
        ours=implementations("permute", ours, device, dtype), chosen=taken("permute", device, dtype),
        counts={
            "forward": Count(tokens * width * item * (1 + top_k)),
            "backward": Count(tokens * width * item * (1 + 2 * top_k)),
        },
        kinds=(ROWS,) * 3,
    )  # fmt: skip


def grouped_product(
    tokens: int, width: int, ffn: int, number: int, top_k: int, *, dtype: torch.dtype, device: torch.device
) -> Case:  # fmt: skip
    """Each expert's rows times its matrix; `eager` is a product for each expert, whose counts the host knows."""
    counts, rows = Routing(tokens, top_k, number, device).counts, tokens * top_k
    known: list[int] = counts.tolist()

    def in_triton(x: Tensor, weights: Tensor) -> Tensor:
        from meshwright.kernels.triton import expert_rows

        return expert_rows.expert_linear(x, weights, counts)

    def by_torch(x: Tensor, weights: Tensor, prefer: str) -> Tensor:
        on_device = experts.groups_on_device(x, weights)
        return experts.expert_linear(x, weights, counts if on_device else known, prefer)

    matrices, item = number * width * ffn, dtype.itemsize
    flop = 2.0 * rows * width * ffn
    forward = Count(item * (rows * (width + ffn) + matrices), flop)
    return Case(
        operation="MoE grouped product", size=f"{rows:,} x {width:,} x {ffn:,}, {number} experts", dtype=dtype,
        leaves=(Leaf((rows, width)), Leaf((number, ffn, width), width**-0.5)),
        exact=partial(exact_forms.grouped, counts=known),
        eager=partial(experts.expert_linear_reference, counts=known),
        ours=implementations("grouped", by_torch, device, dtype, in_triton), chosen=_grouped_by(dtype, device),
        counts={"forward": forward, "backward": Count(2 * forward.bytes_moved, 2 * flop)}, kinds=(ROWS,) * 3,
        compiles=False,
    )  # fmt: skip


def _grouped_by(dtype: torch.dtype, device: torch.device) -> str:
    """Torch's product goes before Triton's where the device has one."""
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    if experts.groups_on_device(torch.empty(16, 16, **options), torch.empty(1, 16, 16, **options)):
        return "ours, torch"
    return taken("grouped", device, dtype)

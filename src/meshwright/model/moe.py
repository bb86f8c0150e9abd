"""Mixture of experts: a router, stacked experts, shared experts and the balance loss.

Dropless: every token reaches its top_k experts, however uneven. Letters: N tokens, D hidden, X experts, F expert ffn.
"""

import torch
from torch import Tensor, nn

from meshwright.kernels import Kernels
from meshwright.model.mlp import make_mlp
from meshwright.spec.shape import ModelShape, MoEShape


class Router(nn.Module):
    """Scores every expert in fp32 and picks top_k of them a token."""

    def __init__(self, shape: ModelShape, moe: MoEShape) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, shape.hidden))
        if moe.correction_bias:
            self.register_buffer("correction_bias", torch.zeros(moe.experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (N, D) -> weights (N, k) fp32, experts (N, k) int64, all scores (N, X) fp32 that sum to 1 a token."""
        logits = x.float() @ self.weight.float().t()
        scores = logits.softmax(-1) if self.moe.scoring == "softmax" else logits.sigmoid()
        experts = self._choose(scores)
        weights = scores.gather(1, experts)
        if self.moe.normalize_top_k:
            tiny = 1e-20 if self.moe.scoring == "sigmoid" else 0.0
            weights = weights / (weights.sum(-1, keepdim=True) + tiny)
        probabilities = scores if self.moe.scoring == "softmax" else scores / scores.sum(-1, keepdim=True)
        return weights * self.moe.routed_scale, experts, probabilities

    def _choose(self, scores: Tensor) -> Tensor:
        """Indices (N, k). With groups: a group counts as its two best experts, the rest is out of the choice."""
        moe, choice = self.moe, scores.detach()
        if moe.correction_bias:
            choice = choice + self.correction_bias
        if moe.groups > 1:
            grouped = choice.view(len(choice), moe.groups, -1)
            strength = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
            best = strength.topk(moe.top_groups, dim=-1).indices
            kept = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, best, True)
            choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
        return choice.topk(moe.top_k, dim=-1).indices


class Experts(nn.Module):
    """X feed-forwards as three stacked matrices; the product over runs of rows is a kernel."""

    def __init__(self, shape: ModelShape, moe: MoEShape, kernels: Kernels) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(moe.experts, moe.ffn, shape.hidden))
        self.up = nn.Parameter(torch.empty(moe.experts, moe.ffn, shape.hidden))
        self.down = nn.Parameter(torch.empty(moe.experts, shape.hidden, moe.ffn))
        self.kernels = kernels

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows (N k, D) sorted by expert, counts (X,) rows of each expert -> (N k, D).

        The only place where the host learns the counts (one wait a layer).
        """
        product, runs = self.kernels.expert_linear, counts.tolist()
        inner = self.kernels.swiglu(product(rows, self.gate, runs), product(rows, self.up, runs))
        out: Tensor = product(inner, self.down, runs)
        return out


class MoE(nn.Module):
    """Routed experts plus shared ones."""

    def __init__(self, shape: ModelShape, kernels: Kernels) -> None:
        super().__init__()
        assert shape.moe is not None
        self.moe = shape.moe
        self.router = Router(shape, shape.moe)
        self.experts = Experts(shape, shape.moe, kernels)
        if shape.moe.shared_experts:
            self.shared = make_mlp(shape, kernels, shape.moe.shared_experts * shape.moe.ffn, False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (B, S, D) -> (B, S, D) and the balance loss of each sequence (B,), fp32."""
        flat = x.flatten(0, 1)
        weights, experts, probabilities = self.router(flat)
        order = experts.flatten().argsort(stable=True)
        counts = experts.new_zeros(self.moe.experts).scatter_add_(0, experts.flatten(), torch.ones_like(order))
        rows = self.experts(flat[order // self.moe.top_k], counts)
        rows = rows * weights.flatten()[order].unsqueeze(1).to(rows.dtype)
        out = torch.zeros_like(flat).index_add(0, order // self.moe.top_k, rows)
        if self.moe.shared_experts:
            out = out + self.shared(flat)
        return out.view_as(x), self._balance(experts, probabilities, x.shape[0])

    def _balance(self, experts: Tensor, probabilities: Tensor, sequences: int) -> Tensor:
        """X * sum over experts of (share of choices) * (mean probability), 1 when even (arXiv:2101.03961, eq. 4).

        Taken per sequence (as DeepSeek-V3, eq. 17-20), so that no split into micro-batches or ranks changes it.
        """
        chosen = torch.zeros_like(probabilities).scatter_(1, experts, 1.0).view(sequences, -1, self.moe.experts)
        share = chosen.mean(1) / self.moe.top_k
        return self.moe.experts * (share * probabilities.view_as(chosen).mean(1)).sum(-1)

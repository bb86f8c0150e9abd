"""What is right, written out: called with fp64 tensors."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of the sum, and the sum."""
    return rms_norm(x + added, weight), x + added


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias."""
    centered = x - x.mean(-1, keepdim=True)
    return centered * (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight + bias


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate sigmoid(gate) up."""
    return gate * gate.sigmoid() * up


def gelu(x: Tensor) -> Tensor:
    """x Phi(x)."""
    return x * 0.5 * (1 + torch.erf(x * 0.5**0.5))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (i, i + E/2) of x (B, S, H, E) turned."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Head by head: q (B, S, H, E), k (B, S, K, E), v (B, S, K, V), seen (S, S)."""
    group, heads = q.shape[2] // k.shape[2], []
    for head in range(q.shape[2]):
        scores = (q[:, :, head] @ k[:, :, head // group].mT) * scale
        heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, :, head // group])
    return torch.stack(heads, 2)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Summed loss of x (N, D), weight (V, D), targets (N,)."""
    return F.cross_entropy(x @ weight.T, targets, reduction="sum")


def grouped(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """rows (N, in) sorted by expert, weights (X, out, in)."""
    parts = zip(rows.split(counts), weights.unbind(), strict=True)
    return torch.cat([part @ weight.T for part, weight in parts])


def merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over two parts of the keys, from their results (B, H, S, V) and log-sum-exps (B, H, S)."""
    both = torch.logaddexp(lse, part_lse)
    share = (lse - both).exp().unsqueeze(-1), (part_lse - both).exp().unsqueeze(-1)
    return out * share[0] + part * share[1], both

"""FlashAttention 4 (package flash-attn-4, Python that CuTe DSL compiles at first use), called by name.

torch 2.13 can put it in the place of its own flash kernel (torch.nn.attention.activate_flash_attention_impl). That is a
setting of the process: dropout and heads that it refuses would then fail. It also takes two results of a function that
has returned four or five since 4.0.0b20. The functions below take the arguments that 4.0.0b5 to 4.0.0b36 have.
"""

import importlib
from importlib import metadata
from typing import Any

import torch

MODULE = "flash_attn.cute.interface"


def flash_4_version() -> str:
    """Of the installed package; empty where pip did not install it."""
    try:
        return metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return ""


def flash_4_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, borders: torch.Tensor, longest: int, *, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as compat.varlen_attention without dropout: q (T, H, E), k (T, K, E), v (T, K, V) in 16 bits -> (T, H,
    V) and the log-sum-exp (H, T) fp32. ImportError where the package or what it needs is missing."""
    forward = importlib.import_module(MODULE)._flash_attn_fwd
    made: Any = forward(q, k, v, **_documents(borders, longest, window, scale), return_lse=True)
    return made[0], made[1]


def flash_4_past(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: int, scale: float) -> torch.Tensor:
    """The last queries (B, S, H, E) of sequences over k (B, T, K, E) and v (B, T, K, V) -> (B, S, H, V), without
    gradients: query i of S sees the keys up to i + T - S."""
    forward = importlib.import_module(MODULE)._flash_attn_fwd
    made: Any = forward(q, k, v, **_masked(window, scale), return_lse=False)
    out: torch.Tensor = made[0]
    return out


def flash_4_attention_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    borders: torch.Tensor, longest: int, *, window: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of q, k and v; see flash_4_attention. Those of queries are added up in any order."""
    backward = importlib.import_module(MODULE)._flash_attn_bwd
    made: Any = backward(q, k, v, out, gradient, lse, **_documents(borders, longest, window, scale))
    return made[0], made[1], made[2]


def _documents(borders: torch.Tensor, longest: int, window: int, scale: float) -> dict[str, Any]:
    """The arguments of both passes."""
    rows = {"cu_seqlens_q": borders, "cu_seqlens_k": borders, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return {**_masked(window, scale), **rows}


def _masked(window: int, scale: float) -> dict[str, Any]:
    """The arguments that hide keys. A window says how many before a query are seen."""
    sides = (window - 1, 0) if window else (None, None)
    return {
        "softmax_scale": scale, "causal": True, "window_size_left": sides[0], "window_size_right": sides[1]
    }  # fmt: skip

"""FlashAttention 4 (package flash-attn-4, Python compiled by CuTe DSL at first use), called by name.

torch 2.13 can install it in place of its own flash kernel (torch.nn.attention.activate_flash_attention_impl). That
setting applies to the whole process, so dropout and unsupported head sizes would fail. It also unpacks two results of a
function that returns four or five since 4.0.0b20. The functions below use the arguments of 4.0.0b5 to 4.0.0b36.
"""

import importlib
from importlib import metadata
from typing import Any

import torch

MODULE = "flash_attn.cute.interface"


def flash_4_version() -> str:
    """Return the version of the installed package, or an empty string."""
    try:
        return metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return ""


def flash_4_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, borders: torch.Tensor, longest: int, *, window: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention as compat.varlen_attention does, without dropout.

    q (T, H, E), k (T, K, E), v (T, K, V) in 16 bits -> (T, H, V) and the log-sum-exp (H, T) fp32. Raises ImportError
    when the package or one of its dependencies is missing.
    """
    forward = importlib.import_module(MODULE)._flash_attn_fwd
    outputs: Any = forward(q, k, v, **_documents(borders, longest, window, scale), return_lse=True)
    return outputs[0], outputs[1]


def flash_4_past(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, window: int, scale: float) -> torch.Tensor:
    """Compute attention of the last queries (B, S, H, E) over k (B, T, K, E), v (B, T, K, V) -> (B, S, H, V).

    No gradients. Query i of S sees the keys up to i + T - S.
    """
    forward = importlib.import_module(MODULE)._flash_attn_fwd
    outputs: Any = forward(q, k, v, **_masked(window, scale), return_lse=False)
    out: torch.Tensor = outputs[0]
    return out


def flash_4_attention_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    borders: torch.Tensor, longest: int, *, window: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of q, k and v of flash_4_attention. Query gradients are summed in any order."""
    backward = importlib.import_module(MODULE)._flash_attn_bwd
    outputs: Any = backward(q, k, v, out, gradient, lse, **_documents(borders, longest, window, scale))
    return outputs[0], outputs[1], outputs[2]


def _documents(borders: torch.Tensor, longest: int, window: int, scale: float) -> dict[str, Any]:
    """Return the arguments that both passes share."""
    rows = {"cu_seqlens_q": borders, "cu_seqlens_k": borders, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return {**_masked(window, scale), **rows}


def _masked(window: int, scale: float) -> dict[str, Any]:
    """Return the arguments that hide keys. A window counts the visible keys up to the query."""
    sides = (window - 1, 0) if window else (None, None)
    return {
        "softmax_scale": scale, "causal": True, "window_size_left": sides[0], "window_size_right": sides[1]
    }  # fmt: skip

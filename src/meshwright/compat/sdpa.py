"""Which of its kernels torch's scaled_dot_product_attention takes: torch can forbid one, and has no public question."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

_NAMES = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.MATH: "math",
}


def chosen_attention(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, *, dropout: float, scale: float, grouped: bool
) -> str:
    """By name, for q, k, v (B, heads, positions, width); `unknown` where this torch has no such question any more.

    scaled_dot_product_attention itself asks by this private name.
    """
    ask = getattr(torch, "_fused_sdp_choice", None)
    if ask is None:
        return "unknown"
    number = ask(q, k, v, allowed, dropout, allowed is None, scale=scale, enable_gqa=grouped)
    return _NAMES.get(SDPBackend(number), "unknown")


def pin_flash_attention() -> None:
    """Let torch take its flash kernel wherever that takes the input.

    On Hopper recent builds prefer cuDNN's, whose memory and order of sums differ from what a dry run models.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)

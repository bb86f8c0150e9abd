"""Attention kernels by name: torch's own, and FlashAttention 4.

scaled_dot_product_attention chooses among torch's, hides their log-sum-exp, and has no document boundaries.
"""

import importlib
import inspect
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

_NAMES = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.MATH: "math",
}


def choose_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, *, scale: float, grouped: bool) -> str:
    """Return the kernel that torch would choose for q, k, v (B, heads, positions, width), or `unknown`.

    scaled_dot_product_attention uses the same private query.
    """
    query = getattr(torch, "_fused_sdp_choice", None)
    if query is None:
        return "unknown"
    choice = query(q, k, v, allowed, 0.0, allowed is None, scale=scale, enable_gqa=grouped)
    return _NAMES.get(SDPBackend(choice), "unknown")


def pin_flash_attention() -> None:
    """Let torch use its flash kernel wherever it can. cuDNN's kernel is called by name (`cudnn_attention`)."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def cudnn_version() -> int:
    """Return the cuDNN version, such as 91900, or 0 without cuDNN or its attention."""
    has_attention = hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention")
    return (torch.backends.cudnn.version() or 0) if has_attention and torch.cuda.is_available() else 0


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Return cuDNN's causal attention: q (B, H, S, E), k and v (B, K, S, E) -> (B, H, S, E), differentiable.

    scaled_dot_product_attention calls the same operation when its backend is enabled for the whole process. It saves
    what flash attention saves: q, k, v, the output and the log-sum-exp in fp32.
    """
    outputs = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)
    out: Tensor = outputs[0]
    return out


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, device: str,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return fused attention q (B, H, S, E), k and v (B, K, T, E) -> (B, H, S, E) and the log-sum-exp (B, H, S).

    On a CPU, a mask (S, T) is added to the scores. The public scaled_dot_product_attention calls the same operations
    but hides the log-sum-exp, without which outputs over parts of the keys cannot be combined.
    """
    if device == "cpu":
        outputs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
    else:
        outputs = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return outputs[0], outputs[1]


def flash_attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
    device: str,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v in `flash_attention` for these keys, from output and log-sum-exp over all keys.

    Without dropout the random state is not read, and without packed lengths neither are the cumulative lengths.
    """
    if device == "cpu":
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = backward(gradient, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    else:
        # The operation wants a random state even without dropout. It is not read, so no memory is filled.
        unread = torch.empty(2, dtype=torch.uint64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        gradients = backward(gradient, q, k, v, out, lse, *lengths, 0.0, causal, unread, unread[0], scale=scale)
    return gradients[0], gradients[1], gradients[2]


def banded_attention(q: Tensor, k: Tensor, v: Tensor, *, left: int, right: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return a GPU's flash attention q (B, H, S, E), k and v (B, K, T, E) -> (B, H, S, E) and log-sum-exp (B, H, S).

    Query i sees the keys from i + T - S - left to i + T - S + right; -1 = no limit. Every query must see a key. This is
    the operation of varlen_attention without document boundaries, which takes heads after positions.
    """
    transposed = (x.transpose(1, 2) for x in (q, k, v))
    sizes = None, None, q.shape[2], k.shape[2]
    outputs = torch.ops.aten._flash_attention_forward(
        *transposed, *sizes, 0.0, False, False, scale=scale, window_size_left=left, window_size_right=right
    )
    return outputs[0].transpose(1, 2), outputs[1]


def banded_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, left: int, right: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v for these keys, given output and log-sum-exp over all keys."""
    transposed = (x.transpose(1, 2) for x in (gradient, q, k, v, out))
    unread = torch.empty(2, dtype=torch.uint64, device=q.device)
    sizes = None, None, q.shape[2], k.shape[2]
    gradients = torch.ops.aten._flash_attention_backward(
        *transposed, lse, *sizes, 0.0, False, unread, unread[0], scale=scale, window_size_left=left,
        window_size_right=right,
    )  # fmt: skip
    q_gradient, k_gradient, v_gradient = (x.transpose(1, 2) for x in gradients)
    return q_gradient, k_gradient, v_gradient


def has_flash_attention(device: str) -> bool:
    """Return whether this torch has flash attention and its gradient for a kind of device."""
    if device not in ("cpu", "cuda"):
        return False
    name = "_scaled_dot_product_flash_attention" + ("_for_cpu" if device == "cpu" else "")
    return hasattr(torch.ops.aten, name) and hasattr(torch.ops.aten, f"{name}_backward")


def supports_flash(q: Tensor, v: Tensor) -> bool:
    """Return whether a GPU's flash kernel, which takes no masks, supports these dtypes and head widths."""
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] == v.shape[-1] <= 256


def attention_backward(kernel: str) -> Any:
    """Return the backward operation of torch's `flash` or `efficient` attention, or None."""
    packet = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward", None)
    return packet.default if packet is not None else None


def cuda_attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None,
    is_causal: bool, scale: float, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Call the kernel that scaled_dot_product_attention uses on a GPU, for fake tensors that stand in for GPU tensors.

    torch would choose by the device that fake tensors report. Raises AssertionError where torch would store the S x T
    weights: unequal heads that its flash kernel does not support.
    """
    if attn_mask is None and supports_flash(q, v):
        outputs = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
        out: Tensor = outputs[0]
        return out
    assert not enable_gqa, "torch's other fused kernel takes equal heads only"
    bias = None
    if attn_mask is not None:
        # torch turns a boolean mask into a bias too, so a dry run counts that memory.
        bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    weighted: Tensor = efficient(q, k, v, bias, True, 0.0, is_causal, scale=scale)[0]
    return weighted


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, *, window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return a GPU's causal flash attention over packed documents: q (T, H, E), k and v (T, K, E).

    Documents start at `borders` (N + 1,) int32 and have at most `longest` positions; `window` 0 = none. Returns the
    output (T, H, E) and the log-sum-exp (H, T). torch.nn.attention.varlen calls the same operation (`varlen_attn`).
    """
    sizes = (borders, borders, longest, longest)
    outputs = torch.ops.aten._flash_attention_forward(q, k, v, *sizes, 0.0, True, False, scale=scale, **_sides(window))
    return outputs[0], outputs[1]


def varlen_attn(q: Tensor, k: Tensor, v: Tensor, *borders: Any, **options: Any) -> Tensor:
    """Call torch.nn.attention.varlen.varlen_attn with the signature of this torch.

    The number of query heads may be a multiple of those of k and v (..., K, E), which versions after 2.11 must be told.
    Raises NotImplementedError for options that this torch lacks, such as `block_table` (2.12).
    """
    from torch.nn.attention.varlen import varlen_attn as function

    parameters = inspect.signature(function).parameters
    # 2.11 takes fewer key heads without being told.
    if "enable_gqa" in parameters:
        options["enable_gqa"] = q.shape[-2] != k.shape[-2]
    missing = [name for name in options if name not in parameters]
    if missing:
        raise NotImplementedError(f"varlen_attn of torch {torch.__version__} has no {', '.join(missing)}")
    outputs: Any = function(q, k, v, *borders, **options)
    # Log-sum-exps come with it only where they are asked for.
    out: Tensor = outputs
    return out


def varlen_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    borders: Tensor, longest: int, *, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v in `varlen_attention`."""
    unread = torch.empty(2, dtype=torch.uint64, device=q.device)
    sizes = (borders, borders, longest, longest)
    gradients = torch.ops.aten._flash_attention_backward(
        gradient, q, k, v, out, lse, *sizes, 0.0, True, unread, unread[0], scale=scale, **_sides(window)
    )
    return gradients[0], gradients[1], gradients[2]


def efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return a GPU's memory-efficient attention, which supports fp32 and a bias (B, H, S, T) on the scores.

    q (B, H, S, E), k (B, H, T, E), v (B, H, T, V) -> (B, H, S, V) and the log-sum-exp (B, H, S rounded up to a multiple
    of 32). scaled_dot_product_attention calls the same operation but hides the log-sum-exp. Rows of `bias` must start
    at multiples of 16 numbers.
    """
    outputs = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return outputs[0], outputs[1]


def efficient_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    out: Tensor, lse: Tensor, *, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v in `efficient_attention`. Without dropout the random state is not read."""
    unread = torch.empty((), dtype=torch.int64, device=q.device)
    gradients = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        gradient, q, k, v, bias, out, lse, unread, unread, 0.0, [True, True, True, False], causal, scale=scale
    )
    return gradients[0], gradients[1], gradients[2]


def varlen_backward() -> Any:
    """Return the backward operation of varlen attention, or None if this torch has none."""
    packet = getattr(torch.ops.aten, "_flash_attention_backward", None)
    return packet.default if packet is not None else None


def _sides(window: int) -> dict[str, int]:
    """Return the arguments for the visible keys before and after a query."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


FLASH_4 = "flash_attn.cute.interface"
"""Module of FlashAttention 4 (package flash-attn-4, Python compiled by CuTe DSL at first use).

torch 2.13 can install it in place of its own flash kernel (torch.nn.attention.activate_flash_attention_impl). That
setting applies to the whole process, so dropout and unsupported head sizes would fail. It also unpacks two results of a
function that returns four or five since 4.0.0b20. The functions below use the arguments of 4.0.0b5 to 4.0.0b36.
"""


def flash_4_version() -> str:
    """Return the version of the installed flash-attn-4, or an empty string."""
    try:
        return metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return ""


def flash_4_attention(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, *, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention as compat.varlen_attention does.

    q (T, H, E), k (T, K, E), v (T, K, V) in 16 bits -> (T, H, V) and the log-sum-exp (H, T) fp32. Raises ImportError
    when the package or one of its dependencies is missing.
    """
    forward = importlib.import_module(FLASH_4)._flash_attn_fwd
    outputs: Any = forward(q, k, v, **_documents(borders, longest, window, scale), return_lse=True)
    return outputs[0], outputs[1]


def flash_4_past(q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float) -> Tensor:
    """Compute attention of the last queries (B, S, H, E) over k (B, T, K, E), v (B, T, K, V) -> (B, S, H, V).

    No gradients. Query i of S sees the keys up to i + T - S.
    """
    forward = importlib.import_module(FLASH_4)._flash_attn_fwd
    outputs: Any = forward(q, k, v, **_masked(window, scale), return_lse=False)
    out: Tensor = outputs[0]
    return out


def flash_4_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    borders: Tensor, longest: int, *, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v of flash_4_attention. Query gradients are summed in any order."""
    backward = importlib.import_module(FLASH_4)._flash_attn_bwd
    outputs: Any = backward(q, k, v, out, gradient, lse, **_documents(borders, longest, window, scale))
    return outputs[0], outputs[1], outputs[2]


def _documents(borders: Tensor, longest: int, window: int, scale: float) -> dict[str, Any]:
    """Return the arguments that both passes share."""
    rows = {"cu_seqlens_q": borders, "cu_seqlens_k": borders, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return {**_masked(window, scale), **rows}


def _masked(window: int, scale: float) -> dict[str, Any]:
    """Return the arguments that hide keys. A window counts the visible keys up to the query."""
    # None is no border there, where torch's kernel has -1.
    sides = (window - 1, 0) if window else (None, None)
    return {"softmax_scale": scale, "causal": True, "window_size_left": sides[0], "window_size_right": sides[1]}

"""torch's attention kernels by their own names: scaled_dot_product_attention chooses among them, keeps their
log-sum-exp to itself, and knows no borders of documents."""

import inspect
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
    """Let torch take its flash kernel wherever that takes the input: what cuDNN's is for is asked for by name
    (`cudnn_attention`), and not by what a build prefers."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def cudnn_version() -> int:
    """Version of this process's cuDNN, as 91900; 0 where there is none, or torch has not its attention."""
    has_attention = hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention")
    return (torch.backends.cudnn.version() or 0) if has_attention and torch.cuda.is_available() else 0


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """cuDNN's causal attention q (B, H, S, E), k and v (B, K, S, E) -> (B, H, S, E), differentiable.

    scaled_dot_product_attention calls the same operation where its backend is switched on, which is a setting of the
    process. It keeps what flash keeps: q, k, v, the result and the log-sum-exp in fp32.
    """
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)
    out: Tensor = found[0]
    return out


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float, device: str,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Fused attention q (B, H, S, E), k and v (B, K, T, E) -> (B, H, S, E) and the log-sum-exp of each row (B, H, S).
    On a CPU a mask (S, T) is added to the scores.

    The public scaled_dot_product_attention calls the same operations, but keeps the log-sum-exp to itself, and without
    it results over parts of the keys cannot be put together.
    """
    if device == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def flash_attention_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    device: str,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v by these keys, given the result and the log-sum-exp over all keys; see flash_attention.

    Without dropout the random state is never read, and without packed lengths neither are the sums of lengths.
    """
    if device == "cpu":
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = backward(gradient, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    else:
        unread = torch.empty(2, dtype=torch.uint64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        found = backward(gradient, q, k, v, out, lse, *lengths, 0.0, causal, unread, unread[0], scale=scale)
    return found[0], found[1], found[2]


def banded_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, left: int, right: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A GPU's flash attention q (B, H, S, E), k and v (B, K, T, E) -> (B, H, S, E) and the log-sum-exp (B, H, S): query
    i sees the keys from i + T - S - left to i + T - S + right; -1 = no border. Every query must see a key.

    The operation of varlen_attention without borders of documents, which takes heads after positions.
    """
    turned = (x.transpose(1, 2) for x in (q, k, v))
    sizes = None, None, q.shape[2], k.shape[2]
    found = torch.ops.aten._flash_attention_forward(
        *turned, *sizes, 0.0, False, False, scale=scale, window_size_left=left, window_size_right=right
    )
    return found[0].transpose(1, 2), found[1]


def banded_attention_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    *, left: int, right: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of q, k and v by these keys, given result and log-sum-exp over all keys; see banded_attention."""
    turned = (x.transpose(1, 2) for x in (gradient, q, k, v, out))
    unread = torch.empty(2, dtype=torch.uint64, device=q.device)
    sizes = None, None, q.shape[2], k.shape[2]
    found = torch.ops.aten._flash_attention_backward(
        *turned, lse, *sizes, 0.0, False, unread, unread[0], scale=scale, window_size_left=left,
        window_size_right=right,
    )  # fmt: skip
    of_q, of_k, of_v = (x.transpose(1, 2) for x in found)
    return of_q, of_k, of_v


def has_flash_attention(device: str) -> bool:
    """Whether this torch has both of the above for a kind of device."""
    if device not in ("cpu", "cuda"):
        return False
    name = "_scaled_dot_product_flash_attention" + ("_for_cpu" if device == "cpu" else "")
    return hasattr(torch.ops.aten, name) and hasattr(torch.ops.aten, f"{name}_backward")


def takes_flash(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether a GPU's flash kernel, which takes no masks, takes these; the last dims are those of heads."""
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] == v.shape[-1] <= 256


def attention_backward(kernel: str) -> Any:
    """The gradient of torch's `flash` or `efficient` attention as an operation; None where this torch has none."""
    packet = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward", None)
    return packet.default if packet is not None else None


def cuda_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attn_mask: torch.Tensor | None, dropout_p: float,
    is_causal: bool, scale: float, enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    """What scaled_dot_product_attention calls on a GPU, for fake tensors that stand in for a GPU's: it would choose
    after the device that they say. AssertionError where torch would store the S x T weights: unequal heads that its
    flash kernel does not take."""
    if attn_mask is None and takes_flash(q, v):
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)
        out: torch.Tensor = found[0]
        return out
    assert not enable_gqa, "torch's other fused kernel takes equal heads only"
    bias = None
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    weighted: torch.Tensor = efficient(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]
    return weighted


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, borders: torch.Tensor, longest: int, *, window: int,
    scale: float, dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """A GPU's causal flash attention over documents one after another: q (T, H, E), k and v (T, K, E), which begin at
    `borders` (N + 1,) int32 and are `longest` at most; `window` 0 = none -> (T, H, E), the log-sum-exp (H, T), and the
    state (2,) that its dropout began with.

    torch.nn.attention.varlen calls the same operation, without dropout; see varlen_attn.
    """
    sizes = (borders, borders, longest, longest)
    found = torch.ops.aten._flash_attention_forward(
        q, k, v, *sizes, dropout, True, False, scale=scale, **_sides(window)
    )  # fmt: skip
    return found[0], found[1], found[2]


def varlen_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *borders: Any, **options: Any) -> torch.Tensor:
    """torch.nn.attention.varlen.varlen_attn, called as each torch has it: heads H may be a multiple of those of k and v
    (..., K, E), which 2.11 takes unasked and later ones where they are told. NotImplementedError for options that this
    torch has not, as `block_table` (2.12)."""
    from torch.nn.attention.varlen import varlen_attn as function

    known = inspect.signature(function).parameters
    if "enable_gqa" in known:
        options["enable_gqa"] = q.shape[-2] != k.shape[-2]
    missing = [name for name in options if name not in known]
    if missing:
        raise NotImplementedError(f"varlen_attn of torch {torch.__version__} has no {', '.join(missing)}")
    found: Any = function(q, k, v, *borders, **options)
    out: torch.Tensor = found  # log-sum-exps come with it only where they are asked for
    return out


def varlen_attention_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    borders: torch.Tensor, longest: int, *, window: int, scale: float, dropout: float = 0.0,
    random: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of q, k and v; see varlen_attention. Without dropout the random state is never read."""
    if random is None:
        random = torch.empty(2, dtype=torch.uint64, device=q.device)
    sizes = (borders, borders, longest, longest)
    found = torch.ops.aten._flash_attention_backward(
        gradient, q, k, v, out, lse, *sizes, dropout, True, random, random[0], scale=scale, **_sides(window)
    )
    return found[0], found[1], found[2]


def efficient_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A GPU's memory-efficient attention, which takes fp32, and numbers (B, H, S, T) that are added to the scores: q
    (B, H, S, E), k (B, H, T, E), v (B, H, T, V) -> (B, H, S, V), and the log-sum-exp (B, H, S up to a multiple of 32).

    scaled_dot_product_attention calls the same operation, and keeps the log-sum-exp to itself. Rows of `bias` must lie
    a multiple of 16 numbers apart.
    """
    found = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return found[0], found[1]


def efficient_attention_backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, *, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of q, k and v; see efficient_attention. Without dropout the random state is never read."""
    unread = torch.empty((), dtype=torch.int64, device=q.device)
    found = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        gradient, q, k, v, bias, out, lse, unread, unread, 0.0, [True, True, True, False], causal, scale=scale
    )
    return found[0], found[1], found[2]


def varlen_backward() -> Any:
    """The operation that does so; None where this torch has none."""
    packet = getattr(torch.ops.aten, "_flash_attention_backward", None)
    return packet.default if packet is not None else None


def _sides(window: int) -> dict[str, int]:
    """How many keys before a query and after it are seen besides its own."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}

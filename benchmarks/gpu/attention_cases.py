"""Attention as training runs it: causal, grouped heads, whole rows or documents one after another."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import exact_forms
from benchmarks.gpu.case import ATTENTION, Case, Count, Leaf, Run, implementations, taken
from meshwright import compat
from meshwright.kernels.attention import attend as ours
from meshwright.kernels.attention.varlen import borders_of
from meshwright.spec.plan.execution import has_flash_4

BACKENDS = {
    "torch flash": SDPBackend.FLASH_ATTENTION, "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip


def causal(
    length: int, heads: int, kv_heads: int, width: int, *, dtype: torch.dtype, device: torch.device
) -> Case:  # fmt: skip
    """One row; half of the square counts."""
    scale, seen = width**-0.5, torch.ones(length, length, dtype=torch.bool, device=device).tril()
    mask = ours.causal_mask(length, length, device=device)
    rivals: dict[str, Run] = {}
    if device.type == "cuda":
        rivals = {name: partial(_by_backend, backend=backend, scale=scale) for name, backend in BACKENDS.items()}
        rivals |= _flash_4("flash_attn_func", scale)
    return _case(
        "attention", f"{length:,} causal", mask, seen, [length], (heads, kv_heads, width), rivals, dtype, device
    )


def documents(
    length: int, number: int, heads: int, kv_heads: int, width: int, *, dtype: torch.dtype, device: torch.device
) -> Case:  # fmt: skip
    """So many documents of unequal lengths in one row; each sees itself only."""
    lengths = _lengths(length, number)
    document = torch.repeat_interleave(torch.arange(number), torch.tensor(lengths)).to(device)
    seen = (document[:, None] == document[None]).tril()
    mask = ours.causal_mask(length, length, documents=document[None], spans=ours.DocumentSpans(number, max(lengths)))
    rivals: dict[str, Run] = {}
    if device.type == "cuda":
        rivals = {"torch varlen": _varlen(document, lengths), "torch FlexAttention": _flex(document, length)}
        borders, longest = borders_of(document[None], number), max(lengths)
        rivals |= _flash_4(
            "flash_attn_varlen_func", width**-0.5, cu_seqlens_q=borders, cu_seqlens_k=borders, max_seqlen_q=longest,
            max_seqlen_k=longest,
        )  # fmt: skip
    size = f"{length:,} in {number} documents"
    return _case("attention", size, mask, seen, lengths, (heads, kv_heads, width), rivals, dtype, device)


def _case(
    operation: str, size: str, mask: ours.Mask, seen: Tensor, lengths: list[int], shape: tuple[int, int, int],
    rivals: dict[str, Run], dtype: torch.dtype, device: torch.device,
) -> Case:  # fmt: skip
    heads, kv_heads, width = shape
    total, scale = sum(lengths), width**-0.5
    flop = sum(2.0 * 2 * heads * width * (length * (length + 1) / 2) for length in lengths)
    q, kv = total * heads * width, 2 * total * kv_heads * width

    def run(q: Tensor, k: Tensor, v: Tensor, prefer: str) -> Tensor:
        return ours.attend(q, k, v, mask, scale=scale, prefer=prefer)

    return Case(
        operation=operation, size=f"{size}, {heads}/{kv_heads} heads of {width}", dtype=dtype,
        leaves=tuple(Leaf((1, total, number, width)) for number in (heads, kv_heads, kv_heads)),
        exact=partial(exact_forms.attention, seen=seen, scale=scale), eager=partial(_eager, seen=seen, scale=scale),
        ours=implementations("attention", run, device, dtype), chosen=taken("attention", device, dtype), rivals=rivals,
        counts={
            "forward": Count(dtype.itemsize * (2 * q + kv), flop),
            "backward": Count(dtype.itemsize * (4 * q + 2 * kv), 2.5 * flop),
        },
        kinds=(ATTENTION,) * 4, compiles=False,
    )  # fmt: skip


def _lengths(length: int, number: int) -> list[int]:
    """1 : 2 : 3 ..., which sum to `length`."""
    ends = [round(length * n * (n + 1) / (number * (number + 1))) for n in range(number + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def _eager(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Whole scores, a mask, a softmax in fp32, products in the dtype given: as transformers' eager attention."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)


def _by_backend(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel([backend]):
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return attended.transpose(1, 2)


def _varlen(document: Tensor, lengths: list[int]) -> Run:
    """torch.nn.attention.varlen."""
    borders, longest = borders_of(document[None], len(lengths)), max(lengths)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.flatten(0, 1) for x in (q, k, v))
        return compat.varlen_attn(*rows, borders, borders, longest, longest, window_size=(-1, 0)).view_as(q)

    return run


def _flash_4(name: str, scale: float, **documents: Any) -> dict[str, Run]:
    """FlashAttention 4 by one of its public functions, where it is installed; documents lie behind one another."""
    if not has_flash_4():
        return {}
    function = getattr(import_module("flash_attn.cute"), name)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.flatten(0, 1) for x in (q, k, v)) if documents else (q, k, v)
        made = function(*rows, softmax_scale=scale, causal=True, **documents)
        out: Tensor = made[0] if isinstance(made, tuple) else made
        return out.view_as(q)

    return {"FlashAttention 4": run}


def _flex(document: Tensor, length: int) -> Callable[..., Tensor]:
    """FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[query] == document[key])

    made: dict[str, Any] = {}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not made:
            made["blocks"] = create_block_mask(sees, None, None, length, length, device=document.device.type)
            made["attend"] = torch.compile(flex_attention, dynamic=False)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        attended: Tensor = made["attend"](q, k, v, block_mask=made["blocks"], enable_gqa=grouped)
        return attended.transpose(1, 2)

    return run

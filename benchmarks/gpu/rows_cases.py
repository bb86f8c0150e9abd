"""Passes over rows: norms, activations, rotary positions, the merge of partial attention."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import exact_forms, liger
from benchmarks.gpu.case import ROWS, Case, Count, Leaf, Run, implementations, taken
from meshwright.kernels import chooser
from meshwright.kernels.attention import rope
from meshwright.kernels.attention.partial import LOWEST
from meshwright.kernels.linear import swiglu
from meshwright.kernels.norm import norms

EPS = 1e-5


def rms_norm(rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """Forward: x and the result. Backward: the gradient, x, the gradient of x."""
    stream = rows * width * dtype.itemsize
    return Case(
        operation="RMSNorm", size=f"{rows:,} x {width:,}", dtype=dtype, leaves=(Leaf((rows, width)), Leaf((width,))),
        exact=exact_forms.rms_norm, eager=partial(norms.rms_norm_reference, eps=EPS),
        ours=implementations("rms_norm", partial(norms.rms_norm, eps=EPS), device, dtype),
        chosen=taken("rms_norm", device, dtype),
        rivals={"torch": lambda x, w: F.rms_norm(x, (width,), w, EPS)} | liger.offered("rms_norm", eps=EPS),
        counts={"forward": Count(2 * stream), "backward": Count(3 * stream)}, kinds=(ROWS,) * 3,
    )  # fmt: skip


def add_rms_norm(rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """Forward: two read, two written. Backward: two gradients and the sum read, one gradient written."""
    stream = rows * width * dtype.itemsize
    return Case(
        operation="add + RMSNorm", size=f"{rows:,} x {width:,}", dtype=dtype,
        leaves=(Leaf((rows, width)), Leaf((rows, width)), Leaf((width,))),
        exact=exact_forms.add_rms_norm, eager=partial(norms.add_rms_norm_reference, eps=EPS),
        ours=implementations("add_rms_norm", partial(norms.add_rms_norm, eps=EPS), device, dtype),
        chosen=taken("add_rms_norm", device, dtype), rivals=liger.offered("add_rms_norm", eps=EPS),
        counts={"forward": Count(4 * stream), "backward": Count(4 * stream)}, kinds=(ROWS,) * 5,
    )  # fmt: skip


def layer_norm(rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """As RMSNorm."""
    stream = rows * width * dtype.itemsize
    return Case(
        operation="LayerNorm", size=f"{rows:,} x {width:,}", dtype=dtype,
        leaves=(Leaf((rows, width)), Leaf((width,)), Leaf((width,))),
        exact=exact_forms.layer_norm, eager=partial(norms.layer_norm_reference, eps=EPS),
        ours=implementations("layer_norm", partial(norms.layer_norm, eps=EPS), device, dtype),
        chosen=taken("layer_norm", device, dtype), rivals=liger.offered("layer_norm", eps=EPS),
        counts={"forward": Count(2 * stream), "backward": Count(3 * stream)}, kinds=(ROWS,) * 4,
    )  # fmt: skip


def gated(rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """SwiGLU. Forward: gate and up, the result. Backward: gradient, gate and up, two gradients."""
    stream = rows * width * dtype.itemsize
    return Case(
        operation="SwiGLU", size=f"{rows:,} x {width:,}", dtype=dtype, leaves=(Leaf((rows, width)),) * 2,
        exact=exact_forms.swiglu, eager=swiglu.swiglu_reference,
        ours=implementations("swiglu", swiglu.swiglu, device, dtype), chosen=taken("swiglu", device, dtype),
        rivals=liger.offered("swiglu"),
        counts={"forward": Count(3 * stream), "backward": Count(5 * stream)}, kinds=(ROWS,) * 3,
    )  # fmt: skip


def gelu(rows: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """Forward: x and the result. Backward: the gradient, x, the gradient of x."""
    stream = rows * width * dtype.itemsize
    return Case(
        operation="GELU", size=f"{rows:,} x {width:,}", dtype=dtype, leaves=(Leaf((rows, width)),),
        exact=exact_forms.gelu, eager=swiglu.gelu_reference,
        ours=implementations("gelu", swiglu.gelu, device, dtype), chosen=taken("gelu", device, dtype),
        counts={"forward": Count(2 * stream), "backward": Count(3 * stream)}, kinds=(ROWS,) * 2,
    )  # fmt: skip


def rotary(
    tokens: int, heads: int, kv_heads: int, width: int, *, dtype: torch.dtype, device: torch.device
) -> Case:  # fmt: skip
    """Queries and keys of one sequence, read and written once in either pass."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=device).float() / width)
    angles = (torch.arange(tokens, device=device).float()[:, None] * frequencies)[None, :, None]
    cos, sin = angles.cos(), angles.sin()
    moved = 2 * tokens * (heads + kv_heads) * width * dtype.itemsize

    def ours(q: Tensor, k: Tensor, prefer: str) -> tuple[Tensor, Tensor]:
        return rope.rotate_pair(q.view_as(q), k.view_as(k), cos, sin, prefer=prefer)  # views may be written over

    def exact(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        tables = cos.double(), sin.double()
        return exact_forms.rotated(q, *tables), exact_forms.rotated(k, *tables)

    return Case(
        operation="RoPE", size=f"{tokens:,} tokens, {heads}/{kv_heads} heads of {width}", dtype=dtype,
        leaves=(Leaf((1, tokens, heads, width)), Leaf((1, tokens, kv_heads, width))), exact=exact,
        eager=lambda q, k: rope.rotate_pair_reference(q, k, cos, sin),
        ours=implementations("rope", ours, device, dtype), chosen=taken("rope", device, dtype),
        rivals=liger.rotary(cos, sin),
        counts={"forward": Count(moved), "backward": Count(moved)}, kinds=(ROWS,) * 4,
    )  # fmt: skip


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """As kernels.partial does without Triton, in place."""
    both = torch.logaddexp(lse, part_lse)
    base = both.clamp(min=LOWEST)
    out.mul_((lse - base).exp_().unsqueeze(-1)).addcmul_(part, (part_lse - base).exp_().unsqueeze(-1))
    lse.copy_(both)
    return out, lse


def _merge_in_triton(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    from meshwright.kernels.triton import flash

    flash.merge(out, lse, part, part_lse, part_lse)
    return out, lse


def _merge_new(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Plain code: the formula, in the dtype that it is given."""
    return exact_forms.merged(out, lse, part, part_lse)


def merge(tokens: int, heads: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Case:
    """Result so far and a part of it, fp32: two read, one written; training takes no gradient here."""
    size, wide = (1, heads, tokens, width), torch.float32
    ours: dict[str, Run] = {"ours, torch": _merge}
    if chooser.choice("merge", device, wide, prefer="triton").by == "triton":
        ours["ours, Triton"] = _merge_in_triton
    return Case(
        operation="merge of partial attention", size=f"{tokens:,} tokens, {heads} heads of {width}", dtype=wide,
        leaves=tuple(Leaf(size_of_leaf) for size_of_leaf in (size, size[:3], size, size[:3])), exact=exact_forms.merged,
        eager=_merge_new, ours=ours, chosen=taken("merge", device, wide),
        counts={"forward": Count(3 * 4 * tokens * heads * width)}, kinds=(ROWS,) * 2, learns=False,
    )  # fmt: skip

"""Attention behind one function: softmax(q k^T * scale + mask) v, causal."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels.attention import varlen
from meshwright.kernels.attention.gpu import attend_past, chosen_kernel, past_kernel
from meshwright.kernels.attention.partial import WIDEST, can_fuse
from meshwright.kernels.attention.varlen import borders_of
from meshwright.kernels.c import sequence_attention, training_rows
from meshwright.kernels.chooser import NARROW, device_kind, simulated_kind, uses_triton
from meshwright.kernels.linear.linear import needs_wide
from meshwright.kernels.norm.dropout import AttentionDropout, features, keep_mask
from meshwright.spec.plan.execution import Case


class DocumentSpans(NamedTuple):
    """Number, length and starts of the documents in packed rows, known on the host without asking the device."""

    number: int = 0
    """Documents in all rows. 0 = unknown."""
    longest: int = 0
    """Positions of the longest document. 0 = unknown."""
    begins: tuple[tuple[int, ...], ...] = ()
    """Start positions of the documents of each row, 0 first. Empty = unknown.

    When a rank holds part of the positions, these are the starts in whole rows.
    """


UNKNOWN = DocumentSpans()
LONG = 256 * 64
"""Positions times head width (counted up to 64) from which blocks of queries pay off."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Visibility of keys: a query sees itself and earlier positions of its document, at most `window` in all."""

    window: int = 0
    """Positions. 0 = no window."""
    documents: Tensor | None = None
    """Document of each position, (B, T) int, ascending along a row. None = a row is one document."""
    borders: Tensor | None = None
    """Starts of the documents, (N + 1,) int32, for kernels that read these (kernels.attention.varlen.borders_of)."""
    longest: Tensor | None = None
    """Positions of the longest document, () int on the host. None = a whole row."""

    @property
    def is_plain(self) -> bool:
        """True for a causal mask without window and documents."""
        return not self.window and self.documents is None

    def allowed(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return which pairs are visible, (B or 1, 1, S, T) bool, for the last `queries` of `keys` positions."""
        query = torch.arange(keys - queries, keys, device=device)[:, None]
        key = torch.arange(keys, device=device)
        visible = key <= query
        if self.window:
            visible = visible & (key > query - self.window)
        if self.documents is None:
            return visible[None, None]
        same_document = self.documents[:, -queries:, None] == self.documents[:, None, :]
        return (visible & same_document)[:, None]


def causal_mask(
    queries: int, keys: int, *, window: int = 0, documents: Tensor | None = None, spans: DocumentSpans = UNKNOWN,
    device: torch.device | None = None,
) -> Mask:  # fmt: skip
    """Return the mask of the last `queries` positions over `keys` positions.

    Args:
        window: A query sees itself and the window - 1 positions before it.
        documents: (B, keys) int, ascending along a row. No query sees another document.
        spans: Number of documents and longest one. Without them a GPU is waited for.
    """
    # A window as long as the row hides nothing, and without one faster kernels take the call.
    window = window if window < keys else 0
    if documents is None or queries != keys or device_kind(documents) == "cpu":
        return Mask(window, documents)
    longest = torch.tensor(spans.longest or keys, device="cpu")
    return Mask(window, documents, borders_of(documents, spans.number), longest)


NARROW_VECTORS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT")
"""True for a CPU without AVX-512.

Asked once: the compiler cannot trace the question and would split a block there.
"""
WIDEST_IN_TRITON = 128
"""Widest head for which the Triton kernel was compiled and its shared memory checked."""
MOST_IN_TRITON = 65535
"""Most documents that a grid of programs can hold."""


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float, dropout: AttentionDropout | None = None
) -> Tensor:  # fmt: skip
    """Attend q (B, S, H, E) over k (B, T, K, E) and v (B, T, K, V). Returns (B, S, H, V).

    Query head h reads key head h // (H / K).
    """
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bshe,bthe->bhst", q.float(), k.float()) * scale
    allowed = mask.allowed(q.shape[1], k.shape[1], q.device)
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    if dropout is not None:
        rows, columns = dropout.rows.transpose(1, 2), features(0, k.shape[1], k.device)
        weights = weights * keep_mask(rows, columns, dropout.rate) * dropout.growth
    return torch.einsum("bhst,bthv->bshv", weights, v.float()).to(q.dtype)


def _expand(x: Tensor, heads: int) -> Tensor:
    """Repeat each of K heads H / K times: (B, T, K, E) -> (B, T, H, E)."""
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def wants_loops(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether the compiled C loops are fastest for q (B, S, H, E), k (B, S, K, E) and v (B, S, K, V).

    They take a half to a third of the time of the other two forms. Below 256 positions of 64 dims the answer is no: a
    process would rather not wait for the C compiler.
    """
    long = q.shape[1] * min(q.shape[3], 64) >= LONG
    return long and device_kind(q) == "cpu" and sequence_attention.takes_heads(q, k, v)


def prefers_blockwise(q: Tensor, mask: Mask) -> bool:
    """Return whether the blockwise form beats torch's fused kernel on this CPU, from 256 positions of 64 dims on.

    With AVX2 it does, by 1.1 to 1.5. On AMD processors with AVX-512, where torch's kernel multiplies by MKL:
    - 16 bits (oneDNN's products): by 1.8 at 512 positions, 1.2 at 2,048, not at 8,192.
    - fp32: by 1.2 at 512 positions, not from 2,048 on.
    - With documents: no, oneDNN would compile code for each new length.

    Other CPUs with wide vectors keep torch's kernel, which was written for them.
    """
    work = q.shape[1] * min(q.shape[3], 64)
    if device_kind(q) != "cpu" or work < LONG:
        return False
    if NARROW_VECTORS or not compat.blas_is_slow():
        return NARROW_VECTORS
    return mask.documents is None and work <= (16 if compat.cpu_multiplies(q.dtype) else 4) * LONG


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float, dropout: AttentionDropout | None = None,
    prefer: str = "auto",
) -> Tensor:  # fmt: skip
    """Attend as the reference does, without storing the S x T weights.

    With dropout every device runs the blockwise form, whose masks do not depend on the layout. Otherwise a CPU runs the
    compiled loops. Without these it runs torch's scaled_dot_product_attention, or the blockwise form where that is
    faster. Documents and windows go through kernels/attention/varlen.py, which skips
    hidden pairs. Only queries over past keys use a mask tensor, and not in 16 bits on a GPU.

    On a GPU only flash attention accepts unequal heads. It accepts no mask tensors, no fp32 and no heads wider than
    256. There torch would fall back to the S x T form, so keys and values are repeated first.

    A CPU without 16-bit matrix units attends in fp32. Values narrower than the keys (MLA) are padded with zeros for the
    fused kernels, which need equal widths, and the padding is cut off again.
    """
    dtype, width, rate = q.dtype, v.shape[-1], 0.0 if dropout is None else dropout.rate
    if uses_triton("attention", q, prefer=prefer, feature=triton_obstacle(q, k, v, mask, rate)):
        return _in_triton(q, k, v, mask, scale)
    kernel = choose_kernel(q, k, v, mask, rate)
    if kernel == "past":
        return attend_past(q, k, v, window=mask.window, scale=scale)
    if kernel not in ("torch", "cudnn"):
        drops = (0.0, None) if dropout is None else dropout
        form = varlen.AttentionForm(mask.documents, mask.borders, mask.longest, mask.window, scale, kernel, *drops)
        return varlen.attend(q, k, v, form)
    allowed, causal = _sdpa_mask(q, k, mask)
    q, k, v, grouped = _sdpa_inputs(q, k, v, allowed)
    if kernel == "cudnn":
        return compat.cudnn_attention(q, k, v, scale=scale).transpose(1, 2)
    fused = compat.cuda_attention if simulated_kind() == "cuda" else F.scaled_dot_product_attention
    out: Tensor = fused(q, k, v, attn_mask=allowed, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)[..., :width].to(dtype)


def triton_obstacle(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> str:
    """Return why the Triton kernel cannot run this attention. Empty = it can."""
    if q.shape[1] != k.shape[1]:
        return "queries are fewer than keys"
    if q.shape[-1] != v.shape[-1]:
        return "values are narrower than keys"
    if q.shape[-1] > WIDEST_IN_TRITON:
        return f"heads wider than {WIDEST_IN_TRITON}"
    if mask.borders is not None and len(mask.borders) > MOST_IN_TRITON:
        return f"more documents than {MOST_IN_TRITON}"
    return "a window" if mask.window else "dropout" if dropout else ""


def _in_triton(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """Attend in Triton over rows, or their documents, laid end to end."""
    from meshwright.kernels.triton import flash

    rows, length = q.shape[:2]
    borders = mask.borders
    if borders is None and mask.documents is not None:
        borders = borders_of(mask.documents, 0)
    if borders is None:
        borders = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=q.device)
    longest = length if mask.longest is None else int(mask.longest)
    out, _ = flash.attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), borders, longest, scale=scale)
    return out.view(rows, length, *out.shape[1:])


def gpu_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> str:
    """Return `cudnn`, `flash-4` or `flash`: the GPU kernel for q (B, S, H, E) over as many keys.

    The table is in spec/plan/execution.py. A dry run models flash, which saves the same tensors as the
    others.
    """
    if simulated_kind() or q.device.type != "cuda" or q.dtype not in NARROW:
        return "flash"
    case = case_of(mask)
    if case == "rows" and not torch.is_grad_enabled():
        if torch.compiler.is_compiling():
            # The compiler does not see through the call of a library.
            return "flash"
        case = "cache"
    # Only numbers go in, so the compiler may take the answer for a constant.
    about = (q.device, q.dtype, case, q.shape[1], q.shape[3], v.shape[3], q.shape[2] // k.shape[2])
    kernel: str = chosen_kernel(*about, torch.is_grad_enabled())
    return kernel


def _is_banded(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> bool:
    """Return whether a GPU's flash kernel takes queries over past keys by numbers, without an S x T mask.

    Not with gradients, whose kernels are called in other ways. A single query that sees all keys needs no border.
    """
    sees_all_keys = q.shape[1] == 1 and not mask.window
    if q.shape[1] == k.shape[1] or sees_all_keys or mask.documents is not None or dropout or device_kind(q) != "cuda":
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    return v.shape[-1] <= q.shape[-1] and can_fuse(q, k)


def _loops_pay(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> bool:
    # The library is asked last: the first answer on a machine starts the C compiler.
    return wants_loops(q, k, v) and training_rows.is_compiled()


def _drops(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> bool:
    return bool(dropout)


def _blocks_pay(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> bool:
    return q.requires_grad and prefers_blockwise(q, mask)


def _is_traced_in_fp32(q: Tensor, *_: object) -> bool:
    return torch.compiler.is_compiling() and q.dtype == torch.float32


def _fuses(q: Tensor, k: Tensor, v: Tensor, *_: object) -> bool:
    return v.shape[-1] <= WIDEST and can_fuse(q, k)


def _strips_run(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> bool:
    return device_kind(q) == "cuda"


def _always(*_: object) -> bool:
    return True


CHOICES: dict[tuple[str, str], tuple[tuple[Callable[..., bool], str], ...]] = {
    ("cpu", "plain"): (
        (_drops, "blocks"),
        (_loops_pay, "loops"),
        # The compiler sees through torch's kernel, not through blocks.
        (_is_traced_in_fp32, "torch"),
        (_blocks_pay, "blocks"),
        (_always, "torch"),
    ),
    ("cpu", "packed"): (
        (_drops, "blocks"),
        (_loops_pay, "loops"),
        (_blocks_pay, "blocks"),
        (_fuses, "flash"),
        (_always, "blocks"),
    ),
    ("cpu", "past"): ((_always, "torch"),),
    ("gpu", "plain"): ((_drops, "blocks"), (_always, "gpu")),
    ("gpu", "packed"): ((_drops, "blocks"), (_fuses, "gpu"), (_strips_run, "strips"), (_always, "blocks")),
    ("gpu", "past"): ((_is_banded, "past"), (_always, "torch")),
}
"""Kernels by device and form of a call. The first that takes the call runs it. Queries over past keys have no dropout.

Forms: plain causal rows, packed documents or a window, fewer queries than keys over past ones. Kernels: `torch` for
scaled_dot_product_attention, `past` for gpu.attend_past, `gpu` for what gpu_kernel says, else a way of varlen.py.
"""


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dropout: float) -> str:
    """Return the kernel of CHOICES, or `cudnn`, for q (B, S, H, E), k (B, T, K, E) and v (B, T, K, V)."""
    form = "past" if q.shape[1] != k.shape[1] else "plain" if mask.is_plain else "packed"
    device = "cpu" if device_kind(q) == "cpu" else "gpu"
    for takes, kernel in CHOICES[device, form]:
        if takes(q, k, v, mask, dropout):
            if kernel != "gpu":
                return kernel
            library = gpu_kernel(q, k, v, mask)
            # Plain rows have no borders. torch's own call runs flash for them, and flash-4 takes them as a prompt.
            return library if form == "packed" else {"flash": "torch", "flash-4": "past"}.get(library, library)
    raise AssertionError(f"no kernel of {device, form} takes every call")


def backend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float, dropout: float = 0.0) -> str:
    """Name the kernel that `attend` runs for the same arguments.

    One of compiled loops, blockwise, or torch's flash, cudnn, efficient or math.
    """
    kernel = choose_kernel(q, k, v, mask, dropout)
    if kernel == "past":
        return past_kernel(q, k, v)
    if kernel != "torch":
        return {"blocks": "blockwise", "strips": "efficient", "loops": "compiled loops"}.get(kernel, kernel)
    allowed, _ = _sdpa_mask(q, k, mask)
    q, k, v, grouped = _sdpa_inputs(q, k, v, allowed)
    if simulated_kind() == "cuda":
        return "flash" if allowed is None and compat.supports_flash(q, v) else "efficient"
    return compat.choose_attention(q, k, v, allowed, scale=scale, grouped=grouped)


def case_of(mask: Mask) -> Case:
    """Return the row of that table for a mask."""
    return "window" if mask.window else "rows" if mask.documents is None else "documents"


def _sdpa_mask(q: Tensor, k: Tensor, mask: Mask) -> tuple[Tensor | None, bool]:
    """Return (attn_mask, is_causal) for torch's kernel. A single query that sees all keys needs neither."""
    if mask.is_plain and q.shape[1] == k.shape[1]:
        return None, True
    if mask.is_plain and q.shape[1] == 1:
        return None, False
    return mask.allowed(q.shape[1], k.shape[1], q.device), False


def _sdpa_inputs(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return q, k, v (B, heads, positions, width) as torch's fused kernels take them, and if heads are unequal."""
    if needs_wide(q):
        q, k, v = q.float(), k.float(), v.float()
    grouped = q.shape[2] != k.shape[2]
    if v.shape[-1] < q.shape[-1] and (device_kind(q) == "cpu" or (allowed is None and compat.supports_flash(q, q))):
        v = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    # Only flash takes unequal heads on a GPU: for others torch would fall back to the S x T form.
    if grouped and device_kind(q) == "cuda" and not (allowed is None and compat.supports_flash(q, v)):
        k, v, grouped = _expand(k, q.shape[2]), _expand(v, q.shape[2]), False
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), grouped

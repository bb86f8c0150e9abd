"""Paged store of keys, or values: numbers, or codes of 8 bits with a scale for each position and head.

    int8    q = round(r / S), S = max |r| / 127
    fp8     q = r / S rounded to e4m3, S = max |r| / 448

Positions lie in blocks. A position's codes depend on its own numbers alone. Letters: K heads, E width of a head.
"""

from typing import final

import torch
from torch import Tensor

from meshwright.kernels.attention.rope import rotate_reference
from meshwright.kernels.c.serving_library import Loops
from meshwright.kernels.norm.norms import rms_norm_reference
from meshwright.kernels.quantized.rounding import E4M3, absmax_scale, e4m3_scale, highest
from meshwright.spec.plan.execution import CacheForm


@final
class PagedStore:
    """Blocks of positions, initially zero."""

    def __init__(self, size: tuple[int, int, int, int], like: Tensor, form: CacheForm) -> None:
        """Allocate a store.

        Args:
            size: Blocks, positions of a block, K, E.
            like: Tensor whose device and dtype reads have.
            form: Stored format.
        """
        self.form, self.dtype, self.sizes = form, like.dtype, size
        dtypes = {"model": like.dtype, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
        self.codes = torch.zeros(size, dtype=dtypes[form], device=like.device)
        self.scales = None if form == "model" else torch.zeros(size[:3], dtype=torch.float32, device=like.device)

    @property
    def tensors(self) -> list[Tensor]:
        """Everything stored, by blocks."""
        bits = self.codes.view(torch.uint8) if self.form == "fp8" else self.codes
        return [bits] if self.scales is None else [bits, self.scales]

    @property
    def bytes(self) -> int:
        """Size of all blocks."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self, slots: Tensor, new: Tensor, loops: Loops | None = None) -> None:
        """Write new (N, K, E) to slots (N,): block * size + position within."""
        if self.scales is None and loops is not None:
            loops.store_floats(new, slots, self.codes)
        elif self.scales is None:
            self.codes.flatten(0, 1).index_copy_(0, slots, new)
        elif self.form == "int8" and loops is not None:
            loops.store_int8(new, slots, self.codes, self.scales)
        else:
            codes, scales = encoded(new, self.form)
            for store, numbers in zip(self.tensors, (codes.view(self.tensors[0].dtype), scales), strict=True):
                store.flatten(0, 1).index_copy_(0, slots, numbers)

    def read(self, blocks: Tensor | slice) -> Tensor:
        """Return the numbers of blocks (M,), or of a run of them: (M, size, K, E)."""
        if isinstance(blocks, slice):
            parts = [tensor[blocks] for tensor in self.tensors]
        else:
            parts = [x.flatten(1).index_select(0, blocks).view(-1, *x.shape[1:]) for x in self.tensors]
        if len(parts) == 1:
            return parts[0]
        codes = parts[0].view(torch.float8_e4m3fn) if self.form == "fp8" else parts[0]
        return codes.float().mul_(parts[1].unsqueeze(-1)).to(self.dtype)


def encoded(numbers: Tensor, form: CacheForm) -> tuple[Tensor, Tensor]:
    """Encode numbers (N, K, E) as codes (N, K, E) and scales (N, K) fp32."""
    peak = numbers.float().abs().amax(-1)
    if form == "fp8":
        scales = e4m3_scale(peak)
        return (numbers.float() / scales.unsqueeze(-1)).clamp_(-E4M3, E4M3).to(torch.float8_e4m3fn), scales
    scales = absmax_scale(peak, 8)
    codes = (numbers.float() / scales.unsqueeze(-1)).round_().clamp_(-highest(8), highest(8))
    return codes.to(torch.int8), scales


def turn_and_keep_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: PagedStore, values: PagedStore, *,
    interleaved: bool, norms: tuple[Tensor, Tensor, float] | None,
) -> None:  # fmt: skip
    """Normalize and rotate q (N, H, E) and k (N, K, E) in place, and write k and v to slots (N,) of the stores.

    cos and sin (N, E / 2) fp32. `norms`: weights (E,) of q and k, and eps.
    """
    for x, weight in zip((q, k), (None, None) if norms is None else norms[:2], strict=True):
        normed = x if weight is None or norms is None else rms_norm_reference(x, weight, norms[2])
        x.copy_(rotate_reference(normed.unsqueeze(0), cos[None, :, None], sin[None, :, None], interleaved)[0])
    keys.write(slots, k)
    values.write(slots, v)


def turn_and_keep(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: PagedStore, values: PagedStore, *,
    interleaved: bool, norms: tuple[Tensor, Tensor, float] | None,
) -> bool:  # fmt: skip
    """Do as the reference in one Triton kernel. Returns False, with nothing done, where it cannot take these."""
    from meshwright.kernels.triton import cache_write, paged

    if (
        not cache_write.is_taken(q, k, v)
        or keys.sizes[3] != q.shape[2]
        or not (values.sizes[3] == v.shape[2] == k.shape[2])
    ):
        return False
    stores = (paged.BlockStore(store.codes, store.scales) for store in (keys, values))
    cache_write.turn_and_keep(
        q, k, v, cos, sin, slots, *stores, interleaved=interleaved,
        norms=None if norms is None else cache_write.HeadNorms(*norms),
    )  # fmt: skip
    return True

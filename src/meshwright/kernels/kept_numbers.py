"""Keys, or values, of many positions, as numbers or as codes of 8 bits with a scale for each position and head.

    int8    q = round(r / S), S = max |r| / 127
    fp8     q = r / S rounded to e4m3, S = max |r| / 448

Positions lie in blocks. A position's codes depend on its own numbers alone. Letters: K heads, E width of a head.
"""

from typing import final

import torch
from torch import Tensor

from meshwright.kernels.compiled.library import Loops
from meshwright.kernels.norm import rms_norm_reference
from meshwright.kernels.quantization import E4M3, absmax_scale, e4m3_scale, highest
from meshwright.kernels.rope import rotate_reference
from meshwright.spec.serving_defaults import CacheForm


@final
class KeptNumbers:
    """A store of blocks, zero at first."""

    def __init__(self, room: tuple[int, int, int, int], like: Tensor, form: CacheForm) -> None:
        """`room`: blocks, positions of one, K, E. What is read is in the dtype of `like`, on its device."""
        self.form, self.dtype, self.sizes = form, like.dtype, room
        kinds = {"model": like.dtype, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
        self.codes = torch.zeros(room, dtype=kinds[form], device=like.device)
        self.scales = None if form == "model" else torch.zeros(room[:3], dtype=torch.float32, device=like.device)

    @property
    def tensors(self) -> list[Tensor]:
        """All that is kept, by blocks."""
        bits = self.codes.view(torch.uint8) if self.form == "fp8" else self.codes
        return [bits] if self.scales is None else [bits, self.scales]

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return sum(one.nbytes for one in self.tensors)

    def write(self, slots: Tensor, new: Tensor, loops: Loops | None = None) -> None:
        """new (N, K, E) to slots (N,): block * size + position within."""
        if self.scales is None and loops is not None:
            loops.keep_floats(new, slots, self.codes)
        elif self.scales is None:
            self.codes.flatten(0, 1).index_copy_(0, slots, new)
        elif self.form == "int8" and loops is not None:
            loops.keep_int8(new, slots, self.codes, self.scales)
        else:
            codes, scales = encoded(new, self.form)
            for store, some in zip(self.tensors, (codes.view(self.tensors[0].dtype), scales), strict=True):
                store.flatten(0, 1).index_copy_(0, slots, some)

    def taken(self, blocks: Tensor | slice) -> Tensor:
        """Numbers of blocks (some,), or of a run of them -> (some, size, K, E)."""
        if isinstance(blocks, slice):
            found = [one[blocks] for one in self.tensors]
        else:
            found = [one.flatten(1).index_select(0, blocks).view(-1, *one.shape[1:]) for one in self.tensors]
        if len(found) == 1:
            return found[0]
        codes = found[0].view(torch.float8_e4m3fn) if self.form == "fp8" else found[0]
        return codes.float().mul_(found[1].unsqueeze(-1)).to(self.dtype)


def encoded(numbers: Tensor, form: CacheForm) -> tuple[Tensor, Tensor]:
    """numbers (N, K, E) -> codes (N, K, E) and scales (N, K) fp32."""
    peak = numbers.float().abs().amax(-1)
    if form == "fp8":
        scales = e4m3_scale(peak)
        return (numbers.float() / scales.unsqueeze(-1)).clamp_(-E4M3, E4M3).to(torch.float8_e4m3fn), scales
    scales = absmax_scale(peak, 8)
    codes = (numbers.float() / scales.unsqueeze(-1)).round_().clamp_(-highest(8), highest(8))
    return codes.to(torch.int8), scales


def turn_and_keep_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: KeptNumbers, values: KeptNumbers, *,
    interleaved: bool, norms: tuple[Tensor, Tensor, float] | None,
) -> None:  # fmt: skip
    """Norm (weights (E,) of q and k, eps) and turn q (N, H, E) and k (N, K, E) in their own memory; write k and v to
    slots (N,) of the stores. cos and sin (N, E / 2) fp32."""
    for x, weight in zip((q, k), (None, None) if norms is None else norms[:2], strict=True):
        normed = x if weight is None or norms is None else rms_norm_reference(x, weight, norms[2])
        x.copy_(rotate_reference(normed.unsqueeze(0), cos[None, :, None], sin[None, :, None], interleaved)[0])
    keys.write(slots, k)
    values.write(slots, v)


def turn_and_keep(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: KeptNumbers, values: KeptNumbers, *,
    interleaved: bool, norms: tuple[Tensor, Tensor, float] | None,
) -> bool:  # fmt: skip
    """As the reference, in one Triton kernel. False where it does not take these tensors, and has done nothing."""
    from meshwright.kernels.triton import keeping, paged

    if (
        not keeping.is_taken(q, k, v)
        or keys.sizes[3] != q.shape[2]
        or not (values.sizes[3] == v.shape[2] == k.shape[2])
    ):
        return False
    stores = (paged.BlockStore(store.codes, store.scales) for store in (keys, values))
    keeping.turn_and_keep(
        q, k, v, cos, sin, slots, *stores, interleaved=interleaved,
        norms=None if norms is None else keeping.HeadNorms(*norms),
    )  # fmt: skip
    return True

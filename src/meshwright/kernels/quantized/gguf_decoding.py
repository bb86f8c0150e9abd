"""Decode blocks of GGUF files to fp32. Layouts are those of ggml-common.h.

    Q8_0   d fp16, 32 codes int8                        d q
    Q4_0   d fp16, 16 bytes: code i and i + 16          d (q - 8)
    Q4_1   d, m fp16, the same                          d q + m
    Q5_0   d, 4 bytes of fifth bits, the same           d (q - 16)
    Q5_1   d, m, the same                               d q + m
    Q2_K   16 bytes: scale s and minimum t of 4 bits of 16 numbers, 64 bytes, d, m   (d s) q - (m t)
    Q3_K   32 bytes of third bits, 64 bytes, 16 scales of 6 bits, d   (d (s - 32)) (q - 4)
    Q4_K   d, m, 8 scales and 8 minima of 6 bits, 128 bytes   (d s) q - (m t), s and t of 32 numbers
    Q5_K   the same with 32 bytes of fifth bits
    Q6_K   128 bytes, 64 bytes of upper bits, 16 scales int8, d   (d s) (q - 32), s of 16 numbers
    IQ4_NL d, 16 bytes as Q4_0           d v[q], v of 16 uneven steps
    IQ4_XS d, 8 scales of 6 bits, 128 bytes   (d (s - 32)) v[q], s of 32 numbers

Products are taken in this order, which makes results bit-identical to those of the `gguf` package.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from meshwright.spec.weights.gguf_schemes import BLOCK_TYPES, SUPER

UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Steps of the IQ4 types (ggml-common.h)."""
FLOAT_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of the types without blocks."""


def decode(kind: str, stored: Tensor) -> Tensor:
    """Decode bytes (..., bytes of a row) uint8 to numbers (..., K) in fp32. Types without blocks keep their dtype."""
    if kind in FLOAT_DTYPES:
        return stored.contiguous().view(FLOAT_DTYPES[kind])
    block_type = BLOCK_TYPES[kind]
    blocks = stored.reshape(-1, block_type.bytes)
    return _DECODERS[kind](blocks).reshape(*stored.shape[:-1], stored.shape[-1] // block_type.bytes * block_type.block)


def halves(blocks: Tensor, start: int) -> Tensor:
    """Read the fp16 number at a byte of each block: (N, 1) fp32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """Unpack bytes (N, groups, B) to codes (N, groups, 2 B): the lower halves of a group, then the upper ones."""
    return torch.cat((packed & 0xF, packed >> 4), dim=-1)


def _shifted(packed: Tensor, bits: int, count: int) -> Tensor:
    """Split bytes (N, groups, B) into bit fields (N, groups * count, B), lowest bits first."""
    shifts = torch.arange(0, bits * count, bits, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    fields: Tensor = (packed.unsqueeze(2) >> shifts) & (2**bits - 1)
    return fields.flatten(1, 2)


def _fifths(packed: Tensor) -> Tensor:
    """Unpack 4 bytes of fifth bits (N, 4) to (N, 32), each 0 or 16."""
    return _shifted(packed.unsqueeze(2), 1, 8).view(len(packed), 32) << 4


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * halves(blocks, 0)


def _q4_0(blocks: Tensor) -> Tensor:
    return halves(blocks, 0) * (nibbles(blocks[:, None, 2:]).squeeze(1).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return halves(blocks, 0) * nibbles(blocks[:, None, 4:]).squeeze(1).float() + halves(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = nibbles(blocks[:, None, 6:]).squeeze(1) | _fifths(blocks[:, 2:6])
    return halves(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = nibbles(blocks[:, None, 8:]).squeeze(1) | _fifths(blocks[:, 4:8])
    return halves(blocks, 0) * codes.float() + halves(blocks, 2)


def scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack 12 bytes (N, 12) to 8 scales and 8 minima of 6 bits, (N, 8) uint8 each."""
    low, high, rest = packed.view(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 0x3F, (rest & 0xF) | ((low >> 2) & 0x30)), dim=1)
    return scales, torch.cat((high & 0x3F, (rest >> 4) | ((high >> 2) & 0x30)), dim=1)


def k_steps(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return step and minimum of each 32 numbers of Q4_K and Q5_K, (N, 8, 1) fp32."""
    scales, minima = scales_and_minima(blocks[:, 4:16])
    return (halves(blocks, 0) * scales.float()).unsqueeze(2), (halves(blocks, 2) * minima.float()).unsqueeze(2)


def _q2_k(blocks: Tensor) -> Tensor:
    packed_steps, codes = blocks[:, :16], _shifted(blocks[:, 16:80].view(-1, 2, 32), 2, 4).view(-1, 16, 16)
    steps, minima = halves(blocks, 80) * (packed_steps & 0xF).float(), halves(blocks, 82) * (packed_steps >> 4).float()
    return (steps.unsqueeze(2) * codes.float() - minima.unsqueeze(2)).view(-1, SUPER)


def _q3_k(blocks: Tensor) -> Tensor:
    lower = _shifted(blocks[:, 32:96].view(-1, 2, 32), 2, 4)
    codes = lower | _shifted(blocks[:, None, :32], 1, 8) << 2
    scales = nibbles(blocks[:, None, 96:104]).squeeze(1) | _shifted(blocks[:, None, 104:108], 2, 4).flatten(1) << 4
    steps = (halves(blocks, 108) * (scales.float() - 32)).unsqueeze(2)
    return (steps * (codes.view(-1, 16, 16).float() - 4)).view(-1, SUPER)


def _uneven(codes: Tensor) -> Tensor:
    table = torch.tensor(UNEVEN, dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return halves(blocks, 0) * _uneven(nibbles(blocks[:, None, 2:]).squeeze(1))


def _iq4_xs(blocks: Tensor) -> Tensor:
    lower = torch.stack((blocks[:, 4:8] & 0xF, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    upper = _shifted(blocks[:, 2:4].unsqueeze(2), 2, 4).flatten(1)
    steps = halves(blocks, 0) * ((lower | upper << 4).float() - 32)
    return (steps.unsqueeze(2) * _uneven(nibbles(blocks[:, 8:].view(-1, 8, 16)))).view(-1, SUPER)


def _q4_k(blocks: Tensor) -> Tensor:
    step, minimum = k_steps(blocks)
    codes = _shifted(blocks[:, 16:].view(-1, 4, 32), 4, 2)
    return (step * codes.float() - minimum).view(-1, SUPER)


def _q5_k(blocks: Tensor) -> Tensor:
    step, minimum = k_steps(blocks)
    upper = _shifted(blocks[:, None, 16:48], 1, 8) << 4
    codes = _shifted(blocks[:, 48:].view(-1, 4, 32), 4, 2) | upper
    return (step * codes.float() - minimum).view(-1, SUPER)


def _q6_k(blocks: Tensor) -> Tensor:
    lower = _shifted(blocks[:, :128].view(-1, 2, 64), 4, 2).view(-1, 8, 32)
    upper = _shifted(blocks[:, 128:192].view(-1, 2, 32), 2, 4) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    steps = (halves(blocks, 208) * scales).unsqueeze(2)
    codes = (lower | upper).view(-1, 16, 16).float() - 32
    return (steps * codes).view(-1, SUPER)


_DECODERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k, "Q2_K": _q2_k, "Q3_K": _q3_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip

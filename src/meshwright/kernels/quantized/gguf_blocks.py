"""Blocks of GGUF files: decoded to fp32, and encoded. Layouts are those of ggml-common.h.

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

Encoded Q8_0, Q4_0, Q5_0 and Q5_1 equal the reference to the bit: one step per block, from its extreme numbers. The K
types search step and minimum of each group as the reference does, over some twenty candidates with a least-squares fit
each. Then each rounded scale of a block is also tried one up and one down, and the best stays. The reference stops
before that.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from meshwright.spec.weights.gguf_schemes import BLOCK_TYPES, SUPER

UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Steps of the IQ4 types (ggml-common.h)."""
FLOAT_DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of the types without blocks."""
CHUNK = 2**16
"""Numbers encoded at once: the search holds ten times as much, and is fastest inside the cache."""
NEXT = (0, -1, 1)
"""Changes of a rounded scale that are tried. The first one wins ties."""


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


def _decode_q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * halves(blocks, 0)


def _decode_q4_0(blocks: Tensor) -> Tensor:
    return halves(blocks, 0) * (nibbles(blocks[:, None, 2:]).squeeze(1).float() - 8)


def _decode_q4_1(blocks: Tensor) -> Tensor:
    return halves(blocks, 0) * nibbles(blocks[:, None, 4:]).squeeze(1).float() + halves(blocks, 2)


def _decode_q5_0(blocks: Tensor) -> Tensor:
    codes = nibbles(blocks[:, None, 6:]).squeeze(1) | _fifths(blocks[:, 2:6])
    return halves(blocks, 0) * (codes.float() - 16)


def _decode_q5_1(blocks: Tensor) -> Tensor:
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


def _decode_q2_k(blocks: Tensor) -> Tensor:
    packed_steps, codes = blocks[:, :16], _shifted(blocks[:, 16:80].view(-1, 2, 32), 2, 4).view(-1, 16, 16)
    steps, minima = halves(blocks, 80) * (packed_steps & 0xF).float(), halves(blocks, 82) * (packed_steps >> 4).float()
    return (steps.unsqueeze(2) * codes.float() - minima.unsqueeze(2)).view(-1, SUPER)


def _decode_q3_k(blocks: Tensor) -> Tensor:
    lower = _shifted(blocks[:, 32:96].view(-1, 2, 32), 2, 4)
    codes = lower | _shifted(blocks[:, None, :32], 1, 8) << 2
    scales = nibbles(blocks[:, None, 96:104]).squeeze(1) | _shifted(blocks[:, None, 104:108], 2, 4).flatten(1) << 4
    steps = (halves(blocks, 108) * (scales.float() - 32)).unsqueeze(2)
    return (steps * (codes.view(-1, 16, 16).float() - 4)).view(-1, SUPER)


def _uneven(codes: Tensor) -> Tensor:
    table = torch.tensor(UNEVEN, dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def _decode_iq4_nl(blocks: Tensor) -> Tensor:
    return halves(blocks, 0) * _uneven(nibbles(blocks[:, None, 2:]).squeeze(1))


def _decode_iq4_xs(blocks: Tensor) -> Tensor:
    lower = torch.stack((blocks[:, 4:8] & 0xF, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    upper = _shifted(blocks[:, 2:4].unsqueeze(2), 2, 4).flatten(1)
    steps = halves(blocks, 0) * ((lower | upper << 4).float() - 32)
    return (steps.unsqueeze(2) * _uneven(nibbles(blocks[:, 8:].view(-1, 8, 16)))).view(-1, SUPER)


def _decode_q4_k(blocks: Tensor) -> Tensor:
    step, minimum = k_steps(blocks)
    codes = _shifted(blocks[:, 16:].view(-1, 4, 32), 4, 2)
    return (step * codes.float() - minimum).view(-1, SUPER)


def _decode_q5_k(blocks: Tensor) -> Tensor:
    step, minimum = k_steps(blocks)
    upper = _shifted(blocks[:, None, 16:48], 1, 8) << 4
    codes = _shifted(blocks[:, 48:].view(-1, 4, 32), 4, 2) | upper
    return (step * codes.float() - minimum).view(-1, SUPER)


def _decode_q6_k(blocks: Tensor) -> Tensor:
    lower = _shifted(blocks[:, :128].view(-1, 2, 64), 4, 2).view(-1, 8, 32)
    upper = _shifted(blocks[:, 128:192].view(-1, 2, 32), 2, 4) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    steps = (halves(blocks, 208) * scales).unsqueeze(2)
    codes = (lower | upper).view(-1, 16, 16).float() - 32
    return (steps * codes).view(-1, SUPER)


_DECODERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _decode_q8_0,
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q5_0": _decode_q5_0,
    "Q5_1": _decode_q5_1,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
    "Q2_K": _decode_q2_k,
    "Q3_K": _decode_q3_k,
    "IQ4_NL": _decode_iq4_nl,
    "IQ4_XS": _decode_iq4_xs,
}


def encode(kind: str, weight: Tensor) -> Tensor:
    """Encode numbers (..., K) as bytes (..., bytes of a row) uint8. K is a whole number of blocks."""
    if kind in FLOAT_DTYPES:
        return weight.to(FLOAT_DTYPES[kind]).contiguous().view(torch.uint8)
    block_type = BLOCK_TYPES[kind]
    blocks = weight.reshape(-1, block_type.block)
    parts = [_ENCODERS[kind](chunk.float()) for chunk in blocks.split(max(1, CHUNK // block_type.block))]
    return torch.cat(parts).reshape(*weight.shape[:-1], weight.shape[-1] // block_type.block * block_type.bytes)


def _bytes(numbers: Tensor) -> Tensor:
    """View fp16 or int8 numbers (N, n) as bytes."""
    return numbers.contiguous().view(torch.uint8)


def _inverse(step: Tensor) -> Tensor:
    return torch.where(step == 0, torch.zeros_like(step), 1 / step)


def _rounded_away(x: Tensor) -> Tensor:
    """Round halves away from zero, as C does."""
    # torch.round goes to the even number, and adding 0.5 to a float just below a half would round it up.
    size = x.abs()
    whole = size.floor()
    return x.sign() * (whole + (2 * (size - whole)).floor())


def _packed(codes: Tensor) -> Tensor:
    """Pack codes (N, groups, 2 B) uint8 below 16 into bytes (N, groups, B), the first half in the lower bits."""
    lower, upper = codes.chunk(2, dim=-1)
    return lower | (upper << 4)


def _stacked(bits: Tensor, width: int) -> Tensor:
    """Pack fields (N, count, B) of `width` bits each into bytes (N, B), the first in the lowest bits."""
    shifts = torch.arange(0, width * bits.shape[1], width, dtype=torch.uint8, device=bits.device).view(1, -1, 1)
    return (bits << shifts).sum(1, dtype=torch.int32).to(torch.uint8)


def _encode_q8_0(x: Tensor) -> Tensor:
    step = x.abs().amax(1, keepdim=True) / 127
    return torch.cat((_bytes(step.half()), _bytes(_rounded_away(x * _inverse(step)).to(torch.int8))), dim=1)


def _signed(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return step (N, 1) fp16 and codes (N, 32) uint8 for which the number largest in size is exactly -half steps."""
    peak = x.gather(1, x.abs().argmax(1, keepdim=True))
    step = peak / -half
    codes = (x * _inverse(step) + (half + 0.5)).trunc().clamp(0, 2 * half - 1)
    return step.half(), codes.to(torch.uint8)


def _encode_q4_0(x: Tensor) -> Tensor:
    step, codes = _signed(x, 8)
    return torch.cat((_bytes(step), _packed(codes)), dim=1)


def _encode_q5_0(x: Tensor) -> Tensor:
    step, codes = _signed(x, 16)
    fifths = _stacked((codes >> 4).view(-1, 4, 8).transpose(1, 2), 1)
    return torch.cat((_bytes(step), fifths, _packed(codes & 0xF)), dim=1)


def _encode_q5_1(x: Tensor) -> Tensor:
    low = x.amin(1, keepdim=True)
    step = (x.amax(1, keepdim=True) - low) / 31
    codes = ((x - low) * _inverse(step) + 0.5).trunc().clamp(0, 31).to(torch.uint8)
    fifths = _stacked((codes >> 4).view(-1, 4, 8).transpose(1, 2), 1)
    return torch.cat((_bytes(step.half()), _bytes(low.half()), fifths, _packed(codes & 0xF)), dim=1)


def _affine(x: Tensor, weight: Tensor, most: int, first: float, count: int) -> tuple[Tensor, Tensor]:
    """Fit step and minimum (M, 1), the latter at most 0, so that step * code + minimum is near x (M, 32).

    Codes run from 0 to `most`, errors are weighted squares. Candidates begin with codes for a range of most + first,
    and are 0.1 apart.
    """
    minimum, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True)
    total, sum_x = weight.sum(1, keepdim=True), (weight * x).sum(1, keepdim=True)
    flat = high == minimum
    step = torch.where(flat, torch.zeros_like(high), (high - minimum) / most)
    codes = ((x - minimum) * _inverse(step)).round().clamp(0, most)
    best = (weight * (step * codes + minimum - x).square()).sum(1, keepdim=True)
    for number in range(count + 1):
        # From the best minimum so far: what is searched moves with it, as in the reference.
        scale = (first + 0.1 * number + most) * _inverse(high - minimum)
        codes = ((x - minimum) * scale).round().clamp(0, most)
        weighted = weight * codes
        sums = (weighted.sum(1, keepdim=True), (weighted * codes).sum(1, keepdim=True))
        sum_xl = (weighted * x).sum(1, keepdim=True)
        determinant = total * sums[1] - sums[0] * sums[0]
        fit = (total * sum_xl - sum_x * sums[0]) / determinant
        least = (sums[1] * sum_x - sums[0] * sum_xl) / determinant
        above = least > 0
        fit, least = torch.where(above, sum_xl / sums[1], fit), torch.where(above, torch.zeros_like(least), least)
        error = (weight * (fit * codes + least - x).square()).sum(1, keepdim=True)
        better = (determinant > 0) & (error < best) & ~flat
        step, minimum = torch.where(better, fit, step), torch.where(better, least, minimum)
        best = torch.where(better, error, best)
    return step, minimum


def _rounded_scales(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Round numbers >= 0 (N, 8) to 6-bit codes in fp32, and return their common step (N, 1) fp16."""
    peak = numbers.amax(1, keepdim=True)
    codes = (63 * _inverse(peak) * numbers).round().clamp(0, 63)
    return codes, (peak / 63).half()


def _k_codes(x: Tensor, step: Tensor, minimum: Tensor, most: int) -> Tensor:
    """Return the codes of x (..., 32) for step q - minimum. 0 where the step is 0."""
    return ((x + minimum) * _inverse(step)).round().clamp(0, most)


def _k_parts(x: Tensor, most: int, first: float, count: int) -> tuple[Tensor, Tensor]:
    """Return the first 16 bytes of each Q4_K or Q5_K block (N, 16), and codes (N, 8, 32) uint8."""
    runs = x.view(-1, 8, 32)
    # The reference's weights: errors of large numbers count more, and none counts nothing.
    weight = runs.square().mean(2, keepdim=True).sqrt() + runs.abs()
    step, minimum = _affine(runs.flatten(0, 1), weight.flatten(0, 1), most, first, count)
    (scales, step_unit), (minima, minimum_unit) = (_rounded_scales(x.view(-1, 8)) for x in (step, -minimum))
    chosen_s, chosen_m, best = scales, minima, torch.full_like(scales, torch.inf)
    for step_change in NEXT:
        for minimum_change in NEXT:
            s, m = (scales + step_change).clamp(0, 63), (minima + minimum_change).clamp(0, 63)
            wide, least = (step_unit.float() * s).unsqueeze(2), (minimum_unit.float() * m).unsqueeze(2)
            codes = _k_codes(runs, wide, least, most)
            error = (weight * (wide * codes - least - runs).square()).sum(2)
            better = error < best
            chosen_s, chosen_m = torch.where(better, s, chosen_s), torch.where(better, m, chosen_m)
            best = torch.where(better, error, best)
    wide, least = (step_unit.float() * chosen_s).unsqueeze(2), (minimum_unit.float() * chosen_m).unsqueeze(2)
    codes = _k_codes(runs, wide, least, most).to(torch.uint8)
    head = torch.cat((_bytes(step_unit), _bytes(minimum_unit), _six_bits(chosen_s.byte(), chosen_m.byte())), dim=1)
    return head, codes


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Pack two times 8 numbers below 64 (N, 8) into 12 bytes (N, 12)."""
    low = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    high = minima[:, :4] | ((minima[:, 4:] >> 4) << 6)
    return torch.cat((low, high, (scales[:, 4:] & 0xF) | ((minima[:, 4:] & 0xF) << 4)), dim=1)


def _encode_q4_k(x: Tensor) -> Tensor:
    head, codes = _k_parts(x, 15, -1.0, 20)
    return torch.cat((head, _packed(codes.view(-1, 4, 64)).flatten(1)), dim=1)


def _encode_q5_k(x: Tensor) -> Tensor:
    head, codes = _k_parts(x, 31, -0.5, 15)
    fifths = _stacked(codes >> 4, 1)
    return torch.cat((head, fifths, _packed((codes & 0xF).view(-1, 4, 64)).flatten(1)), dim=1)


def _symmetric(x: Tensor) -> Tensor:
    """Fit a step (M, 1) for codes -32 to 31 of x (M, 16), by squared errors weighted with x squared."""
    weight, peak = x.square(), x.gather(1, x.abs().argmax(1, keepdim=True))
    step, best = torch.zeros_like(peak), torch.zeros_like(peak)
    for number in (0, *range(-9, 0), *range(1, 10)):
        codes = (-(32 + 0.1 * number) * _inverse(peak) * x).round().clamp(-32, 31)
        sum_xl, sum_ll = ((weight * codes * other).sum(1, keepdim=True) for other in (x, codes))
        better = (sum_ll > 0) & (sum_xl * sum_xl > best * sum_ll)
        fit = sum_xl * _inverse(sum_ll)
        step, best = torch.where(better, fit, step), torch.where(better, fit * sum_xl, best)
    return torch.where(peak.abs() < 1e-15, torch.zeros_like(step), step)


def _encode_q6_k(x: Tensor) -> Tensor:
    runs = x.view(-1, 16, 16)
    weight = runs.square()
    steps = _symmetric(runs.flatten(0, 1)).view(-1, 16)
    # Scales are int8, which reaches further below zero: the largest in size becomes -128.
    peak = steps.gather(1, steps.abs().argmax(1, keepdim=True))
    scales, step_unit = (-128 * _inverse(peak) * steps).round().clamp(max=127), (peak / -128).half()
    chosen, best = scales, torch.full_like(scales, torch.inf)
    for change in NEXT:
        moved = (scales + change).clamp(-128, 127)
        wide = (step_unit.float() * moved).unsqueeze(2)
        codes = (runs * _inverse(wide)).round().clamp(-32, 31)
        error = (weight * (wide * codes - runs).square()).sum(2)
        better = error < best
        chosen, best = torch.where(better, moved, chosen), torch.where(better, error, best)
    wide = (step_unit.float() * chosen).unsqueeze(2)
    codes = ((runs * _inverse(wide)).round().clamp(-32, 31) + 32).to(torch.uint8).view(-1, 2, 4, 32)
    lower = _packed((codes & 0xF).flatten(2).view(-1, 2, 128)).flatten(1)
    upper = _stacked((codes >> 4).flatten(0, 1), 2).view(-1, 64)
    return torch.cat((lower, upper, _bytes(chosen.to(torch.int8)), _bytes(step_unit)), dim=1)


_ENCODERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _encode_q8_0,
    "Q4_0": _encode_q4_0,
    "Q5_0": _encode_q5_0,
    "Q5_1": _encode_q5_1,
    "Q4_K": _encode_q4_k,
    "Q5_K": _encode_q5_k,
    "Q6_K": _encode_q6_k,
}
WRITTEN = (*FLOAT_DTYPES, *_ENCODERS)
"""Types that `encode` knows."""

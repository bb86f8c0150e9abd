"""Encode numbers as blocks of GGUF files (layouts: gguf_decoding.py).

Q8_0, Q4_0, Q5_0 and Q5_1 equal the reference to the bit: one step per block, from its extreme numbers. The K types
search step and minimum of each group as the reference does, over some twenty candidates with a least-squares fit each.
Then each rounded scale of a block is also tried one up and one down, and the best stays. The reference stops before
that.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from meshwright.kernels.quantized.gguf_decoding import FLOAT_DTYPES
from meshwright.spec.weights.gguf_schemes import BLOCK_TYPES

CHUNK = 2**16
"""Numbers encoded at once: the search holds ten times as much, and is fastest inside the cache."""
NEXT = (0, -1, 1)
"""Changes of a rounded scale that are tried. The first one wins ties."""


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


def _q8_0(x: Tensor) -> Tensor:
    step = x.abs().amax(1, keepdim=True) / 127
    return torch.cat((_bytes(step.half()), _bytes(_rounded_away(x * _inverse(step)).to(torch.int8))), dim=1)


def _signed(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return step (N, 1) fp16 and codes (N, 32) uint8 for which the number largest in size is exactly -half steps."""
    peak = x.gather(1, x.abs().argmax(1, keepdim=True))
    step = peak / -half
    codes = (x * _inverse(step) + (half + 0.5)).trunc().clamp(0, 2 * half - 1)
    return step.half(), codes.to(torch.uint8)


def _q4_0(x: Tensor) -> Tensor:
    step, codes = _signed(x, 8)
    return torch.cat((_bytes(step), _packed(codes)), dim=1)


def _q5_0(x: Tensor) -> Tensor:
    step, codes = _signed(x, 16)
    fifths = _stacked((codes >> 4).view(-1, 4, 8).transpose(1, 2), 1)
    return torch.cat((_bytes(step), fifths, _packed(codes & 0xF)), dim=1)


def _q5_1(x: Tensor) -> Tensor:
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
        # from the best minimum so far: what is searched moves with it, as in the reference
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


def _q4_k(x: Tensor) -> Tensor:
    head, codes = _k_parts(x, 15, -1.0, 20)
    return torch.cat((head, _packed(codes.view(-1, 4, 64)).flatten(1)), dim=1)


def _q5_k(x: Tensor) -> Tensor:
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


def _q6_k(x: Tensor) -> Tensor:
    runs = x.view(-1, 16, 16)
    weight = runs.square()
    steps = _symmetric(runs.flatten(0, 1)).view(-1, 16)
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
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
WRITTEN = (*FLOAT_DTYPES, *_ENCODERS)
"""Types that `encode` knows."""

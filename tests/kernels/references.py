"""Slow references of kernels and roundings: a row, a matrix or a number at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.kernels.attention.paged import PagedCall, RowsCall
from meshwright.kernels.optimizer.adamw import COEFFICIENTS, ITERATIONS, norms
from meshwright.kernels.quantized.rounding import Quantized, Share
from meshwright.spec.model.quantization_schemes import NF4


def attend_rows_reference(
    q: Tensor, keys: Tensor, values: Tensor, call: RowsCall, *, width: int, window: int, scale: float
) -> Tensor:
    """Attend q (R, H, E) over paged keys and values. Returns (R, H, width).

    keys (blocks, block, K, E); values (blocks, block, K, V or more), of which `width` are used; `window`: visible
    positions, 0 = all.
    """
    size, group, outputs = keys.shape[1], q.shape[1] // keys.shape[2], []
    for row, offset, last in zip(q, call.offsets.tolist(), call.last.tolist(), strict=True):
        seen = torch.arange(max(0, last + 1 - window) if window else 0, last + 1)
        blocks = call.tables[offset + seen // size]
        seen_k, seen_v = keys[blocks, seen % size], values[blocks, seen % size][..., :width]
        scores = torch.einsum("hke,tke->hkt", _per_key_head(row, group), seen_k.float()) * scale
        summed = torch.einsum("hkt,tkv->hkv", scores.softmax(-1), seen_v.float())
        outputs.append(summed.transpose(0, 1).flatten(0, 1).to(q.dtype))
    return torch.stack(outputs)


def attend_paged_reference(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, calls: Sequence[PagedCall], *, scale: float
) -> Tensor:
    """Attend q (N, H, E). Returns (N, H, V), zero for rows of no call.

    k (N, K, E) and v (N, K, V) of the same rows are already written into keys (blocks, block, K, E) and values (blocks,
    block, K, V).
    """
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    group = q.shape[1] // k.shape[1]
    for call in calls:
        for row in range(call.begin, call.end):
            sequence, query = divmod(row - call.begin, call.queries)
            if call.blocks is None:
                seen_k, seen_v, bias = k[call.begin : row + 1], v[call.begin : row + 1], None
            else:
                blocks = call.blocks
                mine = blocks if isinstance(blocks, slice) else blocks[min(sequence, len(blocks) - 1)]
                seen_k, seen_v, bias = keys[mine].flatten(0, 1), values[mine].flatten(0, 1), call.bias
                if call.band is not None:
                    end = call.band.keys - call.queries + query + 1
                    begin = max(0, end - call.band.window) if call.band.window else 0
                    seen_k, seen_v = seen_k[begin:end], seen_v[begin:end]
            scores = torch.einsum("hke,tke->hkt", _per_key_head(q[row], group), seen_k.float()) * scale
            if bias is not None:
                scores = scores + bias[min(sequence, len(bias) - 1), 0, query]
            summed = torch.einsum("hkt,tkv->khv", scores.softmax(-1), seen_v.float())
            out[row] = summed.flatten(0, 1).to(q.dtype)
    return out


def _per_key_head(row: Tensor, group: int) -> Tensor:
    """Reshape (H, E) to (H / K, K, E) fp32: query head h reads key head h // (H / K)."""
    grouped: Tensor = row.float().unflatten(0, (-1, group))
    return grouped.transpose(0, 1)


def orthogonalized_reference(x: Tensor, epsilon: float) -> Tensor:
    """Orthogonalize one matrix at a time and out of place."""
    a, b, c = COEFFICIENTS
    orthogonal = []
    for matrix in x:
        y = matrix / norms(matrix[None])[0].clamp(min=epsilon)
        for _ in range(ITERATIONS):
            gram = y @ y.T
            y = a * y + (b * gram + c * (gram @ gram)) @ y
        orthogonal.append(y)
    return torch.stack(orthogonal) if orthogonal else x.clone()


def absmax_reference(x: Tensor, bits: int = 8, share: Share = "tensor") -> Quantized:
    """Quantize as `absmax`, a number at a time."""
    return _one_by_one(x, bits, share, symmetric=True)


def zero_point_reference(x: Tensor, bits: int = 8, share: Share = "tensor") -> Quantized:
    """Quantize as `zero_point`, a number at a time."""
    return _one_by_one(x, bits, share, symmetric=False)


def _one_by_one(x: Tensor, bits: int, share: Share, *, symmetric: bool) -> Quantized:
    rows, columns = x.shape
    runs = -(-columns // share) if isinstance(share, int) else 1
    size = (
        {"tensor": (1, 1), "row": (rows, 1), "column": (1, columns)}[share] if isinstance(share, str) else (rows, runs)
    )
    codes = torch.zeros(rows, columns, dtype=torch.int32)
    scale, zero = torch.ones(size), torch.zeros(size)

    def group_of(row: int, column: int) -> tuple[int, int]:
        if isinstance(share, int):
            return row, column // share
        return (row if share == "row" else 0), (column if share == "column" else 0)

    for group in {group_of(row, column) for row in range(rows) for column in range(columns)}:
        members = [(row, column) for row in range(rows) for column in range(columns) if group_of(row, column) == group]
        numbers = torch.stack([x[index].float() for index in members])
        if symmetric:
            step = numbers.abs().max() / (2 ** (bits - 1) - 1)
        else:
            low, high = numbers.min().clamp(max=0), numbers.max().clamp(min=0)
            step = high / (2**bits - 1) - low / (2**bits - 1)
        step = torch.ones(()) if step == 0 else step
        scale[group], zero[group] = step, 0.0 if symmetric else torch.round(-low / step)
        least, most = (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
        for index in members:
            code = (torch.round(x[index].float() / step) + zero[group]).clamp(least, most)
            codes[index] = 0 if code.isnan() else int(code)
    return Quantized(codes, scale, zero, share)


def nf4_codes_reference(x: Tensor) -> Tensor:
    """Compute as `nf4_codes`, by the distance to each."""
    table = torch.tensor(NF4, dtype=torch.float64, device=x.device)
    return (x.double().unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8)


def pack_reference(codes: Tensor, bits: int) -> Tensor:
    """Pack one row (K,) bit by bit."""
    packed = torch.zeros(-(-len(codes) * bits // 8), dtype=torch.uint8)
    for index, code in enumerate(codes.tolist()):
        for bit in range(bits):
            position = index * bits + bit
            packed[position // 8] |= ((code >> bit) & 1) << (position % 8)
    return packed

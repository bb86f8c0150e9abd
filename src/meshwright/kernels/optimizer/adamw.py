"""AdamW, and the norm of all gradients, in passes over many tensors at once.

With fp32 states, on a GPU each is one Triton kernel (triton/updates.py). It reads gradients in the dtype that they
have, and writes the 16-bit copy of a weight as well. AdamW then moves 28 bytes per parameter of bf16 training: 2
of the gradient, 4 + 4 of the master weight, 8 + 8 of the moments, 2 of the copy. torch's kernel reads fp32 gradients,
writes them back divided, and leaves both copies to passes of their own: 44 bytes.

Narrow moments, and bf16 weights without an fp32 copy, are read into fp32, updated, and written back in their format:

    bf16   rounded stochastically: up with the probability of what is cut off, which makes the mean exact. The random
           bits are a hash of (seed, parameter, step, position in the whole tensor). No layout and no restart changes
           them.
    int8   an index into a code book of 256 numbers, times the largest absolute value of its block (Dettmers et al.
           2022, arXiv:2110.02861). A second moment above 0 never becomes 0: AdamW would divide by epsilon alone.

Muon's Newton-Schulz iteration: a matrix U S V' becomes about U V', by products alone (Jordan et al. 2024,
kellerjordan.github.io/posts/muon). Five times X <- a X + (b X X' + c (X X')^2) X, from X / |X|. The coefficients make
the slope at 0 large and are not meant to converge. A singular value above 0.002 of |X| ends between 0.68 and 1.21,
smaller ones are multiplied by up to 485. In bf16 each product is rounded to 2**-9. For random matrices the result is
1 % of its length away from fp64's, in fp32 1e-6 to 1e-5 (tests/kernels/test_orthogonalize.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels.chooser import simulated_kind, uses_triton
from meshwright.kernels.linear.linear import needs_wide
from meshwright.kernels.triton.narrow_piece import Moment, NarrowPiece, UpdateNumbers
from meshwright.spec.memory.matrix_exchange import ITERATIONS

MASK = 0xFFFFFFFF
STEP_SALT, SECOND_SALT = 0x9E3779B9, 0x85EBCA6B
"""Odd constants that spread step numbers, and separate the weight's random bits from those of the moments."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True, slots=True)
class WideStates:
    """Parameters that are updated together, as lists."""

    masters: list[Tensor]
    """Weights in fp32."""
    moments: tuple[list[Tensor], list[Tensor]]
    """First and second moments in fp32, as large."""
    steps: list[Tensor]
    """Updates so far, this one included, () fp32 each."""


def in_one_pass(masters: Sequence[Tensor], prefer: str = "auto") -> bool:
    """Return whether `adamw` takes gradients of any dtype and writes copies itself.

    A dry run of a GPU does not update, and the update takes no memory there either. `prefer` is one of
    chooser.PREFERENCES.
    """
    if simulated_kind() == "cuda" and prefer in ("auto", "triton"):
        return True
    return bool(masters) and uses_triton("adamw", masters[0], prefer=prefer)


def adamw(states: WideStates, gradients: Sequence[Tensor], copies: Sequence[Tensor], numbers: UpdateNumbers) -> None:
    """Update in place where `in_one_pass`.

    Args:
        gradients: fp32 or 16 bits.
        copies: 16-bit weights for computation, or the fp32 masters themselves.
    """
    if simulated_kind():
        return
    from meshwright.kernels.triton import updates

    # A launch takes lists of one dtype each.
    by_dtypes: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index, (gradient, copy) in enumerate(zip(gradients, copies, strict=True)):
        if copy.numel():
            by_dtypes.setdefault((gradient.dtype, copy.dtype), []).append(index)
    for (_, dtype), indices in by_dtypes.items():
        masters, first, second, steps = (
            [tensors[index] for index in indices] for tensors in (states.masters, *states.moments, states.steps)
        )
        updates.adamw(
            [gradients[index].contiguous() for index in indices], masters, (first, second),
            None if dtype == torch.float32 else [copies[index] for index in indices], steps, numbers,
        )  # fmt: skip


def adamw_reference(
    states: WideStates, gradients: Sequence[Tensor], copies: Sequence[Tensor], numbers: UpdateNumbers
) -> None:
    """Update with torch's fused kernel, from gradients in fp32."""
    compat.fused_adamw(
        states.masters, list(gradients), states.moments, states.steps, lr=numbers.rate, beta1=numbers.beta1,
        beta2=numbers.beta2, weight_decay=numbers.decay, eps=numbers.epsilon, grad_scale=numbers.divide_by,
        found_inf=numbers.skip,
    )  # fmt: skip
    pairs = [pair for pair in zip(copies, states.masters, strict=True) if pair[0].dtype != torch.float32]
    if pairs:
        compat.copy_each(*map(list, zip(*pairs, strict=True)))


def euclidean_norm(tensors: Sequence[Tensor], prefer: str = "auto") -> Tensor:
    """Return the Euclidean norm () fp32 over all elements of the tensors, whatever their dtypes."""
    plain = all(type(tensor) is Tensor for tensor in tensors)
    if not (tensors and plain and uses_triton("square_sums", tensors[0], prefer=prefer)):
        norm: Tensor = torch.linalg.vector_norm(torch.stack(compat.norms(list(tensors))))
        return norm
    from meshwright.kernels.triton import updates

    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor.contiguous())
    sums = [updates.squares(group) for group in by_dtype.values()]
    if not sums:
        return torch.zeros((), device=tensors[0].device)
    # In fp64, so the number of chunks costs no digits.
    return torch.cat(sums).sum(dtype=torch.float64).sqrt().float()


def narrow_adamw(piece: NarrowPiece, gradient: Tensor, numbers: UpdateNumbers, most: int, prefer: str = "auto") -> None:
    """Update a piece in place from its gradient (R, W). Temporaries have at most `most` elements."""
    if uses_triton("narrow_adamw", gradient, prefer=prefer):
        from meshwright.kernels.triton import updates

        updates.narrow_adamw(piece, gradient, numbers)
        return
    rows, width = gradient.shape
    # The fp32 copies of a whole parameter would cost the memory that narrow moments save.
    rows_at_once = max(1, most // max(1, width))
    for start in range(0, rows, rows_at_once):
        narrow_adamw_reference(piece, gradient, numbers, slice(start, min(rows, start + rows_at_once)))


def narrow_adamw_reference(piece: NarrowPiece, gradient: Tensor, numbers: UpdateNumbers, rows: slice) -> None:
    """Update some rows in place."""
    bits, wide = random_bits(piece, rows, gradient.shape[1]), piece.weight[rows].float()
    moments = [read(moment, piece.books, rows) for moment in piece.moments]
    compat.fused_adamw(
        [wide], [gradient[rows].float().contiguous()], ([moments[0]], [moments[1]]), [piece.step], lr=numbers.rate,
        beta1=numbers.beta1, beta2=numbers.beta2, weight_decay=numbers.decay, eps=numbers.epsilon,
        grad_scale=numbers.divide_by, found_inf=numbers.skip,
    )  # fmt: skip
    # The moments take separate halves of the random bits.
    for index, (moment, wide_moment) in enumerate(zip(piece.moments, moments, strict=True)):
        write(moment, wide_moment, piece.books, rows, bits >> 16 * index if bits is not None else None, numbers.skip)
    write_weight(piece, wide, rows, bits)


def read(moment: Moment, books: Tensor, rows: slice) -> Tensor:
    """Return a moment in fp32. An fp32 moment is returned itself, not as a copy."""
    values = moment.values[rows]
    if moment.scales is None:
        return values.float()
    shares = books[0 if moment.signed else 2][values.int()]
    return shares.mul_(_along(moment.scales[rows], moment.block, values.shape[1]))


def write(moment: Moment, wide: Tensor, books: Tensor, rows: slice, bits: Tensor | None, skip: Tensor) -> None:
    """Write fp32 numbers in the moment's format. int8 keeps its bits where `skip` is 1; exact bf16 is not rounded."""
    values = moment.values[rows]
    if moment.scales is None:
        if values.dtype != torch.float32:
            assert bits is not None
            values.copy_(rounded(wide, bits))
        return
    codes, scales = quantized(wide, moment.block, books, signed=moment.signed)
    # A skipped step leaves the stored bits as they were.
    same = skip > 0
    values.copy_(torch.where(same, values, codes))
    moment.scales[rows].copy_(torch.where(same, moment.scales[rows], scales))


def write_weight(piece: NarrowPiece, wide: Tensor, rows: slice, bits: Tensor | None) -> None:
    """Write some rows of the weight from fp32, and their 16-bit copy. An fp32 weight is `wide` itself."""
    if piece.weight.dtype != torch.float32:
        assert bits is not None
        piece.weight[rows].copy_(rounded(wide, hashed(bits ^ _signed(SECOND_SALT))))
    if piece.copy is not None:
        piece.copy[rows].copy_(wide)


def quantized(x: Tensor, block: int, books: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantize x (R, W) fp32: nearest codes (R, W) uint8, and scales (R, ceil(W / block)) fp32."""
    rows, width = x.shape
    blocks = -(-width // block)
    padded = F.pad(x, (0, blocks * block - width)) if width % block else x
    scales = padded.view(rows, blocks, block).abs().amax(-1)
    share = x / _along(scales.where(scales > 0, 1.0), block, width)
    codes = torch.bucketize(share, books[1 if signed else 3][:-1], out_int32=True)
    if not signed:
        # A second moment above 0 must not become 0: the update would divide by epsilon alone.
        codes = torch.maximum(codes, (x > 0).int())
    return codes.to(torch.uint8), scales


def _along(scales: Tensor, block: int, width: int) -> Tensor:
    """Repeat each scale for the elements of its block: (R, W)."""
    return scales.unsqueeze(-1).expand(*scales.shape, block).reshape(len(scales), -1)[:, :width]


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """Round x fp32 to bf16, up where its lower 16 bits and the lower 16 of `bits` (int32) carry."""
    carried = x.view(torch.int32) + (bits & 0xFFFF)
    cut = (carried & _signed(0xFFFF0000)).view(torch.float32)
    # The sum of a NaN's bits may be those of a number.
    return torch.where(x.isnan(), x, cut).to(torch.bfloat16)


def random_bits(piece: NarrowPiece, rows: slice, width: int) -> Tensor | None:
    """Return 32 bits (R, W) int32 for each element of some rows. None where nothing is rounded at random."""
    if torch.bfloat16 not in (piece.weight.dtype, piece.moments[0].values.dtype):
        return None
    position, device = piece.position, piece.weight.device
    row = torch.arange(rows.start, rows.stop, device=device)
    # Positions in the whole tensor: every layout draws the same bits for an element.
    row = (row // position.rows + position.first) * position.whole_rows + row % position.rows + position.second
    column = torch.arange(position.column, position.column + width, device=device, dtype=torch.int32)
    counter = _wrapped(row * position.width)[:, None] + column
    key = _wrapped(piece.step.long() * STEP_SALT + position.seed)
    return hashed(counter ^ hashed(key))


def hashed(x: Tensor) -> Tensor:
    """Hash int32 to int32, one to one, every bit depending on all bits (C. Wellons' lowbias32)."""
    x = (x ^ _shifted(x, 16)) * 0x7FEB352D
    x = (x ^ _shifted(x, 15)) * _signed(0x846CA68B)
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift right, as without a sign."""
    # torch has no arithmetic of uint32, and int32 copies its sign into the upper bits.
    return (x >> by) & (MASK >> by)


def _wrapped(x: Tensor) -> Tensor:
    """Return the lower 32 bits of an int64."""
    low = x & MASK
    return torch.where(low > 0x7FFFFFFF, low - 2**32, low).int()


def _signed(number: int) -> int:
    return number - 2**32 if number > 0x7FFFFFFF else number


def orthogonalized(x: Tensor, epsilon: float) -> Tensor:
    """Orthogonalize each of N matrices x (N, R, C) in its own dtype. x is consumed.

    `epsilon`: least norm to divide by, which protects matrices of zeros. Where 16-bit products are emulated, it runs in
    fp32 and one matrix at a time.
    """
    if needs_wide(x):
        for matrix in x:
            # One at a time, so the fp32 copies of the others need no memory.
            matrix.copy_(orthogonalized(matrix[None].float(), epsilon)[0])
        return x
    a, b, c = COEFFICIENTS
    # X X' of the wider form is the smaller square.
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x.div_(norms(x).clamp_(min=epsilon))
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def norms(x: Tensor) -> Tensor:
    """Return the Frobenius norms (N, 1, 1) of x (N, R, C), which torch sums in fp32 at least."""
    lengths: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return lengths

"""Parts of quantized matrices: a rank's part of a matrix, and a run of a stack's experts. Nothing is rounded again."""

from dataclasses import replace

from torch import Tensor

from meshwright.kernels.quantization import pack, unpack
from meshwright.kernels.quantized_matrix import PARTS, QuantizedMatrix
from meshwright.spec.code_cuts import CodesCut


def cut(matrix: QuantizedMatrix, part: CodesCut) -> QuantizedMatrix:
    """Cut a part out of a whole matrix (N, K), or stack (X, N, K).

    Restored it equals, to the bit, that part of the restored whole.
    """
    lead, (rows, _) = part.box.slices[:-2], part.box.slices[-2:]
    scheme, groups = matrix.scheme, part.groups
    first, stop = part.first_code, part.first_code + part.width
    if scheme.packed:
        first, stop = first * scheme.bits // 8, -(-stop * scheme.bits // 8)

    def cut_out(tensor: Tensor, columns: slice) -> Tensor:
        return tensor[(*lead, rows, columns)].contiguous()

    zeros = matrix.zeros
    if zeros is not None and scheme.zeros == "whole":
        zeros = pack(cut_out(unpack(zeros, scheme.bits, matrix.scales.shape[-1]), groups), scheme.bits)
    elif zeros is not None:
        zeros = cut_out(zeros, groups)
    return replace(
        matrix, size_in=part.box.sizes[-1], before=part.before, places=part.places,
        codes=cut_out(matrix.codes, slice(first, stop)), scales=cut_out(matrix.scales, groups), zeros=zeros,
        outer=None if matrix.outer is None else matrix.outer[lead],
        offset=None if matrix.offset is None else matrix.offset[lead], prepared={}, tables={},
    )  # fmt: skip


def experts(stack: QuantizedMatrix, first: int, number: int) -> QuantizedMatrix:
    """Return a run of a stack's experts, as views of its tensors."""
    parts = {PARTS[name]: tensor.narrow(0, first, number) for name, tensor in stack.tensors.items()}
    return replace(stack, prepared={}, **parts)  # type: ignore[arg-type]  # fields that are tensors

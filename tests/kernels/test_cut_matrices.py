"""Parts of a matrix of codes: what they restore is part of what the whole restores, to the bit."""

from random import Random

import pytest
import torch

from meshwright.kernels.quantized.matrix import cut, experts
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.spec.model.quantization_schemes import find_scheme
from meshwright.spec.weights.boxes import Box, CodesCut, bytes_of_codes

NAMES = (
    "nf4", "nf4-double", "int4-hqq", "int3", "int4-rtn", "int4-sym", "int8-g32-sym-fp16", "int8-rows-sym-fp32",
    "int4-rows-sym-fp16", "fp8-rows-sym-bf16", "int4-g128-zeros-fp16", "int3-g16-zeros-bf16", "nf4-g32-sym-double",
)  # fmt: skip


def drawn_box(random: Random) -> Box:
    """Of a matrix or a stack, cut anywhere along every dim."""
    whole = (*random.choice(((), (3,))), random.randint(1, 70), random.randint(1, 300))
    offsets = tuple(random.randrange(size) for size in whole)
    sizes = tuple(random.randint(1, size - start) for size, start in zip(whole, offsets, strict=True))
    return Box(whole=whole, offsets=offsets, sizes=sizes)


@pytest.mark.parametrize("name", NAMES)
def test_a_part_restores_the_bits_of_the_whole(name: str) -> None:
    random, scheme = Random(name), find_scheme(name)
    assert scheme is not None
    for number in range(25):
        box = drawn_box(random)
        weight = torch.randn(box.whole, generator=torch.Generator().manual_seed(number))
        matrix = quantize_matrix("w", weight, scheme)
        part = CodesCut(scheme=scheme, box=box)
        actual = cut(matrix, part)
        sizes = {
            key: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for key, tensor in actual.tensors.items()
        }
        assert sizes == part.sizes(), box
        held = sum(tensor.numel() * tensor.element_size() for tensor in actual.tensors.values())
        assert held == bytes_of_codes(name, box), box
        assert torch.equal(actual.dequantized(), matrix.dequantized()[box.slices]), box
        assert torch.equal(actual.whole_codes().float(), matrix.whole_codes()[box.slices].float()), box
        if len(box.whole) == 3:
            last = box.sizes[0] - 1
            assert torch.equal(actual.expert(last).dequantized(), actual.dequantized()[last])
            assert torch.equal(experts(actual, last, 1).dequantized(), actual.dequantized()[last:])


def test_a_cut_that_is_none_holds_as_much_as_the_whole() -> None:
    for name in NAMES:
        scheme = find_scheme(name)
        assert scheme is not None
        box = Box(whole=(48, 320), offsets=(0, 0), sizes=(48, 320))
        assert CodesCut(scheme=scheme, box=box).sizes() == scheme.sizes(48, 320)
        assert bytes_of_codes(name, box) == scheme.nbytes((48, 320))
    assert bytes_of_codes("", box) == 0

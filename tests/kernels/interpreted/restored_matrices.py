"""Matrices of 4-bit codes restored in the interpreter, beside plain code: equal to the bit, whatever
their sizes."""

from dataclasses import replace

import pytest
import torch

from meshwright.kernels import chooser
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.spec.model.quantization_schemes import SCHEMES
from tests.kernels.interpreted.poison import nothing_is_left_unwritten  # noqa: F401  # a fixture

FOUR = [name for name, scheme in SCHEMES.items() if scheme.bits == 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(3, 64), (5, 71), (2, 1500), (1, 1)], ids=str)
@pytest.mark.parametrize("name", FOUR)
def test_the_kernel_equals_its_twin(name: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(sum(size))) * 0.1
    matrix = quantize_matrix("some", weight, SCHEMES[name])
    assert chooser.choice("restore", torch.device("cpu"), dtype, prefer="triton").by == "triton"
    ours = replace(matrix, prefer="triton").restored(dtype)
    plain = replace(matrix, prefer="eager").restored(dtype)
    if dtype == torch.bfloat16:  # which the interpreter rounds towards zero
        torch.testing.assert_close(ours, plain, rtol=2**-7, atol=0.0)
    else:
        assert torch.equal(ours, plain)

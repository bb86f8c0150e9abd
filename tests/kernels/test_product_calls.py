"""What the host does for one product with codes on a GPU: calls of the package's functions, held at their numbers.

A launch of Triton takes 8 to 10 us of processor time beside them, and the driver's call some more (AMD EPYC).
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

import meshwright
from meshwright.kernels import chooser
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.kernels.quantized.quantized_linear import quantized_linears
from meshwright.spec.model.quantization_schemes import SCHEMES

CALLS = {
    ("int4-rtn", 1): 17, ("int4-rtn", 16): 23, ("nf4", 1): 17, ("nf4", 16): 22, ("int8", 1): 21, ("int8", 16): 22,
    ("llm-int8", 1): 22, ("fp8", 1): 18,
}  # fmt: skip
"""By scheme and rows, where the product was made before; a budget of 40 us holds some 30 with two launches."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of kernels, which are not run."""
    names: list[str] = []

    def choose(operation: str, *inputs: Any) -> chooser.Implementation:
        return chooser.Implementation(operation, "torch" if inputs[-1] else "triton", "counted")

    monkeypatch.setattr(JITFunction, "run", lambda kernel, *_, **__: names.append(kernel.__name__))
    monkeypatch.setattr(chooser, "_choose", choose)
    monkeypatch.setattr(chooser, "_choices", {})
    yield names


def calls_of(x: torch.Tensor, matrix: QuantizedMatrix) -> int:
    """Calls of Python functions of the package for a product."""
    root, count = str(Path(meshwright.__file__).parent), 0

    def heard(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(root)

    sys.setprofile(heard)
    try:
        quantized_linears(x, [matrix], [None])
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(("name", "rows"), CALLS)
@torch.no_grad()
def test_calls_of_a_product(name: str, rows: int, launched: list[str]) -> None:
    columns = torch.tensor([3, 70], dtype=torch.int32) if name == "llm-int8" else None
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)) * 0.1
    matrix = quantize_matrix("some", weight, SCHEMES[name], columns, torch.bfloat16)
    matrix.prefer = "triton"
    x = torch.randn(rows, 256).bfloat16()
    quantized_linears(x, [matrix], [None])
    first = len(launched)
    assert calls_of(x, matrix) == CALLS[name, rows]
    assert len(launched) == 2 * first > 0

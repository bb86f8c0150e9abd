"""Newton-Schulz beside its polynomial on singular values in fp64, and its error in each dtype."""

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.optimizer.adamw import COEFFICIENTS, orthogonalized
from meshwright.spec.memory.matrix_exchange import ITERATIONS
from tests.kernels.references import orthogonalized_reference
from tests.operation_recorder import Recording

SIZES = [(1, 1, 1), (2, 7, 5), (3, 5, 7), (1, 64, 64), (2, 100, 33), (4, 33, 100), (1, 1, 9), (1, 256, 192)]


def drawn(size: tuple[int, ...]) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def exact(x: Tensor) -> Tensor:
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        s = a * s + b * s**3 + c * s**5
    return (u * s.unsqueeze(-2)) @ v


def off(actual: Tensor, right: Tensor) -> float:
    return float((actual.double() - right).norm() / right.norm())


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 5e-2)], ids=str)
def test_it_is_the_polynomial_of_the_singular_values(
    size: tuple[int, int, int], dtype: torch.dtype, limit: float
) -> None:
    x = drawn(size).to(dtype)
    right = exact(x)
    for actual in (orthogonalized(x.clone(), 1e-8), orthogonalized_reference(x, 1e-8)):
        assert actual.dtype == dtype and actual.shape == x.shape
        assert off(actual, right) < limit


def test_it_errs_no_more_than_plain_code_of_the_same_dtype() -> None:
    """In bf16; the rounding of both is that of a dozen products."""
    x = drawn((4, 96, 160)).bfloat16()
    right = exact(x)
    assert off(orthogonalized(x.clone(), 1e-8), right) < 1.5 * off(orthogonalized_reference(x, 1e-8), right)


def test_singular_values_end_near_one() -> None:
    """Those above a hundredth of the norm: between 0.68 and 1.14 by the polynomial."""
    values = torch.logspace(-2, 0, 64, dtype=torch.float64) * 0.5
    u, _, v = torch.linalg.svd(drawn((1, 64, 80)).double(), full_matrices=False)
    x = (u * (values / 1.0)) @ v
    x = x / x.norm()
    start, actual = torch.linalg.svdvals(x), torch.linalg.svdvals(orthogonalized(x.float().clone(), 1e-8))
    large = (start > 0.01).sum()
    assert actual.flatten()[:large].min() > 0.6 and actual.max() < 1.25


def test_scale_does_not_matter_above_epsilon_and_does_below() -> None:
    x = drawn((1, 12, 20))
    orthogonal = orthogonalized(x.clone(), 1e-8)
    torch.testing.assert_close(orthogonalized(x * 1e-4, 1e-8), orthogonal, rtol=1e-4, atol=1e-5)
    assert orthogonalized(x * 1e-14, 1e-8).norm() < 0.02
    assert not orthogonalized(torch.zeros(2, 3, 4), 1e-8).any()
    assert orthogonalized(torch.zeros(0, 3, 4), 1e-8).shape == (0, 3, 4)


def test_where_16_bit_products_are_emulated_it_multiplies_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own are 20 times as slow there."""
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: False)
    x = drawn((2, 20, 30)).bfloat16()
    with Recording() as actual:
        result = orthogonalized(x.clone(), 1e-8)
    assert actual.products() == {torch.float32}
    assert result.dtype == x.dtype and off(result, exact(x)) < 1e-2

"""Sums that no order changes: held against whole numbers of Python."""

from fractions import Fraction

import pytest
import torch

from meshwright.kernels.quantized.quantized_linear import AT_ONCE, exact_product, in_steps, weights_in_steps


@pytest.mark.parametrize("columns", [1, 3, 47, AT_ONCE, AT_ONCE + 70])
def test_a_row_has_the_same_bits_in_any_batch(columns: int) -> None:
    made = torch.Generator().manual_seed(columns)
    x = torch.randn(64, columns, generator=made) * torch.logspace(-20, 20, 64)[:, None]
    weights = weights_in_steps(torch.randn(37, columns, generator=made).half())
    whole = exact_product(x, weights)
    for size in (1, 2, 5, 33):
        assert torch.equal(exact_product(x[:size], weights), whole[:size])
    order = torch.randperm(64, generator=made)
    assert torch.equal(exact_product(x[order], weights), whole[order])


def test_sums_are_those_of_fractions_rounded_once() -> None:
    """The largest numbers and all columns that one sum takes: one bit more would be lost."""
    made = torch.Generator().manual_seed(3)
    x = torch.randn(4, AT_ONCE, generator=made) * 3
    x[3] = 2**24 - 1  # all bits of a step
    weights = weights_in_steps(torch.randn(5, AT_ONCE, generator=made))
    actual, steps = exact_product(x, weights), in_steps(x, 24)
    for row in range(4):
        for column in range(5):
            pairs = zip(steps[row].tolist(), weights[:, column].tolist(), strict=True)
            exact = sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction())
            assert float(actual[row, column]) == torch.tensor(float(exact)).item()


def test_it_is_as_exact_as_fp32() -> None:
    made = torch.Generator().manual_seed(5)
    x, weights = torch.randn(33, 40, generator=made), torch.randn(48, 40, generator=made).bfloat16().float()
    true = x.double() @ weights.double().t()
    plain = (x @ weights.t() - true).norm()
    assert (exact_product(x, weights_in_steps(weights)) - true).norm() < 2 * plain


def test_rows_of_zeros_small_rows_and_no_columns() -> None:
    weights = weights_in_steps(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    x = torch.tensor([[0.0, 0.0], [1e-40, 0.0], [2.0, 1.0]])
    assert exact_product(x, weights).tolist() == [[0.0, 0.0], [pytest.approx(1e-40), 0.0], [0.0, 0.0]]
    assert exact_product(x[:, :0], weights_in_steps(torch.zeros(7, 0))).tolist() == [[0.0] * 7] * 3

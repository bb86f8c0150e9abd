"""Mixture of experts: copies to the experts and back, products by runs of rows, experts without rows."""

from functools import partial

import pytest
import torch
from torch import Tensor

from meshwright.kernels.experts import experts
from meshwright.kernels.linear.fp8 import SAME
from meshwright.kernels.triton import expert_rows
from tests.kernels.exactness import LOW, assert_not_worse, assert_single, outcome, tensors
from tests.kernels.interpreted.poison import nothing_is_left_unwritten  # noqa: F401  # a fixture


def orders(tokens: int, k: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(tokens * k, generator=torch.Generator().manual_seed(tokens))
    return order, order.argsort()


@pytest.mark.parametrize("tokens, k, width", [(1, 1, 1), (5, 2, 33), (7, 3, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, LOW[1]], ids=str)
def test_spread(tokens: int, k: int, width: int, dtype: torch.dtype) -> None:
    order, inverse = orders(tokens, k)
    inputs = tensors((tokens, width), dtype=dtype)
    fast, plain = (partial(f, order=order, inverse=inverse, k=k) for f in (expert_rows.spread, experts.spread))
    actual, right = outcome(fast, inputs), outcome(plain, inputs)
    assert torch.equal(actual[0], right[0])
    if dtype == torch.float32:
        torch.testing.assert_close(actual[1], right[1])
    else:
        assert_not_worse(fast, plain, lambda x: x[order // k], inputs)


@pytest.mark.parametrize("tokens, k, width", [(1, 1, 4), (5, 2, 33), (7, 3, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, LOW[1]], ids=str)
def test_combine(tokens: int, k: int, width: int, dtype: torch.dtype) -> None:
    _, inverse = orders(tokens, k)
    rows, weights = *tensors((tokens * k, width), dtype=dtype), *tensors((tokens, k), seed=1)

    def exact(rows: Tensor, weights: Tensor) -> Tensor:
        return (rows[inverse].view(tokens, k, -1) * weights.unsqueeze(-1)).sum(1)

    fast = partial(expert_rows.combine, inverse=inverse)
    plain = partial(experts.combine_reference, inverse=inverse)
    if dtype == torch.float32:
        assert_single(fast, exact, [rows, weights])
        assert_single(plain, exact, [rows, weights])
    else:
        assert_not_worse(fast, plain, exact, [rows, weights], [1.05] * 3)


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 1], [17, 2, 20], [0, 33, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, LOW[1]], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_grouped_products(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], dtype: torch.dtype, compiled: bool
) -> None:
    """By itself, and as the operator of compiled code calls it."""
    for name in ("ROWS", "COLUMNS", "INNER"):
        monkeypatch.setattr(expert_rows, name, 16)
    inputs = tensors((sum(counts), 20), (3, 18, 20), dtype=dtype)
    fast = partial(expert_rows.expert_linear, counts=torch.tensor(counts))
    if compiled:
        fast = partial(experts.expert_product, counts=torch.tensor(counts), prefer="triton", form=SAME, later=False)

    def exact(rows: Tensor, weights: Tensor) -> Tensor:
        return torch.cat([part @ w.T for part, w in zip(rows.split(counts), weights, strict=True)])

    if dtype == torch.float32:
        assert_single(fast, exact, inputs)
    else:
        assert_not_worse(fast, exact, exact, inputs, [1.05] * 3)
    *_, of_weights = outcome(fast, inputs)
    assert not of_weights[[n for n, count in enumerate(counts) if not count]].any()

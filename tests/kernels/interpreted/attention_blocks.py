"""Flash attention in blocks: causal or not, documents of odd lengths, grouped heads, the log-sum-exp."""

import pytest
import torch
from torch import Tensor

from meshwright.kernels.triton import flash
from tests.kernels.exactness import LOW, assert_not_worse, assert_single, plain_attention, tensors
from tests.kernels.interpreted.poison import nothing_is_left_unwritten  # noqa: F401  # a fixture


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of a document."""
    monkeypatch.setattr(flash, "QUERIES", 16)
    monkeypatch.setattr(flash, "KEYS", 16)


def seen(lengths: tuple[int, ...], causal: bool) -> Tensor:
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    same = document[:, None] == document[None, :]
    return (same & torch.ones_like(same).tril() if causal else same)[None]


def borders(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


CASES = {
    "one": ((37,), 2, 2, 8, True),
    "documents": ((5, 1, 20), 2, 2, 8, True),
    "grouped": ((19,), 4, 2, 8, True),
    "one key head, odd width": ((18, 3), 3, 1, 13, True),
    "all keys": ((21, 4), 2, 1, 16, False),
}


@pytest.mark.parametrize("lengths, heads, keys, width, causal", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.float32, LOW[1]], ids=str)
def test_value_and_gradients(
    lengths: tuple[int, ...], heads: int, keys: int, width: int, causal: bool, dtype: torch.dtype
) -> None:
    inputs = tensors(*((sum(lengths), number, width) for number in (heads, keys, keys)), dtype=dtype)
    scale, mask = width**-0.5, seen(lengths, causal)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain_attention(q[None], k[None], v[None], mask, scale)[0]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash.attend(q, k, v, borders(lengths), max(lengths), causal=causal, scale=scale)[0]

    if dtype == torch.float32:
        assert_single(ours, plain, inputs, 3e-6)
    else:
        assert_not_worse(ours, plain, plain, inputs, [2.0] * 4)


def test_the_log_sum_exp() -> None:
    q, k, v = tensors((20, 2, 8), (20, 2, 8), (20, 2, 8))
    _, lse = flash.attend(q, k, v, borders((20,)), 20, scale=0.3)
    scores = torch.einsum("she,the->hst", q, k) * 0.3
    right = scores.masked_fill(~seen((20,), True), float("-inf")).logsumexp(-1)
    torch.testing.assert_close(lse, right, rtol=1e-5, atol=1e-5)


def test_strided_inputs_and_the_same_bits_twice() -> None:
    packed = torch.randn(20, 3, 2, 8)
    runs = [
        flash.attend(*packed.clone().unbind(1), borders((20,)), 20, scale=0.3)[0] for _ in range(2)
    ]  # fmt: skip
    whole = flash.attend(*(x.contiguous() for x in packed.unbind(1)), borders((20,)), 20, scale=0.3)[0]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], whole)

"""Attention of documents and windows in fp32 on a GPU, and dropout: against pairs written out in fp64, on random
lengths; and that nothing of S x S is made."""

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.attention import varlen
from meshwright.kernels.attention.attend import DocumentSpans, attend, causal_mask
from meshwright.kernels.attention.varlen import varlen_attention
from meshwright.kernels.chooser import simulate_device
from tests.kernels.exactness import drops, tensors

SCALE = 0.2
LENGTH = 150


def random_documents(seed: int, rows: int = 2, length: int = LENGTH) -> tuple[Tensor, DocumentSpans]:
    """(rows, length), how many they are, and the longest."""
    drawn = torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)) < 0.05
    documents = drawn.int().cumsum(1)
    sizes = [int(n) for row in documents for n in row.unique(return_counts=True)[1]]
    return documents, DocumentSpans(len(sizes), max(sizes))


def pairs(documents: Tensor | None, window: int, rows: int = 2, length: int = LENGTH) -> Tensor:
    """(rows, 1, length, length): who sees whom."""
    back = torch.arange(length)[:, None] - torch.arange(length)
    seen = ((back >= 0) & (back < (window or length))).expand(rows, -1, -1)
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None, :])
    return seen[:, None]


def exact(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, factors: Tensor | float = 1.0) -> Tensor:
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bshe,bthe->bhst", q, k) * SCALE
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1) * factors
    return torch.einsum("bhst,bthv->bshv", weights, v)


def with_gradients(attended: Any, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs[:3]]
    out = attended(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3].to(dtype))]


class MemoryEfficient:
    """The two operations of a GPU, as torch states them; and the largest bias that they were given."""

    def __init__(self) -> None:
        self.largest, self.calls = 0, 0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        assert q.shape[1] == k.shape[1] == v.shape[1] and not any(x.shape[-1] % 8 for x in (q, k, v))
        scores = q @ k.mT * scale
        if bias is not None:
            assert bias.stride(-2) % 16 == 0 and bias.stride(-1) == 1 and bias.shape == scores.shape
            self.largest = max(self.largest, bias.untyped_storage().size() // 4)
            scores = scores + bias
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        self.calls += 1
        sums = scores.logsumexp(-1)
        padding = sums.new_full((*sums.shape[:2], -sums.shape[2] % 32), float("inf"))
        return scores.softmax(-1) @ v, torch.cat((sums, padding), 2)

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, *,
        causal: bool, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            made, sums = self.forward(*leaves, bias, causal=causal, scale=scale)
        torch.testing.assert_close(made[..., : out.shape[-1]], out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(sums[..., : q.shape[2]], lse[..., : q.shape[2]])
        assert lse.is_contiguous() and lse.shape == sums.shape
        return torch.autograd.grad(made, leaves, gradient)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> MemoryEfficient:
    actual = MemoryEfficient()
    monkeypatch.setattr(compat, "efficient_attention", actual.forward)
    monkeypatch.setattr(compat, "efficient_attention_backward", actual.backward)
    monkeypatch.setattr(varlen, "STRIP_QUERIES", 32)
    return actual


@pytest.mark.parametrize("heads", [(4, 4, 8, 8), (4, 2, 8, 8), (4, 1, 12, 6), (3, 3, 12, 20)], ids=str)
@pytest.mark.parametrize(("window", "packed"), [(0, True), (7, False), (60, True)])
def test_fp32_on_a_gpu_equals_pairs_written_out(
    heads: tuple[int, int, int, int], window: int, packed: bool, kernel: MemoryEfficient
) -> None:
    queries, keys, width, values = heads
    sizes = ((queries, width), (keys, width), (keys, values), (queries, values))
    inputs = tensors(*((2, LENGTH, *size) for size in sizes), dtype=torch.float32)
    documents, spans = random_documents(window + width)
    seen = pairs(documents if packed else None, window)
    with simulate_device("cuda"):
        mask = causal_mask(LENGTH, LENGTH, window=window, documents=documents if packed else None, spans=spans)
        actual = with_gradients(lambda q, k, v: attend(q, k, v, mask, scale=SCALE), inputs, torch.float32)
    right = with_gradients(lambda q, k, v: exact(q, k, v, seen), inputs, torch.float64)
    for ours, theirs in zip(actual, right, strict=True):
        assert (ours - theirs).norm() <= 2e-6 * theirs.norm()
    assert kernel.calls and kernel.largest <= 2 * 32 * (LENGTH + 16)


def test_strips_leave_out_what_no_document_and_no_window_reaches(kernel: MemoryEfficient) -> None:
    tiles = list(varlen.query_strips(150, 20, 0))
    assert [(t.queries.start, t.queries.stop, t.keys.start, t.keys.stop) for t in tiles] == [
        (0, 32, 0, 32), (32, 64, 13, 64), (64, 96, 45, 96), (96, 128, 77, 128), (128, 150, 109, 150),
    ]  # fmt: skip
    assert [t.keys.start for t in varlen.query_strips(150, 150, 5)] == [0, 28, 60, 92, 124]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.long
def test_on_fake_tensors_of_a_gpu_no_host_waits_and_nothing_of_s_x_s_is_made(
    dtype: torch.dtype, dropout: float, window: int
) -> None:
    length, largest = 4096, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, tuple | list) else [made]:
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes())
            return made

    with simulate_device("cuda"), compat.fake_tensors(), Watch():
        q, k, v = (torch.empty(1, length, heads, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
        documents = torch.zeros(1, length, dtype=torch.int32)
        mask = causal_mask(length, length, window=window, documents=documents, spans=DocumentSpans(7, 2000))
        out = attend(q, k, v, mask, scale=SCALE, dropout=drops(torch.empty(1, length, 4, 16), dropout))
        out.backward(torch.ones_like(out))
    assert q.grad is not None and q.grad.shape == q.shape
    assert largest < length * length * 4 * (1 if dtype == torch.float32 else 0.2)


@pytest.mark.parametrize(("window", "packed"), [(0, False), (0, True), (40, False), (30, True)])
def test_dropout_by_blocks_drops_a_share_of_what_is_seen_and_gives_its_gradients(window: int, packed: bool) -> None:
    """With values of one in a place of their own the result is the weights themselves: what was dropped shows."""
    rate, heads = 0.3, 3
    q, k = tensors((2, LENGTH, heads, 8), (2, LENGTH, heads, 8), dtype=torch.float32)
    ones = torch.eye(LENGTH)[None, :, None].expand(2, -1, heads, -1).contiguous()
    documents, spans = random_documents(5)
    documents_or_none = documents if packed else None
    seen = pairs(documents_or_none, window)
    mask = causal_mask(LENGTH, LENGTH, window=window, documents=documents_or_none, spans=spans)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask, scale=SCALE, dropout=drops(q, rate, seed=11))

    gradient = torch.randn(2, LENGTH, heads, LENGTH, generator=torch.Generator().manual_seed(3))
    inputs = [q, k, ones, gradient]
    actual = with_gradients(ours, inputs, torch.float32)
    weights = exact(*(x.double() for x in inputs[:3]), seen)
    shown = seen.transpose(1, 2).expand_as(weights)
    factors = (actual[0] / weights.where(shown, torch.ones(()).double())).where(shown, torch.zeros(()).double())
    is_shown = factors[shown] > 0.5
    there = factors[shown][is_shown]
    torch.testing.assert_close(there, torch.full_like(there, 1 / (1 - rate)), rtol=1e-5, atol=0)
    assert abs(float(is_shown.double().mean()) - (1 - rate)) < 4 * (rate * (1 - rate) / len(is_shown)) ** 0.5
    assert not actual[0][~shown].any()
    drawn = torch.zeros_like(factors).masked_fill(factors > 0.5, 1 / (1 - rate)).transpose(1, 2)
    right = with_gradients(lambda q, k, v: exact(q, k, v, seen, drawn), inputs, torch.float64)
    for mine, theirs in zip(actual, right, strict=True):
        assert (mine - theirs).norm() <= 2e-6 * theirs.norm()
    assert not torch.equal(attend(q, k, ones, mask, scale=SCALE, dropout=drops(q, rate, seed=12)), actual[0])


def test_compiled_code_makes_dropout_again_as_it_was() -> None:
    """Masks follow from keys, so the operator says that it draws nothing, and compiled code gives the same."""
    q, k, v = tensors((1, 40, 2, 8), (1, 40, 2, 8), (1, 40, 2, 8), dtype=torch.float32)
    assert torch.Tag.nondeterministic_seeded not in varlen_attention._opoverload.tags
    dropout = drops(q, 0.2)
    assert dropout is not None
    arguments = (None, None, None, 9, SCALE, "blocks", *dropout)
    made = []
    for _ in range(2):
        leaf = q.clone().requires_grad_()
        out = varlen_attention(leaf, k, v, *arguments)[0]
        made.append((out.detach(), *torch.autograd.grad(out.sum(), leaf)))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    actual = torch.compile(lambda q: varlen_attention(q, k, v, *arguments)[0], backend="aot_eager")(q)
    torch.testing.assert_close(actual, made[0][0])

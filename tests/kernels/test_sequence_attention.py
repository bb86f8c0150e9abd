"""Attention of whole sequences in compiled loops, forward and backward, against pairs written out in fp64."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.kernels.attention import attend as attention
from meshwright.kernels.attention import partial as partial_attention
from meshwright.kernels.attention import varlen
from meshwright.kernels.attention.attend import attend, backend, causal_mask
from meshwright.kernels.attention.partial import PartialAttention, PartialGradients, Tile
from meshwright.kernels.c import build, sequence_attention, training_rows
from tests.kernels.exactness import FUSED_ATTENTION, assert_not_worse, assert_single, errors, plain_attention, tensors

pytestmark = pytest.mark.skipif(
    not training_rows.is_compiled(), reason="no C compiler that takes the loops of kernels/c"
)
SCALE = 0.2
FORMS = {  # rows, positions, query heads, key heads, widths of keys and values, window, mean share of borders
    "plain": (2, 100, 6, 2, 64, 64, 0, 0.0),
    "one position": (2, 1, 2, 2, 32, 32, 0, 0.0),
    "a tile": (1, 64, 2, 2, 16, 32, 0, 0.0),
    "a tile and one": (1, 65, 4, 1, 32, 16, 0, 0.0),
    "latent": (2, 150, 4, 4, 192, 128, 0, 0.0),
    "odd vectors": (2, 130, 4, 2, 80, 48, 0, 0.0),
    "window": (2, 200, 4, 1, 48, 64, 37, 0.0),
    "window of one": (1, 90, 2, 1, 16, 16, 1, 0.0),
    "window of a tile": (1, 300, 2, 1, 16, 16, 64, 0.0),
    "documents": (3, 333, 4, 2, 64, 32, 0, 0.02),
    "documents of one": (2, 70, 4, 2, 16, 16, 0, 1.0),
    "documents and a window": (2, 300, 4, 2, 128, 64, 50, 0.01),
}


@pytest.fixture(autouse=True)
def at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LONG", 0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def attended(inputs: Sequence[Tensor], mask: attention.Mask) -> Tensor:
    q, k, v = inputs
    return attend(q, k, v, mask, scale=SCALE)


def case(name: str, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], attention.Mask, Tensor]:
    """q, k and v, the mask, and who sees whom (B, S, S)."""
    rows, length, heads, keys, width, values, window, share = FORMS[name]
    inputs = tensors(
        (rows, length, heads, width), (rows, length, keys, width), (rows, length, keys, values), dtype=dtype
    )
    drawn = torch.rand(rows, length, generator=torch.Generator().manual_seed(length)) < share
    documents = drawn.int().cumsum(1).int()
    mask = causal_mask(length, length, window=window, documents=documents if share else None)
    back = torch.arange(length)[:, None] - torch.arange(length)
    near = (back >= 0) & (back < (window or length))
    return inputs, mask, near & (documents[:, :, None] == documents[:, None, :])


@pytest.mark.parametrize("name", FORMS)
def test_fp32_is_exact_to_a_few_roundings(name: str) -> None:
    inputs, mask, seen = case(name)
    q, k, v = inputs
    assert backend(q, k, v, mask, scale=SCALE) == "compiled loops"
    plain = partial(plain_attention, seen=seen, scale=SCALE)
    assert_single(partial(attend, mask=mask, scale=SCALE), plain, inputs, bound=2e-6)


@pytest.fixture(params=[True, False], ids=["pairs", "widened"])
def units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether products of bf16 may be the processor's own; where it has none, both go the same way."""
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: request.param)
    return bool(request.param)


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("name", FORMS)
def test_bf16_is_no_further_from_the_truth_than_plain_code(name: str) -> None:
    inputs, mask, seen = case(name, torch.bfloat16)
    plain = partial(plain_attention, seen=seen, scale=SCALE)
    bars = [FUSED_ATTENTION] * 4
    assert_not_worse(partial(attend, mask=mask, scale=SCALE), plain, plain, inputs, bars)


class OverOtherKeys(torch.autograd.Function):
    """The loops over keys that are not the queries' own: query i sees those up to i + past."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, past: int) -> Tensor:
        documents = [(slice(0, len(q)), 0, q.shape[1])]
        out, sums = sequence_attention.attend(q, k, v, documents, window=0, scale=SCALE, past=past)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.documents, ctx.past = documents, past
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, out, sums = ctx.saved_tensors
        gradients = sequence_attention.gradients(
            gradient, q, k, v, out, sums, ctx.documents, window=0, scale=SCALE, past=ctx.past
        )
        return *gradients, None


PARTS = {  # queries, keys, past
    "whole": (65, 200, 200), "whole, few keys": (200, 17, 17), "two keys": (70, 2, 2), "causal": (130, 130, 0),
    "causal to the end": (70, 150, 80), "not all keys": (64, 200, 3), "one query": (1, 90, 40), "tiles": (128, 128, 64),
}  # fmt: skip


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PARTS)
def test_queries_attend_over_other_keys(name: str, dtype: torch.dtype) -> None:
    queries, keys, past = PARTS[name]
    inputs = tensors((2, queries, 4, 64), (2, keys, 2, 64), (2, keys, 2, 32), dtype=dtype)
    seen = torch.arange(keys) <= torch.arange(queries)[:, None] + past
    plain = partial(plain_attention, seen=seen, scale=SCALE)
    run = partial(_over_other_keys, past=past)
    if dtype == torch.float32:
        assert_single(run, plain, inputs, bound=2e-6)
    else:
        assert_not_worse(run, plain, plain, inputs, [FUSED_ATTENTION] * 4)


def _over_other_keys(q: Tensor, k: Tensor, v: Tensor, past: int) -> Tensor:
    out: Tensor = OverOtherKeys.apply(q, k, v, past)  # type: ignore[no-untyped-call]
    return out


def test_the_loops_take_tiles_from_64_queries_and_keys_on() -> None:
    """Speed that no clock guards: on smaller tiles torch's kernel is as fast."""

    def taken(queries: int, keys: int, **borders: int) -> bool:
        q, k, v = (torch.zeros(1, 2, length, 16) for length in (queries, keys, keys))
        tile = Tile(queries=slice(0, queries), keys=slice(0, keys), **borders)
        return partial_attention._loops_take(q, k, v, tile)

    assert taken(64, 64) and taken(64, 64, right=0) and taken(128, 32)
    assert not taken(63, 64) and not taken(64, 128, right=0) and not taken(64, 64, left=7, right=0)


@pytest.mark.parametrize("loops", [True, False])
def test_parts_of_the_keys_add_up(loops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of the second half: the first half of the keys whole, then their own, as context parallelism does."""
    half, calls = 96, list[str]()
    monkeypatch.setattr(partial_attention, "LEAST_PAIRS", 0 if loops else 2**62)
    for name in ("attend", "gradients"):
        loop = getattr(sequence_attention, name)
        monkeypatch.setattr(
            sequence_attention,
            name,
            lambda *args, name=name, loop=loop, **more: (calls.append(name), loop(*args, **more))[1],
        )
    q, k, v, gradient = tensors((2, half, 4, 32), (2, 2 * half, 2, 32), (2, 2 * half, 2, 16), (2, half, 4, 16))
    queries = slice(0, half)
    parts = [
        (k[:, :half], v[:, :half], Tile(queries=queries, keys=queries)),
        (k[:, half:], v[:, half:], Tile(queries=queries, keys=queries, right=0)),
    ]
    attention_so_far = PartialAttention(q, 16, scale=SCALE, fused=True)
    for keys, values, tile in parts:
        attention_so_far.add(keys.transpose(1, 2), values.transpose(1, 2), [tile])
    out, lse = attention_so_far.result()
    gradients = PartialGradients(q, out, lse, gradient, scale=SCALE, fused=True)
    sums = []
    for keys, values, tile in parts:
        zeros = [torch.zeros_like(x.transpose(1, 2).contiguous()) for x in (keys, values)]
        gradients.add(keys.transpose(1, 2), values.transpose(1, 2), [tile], *zeros)
        sums.append(zeros)
    k_gradient, v_gradient = (torch.cat(halves, 2).transpose(1, 2) for halves in zip(*sums, strict=True))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    seen = torch.arange(2 * half) <= torch.arange(half)[:, None] + half
    right = plain_attention(leaves[0], leaves[1], leaves[2], seen, SCALE)
    expected = [right, *torch.autograd.grad(right, leaves, gradient.double())]
    for x, exact in zip((out, gradients.result(), k_gradient, v_gradient), expected, strict=True):
        torch.testing.assert_close(x.double(), exact, rtol=1e-4, atol=1e-5)
    assert calls == (["attend"] * 2 + ["gradients"] * 2 if loops else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "documents and a window"])
def test_threads_share_a_key_head(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are few, by query heads, whose gradients of keys and values are added."""
    inputs, mask, seen = case(name, dtype)
    monkeypatch.setattr(sequence_attention, "_parts", lambda units, group, threads: group)
    plain = partial(plain_attention, seen=seen, scale=SCALE)
    run = partial(attend, mask=mask, scale=SCALE)
    if dtype == torch.float32:
        assert_single(run, plain, inputs)
    else:
        assert_not_worse(run, plain, plain, inputs, [FUSED_ATTENTION] * 4)


def test_parts_are_as_few_as_give_all_threads_work() -> None:
    assert [sequence_attention._parts(8, 6, threads) for threads in (1, 4, 5, 8, 12, 16, 64)] == [1, 1, 2, 2, 3, 6, 6]


@pytest.mark.parametrize("name", ["plain", "odd vectors", "documents"])
def test_views_of_one_product_are_read_where_they_lie(name: str) -> None:
    (q, k, v), mask, seen = case(name)
    heads, keys = q.shape[2] * q.shape[3], k.shape[2] * k.shape[3]

    def of_one(x: Tensor, run: attention.Mask | None) -> Tensor:
        parts = x[..., :heads], x[..., heads : heads + keys], x[..., heads + keys :]
        views = [part.unflatten(2, (-1, like.shape[3])) for part, like in zip(parts, (q, k, v), strict=True)]
        return plain_attention(views[0], views[1], views[2], seen, SCALE) if run is None else attended(views, run)

    whole = torch.cat([part.flatten(2) for part in (q, k, v)], 2)
    assert_single(partial(of_one, run=mask), partial(of_one, run=None), [whole])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", ["plain", "documents and a window"])
def test_nothing_is_read_that_was_not_written_and_bits_repeat(name: str) -> None:
    """Fresh memory is filled with what is no number."""
    inputs, mask, _ = case(name)
    actual = []
    try:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # of its class
        for _ in range(2):
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = attended(leaves, mask)
            actual.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(x).all() for x in actual[0])
    assert all(a.equal(b) for a, b in zip(*actual, strict=True))


@pytest.mark.parametrize("size", [1e4, 1e18])
def test_large_scores_neither_overflow_nor_vanish(size: float) -> None:
    """One key gets nearly all the weight; scores of 1e5 are themselves off by 1e-2 in fp32."""
    inputs, mask, seen = case("plain")
    q, k, v = inputs
    large = [q * size, k, v]
    exact = plain_attention(large[0].double(), k.double(), v.double(), seen, SCALE)
    torch.testing.assert_close(attended(large, mask).double(), exact, rtol=0, atol=2e-2)


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("scale", [0.0, 1e-46, -0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_scale_is_taken_for_another(dtype: torch.dtype, scale: float) -> None:
    """Of 0, and of what is 0 in fp32, all weights of a query are the same."""
    inputs, mask, seen = case("plain", dtype)
    plain = partial(plain_attention, seen=seen, scale=scale)
    assert max(errors(partial(attend, mask=mask, scale=scale), plain, inputs)) < (
        2e-6 if dtype == torch.float32 else 4e-3
    )


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("width", [32, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e4, 1e10, 1e30])
def test_weights_are_made_again_of_the_same_scores(size: float, dtype: torch.dtype, width: int) -> None:
    """Here one key has all the weight, so its value has the gradient. A score that is rounded in another way than that
    of the forward pass would be off by more than 1, and its weight by e to that power."""
    _, mask, seen = case("a tile and one")
    q, k, v = tensors((1, 65, 4, width), (1, 65, 1, width), (1, 65, 1, 32), dtype=dtype)
    large = [q * size, k, v]
    (of_v,) = torch.autograd.grad(attended(leaves := [x.requires_grad_() for x in large], mask).sum(), leaves[2:])
    scores = torch.einsum("bshe,bte->bhst", large[0].detach().double(), k[:, :, 0].detach().double())
    weights = scores.where(seen[:, None], -torch.inf).mul(SCALE).softmax(-1)
    exact = weights.sum((1, 2))[:, :, None, None].expand_as(v)
    assert SCALE * size >= 2e3  # so that all weights are 0 or 1
    torch.testing.assert_close(of_v.double(), exact, rtol=4e-3 if dtype == torch.bfloat16 else 1e-3, atol=1e-3)


@pytest.mark.parametrize("narrow", [("-U__AVX512F__",), ("-U__AVX512F__", "-U__AVX__")], ids=["eight", "four"])
@pytest.mark.parametrize("name", ["plain", "odd vectors", "documents and a window"])
def test_vectors_of_other_processors(name: str, narrow: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *narrow))
    made = training_rows._library.__wrapped__()
    assert made is not None
    monkeypatch.setattr(sequence_attention, "library", lambda: made)
    inputs, mask, seen = case(name)
    plain = partial(plain_attention, seen=seen, scale=SCALE)
    assert_single(partial(attend, mask=mask, scale=SCALE), plain, inputs, bound=2e-6)


def test_what_is_no_number_stays_in_its_document() -> None:
    (q, k, v), _, _ = case("plain")
    documents = (torch.arange(100) >= 40).int().expand(2, -1)
    k = k.clone()
    k[:, 50] = float("nan")
    out = attend(q, k, v, causal_mask(100, 100, documents=documents), scale=SCALE)
    assert torch.isfinite(out[:, :40]).all() and out[:, 50:].isnan().all()


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_the_compiled_operator_is_declared_as_it_is(share: float) -> None:
    (q, k, v), mask, _ = case("documents" if share else "plain")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for window in (0, 9):
        arguments = (*leaves, mask.documents, None, None, window, SCALE, "loops", 0.0, None)
        torch.library.opcheck(varlen.varlen_attention, arguments)


def test_code_that_torch_compiles_takes_them_too() -> None:
    inputs, mask, _ = case("plain")
    compiled = torch.compile(attended, backend="aot_eager", fullgraph=True)
    assert compiled(inputs, mask).equal(attended(inputs, mask))


def test_compiled_code_of_any_length_goes_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's kernel below the length from which loops pay."""
    monkeypatch.setattr(attention, "LONG", 64 * 64)

    def of_one(x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (-1, 64)) for part in x.split((256, 128, 128), dim=2))
        return attended((q, k, v), causal_mask(x.shape[1], x.shape[1]))

    compiled = torch.compile(of_one, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (40, 41, 64, 90):
        (x,) = tensors((2, length, 512))
        torch.testing.assert_close(compiled(x), of_one(x))


def test_fake_tensors_take_as_much_memory() -> None:
    inputs, mask, _ = case("plain")
    leaves = [x.requires_grad_() for x in inputs]
    real = torch.autograd.grad(attended(leaves, mask).sum(), leaves)
    with compat.fake_tensors():
        fakes = [torch.empty(x.shape, requires_grad=True) for x in inputs]
        made = torch.autograd.grad(attended(fakes, mask).sum(), fakes)
    assert [x.shape for x in made] == [x.shape for x in real]


def test_second_derivatives_are_right() -> None:
    """No part of them is missing where code in C recorded nothing."""
    operands, mask, seen = case("documents and a window")

    def twice(run: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        first = torch.autograd.grad(run(*leaves).square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), leaves))

    actual = twice(partial(attend, mask=mask, scale=SCALE), operands)
    exact = twice(partial(plain_attention, seen=seen, scale=SCALE), [x.double() for x in operands])
    for a, b in zip(actual, exact, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


@pytest.mark.parametrize("q, k, v", [
    ((2, 70, 4, 32), (1, 70, 2, 32), (1, 70, 2, 32)), ((2, 70, 4, 32), (2, 70, 2, 16), (2, 70, 2, 32)),
    ((2, 70, 4, 32), (2, 70, 3, 32), (2, 70, 3, 32)), ((2, 70, 4, 32), (2, 70, 2, 32), (2, 40, 2, 32)),
    ((2, 70, 4, 32), (2, 70, 2, 32), (2, 70, 1, 32)),
], ids=["rows", "width", "heads", "positions", "heads of values"])  # fmt: skip
def test_tensors_that_do_not_fit_never_reach_them(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]
) -> None:  # fmt: skip
    assert not sequence_attention.takes_heads(*tensors(q, k, v))


@pytest.mark.parametrize("other", [torch.float16, torch.float64, torch.bfloat16])
def test_tensors_of_two_dtypes_are_refused(other: torch.dtype) -> None:
    (q, k, v), mask, _ = case("plain")
    for mixed in ((q, k.to(other), v), (q, k, v.to(other))):
        with pytest.raises(RuntimeError, match="same dtype"):
            attended(mixed, mask)


@pytest.mark.parametrize("dtype, width, first, dropout", [
    (torch.float16, 32, 0, 0.0), (torch.float32, 24, 0, 0.0), (torch.float32, 512, 0, 0.0),
    (torch.float32, 32, 1, 0.0), (torch.float32, 32, 0, 0.1),
], ids=["fp16", "no whole vector", "too wide", "fewer queries", "dropout"])  # fmt: skip
def test_what_they_do_not_take_goes_the_other_ways(dtype: torch.dtype, width: int, first: int, dropout: float) -> None:
    q, k, v = tensors((2, 70, 4, width), (2, 70, 2, width), (2, 70, 2, width), dtype=dtype)
    assert backend(q[:, first:], k, v, attention.Mask(), scale=SCALE, dropout=dropout) != "compiled loops"


def test_without_a_compiler_torch_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, mask, seen = case("documents")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert build.load("sequence_attention.c") is None
    monkeypatch.setattr(training_rows, "is_compiled", lambda: False)
    q, k, v = inputs
    assert backend(q, k, v, mask, scale=SCALE) in ("flash", "blockwise")
    plain = partial(plain_attention, seen=seen, scale=SCALE)
    assert_single(partial(attend, mask=mask, scale=SCALE), plain, inputs, bound=2e-6)

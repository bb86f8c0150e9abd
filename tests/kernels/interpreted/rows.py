"""Norms, activations, rotary positions, merging: forward and backward against fp64, odd sizes, poisoned outputs."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels.attention import partial as partial_attention
from meshwright.kernels.attention import rope
from meshwright.kernels.linear import swiglu
from meshwright.kernels.norm import norms
from meshwright.kernels.triton import flash, gated, root_norm, rotary
from tests.kernels.exactness import LOW, assert_not_worse, assert_single, outcome, tensors
from tests.kernels.interpreted.poison import nothing_is_left_unwritten  # noqa: F401  # a fixture

EPS = 1e-5
SIZES = [(1, 1), (3, 8), (5, 33), (2, 4, 100), (19, 7)]
FP16 = LOW[1]


def rms_exact(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rms_norm(size: tuple[int, ...]) -> None:
    inputs = tensors(size, size[-1:])
    assert_single(partial(root_norm.rms_norm, eps=EPS), rms_exact, inputs, 1e-6 if size[-1] > 1 else 1e-5)


@pytest.mark.parametrize("wide", [False, True], ids=["fp16", "fp32 weight"])
def test_rms_norm_of_16_bit(wide: bool) -> None:
    x, weight = tensors((9, 65), (65,), dtype=FP16)
    weight = weight.float() if wide else weight
    plain = partial(norms.rms_norm_reference, eps=EPS)
    assert_not_worse(partial(root_norm.rms_norm, eps=EPS), plain, rms_exact, [x, weight])


def both(function: object, *inputs: Tensor) -> Tensor:
    """The norm and half the sum, side by side, so that each has a gradient of its own."""
    assert callable(function)
    normed, total = function(*inputs)
    return torch.cat((normed, total * 0.5), -1)


@pytest.mark.parametrize("dtype", [torch.float32, FP16], ids=str)
@pytest.mark.parametrize("size", [(3, 8), (2, 5, 33)], ids=str)
def test_add_rms_norm(size: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = tensors(size, size, size[-1:], dtype=dtype)
    exact = partial(both, lambda x, y, w: (rms_exact(x + y, w), x + y))
    fast = partial(both, partial(root_norm.add_rms_norm, eps=EPS))
    plain = partial(both, partial(norms.add_rms_norm_reference, eps=EPS))
    assert_single(fast, exact, inputs) if dtype == torch.float32 else assert_not_worse(fast, plain, exact, inputs)


def test_add_rms_norm_rounds_the_sum_as_plain_code_does() -> None:
    x, added, weight = tensors((4, 16), (4, 16), (16,), dtype=FP16)
    assert torch.equal(root_norm.add_rms_norm(x, added, weight, EPS)[1], x + added)


def layer_exact(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


@pytest.mark.parametrize("size", SIZES[1:], ids=str)
def test_layer_norm(size: tuple[int, ...]) -> None:
    inputs = tensors(size, size[-1:], size[-1:])
    assert_single(partial(root_norm.layer_norm, eps=EPS), layer_exact, inputs, 2e-6)


def test_layer_norm_of_16_bit() -> None:
    inputs = tensors((9, 65), (65,), (65,), dtype=FP16)
    plain = partial(norms.layer_norm_reference, eps=EPS)
    assert_not_worse(partial(root_norm.layer_norm, eps=EPS), plain, layer_exact, inputs)


def swiglu_exact(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_swiglu(size: tuple[int, ...]) -> None:
    assert_single(gated.swiglu, swiglu_exact, tensors(size, size))


def test_swiglu_of_parts_of_wider_rows_and_16_bit() -> None:
    (packed,) = tensors((6, 50), dtype=FP16)
    split = lambda function: lambda x: function(x[:, :25], x[:, 25:])  # noqa: E731
    assert_not_worse(split(gated.swiglu), split(swiglu.swiglu_reference), split(swiglu_exact), [packed])


@pytest.mark.parametrize("dtype", [torch.float32, FP16], ids=str)
def test_swiglu_linear(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The door itself, which asks for the interpreter."""
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: True)
    inputs = tensors((20, 3, 40), (20, 3, 40), (8, 40), (8,), dtype=dtype)
    exact = lambda gate, up, weight, bias: F.linear(F.silu(gate) * up, weight, bias)  # noqa: E731
    fast = partial(swiglu.swiglu_linear, prefer="triton")
    if dtype == torch.float32:
        assert_single(fast, exact, inputs)
    else:
        assert_not_worse(fast, swiglu.swiglu_linear_reference, exact, inputs, [1.05] * 5)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, FP16], ids=str)
def test_gelu(approximate: str, dtype: torch.dtype) -> None:
    inputs = tensors((7, 300), dtype=dtype)
    exact, fast = partial(F.gelu, approximate=approximate), partial(gated.gelu, approximate=approximate)
    assert_single(fast, exact, inputs) if dtype == torch.float32 else assert_not_worse(fast, exact, exact, inputs)


def angles(length: int, half: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    turn = torch.rand(batch, length, 1, half, generator=torch.Generator().manual_seed(3)) * 6
    return turn.cos(), turn.sin()


def pair(function: object, **options: object) -> Callable[..., Tensor]:
    assert callable(function)

    def run(q: Tensor, k: Tensor) -> Tensor:
        made = (q * 1, k * 1)  # no leaves
        return torch.cat([x.flatten() for x in function(*made, **options)])

    return run


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("batch", [1, 2], ids=["one table", "a table each"])
def test_rotate_pair(interleaved: bool, in_place: bool, batch: int) -> None:
    cos, sin = angles(3, 5, batch)
    exact = lambda q, k: torch.cat(  # noqa: E731
        [rope.rotate_reference(x, cos.double(), sin.double(), interleaved).flatten() for x in (q, k)]
    )
    fast = pair(rotary.rotate_pair, cos=cos, sin=sin, interleaved=interleaved, in_place=in_place)
    assert_single(fast, exact, tensors((2, 3, 6, 10), (2, 3, 2, 10)))


def test_rotate_pair_of_16_bit_and_views() -> None:
    cos, sin = angles(3, 4)
    inputs = tensors((2, 3, 40), dtype=FP16)

    def split(function: object, x: Tensor, *tables: Tensor) -> Tensor:
        assert callable(function)
        q, k = (part.unflatten(-1, (-1, 8)) for part in (x * 1).split((24, 16), -1))
        return torch.cat(function(q, k, *tables), 2)

    fast = lambda x: split(rotary.rotate_pair, x, cos, sin)  # noqa: E731
    plain = lambda x: split(rope.rotate_pair_reference, x, cos, sin)  # noqa: E731
    exact = lambda x: split(rope.rotate_pair_reference, x, cos.double(), sin.double())  # noqa: E731
    assert_not_worse(fast, plain, exact, inputs)


def test_rotation_in_place_takes_no_memory_and_a_leaf_is_left_alone() -> None:
    q, k = tensors((1, 3, 2, 8), (1, 3, 1, 8))
    actual = rotary.rotate_pair(q, k, *angles(3, 4))
    assert [x.data_ptr() for x in actual] == [q.data_ptr(), k.data_ptr()]
    leaf = q.clone().requires_grad_()
    before = leaf.detach().clone()
    rotary.rotate_pair(leaf, k, *angles(3, 4))
    assert torch.equal(leaf, before)


def test_who_saved_what_is_written_over_is_told() -> None:
    q, k = (x.requires_grad_() for x in tensors((1, 3, 2, 8), (1, 3, 1, 8)))
    made = q * 1
    squared = made.square()  # needs `made` in its backward pass
    turned, _ = rotary.rotate_pair(made, k * 1, *angles(3, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (squared.sum() + turned.sum()).backward()


@pytest.mark.parametrize("dtype", [torch.float32, FP16], ids=str)
def test_merge(dtype: torch.dtype) -> None:
    batch, heads, queries, width = 2, 3, 18, 12
    out, lse = tensors((batch, heads, queries + 4, width), (batch, heads, queries + 4))
    (part,) = tensors((batch, queries, heads, width), dtype=dtype, seed=1)
    part_lse, shift = tensors((batch, heads, queries), (batch, heads, queries), seed=2)
    lse[:, :, :3] = float("-inf")  # rows that saw nothing so far
    right, right_lse = out.double(), lse.double()
    here = slice(2, 2 + queries)
    partial_attention._merge(right[:, :, here], right_lse[:, :, here], part.transpose(1, 2).double(), part_lse, shift)
    flash.merge(out[:, :, here], lse[:, :, here], part.transpose(1, 2), part_lse, shift)
    torch.testing.assert_close(out.double(), right, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-6, atol=1e-6)


def test_the_same_inputs_give_the_same_bits() -> None:
    inputs = tensors((37, 40), (40,), dtype=FP16)
    runs = [outcome(partial(root_norm.rms_norm, eps=EPS), inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))

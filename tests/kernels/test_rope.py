"""Rotation of pairs: against complex numbers in fp64, in both ways of pairing."""

from functools import partial

import pytest
import torch
from torch import Tensor

from meshwright.kernels import fast, reference
from meshwright.kernels.attention import rope
from tests.counting import saved_bytes
from tests.kernels.exactness import LOW, assert_not_worse, assert_single, tensors

PAIRINGS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])


def angles(rows: int, length: int, pairs: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Tables (rows, S, 1, E/2) of exactly known cos and sin."""
    turn = torch.randn(rows, length, 1, pairs, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return turn.cos().to(dtype), turn.sin().to(dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """A pair is a complex number; turning is multiplying by cos + i sin."""
    half = x.shape[-1] // 2
    pairs = x.unflatten(-1, (half, 2)) if interleaved else x.unflatten(-1, (2, half)).transpose(-1, -2)
    product = torch.view_as_complex(pairs.contiguous().double()) * torch.complex(cos.double(), sin.double())
    split = torch.view_as_real(product)
    flat = split.flatten(-2) if interleaved else split.transpose(-1, -2).flatten(-2)
    return flat.to(x.dtype)


@PAIRINGS
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("size", [(2, 1, 1, 2), (2, 5, 3, 8)], ids=str)
@pytest.mark.parametrize("name", ["fast", "reference"])
def test_value_and_gradient(interleaved: bool, rows: int, size: tuple[int, ...], name: str) -> None:
    rotate = (fast() if name == "fast" else reference()).rotate
    cos, sin = angles(rows, size[1], size[-1] // 2)
    exact = partial(turned, cos=cos, sin=sin, interleaved=interleaved)
    assert_single(lambda x: rotate(x, cos, sin, interleaved), exact, tensors(size))


@PAIRINGS
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_16_bit_is_no_further_from_fp64_than_plain_code(interleaved: bool, dtype: torch.dtype) -> None:
    cos, sin = angles(1, 20, 8)
    low = cos.to(dtype), sin.to(dtype)
    plain = lambda x: reference().rotate(x, *low, interleaved)  # noqa: E731
    exact = partial(turned, cos=cos, sin=sin, interleaved=interleaved)
    assert_not_worse(
        lambda x: fast().rotate(x, cos, sin, interleaved), plain, exact, tensors((2, 20, 3, 16), dtype=dtype)
    )


@PAIRINGS
def test_first_derivatives_in_fp64(interleaved: bool) -> None:
    cos, sin = angles(2, 3, 4, torch.float64)
    x = tensors((2, 3, 2, 8))[0].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rope._Rotate.apply(x, cos, sin, interleaved), [x])
    assert torch.autograd.gradcheck(lambda x: fast().rotate(x, cos, sin, interleaved), [x])


@PAIRINGS
def test_inputs_may_be_views(interleaved: bool) -> None:
    """Latent attention turns the last dims of a head only, and one key for all heads."""
    cos, sin = angles(1, 5, 2)
    exact = partial(turned, cos=cos, sin=sin, interleaved=interleaved)
    inputs = tensors((2, 5, 3, 12))
    assert_single(lambda x: fast().rotate(x[..., 8:], cos, sin, interleaved), lambda x: exact(x[..., 8:]), inputs)
    assert_single(
        lambda x: fast().rotate(x.transpose(1, 2)[:, :, :, 8:], *angles(1, 3, 2), interleaved).transpose(1, 2),
        lambda x: turned(x.transpose(1, 2)[:, :, :, 8:], *angles(1, 3, 2), interleaved).transpose(1, 2),
        inputs,
    )


@PAIRINGS
def test_lengths_stay_and_products_know_distances_only(interleaved: bool) -> None:
    position = torch.arange(6, dtype=torch.float64)
    turn = (position[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)).view(1, 6, 1, 4)
    q, k = (tensor.double().expand(1, 6, 1, 8) for tensor in tensors((1, 1, 1, 8), (1, 1, 1, 8)))
    q_turned, k_turned = (fast().rotate(x, turn.cos(), turn.sin(), interleaved) for x in (q, k))
    torch.testing.assert_close(q_turned.norm(dim=-1), q.norm(dim=-1))
    scores = q_turned[0, :, 0] @ k_turned[0, :, 0].T
    for distance in range(-4, 5):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


@PAIRINGS
def test_only_the_tables_are_kept(interleaved: bool) -> None:
    cos, sin = angles(1, 5, 4)
    x = tensors((2, 5, 3, 8))[0].requires_grad_()
    _, saved = saved_bytes(lambda: fast().rotate(x, cos, sin, interleaved), without=[cos, sin])
    assert saved == 0

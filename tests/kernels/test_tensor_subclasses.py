"""Tensors that a C loop must leave to torch's own operations: their numbers are not behind their pointer (a user's
DTensors, torch.func's wrappers), or somebody records or differentiates what torch does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.fx.experimental.proxy_tensor import make_fx

from meshwright import compat
from meshwright.kernels.attention import attend as attention
from meshwright.kernels.attention import rope
from meshwright.kernels.c import serving_library
from meshwright.kernels.linear import linear, swiglu
from meshwright.kernels.norm import norms

ROWS, WIDTH = 1024, 256
"""Large enough for the compiled loops and for products of oneDNN."""
DRAWN = torch.Generator().manual_seed(4)


def drawn(*size: int) -> Tensor:
    return torch.randn(size, generator=DRAWN)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention.attend(q, k, v, attention.Mask(), scale=0.1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rope.rotate(x, cos, sin)


CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "norm": (lambda x, weight: norms.rms_norm(x, weight, 1e-5), (drawn(ROWS, WIDTH), drawn(WIDTH))),
    "gate": (lambda gate, up: swiglu.swiglu(gate, up), (drawn(ROWS, WIDTH), drawn(ROWS, WIDTH))),
    "rotation": (turned, (drawn(1, ROWS, 4, 64), drawn(1, ROWS, 1, 32), drawn(1, ROWS, 1, 32))),
    "attention": (attended, tuple(drawn(1, ROWS, 4, 64) for _ in range(3))),
    "linear": (linear.linear, (drawn(ROWS, WIDTH), drawn(WIDTH, WIDTH))),
}


@pytest.mark.parametrize("name", CASES)
def test_a_dtensor_gives_what_its_numbers_give(name: str) -> None:
    run, inputs = CASES[name]
    plain = [x.clone().requires_grad_() for x in inputs]
    expected = run(*plain)
    expected.square().sum().backward()
    with compat.fake_world(0, 1), implicit_replication():
        mesh = init_device_mesh("cpu", (1,))
        held = [DTensor.from_local(x, mesh, [Replicate()]).requires_grad_() for x in inputs]
        actual = run(*held)
        actual.square().sum().backward()
        assert isinstance(actual, DTensor)
        torch.testing.assert_close(actual.to_local(), expected, rtol=1e-4, atol=1e-4)
        for tensor, right in zip(held, plain, strict=True):
            assert (tensor.grad is None) == (right.grad is None)
            if isinstance(tensor.grad, DTensor):
                torch.testing.assert_close(tensor.grad.to_local(), right.grad, rtol=1e-3, atol=1e-2)


def test_loops_of_a_server_leave_a_dtensor_alone() -> None:
    x, weight = drawn(4, WIDTH), drawn(WIDTH)
    with (
        torch.no_grad(),
        serving_library.used(serving_library.compiled()),
        compat.fake_world(0, 1),
        implicit_replication(),
    ):
        held = DTensor.from_local(x, init_device_mesh("cpu", (1,)), [Replicate()])
        actual = norms.rms_norm(held, weight, 1e-5)
    assert isinstance(actual, DTensor)
    torch.testing.assert_close(actual.to_local(), norms.rms_norm_reference(x, weight, 1e-5))


def test_the_negative_bit_is_read() -> None:
    x, weight = drawn(ROWS, WIDTH), drawn(WIDTH)
    with torch.no_grad():
        actual = norms.rms_norm(torch._neg_view(-x), weight, 1e-5)
        torch.testing.assert_close(actual, norms.rms_norm_reference(x, weight, 1e-5))


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and warns of all that it cannot record
@pytest.mark.parametrize("name", ["norm", "gate", "rotation"])
def test_a_tracer_records_what_is_computed(name: str) -> None:
    run, inputs = CASES[name]
    other = tuple(x + 0.5 for x in inputs)
    with torch.no_grad():
        for traced in (torch.jit.trace(run, inputs), make_fx(run)(*inputs)):
            torch.testing.assert_close(traced(*other), run(*other), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch scripts its own rules of forward mode
@pytest.mark.parametrize("name", ["norm", "gate", "linear"])
def test_a_tangent_goes_through(name: str) -> None:
    run, (x, *others) = CASES[name]
    with torch.no_grad(), forward_ad.dual_level():
        actual = run(forward_ad.make_dual(x, torch.ones_like(x)), *others)
        tangent = forward_ad.unpack_dual(actual).tangent
    step = 1e-2
    assert tangent is not None
    torch.testing.assert_close(
        tangent, (run(x + step, *others) - run(x - step, *others)) / (2 * step), rtol=2e-2, atol=2e-2
    )


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rule of square_
def test_wrappers_of_torch_func_are_not_read_by_loops() -> None:
    rows, weight = drawn(4, ROWS, WIDTH), drawn(WIDTH)
    with torch.no_grad():
        actual = torch.func.vmap(lambda x: norms.rms_norm(x, weight, 1e-5))(rows)
        torch.testing.assert_close(actual, norms.rms_norm_reference(rows, weight, 1e-5))


def test_what_lies_in_memory() -> None:
    x = drawn(2, 2)
    assert compat.lies_in_memory(x, torch.nn.Parameter(x))
    with compat.fake_tensors():
        assert compat.lies_in_memory(torch.empty(2))
    with compat.fake_world(0, 1):
        assert not compat.lies_in_memory(x, DTensor.from_local(x, init_device_mesh("cpu", (1,)), [Replicate()]))

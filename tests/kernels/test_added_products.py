"""Products that are gradients of weights and go to sums in fp32 by themselves: on a GPU, and here where a test says so.
This processor's products of 16 bits are rounded before they are added, but where they are emulated in fp32."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from meshwright import compat
from meshwright.kernels import fast
from meshwright.kernels.linear import cpu_product, weight_gradients
from meshwright.kernels.linear.fp8 import FP8_ALL
from meshwright.kernels.linear.linear import WeightProduct
from meshwright.kernels.linear.weight_gradients import GradientSum, WeightGradients, splitting
from tests.counting import Operations
from tests.kernels.exactness import tensors

BF16 = torch.bfloat16
MICRO_BATCHES = 3
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def alone(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return fast().linear(fast().linear(x, a, bias), b)


def together(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    first, second = fast().linears(fast().linear(x, a, bias), (b, b), (None, None))
    return first * second


def gated(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    up = fast().linear(x, a, bias)
    return fast().swiglu_linear(up.tanh(), up, b)


def twice(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return fast().linear(fast().linear(alone(x, a, b, bias), a), b)


def again(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    actual: Tensor = checkpoint(gated, x, a, b, bias, use_reentrant=False)
    return actual


FUNCTIONS = (alone, together, gated, twice, again)


@pytest.fixture(autouse=True)
def sums_take_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradients, "ADDING_DEVICES", {"cpu", "cuda"})


def parameters(seed: int = 0) -> list[nn.Parameter]:
    return [nn.Parameter(tensor) for tensor in tensors((24, 16), (16, 24), (24,), dtype=BF16, seed=seed)]


class Sums:
    """Of some parameters, with how often each was told that a gradient is made."""

    def __init__(self, trained: list[nn.Parameter]) -> None:
        self.made = [0] * len(trained)
        self.each = [
            GradientSum(tensor, torch.float32, partial(self.room, tensor), partial(self.tell, at))
            for at, tensor in enumerate(trained)
        ]

    def room(self, tensor: nn.Parameter) -> Tensor:
        return torch.full(tensor.shape, torch.nan)

    def tell(self, at: int) -> None:
        self.made[at] += 1


def micro_batches() -> list[Tensor]:
    return tensors(*[(2, 5, 16)] * MICRO_BATCHES, dtype=BF16, seed=7)


def backward(function: Function, trained: list[nn.Parameter], *, late: bool = False) -> list[Tensor]:
    """Gradients of all micro-batches; `late`: products are taken behind each backward pass."""
    for x in micro_batches():
        if not late:
            function(x.requires_grad_(), *trained).float().square().sum().backward()
            continue
        with splitting():
            loss = function(x.requires_grad_(), *trained).float().square().sum()
            with WeightGradients() as queue:
                loss.backward()
        assert len(queue)
        queue.run()
    return [tensor.grad for tensor in trained if tensor.grad is not None]


def exact(function: Function) -> list[Tensor]:
    """In fp64, of the same numbers."""
    trained = [nn.Parameter(tensor.detach().double()) for tensor in parameters()]
    for x in micro_batches():
        function(x.double().requires_grad_(), *trained).square().sum().backward()
    return [tensor.grad for tensor in trained if tensor.grad is not None]


def rounded_first(function: Function, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(weight_gradients, "ADDING_DEVICES", {"cuda"})
        trained = parameters()
        sums = Sums(trained)
        actual = backward(function, trained)
        assert all(sums.made)
    return actual


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_sums_are_no_further_from_fp64_than_those_of_rounded_gradients(
    function: Function, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated, so that a product is fp32 until it is in the sum, as on a GPU."""
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: False)
    trained = parameters()
    sums = Sums(trained)
    actual = backward(function, trained, late=late)
    right, before = exact(function), rounded_first(function, monkeypatch)
    for a, b, oracle in zip(actual, before, right, strict=True):
        assert a.dtype == torch.float32
        error, error_before = ((x.double() - oracle).norm() / oracle.norm() for x in (a, b))
        assert error <= 1.02 * error_before
    assert sums.made == [MICRO_BATCHES] * 3, "once for each parameter and pass"


@pytest.mark.parametrize("function", FUNCTIONS[:3], ids=lambda function: function.__name__)
def test_where_products_are_rounded_sums_keep_every_bit(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: True)
    trained = parameters()
    sums = Sums(trained)
    actual = backward(function, trained)
    assert all(map(torch.equal, actual, rounded_first(function, monkeypatch))) and all(sums.made)


def test_no_gradient_is_made_nor_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an element of a weight 4 bytes are written, and 8 are moved for each micro-batch more: 8 and 12 before."""
    taken: list[tuple[tuple[int, ...], int]] = []
    add = cpu_product.add_product

    def counted(total: Tensor, a: Tensor, b: Tensor, beta: int = 1) -> Tensor:
        taken.append((tuple(total.shape), beta))
        with _disable_current_modes():
            return add(total, a, b, beta)

    monkeypatch.setattr(cpu_product, "add_product", counted)
    monkeypatch.setattr(compat, "cpu_multiplies", lambda dtype: True)
    trained = parameters()
    sums = Sums(trained)
    with Operations() as operations:
        backward(alone, trained)
    weights = [tuple(tensor.shape) for tensor in trained[:2]]
    assert sorted(taken) == sorted((shape, int(step > 0)) for shape in weights for step in range(MICRO_BATCHES))
    made = [shape for shape in operations.shapes if shape in weights]
    assert operations.counts["mm"] == 3 * MICRO_BATCHES, "the outputs of one and two gradients of inputs"
    assert len(made) == len(weights) * (1 + MICRO_BATCHES * 1), made
    assert sums.made == [MICRO_BATCHES] * 3


def test_products_of_8_bits_are_made_and_then_added() -> None:
    trained = parameters()
    sums = Sums(trained)
    before = [tensor.detach().clone() for tensor in trained]
    for x in micro_batches():
        fast().linear(x, trained[0], form=FP8_ALL).float().sum().backward()
    assert trained[0].grad is not None and trained[0].grad.dtype == torch.float32 and sums.made[0] == MICRO_BATCHES
    assert all(map(torch.equal, trained, before))


def test_a_second_derivative_is_autograds() -> None:
    weight, x = parameters()[0], micro_batches()[0]
    sums = Sums([weight])
    loss = fast().linear(x.requires_grad_(), weight).float().square().sum()
    (of_x,) = torch.autograd.grad(loss, x, create_graph=True)
    of_x.float().square().sum().backward()
    assert weight.grad is not None and bool(weight.grad.isfinite().all()) and sums.made == [1]


def test_a_product_waits_with_its_operands_alone() -> None:
    weight = parameters()[0]
    sums = Sums([weight])
    with splitting():
        made = fast().linear(micro_batches()[0].requires_grad_(), weight)
        with WeightGradients() as queue:
            made.sum().backward()
    assert weight.grad is None and sums.made == [0]
    [[product]] = queue._deferred.values()
    assert isinstance(product, WeightProduct) and not product.x.requires_grad
    queue.run()
    assert weight.grad is not None and sums.made == [1]

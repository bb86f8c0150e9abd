"""x W^T + b, alone or several at once from one x. On a CPU without 16-bit matrix units the product is taken in fp32.

Pipelines fill their bubbles with gradients of weights (Qi et al. 2023, arXiv:2401.10241): a backward pass under an open
`WeightGradients` makes the gradients of inputs only and leaves the other products to `run()`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels import cpu_product, fp8
from meshwright.kernels.target import kind

SAME, FP8 = "same", "fp8"
"""Forms of a product, as recipe.products: of operands as they are, or rounded to 8 bits (kernels.fp8)."""


class Kept:
    """What an autograd function needs for its backward pass, saved before its forward pass runs.

    A function saves behind its own forward pass. Recomputation stops as soon as it has all that was saved: the last
    product of a layer, and the sum over ranks behind it, would be repeated for nothing.
    """

    _node: Any = None

    def __call__(self, *tensors: Tensor, changed: int, bias: Tensor | None = None) -> Sequence[Tensor]:
        """Save tensors; the function is to be given the first ones, as many as are `changed`, as they come back. `bias`
        is not saved: it may be all that the function has a gradient for."""
        found: Sequence[Tensor] = _Keep.apply(self, changed, bias, *tensors)  # type: ignore[no-untyped-call]  # torch has no annotations there
        return found

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Once, in the function's backward pass."""
        found: Sequence[Tensor] = self._node.saved_tensors
        return found


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: Kept, changed: int, bias: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.others = len(tensors) - changed
        kept._node = ctx
        views = tuple(tensor.view_as(tensor) for tensor in tensors[:changed])
        ctx.mark_non_differentiable(*(view for view, x in zip(views, tensors, strict=False) if not x.requires_grad))
        return views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *gradients, *[None] * ctx.others


class SummedProduct(Protocol):
    """A product x W^T + b whose result is a part of a sum; what it gives is the sum, or a slice of it."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., in) -> the sum."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same without a gradient."""

    def gradient(self, gradient: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The sum's gradient -> that of the part (..., out), and that of x (..., in)."""


@dataclass(frozen=True, slots=True)
class PlainProduct:
    """A sum of one part."""

    form: str = SAME

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As kernels.linear."""
        return linear(x, weight, bias, self.form)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As kernels.linear's."""
        return products(x, (weight,), (bias,), self.form)[0]

    def gradient(self, gradient: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient itself, and its product."""
        return gradient, input_gradient((gradient,), (weight,), self.form)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) times weight (out, in) transposed, plus bias (out,)."""
    return F.linear(x, weight, bias)


def linears_reference(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Several linear layers of one input: queries, keys and values, or gate and up."""
    return tuple(linear_reference(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def needs_wide(x: Tensor) -> bool:
    """Whether 16-bit products on this tensor's device are emulated element by element."""
    return kind(x) == "cpu" and x.dtype in (torch.bfloat16, torch.float16) and not compat.cpu_multiplies(x.dtype)


@dataclass(slots=True)
class _Split:
    """One `splitting`: which queue its backward passes leave products in now."""

    queue: "WeightGradients | None" = None


_split: ContextVar[_Split | None] = ContextVar("split", default=None)
"""Autograd runs a GPU's backward pass on threads of its own, which have another context: what a backward pass asks it
keeps from its forward pass (`Leaf`), and what is computed again takes its switch along (`same_split`)."""


@contextmanager
def splitting() -> Iterator[None]:
    """Forward passes inside can be split: their backward passes belong inside as well.

    Elsewhere `linear` is torch's own, which cannot be asked to leave a product out.
    """
    with _inside(_split.get() or _Split()):
        yield


@contextmanager
def _inside(split: _Split | None) -> Iterator[None]:
    token = _split.set(split)
    try:
        yield
    finally:
        _split.reset(token)


def same_split(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, split or not as a call would be now, wherever it is called."""
    if torch.compiler.is_compiling():
        return function
    split = _split.get()

    def call(*given: Any) -> Any:
        with _inside(split):
            return function(*given)

    return call


def splits() -> bool:
    """Whether a forward pass must be made so that it can be split. Compiled code never is: its products stay in B."""
    return not torch.compiler.is_compiling() and _split.get() is not None


class WeightGradients:
    """The products gradient^T x that a backward pass left out, for later.

        with splitting():
            loss = forward(x)
            with WeightGradients() as queue:
                loss.backward()    # gradients of inputs, norms, biases
            queue.run()            # gradients of weight matrices

    Until `run` it keeps x and the output's gradient of each product. Only leaves wait: gradients of weights that were
    computed from others are made at once.
    """

    def __init__(self) -> None:
        self._left: dict[Tensor, list[Callable[[], Tensor]]] = {}
        self._split: _Split | None = None

    def __enter__(self) -> "WeightGradients":
        self._split = _split.get()
        if self._split is not None:
            assert self._split.queue is None, "one backward pass at a time can be split"
            self._split.queue = self
        return self

    def __exit__(self, *failure: object) -> None:
        if self._split is not None:
            self._split.queue = None

    def __len__(self) -> int:
        """Products that wait."""
        return sum(map(len, self._left.values()))

    def run(self) -> None:
        """Add the products to the weights' `grad`, as autograd would: those of one weight are summed first.

        Hooks on the accumulation of gradients are not called.
        """
        with torch.no_grad():
            while self._left:
                weight = next(iter(self._left))
                products = self._left.pop(weight)
                total = products.pop(0)()
                while products:
                    total = total + products.pop(0)()
                if weight.grad is None:
                    weight.grad = total.to(weight.grad_dtype)
                else:
                    weight.grad += total
                del total  # else it stands beside the next weight's

    def take(self, weight: Tensor, product: Callable[[], Tensor]) -> None:
        """Keep what makes a gradient of `weight`, and whatever it holds, until `run`."""
        self._left.setdefault(weight, []).append(product)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A weight whose gradient may be left for later, and where."""

    weight: Tensor
    split: _Split


def as_leaf(weight: Tensor | None) -> Leaf | None:
    """The weight, for a forward pass that is made to be split, if its gradient may be left for later.

    A function keeps this beside what it saves: under recomputation what it saved comes back as a copy.
    """
    split = None if torch.compiler.is_compiling() else _split.get()
    return Leaf(weight, split) if weight is not None and split is not None and weight.is_leaf else None


def is_left(leaf: Leaf | None, product: Callable[[], Tensor]) -> bool:
    """Whether an open queue has taken the product that is a gradient of `leaf` (from `as_leaf`)."""
    if leaf is None or leaf.split.queue is None:
        return False
    leaf.split.queue.take(leaf.weight, product)
    return True


def weight_product(gradient: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient (N, out), x (N, in) -> gradient^T x (out, in), rounded to `dtype` once."""
    wide = torch.float32 if needs_wide(x) else x.dtype
    return cpu_product.multiply(gradient.to(wide).t(), x.to(wide)).to(dtype)


def products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], form: str = SAME
) -> tuple[Tensor, ...]:
    """As `linears_reference`; where 16-bit products are emulated, in fp32 and rounded once."""
    if form == FP8:
        return fp8.products(x, weights, biases)
    if not needs_wide(x):
        return tuple(map(partial(cpu_product.linear, x), weights, biases))
    wide = x.float()
    pairs = ((w.float(), None if b is None else b.float()) for w, b in zip(weights, biases, strict=True))
    return tuple(cpu_product.linear(wide, *pair).to(x.dtype) for pair in pairs)


def products_of_pieces(
    pieces: Iterable[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None], form: str = SAME
) -> Iterator[tuple[Tensor, ...]]:
    """`products` of one x after the other; what a form makes of the weights is made once."""
    multiply = fp8.products_with(weights, biases) if form == FP8 else partial(products, weights=weights, biases=biases)
    return map(multiply, pieces)


def input_gradient(gradients: Sequence[Tensor], weights: Sequence[Tensor], form: str = SAME) -> Tensor:
    """gradients (..., out) of several products of one x -> that of x (..., in), summed inside the products (beta = 1)
    instead of by passes over memory."""
    if form == FP8:
        return fp8.input_gradient(gradients, weights)
    first = gradients[0]
    wide = torch.float32 if needs_wide(first) else first.dtype
    total: Tensor | None = None
    for gradient, weight in zip(gradients, weights, strict=True):
        rows, matrix = gradient.reshape(-1, gradient.shape[-1]).to(wide), weight.to(wide)
        total = cpu_product.multiply(rows, matrix) if total is None else cpu_product.add_product(total, rows, matrix)
    assert total is not None
    return total.to(first.dtype).view(*first.shape[:-1], total.shape[-1])


def parameter_gradients(
    ctx: Any, x: Tensor | None, gradients: Sequence[Tensor], weights: Sequence[Tensor]
) -> Iterator[Tensor | None]:
    """Gradients of the weights, then of the biases, the last inputs of the autograd function that `ctx` is of; None
    where none is wanted or an open queue has taken the product. Without x only biases have any."""
    count = len(weights)
    wanted = ctx.needs_input_grad[-2 * count :]
    narrow = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
    # What waits in a queue must not hold the graph it came from, which holds the stage's input and its gradient.
    rows = None if x is None else x.detach().reshape(-1, x.shape[-1])
    wide: Tensor | None = None
    for gradient, weight, leaf, wants in zip(narrow, weights, ctx.leaves, wanted[:count], strict=True):
        if rows is None or not wants or is_left(leaf, partial(weight_product, gradient, rows, weight.dtype)):
            yield None
            continue
        if wide is None:
            wide = rows.float() if needs_wide(rows) else rows
        yield weight_product(gradient, wide, weight.dtype)
    for gradient, wants in zip(narrow, wanted[count:], strict=True):
        yield gradient.sum(0) if wants else None


def in_halves(parameters: Sequence[Tensor | None]) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """n weights and n biases, as autograd functions take them -> (weights, biases)."""
    count = len(parameters) // 2
    return cast(Sequence[Tensor], parameters[:count]), parameters[count:]


class _Linears(torch.autograd.Function):
    """Arguments after x and the form: n weights, then n biases (or None). Saves x once.

    Where 16-bit products are emulated, operands are widened, products and sums taken in fp32 and rounded once, as a
    GPU's matrix unit does; that costs a pass over the operands, while the emulated product is 10 to 100 times slower.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, form: str, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = in_halves(parameters)
        ctx.save_for_backward(x, *weights)
        ctx.leaves, ctx.form = tuple(map(as_leaf, weights)), form
        return products(x, weights, biases, form)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        found = input_gradient(gradients, weights, ctx.form) if ctx.needs_input_grad[0] else None
        return found, None, *parameter_gradients(ctx, x, gradients, weights)


def linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], form: str = SAME
) -> tuple[Tensor, ...]:
    """As the reference; `form` FP8: as that of kernels.fp8."""
    if torch.compiler.is_compiling() and not any(_has_own(x, weight, form) for weight in weights):
        return linears_reference(x, weights, biases)
    results: tuple[Tensor, ...] = _Linears.apply(x, form, *weights, *biases)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return results


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, form: str = SAME) -> Tensor:
    """As the reference; `form` FP8: as that of kernels.fp8."""
    if splits() or _has_own(x, weight, form):
        return linears(x, (weight,), (bias,), form)[0]
    return F.linear(x, weight, bias)


def _has_own(x: Tensor, weight: Tensor, form: str) -> bool:
    """Whether the product is another than torch's own, whose gradient autograd knows."""
    return form != SAME or needs_wide(x) or cpu_product.pays(x, weight.shape[0])

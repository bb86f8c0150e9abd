"""x W^T + b, one or several from one x. A CPU without 16-bit matrix units multiplies in fp32."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright import compat
from meshwright.kernels.chooser import device_kind
from meshwright.kernels.linear import cpu_product, fp8
from meshwright.kernels.linear.fp8 import FP8 as FP8
from meshwright.kernels.linear.fp8 import FP8_ALL as FP8_ALL
from meshwright.kernels.linear.fp8 import SAME as SAME
from meshwright.kernels.linear.weight_gradients import Leaf, as_leaf, is_direct, is_taken, leaf_at, splits, waits

FEW_ROWS = 2
"""Most rows for which torch's own 16-bit vector code is faster than widening the matrix."""


class EarlySave:
    """Tensors of an autograd function, saved for its backward pass before its forward pass runs.

    A function saves after its own forward pass, and recomputation stops as soon as it has all that was saved. It would
    thus repeat the last product of a layer, and the sum over ranks after it, for nothing.
    """

    _node: Any = None

    def __call__(self, *tensors: Tensor, changed: int, bias: Tensor | None = None) -> Sequence[Tensor]:
        """Save tensors. Returns views of the first `changed` ones, which the function must use in their place.

        `bias` is not saved. It may be all that the function has a gradient for.
        """
        views: Sequence[Tensor] = _SaveEarly.apply(self, changed, bias, *tensors)  # type: ignore[no-untyped-call]  # torch has no annotations there
        return views

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Saved tensors, to be read once, in the function's backward pass."""
        tensors: Sequence[Tensor] = self._node.saved_tensors
        return tensors


class _SaveEarly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, saved: EarlySave, changed: int, bias: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.others = len(tensors) - changed
        saved._node = ctx
        views = tuple(tensor.view_as(tensor) for tensor in tensors[:changed])
        # Else every view would require a gradient as soon as one input does.
        ctx.mark_non_differentiable(*(view for view, x in zip(views, tensors, strict=False) if not x.requires_grad))
        return views

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *gradients, *[None] * ctx.others


class SummedProduct(Protocol):
    """A product x W^T + b that is a part of a sum. It returns the sum, or a slice of it."""

    @property
    def form(self) -> str:
        """Form of kernels.fp8."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the sum for x (..., in)."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the sum without recording a gradient."""

    def gradient(self, gradient: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the part (..., out) and of x (..., in), from that of the sum."""


@dataclass(frozen=True, slots=True)
class PlainProduct:
    """A sum of one part."""

    form: str = SAME

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply as kernels.linear does."""
        return linear(x, weight, bias, self.form)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply without recording a gradient."""
        return products(x, (weight,), (bias,), self.form)[0]

    def gradient(self, gradient: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient itself, and that of x."""
        return gradient, input_gradient((gradient,), (weight,), self.form)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x (..., in) by weight (out, in) transposed and add bias (out,)."""
    return F.linear(x, weight, bias)


def linears_reference(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Apply several linear layers to one input: queries, keys and values, or gate and up."""
    return tuple(linear_reference(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def needs_wide(x: Tensor) -> bool:
    """Return whether this device emulates 16-bit products: element by element, or widened inside."""
    return device_kind(x) == "cpu" and x.dtype in (torch.bfloat16, torch.float16) and not compat.cpu_multiplies(x.dtype)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which x is multiplied by matrices of its dtype. Results are rounded to x's dtype."""
    return torch.float32 if needs_wide(x) else x.dtype


def weight_product(gradient: Tensor, x: Tensor | fp8.Narrow, dtype: torch.dtype, form: str = SAME) -> Tensor:
    """Return gradient^T x (out, in), rounded to `dtype` once, from gradient (N, out) and x (N, in).

    In form FP8_ALL x may be narrowed already.
    """
    if form == FP8_ALL:
        return fp8.weight_gradient(gradient, x, dtype)
    assert isinstance(x, Tensor)
    wide = product_dtype(x)
    return cpu_product.multiply(gradient.to(wide).t(), x.to(wide)).to(dtype)


@dataclass(frozen=True, slots=True)
class WeightProduct:
    """Operands (N, out) and (N, in) of a deferred `weight_product`.

    It is computed by itself, or added to a sum (AddedProduct of kernels.gradient_sums).
    """

    gradient: Tensor
    x: Tensor
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        """Return the product, rounded to the dtype."""
        return weight_product(self.gradient, self.x, self.dtype)

    def add_to(self, total: Tensor, beta: int) -> Tensor:
        """Add as cpu_product.add_product does, in fp32 where 16-bit products are emulated."""
        wide = product_dtype(self.x)
        return cpu_product.add_product(total, self.gradient.to(wide).t(), self.x.to(wide), beta)


def later_product(gradient: Tensor, x: Tensor, dtype: torch.dtype, form: str = SAME) -> Callable[[], Tensor]:
    """Return `weight_product` of these as a function to call later. No sum takes products of 8-bit operands."""
    if form == FP8_ALL:
        return partial(weight_product, gradient, x, dtype, form)
    return WeightProduct(gradient, x, dtype)


def products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], form: str = SAME
) -> tuple[Tensor, ...]:
    """Multiply as `linears_reference`.

    Emulated 16-bit products run in fp32 and are rounded once, unless rows are few.
    """
    if form != SAME:
        return fp8.products(x, weights, biases)
    if not needs_wide(x) or (compat.HAS_VECTORS and x.numel() <= FEW_ROWS * x.shape[-1]):
        return tuple(map(partial(cpu_product.linear, x), weights, biases))
    wide = x.float()
    return tuple(cpu_product.widened_linear(wide, *pair, x.dtype) for pair in zip(weights, biases, strict=True))


def products_of_pieces(
    pieces: Iterable[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None], form: str = SAME
) -> Iterator[tuple[Tensor, ...]]:
    """Yield `products` of one x after the other. A form converts the weights once."""
    plain = partial(products, weights=weights, biases=biases)
    multiply = plain if form == SAME else fp8.products_with(weights, biases)
    return map(multiply, pieces)


def input_gradient(gradients: Sequence[Tensor], weights: Iterable[Tensor], form: str = SAME) -> Tensor:
    """Return the gradient of x (..., in) from the gradients (..., out) of several products of x.

    Summed inside the products (beta = 1) instead of by passes over memory. Weights may come one after the other: none
    is held together with the next.
    """
    if form != SAME:
        return fp8.input_gradient(gradients, tuple(weights))
    first = gradients[0]
    wide = product_dtype(first)
    total: Tensor | None = None
    # zip would hold each weight together with the next.
    following = iter(weights)
    for gradient in gradients:
        rows, matrix = gradient.reshape(-1, gradient.shape[-1]).to(wide), next(following).to(wide)
        total = cpu_product.multiply(rows, matrix) if total is None else cpu_product.add_product(total, rows, matrix)
        del rows, matrix
    assert total is not None
    return total.to(first.dtype).view(*first.shape[:-1], total.shape[-1])


def parameter_gradients(
    wanted: Sequence[bool],
    leaves: Sequence[Leaf | None],
    x: Tensor | None,
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    form: str = SAME,
) -> Iterator[Tensor | None]:
    """Yield the `wanted` gradients of the weights, then those of the biases.

    None where a gradient is not wanted, or an open queue or a sum has taken the product. Without x only biases have
    one.
    """
    count = len(weights)
    narrow = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
    # With gradients on, a second derivative is wanted, which needs the graph of x.
    if x is not None and not torch.is_grad_enabled():
        # A deferred product must not hold the graph it came from, which holds the stage's input and its gradient.
        x = x.detach()
    rows = None if x is None else x.reshape(-1, x.shape[-1])
    wide: Tensor | fp8.Narrow | None = None
    for gradient, weight, leaf, wants in zip(narrow, weights, leaves, wanted[:count], strict=True):
        if rows is None or not wants or is_taken(leaf, later_product(gradient, rows, weight.dtype, form)):
            yield None
            continue
        if wide is None:
            wide = _as_operand(rows, form)
        yield weight_product(gradient, wide, weight.dtype, form)
    for gradient, wants in zip(narrow, wanted[count:], strict=True):
        yield gradient.sum(0) if wants else None


def _as_operand(rows: Tensor, form: str) -> Tensor | fp8.Narrow:
    """Convert once the operand that several gradient products read."""
    if form == FP8_ALL and len(rows):
        return fp8.narrow_columns(rows)
    return rows.float() if form != FP8_ALL and needs_wide(rows) else rows


def in_halves(parameters: Sequence[Tensor | None]) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Split n weights and n biases, as autograd functions take them, into (weights, biases)."""
    count = len(parameters) // 2
    return cast(Sequence[Tensor], parameters[:count]), parameters[count:]


@torch.library.custom_op("meshwright::leave_products", mutates_args=("of_x",))
def leave_products(of_x: Tensor, x: Tensor, gradients: Sequence[Tensor], weights: Sequence[Tensor], form: str) -> None:
    """Defer the products that are gradients of the weights, in compiled code.

    It is declared to change the gradient of x, which it does not: the compiler drops what nobody reads.
    """
    rows = x.detach().reshape(-1, x.shape[-1])
    for gradient, weight in zip(gradients, weights, strict=True):
        flat = gradient.detach().reshape(-1, gradient.shape[-1])
        is_taken(leaf_at(weight), later_product(flat, rows, weight.dtype, form))


@torch.library.custom_op("meshwright::linears_backward", mutates_args=())
def linears_backward(
    gradients: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], of_x: bool, of_weights: Sequence[bool],
    form: str,
) -> list[Tensor]:  # fmt: skip
    """Return the gradient of x if `of_x`, then those of the weights that `of_weights` selects.

    One operator in compiled code where products are operators (kernels.cpu_product): the compiler would keep views,
    sums and copies around each. Always used for form FP8_ALL, where the compiler's code for 8-bit columns is wrong
    (torch 2.13, CPU: NaN).
    """
    flat = _as_operand(x.reshape(-1, x.shape[-1]), form) if any(of_weights) else x
    weight_gradients = [
        weight_product(gradient.reshape(-1, gradient.shape[-1]), flat, weight.dtype, form)
        for gradient, weight, wants in zip(gradients, weights, of_weights, strict=True)
        if wants
    ]
    return [input_gradient(gradients, weights, form), *weight_gradients] if of_x else weight_gradients


@linears_backward.register_fake
def _(
    gradients: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], of_x: bool, of_weights: Sequence[bool],
    form: str,
) -> list[Tensor]:  # fmt: skip
    weight_gradients = [
        weight.new_empty(weight.shape) for weight, wants in zip(weights, of_weights, strict=True) if wants
    ]
    return [x.new_empty(x.shape), *weight_gradients] if of_x else weight_gradients


class _Linears(torch.autograd.Function):
    """Linear layers of one x that save x once, where a weight is trained.

    Arguments after x: the form, which weights are deferred in compiled code, what is saved already, n weights, then n
    biases (or None).

    Where 16-bit products are emulated, operands are widened, products and sums taken in fp32 and rounded once, as in a
    GPU's matrix unit. That costs a pass over the operands, while the emulated product is 10 to 100 times slower.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, form: str, waiting: Sequence[bool], saved: EarlySave | None, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = in_halves(parameters)
        learns = any(ctx.needs_input_grad[4 : 4 + len(weights)])
        if saved is None:
            ctx.save_for_backward(x if learns else None, *weights)
        ctx.leaves, ctx.form, ctx.waiting, ctx.saved = tuple(map(as_leaf, weights)), form, waiting, saved
        return products(x, weights, biases, form)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *weights = ctx.saved_tensors if ctx.saved is None else ctx.saved.tensors
        are_opaque = ctx.form == FP8_ALL or (ctx.form == SAME and x is not None and _any_pays(x, weights))
        if torch.compiler.is_compiling() and x is not None and are_opaque:  # products that the compiler cannot trace
            return _Linears.in_one(ctx, x, weights, gradients)
        x_gradient = input_gradient(gradients, weights, ctx.form) if ctx.needs_input_grad[0] else None
        wanted = list(ctx.needs_input_grad[4:])
        if x_gradient is not None and any(ctx.waiting):
            deferred = [index for index, waits in enumerate(ctx.waiting) if waits]
            operands = [gradients[index] for index in deferred], [weights[index] for index in deferred]
            leave_products(x_gradient, x, *operands, ctx.form)
            wanted = [wants and index not in deferred for index, wants in enumerate(wanted)]
        return x_gradient, None, None, None, *parameter_gradients(wanted, ctx.leaves, x, gradients, weights, ctx.form)

    @staticmethod
    def in_one(ctx: Any, x: Tensor, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> Any:
        """Compute as `backward`, in compiled code with products that the compiler cannot trace."""
        of_x, count = ctx.needs_input_grad[0], len(weights)
        wanted = ctx.needs_input_grad[4:]
        now = [wants and not waits for wants, waits in zip(wanted[:count], ctx.waiting, strict=True)]
        computed = linears_backward(gradients, x, weights, of_x, now, ctx.form) if of_x or any(now) else []
        remaining = iter(computed[1:] if of_x else computed)
        if of_x and any(ctx.waiting):
            deferred = [index for index, waits in enumerate(ctx.waiting) if waits]
            operands = [gradients[index] for index in deferred], [weights[index] for index in deferred]
            leave_products(computed[0], x, *operands, ctx.form)
        weight_gradients = [next(remaining) if wants else None for wants in now]
        bias_gradients = [
            gradient.flatten(0, -2).sum(0) if wants else None
            for gradient, wants in zip(gradients, wanted[count:], strict=True)
        ]
        return computed[0] if of_x else None, None, None, None, *weight_gradients, *bias_gradients


def _any_pays(x: Tensor, weights: Sequence[Tensor]) -> bool:
    return any([cpu_product.pays(x, weight.shape[0]) for weight in weights])


def linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], form: str = SAME
) -> tuple[Tensor, ...]:
    """Multiply as the reference does, or in a form of kernels.fp8."""
    compiles = torch.compiler.is_compiling()
    if not compiles and not torch.is_grad_enabled():
        return products(x, weights, biases, form)
    waiting = [compiles and x.requires_grad and waits(weight) for weight in weights]
    if compiles and not any(waiting) and not any([_needs_function(x, weight, form) for weight in weights]):
        return linears_reference(x, weights, biases)
    outputs: tuple[Tensor, ...] = _Linears.apply(x, form, waiting, None, *weights, *biases)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return outputs


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, form: str = SAME) -> Tensor:
    """Multiply as the reference does, or in a form of kernels.fp8."""
    if is_direct(weight):
        saved = EarlySave()
        (x,) = saved(x, weight, changed=1, bias=bias)
        product: Tensor = _Linears.apply(x, form, [False], saved, weight, bias)[0]  # type: ignore[no-untyped-call]  # torch has no annotations there
        return product
    if splits() or _needs_function(x, weight, form):
        return linears(x, (weight,), (bias,), form)[0]
    return F.linear(x, weight, bias)


def _needs_function(x: Tensor, weight: Tensor, form: str) -> bool:
    """Return whether the product is not torch's own, whose gradient autograd knows."""
    return form != SAME or needs_wide(x) or cpu_product.pays(x, weight.shape[0])

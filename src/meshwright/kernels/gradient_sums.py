"""Sums of a parameter's gradients over the micro-batches of a step, wider than the gradients, without a wide copy.

Autograd would widen a gradient whole before it adds it to a `grad` of another dtype. Here it is widened while it is
added, or while it is copied to where its sum will be: a bucket that a collective reduces in place, or memory of its
own. `grad` is the sum throughout, as with autograd's own accumulation. On a GPU a gradient that is a product is not
even made: the product writes the sum, or adds to it.
"""

from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.kernels.target import kind

PIECE = 2**18
"""Elements that a CPU widens at a time: torch's additions of two dtypes widen their operand there first."""

ADDING_DEVICES = {"cuda"}
"""Kinds of devices whose products of 16 bits add to fp32: elsewhere a product is rounded and then added, as it was."""

Place = Callable[[], Tensor | None]
"""Where a step's first gradient is copied to; None = it stays as it was made."""


class AddedProduct(Protocol):
    """A gradient that is a product, which is taken when it is asked for."""

    def __call__(self) -> Tensor:
        """The gradient by itself, in the dtype of the parameter."""

    def add_to(self, total: Tensor, beta: int) -> Tensor:
        """total fp32 = beta total + the product, in place, with no rounding between; not read where beta is 0."""


class GradientSum:
    """The sum of one parameter's gradients, in `dtype`. `place` is asked for the first of a step, `made` called after
    each. `meets`: a backward pass makes several, which come one by one (`apart`)."""

    def __init__(
        self,
        parameter: nn.Parameter,
        dtype: torch.dtype,
        place: Place,
        made: Callable[[], None] | None = None,
        *,
        meets: bool = False,
    ) -> None:
        self.parameter, self.dtype, self.place, self.made, self.meets = parameter, dtype, place, made, meets
        self._is_made = False
        parameter.grad_dtype = None  # autograd does not widen
        self._hold_node()
        _sums[parameter] = ref(self)

    def move_to_current_stream(self) -> None:
        """Receive gradients on the stream that is current now, which is the one of all passes to come.

        A node of autograd runs on the stream that was current when it was made, and the one that is held here outlives
        its pass. Made on the default stream, it would have that stream wait for the one of a CUDA graph that is being
        captured, which CUDA refuses.
        """
        self._handle.remove()
        del self._node  # the last reference: the parameter's next node is a new one
        self._hold_node()

    def _hold_node(self) -> None:
        """Hook the node that adds to the parameter's gradient, and hold it: it is gone as soon as nobody does."""
        alias = self.parameter.view_as(self.parameter).grad_fn
        node = alias and alias.next_functions[0][0]
        assert node is not None, "a frozen parameter has no gradient"
        own = ref(self)  # the node's hooks are out of the garbage collector's reach: no circle may go through them

        def take(gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
            found, gradient = own(), gradients[0]
            if found is None:
                return None
            if gradient is None:  # the product that makes it waits, or is in the sum
                found.end_pass()
                return None
            found.add(gradient)
            return (None,)

        self._node, self._handle = node, node.register_prehook(take)

    @torch.no_grad()
    def add(self, gradient: Tensor) -> None:
        """Of one micro-batch, or of one product that its backward pass has left."""
        total = self.parameter.grad
        if total is not None:
            add_into(total, gradient)
        elif (place := self.place()) is not None:
            self.parameter.grad = place.copy_(gradient)
        else:
            self.parameter.grad = gradient.contiguous()
        self._is_made = True
        self.end_pass()

    @torch.no_grad()
    def add_product(self, product: AddedProduct) -> None:
        """Add a product of one micro-batch; `end_pass` is called after its last. 8 bytes per element are moved, which
        are 12 where a product is rounded first. A step's first product moves 4 in place of 8."""
        total = self.parameter.grad
        if total is not None and total.dtype != self.dtype:
            add_into(total, product())
        elif total is not None:
            product.add_to(total, 1)
        elif (place := self.place()) is not None:
            self.parameter.grad = product.add_to(place, 0)
        else:
            self.parameter.grad = product()
        self._is_made = True

    def end_pass(self) -> None:
        """Say that a micro-batch's gradient is made, if it is: autograd comes by once per pass, after all products."""
        if self._is_made and self.made is not None:
            self.made()
        self._is_made = False


_sums = WeakTensorKeyDictionary()
"""ref[GradientSum] by parameter."""


def sum_of(parameter: Tensor) -> GradientSum | None:
    """What adds the parameter's gradients up; None = autograd."""
    own = _sums.get(parameter)
    found: GradientSum | None = None if own is None else own()
    return found


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """In which `grad` is, or would be."""
    found = sum_of(parameter)
    return found.dtype if found is not None else parameter.grad_dtype or parameter.dtype


class _UseAlias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.sum = sum_of(parameter)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        ctx.sum.add(gradient)


def use_alias(parameter: Tensor) -> Tensor:
    """The parameter, for one of its uses in a pass: the gradient goes to the sum by itself. Autograd would add those of
    all uses first, rounded as they are, and hold the first of them until the last is there."""
    found = sum_of(parameter)
    if found is None or not found.meets:
        return parameter
    alias: Tensor = _UseAlias.apply(parameter)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return alias


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """As autograd would, outside of its passes."""
    found = sum_of(parameter)
    if found is not None:
        found.add(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient.to(parameter.grad_dtype)
    else:
        parameter.grad += gradient


def direct_sum(parameter: Tensor) -> GradientSum | None:
    """Find the sum that products add to by themselves, where they are gradients of the parameter. None: they do not."""
    if kind(parameter) not in ADDING_DEVICES:
        return None
    total = sum_of(parameter)
    return total if total is not None and total.dtype.itemsize > parameter.dtype.itemsize else None


def add_into(total: Tensor, gradient: Tensor) -> None:
    """total (contiguous) += gradient of the same shape, whatever its dtype, with no copy of it as wide as the total."""
    if total.dtype == gradient.dtype or kind(total) == "cuda":
        total += gradient
        return
    for part, piece in zip(total.view(-1).split(PIECE), gradient.reshape(-1).split(PIECE), strict=True):
        part += piece

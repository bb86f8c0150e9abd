"""Sums of a parameter's gradients over the micro-batches of a step, wider than the gradients, without a wide copy.

Autograd would widen a whole gradient before it adds it to a `grad` of another dtype. Here it is widened while it is
added, or while it is copied to where its sum will be: a bucket that a collective reduces in place, or separate memory.

`grad` is the sum throughout, as with autograd's own accumulation. On a GPU a gradient that is a product is never
stored: the product writes the sum, or adds to it.
"""

from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.kernels.target import device_kind

PIECE = 2**18
"""Elements that a CPU widens at a time: torch's additions of two dtypes widen their operand first."""

ADDING_DEVICES = {"cuda"}
"""Kinds of devices whose 16-bit products add to fp32. Elsewhere a product is rounded and then added."""

Destination = Callable[[], Tensor | None]
"""Returns the tensor that a step's first gradient is copied to. None = the gradient stays as it is."""


class AddedProduct(Protocol):
    """A gradient that is a product, computed on demand."""

    def __call__(self) -> Tensor:
        """Return the gradient by itself, in the dtype of the parameter."""

    def add_to(self, total: Tensor, beta: int) -> Tensor:
        """Set total fp32 = beta total + the product, in place and without rounding between. Not read for beta 0."""


class GradientSum:
    """The sum of one parameter's gradients, in `dtype`.

    Args:
        destination: Called for the first gradient of a step.
        made: Called after each gradient.
        meets: A backward pass makes several gradients, which arrive separately (`use_alias`).
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        dtype: torch.dtype,
        destination: Destination,
        made: Callable[[], None] | None = None,
        *,
        meets: bool = False,
    ) -> None:
        self.parameter, self.dtype, self.destination, self.made, self.meets = (
            parameter, dtype, destination, made, meets,
        )  # fmt: skip
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
        """Add a hook to the node that accumulates the parameter's gradient, and hold it: unreferenced it is freed."""
        alias = self.parameter.view_as(self.parameter).grad_fn
        node = alias and alias.next_functions[0][0]
        assert node is not None, "a frozen parameter has no gradient"
        reference = ref(self)  # weak: the garbage collector cannot see a cycle through the node's hooks

        def take(gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
            this, gradient = reference(), gradients[0]
            if this is None:
                return None
            if gradient is None:  # the product that makes it is deferred, or in the sum already
                this.end_pass()
                return None
            this.add(gradient)
            return (None,)

        self._node, self._handle = node, node.register_prehook(take)

    @torch.no_grad()
    def add(self, gradient: Tensor) -> None:
        """Add the gradient of one micro-batch, or of one product that its backward pass deferred."""
        total = self.parameter.grad
        if total is not None:
            add_into(total, gradient)
        elif (target := self.destination()) is not None:
            self.parameter.grad = target.copy_(gradient)
        else:
            self.parameter.grad = gradient.contiguous()
        self._is_made = True
        self.end_pass()

    @torch.no_grad()
    def add_product(self, product: AddedProduct) -> None:
        """Add a product of one micro-batch. `end_pass` is called after its last.

        Moves 8 bytes per element, against 12 where a product is rounded first. A step's first product moves 4 instead
        of 8.
        """
        total = self.parameter.grad
        if total is not None and total.dtype != self.dtype:
            add_into(total, product())
        elif total is not None:
            product.add_to(total, 1)
        elif (target := self.destination()) is not None:
            self.parameter.grad = product.add_to(target, 0)
        else:
            self.parameter.grad = product()
        self._is_made = True

    def end_pass(self) -> None:
        """Report that a micro-batch's gradient is complete, if it is. Autograd calls it once per pass."""
        if self._is_made and self.made is not None:
            self.made()
        self._is_made = False


_sums = WeakTensorKeyDictionary()
"""ref[GradientSum] by parameter."""


def sum_of(parameter: Tensor) -> GradientSum | None:
    """Return the sum that collects the parameter's gradients. None = autograd does."""
    reference = _sums.get(parameter)
    total: GradientSum | None = None if reference is None else reference()
    return total


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype that `grad` has, or would have."""
    total = sum_of(parameter)
    return total.dtype if total is not None else parameter.grad_dtype or parameter.dtype


class _ParameterUse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.sum = sum_of(parameter)
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        ctx.sum.add(gradient)


def use_alias(parameter: Tensor) -> Tensor:
    """Return the parameter for one of its uses in a pass, whose gradient goes to the sum by itself.

    Autograd would first add those of all uses, in their rounded dtype, and hold the first of them until the last is
    there.
    """
    total = sum_of(parameter)
    if total is None or not total.meets:
        return parameter
    alias: Tensor = _ParameterUse.apply(parameter)  # type: ignore[no-untyped-call]  # torch has no annotations there
    return alias


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient as autograd would, outside its passes."""
    total = sum_of(parameter)
    if total is not None:
        total.add(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient.to(parameter.grad_dtype)
    else:
        parameter.grad += gradient


def direct_sum(parameter: Tensor) -> GradientSum | None:
    """Return the sum to which gradient products of the parameter are added directly. None = they are not."""
    if device_kind(parameter) not in ADDING_DEVICES:
        return None
    total = sum_of(parameter)
    return total if total is not None and total.dtype.itemsize > parameter.dtype.itemsize else None


def add_into(total: Tensor, gradient: Tensor) -> None:
    """Add a gradient of any dtype to total (contiguous, same shape), without a copy as wide as the total."""
    if total.dtype == gradient.dtype or device_kind(total) == "cuda":
        total += gradient
        return
    for part, piece in zip(total.view(-1).split(PIECE), gradient.reshape(-1).split(PIECE), strict=True):
        part += piece

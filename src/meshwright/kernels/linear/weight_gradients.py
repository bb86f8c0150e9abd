"""Gradients of weights that a backward pass defers, or adds to a sum directly.

Pipelines fill their bubbles with deferred ones (Qi et al. 2023, arXiv:2401.10241). A backward pass under an open
`WeightGradients` computes the gradients of inputs only, and leaves the other products to `run()`. Where sums take
products, a product goes there, in the pass or in `run()`, and autograd gets nothing.

Sums of a parameter's gradients over the micro-batches of a step are wider than the gradients, without a wide copy.
Autograd would widen a whole gradient before it adds it to a `grad` of another dtype. Here it is widened while it is
added, or while it is copied to where its sum will be: a bucket that a collective reduces in place, or separate memory.

`grad` is the sum throughout, as with autograd's own accumulation. On a GPU a gradient that is a product is never
stored: the product writes the sum, or adds to it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.kernels.chooser import device_kind

PIECE = 2**18
"""Elements that a CPU widens at a time: torch's additions of two dtypes widen their operand first."""

ADDING_DEVICES = {"cuda"}
"""Kinds of devices whose 16-bit products add to fp32. Elsewhere a product is rounded and then added."""
STANDS_FOR = "stands_for"

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
        # Autograd then leaves a gradient's dtype alone.
        parameter.grad_dtype = None
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
            # The product that makes it is deferred, or in the sum already.
            if gradient is None:
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
        # Autograd gets nothing: the sum has it.
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


@dataclass(slots=True)
class _Split:
    """One `splitting` context, and the queue in which its backward passes leave products now."""

    queue: "WeightGradients | None" = None


_split: ContextVar[_Split | None] = ContextVar("split", default=None)
"""Current context.

Autograd runs a GPU's backward pass on other threads, which have another context. So a backward pass uses what its
forward pass remembered (`Leaf`), and recomputation takes the context along (`same_split`).
"""


@contextmanager
def splitting() -> Iterator[None]:
    """Allow forward passes inside to be split. Their backward passes must be inside as well.

    Elsewhere `linear` is torch's own, which cannot defer a product.
    """
    outer = _split.get()
    with _inside(outer or _Split()):
        yield
    # Addresses of freed parameters may be given to others.
    if outer is None:
        _leaves.clear()


def whole() -> AbstractContextManager[None]:
    """Run forward passes inside as outside `splitting`: their backward passes are not split."""
    return _inside(None)


@contextmanager
def _inside(split: _Split | None) -> Iterator[None]:
    token = _split.set(split)
    try:
        yield
    finally:
        _split.reset(token)


def same_split(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to run in the current splitting context, wherever it is called."""
    # The compiler cannot trace a context variable.
    if torch.compiler.is_compiling():
        return function
    split = _split.get()

    def call(*arguments: Any) -> Any:
        with _inside(split):
            return function(*arguments)

    return call


def splits() -> bool:
    """Return whether a forward pass must be splittable."""
    return _traced.splits if torch.compiler.is_compiling() else _split.get() is not None


class WeightGradients:
    """Queue of the products gradient^T x that a backward pass deferred.

        with splitting():
            loss = forward(x)
            with WeightGradients() as queue:
                loss.backward()    # gradients of inputs, norms, biases
            queue.run()            # gradients of weight matrices

    Until `run` it holds x and the output's gradient of each product. Only leaves are deferred. Gradients of computed
    weights are made at once, unless the weights stand for a leaf (`stand_for`).
    """

    def __init__(self) -> None:
        self._deferred: dict[Tensor, list[Callable[[], Tensor]]] = {}
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
        """Return the number of deferred products."""
        return sum(map(len, self._deferred.values()))

    def run(self) -> None:
        """Add the products to the weights' `grad`, as autograd would: those of one weight are summed first.

        Hooks on the accumulation of gradients are not called.
        """
        with torch.no_grad():
            # Popped one by one, so operands are freed as soon as their product is made.
            while self._deferred:
                weight = next(iter(self._deferred))
                products, direct = self._deferred.pop(weight), direct_sum(weight)
                if direct is not None and _are_added(products):
                    while products:
                        direct.add_product(products.pop(0))
                    direct.end_pass()
                    continue
                total = products.pop(0)()
                while products:
                    total = total + products.pop(0)()
                add_gradient(weight, total)
                # Else it would be in memory together with the next weight's.
                del total

    def take(self, weight: Tensor, product: Callable[[], Tensor]) -> None:
        """Hold a product that is a gradient of `weight`, with its operands, until `run`."""
        self._deferred.setdefault(weight, []).append(product)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A weight whose gradient need not go through autograd, and where it may go."""

    weight: Tensor
    split: _Split | None = None
    """Context whose queue may take the product."""
    direct: GradientSum | None = None
    """Sum that takes the product at once."""


def as_leaf(weight: Tensor | None) -> Leaf | None:
    """Return the weight as a leaf if its gradient may bypass autograd: in a splittable pass, or into a sum.

    A function holds this in addition to what it saves: under recomputation saved tensors come back as copies.
    """
    if weight is None or torch.compiler.is_compiling():
        return None
    split, source = _split.get(), getattr(weight, STANDS_FOR, weight)
    direct = direct_sum(source)
    return Leaf(source, split, direct) if source.is_leaf and (split or direct) else None


def is_direct(weight: Tensor) -> bool:
    """Return whether a forward pass must let the product of the weight's gradient go to its sum."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return direct_sum(getattr(weight, STANDS_FOR, weight)) is not None


def stand_for(stand_in: Tensor, weight: Tensor) -> Tensor:
    """Mark `stand_in` as standing for the weight that it was made of, whose gradient is the same.

    A deferred gradient of `stand_in` goes to the weight. Its own node in the graph then gets none.
    """
    setattr(stand_in, STANDS_FOR, weight)
    return stand_in


def is_taken(leaf: Leaf | None, product: Callable[[], Tensor]) -> bool:
    """Give the product that is a gradient of `leaf` (from `as_leaf`) to an open queue or a sum, if there is one.

    Autograd then gets none. A pass that is recorded for a second derivative leaves the gradient to autograd.
    """
    if leaf is None:
        return False
    # The queue comes first: whoever opened it wants the product later, even where a sum could take it now.
    if leaf.split is not None and leaf.split.queue is not None:
        leaf.split.queue.take(leaf.weight, product)
        return True
    if leaf.direct is None or torch.is_grad_enabled() or not _are_added(added := [product]):
        return False
    leaf.direct.add_product(added[0])
    return True


def _are_added(products: list[Callable[[], Tensor]]) -> TypeGuard[list[AddedProduct]]:
    return all(hasattr(product, "add_to") for product in products)


class _Traced:
    """Switch that the compiler reads in place of a context variable."""

    splits = False


_traced = _Traced()
_leaves: dict[int, Leaf] = {}
"""Parameters of the blocks that call compiled code, by address.

Compiled code does not get them: a tensor that needs no gradient reaches it as another tensor of the same memory.
"""


@contextmanager
def traced(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Call compiled code whose backward pass will be split, deferring the products of these parameters."""
    split = _split.get()
    assert split is not None
    _leaves.update({leaf.data_ptr(): Leaf(leaf, split) for leaf in parameters if type(leaf) is nn.Parameter})
    _traced.splits = True
    try:
        yield
    finally:
        _traced.splits = False


def waits(weight: Tensor) -> bool:
    """Return whether the backward pass of code that is being compiled defers the product of the weight's gradient."""
    return _traced.splits and isinstance(weight, nn.Parameter) and weight.requires_grad


def leaf_at(weight: Tensor) -> Leaf:
    """Return the parameter at the address of a weight that `waits`, in the backward pass of compiled code."""
    leaf = _leaves[weight.data_ptr()]
    is_open = leaf.split is not None and leaf.split.queue is not None
    assert is_open, "code that was compiled for a split backward pass runs in a whole one"
    return leaf

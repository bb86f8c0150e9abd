"""Gradients of weights that a backward pass leaves for later, or adds to a sum by itself.

Pipelines fill their bubbles with them (Qi et al. 2023, arXiv:2401.10241): a backward pass under an open
`WeightGradients` makes the gradients of inputs only and leaves the other products to `run()`. Where sums take products
(kernels/gradient_sums.py), a product goes there, in the pass or in `run()`, and autograd gets nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from meshwright.kernels.gradient_sums import AddedProduct, GradientSum, add_gradient, direct_sum


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
    outer = _split.get()
    with _inside(outer or _Split()):
        yield
    if outer is None:
        _leaves.clear()


def whole() -> AbstractContextManager[None]:
    """Inside, forward passes are as outside of `splitting`: their backward passes will be whole."""
    return _inside(None)


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
    """Whether a forward pass must be made so that it can be split."""
    return _traced.splits if torch.compiler.is_compiling() else _split.get() is not None


class WeightGradients:
    """The products gradient^T x that a backward pass left out, for later.

        with splitting():
            loss = forward(x)
            with WeightGradients() as queue:
                loss.backward()    # gradients of inputs, norms, biases
            queue.run()            # gradients of weight matrices

    Until `run` it keeps x and the output's gradient of each product. Only leaves wait: gradients of weights that were
    computed from others are made at once, but of those that stand for a leaf (`stand_for`).
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
                products, direct = self._left.pop(weight), direct_sum(weight)
                if direct is not None and _are_added(products):
                    while products:
                        direct.add_product(products.pop(0))
                    direct.end_pass()
                    continue
                total = products.pop(0)()
                while products:
                    total = total + products.pop(0)()
                add_gradient(weight, total)
                del total  # else it stands beside the next weight's

    def take(self, weight: Tensor, product: Callable[[], Tensor]) -> None:
        """Keep what makes a gradient of `weight`, and whatever it holds, until `run`."""
        self._left.setdefault(weight, []).append(product)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A weight whose gradient need not go through autograd, and where it may go."""

    weight: Tensor
    split: _Split | None = None
    """Whose queue may have it."""
    direct: GradientSum | None = None
    """What takes it at once."""


def as_leaf(weight: Tensor | None) -> Leaf | None:
    """The weight, for a forward pass that is made to be split or whose products go to sums, if its gradient may go past
    autograd.

    A function keeps this beside what it saves: under recomputation what it saved comes back as a copy.
    """
    if weight is None or torch.compiler.is_compiling():
        return None
    split, source = _split.get(), getattr(weight, STANDS_FOR, weight)
    direct = direct_sum(source)
    return Leaf(source, split, direct) if source.is_leaf and (split or direct) else None


def is_direct(weight: Tensor) -> bool:
    """Tell whether a forward pass must be made so that the product of the weight's gradient goes to its sum."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return direct_sum(getattr(weight, STANDS_FOR, weight)) is not None


STANDS_FOR = "stands_for"


def stand_for(made: Tensor, weight: Tensor) -> Tensor:
    """`made` itself, whose gradient is that of the weight it was made of, as it is: where that is left for later, it is
    left for the weight. Its own node in the graph then gets none."""
    setattr(made, STANDS_FOR, weight)
    return made


def is_taken(leaf: Leaf | None, product: Callable[[], Tensor]) -> bool:
    """Give the product that is a gradient of `leaf` (from `as_leaf`) to an open queue or a sum, if there is one.

    Autograd then gets none. A pass that is recorded for a second derivative leaves the gradient to autograd.
    """
    if leaf is None:
        return False
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
    """What the compiler reads in place of a context variable."""

    splits = False


_traced = _Traced()
_leaves: dict[int, Leaf] = {}
"""Parameters of blocks that compiled code is called with, by address. It does not get them themselves: what needs no
gradient of its own reaches it as another tensor of the same memory."""


@contextmanager
def traced(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Around a call of compiled code whose backward pass will be split. Of these parameters it leaves the products."""
    split = _split.get()
    assert split is not None
    _leaves.update({one.data_ptr(): Leaf(one, split) for one in parameters if type(one) is nn.Parameter})
    _traced.splits = True
    try:
        yield
    finally:
        _traced.splits = False


def waits(weight: Tensor) -> bool:
    """Of code that is compiled: whether its backward pass leaves the product that is the weight's gradient."""
    return _traced.splits and isinstance(weight, nn.Parameter) and weight.requires_grad


def leaf_at(weight: Tensor) -> Leaf:
    """In the backward pass of compiled code: the parameter that lies where it found a weight that `waits`."""
    leaf = _leaves[weight.data_ptr()]
    is_open = leaf.split is not None and leaf.split.queue is not None
    assert is_open, "code that was compiled for a split backward pass runs in a whole one"
    return leaf

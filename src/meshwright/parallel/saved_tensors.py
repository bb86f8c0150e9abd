"""What autograd does with tensors that it saves, where two parts of a program have a say in it.

torch asks only the innermost pair of `saved_tensors_hooks`. A pair that is interested in some tensors hands the others
to the pair around it: recomputation takes what norms have made, offload moves the rest.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedTensorHooks(NamedTuple):
    """As the arguments of saved_tensors_hooks."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]


def _same(packed: Any) -> Any:
    return packed


ALIASES = SavedTensorHooks(Tensor.detach, _same)
"""A node that kept its own result itself would never be freed without a backward pass: an alias."""
_around: ContextVar[SavedTensorHooks] = ContextVar("around", default=ALIASES)


def hooks_around() -> SavedTensorHooks:
    """Of the `saving_by` that this code runs in."""
    return _around.get()


@contextmanager
def saving_by(hooks: SavedTensorHooks) -> Iterator[None]:
    """Inside, autograd saves tensors by these hooks."""
    token = _around.set(hooks)
    try:
        with saved_tensors_hooks(*hooks):
            yield
    finally:
        _around.reset(token)

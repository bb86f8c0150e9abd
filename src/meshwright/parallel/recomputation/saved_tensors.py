"""Nested hooks for tensors that autograd saves.

torch calls only the innermost pair of `saved_tensors_hooks`. Here a pair that handles some tensors passes the others to
the pair around it: recomputation handles the outputs of norms, offload moves the rest.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedTensorHooks(NamedTuple):
    """The arguments of saved_tensors_hooks."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]


ALIASES = SavedTensorHooks(Tensor.detach, lambda packed: packed)
"""Hooks that save an alias. A node that saved its own output would never be freed without a backward pass."""
_around: ContextVar[SavedTensorHooks] = ContextVar("around", default=ALIASES)


def hooks_around() -> SavedTensorHooks:
    """Return the hooks of the innermost `saving_by` around this code."""
    return _around.get()


@contextmanager
def saving_by(hooks: SavedTensorHooks) -> Iterator[None]:
    """Have autograd save tensors by these hooks inside."""
    token = _around.set(hooks)
    try:
        with saved_tensors_hooks(*hooks):
            yield
    finally:
        _around.reset(token)

"""Cache of operations on tensors without values: repeated outcomes are rebuilt without asking torch.

Sizes, strides and dtypes of the inputs determine all about the outputs, and layers and micro-batches of a step repeat
each other. torch's FakeTensorMode caches too, but its look-up takes ten times as long. Operations that are not plain
(known values, sizes changed in place, other packages) are left to it.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright import compat

PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
SEQUENCES = (list, tuple, torch.Size)
TORCH_NAMESPACES = ("aten", "fsdp")
"""Namespaces of operations whose outcomes follow from sizes."""
CHANGING = frozenset(("set_", "resize_", "resize_as_", "_resize_output_", "lift", "lift_fresh", "lift_fresh_copy"))
"""Operations that do more than their sizes tell."""


Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(operation, arguments, keyword arguments) -> outcome."""


class CannotReplay(Exception):
    """The earlier outcome cannot be rebuilt from these arguments."""


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor with its own memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self, maker: compat.FakeMaker, tensors: list[Tensor]) -> Any:
        """Rebuild the outcome from the tensors among the arguments."""
        return maker.fresh(self.sizes, self.strides, self.dtype, self.device)


@dataclass(frozen=True, slots=True)
class CachedView:
    """A view of argument number `argument`, which needs `needed_bytes` of its memory."""

    argument: int
    needed_bytes: int
    offset: int
    like: NewTensor

    def make(self, maker: compat.FakeMaker, tensors: list[Tensor]) -> Any:
        """Rebuild the outcome."""
        storage, like = tensors[self.argument].untyped_storage(), self.like
        if storage.nbytes() < self.needed_bytes:  # freed in place
            raise CannotReplay
        return maker.view(storage, self.offset, like.sizes, like.strides, like.dtype, like.device)


@dataclass(frozen=True, slots=True)
class SameArgument:
    """Argument number `argument` itself."""

    argument: int

    def make(self, maker: compat.FakeMaker, tensors: list[Tensor]) -> Any:
        """Rebuild the outcome."""
        return tensors[self.argument]


@dataclass(frozen=True, slots=True)
class Constant:
    """A number or None."""

    value: int | float | None

    def make(self, maker: compat.FakeMaker, tensors: list[Tensor]) -> Any:
        """Rebuild the outcome."""
        return self.value


@dataclass(frozen=True, slots=True)
class OutputSequence:
    """A tuple or list of outcomes."""

    kind: type
    parts: tuple[NewTensor | CachedView | SameArgument | Constant, ...]

    def make(self, maker: compat.FakeMaker, tensors: list[Tensor]) -> Any:
        """Rebuild the outcome."""
        return self.kind([part.make(maker, tensors) for part in self.parts])


Outcome = NewTensor | CachedView | SameArgument | Constant | OutputSequence


class OpCache:
    """Outcomes of operations under one fake tensor mode. `call` replaces calling an operation."""

    def __init__(self, maker: compat.FakeMaker) -> None:
        self.maker, self.fake = maker, maker.kind
        self._known: dict[tuple[Any, ...], Outcome | None] = {}
        self._plain: dict[int, tuple[Any, bool]] = {}
        self._work: dict[int, tuple[Any, bool, Any]] = {}

    def call(self, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return operation(*args, **kwargs)."""
        tensors: list[Tensor] = []
        key = self._key(operation, tensors, args, kwargs)
        if key is None:
            return self._call_uncached(operation, args, kwargs)
        before = self._known.get(key, self)
        if before is None:
            return operation(*args, **kwargs)
        if before is not self:
            try:
                return before.make(self.maker, tensors)  # type: ignore[union-attr]  # self stands for "unknown"
            except CannotReplay:
                return operation(*args, **kwargs)
        out = operation(*args, **kwargs)
        # Arguments that changed their sizes in place would make a replay wrong: such calls go to torch.
        if self._key(operation, [], args, kwargs) != key:
            self._known[key] = None
        else:
            # This call may be ambiguous where a later one with other arguments is not, so nothing is recorded.
            with suppress(CannotReplay):
                self._known[key] = self._outcome(out, tensors)
        return out

    def _call_uncached(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return operation(*args, **kwargs) of an operation that is not plain.

        Collectives of simulated ranks leave tensors as they are and have always ended, so their work handle is made
        once. Marks for a profiler have no tensors.
        """
        if getattr(operation, "namespace", "") == "profiler":
            with self.maker.below():
                return operation(*args, **kwargs)
        if getattr(operation, "namespace", "") != "c10d" or kwargs or not self._is_fake(args[0]):
            return operation(*args, **kwargs)
        earlier = self._work.get(id(operation))
        if earlier is None:
            out = operation(*args)
            first, work = out if type(out) is tuple and len(out) == 2 else (None, out)
            if isinstance(work, torch.ScriptObject) and (first is None or _same(first, args[0])):
                self._work[id(operation)] = operation, first is not None, work
            return out
        _, gives_first, work = earlier
        return (args[0], work) if gives_first else work

    def _is_fake(self, argument: Any) -> bool:
        tensors = argument if isinstance(argument, (list, tuple)) else (argument,)
        return all(type(tensor) is self.fake for tensor in tensors)

    def _key(self, operation: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return all that determines the outcome, and collect the tensors. None = the call is not plain."""
        # By identity, since an operation's own hash is slow. The entry holds it, so no other can get its id.
        entry = self._plain.get(id(operation))
        if entry is None:
            entry = self._plain[id(operation)] = operation, _is_plain(operation)
        if not entry[1] or torch.is_inference_mode_enabled():
            return None
        key: list[Any] = [id(operation), torch.get_default_dtype()]
        if not self._add(key, tensors, args):
            return None
        if kwargs:
            key += kwargs
            if not self._add(key, tensors, kwargs.values()):
                return None
        return tuple(key)

    def _add(self, key: list[Any], tensors: list[Tensor], arguments: Any) -> bool:
        for leaf in arguments:
            kind = type(leaf)
            if kind is self.fake:
                dtype = leaf.dtype
                # Sizes do not tell all about these: a known value, or a lazy conjugation or negation.
                if leaf.constant is not None or dtype.is_complex or leaf.is_neg():
                    return False
                tensors.append(leaf)
                key += (dtype, leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.fake_device, leaf.requires_grad)
            elif kind in PLAIN:
                key += (kind, leaf)
            elif kind in SEQUENCES:
                key += (kind, len(leaf))
                if not self._add(key, tensors, leaf):
                    return False
            else:
                return False
        return True

    def _outcome(self, out: Any, tensors: list[Tensor]) -> Outcome | None:
        """Return how to rebuild it. None = never. Raises CannotReplay when this call cannot tell."""
        if type(out) is not tuple and type(out) is not list:
            return self._tensor_outcome(out, tensors)
        parts = [self._tensor_outcome(part, tensors) for part in out]
        storages = [part.untyped_storage() for part, how in zip(out, parts, strict=True) if type(how) is NewTensor]
        # Two outputs that share new memory cannot be rebuilt one by one.
        if len({compat.storage_key(storage) for storage in storages}) < len(storages):
            return None
        outcomes = tuple(how for how in parts if how is not None)
        return OutputSequence(type(out), outcomes) if len(outcomes) == len(parts) else None

    def _tensor_outcome(
        self, out: Any, tensors: list[Tensor]
    ) -> NewTensor | CachedView | SameArgument | Constant | None:
        if out is None or type(out) in (int, float):
            return Constant(out)
        if type(out) is not self.fake or out.constant is not None or out.requires_grad:
            return None
        same = [index for index, tensor in enumerate(tensors) if tensor is out]
        storage = out.untyped_storage()
        key = compat.storage_key(storage)
        shared = [index for index, t in enumerate(tensors) if compat.storage_key(t.untyped_storage()) == key]
        if len(same) > 1 or (len(shared) > 1 and not same):
            raise CannotReplay
        if same:
            return SameArgument(same[0])
        like = NewTensor(tuple(out.shape), out.stride(), out.dtype, out.fake_device)
        needed = _needed_bytes(out)
        if shared and needed > storage.nbytes():
            raise CannotReplay
        outcome = CachedView(shared[0], needed, int(out.storage_offset()), like) if shared else like
        return outcome if compat.are_alike(outcome.make(self.maker, tensors), out) else None


def plain_call(operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return operation(*args, **kwargs)."""
    return operation(*args, **kwargs)


def cached_calls(mode: Any) -> Call | None:
    """Return the cached way of calling operations in a fake tensor mode. None = torch has another interface."""
    maker = compat.fake_maker(mode)
    return OpCache(maker).call if maker is not None else None


def _is_plain(operation: Any) -> bool:
    """Return True for torch's own operations that do no more than their sizes tell."""
    if getattr(operation, "namespace", "") not in TORCH_NAMESPACES or operation._opname in CHANGING:
        return False
    return not {torch.Tag.inplace_view, torch.Tag.data_dependent_output} & {*operation.tags}


def _same(a: Any, b: Any) -> bool:
    """Return True for one tensor twice, or lists of the same tensors."""
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_same, a, b))
    return a is b


def _needed_bytes(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())

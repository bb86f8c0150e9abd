"""What operations on tensors without values gave before, given again without asking torch.

Sizes, strides and dtypes of what goes in say all about what comes out, and the layers and micro-batches of a step
repeat each other. torch's FakeTensorMode remembers too, but takes ten times as long to look it up. Whatever is not
plain (values that are known, sizes changed in place, other packages' operations) is left to it.
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
TORCH_S = ("aten", "fsdp")
"""Packages of operations whose results follow from sizes."""
CHANGING = frozenset(("set_", "resize_", "resize_as_", "_resize_output_", "lift", "lift_fresh", "lift_fresh_copy"))
"""Operations that do more than their sizes tell."""


Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(operation, its arguments, those by name) -> what it gives."""


class NotSo(Exception):
    """What came out before cannot be made again of these arguments."""


@dataclass(frozen=True, slots=True)
class Fresh:
    """A tensor with memory of its own."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self, maker: compat.FakeMaker, tensors: list[Tensor]) -> Any:
        """Of these arguments of the operation; so in all of these classes."""
        return maker.fresh(self.sizes, self.strides, self.dtype, self.device)


@dataclass(frozen=True, slots=True)
class CachedView:
    """A tensor in the memory of argument `of`, of which it needs so many bytes."""

    of: int
    needed_bytes: int
    offset: int
    like: Fresh

    def make(self, maker: compat.FakeMaker, tensors: list[Tensor]) -> Any:
        storage, like = tensors[self.of].untyped_storage(), self.like
        if storage.nbytes() < self.needed_bytes:  # freed in place
            raise NotSo
        return maker.view(storage, self.offset, like.sizes, like.strides, like.dtype, like.device)


@dataclass(frozen=True, slots=True)
class Same:
    """Argument `of` itself."""

    of: int

    def make(self, maker: compat.FakeMaker, tensors: list[Tensor]) -> Any:
        return tensors[self.of]


@dataclass(frozen=True, slots=True)
class Constant:
    """No tensor."""

    value: int | float | None

    def make(self, maker: compat.FakeMaker, tensors: list[Tensor]) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class Several:
    """A tuple or list."""

    kind: type
    each: tuple[Fresh | CachedView | Same | Constant, ...]

    def make(self, maker: compat.FakeMaker, tensors: list[Tensor]) -> Any:
        return self.kind([one.make(maker, tensors) for one in self.each])


Outcome = Fresh | CachedView | Same | Constant | Several


class OpCache:
    """Operations under one mode of fake tensors; `call` stands for calling an operation."""

    def __init__(self, maker: compat.FakeMaker) -> None:
        self.maker, self.fake = maker, maker.kind
        self._known: dict[tuple[Any, ...], Outcome | None] = {}
        self._plain: dict[int, tuple[Any, bool]] = {}
        self._work: dict[int, tuple[Any, bool, Any]] = {}

    def call(self, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """operation(*args, **kwargs)."""
        tensors: list[Tensor] = []
        key = self._key(operation, tensors, args, kwargs)
        if key is None:
            return self._other(operation, args, kwargs)
        before = self._known.get(key, self)
        if before is None:
            return operation(*args, **kwargs)
        if before is not self:
            try:
                return before.make(self.maker, tensors)  # type: ignore[union-attr]  # self stands for "unknown"
            except NotSo:
                return operation(*args, **kwargs)
        out = operation(*args, **kwargs)
        if self._key(operation, [], args, kwargs) != key:
            self._known[key] = None  # it changed what it was given
        else:
            with suppress(NotSo):  # not to be told from this call
                self._known[key] = self._outcome(out, tensors)
        return out

    def _other(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """operation(*args, **kwargs). Collectives of ranks that do not exist leave tensors as they are and have always
        ended: what they give to wait for is made once. Marks for a profiler have no tensors."""
        if getattr(operation, "namespace", "") == "profiler":
            with self.maker.below():
                return operation(*args, **kwargs)
        if getattr(operation, "namespace", "") != "c10d" or kwargs or not self._is_fake(args[0]):
            return operation(*args, **kwargs)
        known = self._work.get(id(operation))
        if known is None:
            out = operation(*args)
            first, work = out if type(out) is tuple and len(out) == 2 else (None, out)
            if isinstance(work, torch.ScriptObject) and (first is None or _same(first, args[0])):
                self._work[id(operation)] = operation, first is not None, work
            return out
        _, gives_first, work = known
        return (args[0], work) if gives_first else work

    def _is_fake(self, given: Any) -> bool:
        return all(type(one) is self.fake for one in (given if isinstance(given, (list, tuple)) else (given,)))

    def _key(self, operation: Any, tensors: list[Tensor], args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """All that tells what comes out, the tensors given; None where it is not plain."""
        known = self._plain.get(id(operation))  # its own hash is slow
        if known is None:
            known = self._plain[id(operation)] = operation, _is_plain(operation)
        if not known[1] or torch.is_inference_mode_enabled():
            return None
        key: list[Any] = [id(operation), torch.get_default_dtype()]
        if not self._add(key, tensors, args):
            return None
        if kwargs:
            key += kwargs
            if not self._add(key, tensors, kwargs.values()):
                return None
        return tuple(key)

    def _add(self, key: list[Any], tensors: list[Tensor], given: Any) -> bool:
        for one in given:
            kind = type(one)
            if kind is self.fake:
                dtype = one.dtype
                if one.constant is not None or dtype.is_complex or one.is_neg():
                    return False
                tensors.append(one)
                key += (dtype, one.shape, one.stride(), one.storage_offset(), one.fake_device, one.requires_grad)
            elif kind in PLAIN:
                key += (kind, one)
            elif kind in SEQUENCES:
                key += (kind, len(one))
                if not self._add(key, tensors, one):
                    return False
            else:
                return False
        return True

    def _outcome(self, out: Any, tensors: list[Tensor]) -> Outcome | None:
        """How to make it again; None = never. NotSo: it cannot be told from this call."""
        if type(out) is not tuple and type(out) is not list:
            return self._one(out, tensors)
        each = [self._one(one, tensors) for one in out]
        own = [one.untyped_storage() for one, how in zip(out, each, strict=True) if type(how) is Fresh]
        if len({compat.storage_key(storage) for storage in own}) < len(own):
            return None
        found = tuple(how for how in each if how is not None)
        return Several(type(out), found) if len(found) == len(each) else None

    def _one(self, out: Any, tensors: list[Tensor]) -> Fresh | CachedView | Same | Constant | None:
        if out is None or type(out) in (int, float):
            return Constant(out)
        if type(out) is not self.fake or out.constant is not None or out.requires_grad:
            return None
        same = [index for index, tensor in enumerate(tensors) if tensor is out]
        storage = out.untyped_storage()
        key = compat.storage_key(storage)
        shared = [index for index, t in enumerate(tensors) if compat.storage_key(t.untyped_storage()) == key]
        if len(same) > 1 or (len(shared) > 1 and not same):
            raise NotSo
        if same:
            return Same(same[0])
        like = Fresh(tuple(out.shape), out.stride(), out.dtype, out.fake_device)
        needed = _needed_bytes(out)
        if shared and needed > storage.nbytes():
            raise NotSo
        found = CachedView(shared[0], needed, int(out.storage_offset()), like) if shared else like
        return found if compat.alike(found.make(self.maker, tensors), out) else None


def plain_call(operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """operation(*args, **kwargs)."""
    return operation(*args, **kwargs)


def cached_calls(mode: Any) -> Call | None:
    """What stands for calling an operation under a mode of fake tensors; None where this torch has another way."""
    maker = compat.fake_maker(mode)
    return OpCache(maker).call if maker is not None else None


def _is_plain(operation: Any) -> bool:
    """Whether it is one of torch's own that does no more than its sizes tell."""
    if getattr(operation, "namespace", "") not in TORCH_S or operation._opname in CHANGING:
        return False
    return not {torch.Tag.inplace_view, torch.Tag.data_dependent_output} & {*operation.tags}


def _same(a: Any, b: Any) -> bool:
    """Whether two are one tensor, or lists of the same."""
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_same, a, b))
    return a is b


def _needed_bytes(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())

"""Which operations a piece of code runs, what it keeps for the backward pass, and which tensors are alive."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_")


class Operations(TorchDispatchMode):
    """Counts operations by name (`mm`, `_softmax`) and remembers the shapes they made."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.counts[function.overloadpacket.__name__] += 1
        self.shapes += [tuple(made.shape) for made in (result if isinstance(result, tuple) else (result,)) if _is(made)]
        return result

    @property
    def products(self) -> int:
        """Matrix products of any kind."""
        return sum(self.counts[name] for name in PRODUCTS)

    def largest_numel(self, *, columns: int, but: tuple[int, ...] = ()) -> int:
        """Elements of the largest tensor made whose last dim is `columns`."""
        actual = [shape for shape in self.shapes if shape and shape[-1] == columns and shape != but]
        return max(torch.Size(shape).numel() for shape in actual)


def saved_bytes(function: Callable[[], Any], *, without: list[Tensor]) -> tuple[Any, int]:
    """The result of a forward pass, and the bytes it keeps for the backward pass beside the storages of `without`."""
    known = {tensor.untyped_storage().data_ptr() for tensor in without}
    stored: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            stored[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function()
    return result, sum(tensor.untyped_storage().nbytes() for tensor in stored.values())


class Alive(TorchDispatchMode):
    """Follows every tensor made inside until its memory is given back; storages of `known` tensors are left out."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.live: dict[int, int] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for made in filter(_is, result if isinstance(result, tuple | list) else (result,)):
            storage = made.untyped_storage()
            if storage._cdata not in self.live and storage.data_ptr() not in self.known:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    @property
    def live_bytes(self) -> int:
        """Bytes of the tensors that are alive now."""
        return sum(self.live.values())


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)

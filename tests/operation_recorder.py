"""What stands in for a GPU that captures graphs: operations are recorded with the tensors that they had, and repeated
on them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READ_BY_HOST = {
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default, torch.ops.aten.repeat_interleave.Tensor,
}  # fmt: skip
"""Operations whose result or its size the host must know."""


class Recorder:
    """In place of a GPU: records the operations of a pass and repeats them on the very tensors that they had, as a
    launched graph does. A result that the host reads would stay what it was when it was recorded."""

    bytes = 0

    def __init__(self, tensors_of: Callable[[], list[Tensor]] = list) -> None:
        """`tensors_of` returns what the work adds to; a capture leaves it unchanged."""
        self.tensors, self.launches = tensors_of, 0

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def places(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in tensors)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        before = [entry.clone() for entry in self.tensors()]
        with Recording() as recording:
            work()
        with torch.no_grad():  # a capture does nothing of it
            for entry, value in zip(self.tensors(), before, strict=True):
                entry.copy_(value)

        def launch() -> None:
            self.launches += 1
            recording.repeat()

        return launch


class Recording(TorchDispatchMode):
    """Operations with their operands and results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotations there
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Yes: else a compiled function would run as it was written."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in READ_BY_HOST, f"the host reads a tensor: {function}"
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, out))
        return out

    def products(self) -> set[torch.dtype]:
        """Dtypes of results of matrix products."""
        names = ("mm", "addmm", "bmm", "baddbmm", "linear", "cpu_product")
        return {out.dtype for function, _, _, out in self.calls if function.__name__.partition(".")[0] in names}

    @torch.no_grad()
    def repeat(self) -> None:
        for function, args, kwargs, out in self.calls:
            if any(
                entry.alias_info is not None and not entry.alias_info.is_write for entry in function._schema.returns
            ):
                continue  # a view, which sees what its base holds
            again = function(*args, **kwargs)
            if not any(entry.alias_info is not None for entry in function._schema.returns):
                for old, new in zip(tensors(out), tensors(again), strict=True):
                    old.copy_(new)


def tensors(actual: Any) -> Iterator[Tensor]:
    if isinstance(actual, Tensor):
        yield actual
    elif isinstance(actual, tuple | list):
        for entry in actual:
            yield from tensors(entry)


class OnDeviceOnly(TorchDispatchMode):
    """Refuses what makes a host wait for a GPU. A number that the host has is none."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = args and getattr(args[0], "constant", None) is not None
        assert known or function not in READ_BY_HOST, f"the host reads a tensor: {function}"
        return function(*args, **(kwargs or {}))

"""The code that torch.compile makes of a function, run for its memory alone.

Which tensors compiled code keeps for its backward pass and which buffers it takes, in what order, is decided by
AOTAutograd's partitioner and Inductor's scheduler. Neither has a public question for it; what they write is Python that
takes and drops buffers by name (torch 2.11 to 2.13), and that is run here with kernels that do nothing.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

OWN_CODE = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "cpp_wrapper": False, "freezing": False}
"""Of Inductor: what is written is for this process, and in Python."""


Kernel = Callable[[], None]
"""Stands for a kernel that Inductor wrote, and is called in its stead."""


class _Written(Exception):
    """Inductor has written its code, which is not to be built."""


def lowered(
    call: Callable[..., Any], running: Callable[[], AbstractContextManager[Any]], kernel: Callable[[], Kernel]
) -> Callable[..., Any]:
    """`call` as compiled code of which nothing is computed, for fake tensors in a mode of them that is entered.

    `running` is entered while its passes take memory, `kernel` makes what is called in place of each kernel.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: Any, inputs: Any) -> Any:
        with config.patch(OWN_CODE), torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(graph, inputs, inner_compile=partial(_lower, running, kernel))

    return torch.compile(call, dynamic=False, backend=backend)


def _lower(running: Any, kernel: Callable[[], Kernel], graph: Any, inputs: Any, **options: Any) -> Any:
    """In place of `compile_fx_inner`: what runs one pass of a block."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering

    written: list[str] = []

    def keep(lowering: Any) -> None:
        code = lowering.codegen()[0]
        written.append(getattr(code, "value", code))
        raise _Written

    build = GraphLowering.compile_to_module
    setattr(GraphLowering, "compile_to_module", keep)  # noqa: B010  # as its type has it, it cannot be assigned
    try:
        compile_fx_inner(graph, inputs, **options)
    except Exception:
        if not written:
            raise
    finally:
        setattr(GraphLowering, "compile_to_module", build)  # noqa: B010  # the same
    passes = _runnable(written[0], kernel)

    def run(given: list[Any]) -> Any:
        with running():
            return passes(given)

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for it: the list is emptied
    return run


REPLACED = {
    "async_compile = AsyncCompile()": "from meshwright.compat.lowering import kernels as async_compile",
    "torch.ops.higher_order.run_and_save_rng_state": "run_and_save_state",
    "torch.ops.higher_order.run_with_rng_state": "run_with_state",
}
"""What builds kernels, and operators that no mode follows."""
STATE_BYTES = 16
"""Of a GPU's generator, in host memory."""


def _runnable(code: str, kernel: Callable[[], Kernel]) -> Callable[[list[Any]], Any]:
    from torch._inductor.codecache import PyCodeCache

    for written, stand_in in REPLACED.items():
        code = code.replace(written, stand_in)
    kernels.make = kernel
    module: Any = PyCodeCache.load(code)  # as Inductor loads what it has written
    vars(module).update(
        empty_strided_cpu=_empty, empty_strided_cuda=_empty, reinterpret_tensor=_part, extern_kernels=_Products(),
        assert_size_stride=_nothing, assert_alignment=_nothing, run_and_save_state=_saving, run_with_state=_repeated,
    )  # fmt: skip
    found: Callable[[list[Any]], Any] = module.call
    return found


class _Kernels:
    """Stands for what builds kernels."""

    make: Callable[[], Kernel]

    def cpp_pybinding(self, arguments: Sequence[str], code: str) -> Callable[..., None]:
        """A loop in C++."""
        stand_in = self.make()
        return lambda *given: stand_in()

    def wait(self, names: dict[str, Any]) -> None:
        """Nothing is being built."""


kernels = _Kernels()
"""Imported by the code that is run."""


class _Products:
    """Stands for kernels of libraries, which write into `out`."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, out: Tensor | None = None, **options: Any) -> Any:
            return getattr(torch, name)(*given, **options) if out is None else out

        return call


def _saving(operator: Callable[..., Any], *given: Any, **options: Any) -> tuple[Tensor, Any]:
    return torch.empty(STATE_BYTES, dtype=torch.uint8, device="cpu"), operator(*given, **options)


def _repeated(state: Tensor, operator: Callable[..., Any], *given: Any, **options: Any) -> Any:
    return operator(*given, **options)


def _empty(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device="cpu")


def _part(x: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    return x.as_strided(sizes, strides, x.storage_offset() + offset)


def _nothing(*_: Any) -> None:
    """Sizes and alignment are as they were lowered."""

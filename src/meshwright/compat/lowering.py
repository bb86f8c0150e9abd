"""Compiled code of a function, run only to account for its memory.

AOTAutograd's partitioner decides which tensors compiled code saves for the backward pass, and Inductor's scheduler
which buffers it allocates in what order. Neither can be queried. They emit Python that allocates and frees buffers by
name (torch 2.11 to 2.13), and that code is run here with kernels that do nothing.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

OWN_CODE = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "cpp_wrapper": False, "freezing": False}
"""Inductor settings: Python code, written for this process, not from a cache."""


Kernel = Callable[[], None]
"""Called in place of a kernel that Inductor wrote."""


class _Written(Exception):
    """Raised once Inductor has written its code, to skip compiling it."""


def lowered(
    call: Callable[..., Any], running: Callable[[], AbstractContextManager[Any]], kernel: Callable[[], Kernel]
) -> Callable[..., Any]:
    """Return `call` as compiled code that computes nothing, for fake tensors in an active fake mode.

    `running` is entered while its passes allocate memory; `kernel` creates the stand-in for each kernel.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: Any, inputs: Any) -> Any:
        with config.patch(OWN_CODE), torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(graph, inputs, inner_compile=partial(_lower, running, kernel))

    return torch.compile(call, dynamic=False, backend=backend)


def _lower(running: Any, kernel: Callable[[], Kernel], graph: Any, inputs: Any, **options: Any) -> Any:
    """Replace `compile_fx_inner`: return a function that runs one pass of a block."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering

    written: list[str] = []

    def keep(lowering: Any) -> None:
        code = lowering.codegen()[0]
        written.append(getattr(code, "value", code))
        raise _Written

    build = GraphLowering.compile_to_module
    # Inductor has no public stop between writing code and compiling it.
    setattr(GraphLowering, "compile_to_module", keep)  # noqa: B010  # as its type has it, it cannot be assigned
    try:
        compile_fx_inner(graph, inputs, **options)
    except Exception:
        if not written:
            raise
    finally:
        setattr(GraphLowering, "compile_to_module", build)  # noqa: B010  # the same
    passes = _runnable(written[0], kernel)

    def run(arguments: list[Any]) -> Any:
        with running():
            return passes(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for it: the list is emptied
    return run


REPLACED = {
    "async_compile = AsyncCompile()": "from meshwright.compat.lowering import kernels as async_compile",
    "torch.ops.higher_order.run_and_save_rng_state": "run_and_save_state",
    "torch.ops.higher_order.run_with_rng_state": "run_with_state",
}
"""Text in generated code that builds kernels or bypasses modes -> its stand-in."""
STATE_BYTES = 16
"""Size of a GPU generator's state in host memory."""


def _runnable(code: str, kernel: Callable[[], Kernel]) -> Callable[[list[Any]], Any]:
    from torch._inductor.codecache import PyCodeCache

    for text, stand_in in REPLACED.items():
        code = code.replace(text, stand_in)
    kernels.make = kernel
    module: Any = PyCodeCache.load(code)  # as Inductor loads what it has written
    vars(module).update(
        empty_strided_cpu=_empty, empty_strided_cuda=_empty, reinterpret_tensor=_part, extern_kernels=_Products(),
        assert_size_stride=_nothing, assert_alignment=_nothing, run_and_save_state=_saving, run_with_state=_repeated,
    )  # fmt: skip
    call: Callable[[list[Any]], Any] = module.call
    return call


class _Kernels:
    """Stand-in for the compiler of kernels."""

    make: Callable[[], Kernel]

    def cpp_pybinding(self, arguments: Sequence[str], code: str) -> Callable[..., None]:
        """Return a stand-in for a C++ loop."""
        stand_in = self.make()
        return lambda *arguments: stand_in()

    def wait(self, names: dict[str, Any]) -> None:
        """Do nothing: no kernel is being built."""


kernels = _Kernels()
"""Imported by the generated code."""


class _Products:
    """Stand-in for library kernels that write into `out`."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, out: Tensor | None = None, **options: Any) -> Any:
            return getattr(torch, name)(*arguments, **options) if out is None else out

        return call


def _saving(operator: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Tensor, Any]:
    return torch.empty(STATE_BYTES, dtype=torch.uint8, device="cpu"), operator(*arguments, **options)


def _repeated(state: Tensor, operator: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return operator(*arguments, **options)


def _empty(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device="cpu")


def _part(x: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    return x.as_strided(sizes, strides, x.storage_offset() + offset)


def _nothing(*_: Any) -> None:
    """Skip checks of sizes and alignment, which lowering has made."""

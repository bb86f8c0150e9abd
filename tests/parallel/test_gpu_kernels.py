"""How many kernels a compiled block is on a GPU: Inductor's own count, without a GPU and without Triton.

Inductor can emit Triton for CPU tensors (`cpu_backend=triton`). It fuses by the rules of a GPU then; only the attention
operation is a CPU's, one call either way. The code is read and not compiled: the graph runs as it was traced.
"""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.parallel import on_one_device
from meshwright.spec import Layout
from tests.model.shrunk import model, tokens

FORWARD, BACKWARD = 6, 7
"""Fused kernels of a block of llama-3.1-8b's kind: norm, two rotations, norm with residual, activation, residual; and
of its gradients. Measured with torch 2.13; products and attention are library calls and not counted."""


def reads(codes: list[str]) -> Callable[[Any], Any]:
    """What takes the place of compiling the code that was emitted."""

    def emit(graph: Any) -> Any:
        code, _ = graph.codegen()
        codes.append(code.value)
        graph.cache_key, graph.cache_path, graph.cache_linemap = "", "", []

        def call(arguments: list[Any]) -> list[Any]:
            inputs = list(arguments)
            arguments.clear()
            outputs = torch.fx.Interpreter(graph.orig_gm).run(*inputs)
            return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]

        return SimpleNamespace(call=call, runner=None, __file__="")

    return emit


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_block_is_as_few_kernels_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rise is a fusion lost: a change of ours that the compiler no longer sees through, or torch's."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    if not hasattr(GraphLowering, "_compile_to_module") or not hasattr(config, "cpu_backend"):
        pytest.skip("this torch's Inductor emits code in another way")
    codes: list[str] = []
    monkeypatch.setattr(GraphLowering, "_compile_to_module", reads(codes))
    monkeypatch.setattr(torch.utils._triton, "triton_hash_with_backend", lambda: "")
    torch._dynamo.reset()
    with config.patch(cpu_backend="triton", fx_graph_cache=False, force_disable_caches=True):
        compiled = on_one_device(model("llama-3.1-8b"), Layout(compile="on")).model
        compiled.hidden(tokens(2, 32))[0].sum().backward()
    torch._dynamo.reset()
    forward, backward = (len(set(re.findall(r"^(triton_\w+) = async_compile", code, re.MULTILINE))) for code in codes)
    assert 0 < forward <= FORWARD and 0 < backward <= BACKWARD

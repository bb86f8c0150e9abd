"""The watch on storages of known sizes, and on what torch.compile would take from its eyes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshwright.observe.dryrun.storage_tracker import StorageWatch

WIDTH = 64


def watched(function: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """Peak, and how many storages there were, of a function on a matrix."""
    x = torch.ones(WIDTH, WIDTH)
    with StorageWatch() as watch:
        function(x)
    return watch.peak_bytes, len(watch.records)


@pytest.mark.parametrize("before", [False, True])
def test_a_compiled_function_is_seen_with_all_its_memory(before: bool) -> None:
    """It runs as it was written: also one that was compiled before the watch came."""
    torch.compiler.reset()  # what was once run uncompiled stays so
    graphs, runs = [], []

    def written(x: Tensor) -> Tensor:
        return torch.sin(x @ x).sum()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)

        def run(*inputs: Tensor) -> object:
            runs.append(1)
            with torch.utils._python_dispatch._disable_current_modes():
                return graph.forward(*inputs)

        return run

    compiled = torch.compile(written, backend=backend)
    if before:
        compiled(torch.ones(WIDTH, WIDTH))
    already = len(runs)
    assert already == len(graphs) == int(before)
    assert watched(compiled) == watched(written) == (2 * 4 * WIDTH * WIDTH, 3)
    assert len(runs) == already


def test_views_take_nothing_and_what_is_let_go_is_gone() -> None:
    with StorageWatch() as watch:
        a = torch.ones(WIDTH)
        b = a.view(8, 8).t()
        assert watch.peak_bytes == 4 * WIDTH
        del a, b
        torch.ones(2 * WIDTH)
    assert watch.peak_bytes == 8 * WIDTH and sum(size for _, size in watch.events()) == 0


def test_what_is_freed_after_a_watch_is_closed_is_no_event() -> None:
    """A sum over events and another one later agree, although threads free tensors in between."""
    with StorageWatch() as watch:
        lasting = [torch.ones(WIDTH) for _ in range(3)]
    watch.close()
    before = list(watch.events())
    lasting.clear()
    assert list(watch.events()) == before == [(0, 4 * WIDTH), (1, 4 * WIDTH), (2, 4 * WIDTH)]
    assert watch.now == 3 and all(record.died < 0 for record in watch.records)

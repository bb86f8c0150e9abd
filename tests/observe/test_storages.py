"""The watch on storages of known sizes, and on what torch.compile would take from its eyes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import compat
from meshwright.observe.dryrun.storage_tracker import FakeWatch, StorageWatch
from meshwright.observe.profile.allocator import watching

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


@pytest.mark.parametrize("shared", [False, True])
def test_autograd_adds_gradients_in_place_where_it_alone_holds_the_first(shared: bool) -> None:
    """As with real tensors, where `shared` keeps the first gradient alive for somebody else."""
    size, others = 2**20, list[Tensor]()

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.new_zeros(())

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            summand = torch.ones(size)
            if shared:
                others.append(summand.detach())
            return summand

    def rise(watch: StorageWatch | None) -> float:
        weight = torch.zeros(size, requires_grad=True)
        loss = Gradient.apply(weight) + Gradient.apply(weight)  # type: ignore[no-untyped-call]
        if watch is not None:
            start = watch.now
            loss.backward()
            return watch.rise(start) / (4 * size)
        with watching() as recorder:
            loss.backward()
        return max(held for _, held in recorder.totals()) / (4 * size)

    with compat.fake_tensors(), FakeWatch() as watch:
        dry = rise(watch)
    others.clear()
    assert dry == pytest.approx(rise(None), abs=0.01) == (3 if shared else 2)

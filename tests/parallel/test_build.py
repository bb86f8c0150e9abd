"""What building an engine costs: a rank never has memory for more than it keeps, and every layout starts alike."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.observe.ranks import on_ranks
from meshwright.parallel import build_engine
from meshwright.parallel.axes.data import local
from meshwright.spec import Layout, num_parameters, presets
from meshwright.spec.errors import IllegalLayout

SHAPE = presets.model("llama-10m")
SLACK_BYTES = 6 * 2**20
"""A run of rows that is drawn, and a copy of it."""


class _Alive(TorchDispatchMode):
    """Bytes of CPU memory that operations make, and those alive at most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[Any, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import weakref

        output = operation(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive:
                    forget = weakref.finalize(storage, self.alive.pop, storage._cdata, None)
                    self.alive[storage._cdata] = (forget, storage.nbytes())
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return output


def _built(layouts: list[Layout]) -> list[tuple[int, int, float]]:
    """(bytes kept, bytes alive at most while building, sum of all weights held) on this rank."""
    results = []
    for layout in layouts:
        with _Alive() as seen:
            engine = build_engine(SHAPE, layout)
        weights = [local(parameter.detach()) for parameter in engine.parameters.values()]
        bytes_kept = sum(tensor.numel() * tensor.element_size() for tensor in weights)
        results.append((bytes_kept, seen.most, float(sum(tensor.double().sum() for tensor in weights))))
    return results


def test_a_rank_has_memory_for_its_part_only() -> None:
    whole = 4 * num_parameters(SHAPE)
    [(alone, most, total)] = _built([Layout(compile="off")])
    assert alone == whole and most < whole + SLACK_BYTES
    [first, second] = on_ranks(2, _built, [Layout(dp_shard=2, zero=3, compile="off")])
    for held, most, _ in (first[0], second[0]):
        assert abs(held - whole / 2) < 0.01 * whole
        assert most < held + SLACK_BYTES < 0.8 * whole
    assert abs(first[0][2] + second[0][2] - total) < 1e-6 * max(1.0, abs(total))


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_a_tied_head_on_one_rank_is_never_trained_wrong(schedule: Any) -> None:
    """Each end would shard a matrix of its own, and only one of them be updated."""
    layout = Layout(pp=2, vp=2, schedule=schedule, dp_shard=2, zero=2, micro_batch=1)
    with pytest.raises(IllegalLayout, match="tied head cannot have data parallelism"):
        build_engine(replace(SHAPE, tied=True), layout)

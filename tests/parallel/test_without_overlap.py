"""layout.overlap=off on real Gloo processes: the same bits, and no collective that runs beside other work."""

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import Case, RankOutcome, outcome
from meshwright.observe.ranks import on_ranks
from meshwright.parallel.axes.ring import _Travelling
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout

CASES = {"dense": Case(shape=shrink("llama-3.1-8b")), "experts": Case(shape=shrink("qwen3-30b-a3b"))}
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "dense": [
        {"dp_replicate": 2, "micro_batch": 2},
        {"dp_replicate": 2},
        {"dp_shard": 2, "zero": 3, "micro_batch": 2},
        {"tp": 2, "sp": True, "tp_chunks": 2},
        {"cp": 2},
        {"pp": 2, "micro_batch": 2},
    ],
    "experts": [{"dp_shard": 2, "ep": 2, "ep_chunks": 2}],
}
RUN_BESIDE = ("dp_replicate", "tp", "cp", "ep")
"""Axes whose collectives this engine runs beside other work on a CPU. Those of fully_shard block there."""
NAMES = (
    "all_reduce", "all_to_all_single", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
    "reduce_scatter_single",
)  # fmt: skip
COLLECTIVES = [name for name in NAMES if hasattr(dist, name)]


def _train(case: str, layout: Layout, groups: ProcessGroups) -> tuple[RankOutcome, dict[str, int]]:
    """Return what training came to, and how many calls of each name returned before they had ended."""
    beside: Counter[str] = Counter()

    def counted(name: str, inner: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            beside[name] += bool(keywords.get("async_op"))
            return inner(*arguments, **keywords)

        return call

    begin = _Travelling.__init__

    def hop(self: Any, *arguments: Any) -> None:
        begin(self, *arguments)
        beside["hop"] += bool(self.work)  # what wait() has not emptied

    patches = {name: counted(name, getattr(dist, name)) for name in COLLECTIVES}
    with patch.multiple(dist, **patches), patch.object(_Travelling, "__init__", hop):
        return outcome(CASES[case], layout, process_groups=groups), dict(beside)


def _run(case: str) -> list[list[tuple[RankOutcome, dict[str, int]]]]:
    groups: ProcessGroups = {}
    layouts = [Layout(compile="off", **options) for options in LAYOUTS[case]]
    return [[_train(case, replace(each, overlap=word), groups) for word in ("on", "off")] for each in layouts]


@pytest.mark.parametrize("case", [*LAYOUTS])
def test_without_overlap_every_bit_is_the_same(case: str) -> None:
    for rank in on_ranks(2, _run, case):
        for options, ((usual, runs_beside), (serial, none)) in zip(LAYOUTS[case], rank, strict=True):
            assert (usual.losses, usual.norms) == (serial.losses, serial.norms), options
            assert usual.tensors.keys() == serial.tensors.keys()
            for name, (_, tensor) in usual.tensors.items():
                assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(serial.tensors[name][1])), (options, name)
            assert not any(none.values()), options
            if not options.keys().isdisjoint(RUN_BESIDE):
                assert any(runs_beside.values()), options

"""An engine that is dropped gives its memory back: a notebook trains more than one model in a process."""

import gc
from typing import Any
from weakref import ref

import pytest

from meshwright.observe.oracle.feature_matrix import CASE
from meshwright.observe.ranks import on_ranks
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout
from tests.parallel.test_traffic import Run

LAYOUTS: list[dict[str, Any]] = [
    {"dp_replicate": 2},
    *({"dp_shard": 2, "zero": zero, "micro_batch": 1} for zero in (1, 2, 3)),
    {"tp": 2, "sp": True, "recompute": "selective"},
    {"cp": 2, "zero": 1},
    {"pp": 2, "micro_batch": 1, "schedule": "zb-h1"},
]


def _alive(layouts: list[dict[str, Any]]) -> list[int]:
    """How many parameters of each layout's engine live on after a step when nobody holds the engine."""
    process_groups: ProcessGroups = {}
    counts = []
    for each in layouts:
        run = Run(CASE, Layout(compile="off", **each), process_groups)
        run.step()
        parameters = [ref(parameter) for parameter in run.engine.parameters.values()]
        del run
        gc.collect()
        counts.append(sum(parameter() is not None for parameter in parameters))
    return counts


@pytest.mark.long
def test_no_parameter_outlives_its_engine() -> None:
    assert on_ranks(2, _alive, LAYOUTS) == [[0] * len(LAYOUTS)] * 2

"""Products of operands rounded to 8 bits under layouts: as on one device, within a band. Scales are powers of
two, so that a row that tp splits is rounded as the whole row is, but for what becomes subnormal. A bf16 number that
differs in its last bit may round to another 8-bit number, 32 times as far."""

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import BANDS, Case, first_difference, outcome
from meshwright.observe.ranks import on_ranks
from meshwright.parallel.groups.group import gather_objects
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout
from meshwright.spec.model.shape import MoEShape

SHAPE = replace(shrink("llama-3.1-8b"), hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=64)
CASE = Case(shape=SHAPE, precision="bf16", products="fp8")
ALL = replace(CASE, products="fp8-all")
ROUTED = replace(ALL, shape=replace(SHAPE, moe=MoEShape(experts=4, top_k=4, ffn=32)))
"""Of which every expert is chosen: where two are liked almost equally, a rounding decides."""
EVERY: list[tuple[Case, dict[str, Any]]] = [
    (ALL, {"tp": 2, "sp": True, "tp_chunks": 2, "dp_shard": 2, "zero": 3}),
    (ALL, {"pp": 2, "schedule": "zb-h1", "dp_shard": 2, "zero": 1, "micro_batch": 2}),
    (ROUTED, {"dp_shard": 4, "ep": 2, "zero": 2}),
    (ROUTED, {"tp": 2, "dp_replicate": 2, "micro_batch": 1}),
    (ROUTED, {"pp": 2, "schedule": "zb-h1", "dp_shard": 2, "ep": 2, "zero": 1, "micro_batch": 2}),
]
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "sp": True, "dp_shard": 2, "zero": 3},
    {"tp": 4},
    {"tp": 2, "sp": True, "tp_chunks": 2, "dp_shard": 2, "zero": 2},
    {"tp": 2, "tp_chunks": 2, "dp_shard": 2, "zero": 1},
    {"pp": 2, "schedule": "zb-h1", "tp": 2, "micro_batch": 2},
    {"dp_shard": 4, "zero": 2, "recompute": "full"},
    {"cp": 2, "dp_shard": 2, "zero": 1, "recompute": "selective"},
]


def _differences() -> list[str]:
    process_groups: ProcessGroups = {}
    alone = outcome(CASE, Layout(compile="off")) if dist.get_rank() == 0 else None
    wrong = []
    for each in LAYOUTS:
        ranks = gather_objects(outcome(CASE, Layout(compile="off", **each), process_groups=process_groups), None)
        difference = alone and first_difference(alone, ranks, BANDS["fp8"])
        wrong += [f"{each}: {difference}"] if difference else []
    return wrong


def _of_all_products() -> list[str]:
    process_groups: ProcessGroups = {}
    wrong = []
    for case, each in EVERY:
        alone = outcome(case, Layout(compile="off")) if dist.get_rank() == 0 else None
        ranks = gather_objects(outcome(case, Layout(compile="off", **each), process_groups=process_groups), None)
        difference = alone and first_difference(alone, ranks, BANDS["fp8-all"])
        wrong += [f"{each}: {difference}"] if difference else []
    return wrong


@pytest.mark.slow
def test_layouts_with_all_products_rounded_train_as_one_device() -> None:
    wrong = on_ranks(4, _of_all_products, limit_s=600)[0]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_layouts_train_as_one_device() -> None:
    wrong = on_ranks(4, _differences, limit_s=600)[0]
    assert not wrong, "\n".join(wrong)

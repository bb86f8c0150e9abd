"""Layouts on real Gloo processes beside one device: loss, every gradient, gradient norm and weights after two steps."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import Case, RankOutcome, first_difference, outcome
from meshwright.observe.ranks import on_ranks
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout
from tests.model.shrunk import KINDS

CASES = {kind: Case(shape=shrink(kind)) for kind in KINDS}
CASES |= {f"{kind} of 5 layers": Case(shape=replace(shrink(kind), layers=5)) for kind in KINDS}
CASES["packed"] = Case(shape=shrink("llama-3.1-8b"), packed=True)

TWO: list[dict[str, Any]] = [
    *({"dp_shard": 2, "zero": zero, "micro_batch": 2} for zero in range(4)),
    {"dp_replicate": 2},
    {"dp_shard": 2, "zero": 3, "recompute": "full", "micro_batch": 2},
    {"dp_shard": 2, "zero": 2, "recompute": "selective"},
    {"tp": 2},
    {"tp": 2, "sp": True},
    {"tp": 2, "sp": True, "recompute": "selective", "micro_batch": 4},
    {"cp": 2},
    {"cp": 2, "context_split": "chunks", "context": "all-gather"},
    {"cp": 2, "context_split": "striped"},
    {"cp": 2, "context_split": "striped", "context": "all-gather"},
    {"cp": 2, "zero": 3, "recompute": "full", "micro_batch": 2},
]
TWO_STAGES: list[dict[str, Any]] = [
    {"pp": 2, "micro_batch": 2, "schedule": "afab"},
    {"pp": 2, "micro_batch": 1, "recompute": "selective", "stages": (1, 2)},
    {"pp": 2, "micro_batch": 2, "schedule": "zb-h1", "recompute": "full"},
]
FOUR_STAGES: list[dict[str, Any]] = [
    {"pp": 2, "tp": 2, "sp": True, "micro_batch": 2},
    {"pp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 1, "schedule": "zb-h1"},
    {"pp": 2, "dp_shard": 2, "zero": 0, "micro_batch": 1},
    {"pp": 2, "cp": 2, "zero": 1, "micro_batch": 2},
]
V_STAGES: list[dict[str, Any]] = [
    {"pp": 2, "vp": 2, "schedule": "interleaved", "micro_batch": 1},
    {"pp": 2, "vp": 2, "schedule": "zb-v", "micro_batch": 1, "stages": (2, 1, 1, 1)},
    {"pp": 2, "vp": 2, "schedule": "dualpipe-v", "micro_batch": 1, "recompute": "selective"},
]
TWO_EXPERTS: list[dict[str, Any]] = [
    {"dp_shard": 2, "ep": 2},
    {"dp_shard": 2, "ep": 2, "zero": 3, "micro_batch": 2, "recompute": "full"},
    {"dp_shard": 2, "ep": 2, "zero": 2, "micro_batch": 2, "recompute": "selective", "ep_chunks": 2},
    {"tp": 2, "sp": True, "ep": 2},
    {"cp": 2, "ep": 2, "zero": 2},
]
FOUR: list[dict[str, Any]] = [
    {"tp": 4},
    {"tp": 4, "sp": True},
    {"tp": 2, "dp_shard": 2, "zero": 3},
    {"tp": 2, "dp_replicate": 2, "sp": True, "micro_batch": 2},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 2, "micro_batch": 1},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 1, "micro_batch": 1},
    {"cp": 2, "tp": 2, "sp": True, "zero": 1},
    {"cp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 2},
    {"cp": 4, "context": "all-gather"},
]
FOUR_EXPERTS: list[dict[str, Any]] = [
    {"dp_shard": 4, "ep": 2, "zero": 3},
    {"dp_shard": 2, "dp_replicate": 2, "ep": 2, "zero": 1},
    {"dp_shard": 2, "tp": 2, "sp": True, "ep": 4, "micro_batch": 2},
    {"dp_shard": 2, "tp": 2, "sp": True, "ep": 2, "zero": 2, "micro_batch": 2, "ep_chunks": 2},
    {"cp": 2, "tp": 2, "sp": True, "ep": 4},
    {"tp": 4, "sp": True, "ep": 2},
    {"dp_shard": 4, "ep": 4, "zero": 2, "recompute": "selective"},
]


@cache
def one_device(case: str) -> RankOutcome:
    return outcome(CASES[case], Layout(compile="off"))


def _run(case: str, options: list[dict[str, Any]]) -> list[RankOutcome]:
    process_groups: ProcessGroups = {}
    return [outcome(CASES[case], Layout(compile="off", **each), process_groups=process_groups) for each in options]


def check(case: str, world: int, layouts: list[dict[str, Any]]) -> None:
    ranks = on_ranks(world, _run, case, layouts)
    differences = {
        str(options): first_difference(one_device(case), [rank[index] for rank in ranks])
        for index, options in enumerate(layouts)
    }
    assert not any(differences.values()), "\n".join(
        f"{options}: {what}" for options, what in differences.items() if what
    )


def slow(name: str) -> Any:
    """A mixture's matrix of layouts takes a minute; the other mixtures are in the quick set."""
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("case", [*(slow(kind) if kind == "qwen3-30b-a3b" else kind for kind in KINDS), "packed"])
@pytest.mark.long
def test_two_ranks_train_the_same_model(case: str) -> None:
    check(case, 2, TWO + TWO_STAGES + (TWO_EXPERTS if CASES[case].shape.moe else []))


@pytest.mark.parametrize("kind", ["llama-3.1-8b", "deepseek-v3", "gpt2-124m"])
@pytest.mark.long
def test_four_stages_on_two_ranks(kind: str) -> None:
    check(f"{kind} of 5 layers", 2, V_STAGES)


@pytest.mark.parametrize("case", ["packed", "gpt2-124m", "qwen3-30b-a3b", slow("deepseek-v3")])
@pytest.mark.long
def test_four_ranks_train_the_same_model(case: str) -> None:
    check(case, 4, FOUR + FOUR_STAGES + (FOUR_EXPERTS if CASES[case].shape.moe else []))

"""Muon under layouts: one device's numbers, whoever holds which piece; and what would be wrong without the exchange."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.observe.oracle.feature_matrix import CASE, DENSE, from_arrays, outcomes_of
from meshwright.observe.oracle.one_device import Case, RankOutcome, first_difference, outcome
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout, Recipe
from meshwright.training.optimizer import muon
from meshwright.training.optimizer.optimizer import Optimizer

TWO: list[dict[str, Any]] = [
    {"dp_replicate": 2}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 3}, {"tp": 2, "sp": True},
    {"cp": 2, "zero": 2}, {"pp": 2, "micro_batch": 1},
]  # fmt: skip
FOUR: list[dict[str, Any]] = [
    {"dp_shard": 2, "tp": 2, "zero": 3}, {"tp": 4}, {"dp_replicate": 2, "dp_shard": 2, "zero": 2, "micro_batch": 1},
    {"dp_shard": 4, "ep": 2, "zero": 1}, {"dp_shard": 2, "tp": 2, "sp": True, "ep": 4}, {"dp_shard": 4, "zero": 3},
    {"pp": 2, "vp": 2, "schedule": "zb-v", "dp_shard": 2, "zero": 1, "micro_batch": 1},
]  # fmt: skip
NARROW = replace(DENSE, optimizer="muon", optimizer_states="bf16")
BF16 = replace(DENSE, optimizer="muon", precision="bf16", master_weights="none")


def layouts(options: list[dict[str, Any]], case: Case) -> list[tuple[Case, Layout]]:
    routed = case.shape.moe is not None
    return [(case, Layout(compile="off", **fields)) for fields in options if routed or "ep" not in fields]


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, layouts(TWO, replace(CASE, optimizer="muon"))),
        (2, layouts(TWO, NARROW) + layouts(TWO, BF16)),
        (4, layouts(FOUR, replace(CASE, optimizer="muon"))),
        (4, layouts(FOUR, replace(DENSE, optimizer="muon"))),
    ],
    ids=["two", "two, narrow states and bf16", "four", "four, dense"],
)
@pytest.mark.long
def test_layouts_are_equal_to_one_device(world: int, cases: list[tuple[Case, Layout]]) -> None:
    alone: dict[Case, RankOutcome] = {}
    ranks = on_ranks(world, outcomes_of, cases, "cpu", limit_s=300)
    for number, (case, layout) in enumerate(cases):
        if case not in alone:
            alone[case] = outcome(case, Layout(compile="off"))
        together = [from_arrays(rank[number]) for rank in ranks]
        assert first_difference(alone[case], together, case.band) is None, layout


def each_its_piece(case: Case, layout: Layout) -> RankOutcome:
    """With the error that the exchange is there to prevent: each rank orthogonalizes what it has."""

    def alone(self: muon.Muon, updates: dict[str, muon.MatrixUpdate], numbers: muon.StepNumbers) -> None:
        for exchange in self.rounds:
            for part in exchange.held:
                rows = updates[part.matrix.name].direction[part.start : part.start + part.rows]
                step = muon.orthogonalized(rows[None].clone(), self.recipe.epsilon)[0]
                self._update_rows(updates[part.matrix.name].piece, part, step, numbers)

    muon.Muon.update = alone  # type: ignore[assignment]  # in a process of its own
    return outcomes_of([(case, layout)], "cpu")[0]


@pytest.mark.parametrize("options", [{"tp": 2}, {"dp_shard": 2, "zero": 1}], ids=str)
def test_pieces_that_are_orthogonalized_alone_are_found(options: dict[str, Any]) -> None:
    case, layout = replace(DENSE, optimizer="muon"), Layout(compile="off", **options)
    ranks = [from_arrays(sent) for sent in on_ranks(2, each_its_piece, case, layout)]
    difference = first_difference(outcome(case, Layout(compile="off")), ranks, case.band)
    assert difference is not None and difference.startswith("step 2: loss")


def empty_rank() -> list[int]:
    """Rounds of a rank whose parameters are frozen, or all too few for it."""
    process_groups: ProcessGroups = {}
    rounds = []
    for frozen in (False, True):
        mesh = make_mesh(Layout(dp_shard=2, zero=1), process_groups=process_groups)
        engine = build_engine(DENSE.shape, mesh.layout, mesh=mesh)
        for name, parameter in engine.parameters.items():
            parameter.requires_grad_(not frozen or "norm" in name)
        optimizer = Optimizer.for_engine(engine, Recipe(optimizer="muon"))
        for parameter in optimizer.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(1e-3, divide_by=torch.ones(()), skip=torch.zeros(()))
        assert optimizer._muon is not None
        rounds.append(len(optimizer._muon.rounds))
    return rounds


def test_a_rank_whose_matrices_are_frozen_sends_nothing() -> None:
    assert on_ranks(2, empty_rank) == [[1, 0], [1, 0]]

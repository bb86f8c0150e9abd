"""Fewer experts on a rank than ranks that share them under ZeRO: cut inside, so that no rank is left without."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import Case, RankOutcome, first_difference, outcome
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import Engine, build_engine
from meshwright.parallel.groups.mesh import ProcessGroups, make_mesh
from meshwright.spec import Layout, MoEShape
from meshwright.spec.weights.boxes import Box, shard, sharded_dim
from meshwright.store import checkpoint
from meshwright.store.saver import piece

CASE = Case(shape=replace(shrink("qwen3-30b-a3b"), moe=MoEShape(experts=2, top_k=1, ffn=12, first_dense=1)))
LAYOUTS: list[dict[str, Any]] = [
    *({"dp_shard": 4, "zero": zero, "micro_batch": 1} for zero in (1, 2, 3)),
    {"dp_shard": 4, "ep": 2, "zero": 3, "recompute": "full"},
    {"cp": 2, "dp_shard": 2, "ep": 2, "zero": 2, "micro_batch": 2},
    {"dp_shard": 2, "tp": 2, "sp": True, "ep": 2, "zero": 1},
]
SAVED = LAYOUTS[1::2][:2]
SEED = 7


@pytest.mark.parametrize(
    ("sizes", "ranks", "dim"),
    [
        ((4, 12, 24), 4, 0),
        ((4, 12, 24), 16, 0),  # nothing divides: some ranks stay without
        ((4, 16, 24), 16, 1),
        ((4, 12, 32), 16, 2),
        ((6, 12, 24), 4, 1),  # 2, 2, 2 and none
        ((7, 12, 24), 4, 0),  # 2, 2, 2 and 1
        ((2, 24), 4, 0),
        ((24,), 32, 0),
    ],
)
def test_the_dim_that_is_cut(sizes: tuple[int, ...], ranks: int, dim: int) -> None:
    assert sharded_dim(sizes, ranks) == dim
    parts = [shard(Box(whole=sizes, offsets=(0,) * len(sizes), sizes=sizes), ranks, index) for index in range(ranks)]
    covered = torch.zeros(sizes, dtype=torch.int64)
    for part in parts:
        covered[part.slices] += 1
    assert (covered == 1).all()


def trained(options: list[dict[str, Any]]) -> list[RankOutcome]:
    process_groups: ProcessGroups = {}
    return [outcome(CASE, Layout(compile="off", **each), process_groups=process_groups) for each in options]


@pytest.mark.long
def test_the_same_model_is_trained() -> None:
    expected = outcome(CASE, Layout(compile="off"))
    ranks = on_ranks(4, trained, LAYOUTS)
    for index, each in enumerate(LAYOUTS):
        assert first_difference(expected, [rank[index] for rank in ranks]) is None, each
    for rank in ranks:
        box, _ = rank[0].tensors["step 1 weight layers.1.mlp.experts.up"]
        assert (box.whole, box.sizes) == ((2, 12, 24), (2, 3, 24))


def tensors(engine: Engine) -> dict[str, torch.Tensor]:
    boxes = engine.local_boxes()
    return {
        name: piece(
            parameter.detach().to_local() if hasattr(parameter, "to_local") else parameter.detach(), boxes[name]
        )
        for name, parameter in engine.parameters.items()
    }


def saved_and_loaded(folder: Path) -> list[float]:
    """Saved by each of SAVED and loaded under the other; the largest difference from the weights of the seed."""
    distances, process_groups = [], ProcessGroups()
    for each, other in zip(SAVED, SAVED[::-1], strict=True):
        engines = [
            build_engine(CASE.shape, layout, mesh=make_mesh(layout, process_groups=process_groups), seed=seed)
            for layout, seed in ((Layout(**each), SEED), (Layout(**other), 0), (Layout(**other), SEED))
        ]
        right, fresh, expected = map(tensors, engines)
        path = checkpoint.save(folder, step=1, tensors=right, values={}, score=None, keep_last=1)
        checkpoint.load(path, fresh)
        pairs = [(getattr(fresh[name], "held", fresh[name]), getattr(t, "held", t)) for name, t in expected.items()]
        distances.append(max(float((saved - two).abs().max()) for saved, two in pairs if saved.numel()))
    return distances


@pytest.mark.long
def test_a_checkpoint_of_it_loads_under_other_layouts_and_on_one_device(tmp_path: Path) -> None:
    assert on_ranks(4, saved_and_loaded, tmp_path) == [[0.0] * len(SAVED)] * 4
    fresh, expected = (tensors(build_engine(CASE.shape, Layout(), seed=seed)) for seed in (0, SEED))
    checkpoint.load(tmp_path / "step-000001", fresh)
    assert all(torch.equal(fresh[name], tensor) for name, tensor in expected.items())

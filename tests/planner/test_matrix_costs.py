"""Muon in closed form beside the exchange that is dealt out matrix by matrix."""

from collections import Counter

import pytest

from meshwright.planner.cost.speeds import speeds_of
from meshwright.planner.time.update_passes import _layer_matrices, layer_matrices, moved, spread
from meshwright.spec import Layout, ModelShape, presets
from meshwright.spec.memory.matrix_exchange import deal_matrices, flop
from meshwright.spec.weights.inventory import parameters
from meshwright.verbs.verify.cases import random_case


def spread_of(shape: ModelShape, layout: Layout) -> dict[str, tuple[int, int]]:
    """Parameter -> (pieces of its first matrix, the most ranks that hold one)."""
    return {
        matrix.matrix.name: (len(matrix.tiles), max(map(len, matrix.tiles.values())))
        for matrix in deal_matrices(shape, layout, 0)
        if matrix.matrix.expert == 0
    }


@pytest.mark.parametrize("seed", range(3))
def test_pieces_and_copies_are_those_that_are_dealt(seed: int) -> None:
    """Of random cases without a pipeline; shapes that divide nothing leave some ranks without a row."""
    seen = 0
    for index in range(120):
        drawn = random_case(seed, index)
        shape, layout = drawn.case.shape, drawn.layout
        if layout.pp > 1:
            continue
        known = {parameter.name: parameter for parameter in parameters(shape)}
        trained = {name: each for name, each in spread_of(shape, layout).items() if known[name].trained}
        for name, (pieces, copies) in trained.items():
            counted = spread(known[name], shape, layout)
            assert counted[0] == pieces and counted[1] == pytest.approx(copies), (drawn, name)
            seen += 1
    assert seen > 200


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama-3.1-8b", Layout(dp_shard=8, zero=3)), ("llama-3.1-8b", Layout(dp_replicate=4, dp_shard=4, zero=2)),
        ("llama-3.1-8b", Layout(dp_replicate=8)), ("llama-3.1-8b", Layout(dp_shard=2, tp=16, zero=1)),
        ("qwen3-30b-a3b", Layout(dp_shard=16, ep=8, zero=1)),
        ("qwen3-30b-a3b", Layout(dp_shard=16, tp=2, sp=True, ep=4)),
    ],
    ids=str,
)  # fmt: skip
def test_what_travels_is_what_is_dealt_on_average(name: str, layout: Layout) -> None:
    shape = presets.model(name)
    routed = shape.moe is not None
    sent, ranks = Counter[str](), layout.world
    for matrix in deal_matrices(shape, layout, 0):
        for piece, holders in matrix.tiles.items():
            sent["gathered"] += piece.numel * (matrix.owner not in holders)
            sent["scattered"] += piece.numel * sum(holder != matrix.owner for holder in holders)
            sent["updated"] += piece.numel * len(holders)
        sent["owned"] += matrix.matrix.numel
    counted = moved(shape, layout, routed)
    for key, total in sent.items():
        assert shape.layers * getattr(counted, key) == pytest.approx(total / ranks, rel=0.01), key


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3"])
def test_seconds_are_those_of_the_flop_at_less_than_the_best_rate(name: str) -> None:
    shape, device = presets.model(name), presets.cluster("h100x8").device
    speeds = speeds_of(device)
    matrices = layer_matrices(shape, "bf16", speeds)
    for routed, seconds in ((False, matrices.dense_s), (True, matrices.routed_s)):
        layer = _layer_matrices(shape, routed)
        work = sum(parameter.matrices[0] * flop(*parameter.matrices[1:]) for parameter in layer if parameter.matrices)
        if layer:
            assert work / speeds.matmul_flop_per_s < seconds < 3 * work / speeds.matmul_flop_per_s
    assert layer_matrices(shape, "fp32", speeds).dense_s > 5 * matrices.dense_s

"""Journeys of rows to experts and back beside what is computed: the plan's seconds against the two resources played."""

from dataclasses import replace

import pytest

from meshwright.planner.cost.block import layer
from meshwright.planner.cost.exchanges import links_of
from meshwright.planner.cost.micro_batch import local_shape
from meshwright.planner.cost.speeds import speeds_of
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.cost.stage_costs import block_time
from meshwright.planner.cost.work import LayerOperation
from meshwright.planner.step.predict import predict
from meshwright.spec import Layout, ModelShape, Plan, Recipe, presets

QWEN, DEEPSEEK = presets.model("qwen3-30b-a3b"), presets.model("deepseek-v3")


def played(pieces: int, each_s: float, compute_s: float) -> float:
    """Seconds of all pieces there, computed, and back: one wire, on which the ways there come first, and one device."""
    wire = pieces * each_s
    ready = 0.0
    for piece in range(pieces):
        ready = max(ready, (piece + 1) * each_s) + compute_s / pieces
        wire = max(wire, ready) + each_s
    return wire


def timed(shape: ModelShape, layout: Layout, batch: int, nodes: int) -> tuple[float, float, float, float]:
    """Of a routed layer's forward pass: exposed exchanges, a piece's journey, the experts, the shared experts."""
    cluster = presets.cluster("h100x8", nodes)
    local = local_shape(shape, MESHWRIGHT, layout, 4096, batch, 2, gpu=True)
    speeds, links = speeds_of(cluster.device), links_of(cluster)
    block = layer(local, routed=True)

    def seconds(*names: str) -> float:
        operations = [op for op in block.operations if op.name in names]
        return sum(speeds.seconds(work) for op in operations for work in op.forward)

    (tell, trip), _ = _exchanges(block.operations, "dispatch")
    each = links.seconds("all-to-all", trip.size_bytes, layout.ep)
    told = links.seconds("all-to-all", tell.size_bytes, layout.ep)
    experts = seconds("experts up", "experts activation", "experts down")
    exposed = block_time(block, local, speeds, links).forward[1] - told
    return exposed, each, experts, seconds("shared up", "shared activation", "shared down")


def _exchanges(operations: tuple[LayerOperation, ...], name: str):  # type: ignore[no-untyped-def]  # both passes
    return next(op.exchanges for op in operations if op.name == name)


@pytest.mark.parametrize("pieces", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("nodes", "batch"), [(1, 1), (1, 8), (4, 1), (4, 8)])
def test_what_is_exposed_of_pieces_is_what_two_resources_leave(pieces: int, nodes: int, batch: int) -> None:
    layout = Layout(dp_shard=8 * nodes, ep=8, ep_chunks=pieces)
    exposed, each, experts, _ = timed(QWEN, replace(layout, ep_chunks=pieces), batch, nodes)
    assert exposed == pytest.approx(played(pieces, each, experts) - experts)


def test_shared_experts_hide_what_they_take() -> None:
    """One node, where nothing else travels: a half beside each journey, as far as it goes."""
    layout = Layout(dp_shard=8, ep=8, ep_chunks=1)
    exposed, each, _, shared = timed(DEEPSEEK, layout, 1, 1)
    assert 0 < shared < 2 * each
    assert exposed == pytest.approx(2 * each - shared)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b"])
@pytest.mark.parametrize(("nodes", "ep"), [(1, 2), (1, 4), (1, 8), (4, 8), (8, 64), (16, 32)])
@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_number_that_is_chosen_is_not_slower_than_one(
    name: str, nodes: int, ep: int, micro_batch: int, recompute: str
) -> None:
    shape = presets.model(name)
    assert shape.moe is not None
    if shape.moe.experts % ep:
        return
    recipe = Recipe(sequence=4096, global_batch=8 * nodes * micro_batch, precision="bf16")
    layout = Layout(dp_shard=8 * nodes, zero=1, ep=ep, micro_batch=micro_batch, recompute=recompute)  # type: ignore[arg-type]
    asked = Plan(model=shape, recipe=recipe, layout=layout, cluster=presets.cluster("h100x8", nodes))
    chosen, whole = predict(asked), predict(replace(asked, layout=replace(layout, ep_chunks=1)))
    rows = micro_batch * 4096 * shape.moe.top_k
    pieces = layout.ep_pieces(rows, shape.hidden, shape.moe, "cuda")
    assert (chosen.time.exchange_s < whole.time.exchange_s) == (pieces > 1)
    assert chosen.step_s < 1.001 * whole.step_s

"""Distribution of matrices: ranks agree on what travels, every piece arrives once, and the work is even."""

from collections import Counter

import pytest

from meshwright.spec import Layout, ModelShape, MoEShape, presets
from meshwright.spec.layout.layout import pipeline_ranks
from meshwright.spec.memory.held import list_held, parameters_of
from meshwright.spec.memory.matrix_exchange import ExchangeRound, deal_matrices, flop, rounds, stage_ranks
from meshwright.spec.weights.inventory import num_parameters, parameters
from meshwright.verbs.verify.cases import random_case

SHAPE = ModelShape(vocab=64, layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, max_positions=16)
ROUTED = ModelShape(
    vocab=64, layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, max_positions=16,
    moe=MoEShape(experts=8, top_k=2, ffn=24, shared_experts=1, first_dense=1),
)  # fmt: skip


def agreed(shape: ModelShape, layout: Layout) -> None:
    """Check each stage: senders and receivers expect the same, round by round and in order.

    Every owner gets each element once, and every holder gets what it holds.
    """
    for first in pipeline_ranks(layout):
        ranks = stage_ranks(layout, first)
        views = [rounds(shape, layout, rank) for rank in ranks]
        assert len({len(view) for view in views}) == 1
        for number in range(len(views[0])):
            now = [view[number] for view in views]
            assert len({(exchange.gathers, exchange.scatters) for exchange in now}) == 1
            for a, mine in enumerate(now):
                for b, other in enumerate(now):
                    there = [(mine.sent[k].matrix, mine.sent[k].numel) for k in at(mine.sent, b)]
                    assert there == [(other.owned[p.owned], p.numel) for p in other.gathered if p.peer == a]
                    back = [(other.held[k].matrix, other.held[k].numel) for k in at(other.held, a)]
                    assert back == [(mine.owned[p.owned], p.numel) for p in mine.scattered if p.peer == b]
                    if a != b and there:
                        assert mine.gathers
                    if a != b and back:
                        assert mine.scatters
                whole(mine)
        holders(shape, layout, ranks, views)


def at(parts: list, peer: int) -> list[int]:  # type: ignore[type-arg]
    return [index for index, part in enumerate(parts) if part.peer == peer]


def whole(exchange: ExchangeRound) -> None:
    """Each element of an owned matrix comes once, and goes to somebody."""
    for index, matrix in enumerate(exchange.owned):
        for parts in (exchange.gathered, {p.piece: p for p in exchange.scattered if p.owned == index}.values()):
            seen: Counter[tuple[int, int]] = Counter()
            for part in parts:
                if part.owned == index:
                    rows, columns = part.piece.slices
                    seen.update(
                        (r, c) for r in range(rows.start, rows.stop) for c in range(columns.start, columns.stop)
                    )
            assert set(seen.values()) == {1} and len(seen) == matrix.numel


def holders(shape: ModelShape, layout: Layout, ranks: tuple[int, ...], views: list[tuple[ExchangeRound, ...]]) -> None:
    """Check that a rank gets back all that it holds of matrices."""
    for rank, view in zip(ranks, views, strict=True):
        back: Counter[str] = Counter()
        for exchange in view:
            for part in exchange.held:
                back[part.matrix.name] += part.numel
        wanted = {part.parameter.name: part.owned for part in list_held(shape, layout, rank) if part.parameter.matrices}
        assert dict(back) == {name: size for name, size in wanted.items() if size}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(), Layout(dp_replicate=3), Layout(dp_shard=3, zero=3), Layout(dp_replicate=2, dp_shard=2, zero=2),
        Layout(tp=4), Layout(tp=4, dp_shard=2, zero=1), Layout(pp=2, tp=2, cp=2, zero=1), Layout(pp=2, dp_shard=5),
        Layout(dp_shard=40, zero=3),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [SHAPE, ROUTED], ids=["dense", "experts"])
def test_ranks_agree(shape: ModelShape, layout: Layout) -> None:
    agreed(shape, layout)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=4, ep=4), Layout(dp_shard=4, ep=2, zero=3), Layout(dp_shard=2, tp=2, sp=True, ep=4, zero=2),
        Layout(dp_replicate=2, dp_shard=2, ep=2, zero=1), Layout(dp_shard=24, ep=2, zero=3),
    ],
    ids=str,
)  # fmt: skip
def test_ranks_agree_about_experts(layout: Layout) -> None:
    agreed(ROUTED, layout)


@pytest.mark.parametrize("seed", range(2))
def test_ranks_agree_in_random_cases(seed: int) -> None:
    for index in range(40):
        drawn = random_case(seed, index)
        agreed(drawn.case.shape, drawn.layout)


def test_the_inventory_names_matrices() -> None:
    """An 8B model has all but embedding, head and norms. Each expert is a matrix of its own, a router none."""
    shape = presets.model("llama-3.1-8b")
    elements = sum(parameter.numel for parameter in parameters(shape) if parameter.matrices)
    assert num_parameters(shape) - elements == 2 * 128256 * 4096 + 65 * 4096
    by_name = {parameter.name: parameter.matrices for parameter in parameters(ROUTED)}
    assert by_name["layers.1.mlp.experts.down"] == (8, 32, 24)
    assert by_name["layers.1.mlp.shared.up.weight"] == (1, 24, 32)
    assert by_name["layers.1.mlp.router.weight"] is None and by_name["head.weight"] is None
    assert by_name["embed.weight"] is None and by_name["norm.weight"] is None


def test_only_what_learns_is_orthogonalized() -> None:
    names = frozenset({"layers.0.mlp.up.weight"})
    matrices = deal_matrices(SHAPE, Layout(dp_shard=2, zero=3), 1, names)
    assert [entry.matrix.name for entry in matrices] == list(names)
    assert not deal_matrices(SHAPE, Layout(), 0, frozenset())


@pytest.mark.parametrize(("layout", "most"), [(Layout(dp_shard=8, zero=3), 1.01), (Layout(dp_shard=64, zero=3), 1.5)])
def test_the_work_is_even(layout: Layout, most: float) -> None:
    """224 matrices of three sizes on 8 and on 64 ranks."""
    shape, loads = presets.model("llama-3.1-8b"), Counter[int]()
    for entry in deal_matrices(shape, layout, 0):
        loads[entry.owner] += flop(entry.matrix.rows, entry.matrix.columns)  # type: ignore[assignment]  # FLOP are floats
    assert len(loads) == layout.world
    assert max(loads.values()) < most * sum(loads.values()) / layout.world


def test_experts_that_a_rank_holds_whole_do_not_travel() -> None:
    shape = presets.model("qwen3-30b-a3b")
    for entry in deal_matrices(shape, Layout(dp_shard=16, ep=8), 0):
        if ".experts." in entry.matrix.name:
            assert not entry.gathers and entry.owner in next(iter(entry.tiles.values()))
    ep = [entry for entry in deal_matrices(shape, Layout(dp_shard=8, ep=8), 0) if ".experts." in entry.matrix.name]
    assert not any(entry.scatters for entry in ep)


def test_a_large_world_is_dealt_in_seconds() -> None:
    """DeepSeek-V3's 45,000 matrices over 1024 ranks."""
    shape, layout = presets.model("deepseek-v3"), Layout(dp_shard=1024, ep=64, zero=3)
    exchanges = rounds(shape, layout, 7)
    names = {exchange.name for exchange in parameters_of(shape, layout, 7) if exchange.matrices}
    assert {part.matrix.name for exchange in exchanges for part in exchange.held} <= names
    assert sum(len(exchange.owned) for exchange in exchanges) <= 60

"""Ranks and groups against their definitions, and the collectives against sums by hand."""

import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from meshwright import compat
from meshwright.observe.oracle.features import shrink
from meshwright.observe.ranks import LIMIT_S, on_ranks
from meshwright.parallel.groups import mesh
from meshwright.parallel.groups.mesh import ProcessGroups, make_group, make_mesh, saving_group
from meshwright.spec import Layout
from meshwright.spec.layout.layout import expert_ranks, place_of, rank_of, ranks_along
from meshwright.spec.memory.held import list_common
from tests.parallel.telling import Told

LAYOUT = Layout(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4)


def test_places_and_ranks_are_inverse_with_tp_innermost() -> None:
    assert [rank_of(LAYOUT, place_of(LAYOUT, rank)) for rank in range(32)] == list(range(32))
    assert place_of(LAYOUT, 1) == {"pp": 0, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    assert place_of(LAYOUT, 16)["pp"] == 1


@pytest.mark.parametrize("axes", [("tp",), ("cp", "tp"), ("pp",), ("dp_shard", "cp"), ("pp", "tp")])
def test_groups_of_any_axes_part_the_world(axes: tuple[str, ...]) -> None:
    groups = {ranks_along(LAYOUT, axes, rank) for rank in range(32)}
    assert sorted(itertools.chain(*groups)) == list(range(32))


def test_experts_borrow_ranks_from_one_replica_of_one_stage() -> None:
    for rank in range(32):
        share, same = expert_ranks(LAYOUT, rank)
        assert len(share) == 4 and len(same) == 2 and rank in share and rank in same
        assert set(share) | set(same) <= set(ranks_along(LAYOUT, ("dp_shard", "cp", "tp"), rank))


def test_only_groups_that_somebody_uses_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh.compat, "create_named_group", lambda ranks, limit, purpose, axis: None)
    dense = make_mesh(Layout(pp=2, dp_shard=2, cp=2, tp=2), rank=5).process_groups
    once = [(5, 7), (4, 5), (1, 3, 5, 7), tuple(range(1, 16, 2)), tuple(range(16)), (5,)]
    assert dense.keys() == {("", ranks) for ranks in once} | {("F from 5", (5, 13)), ("B from 13", (5, 13))}
    routed = make_mesh(Layout(pp=2, dp_shard=2, cp=2, tp=2, ep=2, sp=True), rank=5)
    assert routed["ep"].ranks == (4, 5) and routed["expert_shard"].ranks == (1, 3, 5, 7)
    assert [routed.reader, routed.places["cp"]] == [1, 0]


def _collectives() -> dict[str, Any]:
    told = Told()
    ours = make_mesh(Layout(dp_shard=2, tp=2), traffic=told)
    tp, world = ours["tp"], ours["world"]
    mine = torch.arange(6.0).view(2, 3) + 10 * ours.rank
    theirs = torch.arange(6.0).view(2, 3) + 10 * (ours.rank ^ 1)
    pair = [mine, theirs] if tp.index == 0 else [theirs, mine]
    assert torch.equal(tp.all_reduce(mine.clone()), mine + theirs)
    assert torch.equal(tp.all_reduce(mine.clone(), "max"), torch.maximum(mine, theirs))
    assert torch.equal(tp.all_gather(mine), torch.cat(pair))
    assert torch.equal(tp.all_gather(mine, 1), torch.cat(pair, 1))
    assert torch.equal(tp.reduce_scatter(mine), (mine + theirs)[tp.index : tp.index + 1])
    wide = torch.cat((mine, mine), 1)
    assert torch.equal(tp.reduce_scatter(wide, 1), mine + theirs)
    assert torch.equal(tp.all_gather(mine[None], 1), torch.cat(pair)[None])  # no copy: nothing lies before the dim
    assert torch.equal(tp.reduce_scatter(torch.cat(pair)[None], 1), 2 * pair[tp.index][None])
    sent = [[1, 0], [0, 2]][tp.index]
    rows = tp.all_to_all(torch.full((sum(sent), 3), float(tp.index)), sent, sent)
    assert rows.shape[0] == sum(sent) and (rows == tp.index).all()
    assert ours["cp"].all_reduce(mine) is mine and ours["cp"].all_gather(mine) is mine
    assert world.all_reduce(torch.full((2,), float(ours.rank))).tolist() == [6.0, 6.0]
    received = torch.empty(2)
    work = tp.exchange([(torch.full((2,), float(ours.rank)), 1 - tp.index)], [(received, 1 - tp.index)])
    for transfer in work:
        transfer.wait()
    assert received.tolist() == [float(ours.rank ^ 1)] * 2
    groups = [*ours.groups.values(), saving_group(ours)]
    limits = {compat.time_limit(group.process_group) for group in groups if group.process_group is not None}
    return {"told": told.calls, "ranks": tp.ranks, "limits": limits}


def test_collectives_on_four_processes() -> None:
    results = on_ranks(4, _collectives)
    assert [result["ranks"] for result in results] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert all(result["limits"] == {timedelta(seconds=LIMIT_S)} for result in results), "what the world was given"
    assert results[0]["told"][0] == ("tp", "all_reduce", 24)
    assert [kind for axis, kind, _ in results[0]["told"] if axis == "world"] == ["all_reduce"]


def _two_layouts() -> list[float]:
    """A tied pipeline, whose two ends alone make a group, then other axes over the same ranks."""
    shape = replace(shrink("qwen2.5-0.5b"), layers=4)
    process_groups: ProcessGroups = {}
    totals = []
    for layout in (Layout(pp=4, micro_batch=1), Layout(dp_shard=2, tp=2), Layout(pp=2, tp=2, micro_batch=1)):
        ours = make_mesh(layout, process_groups=process_groups)
        for shared in list_common(shape, layout, ours.rank):
            make_group(shared.axis, shared.ranks, ours).all_reduce(torch.ones(1))
        totals.append(sum(ours[name].all_reduce(torch.ones(1)).item() for name in ("tp", "data", "world")))
    again = make_mesh(Layout(dp_shard=2, tp=2))  # the same ranks once more, without those that were made
    return [*totals, again["tp"].all_reduce(torch.ones(1)).item()]


def test_one_rank_may_have_made_more_groups_than_another() -> None:
    assert on_ranks(4, _two_layouts, limit_s=30) == [[6.0, 8.0, 7.0, 2.0]] * 4

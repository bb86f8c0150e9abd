"""Gradients beside those of torch's own parallel machinery around the same model on the same batch.

torch's wrappers average over data-parallel ranks the means of their sequences, ours sum parts of the step's loss: with
equally many targets everywhere both are the gradient of the mean.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.tensor import DTensor

from benchmarks.parallel_work import SHAPE, Ours, Work
from benchmarks.torch_peers import SCHEDULES, VIRTUAL, Peer, TorchDDP, TorchFSDP2, TorchPipeline, TorchTP
from meshwright.observe.oracle.one_device import RankOutcome, assemble
from meshwright.observe.ranks import on_ranks
from meshwright.parallel.axes.data import local
from meshwright.parallel.groups.mesh import ProcessGroups

SMALL = replace(
    SHAPE, vocab=64, layers=5, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, max_positions=64
)  # five layers: stages are uneven
WORK = Work(shape=SMALL, rows=8, sequence=16)
MICRO = replace(WORK, micro_rows=2)
PEERS = {"DDP": TorchDDP, "FSDP2": TorchFSDP2, "TP": TorchTP}
Found = tuple[list[RankOutcome], dict[str, dict[str, Tensor]]]


def ours(work: Work, process_groups: ProcessGroups, layout: dict[str, Any]) -> RankOutcome:
    """This rank's boxes of the gradients of one training step."""
    run = Ours(work, process_groups, **layout)
    gradients: dict[str, Any] = {}
    update = run.optimizer.step

    def keep_and_update(rate: float, **options: Any) -> None:
        for name, p in run.engine.parameters.items():
            assert p.grad is not None, name
            gradients[name] = run.engine.local_boxes()[name], local(p.grad).clone()
        update(rate, **options)

    run.optimizer.step = keep_and_update  # type: ignore[method-assign]
    loss = run.step(*work.batch(0))
    return RankOutcome((loss.item() * run.layout.world,), (), gradients)


def theirs(peer: Peer, work: Work) -> dict[str, Tensor]:
    """The whole gradients that this rank has, and its part of the loss."""
    results = {"loss": peer.forward_backward(*work.batch(0)).clone()}
    for name, p in peer.named.items():
        assert p.grad is not None, name
        results[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return results


def _on_rank(work: Work, layouts: list[dict[str, Any]], peers: list[str], schedules: list[str]) -> Found:
    process_groups: ProcessGroups = {}
    mine = [ours(work, process_groups, layout) for layout in layouts]
    oracles = {name: theirs(PEERS[name](work), work) for name in peers}
    return mine, oracles | {name: theirs(TorchPipeline(work, name), work) for name in schedules}


def assert_equal(mine: list[RankOutcome], other: list[dict[str, Tensor]]) -> None:
    """Every gradient and the loss; what several ranks have whole is the same on all."""
    loss = sum(results.pop("loss") for results in other)
    torch.testing.assert_close(torch.tensor(mine[0].losses[0]), loss, rtol=1e-5, atol=0)
    whole = assemble(mine)
    assert {name for results in other for name in results} == set(whole)
    for name, gradient in ((name, gradient) for results in other for name, gradient in results.items()):
        off = (whole[name] - gradient).norm() / gradient.norm()
        assert off < 1e-5, f"{name}: {off:.2e}"


@pytest.mark.parametrize("peer", ["DDP", "FSDP2"])
def test_every_zero_stage_has_the_gradients_of_torch(peer: str) -> None:
    layouts = [{"dp_shard": 2, "zero": zero} for zero in range(4)]
    ranks = on_ranks(2, _on_rank, WORK, layouts, [peer], [])
    for index in range(len(layouts)):
        assert_equal([mine[index] for mine, _ in ranks], [dict(oracles[peer]) for _, oracles in ranks])


def test_tensor_parallelism_has_the_gradients_of_torch() -> None:
    layouts = [{"tp": 2}, {"tp": 2, "sp": True}]
    ranks = on_ranks(2, _on_rank, WORK, layouts, ["TP"], [])
    for index in range(len(layouts)):
        assert_equal([mine[index] for mine, _ in ranks], [dict(oracles["TP"]) for _, oracles in ranks])


def test_every_schedule_has_the_gradients_of_torch() -> None:
    names = [name for name, kind in SCHEDULES.items() if hasattr(pipelining.schedules, kind)]
    assert {"afab", "1f1b", "interleaved"} <= set(names)
    layouts = [{"pp": 2, "vp": VIRTUAL.get(name, 1), "schedule": name} for name in names]
    ranks = on_ranks(2, _on_rank, MICRO, layouts, [], names)
    for index, name in enumerate(names):
        assert_equal([mine[index] for mine, _ in ranks], [oracles[name] for _, oracles in ranks])

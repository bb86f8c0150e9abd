"""Copies of a parameter on several ranks: one bit or one NaN on one of them ends the run before it is saved."""

from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import RECIPE, Case, case_batch
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import Engine, build_engine, make_mesh
from meshwright.parallel.axes.data import local
from meshwright.parallel.engine import CHUNK, check_replicas, checksum
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout
from meshwright.spec.errors import RunError
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.step.batches import Share, select, split
from meshwright.training.step.step import train_step
from meshwright.training.trainer import Trainer

MOE = shrink("mixtral-8x7b").moe
assert MOE is not None
NORM = "layers.1.attention_norm.weight"
SHARED: list[tuple[dict[str, Any], str, int]] = [
    ({"tp": 4}, NORM, 3),
    ({"tp": 4, "sp": True}, "layers.0.attention.k.weight", 2),  # two ranks hold each of the two key heads
    ({"dp_shard": 4}, "layers.2.mlp.down.weight", 1),
    ({"dp_replicate": 2, "dp_shard": 2, "zero": 3}, NORM, 2),
    ({"tp": 2, "dp_shard": 2, "zero": 1, "sp": True}, NORM, 1),
    ({"pp": 2, "tp": 2, "micro_batch": 4}, "embed.weight", 2),
]
"""A layout, a parameter that several of its ranks hold, and the rank whose copy is changed."""


def _trained(layout: Layout, process_groups: ProcessGroups) -> Engine:
    case = Case(shape=shrink("qwen2.5-0.5b"))
    mesh = make_mesh(layout, process_groups=process_groups)
    engine = build_engine(case.shape, layout, mesh=mesh, micro_batches=layout.micro_batches(case.global_batch))
    engine.train()
    share = Share(index=mesh.reader, parts=layout.dp, columns=engine.columns(case.sequence))
    batches = split(select(case_batch(case, 1), share), layout.micro_batch_of(case.global_batch))
    optimizer = Optimizer(engine.parameters.items(), RECIPE)
    for _ in range(2):
        train_step(engine, optimizer, batches, rate=1e-2, clip=1.0, balance_loss=0.0)
    return engine


def _save(engine: Engine) -> list[str]:
    """What the trainer's own save does, up to the writing."""
    written: list[str] = []
    trainer = MagicMock()
    trainer.state.engine, trainer.state.progress.step = engine, 7
    trainer.saver.save = lambda *_, **__: written.append("checkpoint")
    try:
        Trainer._save(trainer, MagicMock(), None)
    except RunError as error:
        return [str(error), *written]
    return written


def _results() -> list[tuple[list[str], list[str], list[str]]]:
    """Per layout: what a save of equal copies does, one with a bit flipped on a rank, one with a NaN."""
    process_groups: ProcessGroups = {}
    results = []
    for options, name, rank in SHARED:
        engine = _trained(Layout(compile="off", **options), process_groups)
        equal = _save(engine)
        weights = local(engine.parameters[name].detach()).view(-1) if name in engine.parameters else torch.empty(0)
        weights = weights if engine.mesh.rank == rank else weights.clone()
        bits = weights[-1:].view(torch.int32)
        bits ^= 1 << 21  # the lowest bits of a norm may be rounding: see below
        flipped = _save(engine)
        weights[-1:].fill_(torch.nan)
        results.append((equal, flipped, _save(engine)))
    return results


@pytest.mark.long
def test_a_copy_that_differs_is_not_saved() -> None:
    for results in on_ranks(4, _results, limit_s=300):
        for (options, name, rank), (equal, flipped, broken) in zip(SHARED, results, strict=True):
            assert equal == ["checkpoint"], options
            assert len(flipped) == len(broken) == 1, options
            assert "step 7: " in flipped[0] and name in flipped[0] and "checkpoint was not written" in flipped[0]
            assert f"step 7: rank {rank} holds a {name} with numbers that are not finite" in broken[0]


def _few_rows() -> list[list[str]]:
    """A router of one expert under ZeRO: the second rank holds no row of it."""
    shape = replace(shrink("mixtral-8x7b"), moe=replace(MOE, experts=3, top_k=1))
    engine = build_engine(shape, Layout(dp_shard=2, tp=2, zero=3, compile="off"))
    router = local(engine.parameters["layers.0.mlp.router.weight"])
    engine_of_five = build_engine(
        replace(shape, moe=replace(MOE, experts=1, top_k=1)), engine.mesh.layout, mesh=engine.mesh
    )
    empty = local(engine_of_five.parameters["layers.0.mlp.router.weight"])
    return [_save(engine), _save(engine_of_five), [str(len(router)), str(len(empty))]]


def test_ranks_without_a_row_take_part() -> None:
    results = on_ranks(4, _few_rows)
    assert all(first == second == ["checkpoint"] for first, second, _ in results)
    assert {rows[1] for _, _, rows in results} == {"0", "1"}


def _drifted(by: float) -> list[str]:
    """On two tp ranks: what a save does where a norm, whose gradient each makes by itself, differs a little."""
    engine = build_engine(shrink("llama-3.1-8b"), Layout(tp=2, compile="off"))
    if engine.mesh.rank:
        with torch.no_grad():
            engine.parameters[NORM].mul_(1 + by)
    return _save(engine)


def test_rounding_of_a_copy_ends_no_run_and_more_does() -> None:
    """GPUs may choose other kernels on each rank; a missing update is more than rounding."""
    assert on_ranks(2, _drifted, 1e-6) == [["checkpoint"]] * 2
    for errors in on_ranks(2, _drifted, 1e-2):
        assert len(errors) == 1 and NORM in errors[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [1, 3, 8, CHUNK + 5])
def test_every_bit_and_place_counts(dtype: torch.dtype, size: int) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = checksum(x)
    assert checksum(x.clone()) == before
    for element in {0, size // 2, size - 1}:
        for bit in range(8):
            other = x.clone()
            other.view(torch.uint8)[element * x.element_size()] ^= 1 << bit
            assert checksum(other) != before
    if size > 2:
        assert checksum(torch.cat((x[1:2], x[:1], x[2:]))) != before, "the same words in another order"


def test_one_device_has_no_copies() -> None:
    check_replicas(build_engine(shrink("llama-3.1-8b"), Layout(compile="off")), step=1)

"""Checkpoints of narrow optimizer states: written under one layout and read under others, to the bit."""

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.observe.oracle.features import shrink
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import make_mesh
from meshwright.parallel.axes.data import local
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout, Plan, Recipe
from meshwright.spec.model.shape import MoEShape
from meshwright.store import checkpoint
from meshwright.store.saver import Piece
from meshwright.training.loop import new_state
from meshwright.training.step.state import TrainState

SHAPE = replace(
    shrink("mixtral-8x7b"), vocab=70, hidden=72, ffn=128, layers=2, moe=MoEShape(experts=4, top_k=2, ffn=64)
)
LAYOUTS: list[dict[str, Any]] = [
    {"dp_shard": 2, "zero": 3}, {"tp": 2}, {"dp_shard": 2, "ep": 2, "zero": 1}, {"pp": 2, "micro_batch": 1},
]  # fmt: skip
STATES = [{"optimizer_states": "int8", "master_weights": "none"}, {"optimizer_states": "bf16"},
          {"optimizer": "muon"}, {"optimizer": "muon", "optimizer_states": "int8"}]  # fmt: skip


def made(layout: dict[str, Any], states: dict[str, Any], groups: ProcessGroups | None = None) -> TrainState:
    planned = Layout(compile="off", **layout)
    recipe = Recipe(sequence=8, global_batch=4, precision="bf16", **states)
    plan = Plan(model=SHAPE, layout=planned, recipe=recipe)
    plan.check()
    return new_state(plan, make_mesh(planned, process_groups=groups), torch.device("cpu"), initialize=False)


def drawn(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The whole tensor of a name, the same everywhere; a weight and its master are the same numbers."""
    base_name = name.removeprefix("model.").removeprefix("optimizer.master.")
    generator = torch.Generator().manual_seed(zlib.crc32(base_name.encode()))
    return torch.randint(0, 250, size, generator=generator).to(dtype)


def parts(state: TrainState) -> list[tuple[Tensor, Tensor]]:
    """(what this rank holds, what it should hold) of each tensor."""
    pairs = []
    for name, x in state.pieces().items():
        held, box = (x.held, x.box.slices) if isinstance(x, Piece) else (x, ...)
        pairs.append((held, drawn(name, tuple(x.shape), x.dtype)[box]))
    return pairs


def save_and_load(folder: Path, number: int, states: dict[str, Any]) -> None:
    groups: ProcessGroups = {}
    state = made(LAYOUTS[number], states, groups)
    with torch.no_grad():
        for held, right in parts(state):
            held.copy_(right)
    run_folder = folder / f"{number}"
    path = checkpoint.save(run_folder, step=1, tensors=state.pieces(), values={}, score=None, keep_last=1)
    for other in LAYOUTS:
        check(path, made(other, states, groups))


def check(path: Path, state: TrainState) -> None:
    names = list(state.optimizer.tensors())
    assert any(name.startswith("moment") for name in names)
    checkpoint.load(path, state.pieces())
    assert all(torch.equal(held, right) for held, right in parts(state))


def saved(folder: Path, states: dict[str, Any]) -> None:
    for number in range(len(LAYOUTS)):
        save_and_load(folder, number, states)


@pytest.mark.parametrize("states", STATES, ids=["int8, no masters", "bf16", "muon", "muon, int8"])
@pytest.mark.long
def test_states_written_under_one_layout_are_read_under_another(tmp_path: Path, states: dict[str, Any]) -> None:
    on_ranks(2, saved, tmp_path, states)
    alone = made({}, states)
    scales = [name for name in alone.optimizer.tensors() if "_scale." in name]
    assert bool(scales) == (states.get("optimizer_states") == "int8")
    for number in range(len(LAYOUTS)):
        path = checkpoint.find_latest(tmp_path / f"{number}")
        assert path is not None
        check(path, made({}, states))


def weights_alone() -> None:
    """A state that is given weights only, as of an import."""
    state = made({"dp_shard": 2, "zero": 3}, {})
    weights = {name: x for name, x in state.model_tensors().items() if isinstance(x, Piece)}
    for name, x in weights.items():
        x.held.copy_(drawn(name, tuple(x.shape), x.dtype)[x.box.slices])
    state.take_weights(state.model_tensors() | weights)
    for name, parameter in state.engine.parameters.items():
        master, loaded = local(parameter.detach()), weights[f"model.{name}"].held
        assert master.dtype == torch.float32 and loaded.dtype == torch.bfloat16 and torch.equal(master, loaded.float())
        assert state.optimizer.masters[name].data_ptr() == master.data_ptr(), "the shard is the master"
        master *= 1 + 1e-5  # what a 16-bit weight has no room for
    again = state.model_tensors()
    for name, x in weights.items():
        there = again[name]
        assert isinstance(there, Piece) and torch.equal(there.held, x.held)


def test_a_shard_is_its_master_and_a_checkpoint_has_it_rounded() -> None:
    on_ranks(2, weights_alone)

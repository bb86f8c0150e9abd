"""The counting of states against the tensors that the training program makes, on random shapes and layouts: built and
stepped on tensors without values, in worlds that are not there."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from meshwright import compat
from meshwright.kernels.chooser import simulate_device
from meshwright.observe.program import TrainingProgram, without_values
from meshwright.observe.ranks import in_subprocesses
from meshwright.parallel import make_mesh
from meshwright.parallel.axes.data import local
from meshwright.spec import Plan
from meshwright.spec.layout.layout import pipeline_ranks
from meshwright.spec.memory.held import memory
from meshwright.training.optimizer.optimizer import tensors_by_kind
from meshwright.verbs.verify.cases import random_case
from tests.planner.test_states import planned

CASES = 8


def drawn_plan(seed: int, index: int) -> Plan:
    """One over text: a teacher is no state of a student."""
    drawn = random_case(seed, index)
    case, layout = drawn.case, replace(drawn.layout, compile="off", offload="off", kernels="auto")
    batch = {"sequence": case.sequence, "global_batch": case.global_batch}
    return Plan(model=case.shape, recipe=replace(case.recipe, objective="cross-entropy", **batch), layout=layout)


def bytes_of(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Of storages that are not in `seen`."""
    storages = {
        compat.storage_key(storage): storage for storage in (local(t.detach()).untyped_storage() for t in tensors)
    }
    new = {key: storage.nbytes() for key, storage in storages.items() if key not in seen}
    seen |= set(new)
    return sum(new.values())


def made(seed: int, index: int, rank: int) -> dict[str, int]:
    """Bytes of each kind when the optimizer begins."""
    plan, created = drawn_plan(seed, index), {}

    def told(part: str) -> None:
        if part == "update 1":
            seen: set[int] = set()
            tensors = tensors_by_kind(program.state.engine, program.state.optimizer)
            created.update({kind: bytes_of(each, seen) for kind, each in tensors.items()})

    with compat.fake_world(rank, plan.layout.world), compat.fake_tensors(), simulate_device("cpu"), without_values():
        program = TrainingProgram(
            plan=plan, mesh=make_mesh(plan.layout), device=torch.device("cpu"), on_part=told, routing=1.0, acts_as="cpu"
        )
        program.build()
        program.step(1, program.plan.layout.micro_batches(plan.recipe.global_batch))
    return {kind: size for kind, size in created.items() if size}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.long
def test_tensors_of_random_plans_take_what_is_counted(seed: int) -> None:
    """Of the last pipeline place the rank that holds most, which the planner tells of."""
    last = {index: pipeline_ranks(drawn_plan(seed, index).layout)[-1] for index in range(CASES)}
    for index, tensors in in_subprocesses(made, [(seed, *each) for each in last.items()]):
        plan = drawn_plan(seed, index)
        recipe, layout, precision = plan.recipe, plan.layout, plan.recipe.precision
        batch = {"micro_batches": layout.micro_batches(recipe.global_batch)}
        counted = memory(plan.model, layout, precision, last[index], storage=recipe.storage, **batch)
        assert tensors == counted["update"], plan
        assert planned(plan.model, layout, precision, layout.pp - 1, recipe.storage, **batch) == counted, plan

"""Parameters that several ranks hold: that the gradient of each is summed as often as it must, found by numbers.

Neither test knows the rule of spec.inventory. One trains, and compares with one device. The other looks at the
gradients of tp ranks before they are summed, and finds of how many neighbours the sum is the true gradient.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import RECIPE, Case, case_batch, first_difference, outcome
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import Engine, build_engine, make_mesh
from meshwright.parallel.axes.data import local
from meshwright.parallel.groups.group import gather_objects
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout, ModelShape, parameters
from meshwright.spec.weights.inventory import tp_parts
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.step.batches import split
from meshwright.training.step.step import MicroPass, Weights, train_step
from tests.model.shrunk import KINDS

MANY: list[dict[str, Any]] = [
    {"tp": 4},
    {"tp": 4, "sp": True, "micro_batch": 2},
    *({"tp": 2, "dp_shard": 2, "zero": zero, "sp": zero % 2 == 0} for zero in range(4)),
    {"tp": 2, "dp_replicate": 2},
    {"tp": 2, "cp": 2, "sp": True, "zero": 3},
    {"tp": 2, "pp": 2, "micro_batch": 2},
    {"tp": 2, "pp": 2, "micro_batch": 1, "sp": True, "schedule": "zb-h1"},
]
FEW: list[dict[str, Any]] = [{"tp": 4}, {"tp": 2, "dp_shard": 2, "zero": 3, "sp": True}]
EXPERTS: list[dict[str, Any]] = [
    *FEW,
    {"tp": 4, "sp": True, "ep": 2},
    {"tp": 4, "sp": True, "ep": 4},
    {"tp": 2, "dp_shard": 2, "sp": True, "ep": 4, "zero": 2},
]


def with_key_heads(kind: str, kv_heads: int) -> ModelShape:
    return replace(shrink(kind), kv_heads=kv_heads)


CASES = {
    f"{kind}, {kv_heads} of 4 key heads": with_key_heads(kind, kv_heads)
    for kind, numbers in {
        "llama-3.1-8b": (1, 2, 4),
        "qwen2.5-0.5b": (1, 2),
        "qwen3-0.6b": (1,),
        "gpt2-124m": (1,),
        "mistral-7b-v0.1": (1,),
        "qwen3-30b-a3b": (1, 2),
    }.items()
    for kv_heads in numbers
}
CASES["plain experts"] = replace(shrink("qwen3-30b-a3b"), mlp="gelu")
"""GQA and MQA plain, with biases and a tied head, with norms of queries and keys, with learned positions, with a
window, with experts, and with experts that have no gate."""


def _layouts(name: str) -> list[dict[str, Any]]:
    if CASES[name].moe:
        return EXPERTS
    return MANY if name in (MQA, TIED) else FEW


MQA, TIED = "llama-3.1-8b, 1 of 4 key heads", "qwen2.5-0.5b, 1 of 4 key heads"


def _differences() -> list[str]:
    """What the ranks together have otherwise than one device; found by the first."""
    process_groups: ProcessGroups = {}
    wrong = []
    for name, shape in CASES.items():
        alone = outcome(Case(shape=shape), Layout(compile="off")) if dist.get_rank() == 0 else None
        for each in _layouts(name):
            ranks = gather_objects(
                outcome(Case(shape=shape), Layout(compile="off", **each), process_groups=process_groups), None
            )
            difference = alone and first_difference(alone, ranks)
            wrong += [f"{name}, {each}: {difference}"] if difference else []
    return wrong


@pytest.mark.slow
def test_any_number_of_key_heads_trains_the_same_model() -> None:
    wrong = on_ranks(4, _differences, limit_s=600)[0]
    assert not wrong, "\n".join(wrong)


class _Unsummed(Optimizer):
    """Keeps the gradients as a step gives them and changes nothing."""

    def step(self, rate: float, **options: Any) -> None:
        self.gradients = {name: local(p.grad).clone() for name, p in self.parameters.items() if p.grad is not None}


def _gradients(
    shape: ModelShape, layout: Layout, process_groups: ProcessGroups, *, summed: bool
) -> tuple[Engine, dict[str, Tensor]]:
    case = Case(shape=shape)
    mesh = make_mesh(layout, rank=None if layout.world > 1 else 0, process_groups=process_groups)
    engine = build_engine(shape, layout, mesh=mesh)
    engine.train()
    batches = split(case_batch(case, 1), case.global_batch)
    if not summed:
        weights = Weights.for_step(engine, batches, 0.01, None)
        engine.forward_backward([MicroPass(batch, weights) for batch in batches])
        return engine, {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}
    optimizer = _Unsummed(engine.parameters.items(), RECIPE)
    train_step(engine, optimizer, batches, rate=0.0, clip=0.0, balance_loss=0.01)
    return engine, optimizer.gradients


def _needed_sums(shapes: list[ModelShape], layouts: list[dict[str, Any]]) -> list[dict[str, set[int]]]:
    """Per shape and layout, by parameter: of how many neighbours the sum of local gradients is the true gradient."""
    process_groups: ProcessGroups = {}
    sums = []
    for shape in shapes:
        _, true = _gradients(shape, Layout(compile="off"), {}, summed=True)
        for each in layouts:
            layout = Layout(compile="off", **each)
            engine, mine = _gradients(shape, layout, process_groups, summed=False)
            tp, needed = engine.mesh["tp"], dict[str, set[int]]()
            rounding = 1e-3 * max(whole.abs().max() for whole in true.values())  # of gradients that are truly zero
            all_ranks = gather_objects(mine, tp.process_group)
            for name, whole in true.items():
                box = engine.boxes[name]
                expected, none = whole[box.slices], torch.zeros(box.sizes)
                needed[name] = set()
                for n in (1, 2, 4)[: layout.tp.bit_length()]:
                    start = tp.index - tp.index % n
                    parts = [of_rank.get(name, none) for of_rank in all_ranks[start : start + n]]
                    if all(part.shape == expected.shape for part in parts):
                        off = (torch.stack(parts).sum(0) - expected).abs().max()
                        needed[name] |= {n} if off <= 1e-4 * max(whole.abs().max(), rounding) else set()
            sums.append(needed)
    return sums


SEEN = [shrink(kind) for kind in KINDS] + [
    CASES[name] for name in CASES if " 1 of 4 " in name or name == "plain experts"
]
TP: list[dict[str, Any]] = [{"tp": 2}, {"tp": 4}, {"tp": 2, "sp": True}, {"tp": 4, "sp": True}]


def _tp_of(world: int) -> list[dict[str, Any]]:
    return [each for each in TP if each["tp"] == world]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_summed_over_as_many_ranks_as_numbers_ask_for(world: int) -> None:
    ranks = on_ranks(world, _needed_sums, SEEN, _tp_of(world), limit_s=600)
    wrong, decided = [], 0
    for rank, answers in enumerate(ranks):
        keys = ((shape, each) for shape in SEEN for each in _tp_of(world))
        for (shape, each), needed in zip(keys, answers, strict=True):
            assert needed.keys() == {parameter.name for parameter in parameters(shape)}
            for parameter in parameters(shape):
                declared = tp_parts(parameter, shape, Layout(**each))
                decided += len(needed[parameter.name]) == 1
                if declared not in needed[parameter.name]:
                    says = f"{declared} declared, {sorted(needed[parameter.name])} by numbers"
                    wrong.append(f"{shape.name}, {each}, rank {rank}, {parameter.name}: {says}")
    assert not wrong, "\n".join(wrong[:20])
    assert decided > 1000, "but for gradients of zero, one number of ranks is right and the others are not"

"""Pipelines on 2 and 4 processes against the whole model on one device."""

import random
import time
import weakref
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.kernels import fast
from meshwright.model import Transformer, build
from meshwright.observe.ranks import on_ranks
from meshwright.parallel.groups.group import Group
from meshwright.parallel.groups.mesh import ProcessGroups, make_mesh
from meshwright.parallel.pipeline.executor import UNDER_WAY, Pipeline
from meshwright.spec import Layout
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout.replay import StageLink, replay
from meshwright.spec.layout.schedule import NAMES, Action, refusal, schedule, stage_layers, stage_rank, stages_of
from tests.model.shrunk import VOCAB, shrink
from tests.parallel.telling import Told

ROWS, LENGTH, HIDDEN = 2, 7, 24
BALANCE = 0.3
VIRTUAL = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}
MicroBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    schedule: str
    micro_batches: int
    virtual: int
    model: str = "llama-3.1-8b"
    layers: int = 4
    slow: bool = False
    """Stages sleep, each rank by its own dice."""


def cases(world: int) -> list[Case]:
    """One layer more than stages: never even."""
    all_cases = [
        Case(name, m, v)
        for name in NAMES
        for v in {VIRTUAL.get(name, 1), 3 if name == "interleaved" and world == 2 else VIRTUAL.get(name, 1)}
        for m in (1, world + (name != "interleaved"), 2 * world)
    ]
    all_cases += [Case(name, 2 * world, VIRTUAL.get(name, 1), kind) for name, kind in zip(NAMES, KINDS, strict=True)]
    all_cases += [Case(name, 2 * world, VIRTUAL.get(name, 1), slow=True) for name in NAMES[1:]]
    all_cases = [replace(case, layers=case.virtual * world + 1) for case in all_cases]
    return [case for case in all_cases if refusal(case.schedule, world, case.micro_batches, case.virtual) is None]


KINDS = ("gpt2-124m", "qwen2.5-0.5b", "mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "qwen2.5-0.5b")
"""Learned positions, tied heads (on both ends of a pipeline, and on one rank of a V), balance losses of every stage."""


@cache
def whole_model(name: str, layers: int) -> Transformer:
    """Not to be changed: a copy is."""
    return build(replace(shrink(name), layers=layers), seed=3)


def micro_batches(count: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randint(VOCAB, (ROWS, LENGTH), generator=generator),
            torch.randint(VOCAB, (ROWS, LENGTH), generator=generator),
        )
        for _ in range(count)
    ]


def part_of(case: Case, layers: range) -> Transformer:
    """The model with these layers, and the ends where they lie at one."""
    model = deepcopy(whole_model(case.model, case.layers))
    for key in [key for key in model.layers if int(key) not in layers]:
        del model.layers[key]
    model.first, model.last = 0 in layers, case.layers - 1 in layers
    if not model.first:
        if not (model.last and model.shape.tied):
            del model.embed
        if model.shape.positions == "learned":
            del model.positions
    if not model.last:
        del model.norm
        if not model.shape.tied:
            del model.head
    return model


def loss_of(model: Transformer, x: Tensor | None, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    out, loss = model.stage(x, *batch, scale=torch.tensor(0.25))
    total = loss.cross_entropy
    return out, total if loss.balance is None else total + BALANCE * loss.balance.sum()


def stages_here(case: Case, group: Group, models: list[Transformer]) -> list[Callable[..., Any]]:
    dice = random.Random(group.index)

    def stage(model: Transformer, x: Tensor | None, batch: MicroBatch) -> tuple[Tensor | None, Tensor | None]:
        if case.slow:
            time.sleep(dice.random() * 0.006)
        out, loss = loss_of(model, x, batch)
        return (None if model.last else out), loss if model.last or model.shape.moe else None

    return [lambda x, batch, model=model: stage(model, x, batch) for model in models]


def empty(_: MicroBatch) -> Tensor:
    return torch.empty(ROWS, LENGTH, HIDDEN)


def _run_cases(world: int, chosen: list[Case]) -> list[dict[str, Any]]:
    told, process_groups = Told(), ProcessGroups()
    return [_run_case(case, *ranks_of(case, world, process_groups, told), told) for case in chosen]


def ranks_of(
    case: Case, world: int, process_groups: ProcessGroups, told: Told | None = None
) -> tuple[Group, dict[StageLink, Group]]:
    """The pipeline's ranks and the links of this one."""
    mesh = make_mesh(
        Layout(pp=world, vp=case.virtual, schedule=case.schedule), traffic=told, process_groups=process_groups
    )
    return mesh["pp"], mesh.links


def _run_case(case: Case, group: Group, links: dict[StageLink, Group], told: Told) -> dict[str, Any]:
    placement = stage_rank(case.schedule, group.size, case.virtual)
    ranges = stage_layers(case.layers, len(placement))
    models = [part_of(case, ranges[stage]) for stage in stages_of(placement, group.index)]
    seen: list[tuple[str, Action]] = []
    pipeline = Pipeline(
        case.schedule, group, stages_here(case, group, models), empty, links=links,
        before=lambda action: seen.append(("before", action)), after=lambda action: seen.append(("after", action)),
    )  # fmt: skip
    batches = micro_batches(case.micro_batches)
    seen_loss = pipeline.evaluate(batches[: max(1, len(batches) - 1)])
    assert not seen and all(p.grad is None for model in models for p in model.parameters())
    told.calls.clear()
    loss = pipeline.run(batches)
    actions = schedule(case.schedule, group.size, case.micro_batches, case.virtual)[group.index]
    assert (
        seen == [(word, action) for action in actions for word in ("before", "after")]
        and pipeline.actions(len(batches)) == actions
    )
    gradients: dict[str, Tensor] = {}
    for name, parameter in (pair for model in models for pair in model.named_parameters()):
        assert parameter.grad is not None, name
        gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    return {"loss": loss, "evaluated": seen_loss, "gradients": gradients, "sent": told.calls[:]}


@cache
def on_one_device(name: str, layers: int, count: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, loss of all micro-batches but the last (if there is another), gradients."""
    model, losses = deepcopy(whole_model(name, layers)), []
    for batch in micro_batches(count):
        loss = loss_of(model, None, batch)[1]
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return torch.stack(losses).sum(), torch.stack(losses[: max(1, len(losses) - 1)]).sum(), gradients


def assert_equal(case: Case, world: int, results: list[dict[str, Any]]) -> None:
    loss, evaluated, gradients = on_one_device(case.model, case.layers, case.micro_batches)
    torch.testing.assert_close(sum(result["loss"] for result in results), loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(sum(result["evaluated"] for result in results), evaluated, rtol=1e-6, atol=0)
    total: dict[str, Tensor] = {}
    for name, gradient in (pair for result in results for pair in result["gradients"].items()):
        assert name not in total or name == "embed.weight", name
        total[name] = total[name] + gradient if name in total else gradient
    assert set(total) == set(gradients)
    for name, gradient in gradients.items():
        if name == "embed.weight":
            assert (total[name] - gradient).norm() <= 1e-6 * gradient.norm(), case
        else:
            assert torch.equal(total[name], gradient), (case, name)
    placement = stage_rank(case.schedule, world, case.virtual)
    for rank, result in enumerate(results):
        crossing = sum((a == rank) + (b == rank) for a, b in pairwise(placement) if a != b)
        size = ROWS * LENGTH * HIDDEN * 4
        assert result["sent"] == [("pp", "send", size)] * (crossing * case.micro_batches)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.long
def test_every_schedule_equals_one_device(world: int) -> None:
    """Loss, evaluation, every gradient (bit for bit, since micro-batches are added in one order) and what is sent."""
    chosen = cases(world)
    assert {case.schedule for case in chosen} == set(NAMES)
    results = on_ranks(world, _run_cases, world, chosen)
    for index, case in enumerate(chosen):
        assert_equal(case, world, [result[index] for result in results])


def test_a_pipeline_of_one_rank() -> None:
    """Stages hand over on the spot."""
    for name in NAMES:
        case = Case(name, 3, VIRTUAL.get(name, 1))
        assert_equal(case, 1, [_run_case(case, Group("pp"), {}, Told())])


def test_a_schedule_that_does_not_exist_is_refused_before_anything_is_sent() -> None:
    pipeline = Pipeline("dualpipe-v", Group("pp"), [lambda x, batch: (x, None)] * 2, empty, links={})
    with pytest.raises(IllegalLayout, match="2 x pp = 2 micro-batches or more, not 1"):
        pipeline.run(micro_batches(1))


class Census:
    """How many tensors of a kind are alive, by their storages, and the most that were at once."""

    def __init__(self) -> None:
        self.alive: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()

    def follow(self, kind: str, tensor: Tensor) -> None:
        self.alive[kind] += 1
        self.peak[kind] = max(self.peak[kind], self.alive[kind])
        weakref.finalize(tensor.untyped_storage(), self.alive.subtract, [kind])


def _count_alive(world: int, chosen: list[Case]) -> list[tuple[int, int]]:
    process_groups = ProcessGroups()
    return [_count_one(case, *ranks_of(case, world, process_groups)) for case in chosen]


def _count_one(case: Case, group: Group, links: dict[StageLink, Group]) -> tuple[int, int]:
    """Most activations that wait for a backward pass or for the weight's gradient, and most outputs."""
    census = Census()
    placement = stage_rank(case.schedule, group.size, case.virtual)

    def stage(number: int, weight: Tensor, x: Tensor | None, batch: MicroBatch) -> tuple[Tensor | None, Tensor | None]:
        inner = torch.ones(ROWS, LENGTH, HIDDEN) if x is None else x * 1.5
        if x is None:
            inner.requires_grad_()
        census.follow("activation", inner)
        out = fast().linear(inner, weight)
        if number == len(placement) - 1:
            return None, out.sum()
        if placement[number] != placement[number + 1]:
            census.follow("output", out)
        return out, None

    stages = []
    for number in stages_of(placement, group.index):
        weight = torch.ones(HIDDEN, HIDDEN, requires_grad=True)
        stages.append(lambda x, batch, number=number, weight=weight: stage(number, weight, x, batch))
    Pipeline(case.schedule, group, stages, empty, links=links).run(micro_batches(case.micro_batches))
    assert not +census.alive, "all is freed in the end"
    return census.peak["activation"], census.peak["output"]


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_alive_is_what_the_schedule_says(world: int) -> None:
    chosen = [Case(name, 4 * world, VIRTUAL.get(name, 1)) for name in NAMES] + [Case("afab", 1, 1), Case("zb-v", 2, 2)]
    results = on_ranks(world, _count_alive, world, chosen)
    for index, case in enumerate(chosen):
        wanted = replay(schedule(case.schedule, world, case.micro_batches, case.virtual)).in_flight
        assert tuple(result[index][0] for result in results) == wanted, case
        # Outputs live on their way only: some that are sent, and the one just made.
        assert max(result[index][1] for result in results) <= UNDER_WAY + 1, case

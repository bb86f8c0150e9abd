"""When a stage's gradients begin to be summed over data-parallel ranks."""

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import Case, case_batch
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout, MoEShape
from meshwright.spec.layout.schedule import Action, last_of
from meshwright.training.step.batches import Share, select, split
from meshwright.training.step.step import MicroPass, Weights

LAYOUTS: list[dict[str, Any]] = [
    {"zero": zero, "schedule": schedule} for zero in (0, 2) for schedule in ("1f1b", "zb-h1")
]


def begun(options: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Of each layout: sums begun by the end of the last action that makes gradients, and all of them."""
    process_groups: ProcessGroups = {}
    return [_begun(Layout(pp=2, dp_shard=2, micro_batch=2, compile="off", **each), process_groups) for each in options]


def _begun(layout: Layout, process_groups: ProcessGroups) -> tuple[int, int]:
    case, mesh = Case(shape=shrink("llama-3.1-8b")), make_mesh(layout, process_groups=process_groups)
    engine = build_engine(case.shape, layout, mesh=mesh)
    engine.train()
    batches = split(select(case_batch(case, 1), Share(index=mesh["data"].index, parts=2)), 2)
    weights = Weights.for_step(engine, batches, 0.0, None)
    pipeline = engine.pipeline
    last = next(iter(last_of(pipeline.actions(len(batches)), ("W", "BW")).values()))
    kind = ("shard", "reduce_scatter") if layout.zero else ("data", "all_reduce")
    seen: list[int] = []
    reduce = pipeline.after
    before = mesh.traffic.snapshot()

    def after(action: Action) -> None:
        if action == last:
            seen.append(mesh.traffic.since(before).get(kind, (0, 0))[0])
        assert reduce is not None
        reduce(action)

    pipeline.after = after
    engine.forward_backward([MicroPass(batch, weights) for batch in batches])
    engine.finish_gradients()
    everything = len(engine.model.layers) + 1  # blocks, and the end that lies here
    assert mesh.traffic.since(before)[kind][0] == everything
    return seen[0], everything


def test_a_stage_is_reduced_while_its_last_backward_pass_goes_on() -> None:
    """But where weight gradients come last and outside of it, after them."""
    for rank in on_ranks(4, begun, LAYOUTS):
        for each, (early, everything) in zip(LAYOUTS, rank, strict=True):
            assert early == (everything if each["schedule"] == "1f1b" else 0), each


class _Divisions(TorchDispatchMode):
    """Elements of the largest tensor that is divided into a new one."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.div:
            self.largest = max(self.largest, made.numel())
        return made


def divided() -> tuple[int, int]:
    """(elements of the largest quotient of a step, of a rank's experts), where each rank has experts of its own."""
    shape = replace(shrink("qwen3-30b-a3b"), moe=MoEShape(experts=4, top_k=2, ffn=96))
    layout = Layout(dp_shard=2, ep=2, zero=2, compile="off")
    mesh = make_mesh(layout)
    engine = build_engine(shape, layout, mesh=mesh)
    engine.train()
    share = Share(index=mesh["data"].index, parts=2)
    batches = split(select(case_batch(Case(shape=shape), 1), share), 2)
    weights = Weights.for_step(engine, batches, 0.0, None)
    with _Divisions() as divisions:
        engine.forward_backward([MicroPass(batch, weights) for batch in batches])
        engine.finish_gradients()
    experts = [prod(box.sizes) for name, box in engine.local_boxes().items() if name.endswith("experts.up")]
    return divisions.largest, experts[0]


def test_gradients_of_a_rank_alone_are_not_copied_to_be_divided() -> None:
    for largest, experts in on_ranks(2, divided):
        assert largest < experts

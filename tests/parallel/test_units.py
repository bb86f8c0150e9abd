"""The units that ZeRO gathers and reduces, and when: what is whole at a time, and what travels while a layer works."""

from dataclasses import replace
from typing import Any

import torch

from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import Case, case_batch
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout
from meshwright.training.step.batches import Share, select
from meshwright.training.step.step import MicroPass, Weights

CASE = Case(shape=replace(shrink("qwen3-30b-a3b"), layers=4))
LAYERS = CASE.shape.layers

Seen = list[tuple[str, int, tuple[str, ...]]]
"""At a place: units gathered so far in this pass, and whose parameters are whole."""


def watched(layout: Layout) -> Seen:
    """One micro-batch forward and backward: what each block finds when its attention begins, either way."""
    mesh = make_mesh(layout, process_groups=ProcessGroups())
    engine = build_engine(CASE.shape, layout, mesh=mesh)
    model = engine.model
    engine.train()
    seen: Seen = []

    def look(moment: str) -> None:
        now = mesh.traffic.snapshot()
        calls = sum(count for (_, what), (count, _) in now.items() if what == "all_gather")
        whole = tuple(name for name, p in model.named_parameters() if not hasattr(p, "to_local"))
        seen.append((moment, calls, tuple(dict.fromkeys(name.split(".weight")[0] for name in whole))))

    for name, block in model.layers.items():

        def forward(module: Any, inputs: Any, name: str = name) -> None:
            look(f"forward {name}")
            inputs[0].register_hook(lambda gradient: look(f"backward {name}"))

        block.attention.register_forward_pre_hook(forward)
    model.norm.register_forward_pre_hook(lambda module, inputs: look("forward end"))
    batch = select(case_batch(CASE, 1), Share(index=mesh.places["dp_shard"], parts=layout.dp))
    weight = torch.ones(())
    engine.forward_backward([MicroPass(batch, Weights(weight, weight, weight, weight))])
    look("after")
    return seen


def test_units_are_gathered_one_ahead_and_freed_behind() -> None:
    """Embedding, blocks and their experts, norm with head: when a block begins, the next one is under way already."""
    layouts = [Layout(dp_shard=4, ep=ep, zero=3, compile="off") for ep in (1, 2)]
    for units, moments in zip((1, 2), on_ranks(4, _both, layouts)[0], strict=True):
        places = [moment for moment, _, _ in moments]
        forward = [f"forward {layer}" for layer in range(LAYERS)]
        assert places == [*forward, "forward end", *(f"backward {layer}" for layer in reversed(range(LAYERS))), "after"]
        calls, whole = ({moment: each[n] for moment, *each in moments} for n in (0, 1))
        for layer in range(LAYERS - 1):
            assert calls[f"forward {layer}"] == 1 + units * (layer + 2)
            assert calls[f"backward {LAYERS - 1 - layer}"] == 2 + units * (LAYERS + layer + 2)
        assert calls["forward end"] == 2 + units * LAYERS
        assert calls["after"] == 3 + units * 2 * LAYERS
        for moment in (*forward, *(f"backward {layer}" for layer in range(LAYERS))):
            assert {name.split(".")[1] for name in whole[moment]} == {moment.split()[1]}, "only of this block"
        assert whole["forward end"] == ("norm", "head") and whole["after"] == ()


def _both(layouts: list[Layout]) -> list[Seen]:
    return [watched(layout) for layout in layouts]

"""Stages that run once before the first message: nothing of it is left."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from meshwright.observe.oracle.feature_matrix import CASE
from meshwright.observe.oracle.one_device import Case
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import apply
from meshwright.parallel.apply import layout_notes
from meshwright.parallel.axes.data import local
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.parallel.pipeline.executor import Passes
from meshwright.parallel.pipeline.passes import make_pipeline
from meshwright.spec import Layout
from meshwright.spec.layout.schedule import Action
from meshwright.training.step.batches import forms
from meshwright.training.step.step import train_step
from tests.parallel.test_traffic import Run

LAYOUTS = [
    Layout(pp=2, micro_batch=1, compile="off", **each)
    for each in (
        {"dp_shard": 2, "zero": 3, "schedule": "zb-h1"},
        {"dp_shard": 2, "zero": 1, "schedule": "dualpipe-v", "vp": 2},
        {"dp_shard": 2, "zero": 0, "schedule": "interleaved", "vp": 2},
        {"tp": 2, "sp": True},
    )
]


def _steps(case: Case, layout: Layout, process_groups: ProcessGroups, warms_up: bool) -> dict[str, Any]:
    """Two steps, an evaluation between them: what they sent, and everything that they may change."""
    done: list[Action] = []
    do = Passes.do

    def seen(passes: Passes, action: Action) -> None:
        done.append(action)
        do(passes, action)

    with (
        patch.object(Passes, "do", seen),
        patch.object(apply, "make_pipeline", lambda *arguments, **_: make_pipeline(*arguments, warms_up=warms_up)),
    ):
        torch.manual_seed(0)
        run = Run(case, layout, process_groups)
        sent = [run.step(), run.evaluate(), run.step()]
        weights = {name: local(p.detach()).clone() for name, p in run.engine.parameters.items()}
    return {
        "sent": sent,
        "weights": weights,
        "random": torch.get_rng_state(),
        "begun": run.mesh.traffic.calls_begun,
        "passes": len(done),
    }


def _both(case: Case, layouts: list[Layout]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    process_groups: ProcessGroups = {}
    return [
        (_steps(case, layout, process_groups, False), _steps(case, layout, process_groups, True)) for layout in layouts
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.long
def test_a_warm_up_leaves_nothing_behind(precision: str) -> None:
    """Weights bit for bit, random state, and the counts of every step; it communicates inside of the stages only."""
    case = Case(shape=CASE.shape, precision=precision)
    for rank in on_ranks(4, _both, case, LAYOUTS if precision == "fp32" else LAYOUTS[:2]):
        for layout, (cold, warm) in zip(LAYOUTS, rank, strict=False):
            assert warm["sent"] == cold["sent"], layout
            assert torch.equal(warm["random"], cold["random"]), layout
            assert all(torch.equal(warm["weights"][name], weight) for name, weight in cold["weights"].items()), layout
            stages, kinds = layout.vp, {"zb-h1": 3, "dualpipe-v": 5}.get(layout.schedule, 2)
            assert 0 < warm["passes"] - cold["passes"] <= stages * (kinds + 1), layout
            assert warm["begun"] > cold["begun"] or layout.zero == 0, layout


def _form_by_form(case: Case, layout: Layout) -> list[int]:
    """How many passes the stages make in a step without documents, in one with them, and in one without again."""
    done: list[Action] = []
    do = Passes.do

    def seen(passes: Passes, action: Action) -> None:
        done.append(action)
        do(passes, action)

    counts = []
    with (
        patch.object(Passes, "do", seen),
        patch.object(apply, "make_pipeline", lambda *arguments, **_: make_pipeline(*arguments, warms_up=True)),
    ):
        run = Run(case, layout, {})
        packed = [replace(batch, masked=True) for batch in run._batches()]
        plain = [forms(batch)[False] for batch in packed]
        for batches in (plain, packed, plain):
            done.clear()
            train_step(run.engine, run.optimizer, batches, rate=1e-3, clip=1.0, balance_loss=0.01)
            counts.append(len(done))
    return counts


@pytest.mark.parametrize("axes", [{"dp_shard": 2, "zero": 3}, {"cp": 2}], ids=str)
@pytest.mark.long
def test_both_forms_of_a_batch_are_warm_before_the_first_message(axes: dict[str, Any]) -> None:
    """Else the first batch with a border is compiled in the middle of a step, while receives are open."""
    case = Case(shape=CASE.shape, packed=True)
    for first, *later in on_ranks(4, _form_by_form, case, Layout(pp=2, micro_batch=1, compile="off", **axes)):
        assert first == later[0] + 2 * 2, "F and BW, once with documents and once without"
        assert later[0] == later[1]


def test_a_run_says_what_a_schedule_does_not_do() -> None:
    for name in ("1f1b", "zb-h1", "zb-v", "dualpipe-v"):
        assert layout_notes(Layout(pp=2, vp=1 if name in ("1f1b", "zb-h1") else 2, schedule=name)) == []
    assert "is 1f1b" in layout_notes(Layout(pp=2, schedule="interleaved"))[0]

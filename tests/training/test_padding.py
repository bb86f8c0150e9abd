"""What fills rows of samples up: it is known, and the balance loss of experts leaves it out under every layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.data import prepare
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.observe.oracle.features import shrink
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.step.batches import PADDING, Batch, Share, select, split, to_batch
from meshwright.training.step.step import train_step
from tests.training.test_tuning import files as files  # a folder with a model and conversations
from tests.training.test_tuning import plan
from tests.training.tiny import RECIPE, batch

CPU = torch.device("cpu")
LENGTH, REAL = 12, (12, 5, 9, 3)
"""Positions of a row, and those of each that are not padding."""
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, "sp": True, "ep": 2},
    {"cp": 2, "zero": 0},
    {"cp": 2, "dp_shard": 1, "ep": 2},
    {"pp": 2},
    {"dp_shard": 2, "zero": 3, "recompute": "full"},
]


@pytest.mark.parametrize("packing", ["best-fit", "off"])
def test_what_fills_a_row_up_is_known(files: Path, packing: str) -> None:
    """Of rows that hold one sample: all behind it."""
    asked = plan(files, f"data.packing={packing}")
    corpus = prepare(asked.data)
    rows = numbered_rows(asked.data, asked.recipe, corpus, corpus.train, shuffle=True).take(0, 4)
    mask = to_batch(rows, CPU, document_mask=True, padding=True, rows=5).more[PADDING]
    real = [
        sum(documents == documents[targets >= 0].max())
        for documents, targets in zip(rows.documents, rows.targets, strict=True)
    ]
    assert mask[4].all() and mask.shape == (5, 64)
    for padding, documents, number in zip(mask, rows.documents, real, strict=False):
        behind = int((~padding).sum())
        assert not padding[:behind].any() and (packing == "best-fit" or behind == number)
        assert set(documents[behind:].tolist()).isdisjoint(documents[:behind].tolist())
    assert mask[:4].any()
    cut = to_batch(rows, CPU, document_mask=True, padding=True, share=Share(columns=(3, 60))).more[PADDING]
    assert torch.equal(cut, mask[:4, [3, 60]])
    assert PADDING not in to_batch(rows, CPU, document_mask=True).more


def padded(rows: int = 4) -> Batch:
    filled = batch(rows, LENGTH, valid=REAL[:rows])
    padding = torch.arange(LENGTH) >= torch.tensor(REAL[:rows]).unsqueeze(1)
    return replace(filled, more={PADDING: padding})


def _steps(name: str, layouts: list[dict[str, Any]], compile: str) -> list[tuple[float, ...]]:
    """Loss, balance loss and norm of the gradient under each layout."""
    process_groups: ProcessGroups = {}
    curves = []
    for each in layouts:
        layout = Layout(compile=compile, micro_batch=2, **each)
        mesh = make_mesh(layout, rank=None if layout.world > 1 else 0, process_groups=process_groups)
        engine = build_engine(shrink(name), layout, mesh=mesh)
        engine.train()
        index = mesh["data"].index if layout.cp == 1 else 0
        share = Share(index=index, parts=layout.dp, columns=engine.columns(LENGTH))
        batches = split(select(padded(), share), 2)
        optimizer = Optimizer(engine.parameters.items(), RECIPE)
        step = train_step(engine, optimizer, batches, rate=0.0, clip=0.0, balance_loss=1.0)
        assert step.balance is not None
        curves.append((step.loss.item(), step.balance.item(), step.grad_norm.item()))
    return curves


def _alone(name: str) -> float:
    """The mean balance loss of rows that end where the padding begins, each by itself."""
    engine = build_engine(shrink(name), Layout(compile="off"), mesh=make_mesh(Layout(), rank=0))
    rows = [
        engine.model.loss(row[:, :n], row[:, :n]).balance for row, n in zip(padded().tokens.split(1), REAL, strict=True)
    ]
    return torch.stack([row for row in rows if row is not None]).mean().item()


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3"])
def test_every_layout_leaves_padding_out(name: str) -> None:
    [alone] = _steps(name, [{}], "off")
    assert alone[1] == pytest.approx(_alone(name), rel=1e-5)
    for rank in on_ranks(2, _steps, name, LAYOUTS, "off"):
        for layout, curve in zip(LAYOUTS, rank, strict=True):
            assert curve == pytest.approx(alone, rel=1e-4), layout


COMPILED: list[dict[str, Any]] = [{"tp": 2, "sp": True, "ep": 2}, {"dp_shard": 2}]


@pytest.mark.slow
def test_compiled_code_leaves_padding_out() -> None:
    [alone] = _steps("mixtral-8x7b", [{}], "off")
    for rank in on_ranks(2, _steps, "mixtral-8x7b", COMPILED, "on", limit_s=600):
        for curve in rank:
            assert curve == pytest.approx(alone, rel=1e-4)

"""An objective with token weights, one over pairs, and a source of pairs: what a package above would bring, small."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.model.transformer import Predictions
from meshwright.observe.oracle.features import shrink
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.recipe.recipe import TRAITS
from meshwright.training.objectives.objectives import BUILDERS, objective_of
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.step.batches import Batch, Feed, Share, select, split
from meshwright.training.step.step import CROSS_ENTROPY, Objective, train_step
from tests.training.tiny import RECIPE, batch, relative, small, trained

ROWS, LENGTH = 4, 12
BETA = 0.5


class WeightedTokens:
    """Cross-entropy with a weight for each token, by name `weights` (B, S)."""

    by_position = True
    figures = ()

    def count(self, batch: Batch) -> float:
        return float(batch.more["weights"].sum())

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        weights = batch.more["weights"]
        return predictions.cross_entropy(batch.targets, weights if scale is None else weights * scale)


class Preferences:
    """Each even row is preferred to the next one: -log sigmoid of the difference of their log-probabilities, beyond
    that of another model, by name `reference` (B,)."""

    by_position = False
    figures = ()

    def count(self, batch: Batch) -> float:
        return len(batch.tokens) / 2

    def loss(self, predictions: Predictions, batch: Batch, scale: Tensor | None) -> Tensor:
        beyond = predictions.log_probabilities(batch.targets).sum(1) - batch.more["reference"]
        total = -F.logsigmoid(BETA * (beyond[0::2] - beyond[1::2])).sum()
        return total if scale is None else total * scale


class Pairs:
    """Row 2 i is the preferred answer of pair i, row 2 i + 1 the other; a number gives the same row everywhere."""

    def take(self, cursor: int, count: int, device: torch.device, share: Share) -> Batch:
        rows = [batch(1, LENGTH, seed=number) for number in range(cursor, cursor + count)]
        whole = Batch(
            tokens=torch.cat([row.tokens for row in rows]),
            targets=torch.cat([row.targets for row in rows]),
            more={"reference": torch.arange(cursor, cursor + count) / 10},
        )
        return select(whole, replace(share, index=0, parts=1))


def weighted(rows: int = ROWS) -> Batch:
    rows_batch = batch(rows, LENGTH, valid=[12, 3, 7, 12][:rows])
    weights = torch.rand(rows, LENGTH, generator=torch.Generator().manual_seed(4)) * (rows_batch.targets >= 0)
    return replace(rows_batch, more={"weights": weights})


def pairs(rows: int = ROWS) -> Batch:
    return Pairs().take(0, rows, torch.device("cpu"), Share())


def plain_log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return chosen.where(targets >= 0, 0.0)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-0.5b"])
@pytest.mark.parametrize("size", [2, 4])
def test_token_weights_are_those_of_the_written_out_loss(name: str, size: int) -> None:
    whole, model, plain = weighted(), small(name), small(name)
    weights = whole.more["weights"]
    expected = -(plain_log_probabilities(plain(whole.tokens), whole.targets) * weights).sum() / weights.sum()
    expected.backward()
    result, optimizer = trained(model, whole, size, clip=0.0, objective=WeightedTokens())
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for key, parameter in plain.named_parameters():
        assert parameter.grad is not None and relative(optimizer.seen[key], parameter.grad) < 1e-4, key


@pytest.mark.parametrize("size", [2, 4])
def test_preferences_are_those_of_the_written_out_loss(size: int) -> None:
    whole, model, plain = pairs(), small(), small()
    beyond = plain_log_probabilities(plain(whole.tokens), whole.targets).sum(1) - whole.more["reference"]
    expected = -F.logsigmoid(BETA * (beyond[0::2] - beyond[1::2])).mean()
    expected.backward()
    result, optimizer = trained(model, whole, size, clip=0.0, objective=Preferences())
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for key, parameter in plain.named_parameters():
        assert parameter.grad is not None and relative(optimizer.seen[key], parameter.grad) < 1e-4, key


def test_weights_of_one_are_cross_entropy() -> None:
    whole = batch(ROWS, LENGTH, valid=[12, 3, 7, 12])
    ones = replace(whole, more={"weights": (whole.targets >= 0).float()})
    plain, _ = trained(small(), whole, 2)
    outcome, _ = trained(small(), ones, 2, objective=WeightedTokens())
    assert outcome.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    assert outcome.grad_norm.item() == pytest.approx(plain.grad_norm.item(), rel=1e-6)


OBJECTIVES: dict[str, tuple[Objective, Batch]] = {
    "plain": (CROSS_ENTROPY, weighted()),
    "weighted": (WeightedTokens(), weighted()),
    "pairs": (Preferences(), pairs()),
}
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, "sp": True},
    {"dp_shard": 2, "zero": 3},
    {"pp": 2, "schedule": "zb-h1"},
    {"cp": 2, "zero": 0},
]


def _steps(name: str, layouts: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """(layout and objective, loss, norm of the gradient)."""
    process_groups: ProcessGroups = {}
    curves = []
    for each in layouts:
        layout = Layout(compile="off", micro_batch=2, **each)
        mesh = make_mesh(layout, rank=None if layout.world > 1 else 0, process_groups=process_groups)
        for kind, (objective, whole) in OBJECTIVES.items():
            engine = build_engine(shrink(name), layout, mesh=mesh)
            engine.train()
            share = Share(
                index=mesh["data"].index if layout.cp == 1 else 0, parts=layout.dp, columns=engine.columns(LENGTH)
            )
            batches = split(select(whole, share), 2)
            optimizer = Optimizer(engine.parameters.items(), RECIPE)
            step = partial(train_step, engine, optimizer, batches, rate=0.0, clip=0.0, balance_loss=0.0)
            if kind == "pairs" and layout.cp > 1:
                with pytest.raises(IllegalLayout, match="cp=2 splits the sequences"):
                    step(objective=objective)
                continue
            result = step(objective=objective)
            curves.append((f"{kind} {each}", result.loss.item(), result.grad_norm.item()))
    return curves


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-0.5b"])
def test_every_layout_computes_the_same(name: str) -> None:
    alone = {what.split()[0]: numbers for what, *numbers in _steps(name, [{}])}
    for rank in on_ranks(2, _steps, name, LAYOUTS):
        assert len(rank) == 3 * len(LAYOUTS) - 1
        for what, *numbers in rank:
            assert numbers == pytest.approx(alone[what.split()[0]], rel=1e-4), what


def test_ranks_read_their_parts_of_a_source_and_together_all_of_it() -> None:
    whole = Feed(Pairs(), torch.device("cpu"))
    parts = [Feed(Pairs(), torch.device("cpu"), share=Share(index=index, parts=2)) for index in range(2)]
    try:
        for cursor in (0, 8):  # the second was read ahead
            batches = [feed.take(cursor, 8, following=8) for feed in (whole, *parts)]
            assert torch.equal(batches[0].tokens, torch.cat([batch.tokens for batch in batches[1:]]))
            assert torch.equal(
                batches[0].more["reference"], torch.cat([batch.more["reference"] for batch in batches[1:]])
            )
        assert torch.equal(parts[1].take(4, 4).tokens, whole.take(6, 2).tokens), "a restart reads the same"
    finally:
        for feed in (whole, *parts):
            feed.close()


def test_every_objective_of_a_recipe_is_made() -> None:
    """One without a maker would end in a KeyError, and not as cross-entropy; those with a teacher are made with it."""
    assert {*BUILDERS} == {name for name, traits in TRAITS.items() if not traits.teacher}
    for name in BUILDERS:
        made = objective_of(replace(RECIPE, objective=name))
        assert (made is CROSS_ENTROPY) == (name == "cross-entropy")
        assert made.figures == TRAITS[name].figures

"""A run of many ranks is served as stored: every token has the probability that its trainer measured."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.data import prepare
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.observe.ranks import on_ranks
from meshwright.serving.engine.cache.blocks import CachedSequence
from meshwright.serving.engine.scheduler import StepPlan
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.spec import Layout, Plan
from meshwright.training import loop
from meshwright.training.step.batches import held_out_batches
from tests.training.running import MOE, SHAPE, Notes, plan, write_texts

Tokens = tuple[int, ...]
LAYOUTS = {
    "ZeRO-3, tp, pp": (SHAPE, Layout(dp_shard=2, zero=3, tp=2, pp=2, micro_batch=1)),
    "ZeRO-3, ep": (MOE, Layout(dp_shard=2, zero=3, ep=2, micro_batch=1)),
}


def trained(asked: Plan) -> float | None:
    """Return the held-out loss that the trainer measured after the last step. None = another rank than the first."""
    torch.set_num_threads(1)
    notes = Notes()
    loop.run(asked, watchers=[notes])
    if not notes.evaluations:
        return None
    assert notes.evaluations[-1].step == asked.recipe.steps
    return notes.evaluations[-1].loss


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.long
def test_probabilities_are_those_of_the_trainer(name: str, tmp_path: Path) -> None:
    """The paged engine gets every beginning of every held-out window."""
    shape, layout = LAYOUTS[name]
    asked = replace(
        plan(write_texts(tmp_path / "texts"), tmp_path / "run", shape=shape, document_mask=False), layout=layout
    )
    measured = on_ranks(layout.world, trained, asked)[0]
    beginnings = list(_held_out(asked))
    for exact in (False, True):
        engine, logits = mw.load(asked.run).engine(mw.EngineOptions(exact=exact, block=4)), dict[Tokens, Tensor]()
        _watch(engine, logits)
        engine.run([engine.add(tokens, mw.RequestOptions(max_new_tokens=1)) for tokens, _ in beginnings])
        logs = [float(logits[tuple(tokens)].log_softmax(-1)[target]) for tokens, target in beginnings]
        assert len(logs) > 50 and -sum(logs) / len(logs) == pytest.approx(measured, rel=2e-6)


def _watch(engine: ServingEngine, logits: dict[Tokens, Tensor]) -> None:
    """Keep what the engine computes, by the tokens before."""
    run = engine._loop.runner.run

    def seen(step: StepPlan, **args: int) -> tuple[list[CachedSequence], Tensor]:
        owners, rows = run(step, **args)
        logits.update((tuple(sequence.tokens), row) for sequence, row in zip(owners, rows, strict=True))
        return owners, rows

    engine._loop.runner.run = seen  # type: ignore[method-assign]


def _held_out(asked: Plan) -> Iterator[tuple[list[int], int]]:
    """Return every beginning of every scored window, and the token after it."""
    corpus = prepare(asked.data)
    rows = numbered_rows(asked.data, asked.recipe, corpus, corpus.validation, shuffle=False)
    limit = asked.recipe.eval_sequences
    for batch in held_out_batches(rows, torch.device("cpu"), rows=1, limit=limit, document_mask=False):
        tokens, targets = batch.tokens[0].tolist(), batch.targets[0].tolist()
        for position, target in enumerate(targets):
            if target >= 0:
                yield tokens[: position + 1], target

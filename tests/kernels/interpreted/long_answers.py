"""Greedy answers behind short and long prompts, by all kernels of a GPU's step, beside the model's own logits."""

from dataclasses import replace

import pytest
import torch

from meshwright.kernels.attention.paged import PagedStore, RowsCall, attend_rows
from meshwright.model import build
from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from tests.kernels.references import attend_rows_reference
from tests.model.shrunk import shrink


@pytest.mark.parametrize("length", [5, 300])
def test_long_prompts_are_answered_by_the_models_own_logits(length: int) -> None:
    """Greedy tokens, at lengths on both sides of the runs of keys that are added up."""
    shape = replace(shrink("qwen3-0.6b"), layers=1, max_positions=400)
    actual = build(shape, kernels="triton", seed=3).eval()
    draw = torch.Generator().manual_seed(length)
    prompt = torch.randint(shape.vocab, (length,), generator=draw).tolist()
    engine = ServingEngine(actual, EngineOptions(compiled=False, most_tokens=512, most_sequences=2))
    asked = engine.add(prompt, RequestOptions(max_new_tokens=3, ignore_end=True))
    engine.run([asked])
    beside = build(shape, seed=3).eval()
    with torch.no_grad():
        logits = beside(torch.tensor([prompt + asked.answers[0].ids]))[0, length - 1 : -1]
    for token, row in zip(asked.answers[0].ids, logits, strict=True):
        assert row[token] > row.max() - 1e-4


@pytest.mark.parametrize("last", [699, 7999])
def test_one_long_row_alone(last: int) -> None:
    """A step with a single row whose runs of keys are added up, beside fp64."""
    blocks = last // 16 + 1
    keys, values = (PagedStore((blocks, 16, 1, 16), torch.zeros(1), "model") for _ in range(2))
    draw = torch.Generator().manual_seed(last)
    for store in (keys, values):
        store.codes.copy_(torch.randn(store.codes.shape, generator=draw))
    q = torch.randn(1, 2, 16, generator=draw)
    call = RowsCall(torch.randperm(blocks, generator=draw), torch.tensor([0]), torch.tensor([last]), last + 1)
    actual = attend_rows(None, q, keys, values, call, width=16, window=0, scale=0.3)
    wide = [store.codes.double() for store in (keys, values)]
    right = attend_rows_reference(q.double(), *wide, call, width=16, window=0, scale=0.3)
    assert ((actual.double() - right).norm() / right.norm()).item() < 2e-6

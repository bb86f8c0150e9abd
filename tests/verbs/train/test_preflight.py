"""Plan and dry run, printed before the first step."""

from dataclasses import replace

import pytest

from meshwright.planfile import read
from meshwright.planner.step.predict import build_estimator
from meshwright.planner.step.prediction import Prediction
from meshwright.spec import Plan
from meshwright.spec.units import count
from meshwright.verbs.train import preflight

PLAN = read(
    None,
    ["model=llama-3.1-8b", "cluster=h100x8", "recipe.sequence=8192", "recipe.global_batch=16", "recipe.precision=bf16",
     "layout.dp_shard=8", "layout.zero=3", "layout.micro_batch=1"],
)  # fmt: skip


def predicted(plan: Plan) -> Prediction:
    return build_estimator(plan).predict(plan)


def test_the_time_of_the_documents_that_are_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short documents make steps faster than full rows. A costly mask is named."""
    together = replace(PLAN, recipe=replace(PLAN.recipe, document_mask=False))
    rates = []
    for tokens in (512.0, 8192.0):
        prediction = build_estimator(PLAN, document_tokens=tokens).predict(PLAN)
        [(label, sentence)] = preflight._with_documents(PLAN, tokens)[:1]
        assert (
            label == "plan"
            and f"{count(prediction.tokens_per_s_per_device)} tokens/s" in sentence
            and count(tokens) in sentence
        )
        rates.append(prediction.tokens_per_s_per_device)
    assert rates[0] > rates[1]
    share = 1 - predicted(together).step_s / predicted(PLAN).step_s
    for least in (share - 0.01, share + 0.01):
        monkeypatch.setattr(preflight, "NAMED_FROM", least)
        notes = [sentence for label, sentence in preflight._with_documents(PLAN, 8192.0) if label == "note"]
        assert len(notes) == (least < share)
        assert all(f"costs {share:.0%} of the planned speed" in sentence for sentence in notes)
    assert preflight._with_documents(replace(PLAN, cluster=read(None).cluster), 512.0) == (), "no device is known"

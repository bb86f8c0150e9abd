"""The explorer's formulas for other training software, run as JavaScript, against the planner's."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshwright.planner.explorer.explorer_page import facts
from meshwright.planner.step.predict import Estimator, estimator
from meshwright.spec import Plan
from meshwright.stacks.trainer_table import SOFTWARE
from tests.planner.browser import CHROMIUM
from tests.planner.test_explorer_formulas import NODE, asked, drawn, javascript, words

pytestmark = pytest.mark.skipif(not (NODE or CHROMIUM), reason="neither node nor Chromium to run JavaScript with")
PLANS = 60
"""Legal ones of each software."""


def of_software(word: str) -> Estimator:
    return estimator(asked("llama-3.1-8b", "h100x8", 2, "bf16"), SOFTWARE[word].stack({}))


@cache
def found(word: str) -> tuple[dict[str, Any], list[Plan]]:
    """What the page is told of a software, and legal plans."""
    told, dice, plans = facts(of_software(word)), random.Random(word), []
    while len(plans) < PLANS:
        one = drawn(asked("llama-3.1-8b", "h100x8", 2, "bf16"), told["controls"], dice)
        if not one.violations():
            plans.append(one)
    return told, plans


@pytest.mark.long
@pytest.mark.parametrize("word", SOFTWARE)
def test_memory_and_time_are_the_planners(word: str) -> None:
    told, plans = found(word)
    question = (
        "GIVEN.plans.map(({recipe, layout}) => ({ranks: memoryOf(GIVEN.facts, recipe, layout),"
        " parts: stepParts(GIVEN.facts, recipe, layout)}))"
    )
    answers = javascript(question, {"facts": told, "plans": [words(one) for one in plans]})
    errors = []
    for plan, one in zip(plans, answers, strict=True):
        expected = replace(of_software(word), recipe=plan.recipe).predict(plan)
        for memory, rank in zip(expected.memory, one["ranks"], strict=True):
            kinds = {kind: size for kind, size in rank["kinds"].items() if size}
            assert rank["when"] == memory.when, plan.layout
            assert kinds == pytest.approx({k: v for k, v in memory.kinds.items() if v}, rel=1e-6), plan.layout
        errors.append(abs(sum(one["parts"]) / expected.step_s - 1))
    errors.sort()
    assert errors[PLANS // 2] < 0.01 and errors[int(0.95 * PLANS)] < 0.2, errors[-5:]

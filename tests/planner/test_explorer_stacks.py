"""The explorer's formulas for other training software, run as JavaScript, against the planner's."""

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from meshwright.planner.explorer.explorer_page import facts
from meshwright.planner.search.landscape import FIELDS, landscape
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.spec import Layout, Plan
from meshwright.stacks.config_files import option_words
from meshwright.stacks.trainer_table import SOFTWARE
from meshwright.verbs.explore.answer import rules_of
from tests.planner.browser import CHROMIUM
from tests.planner.test_explorer_formulas import NODE, asked, drawn, javascript, words

pytestmark = pytest.mark.skipif(not (NODE or CHROMIUM), reason="neither node nor Chromium to run JavaScript with")
PLANS = 60
"""Legal ones of each software."""


def of_software(word: str) -> Estimator:
    return build_estimator(asked("llama-3.1-8b", "h100x8", 2, "bf16"), SOFTWARE[word].stack({}))


@cache
def software_facts(word: str) -> tuple[dict[str, Any], list[Plan]]:
    """What the page is told of a software, and legal plans."""
    estimator, rules = of_software(word), rules_of(SOFTWARE[word])
    land = landscape(estimator, asked("llama-3.1-8b", "h100x8", 2, "bf16"), fixed=rules.fixed)
    points = [dict(zip(FIELDS, fields, strict=True)) for fields, *_ in land["points"]]
    told, dice, plans = facts(estimator, layouts=points, software=rules), random.Random(word), []
    while len(plans) < PLANS:
        plan = drawn(asked("llama-3.1-8b", "h100x8", 2, "bf16"), told["controls"], dice)
        if not plan.violations():
            plans.append(plan)
    return told, plans


@pytest.mark.long
@pytest.mark.parametrize("word", SOFTWARE)
def test_memory_is_the_planners(word: str) -> None:
    told, plans = software_facts(word)
    question = "GIVEN.plans.map(({recipe, layout}) => memoryOf(GIVEN.facts, recipe, layout))"
    answers = javascript(question, {"facts": told, "plans": [words(answer) for answer in plans]})
    for plan, ranks in zip(plans, answers, strict=True):
        expected = of_software(word).with_recipe(plan.recipe).predict(plan)
        for memory, rank in zip(expected.memory, ranks, strict=True):
            kinds = {kind: size for kind, size in rank["kinds"].items() if size}
            assert rank["when"] == memory.when, plan.layout
            assert kinds == pytest.approx({k: v for k, v in memory.kinds.items() if v}, rel=1e-6), plan.layout


@pytest.mark.parametrize("word", SOFTWARE)
def test_layouts_are_refused_in_the_softwares_words(word: str) -> None:
    told, plans = software_facts(word)
    question = "GIVEN.plans.map(({recipe, layout}) => violations(GIVEN.facts.model, recipe, layout))"
    answers = javascript(question, {"facts": told, "plans": [words(each) for each in plans]})
    for plan, sentences in zip(plans, answers, strict=True):
        expected = [sentence for refuse in SOFTWARE[word].refusals() if (sentence := refuse(plan.model, plan.layout))]
        assert sentences == expected, plan.layout
        assert bool(sentences) == bool(SOFTWARE[word].refusal(plan.model, plan.layout))
    assert any(answers)


@pytest.mark.parametrize("word", SOFTWARE)
def test_options_are_those_that_the_files_say(word: str) -> None:
    """Of layouts of the map, with other sequences and batches; and every option that differs between them is shown."""
    plan, software, dice = asked("llama-3.1-8b", "h100x8", 2, "bf16"), SOFTWARE[word], random.Random(7)
    land = landscape(of_software(word), plan, fixed=rules_of(software).fixed)
    told, _ = software_facts(word)
    plans = []
    for fields, *_ in dice.sample(land["points"], min(150, len(land["points"]))):
        settings = dict(zip(FIELDS, fields, strict=True))
        layout = Layout(**{**settings, "sp": bool(settings["sp"])})
        even = [batch for batch in told["controls"]["global_batch"] if batch % (layout.dp * layout.micro_batch) == 0]
        batch = dice.choice(even)
        plans.append(
            replace(
                plan, layout=layout, recipe=replace(plan.recipe, sequence=dice.choice((2048, 4096)), global_batch=batch)
            )
        )
    question = "GIVEN.plans.map((state) => optionLines({data: GIVEN.facts, state}))"
    answers = javascript(question, {"facts": told, "plans": [words(each) for each in plans]}, "options.js")
    for file in software.files:
        options_said = [option_words(file, software.all_facts(each)) for each in plans]
        tables = [option for option, _ in told["software"]["files"].get(file.name, ())]
        every = {option for stated in options_said for option in stated}
        assert {option for option in every if len({stated.get(option) for stated in options_said}) > 1} <= {*tables}
        for stated, shown in zip(options_said, answers, strict=True):
            assert dict(shown).get(file.name, []) == [stated[option] for option in tables if option in stated]

"""The explorer's formulas, run as JavaScript, against the planner's: memory, rules, schedules."""

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from meshwright.planner.explorer.explorer_page import facts, source
from meshwright.planner.search.regions import divisors
from meshwright.planner.step.predict import Estimator, build_estimator
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.layout.replay import replay
from meshwright.spec.layout.schedule import KINDS, refusal, schedule, stage_layers
from meshwright.spec.memory.held import PLANNED
from meshwright.spec.model.shape import LoRAShape
from tests.planner.browser import CHROMIUM, evaluate

NODE = shutil.which("node")
FORMULAS = ("schedule.js", "legal.js", "matrices.js", "memory.js", "peaks.js")
MODELS: tuple[tuple[Any, ...], ...] = (
    ("llama-3.1-8b", "h100x8", 8, "bf16"),
    ("llama-3.2-1b", "a100-40x8", 4, "fp32"),
    ("gpt2-xl", "a100-80x8", 3, "fp16"),
    ("mixtral-8x7b", "h100x8", 8, "bf16"),
    ("deepseek-v3", "h100x8", 64, "bf16"),
    ("qwen3-30b-a3b", "h200x8", 6, "bf16"),
    ("llama-3.1-405b", "h100x8", 256, "bf16"),
    ("moe-tiny", "h100x8", 2, "bf16"),
    ("llama-2-7b", "h100x8", 4, "bf16", "int8", "none"),
    ("llama-3.1-8b", "h100x8", 8, "bf16", "fp32", "fp32", "muon"),
    ("deepseek-v3", "h100x8", 64, "bf16", "fp32", "fp32", "muon"),
    ("llama-3.1-8b", "h100x8", 2, "bf16", "fp32", "fp32", "adamw", "nf4-double"),
    ("llama-2-7b", "h100x8", 4, "bf16", "fp32", "fp32", "adamw", "", "fp8"),
    ("llama-3.1-8b", "h100x8", 2, "bf16", "fp32", "fp32", "adamw", "same", "same", 0.1),
)
SMALL = (0, 2, 7, 8, 13)
"""Of MODELS, whose tables are made in a second or two; those of hundreds of devices take as long as all of these."""
LARGE = tuple(number for number in range(len(MODELS)) if number not in SMALL)
PLANS = 72
"""Legal ones of each model: a thousand of all."""

pytestmark = pytest.mark.skipif(not (NODE or CHROMIUM), reason="neither node nor Chromium to run JavaScript with")


def javascript(question: str, inputs: Any, *more: str) -> Any:
    """The value of an expression over GIVEN, with the page's formulas in scope, and `more` of its scripts."""
    text = f"{source(*FORMULAS, *more)}\nconst GIVEN = {json.dumps(inputs)};\n"
    if NODE:
        program = f"{text}process.stdout.write(JSON.stringify({question}))"
        return json.loads(subprocess.run([NODE, "-"], input=program, capture_output=True, text=True, check=True).stdout)
    return json.loads(evaluate(f"(() => {{ {text} return JSON.stringify({question}) }})()"))


@cache
def shared(number: int) -> Estimator:
    """Of a model's first plan; others differ in sequence and batch."""
    return build_estimator(asked(*MODELS[number]))


@cache
def told(number: int) -> dict[str, Any]:
    """What the page is told of a model."""
    return facts(shared(number))


def asked(
    name: str, cluster: str, nodes: int, precision: str, states: str = "fp32", masters: str = "fp32",
    optimizer: str = "adamw", base: str = "", products: str = "same", dropout: float = 0.0,
) -> Plan:  # fmt: skip
    keys: dict[str, Any] = {"precision": precision, "optimizer_states": states, "master_weights": masters}
    keys |= {"optimizer": optimizer, "products": products}
    recipe = Recipe(sequence=4096, global_batch=512, **keys)
    model = presets.model(name)
    model = replace(model, lora=LoRAShape(rank=16, base=base, dropout=dropout)) if base else model
    return Plan(model=model, recipe=recipe, cluster=presets.cluster(cluster, nodes))


def drawn(plan: Plan, controls: dict[str, Any], dice: random.Random) -> Plan:
    """A state as the controls can make it, often illegal."""
    devices = plan.cluster.devices
    tp, cp, pp, dp = dice.choice([
        (tp, cp, pp, controls["dp"][tp * cp * pp])
        for tp, cp, pp in product(controls["tp"], controls["cp"][:4], controls["pp"][:5])
        if devices % (tp * cp * pp) == 0
    ])  # fmt: skip
    shard = dice.choice(divisors(dp))
    name = dice.choice(controls["schedule"]) if pp > 1 else "1f1b"
    vp = dice.choice(controls["vp"][name][pp][:3]) if pp > 1 else 1
    experts = [ep for ep in controls["ep"] if shard * cp * tp % ep == 0]
    layout = Layout(
        dp_replicate=dp // shard, dp_shard=shard, tp=tp, cp=cp, pp=pp, vp=vp, schedule=name,
        zero=dice.randrange(4) if shard * cp > 1 else dice.choice((0, 0, 0, 1)), sp=tp > 1 and dice.random() < 0.7,
        ep=dice.choice(experts if dice.random() < 0.9 else controls["ep"]),
        micro_batch=dice.choice(controls["micro_batch"][:5]), recompute=dice.choice(controls["recompute"]),
    )  # type: ignore[arg-type]  # fmt: skip
    whole = [batch for batch in controls["global_batch"] if batch % (layout.dp * layout.micro_batch) == 0]
    batches = whole if whole and dice.random() < 0.95 else controls["global_batch"]
    recipe = {"sequence": dice.choice(controls["sequence"][:7]), "global_batch": dice.choice(batches)}
    return replace(plan, layout=layout, recipe=replace(plan.recipe, **recipe))


@pytest.fixture(scope="module", params=[SMALL, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["small", "large"])
def plans(request: pytest.FixtureRequest) -> list[tuple[int, Plan, list[str]]]:
    """(place in MODELS, plan, its violations) until there are PLANS legal ones of each."""
    dice, asked_plans = random.Random(1), []
    for number in request.param:
        plan, legal = asked(*MODELS[number]), 0
        while legal < PLANS:
            candidate = drawn(plan, told(number)["controls"], dice)
            sentences = candidate.violations()
            legal += not sentences
            asked_plans.append((number, candidate, sentences))
    return asked_plans


def facts_of(plans: list[tuple[int, Plan, list[str]]]) -> dict[int, dict[str, Any]]:
    return {number: told(number) for number in sorted({number for number, *_ in plans})}


def words(plan: Plan) -> dict[str, Any]:
    recipe = {"sequence": plan.recipe.sequence, "global_batch": plan.recipe.global_batch}
    return {"layout": asdict(plan.layout), "recipe": recipe}


@pytest.mark.long
def test_memory_of_hundreds_of_plans(plans: list[tuple[int, Plan, list[str]]]) -> None:
    legal = [(number, plan) for number, plan, sentences in plans if not sentences]
    assert len(legal) >= PLANS * len(SMALL)
    inputs = {
        "facts": facts_of(plans),
        "plans": [{"of": number, **words(plan)} for number, plan in legal],
    }
    counted = javascript("GIVEN.plans.map((one) => memoryOf(GIVEN.facts[one.of], one.recipe, one.layout))", inputs)
    for (_, plan), ranks in zip(legal, counted, strict=True):
        estimator: Estimator = build_estimator(plan)
        for expected, rank in zip(
            estimator.measure(plan.layout)[1], ranks, strict=True
        ):  # compiled, as the page has it
            assert rank["when"] == expected.when, plan.layout
            assert {k: v for k, v in rank["kinds"].items() if v} == pytest.approx(
                {k: v for k, v in expected.kinds.items() if v}, rel=1e-6
            ), plan.layout
            assert rank["total"] == pytest.approx(expected.total_bytes, rel=1e-6)


def test_the_same_layouts_are_refused_in_the_same_words(plans: list[tuple[int, Plan, list[str]]]) -> None:
    illegal = [(plan, expected_sentences) for _, plan, expected_sentences in plans if expected_sentences]
    assert len({sentence.split("=")[0] for _, expected_sentences in illegal for sentence in expected_sentences}) >= 5
    models = {number: known["model"] for number, known in facts_of(plans).items()}
    inputs = {"models": models, "plans": [{"of": number, **words(plan)} for number, plan, _ in plans]}
    refused = javascript("GIVEN.plans.map((one) => violations(GIVEN.models[one.of], one.recipe, one.layout))", inputs)
    for (_, plan, expected_sentences), sentences in zip(plans, refused, strict=True):
        assert sentences == expected_sentences, plan.layout


def cases() -> Iterator[tuple[str, int, int, int]]:
    for name, kind in KINDS.items():
        for p, m in product((2, 3, 4, 8), (1, 2, 3, 4, 7, 8, 12, 32)):
            for v in (2, 3) if kind.deeper and kind.stages > 1 else (1, 2) if kind.deeper else (kind.stages,):
                yield name, p, m, v


def test_schedules_and_their_bubbles() -> None:
    """Words and rounds, written out by the page, are Python's lists; what it cannot draw it refuses in Python's
    words. ZB-H1 with more stages is in layouts, but has no timeline."""
    every = list(cases())
    drawn = [
        case_
        for case_ in every
        if not KINDS[case_[0]].deeper or case_[3] >= KINDS[case_[0]].stages > 1 or case_[3] == 1
    ]
    told_of = told(0)
    answers = javascript(
        "GIVEN.cases.map(([name, p, m, v, drawn]) => {"
        " const {schedules, timelines} = GIVEN, values = {schedule: name, pp: p, count: m, vp: v};"
        " const no = drawn ? lookUp(timelines, timelines.refused, values) : null;"
        " if (no) return {no: fillIn(no, values)};"
        " const made = schedule(schedules[name], p, m, v);"
        " const played = replay(made);"
        " return {lists: made.map((list) => list.map((a) => [a.kind, a.stage, a.i])), bubble: played.bubble,"
        " total: played.total, alive: played.inFlight}; })",
        {
            "cases": [(*case_, case_ in drawn) for case_ in every if case_ in drawn or refusal(*case_) is None],
            "schedules": told_of["schedules"],
            "timelines": told_of["timelines"],
        },
    )
    every = [case_ for case_ in every if case_ in drawn or refusal(*case_) is None]
    assert sum("lists" in case_ for case_ in answers) > 150 and sum("no" in case_ for case_ in answers) > 10
    for case, case_ in zip(every, answers, strict=True):
        sentence = refusal(*case)
        assert case_.get("no") == sentence
        if sentence is None:
            actions = schedule(*case)
            played = replay(actions)
            assert case_["lists"] == [[[a.kind, a.stage, a.micro_batch] for a in of_rank] for of_rank in actions], case
            assert case_["bubble"] == pytest.approx(played.bubble, abs=1e-12)
            assert (case_["total"], case_["alive"]) == (played.total_s, list(played.in_flight))


def test_layers_of_stages() -> None:
    every = [(number, int(stages)) for number in SMALL for stages in told(number)["model"]["stages"]]
    models = {number: told(number)["model"] for number in SMALL}
    answers = javascript(
        "GIVEN.every.map(([place, stages]) => stageLayers(GIVEN.models[place], stages))",
        {"every": every, "models": models},
    )
    assert len(every) > 50
    for (number, stages), made in zip(every, answers, strict=True):
        expected = stage_layers(shared(number).shape.layers, stages)
        assert [(stage["start"], stage["end"]) for stage in made] == [(r.start, r.stop) for r in expected]


def test_the_page_draws_every_kind_of_memory_that_is_planned() -> None:
    """Tokens and staging are no device memory that a plan counts."""
    text = source("memory.js")
    listed = text[text.index("const KINDS = [") :].partition("[")[2].partition("]")[0]
    assert [kind.strip(' "\n') for kind in listed.split(",")] == [
        kind for kind in PLANNED if kind not in ("tokens", "staging")
    ]

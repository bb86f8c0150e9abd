"""The explorer's formulas, run as JavaScript, against the planner's: memory, rules, schedules."""

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pytest

from meshwright.planner.explorer.explorer_page import facts, source
from meshwright.planner.search.landscape import PARTS
from meshwright.planner.search.regions import divisors
from meshwright.planner.step.predict import Estimator, estimator
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.layout import RECOMPUTE
from meshwright.spec.lora import LoRAShape
from meshwright.spec.replay import replay
from meshwright.spec.schedule import NAMES, refusal, schedule, stage_layers
from tests.planner.browser import CHROMIUM, evaluate

NODE = shutil.which("node")
FORMULAS = ("schedule.js", "legal.js", "matrices.js", "memory.js", "peaks.js", "time.js")
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
PLANS = 1000

pytestmark = pytest.mark.skipif(not (NODE or CHROMIUM), reason="neither node nor Chromium to run JavaScript with")


def javascript(question: str, given: Any) -> Any:
    """The value of an expression over GIVEN, with the page's formulas in scope."""
    text = f"{source(*FORMULAS)}\nconst GIVEN = {json.dumps(given)};\n"
    if NODE:
        program = f"{text}process.stdout.write(JSON.stringify({question}))"
        return json.loads(subprocess.run([NODE, "-"], input=program, capture_output=True, text=True, check=True).stdout)
    return json.loads(evaluate(f"(() => {{ {text} return JSON.stringify({question}) }})()"))


@cache
def shared(place: int) -> Estimator:
    """Of a model's first plan; others differ in sequence and batch."""
    return estimator(asked(*MODELS[place]))


@cache
def told(place: int) -> dict[str, Any]:
    """What the page is told of a model."""
    return facts(shared(place))


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


def drawn(plan: Plan, dice: random.Random) -> Plan:
    """A layout as the sliders can make it, often illegal, and a recipe."""
    devices = plan.cluster.devices
    tp = dice.choice(divisors(min(devices, 64)))
    cp = dice.choice(divisors(devices // tp if devices % tp == 0 else 1)[:4])
    left = devices // (tp * cp) if devices % (tp * cp) == 0 else 1
    pp = dice.choice([1, *divisors(left)[:5]])
    dp = max(1, left // pp)
    shard = dice.choice(divisors(dp))
    name = dice.choice(NAMES) if pp > 1 else "1f1b"
    vp = 2 if name in ("zb-v", "dualpipe-v") else dice.choice((2, 3, 4)) if name == "interleaved" else 1
    experts = plan.model.moe.experts if plan.model.moe else 1
    layout = Layout(
        dp_replicate=dp // shard, dp_shard=shard, zero=dice.randrange(4) if shard * cp > 1 else 0, tp=tp, cp=cp, pp=pp,
        vp=vp, schedule=name, sp=tp > 1 and dice.random() < 0.7, ep=dice.choice(divisors(experts)),
        micro_batch=dice.choice((1, 1, 2, 3, 4)), recompute=dice.choice(RECOMPUTE),
    )  # type: ignore[arg-type]  # fmt: skip
    batch = layout.dp * layout.micro_batch * dice.choice((1, 3, 4, 8, 16, 33))
    sequence = dice.choice((512, 1024, 2000, 4096, 8192, 32768))
    if dice.random() < 0.1:
        batch, sequence = batch + 1, sequence + dice.randrange(3)
    return replace(plan, layout=layout, recipe=replace(plan.recipe, sequence=sequence, global_batch=batch))


@pytest.fixture(scope="module")
def plans() -> list[tuple[int, Plan, list[str]]]:
    """(place in MODELS, plan, its violations) until there are PLANS legal ones, in equal parts."""
    dice, found = random.Random(1), []
    for place, given in enumerate(MODELS):
        plan, legal = asked(*given), 0
        while legal < -(-PLANS // len(MODELS)):
            one = drawn(plan, dice)
            said = one.violations()
            legal += not said
            found.append((place, one, said))
    return found


def words(plan: Plan) -> dict[str, Any]:
    recipe = {"sequence": plan.recipe.sequence, "global_batch": plan.recipe.global_batch}
    return {"layout": asdict(plan.layout), "recipe": recipe}


def test_memory_of_a_thousand_plans(plans: list[tuple[int, Plan, list[str]]]) -> None:
    legal = [(place, plan) for place, plan, said in plans if not said]
    assert len(legal) >= PLANS
    given = {
        "facts": [told(place) for place in range(len(MODELS))],
        "plans": [{"of": place, **words(plan)} for place, plan in legal],
    }
    found = javascript("GIVEN.plans.map((one) => memoryOf(GIVEN.facts[one.of], one.recipe, one.layout))", given)
    for (_, plan), ranks in zip(legal, found, strict=True):
        of: Estimator = estimator(plan)
        for expected, rank in zip(of.predict(plan).memory, ranks, strict=True):
            assert rank["when"] == expected.when, plan.layout
            assert {k: v for k, v in rank["kinds"].items() if v} == pytest.approx(
                {k: v for k, v in expected.kinds.items() if v}, rel=1e-6
            ), plan.layout
            assert rank["total"] == pytest.approx(expected.total_bytes, rel=1e-6)


def test_step_time_of_hundreds_of_plans_is_about_right(plans: list[tuple[int, Plan, list[str]]]) -> None:
    """Tables between a few sizes and closed forms of schedules: no legal layout without a time, half of them
    within 1 %, 19 of 20 within 15 %."""
    legal = [(place, plan) for place, plan, said in plans if not said][::3]
    given = {
        "facts": [told(place) for place in range(len(MODELS))],
        "plans": [{"of": place, **words(plan)} for place, plan in legal],
    }
    question = "GIVEN.plans.map((one) => stepParts(GIVEN.facts[one.of], one.recipe, one.layout))"
    found = javascript(question, given)
    errors = []
    for (place, plan), parts in zip(legal, found, strict=True):
        expected = replace(shared(place), recipe=plan.recipe).time(plan.layout)
        assert len(parts) == len(PARTS) and all(part is not None for part in parts), plan.layout
        errors.append(abs(sum(parts) / expected.total_s - 1))
    errors.sort()
    assert errors[len(errors) // 2] < 0.01
    assert errors[int(0.95 * len(errors))] < 0.15 and errors[-1] < 0.5


def test_the_same_layouts_are_refused_in_the_same_words(plans: list[tuple[int, Plan, list[str]]]) -> None:
    illegal = [(plan, said) for _, plan, said in plans if said]
    assert len({sentence.split("=")[0] for _, said in illegal for sentence in said}) >= 5
    models = [told(place)["model"] for place in range(len(MODELS))]
    given = {"models": models, "plans": [{"of": place, **words(plan)} for place, plan, _ in plans]}
    found = javascript("GIVEN.plans.map((one) => violations(GIVEN.models[one.of], one.recipe, one.layout))", given)
    for (_, plan, said), sentences in zip(plans, found, strict=True):
        assert sentences == said, plan.layout


def cases() -> Iterator[tuple[str, int, int, int]]:
    for name in NAMES:
        for p, m, v in ((p, m, v) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 7, 8, 12, 17, 32) for v in (1, 2, 3)):
            yield name, p, m, v


def test_schedules_and_their_bubbles() -> None:
    every = list(cases())
    found = javascript(
        "GIVEN.map(([name, p, m, v]) => { const no = refusal(name, p, m, v); if (no) return {no};"
        " const made = schedule(name, p, m, v), played = replay(made);"
        " return {lists: made.map((own) => own.map((a) => [a.kind, a.stage, a.i])), bubble: played.bubble,"
        " total: played.total, alive: played.inFlight}; })",
        every,
    )
    assert sum("lists" in one for one in found) > 200
    for case, one in zip(every, found, strict=True):
        sentence = refusal(*case)
        assert one.get("no") == sentence
        if sentence is None:
            actions = schedule(*case)
            played = replay(actions)
            assert one["lists"] == [[[a.kind, a.stage, a.micro_batch] for a in own] for own in actions], case
            assert one["bubble"] == pytest.approx(played.bubble, abs=1e-12)
            assert (one["total"], one["alive"]) == (played.total_s, list(played.in_flight))


def test_layers_of_stages() -> None:
    every = [(layers, stages) for layers in (1, 2, 5, 16, 32, 61, 126) for stages in range(1, layers + 1)]
    found = javascript("GIVEN.map(([layers, stages]) => stageLayers(layers, stages))", every)
    for (layers, stages), made in zip(every, found, strict=True):
        assert [(one["start"], one["end"]) for one in made] == [(r.start, r.stop) for r in stage_layers(layers, stages)]

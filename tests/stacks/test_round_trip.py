"""`--from` of what `--for` wrote is the same plan, for random layouts of each software."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.planner.search.bounds import families
from meshwright.planner.step.predict import build_estimator
from meshwright.spec import Plan, Recipe, presets
from meshwright.spec.errors import PlanError
from meshwright.stacks.config_files import file_texts
from meshwright.stacks.config_reading import read
from meshwright.stacks.trainer_table import SOFTWARE

MODELS = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-30b-a3b", "llama-3.1-70b")


def asked(model: str, nodes: int) -> Plan:
    recipe = Recipe(precision="bf16", sequence=4096, global_batch=64 * nodes)
    return Plan(model=presets.model(model), recipe=recipe, cluster=presets.cluster("h100x8", nodes))


def models_of(word: str) -> list[str]:
    """Those that the software has."""
    cases = []
    for name in MODELS:
        plan = asked(name, 1)
        trial = replace(plan, layout=replace(plan.layout, dp_replicate=8, micro_batch=1))
        with suppress(PlanError):
            SOFTWARE[word].facts(trial)
            cases.append(name)
    assert "llama-3.1-8b" in cases
    return cases


@pytest.mark.long
@pytest.mark.parametrize("word", SOFTWARE)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(data=st.data(), nodes=st.sampled_from((1, 2)))
def test_what_is_written_is_read_again(word: str, data: st.DataObject, nodes: int, tmp_path: Path) -> None:
    software, plan = SOFTWARE[word], asked(data.draw(st.sampled_from(models_of(word))), nodes)
    offered = list(families(build_estimator(plan, software.stack({})), plan, software.fixed()))
    if not offered:
        return
    least, family = data.draw(st.sampled_from(offered))
    region = data.draw(st.sampled_from(list(family.regions())))
    layout = region.layout(*data.draw(st.sampled_from(least.splits)))
    original = Plan(model=plan.model, recipe=plan.recipe, layout=layout, cluster=plan.cluster)
    assert software.refusal(plan.model, layout) == ""
    for name, text in file_texts(software, original).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    again = read(str(tmp_path), word)
    assert again.unknown == ()
    assert again.shape is not None
    assert again.plan(again.shape, plan.cluster, {}) == original
    if layout.tp == 1 or layout.sp:
        read_s, written_s = (
            build_estimator(plan, software.stack(facts)).predict(original).step_s for facts in (again.facts, {})
        )
        assert read_s == written_s


@pytest.mark.parametrize("word", SOFTWARE)
def test_each_file_alone_says_what_it_states(word: str, tmp_path: Path) -> None:
    """The first file that has batch and sequence is enough by itself, where a software has them in one file."""
    software, plan = SOFTWARE[word], asked("llama-3.1-8b", 1)
    offered = next(iter(families(build_estimator(plan, software.stack({})), plan, software.fixed())))
    layout = next(iter(offered[1].regions())).layout(*offered[0].splits[0])
    original = Plan(model=plan.model, recipe=plan.recipe, layout=layout, cluster=plan.cluster)
    for name, text in file_texts(software, original).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for file in software.files:
        if {"sequence", "micro_batch"} <= {option.fact for option in file.options} and len(software.files) == 1:
            again = read(str(tmp_path / file.name))
            assert again.shape is not None
            assert again.plan(again.shape, plan.cluster, {}) == original
        assert read(str(tmp_path / file.name), word).software is software


@pytest.mark.parametrize("word", SOFTWARE)
def test_every_option_has_a_meaning_and_a_name_of_its_own(word: str) -> None:
    for file in SOFTWARE[word].files:
        keys = [key for option in file.options for key in (option.key, *option.also)]
        assert len(keys) == len(set(keys))
        assert all(option.meaning for option in file.options)

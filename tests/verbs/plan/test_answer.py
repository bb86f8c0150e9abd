"""`mw.plan`: the command line's answer, its text and HTML, and its arguments."""

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright import planfile
from meshwright.interface.answers.answer import plain
from meshwright.interface.planning.layouts import PlannedLayout
from meshwright.interface.planning.plan_reading import base_words, read_plan, words_of
from meshwright.spec import Plan, presets
from meshwright.spec.errors import ArgumentError, IllegalLayout
from meshwright.verbs.commands import option_writer
from meshwright.verbs.main import main

RECIPE = {"global_batch": 64, "sequence": 4096}
WORDS = ["llama-3.2-1b", "--cluster", "h100x8", "--recipe", "global_batch=64,sequence=4096"]
FULL = {"dp_shard": 8, "dp_replicate": 1, "zero": 3, "tp": 1, "cp": 1, "pp": 1, "micro_batch": 1, "recompute": "full"}


@pytest.fixture(scope="module")
def answer() -> Any:
    return mw.plan("llama-3.2-1b", cluster="h100x8", recipe=RECIPE)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def same(document: Any, other: Any) -> bool:
    return bool(json.loads(json.dumps(plain(document))) == other)


def test_it_is_what_the_command_line_prints(answer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert same(answer.to_dict(), printed(capsys, *WORDS))


def test_layouts_recipes_and_budgets_are_given_as_words_or_as_a_mapping(capsys: pytest.CaptureFixture[str]) -> None:
    printed_document = printed(capsys, *WORDS, "--layout", "tp=2,zero=1", "--tokens", "300B", "--price", "2")
    ask: Any = mw.plan
    for layout in ("tp=2,zero=1", ["tp=2", "zero=1"], {"tp": 2, "zero": 1}):
        answer = ask("llama-3.2-1b", cluster="h100x8", recipe=RECIPE, layout=layout, tokens=300e9, price=2)
        assert same(answer.to_dict(), printed_document)
    words = ask("llama-3.2-1b", cluster="h100x8", recipe="global_batch=64, sequence=4096", layout=layout, tokens="300B")
    spaced = ask("llama-3.2-1b", cluster="h100x8", recipe="global_batch=64 sequence=4096", layout=layout, tokens="300B")
    assert spaced == words
    assert words.budget is not None and words.budget.steps == printed_document["budget"]["steps"]


def test_a_memory_budget_is_kept_by_recomputing_no_more_layers_than_it_takes() -> None:
    """The only layout of one rank: no recomputation with all memory, then more and more layers."""
    question: Any = {"cluster": "h100x1", "recipe": {"global_batch": 4, "sequence": 8192}}
    layout = "micro_batch=2"
    free = mw.plan("llama-3.2-1b", layout=layout, **question).best
    assert free.layout.recompute == "none"
    peaks, seconds = [], []
    for share in (0.95, 0.9, 0.85):
        gib = share * free.peak_bytes / 2**30
        best = mw.plan("llama-3.2-1b", layout=layout, memory=gib, **question).best
        assert best.peak_bytes <= 0.95 * gib * 2**30 and best.layout.recompute != "none"
        peaks.append(best.peak_bytes)
        seconds.append(best.step_seconds)
    assert peaks == sorted(peaks, reverse=True) and free.step_seconds <= seconds[0] <= seconds[1] <= seconds[2]
    for bad in (0, -1, 1000):
        with pytest.raises(mw.PlanError, match=r"memory=.* at most 78\.4"):
            mw.plan("llama-3.2-1b", memory=bad, **question)


def test_a_layout_of_an_answer_can_be_asked_about_again(answer: Any) -> None:
    for layout in (answer.best, answer.alternatives[3]):
        again = mw.plan(answer, layout=layout.layout)
        assert again.ranking.legal == 1 and again.best.layout == layout.layout
        assert again.best.step_seconds == layout.step_seconds and again.best.peak_bytes == layout.peak_bytes


def test_figures_are_those_of_the_document(answer: Any) -> None:
    document, best = answer.to_dict(), answer.best
    for name in ("step_seconds", "peak_bytes", "mfu_causal", "mfu_full", "bubble_fraction",
                 "tokens_per_second_per_device"):  # fmt: skip
        assert getattr(best, name) == document[name]
    assert best.memory == {part["kind"]: part["bytes"] for part in document["memory"]}
    assert best.time == {part["what"]: part["seconds"] for part in document["time"]}
    assert len(answer.rows()) == len(document["layouts"]) and answer.rows()[0]["layout"] == best.words
    assert {row["tight"] for row in answer.rows()} <= {True, False}


def test_an_answer_cannot_be_changed(answer: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        answer.tokens = 1.0
    with pytest.raises(FrozenInstanceError):
        answer.best.tokens = 1.0


def test_it_says_itself_in_one_line(answer: Any) -> None:
    for sentence in (repr(answer), repr(answer.best)):
        assert "\n" not in sentence and "MFU" in sentence and answer.best.words in sentence
    assert repr(answer).startswith("llama-3.2-1b on 1 x 8 H100")
    assert answer.outlook and all(answer.outlook)


def test_why_names_what_the_layout_has() -> None:
    answer = mw.plan("llama-3.1-8b", cluster="h100x8", nodes=4)
    assert answer.why and answer.why[0].startswith(("with zero=0 ", "with tp=1 ", "with recompute=none "))


def test_the_saved_plan_is_read_by_train(answer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, "--save", str(tmp_path / "cli.yaml"), "--tokens", "1B"]) == 0
    capsys.readouterr()
    asked = mw.plan("llama-3.2-1b", cluster="h100x8", recipe=RECIPE, tokens="1B")
    assert asked.save(tmp_path / "own.yaml") == tmp_path / "own.yaml"
    assert (tmp_path / "own.yaml").read_text() == (tmp_path / "cli.yaml").read_text()
    other = answer.alternatives[0].save(tmp_path / "other.yaml")
    assert planfile.read(other).layout == answer.alternatives[0].layout


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("llama-3.1-8", {"cluster": "h100x8"}, []),
        ("llama-3.1-8b", {}, []),
        ("llama-3.1-8b", {"cluster": "h10x8"}, []),
        ("llama-3.1-8b", {"cluster": "h100x8", "recipe": {"sequenc": 4}}, ["--recipe", "sequenc=4"]),
        ("llama-3.1-8b", {"cluster": "h100x8", "recipe": {"sequence": -4}}, ["--recipe", "sequence=-4"]),
        ("llama-3.1-8b", {"cluster": "h100x8", "layout": {"tpp": 2}}, ["--layout", "tpp=2"]),
        ("llama-3.1-8b", {"cluster": "h100x8", "layout": {"ep": 2}}, ["--layout", "ep=2"]),
        ("llama-3.1-8b", {"cluster": "h100x8", "nodes": 0}, ["--nodes", "0"]),
        ("llama-3.1-8b", {"cluster": "h100x8", "tokens": "many"}, ["--tokens", "many"]),
        ("llama-3.1-8b", {"cluster": "h100x8", "price": 2.0}, ["--price", "2"]),
        ("llama-3.1-405b", {"cluster": "h100x8"}, []),
    ],
)
@pytest.mark.long
def test_what_is_refused_is_refused_in_the_words_of_the_command_line(
    model: str, options: dict[str, Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(mw.MeshwrightError) as raised:
        mw.plan(model, **options)
    cluster = ["--cluster", options["cluster"]] if "cluster" in options else []
    assert main(["plan", model, *cluster, *words]) == raised.value.exit_code
    assert capsys.readouterr().err == f"meshwright: {raised.value.written(option_writer(['plan']))}\n"


def test_what_does_not_fit_comes_with_the_nearest_layout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(mw.DoesNotFit) as raised:
        mw.plan("llama-3.1-405b", cluster="h100x8")
    nearest = raised.value.answer
    assert isinstance(nearest, PlannedLayout) and nearest.peak_bytes > nearest.usable_bytes
    assert "Does not fit" in nearest._repr_html_()
    assert main(["plan", "llama-3.1-405b", "--cluster", "h100x8", "--json"]) == 3
    assert same(raised.value.document, json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("name", ["llama-tiny", "llama-3.1-8b", "deepseek-v3", "gpt2"])
def test_a_plan_is_the_same_plan_after_its_words(name: str) -> None:
    plan = Plan(model=presets.model(name))
    assert read_plan([plan], {})[0] == plan
    changed, _ = read_plan([plan], {"recipe": {"steps": 7}, "run": "runs/a"})
    assert changed.recipe.steps == 7 and changed.run == "runs/a" and changed.model == plan.model
    assert planfile.read(None, base_words(changed)) == changed


def test_keywords_are_keys_of_a_plan_file() -> None:
    assert words_of("recipe", {"steps": 5, "document_mask": False}) == ["recipe.steps=5", "recipe.document_mask=false"]
    assert words_of("cluster", {"device": {"name": "x"}}) == ["cluster.device.name=x"]
    plan, resume = read_plan(["recipe.steps=3", "resume=auto"], {"model": "llama-tiny", "layout": {"micro_batch": 2}})
    assert (plan.recipe.steps, resume, plan.layout.micro_batch) == (3, "auto", 2)
    with pytest.raises(mw.PlanError, match=r"recipe\.stepps is not known.*recipe\.steps"):
        read_plan([], {"recipe": {"stepps": 3}})
    with pytest.raises(mw.PlanError, match="two plans: give one"):
        read_plan([plan, plan], {})


def test_a_layout_of_several_ranks_is_sent_to_torchrun() -> None:
    with pytest.raises(IllegalLayout, match="torchrun --nproc_per_node 2"):
        mw.train(layout={"dp_shard": 2})


def test_a_length_brings_goodput_and_an_interval_of_saves(tmp_path: Path) -> None:
    """The same bill, longer by what fails; a worse device saves no less often; refusals come first."""
    answer = mw.plan("llama-3.2-1b", cluster="h100x8", tokens="1T", listed=1)
    weeks = answer.to_dict()["goodput"]
    assert weeks["wall_seconds"] == pytest.approx(sum(weeks["wall_seconds_by_part"].values()))
    assert (
        weeks["wall_seconds"]
        > answer.to_dict()["budget"]["days"] * 86_400
        == pytest.approx(weeks["wall_seconds_by_part"]["steps"], rel=1e-3)
    )
    assert "recipe.checkpoint_every=" in answer.weeks and "419 unexpected interruptions" in answer.weeks
    worse = mw.plan("llama-3.2-1b", cluster="h100x8", tokens="1T", listed=1, mtbf=100, spares=1).to_dict()["goodput"]
    assert worse["goodput"] < weeks["goodput"] and worse["spare_nodes"] == 1
    assert worse["checkpoint_every"] <= weeks["checkpoint_every"]
    # What is proposed is saved, unless the user has chosen.
    planned = mw.plan("llama-3.2-1b", cluster="h100x8", tokens="1T", listed=1, recipe={"checkpoint_every": 7})
    every = [planfile.read(each.save(tmp_path / "plan.yaml")).recipe.checkpoint_every for each in (answer, planned)]
    assert every == [weeks["checkpoint_every"], 7] and every[0] != 100
    with pytest.raises(ArgumentError, match="length of a run"):
        mw.plan("llama-3.2-1b", cluster="h100x8", mtbf=100)
    with pytest.raises(ArgumentError, match="lets no run end"):
        mw.plan(
            "llama-3.1-8b", cluster="h100x8", nodes=512, recipe={"global_batch": 4096}, tokens="1T", listed=1, mtbf=1
        )

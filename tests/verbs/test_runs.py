"""`mw.train`, `load`, `dry_run`, `profile`, `compare`, `report` of one small run, compared with the command line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.interface.answers.answer import plain
from meshwright.interface.trained.opening import dtype_on
from meshwright.spec.errors import ArgumentError, OutsideTolerance, RunError
from meshwright.verbs.main import main
from tests.interface.test_markup import parsed
from tests.verbs.toy import RECIPE, SHAPE, write_texts

MODEL = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "max_positions": 128}
STEPS = {"steps": 6, "warmup_steps": 2, "sequence": 32, "global_batch": 4, "eval_every": 3, "checkpoint_every": 3}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def run(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train without a dry run, which a busy machine would give up. The notebook has one."""
    data, folder = {"path": texts, "tokenizer": "bytes"}, tmp_path_factory.mktemp("runs") / "first"
    return mw.train(model=MODEL, data=data, recipe=STEPS, run=folder, watchers=(), dry_run=False)


def printed(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> Any:
    assert main([*words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def same(document: Any, other: Any) -> bool:
    return bool(json.loads(json.dumps(plain(document))) == other)


def test_training_answers_with_how_it_ended(run: Any) -> None:
    assert run.done and run.summary.step == 6
    assert [row["step"] for row in run.rows()] == [1, 2, 3, 4, 5, 6]
    assert run.loss == run.rows()[-1]["loss"] and run.evaluation_rows()[-1]["step"] == 6
    assert repr(run).startswith(f"{run.run}: step 6 of 6") and "bits per byte" in repr(run)
    assert parsed(run._repr_html_()).text.count("held out") == 1
    assert run.plan.model.layers == 2 and run.to_dict()["run"] == str(run.run)


def test_a_call_without_watchers_prints_a_line_a_step(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = {**STEPS, "steps": 2}
    run = mw.train(
        model=MODEL, data={"path": texts, "tokenizer": "bytes"}, recipe=recipe, run=tmp_path / "a", dry_run=False
    )
    printed = capsys.readouterr().out
    assert "step 1: loss" in printed and "step 2: held out" in printed
    further = mw.train(run, "recipe.steps=3", resume="auto", dry_run=False, watchers=())
    assert further.run == run.run and further.summary.step == 3
    with pytest.raises(RunError, match="resume=auto"):
        mw.train(run, dry_run=False, watchers=())


def test_a_run_that_was_terminated_says_so(run: Any) -> None:
    run.check()
    ended = replace(run, summary=replace(run.summary, stopped="terminated", step=4))
    message = 'stopped by SIGTERM after step 4 of 6 and saved; resume="auto" continues'
    assert not ended.done and message in repr(ended)
    with pytest.raises(RunError, match=message):
        ended.check()


def test_a_trained_model_says_what_generate_says(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = mw.load(run)
    assert "fp32 on cpu" in repr(model) and str(run.run) in repr(model)
    options = ["--max-new-tokens", "8", "--seed", "3"]
    printed_document = printed(capsys, "generate", str(run.run), "--prompt", "def f", *options)
    answer = model.generate("def f", max_new_tokens=8, seed=3)
    assert list(answer.ids) == printed_document["ids"] and answer.text == printed_document["text"]
    assert str(answer) == "def f" + printed_document["text"]
    assert "def f" in parsed(answer._repr_html_()).text
    by_ids = model.generate(answer.prompt_ids, max_new_tokens=8, seed=3)
    assert by_ids.ids == answer.ids and by_ids.logprobs == answer.logprobs
    with pytest.raises(mw.PlanError, match="must be 0 or more"):
        model.generate("x", max_new_tokens=-1)


def test_weights_are_in_fp32_on_a_cpu_and_as_stored_on_a_gpu(run: Any, tmp_path: Path) -> None:
    assert main(["export", str(run.run), str(tmp_path / "hf"), "--dtype", "bf16"]) == 0
    assert {parameter.dtype for parameter in mw.load(tmp_path / "hf", None).model.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in mw.load(tmp_path / "hf").model.parameters()} == {torch.float32}
    assert (dtype_on(torch.device("cuda")), dtype_on(torch.device("cpu"))) == (None, "fp32")
    with pytest.raises(ArgumentError, match="dtype='fp8' is not known: take one of auto, fp32"):
        mw.load(tmp_path / "hf", "fp8")


def test_many_prompts_are_answered_at_once(run: Any) -> None:
    model, prompts = mw.load(run), ["def f", [65, 66], "class"]
    generated = model.generate_many(prompts, mw.RequestOptions(max_new_tokens=8), engine=mw.EngineOptions(exact=True))
    right = [model.generate(prompt, max_new_tokens=8, temperature=0.0) for prompt in prompts]
    assert [(made.prompt, made.prompt_ids, made.ids, made.text) for made in generated] == [
        (made.prompt, made.prompt_ids, made.ids, made.text) for made in right
    ]
    spelled = {"max_new_tokens": 8, "logit_bias": {ord("x"): 1000.0}}
    options = [mw.RequestOptions(**spelled, stop=("xxx",)), mw.RequestOptions(**spelled, n=2)]
    cut, *twice = model.generate_many(prompts[:2], options)
    assert (cut.text, cut.ids) == ("", (ord("x"),) * 3) and [answer.text for answer in twice] == ["x" * 8] * 2
    with pytest.raises(mw.PlanError, match="options has 1 entries for 3 prompts"):
        model.generate_many(prompts, options[:1])


def test_a_trained_model_is_scored_as_eval_scores_it(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    printed_document, score = printed(capsys, "eval", str(run.run)), run.load(None).evaluate()
    assert (score.loss, score.tokens) == (printed_document["loss"], printed_document["tokens"])


def test_a_folder_that_is_none_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError) as raised:
        mw.load(tmp_path / "none")
    assert main(["generate", str(tmp_path / "none"), "--prompt", "x"]) == 2
    assert capsys.readouterr().err == f"meshwright: {raised.value}\n"


def test_a_dry_run_is_what_the_command_line_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """On two ranks, for a named device, so no figure depends on this machine."""
    layout = ["layout.pp=2", "layout.micro_batch=1", "cluster=a100x2"]
    printed_document = printed(capsys, "dryrun", *SHAPE, *RECIPE, *layout)
    answer = mw.dry_run(*layout, model=MODEL, recipe={**STEPS, "steps": 12, "eval_every": 5, "checkpoint_every": 5})
    document = json.loads(json.dumps(plain(answer.to_dict())))
    for rank in (*printed_document["ranks"], *document["ranks"]):
        del rank["cost"]  # seconds of the dry run itself
    assert document == printed_document
    assert answer.fits is True and answer.peak_bytes == printed_document["peak_bytes"]
    answer.check()
    assert {row["rank"] for row in answer.rows()} == {0, 1} == {row["rank"] for row in answer.traffic_rows()}
    assert "fits" in repr(answer) and "Fits" in parsed(answer._repr_html_()).text


def test_a_dry_run_that_does_not_fit_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["cluster.device.name=thimble", "cluster.device.memory_bytes=700000000"]
    answer = mw.dry_run(*SHAPE, *tiny, *RECIPE, "model.vocab=200000", device="cuda")
    assert answer.fits is False and "Does not fit" in answer._repr_html_()
    with pytest.raises(mw.DoesNotFit) as raised:
        answer.check()
    assert main(["dryrun", *SHAPE, *tiny, *RECIPE, "model.vocab=200000", "--device", "cuda"]) == 3
    assert capsys.readouterr().err == f"meshwright: {raised.value}\n"


@pytest.mark.long
def test_a_profile_is_kept_and_compared(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    answer = mw.profile(run, steps=1)
    saved = json.loads((run.run / "profile.json").read_text())
    assert answer.run == run.run and same(answer.to_dict(), saved)
    assert answer.rows()[0]["peak_bytes"] == answer.peak_bytes and answer.operation_rows()
    assert "per step" in repr(answer) and "per step" in parsed(answer._repr_html_()).text

    mw.compare(answer, tolerance=1e9)  # makes the dry run, and keeps it
    assert (run.run / "dryrun.json").is_file()
    table = mw.compare(answer, tolerance=1e9)
    assert same(table.to_dict(), printed(capsys, "compare", str(run.run), "--tolerance", "1e9"))
    assert table.agrees is True and len(table.rows()) == len(table.to_dict()["rows"])
    table.check()
    assert "Agrees" in parsed(table._repr_html_()).text
    strict = run.compare(tolerance=0.0)
    assert strict.agrees is False and strict.disagreeing and "Disagrees" in strict._repr_html_()
    with pytest.raises(OutsideTolerance) as raised:
        strict.check()
    assert main(["compare", str(run.run), "--tolerance", "0"]) == 4
    assert capsys.readouterr().err == f"meshwright: {raised.value}\n"

    page = mw.report(run)
    assert page == run.run / "report.html" and "<html" in page.read_text()


def test_what_cannot_be_profiled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(mw.PlanError, match="steps=0 must"):
        mw.profile(model=MODEL, steps=0, run=tmp_path / "x")

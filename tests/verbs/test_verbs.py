"""Train, generate, eval and quickstart from the command line, at toy size."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from meshwright.data import Tokenizer
from meshwright.data.tokens.text_stream import TextStream
from meshwright.interface.planning.plan_reading import sort_words
from meshwright.interface.process.environment import fix_cublas_workspace
from meshwright.interface.process.launch import command
from meshwright.interface.terminal.screen_text import printable
from meshwright.spec import Plan, Recipe, presets
from meshwright.spec.errors import PlanError
from meshwright.verbs.generate import command as generate
from meshwright.verbs.main import main
from meshwright.verbs.quickstart import command as quickstart
from meshwright.verbs.train.start import again
from tests.verbs import toy
from tests.verbs.toy import call, refused


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def run(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    assert main(toy.train(texts, folder)) == 0
    return folder


@pytest.fixture(scope="module")
def hf(run: Path) -> Path:
    """Its export."""
    folder = run.parent / "hf"
    assert main(["export", str(run), str(folder)]) == 0
    return folder


def test_train_prints_the_batch_equation_and_a_line_a_step(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, *toy.train(texts, tmp_path / "r", "layout.micro_batch=2"))
    assert code == 0 and not err
    assert "global batch 4 sequences = micro-batch 2 x accumulation 2 x dp 1: 128 tokens a step" in out
    assert sum("| loss" in line for line in out.splitlines()) == 12
    assert out.splitlines()[-1].startswith("trained 12 of 12 steps")
    assert "\x1b" not in out
    left = {path.name for path in (tmp_path / "r").iterdir()}
    assert {"plan.yaml", "metrics.jsonl", "loss.png", "checkpoints", "tokenizer.json"} <= left


def test_train_json_is_one_document_with_the_summary(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, *toy.train(texts, tmp_path / "r", "recipe.steps=3"), "--json")
    summary = json.loads(out)
    assert code == 0 and not err
    assert (summary["step"], summary["steps"], summary["stopped"]) == (3, 3, "done")
    assert summary["tokens"] == 3 * 4 * 32 and summary["bits_per_byte"] > 0
    assert Path(summary["checkpoint"]).is_dir()


def test_the_rate_of_a_resumed_run_is_that_of_its_own_steps(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = toy.train(texts, tmp_path / "r", "recipe.checkpoint_every=2")
    assert call(capsys, *words, "recipe.steps=4")[0] == 0
    code, out, _ = call(capsys, *words, "recipe.steps=6", "resume=auto")
    assert code == 0 and "trained 6 of 6 steps, 2 steps now, 256 tokens in" in out
    code, out, _ = call(capsys, *words, "recipe.steps=9", "resume=auto", "--json")
    summary = json.loads(out)
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    seconds = {row["step"]: row["step_seconds"] for row in rows if "step_seconds" in row}
    assert (summary["step"], summary["process_steps"], summary["process_tokens"]) == (9, 3, 3 * 4 * 32)
    assert summary["process_seconds"] == pytest.approx(sum(seconds[step] for step in (7, 8, 9)))
    assert summary["tokens_per_second"] == pytest.approx(3 * 4 * 32 / summary["process_seconds"])


def test_a_plan_file_with_changes_and_resume_auto_goes_on(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = tmp_path / "plan.yaml"
    code, out, _ = call(capsys, "init")
    plan.write_text(out)
    words = ["train", "plan.yaml", *toy.train(texts, tmp_path / "r")[1:]]
    assert call(capsys, *words, "recipe.steps=4", "resume=auto")[0] == 0, "auto is no error where there is no run"
    code, out, _ = call(capsys, *words, "recipe.steps=6", "resume=auto")
    assert code == 0
    assert "continued after step 4: steps 5 to 6" in out and "step 5/6" in out and "step 4/6" not in out
    steps = [json.loads(line)["step"] for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [1, 2, 3, 4, 5, 6]


def test_generate_gives_ids_logprobs_and_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("generate", run, "--prompt", "def f", "--max-new-tokens", "6", "--greedy", "--json")
    code, out, err = call(capsys, *words)
    document = json.loads(out)
    tokenizer = Tokenizer.load(run)
    assert code == 0 and not err
    assert list(document) == ["prompt_ids", "ids", "logprobs", "text"]
    assert document["prompt_ids"] == tokenizer.encode("def f").tolist()
    assert len(document["ids"]) == len(document["logprobs"]) == 6
    assert all(value < 0 for value in document["logprobs"])
    assert document["text"] == tokenizer.decode(document["ids"])
    assert json.loads(call(capsys, *words)[1]) == document


def test_the_prompt_is_printed_with_the_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    """A warning while the model starts, as of a compiler, does not join the prompt's line."""
    tokenizer = SimpleNamespace(bos=None, decode=lambda ids: "".join(map(chr, ids)), texts=None)
    opened: Any = SimpleNamespace(tokenizer=tokenizer, stop_ids={0}, model=SimpleNamespace(max_positions=None))

    def answer(on_token: Any) -> None:
        print("compiling")
        for token in (98, 99, 0):
            on_token(token)

    with patch("meshwright.model.generate.check_prompt"):
        generate.stream_answer(opened, [97], answer)
        assert capsys.readouterr().out == "compiling\nabc\n"
        generate.stream_answer(opened, [97], lambda on_token: None)
    assert capsys.readouterr().out == "a\n"


def test_logprobs_are_those_of_the_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One plain forward pass over prompt and answer, without a cache, gives the same log-probabilities."""
    from meshwright.interface.trained.opening import load

    words = ("--prompt-ids", "5,6,7", "--max-new-tokens", "5", "--temperature", "1.5", "--seed", "3", "--json")
    document = json.loads(call(capsys, "generate", run, *words)[1])
    model = load(run, "fp32").model
    ids = torch.tensor([[5, 6, 7, *document["ids"]]])
    with torch.no_grad():
        expected = model(ids).log_softmax(-1)[0, 2:-1].gather(1, ids[0, 3:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(document["logprobs"]), expected, rtol=1e-4, atol=1e-4)


def test_a_run_its_checkpoint_and_its_export_answer_alike(
    run: Path, hf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--prompt-ids", "1,2,3", "--max-new-tokens", "5", "--greedy", "--json")
    answers = [call(capsys, "generate", source, *words)[1] for source in (run, run / "checkpoints" / "step-000012", hf)]
    assert answers[0] == answers[1] == answers[2] != ""


def test_a_prompt_that_the_model_does_not_know_is_refused_before_it_is_shown(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(run), "--prompt-ids", "1,99999"]) == 2
    printed = capsys.readouterr()
    assert not printed.out and "prompt token 99999 is outside" in printed.err


def test_the_seed_decides_what_is_sampled(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sampled(seed: str) -> str:
        return call(capsys, "generate", run, "--prompt", "x", "--temperature", "2", "--seed", seed, "--json")[1]

    assert sampled("1") == sampled("1") != sampled("2")


def test_text_for_people_is_the_prompt_and_what_the_document_says(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("generate", run, "--prompt", "def f", "--max-new-tokens", "9", "--seed", "1")
    document = json.loads(call(capsys, *words, "--json")[1])
    assert call(capsys, *words)[1] == "def f" + document["text"] + "\n"


def test_an_empty_prompt_begins_a_document(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(call(capsys, "generate", run, "--prompt", "", "--max-new-tokens", "1", "--json")[1])
    assert document["prompt_ids"] == [Tokenizer.load(run).bos]


def test_a_run_without_its_tokenizer_or_with_another_is_refused(
    run: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such runs once generated from bytes, silently."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    (copy / "tokenizer.json").unlink()
    verbs = (("eval", copy), ("generate", copy, "--prompt", "x"), ("export", copy, tmp_path / "out"))
    for words in verbs:
        assert "has lost its tokenizer.json" in refused(capsys, *words)
    assert "has lost its tokenizer.json, and data.tokenizer" in refused(
        capsys, *toy.train(texts, copy, "resume=auto", "data.tokenizer=bytes")
    )
    assert call(capsys, *toy.train(texts, copy, "resume=auto"))[0] == 0, "from the same text it is made anew"
    assert (copy / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    Tokenizer.bytes().save(copy)
    for words in verbs:
        assert "is not the tokenizer that step-000012 was trained with" in refused(capsys, *words)


def test_eval_repeats_the_figures_of_training(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "eval", run, "--json")
    document = json.loads(out)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row.get("kind") == "eval"][-1]
    assert code == 0 and not err
    assert set(document) == {"loss", "perplexity", "bits_per_byte", "tokens", "seconds"}
    assert document["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert document["bits_per_byte"] == pytest.approx(last["bits_per_byte"], rel=1e-5)


def test_eval_of_a_run_and_its_export_on_a_text_agree(
    run: Path, hf: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = (
        json.loads(call(capsys, "eval", source, "--data", texts / "a.py", "--json")[1]) for source in (run, hf)
    )
    assert theirs["bits_per_byte"] == pytest.approx(ours["bits_per_byte"], rel=1e-2), "windows of another length"
    few = json.loads(call(capsys, "eval", run, "--data", texts / "a.py", "--sequences", "3", "--json")[1])
    assert 0 < few["tokens"] <= 3 * 32 < ours["tokens"]
    assert "bits per byte" in call(capsys, "eval", run)[1]
    refused(capsys, "--data none.txt does not exist", "eval", run, "--data", "none.txt")


@pytest.mark.parametrize(
    ("words", "another"),
    [
        (["report", "{run}", "-o", "{place}.html"], "another --out"),
        (["export", "{run}", "{place}"], "another OUT"),
        (["import", "{hf}", "{place}"], "another RUN"),
        (["plan", "llama-tiny", "--cluster", "h100", "--save", "{place}.yaml"], "another file (--save)"),
    ],
)
def test_a_place_that_cannot_be_written_is_named_with_its_option(
    words: list[str], another: str, run: Path, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    code, _, err = call(capsys, *(word.format(run=run, hf=hf, place=tmp_path / "x") for word in words))
    assert code == 2 and "no space left on device" in err.lower() and err.count("\n") == 1
    assert str(tmp_path / "x") in err and err.rstrip().endswith(another)
    assert not list(tmp_path.iterdir())


def test_data_show_names_the_texts(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "data", "show", f"data={texts}", "recipe.sequence=16", "--json")
    assert code == 0 and isinstance(json.loads(out), dict)


def test_quickstart_leaves_everything_and_its_three_commands_work(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "SAMPLE_TOKENS", 8)
    words = [f"data={texts}", *toy.SHAPE, *toy.RECIPE, "recipe.steps=2"]
    code, out, err = call(capsys, "quickstart", *words)
    assert code == 0 and not err
    assert out.index("Before training") < out.index("global batch 4 sequences") < out.index("After training")
    assert "bits per byte on held-out text" in out
    run = tmp_path / "runs" / "quickstart"
    assert {"plan.yaml", "metrics.jsonl", "loss.png", "checkpoints", "hf"} <= {path.name for path in run.iterdir()}
    assert (run / "hf" / "model.safetensors").is_file()
    assert "Memory: planned " in out and " of tensors (the process: " in out
    proposed = [line.strip().partition("  # ")[0] for line in out.partition("\nNext\n")[2].splitlines() if line]
    assert len(proposed) == 3
    for line in proposed:
        words = shlex.split(line)
        verb = words[max(words.index(word) for word in words if word in ("generate", "train", "report")) :]
        assert call(capsys, *verb)[0] == 0, line


def test_quickstart_takes_the_next_free_folder_and_prints_one_document(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "SAMPLE_TOKENS", 4)
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    words = [f"data={texts}", *toy.SHAPE, *toy.RECIPE, "recipe.steps=1", "recipe.warmup_steps=0"]
    code, out, err = call(capsys, "quickstart", *words, "--json")
    document = json.loads(out)
    assert code == 0 and not err
    assert document["run"] == "runs/quickstart-2" and document["bits_per_byte"] > 0
    [held_out] = [path.read_text() for path in texts.iterdir() if document["before"].split()[0] in path.read_text()][:1]
    for sample in (document["before"], document["after"]):
        assert " ".join(sample.split()[:1]) in held_out


def test_a_prompt_belongs_to_the_text(texts: Path, tmp_path: Path) -> None:
    from meshwright.data import prepare
    from meshwright.spec import Data

    code, prose = tmp_path / "a.py", tmp_path / "a.txt"
    code.write_text("X = {1: 2}\n\n\nclass Reader(Base):\n    pass\n" * 40)
    prose.write_text("To be, or not to be.\n" * 400)
    assert quickstart.first_words(prepare(Data(path=str(code)))) == "class Reader(Base):"
    words = quickstart.first_words(prepare(Data(path=str(prose))))
    assert len(words.split()) == 3 and words in " ".join(prose.read_text().split())


def test_the_plan_of_quickstart_is_legal_and_small() -> None:
    from meshwright import planfile
    from meshwright.spec import num_parameters

    plan = planfile.read(quickstart.PLAN)
    plan.check()
    assert plan.data.path == "stdlib" and quickstart.RUN == "runs/quickstart"
    assert num_parameters(plan.model) < 5_000_000


def test_words_are_sorted_whatever_their_order() -> None:
    path, overrides, resume = sort_words(["recipe.steps=3", "resume=auto", "p.yaml", "data=./x=y"])
    assert (path, overrides, resume) == (Path("p.yaml"), ["recipe.steps=3", "data=./x=y"], "auto")
    assert sort_words([]) == (None, [], "no")
    with pytest.raises(PlanError, match="two plan files"):
        sort_words(["a.yaml", "b.yaml"])
    with pytest.raises(PlanError, match="resume"):
        sort_words(["resume="])


@pytest.mark.parametrize("text", ["x = 'caf\u00e9 \u4f60\u597d \U0001f600'\n", "a\tb\n\n", ""])
def test_streamed_pieces_join_to_the_whole_text(text: str) -> None:
    tokenizer = Tokenizer.bytes()
    ids = tokenizer.encode(text).tolist()
    stream = TextStream(tokenizer.decode, tokenizer.encode("def ").tolist())
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.rest() == text
    assert not any("\ufffd" in piece for piece in pieces), "half a character is never shown"


def test_an_unfinished_character_comes_at_the_end() -> None:
    tokenizer = Tokenizer.bytes()
    stream = TextStream(tokenizer.decode)
    half = tokenizer.encode("\u00e9").tolist()[:1]
    assert stream.push(half[0]) == "" and stream.rest() == "\ufffd"


def test_samples_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2J\x07\r\tb\n\u4f60") == "a\ufffd[2J\ufffd\ufffd\tb\n\u4f60"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Make an environment below the current folder, with a meshwright in it."""
    script = tmp_path / ".venv" / "bin" / "meshwright"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    yield script


def test_a_proposed_command_finds_this_very_program(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert command(["generate", "my run"]) == ".venv/bin/meshwright generate 'my run'"
    monkeypatch.setenv("PATH", str(program.parent))
    assert command(["init"]) == "meshwright init"
    monkeypatch.setattr(sys, "argv", ["/x/meshwright/__main__.py"])
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    assert command(["init"]) == ".venv/bin/python -m meshwright init"


def test_a_run_on_many_processes_goes_on_with_as_many(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["plan.yaml", "run=my run", "resume=no"]
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setenv("WORLD_SIZE", "4")
    tail = "-m meshwright train plan.yaml 'run=my run' resume=auto"
    assert again("train", words, "my run") == f".venv/bin/python -m torch.distributed.run --nproc_per_node 4 {tail}"
    program.with_name("torchrun").write_text("")
    assert again("train", words, "my run") == f".venv/bin/torchrun --nproc_per_node 4 {tail}"
    program.with_name("torchrun").chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "node1")
    meeting = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node1:29500"
    assert again("train", words, "my run") == f"torchrun {meeting} --nproc_per_node 2 {tail}"
    tail = "-m meshwright train plan.yaml --elastic 2:3 'run=my run' resume=auto"
    elastic = again("train", [*words, "--elastic", "2:3"], "my run")
    assert elastic == f"torchrun {meeting.replace('2', '2:3', 1)} --nproc_per_node 2 {tail}"


@pytest.mark.parametrize(
    ("environment", "expected"), [({}, ":4096:8"), ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, ":16:8")]
)
def test_a_deterministic_plan_sets_what_cublas_needs(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(os, "environ", dict(environment))
    plan = Plan(model=presets.model("llama-tiny"))
    fix_cublas_workspace(plan)
    assert os.environ == environment
    fix_cublas_workspace(replace(plan, recipe=Recipe(deterministic=True)))
    assert os.environ == {"CUBLAS_WORKSPACE_CONFIG": expected}

"""Which checkpoint of a run is taken: the last, the best by held-out loss, or that of a step; by every verb that reads
a model."""

import json
from pathlib import Path

import pytest
import torch

from meshwright.interface.trained.opening import load
from meshwright.spec.errors import ArgumentError, CheckpointError
from meshwright.store import checkpoint
from meshwright.store.model_weights import locate
from meshwright.training import loop
from meshwright.verbs.main import main
from tests.training.running import Notes
from tests.training.test_tuning import files as files  # a folder with a model and conversations
from tests.training.test_tuning import plan

WORDS = ["recipe.eval_every=4", "recipe.checkpoint_every=2", "recipe.keep_last=1", "data.validation=0.3"]


@pytest.fixture
def run(files: Path) -> Path:
    """A run that gets worse: its best checkpoint is an earlier one, and is kept beside the last."""
    watcher = Notes()
    loop.run(plan(files, *WORDS, "recipe.steps=8", "recipe.learning_rate=0.05"), watchers=[watcher])
    worse = plan(files, *WORDS, "recipe.steps=12", "recipe.learning_rate=10")
    loop.run(worse, resume="auto", watchers=[watcher])
    scores = {evaluation.step: evaluation.loss for evaluation in watcher.evaluations}
    best = min(scores, key=lambda step: (scores[step], step))
    stored = {saved.step: saved.score for saved in checkpoint.list_checkpoints(files / "run" / "checkpoints")}
    assert stored == {best: scores[best], 12: scores[12]}, "step 10 was not evaluated, and is no best"
    assert best == 8, "else this shows nothing"
    return files / "run"


def test_the_best_is_kept_and_taken(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = checkpoint.find_best(run / "checkpoints")
    assert best is not None and locate(run, "best")[1] == best != locate(run)[1] == locate(run, "12")[1]
    assert main(["export", str(run), str(tmp_path / "out"), "--checkpoint", "best", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"] == str(best)
    loaded, other = load(run, checkpoint="best"), load(tmp_path / "out")
    last = load(run)
    for (name, a), b, c in zip(
        loaded.model.state_dict().items(),
        other.model.state_dict().values(),
        last.model.state_dict().values(),
        strict=True,
    ):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c) or not a.is_floating_point(), name
    assert main(["eval", str(run), "--checkpoint", "best", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["loss"]
    assert document < last.evaluate().loss and document == pytest.approx(loaded.evaluate().loss)
    message = ["--prompt-ids", "5,6", "--greedy", "--max-new-tokens", "5", "--json"]
    answers = []
    for which in ("best", best.name.removeprefix("step-"), "last"):
        assert main(["generate", str(run), *message, "--checkpoint", which]) == 0
        answers.append(json.loads(capsys.readouterr().out)["logprobs"])
    assert answers[0] == answers[1] != answers[2]


def test_before_and_after_of_one_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--checkpoint", "best", "--against", str(run)]) == 0
    assert capsys.readouterr().out.startswith("BETTER  1 of 1 figure better")


def test_what_is_not_there_is_refused(files: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match=r"has no checkpoint of that step, it has: .*12"):
        locate(run, "7")
    with pytest.raises(ArgumentError, match="checkpoint='newest' is not known: take last, best"):
        locate(run, "newest")
    with pytest.raises(ArgumentError, match="is a checkpoint already"):
        locate(run / "checkpoints" / "step-000012", "best")
    with pytest.raises(ArgumentError, match="a Hugging Face directory, which has none"):
        load(files / "hf", checkpoint="best")
    assert main(["generate", str(run), "--prompt", "x", "--checkpoint", "first"]) == 2
    assert "--checkpoint first is not known" in capsys.readouterr().err
    loop.run(plan(files, "data.validation=0", "recipe.steps=1", f"run={files / 'blind'}"))
    with pytest.raises(CheckpointError, match="has a held-out loss: take checkpoint='last'"):
        locate(files / "blind", "best")

"""Missing model folders: every verb prints the same error, which suggests the hub for names of the hub only."""

from pathlib import Path

import pytest

from meshwright.spec.hub_names import download_hint, looks_like_hub_name
from meshwright.verbs.main import main

PATH = "runs/nope"
KINDS = "give a run folder, one of its checkpoints, a Hugging Face directory, or a .gguf file"
VERBS = {
    "generate runs/nope": f"{PATH} does not exist: {KINDS}",
    "generate runs/nope --prompt x": f"{PATH} does not exist: {KINDS}",
    "eval runs/nope": f"{PATH} does not exist: {KINDS}",
    "serve runs/nope": f"{PATH} does not exist: {KINDS}",
    "chat runs/nope": f"{PATH} does not exist: {KINDS}",
    "quantize runs/nope --scheme int8 -o small": f"{PATH} does not exist: {KINDS}",
    "tune model=runs/nope data=chat.jsonl": f"model={PATH} does not exist: give a preset, a run folder, or a",
    "train model=runs/nope": f"model={PATH} does not exist: give a preset, a run folder, or a Hugging Face directory",
    "plan runs/nope --cluster h100x8": f"MODEL {PATH} does not exist: give a preset, a run folder, or a",
    "tune runs/nope": f"{PATH} does not exist: give a plan file, or a model as model=FOLDER",
    "dryrun runs/nope": f"{PATH} does not exist: give a plan file, or a model as model=FOLDER",
    "compare runs/nope": f"{PATH} does not exist: give a run folder, which run= named",
    "report runs/nope": f"{PATH} does not exist: give a run folder, which run= named",
    "export runs/nope out": f"{PATH} does not exist: give a run folder, which run= named",
    "import runs/nope": f"{PATH} does not exist: give a Hugging Face directory with config.json and *.safetensors",
}


@pytest.mark.parametrize("command", VERBS)
def test_a_folder_that_is_not_there_is_said_alike(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "nose").mkdir(parents=True)
    assert main(command.split()) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"meshwright: {VERBS[command]}") and errors.endswith("; nearest: runs/nose\n")
    assert "hf download" not in errors


def test_folders_beside_a_missing_one_are_named_and_not_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("alpha", "beta", "gamma", "omega"):
        (tmp_path / "mine" / name).mkdir(parents=True)
    main(["eval", "mine/0"])
    assert capsys.readouterr().err.endswith("file; mine holds alpha, beta, gamma and 1 more\n")


def test_a_name_of_the_hub_is_told_from_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work" / "first").mkdir(parents=True)
    (tmp_path / "google" / "gemma").mkdir(parents=True)
    (tmp_path / "google" / "gemma" / "config.json").write_text("{}")
    assert all(map(looks_like_hub_name, ("acme/tiny", "google/gemma-3-4b-pt", "meta-llama/Llama-3.1-8B")))
    (tmp_path / "acme").mkdir()
    assert looks_like_hub_name("acme/tiny"), "a folder of the owner's name hides no model of the hub"
    assert not any(map(looks_like_hub_name, ("runs/mine", "outputs/last", "a/b/c", "./a", "mine.yaml")))
    assert not download_hint("work/second") and download_hint("google/gemma-3-4b-pt")

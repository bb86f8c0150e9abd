"""`tune` in a named format, from a base model's folder to an answer that ends: the template and the end of a turn go
with the run, with its export, and with whoever reads them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import meshwright as mw
from meshwright import planfile
from meshwright.data import Tokenizer
from meshwright.data.chat.rendering import named_template
from meshwright.formats.hub.config import GENERATION, TEMPLATE, read_json
from meshwright.interface.planning.plan_reading import read_folder
from meshwright.store.run_folder import RunFolder
from meshwright.training.step.state import keep_extra_files
from meshwright.verbs.main import main
from tests.data.tokenizers_for_tests import with_added
from tests.training.test_tuning import conversations
from tests.training.test_weights import SHAPES, directory

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
PLAIN = Tokenizer.shipped()


def base(folder: Path, *tokens: str) -> Path:
    """Write a model without a chat template, whose vocabulary has the tokens."""
    text = PLAIN.json
    for token in tokens:
        text = with_added(text, token, special=True)
    end = PLAIN.spelled["eos_token"]
    directory(folder, replace(SHAPES["llama"], vocab=2176), Tokenizer(text, bos=end, eos=end))
    (folder / TEMPLATE).unlink()
    config = read_json(folder / "tokenizer_config.json") or {}
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    base(tmp_path / "hf", IM_START, IM_END)
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, conversations(24))), encoding="utf-8")
    return tmp_path


def words(*more: str) -> list[str]:
    words = ["model=./hf", "data=chat.jsonl", "run=run", "recipe.sequence=64", "recipe.global_batch=4"]
    return [*words, "recipe.steps=2", *more, "--no-dry-run"]


def ends(folder: Path) -> list[int]:
    end_ids: list[int] = (read_json(folder / GENERATION) or {})["eos_token_id"]
    return end_ids


def test_the_template_and_its_end_go_with_the_run_and_its_export(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *words("data.template=chatml")]) == 0
    assert main(["export", "run", "out"]) == 0
    tokenizer = Tokenizer.load(files / "hf")
    [end] = tokenizer.encode(IM_END, special=True).tolist()
    assert "plain template" not in "".join(capsys.readouterr())
    for folder in (files / "run", files / "out"):
        assert (folder / TEMPLATE).read_text(encoding="utf-8") == named_template("chatml")
        assert ends(folder) == [tokenizer.eos, end]
        assert mw.load(str(folder)).stop_ids == (tokenizer.eos, end)
    assert RunFolder.open(files / "run").end_ids() == (tokenizer.eos, end)
    asked = ["--chat", "--prompt", "say 3", "--max-new-tokens", "4", "--greedy"]
    assert main(["generate", "out", *asked]) == 0
    assert capsys.readouterr().out.startswith(f"{IM_START}user\nsay 3{IM_END}\n{IM_START}assistant\n")

    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(files / "out")
    ids = theirs.apply_chat_template([{"role": "user", "content": "say 3"}], add_generation_prompt=True)["input_ids"]
    assert ids == mw.load(str(files / "run")).encode_chat("say 3")
    assert transformers.GenerationConfig.from_pretrained(files / "out").eos_token_id == [tokenizer.eos, end]


def test_an_adapter_alone_takes_the_template_and_its_end_along(files: Path) -> None:
    """The base's folder has neither. transformers and Meshwright read them beside the adapter."""
    assert main(["tune", *words("data.template=chatml", "model.lora={rank: 4}")]) == 0
    assert main(["export", "run", "adapter", "--adapter"]) == 0
    tokenizer = Tokenizer.load(files / "hf")
    [end] = tokenizer.encode(IM_END, special=True).tolist()
    assert (files / "adapter" / TEMPLATE).read_text(encoding="utf-8") == named_template("chatml")
    assert ends(files / "adapter") == [tokenizer.eos, end]
    read = mw.load("adapter")
    assert read.stop_ids == (tokenizer.eos, end)
    assert read.encode_chat("say 3") == mw.load("run").encode_chat("say 3")

    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(files / "adapter")
    ids = theirs.apply_chat_template([{"role": "user", "content": "say 3"}], add_generation_prompt=True)["input_ids"]
    assert ids == read.encode_chat("say 3")


def generation_of(files: Path, source: str | None, *more: str) -> dict[str, object]:
    """Return the generation config of a run that starts from the folder, with a template."""
    tokenizer = Tokenizer.load(files / "hf")
    words = ["model=./hf", "data=chat.jsonl", *more]
    (files / "run").mkdir()
    keep_extra_files(
        planfile.read(None, words, read_folder=read_folder),
        files / "run",
        tokenizer if source is None else tokenizer.with_template(source),
    )
    return read_json(files / "run" / GENERATION) or {}


def end_of(files: Path) -> int:
    [end] = Tokenizer.load(files / "hf").encode(IM_END, special=True).tolist()
    return int(end)


SAMPLES = "data.form=samples"


def test_what_a_generation_config_says_stays(files: Path) -> None:
    config = {"bos_token_id": 0, "eos_token_id": 5, "temperature": 0.6, "do_sample": True}
    (files / "hf" / GENERATION).write_text(json.dumps(config), encoding="utf-8")
    assert generation_of(files, named_template("chatml"), SAMPLES) == config | {"eos_token_id": [5, end_of(files)]}


def test_ids_of_a_config_stay_where_no_generation_config_is(files: Path) -> None:
    (files / "hf" / GENERATION).unlink()
    config = read_json(files / "hf" / "config.json") or {}
    (files / "hf" / "config.json").write_text(json.dumps(config | {"eos_token_id": [3, 4]}), encoding="utf-8")
    assert generation_of(files, named_template("chatml"), SAMPLES)["eos_token_id"] == [3, 4, end_of(files)]


def test_a_drawn_model_has_its_ends_too(files: Path) -> None:
    generation = generation_of(files, named_template("chatml"), SAMPLES, "model.init=random")
    assert generation["eos_token_id"] == [Tokenizer.load(files / "hf").eos, end_of(files)]


@pytest.mark.parametrize("more", [[SAMPLES], []])
def test_a_config_that_lacks_nothing_is_kept_to_the_byte(files: Path, more: list[str]) -> None:
    """The plain template ends with the end of a text, and a run over text has no turns."""
    source = named_template("chatml") if not more else None
    generation_of(files, source, *more)
    assert (files / "run" / GENERATION).read_bytes() == (files / "hf" / GENERATION).read_bytes()


def test_a_base_without_the_tokens_is_refused_before_anything_is_made(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base(files / "bare")
    assert main(["tune", *words("model=./bare", "data.template=chatml")]) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert (
        f"data.template=chatml needs {IM_START} and {IM_END}, which the tokenizer lacks as one special token" in errors
    )
    assert "take data.template=llama-2 or mistral-v1 or auto" in errors
    assert not (files / "run").exists()


def test_a_name_is_no_path_and_a_file_of_that_name_stays_one(files: Path) -> None:
    (files / "plans").mkdir()
    (files / "chatml").write_text("{{ messages }}", encoding="utf-8")
    for name, expected in (("chatml", "chatml"), ("../chatml", "./chatml")):
        plan = files / "plans" / "plan.yaml"
        plan.write_text(f"model: llama-tiny\ndata: {{path: stdlib, template: {name}}}\n", encoding="utf-8")
        written_plan = planfile.read(plan)
        assert written_plan.data.template == expected
        planfile.write(written_plan, files / "again.yaml")
        assert planfile.read(files / "again.yaml").data.template == expected

"""A whole directory: what lies in it, that it appears at once or not at all, and what is read of foreign ones."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from meshwright.data import Tokenizer
from meshwright.formats.gguf.model import fresh_file
from meshwright.formats.hub import export_folder, import_folder
from meshwright.formats.safetensors import stored_tensors
from meshwright.spec import ModelShape
from meshwright.spec.errors import HubError
from tests.formats.hub.test_weights import assert_same, random_tensors

SHAPE = ModelShape(vocab=2048, layers=1, hidden=8, heads=2, ffn=12, max_positions=64)
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"


def exported(folder: Path, shape: ModelShape = SHAPE, **options: Any) -> dict[str, Tensor]:
    tensors = random_tensors(shape)
    defaults: dict[str, Any] = {
        "model_tensors": tensors.items(),
        "tokenizer": Tokenizer.shipped(),
        "dtype": torch.float32,
    }
    export_folder(folder, shape=shape, **{**defaults, **options})
    return tensors


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_a_tokenizer_without_a_first_mark_is_given_none(tmp_path: Path) -> None:
    """A template that begins with bos_token (Qwen) would write another prompt than in training."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    Tokenizer.shipped().save(theirs)
    config = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "tokenizer_class": "TokenizersBackend"}
    (theirs / "tokenizer_config.json").write_text(json.dumps(config))
    exported(tmp_path / "out", tokenizer=Tokenizer.load(theirs))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (None, "<|endoftext|>", "<|endoftext|>")
    ids = read(tmp_path / "out" / "config.json")
    assert ids["bos_token_id"] is None and ids["eos_token_id"] == ids["pad_token_id"] == tokenizer.eos_token_id
    assert "bos_token_id" not in read(tmp_path / "out" / "generation_config.json")


def test_what_a_directory_holds(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    tensors = exported(folder, chat_template=TEMPLATE, dtype=torch.bfloat16)
    assert names(folder) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    }
    assert names(folder.parent) == {"out"}
    eos = Tokenizer.shipped().eos
    assert (
        read(folder / "config.json")["eos_token_id"] == read(folder / "generation_config.json")["eos_token_id"] == eos
    )
    tokenizer = read(folder / "tokenizer_config.json")
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (tokenizer["eos_token"], tokenizer["model_max_length"]) == ("<|endoftext|>", 64)
    imported = import_folder(folder)
    assert (imported.shape.name, imported.dtype, imported.chat_template) == ("out", torch.bfloat16, TEMPLATE)
    assert imported.tokenizer == folder / "tokenizer.json" and imported.generation["eos_token_id"] == eos
    weights: dict[str, Tensor] = {}
    imported.load(lambda name, tensor: weights.update({name: tensor}))
    assert_same(weights, {name: tensor.bfloat16() for name, tensor in tensors.items()})


def test_a_full_folder_is_left_alone_and_an_empty_one_is_taken(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    with pytest.raises(HubError, match="full is not empty"):
        exported(tmp_path / "full")
    with pytest.raises(HubError, match=r"note\.txt is not empty"):
        exported(tmp_path / "full" / "note.txt")
    assert names(tmp_path / "full") == {"note.txt"}
    exported(tmp_path / "empty", tokenizer=None)
    assert names(tmp_path / "empty") == {"config.json", "model.safetensors", "generation_config.json"}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), HubError("lost")])
def test_nothing_stays_behind_when_an_export_fails(error: BaseException, tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(random_tensors(SHAPE).items())[:2]
        raise error

    with pytest.raises(type(error)):
        exported(tmp_path / "out", model_tensors=broken())
    assert names(tmp_path) == set()


def test_a_shape_that_cannot_be_held_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"model\.window=8 .* model\.family=mistral"):
        exported(
            tmp_path / "out", ModelShape(vocab=2048, layers=1, hidden=8, heads=2, ffn=12, max_positions=64, window=8)
        )
    assert names(tmp_path) == set()


def test_a_generation_config_is_handed_on(tmp_path: Path) -> None:
    exported(tmp_path / "out", generation={"temperature": 0.6, "top_p": 0.9})
    assert import_folder(tmp_path / "out").generation == {"temperature": 0.6, "top_p": 0.9}


@pytest.mark.parametrize(
    "template", [TEMPLATE, [{"name": "tool", "template": "x"}, {"name": "default", "template": TEMPLATE}]]
)
def test_templates_inside_the_tokenizer_config_are_found(template: object, tmp_path: Path) -> None:
    exported(tmp_path / "out")
    (tmp_path / "out" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (tmp_path / "out" / "generation_config.json").unlink()
    imported = import_folder(tmp_path / "out")
    eos = Tokenizer.shipped().eos
    assert imported.chat_template == TEMPLATE
    assert imported.generation == {"bos_token_id": eos, "eos_token_id": eos}


def test_a_tokenizer_config_of_its_own_is_kept(tmp_path: Path) -> None:
    text = Tokenizer.shipped().json
    config = json.dumps(
        {"eos_token": "<|endoftext|>", "tokenizer_class": "TokenizersBackend", "add_prefix_space": True}
    )
    exported(tmp_path / "out", tokenizer=Tokenizer(text, eos="<|endoftext|>", config=config))
    written = read(tmp_path / "out" / "tokenizer_config.json")
    assert written["add_prefix_space"] is True
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast", "v4 does not know TokenizersBackend"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no config.json"),
        ("{", "not JSON"),
        ("[]", "must hold a JSON object"),
        ('{"model_type": "bert"}', "out/config.json: model_type 'bert' is not supported"),
        ('{"a": 1}', "out/config.json: model_type is missing"),
    ],
)
def test_what_is_no_directory_is_refused_in_one_line(content: str | None, words: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    if content is not None:
        (tmp_path / "out" / "config.json").write_text(content)
    with pytest.raises(HubError, match=words) as error:
        import_folder(tmp_path / "out")
    assert "\n" not in str(error.value)
    with pytest.raises(HubError, match="absent does not exist: give a Hugging Face directory"):
        import_folder(tmp_path / "absent")


def test_folders_that_differ_in_one_matrix_are_told_apart(tmp_path: Path) -> None:
    """A merged adapter changes the middle of a long file. Stored outputs of a teacher are found by the fingerprint."""
    shape = ModelShape(vocab=256, layers=3, hidden=256, heads=2, ffn=512, max_positions=64)
    exported(tmp_path / "out", shape, tokenizer=None)
    before = import_folder(tmp_path / "out").fingerprint()
    assert import_folder(tmp_path / "out").fingerprint() == before
    name, file = "model.layers.1.mlp.up_proj.weight", tmp_path / "out" / "model.safetensors"
    tensor = stored_tensors(tmp_path / "out")[name]
    assert tensor.start > 2**20 and tensor.start + tensor.num_bytes < file.stat().st_size - 2**20
    raw = bytearray(file.read_bytes())
    raw[tensor.start : tensor.start + tensor.num_bytes] = bytes(tensor.num_bytes)
    file.write_bytes(raw)
    assert import_folder(tmp_path / "out").fingerprint() != before


def test_what_a_killed_process_left_is_removed_by_the_next_that_writes_there(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for process in (gone.pid, os.getppid()):
        (tmp_path / f".out.partial-{process}").mkdir()
    exported(tmp_path / "out")
    assert names(tmp_path) == {"out", f".out.partial-{os.getppid()}"}
    (tmp_path / f".a.gguf.partial-{gone.pid}").write_bytes(b"x")
    with fresh_file(tmp_path / "a.gguf") as partial:
        partial.write_bytes(b"y")
    assert names(tmp_path) == {"out", f".out.partial-{os.getppid()}", "a.gguf"}


def test_an_adapter_where_a_model_is_asked_for_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(HubError, match="it is an adapter: give its base, or export the run without --adapter"):
        import_folder(tmp_path)

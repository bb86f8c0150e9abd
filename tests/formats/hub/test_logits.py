"""Logits and greedy tokens equal those of transformers, for every family, in both directions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.data import Tokenizer
from meshwright.formats.hub import HubFolder, export_folder, import_folder
from meshwright.model import Transformer, build
from meshwright.spec import ModelShape
from tests.formats.hub.peers import PEERS, corrections, peer, relative_error, shake, tensors_of, tokens

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here and is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")
LARGEST_ERROR = 1e-5


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def loaded(folder: HubFolder) -> Transformer:
    model = build(folder.shape, initialize=False).eval()
    targets = {name: tensor.detach() for name, tensor in tensors_of(model).items()}
    folder.load(lambda name, tensor: targets.pop(name).copy_(tensor))
    assert not targets, "weights that nothing was read for"
    return model


def continued(model: Transformer, prompt: Tensor, count: int) -> Tensor:
    for _ in range(count):
        prompt = torch.cat((prompt, model(prompt)[:, -1:].argmax(-1)), dim=1)
    return prompt


@pytest.mark.parametrize("name", PEERS)
@torch.no_grad()
def test_directory_of_transformers_gives_the_same_logits_here(name: str, tmp_path: Path) -> None:
    theirs = peer(name)
    theirs.save_pretrained(tmp_path)
    folder = import_folder(tmp_path)
    assert folder.shape.family == PEERS[name][0]
    assert folder.dtype == torch.float32
    assert relative_error(loaded(folder)(tokens()), theirs(tokens()).logits) <= LARGEST_ERROR


@pytest.mark.parametrize("name", PEERS)
@torch.no_grad()
def test_our_directory_gives_the_same_logits_and_greedy_tokens_there(name: str, tmp_path: Path) -> None:
    theirs = peer(name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = build(import_folder(tmp_path / "theirs").shape).eval()
    shake(tensors_of(ours), seed=7)
    export_folder(
        tmp_path / "ours",
        model_tensors=tensors_of(ours).items(),
        shape=ours.shape,
        tokenizer=None,
        dtype=torch.float32,
    )
    back, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert relative_error(ours(tokens()), back.eval()(tokens()).logits) <= LARGEST_ERROR
    generated = back.generate(tokens(), max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert torch.equal(generated, continued(ours, tokens(), 10))


@pytest.mark.parametrize("name", ["llama-llama3-rope", "llama-yarn"])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("inside", [None, 32])
@torch.no_grad()
def test_positions_of_training_beside_the_rotary_settings(
    name: str, spelling: str, inside: int | None, tmp_path: Path
) -> None:
    """Phi-3 and other tools write them there. transformers prefers them to those inside."""
    peer(name).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    rope = {**config.pop("rope_parameters"), "original_max_position_embeddings": inside}
    config["rope_theta"] = rope["rope_theta"] if spelling == "rope_parameters" else rope.pop("rope_theta")
    config[spelling] = {key: value for key, value in rope.items() if value is not None}
    file.write_text(json.dumps({**config, "original_max_position_embeddings": 8}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    folder = import_folder(tmp_path)
    assert folder.shape.rope_scaling is not None and folder.shape.rope_scaling.original_positions == 8
    assert relative_error(loaded(folder)(tokens()), theirs(tokens()).logits) <= LARGEST_ERROR


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@torch.no_grad()
def test_dynamic_scaling_changes_nothing_up_to_the_positions_of_training(spelling: str, tmp_path: Path) -> None:
    """Nor does the engine take more positions. InternLM 2 and older Llamas have it."""
    peer("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = {**config.pop("rope_parameters"), "rope_type": "dynamic", "factor": 4.0}
    config |= {spelling: rope, "rope_theta": rope["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert relative_error(loaded(import_folder(tmp_path))(tokens()), theirs(tokens()).logits) <= LARGEST_ERROR


@torch.no_grad()
def test_neighbouring_rotary_pairs_become_halves_there(tmp_path: Path) -> None:
    peer("qwen3-biases-window").save_pretrained(tmp_path / "theirs")
    shape = replace(import_folder(tmp_path / "theirs").shape, rope_interleaved=True)
    ours = build(shape).eval()
    shake(tensors_of(ours), seed=3)
    options = {"shape": shape, "tokenizer": None, "dtype": torch.float32}
    export_folder(tmp_path / "ours", model_tensors=tensors_of(ours).items(), **options)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert relative_error(ours(tokens()), back(tokens()).logits) <= LARGEST_ERROR


def test_a_trained_export_generates_the_same_greedy_text_there(tmp_path: Path) -> None:
    tokenizer = Tokenizer.shipped()
    text = "def area(width, height):\n    return width * height\n\n\nclass Box:\n    def __init__(self, width):\n"
    batch = torch.tensor([tokenizer.encode(text).tolist()])
    shape = ModelShape(vocab=tokenizer.vocab, layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, max_positions=128)
    ours = build(shape)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(ours(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    options = {"shape": shape, "tokenizer": tokenizer, "dtype": torch.float32, "max_shard_bytes": 100_000}
    export_folder(tmp_path / "out", model_tensors=tensors_of(ours).items(), **options)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = theirs("def area(", return_tensors="pt")["input_ids"]
    assert prompt.tolist() == [tokenizer.encode("def area(").tolist()]
    with torch.no_grad():
        generated = back.generate(prompt, max_new_tokens=40, do_sample=False)
        assert torch.equal(generated, continued(ours.eval(), prompt, 40))
    assert text[:50] in theirs.decode(generated[0]), "it has not learnt its text: the test would show little"


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "deepseek", "gpt2"])
@pytest.mark.parametrize("tokenizer", [Tokenizer.shipped(), Tokenizer.bytes()], ids=["bpe", "bytes"])
def test_the_exported_tokenizer_gives_the_same_ids_there(family: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """qwen2 is left out: its AutoTokenizer in v5 splits by Qwen's pattern, whatever tokenizer.json says."""
    peer(family).save_pretrained(tmp_path / "theirs")
    shape = replace(import_folder(tmp_path / "theirs").shape, vocab=tokenizer.vocab)
    template = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    options = {"shape": shape, "tokenizer": tokenizer, "dtype": torch.float32, "chat_template": template}
    export_folder(tmp_path / "out", model_tensors=tensors_of(build(shape)).items(), **options)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "def f(x):\n    return x + '\u00e9t\u00e9'  # \u65e5\u672c<|endoftext|>\n\n\nclass A: pass  "
    assert theirs(text)["input_ids"] == tokenizer.encode(text, special=True).tolist()
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos, tokenizer.eos)
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<user>hi"


@torch.no_grad()
def test_experts_outside_the_chosen_groups_stay_out_when_every_score_is_negative(tmp_path: Path) -> None:
    theirs = peer("deepseek")
    for bias in corrections(dict(theirs.named_buffers())).values():
        bias.sub_(3.0)
    theirs.save_pretrained(tmp_path)
    assert relative_error(loaded(import_folder(tmp_path))(tokens()), theirs(tokens()).logits) <= LARGEST_ERROR

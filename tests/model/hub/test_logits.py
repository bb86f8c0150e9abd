"""Logits and greedy tokens equal those of transformers, for every family, in both directions."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshwright.model import Transformer, build
from meshwright.model.hub import HubFolder, export_folder, import_folder
from tests.model.hub.peers import PEERS, corrections, peer, relative_error, shake, tensors_of, tokens

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here and is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")
LARGEST_ERROR = 1e-5


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def loaded(found: HubFolder) -> Transformer:
    model = build(found.shape, initialize=False).eval()
    targets = {name: tensor.detach() for name, tensor in tensors_of(model).items()}
    found.load(lambda name, tensor: targets.pop(name).copy_(tensor))
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
    found = import_folder(tmp_path)
    assert found.shape.family == PEERS[name][0]
    assert found.dtype == torch.float32
    assert relative_error(loaded(found)(tokens()), theirs(tokens()).logits) <= LARGEST_ERROR


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


@torch.no_grad()
def test_experts_outside_the_chosen_groups_stay_out_when_every_score_is_negative(tmp_path: Path) -> None:
    theirs = peer("deepseek")
    for bias in corrections(dict(theirs.named_buffers())).values():
        bias.sub_(3.0)
    theirs.save_pretrained(tmp_path)
    assert relative_error(loaded(import_folder(tmp_path))(tokens()), theirs(tokens()).logits) <= LARGEST_ERROR

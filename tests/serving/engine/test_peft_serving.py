"""Adapters that PEFT has written, served beside each other: its own greedy tokens, alone and mixed in one batch."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.formats.hub import export_folder
from meshwright.formats.hub.adapter import save_adapter
from meshwright.spec.errors import ArgumentError, HubError
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.weights.inventory import parameters
from tests.model.shrunk import model

PROMPTS = [[3, 5, 7, 9, 11], [8, 1, 8, 2], [3, 5, 7, 9, 11], [40, 41, 42, 43, 44, 45, 46], [9] * 9, [3, 5, 7, 9, 11]]
LLAMA = {
    "thin": {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "wide": {"r": 24, "lora_alpha": 24, "target_modules": ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]},
    "odd": {"r": 5, "lora_alpha": 10, "use_rslora": True, "target_modules": ["gate_proj", "v_proj"],
            "rank_pattern": {"v_proj": 9}, "layers_to_transform": [1]},
}  # fmt: skip
GPT2 = {
    "thin": {"r": 2, "lora_alpha": 8, "target_modules": ["c_attn"]},
    "wide": {"r": 12, "lora_alpha": 24, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
}
CALLED = ["thin", "wide", None, "wide", "thin", "odd"]
NEW = 10


def base(folder: Path, name: str) -> Path:
    network = model(name)
    arguments: dict[str, Any] = {"shape": network.shape, "tokenizer": None, "dtype": torch.float32}
    export_folder(folder / "base", model_tensors=network.state_dict().items(), **arguments)
    return folder / "base"


@pytest.mark.filterwarnings("ignore")  # of PEFT's and transformers' own
@pytest.mark.parametrize(("name", "forms"), [("llama-3.1-8b", LLAMA), ("gpt2-124m", GPT2)])
def test_answers_are_those_of_peft(tmp_path: Path, name: str, forms: dict[str, dict[str, Any]]) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = base(tmp_path, name)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    theirs: dict[str | None, Any] = {None: plain}
    for called, form in forms.items():
        adapted = peft.get_peft_model(copy.deepcopy(plain), peft.LoraConfig(task_type="CAUSAL_LM", **form))
        with torch.no_grad():
            for key, parameter in adapted.named_parameters():
                if "lora_B" in key:
                    parameter.normal_(0.0, 0.15)
        adapted.save_pretrained(tmp_path / called)
        theirs[called] = adapted.eval()
    ours = mw.load(folder)
    folders = {called: tmp_path / called for called in forms}
    called = [adapter if adapter in (*forms, None) else "wide" for adapter in CALLED]
    asked = [mw.RequestOptions(adapter=adapter, max_new_tokens=NEW, ignore_end=True) for adapter in called]
    tokens_of_way: list[list[list[int]]] = []
    for exact in (False, True):
        settings: dict[str, Any] = {"engine": mw.EngineOptions(exact=exact, block=4), "adapters": folders}
        mixed = ours.generate_many(PROMPTS, asked, **settings)
        alone = [
            ours.generate_many([prompt], adapter, **settings)[0] for prompt, adapter in zip(PROMPTS, asked, strict=True)
        ]
        assert [adapter.ids for adapter in mixed] == [adapter.ids for adapter in alone]
        tokens_of_way.append([list(adapter.ids) for adapter in mixed])
        for prompt, adapter, answer in zip(PROMPTS, called, mixed, strict=True):
            with torch.no_grad():
                logits = theirs[adapter](torch.tensor([[*prompt, *answer.ids]])).logits[0].float()
            behind = logits[len(prompt) - 1 : -1]
            assert list(answer.ids) == behind.argmax(-1).tolist(), (adapter, prompt)
            right = behind.log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0].tolist()
            assert answer.logprobs == pytest.approx(right, abs=2e-3)
    assert len({tuple(adapter) for adapter in (tokens_of_way[0][0], tokens_of_way[0][2], tokens_of_way[0][5])}) == 3, (
        "one prompt, three answers"
    )
    if name == "llama-3.1-8b":
        assert over_ranks(folder, folders, asked, ep=1, exact=True) == tokens_of_way[1]
    for adapter in forms:
        whole = theirs[adapter].merge_and_unload()
        with torch.no_grad():
            number = called.index(adapter)
            logits = whole(torch.tensor([[*PROMPTS[number], *tokens_of_way[0][number]]])).logits[0]
        assert logits[len(PROMPTS[number]) - 1 : -1].argmax(-1).tolist() == tokens_of_way[0][number]


def over_ranks(folder: Path, folders: dict[str, Path], asked: list[Any], *, ep: int, exact: bool) -> list[list[int]]:
    """What two ranks answer."""
    options = mw.EngineOptions(exact=exact, block=4)
    with mw.sharded_engine(folder, options, tp=2, ep=ep, adapters=folders) as engine:
        assert engine is not None
        requests = [engine.add(prompt, wish) for prompt, wish in zip(PROMPTS, asked, strict=True)]
        engine.run(requests)
    return [wish.answers[0].ids for wish in requests]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_experts_are_those_of_peft(tmp_path: Path) -> None:
    """On one device, and with experts spread over two ranks. PEFT makes stacks of what it reads."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder, shape = base(tmp_path, "mixtral-8x7b"), model("mixtral-8x7b").shape
    theirs: dict[str | None, Any] = {None: transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()}
    for seed, (called, targets) in enumerate({"thin": "down", "wide": "all"}.items()):
        lora = LoRAShape(rank=2 + 3 * seed, alpha=8.0, targets=targets)
        low = [entry for entry in parameters(replace(shape, lora=lora)) if entry.adapts]
        chance = torch.Generator().manual_seed(seed)
        tensors = {entry.name: torch.randn(entry.shape, generator=chance) * 0.3 for entry in low}
        (tmp_path / called).mkdir()
        save_adapter(tmp_path / called, tensors, replace(shape, lora=lora), base=str(folder), dtype=torch.float32)
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder).float()
        theirs[called] = peft.PeftModel.from_pretrained(plain, tmp_path / called).eval()
    folders = {called: tmp_path / called for called in ("thin", "wide")}
    called = [entry if entry in (*folders, None) else "wide" for entry in CALLED]
    asked = [mw.RequestOptions(adapter=entry, max_new_tokens=NEW, ignore_end=True) for entry in called]
    mixed = mw.load(folder).generate_many(PROMPTS, asked, engine=mw.EngineOptions(block=4), adapters=folders)
    for prompt, entry, answer in zip(PROMPTS, called, mixed, strict=True):
        with torch.no_grad():
            logits = theirs[entry](torch.tensor([[*prompt, *answer.ids]])).logits[0].float()
        assert list(answer.ids) == logits[len(prompt) - 1 : -1].argmax(-1).tolist(), (entry, prompt)
    assert len({entry.ids for entry in (mixed[0], mixed[2], mixed[5])}) == 3, "one prompt, three answers"
    assert over_ranks(folder, folders, asked, ep=2, exact=False) == [list(entry.ids) for entry in mixed]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("form", "complaint"),
    [
        ({"use_dora": True, "target_modules": ["q_proj"]}, "adapter='mine' cannot be served by request: DoRA"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens.* is no tensor of a LoRA or DoRA adapter"),
        ({"target_modules": ["lm_head"]}, "lm_head.* is no tensor of a LoRA or DoRA adapter"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
    ],
)
def test_what_peft_may_write_and_requests_cannot_have(tmp_path: Path, form: dict[str, Any], complaint: str) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = base(tmp_path, "llama-3.1-8b")
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peft.get_peft_model(plain, peft.LoraConfig(task_type="CAUSAL_LM", r=2, **form)).save_pretrained(tmp_path / "mine")
    with pytest.raises((ArgumentError, HubError), match=complaint):
        mw.load(folder).engine(adapters={"mine": tmp_path / "mine"})


def test_a_folder_without_an_adapter(tmp_path: Path) -> None:
    folder = base(tmp_path, "llama-3.1-8b")
    with pytest.raises(ArgumentError, match=r"adapter='mine': .* has neither adapter_config"):
        mw.load(folder).engine(adapters={"mine": folder})

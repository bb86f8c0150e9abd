"""A quantized folder as the frozen base of adapters: its codes are taken as they are, whoever wrote them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright import planfile
from meshwright.formats.hub import export_folder
from meshwright.formats.quantized.detection import is_quantized
from meshwright.interface.trained.opening import load
from meshwright.kernels.quantized.matrix import QuantizedMatrix
from meshwright.kernels.quantized.quantize import quantize_matrix, relative_error
from meshwright.model.quantized_weights import QuantizedWeight, frozen_codes, quantized_name
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.spec import Plan
from meshwright.spec.errors import CheckpointError, HubError, PlanError
from meshwright.spec.memory.held import memory
from meshwright.spec.model.quantization_schemes import SCHEMES, base_name, find_scheme
from meshwright.store import checkpoint
from meshwright.store.model_weights import base_weights, open_base
from meshwright.training import job, loop
from meshwright.training.optimizer.optimizer import held_bytes
from meshwright.verbs.main import main
from tests.model.shrunk import tokens
from tests.training.test_adapters import peft_run
from tests.training.test_frozen_codes import LORA, files, losses, state_of
from tests.training.test_tuning import CHATML, plan

__all__ = ["files"]
FOLDERS: list[tuple[str, str, dict[str, Any], str]] = [
    ("meshwright", "int4-hqq", {}, "int4-hqq"),
    ("meshwright", "int3", {"group": 64}, "int3-g64-real-bf16"),
    ("compressed-tensors", "int4-rtn", {}, "int4-g32-zeros-fp32"),
    ("gptq", "int4-sym", {"group": 32}, "int4-g32-sym-fp16"),
    ("awq", "int4-rtn", {}, "int4-g32-zeros-fp16"),
    ("bitsandbytes", "nf4", {}, "nf4"),
    ("bitsandbytes", "nf4-double", {}, "nf4-double"),
]
"""Format, scheme, options, and the base that is read from the folder."""
QUICK = ("awq", "compressed-tensors")


def quantized(files: Path, form: str, scheme: str, **more: Any) -> Path:
    mw.quantize(files / "hf", scheme, files / "q", format=form, quality=False, **more)
    (files / "q" / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    return files / "q"


def beside(files: Path, folder: Path, *words: str) -> Plan:
    return plan(files, f"model={folder}", *LORA, *words)


def restored_twin(folder: Path, to: Path, asked: Plan) -> str:
    """The numbers that every evaluation of the quantized folder multiplies with, as a folder in fp32."""
    model = load(folder).model

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in base_weights(asked, torch.float32):
            if isinstance(tensor, QuantizedMatrix):
                coded = model.get_submodule(quantized_name(name))
                assert isinstance(coded, QuantizedWeight)
                yield name, coded.matrix.dequantized()
            else:
                yield name, tensor

    tokenizer = job.prepare_data(asked.data).tokenizer
    export_folder(
        to, model_tensors=weights(), shape=model.shape, tokenizer=tokenizer, dtype=torch.float32, chat_template=CHATML
    )
    return str(to)


@pytest.mark.parametrize(
    ("form", "scheme", "more", "base"),
    [pytest.param(*matrix, marks=() if matrix[0] in QUICK else pytest.mark.slow) for matrix in FOLDERS],
)
def test_its_codes_are_the_frozen_base(files: Path, form: str, scheme: str, more: dict[str, Any], base: str) -> None:
    """Bit-equal codes, the losses of the numbers that they stand for, bytes as counted, and merged exports."""
    folder = quantized(files, form, scheme, **more)
    asked = beside(files, folder, "recipe.steps=4")
    assert asked.model.lora is not None and asked.model.lora.base == base
    state = state_of(asked)
    opened = load(folder).model
    held = frozen_codes([state.engine.model], asked.model)
    assert len(held) == 14
    for name, matrix in held.items():
        there = opened.get_submodule(quantized_name(name))
        assert all(torch.equal(tensor, there.get_buffer(part)) for part, tensor in matrix.named_buffers()), name
    counted = memory(asked.model, asked.layout, "fp32")["step"]
    assert held_bytes(state.engine, state.optimizer) == {k: v for k, v in counted.items() if k != "gradients"}
    dense = plan(files, f"model={restored_twin(folder, files / 'twin', asked)}", f"run={files / 'dense'}", *LORA)
    assert losses(asked) == [pytest.approx(pair, abs=1e-5, rel=1e-4) for pair in losses(dense)]
    latest = checkpoint.find_latest(files / "run" / "checkpoints")
    assert latest is not None
    checkpoint.load(latest, state.tensors())
    prompt = tokens(2, 11)
    right = state.engine.model.eval()(prompt)
    assert main(["export", str(files / "run"), str(files / "merged")]) == 0
    torch.testing.assert_close(load(files / "merged").model(prompt), right, rtol=1e-5, atol=1e-5)
    assert main(["export", str(files / "run"), str(files / "adapter"), "--adapter"]) == 0
    named = json.loads((files / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert is_quantized(Path(named))
    torch.testing.assert_close(load(files / "adapter").model(prompt), right, rtol=1e-5, atol=1e-5)


def test_a_run_goes_on_beside_the_same_folder_alone(files: Path) -> None:
    asked = beside(files, quantized(files, "bitsandbytes", "nf4"), "recipe.steps=2")
    loop.run(asked)
    stored_plan = planfile.read(files / "run" / "plan.yaml")
    assert stored_plan.model == asked.model and stored_plan.init == asked.init
    more = beside(files, files / "q", "recipe.steps=3")
    assert loop.run(more, resume="auto").step == 3
    shard = next((files / "q").glob("*.safetensors"))
    body = bytearray(shard.read_bytes())
    body[-1] ^= 1
    shard.write_bytes(bytes(body))
    with pytest.raises(CheckpointError, match="adapter for other weights"):
        loop.run(beside(files, files / "q", "recipe.steps=4"), resume="auto")


@pytest.mark.parametrize(
    ("form", "scheme", "more", "words", "match"),
    [
        ("meshwright", "int8", {}, LORA, r"rounds activations, too \(int8\)"),
        ("compressed-tensors", "fp8", {}, LORA, r"rounds activations, too"),
        ("bitsandbytes", "int8", {}, LORA, r"rounds activations, too"),
        ("bitsandbytes", "llm-int8", {"outliers": "threshold", "threshold": 3.0}, LORA, r"rounds activations, too"),
        ("gptq", "int4-rtn", {"keep": ["layers.0.*"]}, LORA, r"holds layers.0.attention.q.weight as numbers"),
        ("awq", "int4-rtn", {}, [], r"holds codes \(int4-g32-zeros-fp16\).*give model.lora.rank=16"),
        ("awq", "int4-rtn", {}, [*LORA, "model.lora.base=nf4"], r"quantized to \S+ already, and model.lora.base=nf4"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_base_is_refused(
    files: Path, form: str, scheme: str, more: dict[str, Any], words: list[str], match: str
) -> None:
    folder = quantized(files, form, scheme, **more)
    with pytest.raises((PlanError, HubError), match=match):
        plan(files, f"model={folder}", *words)
    assert not (files / "run").exists()


def test_a_plan_of_other_codes_is_refused_before_a_run_is_made(files: Path) -> None:
    folder = quantized(files, "bitsandbytes", "nf4")
    asked = plan(files, f"model.init={folder}", *LORA, "model.lora.base=nf4-double")
    with pytest.raises(PlanError, match=r"holds codes \(nf4\).* take model.lora.base=nf4,"):
        loop.run(asked)
    assert not (files / "run").exists()


@pytest.mark.parametrize(
    "name", ["int4-g64-zeros-fp16", "int8-rows-sym-fp32", "fp8-rows-sym-bf16", "nf4-g128-sym-fp32"]
)
def test_layouts_have_names(name: str) -> None:
    named = find_scheme(name)
    assert named is not None and base_name(named) == name
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    assert all(base_name(scheme) == key for key, scheme in SCHEMES.items() if scheme.trains_beside)
    assert relative_error(weight, quantize_matrix("w", weight, named)) < 0.1


@pytest.mark.parametrize(
    "name", ["int7-rows-sym-fp16", "int4-g33-sym-fp16", "int8-g32-zeros-fp16", "fp6-rows-sym-fp16"]
)
def test_what_names_no_layout(name: str) -> None:
    assert find_scheme(name) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of PEFT's, bitsandbytes' and transformers' own
@pytest.mark.parametrize("scheme", ["nf4", "nf4-double"])
def test_twenty_steps_are_those_of_peft_beside_the_same_files(files: Path, scheme: str) -> None:
    """transformers and bitsandbytes open the folder by themselves."""
    pytest.importorskip("bitsandbytes")
    folder = quantized(files, "bitsandbytes", scheme)
    asked = beside(files, folder, "recipe.steps=20", "recipe.epsilon=1e-6")
    right = peft_run(asked, files / "peft", 20, device_map="cpu")
    for (loss, norm), (their_loss, their_norm) in zip(losses(asked), right, strict=True):
        assert loss == pytest.approx(their_loss, abs=1e-4)
        assert norm == pytest.approx(their_norm, rel=1e-3)
    assert right[-1][0] < right[0][0] - 0.03


def test_what_a_folder_holds_is_read_from_it(files: Path) -> None:
    assert open_base(files / "hf").base == ""
    assert open_base(quantized(files, "gptq", "int4-sym", group=64)).base == "int4-g64-sym-fp16"


def test_plan_and_dry_run_count_its_codes(files: Path) -> None:
    """`--tune qlora` takes the folder's own codes, and a dry run finds what is counted."""
    folder = quantized(files, "gptq", "int4-sym", group=32)
    answer = mw.plan(folder, cluster="rtx4090x1", tune="qlora", recipe={"sequence": 64}).plan
    assert answer.model.lora is not None and answer.model.lora.base == "int4-g32-sym-fp16"
    asked = beside(files, folder)
    seen = dry_run(asked, device="cpu").ranks[0]
    assert seen.kinds["parameters"] == memory(asked.model, asked.layout, "fp32")["step"]["parameters"]

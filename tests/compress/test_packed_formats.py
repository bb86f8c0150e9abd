"""GPTQ's and AWQ's folders: read by unpackers that share nothing with ours, read back, refused.

The unpackers take a bit at a time, in the places where AutoGPTQ's and AutoAWQ's layers look for it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.formats.hub.weight_names import bindings
from meshwright.formats.quantized.packed_linears import Codes, GPTQFiles
from meshwright.formats.quantized.table import FORMATS
from meshwright.formats.safetensors import stored_tensors
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import HubError, PlanError
from meshwright.spec.model.quantization_schemes import SCHEMES
from tests.compress.test_formats import SHAPES, restored
from tests.compress.test_quantize import folder as folder  # a fixture
from tests.training.test_weights import directory


def bits_at(words: list[int], first_bit: int, bits: int) -> int:
    """`bits` bits from bit `place` of a stream of 32-bit words."""
    actual = 0
    for bit in range(bits):
        at = first_bit + bit
        actual |= ((words[at // 32] & 0xFFFFFFFF) >> (at % 32) & 1) << bit
    return actual


def by_autogptq(parts: dict[str, Tensor], bits: int, version: int = 1) -> Tensor:
    """weight[k, n] = scales[g_idx[k], n] * (qweight - (qzeros + 1)), -> (N, K)."""
    qweight, qzeros, scales, index = (parts[name] for name in ("qweight", "qzeros", "scales", "g_idx"))
    columns, rows = len(index), scales.shape[1]
    zeros = torch.tensor(
        [[bits_at(row.tolist(), bits * index, bits) + (version == 1) for index in range(rows)] for row in qzeros]
    )
    codes = torch.tensor(
        [[bits_at(qweight[:, row].tolist(), bits * index, bits) for index in range(columns)] for row in range(rows)]
    )
    return (scales.float()[index.long()] * (codes.t() - zeros[index.long()])).t()


def by_autoawq(parts: dict[str, Tensor]) -> Tensor:
    """weight[k, n] = scales[k // g, n] * (qweight - qzeros), output n of each 8 at run 0, 4, 1, 5, 2, 6, 3, 7 -> (N, K)
    in fp16."""
    places = [32 * (index // 8) + 4 * (0, 4, 1, 5, 2, 6, 3, 7)[index % 8] for index in range(parts["scales"].shape[1])]
    codes, zeros = (
        torch.tensor([[bits_at(row.tolist(), position, 4) for position in places] for row in parts[name]])
        for name in ("qweight", "qzeros")
    )
    group = torch.arange(len(codes)) // (len(codes) // len(zeros))
    return (parts["scales"][group] * (codes - zeros[group])).t()


def written(folder: Path, shape: str, scheme: str, format: str, **more: Any) -> Path:
    """The folder."""
    if not (folder / shape).exists():
        directory(folder / shape, SHAPES[shape])
    inputs = {"data": folder / "text.txt", "quality": False, "group": 32, **more}
    quantized = mw.quantize(folder / shape, scheme, folder / "q", format=format, **inputs)
    assert (
        quantized.bytes
        == quantized.predicted_bytes
        == sum(path.stat().st_size for path in folder.glob("q/*.safetensors"))
    )
    return folder / "q"


def theirs(folder: Path, name: str) -> dict[str, Tensor]:
    stored = stored_tensors(folder)
    start = name.removesuffix("weight")
    return {key.removeprefix(start): entry.read() for key, entry in stored.items() if key.startswith(start)}


@pytest.mark.parametrize(("shape", "scheme", "format"), [
    ("llama", "int4-gptq", "gptq"), ("llama", "int4-sym", "gptq"), ("qwen3_moe", "int4-rtn", "gptq"),
    ("llama", "int4-awq", "awq"), ("qwen3", "int4-rtn", "awq"), ("llama", "int4-sym", "awq"),
])  # fmt: skip
def test_others_read_the_same_numbers_and_so_do_we(shape: str, scheme: str, format: str, folder: Path) -> None:
    out = written(folder, shape, scheme, format)
    restored_weight, names, seen = restored(out), quantizable(SHAPES[shape]), 0
    for binding in bindings(SHAPES[shape]):
        first = next(iter(binding.ours))
        if first not in names or ("experts" in first and "layers.1" in first):
            continue
        for their, expected in zip(
            binding.theirs, binding.transform.export([restored_weight(first)], SHAPES[shape]), strict=True
        ):
            parts = theirs(out, their)
            actual = by_autogptq(parts, 4) if format == "gptq" else by_autoawq(parts)
            assert torch.equal(actual.float(), expected.half().float() if format == "awq" else expected), their
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_width_comes_back(bits: int) -> None:
    scheme = GPTQFiles().scheme_of(Entries({"bits": bits, "group_size": 32, "sym": bits == 8}))
    weight = torch.randn(32, 96, generator=torch.Generator().manual_seed(bits)) * 0.1
    matrix = quantize_matrix("some", weight, scheme)
    middle = torch.full(matrix.scales.shape, 128, dtype=torch.uint8)
    codes = matrix.whole_codes() if bits < 8 else (matrix.codes.int() + 128).to(torch.uint8)
    zeros = matrix.every_zero().to(torch.uint8) if bits < 8 else middle
    parts = GPTQFiles().packed("some", Codes(codes, zeros, matrix.scales), scheme)
    planned = GPTQFiles().sizes(32, 96, scheme)
    assert {name: (tuple(part.shape), part.dtype) for name, part in parts.items()} == planned
    assert torch.equal(by_autogptq(parts, bits), matrix.dequantized())
    stored: Any = {name: Read(part) for name, part in parts.items()}
    back = GPTQFiles().unpacked(stored, (32, 96), scheme, Entries({}))
    assert torch.equal(back.scales, matrix.scales)
    assert torch.equal(back.codes.int() - back.zeros.repeat_interleave(32, 1).int(),
                       codes.int() - zeros.repeat_interleave(32, 1).int())  # fmt: skip


class Read:
    """A tensor as a file gives it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def read(self) -> Tensor:
        return self.tensor


def Entries(values: dict[str, object]) -> Any:
    from meshwright.formats.hub.families import Entries as Plain

    return Plain(values, "config")


def test_a_zero_of_0_is_raised_with_its_codes_or_refused() -> None:
    scheme = GPTQFiles().scheme_of(Entries({"bits": 4, "group_size": 32, "sym": False}))
    zeros, scales = torch.zeros(32, 1, dtype=torch.uint8), torch.ones(32, 1).half()
    codes = torch.arange(15, dtype=torch.uint8).repeat(32, 3)[:, :32].contiguous()
    parts = GPTQFiles().packed("some", Codes(codes, zeros, scales), scheme)
    assert torch.equal(by_autogptq(parts, 4), codes.float())
    with pytest.raises(PlanError, match="some has a group whose weights are all positive"):
        GPTQFiles().packed("some", Codes(codes + 1, zeros, scales), scheme)


def test_folders_are_described_as_their_readers_want(folder: Path) -> None:
    out = written(folder, "llama", "int4-gptq", "gptq", keep=["layers.0.mlp.*"])
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "gptq" and (config["bits"], config["group_size"]) == (4, 32)
    assert not config["desc_act"] and not config["sym"] and config["checkpoint_format"] == "gptq"
    assert "-:^model\\.layers\\.0\\.mlp\\.up_proj$" in config["dynamic"]
    (folder / "q").rename(folder / "first")
    out = written(folder, "llama", "int4-awq", "awq", keep=["layers.0.mlp.*"])
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["version"] == "gemm" and config["zero_point"] and config["quant_method"] == "awq"
    assert config["modules_to_not_convert"][:2] == ["lm_head", "model.layers.0.mlp.gate_proj"]
    assert mw.load(out).generate("def", max_new_tokens=2, temperature=0).ids


def test_version_2_and_layouts_that_are_not_read(folder: Path) -> None:
    out = written(folder, "llama", "int4-rtn", "gptq")
    restored_weight = restored(out)
    before = {name: restored_weight(name) for name in quantizable(SHAPES["llama"])}
    path = out / "config.json"
    whole = json.loads(path.read_text())

    def changed(**values: Any) -> None:
        path.write_text(json.dumps({**whole, "quantization_config": {**whole["quantization_config"], **values}}))

    changed(checkpoint_format="gptq_v2")
    name = "layers.0.mlp.up.weight"
    later = restored(out)(name)
    assert torch.equal(later, by_autogptq(theirs(out, "model.layers.0.mlp.up_proj.weight"), 4, version=2))
    assert not torch.equal(later, before[name])
    format_alone = {key: entry for key, entry in whole["quantization_config"].items() if key != "checkpoint_format"}
    path.write_text(json.dumps({**whole, "quantization_config": {**format_alone, "format": "gptq_v2"}}))
    assert torch.equal(restored(out)(name), later)
    for values, message in (
        ({"is_marlin_format": True}, "is_marlin_format=true is not read"),
        ({"lm_head": True}, "lm_head=true is not read"),
        ({"pack_dtype": "int8"}, "pack_dtype='int8' is not supported .supported: int32"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported"),
        ({"bits": 5}, "bits=5 with group_size=32 is not read"), ({"group_size": 48}, "group_size=48 is not read"),
        ({"bits": 8}, "bits=8 with sym=false is not read"), ({"group_size": 16}, "qzeros is"),
    ):  # fmt: skip
        changed(**values)
        with pytest.raises(HubError, match=message):
            mw.load(out)
    changed()
    data = (out / "model.safetensors").read_bytes()
    stored = stored_tensors(out)["model.layers.0.mlp.up_proj.g_idx"]
    raw = bytearray(data)
    raw[stored.start] ^= 1
    (out / "model.safetensors").write_bytes(raw)
    with pytest.raises(
        HubError, match=r"layers\.0\.mlp\.up_proj\.qweight: g_idx has groups of other sizes than group_size=32"
    ):
        mw.load(out)


@pytest.mark.parametrize(("format", "change", "message"), [
    ("gptq", {"scheme": "int4-hqq"}, "gptq cannot hold int4-hqq: its zeros must be whole numbers"),
    ("gptq", {"scheme": "int8", "group": None}, "gptq cannot hold int8: its activations stay"),
    ("awq", {"scheme": "int3"}, "awq cannot hold int3: it has whole numbers of 4 bits"),
    ("awq", {"scheme": "nf4"}, "awq cannot hold nf4"),
    ("awq", {"scheme": "int4-sym", "group": None}, "64 inputs do not fit; take group=64 or format='meshwright'"),
    ("gptq", {"model": "gpt2"}, "gptq cannot hold gpt2"),
])  # fmt: skip
def test_what_a_format_cannot_hold_is_refused_before_anything_is_made(
    format: str, change: dict[str, Any], message: str, folder: Path
) -> None:
    directory(folder / "gpt2", SHAPES["gpt2"])
    inputs = {"model": "hf", "scheme": "int4-rtn", "group": 32, "quality": False, **change}
    with pytest.raises(PlanError, match=message):
        mw.quantize(folder / str(inputs.pop("model")), inputs.pop("scheme"), folder / "q", format=format, **inputs)
    assert not (folder / "q").exists() and {"gptq", "awq"} < FORMATS.keys() and SCHEMES

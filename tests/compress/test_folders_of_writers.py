"""Folders as other writers leave them: AutoGPTQ, GPTQModel, AutoAWQ and bitsandbytes, their names, files and habits.

Each is written here by its writer's rules (docs/quantize.md names versions), and read by unpackers that share nothing
with ours.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import meshwright as mw
from meshwright.formats.hub.weight_names import bindings
from meshwright.formats.safetensors import stored_tensors
from meshwright.interface.planning.plan_reading import read_folder
from meshwright.model.quantized_weights import quantizable
from meshwright.spec import ModelShape
from meshwright.spec.errors import HubError
from meshwright.store.model_weights import open_base
from tests.compress.test_formats import SHAPES, SIZES, restored
from tests.compress.test_packed_formats import by_autoawq, by_autogptq
from tests.training.test_weights import directory

PHI3 = ModelShape(**{**SIZES, "ffn": 128}, kv_heads=1, family="phi3")
BLOCKS = ModelShape(**{**SIZES, "ffn": 128}, kv_heads=1)
"""Rows of whole blocks of 64."""
Parts = dict[str, Tensor]
FOUR_BITS_OF_FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]
"""By bitsandbytes' get_4bit_type, before they are divided by 12."""


def gptq_parts(
    weight: Tensor, *, bits: int = 4, group: int = 32, order: Tensor | None = None, symmetric: bool = True
) -> Parts:
    """As AutoGPTQ's quantize and pack: columns are rounded in an order, and groups are runs of that."""
    rows, columns = weight.shape
    order = torch.arange(columns) if order is None else order
    index = torch.empty(columns, dtype=torch.int32)
    index[order] = (torch.arange(columns) // group).int()
    middle, groups = 2 ** (bits - 1), -(-columns // group)
    scales, zeros = torch.empty(groups, rows), torch.full((groups, rows), middle)
    for number in range(groups):
        ours = weight[:, index == number]
        low, high = ours.amin(1).clamp(max=0), ours.amax(1).clamp(min=0)
        if symmetric:
            scales[number] = torch.maximum(-low, high) * 2 / (2**bits - 1)
        else:
            scales[number] = (high - low) / (2**bits - 1)
            zeros[number] = (-low / scales[number]).round().clamp(1, 2**bits - 1)
    scales = scales.half().float()
    codes = (weight.t() / scales[index.long()] + zeros[index.long()]).round().clamp(0, 2**bits - 1).long()
    return {
        "qweight": _words(codes.t(), bits).t().contiguous(), "qzeros": _words(zeros.long() - 1, bits),
        "scales": scales.half(), "g_idx": index, "bias": torch.zeros(rows, dtype=torch.float16),
    }  # fmt: skip


def _words(codes: Tensor, bits: int) -> Tensor:
    """(R, C) -> a stream of bits for each row, by whole numbers of Python."""
    actual = []
    for row in codes.tolist():
        stream = sum(code << (bits * index) for index, code in enumerate(row))
        each = [(stream >> (32 * word)) & 0xFFFFFFFF for word in range(len(row) * bits // 32)]
        actual.append([word - 2**32 if word >= 2**31 else word for word in each])
    return torch.tensor(actual, dtype=torch.int32)


def awq_parts(weight: Tensor, group: int = 32) -> Parts:
    """As AutoAWQ's pseudo_quantize_tensor and WQLinear_GEMM.from_linear."""
    runs = weight.view(len(weight), -1, group)
    low, high = runs.amin(-1), runs.amax(-1)
    scales = ((high - low).clamp(min=1e-5) / 15).half().float()
    zeros = (-(low / scales).round()).clamp(0, 15)
    codes = ((runs + (zeros * scales).unsqueeze(-1)) / scales.unsqueeze(-1)).round().clamp(0, 15)
    ways = [8 * word + location for word in range(len(weight) // 8) for location in (0, 2, 4, 6, 1, 3, 5, 7)]
    return {
        "qweight": _words(codes.flatten(1).long().t()[:, ways], 4), "qzeros": _words(zeros.long().t()[:, ways], 4),
        "scales": scales.t().half().contiguous(),
    }  # fmt: skip


def by_autoawq_wide(parts: Parts) -> Tensor:
    """Products in fp32, which AutoAWQ's are not."""
    return by_autoawq({**parts, "scales": parts["scales"].float()})


def written(
    folder: Path, shape: ModelShape, quantize: Callable[[str, Tensor], Parts | None], config: dict[str, Any], *,
    beside: str = "", weights: str = "model.safetensors",
) -> dict[str, Parts]:  # fmt: skip
    """Make `theirs` of a directory `hf`: matrices by `quantize`, the rest in fp16. -> parts by their names.
    `beside`: the file that has the config in place of config.json."""
    directory(folder / "hf", shape)
    tensors, coded = load_file(folder / "hf" / "model.safetensors"), dict[str, Parts]()
    for binding in bindings(shape):
        for their in binding.theirs if next(iter(binding.ours)) in quantizable(shape) else ():
            if parts := quantize(their, tensors[their]):
                coded[their] = parts
                del tensors[their]
                tensors |= {their.removesuffix("weight") + part: entry for part, entry in parts.items()}
    tensors = {name: tensor.half() if tensor.dtype == torch.float32 else tensor for name, tensor in tensors.items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    (folder / "hf").rename(folder / "theirs")
    (folder / "theirs" / "model.safetensors").unlink()
    save_file(tensors, folder / "theirs" / weights)
    path = folder / "theirs" / "config.json"
    whole = json.loads(path.read_text()) | ({} if beside else {"quantization_config": config})
    path.write_text(json.dumps(whole))
    if beside:
        (folder / "theirs" / beside).write_text(json.dumps(config))
    return coded


def same_numbers(folder: Path, shape: ModelShape, coded: dict[str, Parts], read: Callable[[Parts], Tensor]) -> None:
    """Compare each matrix to what a writer's reader makes of it, and logits and answers to those of plain numbers."""
    restored_weight, plain = restored(folder / "theirs"), load_file(next((folder / "theirs").glob("*.safetensors")))
    count = 0
    for binding in bindings(shape):
        if all(their in plain for their in binding.theirs):
            continue
        theirs = binding.transform.export([restored_weight(our_part) for our_part in binding.ours], shape)
        for their, their_part in zip(binding.theirs, theirs, strict=True):
            plain[their] = read(coded[their]).float() if their in coded else plain[their]
            assert torch.equal(their_part, plain[their]), their
            count += 1
    assert count == len(coded)
    stored = {
        name: entry
        for name, entry in plain.items()
        if entry.dtype != torch.int32 and not name.endswith((".scales", ".bias"))
    }
    (folder / "plain").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / "plain" / name).write_text((folder / "theirs" / name).read_text())
    config = json.loads((folder / "plain" / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "plain" / "config.json").write_text(json.dumps(config))
    save_file(
        {name: entry.float().contiguous() for name, entry in stored.items()}, folder / "plain" / "model.safetensors"
    )
    ours, theirs_model = mw.load(folder / "theirs"), mw.load(folder / "plain")
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(ours.model(tokens), theirs_model.model(tokens), rtol=2e-2, atol=2e-3)
    ask = mw.RequestOptions(max_new_tokens=6)
    answers = [[entry.ids for entry in model.generate_many(["def f", "class"], ask)] for model in (ours, theirs_model)]
    assert answers[0] == answers[1]


GPTQ = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": True, "static_groups": False, "sym": True,
        "true_sequential": True, "model_name_or_path": None, "model_file_base_name": None}  # fmt: skip
"""quantize_config.json of AutoGPTQ."""


def shuffled(name: str, weight: Tensor) -> Tensor:
    """An order of inputs, one for matrices that read the same."""
    seed = len(name.rpartition(".layers.")[2].split("_proj")[0].replace("gate", "up"))
    return torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", ["llama", "qwen3_moe"])
def test_gptq_with_desc_act_under_autogptqs_names(shape: str, tmp_path: Path) -> None:
    coded = written(
        tmp_path, SHAPES[shape], lambda name, weight: gptq_parts(weight, order=shuffled(name, weight)), GPTQ,
        beside="quantize_config.json", weights="gptq_model-4bit-32g.safetensors",
    )  # fmt: skip
    same_numbers(tmp_path, SHAPES[shape], coded, lambda parts: by_autogptq(parts, 4))
    with pytest.raises(HubError, match=r"holds codes, by 'gptq', and numbers are needed: take the folder"):
        mw.quantize(tmp_path / "theirs", "int8", tmp_path / "again", quality=False)
    with pytest.raises(HubError, match=r"inputs in another order .GPTQ's desc_act., on which no adapter"):
        open_base(tmp_path / "theirs")


def test_gptq_in_several_widths_by_rules_of_gptqmodel(tmp_path: Path) -> None:
    rules = {
        r"+:.*\.down_proj.*": {"bits": 8},
        r".*o_proj": {"group_size": 64},
        r"-:.*k_proj": {},
        r".*q_proj": {"sym": False},
    }

    def quantize(name: str, weight: Tensor) -> Parts | None:
        if "k_proj" in name:
            return None
        return gptq_parts(
            weight,
            bits=8 if "down" in name else 4,
            group=64 if "o_proj" in name else 32,
            symmetric="q_proj" not in name,
        )

    config = {
        "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "quant_method": "gptq", "format": "gptq",
        "checkpoint_format": "gptq", "pack_dtype": "int32", "lm_head": False, "dynamic": rules, "meta": {},
    }  # fmt: skip
    coded = written(tmp_path, SHAPES["llama"], quantize, config)
    widths = {name: 8 if "down" in name else 4 for name in coded}
    same_numbers(
        tmp_path, SHAPES["llama"], coded, lambda parts: by_autogptq(parts, 8 if len(parts["qweight"]) == 24 else 4)
    )
    assert set(widths.values()) == {4, 8} and len(coded) == 12


def test_awq_by_the_file_that_autoawq_writes_beside(tmp_path: Path) -> None:
    config = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM", "modules_to_not_convert": None}
    coded = written(
        tmp_path, SHAPES["llama"], lambda name, weight: awq_parts(weight), config, beside="quant_config.json"
    )
    same_numbers(tmp_path, SHAPES["llama"], coded, by_autoawq_wide)
    assert read_folder(tmp_path / "theirs").codes == open_base(tmp_path / "theirs").base != ""


@pytest.mark.parametrize("beside", ["", "quantize_config.json"])
def test_a_plan_counts_codes_whichever_file_says_that_there_are(beside: str, tmp_path: Path) -> None:
    """An adapter beside them is planned with these codes as its base, and not with weights of 16 bits."""
    config = {**GPTQ, "desc_act": False} | ({} if beside else {"quant_method": "gptq"})
    written(tmp_path, SHAPES["llama"], lambda name, weight: gptq_parts(weight), config, beside=beside)
    folder = tmp_path / "theirs"
    assert read_folder(folder).codes == open_base(folder).base != ""
    recipe = {"sequence": 64, "global_batch": 1}
    answer = mw.plan(str(folder), cluster="h100x1", tune="lora", recipe=recipe)
    assert answer.plan.model.lora is not None and answer.plan.model.lora.base == open_base(folder).base


@pytest.mark.parametrize("order", [False, True])
def test_matrices_that_a_family_stores_below_each_other(order: bool, tmp_path: Path) -> None:
    coded = written(
        tmp_path, PHI3,
        lambda name, weight: gptq_parts(weight, order=shuffled(name, weight) if order else None, symmetric=False),
        {**GPTQ, "quant_method": "gptq", "sym": False},
    )  # fmt: skip
    same_numbers(tmp_path, PHI3, coded, lambda parts: by_autogptq(parts, 4))


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round:auto_awq"])
def test_auto_round_under_the_layouts_of_others(packing: str, tmp_path: Path) -> None:
    """`gptqmodel` keeps zeros as they are; `extra_config` names matrices of other widths."""
    config = {
        "quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 32, "sym": True,
        "data_type": "int", "extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32}},
    }  # fmt: skip
    second = packing.endswith("gptqmodel")

    def quantize(name: str, weight: Tensor) -> Parts:
        if packing.endswith("awq"):
            return awq_parts(weight)
        parts = gptq_parts(weight, bits=8 if "0.mlp.down" in name else 4)
        zeros = torch.full((len(parts["scales"]), len(weight)), 2 ** (7 if "0.mlp.down" in name else 3))
        return parts | ({"qzeros": _words(zeros, 8 if "0.mlp.down" in name else 4)} if second else {})

    def read(parts: Parts) -> Tensor:
        if packing.endswith("awq"):
            return by_autoawq_wide(parts)
        return by_autogptq(parts, 32 * len(parts["qweight"]) // len(parts["g_idx"]), version=1 + second)

    same_numbers(tmp_path, SHAPES["llama"], written(tmp_path, SHAPES["llama"], quantize, config), read)


def changed(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_tied_head_may_stand_in_the_file_and_must_be_the_embedding(tmp_path: Path) -> None:
    config = {**GPTQ, "quant_method": "gptq"}
    written(tmp_path, SHAPES["qwen3"], lambda name, weight: gptq_parts(weight), config)
    changed(tmp_path / "theirs", lambda all: all.update({"lm_head.weight": all["model.embed_tokens.weight"].clone()}))
    assert mw.load(tmp_path / "theirs").model.shape.tied
    changed(tmp_path / "theirs", lambda all: all["lm_head.weight"].zero_())
    with pytest.raises(HubError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        mw.load(tmp_path / "theirs")


BAD: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "bias": (
        lambda all: all["model.layers.0.mlp.up_proj.bias"].fill_(1),
        "mlp.up_proj.bias is not zero, but config",
    ),
    "groups": (lambda all: all["model.layers.0.mlp.up_proj.g_idx"].zero_(), "g_idx has groups of other sizes"),
    "index": (
        lambda all: all.update({"model.layers.0.mlp.up_proj.g_idx": torch.zeros(3, dtype=torch.int32)}),
        r"g_idx is \[3\]",
    ),
    "no scales": (lambda all: all.pop("model.layers.0.mlp.up_proj.scales"), "lacks model.layers.0.mlp.up_proj.scales"),
    "a scalar": (
        lambda all: all.update({"model.layers.0.mlp.up_proj.scales": torch.tensor(1.0).half()}),
        r"up_proj.scales is \[\]",
    ),
    "zeros": (lambda all: all["model.layers.0.mlp.up_proj.qzeros"].fill_(1), "some zeros are not the middle code"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    change, message = BAD[name]
    written(tmp_path, SHAPES["llama"], lambda name, weight: gptq_parts(weight), {**GPTQ, "quant_method": "gptq"})
    assert mw.load(tmp_path / "theirs").model.shape.layers == 2
    changed(tmp_path / "theirs", change)
    with pytest.raises(HubError, match=message):
        mw.load(tmp_path / "theirs")


def test_files_that_nothing_joins_and_codes_of_others_are_refused(tmp_path: Path) -> None:
    written(tmp_path, SHAPES["llama"], lambda name, weight: gptq_parts(weight), {**GPTQ, "quant_method": "hqq"})
    with pytest.raises(HubError, match=r"is quantized by 'hqq', which is not supported \(supported: meshwright,"):
        mw.load(tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "theirs" / "a.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "theirs" / "b.safetensors")
    with pytest.raises(HubError, match=r"neither model\.safetensors nor .*, and 2 other files, as a\.safetensors"):
        stored_tensors(tmp_path / "theirs")


def fp8_parts(weight: Tensor, block: int = 0) -> Parts:
    """As llm-compressor's FP8 (one scale for all, and one for inputs) and FP8_BLOCK."""
    rows, columns = weight.shape
    if block:
        padded = torch.zeros(-(-rows // block) * block, -(-columns // block) * block)
        padded[:rows, :columns] = weight
        peaks = padded.view(padded.shape[0] // block, block, -1, block).abs().amax((1, 3))
    else:
        peaks = weight.abs().max().view(1, 1)
    scales = (peaks / 448).bfloat16()
    wide = _wide(scales, block, rows, columns)
    parts = {"weight": (weight / wide).to(torch.float8_e4m3fn), "weight_scale": scales if block else scales.view(1)}
    return parts if block else {**parts, "input_scale": torch.tensor([0.01]).bfloat16()}


def _wide(scales: Tensor, block: int, rows: int, columns: int) -> Tensor:
    spread = scales.float().view(-1, scales.shape[-1])
    if block:
        spread = spread.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return spread.expand(rows, columns) if not block else spread[:rows, :columns]


def packed_parts(weight: Tensor, group: int = 32) -> Parts:
    """As llm-compressor's W4A16: codes 8 more than they stand for, each row one stream of bits."""
    runs = weight.view(len(weight), -1, group)
    scales = (runs.abs().amax(-1) / 7.5).bfloat16()
    codes = (runs / scales.float().unsqueeze(-1)).round().clamp(-8, 7).long() + 8
    return {
        "weight_packed": _words(codes.flatten(1), 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }


def whole_parts(weight: Tensor, group: int = 32) -> Parts:
    """As llm-compressor 0.14's W4A8: 4-bit codes with their sign, a byte each."""
    runs = weight.view(len(weight), -1, group)
    scales = (runs.abs().amax(-1) / 7.5).bfloat16()
    codes = (runs / scales.float().unsqueeze(-1)).round().clamp(-8, 7)
    return {"weight": codes.to(torch.int8).flatten(1), "weight_scale": scales}


def by_compressed_tensors(parts: Parts, block: int, size: tuple[int, int]) -> Tensor:
    if parts.get("weight", torch.empty(0)).dtype == torch.int8:
        runs = parts["weight"].view(size[0], parts["weight_scale"].shape[1], -1)
        return (runs * parts["weight_scale"].float().unsqueeze(-1)).flatten(1)
    if "weight_packed" not in parts:
        return parts["weight"].float() * _wide(parts["weight_scale"], block, *size)
    words = [[word & 0xFFFFFFFF for word in row] for row in parts["weight_packed"].tolist()]
    codes = torch.tensor([[word >> index & 15 for word in row for index in range(0, 32, 4)] for row in words])
    runs = (codes - 8).view(size[0], parts["weight_scale"].shape[1], -1)
    return (runs * parts["weight_scale"].float().unsqueeze(-1)).flatten(1)


EIGHT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "group_size": None}
PRESETS: dict[str, dict[str, Any]] = {
    "FP8": {"format": "float-quantized", "weights": {**EIGHT, "strategy": "tensor"},
            "input_activations": {**EIGHT, "strategy": "tensor"}},
    "FP8_BLOCK": {"format": "float-quantized", "weights": {**EIGHT, "strategy": "block", "block_structure": [32, 32]},
                  "input_activations": {**EIGHT, "strategy": "group", "group_size": 32, "dynamic": True}},
    "W4A16": {"format": "pack-quantized", "input_activations": None,
              "weights": {**EIGHT, "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}},
    "W4A8": {"format": "int-quantized",
             "input_activations": {**EIGHT, "type": "int", "strategy": "token", "dynamic": True},
             "weights": {**EIGHT, "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}},
}  # fmt: skip


@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_of_fewer_than_8_bits_are_refused(bits: int, tmp_path: Path) -> None:
    inputs = {**PRESETS["W4A8"]["input_activations"], "num_bits": 4}
    group = {**PRESETS["W4A8"], "input_activations": inputs, "targets": ["Linear"]}
    group["weights"] = {**group["weights"], "num_bits": bits}
    config = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip
    written(tmp_path, SHAPES["llama"], lambda name, weight: whole_parts(weight), config)
    with pytest.raises(HubError, match="num_bits"):
        restored(tmp_path / "theirs")


@pytest.mark.parametrize("names", [("FP8",), ("FP8_BLOCK",), ("W4A16", "FP8"), ("W4A8",)])
def test_llm_compressors_scales_of_all_of_blocks_and_of_several_groups(names: tuple[str, ...], tmp_path: Path) -> None:
    groups = {f"group_{index}": {**PRESETS[name], "targets": ["re:.*"]} for index, name in enumerate(names)}
    config = {
        "quant_method": "compressed-tensors", "format": PRESETS[names[0]]["format"], "config_groups": groups,
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip
    block, sizes = 32 if "FP8_BLOCK" in names else 0, dict[str, tuple[int, int]]()

    def quantize(name: str, weight: Tensor) -> Parts:
        sizes[name] = weight.shape[0], weight.shape[1]
        if names == ("W4A8",):
            return whole_parts(weight)
        return packed_parts(weight) if len(names) > 1 and "mlp" in name else fp8_parts(weight, block)

    coded = written(tmp_path, SHAPES["llama"], quantize, config)
    restored_weight = restored(tmp_path / "theirs")
    for binding in bindings(SHAPES["llama"]):
        (our_name,), (their,) = binding.ours, binding.theirs
        if their in coded:
            (actual,) = binding.transform.export([restored_weight(our_name)], SHAPES["llama"])
            assert torch.equal(actual, by_compressed_tensors(coded[their], block, sizes[their])), their
    assert mw.load(tmp_path / "theirs").generate("def", max_new_tokens=2, temperature=0).ids


OTHER_NAMES: dict[str, tuple[dict[str, Any], str]] = {
    "AutoFP8": ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, ""),
    "FBGEMM": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []}, ""),
    "ModelOpt": ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, ""),
    "ModelOpt's own file": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        "hf_quant_config.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_weights_of_8_bits_under_other_names(name: str, tmp_path: Path) -> None:
    """Of FBGEMM each output has a scale, of the others a matrix, as a scalar in fp32."""
    config, beside = OTHER_NAMES[name]

    def quantize(_: str, weight: Tensor) -> Parts:
        parts = fp8_parts(weight)
        if name == "FBGEMM":
            scales = weight.abs().amax(1, keepdim=True) / 448
            return {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales.half()}
        return {**parts, "weight_scale": parts["weight_scale"].float().view(()), "k_scale": torch.tensor(1.0)}

    coded = written(tmp_path, SHAPES["llama"], quantize, config, beside=beside)
    restored_weight = restored(tmp_path / "theirs")
    for binding in bindings(SHAPES["llama"]):
        (our_name,), (their,) = binding.ours, binding.theirs
        if their in coded:
            (exported,), parts = binding.transform.export([restored_weight(our_name)], SHAPES["llama"]), coded[their]
            assert torch.equal(exported, parts["weight"].float() * parts["weight_scale"].half().float()), their
    assert mw.load(tmp_path / "theirs").generate("def", max_new_tokens=2, temperature=0).ids


def test_codes_that_no_quant_method_names_are_those_of_mlx(tmp_path: Path) -> None:
    written(tmp_path, SHAPES["llama"], lambda name, weight: None, {"group_size": 64, "bits": 4})
    with pytest.raises(HubError, match="by software that names no quant_method, as MLX does"):
        mw.load(tmp_path / "theirs")


def test_a_matrix_that_is_of_no_group_is_refused(tmp_path: Path) -> None:
    groups = {name: {**PRESETS[name], "targets": ["Linear"]} for name in ("W4A16", "FP8")}
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    written(tmp_path, SHAPES["llama"], lambda name, weight: packed_parts(weight, 16), config)
    with pytest.raises(HubError, match=r"q_proj\.weight has the tensors of none of 2 config_groups, which must be one"):
        mw.load(tmp_path / "theirs")


def fp4_parts(weight: Tensor, block: int = 64) -> dict[str, Tensor]:
    """As bitsandbytes' quantize_fp4: two codes to a byte, the first in the upper half."""
    table = torch.tensor(FOUR_BITS_OF_FP4) / 12
    runs = weight.reshape(-1, block)
    peaks = runs.abs().amax(1)
    codes = ((runs / peaks.unsqueeze(1)).unsqueeze(-1) - table).abs().argmin(-1).flatten().to(torch.uint8)
    state = {"quant_type": "fp4", "blocksize": block, "dtype": "float16", "shape": list(weight.shape)}
    return {
        "weight": (codes[::2] << 4 | codes[1::2]).unsqueeze(1), "weight.absmax": peaks, "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__fp4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }  # fmt: skip


def by_bitsandbytes(parts: dict[str, Tensor]) -> Tensor:
    packed = parts["weight"].view(torch.uint8).flatten().tolist()
    state = json.loads(bytes(parts["weight.quant_state.bitsandbytes__fp4"].tolist()))
    codes = torch.tensor([code for byte in packed for code in (byte >> 4, byte & 15)])
    numbers = (torch.tensor(FOUR_BITS_OF_FP4) / 12)[codes].view(-1, state["blocksize"])
    tensor: Tensor = (numbers * parts["weight.absmax"].unsqueeze(1)).view(state["shape"])
    return tensor


@pytest.mark.parametrize(("shape", "storage"), [
    ("llama", torch.uint8), ("llama", torch.bfloat16), ("llama", torch.float32), ("phi3", torch.uint8),
])  # fmt: skip
def test_fp4_of_bitsandbytes_in_bytes_of_any_dtype(shape: str, storage: torch.dtype, tmp_path: Path) -> None:
    """transformers' default of 4 bits; `bnb_4bit_quant_storage` is what FSDP wants of it."""
    config = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_quant_storage": str(storage).removeprefix("torch."), "bnb_4bit_use_double_quant": False,
    }  # fmt: skip

    def quantize(name: str, weight: Tensor) -> Parts:
        parts = fp4_parts(weight)
        return parts | {"weight": parts["weight"].flatten().view(storage).unsqueeze(1)}

    model = PHI3 if shape == "phi3" else BLOCKS
    directory(tmp_path / "hf", model)
    tensors, coded = load_file(tmp_path / "hf" / "model.safetensors"), dict[str, Parts]()
    for binding in bindings(model):
        for their in binding.theirs if next(iter(binding.ours)) in quantizable(model) else ():
            coded[their] = quantize(their, tensors.pop(their))
            tensors |= {their.removesuffix("weight") + part: entry.contiguous() for part, entry in coded[their].items()}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "hf" / "model.safetensors")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    restored_weight = restored(tmp_path / "hf")
    for binding in bindings(model):
        theirs = binding.transform.export([restored_weight(our_part) for our_part in binding.ours], model)
        for their, their_part in zip(binding.theirs, theirs, strict=True):
            assert their not in coded or torch.equal(their_part, by_bitsandbytes(coded[their])), their
    assert open_base(tmp_path / "hf").base == "fp4-g64-sym-fp32"
    assert mw.load(tmp_path / "hf").generate("def", max_new_tokens=2, temperature=0).ids

"""Folders of codes: written, read back to the bit, refused where damaged, opened by compressed-tensors itself."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.compress.original import OriginalModel
from meshwright.compress.stream import write_quantized
from meshwright.formats.hub.weight_names import ROTARY, bindings, tensor_sizes
from meshwright.formats.quantized.interface import QuantizedModel
from meshwright.formats.quantized.table import FORMATS
from meshwright.formats.safetensors import stored_tensors
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model.quantized_weights import quantizable
from meshwright.spec import ModelShape, MoEShape
from meshwright.spec.errors import HubError, PlanError
from meshwright.spec.model.quantization_schemes import SCHEMES, Scheme
from tests.training.test_weights import directory

SIZES: dict[str, Any] = {"name": "dot", "vocab": 2048, "layers": 2, "hidden": 64, "heads": 2, "ffn": 96}
SIZES |= {"max_positions": 64}
MOE = MoEShape(experts=4, top_k=2, ffn=32, shared_experts=1, first_dense=1, scoring="sigmoid", correction_bias=True)
SHAPES = {
    "llama": ModelShape(**SIZES, kv_heads=1),
    "qwen3": ModelShape(**SIZES, kv_heads=1, family="qwen3", qk_norm=True, tied=True),
    "qwen3_moe": ModelShape(
        **SIZES, kv_heads=1, family="qwen3_moe", qk_norm=True, moe=replace(MOE, shared_experts=0, first_dense=0,
        scoring="softmax", correction_bias=False),
    ),
    "gpt2": ModelShape(
        **SIZES, family="gpt2", norm="layernorm", positions="learned", mlp="gelu_tanh", tied=True, qkv_bias=True,
        out_bias=True, mlp_bias=True,
    ),
}  # fmt: skip
CT = "compressed-tensors"
ALONE = [name for name, scheme in SCHEMES.items() if not scheme.calibrated]
"""Schemes without text: what becomes of a matrix depends on it alone."""
WHOLE = [name for name in ALONE if SCHEMES[name].zeros != "real" and SCHEMES[name].codes != "nf4"]
WHOLE = [name for name in WHOLE if SCHEMES[name].outliers == "none"]
WHOLE = [name for name in WHOLE if SCHEMES[name].activations != "int8" or SCHEMES[name].symmetric_by_token]


def used(name: str) -> Scheme:
    """With groups that divide the inputs of SHAPES, which compressed-tensors wants."""
    return replace(SCHEMES[name], group=32) if SCHEMES[name].group else SCHEMES[name]


def quantized(tmp_path: Path, shape: str, scheme: str, format: str, **more: Any) -> tuple[dict[str, Tensor], Path]:
    """The weights before, and the folder."""
    before = directory(tmp_path / "hf", SHAPES[shape])
    if format == CT and SCHEMES[scheme].group:
        more = {"group": 32, **more}
    actual = mw.quantize(tmp_path / "hf", scheme, tmp_path / "q", format=format, quality=False, **more)
    assert (
        actual.bytes == actual.predicted_bytes == sum(path.stat().st_size for path in tmp_path.glob("q/*.safetensors"))
    )
    return before, tmp_path / "q"


def restored(folder: Path) -> Callable[[str], Tensor]:
    """What each parameter of a read model stands for, fp32."""
    model = mw.load(folder).model

    def weight_of(name: str) -> Tensor:
        where, _, leaf = name.rpartition(".")
        module: Any = model.get_submodule(where)
        attribute = getattr(module, "quantized" if leaf == "weight" else f"{leaf}_quantized", None)
        tensor: Tensor = getattr(module, leaf) if attribute is None else attribute.matrix.dequantized()
        return tensor.detach()

    return weight_of


@pytest.mark.parametrize(("shape", "scheme"), [
    *(("llama", scheme) for scheme in ALONE if SCHEMES[scheme].outliers == "none"), ("qwen3_moe", "int4-hqq"),
    ("gpt2", "nf4"),
])  # fmt: skip
def test_our_layout_keeps_every_bit(shape: str, scheme: str, tmp_path: Path) -> None:
    before, folder = quantized(tmp_path, shape, scheme, "meshwright", keep=["layers.1.mlp.*up*"])
    restored_weight, matrices = restored(folder), quantizable(SHAPES[shape])
    for name, weight in before.items():
        whole = name not in matrices or (name.startswith("layers.1.mlp.") and "up" in name)
        expected = weight if whole else quantize_matrix(name, weight, SCHEMES[scheme]).dequantized()
        assert torch.equal(restored_weight(name), expected), name


@pytest.mark.parametrize(
    ("shape", "scheme"), [*(("llama", scheme) for scheme in WHOLE), ("qwen3", "int4-rtn"), ("qwen3_moe", "int4-rtn")]
)
def test_compressed_tensors_are_read_back(shape: str, scheme: str, tmp_path: Path) -> None:
    before, folder = quantized(tmp_path, shape, scheme, CT)
    restored_weight = restored(folder)
    for name in quantizable(SHAPES[shape]):
        assert torch.equal(restored_weight(name), quantize_matrix(name, before[name], used(scheme)).dequantized()), name


def test_rows_of_rotary_pairs_change_places_with_their_scales(tmp_path: Path) -> None:
    """A run's rotary pairs may be neighbours; in these files they are halves of a head."""
    shape = replace(SHAPES["llama"], rope_interleaved=True)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(size, generator=generator) for name, size in tensor_sizes(shape).items()}
    model = QuantizedModel(
        shape=shape,
        schemes=dict.fromkeys(quantizable(shape), SCHEMES["int4-rtn"]),
        outlier_columns={},
        dtype=torch.float32,
    )
    original = OriginalModel(
        shape=shape, dtype=torch.float32, weights=lambda dtype: iter(weights.items()), tokenizer=None,
        chat_template=None, generation=None, dropout=0.0,
    )  # fmt: skip
    write_quantized(tmp_path / "q", original, model, FORMATS[CT], {}, lambda layer: None)
    name = "layers.0.attention.q.weight"
    (expected,) = ROTARY.export([quantize_matrix(name, weights[name], SCHEMES["int4-rtn"]).dequantized()], shape)
    assert torch.equal(restored(tmp_path / "q")(name), expected)


@pytest.mark.parametrize(("scheme", "dtype"), [*((scheme, "bf16") for scheme in WHOLE), ("int4-rtn", "fp32")])
def test_compressed_tensors_own_reader_restores_the_same(scheme: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    compressors: Any = import_module("compressed_tensors.compressors")
    quantization: Any = import_module("compressed_tensors.quantization")
    _, folder = quantized(tmp_path, "llama", scheme, CT, dtype=dtype)
    written = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = quantization.QuantizationConfig.model_validate(written)
    reader = compressors.BaseCompressor.get_value_from_registry(config.format)
    stored, restored_weight = stored_tensors(folder), restored(folder)
    for binding in bindings(SHAPES["llama"]):
        (name,), (their,) = binding.ours, binding.theirs
        if name not in quantizable(SHAPES["llama"]):
            continue
        start = their.removesuffix("weight")
        local = {key.removeprefix(start): entry.read() for key, entry in stored.items() if key.startswith(start)}
        group = next(iter(config.config_groups.values()))
        theirs = reader.decompress(local, group)["weight"]
        (ours,) = binding.transform.export([restored_weight(name)], SHAPES["llama"])
        assert torch.equal(theirs, ours.to(theirs.dtype)), name


@pytest.mark.parametrize(("shape", "scheme", "more", "message"), [
    ("llama", "nf4", {}, "cannot hold nf4: it has no normal floats; take format='meshwright'"),
    ("llama", "int4-hqq", {}, "its zeros must be whole numbers"),
    ("llama", "llm-int8", {"outliers": "threshold"}, "no place for columns in 16 bit"),
    ("llama", "int4-rtn", {"group": 64}, r"mlp.down.weight: its 96 inputs are no multiple of group=64; take group=32"),
    ("gpt2", "int8", {}, "cannot hold gpt2, whose matrices are stored transposed"),
])  # fmt: skip
def test_what_a_format_cannot_hold_is_refused_at_the_start(
    shape: str, scheme: str, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=message):
        quantized(tmp_path, shape, scheme, CT, **more)
    assert not (tmp_path / "q").exists()


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


DAMAGE: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "version": ("meshwright", lambda config: config.update(version=9), "version 9 of the layout"),
    "bits": ("meshwright", lambda config: config["schemes"]["int4-rtn"].update(bits=10**9), "bits=1000000000"),
    "word": (
        "meshwright",
        lambda config: config["schemes"]["int4-rtn"].update(bits="4"),
        "damaged quantization_config",
    ),
    "more bits": ("meshwright", lambda config: config["schemes"]["int4-rtn"].update(bits=6), r"\[64, 32\] torch.uint8"),
    "matrix": ("meshwright", lambda config: config["matrices"].update({"layers.9.o": "int4-rtn"}), "no matrix of this"),
    "missing": ("meshwright", lambda config: config["matrices"].pop("layers.0.mlp.up.weight"), "lacks layers.0.mlp.up"),
    "layout": (CT, lambda config: config.update(format="marlin-24"), "format='marlin-24'"),
    "groups": (CT, lambda config: config["config_groups"].update(other={}), "weights is missing"),
    "width": (CT, lambda config: config["config_groups"]["group_0"]["weights"].update(num_bits=3), "torch.int32 where"),
    "order": (CT, lambda config: config["config_groups"]["group_0"]["weights"].update(actorder="group"), "actorder"),
}


def test_our_layout_is_not_taken_for_a_model_of_random_weights(tmp_path: Path) -> None:
    """transformers skips codes that it does not know, with a warning, where it knows the model_type."""
    transformers = pytest.importorskip("transformers")
    _, folder = quantized(tmp_path, "llama", "int4-rtn", "meshwright")
    with pytest.raises(ValueError, match="meshwright-llama"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert mw.load(folder).model.shape.family == "llama"


@pytest.mark.parametrize("order", ["static", "weight", False, None])
def test_the_order_of_rounding_changes_no_file(order: object, tmp_path: Path) -> None:
    """llm-compressor's GPTQ writes "static" by default; compressed-tensors 0.20 names it an alias of "weight"."""
    before, folder = quantized(tmp_path, "llama", "int4-rtn", CT)
    changed(folder, lambda config: config["config_groups"]["group_0"]["weights"].update(actorder=order))
    restore = restored(folder)
    for name in quantizable(SHAPES["llama"]):
        assert torch.equal(restore(name), quantize_matrix(name, before[name], used("int4-rtn")).dequantized()), name


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    format, damage, message = DAMAGE[name]
    _, folder = quantized(tmp_path, "llama", "int4-rtn", format)
    changed(folder, damage)
    with pytest.raises((HubError, PlanError), match=message):
        mw.load(folder)


@pytest.mark.parametrize(
    ("format", "scheme", "part"),
    [("meshwright", "int4-hqq", "scales"), (CT, "int4-rtn", "scale"), (CT, "fp8", "weight")],
)
def test_codes_that_stand_for_no_number_are_refused(format: str, scheme: str, part: str, tmp_path: Path) -> None:
    """Torch's attention would make numbers of queries that are none."""
    _, folder = quantized(tmp_path, "llama", scheme, format)
    stored = stored_tensors(folder)
    entry = stored[next(name for name in stored if re.search(rf"layers.*[._]q.*{part}$|q_proj.*{part}$", name))]
    raw = bytearray((folder / "model.safetensors").read_bytes())
    raw[entry.start : entry.start + entry.num_bytes] = b"\xff" * entry.num_bytes
    (folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(HubError, match="has numbers that are infinite or NaN: damaged"):
        mw.load(folder)


def test_a_truncated_file_and_training_on_codes_are_refused(tmp_path: Path) -> None:
    _, folder = quantized(tmp_path, "llama", "int4-rtn", "meshwright")
    with pytest.raises(HubError, match=r"holds codes, by 'meshwright'.* take the folder that it was quantized from"):
        mw.quantize(folder, "int8", tmp_path / "again", quality=False)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(HubError, match="truncated"):
        mw.load(folder)

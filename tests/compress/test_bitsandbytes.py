"""Folders of bitsandbytes: ours are restored by its own code to the bit, and its own are read so."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import meshwright as mw
from meshwright.formats.hub.weight_names import bindings
from meshwright.formats.safetensors import stored_tensors
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.kernels.quantized.rounding import DYNAMIC, doubled, dynamic_table, undoubled
from meshwright.model.quantized_weights import quantizable
from meshwright.spec import ModelShape
from meshwright.spec.errors import HubError, PlanError
from meshwright.spec.model.quantization_schemes import NF4, SCHEMES
from tests.compress.test_formats import SHAPES, SIZES, restored
from tests.training.test_weights import directory

BNB = "bitsandbytes"
SHAPE = ModelShape(**{**SIZES, "ffn": 128}, kv_heads=1)
"""Rows of whole blocks of 64."""
WAYS: dict[str, dict[str, Any]] = {
    "nf4": {}, "nf4-double": {}, "int8": {}, "llm-int8": {"outliers": "threshold", "threshold": 5.0},
}  # fmt: skip


def quantized(tmp_path: Path, scheme: str, shape: ModelShape = SHAPE, **more: Any) -> tuple[dict[str, Tensor], Path]:
    """The weights before, and the folder."""
    before = directory(tmp_path / "hf", shape)
    more = {**WAYS.get(scheme, {}), **more}
    actual = mw.quantize(tmp_path / "hf", scheme, tmp_path / "q", format=BNB, quality=False, **more)
    assert (
        actual.bytes == actual.predicted_bytes == sum(path.stat().st_size for path in tmp_path.glob("q/*.safetensors"))
    )
    return before, tmp_path / "q"


@pytest.mark.parametrize("keep", [[], ["layers.1.mlp.*"]], ids=["all", "some"])
@pytest.mark.parametrize("scheme", WAYS)
def test_what_is_written_is_read_back_to_the_bit(scheme: str, keep: list[str], tmp_path: Path) -> None:
    before, folder = quantized(tmp_path, scheme, keep=keep)
    restored_weight = restored(folder)
    for name, weight in before.items():
        left = name not in quantizable(SHAPE) or (keep and name.startswith("layers.1.mlp."))
        expected = weight if left else quantize_matrix(name, weight, SCHEMES[scheme]).dequantized()
        assert torch.equal(restored_weight(name), expected), name


def opened(folder: Path, **options: Any) -> Any:
    """The model as transformers and bitsandbytes read it."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", **options)


def their_weight(layer: Any) -> Tensor:
    """Of one of their layers, by their own code."""
    import bitsandbytes.functional as theirs

    if isinstance(layer.weight.data, Tensor) and layer.weight.dtype == torch.int8:
        tensor: Tensor = theirs.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)
        return tensor
    state = layer.weight.quant_state
    state.dtype = torch.float32
    wide: Tensor = theirs.dequantize_4bit(layer.weight.data, state)
    return wide


def compared(model: Any, weight_of: Callable[[str], Tensor]) -> int:
    """Matrices whose restored weights are equal to the bit."""
    count = 0
    for binding in bindings(SHAPE):
        (name,), (their,) = binding.ours, binding.theirs
        if name in quantizable(SHAPE):
            ours, theirs = weight_of(name), their_weight(model.get_submodule(their.removesuffix(".weight")))
            assert torch.equal(theirs.view(ours.shape), ours), name
            count += 1
    return count


@pytest.mark.filterwarnings("ignore")  # of theirs
@pytest.mark.parametrize("scheme", WAYS)
def test_bitsandbytes_restores_ours_to_the_bit(scheme: str, tmp_path: Path) -> None:
    _, folder = quantized(tmp_path, scheme, dtype="bf16")
    model = opened(folder)
    assert compared(model, restored(folder)) == 14
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    if scheme == "llm-int8":
        assert model.config.quantization_config.llm_int8_threshold == 5.0


@pytest.mark.filterwarnings("ignore")  # of theirs
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_their_own_folders_are_read_to_the_bit(kind: str, double: bool, storage: torch.dtype, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    before = directory(tmp_path / "hf", SHAPE)
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32, bnb_4bit_quant_storage=storage,
    )  # fmt: skip
    model = opened(tmp_path / "hf", quantization_config=config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    restored_weight = restored(tmp_path / "theirs")
    assert compared(model, restored_weight) == 14
    scheme = replace(SCHEMES["nf4-double" if double else "nf4"], codes=kind)
    for name in () if kind == "fp4" else quantizable(SHAPE):  # and what they make of a matrix is what we do
        assert torch.equal(restored_weight(name), quantize_matrix(name, before[name], scheme).dequantized()), name


@pytest.mark.filterwarnings("ignore")  # of theirs
def test_their_own_8_bit_folders_are_read(tmp_path: Path) -> None:
    """Scales as 127 times ours: within one rounding of fp32."""
    transformers = pytest.importorskip("transformers")
    directory(tmp_path / "hf", SHAPE)
    config = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=4.0)
    model = opened(tmp_path / "hf", quantization_config=config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    loaded, restored_weight = mw.load(tmp_path / "theirs").model, restored(tmp_path / "theirs")
    assert loaded.get_submodule("layers.0.mlp.up.quantized").scheme.threshold == 4.0
    for binding in bindings(SHAPE):
        (name,), (their,) = binding.ours, binding.theirs
        if name in quantizable(SHAPE):
            theirs = their_weight(model.get_submodule(their.removesuffix(".weight")))
            torch.testing.assert_close(restored_weight(name), theirs, rtol=2e-7, atol=0.0)


def test_rows_of_8_bits_are_read_without_the_word_for_it_and_tiles_are_refused(tmp_path: Path) -> None:
    """bitsandbytes itself takes an order that is not named for rows."""
    _, folder = quantized(tmp_path, "int8")
    before = {name: restored(folder)(name) for name in quantizable(SHAPE)}
    tensors = load_file(folder / "model.safetensors")
    orders = {name: tensors.pop(name) for name in list(tensors) if name.endswith("weight_format")}
    save_file(tensors, folder / "model.safetensors")
    restored_weight = restored(folder)
    assert len(orders) == 14 and all(torch.equal(restored_weight(name), tensor) for name, tensor in before.items())
    save_file(tensors | {name: order + 1 for name, order in orders.items()}, folder / "model.safetensors")
    with pytest.raises(HubError, match="has codes in tiles of a GPU: save the model again"):
        mw.load(folder)


@pytest.mark.parametrize(("shape", "scheme", "more", "message"), [
    (SHAPE, "int4-hqq", {}, "cannot hold int4-hqq: it has normal floats and 8-bit weights alone; take scheme='nf4'"),
    (SHAPE, "fp8", {}, "cannot hold fp8"),
    (SHAPE, "nf4", {"group": 16}, "blocks of 16: take group=64"),
    (SHAPES["llama"], "nf4", {}, "mlp.down.weight: its 96 inputs are no multiple of group=64"),
    (SHAPES["gpt2"], "int8", {}, "gpt2's matrices in another order"),
    (SHAPES["qwen3_moe"], "nf4", {"group": 32}, "leaves stacks of experts as they are"),
])  # fmt: skip
def test_what_it_cannot_hold_is_refused_at_the_start(
    shape: ModelShape, scheme: str, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=message):
        quantized(tmp_path, scheme, shape, **more)
    assert not (tmp_path / "q").exists()


def rewritten(folder: Path, name: str, change: Callable[[bytearray], None]) -> None:
    """One tensor's bytes changed in place."""
    first = next(stored for key, stored in stored_tensors(folder).items() if key.endswith(name))
    raw = bytearray(first.file.read_bytes())
    part = raw[first.start : first.start + first.num_bytes]
    change(part)
    raw[first.start : first.start + first.num_bytes] = part
    first.file.write_bytes(bytes(raw))


def replaced(old: bytes, new: bytes) -> Callable[[bytearray], None]:
    def change(part: bytearray) -> None:
        assert old in part and len(old) == len(new)
        part[:] = part.replace(old, new)

    return change


STATE = "q_proj.weight.quant_state.bitsandbytes__nf4"
DAMAGE: dict[str, tuple[str, Callable[[bytearray], None], str]] = {
    "huge": (STATE, replaced(b"[64, 64]", b"[9999,9]"), r"shape=\[9999, 9\] .supported: \[64, 64\]"),
    "blocks": (STATE, replaced(b'"blocksize": 64', b'"blocksize": 48'), "blocks of 48"),
    "wider": (STATE, replaced(b'"blocksize": 64', b'"blocksize": 32'), r"absmax is \[64\] .* where \[128\]"),
    "kind": (STATE, replaced(b'"nf4"', b'"fp4"'), "quant_type='fp4' .supported: 'nf4'"),
    "json": (STATE, replaced(b'{"quant', b'[[quant'), "is damaged"),
    "map": ("q_proj.weight.quant_map", lambda part: part.__setitem__(slice(0, 4), b"\0\0\0\0"), "other numbers than"),
    "nested": ("q_proj.weight.nested_quant_map", lambda part: part.__setitem__(0, 7), "other numbers than"),
    "offset": (STATE, replaced(b'"nested_offset": 0', b'"nested_offset": "'), "is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    _, folder = quantized(tmp_path, "nf4-double")
    where, change, message = DAMAGE[name]
    rewritten(folder, where, change)
    with pytest.raises(HubError, match=message):
        mw.load(folder)


def test_a_config_of_other_storage_or_without_codes_is_refused(tmp_path: Path) -> None:
    directory(tmp_path / "hf", SHAPE)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": BNB, "load_in_4bit": True}})
    )
    with pytest.raises(HubError, match="no tensor of the folder is quantized"):
        mw.load(tmp_path / "hf")


def normal_float(bits: int = 4) -> tuple[float, ...]:
    """Return the numbers of a normal float (Dettmers et al. 2023, arXiv:2305.14314, eq. 4 and appendix E).

    They are quantiles of the standard normal distribution, evenly spaced in probability on both sides of zero, divided
    by the largest. One side has half of the codes, the other one less, and zero is exact. The outermost quantile is the
    mean of those of both sides: 1 - (1 / 30 + 1 / 32) / 2 for 4 bits.
    """
    half = 2 ** (bits - 1)
    outermost = 1 - (1 / (2 * (2 * half - 1)) + 1 / (2 * 2 * half)) / 2
    quantile = NormalDist().inv_cdf

    def side(count: int) -> list[float]:
        """Return `count` quantiles from the outermost one inwards. The next, at 1/2, would be zero."""
        return [quantile(outermost + (0.5 - outermost) * index / count) for index in range(count)]

    above, below = side(half), side(half - 1)
    return tuple(number / above[0] for number in sorted([*above, 0.0, *(-number for number in below)]))


def test_doubled_scales_are_near_and_their_table_is_what_it_says() -> None:
    """Codes name the nearest number of the table; a matrix of equal scales comes back exact."""
    assert (
        len(DYNAMIC) == 256
        and DYNAMIC[0] == -max(abs(tensor) for tensor in DYNAMIC if tensor < 0)
        and DYNAMIC[-1] == 1.0
    )
    assert max(abs(left - right) for left, right in zip(NF4, normal_float(), strict=True)) < 1e-6
    scales = torch.rand(7, 90, generator=torch.Generator().manual_seed(0)) + 0.1
    table = dynamic_table(scales.device)
    codes, outer, offset = doubled(scales)
    shares = ((scales - offset).flatten() / outer.repeat_interleave(256)[: scales.numel()]).view(scales.shape)
    nearest = (shares.unsqueeze(-1) - table).abs().argmin(-1)
    assert torch.equal(codes.long(), nearest)
    actual = undoubled(codes, outer, offset, table)
    torch.testing.assert_close(actual, table[codes.long()] * outer.repeat_interleave(256)[:630].view(7, 90) + offset)
    assert float((actual - scales).abs().max()) < 0.05
    same = torch.full((3, 5), 0.25)
    assert torch.equal(undoubled(*doubled(same), table), same)


def test_schemes_that_share_a_name_are_one_format(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="scales=double are for nf4"):
        replace(SCHEMES["int4-sym"], scales="double")

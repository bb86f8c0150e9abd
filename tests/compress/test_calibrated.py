"""GPTQ, AWQ and SmoothQuant on whole models: what is folded, gathered, resumed, held in memory and refused."""

import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.compress import calibrated_model as calibration
from meshwright.compress.calibrated_block import BlockModel, quantize_block, restored_parts
from meshwright.compress.calibrated_model import calibrate
from meshwright.compress.input_scales import fold, input_groups, list_folds
from meshwright.compress.layer_inputs import Inputs, observe_inputs
from meshwright.compress.original import OriginalModel, open_original
from meshwright.formats.hub import export_folder
from meshwright.formats.quantized.interface import QuantizedModel
from meshwright.formats.safetensors import stored_tensors
from meshwright.kernels.quantized import matrix
from meshwright.kernels.quantized.quantize import quantize_matrix
from meshwright.model import Transformer, build
from meshwright.model.quantized_weights import quantizable
from meshwright.spec import MLAShape, ModelShape
from meshwright.spec.errors import ArgumentError, DataError, PlanError
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.training.step.batches import Batch
from meshwright.verbs.main import main
from meshwright.verbs.quantize.passes import quantization_text
from tests.compress.test_formats import MOE, SHAPES, SIZES
from tests.compress.test_quantize import batch
from tests.counting import Alive
from tests.training.test_weights import directory
from tests.verbs.toy import train, write_texts

MLA = MLAShape(q_rank=24, kv_rank=32, nope_dim=16, rope_dim=8, v_dim=16)
EVERY = {
    **SHAPES,
    "deepseek": ModelShape(**SIZES, family="deepseek_v3", mla=MLA, moe=MOE),
    "gqa": ModelShape(**{**SIZES, "heads": 4}, kv_heads=2, qkv_bias=True, family="qwen2"),
}
TEXT = [batch(8, seed) for seed in (1, 2)]
CALIBRATED = [name for name, scheme in SCHEMES.items() if scheme.calibrated]


def original(shape: ModelShape, seed: int = 0) -> tuple[OriginalModel, Transformer]:
    """A model that is read from memory, and itself."""
    model = build(shape, seed=seed).eval().requires_grad_(False)
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(seed)
    for name, entry in model.state_dict().items():
        if "norm" in name or name.endswith("bias"):
            entry.add_(0.3 * torch.rand(entry.shape, generator=generator))
    weights = {**parameters, **{name: tensor for name, tensor in model.state_dict().items() if "correction" in name}}
    original_model = OriginalModel(
        shape=shape, dtype=torch.float32, tokenizer=None,
        weights=lambda dtype: ((name, weight.detach().clone()) for name, weight in weights.items()),
        chat_template=None, generation=None, dropout=0.0,
    )  # fmt: skip
    return original_model, model


def described(shape: ModelShape, scheme: str) -> QuantizedModel:
    schemes = dict.fromkeys(quantizable(shape), SCHEMES[scheme])
    return QuantizedModel(shape=shape, schemes=schemes, outlier_columns={}, dtype=torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("name", EVERY)
def test_folded_scales_change_no_logit(name: str) -> None:
    """Powers of two are exact but for sums in another order; others are exact to rounding."""
    shape = EVERY[name]
    _, model = original(shape)
    tokens, generator = batch().tokens, torch.Generator().manual_seed(5)
    before = model(tokens)
    places = [fold for layer in range(shape.layers) for fold in list_folds(shape, layer, quantizable(shape))]
    assert {position.source.rpartition(".")[2] for position in places} >= {
        "gpt2": {"attention_norm", "v", "mlp_norm"}, "deepseek": {"q_norm", "kv_norm", "up", "mlp_norm"},
    }.get(name, {"attention_norm", "v", "up"})  # fmt: skip
    for fold_place in places:
        reader = model.state_dict()[fold_place.readers[0]]
        number = len(reader) if reader.dim() == 3 else 1
        scales = [fold_place.tied(torch.rand(reader.shape[-1], generator=generator) * 4 + 0.2) for _ in range(number)]
        fold(model, fold_place, scales, torch.float32)
        changed = model(tokens)
        assert torch.allclose(changed, before, rtol=1e-4, atol=1e-4), fold_place


@torch.no_grad()
def test_a_gain_that_is_stored_in_16_bit_is_folded_exactly() -> None:
    _, model = original(EVERY["llama"])
    before = model(batch().tokens)
    (fold_place, *_) = list_folds(model.shape, 0, quantizable(model.shape))
    fold(model, fold_place, [torch.rand(64) + 0.3], torch.bfloat16)
    gain = model.get_submodule(fold_place.source).weight
    assert isinstance(gain, Tensor) and torch.equal(gain.bfloat16().float(), gain)
    assert torch.allclose(model(batch().tokens), before, rtol=1e-4, atol=1e-4)


def test_matrices_that_stay_are_not_scaled() -> None:
    shape = SHAPES["llama"]
    names = [
        name for name in quantizable(shape) if name not in ("layers.0.attention.k.weight", "layers.0.mlp.up.weight")
    ]
    assert [fold.source for fold in list_folds(shape, 0, names)] == ["layers.0.attention.v"]
    assert input_groups([name for name in names if name.startswith("layers.0.")]) == [
        ("layers.0.attention.q.weight", "layers.0.attention.v.weight"), ("layers.0.attention.o.weight",),
        ("layers.0.mlp.gate.weight",), ("layers.0.mlp.down.weight",),
    ]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "deepseek", "qwen3_moe", "gpt2"])
def test_what_a_block_gathers_is_what_the_whole_model_reads(name: str) -> None:
    source, model = original(EVERY[name])
    heard: dict[str, list[tuple[Tensor, list[int]]]] = {}
    wanted = [name for name in quantizable(model.shape) if name.startswith("layers.1.")]

    def seen(entry: str, x: Tensor, counts: Any) -> None:
        rows = x.reshape(-1, x.shape[-1])
        heard.setdefault(entry, []).append((rows.clone(), [len(rows)] if counts is None else list(counts)))

    with observe_inputs(model, wanted, seen):
        for part in TEXT:
            model(part.tokens)
    text = BlockModel(model.shape, torch.float32, TEXT)
    weights = dict(source.weights(torch.float32))
    text.enter({entry: weights[entry] for entry in ("embed.weight", "positions.weight") if entry in weights})
    for layer in (0, 1):
        ours = {name: tensor for name, tensor in weights.items() if name.startswith(f"layers.{layer}.")}
        with text.block(layer, ours.items()):
            if layer == 0:
                text.step(0)
                continue
            for wanted_name in wanted:
                size = quantizable(model.shape)[wanted_name]
                number = size[0] if len(size) == 3 else 1
                inputs = Inputs(
                    wanted_name, "products", number, size[-1], lambda which, hear: text.listen(1, which, hear)
                )
                for expert in range(number):
                    rows = torch.cat([x.split(counts)[expert] for x, counts in heard[wanted_name]])
                    actual = inputs.statistics(expert)
                    assert actual.rows == len(rows)
                    if len(rows):
                        assert torch.allclose(actual.gram, rows.t() @ rows / len(rows), rtol=1e-3, atol=1e-4), (
                            wanted_name
                        )
                        assert torch.allclose(actual.peaks, rows.abs().amax(0), rtol=1e-3, atol=1e-5)
    assert all(parameter.is_meta for parameter in text.model.parameters()), "nothing stays in memory"


@pytest.mark.parametrize("scheme", CALIBRATED)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek", "gpt2", "gqa"])
@pytest.mark.long
def test_every_family_is_calibrated_and_stays_close(name: str, scheme: str, tmp_path: Path) -> None:
    source, model = original(EVERY[name])
    actual = calibrate(tmp_path / "q", source, described(model.shape, scheme), TEXT, torch.float32)
    after = build(model.shape).eval().requires_grad_(False)
    places = after.state_dict()
    inputs = {}
    for entry, what in actual.weights:
        inputs[entry] = what if isinstance(what, Tensor) else what.dequantized()
        places[entry].copy_(inputs[entry])
    assert set(inputs) == {entry for entry, _ in source.weights(torch.float32)}
    assert [layer.name for layer in actual.layers] == list(quantizable(model.shape))
    p, q = (entry(TEXT[0].tokens).double().log_softmax(-1) for entry in (model, after))
    bound = {"int8-smooth": 1e-3, "int3-gptq": 0.2}.get(scheme, 0.05)
    assert 0 < float((p.exp() * (p - q)).sum(-1).mean()) < bound


def test_experts_that_the_text_hardly_reaches_are_rounded_and_counted(tmp_path: Path) -> None:
    source, model = original(EVERY["deepseek"])
    model.get_buffer("layers.1.mlp.router.correction_bias")[2] = -100.0
    actual = calibrate(tmp_path / "q", source, described(model.shape, "int4-gptq"), TEXT, torch.float32)
    rare = {layer.name: layer.uncalibrated for layer in actual.layers if layer.uncalibrated}
    assert rare == {f"layers.1.mlp.experts.{leaf}": 1 for leaf in ("gate", "up", "down")}


def test_a_stack_is_gathered_in_parts_and_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, model = original(SHAPES["qwen3_moe"])
    whole = [tensors(what) for _, what in calibrated(tmp_path / "a", source, model.shape).weights]
    monkeypatch.setattr("meshwright.compress.layer_inputs.PRODUCTS_BYTES", 1)
    parts = [tensors(what) for _, what in calibrated(tmp_path / "b", source, model.shape).weights]
    assert all(torch.equal(left, right) for first, second in zip(whole, parts, strict=True)
               for left, right in zip(first, second, strict=True))  # fmt: skip


def calibrated(out: Path, source: OriginalModel, shape: ModelShape, **more: Any) -> calibration.Calibrated:
    return calibrate(out, source, described(shape, "int4-gptq"), TEXT, torch.float32, **more)


def tensors(what: Any) -> list[Tensor]:
    return [what] if isinstance(what, Tensor) else list(what.tensors.values())


def test_memory_holds_one_matrix_beside_the_block_that_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block that is read back as codes."""
    monkeypatch.setattr(matrix, "PIECE", 256)
    source, _ = original(SHAPES["llama"])
    text = BlockModel(source.shape, torch.float32, TEXT)
    weights = {name: entry for name, entry in source.weights(torch.float32) if name.startswith("layers.0.")}
    parts = {
        name: quantize_matrix(name, weight, SCHEMES["int4-rtn"]) if name in quantizable(source.shape) else weight
        for name, weight in weights.items()
    }
    known = [
        entry for part in parts.values() for entry in ([part] if isinstance(part, Tensor) else part.tensors.values())
    ]
    with Alive(known) as alive, text.block(0, restored_parts(parts, torch.float32)):
        pass
    whole, largest = (lookup(weight.nbytes for weight in weights.values()) for lookup in (sum, max))
    assert whole < alive.peak_bytes < whole + 2 * largest


def test_memory_holds_one_block(tmp_path: Path) -> None:
    shape = replace(SHAPES["llama"], layers=6)
    plain, model = original(shape)
    alive: dict[int, int] = {}
    most = 0

    def weights(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name, tensor in plain.weights(dtype):
            copied = tensor.clone()
            alive[id(copied)] = copied.nbytes if name.startswith("layers.") else 0
            weakref.finalize(copied, alive.pop, id(copied))
            most = max(most, sum(alive.values()))
            yield name, copied
            del copied, tensor

    calls = []
    text = calibration.BlockModel

    class Watched(text):  # type: ignore[misc, valid-type]  # a class of a module's name
        def listen(self, layer: int, *inputs: Any) -> None:
            real = {name.split(".")[1] for name, parameter in self.model.named_parameters() if not parameter.is_meta}
            calls.append(real)
            super().listen(layer, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "BlockModel", Watched)
        for _, what in calibrated(tmp_path / "q", replace(plain, weights=weights), shape).weights:
            del what
    block = sum(parameter.nbytes for name, parameter in model.named_parameters() if name.startswith("layers.0."))
    assert all(len(call) == 1 for call in calls) and len(calls) == 6 * 4
    assert most <= 2 * block, (most, block)


def run(folder: Path, out: str, *, fail_after: int = 0, scheme: str = "int4-awq") -> subprocess.Popen[bytes]:
    """`quantize` in a process of its own, which stops for good after so many blocks."""
    code = (
        "import time, meshwright as mw\nfrom meshwright.compress import calibrated_model as f\n"
        "plain, count = f.FinishedBlocks.save, 0\n"
        "def save(*given):\n    global count\n    plain(*given)\n    count += 1\n"
        f"    if count == {fail_after}:\n        print('x', flush=True)\n        time.sleep(100)\n"
        "f.FinishedBlocks.save = save\n"
        f"mw.quantize({str(folder / 'hf')!r}, {scheme!r}, {str(folder / out)!r}, data={str(folder / 'text.txt')!r},"
        " quality=False)"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    directory(tmp_path / "hf", replace(SHAPES["llama"], layers=3))
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n\nclass A:\n    pass\n\n" * 300)
    return tmp_path


@pytest.mark.long
def test_after_a_kill_it_goes_on_with_the_same_bits(folder: Path) -> None:
    inputs: dict[str, Any] = {"data": folder / "text.txt", "quality": False}
    assert mw.quantize(folder / "hf", "int4-awq", folder / "whole", **inputs).resumed_blocks == 0
    with run(folder, "q", fail_after=2) as child:
        assert child.stdout is not None and child.stdout.readline() == b"x\n"
        child.send_signal(signal.SIGKILL)
    left = folder / ".q.blocks"
    assert not (folder / "q").exists() and sorted(entry.name for entry in left.iterdir()) == ["00000", "00001"]
    quantized = mw.quantize(folder / "hf", "int4-awq", folder / "q", **inputs)
    assert quantized.resumed_blocks == 2 and not left.exists()
    files = [(folder / name / "model.safetensors").read_bytes() for name in ("whole", "q")]
    assert files[0] == files[1]
    assert [layer.weight_error for layer in quantized.layers] == [
        layer.weight_error for layer in mw.quantize(folder / "hf", "int4-awq", folder / "again", **inputs).layers
    ]


def test_blocks_of_other_content_and_damaged_ones_are_made_again(folder: Path) -> None:
    source, model = original(replace(SHAPES["llama"], layers=3))
    shape = model.shape
    first = calibrated(folder / "q", source, shape)
    assert first.resumed == 0 and calibrated(folder / "q", source, shape).resumed == 3
    record = first.finished.path / "00001" / "model.safetensors"
    raw = bytearray(record.read_bytes())
    raw[-5] ^= 1
    record.write_bytes(raw)
    assert calibrated(folder / "q", source, shape).resumed == 2, "one was damaged"
    (first.finished.path / "00002" / "block.json").write_text("[")
    assert calibrated(folder / "q", source, shape).resumed == 2
    model.get_parameter("layers.1.mlp.up.weight")[0, 0] += 1.0
    assert calibrated(folder / "q", source, shape).resumed == 1, "the second's weights are others"
    other = calibrate(folder / "q", source, described(shape, "int4-gptq"), TEXT[::-1], torch.float32)
    assert other.resumed == 0, "other text"


def test_what_cannot_be_calibrated_is_refused_and_leaves_nothing(folder: Path) -> None:
    out = folder / "q"
    with pytest.raises(DataError, match=r"has 64 tokens, and .*mlp.down.weight has 96 inputs. Raise calibration="):
        mw.quantize(folder / "hf", "int4-gptq", out, data=folder / "text.txt", calibration=1, sequences=8)
    with pytest.raises(ArgumentError, match="calibration=0 must be 1 or more"):
        mw.quantize(folder / "hf", "int4-gptq", out, data=folder / "text.txt", calibration=0)
    loaded = mw.load(folder / "hf")
    for name, bad, message in (
        (
            "layers.1.mlp.up.weight",
            float("nan"),
            r"mlp\.up\.weight cannot be quantized: 1 of its weights are infinite",
        ),
        ("layers.1.mlp_norm.weight", float("inf"), r"layers\.1\.mlp\.gate\.weight reads activations that are infinite"),
    ):
        weights = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
        weights[name].view(-1)[3] = bad
        export_folder(
            folder / name, model_tensors=weights.items(), shape=loaded.model.shape, tokenizer=loaded.tokenizer,
            dtype=torch.float32,
        )  # fmt: skip
        with pytest.raises(PlanError, match=message):
            mw.quantize(folder / name, "int4-gptq", out, data=folder / "text.txt", quality=False)
    assert sorted(entry.name for entry in folder.iterdir() if entry.name.startswith((".", "q"))) == []


def test_compressed_tensors_hold_the_same_codes(folder: Path) -> None:
    inputs: dict[str, Any] = {"data": folder / "text.txt", "quality": False}
    for scheme in ("int4-gptq", "int4-awq", "int8-smooth"):
        quantized = mw.quantize(folder / "hf", scheme, folder / scheme, **inputs)
        other = mw.quantize(folder / "hf", scheme, folder / f"{scheme}-ct", format="compressed-tensors", **inputs)
        assert quantized.bytes == quantized.predicted_bytes and other.bytes == other.predicted_bytes
        first, second = (mw.load(folder / name).model for name in (scheme, f"{scheme}-ct"))
        with torch.no_grad():
            assert torch.equal(first(batch().tokens), second(batch().tokens)), scheme


def test_a_run_calibrates_on_what_it_trained_on_and_is_scored_on_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ["model.hidden=64", "model.ffn=96", "data.tokenizer=bytes", "data.validation=0.3"]
    assert main([*train(write_texts(tmp_path / "texts"), tmp_path / "run", *shape)]) == 0
    capsys.readouterr()
    words = ["quantize", str(tmp_path / "run"), "--sequences", "8", "--calibration", "16", "--max-kl", "2"]
    assert main([*words, "--scheme", "int4-gptq", "-o", str(tmp_path / "q")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "tokens of what the run trained on" in printed
    opened = mw.load(tmp_path / "run")
    plain, ours = (quantization_text(opened, None, 8, windows) for windows in (None, 16))
    assert all(torch.equal(left.tokens, right.tokens) for left, right in zip(plain.scored, ours.scored, strict=True))
    scored = {tuple(row.tolist()) for part in ours.scored for row in part.tokens}
    read = {tuple(row.tolist()) for part in ours.calibration for row in part.tokens}
    assert read and not read & scored


def test_a_text_below_two_windows_is_told_in_tokens_and_one_of_two_is_enough(folder: Path) -> None:
    opened = mw.load(folder / "hf")
    assert opened.tokenizer is not None
    window = opened.model.shape.max_positions
    short = folder / "short.txt"
    for words in (3, 20, 90, 4 * window):
        short.write_text("a = 1\n" * words)
        tokens = len(opened.tokenizer.encode(short.read_text()))
        if tokens > window + 2:
            actual = quantization_text(opened, short, 64, None)
            assert actual.calibration and actual.scored, tokens
            continue
        with pytest.raises(DataError, match=rf"2 windows of {window:,}, which are {window + 2:,} tokens"):
            quantization_text(opened, short, 64, None)
    assert tokens > window + 2, "both ways were tried"


def test_sharded_models_are_read_as_they_come(folder: Path) -> None:
    loaded = mw.load(folder / "hf")
    export_folder(
        folder / "shards", model_tensors=loaded.model.state_dict().items(), shape=loaded.model.shape,
        tokenizer=loaded.tokenizer, dtype=torch.float32, max_shard_bytes=200_000,
    )  # fmt: skip
    assert len(list((folder / "shards").glob("*.safetensors"))) > 3
    for name in ("hf", "shards"):
        mw.quantize(folder / name, "int4-gptq", folder / f"{name}-q", data=folder / "text.txt", quality=False)
    first, second = (stored_tensors(folder / f"{name}-q") for name in ("hf", "shards"))
    assert (
        all(torch.equal(first[entry].read(), second[entry].read()) for entry in first) and first.keys() == second.keys()
    )


def test_a_block_is_made_from_its_weights_as_they_are_stored(folder: Path) -> None:
    """Parts outside of matrices come back to the bit, in the dtype of the file."""
    source = open_original(folder / "hf", "last")
    model = described(source.shape, "int4-gptq")
    text = BlockModel(source.shape, torch.float32, TEXT)
    weights = dict(source.weights(torch.bfloat16))
    text.enter({"embed.weight": weights["embed.weight"]})
    ours = {name: weight for name, weight in weights.items() if name.startswith("layers.0.")}
    schemes = {name: scheme for name, scheme in model.schemes.items() if name in ours}
    made = quantize_block(text, 0, ours, schemes, torch.bfloat16)
    assert list(made.parts) == list(ours)
    norm = made.parts["layers.0.mlp_norm.weight"]
    assert isinstance(norm, Tensor) and torch.equal(norm, ours["layers.0.mlp_norm.weight"])


def test_a_batch_keeps_only_rows_that_count() -> None:
    rows = Batch(
        tokens=torch.arange(12).view(3, 4),
        targets=torch.zeros(3, 4, dtype=torch.long),
        valid=8,
        valid_of_rows=(4, 0, 4),
    )
    (actual,) = calibration.drop_padding_rows([rows])
    assert actual.tokens.tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]] and actual.valid == 8
    assert list(calibration.drop_padding_rows([replace(rows, valid_of_rows=(0, 0, 0))])) == []

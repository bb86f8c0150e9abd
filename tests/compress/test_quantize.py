"""`quantize` through the command line and from Python: what it writes, says, measures and refuses."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.compress.layer_inputs import column_peaks, outlier_columns
from meshwright.compress.quality import compare
from meshwright.kernels import reference
from meshwright.model import Transformer, build
from meshwright.model.layers import Linear
from meshwright.model.low_rank import LoRA
from meshwright.model.quantized_weights import quantizable
from meshwright.spec.errors import ArgumentError, OutsideTolerance, PlanError, RunError
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.spec.model.shape import LoRAShape
from meshwright.training.step.batches import Batch
from meshwright.verbs.main import main
from meshwright.verbs.quantize.answer import LayerRecord, QuantizeAnswer
from tests.compress.test_formats import SHAPES
from tests.training.test_weights import directory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face directory `hf`, with a text beside it."""
    directory(tmp_path / "hf", SHAPES["llama"])
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n\nclass A:\n    pass\n\n" * 1200)
    return tmp_path


def words(folder: Path, scheme: str, *more: str) -> list[str]:
    return [
        "quantize", str(folder / "hf"), "--scheme", scheme, "-o", str(folder / "q"), "--data", str(folder / "text.txt"),
        "--sequences", "16", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.long
def test_the_verb_writes_measures_and_others_read(
    scheme: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(folder, scheme, "--json", "--max-kl", "2")) == 0
    document = json.loads(capsys.readouterr().out)
    files = sum(path.stat().st_size for path in folder.glob("q/*.safetensors"))
    assert document["scheme"] == scheme and document["bytes"] == document["predicted_bytes"] == files
    assert 0 < document["kl"] < 0.5 and 0.5 < document["top1"] <= 1 and document["tokens"] > 500 and document["passed"]
    assert document["perplexity_after"] == pytest.approx(document["perplexity_before"], rel=0.2)
    assert [layer["name"] for layer in document["layers"]] == list(quantizable(SHAPES["llama"]))
    assert all(0 < layer["output_error"] < 0.2 and layer["weight_error"] < 0.4 for layer in document["layers"])
    assert main(["generate", str(folder / "q"), "--prompt", "def", "--greedy", "--max-new-tokens", "4"]) == 0
    assert main(["eval", str(folder / "q"), "--data", str(folder / "text.txt"), "--json"]) == 0
    loss = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    plain = mw.load(folder / "hf").evaluate(folder / "text.txt").loss
    assert loss == pytest.approx(plain, rel=0.02)


def test_what_is_printed_begins_with_the_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(folder, "int4-rtn", "--keep", "layers.0.*")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("OK  int4-rtn: ") and "KL" in lines[0] and "smaller" in lines[0]
    text = " ".join(" ".join(lines).split())  # folded to the screen
    assert "as predicted" in text and "left alone" in text and "layers.0.attention.q.weight" in text
    assert all(line.split()[-1].startswith("layers.1.") for line in lines[-5:])


@pytest.mark.parametrize(
    ("scheme", "name", "message"),
    [("q6_k", "small.gguf", "types Q8_0 for 16 matrices"), ("llm-int8", "q", "no column was kept in 16 bit")],
)
def test_what_a_scheme_became_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str], scheme: str, name: str, message: str
) -> None:
    inputs = [str(folder / "hf"), "--scheme", scheme, "-o", str(folder / name), "--data", str(folder / "text.txt")]
    main(["quantize", *inputs, "--no-quality", *(["--threshold", "1e6"] if scheme == "llm-int8" else [])])
    assert message in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("scheme", "least"), [("int4-rtn", 3), ("int8", 1), ("int3", 0)])
def test_other_formats_that_are_named_are_those_that_hold_the_scheme(
    folder: Path, capsys: pytest.CaptureFixture[str], scheme: str, least: int
) -> None:
    assert main([*words(folder, scheme), "--no-quality"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    holding = []
    for name in ("compressed-tensors", "gptq", "awq", "bitsandbytes"):
        if main([*words(folder, scheme), "--no-quality", "--format", name, "-o", str(folder / name)]) == 0:
            holding.append(name)
    assert len(holding) >= least and ("no other format holds this" in printed) == (not holding)
    assert not holding or f"--format {' or '.join(holding)} is for other software" in printed


def test_beyond_the_limit_the_exit_code_is_4_and_the_folder_is_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(folder, "int3", "--max-kl", "1e-6", "--json")) == 4
    out = capsys.readouterr()
    assert not json.loads(out.out)["passed"] and (folder / "q" / "model.safetensors").is_file()
    assert "int3 is too lossy: it moves predictions by" in out.err and "--keep layers." in out.err


@pytest.mark.parametrize(("change", "kind", "message"), [
    ({"scheme": "int5"}, ArgumentError, "scheme='int5' is not known: take one of int8, llm-int8"),
    ({"scheme": "int4"}, ArgumentError, "nearest: int4-rtn, int4-sym, int4-hqq, int4-gptq, int4-awq, int4-awq-gptq$"),
    ({"scheme": "int8", "group": 32}, ArgumentError, "group=32: int8 has a scale for each output"),
    ({"scheme": "nf4", "group": 48}, PlanError, "group=48 is not supported"),
    ({"scheme": "int8", "zero_point": "both"}, ArgumentError, "is for int8-zeropoint, int8-vector-zeropoint"),
    ({"scheme": "int8-zeropoint", "zero_point": "some"}, ArgumentError, "take both or weights or activations"),
    ({"scheme": "int8-tensor", "format": "bitsandbytes"}, PlanError, "a scale for each token"),
    ({"scheme": "int8-zeropoint", "format": "compressed-tensors"}, PlanError, "neither side has zeros"),
    ({"scheme": "nf4", "threshold": 3.0}, ArgumentError, "are for scheme='llm-int8'"),
    ({"scheme": "llm-int8", "outliers": "some"}, ArgumentError, "outliers='some' is not known"),
    ({"scheme": "llm-int8", "threshold": 0.0}, PlanError, "threshold=0 must be above 0"),
    ({"scheme": "int8", "format": "gif"}, ArgumentError, "format='gif' is not known: take one of meshwright"),
    ({"scheme": "int8", "keep": ["head"]}, ArgumentError, "keep='head' names no matrix"),
    ({"scheme": "int8", "keep": ["*"]}, ArgumentError, "leaves nothing to quantize"),
    ({"scheme": "int8", "sequences": 0}, ArgumentError, "sequences=0 must be 1 or more"),
    ({"scheme": "int8", "max_kl": float("nan")}, ArgumentError, "max_kl=nan"),
    ({"scheme": "int8", "dtype": "int8"}, ArgumentError, "dtype='int8' is not known"),
    ({"scheme": "int8", "model": "nowhere"}, RunError, "nowhere does not exist"),
])  # fmt: skip
def test_bad_input_is_refused_before_anything_is_made(
    change: dict[str, Any], kind: type[Exception], message: str, folder: Path
) -> None:
    inputs = {"model": folder / "hf", "out": folder / "q", **change}
    with pytest.raises(kind, match=message):
        mw.quantize(**inputs)
    assert not (folder / "q").exists()


@pytest.mark.parametrize(
    ("scheme", "out", "room"), [("int4-rtn", "q", 1.0), ("int4-gptq", "q", 1.02), ("q8_0", "q.gguf", 1.0)]
)
def test_a_disk_without_room_is_said_before_anything_is_written(
    scheme: str,
    out: str,
    room: float,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of a calibrated method are beside its folder until the end; those of an earlier run are there already."""
    inputs = ["quantize", str(folder / "hf"), "--scheme", scheme, "--data", str(folder / "text.txt"), "--no-quality"]
    assert main([*inputs, "-o", str(folder / f"first-{out}"), "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)["predicted_bytes"]
    free = int(predicted * room)
    monkeypatch.setattr("shutil.disk_usage", lambda location: SimpleNamespace(free=free - 1))
    assert main([*inputs, "-o", str(folder / out)]) == 2
    printed = capsys.readouterr().err
    [needed] = [int(entry.replace(",", "")) for entry in re.findall(r"needs .*? \(([\d,]+) bytes\)", printed)]
    assert (
        f"({free - 1:,} bytes) are free" in printed
        and not list(folder.glob(f"*{out}.*"))
        and not (folder / out).exists()
    )
    assert needed == predicted if scheme != "int4-gptq" else free <= needed < 1.1 * predicted
    monkeypatch.setattr("shutil.disk_usage", lambda location: SimpleNamespace(free=needed))
    assert main([*inputs, "-o", str(folder / out)]) == 0


def test_a_folder_that_is_taken_and_weights_that_are_not_finite_are_refused(folder: Path) -> None:
    with pytest.raises(PlanError, match="hf' is not empty"):
        mw.quantize(folder / "hf", "int8", folder / "hf")
    loaded = mw.load(folder / "hf")
    weights = dict(loaded.model.state_dict())
    weights["layers.1.mlp.up.weight"][3, 4] = float("nan")
    from meshwright.formats.hub import export_folder

    export_folder(
        folder / "bad", model_tensors=weights.items(), shape=loaded.model.shape, tokenizer=loaded.tokenizer,
        dtype=torch.float32,
    )  # fmt: skip
    with pytest.raises(PlanError, match=r"mlp\.up.weight cannot be quantized: 1 of its weights are infinite"):
        mw.quantize(folder / "bad", "int8", folder / "q", quality=False)
    assert not [entry.name for entry in folder.iterdir() if "q" in entry.name.split(".")[0] or "partial" in entry.name]


def test_names_of_gguf_files_are_for_their_schemes(folder: Path) -> None:
    with pytest.raises(ArgumentError, match=r"small.gguf' names a GGUF file, which has schemes of its own: q8_0"):
        mw.quantize(folder / "hf", "int8", folder / "small.gguf", quality=False)
    (folder / "taken.gguf").write_bytes(b"GGUF")
    with pytest.raises(PlanError, match=r"taken.gguf' is there already"):
        mw.quantize(folder / "hf", "q8_0", folder / "taken.gguf", quality=False)


def test_a_kill_leaves_nothing_under_the_name(folder: Path) -> None:
    code = (
        "import sys, time, meshwright as mw\nfrom meshwright.compress import stream\n"
        "plain = stream.quantize_matrix\n"
        "def slow(*given):\n    print('x', flush=True)\n    time.sleep(0.5)\n    return plain(*given)\n"
        "stream.quantize_matrix = slow\n"
        f"mw.quantize({str(folder / 'hf')!r}, 'int8', {str(folder / 'q')!r}, quality=False)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ}) as child:
        assert child.stdout is not None and child.stdout.readline() == b"x\n"
        time.sleep(0.2)
        child.send_signal(signal.SIGKILL)
    assert not (folder / "q").exists()
    assert mw.quantize(folder / "hf", "int8", folder / "q", quality=False).quality is None


def test_answers_know_their_limit_and_their_worst_layer() -> None:
    layers = tuple(
        LayerRecord(name=f"layers.{n}", scheme="int3", bytes=8, weight_error=0.1, output_error=n / 10, outliers=0.0)
        for n in range(7)
    )
    quantize_answer = QuantizeAnswer(
        run=Path("q"), original=Path("m"), scheme="int3", format="meshwright", bytes=10, predicted_bytes=10,
        bytes_before=40, quality=None, max_kl=0.1, layers=layers, skipped=(), quantized_parameters=16,
    )  # fmt: skip
    quantize_answer.check()
    assert [entry.name for entry in quantize_answer.blamed] == [f"layers.{n}" for n in (6, 5, 4, 3, 2)]
    assert quantize_answer.headline == "int3: 4.00x smaller (0.0 MiB to 0.0 MiB), quality not measured"
    assert len(quantize_answer.rows()) == 7 and "layers.6" in quantize_answer._repr_html_()
    assert quantize_answer.to_dict()["kl"] is None


def toy(seed: int = 0) -> Transformer:
    return build(SHAPES["llama"], seed=seed).eval()


def batch(rows: int = 4, seed: int = 0) -> Batch:
    tokens = torch.randint(0, 2048, (rows, 33), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:].contiguous(), valid=rows * 32)


@torch.no_grad()
def test_the_divergence_is_its_definition() -> None:
    before, after, first_batch = toy(), toy(1), batch()
    comparison = compare(before, after, [first_batch, batch(seed=1)])
    p, q = (
        torch.cat([model(part.tokens).flatten(0, 1).double().log_softmax(-1) for part in (first_batch, batch(seed=1))])
        for model in (before, after)
    )
    divergence = (p.exp() * (p - q)).sum(-1)
    targets = torch.cat([part.targets.flatten() for part in (first_batch, batch(seed=1))])
    assert comparison.tokens == 256 and comparison.kl == pytest.approx(float(divergence.mean()), rel=1e-4)
    assert comparison.kl_error == pytest.approx(float(divergence.std()) / 16, rel=1e-3)
    assert comparison.kl_p99 == pytest.approx(float(divergence.sort().values[253]), rel=1e-4)
    assert comparison.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    loss = float(-q.gather(1, targets.unsqueeze(1)).mean())
    assert comparison.perplexity_after == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)
    assert compare(before, before, [first_batch]).kl == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("shape", ["llama", "qwen3_moe"])
def test_peaks_are_those_of_what_matrices_read(shape: str) -> None:
    model = build(SHAPES[shape]).eval()
    peaks = column_peaks(model, [batch()], quantizable(SHAPES[shape]))
    assert peaks.keys() == quantizable(SHAPES[shape]).keys()
    assert all(len(peaks[name]) == size[-1] for name, size in quantizable(SHAPES[shape]).items())
    assert torch.equal(peaks["layers.0.attention.q.weight"], peaks["layers.0.attention.k.weight"])
    heard: list[torch.Tensor] = []
    with torch.no_grad():
        layer = model.get_submodule("layers.1.attention.o")
        hook = layer.register_forward_pre_hook(lambda module, inputs: heard.append(inputs[0]))
        model(batch().tokens)
        hook.remove()
    assert torch.equal(peaks["layers.1.attention.o.weight"], heard[0].flatten(0, -2).abs().amax(0))
    with torch.no_grad():
        again = model(batch().tokens)
        assert torch.equal(again, build(SHAPES[shape]).eval()(batch().tokens)), "nothing stays on the model"


def test_outliers_are_columns_far_above_the_median() -> None:
    peak = torch.rand(64) + 0.5
    peak[[7, 30]] = torch.tensor([40.0, 12.0])
    actual = outlier_columns({"a": peak, "b": torch.rand(64) + 0.5}, 6.0)
    assert list(actual) == ["a"] and actual["a"].tolist() == [7, 30] and actual["a"].dtype == torch.int32
    many = torch.cat((torch.ones(40), torch.arange(100.0, 124.0)))
    assert outlier_columns({"a": many}, 6.0)["a"].tolist() == list(range(56, 64)), "an eighth, the largest"
    assert outlier_columns({"a": torch.zeros(64)}, 6.0) == {}


def test_an_adapter_beside_codes_adds_its_sum(folder: Path) -> None:
    """The seam of QLoRA: base of codes, LoRA on top, gradients for the adapter alone."""
    mw.quantize(folder / "hf", "nf4", folder / "q", quality=False)
    model = mw.load(folder / "q").model
    layer = model.get_submodule("layers.0.attention.q")
    assert isinstance(layer, Linear) and layer.weight is None
    x = torch.randn(2, 5, 64, requires_grad=True)
    plain = layer(x)
    lora = LoRA(LoRAShape(rank=4), 64, 64)
    torch.nn.init.normal_(lora.a)
    torch.nn.init.normal_(lora.b)
    layer.lora = lora
    actual = layer(x)
    expected = plain + lora.scale * (x @ lora.a.t()) @ lora.b.t()
    assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-5)
    actual.sum().backward()
    assert lora.b.grad is not None and x.grad is not None
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == [
        "layers.0.attention.q.lora.a", "layers.0.attention.q.lora.b",
    ]  # fmt: skip


def test_the_reference_set_gives_the_same_logits(folder: Path) -> None:
    mw.quantize(folder / "hf", "int8", folder / "q", quality=False)
    model = mw.load(folder / "q").model
    tokens = batch().tokens
    with torch.no_grad():
        fast = model(tokens)
        for module in model.modules():
            if isinstance(module, Linear):
                module.kernels = replace(module.kernels, quantized_linears=reference().quantized_linears)
        assert torch.equal(model(tokens), fast)


def test_out_of_bounds_is_an_error_with_its_layer() -> None:
    with pytest.raises(OutsideTolerance, match=r"int3 is too lossy: it moves predictions by nan .* keep='layers\.0"):
        from meshwright.compress.quality import Quality

        bad = Quality(tokens=1, kl=float("nan"), kl_error=0, kl_p99=0, top1=0, perplexity_before=1, perplexity_after=1)
        layer = LayerRecord(name="layers.0", scheme="int3", bytes=8, weight_error=0.1, output_error=0.5, outliers=0.0)
        QuantizeAnswer(
            run=Path("q"), original=Path("m"), scheme="int3", format="meshwright", bytes=10, predicted_bytes=10,
            bytes_before=40, quality=bad, max_kl=0.1, layers=(layer,), skipped=(), quantized_parameters=16,
        ).check()  # fmt: skip

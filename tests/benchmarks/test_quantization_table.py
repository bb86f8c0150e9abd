"""The table of 8-bit methods at toy size: outliers change nothing, and what is read of the rows."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import meshwright as mw
from benchmarks import quantization_table as table
from benchmarks import quantized_rates as rates
from meshwright.kernels.quantized.quantized_linear import quantized_linears
from meshwright.model import build
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.verbs.main import main
from tests.compress.test_formats import SHAPES
from tests.compress.test_quantize import batch
from tests.verbs.toy import train, write_texts

SHAPE = ["model.hidden=64", "model.ffn=96", "data.tokenizer=bytes"]


@torch.no_grad()
def test_outliers_change_no_logit_and_make_large_activations() -> None:
    plain = build(SHAPES["llama"]).eval()
    strong = table.inject(plain, 64.0)
    tokens = batch().tokens
    assert torch.equal(plain(tokens), strong(tokens)), "powers of two"
    peaks = table.column_peaks(strong, [batch()], ["layers.0.attention.q.weight", "layers.1.mlp.down.weight"])
    columns = table.outlier_columns(peaks, 6.0)
    assert all(table.CHANNELS <= len(column) <= 8 for column in columns.values()) and len(columns) == 2


@torch.no_grad()
def test_methods_are_those_of_the_lecture() -> None:
    model, tokens = build(SHAPES["llama"]).eval(), batch().tokens
    exact = model(tokens)
    errors = {
        row: float((table.rounded(model, SCHEMES[name], {})(tokens) - exact).norm())
        for row, name in table.METHODS.items()
    }
    absmax, zero_point, rows, vectors, zero_vectors, *_ = errors.values()
    assert absmax > rows > vectors and zero_point > zero_vectors > 0 and len(errors) == 8
    # Each row is what numpy makes of one matrix, whole as the definition has it, tokens and weights in fp64.
    name, layer = next(iter(table.layers(model).items()))
    x = torch.randn(6, layer.weight.shape[1], generator=torch.Generator().manual_seed(0))
    matrix = table.rounded(model, SCHEMES["int8-tensor"], {}).get_submodule(name.removesuffix(".weight")).lora.matrix
    weight, numbers = layer.weight.detach().double().numpy(), x.double().numpy()
    steps = float(matrix.scales[0, 0]), np.abs(numbers).max() / 127
    codes = (np.clip(np.rint(each / step), -127, 127) for each, step in zip((weight, numbers), steps, strict=True))
    of_weights, of_tokens = codes
    expected = of_tokens @ of_weights.T * steps[0] * steps[1]
    assert np.allclose(quantized_linears(x, [matrix], [None])[0].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_the_benchmark_runs_at_toy_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*train(write_texts(tmp_path / "texts"), tmp_path / "run", *SHAPE), "data.validation=0.3"]) == 0
    capsys.readouterr()
    words = ["table", "--json", "--run", str(tmp_path / "run"), "--scales", "1,64", "--sequences", "16"]
    monkeypatch.setattr(sys, "argv", words)
    table.main()
    document = json.loads(capsys.readouterr().out)
    assert list(document["perplexity"]) == ["1", "64"]
    assert list(document["perplexity"]["64"]) == ["fp32", *table.METHODS]
    assert document["neighbours"] == 0 and document["gap_64"] < 0.01 and document["worst_1"] < 0.05
    assert document["facts"]["64"]["injection_kl"] < 1e-6 and document["facts"]["64"]["columns"] > 0
    assert mw.load(tmp_path / "run").plan is not None


def test_rates_are_measured_at_toy_size(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rates", "--json", "--size", "256", "--rows", "1,40", "--rounds", "1"])
    rates.main()
    document = json.loads(capsys.readouterr().out)
    assert document["over_bf16"].keys() == {"1", "40"} and set(document["over_bf16"]["1"]) == set(rates.WAYS)
    assert all(document[name] > 0 for name in ("int4_bandwidth", "int4_over_fp16", "llm_int8_many_rows"))
    assert document["slowest_over_bf16"] <= document["llm_int8_one_row"]

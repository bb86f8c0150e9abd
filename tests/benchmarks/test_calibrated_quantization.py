"""The benchmark of calibrated quantization at toy size."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import calibrated_quantization as bench
from meshwright.compress import calibrated_methods
from meshwright.kernels.quantized.quantize import scales_of
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.verbs.main import main
from tests.benchmarks.test_quantization_table import SHAPE
from tests.verbs.toy import train, write_texts


@pytest.mark.long
def test_the_benchmark_runs_at_toy_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*train(write_texts(tmp_path / "texts"), tmp_path / "run", *SHAPE), "data.validation=0.3"]) == 0
    capsys.readouterr()
    words = ["bench", "--json", "--run", str(tmp_path / "run"), "--sequences", "8", "--calibration", "8"]
    monkeypatch.setattr(sys, "argv", words)
    bench.main()
    document = json.loads(capsys.readouterr().out)
    assert list(document["rows"]["as trained"]) == [*bench.PLAIN, bench.MIXED]
    assert list(document["rows"]["with outliers"]) == list(bench.STRONG)
    assert document["gptq_off_textbook"] < 0.05 and 0 < document["int3_top1"] <= 1
    assert all(document[name] > 0 for name in ("gptq_over_rtn", "gptq_over_hqq", "awq_over_rtn", "smooth_over_int8"))


def test_its_textbook_is_ours_in_fp64() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).double() * 0.1
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(1)).double().cumsum(1)
    scheme = SCHEMES["int4-gptq"]
    scales, zeros = scales_of(weight.float(), scheme)
    inputs = weight, x.t() @ x / 300, scheme, scales.float(), zeros
    assert torch.equal(bench.textbook(*inputs), calibrated_methods.quantize_columns(*inputs))

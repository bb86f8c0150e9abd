"""The comparison with llama.cpp at toy size: what the claims read is there, and means what it says."""

from pathlib import Path

import pytest
import torch

import meshwright as mw


def test_both_quantizers_are_measured_on_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_cpp")
    from benchmarks import gguf_agreement

    monkeypatch.setattr(gguf_agreement, "COMPARED", ("q4_k_m", "q8_0"))
    monkeypatch.setattr(gguf_agreement, "WINDOWS", 4)
    monkeypatch.setattr(gguf_agreement, "LEARNER", {**gguf_agreement.LEARNER, "layers": 1})
    actual = gguf_agreement.losses(tmp_path, 24, 200_000)
    assert {path.name for path in tmp_path.glob("theirs-*")} == {"theirs-q4_k_m.gguf", "theirs-q8_0.gguf"}
    assert 0 < actual["q8_0"]["ours"] < actual["q4_k_m"]["ours"]
    assert actual["q8_0"]["ours"] == actual["q8_0"]["theirs"], "the same codes"
    files = [tmp_path / f"{who}-q4_k_m.gguf" for who in ("ours", "theirs")]
    weights = [mw.load(file).model.get_parameter("layers.0.mlp.up.weight") for file in files]
    assert not torch.equal(*weights)
    differing, ratios = gguf_agreement.codes()
    assert differing == 0 and all(0.9 < ratio <= 1 for ratio in ratios.values())

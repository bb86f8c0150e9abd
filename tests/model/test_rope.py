"""Rotary frequencies: plain, linear, Llama-3 and YaRN, against their definitions frequency by frequency."""

import math
from dataclasses import replace

import pytest
import torch

from meshwright.model.attention import frequencies, softmax_factor, table_factor, tables
from meshwright.spec import ModelShape, RopeScaling, presets


def plain(shape: ModelShape) -> list[float]:
    return [shape.rope_theta ** (-2 * i / shape.rope_dim) for i in range(shape.rope_dim // 2)]


def rotations(frequency: float, positions: int) -> float:
    return positions * frequency / (2 * math.pi)


@pytest.mark.parametrize("name", ["llama-2-7b", "qwen3-0.6b"])
def test_plain_frequencies(name: str) -> None:
    assert frequencies(presets.model(name)).tolist() == pytest.approx(plain(presets.model(name)), rel=1e-6)


def test_linear_scaling_divides_all() -> None:
    shape = replace(
        presets.model("llama-2-7b"), rope_scaling=RopeScaling(kind="linear", factor=4, original_positions=4096)
    )
    assert frequencies(shape).tolist() == pytest.approx([f / 4 for f in plain(shape)], rel=1e-6)
    assert table_factor(shape) == softmax_factor(shape) == 1


def test_llama3_keeps_fast_ones_divides_slow_ones_and_blends() -> None:
    shape = presets.model("llama-3.1-8b")
    scaling = shape.rope_scaling
    assert scaling is not None and (scaling.factor, scaling.original_positions) == (8, 8192)
    expected = []
    for frequency in plain(shape):
        turns = rotations(frequency, 8192)
        share = min(1.0, max(0.0, (turns - 1) / (4 - 1)))
        expected.append(frequency * (share + (1 - share) / 8))
    scaled = frequencies(shape).tolist()
    assert scaled == pytest.approx(expected, rel=1e-5)
    assert {1.0, 0.125} <= {round(f / p, 6) for f, p in zip(scaled, plain(shape), strict=True)}
    assert table_factor(shape) == 1


def test_yarn_of_deepseek() -> None:
    """Factor 40 over 4096: pairs below `low` stay, above `high` are divided, a ramp of pairs between (paper, 3.2)."""
    shape = presets.model("deepseek-v3")
    scaled, before = frequencies(shape).tolist(), plain(shape)
    pair = [64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(10000)) for turns in (32, 1)]
    low, high = math.floor(pair[0]), math.ceil(pair[1])
    for i, (after, frequency) in enumerate(zip(scaled, before, strict=True)):
        divided = min(1.0, max(0.0, (i - low) / (high - low)))
        assert after == pytest.approx(frequency * (1 - divided) + frequency / 40 * divided, rel=1e-5)
    assert scaled[0] == before[0] == 1.0 and scaled[-1] == pytest.approx(before[-1] / 40)
    assert table_factor(shape) == 1.0, "mscale and mscale_all_dim are equal"
    assert softmax_factor(shape) == pytest.approx((0.1 * math.log(40) + 1) ** 2)


def test_yarns_temperature_without_mscale() -> None:
    scaling = RopeScaling(kind="yarn", factor=4, original_positions=32768)
    shape = replace(presets.model("qwen2.5-7b"), rope_scaling=scaling)
    assert table_factor(shape) == pytest.approx(0.1 * math.log(4) + 1)
    assert softmax_factor(shape) == 1
    cos, sin = tables(frequencies(shape), torch.arange(3).unsqueeze(0), table_factor(shape))
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, table_factor(shape) ** 2))


def test_tables_by_position() -> None:
    inverse = torch.tensor([1.0, 0.01])
    cos, sin = tables(inverse, torch.tensor([[0, 5, 100_000]]), 1.0)
    assert cos.shape == sin.shape == (1, 3, 1, 2) and cos.dtype == torch.float32
    for index, position in enumerate((0, 5, 100_000)):
        for i, frequency in enumerate((1.0, float(torch.tensor(0.01)))):
            assert cos[0, index, 0, i].item() == pytest.approx(math.cos(position * frequency), abs=1e-4)
            assert sin[0, index, 0, i].item() == pytest.approx(math.sin(position * frequency), abs=1e-4)

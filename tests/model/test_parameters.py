"""The model has exactly the parameters of the inventory, and their first values depend on seed and name alone."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.model import build, init
from meshwright.model.init import generator_for, width_deviation
from meshwright.spec import ModelShape, num_parameters, parameters, presets
from tests.model.shrunk import KINDS, shrink

GOLDEN = 4326946535274743962
"""`printf 7:embed.weight | b2sum -l 64`, little-endian, halved."""


@pytest.mark.parametrize("name", [name for name in presets.model_names() if not presets.model(name).plan_only])
def test_names_shapes_and_order_are_the_inventorys(name: str) -> None:
    """Checked for every preset: shrunk in memory, and at full size without memory."""
    small = build(shrink(name))
    assert [(n, tuple(p.shape)) for n, p in small.named_parameters()] == inventory(small.shape)
    assert sum(p.numel() for p in small.parameters()) == num_parameters(small.shape)
    whole = build(replace(presets.model(name), layers=5), device="meta", initialize=False)
    assert [(n, tuple(p.shape)) for n, p in whole.named_parameters()] == inventory(whole.shape)


def inventory(shape: ModelShape) -> list[tuple[str, tuple[int, ...]]]:
    return [(parameter.name, parameter.shape) for parameter in parameters(shape)]


@pytest.mark.parametrize("name", KINDS)
def test_every_parameter_and_kept_buffer_is_in_the_state(name: str) -> None:
    model = build(shrink(name))
    extra = set(model.state_dict()) - {parameter.name for parameter in parameters(model.shape)}
    routed = {f"layers.{i}.mlp.router.correction_bias" for i in range(3) if model.shape.is_moe_layer(i)}
    assert extra == (routed if model.shape.moe and model.shape.moe.correction_bias else set())


@pytest.mark.parametrize("name", KINDS)
def test_first_values_are_those_of_seed_and_name(name: str) -> None:
    """Two models of one seed agree bit for bit where names and sizes agree, however many layers they have."""
    shape = shrink(name)
    few, many = build(shape, seed=5), dict(build(replace(shape, layers=6), seed=5).named_parameters())
    for key, value in few.named_parameters():
        if key.endswith((".o.weight", ".down.weight", ".down")):
            torch.testing.assert_close(value, many[key] * math.sqrt(2), rtol=1e-6, atol=0)
        else:
            assert torch.equal(value, many[key]), key
    for key, value in build(shape, seed=6).named_parameters():
        if value.dim() > 1:
            assert not torch.equal(value, few.get_parameter(key)), key


def test_neither_the_global_generator_nor_the_order_matters() -> None:
    shape = shrink("llama-3.1-8b")
    torch.manual_seed(1)
    first = build(shape, seed=5)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    second = build(shape, seed=5)
    for value, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(value, other)
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state()), "building draws nothing"
    same_names = build(replace(shape, tied=True), seed=5)
    assert torch.equal(same_names.embed.weight, first.embed.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_narrow_dtype_holds_the_same_values_rounded(dtype: torch.dtype) -> None:
    shape = shrink("deepseek-v3")
    wide, narrow = build(shape, seed=3), build(shape, seed=3, dtype=dtype)
    for value, rounded in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert rounded.dtype == dtype and torch.equal(value.to(dtype), rounded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("initialize", [True, False])
def test_tables_stay_fp32_and_are_made_even_where_weights_are_not(dtype: torch.dtype, initialize: bool) -> None:
    model = build(shrink("deepseek-v3"), dtype=dtype, initialize=initialize)
    assert model.inverse.dtype == torch.float32 and torch.equal(model.inverse, build(shrink("deepseek-v3")).inverse)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
    assert len(biases) == 2 and all(bias.dtype == torch.float32 and not bias.any() for bias in biases)


def test_distributions() -> None:
    """Matrices N(0, 2 / (5 D)), those into the residual stream narrower by sqrt(2 L); norms 1, biases 0."""
    shape = replace(shrink("gpt2-124m"), hidden=96, heads=4, head_dim=24, ffn=384)
    wide = math.sqrt(2 / (5 * 96))
    for name, value in build(shape).named_parameters():
        if name.endswith(".bias"):
            assert not value.any(), name
        elif "norm.weight" in name:
            assert (value == 1).all(), name
        else:
            narrow = name.endswith(("attention.o.weight", "mlp.down.weight"))
            expected = wide / math.sqrt(2 * shape.layers) if narrow else wide
            assert abs(value.std().item() / expected - 1) < 5 / math.sqrt(2 * value.numel()), name
            assert abs(value.mean().item()) < 5 * expected / math.sqrt(value.numel()), name


def test_experts_are_drawn_as_matrices() -> None:
    shape = shrink("mixtral-8x7b")
    model = build(shape)
    wide = width_deviation(shape.hidden)
    for part, expected in (("gate", wide), ("up", wide), ("down", wide / math.sqrt(2 * shape.layers))):
        value = model.get_parameter(f"layers.1.mlp.experts.{part}")
        assert abs(value.std().item() / expected - 1) < 5 / math.sqrt(2 * value.numel())
        assert not torch.equal(value[0], value[1])


def test_the_golden_draw() -> None:
    """A hash decides the stream: it may never change, or old runs could not be repeated."""
    stream = [int(torch.randint(2**31, (), generator=generator_for(7, "embed.weight"))) for _ in range(2)]
    assert stream[0] == stream[1]
    assert generator_for(7, "embed.weight").initial_seed() == GOLDEN
    assert len({generator_for(seed, name).initial_seed() for seed in range(4) for name in ("a", "b", "1a")}) == 12


@pytest.mark.parametrize("size", [(50, 6), (7, 5, 4), (1, 40)])
def test_a_box_is_drawn_as_it_stands_in_the_whole(monkeypatch: pytest.MonkeyPatch, size: tuple[int, ...]) -> None:
    """Whatever rows and columns a rank holds, over the borders of the runs that are drawn at a time."""
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", 24)
    shape, name = shrink("llama-3.1-8b"), "layers.0.mlp.up.weight"
    whole = torch.empty(size)
    init.fill_initial(whole, name, shape, 3, whole=size)
    assert whole.unique().numel() == whole.numel()
    for first, last in ((0, size[0]), (size[0] // 3, size[0] - 1), (size[0] - 1, size[0]), (0, 0)):
        offsets = (first, *(1 for _ in size[1:]))
        box = tuple(slice(start, stop) for start, stop in zip(offsets, (last, *size[1:]), strict=True))
        part = torch.full(whole[box].shape, torch.nan)
        init.fill_initial(part, name, shape, 3, whole=size, offsets=offsets)
        assert torch.equal(part, whole[box])


def test_they_are_drawn_on_the_device_of_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing on the CPU and copying took 10 s per billion. Without a GPU the test checks devices and pieces."""
    asked: list[str] = []
    real = torch.Generator

    def generator(device: Any = "cpu") -> torch.Generator:
        asked.append(str(device))
        return real()

    monkeypatch.setattr(torch, "Generator", generator)
    assert init.generator_for(7, "embed.weight", 0, torch.device("cuda", 1)).initial_seed() == GOLDEN
    part = torch.empty(4, 6)
    init.fill_initial(part, "layers.0.mlp.up.weight", shrink("llama-3.1-8b"), 3, whole=(4, 6))
    assert asked == ["cuda:1", "cpu"]


@pytest.mark.gpu
def test_a_gpu_draws_a_box_as_it_stands_in_the_whole() -> None:
    shape, name, size = shrink("llama-3.1-8b"), "layers.0.mlp.up.weight", (3000, 700)
    whole = torch.empty(size, device="cuda")
    init.fill_initial(whole, name, shape, 3, whole=size)
    assert abs(whole.std().item() / width_deviation(shape.hidden) - 1) < 0.01
    part = torch.empty(1200, 300, device="cuda", dtype=torch.bfloat16)
    init.fill_initial(part, name, shape, 3, whole=size, offsets=(1700, 350))
    assert torch.equal(part, whole[1700:2900, 350:650].bfloat16())

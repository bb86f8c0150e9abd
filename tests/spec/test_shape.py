"""ModelShape: what is derived, what is refused, and with which words."""

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from meshwright.spec import MLAShape, ModelShape, MoEShape, RopeScaling, presets
from meshwright.spec.errors import PlanError

SIZES: dict[str, Any] = {"vocab": 64, "layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "max_positions": 128}
EXPERTS: dict[str, Any] = {"experts": 8, "top_k": 2, "ffn": 16}
LATENT: dict[str, Any] = {"q_rank": 8, "kv_rank": 8, "nope_dim": 8, "rope_dim": 4, "v_dim": 8}
SCALED: dict[str, Any] = {"kind": "yarn", "factor": 4.0, "original_positions": 32}


def test_heads_are_derived() -> None:
    shape = ModelShape(**SIZES)
    assert (shape.kv_heads, shape.head_dim, shape.rope_dim) == (4, 8, 8)
    assert ModelShape(**SIZES, kv_heads=1, head_dim=16).head_dim == 16
    latent = ModelShape(**SIZES, mla=MLAShape(**LATENT))
    assert (latent.head_dim, latent.rope_dim) == (12, 4)


def test_experts_begin_after_the_dense_layers() -> None:
    shape = ModelShape(**SIZES, moe=MoEShape(**EXPERTS, first_dense=1))
    assert [shape.is_moe_layer(layer) for layer in range(2)] == [False, True]
    assert not ModelShape(**SIZES).is_moe_layer(0)


def test_window_begins_at_its_layer() -> None:
    shape = ModelShape(**SIZES, window=16, window_from_layer=1)
    assert [shape.window_of(layer) for layer in range(2)] == [0, 16]


def test_shapes_are_values() -> None:
    assert ModelShape(**SIZES) == ModelShape(**SIZES)
    assert len({ModelShape(**SIZES), ModelShape(**SIZES)}) == 1
    with pytest.raises(FrozenInstanceError):
        ModelShape(**SIZES).vocab = 5  # type: ignore[misc]


@pytest.mark.parametrize("field", ["vocab", "layers", "hidden", "heads", "ffn", "max_positions"])
@pytest.mark.parametrize("value", [0, -3, 2**31, 10**30])
def test_sizes_have_bounds(field: str, value: int) -> None:
    with pytest.raises(PlanError, match=rf"model\.{field}={value} |model\.hidden"):
        ModelShape(**SIZES | {field: value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": 5}, "hidden=32 is not divisible by model.heads=5: give model.head_dim, or take hidden=30"),
        ({"heads": 6, "kv_heads": 4, "head_dim": 8}, "heads=6 is not a multiple of model.kv_heads=4: take kv_heads=3"),
        ({"kv_heads": -1}, "model.kv_heads=-1 must be at least 1"),
        ({"head_dim": 7}, "head_dim=7 must be even for rotary positions: take 8"),
        ({"layers": 10_001}, "layers=10001 must be at most 10000"),
        ({"norm_eps": 0.0}, "norm_eps=0.0"),
        ({"norm_eps": float("nan")}, "norm_eps=nan"),
        ({"rope_theta": float("inf")}, "rope_theta=inf"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
        ({"window": -1}, "model.window=-1"),
        ({"window_from_layer": -1}, "window_from_layer=-1"),
    ],
)
def test_shapes_that_cannot_be(change: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as error:
        ModelShape(**SIZES | change)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"top_k": 9}, "top_k=9 must lie between 1 and model.moe.experts=8"),
        ({"top_k": 0}, "top_k=0"),
        ({"ffn": 0}, "ffn must be at least 1"),
        ({"shared_experts": -1}, "shared_experts"),
        ({"groups": 3}, "experts=8 must split evenly into groups=3"),
        ({"groups": 4, "top_groups": 5}, "top_groups=5"),
        ({"groups": 8, "top_groups": 1}, "top_k=2 exceeds the 1 experts of the 1 chosen groups"),
        ({"routed_scale": float("nan")}, "routed_scale=nan"),
    ],
)
def test_experts_that_cannot_be(change: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as error:
        MoEShape(**EXPERTS | change)
    assert says in str(error.value)


@pytest.mark.parametrize("field", list(LATENT))
def test_ranks_have_bounds(field: str) -> None:
    with pytest.raises(PlanError, match=f"model.mla.{field}=-2"):
        MLAShape(**LATENT | {field: -2})


def test_rotated_dims_come_in_pairs() -> None:
    with pytest.raises(PlanError, match="rope_dim=5 must be even: take 6"):
        MLAShape(**LATENT | {"rope_dim": 5})
    assert MLAShape(**LATENT | {"q_rank": 0}).q_rank == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"factor": 0.0}, "factor=0.0"),
        ({"factor": float("nan")}, "factor=nan"),
        ({"factor": float("inf")}, "factor=inf"),
        ({"original_positions": 0}, "original_positions=0"),
        ({"low_frequency_factor": 4.0}, "low_frequency_factor=4.0 must be below high_frequency_factor=4.0"),
        ({"beta_slow": 40.0}, "beta_slow=40.0 must be below beta_fast=32.0"),
        ({"mscale": -1.0}, "mscale=-1.0"),
    ],
)
def test_scalings_that_cannot_be(change: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as error:
        RopeScaling(**SCALED | change)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kv_heads": 2}, "model.kv_heads=2 groups key heads, and model.mla makes those of all 4 heads"),
        ({"qk_norm": True}, "take model.qk_norm=false"),
        ({"positions": "learned"}, "model.mla.rope_dim=4 to rotate: take model.positions=rope"),
    ],
)
def test_latent_attention_has_no_place_for_what_plain_heads_have(change: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as error:
        ModelShape(**SIZES | change, mla=MLAShape(**LATENT))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_preset_can_be_changed() -> None:
    assert replace(presets.model("llama-tiny"), layers=2).layers == 2

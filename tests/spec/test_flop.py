"""FLOP of a token: the published figures, the lectures' identities, and sums by hand for every kind of model."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.spec import ModelShape, num_active_parameters, num_parameters, parameters, presets
from meshwright.spec.layout.layout import RECOMPUTE
from meshwright.spec.weights.inventory import TokenFlop, token_flop


def gigaflop(name: str, sequence: int, *, causal: bool) -> float:
    return token_flop(presets.model(name), sequence, causal=causal).training / 1e9


@pytest.mark.parametrize(
    ("causal", "published"),
    [(False, 57.9), (True, 51.5)],
    ids=["torchtitan and Megatron's table of 2024", "Megatron-Bridge 25.09"],
)
def test_llama_3_8b_at_8192_as_published(causal: bool, published: float) -> None:
    """Its shape is Llama-3.1's. Both tables: 800 TFLOP/s at 13,812 tokens/s and 744 at 14,451."""
    assert round(gigaflop("llama-3.1-8b", 8192, causal=causal), 1) == published


def vectors(shape: ModelShape) -> int:
    return sum(p.numel for p in parameters(shape) if len(p.shape) == 1)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3.1-8b", "llama-3.1-405b", "qwen2.5-7b", "qwen3-8b"])
@pytest.mark.parametrize("sequence", [512, 8192])
def test_six_n_and_twelve_l_h_s(name: str, sequence: int) -> None:
    """6 (N - input embedding - vectors) + 12 L H E S; half of the second term where attention is causal."""
    shape = presets.model(name)
    weights = 6 * (num_parameters(shape) - shape.vocab * shape.hidden - vectors(shape))
    square = 12 * shape.layers * shape.heads * shape.head_dim * sequence
    assert token_flop(shape, sequence, causal=False).training == weights + square
    assert token_flop(shape, sequence, causal=True).training == weights + square / 2


def test_a_tied_embedding_is_multiplied_once_as_the_head() -> None:
    shape = presets.model("llama-3.2-1b")
    assert shape.tied
    untied = replace(shape, tied=False)
    assert token_flop(shape, 512, causal=True) == token_flop(untied, 512, causal=True)
    assert token_flop(shape, 512, causal=True).head == 2 * shape.vocab * shape.hidden


def test_learned_positions_are_added_not_multiplied() -> None:
    shape = presets.model("gpt2-124m")
    matrices = 12 * shape.layers * shape.hidden**2
    assert token_flop(shape, 1024, causal=False).layers == 2 * matrices


def small(**changes: Any) -> ModelShape:
    return ModelShape(**{"vocab": 100, "layers": 3, "hidden": 8, "heads": 4, "ffn": 20, "max_positions": 64, **changes})


def seen_by_hand(sequence: int, window: int) -> float:
    """Keys a query sees on average, itself included."""
    return sum(min(i + 1, window or i + 1) for i in range(sequence)) / sequence


@pytest.mark.parametrize("window", [0, 1, 8, 63, 64, 200])
def test_causal_attention_counts_the_keys_that_are_seen(window: int) -> None:
    """The field rounds (S + 1) / 2 to S / 2, so half a key is allowed."""
    shape = small(window=window)
    keys = token_flop(shape, 64, causal=True).attention / (2 * 3 * 4 * 2 * 2)
    assert abs(keys - seen_by_hand(64, window)) <= 0.5
    full = token_flop(shape, 64, causal=False).attention / (2 * 3 * 4 * 2 * 2)
    assert full == 64


def test_a_window_from_some_layer_on() -> None:
    windows = ((8, 1), (8, 0), (0, 0))
    half, every, none = (
        token_flop(small(window=size, window_from_layer=first), 64, causal=True).attention for size, first in windows
    )
    assert half == pytest.approx(none / 3 + every * 2 / 3)


def test_grouped_queries_save_weights_and_no_attention() -> None:
    """Every query head meets every key, whoever shares it."""
    mha, gqa = small(), small(kv_heads=1)
    full, grouped = token_flop(mha, 64, causal=False), token_flop(gqa, 64, causal=False)
    assert full.attention == grouped.attention
    assert full.layers - grouped.layers == 2 * 3 * 2 * (8 - 2) * 8, "two projections of 3 layers, 6 rows fewer"


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"])
def test_of_the_experts_only_the_visited_count(name: str) -> None:
    shape = presets.model(name)
    assert shape.moe is not None
    active = num_active_parameters(shape) - shape.vocab * shape.hidden - vectors(shape)
    flop = token_flop(shape, 4096, causal=False)
    assert flop.layers + flop.head == 2 * active
    every = token_flop(replace(shape, moe=replace(shape.moe, top_k=shape.moe.top_k - 1)), 4096, causal=False)
    routed = [layer for layer in range(shape.layers) if shape.is_moe_layer(layer)]
    assert flop.layers - every.layers == pytest.approx(2 * len(routed) * 3 * shape.moe.ffn * shape.hidden)


def test_latent_attention_of_deepseek_v3() -> None:
    """Queries and keys are 128 + 64 wide, values 128, for 128 heads and 61 layers."""
    flop = token_flop(presets.model("deepseek-v3"), 4096, causal=True)
    assert flop.attention == 61 * 2 * 128 * (128 + 64 + 128) * 4096 / 2
    assert flop.head == 2 * 129280 * 7168
    per_layer = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    dense = 3 * 3 * 7168 * 18432
    routed = 58 * (256 * 7168 + 9 * 3 * 7168 * 2048)
    assert flop.layers == 2 * (61 * per_layer + dense + routed)
    assert 2 * 36e9 < flop.forward < 2 * 42e9, "37B active parameters and attention"


def test_training_is_three_forward_passes_and_recomputation_adds() -> None:
    flop = TokenFlop(layers=100.0, head=20.0, attention=7.0)
    assert flop.forward == 127 and flop.training == 381
    assert [flop.hardware(policy) for policy in RECOMPUTE] == [381, 381, 388, 481, 488]


@pytest.mark.parametrize("name", presets.model_names())
def test_every_preset_lies_between_its_weights_and_the_whole_square(name: str) -> None:
    shape = presets.model(name)
    causal, full = (token_flop(shape, 2048, causal=causal) for causal in (True, False))
    assert causal.layers == full.layers > 0 and causal.head == full.head
    linear = [
        attention.token_flop for layer in range(shape.layers) if (attention := shape.linear_of(layer)) is not None
    ]
    assert 0 < causal.attention - sum(linear) <= (full.attention - sum(linear)) / 2

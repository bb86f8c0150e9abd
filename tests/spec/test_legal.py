"""Every rule of a layout: what is refused, with which numbers and which advice; and that the advice is legal."""

import re
from dataclasses import replace
from typing import Any

import pytest

from meshwright.spec import Layout, Recipe, presets
from meshwright.spec.rules.legal import layout_violations, nearest_divisor

LLAMA = presets.model("llama-3.1-8b")
TIED = presets.model("qwen2.5-0.5b")
MIXTRAL = presets.model("mixtral-8x7b")
NARROW = replace(MIXTRAL, moe=MIXTRAL.moe and replace(MIXTRAL.moe, ffn=4))
RECIPE = Recipe(sequence=4096, global_batch=64)

REFUSED: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"tp": 3}, {}, "layout.tp=3 does not divide the 32 attention heads: take layout.tp=2"),
    (LLAMA, {"sp": True}, {}, "layout.sp=true shares the sequence"),
    (LLAMA, {"tp": 4, "sp": True}, {"sequence": 4098}, "take recipe.sequence=4096"),
    (LLAMA, {"cp": 4}, {"sequence": 4100}, "two chunks for each of layout.cp=4 ranks: take recipe.sequence=4096"),
    (LLAMA, {"cp": 4, "context_split": "chunks"}, {"sequence": 4098}, "a part for each of layout.cp=4 ranks"),
    (LLAMA, {"pp": 64}, {}, "exceed the model's 32 layers: take layout.pp=32"),
    (LLAMA, {"vp": 2}, {}, "layout.pp=1: take layout.vp=1"),
    (LLAMA, {"pp": 4, "schedule": "zb-v"}, {}, "two stages a rank, not layout.vp=1: take layout.vp=2"),
    (LLAMA, {"pp": 4, "vp": 2}, {}, "one stage a rank, not layout.vp=2"),
    (LLAMA, {"pp": 4, "vp": 2, "schedule": "dualpipe-v", "micro_batch": 16}, {}, "wants 2 x pp = 8 micro-batches"),
    (LLAMA, {"stages": (16, 16)}, {}, "2 pipeline stages, and layout.pp=1: take layout.stages=[] or layout.pp=2"),
    (
        LLAMA,
        {"pp": 4, "stages": (9, 9, 8, 5)},
        {},
        "layout.stages=[9, 9, 8, 5] deals 31 layers to 4 stages, and layout.pp=4 x layout.vp=1 stages want "
        "the model's 32: take layout.stages=[8, 8, 8, 8]",
    ),
    (LLAMA, {"pp": 2, "vp": 2, "schedule": "zb-v", "stages": (16, 16)}, {}, "32 layers to 2 stages"),
    (LLAMA, {"dp_shard": 2, "ep": 2}, {}, "the model has none: take layout.ep=1"),
    (MIXTRAL, {"dp_shard": 3, "ep": 3}, {"global_batch": 63}, "layout.ep=3 does not divide the 8 experts"),
    (MIXTRAL, {"dp_shard": 2, "ep": 4}, {}, "dp_shard x cp x tp = 2 ranks"),
    (MIXTRAL, {"dp_shard": 2, "tp": 2, "ep": 2}, {}, "take layout.sp=true"),
    (MIXTRAL, {"ep_chunks": 2}, {}, "layout.ep_chunks=2 cuts what ep ranks exchange, and layout.ep=1: leave it out"),
    (
        MIXTRAL,
        {"dp_shard": 2, "ep": 2, "ep_chunks": 3},
        {},
        "the 4 experts of a rank: take layout.ep_chunks=2",
    ),
    (
        MIXTRAL,
        {"dp_shard": 2, "ep": 2, "ep_chunks": 2, "pp": 2, "schedule": "zb-h1", "micro_batch": 1},
        {},
        "layout.schedule=zb-h1 leaves the gradients of whole stacks for later: take layout.ep_chunks=1",
    ),
    (TIED, {"pp": 2, "vp": 2, "schedule": "zb-v", "dp_shard": 2, "zero": 2, "micro_batch": 1}, {}, "cannot share yet"),
    (TIED, {"pp": 2, "vp": 2, "schedule": "dualpipe-v", "cp": 2, "micro_batch": 1}, {}, "cannot share yet"),
    (NARROW, {"tp": 8}, {}, "layout.tp=8 exceeds model.moe.ffn=4"),
    (LLAMA, {"zero": 3, "dp_replicate": 2}, {}, "dp_shard instead of dp_replicate"),
    (LLAMA, {"zero": 3}, {}, "which is one rank: take layout.zero=0$"),
    (
        replace(LLAMA, ffn=14400),
        {"tp": 16},
        {"optimizer_states": "int8"},
        "scales layers.0.mlp.down.weight in blocks of 32 elements of a row, and layout.tp=16 leaves a rank 900",
    ),
    (
        LLAMA,
        {},
        {"master_weights": "none"},
        "rounds bf16 weights, and recipe.precision=fp32: take recipe.precision=bf16",
    ),
    (LLAMA, {"dp_shard": 2}, {"noise_scale_every": 5}, "take recipe.noise_scale_every=0"),
]


@pytest.mark.parametrize("shape,layout,recipe,sentence", REFUSED)
def test_refusals(shape: Any, layout: dict[str, Any], recipe: dict[str, Any], sentence: str) -> None:
    refusals = layout_violations(shape, replace(RECIPE, **recipe), Layout(**layout))
    assert any(sentence in f"{line}$" for line in refusals), refusals


def test_advice_about_the_sequence_is_legal() -> None:
    for sequence in range(1, 200, 7):
        layout = Layout(cp=4, tp=2, sp=True)
        refusals = layout_violations(LLAMA, replace(RECIPE, sequence=sequence), layout)
        for line in refusals:
            advised = int(re.findall(r"recipe.sequence=(\d+)", line)[-1])
            assert not layout_violations(LLAMA, replace(RECIPE, sequence=advised), layout)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 8, "sp": True, "pp": 4, "dp_shard": 8, "zero": 1},
        {"tp": 16},
        {"cp": 8, "dp_shard": 4, "zero": 3},
        {"pp": 4, "vp": 4, "schedule": "interleaved", "micro_batch": 8},
        {"pp": 4, "vp": 2, "schedule": "zb-v", "micro_batch": 8, "tp": 2},
        {"pp": 4, "stages": (9, 9, 8, 6), "micro_batch": 8},
    ],
)
def test_legal(layout: dict[str, Any]) -> None:
    assert layout_violations(LLAMA, RECIPE, Layout(**layout)) == []


def test_nearest_divisor() -> None:
    assert [nearest_divisor(32, n) for n in (1, 3, 5, 12, 100)] == [1, 2, 4, 8, 32]

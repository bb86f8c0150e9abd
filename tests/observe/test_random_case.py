"""The cases of `meshwright verify --random`: what is drawn, how it is written, how it is made smaller."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.model.moe import Router
from meshwright.observe.verify.case_text import DrawnCase, format_case, parse_case, settings_of, violations
from meshwright.observe.verify.one_device import case_batch, margin
from meshwright.observe.verify.random_case import random_case
from meshwright.observe.verify.shrinking import shrink_case
from meshwright.spec.errors import PlanError
from meshwright.spec.frozen_code_rules import holds_codes, shares_codes
from meshwright.spec.recipe import NO_SCHEME
from meshwright.spec.schedule_kinds import NAMES
from meshwright.spec.shape import ModelShape, MoEShape

DRAWS = 2000
Asks = Callable[[DrawnCase], bool]


def _reader_without_target(one: DrawnCase) -> bool:
    valid = case_batch(one.case, 1).valid_of_rows
    each = len(valid) // one.layout.dp
    return one.layout.dp > 1 and any(sum(valid[i * each : (i + 1) * each]) == 0 for i in range(one.layout.dp))


def _micro_batch_without_target(one: DrawnCase) -> bool:
    """The same micro-batch on every reader."""
    valid = case_batch(one.case, 1).valid_of_rows
    each, size = len(valid) // one.layout.dp, one.layout.micro_batch_of(len(valid))
    starts = range(0, each, size)
    return len(starts) > 1 and any(
        not any(valid[who * each + start + row] for who in range(one.layout.dp) for row in range(size))
        for start in starts
    )


def _experts_of_a_piece(one: DrawnCase) -> int:
    assert one.case.shape.moe is not None
    return one.case.shape.moe.experts // one.layout.ep // one.layout.ep_chunks


def rounds(one: DrawnCase) -> bool:
    return one.case.fake_quantize != NO_SCHEME


FEATURES: dict[str, Asks] = {
    "one key head": lambda one: one.case.shape.kv_heads == 1 < one.case.shape.heads and one.case.shape.mla is None,
    "one key head under tp": lambda one: one.case.shape.kv_heads == 1 and one.layout.tp > 1,
    "key heads shared by some tp ranks": lambda one: 1 < one.case.shape.kv_heads < one.layout.tp,
    "an odd head size": lambda one: one.case.shape.head_dim % 2 == 1 and one.case.shape.mla is None,
    "a head size that is no share of hidden": lambda one: one.case.shape.hidden % one.case.shape.heads > 0,
    "unequal stages": lambda one: one.layout.pp > 1 and one.case.shape.layers % (one.layout.pp * one.layout.vp) > 0,
    "stages by hand": lambda one: bool(one.layout.stages),
    "biases of queries": lambda one: one.case.shape.qkv_bias,
    "a bias of the output": lambda one: one.case.shape.out_bias,
    "biases of the MLP": lambda one: one.case.shape.mlp_bias,
    "norms of queries and keys": lambda one: one.case.shape.qk_norm,
    "layer norms": lambda one: one.case.shape.norm == "layernorm",
    "gelu": lambda one: one.case.shape.mlp == "gelu",
    "gelu by tanh": lambda one: one.case.shape.mlp == "gelu_tanh",
    "muon": lambda one: one.case.optimizer == "muon",
    "muon with 8-bit momentum": lambda one: (one.case.optimizer, one.case.optimizer_states) == ("muon", "int8"),
    "muon's matrices cut twice": lambda one: one.case.optimizer == "muon" and one.layout.tp > 1 and one.layout.zero > 0,
    "muon's experts on ranks of their own": lambda one: one.case.optimizer == "muon" and one.layout.ep > 1,
    "a window from some layer": lambda one: 0 < one.case.shape.window_from_layer < one.case.shape.layers,
    "learned positions": lambda one: one.case.shape.positions == "learned",
    "latent attention": lambda one: one.case.shape.mla is not None and one.case.shape.mla.q_rank > 0,
    "latent attention, queries directly": lambda one: one.case.shape.mla is not None and not one.case.shape.mla.q_rank,
    "shared experts": lambda one: one.case.shape.moe is not None and one.case.shape.moe.shared_experts > 0,
    "grouped experts": lambda one: one.case.shape.moe is not None and one.case.shape.moe.groups > 1,
    "sigmoid scores": lambda one: one.case.shape.moe is not None and one.case.shape.moe.scoring == "sigmoid",
    "dense layers first": lambda one: one.case.shape.moe is not None and one.case.shape.moe.first_dense > 0,
    "experts without a gate": lambda one: one.case.shape.moe is not None and one.case.shape.mlp != "swiglu",
    "values wider than keys under cp": lambda one: (
        one.case.shape.mla is not None and one.layout.cp > 1 and one.case.shape.mla.v_dim > one.case.shape.head_dim
    ),
    "a tied head over a pipeline": lambda one: one.case.shape.tied and one.layout.pp > 2,
    "a tied head": lambda one: one.case.shape.tied,
    **{
        f"{kind} scaling": lambda one, kind=kind: getattr(one.case.shape.rope_scaling, "kind", None) == kind
        for kind in ("linear", "llama3", "yarn")
    },
    **{f"{world} processes": lambda one, world=world: one.layout.world == world for world in range(1, 9)},
    **{f"schedule {name}": lambda one, name=name: one.layout.pp > 1 and one.layout.schedule == name for name in NAMES},
    **{f"zero {zero}": lambda one, zero=zero: one.layout.dp > 1 and one.layout.zero == zero for zero in range(4)},
    "pp=5": lambda one: one.layout.pp == 5,
    "dp=3 and tp=2": lambda one: one.layout.dp == 3 and one.layout.tp == 2,
    "dp=7": lambda one: one.layout.dp == 7,
    "virtual stages": lambda one: one.layout.vp == 3,
    "hybrid sharding": lambda one: one.layout.dp_replicate > 1 and one.layout.dp_shard > 1 and one.layout.zero > 0,
    "sp": lambda one: one.layout.sp,
    "pieces of whole sequences": lambda one: one.layout.tp_chunks == 2 and not one.layout.sp,
    "pieces of slices": lambda one: one.layout.tp_chunks == 3 and one.layout.sp,
    "pieces for one expert each": lambda one: one.layout.ep_chunks > 1 and _experts_of_a_piece(one) == 1,
    "pieces for several experts": lambda one: one.layout.ep_chunks > 1 and _experts_of_a_piece(one) > 1,
    "the ring": lambda one: one.layout.cp > 1 and one.layout.context == "ring",
    "the gather": lambda one: one.layout.cp > 1 and one.layout.context == "all-gather",
    "striped": lambda one: one.layout.cp > 1 and one.layout.context_split == "striped",
    "chunks": lambda one: one.layout.cp > 1 and one.layout.context_split == "chunks",
    "experts spread": lambda one: one.layout.ep > 1,
    "experts spread over tp": lambda one: one.layout.ep > 1 and one.layout.tp > 1,
    "recomputation of some": lambda one: one.layout.recompute == "selective",
    "recomputation of norms": lambda one: one.layout.recompute == "norms",
    "recomputation of all but attention": lambda one: one.layout.recompute == "all-but-attention",
    "recomputation of all": lambda one: one.layout.recompute == "full",
    "recomputation of some layers": lambda one: one.layout.recompute_layers > 0,
    "activations in host memory": lambda one: one.layout.offload == "activations",
    "accumulation": lambda one: one.layout.pp == 1 and one.layout.micro_batches(one.case.global_batch) > 1,
    "steps of different size": lambda one: len(set(one.case.batches)) > 1,
    "a rank without a target": _reader_without_target,
    "a micro-batch without a target": _micro_batch_without_target,
    "clipping that bites": lambda one: one.case.clip == 0.05,
    "clipping that does not": lambda one: one.case.clip == 1000,
    "no clipping": lambda one: one.case.clip == 0,
    "fp16 without an overflow": lambda one: one.case.precision == "fp16" and not one.case.overflow,
    "fp16, overflow on one rank": lambda one: (
        bool(one.case.precision == "fp16" and one.case.overflow) and one.layout.dp > 1
    ),
    "bf16": lambda one: one.case.precision == "bf16",
    "documents": lambda one: one.case.packed,
    "fp8": lambda one: one.case.products == "fp8",
    "codes": lambda one: holds_codes(one.case.shape),
    "codes that ranks share": lambda one: holds_codes(one.case.shape) and shares_codes(one.layout),
    "codes that ranks share, cut by tp": lambda one: (
        holds_codes(one.case.shape) and shares_codes(one.layout) and one.layout.tp > 1
    ),
    "rounded weights": rounds,
    "rounded weights under tp": lambda one: rounds(one) and one.layout.tp > 1,
    "rounded weights under tp with real zeros": lambda one: (
        one.case.fake_quantize in ("int3", "int4-hqq") and one.layout.tp > 1
    ),
    "rounded experts": lambda one: rounds(one) and one.case.shape.moe is not None,
    "rounded experts on several ranks": lambda one: rounds(one) and one.layout.ep > 1,
    "rounded weights in split passes": lambda one: rounds(one) and one.layout.splits_backward,
    "rounded weights under ZeRO-3": lambda one: rounds(one) and one.layout.zero == 3,
    "rounded rows under tp": lambda one: one.case.fake_quantize == "int8" and one.layout.tp > 1,
    "LLM.int8() beside adapters": lambda one: (
        one.case.shape.lora is not None and one.case.shape.lora.base == "llm-int8"
    ),
    "a teacher of codes": lambda one: one.case.teacher is not None and one.case.teacher.base != "same",
    "a teacher": lambda one: one.case.teacher is not None,
    "a teacher under tp": lambda one: one.case.teacher is not None and one.layout.tp > 1,
    "a teacher under cp": lambda one: one.case.teacher is not None and one.layout.cp > 1,
    "a teacher under ZeRO-3": lambda one: one.case.teacher is not None and one.layout.zero == 3,
    "a teacher with experts": lambda one: (
        one.case.teacher is not None and one.case.shape.moe is not None and not one.case.teacher.dense
    ),
    "a teacher of adapters": lambda one: one.case.teacher is not None and one.case.shape.lora is not None,
    "a teacher with another vocabulary": lambda one: one.case.teacher is not None and one.case.teacher.filled > 0,
    "reverse KL": lambda one: one.case.teacher is not None and one.case.teacher.beta == 1,
    "generalized JS": lambda one: one.case.teacher is not None and 0 < one.case.teacher.beta < 1,
    "a divergence beside cross-entropy": lambda one: one.case.teacher is not None and one.case.teacher.hard > 0,
    "a balance loss": lambda one: one.case.shape.moe is not None and one.case.balance_loss > 0,
}


@pytest.fixture(scope="module")
def drawn() -> list[DrawnCase]:
    return [random_case(11, index) for index in range(DRAWS)]


def test_every_feature_is_drawn(drawn: list[DrawnCase]) -> None:
    counts = Counter(name for one in drawn for name, has in FEATURES.items() if has(one))
    rare = {name: counts[name] for name in FEATURES if counts[name] < 3}
    assert not rare, rare


def test_what_is_drawn_is_legal_and_the_same_again(drawn: list[DrawnCase]) -> None:
    assert not [one for one in drawn if violations(one)]
    assert drawn[:50] == [random_case(11, index) for index in range(50)]
    assert len({format_case(one) for one in drawn}) > 0.99 * DRAWS
    assert all(random_case(3, index, processes=3).layout.world <= 3 for index in range(100))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_text_says_it_all(seed: int, index: int) -> None:
    one = random_case(seed, index)
    assert parse_case(format_case(one)) == one


def test_the_text_is_short_and_written_by_hand() -> None:
    one = parse_case("kv_heads=1 tp=2 stages=1,1 pp=2 micro_batch=1 sp=true rope_scaling.kind=yarn clip=0.05")
    assert (one.case.shape.kv_heads, one.layout.tp, one.layout.stages, one.case.clip) == (1, 2, (1, 1), 0.05)
    assert one.case.shape.rope_scaling is not None and one.case.shape.rope_scaling.factor == 2.0
    assert format_case(parse_case("kv_heads=1 tp=2")) == "kv_heads=1 tp=2" and format_case(parse_case("")) == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kv_hads=1", "'kv_hads' is not known; nearest: kv_heads"),
        ("tp", "'tp' is not KEY=VALUE"),
        ("tp=2 tp=2", "'tp' is given twice"),
        ("tp=two", "tp=two must be a number"),
        ("sp=yes", "sp=yes must be true or false"),
        ("stages=a", "stages=a must be numbers with commas"),
        ("schedule=2f2b", "schedule=2f2b is unknown: take one of afab, 1f1b"),
        ("tp=3", "layout.tp=3 does not divide the 4 attention heads"),
        ("dp_shard=3", "recipe.global_batch=8 is not micro_batch"),
        ("precision=fp8", "precision=fp8 is unknown"),
        ("batches=8", "names 1 steps, and steps=2"),
        ("overflow=3", "overflow=3 must be a step of steps=2"),
        ("teacher.layers=2 teacher.filled=5 tp=2", "differ, and layout.tp=2 would cut them at different tokens"),
        ("positions=learned sequence=65", "sequence=65 exceeds max_positions=64"),
    ],
)
def test_a_wrong_text_is_one_line(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says.replace("?", r"\?")) as caught:
        parse_case(text)
    assert "\n" not in str(caught.value)


def _shrink(failing: Asks, start: DrawnCase) -> tuple[str, int]:
    tries = 0

    def asks(one: DrawnCase) -> DrawnCase | None:
        nonlocal tries
        tries += 1
        assert not violations(one)
        return one if failing(one) else None

    return format_case(shrink_case(start, asks, lambda: True)), tries


@pytest.mark.parametrize(
    ("failing", "smallest"),
    [
        (lambda one: one.case.shape.kv_heads == 1 and one.layout.tp > 1, "kv_heads=1 tp=2"),
        (lambda one: one.layout.pp > 1 and one.layout.schedule == "zb-v", "pp=2 vp=2 schedule=zb-v"),
        (lambda one: one.case.shape.moe is not None and one.layout.ep > 1, "moe. ep=2"),
        (lambda one: one.case.precision == "fp16" and one.case.overflow > 0, "precision=fp16 overflow="),
        (lambda one: len(one.case.empty) > 0 and one.layout.dp_replicate > 1, "dp_replicate=2 empty="),
    ],
)
def test_a_failing_case_is_made_small(failing: Asks, smallest: str, drawn: list[DrawnCase]) -> None:
    for start in [one for one in drawn if failing(one)][:5]:
        found, tries = _shrink(failing, start)
        assert all(word in found for word in smallest.split()), found
        least = parse_case(found)
        assert failing(least) and least.layout.world <= 2, found
        own = {key.partition(".")[0] for key in settings_of(least)}
        wanted = {word.partition("=")[0].strip(".") for word in smallest.split()}
        assert len(own - wanted) <= 3, found
        assert tries < 400


def test_no_time_leaves_the_case_as_it_is(drawn: list[DrawnCase]) -> None:
    assert shrink_case(drawn[0], lambda one: one, lambda: False) == drawn[0]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_margin_is_what_changes_the_choice(groups: int, scoring: str) -> None:
    """Changes of the logits that move no score by half a margin change no choice, larger ones do."""
    moe = MoEShape(experts=8, top_k=2, ffn=4, groups=groups, top_groups=max(1, groups // 2), scoring=scoring)  # type: ignore[arg-type]
    shape = ModelShape(vocab=7, layers=1, hidden=8, heads=1, ffn=4, max_positions=8, moe=moe)
    router = Router(shape, moe)
    generator = torch.Generator().manual_seed(groups)
    with torch.no_grad():
        router.weight.copy_(torch.eye(8))
    logits = torch.randn(1, 8, generator=generator)
    _, experts, scores = router(logits)
    found = margin(moe, scores, experts)
    assert 0 < found < 1
    changed = 0
    for size in torch.linspace(0, 30, 300):
        other = logits + torch.randn(1, 8, generator=generator) * size * found
        _, others, moved = router(other)
        if (moved - scores).abs().max() < found / 4:
            assert set(others.flatten().tolist()) == set(experts.flatten().tolist())
        changed += set(others.flatten().tolist()) != set(experts.flatten().tolist())
    assert changed


def test_no_choice_has_no_margin() -> None:
    moe = MoEShape(experts=3, top_k=3, ffn=4)
    scores = torch.tensor([[0.2, 0.3, 0.5]])
    assert margin(moe, scores, torch.tensor([[2, 1, 0]])) == float("inf")
    near = margin(replace(moe, top_k=1), torch.tensor([[0.4, 0.4, 0.2]]), torch.tensor([[0]]))
    assert near == 0.0

"""The cases of `meshwright verify --random`: what is drawn, how it is written, how it is made smaller."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.model.feed_forward import Router
from meshwright.observe.oracle.one_device import case_batch, margin
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.schedule import NAMES
from meshwright.spec.model.shape import ModelShape, MoEShape
from meshwright.spec.recipe.recipe import NO_SCHEME
from meshwright.spec.rules.passes import holds_codes, shares_codes
from meshwright.verbs.verify.cases import DrawnCase, format_case, parse_case, random_case, settings_of, violations
from meshwright.verbs.verify.random_run import shrink_case

DRAWS = 2000
Asks = Callable[[DrawnCase], bool]


def _reader_without_target(drawn: DrawnCase) -> bool:
    valid = case_batch(drawn.case, 1).valid_of_rows
    each = len(valid) // drawn.layout.dp
    return drawn.layout.dp > 1 and any(sum(valid[i * each : (i + 1) * each]) == 0 for i in range(drawn.layout.dp))


def _micro_batch_without_target(drawn: DrawnCase) -> bool:
    """The same micro-batch on every reader."""
    valid = case_batch(drawn.case, 1).valid_of_rows
    each, size = len(valid) // drawn.layout.dp, drawn.layout.micro_batch_of(len(valid))
    starts = range(0, each, size)
    return len(starts) > 1 and any(
        not any(valid[who * each + start + row] for who in range(drawn.layout.dp) for row in range(size))
        for start in starts
    )


def _experts_of_a_piece(drawn: DrawnCase) -> int:
    assert drawn.case.shape.moe is not None
    return drawn.case.shape.moe.experts // drawn.layout.ep // drawn.layout.ep_chunks


def rounds(drawn: DrawnCase) -> bool:
    return drawn.case.fake_quantize != NO_SCHEME


FEATURES: dict[str, Asks] = {
    "one key head": lambda drawn: (
        drawn.case.shape.kv_heads == 1 < drawn.case.shape.heads and drawn.case.shape.mla is None
    ),
    "one key head under tp": lambda drawn: drawn.case.shape.kv_heads == 1 and drawn.layout.tp > 1,
    "key heads shared by some tp ranks": lambda drawn: 1 < drawn.case.shape.kv_heads < drawn.layout.tp,
    "an odd head size": lambda drawn: drawn.case.shape.head_dim % 2 == 1 and drawn.case.shape.mla is None,
    "a head size that is no share of hidden": lambda drawn: drawn.case.shape.hidden % drawn.case.shape.heads > 0,
    "unequal stages": lambda drawn: (
        drawn.layout.pp > 1 and drawn.case.shape.layers % (drawn.layout.pp * drawn.layout.vp) > 0
    ),
    "stages by hand": lambda drawn: bool(drawn.layout.stages),
    "biases of queries": lambda drawn: drawn.case.shape.qkv_bias,
    "a bias of the output": lambda drawn: drawn.case.shape.out_bias,
    "biases of the MLP": lambda drawn: drawn.case.shape.mlp_bias,
    "norms of queries and keys": lambda drawn: drawn.case.shape.qk_norm,
    "layer norms": lambda drawn: drawn.case.shape.norm == "layernorm",
    "gelu": lambda drawn: drawn.case.shape.mlp == "gelu",
    "gelu by tanh": lambda drawn: drawn.case.shape.mlp == "gelu_tanh",
    "muon": lambda drawn: drawn.case.optimizer == "muon",
    "muon with 8-bit momentum": lambda drawn: (drawn.case.optimizer, drawn.case.optimizer_states) == ("muon", "int8"),
    "muon's matrices cut twice": lambda drawn: (
        drawn.case.optimizer == "muon" and drawn.layout.tp > 1 and drawn.layout.zero > 0
    ),
    "muon's experts on ranks of their own": lambda drawn: drawn.case.optimizer == "muon" and drawn.layout.ep > 1,
    "a window from some layer": lambda drawn: 0 < drawn.case.shape.window_from_layer < drawn.case.shape.layers,
    "learned positions": lambda drawn: drawn.case.shape.positions == "learned",
    "latent attention": lambda drawn: drawn.case.shape.mla is not None and drawn.case.shape.mla.q_rank > 0,
    "latent attention, queries directly": lambda drawn: (
        drawn.case.shape.mla is not None and not drawn.case.shape.mla.q_rank
    ),
    "shared experts": lambda drawn: drawn.case.shape.moe is not None and drawn.case.shape.moe.shared_experts > 0,
    "grouped experts": lambda drawn: drawn.case.shape.moe is not None and drawn.case.shape.moe.groups > 1,
    "sigmoid scores": lambda drawn: drawn.case.shape.moe is not None and drawn.case.shape.moe.scoring == "sigmoid",
    "dense layers first": lambda drawn: drawn.case.shape.moe is not None and drawn.case.shape.moe.first_dense > 0,
    "experts without a gate": lambda drawn: drawn.case.shape.moe is not None and drawn.case.shape.mlp != "swiglu",
    "values wider than keys under cp": lambda drawn: (
        drawn.case.shape.mla is not None
        and drawn.layout.cp > 1
        and drawn.case.shape.mla.v_dim > drawn.case.shape.head_dim
    ),
    "a tied head over a pipeline": lambda drawn: drawn.case.shape.tied and drawn.layout.pp > 2,
    "a tied head": lambda drawn: drawn.case.shape.tied,
    **{
        f"{kind} scaling": lambda drawn, kind=kind: getattr(drawn.case.shape.rope_scaling, "kind", None) == kind
        for kind in ("linear", "llama3", "yarn")
    },
    **{f"{world} processes": lambda drawn, world=world: drawn.layout.world == world for world in range(1, 9)},
    **{
        f"schedule {name}": lambda drawn, name=name: drawn.layout.pp > 1 and drawn.layout.schedule == name
        for name in NAMES
    },
    **{f"zero {zero}": lambda drawn, zero=zero: drawn.layout.dp > 1 and drawn.layout.zero == zero for zero in range(4)},
    "pp=5": lambda drawn: drawn.layout.pp == 5,
    "dp=3 and tp=2": lambda drawn: drawn.layout.dp == 3 and drawn.layout.tp == 2,
    "dp=7": lambda drawn: drawn.layout.dp == 7,
    "virtual stages": lambda drawn: drawn.layout.vp == 3,
    "hybrid sharding": lambda drawn: (
        drawn.layout.dp_replicate > 1 and drawn.layout.dp_shard > 1 and drawn.layout.zero > 0
    ),
    "sp": lambda drawn: drawn.layout.sp,
    "pieces of whole sequences": lambda drawn: drawn.layout.tp_chunks == 2 and not drawn.layout.sp,
    "pieces of slices": lambda drawn: drawn.layout.tp_chunks == 3 and drawn.layout.sp,
    "pieces for one expert each": lambda drawn: drawn.layout.ep_chunks > 1 and _experts_of_a_piece(drawn) == 1,
    "pieces for several experts": lambda drawn: drawn.layout.ep_chunks > 1 and _experts_of_a_piece(drawn) > 1,
    "the ring": lambda drawn: drawn.layout.cp > 1 and drawn.layout.context == "ring",
    "the gather": lambda drawn: drawn.layout.cp > 1 and drawn.layout.context == "all-gather",
    "striped": lambda drawn: drawn.layout.cp > 1 and drawn.layout.context_split == "striped",
    "chunks": lambda drawn: drawn.layout.cp > 1 and drawn.layout.context_split == "chunks",
    "experts spread": lambda drawn: drawn.layout.ep > 1,
    "experts spread over tp": lambda drawn: drawn.layout.ep > 1 and drawn.layout.tp > 1,
    "recomputation of some": lambda drawn: drawn.layout.recompute == "selective",
    "recomputation of norms": lambda drawn: drawn.layout.recompute == "norms",
    "recomputation of all but attention": lambda drawn: drawn.layout.recompute == "all-but-attention",
    "recomputation of all": lambda drawn: drawn.layout.recompute == "full",
    "recomputation of some layers": lambda drawn: drawn.layout.recompute_layers > 0,
    "activations in host memory": lambda drawn: drawn.layout.offload == "activations",
    "accumulation": lambda drawn: drawn.layout.pp == 1 and drawn.layout.micro_batches(drawn.case.global_batch) > 1,
    "steps of different size": lambda drawn: len(set(drawn.case.batches)) > 1,
    "a rank without a target": _reader_without_target,
    "a micro-batch without a target": _micro_batch_without_target,
    "clipping that bites": lambda drawn: drawn.case.clip == 0.05,
    "clipping that does not": lambda drawn: drawn.case.clip == 1000,
    "no clipping": lambda drawn: drawn.case.clip == 0,
    "fp16 without an overflow": lambda drawn: drawn.case.precision == "fp16" and not drawn.case.overflow,
    "fp16, overflow on one rank": lambda drawn: (
        bool(drawn.case.precision == "fp16" and drawn.case.overflow) and drawn.layout.dp > 1
    ),
    "bf16": lambda drawn: drawn.case.precision == "bf16",
    "documents": lambda drawn: drawn.case.packed,
    "fp8": lambda drawn: drawn.case.products == "fp8",
    "codes": lambda drawn: holds_codes(drawn.case.shape),
    "codes that ranks share": lambda drawn: holds_codes(drawn.case.shape) and shares_codes(drawn.layout),
    "codes that ranks share, cut by tp": lambda drawn: (
        holds_codes(drawn.case.shape) and shares_codes(drawn.layout) and drawn.layout.tp > 1
    ),
    "rounded weights": rounds,
    "rounded weights under tp": lambda drawn: rounds(drawn) and drawn.layout.tp > 1,
    "rounded weights under tp with real zeros": lambda drawn: (
        drawn.case.fake_quantize in ("int3", "int4-hqq") and drawn.layout.tp > 1
    ),
    "rounded experts": lambda drawn: rounds(drawn) and drawn.case.shape.moe is not None,
    "rounded experts on several ranks": lambda drawn: rounds(drawn) and drawn.layout.ep > 1,
    "rounded weights in split passes": lambda drawn: rounds(drawn) and drawn.layout.splits_backward,
    "rounded weights under ZeRO-3": lambda drawn: rounds(drawn) and drawn.layout.zero == 3,
    "rounded rows under tp": lambda drawn: drawn.case.fake_quantize == "int8" and drawn.layout.tp > 1,
    "LLM.int8() beside adapters": lambda drawn: (
        drawn.case.shape.lora is not None and drawn.case.shape.lora.base == "llm-int8"
    ),
    "a teacher of codes": lambda drawn: drawn.case.teacher is not None and drawn.case.teacher.base != "same",
    "a teacher": lambda drawn: drawn.case.teacher is not None,
    "a teacher under tp": lambda drawn: drawn.case.teacher is not None and drawn.layout.tp > 1,
    "a teacher under cp": lambda drawn: drawn.case.teacher is not None and drawn.layout.cp > 1,
    "a teacher under ZeRO-3": lambda drawn: drawn.case.teacher is not None and drawn.layout.zero == 3,
    "a teacher with experts": lambda drawn: (
        drawn.case.teacher is not None and drawn.case.shape.moe is not None and not drawn.case.teacher.dense
    ),
    "a teacher of adapters": lambda drawn: drawn.case.teacher is not None and drawn.case.shape.lora is not None,
    "a teacher with another vocabulary": lambda drawn: drawn.case.teacher is not None and drawn.case.teacher.filled > 0,
    "reverse KL": lambda drawn: drawn.case.teacher is not None and drawn.case.teacher.beta == 1,
    "generalized JS": lambda drawn: drawn.case.teacher is not None and 0 < drawn.case.teacher.beta < 1,
    "a divergence beside cross-entropy": lambda drawn: drawn.case.teacher is not None and drawn.case.teacher.hard > 0,
    "a balance loss": lambda drawn: drawn.case.shape.moe is not None and drawn.case.balance_loss > 0,
}


@pytest.fixture(scope="module")
def drawn() -> list[DrawnCase]:
    return [random_case(11, index) for index in range(DRAWS)]


def test_every_feature_is_drawn(drawn: list[DrawnCase]) -> None:
    counts = Counter(name for case in drawn for name, has in FEATURES.items() if has(case))
    rare = {name: counts[name] for name in FEATURES if counts[name] < 3}
    assert not rare, rare


def test_what_is_drawn_is_legal_and_the_same_again(drawn: list[DrawnCase]) -> None:
    assert not [case for case in drawn if violations(case)]
    assert drawn[:50] == [random_case(11, index) for index in range(50)]
    assert len({format_case(case) for case in drawn}) > 0.99 * DRAWS
    assert all(random_case(3, index, processes=3).layout.world <= 3 for index in range(100))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_text_says_it_all(seed: int, index: int) -> None:
    drawn = random_case(seed, index)
    assert parse_case(format_case(drawn)) == drawn


def test_the_text_is_short_and_written_by_hand() -> None:
    drawn = parse_case("kv_heads=1 tp=2 stages=1,1 pp=2 micro_batch=1 sp=true rope_scaling.kind=yarn clip=0.05")
    assert (drawn.case.shape.kv_heads, drawn.layout.tp, drawn.layout.stages, drawn.case.clip) == (1, 2, (1, 1), 0.05)
    assert drawn.case.shape.rope_scaling is not None and drawn.case.shape.rope_scaling.factor == 2.0
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

    def asks(drawn: DrawnCase) -> DrawnCase | None:
        nonlocal tries
        tries += 1
        assert not violations(drawn)
        return drawn if failing(drawn) else None

    return format_case(shrink_case(start, asks, lambda: True)), tries


@pytest.mark.parametrize(
    ("failing", "smallest"),
    [
        (lambda case: case.case.shape.kv_heads == 1 and case.layout.tp > 1, "kv_heads=1 tp=2"),
        (lambda case: case.layout.pp > 1 and case.layout.schedule == "zb-v", "pp=2 vp=2 schedule=zb-v"),
        (lambda case: case.case.shape.moe is not None and case.layout.ep > 1, "moe. ep=2"),
        (lambda case: case.case.precision == "fp16" and case.case.overflow > 0, "precision=fp16 overflow="),
        (lambda case: len(case.case.empty) > 0 and case.layout.dp_replicate > 1, "dp_replicate=2 empty="),
    ],
)
def test_a_failing_case_is_made_small(failing: Asks, smallest: str, drawn: list[DrawnCase]) -> None:
    for start in [case for case in drawn if failing(case)][:5]:
        text, tries = _shrink(failing, start)
        assert all(word in text for word in smallest.split()), text
        least = parse_case(text)
        assert failing(least) and least.layout.world <= 2, text
        keys = {key.partition(".")[0] for key in settings_of(least)}
        wanted = {word.partition("=")[0].strip(".") for word in smallest.split()}
        assert len(keys - wanted) <= 3, text
        assert tries < 400


def test_no_time_leaves_the_case_as_it_is(drawn: list[DrawnCase]) -> None:
    assert shrink_case(drawn[0], lambda drawn: drawn, lambda: False) == drawn[0]


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
    least_change = margin(moe, scores, experts)
    assert 0 < least_change < 1
    changed = 0
    for size in torch.linspace(0, 30, 300):
        other = logits + torch.randn(1, 8, generator=generator) * size * least_change
        _, others, moved = router(other)
        if (moved - scores).abs().max() < least_change / 4:
            assert set(others.flatten().tolist()) == set(experts.flatten().tolist())
        changed += set(others.flatten().tolist()) != set(experts.flatten().tolist())
    assert changed


def test_no_choice_has_no_margin() -> None:
    moe = MoEShape(experts=3, top_k=3, ffn=4)
    scores = torch.tensor([[0.2, 0.3, 0.5]])
    assert margin(moe, scores, torch.tensor([[2, 1, 0]])) == float("inf")
    near = margin(replace(moe, top_k=1), torch.tensor([[0.4, 0.4, 0.2]]), torch.tensor([[0]]))
    assert near == 0.0

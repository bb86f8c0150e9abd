"""What the planner says a rank sends: the lectures' table, and the numbers of the trainer's own ledger."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import Case
from meshwright.observe.ranks import on_ranks
from meshwright.planner.cost.block import layer
from meshwright.planner.cost.micro_batch import local_shape
from meshwright.planner.cost.stack import MESHWRIGHT
from meshwright.planner.time.collectives import exchange_calls, exchanges, traffic
from meshwright.spec import Layout, MoEShape, Plan, Recipe, num_parameters, presets
from meshwright.spec.layout.layout import RECOMPUTE, place_of
from meshwright.spec.model.shape import LoRAShape
from tests.parallel.test_traffic import CASE, HEAD, SHAPE, Sent, sent_by

N = num_parameters(SHAPE)
B, S, D, WORD = 8, 16, 32, 4
"""Sequences, positions, hidden and bytes of the tests' model."""


def plan(case: Case = CASE, **options: Any) -> Plan:
    recipe = replace(case.recipe, sequence=case.sequence, global_batch=case.global_batch)
    return Plan(model=case.shape, recipe=recipe, layout=Layout(**options))


def told(plan: Plan, pp_rank: int = 0) -> Sent:
    return {(part.axis, part.collective): (part.calls, part.sent_bytes) for part in traffic(plan, pp_rank)}


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_sends_two_or_three_times_the_parameters(n: int, zero: int) -> None:
    """(n - 1)/n x 4 N bytes: 2 (all-reduce), 2 (scatter, gather), 2, 3 but for norm and head, which stay gathered."""
    whole = (n - 1) * WORD * N // n
    sent = told(plan(dp_shard=n, zero=zero))
    if zero == 0:
        assert sent["data", "all_reduce"][1] - 2 * (n - 1) * 8 // n == pytest.approx(2 * whole, abs=n)
        return
    regathered = (n - 1) * WORD * HEAD // n
    assert sent["shard", "reduce_scatter"][1] == whole
    assert sent["shard", "all_gather"][1] == (2 * whole - regathered if zero == 3 else whole)


@pytest.mark.parametrize(("zero", "scatters", "gathers"), [(1, 1, 1), (2, 4, 1), (3, 4, 4)])
def test_micro_batches_repeat_what_their_stage_does_not_keep(zero: int, scatters: int, gathers: int) -> None:
    single, four = (told(plan(dp_shard=2, zero=zero, micro_batch=size)) for size in (4, 1))
    assert four["shard", "reduce_scatter"][1] == scatters * single["shard", "reduce_scatter"][1]
    assert four["shard", "all_gather"][1] == gathers * single["shard", "all_gather"][1]


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("sp", [False, True])
def test_a_layer_sends_eight_activations_under_tensor_parallelism(t: int, sp: bool) -> None:
    """2 all-reduces forward and 2 backward of A = b s h: 8 (t-1)/t A; with sp the same as gathers and scatters, and 2
    gathers more; full recomputation repeats those that something kept depends on."""
    local = local_shape(SHAPE, MESHWRIGHT, Layout(tp=t, sp=sp), S, B, WORD)
    activation = B * S * D * WORD
    sums = [times * each for times, each in (exchange_calls(exchange, t) for exchange in exchanges(layer(local)))]
    assert sum(sums) == pytest.approx((10 if sp else 8) * (t - 1) / t * activation)
    again = sum(
        times * each for times, each in (exchange_calls(exchange, t) for exchange in exchanges(layer(local), "full"))
    )  # the last all-reduce of a layer feeds the residual stream alone
    assert again - sum(sums) == pytest.approx((3 if sp else 2) * (t - 1) / t * activation)


@pytest.mark.parametrize("c", [2, 4, 8])
@pytest.mark.parametrize(("precision", "gradients"), [(4, 1), (2, 2)])
def test_context_parallelism_sends_keys_and_values_in_hops(c: int, precision: int, gradients: int) -> None:
    """(c - 1) hops of 2 b s/c g h forward; backward those again and their gradients, which are fp32."""
    local = local_shape(SHAPE, MESHWRIGHT, Layout(cp=c), S, B, precision)
    hop = 2 * B * S / c * SHAPE.kv_heads * SHAPE.head_dim * precision
    calls = [exchange_calls(exchange, c) for exchange in exchanges(layer(local))]
    assert [times for times, _ in calls] == [c - 1] * 3
    assert [each for _, each in calls] == [hop, hop, gradients * hop]


def test_a_pipeline_sends_an_activation_each_way_over_each_border() -> None:
    for sp, slices in ((False, 1), (True, 2)):
        for rank, borders in enumerate((1, 2, 2, 1)):
            sent = told(plan(pp=4, tp=2, sp=sp, micro_batch=2), rank)
            assert sent["pp", "send"] == (4 * borders, borders * B * S * D * WORD // slices)


def test_experts_get_k_rows_a_token_and_send_them_back() -> None:
    """Forward there and back, backward the same: 4 (e-1)/e k rows; 8 bytes an expert tell how many."""
    moe = MoEShape(experts=8, top_k=2, ffn=16)
    shape = replace(SHAPE, layers=2, family="mixtral", moe=moe)
    sent = told(plan(replace(CASE, shape=shape), dp_shard=4, ep=4))
    rows = moe.top_k * B // 4 * S * D * WORD
    assert sent["ep", "all_to_all"] == (5 * 2, 2 * (4 * rows * 3 // 4 + 8 * moe.experts * 3 // 4))


def test_one_device_sends_nothing() -> None:
    assert traffic(plan()) == ()


FOUR: list[dict[str, Any]] = [
    *({"dp_shard": 4, "zero": zero, "micro_batch": 1} for zero in range(4)),
    {"dp_replicate": 2, "dp_shard": 2, "zero": 2, "micro_batch": 1},
    {"dp_replicate": 2, "tp": 2},
    *({"tp": 4, "sp": sp, "recompute": again} for sp in (False, True) for again in RECOMPUTE),
    {"tp": 4, "sp": True, "recompute": "full", "recompute_layers": 1},
    {"pp": 2, "tp": 2, "micro_batch": 2, "recompute": "all-but-attention", "recompute_layers": 1},
    {"cp": 4, "recompute": "selective"},
    {"cp": 4, "context": "all-gather", "recompute": "full"},
    *({"tp": 4, "sp": sp, "tp_chunks": 2, "recompute": again} for sp in (False, True) for again in RECOMPUTE),
    {"tp": 2, "cp": 2, "sp": True, "zero": 3},
    {"tp": 2, "cp": 2, "sp": True, "tp_chunks": 2},
    {"pp": 4, "micro_batch": 1, "schedule": "zb-h1"},
    {"pp": 2, "tp": 2, "sp": True, "micro_batch": 2},
    {"pp": 2, "cp": 2, "micro_batch": 1, "recompute": "full"},
    {"pp": 2, "dp_shard": 2, "zero": 1, "micro_batch": 1, "stages": (1, 3)},
]
ROUTED: list[dict[str, Any]] = [
    {"dp_shard": 4, "ep": 2},
    {"dp_shard": 4, "ep": 4, "zero": 3, "micro_batch": 1},
    {"tp": 2, "dp_shard": 2, "ep": 4, "sp": True, "zero": 2},
    {"tp": 2, "dp_shard": 2, "ep": 4, "sp": True, "zero": 2, "tp_chunks": 2},
    {"dp_shard": 4, "ep": 2, "ep_chunks": 2, "recompute": "full", "micro_batch": 1},
    {"tp": 2, "dp_shard": 2, "ep": 2, "sp": True, "ep_chunks": 2},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero": 1},
    {"pp": 2, "tp": 2, "sp": True, "ep": 2, "micro_batch": 2},
    {"pp": 2, "dp_shard": 2, "ep": 2, "zero": 3, "micro_batch": 1, "schedule": "zb-h1"},
]
FEW: list[dict[str, Any]] = [
    *({"dp_shard": 4, "zero": zero, "micro_batch": 1} for zero in range(4)),
    {"dp_shard": 4, "ep": 2, "zero": 3},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 2, "micro_batch": 1},
    *({"tp": 4, "sp": sp, "recompute": "full"} for sp in (False, True)),
    {"tp": 2, "dp_shard": 2, "ep": 2, "sp": True, "zero": 1, "recompute": "selective"},
    {"cp": 4, "zero": 3},
    {"cp": 4, "context": "all-gather", "zero": 1},
    {"pp": 2, "tp": 2, "micro_batch": 2, "stages": (1, 2)},
    {"pp": 2, "dp_shard": 2, "zero": 2, "micro_batch": 1, "schedule": "zb-h1", "stages": (2, 1)},
]
"""For two experts after a dense layer, fewer than the ranks that share them."""
TIED: list[dict[str, Any]] = [
    {"pp": 2, "micro_batch": 4},
    {"tp": 2, "sp": True},
    *({"pp": 2, "vp": 2, "schedule": name, "micro_batch": 1} for name in ("interleaved", "zb-v", "dualpipe-v")),
]


MIXTRAL = replace(SHAPE, layers=2, family="mixtral", moe=MoEShape(experts=4, top_k=4, ffn=16))
CODED = replace(SHAPE, lora=LoRAShape(rank=2, base="nf4-double"))
SHARED: list[dict[str, Any]] = [
    {"dp_shard": 4, "zero": 3, "micro_batch": 1},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
    {"tp": 2, "dp_shard": 2, "zero": 3},
    {"cp": 2, "dp_shard": 2, "zero": 3},
    {"dp_shard": 4, "zero": 2, "micro_batch": 1},
    {"pp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 1},
]
ADAPTED: list[dict[str, Any]] = [
    {"tp": 2, "dp_shard": 2},
    {"tp": 2, "sp": True, "dp_shard": 2},
    {"tp": 2, "sp": True, "pp": 2, "micro_batch": 1},
    {"tp": 2, "sp": True, "dp_shard": 2, "recompute": "full"},
    {"tp": 2, "cp": 2},
]
"""In front of the first adapter no gradient is sent; what frozen matrices read is not gathered again."""
SHARED_EXPERTS: list[dict[str, Any]] = [
    {"dp_shard": 4, "zero": 3},
    {"dp_shard": 4, "ep": 2, "zero": 3},
    {"dp_shard": 4, "ep": 4, "zero": 3},
]
"""Frozen matrices are codes, which ZeRO-3 shares."""
ROUNDED: list[dict[str, Any]] = [
    *({"tp": 4, "sp": sp, "recompute": again} for sp in (False, True) for again in ("none", *RECOMPUTE)),
    {"tp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 1},
    {"pp": 2, "tp": 2, "sp": True, "micro_batch": 1, "schedule": "zb-h1"},
    {"pp": 2, "tp": 2, "micro_batch": 2, "recompute": "full", "recompute_layers": 1},
]
"""Ranks find scales together, each time a matrix or a row of activations is rounded."""
ROUNDED_EXPERTS: list[dict[str, Any]] = [
    {"tp": 4, "recompute": "full"},
    {"tp": 2, "sp": True, "dp_shard": 2, "recompute": "selective"},
    {"tp": 2, "sp": True, "dp_shard": 2, "ep": 4, "zero": 2},
]
MLA = shrink("deepseek-v3")
TWO_EXPERTS = replace(SHAPE, layers=3, family="deepseek", moe=MoEShape(experts=2, top_k=2, ffn=16, first_dense=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "world", "options"),
    [
        (CASE, 4, FOUR),
        (replace(CASE, shape=MIXTRAL), 4, ROUTED),
        (replace(CASE, shape=TWO_EXPERTS, precision="bf16"), 4, FEW),
        (replace(CASE, shape=replace(shrink("qwen2.5-0.5b"), layers=5)), 2, TIED),
        (replace(CASE, optimizer="muon"), 4, FOUR),
        (replace(CASE, shape=TWO_EXPERTS, precision="bf16", optimizer="muon"), 4, FEW),
        (replace(CASE, shape=CODED), 4, SHARED),
        (replace(CASE, shape=replace(MIXTRAL, lora=CODED.lora)), 4, SHARED_EXPERTS),
        *((replace(CASE, fake_quantize=scheme), 4, ROUNDED) for scheme in ("int8", "nf4-double")),
        *((replace(CASE, shape=MIXTRAL, fake_quantize=scheme), 4, ROUNDED_EXPERTS) for scheme in ("int8", "int4-rtn")),
        (replace(CASE, shape=MLA, fake_quantize="int8"), 4, ROUNDED_EXPERTS[:2]),
        *(
            (replace(CASE, shape=replace(shape, lora=LoRAShape(rank=2, targets=targets))), 4, ADAPTED)
            for shape, targets in ((SHAPE, "all"), (SHAPE, "mlp"), (SHAPE, "o"), (MLA, "attention"))
        ),
    ],
    ids=[
        "dense",
        "experts",
        "few experts in bf16",
        "tied head",
        "muon",
        "muon, few experts in bf16",
        "codes",
        "codes of experts",
        "rounded, with rows",
        "rounded, with doubled scales",
        "rounded experts, with rows",
        "rounded experts, cut within groups",
        "rounded latent attention",
        "adapters",
        "adapters of the MLP",
        "adapters of o",
        "adapters of latent attention",
    ],
)
def test_the_trainer_counts_the_same(case: Case, world: int, options: list[dict[str, Any]]) -> None:
    """Calls and bytes by axis and collective, exactly. Every expert gets every token, so routing leaves no choice. A
    pipeline's barrier is met once in a run, not once a step."""
    counted = on_ranks(world, sent_by, case, options)
    for index, each in enumerate(options):
        asked = plan(case, **each)
        for rank in range(world):
            at = place_of(asked.layout, rank)
            if not any(number for axis, number in at.items() if axis != "pp"):
                sent = {key: value for key, value in counted[rank][index].items() if key[1] != "barrier"}
                assert told(asked, at["pp"]) == sent, f"{each}, rank {rank}"


def test_a_prediction_tells_its_traffic() -> None:
    from meshwright.planner.step.predict import predict

    llama = presets.model("llama-3.1-8b")
    cluster = presets.cluster("h100x8", 2)
    layout = Layout(dp_shard=8, tp=2, sp=True, zero=1, micro_batch=1)
    plan = Plan(
        model=llama, recipe=Recipe(global_batch=16, sequence=4096, precision="bf16"), layout=layout, cluster=cluster
    )
    predicted = predict(plan).traffic()
    assert predicted == traffic(plan)
    gathered = next(part for part in predicted if (part.axis, part.collective) == ("tp", "all_gather"))
    assert gathered.sent_bytes == 2 * (6 * 32 + 2) * 4096 * 4096 * 2 // 2  # two micro-batches

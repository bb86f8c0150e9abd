"""Bytes that ranks hold, beside the counting from shape and layout alone, and that beside the lectures' formulas."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import RECIPE, Case, case_batch
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.axes import data
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout, ModelShape, MoEShape, num_parameters, parameters, presets
from meshwright.spec.layout.layout import pipeline_ranks
from meshwright.spec.memory.held import Phase, list_held, memory, shards_are_masters
from meshwright.spec.model.shape import LoRAShape
from meshwright.training.optimizer.optimizer import Optimizer
from meshwright.training.optimizer.optimizer import held_bytes as measured
from meshwright.training.optimizer.precision import DTYPES
from meshwright.training.step.batches import Share, select, split
from meshwright.training.step.step import MicroPass, Weights
from tests.planner.test_states import planned

SHAPE = ModelShape(vocab=64, layers=4, hidden=32, heads=4, kv_heads=4, ffn=48, max_positions=16)
"""All that is split divides by 2 and by 4."""
N = num_parameters(SHAPE)
LARGE = replace(SHAPE, vocab=127, hidden=64, ffn=128)
"""Of matrices that are large enough for 8-bit states, and rows that 4 ranks cut between blocks."""
UNEVEN = shrink("qwen3-30b-a3b")
"""A prime vocabulary, three layers, fewer key heads than 4 ranks, experts."""
ADAPTED = replace(UNEVEN, lora=LoRAShape(rank=3))
CODED = replace(UNEVEN, lora=LoRAShape(rank=3, base="nf4-double"))
FEW = replace(UNEVEN, moe=MoEShape(experts=2, top_k=1, ffn=12))
"""Fewer experts than 4 ranks."""
TIED = replace(shrink("qwen2.5-0.5b"), layers=5)

TWO: list[dict[str, Any]] = [
    {"dp_replicate": 2},
    *({"dp_shard": 2, "zero": zero, "micro_batch": 2} for zero in range(4)),
    {"tp": 2},
    {"cp": 2, "zero": 2},
    {"pp": 2, "micro_batch": 2},
    {"pp": 2, "micro_batch": 2, "schedule": "zb-h1"},
]
EXPERTS: list[dict[str, Any]] = [
    *({"dp_shard": 2, "ep": 2, "zero": zero, "micro_batch": 2} for zero in range(4)),
    {"tp": 2, "sp": True, "ep": 2},
]
FOUR: list[dict[str, Any]] = [
    *({"dp_shard": 4, "zero": zero, "micro_batch": 1} for zero in range(4)),
    *({"dp_replicate": 2, "dp_shard": 2, "zero": zero, "micro_batch": 1} for zero in (1, 2, 3)),
    {"tp": 4},
    {"tp": 2, "dp_shard": 2, "zero": 3},
    *({"pp": 2, "dp_shard": 2, "zero": zero, "micro_batch": 1} for zero in range(4)),
]
FOUR_EXPERTS: list[dict[str, Any]] = [
    {"dp_shard": 4, "ep": 2, "zero": 3},
    {"dp_shard": 2, "dp_replicate": 2, "ep": 2, "zero": 1},
    {"dp_shard": 2, "tp": 2, "sp": True, "ep": 4, "zero": 2},
]
FEW_EXPERTS: list[dict[str, Any]] = [
    *({"dp_shard": 4, "ep": ep, "zero": zero, "micro_batch": 1} for ep in (1, 2) for zero in (1, 3)),
    {"dp_shard": 2, "tp": 2, "sp": True, "ep": 2, "zero": 2, "micro_batch": 1},
]


Held = dict[Phase, dict[str, int]]


def hold(
    shape: ModelShape, layout: Layout, precision: str, process_groups: ProcessGroups, states: dict[str, Any]
) -> Held:
    """What this rank holds at the two moments of a step."""
    case, recipe = Case(shape=shape), replace(RECIPE, precision=precision, **states)  # type: ignore[arg-type]
    mesh = make_mesh(layout, process_groups=process_groups)
    engine = build_engine(
        shape,
        layout,
        mesh=mesh,
        dtype=DTYPES[precision],
        reduce_dtype=torch.float32,
        micro_batches=layout.micro_batches(case.global_batch),
        masters=shards_are_masters(precision, layout, recipe.storage),
    )
    engine.train()
    optimizer = Optimizer.for_engine(engine, recipe)
    index = mesh.places["dp_replicate"] * layout.dp_shard + mesh.places["dp_shard"]
    share = Share(index=index, parts=layout.dp, columns=engine.columns(case.sequence))
    batches = split(select(case_batch(case, 1), share), layout.micro_batch_of(case.global_batch))
    weights = Weights(torch.tensor(0.01), torch.tensor(0.1), torch.tensor(0.01), torch.ones(()))
    seen: list[dict[str, int]] = []

    def look(*_: Any) -> None:
        if not seen:
            seen.append(measured(engine, optimizer))

    set_reducing = data.set_reducing

    def reducing(modules: Any, reduces: bool) -> None:
        if reduces:  # under a pipeline: before anything is reduced
            look()
        set_reducing(modules, reduces)

    data.set_reducing = reducing
    try:
        engine.forward_backward([MicroPass(batch, weights) for batch in batches], after=look)
    finally:
        data.set_reducing = set_reducing
    look()
    engine.finish_gradients()
    return {"step": seen[0], "update": measured(engine, optimizer)}


def holdings(shape: ModelShape, options: list[dict[str, Any]], precision: str, states: dict[str, Any]) -> list[Held]:
    process_groups: ProcessGroups = {}
    return [hold(shape, Layout(compile="off", **each), precision, process_groups, states) for each in options]


@pytest.mark.parametrize(
    ("shape", "world", "options", "precision", "states"),
    [
        (SHAPE, 2, TWO, "fp32", {}),
        (UNEVEN, 2, TWO + EXPERTS, "bf16", {"optimizer_states": "bf16"}),
        (TIED, 2, TWO, "fp32", {}),
        (SHAPE, 4, FOUR, "bf16", {}),
        (LARGE, 4, FOUR, "bf16", {"optimizer_states": "int8", "master_weights": "none"}),
        (UNEVEN, 4, FOUR + FOUR_EXPERTS, "fp32", {}),
        (FEW, 4, FEW_EXPERTS, "bf16", {}),
        (UNEVEN, 4, FOUR + FOUR_EXPERTS, "bf16", {"optimizer": "muon"}),
        (LARGE, 2, TWO, "bf16", {"optimizer": "muon", "optimizer_states": "int8"}),
        (ADAPTED, 4, FOUR + FOUR_EXPERTS, "bf16", {}),
        (CODED, 2, [each for each in TWO if "tp" not in each], "bf16", {}),
    ],
    ids=[
        "even",
        "uneven, bf16",
        "tied",
        "four, bf16",
        "four, int8",
        "four, uneven",
        "four, few experts",
        "four, muon",
        "muon, int8",
        "four, adapters",
        "codes",
    ],
)
@pytest.mark.long
def test_ranks_hold_what_is_counted_to_the_byte(
    shape: ModelShape, world: int, options: list[dict[str, Any]], precision: str, states: dict[str, Any]
) -> None:
    storage = replace(RECIPE, precision=precision, **states).storage  # type: ignore[arg-type]
    for rank, results in enumerate(on_ranks(world, holdings, shape, options, precision, states)):
        for each, bytes_by_kind in zip(options, results, strict=True):
            layout = Layout(compile="off", **each)
            passes, title = layout.micro_batches(8), f"rank {rank} of {each}"
            counted = memory(shape, layout, precision, rank, micro_batches=passes, storage=storage)
            assert bytes_by_kind["update"] == counted["update"], title
            if rank in pipeline_ranks(layout):  # which hold most of their place
                pp_rank = pipeline_ranks(layout).index(rank)
                counted_bytes = planned(shape, layout, precision, pp_rank, storage, micro_batches=passes)
                assert (
                    bytes_by_kind["update"] == counted_bytes["update"] and counted["step"] == counted_bytes["step"]
                ), title
            now, right = bytes_by_kind["step"], counted["step"]
            if passes == 1 and layout.pp == 1:
                continue  # there is no moment between micro-batches
            if layout.dp_replicate > 1 and layout.zero > 1:  # fully_shard keeps partial sums to itself until the last
                assert "gradients" not in now
                del right["gradients"]
            assert now == right, title


def counted(
    shape: ModelShape, precision: str, rank: int = 0, *, reduce_dtype: str = "fp32", **options: Any
) -> dict[str, dict[str, int]]:
    by_phase = memory(shape, Layout(**options), precision, rank, reduce_dtype=reduce_dtype)
    return {phase: {k: v for k, v in by_phase[phase].items() if k != "counters"} for phase in ("step", "update")}


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_lectures_table_of_zero_in_fp32(n: int) -> None:
    """4 + 4 + 8: 16 N; 8 N + 8 N / n; 4 N + 12 N / n; 16 N / n. Beside whole parameters lies the rank's own shard."""
    table = {0: 16 * N, 1: 4 * N + 4 * N + 8 * N // n, 2: 4 * N + (4 + 8) * N // n, 3: 16 * N // n}
    for zero, right in table.items() if n > 1 else [(0, 16 * N)]:
        by_phase = counted(SHAPE, "fp32", dp_shard=n, zero=zero)
        beside = by_phase["step"].pop("shards", 0)
        assert sum(by_phase["step"].values()) == right
        assert beside == (4 * N // n if zero in (1, 2) else 0)
        assert sum(by_phase["update"].values()) == (16 * N // n if zero else 16 * N)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("gradient", [2, 4])
def test_the_lectures_table_of_zero_in_mixed_precision(n: int, gradient: int) -> None:
    """2 + 2 + 4 + 4 + 4: 16 N; 4 N + 12 N / n; 2 N + 14 N / n; 16 N / n. Gradients summed in fp32: two bytes more, and
    shards that are their masters: under ZeRO-3 two less. Else a 16-bit shard lies beside whole parameters."""
    g, reduce_dtype = gradient, {2: "model", 4: "fp32"}[gradient]
    table = {0: (14 + g) * N, 1: (2 + g) * N + 12 * N // n, 2: 2 * N + (12 + g) * N // n, 3: (14 + g) * N // n}
    for zero, right in table.items():
        by_phase = counted(SHAPE, "bf16", reduce_dtype=reduce_dtype, dp_shard=n, zero=zero)
        beside = 2 * N // n if zero in (1, 2) and reduce_dtype == "model" else 0
        saved = 2 * N // n if zero == 3 and reduce_dtype == "fp32" else 0
        assert sum(by_phase["step"].values()) == right + beside - saved
        if zero and reduce_dtype == "fp32":
            assert by_phase["update"] == {"parameters": 4 * N // n, "gradients": 4 * N // n, "moments": 8 * N // n}


def test_one_process_and_one_micro_batch_keep_the_lectures_sixteen_bytes() -> None:
    assert counted(SHAPE, "bf16")["update"] == {
        "parameters": 2 * N,
        "gradients": 2 * N,
        "masters": 4 * N,
        "moments": 8 * N,
    }


def test_hybrid_sharding_divides_by_the_ranks_of_a_replica() -> None:
    for zero in (1, 2, 3):
        assert counted(SHAPE, "bf16", dp_replicate=8, dp_shard=4, zero=zero) == counted(
            SHAPE, "bf16", dp_shard=4, zero=zero
        )


@pytest.mark.parametrize("t", [2, 4])
def test_tensor_parallelism_divides_all_but_the_norms(t: int) -> None:
    norms = (2 * SHAPE.layers + 1) * SHAPE.hidden
    for rank in range(t):
        in_update = counted(SHAPE, "fp32", rank, tp=t)["update"]
        assert sum(in_update.values()) == 16 * ((N - norms) // t + norms)


@pytest.mark.parametrize("p", [2, 4])
def test_pipeline_stages_hold_their_layers_and_the_ends_their_matrices(p: int) -> None:
    """h v for the embedding, h v + h for norm and head, L / p layers of 4 h^2 + 3 h f + 2 h."""
    h, f, v = SHAPE.hidden, SHAPE.ffn, SHAPE.vocab
    layer = 4 * h * h + 3 * h * f + 2 * h
    for rank in range(p):
        ends = (rank == 0) * h * v + (rank == p - 1) * (h * v + h)
        in_update = counted(SHAPE, "fp32", rank, pp=p, micro_batch=1)["update"]
        assert sum(in_update.values()) == 16 * (SHAPE.layers // p * layer + ends)


def test_stages_by_hand_hold_what_they_were_dealt() -> None:
    h, f, v = SHAPE.hidden, SHAPE.ffn, SHAPE.vocab
    layer = 4 * h * h + 3 * h * f + 2 * h
    for rank, (layers, ends) in enumerate(((1 + 1, h * v + h * v + h), (1 + 1, 0))):
        in_update = counted(SHAPE, "fp32", rank, pp=2, vp=2, schedule="zb-v", stages=(1, 1, 1, 1), micro_batch=1)[
            "update"
        ]
        assert sum(in_update.values()) == 16 * (layers * layer + ends)
    for rank, layers in enumerate((3, 1)):
        in_update = counted(SHAPE, "fp32", rank, pp=2, stages=(3, 1), micro_batch=1)["update"]
        assert sum(in_update.values()) == 16 * (layers * layer + h * v + (rank == 1) * h)


def test_a_tied_head_lies_on_both_ends_of_a_pipeline_once() -> None:
    tied = replace(SHAPE, tied=True)
    first, last = ({share.parameter.name for share in list_held(tied, Layout(pp=2), rank)} for rank in range(2))
    assert first & last == {"embed.weight"}
    both = [share.parameter.name for share in list_held(tied, Layout(pp=2, vp=2, schedule="zb-v"), 0)]
    assert both.count("embed.weight") == 1 and "norm.weight" in both


@pytest.mark.parametrize("e", [2, 4])
def test_experts_divide_by_ep_and_the_rest_by_all_ranks(e: int) -> None:
    shape = replace(SHAPE, family="mixtral", moe=MoEShape(experts=8, top_k=2, ffn=16))
    experts = sum(p.numel for p in parameters(shape) if p.group == "expert")
    rest = num_parameters(shape) - experts
    plain = counted(shape, "fp32", dp_shard=4, ep=e)["update"]
    assert sum(plain.values()) == 16 * (experts // e + rest)
    sharded = counted(shape, "fp32", dp_shard=4, ep=e, zero=3)["update"]  # 4 / e ranks share what ep leaves
    assert sum(sharded.values()) == 16 * (experts // 4 + rest // 4)


def test_experts_fewer_than_ranks_are_shared_by_all_of_them() -> None:
    """DeepSeek-V3 over 1024 ranks, 4 experts on each of ep=64: 16 ranks share them, and each has a sixteenth."""
    shape, layout = presets.model("deepseek-v3"), Layout(dp_shard=1024, ep=64, zero=3)
    for rank in (0, 64 * 15):
        experts = [share for share in list_held(shape, layout, rank) if share.parameter.group == "expert"]
        assert all(16 * share.owned == 16 * share.padded == share.box.numel for share in experts)
        assert all(share.box.sizes[0] == 4 for share in experts)


@pytest.mark.parametrize("zero", [0, 3])
def test_all_ranks_together_hold_the_model_once_for_each_replica(zero: int) -> None:
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2, zero=zero, micro_batch=1)
    copies = layout.dp if zero == 0 else layout.dp_replicate
    split_by_tp = sum(p.numel for p in parameters(SHAPE) if "tp" in p.axes)
    total = sum(share.owned for rank in range(layout.world) for share in list_held(SHAPE, layout, rank))
    assert total == copies * (split_by_tp + layout.tp * (N - split_by_tp))

"""The dry run against real processes, against the counting of states, and against itself: whole steps, other worlds."""

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.dry_run import LLAMA, MOE, measured, row
from meshwright.kernels.chooser import simulated_kind
from meshwright.model import Transformer
from meshwright.observe.dryrun.document import dry_run_document, needed_bytes, room_of
from meshwright.observe.dryrun.simulate import device_of, dry_run, watch_rank
from meshwright.observe.program import Routing
from meshwright.observe.ranks import SERVER, on_ranks
from meshwright.parallel.groups.group import Group
from meshwright.planner.step.predict import build_estimator
from meshwright.spec import Layout, Plan, Recipe, presets
from meshwright.spec.errors import IllegalLayout, PlanError
from meshwright.spec.layout.cluster import Cluster, Device
from meshwright.spec.memory.held import memory, written_bytes
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.recipe.recipe import BatchStage
from meshwright.spec.weights.inventory import parameters
from meshwright.verbs.calibrate import campaign
from meshwright.verbs.main import main

SMALL = replace(LLAMA, vocab=4096, layers=2, hidden=256, heads=4, kv_heads=2, ffn=704)
TINY = replace(SMALL, vocab=512, layers=4, hidden=64, heads=4, kv_heads=2, ffn=96)
MIXED = replace(MOE, vocab=4096, layers=2, hidden=256, heads=4, kv_heads=2, ffn=384)

SCALARS = 12 * 8 * 512
"""What micro-batches keep of their losses until the step ends, as a GPU's allocator gives it."""


def plan(shape: Any, batch: int, sequence: int = 64, precision: str = "fp32", **layout: Any) -> Plan:
    recipe = Recipe(sequence=sequence, global_batch=batch, precision=precision, document_mask=False)  # type: ignore[arg-type]
    return Plan(model=shape, recipe=recipe, layout=Layout(compile="off", **layout))


def ramped(base: Plan, batch: int) -> Plan:
    return replace(base, recipe=replace(base.recipe, batch_ramp=(BatchStage(tokens=1000, global_batch=batch),)))


def by_muon(base: Plan) -> Plan:
    return replace(base, recipe=replace(base.recipe, optimizer="muon"))


def rounding(base: Plan, scheme: str) -> Plan:
    return replace(base, recipe=replace(base.recipe, fake_quantize=scheme))


CODED = replace(SMALL, hidden=512, ffn=1408, vocab=1024, lora=LoRAShape(rank=8, base="nf4-double"))
"""Matrices whose restored copies are larger than all else that a short pass takes."""
REAL = {
    "one": plan(SMALL, 16, micro_batch=8),
    "noise": replace(
        plan(SMALL, 4, micro_batch=1), recipe=replace(plan(SMALL, 4, micro_batch=1).recipe, noise_scale_every=5)
    ),
    "ramp": ramped(plan(SMALL, 2, micro_batch=8), 32),
    "async": plan(SMALL, 4, micro_batch=2, saving="async"),
    "z3": plan(SMALL, 32, dp_shard=2, zero=3, micro_batch=8),
    "dp-async": plan(SMALL, 8, dp_replicate=2, micro_batch=2, saving="async"),
    "sp": plan(SMALL, 32, tp=2, sp=True, micro_batch=16, recompute="selective"),
    "norms": plan(SMALL, 32, cp=2, context_split="striped", micro_batch=16, recompute="norms"),
    "but attention": plan(SMALL, 32, cp=2, micro_batch=16, recompute="all-but-attention"),
    "cp-window": plan(replace(SMALL, window=24), 32, cp=2, micro_batch=16),
    "cp-window gathered": plan(replace(SMALL, window=24), 32, cp=2, micro_batch=16, context="all-gather"),
    "cp-window in bf16": plan(replace(SMALL, window=24), 32, cp=2, micro_batch=16, precision="bf16"),
    "zb-h1": plan(SMALL, 32, pp=2, micro_batch=8, schedule="zb-h1"),
    "ep": plan(MIXED, 32, dp_shard=2, ep=2, zero=1, micro_batch=8),
    "ep in pieces": plan(MIXED, 32, dp_shard=2, ep=2, zero=1, micro_batch=8, ep_chunks=2),
    "muon": by_muon(plan(SMALL, 4, micro_batch=2)),
    "z2-muon": by_muon(plan(SMALL, 4, dp_shard=2, zero=2, micro_batch=2)),
    "z3-muon": by_muon(plan(SMALL, 32, dp_shard=2, zero=3, micro_batch=8)),
    "tp-muon": by_muon(plan(SMALL, 4, tp=2, micro_batch=2)),
    "dp-muon": by_muon(plan(SMALL, 4, dp_replicate=2, micro_batch=2)),
    "codes": plan(CODED, 8, micro_batch=2),
    "codes again": plan(CODED, 4, micro_batch=2, recompute="full"),
    "z2-codes": plan(CODED, 8, dp_shard=2, zero=2, micro_batch=2),
    "z3-codes": plan(CODED, 8, dp_shard=2, zero=3, micro_batch=2),
    "z3-codes again": plan(CODED, 8, dp_shard=2, zero=3, micro_batch=2, recompute="full", precision="bf16"),
    "tp-codes": plan(CODED, 8, tp=2, sp=True, micro_batch=4),
    "ep-codes": plan(
        replace(MIXED, lora=LoRAShape(rank=8, base="int4-hqq")), 32, dp_shard=2, ep=2, zero=1, micro_batch=8
    ),
    "rounding": rounding(plan(SMALL, 4, micro_batch=2), "int3"),
    "tp-rounding": rounding(plan(SMALL, 8, tp=2, sp=True, micro_batch=4, recompute="full"), "int8"),
    "ep-rounding": rounding(plan(MIXED, 32, dp_shard=2, ep=2, zero=1, micro_batch=8), "int4-rtn"),
    "zb-rounding": rounding(plan(SMALL, 32, pp=2, micro_batch=8, schedule="zb-h1"), "nf4-double"),
    "ep-muon": by_muon(plan(MIXED, 4, dp_shard=2, ep=2, zero=1, micro_batch=2)),
}


@pytest.mark.parametrize("name", ["norms", "but attention", "cp-window", "cp-window gathered", "cp-window in bf16"])
def test_context_parallel_plans_run_without_values(name: str) -> None:
    assert dry_run(REAL[name], ranks=(1,), device="cuda").ranks[0].peak_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_peak_and_traffic_of_real_processes(world: int) -> None:
    """All layouts with so many processes in one group: peaks as torch's allocator tells them, traffic exactly."""
    plans = [job for job in REAL.values() if job.layout.world == world]
    ranks = on_ranks(world, measured, plans, 2, limit_s=600)
    for index, job in enumerate(plans):
        simulated = dry_run(job, ranks=range(world), device="cpu", whole=True)
        compared = row(str(job.layout), simulated, [rank[index] for rank in ranks], 0.0)
        assert compared["same_traffic"], job.layout
        assert abs(compared["error"]) < 0.03, compared


def test_gathers_are_buffers_and_the_loss_makes_logits() -> None:
    """By what the engine says of what it makes, wherever its files lie."""
    sharded, split = (dry_run(REAL[name], ranks=(0,), device="cuda").ranks[0] for name in ("z3", "sp"))
    block = 4 * sum(p.numel for p in parameters(SMALL) if p.layer == 0)
    backward = [part.kinds.get("buffers", 0) for part in sharded.passes if part.name.startswith("BW")]
    assert min(backward) >= 2 * block
    rows, vocab = 16 * 64, SMALL.vocab // 2
    assert split.kinds["logits"] >= 4 * rows * vocab
    assert all(tensor.kind == "logits" for tensor in split.largest if tensor.shape == (rows, vocab))


def test_measuring_the_noise_scale_takes_one_more_copy_of_the_gradients() -> None:
    noisy, plain = (dry_run(job, device="cpu").ranks[0] for job in (REAL["noise"], plan(SMALL, 4, micro_batch=1)))
    assert noisy.peak_bytes > plain.peak_bytes + 0.3 * plain.kinds["gradients"]  # the head's scratch is free by then


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_shard": 1024, "zero": 3},
        {"dp_replicate": 64, "dp_shard": 16, "zero": 2},
        {"dp_shard": 64, "tp": 2, "pp": 2, "zero": 1},
    ],
    ids=str,
)
def test_states_are_those_that_are_counted(layout: dict[str, Any]) -> None:
    """A thousand ranks: of a sharded parameter only the shard counts, not the whole one that its wrapper tells of."""
    job = plan(TINY, 2048, precision="bf16", micro_batch=1, **layout)
    seen = dry_run(job, ranks=[3], device="cpu").ranks[0]
    counted = memory(TINY, job.layout, "bf16", 3, micro_batches=job.micro_batches, reduce_dtype="fp32")
    for kind in ("moments", "counters"):
        assert seen.kinds[kind] == counted["update"][kind], kind
    kind_of_weights = "parameters" if job.layout.zero == 3 else "shards"
    assert seen.kinds[kind_of_weights] == counted["update"]["parameters"] and "masters" not in {
        **seen.kinds,
        **counted["update"],
    }


@pytest.mark.parametrize("zero", [1, 3])
def test_a_short_shard_is_held_once(zero: int) -> None:
    """The last rank's, which is padded: FSDP knows its memory by an address, and tensors without values have none."""
    uneven = replace(TINY, vocab=509, hidden=65, head_dim=16, ffn=99)
    job = plan(uneven, 4, dp_shard=4, zero=zero)
    counted = memory(uneven, job.layout, "fp32", 3)["update"]["parameters"]
    for rank in dry_run(job, ranks=[0, 3], device="cpu").ranks:
        assert rank.kinds["parameters" if zero == 3 else "shards"] == counted, rank.rank


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
@pytest.mark.long
def test_few_micro_batches_stand_for_many(schedule: str) -> None:
    virtual = 2 if schedule in ("interleaved", "zb-v", "dualpipe-v") else 1
    job = plan(TINY, 12, pp=2, vp=virtual, micro_batch=1, schedule=schedule)
    short, whole = dry_run(job, device="cuda"), dry_run(job, device="cuda", whole=True)
    assert any(sum(short.run[rank]) < sum(whole.run[rank]) for rank in short.run)
    for few, all_of_them in zip(short.ranks, whole.ranks, strict=True):
        tokens = all_of_them.kinds.get("tokens", 0) - few.kinds.get("tokens", 0)
        assert few.peak_bytes + tokens == pytest.approx(all_of_them.peak_bytes, abs=SCALARS)
        assert dict(short.traffic(few.rank)) == dict(whole.traffic(few.rank))


@pytest.mark.parametrize("schedule", ["1f1b", "afab"])
@pytest.mark.long
def test_a_step_that_must_be_whole_is_made_once(schedule: str) -> None:
    job = plan(TINY, 4, pp=4, micro_batch=1, schedule=schedule)
    short, whole = dry_run(job, ranks=[0], device="cuda"), dry_run(job, ranks=[0], device="cuda", whole=True)
    assert short.run == {0: (1, 4)} and whole.run == {0: (4, 4)}
    assert (short.peak_bytes, short.ranks[0].kinds) == (whole.peak_bytes, whole.ranks[0].kinds)
    assert dict(short.traffic(0)) == dict(whole.traffic(0))


@pytest.mark.long
def test_accumulation_is_shortened_too() -> None:
    job = plan(TINY, 12, dp_shard=2, zero=2, micro_batch=1)
    short, whole = dry_run(job, device="cuda"), dry_run(job, device="cuda", whole=True)
    assert short.run == {0: (1, 3)}
    assert short.peak_bytes == pytest.approx(whole.peak_bytes, abs=SCALARS)
    assert dict(short.traffic(0)) == dict(whole.traffic(0))


@pytest.mark.long
def test_what_a_rank_does_does_not_depend_on_how_many_there_are() -> None:
    few = dry_run(plan(TINY, 32, dp_replicate=8, tp=2, pp=2, micro_batch=1), device="cuda")
    many = dry_run(plan(TINY, 32 * 512, dp_replicate=8 * 512, tp=2, pp=2, micro_batch=1), device="cuda")
    assert [seen.peak_bytes for seen in few.ranks] == [seen.peak_bytes for seen in many.ranks]
    assert [seen.sent[1].keys() for seen in few.ranks] == [seen.sent[1].keys() for seen in many.ranks]


@pytest.mark.long
def test_more_rows_for_a_rank_s_experts() -> None:
    job = plan(MIXED, 8, dp_shard=2, ep=2, zero=1, micro_batch=4)
    even, loaded = (dry_run(job, device="cuda", load=load) for load in (1.0, 1.9))
    assert loaded.worst.kinds["activations"] > 1.1 * even.worst.kinds["activations"]


def test_routing_adds_up() -> None:
    group = Group("ep", (0, 1, 2, 3), 2)
    counts = torch.zeros(2, 8)
    leaving, arriving = Routing(group).counts(counts, 803)
    assert sum(leaving) == 803 and max(leaving) - min(leaving) == 1
    assert arriving == leaving[4:6] * 4
    leaving, arriving = Routing(group, 2.0).counts(counts, 800)
    assert sum(leaving) == 800 and sum(leaving[4:6]) == 400 and sum(arriving) == 1600
    with pytest.raises(PlanError, match="take less"):
        Routing(group, 5.0).counts(counts, 800)


def _reads_a_value() -> str:
    def stage(self: Transformer, x: Any, tokens: Any, *arguments: Any, **keywords: Any) -> Any:
        return torch.empty(int(tokens.sum().item()))

    Transformer.stage = stage  # type: ignore[method-assign,assignment]
    try:
        watch_rank(plan(TINY, 2, micro_batch=1), 0, "cpu", 1.0, (1, 1))
    except PlanError as error:
        return str(error)
    return "no error"


def test_sizes_that_depend_on_values_are_told_of() -> None:
    with ProcessPoolExecutor(1, mp_context=SERVER) as pool:
        told = pool.submit(_reads_a_value).result()
    assert "cannot be run without values" in told and "\n" not in told


def test_bad_plans() -> None:
    with pytest.raises(PlanError, match="rank=7 is not one of the 2 ranks"):
        dry_run(plan(TINY, 4, dp_replicate=2), ranks=[7])
    with pytest.raises(IllegalLayout):
        dry_run(plan(TINY, 4, tp=3))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "model: {preset: llama-tiny, layers: 2}\nrecipe: {sequence: 64, global_batch: 8, precision: bf16}\n"
        "layout: {pp: 2, micro_batch: 1}\n"
    )
    return path


def test_the_verb(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", str(written), "--device", "cuda", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["source"] == "dryrun" and [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert sum(kind["bytes"] for kind in document["memory"]) == document["peak_bytes"]
    assert len(document["ranks"][0]["largest"]) == 20 and document["ranks"][0]["largest"][0]["line"]


def test_the_verb_says_what_does_not_fit(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["dryrun", str(written), "cluster.device.name=small", "cluster.device.memory_bytes=1704000000"]
    assert main(words) == 3
    told = capsys.readouterr()
    assert "does not fit" in told.out and told.err.count("\n") == 1 and "needs" in told.err


def _left_behind() -> list[tuple[bool, bool, str]]:
    """Of a dry run in this very process, and of one that fails: a process group, a mode, a device that is acted as."""
    states = []
    for run in (lambda: watch_rank(plan(TINY, 2, micro_batch=1), 0, "cuda", 1.0, (1, 1)), _reads_a_value):
        run()
        states.append((torch.distributed.is_initialized(), type(torch.ones(1)) is not torch.Tensor, simulated_kind()))
    return states


def test_a_dry_run_leaves_its_process_as_it_was() -> None:
    with ProcessPoolExecutor(1, mp_context=SERVER) as pool:
        assert pool.submit(_left_behind).result() == [(False, False, "")] * 2


def test_the_document_says_what_fits() -> None:
    assert dry_run_document(dry_run(plan(TINY, 2, micro_batch=1), device="cpu"))["fits"] is True


def test_workspaces_of_a_gpu_come_to_what_tensors_hold() -> None:
    simulated = dry_run(plan(TINY, 2, micro_batch=1), device="cuda")
    described = replace(simulated, plan=replace(simulated.plan, cluster=presets.cluster("h100x1")))
    room = dry_run_document(described)["capacity_bytes"]
    for below, fits in ((200 * 2**20, True), (1000, False)):
        full = replace(described, ranks=(replace(simulated.worst, peak_bytes=room - below),))
        assert dry_run_document(full)["fits"] is fits


def test_kernels_and_memory_are_of_one_device() -> None:
    """A CPU's kernels in this machine's memory, a GPU's in the plan's; what is called a GPU's, planner and dry run
    agree upon."""
    job = replace(plan(TINY, 2, micro_batch=1), cluster=presets.cluster("h100x1"))
    assert room_of(job, "cpu").owner == "this machine"
    assert room_of(job, "cuda").owner == job.cluster.device.name
    for device, kind in (
        (Device(name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 10**9, bf16_flop_per_s=8e14), "cuda"),
        (Device(name=campaign._title("cpu"), memory_bytes=2**33, bf16_flop_per_s=2e11), "cpu"),
        (Device(name="small", memory_bytes=2**33), "cpu"),
    ):
        asked = replace(job, cluster=Cluster(device=device))
        assert device_of(asked) == kind
        assert room_of(asked, kind).owner == device.name
        assert build_estimator(asked).costs.gpu is (kind == "cuda")


def test_ranks_of_one_machine_need_memory_together() -> None:
    simulated = dry_run(plan(TINY, 8, pp=2, micro_batch=1), device="cpu")
    room = room_of(simulated.plan, "cpu")
    assert needed_bytes(simulated, room) == sum(rank.peak_bytes for rank in simulated.ranks)
    assert needed_bytes(simulated, replace(room, machines=2)) == simulated.peak_bytes
    alone = replace(simulated, ranks=simulated.ranks[:1])
    first = simulated.ranks[0].peak_bytes
    assert needed_bytes(alone, room) == 2 * first
    assert needed_bytes(alone, room, {0: 10.0, 1: 5.0}) == first + round(first / 2)


def test_the_largest_step_of_a_ramp_is_run() -> None:
    small, large = plan(SMALL, 2, micro_batch=8), plan(SMALL, 32, micro_batch=8)
    seen = dry_run(ramped(small, 32), device="cpu")
    assert seen.peak_bytes == dry_run(large, device="cpu").peak_bytes > 1.2 * dry_run(small, device="cpu").peak_bytes
    assert any("32 sequences" in note for note in seen.notes)
    planned, of_large = (
        build_estimator(job).memory(job.layout, [0])[0].total_bytes for job in (ramped(small, 32), large)
    )
    assert planned == of_large


@pytest.mark.long
def test_the_copy_of_a_background_save_is_host_memory() -> None:
    """Of a CPU's peak a part; of a GPU's none, and said apart. Without a save before the last step there is none."""
    plain = plan(SMALL, 2, micro_batch=2)
    behind = replace(plain, layout=replace(plain.layout, saving="async"))
    before, cpu, cuda = (dry_run(job, device=kind) for job, kind in
                         ((plain, "cpu"), (behind, "cpu"), (behind, "cuda")))  # fmt: skip
    state = written_bytes(SMALL, behind.layout, "fp32")
    assert cpu.peak_bytes == pytest.approx(before.peak_bytes + state, rel=0.001)
    assert cpu.worst.kinds["staging"] == pytest.approx(state, rel=0.001) and not before.worst.staging_bytes
    assert "staging" not in cuda.worst.kinds and cuda.worst.staging_bytes == state
    rare = replace(behind, recipe=replace(behind.recipe, checkpoint_every=0))
    assert dry_run(rare, device="cpu").peak_bytes == before.peak_bytes
    planned = [build_estimator(job).memory(job.layout, [0])[0] for job in (plain, behind)]
    assert planned[1].total_bytes - planned[0].total_bytes == state == planned[1].kinds["staging"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("states", ["bf16", "int8", "muon"])
@pytest.mark.long
def test_narrow_states_are_those_that_are_counted(states: str, device: str) -> None:
    """As plan and dry run find them, on a CPU to the byte (a GPU's allocator rounds up). Saving copies them too."""
    first = plan(SMALL, 4, precision="bf16", dp_shard=2, zero=3, micro_batch=2, saving="async")
    keys: dict[str, Any] = {"optimizer_states": states, "master_weights": "none"}
    keys = {"optimizer": "muon", "optimizer_states": "bf16"} if states == "muon" else keys
    narrow = replace(first, recipe=replace(first.recipe, **keys))
    for job in (first, narrow):
        watched = dry_run(job, device=device).worst
        storage = job.recipe.storage
        counted = memory(SMALL, job.layout, "bf16", watched.rank, micro_batches=1, storage=storage)["update"]
        planned = build_estimator(job).memory(job.layout, [0])[0].kinds
        for kind in ("parameters", "masters", "moments", "counters"):
            held, right = watched.kinds.get(kind, 0), counted.get(kind, 0)
            assert held == right if device == "cpu" else right <= held <= right + 512 * 64, kind
            assert planned.get(kind, 0) == counted.get(kind, 0) or kind == "parameters", kind
        written = written_bytes(SMALL, job.layout, "bf16", watched.rank, storage=storage)
        assert watched.staging_bytes == pytest.approx(written, rel=0.001)
    assert counted["moments"] < 4.1 * sum(p.numel for p in parameters(SMALL)) / 2


@pytest.mark.long
def test_of_equal_pieces_one_rank_copies_each() -> None:
    """All replicas together copy the state once, some a tensor more than others; on a GPU each has an even share."""
    job = plan(SMALL, 8, dp_replicate=2, micro_batch=2, saving="async")
    simulated = dry_run(job, ranks=[0, 1], device="cpu")
    whole = written_bytes(SMALL, Layout(), "fp32")
    copied = [seen.staging_bytes for seen in simulated.ranks]
    assert sum(copied) == pytest.approx(whole, rel=0.001)
    assert max(copied) - min(copied) < 4 * 4096 * 256 * 4
    many = plan(TINY, 128, dp_replicate=128, micro_batch=1)
    assert dry_run(many, device="cuda").worst.staging_bytes == written_bytes(TINY, many.layout, "fp32")


def test_offload_on_a_cpu_is_refused_as_by_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", "model=llama-tiny", "layout.offload=activations"]) == 2
    assert "which is all that a CPU has: take layout.offload=off" in capsys.readouterr().err

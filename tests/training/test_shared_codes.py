"""Codes of a frozen base that ZeRO-3 shares over data-parallel ranks: gathered for each pass, as frozen numbers are."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.interface.trained.opening import load
from meshwright.model.quantized_weights import frozen_codes
from meshwright.observe.oracle.features import shrink
from meshwright.observe.oracle.one_device import Case, RankOutcome, assemble, first_difference, outcome
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.axes import data
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.planner.cost.exchanges import links_of
from meshwright.planner.cost.states import counts
from meshwright.planner.time.collectives import StageContents, sharing
from meshwright.spec import Layout, ModelShape, presets
from meshwright.spec.memory.held import list_held, memory
from meshwright.spec.model.quantization_schemes import find_scheme
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.weights.boxes import LINE_BYTES, CodesCut, boxes, lines, nbytes
from meshwright.spec.weights.inventory import parameters
from meshwright.store import checkpoint
from meshwright.training import loop
from meshwright.verbs.main import main
from tests.model.shrunk import tokens
from tests.training.running import Notes
from tests.training.test_frozen_codes import LORA, files, losses
from tests.training.test_tuning import plan

__all__ = ["files"]

DENSE = ModelShape(vocab=67, layers=2, hidden=40, heads=4, kv_heads=2, head_dim=16, ffn=52, max_positions=16)
"""Rows of 40, 52 and 64 inputs: no run of codes divides by two, and most end within a group."""
ROUTED = shrink("qwen3-30b-a3b")
FORMATS = ("nf4", "nf4-double", "int4-rtn", "int4-hqq", "int3", "int8-rows-sym-fp32", "fp8-rows-sym-bf16")
"""Codes of 3, 4 and 8 bits, with and without zeros, whole and real ones; scales of three dtypes, and doubled ones."""
SHARED, WHOLE = {"dp_shard": 2, "zero": 3}, {"dp_shard": 2, "zero": 0}
TWO: list[dict[str, Any]] = [SHARED, WHOLE, {**SHARED, "micro_batch": 1, "recompute": "full"}]
FOUR: list[dict[str, Any]] = [
    {"tp": 2, "dp_shard": 2, "zero": 3},
    {"tp": 2, "dp_shard": 2, "zero": 3, "sp": True, "recompute": "selective"},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 3, "micro_batch": 1},
    {"cp": 2, "dp_shard": 2, "zero": 3},
]
SPREAD: list[dict[str, Any]] = [
    {"dp_shard": 4, "ep": 2, "zero": 3},
    {"dp_shard": 4, "ep": 4, "zero": 3, "micro_batch": 1},
    {"tp": 2, "dp_shard": 2, "ep": 2, "sp": True, "zero": 3},
]


def coded(shape: ModelShape, base: str, **more: Any) -> Case:
    lora = LoRAShape(rank=3, base=base, **more)
    return Case(shape=replace(shape, lora=lora), sequence=12, global_batch=4, clip=0.0)


def laid(layout: dict[str, Any]) -> Layout:
    return Layout(compile="off", **layout)


def trained(cases: list[Case], layouts: list[dict[str, Any]]) -> list[list[RankOutcome]]:
    process_groups: ProcessGroups = {}
    return [[outcome(case, laid(layout), process_groups=process_groups) for layout in layouts] for case in cases]


def same(cases: list[Case], layouts: list[dict[str, Any]], world: int) -> list[list[list[RankOutcome]]]:
    """Of each case and layout the ranks' outcomes, which are those of one device within 1e-5 of each tensor."""
    ranks = on_ranks(world, trained, cases, layouts, limit_s=900)
    outcomes = []
    for number, case in enumerate(cases):
        alone = outcome(case, laid({}))
        assert alone.losses[1] != alone.losses[0]
        outcomes.append([[rank[number][layout_index] for rank in ranks] for layout_index in range(len(layouts))])
        for layout, group in zip(layouts, outcomes[-1], strict=True):
            difference = first_difference(alone, group)
            assert difference is None, (case.shape.lora, layout, difference)
            assert max(abs(loss - two) for loss, two in zip(group[0].losses, alone.losses, strict=True)) < 2e-6
    return outcomes


@pytest.mark.long
def test_every_format_trains_as_on_one_device() -> None:
    """Loss, every gradient, weights after each step. First gradients are to the bit those beside whole codes: what was
    gathered is what was shared."""
    cases = [coded(DENSE, base) for base in FORMATS]
    cases += [coded(DENSE, "nf4-double", dora=True), coded(DENSE, "int4-hqq", targets="q,v")]
    for case, (shared, whole, _) in zip(cases, same(cases, TWO, 2), strict=True):
        assert shared[0].losses[0] == whole[0].losses[0], case.shape.lora
        here, there = assemble(shared), assemble(whole)
        gradients = [name for name in there if name.startswith("step 1 gradient")]
        assert gradients and all(torch.equal(here[name], there[name]) for name in gradients), case.shape.lora


@pytest.mark.slow
def test_shared_beside_other_axes() -> None:
    """What tensor parallelism has cut, within groups too, is shared; so are experts, where several ranks hold them."""
    same([coded(DENSE, "nf4-double"), coded(DENSE, "int4-rtn", dora=True)], FOUR, 4)
    same([coded(ROUTED, "int4-hqq"), coded(ROUTED, "nf4", targets="q,v")], SPREAD, 4)


def held_here(
    shape: ModelShape, layouts: list[dict[str, Any]], dtype: torch.dtype = torch.float32
) -> list[tuple[int, int, list[str]]]:
    """(bytes of codes on this rank, those that are counted, which matrices gather other bits than one process has)."""
    process_groups: ProcessGroups = {}
    alone = frozen_codes([build_engine(shape, laid({}), mesh=make_mesh(laid({}), rank=0), dtype=dtype).model], shape)
    sizes = []
    for each in layouts:
        layout = laid(each)
        mesh = make_mesh(layout, process_groups=process_groups)
        engine = build_engine(shape, layout, mesh=mesh, dtype=dtype, masters=layout.zero > 0)
        matrices = frozen_codes([engine.model], shape)
        here = sum(
            data.local(matrix.run.detach()).untyped_storage().nbytes()
            if matrix.run is not None
            else sum(tensor.nbytes for tensor in matrix.buffers())
            for matrix in matrices.values()
        )
        counted = sum(matrix.code_bytes for matrix in list_held(shape, layout, mesh.rank))
        other = []
        for module in data.sharded_modules(engine.model):
            module.unshard()
        for name, matrix in matrices.items():
            if matrix.rows == alone[name].rows and matrix.matrix.size_in == alone[name].matrix.size_in:
                tensors = alone[name].matrix.tensors
                if not all(torch.equal(tensors[part], there) for part, there in matrix.matrix.tensors.items()):
                    other.append(name)
        sizes.append((here, counted, other))
    return sizes


@pytest.mark.long
def test_a_rank_holds_its_share_and_gathers_the_codes_of_one_process() -> None:
    for shape in (coded(DENSE, "nf4-double").shape, coded(ROUTED, "int4-rtn").shape):
        whole = sum(share.code_bytes for share in list_held(shape, laid({}), 0))
        for ranks in on_ranks(2, held_here, shape, [SHARED, WHOLE]):
            (shared, counted, other), (plain, counted_plain, others) = ranks
            assert (shared, plain) == (counted, counted_plain) and not other and not others
            assert plain == whole and whole / 2 <= shared < 0.56 * whole


@pytest.mark.slow
def test_sixteen_bit_runs_are_shared_too() -> None:
    """Bytes of codes are not rounded with the fp32 shards of adapters beside them, whatever numbers they would be.
    Losses are compared without fp32 shards, whose first values tests round once more."""
    for dtype in (torch.bfloat16, torch.float16):
        for [(shared, counted, other)] in on_ranks(2, held_here, coded(DENSE, "nf4").shape, [SHARED], dtype):
            assert shared == counted and not other
    bases = ("nf4", "int8-rows-sym-fp32")
    cases = [replace(coded(DENSE, base), precision="bf16", master_weights="none") for base in bases]
    for case, (shared_run, whole) in zip(cases, on_ranks(2, trained, cases, [SHARED, WHOLE])[0], strict=True):
        assert shared_run.losses == whole.losses, case
        assert shared_run.losses[0] != shared_run.losses[1]


@pytest.mark.long
def test_a_run_goes_on_under_another_layout(files: Path) -> None:
    """From a folder, with DoRA: the steps of one process, a checkpoint of the adapter alone, and the merged export."""
    words = ["model.lora.base=nf4-double", "model.lora.dora=true", "recipe.steps=4", "recipe.checkpoint_every=2"]
    asked = plan(files, *LORA, *words)
    right = losses(asked)
    other = replace(asked, run=str(files / "shared"), layout=laid(SHARED))
    [first, _] = on_ranks(2, losses, other)
    assert first == [pytest.approx(pair, rel=1e-5) for pair in right]
    assert main(["export", other.run, str(files / "merged")]) == 0
    prompt = tokens(2, 11)
    here, there = (load(folder).model(prompt) for folder in (files / "merged", asked.run))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)
    newest = checkpoint.find_latest(files / "shared" / "checkpoints")
    assert newest is not None
    names = [name for name in checkpoint.names(newest) if name.startswith(("model.", "optimizer."))]
    assert names and all(".lora." in name for name in names)
    shutil.rmtree(newest)
    watcher = Notes()
    loop.run(replace(other, layout=asked.layout), resume="auto", watchers=[watcher])
    assert [(step.loss, step.grad_norm) for step in watcher.steps] == [
        pytest.approx(pair, rel=1e-5) for pair in right[2:]
    ]


@pytest.mark.parametrize("base", FORMATS)
def test_every_tensor_of_a_run_begins_with_a_line(base: str) -> None:
    """Of a matrix whose inputs tensor parallelism cuts within a group; all lines are there, and no more."""
    scheme = find_scheme(base)
    assert scheme is not None
    shape = replace(DENSE, lora=LoRAShape(rank=3, base=base))
    box = boxes(shape, laid({"tp": 2}), 1)["layers.0.mlp.down.weight"]
    sizes = CodesCut(scheme=scheme, box=box).sizes()
    count = lines(sizes.values())
    assert nbytes(sizes.values()) <= count * LINE_BYTES < nbytes(sizes.values()) + LINE_BYTES * len(sizes)
    [name] = [
        share
        for share in list_held(shape, laid({"tp": 2, **SHARED}), 1)
        if share.parameter.name == "layers.0.mlp.down.weight"
    ]
    assert name.code_bytes == -(-count // 2) * LINE_BYTES


@pytest.mark.parametrize("layout", [{"dp_shard": 4, "zero": 2}, {"pp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 1}])
def test_codes_stay_whole_where_weights_stay_gathered(layout: dict[str, Any]) -> None:
    """A share would stand beside the whole; nothing of them is gathered then."""
    shape = coded(DENSE, "nf4").shape
    stages = layout.get("pp", 1)
    one_device = sum(share.code_bytes for share in list_held(shape, laid({}), 0))
    assert sum(share.code_bytes for share in list_held(shape, laid(layout), 0)) == one_device // stages
    frozen = [share for share in parameters(shape) if share.scheme]
    assert all(share.ranks == 1 for share in list_held(shape, laid(layout), 0) if share.parameter in frozen)


def test_llama_2_70b_on_two_cards_of_24_gb() -> None:
    """The well-known case: FSDP + QLoRA. It fits because codes are shared, and the plan says so."""
    answer = mw.plan("llama-2-70b", cluster="rtx4090x2", tune="qlora", layout="dp_shard=2 zero=3")
    best = answer.ranking.best[0]
    assert best.plan.layout.zero == 3 and best.plan.layout.dp_shard == 2
    assert any("with zero=0 it needs 39" in reason for reason in answer.why)
    whole = memory(best.plan.model, laid({}), "bf16")["step"]["parameters"]
    shared = memory(best.plan.model, best.plan.layout, "bf16")["step"]["parameters"]
    assert 34 * 2**30 < whole < 35 * 2**30 and 0.49 < shared / whole < 0.52


def test_gathers_of_codes_cost_time_and_room() -> None:
    """Bytes on the wire are those of the codes, not of the numbers that they stand for: a quarter of them."""
    cluster = presets.cluster("rtx4090x2")
    plain = replace(presets.model("llama-2-70b"), layers=4, lora=LoRAShape(rank=16))
    seconds = {}
    for base in ("same", "nf4-double"):
        shape = replace(plain, lora=LoRAShape(rank=16, base=base))
        part = StageContents((0, 1, 2, 3), False, False)
        seconds[base] = sharing(shape, laid(SHARED), part, links_of(cluster), 2.0, 4.0, False).gather_s
        block = counts(shape, laid(SHARED), (3,), first=False, last=False)
        gathered = 2 * block.gathered + block.codes_gathered
        assert block.codes_gathered == (2 * block.codes if base != "same" else 0)
        whole = sum(parameter.numel for parameter in parameters(shape) if parameter.layer == 3)
        assert 1.9 < gathered / whole < 2.1 or (base != "same" and 0.5 < gathered / whole < 0.55)
    assert 0.24 < seconds["nf4-double"] / seconds["same"] < 0.32

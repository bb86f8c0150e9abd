"""The dry run's peak and traffic beside those of real processes, for every kind of layout.

    python -m benchmarks.dry_run [--json] [--only tp,z3] [--times 3]

Each layout is run on Gloo processes of this machine, as often as `--times` says, under two recorders in turn that the
dry run does not know of: torch's profiler, whose allocator events count tensors (observe/profile/allocator.py), and
a library before the C library's own that counts every block (benchmarks/allocations.py), scratch of oneDNN, MKL and
Gloo included. A rank's peak is the median; the counted ones are beyond what a first run has left: MKL keeps the buffers
in which it packs matrices for each thread that multiplies (`kept_by_libraries_bytes`). Traffic must be equal, call by
call and byte by byte. Tokens of a mixture go to its experts evenly on both sides.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.allocations import again_counted, counter, missing
from meshwright.model.feed_forward import Router
from meshwright.observe.dryrun.simulate import DryRun, dry_run
from meshwright.observe.profile.allocator import patient, watching
from meshwright.observe.program import TrainingProgram
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import make_mesh
from meshwright.parallel.groups.group import Counts
from meshwright.parallel.groups.mesh import ProcessGroups, saving_group
from meshwright.planner.explain import layout_words
from meshwright.spec import Layout, ModelShape, MoEShape, Plan, Recipe
from meshwright.spec.model.shape import LoRAShape
from meshwright.spec.recipe.recipe import BatchStage
from meshwright.store import checkpoint

LLAMA = ModelShape(
    name="llama-like", vocab=8192, layers=4, hidden=512, heads=8, kv_heads=4, ffn=1408, max_positions=1024
)
GPT = ModelShape(
    name="gpt2-like", family="gpt2", vocab=8192, layers=4, hidden=512, heads=8, ffn=2048, max_positions=1024,
    norm="layernorm", mlp="gelu_tanh", positions="learned", qkv_bias=True, out_bias=True, mlp_bias=True, tied=True,
)  # fmt: skip
ODD = replace(LLAMA, name="odd", vocab=8209, hidden=500, heads=10, kv_heads=5)
ADAPTED = replace(LLAMA, name="adapted", lora=LoRAShape(rank=16))
CODED = replace(LLAMA, name="coded", lora=LoRAShape(rank=16, base="nf4-double"))
MOE = replace(LLAMA, name="mixture", family="mixtral", moe=MoEShape(experts=4, top_k=2, ffn=704))

CASES: dict[str, tuple[ModelShape, int, int, dict[str, Any]]] = {
    "one": (LLAMA, 16, 128, {"micro_batch": 8}),
    "one-selective": (LLAMA, 16, 128, {"micro_batch": 8, "recompute": "selective"}),
    "one-norms": (LLAMA, 16, 128, {"micro_batch": 8, "recompute": "norms"}),
    "one-but-attention": (LLAMA, 16, 128, {"micro_batch": 8, "recompute": "all-but-attention"}),
    "one-full": (LLAMA, 16, 128, {"micro_batch": 8, "recompute": "full"}),
    "one-long": (LLAMA, 2, 1024, {"micro_batch": 1}),
    "one-packed": (LLAMA, 2, 1024, {"micro_batch": 1, "documents": True}),
    "tp-packed-bf16": (LLAMA, 8, 512, {"tp": 2, "micro_batch": 4, "documents": True, "precision": "bf16"}),
    "one-gpt2": (GPT, 16, 128, {"micro_batch": 4}),
    "one-moe": (MOE, 16, 128, {"micro_batch": 8}),
    "dp": (LLAMA, 32, 128, {"dp_replicate": 2, "micro_batch": 8}),
    "z1": (LLAMA, 32, 128, {"dp_shard": 2, "zero": 1, "micro_batch": 8}),
    "z2": (LLAMA, 32, 128, {"dp_shard": 2, "zero": 2, "micro_batch": 8}),
    "z3": (LLAMA, 32, 128, {"dp_shard": 2, "zero": 3, "micro_batch": 8}),
    "z3-full": (LLAMA, 32, 128, {"dp_shard": 2, "zero": 3, "micro_batch": 8, "recompute": "full"}),
    "tp": (LLAMA, 16, 128, {"tp": 2, "micro_batch": 8}),
    "sp": (LLAMA, 32, 128, {"tp": 2, "sp": True, "micro_batch": 16}),
    "sp-selective": (LLAMA, 32, 128, {"tp": 2, "sp": True, "micro_batch": 16, "recompute": "selective"}),
    "cp": (LLAMA, 4, 512, {"cp": 2, "micro_batch": 2}),
    "cp-gather": (LLAMA, 4, 512, {"cp": 2, "micro_batch": 2, "context": "all-gather"}),
    "pp": (LLAMA, 32, 128, {"pp": 2, "micro_batch": 8}),
    "pp-full": (LLAMA, 64, 128, {"pp": 2, "micro_batch": 16, "recompute": "full"}),
    "afab": (LLAMA, 32, 128, {"pp": 2, "micro_batch": 8, "schedule": "afab"}),
    "interleaved": (LLAMA, 32, 128, {"pp": 2, "vp": 2, "micro_batch": 8, "schedule": "interleaved"}),
    "zb-h1": (LLAMA, 32, 128, {"pp": 2, "micro_batch": 8, "schedule": "zb-h1"}),
    "zb-v": (LLAMA, 64, 128, {"pp": 2, "vp": 2, "micro_batch": 8, "schedule": "zb-v"}),
    "dualpipe-v": (LLAMA, 64, 128, {"pp": 2, "vp": 2, "micro_batch": 8, "schedule": "dualpipe-v"}),
    "ep-z1": (MOE, 32, 128, {"dp_shard": 2, "ep": 2, "zero": 1, "micro_batch": 8}),
    "ep-z3": (MOE, 32, 128, {"dp_shard": 2, "ep": 2, "zero": 3, "micro_batch": 8}),
    "dp-4": (LLAMA, 64, 128, {"dp_replicate": 4, "micro_batch": 8}),
    "hsdp": (LLAMA, 64, 128, {"dp_replicate": 2, "dp_shard": 2, "zero": 3, "micro_batch": 8}),
    "tp-pp": (LLAMA, 64, 128, {"tp": 2, "pp": 2, "micro_batch": 16}),
    "sp-z2": (LLAMA, 64, 128, {"tp": 2, "sp": True, "dp_shard": 2, "zero": 2, "micro_batch": 16}),
    "cp-z3": (LLAMA, 16, 256, {"cp": 2, "dp_shard": 2, "zero": 3, "micro_batch": 4}),
    "pp-z1": (LLAMA, 64, 128, {"pp": 2, "dp_shard": 2, "zero": 1, "micro_batch": 8}),
    "one-bf16": (LLAMA, 16, 128, {"micro_batch": 8, "precision": "bf16"}),
    "z2-bf16": (LLAMA, 64, 128, {"dp_shard": 2, "zero": 2, "micro_batch": 16, "precision": "bf16"}),
    "sp-bf16": (LLAMA, 64, 128, {"tp": 2, "sp": True, "micro_batch": 32, "precision": "bf16"}),
    "zb-h1-bf16": (LLAMA, 64, 128, {"pp": 2, "micro_batch": 16, "schedule": "zb-h1", "precision": "bf16"}),
    "odd-bf16": (ODD, 16, 128, {"micro_batch": 8, "precision": "bf16"}),
    "one-ramp": (LLAMA, 2, 128, {"micro_batch": 8, "ramp": 16}),
    "pp-ramp": (LLAMA, 16, 128, {"pp": 2, "micro_batch": 8, "ramp": 32}),
    "one-async": (LLAMA, 16, 128, {"micro_batch": 8, "saving": "async"}),
    "dp-async": (LLAMA, 32, 128, {"dp_replicate": 2, "micro_batch": 8, "saving": "async"}),
    "ep-pp": (MOE, 64, 128, {"pp": 2, "dp_shard": 2, "ep": 2, "zero": 2, "micro_batch": 8}),
    "lora": (ADAPTED, 16, 128, {"micro_batch": 8}),
    "lora-full": (ADAPTED, 40, 128, {"micro_batch": 20, "recompute": "full"}),
    "lora-z3": (ADAPTED, 32, 128, {"dp_shard": 2, "zero": 3, "micro_batch": 8}),
    "lora-sp-pp": (ADAPTED, 128, 128, {"tp": 2, "sp": True, "pp": 2, "micro_batch": 32}),
    "qlora": (CODED, 16, 128, {"micro_batch": 8}),
    "qlora-z3": (CODED, 32, 128, {"dp_shard": 2, "zero": 3, "micro_batch": 8}),
}
"""name -> (shape, sequences of a step, tokens of each, layout, its precision where it is not fp32, `ramp`:
sequences of later steps, and whether rows may hold several documents)."""


def plan_of(name: str) -> Plan:
    """A case as a plan."""
    shape, batch, sequence, changes = CASES[name]
    layout = {key: value for key, value in changes.items() if key not in ("precision", "ramp", "documents")}
    ramp = tuple(BatchStage(tokens=10_000, global_batch=changes[key]) for key in changes if key == "ramp")
    recipe = Recipe(
        sequence=sequence, global_batch=batch, precision=changes.get("precision", "fp32"), batch_ramp=ramp,
        document_mask=changes.get("documents", False),
    )  # fmt: skip
    return Plan(model=shape, recipe=recipe, layout=Layout(compile="off", **layout))


def evenly(router: Router, scores: Tensor) -> Tensor:
    """In the place of Router._choose: experts in turn."""
    tokens, experts = scores.shape
    chosen = torch.arange(tokens * router.moe.top_k, device=scores.device) % experts
    return chosen.view(tokens, -1)


def measured(plans: Sequence[Plan], times: int) -> list[list[tuple[int, list[Counts]]]]:
    """On one rank: for each plan and time the peak that the recorder saw, and what each step sent."""
    torch.set_num_threads(1)
    Router._choose = evenly  # type: ignore[method-assign, assignment]  # in this process alone
    process_groups: ProcessGroups = {}
    peaks = []
    for plan in plans:
        count = plan.micro_batches
        runs = []
        for _ in range(times):
            with watching() as recorder, patient():
                sent = _run(plan, count, process_groups)
            runs.append((max((held for _, held in recorder.totals()), default=0), sent))
        peaks.append(runs)
    return peaks


def counted(plan: Plan, times: int) -> tuple[int, list[int]]:
    """On one rank: what libraries keep of a first run for good, and for each later one the peak of all blocks of memory
    beyond those that live before it."""
    torch.set_num_threads(1)
    Router._choose = evenly  # type: ignore[method-assign, assignment]  # in this process alone
    process_groups: ProcessGroups = {}
    library, live_bytes = counter(), list[int]()
    assert library is not None
    first = library.mark()
    for _ in range(times + 1):
        before = library.mark()
        _run(plan, plan.micro_batches, process_groups)
        live_bytes.append(library.peak_bytes - before)
        gc.collect()
        library_bytes = library.live_bytes - first
    return library_bytes, live_bytes[1:]


def _run(plan: Plan, count: int, process_groups: ProcessGroups) -> list[Counts]:
    mesh = make_mesh(plan.layout, process_groups=process_groups)
    group = saving_group(mesh).process_group if plan.copies_state("cpu") else None
    program = TrainingProgram(
        plan=plan, mesh=mesh, device=torch.device("cpu"), on_part=lambda part: None, initialize=True,
        assigned=lambda tensors: checkpoint.assign_tensors(tensors, group), documents=plan.recipe.document_mask,
    )  # fmt: skip
    program.build()
    sent = []
    for number in (1, 2):
        before = mesh.traffic.snapshot()
        program.step(number, count)
        sent.append(mesh.traffic.since(before))
        if number == 1:
            program.copy()
    program.rest()
    return sent


def row(name: str, dry: DryRun, ranks: Sequence[list[tuple[int, list[Counts]]]], seconds: float) -> dict[str, Any]:
    """A case's comparison: the rank that is farthest off."""
    peaks = [statistics.median(peak for peak, _ in runs) for runs in ranks]
    errors = [seen.peak_bytes / peak - 1 for seen, peak in zip(dry.ranks, peaks, strict=True)]
    worst = max(range(len(errors)), key=lambda rank: abs(errors[rank]))
    same = all(
        list(map(dict, seen.sent)) == list(map(dict, sent))
        for seen, runs in zip(dry.ranks, ranks, strict=True)
        for _, sent in runs
    )
    return {
        "layout": name, "words": layout_words(dry.plan.layout), "ranks": len(peaks), "rank": worst,
        "dry_bytes": dry.ranks[worst].peak_bytes, "measured_bytes": peaks[worst], "error": errors[worst],
        "least_peak_bytes": min(peaks), "same_traffic": same, "dry_seconds": seconds,
    }  # fmt: skip


def _of_blocks(figures: dict[str, Any]) -> str:
    if figures["counted_error"] is None:
        return ""
    library_mib = figures["kept_by_libraries_bytes"] / 2**20
    return f"{figures['counted_error']:+7.2%} of all blocks ({library_mib:.1f} MiB kept by libraries)  "


def main() -> None:
    """All cases, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="cases, by name")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(CASES)
    again_counted()
    if missing():
        print(f"only one recorder: {missing()}", file=sys.stderr)
    rows = []
    for name in names:
        plan = plan_of(name)
        world = plan.layout.world
        ranks = on_ranks(world, measured, [plan], options.times, limit_s=1800)  # the profiler keeps memory: fresh ones
        started = time.perf_counter()
        dry = dry_run(plan, ranks=range(world), device="cpu", whole=True)
        figures = row(name, dry, [rank[0] for rank in ranks], time.perf_counter() - started)
        figures["counted_error"] = None
        if not missing():
            blocks = on_ranks(world, counted, plan, options.times, limit_s=1800)
            peaks = [statistics.median(live) for _, live in blocks]
            figures["kept_by_libraries_bytes"] = max(library_bytes for library_bytes, _ in blocks)
            errors = [seen.peak_bytes / peak - 1 for seen, peak in zip(dry.ranks, peaks, strict=True)]
            figures["counted_error"] = max(errors, key=abs)
        rows.append(figures)
        print(
            f"{name:<14} {figures['dry_bytes'] / 2**20:8.1f} MiB dry {figures['measured_bytes'] / 2**20:8.1f} measured "
            f"{figures['error']:+7.2%} (rank {figures['rank']} of {world})  "
            f"{_of_blocks(figures)}"
            f"traffic {'equal' if figures['same_traffic'] else 'DIFFERS'}",
            file=sys.stderr if options.json else sys.stdout, flush=True,
        )  # fmt: skip
    result = {
        "layouts": len(rows),
        "largest_error": max(abs(row["error"]) for row in rows),
        "largest_counted_error": max(abs(row["counted_error"] or 0.0) for row in rows) if not missing() else None,
        "within_3_percent": sum(abs(row["error"]) <= 0.03 for row in rows),
        "same_traffic": sum(row["same_traffic"] for row in rows),
        "least_peak_bytes": min(row["least_peak_bytes"] for row in rows),
        "rows": rows,
    }
    if options.json:
        print(json.dumps(result))
    else:
        print({key: value for key, value in result.items() if key != "rows"})


if __name__ == "__main__":
    main()

"""Checks of the engine itself on a tiny model.

One cold step of every pipeline schedule, every axis beside one device, a checkpoint with random states, the speed of a
real step.
"""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meshwright.observe.oracle.feature_matrix import DENSE, Trial, from_arrays, outcomes_of, trial
from meshwright.observe.oracle.one_device import BANDS, first_difference, outcome
from meshwright.observe.ranks import RankError, on_ranks
from meshwright.observe.timed_steps import Timing, step_s
from meshwright.parallel.groups.group import Group
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule import NAMES
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan
from meshwright.spec.recipe.recipe import Recipe
from meshwright.spec.weights.inventory import token_flop
from meshwright.store import checkpoint
from meshwright.store.checkpoint import rng_state, set_rng_state
from meshwright.training import device as train_device
from meshwright.verbs.doctor.findings import Finding, failure, ok, skipped, warning
from meshwright.verbs.doctor.network import RankFailure, gather_from_all, run_everywhere

COLD_S = 60.0
"""Time after which a step of a tiny model counts as hanging, in seconds."""
SCHEDULES = tuple(f"pp {name}" for name in NAMES)
AXES = ("zero 0", "zero 3", "tp", "tp + sp", "cp ring", "cp gather")
SMALL = ModelShape(
    name="200M", vocab=32000, layers=12, hidden=1024, heads=16, kv_heads=16, ffn=2816, max_positions=2048
)
"""Model that measures the speed of a GPU."""
SMALLER = replace(SMALL, name="10M", vocab=8192, layers=4, hidden=256, heads=4, kv_heads=4, ffn=704)
"""Model that measures the speed of a CPU."""
LOW_MFU = 0.15

Run = Callable[..., list[Any]]
"""Same signature as observe.ranks.on_ranks."""


def check_schedules(kind: str, most: int, run: Run = on_ranks) -> Finding:
    """Run one cold step of each pipeline schedule in fresh processes: hangs occur in the first step."""
    return _compare_with_one_device("schedules", SCHEDULES, kind, most, run, cold=True)


def check_axes(kind: str, most: int, run: Run = on_ranks) -> Finding:
    """Compare two steps along each axis with one device."""
    return _compare_with_one_device("axes", AXES, kind, most, run, cold=False)


def _compare_with_one_device(
    check: str, names: Sequence[str], kind: str, most: int, run: Run, *, cold: bool
) -> Finding:
    """Compare layouts with one device. `cold` starts new processes for each layout."""
    if most < 2:
        return skipped(check, "two processes are needed, and there is one GPU")
    chosen = [candidate for candidate in map(trial, ([name] for name in names)) if isinstance(candidate, Trial)]
    chosen = [replace(candidate, layout=replace(candidate.layout, compile="off")) for candidate in chosen]
    case = replace(DENSE, steps=1 if cold else 2)
    alone = outcome(case, Layout(compile="off"), device=kind)
    wrong: dict[str, str] = {}
    for batch in [[candidate] for candidate in chosen] if cold else [chosen]:
        try:
            limit_s = COLD_S * (1 if cold else len(batch))
            cases = [(case, candidate.layout) for candidate in batch]
            ranks = run(2, outcomes_of, cases, kind, limit_s=limit_s, device=kind)
        except RankError as error:
            # Ranks that failed together share one message, since nobody knows which layout it was.
            hangs = "did not answer" in str(error)
            message = f"hangs (no step in {COLD_S:.0f} s)" if hangs else _last_line(error)
            wrong |= {candidate.title: message for candidate in batch}
            continue
        for index, candidate in enumerate(batch):
            difference = first_difference(alone, [from_arrays(rank[index]) for rank in ranks], BANDS["fp32"])
            if difference:
                wrong[candidate.title] = difference
    if wrong:
        name, message = next(iter(wrong.items()))
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        advice = "do not train with it; report it with this file (NCCL_DEBUG=WARN shows more)"
        return failure(check, f"{name}: {message}{more}", advice, wrong=wrong)
    return ok(check, f"{', '.join(candidate.title for candidate in chosen)} equal one device", tried=len(chosen))


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]


def check_checkpoint(device: torch.device, folder: Path, world: Group | None = None) -> Finding:
    """Save and load tensors and random states below `folder`, which all ranks of `world` must share."""
    world = world or Group("world")
    try:
        return _save_and_load(device, folder, world)
    except RankFailure as error:
        return failure("checkpoint", f"none could be made: {error}", "give a folder that all ranks can write (--runs)")


def _save_and_load(device: torch.device, folder: Path, world: Group) -> Finding:
    rank = world.index

    def begin() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any], torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        tensors = {
            "weight": torch.randn(64, 33, generator=generator).to(device),
            "step": torch.zeros((), device=device),
        }
        states, values = rng_state(rank)
        before = {name: x.clone() for name, x in (tensors | states).items()}
        expected = _draw(device)
        folder.mkdir(parents=True, exist_ok=True)
        return tensors | states, before, dict(values), expected

    # Each part that can fail on one rank alone runs on all, so that all give up together.
    saving, before, values, expected = run_everywhere(world, begin)
    scratch_name = run_everywhere(world, lambda: tempfile.mkdtemp(prefix=".doctor-", dir=folder) if rank == 0 else "")
    scratch = Path(gather_from_all(world, scratch_name)[0])

    def save() -> Path:
        return checkpoint.save(
            scratch, step=1, tensors=saving, values=values, score=None, keep_last=1, group=world.process_group
        )

    def load(saved: Path) -> dict[str, torch.Tensor]:
        loaded = {name: torch.zeros_like(x) for name, x in before.items()}
        checkpoint.load(saved, loaded, group=world.process_group)
        return loaded

    try:
        seen = gather_from_all(world, run_everywhere(world, scratch.is_dir))
        if blind_ranks := [other for other, sees in enumerate(seen) if not sees]:
            advice = "keep runs in a folder that all nodes share"
            return failure("checkpoint", f"rank {blind_ranks[0]} does not see the folder that rank 0 made", advice)
        saved = run_everywhere(world, save)
        loaded = run_everywhere(world, lambda: load(saved))
    finally:
        if rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
    # Restored states must give the numbers that were drawn right after they were saved.
    set_rng_state(loaded, values, rank)
    different = [name for name, x in before.items() if not torch.equal(loaded[name], x)]
    if not torch.equal(_draw(device), expected):
        different.append("what is drawn afterwards")
    if different:
        return failure(
            "checkpoint", f"came back different: {', '.join(different)}", "try another disk; resuming here is not exact"
        )
    return ok("checkpoint", "tensors and random states come back to the bit")


def _draw(device: torch.device) -> torch.Tensor:
    return torch.cat((torch.rand(4), torch.rand(4, device=device).cpu()))


def check_step_speed(device: torch.device, seconds_of_step: float = 0.0) -> Finding:
    """Time a real step of a small model, as a share of the device's peak where that is known."""
    gpu = device.type == "cuda"
    shape, sequence, batch = (SMALL, 2048, 8) if gpu else (SMALLER, 256, 4)
    recipe = Recipe(sequence=sequence, global_batch=batch, precision="bf16" if gpu else "fp32")
    plan = Plan(model=shape, recipe=recipe, layout=Layout(compile="off", cuda_graphs="off"))
    took = seconds_of_step or step_s(plan, Timing(seconds=2.0, least=2, most=6), device.type)
    rate = sequence * batch / took
    summary = f"{rate:,.0f} tokens/s with a model of {shape.name}"
    peak = train_device.peak_flop_per_s(device, recipe.precision, plan.cluster.device)
    if not peak:
        return ok("step", summary, tokens_per_s=rate)
    mfu = rate * token_flop(shape, sequence, causal=True).training / peak
    figures = {"tokens_per_s": rate, "mfu_causal": mfu}
    if mfu < LOW_MFU:
        return warning(
            "step",
            f"{summary}, MFU {mfu:.0%} (causal)",
            "see products and compiler above: one of them slows it",
            **figures,
        )
    return ok("step", f"{summary}, MFU {mfu:.0%} (causal)", **figures)

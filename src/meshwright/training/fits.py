"""Refusal of plans that cannot fit, before anything is read or allocated.

A lower bound: no plan that could run is refused.

Counted are weights, gradients and optimizer states (spec/memory/held.py), and what the layers keep of one micro-batch:
their inputs with full recomputation, else also inputs and outputs of matrix products. On a CPU also the tokens of a
step and the copy from which a thread writes checkpoints. All are of the largest step. A real step needs more. Gradients
of a single micro-batch appear as its activations go, so the two are not added.

Ranks on CPUs share the memory of their machine. Their needs are added up and compared with what is available,
by /proc and the control groups of this process.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from meshwright.spec import Plan, parameters
from meshwright.spec.errors import DoesNotFit, RunError, argument
from meshwright.spec.layout.layout import Layout, layers_of_stages, own_stages, pipeline_ranks, place_of
from meshwright.spec.memory.held import COUNTER_BYTES, TOKEN_BYTES, WIDTHS, master_bytes, memory, written_bytes
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.recipe.recipe import Recipe
from meshwright.spec.units import MIB, gib, many
from meshwright.store import checkpoint_folder
from meshwright.store.durable import free_bytes

PROCESS_BYTES = 300 * 2**20
"""Memory of a process in addition to its tensors: libraries (torch alone 0.25 GiB), threads, gaps between blocks."""
UNLIMITED_BYTES = 2**60
"""No limit. Control groups of version 1 write a number above this when they have none."""
CACHES = ("inactive_file", "active_file")
"""Parts of a control group's use that the kernel reclaims before it refuses memory."""
PARTS = {
    "states": (
        "weights, gradients and optimizer states",
        "a smaller model, or more ranks with layout.zero=3, tp or pp",
    ),
    "activations": ("activations", "a smaller layout.micro_batch, layout.recompute=full or a smaller recipe.sequence"),
    "tokens": ("tokens of a step", "a smaller recipe.global_batch"),
    "copy": ("the copy for layout.saving=async", "layout.saving=sync"),
}
"""Name of each part, and what makes it smaller."""
OTHER_BYTES = 2 * MIB
"""Files of a run apart from its checkpoints: plan, tokenizer, metrics, ledgers, picture of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMemory:
    """Memory for processes of this machine, in bytes."""

    total_bytes: int
    """Memory of the machine, or the limit of its control group."""
    available_bytes: int
    """Unused memory, and memory that is reclaimed on demand."""
    swap_bytes: int = 0
    """Free swap that the control group allows. Computing there is slow but does not crash."""
    swapped_bytes: int = 0
    """Swap in use by all programs of the machine."""


def machine_memory(root: Path = Path("/")) -> MachineMemory:
    """Read the memory of this machine from the kernel's files below `root`.

    Reads /proc/meminfo and every control group of this process, of version 1 or 2. Without /proc (macOS) all memory
    counts as available.
    """
    described = _read_table(root / "proc/meminfo")
    if "MemTotal" not in described:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return MachineMemory(total_bytes=total, available_bytes=total)
    total = described["MemTotal"] * 1024
    available = described.get("MemAvailable", described.get("MemFree", 0)) * 1024
    swap, memory_and_swap = described.get("SwapFree", 0) * 1024, UNLIMITED_BYTES
    for group in _control_groups(root):
        total, available = min(total, group.limit_bytes), min(available, group.memory_bytes)
        swap, memory_and_swap = min(swap, group.swap_bytes), min(memory_and_swap, group.both_bytes)
    available = min(available, memory_and_swap)
    return MachineMemory(
        total_bytes=total,
        available_bytes=available,
        swap_bytes=min(swap, memory_and_swap - available),
        swapped_bytes=max(0, described.get("SwapTotal", 0) - described.get("SwapFree", 0)) * 1024,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ControlGroup:
    """Memory limit of a control group, and what it leaves this process."""

    limit_bytes: int
    memory_bytes: int
    swap_bytes: int
    both_bytes: int
    """Memory and swap together."""


def _control_groups(root: Path) -> Iterator[_ControlGroup]:
    listed = root / "proc/self/cgroup"
    for line in listed.read_text().splitlines() if listed.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, first_kind = root / "sys/fs/cgroup", False
        elif "memory" in controllers.split(","):
            top, first_kind = root / "sys/fs/cgroup/memory", True
        else:
            continue
        inner = top / path.lstrip("/")
        # In a container the path may be that of the host. Each group up to the root has a limit, the tightest counts.
        folder = inner if inner.is_dir() else top
        while True:
            yield _group(folder, first_kind=first_kind)
            if folder == top:
                break
            folder = folder.parent


def _group(folder: Path, *, first_kind: bool) -> _ControlGroup:
    """Read one control group. Version 1 limits memory and swap together, version 2 each separately."""
    prefix, limit, used = ("total_", "limit_in_bytes", "usage_in_bytes") if first_kind else ("", "max", "current")
    statistics = _read_table(folder / "memory.stat")
    cache = sum(statistics.get(prefix + name, 0) for name in CACHES)
    most = _read_number(folder / f"memory.{limit}")
    swap = _read_number(folder / "memory.swap.max")
    memory_and_swap = _read_number(folder / "memory.memsw.limit_in_bytes")
    return _ControlGroup(
        limit_bytes=most,
        memory_bytes=_remaining_bytes(most, folder / f"memory.{used}", cache),
        swap_bytes=_remaining_bytes(swap, folder / "memory.swap.current"),
        both_bytes=_remaining_bytes(memory_and_swap, folder / "memory.memsw.usage_in_bytes", cache),
    )


def _remaining_bytes(limit_bytes: int, used: Path, cache_bytes: int = 0) -> int:
    """Return what a limit leaves after used memory that cannot be reclaimed."""
    if limit_bytes >= UNLIMITED_BYTES or not used.is_file():
        return limit_bytes
    return max(0, limit_bytes - max(0, _read_number(used) - cache_bytes))


def _read_number(file: Path) -> int:
    """Return the number in a file, UNLIMITED_BYTES for `max` or a missing file."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else UNLIMITED_BYTES


def _read_table(file: Path) -> dict[str, int]:
    """Parse lines of `name number` or `name: number unit`."""
    lines = (line.replace(":", " ").split() for line in file.read_text().splitlines()) if file.is_file() else ()
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Needs:
    """Bytes that a rank needs at least."""

    states: int
    activations: int
    tokens: int = 0
    copy: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, part.name) for part in fields(self))


def check_fits(plan: Plan, device: torch.device, *, machines: int = 1) -> None:
    """Raise DoesNotFit when a rank needs more than its device has, naming the worst pipeline rank.

    On a CPU the ranks of a machine are added up against its available memory. Ranks are spread evenly over `machines`.
    """
    needs = {rank: _rank_needs(plan, rank, device.type) for rank in pipeline_ranks(plan.layout)}
    rank = max(needs, key=lambda number: needs[number].total)
    worst = needs[rank]
    breakdown = ", ".join(
        f"{gib(getattr(worst, key))} of {name}" for key, (name, _) in PARTS.items() if getattr(worst, key)
    )
    message = f"rank {rank} needs at least {gib(worst.total)} ({breakdown})"
    if device.type == "cpu":
        machine = machine_memory()
        together = shared_bytes(plan, {rank: need.total for rank, need in needs.items()}, machines)
        if together <= machine.available_bytes + machine.swap_bytes:
            return
        ranks = plan.layout.world // machines
        if ranks > 1:
            message += f", the {ranks} ranks of this machine {gib(together)} together,"
        message += f" and {gib(machine.available_bytes)} of its {gib(machine.total_bytes)} are available"
    else:
        has = capacity_bytes(device)
        if worst.total <= has:
            return
        message += f" and its device has {gib(has)}"
    largest = max(PARTS, key=lambda key: int(getattr(worst, key)))
    raise DoesNotFit(f"{message}: take {PARTS[largest][1]}")


def capacity_bytes(device: torch.device) -> int:
    """Return the memory of a GPU, or what the machine has available now."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory().available_bytes


def shared_bytes(plan: Plan, bytes_of_rank: Mapping[int, int], machines: int) -> int:
    """Return the number of bytes that the ranks of the fullest machine need together.

    `bytes_of_rank` holds the needs of a pipeline place by its first rank. Neighbouring ranks share a machine.
    """
    ranks, place_ranks = max(1, plan.layout.world // machines), plan.layout.world // plan.layout.pp
    sums = [
        sum(bytes_of_rank[rank - rank % place_ranks] for rank in range(first, min(first + ranks, plan.layout.world)))
        for first in range(0, plan.layout.world, ranks)
    ]
    return max(sums)


def _rank_needs(plan: Plan, rank: int, device: str) -> Needs:
    layout, recipe, shape = plan.layout, plan.recipe.largest, plan.model
    held = memory(
        shape, layout, recipe.precision, rank, micro_batches=plan.micro_batches, reduce_dtype=recipe.reduce_dtype,
        storage=recipe.storage,
    )  # fmt: skip
    update, inside = sum(held["update"].values()), sum(held["step"].values())
    # Gradients of a single micro-batch appear as its activations go: both are never there in full.
    if plan.micro_batches == 1:
        inside -= held["step"].get("gradients", 0)
    positions = recipe.sequence // layout.cp
    sequences = layout.micro_batch_of(recipe.global_batch)
    ranges = layers_of_stages(shape.layers, layout)
    layers = sum(len(ranges[stage]) for stage in own_stages(layout, place_of(layout, rank)["pp"]))
    activation_bytes = (
        layers * sequences * positions * _elements_per_token(shape, layout) * WIDTHS[recipe.precision].parameter
    )
    host = device == "cpu"
    return Needs(
        states=max(update, inside),
        activations=max(0, inside + activation_bytes - max(update, inside)),
        tokens=recipe.global_batch // layout.dp * positions * TOKEN_BYTES * host,
        copy=written_bytes(shape, layout, recipe.precision, rank, storage=recipe.storage)
        * (host and plan.copies_state(device)),
    )


def _elements_per_token(shape: ModelShape, layout: Layout) -> int:
    """Return the least number of elements that a dense layer keeps of one token."""
    whole = shape.hidden // (layout.tp if layout.sp else 1)
    if layout.recompute == "full" or shape.mla is not None or shape.moe is not None:
        return whole
    products = (shape.heads + 2 * shape.kv_heads) * shape.head_dim + shape.ffn
    return 2 * whole + products // layout.tp


def checkpoint_bytes(shape: ModelShape, recipe: Recipe) -> int:
    """Return the size of the tensors of one checkpoint, which does not depend on the layout.

    Counted are trained weights, master weights, moments, and a step counter per tensor. Names, hashes and random
    states, some kilobytes per rank, are left out.
    """
    storage, precision = recipe.storage, recipe.precision
    weight_bytes = WIDTHS[precision].parameter + master_bytes(precision, storage)
    return sum(
        parameter.numel * weight_bytes + storage.format_of(parameter).nbytes(parameter.shape) + COUNTER_BYTES
        for parameter in parameters(shape)
        if parameter.trained
    )


def check_space(plan: Plan) -> str | None:
    """Return a warning when the disk cannot hold all checkpoints that exist at once. None = it can.

    Raises RunError when not even one more fits. A finished run is not checked.
    """
    run, recipe = Path(plan.run), plan.recipe
    saved_checkpoints = checkpoint_folder.list_checkpoints(run / "checkpoints")
    if saved_checkpoints and saved_checkpoints[-1].step >= recipe.steps:
        return None
    free = free_bytes(run)
    if free is None:
        return None
    size = checkpoint_bytes(plan.model, recipe)
    if free < size + OTHER_BYTES:
        raise RunError(
            f"{argument('run', run)}: the disk is too small. A checkpoint takes {gib(size)}, other files of "
            f"the run up to {gib(OTHER_BYTES)}, and {gib(free)} are free: free some space, or choose another "
            f"{argument('run')}"
        )
    best = 1 if plan.data.validation else 0
    saves = -(-recipe.steps // recipe.checkpoint_every) if recipe.checkpoint_every else 1
    # One more than are retained: a new checkpoint is complete before the oldest is removed.
    spike = 1 if recipe.rollback_spikes else 0
    most = min(saves, recipe.keep_last + best + spike + 1)
    needed = OTHER_BYTES + most * size - sum(saved.size_bytes for saved in saved_checkpoints)
    if free >= needed:
        return None
    return (
        f"the disk of {run} has {gib(free)} free, and up to {many(most, 'checkpoint')} of {gib(size)} are there at "
        f"once (recipe.keep_last={recipe.keep_last}, the best, {'that from before a spike, ' * spike}the one being "
        "written): it may fill up before the end"
    )

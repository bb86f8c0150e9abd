"""Refuse, before anything is read or made, what cannot fit: a lower bound, so that no plan that could run is refused.

Counted are weights, gradients and optimizer states (spec/held.py), what the layers keep of one micro-batch (with full
recomputation their inputs, else also what goes into and comes out of matrix products) and, on a CPU, the tokens of a
step and the copy from which a thread writes checkpoints, all of the largest step. What a step really takes is more.
Gradients of a single micro-batch are made as its activations go, so the two are not added up.

Ranks on CPUs share the memory of their machine: what they need is added up, and judged against what is available.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from meshwright.spec import Plan
from meshwright.spec.errors import DoesNotFit
from meshwright.spec.held import TOKEN_BYTES, WIDTHS, memory, written_bytes
from meshwright.spec.layout import Layout
from meshwright.spec.places import layers_of_stages, own_stages, pipeline_ranks, place_of
from meshwright.spec.shape import ModelShape
from meshwright.spec.units import gib
from meshwright.training.available_memory import machine_memory


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Needs:
    """Bytes that a rank needs at least."""

    states: int
    activations: int
    tokens: int = 0
    copy: int = 0

    @property
    def total(self) -> int:
        """Of all."""
        return sum(getattr(self, one.name) for one in fields(self))


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


def check_fits(plan: Plan, device: torch.device, *, machines: int = 1) -> None:
    """DoesNotFit where some rank needs more than a device has, or on a CPU all ranks of a machine more than is
    available there; the worst pipeline rank is named. Ranks are spread evenly over `machines`."""
    needs = {rank: _needs(plan, rank, device.type) for rank in pipeline_ranks(plan.layout)}
    rank = max(needs, key=lambda one: needs[one].total)
    worst = needs[rank]
    of_each = ", ".join(
        f"{gib(getattr(worst, key))} of {name}" for key, (name, _) in PARTS.items() if getattr(worst, key)
    )
    said = f"rank {rank} needs at least {gib(worst.total)} ({of_each})"
    if device.type == "cpu":
        here = machine_memory()
        together = shared_bytes(plan, {rank: one.total for rank, one in needs.items()}, machines)
        if together <= here.available_bytes + here.swap_bytes:
            return
        ranks = plan.layout.world // machines
        if ranks > 1:
            said += f", the {ranks} ranks of this machine {gib(together)} together,"
        said += f" and {gib(here.available_bytes)} of its {gib(here.total_bytes)} are available"
    else:
        has = capacity_bytes(device)
        if worst.total <= has:
            return
        said += f" and its device has {gib(has)}"
    largest = max(PARTS, key=lambda key: int(getattr(worst, key)))
    raise DoesNotFit(f"{said}: take {PARTS[largest][1]}")


def capacity_bytes(device: torch.device) -> int:
    """Memory of a GPU; of a machine what is available now."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory().available_bytes


def shared_bytes(plan: Plan, of_places: Mapping[int, int], machines: int) -> int:
    """What the ranks of the fullest machine need together, where those of a pipeline place need `of_places`, by its
    first rank; neighbours are on one machine."""
    each, place = max(1, plan.layout.world // machines), plan.layout.world // plan.layout.pp
    sums = [
        sum(of_places[rank - rank % place] for rank in range(first, min(first + each, plan.layout.world)))
        for first in range(0, plan.layout.world, each)
    ]
    return max(sums)


def _needs(plan: Plan, rank: int, device: str) -> Needs:
    layout, recipe, shape = plan.layout, plan.recipe.largest, plan.model
    held = memory(
        shape, layout, recipe.precision, rank, micro_batches=plan.micro_batches, reduce_dtype=recipe.reduce_dtype,
        storage=recipe.storage,
    )  # fmt: skip
    update, inside = sum(held["update"].values()), sum(held["step"].values())
    if plan.micro_batches == 1:
        inside -= held["step"].get("gradients", 0)
    positions = recipe.sequence // layout.cp
    sequences = layout.micro_batch_of(recipe.global_batch)
    ranges = layers_of_stages(shape.layers, layout)
    layers = sum(len(ranges[stage]) for stage in own_stages(layout, place_of(layout, rank)["pp"]))
    kept = layers * sequences * positions * _kept_of_token(shape, layout) * WIDTHS[recipe.precision].parameter
    host = device == "cpu"
    return Needs(
        states=max(update, inside),
        activations=max(0, inside + kept - max(update, inside)),
        tokens=recipe.global_batch // layout.dp * positions * TOKEN_BYTES * host,
        copy=written_bytes(shape, layout, recipe.precision, rank, storage=recipe.storage)
        * (host and plan.copies_state(device)),
    )


def _kept_of_token(shape: ModelShape, layout: Layout) -> int:
    """Elements that a dense layer keeps of one token at least."""
    whole = shape.hidden // (layout.tp if layout.sp else 1)
    if layout.recompute == "full" or shape.mla is not None or shape.moe is not None:
        return whole
    products = (shape.heads + 2 * shape.kv_heads) * shape.head_dim + shape.ffn
    return 2 * whole + products // layout.tp

"""Refuse, before anything is read or made, what cannot fit: a lower bound, so that no plan that could run is refused.

Counted are weights, gradients and optimizer states (spec/held.py), what the layers keep of one micro-batch (with full
recomputation their inputs, else also what goes into and comes out of matrix products) and, on a CPU, the tokens of a
step. What a step really takes is more.
"""

import os
from pathlib import Path

import torch

from meshwright.spec import Plan
from meshwright.spec.errors import DoesNotFit
from meshwright.spec.held import WIDTHS, memory
from meshwright.spec.layout import Layout
from meshwright.spec.places import layers_of_stages, own_stages, pipeline_ranks, place_of
from meshwright.spec.shape import ModelShape
from meshwright.spec.units import gib

TOKEN_BYTES = 16
"""A token and its target, int64."""


def check_fits(plan: Plan, device: torch.device) -> None:
    """DoesNotFit where some rank needs more than a device has; the worst pipeline rank is named."""
    has = capacity_bytes(device)
    states, kept, tokens, rank = max(_needs(plan, rank) for rank in pipeline_ranks(plan.layout))
    tokens = tokens if device.type == "cpu" else 0
    if states + kept + tokens <= has:
        return
    parts = {"weights, gradients and optimizer states": states, "activations": kept, "tokens of a step": tokens}
    largest = max(parts, key=lambda name: parts[name])
    advice = {
        "weights, gradients and optimizer states": "a smaller model, or more ranks with layout.zero=3, tp or pp",
        "activations": "a smaller layout.micro_batch, layout.recompute=full or a smaller recipe.sequence",
        "tokens of a step": "a smaller recipe.global_batch",
    }
    listed = ", ".join(f"{gib(size)} of {name}" for name, size in parts.items() if size)
    raise DoesNotFit(
        f"rank {rank} needs at least {gib(states + kept + tokens)} ({listed}) and its device has {gib(has)}: "
        f"take {advice[largest]}"
    )


def capacity_bytes(device: torch.device) -> int:
    """Memory of a GPU; of a machine, or what its control group may have of it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    given = limit.read_text().strip() if limit.is_file() else "max"
    return min(whole, int(given)) if given.isdigit() else whole


def _needs(plan: Plan, rank: int) -> tuple[int, int, int, int]:
    """Bytes of states, of activations, of tokens; and the rank."""
    layout, recipe, shape = plan.layout, plan.recipe, plan.model
    held = memory(
        shape, layout, recipe.precision, rank, micro_batches=plan.micro_batches, reduce_dtype=recipe.reduce_dtype
    )
    states = held.only(phase="update").total()
    positions = recipe.sequence // layout.cp
    sequences = layout.micro_batch_of(recipe.global_batch)
    ranges = layers_of_stages(shape.layers, layout)
    layers = sum(len(ranges[stage]) for stage in own_stages(layout, place_of(layout, rank)["pp"]))
    kept = layers * sequences * positions * _kept_of_token(shape, layout)
    tokens = recipe.global_batch // layout.dp * positions * TOKEN_BYTES
    return int(states), kept * WIDTHS[recipe.precision].parameter, tokens, rank


def _kept_of_token(shape: ModelShape, layout: Layout) -> int:
    """Elements that a dense layer keeps of one token at least."""
    whole = shape.hidden // (layout.tp if layout.sp else 1)
    if layout.recompute == "full" or shape.mla is not None or shape.moe is not None:
        return whole
    products = (shape.heads + 2 * shape.kv_heads) * shape.head_dim + shape.ffn
    return 2 * whole + products // layout.tp

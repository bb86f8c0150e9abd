"""What people are told of a run before its first step: what is slower, other or less than its plan may suggest."""

import torch

from meshwright.model.hub import unwritable
from meshwright.parallel.apply import layout_notes
from meshwright.parallel.compiling import compile_notes, is_compiled
from meshwright.spec import Plan
from meshwright.spec.compiled_blocks import can_be_compiled
from meshwright.training.device import deterministic_notes, kernel_notes, product_notes


def run_notes(plan: Plan, device: torch.device, *more: str, steps_done: int, length: str, changes: str) -> list[str]:
    """Sentences. `length`: the key of the recipe that says how long the run is; `changes`: what it does otherwise than
    the one it goes on from."""
    compiled = is_compiled(plan.layout, device) and can_be_compiled(plan.model, plan.recipe.fake_quantize)
    found = compile_notes(plan.layout, device, plan.model)
    if compiled:
        found.append("the first step compiles blocks, which may take a minute; later runs find the code on disk")
    found += [plan.beyond_positions] if plan.beyond_positions else []
    found += [*layout_notes(plan.layout), *more]
    found += kernel_notes(plan, device, compiled)
    found += deterministic_notes(plan, device, compiled)
    if device.type == "cuda" and plan.recipe.precision == "fp32" and not plan.recipe.tf32:
        found.append("fp32 products use no tensor cores: recipe.precision=bf16 or recipe.tf32=true is far faster")
    found += product_notes(plan, device, compiled)
    if problem := unwritable(plan.model.base):
        found.append(f"this model cannot be exported to a Hugging Face directory: {problem}")
    if steps_done >= plan.recipe.steps and changes:
        found.append(
            f"the run has made {steps_done} steps, so that no step is left for {changes}: raise recipe.{length}, or "
            "choose another run= to train anew"
        )
    elif steps_done >= plan.recipe.steps:
        found.append(f"all {plan.recipe.steps} steps were already done: raise recipe.{length} to go on")
    elif changes:
        found.append(f"resuming with changes: {changes}")
    return found

"""Facts about a run before its first step, for watchers: what it is, and what is slower than its plan suggests."""

import torch

from meshwright.data import Corpus
from meshwright.data.report import note_plain_template, note_unscored
from meshwright.formats.hub import unwritable
from meshwright.parallel.apply import layout_notes
from meshwright.parallel.graphs.compiling import compile_notes, is_compiled
from meshwright.spec import Plan, num_parameters
from meshwright.spec.recipe.recipe import DataRead
from meshwright.spec.rules.compilation import can_be_compiled
from meshwright.spec.units import many
from meshwright.training import device as devices
from meshwright.training.step.watch import Forecast, RunInfo


def run_info(
    plan: Plan,
    corpus: Corpus,
    device: torch.device,
    *,
    read: DataRead,
    losses: tuple[float, ...],
    forecast: Forecast,
    notes: tuple[str, ...],
) -> RunInfo:
    """Return what watchers get before the first step."""
    layout, batch, validation = plan.layout, plan.recipe.global_batch, corpus.validation
    return RunInfo(
        plan=plan,
        parameters=num_parameters(plan.model),
        device=devices.title(device),
        first_step=read.steps,
        steps=plan.recipe.steps,
        batch_equation=(
            f"global batch {many(batch, 'sequence')} = micro-batch {layout.micro_batch_of(batch)} "
            f"x accumulation {layout.micro_batches(batch)} x dp {layout.dp}"
        ),
        train_tokens=corpus.train.size,
        run_tokens=plan.recipe.tokens_of_run(read),
        bytes_per_token=(validation if validation.num_tokens else corpus.train).bytes_per_token,
        peak_flop_per_s=devices.peak_flop_per_s(device, plan.recipe.precision, plan.cluster.device),
        losses=losses,
        foreseen=forecast.sentences,
        notes=(
            *notes,
            *note_plain_template(plan.data, corpus),
            *(note_unscored(plan.data, plan.recipe, corpus) if plan.recipe.eval_every else ()),
        ),
    )


def run_notes(
    plan: Plan, device: torch.device, *extra_notes: str, steps_done: int, length: str, changes: str
) -> list[str]:
    """Return sentences about what is slower, different or less than the plan may suggest.

    Args:
        length: The recipe key that sets how long the run is.
        changes: What differs from the run that it resumes.
    """
    compiled = is_compiled(plan.layout, device) and can_be_compiled(plan.model, plan.recipe.fake_quantize)
    notes = compile_notes(plan.layout, device, plan.model)
    if compiled:
        notes.append("the first step compiles blocks, which may take a minute; later runs find the code on disk")
    notes += [plan.beyond_positions] if plan.beyond_positions else []
    notes += [*layout_notes(plan.layout), *extra_notes]
    notes += devices.kernel_notes(plan, device, compiled)
    notes += devices.deterministic_notes(plan, device, compiled)
    if device.type == "cuda" and plan.recipe.precision == "fp32" and not plan.recipe.tf32:
        notes.append("fp32 products use no tensor cores: recipe.precision=bf16 or recipe.tf32=true is far faster")
    notes += devices.product_notes(plan, device, compiled)
    if problem := unwritable(plan.model.base):
        notes.append(f"this model cannot be exported to a Hugging Face directory: {problem}")
    if steps_done >= plan.recipe.steps and changes:
        notes.append(
            f"the run has made {steps_done} steps, so that no step is left for {changes}: raise recipe.{length}, or "
            "choose another run= to train anew"
        )
    elif steps_done >= plan.recipe.steps:
        notes.append(f"all {plan.recipe.steps} steps were already done: raise recipe.{length} to go on")
    elif changes:
        notes.append(f"resuming with changes: {changes}")
    return notes

"""What is known of a run before its first step."""

import torch

from meshwright.data import Corpus
from meshwright.data.run_reading import plainly_written, unscored
from meshwright.spec import Plan, num_parameters
from meshwright.spec.recipe import DataRead
from meshwright.spec.units import many
from meshwright.training import device
from meshwright.training.watch import Foreseen, RunInfo


def run_info(
    plan: Plan,
    corpus: Corpus,
    target: torch.device,
    *,
    read: DataRead,
    losses: tuple[float, ...],
    foreseen: Foreseen,
    notes: tuple[str, ...],
) -> RunInfo:
    """For those who watch."""
    layout, batch, validation = plan.layout, plan.recipe.global_batch, corpus.validation
    return RunInfo(
        plan=plan,
        parameters=num_parameters(plan.model),
        device=device.title(target),
        first_step=read.steps,
        steps=plan.recipe.steps,
        batch_equation=(
            f"global batch {many(batch, 'sequence')} = micro-batch {layout.micro_batch_of(batch)} "
            f"x accumulation {layout.micro_batches(batch)} x dp {layout.dp}"
        ),
        train_tokens=corpus.train.size,
        run_tokens=plan.recipe.tokens_of_run(read),
        bytes_per_token=(validation if validation.num_tokens else corpus.train).bytes_per_token,
        peak_flop_per_s=device.peak_flop_per_s(target, plan.recipe.precision, plan.cluster.device),
        losses=losses,
        foreseen=foreseen.sentences,
        notes=(
            *notes,
            *plainly_written(plan.data, corpus),
            *(unscored(plan.data, plan.recipe, corpus) if plan.recipe.eval_every else ()),
        ),
    )

"""An invented run, reported to watchers step by step."""

import math
from pathlib import Path

from meshwright.spec import ModelShape, Plan, Recipe
from meshwright.training.step.watch import EvalMetrics, RunInfo, StepMetrics, Summary, Watcher

EQUATION = "global batch 32 sequences = micro-batch 8 x accumulation 4 x dp 1"


def info(run: Path | str = "runs/made-up", steps: int = 40, first_step: int = 0) -> RunInfo:
    """Return the description of a run of `steps` steps."""
    shape = ModelShape(name="made-up", vocab=256, layers=2, hidden=32, heads=4, ffn=64, max_positions=64)
    return RunInfo(
        plan=Plan(model=shape, run=str(run), recipe=Recipe(steps=steps, warmup_steps=1)),
        parameters=1_260_000,
        device="CPU, 2 threads",
        first_step=first_step,
        steps=steps,
        batch_equation=EQUATION,
        train_tokens=3_900_000,
        run_tokens=Recipe(steps=steps, warmup_steps=1).tokens_of_run(),
        bytes_per_token=2.9,
        peak_flop_per_s=None,
        notes=("first note", "second note"),
    )


def step(number: int, *, loss: float | None = None, mfu: float | None = None, **more: float) -> StepMetrics:
    """Return the metrics of one step. `mfu`: on a device with a known peak."""
    return StepMetrics(
        step=number,
        loss=2 + 5 * math.exp(-number / 10) if loss is None else loss,
        grad_norm=0.5,
        lr=3e-4,
        tokens=number * 8192,
        tokens_per_second=9123.0,
        seconds=number * 0.25,
        step_seconds=0.25,
        data_wait_seconds=0.005,
        allocated_bytes=3 * 2**28,
        reserved_bytes=2**30,
        mfu_causal=mfu,
        mfu_full=mfu and mfu + 0.05,
        hfu=mfu and mfu + 0.1,
        global_batch=32,
        **more,
    )


def evaluation(number: int) -> EvalMetrics:
    """Return an evaluation at loss 3."""
    return EvalMetrics(step=number, loss=3.0, perplexity=20.1, bits_per_byte=1.49, tokens=40_000, seconds=1.2)


def summary(number: int, steps: int = 40, stopped: str = "done") -> Summary:
    """Return the summary of the run."""
    return Summary(
        step=number,
        steps=steps,
        loss=2.1,
        eval_loss=3.0,
        best_eval_loss=3.0,
        best_step=number,
        bits_per_byte=1.49,
        tokens=number * 8192,
        seconds=10.0,
        tokens_per_second=9123.0,
        peak_allocated_bytes=3 * 2**28,
        checkpoint=Path("runs/made-up/checkpoints/step-40"),
        stopped=stopped,
    )


def tell(watcher: Watcher, told: RunInfo) -> None:
    """Report a whole run, with an evaluation and a checkpoint every ten steps."""
    watcher.started(told)
    for number in range(told.first_step + 1, told.steps + 1):
        watcher.stepped(step(number))
        if number % 10 == 0:
            watcher.evaluated(evaluation(number))
            watcher.saved(number, Path(f"runs/made-up/checkpoints/step-{number}"))
    watcher.ended(summary(told.steps, told.steps))

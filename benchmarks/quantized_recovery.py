"""How much of what a model loses in 3 bits its own teacher gives back.

    python -m benchmarks.quantized_recovery [--json] [--teacher-steps 200] [--steps 100] [--seeds 3]

A model is trained here on the source of Python's standard library, in bytes. It is written in `int3` as it is. Then a
student with its weights learns from it, rounded to `int3` in every product, and is written in the same scheme. Both are
compared with the model on other text of that library: KL(model || quantized), nats per byte.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from benchmarks.on_policy_gain import TEACHER, divergence, other_rows, train
from meshwright.verbs.export.answer import write_directory

SCHEME = "int3"
RATE = 1e-4


def recovered(folder: Path, teacher_steps: int, steps: int, seed: int) -> dict[str, float]:
    """Of one seed: KL of the model as it is rounded, and after training for it."""
    model = train(folder, f"model-{seed}", TEACHER, teacher_steps, seed)
    write_directory(model, folder / f"hf-{seed}")
    student = train(
        folder, f"student-{seed}", TEACHER, steps, seed, teacher=model, model=str(folder / f"hf-{seed}"),
        learning_rate=RATE, weight_decay=0.0, fake_quantize=SCHEME,
    )  # fmt: skip
    before, rows = mw.load(model).model, other_rows(model)
    figures = {}
    for name, run in (("rounded", model), ("recovered", student)):
        out = folder / f"{name}-{seed}"
        mw.quantize(run, SCHEME, out, quality=False)
        figures[name] = divergence(before, mw.load(out).model, rows, 1)
    return figures


def measure(teacher_steps: int, steps: int, seeds: int) -> dict[str, Any]:
    """The document; `share`: of the divergence, what is gone after training, of the seed with least."""
    with tempfile.TemporaryDirectory() as folder:
        each = [recovered(Path(folder), teacher_steps, steps, seed) for seed in range(1, seeds + 1)]
    return {"seeds": each, "share": min(1 - figures["recovered"] / figures["rounded"] for figures in each)}


def text(figures: dict[str, Any]) -> str:
    """A table."""
    lines = [f"{'seed':<6}{'KL rounded':>12}{'recovered':>12}"]
    for seed, divergences in enumerate(figures["seeds"], start=1):
        lines.append(f"{seed:<6}{divergences['rounded']:>12.5f}{divergences['recovered']:>12.5f}")
    return "\n".join([*lines, f"recovered, least: {figures['share']:.2f}"])


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--teacher-steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    figures = measure(options.teacher_steps, options.steps, options.seeds)
    print(json.dumps(figures) if options.json else text(figures))


if __name__ == "__main__":
    main()

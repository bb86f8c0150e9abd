"""What a teacher is worth: students of three seeds, taught and untaught, at equal tokens and at equal student compute.

    python -m benchmarks.distill_gain [--json] [--teacher-steps 800] [--steps 300] [--seeds 3]

A teacher is trained here on the source of Python's standard library, in bytes. Students of a quarter of its parameters
are trained on the same text, all with the same steps, batches and rate:

    cross-entropy   the text alone
    online          the teacher's whole distributions, the teacher beside the student
    kept            its 32 likeliest tokens and the rest in one, asked once and kept on disk
    longer          the text alone, for as many steps as take the CPU seconds of `kept`

The held-out loss is the cross-entropy of text that nobody was trained on, in nats per byte. Seconds are those of the
process on one thread, from the first step to the last: those of `kept` are its student's alone. What the teacher took,
to be trained and to be asked, is stated beside them.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.training.step.watch import RunInfo, StepMetrics, Summary, Watcher

TEACHER = {"layers": 4, "hidden": 160, "heads": 4, "kv_heads": 4, "ffn": 432}
STUDENT = {"layers": 2, "hidden": 96, "heads": 4, "kv_heads": 4, "ffn": 256}
SHAPE = {"vocab": 257, "max_positions": 128, "tied": True}
RECIPE = {
    "sequence": 128, "global_batch": 16, "learning_rate": 3e-3, "warmup_steps": 20, "eval_every": 0,
    "eval_sequences": 0, "checkpoint_every": 0, "log_every": 10**6,
}  # fmt: skip
KEPT = 32
DATA = {"path": "stdlib", "tokenizer": "bytes", "limit_bytes": 8_000_000, "validation": 0.01}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One run."""

    loss: float
    """Held out, nats per byte."""
    seconds: float
    """CPU seconds of its steps."""
    steps: int

    @property
    def perplexity(self) -> float:
        """Of a byte."""
        return math.exp(self.loss)


class Clock(Watcher):
    """CPU seconds of a run's steps, and its held-out loss."""

    def __init__(self) -> None:
        self.begun = self.last = self.loss = 0.0

    def started(self, info: RunInfo) -> None:
        """What came before is not counted."""
        self.begun = self.last = time.process_time()

    def stepped(self, metrics: StepMetrics) -> None:
        """After the last one the text is scored, which is not counted."""
        self.last = time.process_time()

    def ended(self, summary: Summary) -> None:
        """The loss of the last evaluation."""
        self.loss = summary.eval_loss or math.nan


def train(folder: Path, name: str, shape: dict[str, Any], steps: int, seed: int, **more: Any) -> Trained:
    """A run of so many steps; `more` are other sections and keys of recipe."""
    teacher = more.pop("teacher", None)
    recipe = {**RECIPE, "steps": steps, "seed": seed, "warmup_steps": min(20, steps // 2), **more}
    clock = Clock()
    call = mw.train if teacher is None else mw.distill
    teachers = {} if teacher is None else {"teacher": teacher}
    call(
        "layout.compile=off", model={**SHAPE, **shape}, data=DATA, run=str(folder / name), recipe=recipe, dry_run=False,
        watchers=(clock,), **teachers,
    )  # fmt: skip
    return Trained(loss=clock.loss, seconds=clock.last - clock.begun, steps=steps)


def students(folder: Path, teacher: Path, steps: int, seed: int) -> dict[str, Trained]:
    """All of one seed."""

    def trained_student(way: str, steps: int, **more: Any) -> Trained:
        return train(folder, f"{way}-{seed}", STUDENT, steps, seed, **more)

    by_way = {
        "cross-entropy": trained_student("cross-entropy", steps),
        "online": trained_student("online", steps, teacher=teacher),
        "kept": trained_student("kept", steps, teacher=teacher, distillation_top_k=KEPT),
    }
    more = math.ceil(steps * by_way["kept"].seconds / by_way["cross-entropy"].seconds)
    return {**by_way, "longer": trained_student("longer", max(steps, more))}


def measure(teacher_steps: int, steps: int, seeds: int) -> dict[str, Any]:
    """The document: each student, and by how much the losses of taught ones are below those of untaught ones, of the
    seed with the least gain."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        teacher = train(folder, "teacher", TEACHER, teacher_steps, 0)
        each = [students(folder, folder / "teacher", steps, seed) for seed in range(1, seeds + 1)]
    gains = {
        "equal_tokens": min(ways["cross-entropy"].loss - ways["online"].loss for ways in each),
        "equal_tokens_kept": min(ways["cross-entropy"].loss - ways["kept"].loss for ways in each),
        "equal_compute_kept": min(ways["longer"].loss - ways["kept"].loss for ways in each),
        "kept_over_online": max(
            abs(ways["kept"].perplexity / ways["online"].perplexity - 1) for ways in each
        ),
    }  # fmt: skip
    seeds_of = [{way: asdict(student) for way, student in ways.items()} for ways in each]
    return {"teacher": asdict(teacher), "students": seeds_of, "gains": gains}


def text(figures: dict[str, Any]) -> str:
    """A table."""
    lines = [
        f"teacher: held out {figures['teacher']['loss']:.4f} nats per byte, {figures['teacher']['seconds']:.0f} CPU s"
    ]
    lines.append(f"{'seed':<6}{'student':<16}{'steps':>6}{'CPU s':>8}{'held out':>10}{'perplexity':>12}")
    for seed, ways in enumerate(figures["students"], start=1):
        for way, student in ways.items():
            loss = student["loss"]
            row = f"{student['steps']:>6}{student['seconds']:>8.1f}{loss:>10.4f}{math.exp(loss):>12.3f}"
            lines.append(f"{seed:<6}{way:<16}{row}")
    for name, gain in figures["gains"].items():
        lines.append(f"{name}: {gain:+.4f}")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--teacher-steps", type=int, default=800)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(words)
    import torch

    torch.set_num_threads(1)
    figures = measure(options.teacher_steps, options.steps, options.seeds)
    print(json.dumps(figures) if options.json else text(figures))


if __name__ == "__main__":
    main()

"""What it is worth that a student writes what it is taught on: students of three seeds, with and without.

    python -m benchmarks.on_policy_gain [--json] [--teacher-steps 200] [--begins 150] [--steps 150] [--seeds 3]

All train on 60 kB of the source of Python's standard library, in bytes: a teacher, and a student of a quarter of its
parameters, since one that writes noise learns little from that. From there two students learn from the teacher with the
same steps, rate and divergence (reverse KL):

    offline      on the text alone
    on-policy    half of the steps on what the student itself writes behind the first half of each row (GKD's lambda)

Then each continues the first halves of rows of other text of that library. Both models score those bytes: the
divergence of the student from its teacher there, KL(student || teacher) in nats per byte, says how far it strays in its
own words. That on the text of the same rows stands beside it.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.data import prepare
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.model import Transformer
from meshwright.serving.engine.serving_engine import sample_answers
from meshwright.store.run_folder import RunFolder
from meshwright.verbs.export.answer import write_directory

TEACHER = {"layers": 3, "hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 344}
STUDENT = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 176}
SHAPE = {"vocab": 257, "max_positions": 64, "tied": True}
RECIPE = {
    "sequence": 64, "global_batch": 16, "learning_rate": 3e-3, "eval_every": 0, "eval_sequences": 16,
    "checkpoint_every": 0, "log_every": 10**6,
}  # fmt: skip
DATA: dict[str, Any] = {"path": "stdlib", "tokenizer": "bytes", "limit_bytes": 60_000, "validation": 0.1}
OTHER_BYTES = 1_000_000
"""Of the text that is scored, behind those."""
BETA, SHARE, RATE = 1.0, 0.5, 1e-3
ROWS = 128
"""Of other text, of which each is continued once."""


def train(folder: Path, name: str, shape: dict[str, Any], steps: int, seed: int, **more: Any) -> Path:
    """The run of a student, or of its teacher."""
    teacher, model = more.pop("teacher", None), more.pop("model", {**SHAPE, **shape})
    recipe = {**RECIPE, "steps": steps, "seed": seed, "warmup_steps": min(20, steps // 2), **more}
    teachers: dict[str, Any] = {} if teacher is None else {"teacher": teacher}
    (mw.train if teacher is None else mw.distill)(
        "layout.compile=off", "layout.zero=0", model=model, data=DATA, run=str(folder / name),
        recipe=recipe, dry_run=False, watchers=(), **teachers,
    )  # fmt: skip
    return folder / name


def other_rows(run: Path) -> Tensor:
    """Rows (ROWS, S) of text that nobody was trained on, evenly over a larger part of it."""
    plan = RunFolder.open(run).plan
    corpus = prepare(replace(plan.data, limit_bytes=OTHER_BYTES))
    rows = numbered_rows(plan.data, plan.recipe, corpus, corpus.train, shuffle=False)
    first = 2 * DATA["limit_bytes"] // plan.recipe.sequence
    step = (len(rows) - first) // ROWS
    taken = [rows.take(first + number * step, 1).tokens for number in range(ROWS)]
    return torch.from_numpy(np.concatenate(taken)).long()


@torch.no_grad()
def divergence(student: Transformer, teacher: Transformer, rows: Tensor, first: int) -> float:
    """KL(student || teacher), nats per token, of what comes behind the first so many tokens of rows (B, S)."""
    ours, theirs = (model(rows)[:, first - 1 : -1].float().log_softmax(-1) for model in (student, teacher))
    return float(F.kl_div(theirs, ours, reduction="none", log_target=True).sum(-1).mean())


def own_words(student: Transformer, rows: Tensor, first: int) -> Tensor:
    """Rows (B, S), of which only the first so many tokens are the text's."""
    number, length = rows.shape
    answers = sample_answers(
        student, rows[:, :first].tolist(), longest=length, most=[length - first] * number, seeds=range(number),
        temperature=1.0, stop_ids=(), at_once=min(64, number),
    )  # fmt: skip
    return torch.cat((rows[:, :first], torch.tensor(answers)), 1)


def scored(run: Path, teacher: Transformer, rows: Tensor) -> dict[str, float]:
    """How far a student is from its teacher, in its own words and in those of the text."""
    student, first = mw.load(run).model, rows.shape[1] // 2
    words = own_words(student, rows, first)
    return {"own": divergence(student, teacher, words, first), "text": divergence(student, teacher, rows, first)}


def measure(teacher_steps: int, begins: int, steps: int, seeds: int) -> dict[str, Any]:
    """The document: each student, and what is left of the divergence in a student's own words, of the worst seed."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        taught = train(folder, "teacher", TEACHER, teacher_steps, 0)
        teacher, rows = mw.load(taught).model, other_rows(taught)
        each = []
        for seed in range(1, seeds + 1):
            ways, begun = {"offline": 0.0, "on-policy": SHARE}, folder / f"begun-{seed}-hf"
            write_directory(train(folder, f"begun-{seed}", STUDENT, begins, seed), begun)
            runs = {
                name: train(
                    folder, f"{name}-{seed}", STUDENT, steps, seed, teacher=taught, model=str(begun),
                    learning_rate=RATE, distillation_beta=BETA, distillation_on_policy=share,
                )
                for name, share in ways.items()
            }  # fmt: skip
            each.append({name: scored(run, teacher, rows) for name, run in runs.items()})
    ratio = max(by_way["on-policy"]["own"] / by_way["offline"]["own"] for by_way in each)
    return {"students": each, "own_ratio": ratio}


def text(figures: dict[str, Any]) -> str:
    """A table."""
    lines = [f"{'seed':<6}{'student':<12}{'KL in its own words':>22}{'KL on the text':>18}"]
    for seed, ways in enumerate(figures["students"], start=1):
        lines += [
            f"{seed:<6}{way:<12}{divergences['own']:>22.4f}{divergences['text']:>18.4f}"
            for way, divergences in ways.items()
        ]
    return "\n".join([*lines, f"on-policy over offline, own words, worst seed: {figures['own_ratio']:.3f}"])


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--teacher-steps", type=int, default=200)
    parser.add_argument("--begins", type=int, default=150)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    figures = measure(options.teacher_steps, options.begins, options.steps, options.seeds)
    print(json.dumps(figures) if options.json else text(figures))


if __name__ == "__main__":
    main()

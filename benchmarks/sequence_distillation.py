"""Word-level, sequence-level and both kinds of distillation, where the right answers are known.

    python -m benchmarks.sequence_distillation [--json] [--teacher-steps 400] [--steps 200] [--seeds 3]

The task is a translation by a made-up grammar. Six digits are written backwards as letters, in one of three dialects:
`314159>` becomes `jfbebd`, `tpvrvx` or another of three alphabets. The text to learn from draws the dialect per line,
and has a wrong letter in 15 % of all positions, as a corpus of human translations has several wordings and errors. A
translation is right if it is complete in one dialect. So the share of right translations needs no reference.

The rows are those of Kim and Rush 2016 (arXiv:1606.07947), table 1, and all students have equal steps:

    student      learns from the text
    word-KD      half of its loss is the teacher's distribution of each letter of the text
    seq-KD       learns from the teacher's translations of the same prompts, by beams of 5
    both         word-KD on these translations

Each student and the teacher then translate prompts that nobody was trained on, with 1 beam and with 5.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.verbs.distill.answer import write_answers

DIGITS = 6
ALPHABETS = ("abcdefghij", "klmnopqrst", "uvwxyzABCD")
SHARES = (0.4, 0.3, 0.3)
WRONG = 0.15
"""Share of letters of the text that are wrong."""
LINES, ASKED = 3_000, 200
TEACHER = {"layers": 3, "hidden": 96, "heads": 4, "kv_heads": 4, "ffn": 256}
STUDENT = {"layers": 1, "hidden": 40, "heads": 4, "kv_heads": 4, "ffn": 80}
SHAPE = {"vocab": 257, "max_positions": 64, "tied": True}
RECIPE = {
    "sequence": 64, "global_batch": 32, "learning_rate": 3e-3, "eval_every": 0, "eval_sequences": 0,
    "checkpoint_every": 0, "log_every": 10**6,
}  # fmt: skip
WORD_SHARE = 0.5
"""Weight of the text in word-level distillation, as in the paper."""
BEAMS = (1, 5)
WAYS = ("student", "word-KD", "seq-KD", "both")


def prompts(generator: random.Random) -> Iterator[str]:
    """Yield prompts without end, each once."""
    numbers = list(range(10**DIGITS))
    generator.shuffle(numbers)
    for number in numbers:
        yield f"{number:0{DIGITS}d}>"


def translation(prompt: str, alphabet: str) -> str:
    """Return the digits of a prompt backwards, in the letters of a dialect."""
    return "".join(alphabet[int(digit)] for digit in reversed(prompt.rstrip(">")))


def human(prompt: str, generator: random.Random) -> str:
    """Return a translation in a dialect that is drawn, with wrong letters."""
    (alphabet,) = generator.choices(ALPHABETS, SHARES)
    return "".join(
        generator.choice(alphabet) if generator.random() < WRONG else letter for letter in translation(prompt, alphabet)
    )


def is_right(prompt: str, answer: str) -> bool:
    """Return whether an answer is the translation in one dialect."""
    return answer in {translation(prompt, alphabet) for alphabet in ALPHABETS}


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> Path:
    """Write a file of rows and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(folder: Path, name: str, shape: dict[str, Any], text: Path, steps: int, seed: int, **more: Any) -> Path:
    """Train a teacher or a student and return its run. `more` are keys of the recipe, and `teacher`."""
    teacher = more.pop("teacher", None)
    recipe = {**RECIPE, "steps": steps, "seed": seed, "warmup_steps": min(20, steps // 2), **more}
    teachers: dict[str, Any] = {} if teacher is None else {"teacher": teacher}
    (mw.train if teacher is None else mw.distill)(
        "layout.compile=off", "layout.zero=0", model={**SHAPE, **shape}, run=str(folder / name), recipe=recipe,
        data={"path": str(text), "form": "samples", "tokenizer": "bytes", "validation": 0.0},
        dry_run=False, watchers=(), **teachers,
    )  # fmt: skip
    return folder / name


def scored(run: Path, asked: Path) -> dict[str, float]:
    """Return the percentage of right translations for each number of beams. What does not end is wrong."""
    shares = {}
    for beams in BEAMS:
        out = run / f"answers-{beams}.jsonl"
        write_answers(run, asked, out, beams=beams, max_new_tokens=DIGITS + 2, keep_cut=True)
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        right = sum(is_right(row["prompt"], row["completion"]) for row in rows if not row.get("cut_off"))
        shares[str(beams)] = 100 * right / ASKED
    return shares


def measure(teacher_steps: int, steps: int, seeds: int) -> dict[str, Any]:
    """Return the document: the teacher's shares, and of each way those of every seed, their mean and spread."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, generator = Path(temporary), random.Random(0)
        source = prompts(generator)
        lines = [next(source) for _ in range(LINES)]
        asked = write_rows(folder / "asked.jsonl", [{"prompt": next(source)} for _ in range(ASKED)])
        text = write_rows(
            folder / "text.jsonl", [{"prompt": line, "completion": human(line, generator)} for line in lines]
        )
        teacher = train(folder, "teacher", TEACHER, text, teacher_steps, 0)
        translated = folder / "translated.jsonl"
        write_answers(teacher, text, translated, beams=max(BEAMS), max_new_tokens=DIGITS + 2)
        work = partial(_students, folder, teacher, text, translated, asked, steps)
        # Each seed has a process of its own, of one thread.
        with ProcessPoolExecutor(min(2, seeds), mp_context=get_context("spawn")) as pool:
            each = list(pool.map(work, range(1, seeds + 1)))
        shares = {"teacher": scored(teacher, asked)}
    table = {
        way: {
            beams: {
                "mean": statistics.mean(percents), "spread": max(percents) - min(percents), "seeds": percents,
            }
            for beams in map(str, BEAMS)
            for percents in [[students[way][beams] for students in each]]
        }
        for way in WAYS
    }  # fmt: skip
    return {**shares, "students": table}


def _students(
    folder: Path, teacher: Path, text: Path, translated: Path, asked: Path, steps: int, seed: int
) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)

    def student(way: str, source: Path, **more: Any) -> dict[str, float]:
        return scored(train(folder, f"{way}-{seed}", STUDENT, source, steps, seed, **more), asked)

    taught = {"teacher": teacher, "distillation_hard": WORD_SHARE}
    return {
        "student": student("student", text),
        "word-KD": student("word-KD", text, **taught),
        "seq-KD": student("seq-KD", translated),
        "both": student("both", translated, **taught),
    }


def text_table(figures: dict[str, Any]) -> str:
    """Return a table: percent right, the mean of all seeds and the spread from the least to the most."""
    lines = [f"{'percent right':<14}{'beam 1':>16}{'beam 5':>16}"]
    lines.append(f"{'teacher':<14}{figures['teacher']['1']:>16.1f}{figures['teacher']['5']:>16.1f}")
    for way, columns in figures["students"].items():
        cells = [f"{columns[str(beams)]['mean']:.1f} (spread {columns[str(beams)]['spread']:.1f})" for beams in BEAMS]
        lines.append(f"{way:<14}{cells[0]:>20}{cells[1]:>20}")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--teacher-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    figures = measure(options.teacher_steps, options.steps, options.seeds)
    print(json.dumps(figures) if options.json else text_table(figures))


if __name__ == "__main__":
    main()

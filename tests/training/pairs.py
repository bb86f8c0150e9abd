"""Small runs over pairs of answers: their files, plans and ranks."""

import json
import os
from pathlib import Path
from typing import Any

from meshwright import planfile
from meshwright.interface.planning.plan_reading import read_folder
from meshwright.spec import ModelShape, Plan
from meshwright.training import loop
from tests.training.running import Notes
from tests.training.test_weights import SHAPES, directory

WORDS = (
    "data.form=samples", "data.validation=0", "recipe.objective=dpo", "recipe.sequence=64", "recipe.global_batch=4",
    "recipe.steps=3", "recipe.warmup_steps=0", "recipe.learning_rate=1e-2", "recipe.learning_rate_schedule=constant",
    "recipe.weight_decay=0", "recipe.clip=0", "recipe.eval_every=0", "recipe.checkpoint_every=0",
)  # fmt: skip


CHAT = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
ROLES = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}


def preferences(number: int, *, messages: bool = False) -> list[dict[str, Any]]:
    """Answers of several lengths, as texts or as messages."""
    rows = _texts(number)
    if not messages:
        return rows
    return [{name: [{"role": ROLES[name], "content": row[name]}] for name in row} for row in rows]


def _texts(number: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"Say {index}" + " please" * (index % 3) + ":",
            "chosen": f" {index} " + "fine " * (1 + index % 4),
            "rejected": " no" * (1 + index % 5),
        }
        for index in range(number)
    ]


def write(folder: Path, *, number: int = 24, shape: ModelShape = SHAPES["llama"], messages: bool = False) -> Path:
    """A Hugging Face folder `hf` and a file `pairs.jsonl`; returns the folder."""
    directory(folder / "hf", shape)
    (folder / "hf" / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    rows = preferences(number, messages=messages)
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def plan(folder: Path, *words: str, run: str = "run") -> Plan:
    """Of the files in a folder."""
    words_of_plan = [f"model={folder / 'hf'}", f"data={folder / 'pairs.jsonl'}", f"run={folder / run}", *WORDS, *words]
    return planfile.read(None, words_of_plan, read_folder=read_folder)


def curve(folder: str, run: str, words: tuple[str, ...], resume: str = "no") -> list[dict[str, Any]]:
    """Loss, norm and figures of each step of a run on these ranks; of the first of them."""
    os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
    watcher = Notes()
    loop.run(plan(Path(folder), *words, run=run), watchers=[watcher], resume=resume)
    return [{"loss": step.loss, "grad_norm": step.grad_norm, **step.figures} for step in watcher.steps]

"""The contestants of `tune_speed`: each fine-tunes with its own loop, in a process of its own, a step at a time.

    python -m benchmarks.tune_ways WAY FOLDER PRECISION THREADS      # started by tune_speed

Where its loop ends a step, a process answers the line that it was given with seconds, the real tokens of the step and
its peak memory, and waits for the next line. The time between is the whole loop's: batches, the step, the learning
rate, the log.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.training.device import resident_peak_bytes

SEQUENCE, ROWS = 1024, 8
"""Tokens of a row, and rows of a step, each a micro-batch of its own."""
STEPS = 100_000
"""More than anybody takes."""
OURS = {"ours": {"compile": "off"}, "ours-compiled": {"compile": "on"}}
"""Changes of the layout."""
PACKED: dict[str, Any] = {
    "packing": True,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": ROWS,
    "include_num_input_tokens_seen": "all",  # rows are not filled up: each of its tokens is one of a conversation
}
PADDED: dict[str, Any] = {
    "packing": False,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "include_num_input_tokens_seen": "non_padding",
}
"""16 conversations, about as many tokens as ROWS packed rows have."""
ALONE = PADDED | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}
GROUPED = PADDED | {"train_sampling_strategy": "group_by_length"}
COMPILED = {"torch_compile": True}
TRL: dict[str, dict[str, Any]] = {
    "trl-packed": PACKED,
    "trl-packed-compiled": PACKED | COMPILED,
    "trl-alone": ALONE,
    "trl-alone-compiled": ALONE | COMPILED,
    "trl-padded": PADDED,
    "trl-grouped": GROUPED,
    "trl-grouped-compiled": GROUPED | COMPILED,
}
"""Settings of TRL that train on the same targets: rows packed best fit first (and flattened, so that a conversation
sees itself alone), conversations one by one, batches padded to their longest, and batches of like lengths. Its
"wrapped" packing does not: there conversations see one another."""


@dataclass(slots=True)
class Turns:
    """A line read, a step taken, a line written."""

    counted: Callable[[], int]
    """Real tokens of the run so far: those of conversations, not those that fill rows up."""
    base: int = field(default_factory=resident_peak_bytes)
    _began: tuple[float, float] = (0.0, 0.0)
    _tokens: int = 0

    def begin(self) -> None:
        """Say that the first step may begin, and wait until it is asked for."""
        self._answer({"ready": True, "peak": resident_peak_bytes() - self.base})

    def end(self, loss: float = 0.0) -> None:
        """A step has ended."""
        wall, process = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        before, self._tokens = self._tokens, self.counted()
        peak = resident_peak_bytes() - self.base
        self._answer({"seconds": wall, "cpu": process, "tokens": self._tokens - before, "peak": peak, "loss": loss})

    def _answer(self, document: dict[str, Any]) -> None:
        print(json.dumps(document), file=sys.__stdout__, flush=True)
        if not sys.stdin.readline():
            os._exit(0)  # nobody asks any more, and neither loop is to save anything
        self._began = time.perf_counter(), time.process_time()


def tune_ours(folder: Path, way: str, precision: str) -> None:
    """`meshwright tune` as it is."""
    import meshwright.training.loop
    import meshwright.training.step.state  # noqa: F401  # imported lazily else, behind the base of memory
    from meshwright.data import prepare
    from meshwright.data.sequences.numbered_rows import numbered_rows
    from meshwright.training.step.watch import RunInfo, StepMetrics, Watcher
    from meshwright.verbs.tune.answer import tune

    class Waits(Watcher):
        """Between steps."""

        def __init__(self) -> None:
            self.turns, self.tokens = Turns(lambda: self.tokens), 0

        def started(self, info: RunInfo) -> None:
            """Before the first."""
            plan = info.plan
            corpus = prepare(plan.data)
            self.rows = numbered_rows(plan.data, plan.recipe, corpus, corpus.train, shuffle=True)
            self.turns.begin()

        def stepped(self, metrics: StepMetrics) -> None:
            """After each."""
            taken = self.rows.take(ROWS * (metrics.step - 1), ROWS)
            for documents, targets in zip(taken.documents, taken.targets, strict=True):
                last = documents == documents[-1]
                filled = bool((targets[last] >= 0).any())  # else it is what fills the row up
                self.tokens += len(documents) - (0 if filled else int(last.sum()))
            self.turns.end(metrics.loss)

    tune(
        model=str(folder / "model"),
        data={"path": str(folder / "chat.jsonl"), "validation": 0},
        run=str(folder / way),
        recipe={
            "sequence": SEQUENCE, "global_batch": ROWS, "steps": STEPS, "precision": precision, "eval_every": 0,
            "checkpoint_every": 0, "learning_rate_schedule": "constant", "warmup_steps": 0,
        },
        layout={"micro_batch": 1, **OURS[way]},
        watchers=[Waits()],
        dry_run=False,
    )  # fmt: skip


def tune_trl(folder: Path, way: str, precision: str) -> None:
    """TRL's trainer at one of its settings; what does not change the result is set as fast as it goes."""
    import trl.trainer.sft_trainer  # noqa: F401  # imported lazily else, behind the base of memory
    from datasets import load_dataset
    from transformers import TrainerCallback
    from transformers.models.llama import modeling_llama  # noqa: F401
    from trl import SFTConfig, SFTTrainer

    class Waits(TrainerCallback):
        """Between steps."""

        def __init__(self) -> None:
            self.turns = Turns(lambda: int(trainer.state.num_input_tokens_seen))

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            """Before the first."""
            self.turns.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """After each."""
            self.turns.end()

    waits = Waits()
    options = SFTConfig(
        output_dir=str(folder / way), use_cpu=True, max_length=SEQUENCE, max_steps=STEPS, assistant_only_loss=True,
        gradient_checkpointing=False, bf16=precision == "bf16", optim="adamw_torch_fused", learning_rate=2e-5,
        weight_decay=0.0, adam_beta2=0.95, max_grad_norm=1.0, lr_scheduler_type="constant", report_to="none",
        save_strategy="no", logging_steps=50, disable_tqdm=True, seed=0,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"}, **TRL[way],
    )  # fmt: skip
    chat = load_dataset("json", data_files=str(folder / "chat.jsonl"), split="train")
    trainer = SFTTrainer(str(folder / "model"), args=options, train_dataset=chat, callbacks=[waits])
    trainer.train()


def main() -> None:
    """One contestant."""
    way, folder, precision, threads = sys.argv[1:]
    import torch
    import torch._dynamo  # torch's optimizers load it in their first step, behind the base of memory
    import torch._inductor.compile_fx

    torch.set_num_threads(int(threads))
    sys.stdout = sys.stderr  # what a trainer prints is not an answer
    (tune_ours if way in OURS else tune_trl)(Path(folder), way, precision)


if __name__ == "__main__":
    main()

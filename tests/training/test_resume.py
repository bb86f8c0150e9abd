"""A run that was ended and resumed is the run that was not: metrics and every bit of the state."""

import json
import os
import random
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.spec import BatchStage, Data, Plan
from meshwright.spec.errors import CheckpointError
from meshwright.training import loop
from meshwright.training.step.batches import Batch, Feed
from meshwright.training.step.state import STATE_KEYS
from tests.store import saving
from tests.training import running
from tests.training.running import MOE, Crashed, PowerCut, Terminated, assert_same_end, lines

WIDE = replace(running.SHAPE, hidden=32, ffn=160)
"""Its matrices are large enough for 8-bit states."""
RAMP = (BatchStage(tokens=192, global_batch=4), BatchStage(tokens=300, global_batch=8))
KINDS: dict[str, dict[str, Any]] = {
    "dropout and epochs": {"dropout": 0.2, "global_batch": 32, "micro_batch": 16},
    "bf16": {"precision": "bf16", "dropout": 0.1},
    "fp16": {"precision": "fp16"},
    "experts": {"shape": MOE, "dropout": 0.1},
    "8-bit states": {"optimizer_states": "int8", "precision": "bf16", "master_weights": "none", "shape": WIDE},
    "bf16 states": {"optimizer_states": "bf16"},
    "muon": {"optimizer": "muon", "shape": MOE},
    "muon in bf16": {"optimizer": "muon", "optimizer_states": "bf16", "precision": "bf16", "master_weights": "none"},
    "ramp and noise scale": {"global_batch": 2, "micro_batch": 1, "batch_ramp": RAMP, "noise_scale_every": 2},
}
"""32 sequences a step are an epoch in about eight steps; the ramp's stages begin at steps 9 and 12 of 14."""
OPTIONS: dict[str, Any] = {"steps": 14, "eval_every": 3, "checkpoint_every": 4}


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return running.write_texts(tmp_path_factory.mktemp("resume") / "texts")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture, which costs a second a run (one test wants it), and no waiting for the disk: the machine lives on."""
    monkeypatch.setattr(os, "fsync", lambda number: None)
    monkeypatch.setattr("meshwright.training.plot.loss_plot", lambda records, path, **options: None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_ended_twice_it_is_as_if_it_never_was(texts: Path, tmp_path: Path, kind: str) -> None:
    """By SIGTERM after step 6, which saves, and by a power cut after step 11, three steps behind a checkpoint."""
    whole, broken = (running.plan(texts, tmp_path / name, **OPTIONS, **KINDS[kind]) for name in ("whole", "broken"))
    loop.run(whole)
    assert loop.run(broken, watchers=[Terminated(6)]).stopped == "terminated"
    with pytest.raises(PowerCut):
        loop.run(broken, watchers=[Crashed(11)], resume="auto")
    assert lines(tmp_path / "broken" / "metrics.jsonl") > 11
    assert loop.run(broken, resume="auto").stopped == "done"
    assert_same_end(tmp_path / "broken", tmp_path / "whole")


def test_an_earlier_checkpoint_by_its_path(texts: Path, tmp_path: Path) -> None:
    """Back to step 4 of 14: what came after is forgotten and comes again."""
    plan = running.plan(texts, tmp_path / "run", **OPTIONS, keep_last=9)
    loop.run(plan)
    loop.run(plan, resume=str(tmp_path / "run" / "checkpoints" / "step-000004"))
    whole = running.plan(texts, tmp_path / "whole", **OPTIONS, keep_last=9)
    loop.run(whole)
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(("key", "word"), [("optimizer_states", "bf16"), ("optimizer", "muon")])
def test_states_of_another_kind_are_refused(texts: Path, tmp_path: Path, key: str, word: str) -> None:
    loop.run(running.plan(texts, tmp_path / "run", steps=2))
    changed = running.plan(texts, tmp_path / "run", steps=4, **{key: word})
    before = STATE_KEYS[key]
    with pytest.raises(CheckpointError, match=rf"optimizer states of recipe\.{key}={before}, .* take recipe\.{key}"):
        loop.run(changed, resume="auto")


@pytest.mark.slow
def test_killed_at_random_moments_it_is_as_if_it_never_was(texts: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of steps, saves and starts; whatever was under way."""
    options = {"steps": 40, "eval_every": 7, "checkpoint_every": 2, "dropout": 0.1}
    rng = random.Random(time.time_ns())
    metrics = tmp_path / "broken" / "metrics.jsonl"
    seen, kills = 0, 0
    for _ in range(3):
        process = saving.start(running.train_in_child, str(texts), str(tmp_path / "broken"), options)
        end = time.monotonic() + 60
        while process.is_alive() and lines(metrics) < seen + 6 and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.06))
        alive = process.is_alive()
        process.kill()
        assert saving.finish(process) == [-9] or not alive
        kills += alive
        seen = lines(metrics)
    assert kills >= 2, "the run was over before it could be killed"
    loop.run(running.plan(texts, tmp_path / "broken", **options), resume="auto")
    loop.run(running.plan(texts, tmp_path / "whole", **options))
    assert_same_end(tmp_path / "broken", tmp_path / "whole")


NUMBERED = 57
"""Conversations, each with its number in the answer."""
RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "smaller steps": ({"epochs": 2, "global_batch": 8}, {"epochs": 3, "global_batch": 4}, 28),
    "larger steps": ({"epochs": 2, "global_batch": 4}, {"epochs": 3, "global_batch": 16}, 33),
    "smaller micro-batches": ({"epochs": 1, "global_batch": 8}, {"epochs": 2, "global_batch": 4, "micro_batch": 1}, 21),
    "ended within": ({"epochs": 2, "global_batch": 8, "stop": 7}, {"epochs": 2, "global_batch": 4}, 22),
    "more tokens": ({"tokens": 40 * 64, "global_batch": 8}, {"tokens": 99 * 64, "global_batch": 4}, 20),
    "all was read": ({"epochs": 2, "global_batch": 8}, {"epochs": 2, "global_batch": 4}, 15),
}
"""How a run begins, how it is resumed, and its steps, counted by hand: 15 steps of 8 are 120 rows, and 3 x 57 - 120 =
51 rows are 13 steps of 4."""


def numbered(folder: Path, run: Path, **recipe: Any) -> Plan:
    """A tuning run over conversations that fill a row each."""
    path = folder / "numbered.jsonl"
    if not path.exists():
        turns = [
            [{"role": "user", "content": "n?"}, {"role": "assistant", "content": f"<{n}>"}] for n in range(NUMBERED)
        ]
        path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    options = {"warmup_steps": 0, "sequence": 64, "eval_every": 0, "checkpoint_every": 0, "steps": 500, **recipe}
    data = Data(path=str(path), tokenizer="bytes", form="samples", packing="off", validation=0.0)
    asked = running.plan(folder, run, **{key: number for key, number in options.items() if key != "warmup_steps"})
    return replace(asked, data=data, recipe=replace(asked.recipe, warmup_steps=0))


@pytest.mark.parametrize("kind", RESUMED)
def test_a_resume_with_another_batch_counts_what_was_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every conversation is read as often as its epochs say, found by the numbers in the text of the batches."""
    seen: list[int] = []
    take = Feed.take

    def spied(feed: Feed, cursor: int, count: int, following: int = 0) -> Batch:
        batch = take(feed, cursor, count, following)
        for row in batch.tokens.tolist():
            [number] = re.findall(rb"<(\d+)>", bytes(token for token in row if token < 256))
            seen.append(int(number))
        return batch

    monkeypatch.setattr(Feed, "take", spied)
    first, then, steps = (dict(part) if isinstance(part, dict) else part for part in RESUMED[kind])
    stop = first.pop("stop", 0)
    loop.run(numbered(tmp_path, tmp_path / "run", **first), watchers=[Terminated(stop)] if stop else ())
    before = len(seen)
    summary = loop.run(numbered(tmp_path, tmp_path / "run", **then), resume="auto")
    assert summary.step == summary.steps == steps
    wanted = then["tokens"] // 64 if "tokens" in then else then["epochs"] * NUMBERED
    assert max(wanted, before) <= len(seen) < max(wanted, before) + max(1, then["global_batch"])
    times = Counter(seen)
    assert len(times) == NUMBERED, "none is lost"
    assert max(times.values()) - min(times.values()) <= 1, "none is read more often than another by more than once"

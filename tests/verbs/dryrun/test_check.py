"""`dryrun --check`: the answer, its document, and the exit code of a broken rule."""

import json
from dataclasses import replace

import pytest

from meshwright.observe.check import recording
from meshwright.observe.check.events import RankTrace, Start, WaitEvent
from meshwright.verbs.main import main

TINY = [
    "model.name=tiny", "model.vocab=61", "model.layers=2", "model.hidden=24", "model.heads=4", "model.ffn=40",
    "model.max_positions=64", "recipe.sequence=16", "recipe.global_batch=2", "layout.micro_batch=1", "layout.pp=2",
]  # fmt: skip


def test_a_sound_plan_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", "--check", *TINY]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no deadlock, no mismatch: 2 ranks, ")
    assert out.count("\n") == 1


def test_a_broken_rule_is_named_and_ends_with_4(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "record_world", broken)
    assert main(["dryrun", "--check", "--json", *TINY]) == 4
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["source"] == "check" and document["ranks"] == 2 and document["operations"] > 8
    assert document["violations"][0]["rule"] == "mismatch"
    assert "rank 1 never starts" in document["violations"][0]["text"]
    assert printed.err.count("\n") == 1 and "rank 1 never starts" in printed.err


RECORD = recording.record_world


def broken(plan: object, **named: object) -> list[RankTrace]:
    """Return the recording, with the last collective of rank 1 missing."""
    first, second = RECORD(plan, **named)  # type: ignore[arg-type]
    trace = second.trace
    last = max(n for n, operation in enumerate(trace.operations) if not operation.is_message)
    remaining = tuple(event for event in trace.events if event not in (Start((last,)), WaitEvent(last)))
    return [first, replace(second, trace=replace(trace, events=remaining))]

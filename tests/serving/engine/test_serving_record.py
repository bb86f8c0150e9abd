"""The record of an engine: replayed here, it is what the engine held; without one, a step calls nothing more."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest

from meshwright.serving.engine.answers.request_options import RequestOptions
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.engine.serving_record import (
    ServingRecorder,
    is_record,
    memory_use,
    read_record,
)
from meshwright.serving.http.engine_thread import HostedModel
from meshwright.spec.errors import ArgumentError, DataError
from tests.model.shrunk import model

MODEL = model("llama-3.1-8b").eval()
BLOCK = 4
BLOCK_BYTES = BLOCK * 2 * MODEL.shape.kv_heads * MODEL.shape.head_dim * 4 * MODEL.shape.layers
SYSTEM = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9]


def tight(path: Path | None, **options: Any) -> ServingEngine:
    """An engine with so few blocks that requests are preempted, and with a host tier."""
    sizes = {
        "block": BLOCK, "cache_bytes": 24 * BLOCK_BYTES, "host_cache_bytes": 8 * BLOCK_BYTES, "most_sequences": 8,
        "most_tokens": 32,
    }  # fmt: skip
    return ServingEngine(MODEL, EngineOptions(record=path, **{**sizes, **options}))


def load(engine: ServingEngine) -> list[Any]:
    """Requests that share a prefix, one of three answers, and one of three beams."""
    asked = [
        engine.add(
            [*SYSTEM, *range(number, number + 3 + number % 5)],
            RequestOptions(max_new_tokens=5 + 2 * number, temperature=1.0, n=3 if number == 2 else 1, ignore_end=True),
        )
        for number in range(8)
    ]
    asked.append(engine.add(SYSTEM[:9], RequestOptions(max_new_tokens=8, beams=3)))
    engine.run(asked)
    return asked


def replayed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a reader makes of the lines: tables of running sequences, cached blocks and host slots at each step."""
    tables: dict[int, list[int]] = {}
    members: dict[str, set[int]] = {"cached": set(), "host": set()}
    states = []
    for line in lines:
        if "running" not in line:
            continue
        for number, (same, *blocks) in line.get("tables", {}).items():
            tables[int(number)] = tables.get(int(number), [])[:same] + blocks
        for name, now in members.items():
            came, went = line.get(name, [[], []])
            assert not now & set(came) and set(went) <= now
            members[name] = now - set(went) | set(came)
        running = [number for number, _, _ in line["running"]]
        states.append({"tables": {number: tables[number] for number in running}, **members})
    return states


def test_a_record_replays_to_what_the_engine_held(tmp_path: Path) -> None:
    path, held, engine = tmp_path / "record.jsonl", list[dict[str, Any]](), tight(tmp_path / "record.jsonl")
    note, pool = ServingRecorder.note_blocks, engine.tables.pool
    assert pool.host is not None

    def spied(recorder: ServingRecorder, plan: Any) -> None:
        note(recorder, plan)
        tables = {sequence.number: list(sequence.table) for sequence in engine.scheduler.running}
        cached = {block for block in range(pool.size) if pool.key_of(block) is not None}
        host = set(pool.host.slots[: len(pool.host)]) if pool.host else set()
        filled = {
            (block, offset)
            for sequence in engine.scheduler.running
            for position in range(sequence.computed)
            for block, offset in [(sequence.table[position // BLOCK], position % BLOCK)]
        }
        held.append({"tables": tables, "cached": cached, "host": host, "holders": list(pool.holders), "filled": filled})
        held[-1]["lengths"] = {sequence.number: sequence.computed for sequence in engine.scheduler.running}

    with patch.object(ServingRecorder, "note_blocks", spied):
        asked = load(engine)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    states = replayed(lines)
    assert len(states) == len(held) > 10
    for state, truth in zip(states, held, strict=True):
        assert {name: state[name] for name in state} == {name: truth[name] for name in state}
        holders = Counter(block for table in state["tables"].values() for block in table)
        assert [holders[block] for block in range(pool.size)] == truth["holders"]
    steps = [line for line in lines if "running" in line]
    made = Counter[int]()
    for step in steps:
        made.update({int(number): count for number, count in step.get("made", {}).items()})
    assert sum(made.values()) == sum(len(answer.ids) for request in asked for answer in request.answers)
    assert sum(len(step.get("preempted", ())) for step in steps) == engine.scheduler.preemptions > 0
    assert sum(step.get("hits", 0) for step in steps) == engine.tables.hits > 0
    moves = Counter(kind for step in steps for kind, _, _ in step.get("moves", ()))
    assert moves["save"] == pool.host.saved > 0 and moves["copy"] > 0
    assert {entry["request"] for entry in lines if "request" in entry} == {0, 1, 2, 5, 6, 7, 8, 9, 10}

    # Shares by sets of positions, which the package does not make.
    use, reserved = (
        memory_use(read_record(path)),
        [len({b for t in each["tables"].values() for b in t}) for each in held],
    )
    tokens = sum(sum(each["lengths"].values()) for each in held)
    ends = {number: length for each in held for number, length in each["lengths"].items()}
    running = [number for each in held for number in each["lengths"]]
    assert use.blocks == pytest.approx(sum(len(each["filled"]) for each in held) / (BLOCK * sum(reserved)))
    assert use.holders == pytest.approx(tokens / sum(len(each["filled"]) for each in held))
    assert use.longest == pytest.approx(tokens / (MODEL.shape.max_positions * len(running)))
    assert use.final == pytest.approx(tokens / sum(ends[number] for number in running))
    powers = {number: next(1 << k for k in range(9) if 1 << k >= length) for number, length in ends.items()}
    assert use.power_of_two == pytest.approx(tokens / sum(powers[number] for number in running))


def calls_of(step: Callable[[], object], skipped: str = "") -> Counter[str]:
    """Python calls of a step by function, without those of a file and what they call."""
    calls, inside = Counter[str](), list[FrameType]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            if skipped and (inside or frame.f_code.co_filename.endswith(skipped)):
                inside.append(frame)
            else:
                calls[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1
        elif event == "return" and inside:
            inside.pop()

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def test_without_a_record_a_step_calls_nothing_more(tmp_path: Path) -> None:
    counts = []
    for path in (None, tmp_path / "record.jsonl"):
        engine = ServingEngine(MODEL, EngineOptions(record=path, longest=48))
        for number in range(4):
            engine.add([*SYSTEM, number], RequestOptions(max_new_tokens=20, ignore_end=True))
        for _ in range(5):
            engine.step()
        counts.append(calls_of(engine.step, "serving_record.py" if path else ""))
    assert counts[0] == counts[1]
    assert not any("serving_record.py" in name for name in counts[0])


def test_a_record_ends_when_it_is_full_and_the_engine_goes_on(tmp_path: Path) -> None:
    with patch.object(ServingRecorder.__init__, "__defaults__", (2000,)):
        engine = tight(tmp_path / "record.jsonl")
    asked = load(engine)
    assert all(request.ended for request in asked)
    assert (tmp_path / "record.jsonl").stat().st_size <= 2000 + len('{"cut":true}\n')
    record = read_record(tmp_path / "record.jsonl")
    assert record.cut and 0 < len(record.steps) < 20


def test_answers_are_those_without_a_record(tmp_path: Path) -> None:
    ids = [
        [answer.ids for request in load(tight(path, exact=True)) for answer in request.answers]
        for path in (None, tmp_path / "record.jsonl")
    ]
    assert ids[0] == ids[1]


def test_a_server_records_from_its_first_request_on(tmp_path: Path) -> None:
    hosted = HostedModel(name="small", model=MODEL, tokenizer=None, end_ids=(), created=0)
    engine = hosted.engine(EngineOptions(record=tmp_path / "record.jsonl", longest=32))
    engine.run([engine.add(SYSTEM, RequestOptions(max_new_tokens=3, ignore_end=True))])
    record = read_record(tmp_path / "record.jsonl")
    assert [request["prompt"] for request in record.requests] == [len(SYSTEM)]
    assert [step["step"] for step in record.steps] == [0, 1, 2]
    assert "text" not in (tmp_path / "record.jsonl").read_text()


def test_what_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    load(tight(path))
    with pytest.raises(ArgumentError, match="is there already"):
        tight(path)
    with pytest.raises(ArgumentError, match="cannot be written"):
        tight(tmp_path / "nowhere" / "record.jsonl")
    assert is_record(path) and not is_record(tmp_path) and not is_record(Path(__file__))
    text = path.read_text()
    path.write_text(text + '{"step": 99, "run')  # a server that was killed
    assert len(read_record(path).steps) == sum('"running"' in line for line in text.splitlines())
    path.write_text(text.replace('"version":1', '"version":2', 1))
    with pytest.raises(DataError, match="meshwright-serving-record 2, not"):
        read_record(path)
    path.write_text(text.splitlines()[0] + "\n")
    with pytest.raises(DataError, match="holds no step"):
        read_record(path)
    path.write_text(text.splitlines()[0] + "\n[1, 2]\n")
    with pytest.raises(DataError, match="line 2"):
        read_record(path)

"""What a profile measures on real processes, beside the schedule, the trainer's ledger and each other."""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.compat import torch_compile
from meshwright.observe.profile import measure as measuring
from meshwright.observe.profile.allocator import POINTS, thin_curve
from meshwright.observe.profile.clock import CollectiveCall, HostClock, WaitSpan
from meshwright.observe.profile.measure import FIRST, Profile, RankProfile, _Rounds, gather_profile, measure
from meshwright.observe.profile.profile_document import profile_document, trace
from meshwright.observe.profile.step_record import PARTS, PASSES, StepRecorder, TimedCall, TimedStep, part_of
from meshwright.observe.ranks import RankError, on_ranks
from meshwright.observe.shared_document import Ran, parse_document
from meshwright.parallel import make_mesh
from meshwright.parallel.blocks.compiling import is_compiled
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.parallel.health.heartbeat import Heartbeat
from meshwright.spec import Layout, Plan, presets
from meshwright.spec.errors import RunError
from meshwright.spec.layout.schedule import Action, schedule
from meshwright.training import loop
from meshwright.verbs.main import main
from tests.training import running

pytestmark = pytest.mark.long

STEPS = 2
LAYOUTS = {
    "1f1b": Layout(pp=2, micro_batch=1, compile="off"),
    "zb-h1": Layout(pp=2, micro_batch=1, schedule="zb-h1", compile="off"),
    "zero 3": Layout(dp_shard=2, zero=3, micro_batch=1, compile="off"),
}
SHAPE = replace(running.SHAPE, hidden=64, heads=4, kv_heads=2, ffn=96)


def plan(layout: Layout, folder: Path = Path("nowhere")) -> Plan:
    base = running.plan(folder / "texts", folder / "run", shape=SHAPE, steps=STEPS)
    return replace(base, layout=layout, data=replace(base.data, validation=0.0))


def _measured(plans: list[Plan]) -> list[Profile | None]:
    process_groups: ProcessGroups = {}
    return [gather_profile(measure(job, steps=STEPS, process_groups=process_groups), job) for job in plans]


@pytest.fixture(scope="module")
def profiles() -> dict[str, Profile]:
    first, *others = on_ranks(2, _measured, [plan(layout) for layout in LAYOUTS.values()])
    assert all(profile is None for other in others for profile in other)
    return dict(zip(LAYOUTS, first, strict=True))


each = pytest.mark.parametrize("name", LAYOUTS)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_spans_are_the_schedules_actions(profiles: dict[str, Profile], name: str) -> None:
    profile = profiles[name]
    actions = schedule(name, 2, profile.plan.layout.micro_batches(profile.plan.recipe.global_batch))
    for rank in profile.ranks:
        for step in rank.steps:
            passes = [Action(span.name, span.stage, span.micro_batch) for span in step.spans if span.name in PASSES]
            assert tuple(passes) == actions[rank.rank]
            assert [span.name for span in step.spans[-3:]] == ["gradients", "norm", "optimizer"]


@each
def test_spans_follow_each_other_within_the_step(profiles: dict[str, Profile], name: str) -> None:
    for rank in profiles[name].ranks:
        for step in rank.steps:
            moments = [step.start_s, *(at for span in step.spans for at in (span.start_s, span.end_s)), step.end_s]
            assert moments == sorted(moments)
            assert len(step.waits) and all(wait.part in PARTS for wait in step.waits)


def test_a_pass_begins_after_what_it_reads_was_made_elsewhere(profiles: dict[str, Profile]) -> None:
    """On the common clock, which can be wrong by its residual."""
    profile = profiles["1f1b"]
    slack = 2 * profile.residual_s
    for first, second in zip(profile.ranks[0].steps, profile.ranks[1].steps, strict=True):
        ends = {(span.name, span.micro_batch): span.end_s for step in (first, second) for span in step.spans}
        made = {span.micro_batch: span.start_s for span in first.spans if span.name == "F"}
        for micro_batch, begun in made.items():
            assert begun < ends["F", micro_batch] + slack
            assert ends["BW", micro_batch] > begun - slack
        last = {span.micro_batch: span for span in second.spans if span.name == "F"}
        assert all(span.end_s > made[number] - slack for number, span in last.items())


def _trained(folder: str, layout: Layout) -> None:
    os.fsync = lambda number: None
    loop.run(plan(layout, Path(folder)))


@pytest.mark.parametrize("name", ["1f1b", "zero 3"])
def test_traffic_is_that_of_training(profiles: dict[str, Profile], name: str, tmp_path: Path) -> None:
    running.write_texts(tmp_path / "texts")
    on_ranks(2, _trained, str(tmp_path), LAYOUTS[name])
    told = json.loads((tmp_path / "run" / "ledger.json").read_text())["traffic"]
    sent = {(row["axis"], row["collective"]): (row["calls"], row["bytes"]) for row in told}
    assert profiles[name].ranks[0].traffic == sent and sent


@each
def test_every_collective_of_a_step_is_timed(profiles: dict[str, Profile], name: str) -> None:
    for rank in profiles[name].ranks:
        calls = Counter((c.axis, c.collective) for c in rank.steps[-1].calls if c.collective != "receive")
        sent = Counter({(c.axis, c.collective): 0 for c in rank.steps[-1].calls if c.collective != "receive"})
        for call in rank.steps[-1].calls:
            if call.collective != "receive":
                sent[call.axis, call.collective] += call.sent_bytes
        assert {key: (calls[key], sent[key]) for key in calls} == dict(rank.traffic)


@each
def test_allocator_and_watch_agree(profiles: dict[str, Profile], name: str) -> None:
    for rank in profiles[name].ranks:
        assert rank.account.peak_bytes > 0
        late = rank.seen.peak_bytes - rank.account.peak_bytes
        # On a loaded machine either hears of some releases late, because Gloo's threads hold tensors a bit longer.
        # In 3 of 12 runs of zero 3 the watch's peak was 20 to 66 KB higher, in another it was 71 KB lower.
        assert -max(0.05 * rank.account.peak_bytes, 2**17) <= late <= 2**17
        assert sum(rank.seen.kinds.values()) == rank.seen.peak_bytes
        assert rank.account.reserved_bytes > rank.account.peak_bytes
        assert max(moment.allocated_bytes for moment in rank.memory) == rank.account.peak_bytes
        assert {moment.step for moment in rank.memory} == set(range(FIRST + 1))


@each
def test_parts_add_up_to_the_step(profiles: dict[str, Profile], name: str) -> None:
    profile = profiles[name]
    assert sum(profile.parts.values()) == pytest.approx(profile.step_s)
    for rank in profile.ranks:
        for step in rank.steps:
            assert set(step.parts) == set(PARTS) and min(step.parts.values()) > -1e-9
            streams = step.streams
            assert sum(streams[key] for key in ("compute_s", "exposed_s", "idle_s")) == pytest.approx(step.seconds)
    zero = profile.plan.layout.zero == 3
    parts = {
        part for rank in profile.ranks for step in rank.steps for part, spent in step.parts.items() if spent > 1e-9
    }
    assert ("weights" in parts) == zero and ("bubble" in parts) != zero


@each
def test_the_document_has_the_keys_that_all_share(profiles: dict[str, Profile], name: str) -> None:
    document = json.loads(json.dumps(profile_document(profiles[name]), allow_nan=False))
    assert len(parse_document(document, name).ranks) == 2
    assert document["ranks"][0]["largest"][0]["bytes"] > 0
    assert document["source"] == "measured" and document["plan"]["layout"]["pp"] == profiles[name].plan.layout.pp
    assert document["peak_bytes"] == max(rank["peak_bytes"] for rank in document["ranks"])
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert sum(row["seconds"] for row in document["time"]) == pytest.approx(document["step_seconds"])
    tokens = profiles[name].plan.recipe.global_batch * profiles[name].plan.recipe.sequence
    assert document["tokens_per_second"] * document["step_seconds"] == pytest.approx(tokens)
    assert document["tokens_per_second"] == pytest.approx(2 * document["tokens_per_second_per_device"])
    assert document["ranks"][0]["operations"][0]["seconds"] > 0


@each
def test_the_trace_has_every_rank_and_pass(profiles: dict[str, Profile], name: str) -> None:
    document = json.loads(json.dumps(trace(profiles[name])))
    events = document["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}
    assert min(event["ts"] for event in events if "ts" in event) == 0
    for rank in (0, 1):
        mine = [event for event in events if event["pid"] == rank]
        names = [event["name"] for event in mine if event["ph"] == "X" and event["tid"] == 0]
        expected = [f"{s.name} {s.stage} {s.micro_batch}" for s in profiles[name].ranks[rank].steps[0].spans[:-3]]
        assert names.count("optimizer") == STEPS and all(names.count(title) == STEPS for title in expected)
        assert Counter(e["id"] for e in mine if e["ph"] == "b") == Counter(e["id"] for e in mine if e["ph"] == "e")
        assert any(event["ph"] == "C" and event["args"]["parameters"] > 0 for event in mine)


@pytest.mark.parametrize(
    ("compile", "target", "notes"), [("on", "cpu", 1), ("auto", "cpu", 0), ("auto", "cuda", 0), ("on", "cuda", 1)]
)
def test_the_watched_round_is_never_compiled(
    compile: Any, target: str, notes: int, profiles: dict[str, Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would not see what compiled code takes; that its kinds are of another program than the peak is said."""
    job = plan(Layout(micro_batch=2, compile=compile))
    monkeypatch.setattr(torch_compile, "compile_tool_missing", lambda kind: "")
    assert is_compiled(job.layout, torch.device(target)) == bool(notes)
    rounds = _Rounds(job, make_mesh(job.layout), torch.device("cpu"), Heartbeat())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda *_, **__: pytest.fail("the watched program was compiled"))
        seen, _ = rounds.watch()
    off = _Rounds(plan(Layout(micro_batch=2, compile="off")), rounds.mesh, rounds.device, Heartbeat())
    assert seen.kinds == off.watch()[0].kinds
    rank = replace(profiles["1f1b"].ranks[0], compiled=bool(notes))
    assert len(profile_document(Profile(plan=job, ranks=(rank,)))["notes"]) == notes


def test_the_verb_starts_processes_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", *_words(tmp_path), "layout.dp_replicate=2", "--steps", "1", "--json"]
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "run" / "profile.json").read_text())
    assert len(document["ranks"]) == 2 and document["traffic"]
    assert {"gradients", "compute"} <= {row["what"] for row in document["time"] if row["seconds"] > 0}
    assert json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert sorted(os.listdir(tmp_path / "run")) == ["plan.yaml", "profile.json", "trace.json"]


def test_the_verb_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *_words(tmp_path), "--steps", "1"]) == 0
    out = capsys.readouterr().out
    assert "peak by step: 1: " in out and "tokens/s" in out and "optimizer" in out and "trace.json" in out


def _words(folder: Path) -> list[str]:
    shape = [f"model.{key}={getattr(SHAPE, key)}" for key in ("vocab", "layers", "hidden", "heads", "kv_heads", "ffn")]
    return [*shape, "recipe.sequence=16", "recipe.global_batch=4", "layout.micro_batch=2", f"run={folder / 'run'}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster=h100x8"], "this machine has no GPU"),
        (["layout.dp_replicate=1000000", "recipe.global_batch=1000000"], "run at most"),
        (["layout.pp=3"], "pp"),
        (["--steps", "0"], "at least 1"),
        (["nothing.yaml"], "nothing.yaml"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refusals_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *_words(tmp_path), *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0], lines
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").write_text("")
    assert main(["profile", *_words(tmp_path), "--steps", "1"]) == 2
    assert str(tmp_path / "run") in capsys.readouterr().err


def test_waits_belong_to_parts() -> None:
    assert part_of("F", "tp", "all_reduce", False) == "exchange"
    assert part_of("BW", "shard", "all_gather", False) == "weights"
    assert part_of("", "shard", "reduce_scatter", True) == "gradients"
    assert part_of("gradients", "tp", "all_reduce", False) == "gradients"
    assert part_of("norm", "world", "all_reduce", False) == "optimizer"
    assert part_of("", "losses", "all_reduce", True) == "bubble"
    assert part_of("", "data", "all_reduce", True) == "other"


def test_a_step_by_hand() -> None:
    """Seconds: forward 0 to 4, of which 1 is waited; 2 between; backward 6 to 9; a bubble outside; the end at 12."""

    def call(start: float, end: float, part: str, axis: str) -> TimedCall:
        return TimedCall(axis=axis, collective="x", sent_bytes=1, start_s=start, end_s=end, part=part)

    waits = (call(1, 2, "exchange", "tp"), call(9.5, 11, "bubble", "pp"))
    spans = (
        Ran(name="F", stage=0, micro_batch=0, start_s=0, end_s=4),
        Ran(name="BW", stage=0, micro_batch=0, start_s=6, end_s=9),
    )
    step = TimedStep(start_s=0, end_s=12, spans=spans, calls=(call(0.5, 2, "", "tp"),), waits=waits)
    expected = dict.fromkeys(PARTS, 0.0) | {"compute": 6.0, "exchange": 1.0, "bubble": 1.5, "other": 3.5}
    assert step.parts == pytest.approx(expected)
    assert step.streams == pytest.approx({"compute_s": 9.5, "communication_s": 1.5, "exposed_s": 1, "idle_s": 1.5})


def test_a_curve_keeps_its_peak() -> None:
    points = [(i / 1000, i % 977) for i in range(20_000)]
    thinned = thin_curve(points)
    assert len(thinned) <= POINTS and max(size for _, size in thinned) == 976
    assert [at for at, _ in thinned] == sorted(at for at, _ in thinned)


def test_a_wait_is_noted_in_its_span() -> None:
    recorder = StepRecorder(HostClock(), pipeline=False)
    with recorder.step():
        start = recorder.clock.mark()
        call = CollectiveCall("world", "all_reduce", 4, start)
        recorder._record_wait(WaitSpan(call, start, recorder.clock.mark()))
    step: Any = recorder.timed(lambda seconds: seconds + 100.0)
    assert [wait.part for wait in step.waits] == ["other"] and step.waits[0].start_s > 100.0


def test_one_rank_is_not_sent_anywhere(profiles: dict[str, Profile]) -> None:
    mine: RankProfile = profiles["1f1b"].ranks[0]
    alone = gather_profile(mine, plan(Layout()))
    assert alone is not None and alone.ranks == (mine,)


def test_an_error_of_a_rank_that_nobody_foresaw_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **keywords: object) -> None:
        raise RankError('rank 0 of 2:\nTraceback:\n  File "a.py", line 1\nIndexError: list index out of range\n')

    monkeypatch.setattr(measuring, "on_ranks", fail)
    with pytest.raises(RunError, match="list index out of range") as raised:
        measuring.profile(Plan(model=presets.model("llama-tiny"), layout=Layout(dp_replicate=2)))
    assert "(run with --debug for the traceback)" in str(raised.value)
    assert 'File "a.py", line 1' in str(raised.value.__cause__)

"""The trace checker: planted faults are named, and sound programs pass.

The engine's own traces are recorded from fake worlds. Faults are planted in them, or in small programs that call
torch.distributed as the engine does.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from meshwright import compat
from meshwright.observe.check import rules
from meshwright.observe.check.events import (
    CommunicationOperation,
    Communicator,
    Compute,
    Event,
    RankTrace,
    Start,
    Touch,
    Trace,
    WaitEvent,
)
from meshwright.observe.check.recorder import TraceRecorder
from meshwright.observe.check.recording import abbreviate_plan, record_world
from meshwright.observe.check.rules import check
from meshwright.observe.oracle.features import shrink
from meshwright.observe.ranks import in_subprocesses
from meshwright.observe.spans import replaced
from meshwright.parallel import Mesh, make_mesh
from meshwright.spec import Plan
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.recipe.recipe import BatchStage, Recipe


def plan(layout: Layout, name: str = "llama-3.1-8b", layers: int = 3, global_batch: int = 4) -> Plan:
    shape = replace(shrink(name), layers=layers)
    return Plan(model=shape, layout=layout, recipe=Recipe(sequence=16, global_batch=global_batch))


PIPELINE = Layout(pp=2, tp=2, zero=0, micro_batch=1, compile="off")


@cache
def pipeline() -> tuple[RankTrace, ...]:
    return tuple(record_world(plan(PIPELINE, layers=2), device="cuda", processes=2))


def changed(world: Iterable[RankTrace], rank: int, change: Callable[[Trace], Trace]) -> list[RankTrace]:
    return [replace(traced, trace=change(traced.trace)) if traced.rank == rank else traced for traced in world]


def numbers(trace: Trace, kind: str) -> list[int]:
    return [n for n, operation in enumerate(trace.operations) if operation.kind == kind]


def in_busiest_group(trace: Trace) -> list[int]:
    """The all-reduces of the group that has most of them: tp."""
    groups = [trace.operations[n].group for n in numbers(trace, "all_reduce")]
    busiest = max(groups, key=groups.count)
    return [n for n in numbers(trace, "all_reduce") if trace.operations[n].group == busiest]


def without(trace: Trace, number: int) -> Trace:
    """One operation is never called."""
    events = [e for e in trace.events if e not in (Start((number,)), WaitEvent(number))]
    return replace(trace, events=tuple(events))


def sound(world: Iterable[RankTrace]) -> list[RankTrace]:
    """With every receive posted right before it is waited for: what no rule can object to."""
    traces_of_ranks = []
    for traced in world:
        posted = {n for n in numbers(traced.trace, "receive")}
        events: list[Event] = []
        for event in traced.trace.events:
            if isinstance(event, Start) and posted & set(event.operations):
                continue
            if isinstance(event, WaitEvent) and event.operation in posted:
                events.append(Start((event.operation,)))
            events.append(event)
        traces_of_ranks.append(replace(traced, trace=replace(traced.trace, events=tuple(events))))
    return traces_of_ranks


def test_a_sound_pipeline_has_no_violation() -> None:
    report = check(sound(pipeline()))
    assert not report.violations
    assert report.sentence == f"no deadlock, no mismatch: 4 ranks, {report.operations} operations"
    assert report.operations > 4 * 20


def test_a_receive_posted_at_the_start_of_a_step_is_a_deadlock_where_kernels_are_loaded() -> None:
    """The engine did so once: rank 0 opened the receive of its first gradient before its first forward pass."""

    def early(trace: Trace) -> Trace:
        first = Start((numbers(trace, "receive")[0],))
        events = [event for event in trace.events if event != first]
        return replace(trace, events=(first, *events))

    world = changed(changed(sound(pipeline()), 0, early), 2, early)
    assert not list(rules.deadlocks(world, "none"))  # without the loading of kernels nobody would see it
    (violation,) = check(world).violations
    assert violation.rule == "deadlock"
    lines = violation.text.splitlines()
    assert lines[0] == "each of these waits for the next, the last for the first:"
    assert any("rank 0 loads a kernel" in line and "open receive" in line and "from rank 2" in line for line in lines)
    assert any("rank 2 has not yet started its send" in line and "micro-batch 0" in line for line in lines)
    assert any("rank 0 has not yet started its send" in line and "F of stage 0" in line for line in lines)


def test_a_receive_is_open_until_its_wait_only() -> None:
    every = list(rules.deadlocks(sound(pipeline()), "every"))
    assert not every


def test_a_swapped_pair_of_collectives_is_named() -> None:
    def swap(trace: Trace) -> Trace:
        operations = list(trace.operations)
        reductions = in_busiest_group(trace)
        a, b = next((a, b) for a, b in pairwise(reductions) if operations[a].elements != operations[b].elements)
        operations[a], operations[b] = operations[b], operations[a]
        return replace(trace, operations=tuple(operations))

    violation = check(changed(sound(pipeline()), 3, swap)).violations[0]
    assert violation.rule == "mismatch"
    assert "rank 2 and rank 3 start different collectives as number" in violation.text
    assert "tp group of ranks 2, 3" in violation.text
    assert "step 1" in violation.text


def test_a_missing_all_reduce_on_one_rank_is_named() -> None:
    def drop(trace: Trace) -> Trace:
        return without(trace, in_busiest_group(trace)[-1])

    violation = check(changed(sound(pipeline()), 1, drop)).violations[0]
    assert violation.rule == "mismatch"
    assert "rank 1 never starts collective" in violation.text
    assert "which rank 0 starts: all_reduce" in violation.text


def test_a_missing_send_is_named() -> None:
    world = changed(sound(pipeline()), 0, lambda trace: without(trace, numbers(trace, "send")[-1]))
    texts = [violation.text for violation in check(world).violations]
    assert any("rank 0 never starts the other end of message" in text and "of rank 2" in text for text in texts)


def test_a_message_of_the_wrong_size_is_named() -> None:
    def larger(trace: Trace) -> Trace:
        operations = list(trace.operations)
        first = numbers(trace, "send")[0]
        operations[first] = replace(operations[first], elements=2 * operations[first].elements)
        return replace(trace, operations=tuple(operations))

    (violation,) = check(changed(sound(pipeline()), 0, larger)).violations
    assert violation.rule == "mismatch"
    assert "rank 0 and rank 2 have ends of different sizes as message 1" in violation.text


def test_a_buffer_freed_early_is_named() -> None:
    def freed(trace: Trace) -> Trace:
        at = trace.events.index(Start((numbers(trace, "send")[0],)))
        touch = Touch(numbers(trace, "send")[0], "freed", "step 1, planted")
        return replace(trace, events=(*trace.events[: at + 1], touch, *trace.events[at + 1 :]))

    (violation,) = check(changed(sound(pipeline()), 0, freed)).violations
    assert violation.rule == "buffer"
    assert "rank 0 frees the buffer of an operation before it was waited for: step 1, planted" in violation.text
    assert "send of" in violation.text


PAIR = Communicator(name="pair", ranks=(0, 1), axis="pp")


def message(kind: str, peer: int = 1, elements: int = 4) -> CommunicationOperation:
    return CommunicationOperation(
        group=0, kind=kind, elements=elements, dtype="float32", element_bytes=4, peer=peer, where=kind
    )


def traced_rank(rank: int, operations: tuple[CommunicationOperation, ...], *events: Event) -> RankTrace:
    return RankTrace(rank, Trace(operations, events), (PAIR,))


def test_two_ranks_that_both_send_first_wait_for_each_other() -> None:
    operations = message("send"), message("receive")
    events = Start((0,)), WaitEvent(0), Start((1,)), WaitEvent(1)
    (violation,) = check([traced_rank(rank, operations, *events) for rank in (0, 1)]).violations
    assert violation.rule == "deadlock"
    assert "rank 0 needs rank 1 for its send" in violation.text


def test_one_communicator_works_off_its_operations_in_order_even_if_nobody_waits() -> None:
    """FIFO: the host goes on, but each rank's receive runs after its send, which needs the other rank's receive."""
    operations = message("send"), message("receive")
    events = Start((0,)), Start((1,)), WaitEvent(0), WaitEvent(1)
    (violation,) = check([traced_rank(rank, operations, *events) for rank in (0, 1)]).violations
    assert violation.rule == "deadlock"
    assert "only after, in the same group" in violation.text


def test_sends_and_receives_of_one_call_run_together() -> None:
    operations = message("send"), message("receive")
    assert not check(
        [traced_rank(rank, operations, Start((0, 1)), WaitEvent(0), WaitEvent(1)) for rank in (0, 1)]
    ).violations


def test_groups_that_two_ranks_enter_in_opposite_order_are_a_deadlock() -> None:
    reduce = [
        CommunicationOperation(
            group=group, kind="all_reduce", elements=1, dtype="float32", element_bytes=4, where=f"group {group}"
        )
        for group in (0, 1)
    ]
    groups = PAIR, replace(PAIR, name="other", axis="tp")
    events = Start((0,)), WaitEvent(0), Start((1,)), WaitEvent(1)
    world = [
        RankTrace(0, Trace(tuple(reduce), events), groups),
        RankTrace(1, Trace(tuple(reduce[::-1]), events), groups),
    ]
    (violation,) = check(world).violations
    assert violation.rule == "deadlock"
    assert len(violation.text.splitlines()) == 1 + 2 * 3
    async_world = [
        replace(rank, trace=replace(rank.trace, events=(Start((0,)), Start((1,)), WaitEvent(0), WaitEvent(1))))
        for rank in world
    ]
    assert not check(async_world).violations


def test_a_group_whose_name_differs_between_its_ranks_is_named() -> None:
    world = [traced_rank(0, ()), replace(traced_rank(1, ()), communicators=(replace(PAIR, name="else"),))]
    assert "rank 1 does not make the pp group of ranks 0, 1" in check(world).violations[0].text


def test_rows_that_do_not_meet_in_an_all_to_all_are_named() -> None:
    def exchange(sent: tuple[int, int], received: tuple[int, int]) -> CommunicationOperation:
        return replace(message("all_to_all", 0), sent=sent, received=received)

    events = Start((0,)), WaitEvent(0)
    right = [traced_rank(0, (exchange((1, 3), (1, 2)),), *events), traced_rank(1, (exchange((2, 2), (3, 2)),), *events)]
    assert not check(right).violations
    wrong = [right[0], traced_rank(1, (exchange((2, 2), (4, 2)),), *events)]
    assert "rank 0 sends 3 elements to rank 1, which takes 4" in check(wrong).violations[0].text


def test_a_cycle_of_five_ranks_is_shown_whole() -> None:
    ranks = tuple(range(5))
    ring = Communicator(name="ring", ranks=ranks, axis="cp")
    sends = tuple(replace(message(kind, peer), where="") for kind, peer in (("send", 1), ("receive", 4)))
    events = Start((0,)), WaitEvent(0), Start((1,)), WaitEvent(1)
    world = [RankTrace(rank, Trace(sends, events), (ring,)) for rank in ranks]
    (violation,) = check(world).violations
    assert len(violation.text.splitlines()) == 1 + 3 * 5


def in_fake_pair(function: Callable[[Mesh], None]) -> Trace:
    """The trace of rank 0 of 2 over a small program."""
    recorder = TraceRecorder()
    with compat.fake_tensors(), compat.fake_world(0, 2):
        mesh = make_mesh(Layout(tp=2))
        with recorder.listening():
            function(mesh)
    return recorder.trace()


def touched(trace: Trace) -> list[str]:
    return [event.what for event in trace.events if isinstance(event, Touch)]


def read_early(mesh: Mesh) -> None:
    x = torch.ones(4)
    pending = mesh["tp"].start_all_reduce(x)
    x * 2
    pending.wait()


def write_early(mesh: Mesh) -> None:
    x = torch.ones(4)
    (work,) = mesh["tp"].exchange([(x, 1)], [])
    x.zero_()
    work.wait()


def free_early(mesh: Mesh) -> None:
    works = mesh["tp"].exchange([(torch.ones(4), 1)], [])
    torch.zeros(3)
    works[0].wait()


def never_wait(mesh: Mesh) -> None:
    x = torch.ones(4)
    mesh["tp"].start_all_reduce(x)
    mesh["tp"].all_reduce(torch.ones(1))


def in_order(mesh: Mesh) -> None:
    x, y = torch.ones(4), torch.ones(4)
    pending = mesh["tp"].start_all_reduce(x)
    y * 2
    sent = mesh["tp"].exchange([(y, 1)], [])
    y * 3
    x = pending.wait()
    x * 2
    sent[0].wait()
    y.zero_()
    mesh["tp"].all_gather(x)
    mesh["tp"].reduce_scatter(x)
    mesh["tp"].all_to_all(x, [2, 2], [2, 2])
    mesh["tp"].barrier()


def _traces() -> dict[str, Trace]:
    programs = read_early, write_early, free_early, never_wait, in_order
    return {program.__name__: in_fake_pair(program) for program in programs}


@cache
def traces() -> dict[str, Trace]:
    """In a process of its own: this one may be part of another process group."""
    ((_, recorded),) = in_subprocesses(_traces, [()])
    assert isinstance(recorded, dict)
    return recorded


@pytest.mark.parametrize(
    ("program", "what", "says"),
    [
        ("read_early", ["read"], "rank 0 reads what arrives of an operation before it was waited for: mul"),
        ("write_early", ["written"], "rank 0 changes the buffer of an operation before it was waited for: zero_"),
        ("free_early", ["freed"], "rank 0 frees the buffer of an operation before it was waited for"),
    ],
)
def test_what_a_program_does_with_a_buffer_too_early_is_recorded(program: str, what: list[str], says: str) -> None:
    trace = traces()[program]
    assert touched(trace) == what
    world = [RankTrace(0, trace, (PAIR,))]
    assert any(says in violation.text for violation in check(world).violations)


def test_an_operation_that_nobody_waits_for_is_named() -> None:
    texts = [violation.text for violation in check([RankTrace(0, traces()["never_wait"], (PAIR,))]).violations]
    assert any("rank 0 frees the buffer" in text or "rank 0 never waits for the all_reduce" in text for text in texts)


def test_a_program_that_waits_in_time_leaves_no_touch() -> None:
    trace = traces()["in_order"]
    assert not touched(trace)
    kinds = [operation.kind for operation in trace.operations]
    assert kinds == ["all_reduce", "send", "all_gather", "reduce_scatter", "all_to_all", "barrier"]
    assert [operation.size_bytes for operation in trace.operations] == [16, 16, 16, 16, 16, 0]
    assert trace.operations[4].sent == trace.operations[4].received == (2, 2)
    world = [RankTrace(rank, replace(trace, operations=trace.operations), (PAIR,)) for rank in (0, 1)]
    assert not [v for v in check(world).violations if v.rule == "buffer"]


def test_a_collective_that_the_recorder_cannot_hear_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="1 collectives were dispatched and 0 were recorded"):
        for _ in in_subprocesses(_deaf, [()]):
            pass


def _deaf() -> None:
    recorder = TraceRecorder()
    with compat.fake_tensors(), compat.fake_world(0, 2):
        unheard = dist.group.WORLD.allreduce
        with recorder.listening():
            unheard([torch.ones(1)])
    recorder.trace()


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(pp=2, tp=2, dp_shard=2, zero=1, sp=True, micro_batch=1, compile="off"), "llama-3.1-8b"),
        pytest.param(
            Layout(cp=2, tp=2, dp_shard=2, ep=4, sp=True, zero=3, micro_batch=1, compile="off"),
            "qwen3-30b-a3b",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.long
def test_ranks_that_share_a_trace_would_have_recorded_that_trace(layout: Layout, name: str) -> None:
    """Every rank in full beside brief runs of every rank and a full run of one of those that are alike."""
    job = plan(layout, name, layers=4, global_batch=2 * layout.dp)
    assert abbreviate_plan(job).model.layers < 4
    every = record_world(job, device="cuda", in_full=True, processes=2)
    shared = record_world(job, device="cuda", in_full=False, processes=2)
    assert [traced.rank for traced in every] == list(range(8))
    assert every == shared
    assert len({traced.communicators for traced in shared}) > 1


def test_replicas_of_a_shard_can_be_recorded_one_after_another() -> None:
    """Their meshes hold the same ranks and count as equal, and each has groups of its own."""
    layout = Layout(dp_replicate=2, dp_shard=2, zero=1, compile="off")
    world = record_world(plan(layout), device="cuda", processes=1)
    assert not check(world).violations and len(list(world)) == 4


def test_a_world_of_one_rank_is_refused() -> None:
    with pytest.raises(PlanError, match="a plan of one rank sends nothing"):
        record_world(plan(Layout(zero=0, micro_batch=1, compile="off")))


@pytest.mark.parametrize(("batches", "whole", "sends"), [((2, 4, 16), False, (2, 4, 6)), ((4, 16, 4), True, (4, 16))])
def test_every_size_of_a_batch_ramp_is_run(batches: tuple[int, ...], whole: bool, sends: tuple[int, ...]) -> None:
    """The first rank of a pipeline sends once per micro-batch. A step of 16 is cut to three per rank."""
    job = plan(Layout(pp=2, zero=0, micro_batch=1, compile="off"), layers=2, global_batch=batches[0])
    stages = tuple(BatchStage(tokens=1000 * n, global_batch=batch) for n, batch in enumerate(batches[1:], start=1))
    job = replace(job, recipe=replace(job.recipe, batch_ramp=stages))
    evaluation, last_step = 2, 1
    first = record_world(job, device="cuda", whole=whole, processes=2)[0].trace
    assert len(numbers(first, "send")) == sum(sends) + evaluation + last_step
    assert abbreviate_plan(job).recipe.batch_ramp == ()


def test_a_brief_plan_keeps_one_layer_of_each_kind_per_stage() -> None:
    shape = shrink("deepseek-v3")
    assert shape.moe is not None
    shape = replace(shape, layers=9, moe=replace(shape.moe, first_dense=3))
    layout = Layout(pp=2, tp=2, sp=True, zero=0, stages=(5, 4), micro_batch=1, compile="off")
    brief = abbreviate_plan(Plan(model=shape, layout=layout, recipe=Recipe(sequence=64, global_batch=8)))
    assert brief.layout.stages == (2, 1)
    assert brief.model.moe is not None and brief.model.moe.first_dense == 1
    assert brief.recipe.global_batch == 1
    assert brief.recipe.sequence == 32


def test_compute_without_open_receives_adds_no_rule() -> None:
    first = message("send")
    world = [
        traced_rank(0, (first,), Compute(True), Start((0,)), Compute(True), WaitEvent(0)),
        traced_rank(1, (message("receive"),), Compute(True), Start((0,)), WaitEvent(0), Compute(True)),
    ]
    assert not check(world).violations


@pytest.mark.parametrize(
    ("owner", "name"), [(dist.ProcessGroup, "broadcast"), (torch.UntypedStorage, "resize_"), (dist, "broadcast")]
)
def test_a_function_that_was_replaced_is_as_before(owner: object, name: str) -> None:
    """Methods of C++ classes are bound by a wrapper that reading the attribute of the class takes off."""
    before = vars(owner).get(name)
    with replaced(owner, name, lambda inner, *words: inner(*words)):
        assert vars(owner)[name] is not before
    assert vars(owner).get(name) is before

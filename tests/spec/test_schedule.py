"""Pipeline schedules: closed forms of bubble and memory, legality, and equality with torch's own lists."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.spec.errors import IllegalLayout
from meshwright.spec.layout.replay import Times, needs, placement_of, replay, transfers
from meshwright.spec.layout.schedule import (
    NAMES,
    V_PLACED,
    Action,
    Actions,
    check,
    forward_only,
    last_of,
    refusal,
    schedule,
    stage_layers,
    stage_rank,
    stages_of,
)

LEGAL = [
    (name, p, m, v)
    for name, p, m, v in product(NAMES, (1, 2, 4, 7), (1, 2, 3, 8, 12, 14, 21), (1, 2, 3))
    if refusal(name, p, m, v) is None
]
SOME_TIMES = (
    (Times(), 0),
    (Times(forward_s=2, input_s=3, weight_s=1), 0),
    (Times(forward_s=3, input_s=2, weight_s=4), 1),
)


@pytest.mark.parametrize("name", NAMES)
def test_every_list_can_be_executed_and_is_complete(name: str) -> None:
    for _, p, m, v in (case for case in LEGAL if case[0] == name):
        actions = schedule(name, p, m, v)
        assert placement_of(actions) == stage_rank(name, p, v)
        for times, send_s in SOME_TIMES:
            played = replay(actions, times, send_s)
            assert [[span.action for span in spans] for spans in played.spans] == [
                list(rank_actions) for rank_actions in actions
            ]
            assert max(played.busy_s) <= played.total_s
            ends = {span.action: span.end_s for spans in played.spans for span in spans}
            _assert_nothing_starts_before_its_inputs(played.spans, ends, p * v, send_s)


def _assert_nothing_starts_before_its_inputs(spans: Any, ends: dict[Action, float], stages: int, send_s: int) -> None:
    holder = {span.action.stage: rank for rank, rank_spans in enumerate(spans) for span in rank_spans}
    for rank, rank_spans in enumerate(spans):
        for before, span in zip((None, *rank_spans), rank_spans, strict=False):
            assert before is None or span.start_s >= before.end_s
            for kind, stage, i in needs(span.action, stages):
                made = [ends[a] for k in (("F",) if kind == "F" else ("B", "BW")) if (a := Action(k, stage, i)) in ends]
                assert span.start_s >= made[0] + (send_s if holder[stage] != rank else 0)


def test_all_six_exist_for_usual_numbers() -> None:
    assert {name for name, p, m, _ in LEGAL if p == 4 and m == 12} == set(NAMES)
    assert len(LEGAL) > 200


@pytest.mark.parametrize("name", ["afab", "1f1b"])
@pytest.mark.parametrize("times", [Times(), Times(forward_s=3, input_s=4, weight_s=1)], ids=["even", "uneven"])
def test_bubble_of_afab_and_1f1b_is_p_minus_1_over_m(name: str, times: Times) -> None:
    for p, m in product((1, 2, 4, 8), (1, 2, 8, 16, 33)):
        assert replay(schedule(name, p, m), times).bubble == pytest.approx(float(Fraction(p - 1, m)))


def test_bubble_of_interleaved_is_p_minus_1_over_v_m() -> None:
    for p, rounds, v in product((2, 4, 8), (1, 2, 3), (1, 2, 3, 4)):
        played = replay(schedule("interleaved", p, rounds * p, v))
        assert played.bubble == pytest.approx(float(Fraction(p - 1, v * rounds * p)))


@pytest.mark.parametrize("times", [Times(), Times(forward_s=2, input_s=2, weight_s=1), Times(weight_s=0.5)], ids=str)
def test_bubble_of_zb_h1_is_p_minus_1_times_f_plus_b_minus_w(times: Times) -> None:
    for p, m in product((2, 3, 4, 8), (16, 24)):
        played = replay(schedule("zb-h1", p, m), times)
        ideal = m * (times.forward_s + times.input_s + times.weight_s)
        bubble = (p - 1) * (times.forward_s + times.input_s - times.weight_s)
        assert played.total_s == pytest.approx(ideal + bubble)
        assert played.total_s < replay(schedule("1f1b", p, m), times).total_s


def test_zb_v_has_no_bubble_inside_when_all_passes_take_the_same_time() -> None:
    """The first rank starts at once, and from its first pass to its last every rank but for the fill computes."""
    for p, m in product((2, 3, 4, 8), (16, 24)):
        played = replay(schedule("zb-v", p, m, 2))
        assert played.total_s == 6 * m + p - 1
        assert all(spans[-1].end_s - spans[0].start_s == 6 * m for spans in played.spans)


@pytest.mark.parametrize("times", [Times(), Times(forward_s=2), Times(input_s=2), Times(weight_s=2)], ids=str)
def test_bubble_of_dualpipe_v_is_at_most_that_of_its_readme(times: Times) -> None:
    """(p - 1) (F&B + B - 3 W), where B is a whole backward pass. There a pair F&B gives its results at its end; here F
    gives its own before BW begins, so the bubble is smaller."""
    whole = times.input_s + times.weight_s
    for p, m in product((2, 3, 4, 8), (16, 24)):
        bubble = replay(schedule("dualpipe-v", p, m, 2), times).total_s - 2 * m * (times.forward_s + whole)
        assert 0 < bubble <= (p - 1) * (times.forward_s + whole + whole - 3 * times.weight_s)
        assert times != Times() or bubble == p - 1


def test_in_flight_micro_batches() -> None:
    for p, m in product((1, 2, 4, 8), (1, 3, 8, 16)):
        assert replay(schedule("afab", p, m)).in_flight == (m,) * p
        assert replay(schedule("1f1b", p, m)).in_flight == tuple(min(m, p - rank) for rank in range(p))
        assert max(replay(schedule("zb-h1", p, m)).in_flight) == min(m, p)
        assert max(replay(schedule("zb-v", p, m, 2)).in_flight) <= 2 * p
    for p in (2, 4, 8):
        assert replay(schedule("zb-v", p, 3 * p, 2)).in_flight == (2 * p,) * p
        assert replay(schedule("dualpipe-v", p, 3 * p, 2)).in_flight == (2 * p + 1,) * p
        for v in (2, 3):
            wanted = tuple((v - 1) * p + 2 * (p - 1 - rank) + 1 for rank in range(p))
            assert replay(schedule("interleaved", p, 4 * p, v)).in_flight == wanted


def test_placement() -> None:
    assert stage_rank("1f1b", 3) == (0, 1, 2)
    assert stage_rank("interleaved", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert stage_rank("zb-v", 3, 2) == stage_rank("dualpipe-v", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert stages_of(stage_rank("zb-v", 3, 2), 1) == (1, 4)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (("gpipe", 2, 2, 1), "unknown"),
        (("1f1b", 0, 2, 1), "1 or more"),
        (("1f1b", 2, 0, 1), "1 or more"),
        (("1f1b", 2, 4, 2), "layout.vp=2: take layout.vp=1 or layout.schedule=interleaved"),
        (("afab", 2, 4, 2), "take layout.vp=1"),
        (("zb-v", 2, 4, 1), "layout.vp=1: take layout.vp=2"),
        (("dualpipe-v", 2, 4, 3), "layout.vp=3: take layout.vp=2"),
        (("dualpipe-v", 4, 7, 2), "2 x pp = 8 micro-batches or more, not 7"),
        (("interleaved", 4, 9, 2), "take 8 or 12"),
        (("zb-h1", 4, 9, 2), "take 8 or 12"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_change(numbers: tuple[str, int, int, int], words: str) -> None:
    sentence = refusal(*numbers)
    assert sentence is not None and words in sentence and "\n" not in sentence
    for function in (check, schedule):
        with pytest.raises(IllegalLayout, match="^" + sentence.split(":")[0][:20].replace("(", ".")):
            function(*numbers)


def test_lists_that_cannot_be_executed_are_named() -> None:
    good = schedule("1f1b", 2, 2)
    with pytest.raises(IllegalLayout, match=r"wait for each other: rank 0 at BW of stage 0, micro-batch 0; rank 1"):
        replay((good[0], (good[1][1], good[1][0], *good[1][2:])))
    with pytest.raises(IllegalLayout, match="lack B of stage 1, micro-batch 1"):
        replay((good[0], good[1][:-1]))
    with pytest.raises(IllegalLayout, match="which was done already"):
        replay(((*good[0], Action("W", 0, 0)), good[1]))
    with pytest.raises(IllegalLayout, match="its stage is on rank 0"):
        replay((good[0], (*good[1], good[0][0])))
    with pytest.raises(IllegalLayout, match="no action of stage 1"):
        replay((good[0], tuple(Action(a.kind, 2, a.micro_batch) for a in good[1])))


@pytest.mark.parametrize("name", NAMES)
def test_transfers_are_in_an_order_that_every_rank_can_follow(name: str) -> None:
    """A rank that starts its transfers in this order has made what it sends, and needs nothing that comes later."""
    for _, p, m, v in (case for case in LEGAL if case[0] == name):
        for actions in (schedule(name, p, m, v), forward_only(stage_rank(name, p, v), m)):
            _follow(actions, p, v)


def _follow(actions: Actions, p: int, v: int) -> None:
    order = transfers(actions)
    assert len(set(order)) == len(order)
    for rank, rank_actions in enumerate(actions):
        at = {
            ("F" if a.kind == "F" else "B", a.stage, a.micro_batch): n
            for n, a in enumerate(rank_actions)
            if a.kind != "W"
        }
        done = -1
        for transfer in (t for t in order if rank in (t.source, t.target)):
            step = -1 if transfer.kind == "F" else 1
            if transfer.source == rank:
                done = max(done, at[transfer.kind, transfer.stage + step, transfer.micro_batch])
            else:
                assert at[transfer.kind, transfer.stage, transfer.micro_batch] > done
    both = 2 if any(a.kind != "F" for rank_actions in actions for a in rank_actions) else 1
    crossing = sum(a != b for a, b in zip(placement_of(actions), placement_of(actions)[1:], strict=False))
    assert len(order) == both * crossing * len({a.micro_batch for a in actions[0]})


def test_an_evaluation_takes_any_number_of_micro_batches() -> None:
    for name, p, m, v in product(NAMES, (1, 2, 4), (1, 3, 9), (1, 2, 3)):
        placement = stage_rank(name, p, 2 if name in V_PLACED else v)
        actions = forward_only(placement, m)
        passes = sorted(action for rank_actions in actions for action in rank_actions)
        assert passes == [Action("F", s, i) for s in range(len(placement)) for i in range(m)]
    assert forward_only((0, 1, 0, 1), 2)[0] == tuple(Action("F", s, i) for s in (0, 2) for i in range(2))


def test_last_of_each_stage() -> None:
    rank_actions = schedule("zb-v", 2, 4, 2)[0]
    assert last_of(rank_actions, ("B", "BW")) == {0: Action("B", 0, 3), 3: Action("B", 3, 3)}
    assert last_of(rank_actions, ("W", "BW")) == {0: Action("W", 0, 3), 3: Action("W", 3, 3)}


def test_stage_layers() -> None:
    assert [len(r) for r in stage_layers(32, 4)] == [8, 8, 8, 8]
    assert [len(r) for r in stage_layers(30, 4)] == [7, 8, 8, 7]
    assert [len(r) for r in stage_layers(31, 4)] == [8, 8, 8, 7]
    assert [len(r) for r in stage_layers(61, 16)] == [3, *[4] * 13, 3, 3]
    for layers, stages in product(range(1, 40), range(1, 17)):
        if stages > layers:
            with pytest.raises(IllegalLayout, match=f"the model has {layers}: take pp x vp <= {layers}"):
                stage_layers(layers, stages)
            continue
        ranges = stage_layers(layers, stages)
        assert [layer for part in ranges for layer in part] == list(range(layers))
        assert all(ranges)
        loads = [len(part) + (s == 0) + (s == stages - 1) for s, part in enumerate(ranges)]
        assert max(loads) - min(loads) <= 1
        assert layers % stages or len({len(part) for part in ranges}) == 1


def _of_torch(name: str, p: int, m: int, v: int) -> Actions:
    """The order that torch's schedule class makes for each rank, without its waits; overlapped pairs one by one."""
    from torch.distributed.pipelining import schedules as theirs

    classes = {
        "afab": theirs.ScheduleGPipe,
        "1f1b": theirs.Schedule1F1B,
        "interleaved": theirs.ScheduleInterleaved1F1B,
        "zb-h1": theirs.ScheduleInterleavedZeroBubble,
        "zb-v": theirs.ScheduleZBVZeroBubble,
        "dualpipe-v": theirs.ScheduleDualPipeV,
    }
    stages = [
        SimpleNamespace(
            group=None, group_size=p, group_rank=0, num_stages=p * v, stage_index=s, is_first=s == 0, is_last=False,
            has_backward=False, submod=None, stage_index_to_group_rank={}, backward_requires_autograd=True,
            use_saved_stage_input=False,
        )
        for s in range(0, p * v, p)
    ]  # fmt: skip
    made: Any = classes[name](stages[0] if name in ("afab", "1f1b") else stages, m, loss_fn=lambda x, y: x)
    order = made._get_pipeline_order() if name in ("afab", "1f1b") else made.pipeline_order
    return tuple(tuple(_translated(order[rank])) for rank in range(p))


def _translated(listed: Any) -> Iterator[Action]:
    kinds: dict[str, Any] = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "BW"}
    for action in listed:
        if action is None or action.computation_type.name == "REDUCE_GRAD":
            continue
        for part in action.sub_actions or (action,):
            yield Action(kinds[part.computation_type.name], part.stage_index, part.microbatch_index)


def _counted_from_zero(rank_actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """The last rank's forward passes as torch executes them: its list numbers them from 1."""
    first = min(action.micro_batch for action in rank_actions if action.kind == "F")
    return tuple(Action(a.kind, a.stage, a.micro_batch - (first if a.kind == "F" else 0)) for a in rank_actions)


@pytest.mark.parametrize("name", NAMES)
def test_lists_are_those_of_torch(name: str) -> None:
    compared = 0
    for _, p, m, v in (case for case in LEGAL if case[0] == name):
        if (name == "1f1b" and m < p) or (name in ("interleaved", "zb-h1") and m % max(1, m // p)):
            continue  # torch's classes refuse them, the second kind for one stage a rank as well
        theirs = _of_torch(name, p, m, v)
        if name == "1f1b":
            theirs = (*theirs[:-1], _counted_from_zero(theirs[-1]))
        assert schedule(name, p, m, v) == theirs, (p, m, v)
        compared += 1
    assert compared > 10

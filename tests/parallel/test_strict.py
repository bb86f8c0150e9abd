"""Layouts under collectives as strict as NCCL's (strict.py), beside one device; and planted faults, each found."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.observe.oracle.feature_matrix import CASE, DENSE
from meshwright.observe.oracle.one_device import Case, RankOutcome, first_difference, outcome
from meshwright.observe.ranks import RankError, on_ranks
from meshwright.parallel.groups.group import Group
from meshwright.parallel.groups.mesh import ProcessGroups, make_mesh
from meshwright.parallel.pipeline.executor import PointToPoint
from meshwright.spec import Layout
from tests.parallel.strict import strict

TWO = [
    Layout(compile="off", **each)
    for each in (
        {"dp_shard": 2, "micro_batch": 2},
        {"dp_shard": 2, "zero": 2, "micro_batch": 2},
        {"dp_shard": 2, "zero": 3, "recompute": "full"},
        {"tp": 2, "sp": True},
        {"cp": 2},
        {"cp": 2, "context": "all-gather", "zero": 1},
        {"pp": 2, "micro_batch": 1, "schedule": "zb-h1"},
        {"pp": 2, "vp": 2, "micro_batch": 1, "schedule": "interleaved"},
        {"pp": 2, "vp": 2, "micro_batch": 1, "schedule": "dualpipe-v"},
        {"dp_shard": 2, "ep": 2, "zero": 3},
        {"dp_shard": 2, "ep": 2, "zero": 3, "ep_chunks": 2, "recompute": "full", "micro_batch": 2},
    )
]
FOUR = [
    Layout(compile="off", **each)
    for each in (
        {"pp": 4, "micro_batch": 1},
        {"pp": 2, "tp": 2, "sp": True, "micro_batch": 1, "schedule": "zb-v", "vp": 2},
        {"dp_replicate": 2, "cp": 2, "ep": 2, "zero": 2},
    )
]


def case_of(layout: Layout) -> Case:
    return CASE if layout.ep > 1 or layout.pp > 1 else DENSE


def _strictly(layouts: list[Layout], seed: int) -> list[tuple[RankOutcome, int, int]]:
    """What each layout computed, how many calls were checked, and how many of these ended without a wait."""
    process_groups: ProcessGroups = {}
    results = []
    for layout in layouts:
        with strict(seed) as checks:
            computed = outcome(case_of(layout), layout, process_groups=process_groups)
        results.append((computed, checks.checked, checks.seen_to_end))
    return results


@pytest.mark.parametrize(("world", "layouts"), [(2, TWO), (4, FOUR)])
@pytest.mark.long
def test_layouts_equal_one_device(world: int, layouts: list[Layout]) -> None:
    ranks = on_ranks(world, _strictly, layouts, 1)
    for index, layout in enumerate(layouts):
        alone = outcome(case_of(layout), Layout(compile="off", micro_batch=layout.micro_batch))
        assert (difference := first_difference(alone, [rank[index][0] for rank in ranks])) is None, (layout, difference)
        assert all(rank[index][1] >= 8 for rank in ranks), layout  # a sum of all gradients, and figures
    ended = [rank[index][2] for index, layout in enumerate(layouts) if layout.pp > 1 for rank in ranks]
    assert sum(ended) >= 10, "sends that were freed because they had ended"


def _pair() -> Group:
    return make_mesh(Layout(tp=2))["tp"]


def _reads_before_the_wait() -> list[float]:
    group = _pair()
    with strict():
        pending = group.start_all_gather(torch.ones(2))
        early = pending.tensor.sum().item()
        received = torch.zeros(2)
        other = 1 - group.index
        sent = torch.ones(2)
        work = group.exchange([(sent, other)], [(received, other)])
        unread = received.sum().item()
        for transfer in work:
            transfer.wait()
        summed = group.start_all_reduce(torch.ones(2))
        partial = summed.tensor.sum().item()
        gathered, whole = pending.wait().sum().item(), summed.wait().sum().item()
        return [early, gathered, unread, received.sum().item(), partial, whole]


def test_what_is_read_before_its_wait_is_not_a_number() -> None:
    for values in on_ranks(2, _reads_before_the_wait):
        assert str(values) == str([float("nan"), 4.0, float("nan"), 2.0, float("nan"), 4.0])


def _changes_what_it_sends(how: str) -> None:
    group = _pair()
    x, received = torch.ones(2, 2), torch.empty(2, 2)
    with strict():
        if how == "message":
            work = group.exchange([(x, 1 - group.index)], [(received, 1 - group.index)])
            x.add_(1)
            for transfer in work:
                transfer.wait()
            return
        pending = group.start_all_gather(x) if how == "gather" else group.start_reduce_scatter(x)
        x.add_(1)
        pending.wait()


@pytest.mark.parametrize(
    ("how", "name"), [("message", "send"), ("gather", "all_gather"), ("scatter", "reduce_scatter")]
)
def test_what_is_sent_must_not_change(how: str, name: str) -> None:
    with pytest.raises(RankError, match=rf"StrictError: {name} of .*: what it sends was changed before"):
        on_ranks(2, _changes_what_it_sends, how)


def _sees_the_end(changes: bool) -> tuple[float, int]:
    group = _pair()
    sent, received = torch.ones(2), torch.empty(2)
    with strict() as checks:
        work = group.exchange([(sent, 1 - group.index)], [(received, 1 - group.index)])
        if changes:
            sent.add_(1)
        end = time.monotonic() + 30
        while not all(transfer.is_completed() for transfer in work):
            assert time.monotonic() < end
    return received.sum().item(), checks.seen_to_end


def test_a_message_ends_without_a_wait_and_is_checked_then() -> None:
    assert on_ranks(2, _sees_the_end, False) == [(2.0, 2)] * 2
    with pytest.raises(RankError, match=r"StrictError: send of .*: what it sends was changed before"):
        on_ranks(2, _sees_the_end, True)


def _misuses(how: str) -> None:
    group = _pair()
    with strict():
        received = torch.empty(2)
        other = 1 - group.index
        tensor = torch.ones(2)
        work = group.exchange([(tensor.clone() if how == "freed" else tensor, other)], [(received, other)])
        if how == "overwritten":
            received.zero_()
        for transfer in work if how != "forgotten" else []:
            transfer.wait()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("freed", "send of .*test_strict.* what it sends was freed before"),
        ("overwritten", "receive of .*what it receives was written to before"),
        ("forgotten", "starts were never waited for"),
    ],
)
def test_memory_must_stay_and_be_waited_for(how: str, words: str) -> None:
    with pytest.raises(RankError, match=words):
        on_ranks(2, _misuses, how)


def _sends_alone() -> float:
    """Seconds until a message of four bytes is gone, whose receiver takes its time."""
    group = _pair()
    begun = time.monotonic()
    if group.index == 0:
        sent = torch.ones(1)
        group.exchange([(sent, 1)], [])[0].wait()
    else:
        time.sleep(0.5)
        received = torch.empty(1)
        group.exchange([], [(received, 0)])[0].wait()
    return time.monotonic() - begun


def test_a_send_of_gloo_ends_when_its_receive_has_started() -> None:
    assert min(on_ranks(2, _sends_alone)) > 0.3


def _reads_at_once(patch: pytest.MonkeyPatch) -> None:
    take, close = PointToPoint.take, PointToPoint.close

    def take_without_waiting(transfers: PointToPoint, kind: Any, stage: int, micro_batch: int) -> Tensor:
        key = kind, stage, micro_batch
        if key in transfers.arriving:
            tensor, work = transfers.arriving[key]
            LATE.append((tensor, work))
            transfers.arriving[key] = tensor, []
        return take(transfers, kind, stage, micro_batch)

    def close_and_wait(transfers: PointToPoint) -> None:
        close(transfers)
        for _, work in LATE:
            for transfer in work:
                transfer.wait()
        LATE.clear()

    patch.setattr(PointToPoint, "take", take_without_waiting)
    patch.setattr(PointToPoint, "close", close_and_wait)


LATE: list[Any] = []


def _frees_at_once(patch: pytest.MonkeyPatch) -> None:
    put = PointToPoint.put

    def put_and_forget(transfers: PointToPoint, kind: Any, stage: int, micro_batch: int, tensor: Tensor) -> None:
        put(transfers, kind, stage, micro_batch, tensor)
        transfers.leaving = [replace(sent, tensor=torch.empty(0)) for sent in transfers.leaving]

    patch.setattr(PointToPoint, "put", put_and_forget)


def _changes_at_once(patch: pytest.MonkeyPatch) -> None:
    put = PointToPoint.put

    def put_and_change(transfers: PointToPoint, kind: Any, stage: int, micro_batch: int, tensor: Tensor) -> None:
        put(transfers, kind, stage, micro_batch, tensor)
        tensor.mul_(2)

    patch.setattr(PointToPoint, "put", put_and_change)


def _engine_with_a_fault(plant: Callable[[pytest.MonkeyPatch], None]) -> RankOutcome:
    plant(pytest.MonkeyPatch())
    layout = Layout(pp=2, micro_batch=1, compile="off")
    with strict(3):
        return outcome(case_of(layout), layout)


def test_an_engine_that_reads_what_has_not_arrived() -> None:
    ranks = on_ranks(2, _engine_with_a_fault, _reads_at_once)
    assert not all(math.isfinite(loss) for rank in ranks for loss in rank.losses)


@pytest.mark.parametrize(("plant", "word"), [(_frees_at_once, "freed"), (_changes_at_once, "changed")])
def test_an_engine_that_does_not_keep_what_it_sends(plant: Callable[..., None], word: str) -> None:
    with pytest.raises(RankError, match=f"StrictError: send of .*executor.py.*: what it sends was {word} before"):
        on_ranks(2, _engine_with_a_fault, plant)

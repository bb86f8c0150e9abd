"""When each send and receive of a pipeline is started, played under NCCL's rules without a GPU.

The operations of a step are written down by the executor's own code, over groups that only record, and put into a graph
of what must happen before what. A step can end where that graph has no cycle. Rules: operations of a group run in the
order in which they were started, each after the computation that was started before it; a transfer ends when both
sides have started it; waiting holds the computation that follows and not the host; an action that loads code (the first
launch of a kernel) holds the host until all receives that its rank has started are done.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

import pytest
import torch

from meshwright.parallel.pipeline.executor import AHEAD, UNDER_WAY, PointToPoint, program
from meshwright.spec.layout.replay import StageLink, links, placement_of
from meshwright.spec.layout.schedule import (
    NAMES,
    V_PLACED,
    Action,
    Actions,
    forward_only,
    refusal,
    schedule,
    stage_rank,
)

Node = tuple[Any, ...]


@dataclass
class Work:
    """A transfer as the rank that started it sees it: the n-th of a link."""

    log: list[Node]
    link: StageLink
    number: int

    def wait(self) -> None:
        self.log.append(("wait", self.link, self.number))

    def is_completed(self) -> bool:
        return False


@dataclass
class Recorder:
    """In place of the group of a link."""

    log: list[Node]
    link: StageLink
    index: int
    started: int = 0

    def exchange(self, sends: list[Any], receives: list[Any]) -> list[Work]:
        assert len(sends) + len(receives) == 1
        self.log.append(("send" if sends else "receive", self.link, self.started))
        self.started += 1
        return [Work(self.log, self.link, self.started - 1)]


def recorded(lists: Actions, rank: int) -> list[Node]:
    """What the host of a rank starts in a step, in its order."""
    log: list[Node] = []
    todo, placement = program(lists, rank), placement_of(lists)
    ranks = {link: sorted((link.source, link.target)) for link in links(placement)}
    groups: Any = {link: Recorder(log, link, ends.index(rank)) for link, ends in ranks.items() if rank in ends}
    empty = torch.empty(0)
    transfers = PointToPoint(groups, rank, todo, lambda _: empty)
    for action in todo.actions:
        stage, i, last = action.stage, action.micro_batch, len(placement) - 1
        if action.kind == "F" and stage:
            transfers.take("F", stage, i)
        elif action.kind in ("B", "BW") and stage < last:
            transfers.take("B", stage, i)
        log.append(("compute", action))
        if action.kind == "F" and stage < last:
            transfers.put("F", stage + 1, i, empty)
        elif action.kind in ("B", "BW") and stage:
            transfers.put("B", stage - 1, i, empty)
        transfers.action_ended()
    transfers.close()
    return log


@dataclass
class Graph:
    """What must have happened before what."""

    before: dict[Node, set[Node]] = field(default_factory=dict)

    def add(self, node: Node, *earlier: Node | None) -> Node:
        self.before.setdefault(node, set()).update(node_before for node_before in earlier if node_before is not None)
        return node

    def cycle(self) -> list[Node] | None:
        try:
            TopologicalSorter(self.before).prepare()
        except CycleError as error:
            nodes: list[Node] = error.args[1]
            return nodes
        return None


Launch = Callable[[int, Action], bool]


def anywhere(rank: int, action: Action) -> bool:
    """Any action may load code: a cold start, variants compiled in mid-run, on several ranks at once."""
    return True


def nowhere(rank: int, action: Action) -> bool:
    """Everything has run before."""
    return False


def played(logs: list[list[Node]], loads: Launch, *, host_waits: bool = False) -> list[Node] | None:
    """A cycle in what the ranks' operations wait for; None where the step can end. `loads`: which actions launch
    something for the first time; `host_waits`: waiting holds the host as well, as with Gloo."""
    graph = Graph()
    for rank, log in enumerate(logs):
        host: Node | None = None
        stream: Node | None = None
        of_link: dict[StageLink, Node] = {}
        open_receives: list[Node] = []
        for number, (what, *details) in enumerate(log):
            start = graph.add(("start", rank, number, what, *details), host)
            host = start
            if what == "compute":
                if loads(rank, details[0]):
                    graph.add(start, *open_receives)
                stream = graph.add(("computed", rank, number), start, stream)
                continue
            transfer: Node = ("transfer", *details)
            if what == "wait":
                stream = graph.add(("waited", rank, number), start, stream, transfer)
                host = stream if host_waits else host
                continue
            graph.add(transfer, start, stream, of_link.get(details[0]))
            of_link[details[0]] = transfer
            if what == "receive":
                open_receives.append(transfer)
    return graph.cycle()


def steps() -> Iterator[tuple[str, Actions]]:
    """Every schedule with p to 3p micro-batches, and its evaluation."""
    for name in NAMES:
        for p in (2, 3, 4, 8):
            v = 2 if name in ("interleaved", *V_PLACED) else 1
            for m in (p, p + 2, 2 * p + 2, 3 * p) if p < 8 else (p, 2 * p):
                if refusal(name, p, m, v) is None:
                    yield f"{name}, {p} ranks, {m} micro-batches", schedule(name, p, m, v)
                yield f"{name}, {p} ranks, {m} evaluated", forward_only(stage_rank(name, p, v), m)


def rank_logs(lists: Actions) -> list[list[Node]]:
    return [recorded(lists, rank) for rank in range(len(lists))]


def test_every_schedule_ends_under_the_rules_of_nccl() -> None:
    """Wherever code is loaded; and where nothing is, with a host that waits."""
    for title, lists in steps():
        logs = rank_logs(lists)
        assert (deadlock := played(logs, anywhere)) is None, (title, deadlock)
        assert (deadlock := played(logs, nowhere, host_waits=True)) is None, (title, deadlock)


def test_a_receive_at_the_start_of_a_step_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would start the receive of its first gradient before its first forward pass. The play finds it, where
    that pass loads code, and finds nothing where no code is loaded."""
    monkeypatch.setattr(PointToPoint, "_may_wait", lambda *_: True)
    logs = rank_logs(schedule("1f1b", 2, 4))
    assert logs[0][0] == ("receive", StageLink("B", 1, 0), 0)
    assert played(logs, nowhere) is None
    deadlock = played(logs, lambda rank, action: action in (Action("F", 0, 0), Action("F", 1, 0)))
    assert deadlock is not None and ("transfer", StageLink("B", 1, 0), 0) in deadlock


def test_swapped_sends_are_a_deadlock() -> None:
    """The play sees two ranks that disagree about what comes first."""
    logs = rank_logs(schedule("afab", 2, 2))
    sends = [number for number, entry in enumerate(logs[0]) if entry[0] == "send"]
    late = logs[0].pop(sends[0])
    logs[0].append(late)
    assert played(logs, nowhere) is not None


def test_receives_travel_while_a_rank_computes() -> None:
    """Of the last rank all but the first, which nothing comes before."""
    log = recorded(schedule("1f1b", 4, 12), 3)
    ahead = []
    for number, entry in enumerate(log):
        if entry[0] == "receive":
            wait = log.index(("wait", *entry[1:]))
            ahead.append(any(other[0] == "compute" for other in log[number:wait]))
    assert ahead == [False] + [True] * 11


def test_no_more_buffers_than_the_planner_counts() -> None:
    """At most AHEAD of a kind are under way beside what is being read, and UNDER_WAY sends beside the latest. Rounds of
    interleaved stages that pp does not divide keep two sends more, if their receivers are late."""
    for title, lists in steps():
        count = 1 + max(action.micro_batch for action in lists[0])
        for log in rank_logs(lists):
            received, sent = {"F": 0, "B": 0}, 0
            received_here = {entry[1] for entry in log if entry[0] == "receive"}
            for what, *details in log:
                if what == "receive":
                    received[details[0].kind] += 1
                elif what == "send":
                    sent += 1
                elif what == "wait" and details[0] in received_here:
                    received[details[0].kind] -= 1
                elif what == "wait":
                    sent -= 1
                assert max(received.values()) <= AHEAD + 1, title
                uneven = title.startswith("interleaved") and count % len(lists)
                assert sent <= UNDER_WAY + 1 + 2 * bool(uneven), title


def test_links_connect_in_an_order_in_which_no_rank_waits_for_a_chain() -> None:
    """Each rank's links one after the other: after half of the pairs the other half."""
    assert links(stage_rank("1f1b", 4)) == (
        StageLink("B", 1, 0), StageLink("F", 0, 1), StageLink("B", 3, 2), StageLink("F", 2, 3),
        StageLink("B", 2, 1), StageLink("F", 1, 2),
    )  # fmt: skip
    ring, v = links(stage_rank("interleaved", 4, 2)), links(stage_rank("zb-v", 4, 2))
    assert StageLink("F", 3, 0) in ring and StageLink("B", 0, 3) in ring and len(ring) == 8
    assert len(v) == 12 and all(abs(link.source - link.target) == 1 for link in v)
    assert links((0,)) == ()

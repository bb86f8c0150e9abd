"""Tensors that pipeline ranks send each other in one step, and when each send and receive is started.

Each link (spec/layout/replay.py: a kind, a sender, a receiver) has a process group of its own, so that nothing waits
behind an unrelated transfer. A send is started as soon as its tensor is made. A receive is started before the action
that reads it, up to AHEAD of its kind earlier, so that it travels while the rank computes.

On a GPU an open receive is a kernel that runs until the tensor arrives. The first launch of another kernel may wait
until nothing runs: CUDA loads code lazily, and compiled code is loaded when it is made. So any action may have to wait
for every open receive, and after a wait for a send all computation waits for its receiver.

No deadlock follows, because all ranks number the actions of a step in one order (`number_actions`). An action may
only wait for others with smaller numbers: those that make what is received, and those before the receipt of what is
sent. So some action waits for nothing. A first launch waits for open sends as well, whose receivers AHEAD may hold
back. Hence the stages of a pipeline are warmed up before the first message.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.groups.group import Group
from meshwright.spec.layout.replay import StageLink, Transfer, number_actions, transfers
from meshwright.spec.layout.schedule import Action, Actions
from meshwright.spec.memory.held import takes

AHEAD = 1
"""Receives of a kind that are started early. Each takes the memory of a tensor."""
UNDER_WAY = 2
"""Sends whose tensors are kept before the rank waits for the oldest."""

Kind = Literal["F", "B"]
Key = tuple[Kind, int, int]
"""(F or B, stage that reads the tensor, micro-batch)."""


@dataclass(frozen=True, slots=True)
class RankProgram:
    """A rank's actions, its sends and receives in order, and the actions of other ranks that they wait for."""

    actions: tuple[Action, ...]
    numbers: tuple[int, ...]
    """Number of each of its actions in the order of all ranks' actions."""
    transfers: tuple[Transfer, ...]
    others: Mapping[Transfer, int]
    """Number of an action at the other end of each transfer.

    A receive has the action that makes its tensor. A send has the action before the one that reads its tensor (-1 =
    none): after that action, at the latest, the receive is started.
    """

    @property
    def splits(self) -> bool:
        """True if any backward pass leaves its weight gradients for later."""
        return any(action.kind == "W" for action in self.actions)


def program(lists: Actions, rank: int) -> RankProgram:
    """Extract the program of one rank from the lists of all."""
    order = number_actions(lists)
    # Both keyed by (kind, stage, micro-batch): the action itself, and the one its rank does before it.
    makers = {_read(action): number for action, number in order.items() if action.kind != "W"}
    before = {_read(b): order[a] for actions in lists for a, b in pairwise(actions) if b.kind != "W"}
    rank_transfers = tuple(transfer for transfer in transfers(lists) if rank in (transfer.source, transfer.target))
    others = {}
    for transfer in rank_transfers:
        kind, stage, i = _key(transfer)
        # Activations come from the stage before, gradients from the stage behind.
        maker = stage - 1 if kind == "F" else stage + 1
        others[transfer] = makers[kind, maker, i] if transfer.target == rank else before.get((kind, stage, i), -1)
    return RankProgram(lists[rank], tuple(order[action] for action in lists[rank]), rank_transfers, others)


class PointToPoint:
    """The tensors of one step that go from stage to stage.

    `groups` are the two ranks of each link of this rank. `empty` makes the memory for a micro-batch's tensor. A tensor
    without a transfer goes to another stage of this rank.
    """

    def __init__(
        self, groups: Mapping[StageLink, Group], rank: int, todo: RankProgram, empty: Callable[[int], Tensor]
    ) -> None:
        self.groups, self.todo, self.empty = groups, todo, empty
        self.sends = {_key(transfer): transfer for transfer in todo.transfers if transfer.source == rank}
        self.receives = [transfer for transfer in todo.transfers if transfer.target == rank]
        kinds: tuple[Kind, Kind] = ("F", "B")
        # Receives that are not started yet, in the order in which their tensors are read.
        self.awaited = {kind: deque(transfer for transfer in self.receives if transfer.kind == kind) for kind in kinds}
        self.arrives = {_key(transfer) for transfer in self.receives}
        # Tensors between stages of this rank, tensors on their way here, and sends that still need their memory.
        self.within_rank: dict[Key, Tensor] = {}
        self.arriving: dict[Key, tuple[Tensor, list[dist.Work]]] = {}
        self.leaving: list[_Sent] = []
        self.done = 0
        self._look_ahead()

    @takes("buffers")
    def put(self, kind: Kind, stage: int, micro_batch: int, tensor: Tensor) -> None:
        """Hand a tensor to a stage. Nobody else may change it afterwards."""
        key: Key = kind, stage, micro_batch
        transfer = self.sends.pop(key, None)
        if transfer is None:
            self.within_rank[key] = tensor
            return
        tensor = tensor.contiguous()
        group = self.groups[transfer.link]
        self.leaving.append(_Sent(transfer, tensor, group.exchange([(tensor, 1 - group.index)], [])))
        self._release(UNDER_WAY)

    def take(self, kind: Kind, stage: int, micro_batch: int) -> Tensor:
        """Wait for a tensor that was handed to a stage, and return it."""
        key: Key = kind, stage, micro_batch
        if key not in self.arrives:
            return self.within_rank.pop(key)
        # AHEAD or the order of actions held it back until now.
        if key not in self.arriving:
            self._receive_up_to(key)
        tensor, work = self.arriving.pop(key)
        # The next tensors travel while this rank waits.
        self._look_ahead()
        for transfer in work:
            transfer.wait()
        return tensor

    def action_ended(self) -> None:
        """Note that this rank has done one more of its actions."""
        self.done += 1
        self._look_ahead()

    def close(self) -> None:
        """Wait for all sends."""
        assert not (any(self.awaited.values()) or self.sends or self.arriving or self.within_rank), (
            "the schedule has transfers that no action made or read"
        )
        self._release(0)

    def _look_ahead(self) -> None:
        """Start the next receives, as many as are allowed."""
        for kind, order in self.awaited.items():
            ahead = sum(key[0] == kind for key in self.arriving)
            while order and ahead < AHEAD and self._may_wait(order[0], self.done):
                self._receive(order.popleft())
                ahead += 1

    def _receive_up_to(self, key: Key) -> None:
        """Start a receive, after those that come before it on its link."""
        order = self.awaited[key[0]]
        last = next(transfer for transfer in order if _key(transfer) == key)
        for transfer in [entry for entry in order if entry.link == last.link]:
            order.remove(transfer)
            self._receive(transfer)
            if transfer == last:
                return

    def _may_wait(self, transfer: Transfer, action: int) -> bool:
        """Return whether an action of this rank, by index, may wait for the other end of a transfer."""
        numbers = self.todo.numbers
        return action >= len(numbers) or self.todo.others[transfer] < numbers[action]

    def _receive(self, transfer: Transfer) -> None:
        tensor, group = self.empty(transfer.micro_batch), self.groups[transfer.link]
        self.arriving[_key(transfer)] = tensor, group.exchange([], [(tensor, 1 - group.index)])

    def _release(self, most: int) -> None:
        """Free what has been received. Wait for the oldest sends beyond the `most` that may stay open."""
        for sent in list(self.leaving):
            if not all(work.is_completed() for work in sent.work):
                # An unfinished send is waited for only where the order of actions rules out a deadlock.
                if len(self.leaving) <= most or not self._may_wait(sent.transfer, self.done + 1):
                    continue
                for work in sent.work:
                    work.wait()
            self.leaving.remove(sent)


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """A tensor that must not change until its receiver has it."""

    transfer: Transfer
    tensor: Tensor
    work: list[dist.Work]


def _key(transfer: Transfer) -> Key:
    return transfer.kind, transfer.stage, transfer.micro_batch


def _read(action: Action) -> Key:
    return "F" if action.kind == "F" else "B", action.stage, action.micro_batch

"""What pipeline ranks send each other, started in one order that all of them follow.

The order (spec/replay.py, `transfers`) is that of the schedule played in unit time. Activations and gradients travel in
groups of their own, so that neither waits for the other. In each of the two, a rank starts its own part of the order
strictly: a send as soon as its tensor is made, a receive before the action that reads it, if nothing that is not yet
made stands before it earlier still (AHEAD), so that it travels while the rank computes. NCCL works off the transfers of
a group one after the other, so ranks that started them in different orders would wait for each other for ever; here the
first transfer of the order that has not ended always can.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.group import Group
from meshwright.spec.replay import Transfer

AHEAD = 1
"""Receives of a kind that are started before what arrives is needed: a tensor of memory each."""
UNDER_WAY = 2
"""Sends whose tensors are kept before the rank waits for the oldest."""

Kind = Literal["F", "B"]
Key = tuple[Kind, int, int]
"""(F or B, stage that reads it, micro-batch)."""


class Mail:
    """The tensors of one step that go from stage to stage; `order` are the transfers of this rank, `groups` the ranks
    for each kind.

    What no transfer names stays here: its stage lies on this rank.
    """

    def __init__(self, groups: Mapping[Kind, Group], order: Sequence[Transfer], empty: Callable[[int], Tensor]) -> None:
        self.groups, self.empty = groups, empty
        self.index = groups["F"].index
        self.orders = {kind: deque(transfer for transfer in order if transfer.kind == kind) for kind in groups}
        self.travels = {_key(transfer) for transfer in order}
        self.here: dict[Key, Tensor] = {}
        self.arriving: dict[Key, tuple[Tensor, list[dist.Work]]] = {}
        self.leaving: deque[tuple[Tensor, list[dist.Work]]] = deque()
        for kind in groups:
            self._look_ahead(kind)

    def put(self, kind: Kind, stage: int, micro_batch: int, tensor: Tensor) -> None:
        """Hand a tensor to a stage; it belongs to the mail from now on."""
        key: Key = kind, stage, micro_batch
        if key not in self.travels:
            self.here[key] = tensor
            return
        order = self.orders[kind]
        while _key(order[0]) != key:
            self._receive(order.popleft())
        transfer = order.popleft()
        tensor = tensor.contiguous()
        self.leaving.append((tensor, self.groups[kind].exchange([(tensor, transfer.target)], [])))
        self._look_ahead(kind)
        self._release(UNDER_WAY)

    def take(self, kind: Kind, stage: int, micro_batch: int) -> Tensor:
        """What was handed to a stage; waits for it."""
        key: Key = kind, stage, micro_batch
        if key not in self.travels:
            return self.here.pop(key)
        while key not in self.arriving:
            self._receive(self.orders[kind].popleft())
        tensor, work = self.arriving.pop(key)
        self._look_ahead(kind)
        for one in work:
            one.wait()
        return tensor

    def close(self) -> None:
        """Wait for all that was sent."""
        assert not (any(self.orders.values()) or self.arriving or self.here), (
            "the schedule has transfers that no action made or read"
        )
        self._release(0)

    def _look_ahead(self, kind: Kind) -> None:
        """Start the receives that are next, up to the first send: what that sends is not made yet."""
        order = self.orders[kind]
        ahead = sum(key[0] == kind for key in self.arriving)
        while order and order[0].target == self.index and ahead < AHEAD:
            self._receive(order.popleft())
            ahead += 1

    def _receive(self, transfer: Transfer) -> None:
        assert transfer.target == self.index, f"{transfer} should have been sent before"
        tensor = self.empty(transfer.micro_batch)
        self.arriving[_key(transfer)] = tensor, self.groups[transfer.kind].exchange([], [(tensor, transfer.source)])

    def _release(self, kept: int) -> None:
        """Free what has been sent; of the rest keep so many at most."""
        while self.leaving:
            _, work = self.leaving[0]
            if len(self.leaving) <= kept and not all(one.is_completed() for one in work):
                return
            for one in work:
                one.wait()
            self.leaving.popleft()


def _key(transfer: Transfer) -> Key:
    return transfer.kind, transfer.stage, transfer.micro_batch

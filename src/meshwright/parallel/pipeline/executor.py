"""One executor for all pipeline schedules (spec/layout/schedule.py): it follows this rank's list, action by action.

    F    the stage's forward pass on the output of the stage before; its own output goes to the next stage
    B    gradients of the stage's input, norms and biases; the input's gradient goes to the stage before
    W    the gradients of weight matrices that B left in a queue (kernels.weight_gradients)
    BW   B and W in one backward pass

Between F and B only the graph is kept: an output lives until it is sent, and its gradient enters the graph by an edge.
(Megatron-LM's deallocate_output_tensor has the same effect by changing the tensor.) Sizes are known beforehand, so only
the tensors themselves are sent. Stages on one rank (the bottom of a V) hand over without a copy.

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
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.kernels.linear.weight_gradients import WeightGradients, splitting, whole
from meshwright.parallel.groups.group import Group
from meshwright.spec.layout.replay import StageLink, Transfer, number_actions, transfers
from meshwright.spec.layout.schedule import Action, Actions, forward_only, schedule, stage_rank, stages_of
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


Stage = Callable[[Tensor | None, Any], tuple[Tensor | None, Tensor | None]]
"""(output of the stage before or None, micro-batch) -> (output, unread on the last; part of the loss () or None)."""

Watch = Callable[[Action], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """One run of every stage on this rank alone, before the first message of a step with new code.

    Code is then compiled and loaded on all ranks at the same time, and not while a transfer is open.
    """

    forms: Callable[[Any], Mapping[Hashable, Any]]
    """Micro-batches by the key of the code they run: the argument, and those that may come later in its size.

    The keys are the same on all ranks that a stage communicates with.
    """
    undone: Callable[[], AbstractContextManager[None]]
    """Context in which stages may run without lasting effects."""


class Pipeline:
    """This rank's stages under a schedule.

    Args:
        group: Lists the ranks.
        stages: In ascending order (`stages_of(stage_rank(name, ranks, virtual), rank)`). Each returns a part of the
            loss, whose gradient is 1, or None.
        receive_like: Makes an empty tensor of the size and dtype that stages send for a micro-batch, the same on all
            ranks.
        links: The process groups in which this rank sends and receives.
        before: Called before every action of a training step.
        after: Called after every action of a training step.
        warm_up: None = nothing is compiled or loaded.
    """

    def __init__(
        self,
        name: str,
        group: Group,
        stages: Sequence[Stage],
        receive_like: Callable[[Any], Tensor],
        *,
        links: Mapping[StageLink, Group],
        before: Watch | None = None,
        after: Watch | None = None,
        warm_up: WarmUp | None = None,
    ) -> None:
        self.name, self.group, self.receive_like = name, group, receive_like
        self.links = links
        self.placement = stage_rank(name, group.size, len(stages))
        self.stages = dict(zip(stages_of(self.placement, group.index), stages, strict=True))
        self.before, self.after = before, after
        self.warm_up = warm_up
        self._warm: set[Hashable] = set()
        self._programs: dict[tuple[int, bool], RankProgram] = {}
        self.current: tuple[Action, ...] = ()
        """The actions of the step under way."""

    def actions(self, micro_batches: int) -> tuple[Action, ...]:
        """Return this rank's actions in a step. Raises IllegalLayout when the schedule has no such list."""
        return self._program(micro_batches, train=True).actions

    def run(self, micro_batches: Sequence[Any]) -> Tensor:
        """Run one step's passes and return the sum () fp32 of the losses of this rank's stages, detached."""
        return self._execute(micro_batches, train=True)

    def evaluate(self, micro_batches: Sequence[Any]) -> Tensor:
        """Run forward passes of any number of micro-batches; return the sum () fp32 of this rank's losses."""
        with torch.no_grad():
            return self._execute(micro_batches, train=False)

    def _program(self, micro_batches: int, *, train: bool) -> "RankProgram":
        key = micro_batches, train
        if key not in self._programs:
            ranks, virtual = self.group.size, len(self.stages)
            lists = (
                schedule(self.name, ranks, micro_batches, virtual)
                if train
                else forward_only(self.placement, micro_batches)
            )
            self._programs[key] = program(lists, self.group.index)
        return self._programs[key]

    def _execute(self, micro_batches: Sequence[Any], *, train: bool) -> Tensor:
        rank_program = self._program(len(micro_batches), train=train)
        # Before PointToPoint, which opens the first receives: code must not be loaded while a transfer is open.
        if self.warm_up is not None:
            self._warm_up(self.warm_up, rank_program, micro_batches, train=train)
        like, rank = self.receive_like, self.group.index
        p2p = PointToPoint(self.links, rank, rank_program, lambda i: like(micro_batches[i]))
        passes = Passes(self, p2p, micro_batches, rank_program.actions, train=train)
        self.current = rank_program.actions
        with splitting() if rank_program.splits else nullcontext():
            for action in rank_program.actions:
                if train and self.before is not None:
                    self.before(action)
                passes.do(action)
                if train and self.after is not None:
                    self.after(action)
                p2p.action_ended()
        p2p.close()
        return passes.loss()

    def _warm_up(self, how: WarmUp, rank_program: RankProgram, micro_batches: Sequence[Any], *, train: bool) -> None:
        kinds = {(action.stage, action.kind) for action in rank_program.actions}
        for form, sample in {form: call for batch in micro_batches for form, call in how.forms(batch).items()}.items():
            # A pass whose backward is split runs other code than a whole one, so the kinds of actions are part of the
            # name.
            name = train, form, frozenset(kinds)
            if name in self._warm:
                continue
            self._warm.add(name)
            with how.undone(), splitting() if rank_program.splits else nullcontext():
                for stage in self.stages:
                    # Whole and split backward passes run different code; the schedule may use both.
                    for order in (("F", "BW"), ("F", "B", "W")) if train else (("F",),):
                        if all((stage, kind) in kinds for kind in order):
                            actions = [Action(kind, stage, 0) for kind in order]
                            passes = Passes(
                                self, _NoPeers(self.receive_like(sample)), [copy(sample)], actions, train=train
                            )
                            for action in actions:
                                passes.do(action)


class _NoPeers:
    """Stand-in for the other ranks: a stage reads random numbers, and what it sends is dropped."""

    def __init__(self, like: Tensor) -> None:
        self.like = like

    def take(self, kind: Kind, stage: int, micro_batch: int) -> Tensor:
        """Return random numbers."""
        return torch.randn_like(self.like)

    def put(self, kind: Kind, stage: int, micro_batch: int, tensor: Tensor) -> None:
        """Drop the tensor."""


@dataclass(slots=True)
class _Graph:
    """State of a forward pass that its backward pass needs."""

    x: Tensor | None
    output: GradientEdge | None
    loss: Tensor | None


class Passes:
    """The state of one step: graphs between F and B, queues between B and W, tensors under way."""

    def __init__(
        self,
        pipeline: Pipeline,
        p2p: "PointToPoint | _NoPeers",
        micro_batches: Sequence[Any],
        actions: Sequence[Action],
        *,
        train: bool,
    ) -> None:
        self.pipeline, self.p2p, self.micro_batches, self.train = pipeline, p2p, micro_batches, train
        self.last = len(pipeline.placement) - 1
        self.split = {(action.stage, action.micro_batch) for action in actions if action.kind == "B"}
        self.graphs: dict[tuple[int, int], _Graph] = {}
        self.queues: dict[tuple[int, int], WeightGradients] = {}
        self.total: Tensor | None = None

    def do(self, action: Action) -> None:
        """Do one action of this rank's list."""
        key = action.stage, action.micro_batch
        if action.kind == "F":
            self._forward(*key)
        elif action.kind == "W":
            self.queues.pop(key).run()
        else:
            self._backward(*key, split=action.kind == "B")

    def loss(self) -> Tensor:
        """Return the sum of this rank's parts ()."""
        if self.total is None:
            return self.pipeline.receive_like(self.micro_batches[0]).new_zeros((), dtype=torch.float32)
        return self.total

    def _forward(self, stage: int, i: int) -> None:
        x = self.p2p.take("F", stage, i) if stage else None
        if x is not None and self.train:
            # The received tensor is a leaf, whose gradient goes back to the stage before.
            x.requires_grad_()
        # Only split passes leave weight gradients for a later W.
        with nullcontext() if (stage, i) in self.split else whole():
            output, loss = self.pipeline.stages[stage](x, self.micro_batches[i])
        if loss is not None:
            part = loss.detach().float()
            self.total = part.clone() if self.total is None else self.total + part
        edge = None
        if stage < self.last:
            assert output is not None, f"stage {stage} of {self.last + 1} gave no output"
            # The edge enters the graph later without keeping the output alive.
            edge = get_gradient_edge(output) if output.requires_grad else None
            self.p2p.put("F", stage + 1, i, output.detach())
        if self.train:
            self.graphs[stage, i] = _Graph(x, edge, loss if loss is not None and loss.requires_grad else None)

    def _backward(self, stage: int, i: int, *, split: bool) -> None:
        graph = self.graphs.pop((stage, i))
        gradient = self.p2p.take("B", stage, i) if stage < self.last else None
        queue = WeightGradients()
        with queue if split else nullcontext():
            # All gradients that the graph reaches, from the output's gradient, and 1 for the stage's own loss.
            roots, seeds = [], []
            if graph.output is not None and gradient is not None:
                roots.append(graph.output)
                seeds.append(gradient)
            if graph.loss is not None:
                roots.append(get_gradient_edge(graph.loss))
                seeds.append(torch.ones_like(graph.loss))
            if roots:
                torch.autograd.backward(roots, seeds)
        if split:
            self.queues[stage, i] = queue
        if graph.x is not None:
            # The stage before has a receive open, so it gets zeros even if nothing here depends on its output.
            x_gradient = torch.zeros_like(graph.x) if graph.x.grad is None else graph.x.grad
            self.p2p.put("B", stage - 1, i, x_gradient)

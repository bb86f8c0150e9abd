"""Collectives and messages of a real run over Gloo, with the strictness that NCCL has and Gloo lacks.

    with strict(seed):
        ...    # everything that groups and fully_shard start in this process

Gloo copies late and hides mistakes; on a GPU they are races. Inside:

- what arrives is NaN (each byte 255) until it has been waited for, also the tensor of a sum in place;
- what is sent is held against its checksum when it is waited for, and must still have its memory;
- what arrives must not have been written to before its wait;
- every start is waited for, or seen to have ended, before the block ends;
- a message that has ended says so without a wait, at random times (`is_completed`); its checksum is compared then;
- starts and waits are delayed by random times (`seed`), so that ranks meet in other orders.

That a send ends only when its receive has been started, Gloo does by itself (test_strict.py shows it). On a CPU
fully_shard waits for its collectives at once; their order on a GPU is torch's own matter.

The whole suite of an axis runs under it: `pytest tests/parallel/test_pipeline.py --strict-collectives 1`.
"""

import random
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright import compat

POISON = 255
"""Of each byte: a NaN in every floating dtype, -1 in every integer."""
LONGEST_S = 0.002
"""Delay of a start or a wait."""


class StrictError(AssertionError):
    """What NCCL would have answered with wrong numbers."""


class Strict:
    """What is under way in this process, and how much was checked."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(f"{seed} {dist.get_rank() if dist.is_initialized() else 0}")
        self.open: list[_Open] = []
        self.checked = 0
        """Sends and receives that went through unharmed."""
        self.seen_to_end = 0
        """Those of them that nobody has waited for."""

    def delay(self) -> None:
        """For a while that nobody can foresee."""
        time.sleep(self.dice.random() ** 4 * LONGEST_S)

    def end(self) -> None:
        """StrictError where something was started that nobody has waited for."""
        if self.open:
            raise StrictError(f"{len(self.open)} starts were never waited for: {self.open[0].title}")


class _Open:
    """Part of a call under way: `sent` and `received` are the caller's tensors, their stand-ins are what travels."""

    def __init__(self, strict: Strict, name: str, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        self.strict, self.title = (
            strict,
            f"{name} of {[tuple(x.shape) for x in (*sent, *received)]}, started at {_line()}",
        )
        into = {
            x.untyped_storage().data_ptr() for x in received
        }  # fully_shard gathers from a part of what it gathers to
        apart = [x for x in sent if x.untyped_storage().data_ptr() not in into]
        self.sent = [(StorageWeakRef(x.untyped_storage()), _sum(x), _again(x)) for x in apart]
        self.stand_ins = [x.detach().clone() for x in sent]
        self.arrived = [torch.empty_like(x) for x in received]
        self.received = [(StorageWeakRef(x.untyped_storage()), _again(x)) for x in received]
        for x in received:
            _bytes(x).fill_(POISON)
        self.works: list[dist.Work] = []
        self.waiting: threading.Thread | None = None
        self.failed: BaseException | None = None
        strict.open.append(self)

    def has_ended(self) -> bool:
        """Whether it is over: at random not yet. A thread waits, since Gloo's own answer is no before somebody does."""
        if self not in self.strict.open:
            return True
        if self.waiting is None:
            self.waiting = threading.Thread(target=self._wait, daemon=True)
            self.waiting.start()
        if self.strict.dice.random() < 0.5:
            self.waiting.join(LONGEST_S)
        if self.waiting.is_alive() or self.strict.dice.random() < 0.25:
            return False
        self.strict.seen_to_end += 1
        self.finish()
        return True

    def _wait(self) -> None:
        try:
            for work in self.works:
                work.wait()
        except BaseException as error:
            self.failed = error

    def finish(self) -> None:
        """Wait, check, and give what has arrived to the caller."""
        if self not in self.strict.open:
            return
        self.strict.delay()
        if self.waiting is None:
            self._wait()
        else:
            self.waiting.join()
        if self.failed is not None:
            raise self.failed
        self.strict.open.remove(self)
        for storage, sum_before, again in self.sent:
            if storage.expired():
                raise StrictError(f"{self.title}: what it sends was freed before it was waited for")
            if _sum(again()) != sum_before:
                raise StrictError(f"{self.title}: what it sends was changed before it was waited for")
        for (storage, again), arrived in zip(self.received, self.arrived, strict=True):
            if storage.expired():
                raise StrictError(f"{self.title}: what it receives was freed before it was waited for")
            received = again()
            if not bool((_bytes(received) == POISON).all()):
                raise StrictError(f"{self.title}: what it receives was written to before it was waited for")
            _bytes(received).copy_(_bytes(arrived))
        self.strict.checked += 1


class _Work:
    """What the caller waits on."""

    def __init__(self, opened: _Open) -> None:
        self.opened = opened

    def wait(self, *_: Any) -> bool:
        """Until it has ended."""
        self.opened.finish()
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, without a wait for it."""
        return self.opened.has_ended()


def _again(x: Tensor) -> Callable[[], Tensor]:
    """What makes the tensor anew from its memory, without keeping that alive."""
    reference = StorageWeakRef(x.untyped_storage())
    shape, strides, offset, dtype = x.shape, x.stride(), x.storage_offset(), x.dtype

    def make() -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)

    return make


def _bytes(x: Tensor) -> Tensor:
    """Of a contiguous tensor, in its memory."""
    assert x.is_contiguous()
    return x.detach().view(-1).view(torch.uint8)


def _sum(x: Tensor) -> int:
    return zlib.crc32(memoryview(_bytes(x).numpy()))


def _line() -> str:
    """The innermost lines of the package: file:line in function."""
    frames = [f for f in traceback.extract_stack() if "torch" not in f.filename and f.filename != __file__]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in frames[:-4:-1])


@contextmanager
def strict(seed: int = 0) -> Iterator[Strict]:
    """Inside, all collectives and messages of this process are strict."""
    checks = Strict(seed)

    def gathers(inner: Any) -> Any:
        def call(out: Tensor, x: Tensor, group: Any, async_op: bool = False) -> Any:
            return _run(checks, "all_gather", [x], [out], async_op, lambda s, r: inner(r[0], s[0], group, True))

        return call

    def scatters(inner: Any) -> Any:
        def call(out: Tensor, x: Tensor, group: Any, op: Any = dist.ReduceOp.SUM, async_op: bool = False) -> Any:
            return _run(checks, "reduce_scatter", [x], [out], async_op, lambda s, r: inner(r[0], s[0], group, op, True))

        return call

    def reduces(inner: Any) -> Any:
        def call(x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
            if not x.is_contiguous():
                return inner(x, op, group, async_op)
            copy = x.detach().clone()

            def start(_: Any, arrived: list[Tensor]) -> dist.Work:
                arrived[0].copy_(copy)
                work: dist.Work = inner(arrived[0], op, group, True)
                return work

            return _run(checks, "all_reduce", [], [x], async_op, start)

        return call

    def exchanges(inner: Any) -> Any:
        def call(
            out: Tensor, x: Tensor, received: Any = None, sent: Any = None, group: Any = None, async_op: bool = False
        ) -> Any:
            def start(s: list[Tensor], r: list[Tensor]) -> dist.Work:
                work: dist.Work = inner(r[0], s[0], received, sent, group=group, async_op=True)
                return work

            return _run(checks, "all_to_all", [x], [out], async_op, start)

        return call

    def messages(inner: Any) -> Any:
        def call(operations: list[dist.P2POp]) -> list[_Work]:
            checks.delay()
            opened, started = [], []
            for operation in operations:
                sends = operation.op is dist.isend
                each = _Open(
                    checks,
                    "send" if sends else "receive",
                    *(([operation.tensor], []) if sends else ([], [operation.tensor])),
                )
                stand_in = (each.stand_ins or each.arrived)[0]
                started.append(dist.P2POp(operation.op, stand_in, operation.peer, operation.group))
                opened.append(each)
            works = inner(started)
            for each, work in zip(opened, works, strict=True):
                each.works.append(work)
            return [_Work(each) for each in opened]

        return call

    with ExitStack() as stack:
        for owner, name, made in (
            (compat, "all_gather_into", gathers),
            (compat, "reduce_scatter_into", scatters),
            (dist, "all_reduce", reduces),
            (dist, "all_to_all_single", exchanges),
            (dist, "batch_isend_irecv", messages),
        ):
            stack.enter_context(patch.object(owner, name, made(getattr(owner, name))))
        yield checks
    checks.end()


def _run(
    checks: Strict,
    name: str,
    sent: list[Tensor],
    received: list[Tensor],
    goes_on: bool,
    start: Callable[[list[Tensor], list[Tensor]], dist.Work],
) -> _Work | None:
    checks.delay()
    opened = _Open(checks, name, sent, received)
    opened.works.append(start(opened.stand_ins, opened.arrived))
    if goes_on:
        return _Work(opened)
    opened.finish()
    return None


def under(seed: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """function(*arguments) inside; for processes that are told what to run."""
    with strict(seed):
        return function(*arguments)

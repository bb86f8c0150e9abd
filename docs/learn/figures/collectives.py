"""Every collective of `examples/collectives.py`, run on 2 to 6 ranks: what each holds, and the sends of each step."""

from queue import Queue
from threading import Thread
from typing import Any

from torch import Tensor

from examples.collectives import COLLECTIVES, Wire, start

TITLE = "A collective, step by step"
RANKS = (2, 3, 4, 5, 6)


class Post(dict[tuple[int, int], "Queue[Tensor]"]):
    """A queue for each pair of ranks (from, to)."""

    def __missing__(self, pair: tuple[int, int]) -> "Queue[Tensor]":
        # setdefault is atomic: two threads that ask at once get the same queue.
        return self.setdefault(pair, Queue())


class ThreadWire(Wire):
    """Ranks as threads of this process: a tensor goes through a queue where the example sends it to a process."""

    def __init__(self, rank: int, world: int, post: Post) -> None:
        super().__init__(rank, world)
        self.post = post

    def exchange(self, send: dict[int, Tensor], receive: dict[int, Tensor]) -> None:
        self.step += 1
        for to, tensor in send.items():
            self.sends.append((self.step, self.rank, to, tensor.tolist()))
            self.post[self.rank, to].put(tensor.clone())
        for source, tensor in receive.items():
            tensor.copy_(self.post[source, self.rank].get(timeout=60))


def record(name: str, world: int) -> dict[str, Any]:
    """One collective on `world` ranks with a number of fp32 in each chunk."""
    collective, post = COLLECTIVES[name], Post()
    wires = [ThreadWire(rank, world, post) for rank in range(world)]
    inputs = [start(rank, world, 1) for rank in range(world)]
    if collective.takes_chunk:
        inputs = [x.chunk(world)[rank] for rank, x in enumerate(inputs)]
    outputs: list[Tensor | None] = [None] * world

    def work(rank: int) -> None:
        outputs[rank] = collective.run(wires[rank], inputs[rank].clone())

    threads = [Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sends = sorted(send for wire in wires for send in wire.sends)
    return {
        "before": [x.tolist() for x in inputs],
        "after": [None if y is None else y.tolist() for y in outputs],
        "steps": [[send[1:] for send in sends if send[0] == step] for step in dict.fromkeys(send[0] for send in sends)],
        "sent": [wire.bytes_sent(4) for wire in wires],
    }


def data() -> dict[str, Any]:
    """Collective -> its words, its formula, and for each number of ranks what happens."""
    return {
        name: {
            "does": collective.does,
            "formula": collective.formula,
            "shares": {world: collective.share(world) for world in RANKS},
            "ranks": {world: record(name, world) for world in RANKS},
        }
        for name, collective in COLLECTIVES.items()
    }

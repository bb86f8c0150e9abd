"""Collectives by hand: what each rank holds before and after, who sends what in each step, and how many bytes.

    python examples/collectives.py                                  # all of them, three processes on this machine
    python examples/collectives.py all-reduce --processes 4         # one of them
    torchrun --nproc_per_node 3 examples/collectives.py             # the same, started by torchrun

Every collective is written here with sends and receives alone. Its outcome is compared with torch.distributed's own,
and its bytes, counted at each send, with the formula. Three questions stand at the end, answered by running both sides.
"""

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

ROOT = 0
"""Rank that broadcasts, reduces to itself, gathers and scatters."""
QUESTIONS = "questions"


@dataclass
class Wire:
    """The only way to other ranks. Notes each send as (step, from, to, numbers)."""

    rank: int
    world: int
    step: int = 0
    sends: list[tuple[int, int, int, list[float]]] = field(default_factory=list)

    @property
    def next(self) -> int:
        """The rank after this one on the ring."""
        return (self.rank + 1) % self.world

    @property
    def last(self) -> int:
        """The rank before this one on the ring."""
        return (self.rank - 1) % self.world

    def exchange(self, send: dict[int, Tensor], receive: dict[int, Tensor]) -> None:
        """Send and receive at the same time, as one step of an algorithm. `receive`: rank -> memory for its tensor."""
        self.step += 1
        # A copy leaves: a receive may overwrite what an unfinished send still reads.
        out = {to: tensor.clone() for to, tensor in send.items()}
        calls = [dist.P2POp(dist.isend, tensor, to) for to, tensor in out.items()]
        calls += [dist.P2POp(dist.irecv, tensor, source) for source, tensor in receive.items()]
        self.sends += [(self.step, self.rank, to, tensor.tolist()) for to, tensor in out.items()]
        for work in dist.batch_isend_irecv(calls) if calls else []:
            work.wait()

    def bytes_sent(self, element: int) -> int:
        """Return the bytes that this rank has sent so far. `element`: bytes of a number."""
        return sum(element * len(numbers) for *_, numbers in self.sends)


# The algorithms. `x` (world * k,): world chunks of k numbers. The ring: rank r sends to r + 1 and receives from r - 1.


def broadcast(wire: Wire, x: Tensor, root: int = ROOT) -> Tensor:
    """Pass the root's tensor on along the ring: world - 1 steps."""
    y, distance = x.clone(), (wire.rank - root) % wire.world
    for step in range(wire.world - 1):
        wire.exchange({wire.next: y} if distance == step else {}, {wire.last: y} if distance == step + 1 else {})
    return y


def reduce(wire: Wire, x: Tensor) -> Tensor | None:
    """Add along the ring towards the root, which alone has the sum at the end."""
    total, arrived = x.clone(), torch.empty_like(x)
    distance = (wire.rank - ROOT - 1) % wire.world  # the root is the last
    for step in range(wire.world - 1):
        sends, receives = distance == step, distance == step + 1
        wire.exchange({wire.next: total} if sends else {}, {wire.last: arrived} if receives else {})
        if receives:
            total += arrived
    return total if wire.rank == ROOT else None


def gather(wire: Wire, x: Tensor) -> Tensor | None:
    """Collect chunk r of rank r on the root. Everybody sends to one rank: its link is the bottleneck."""
    y, mine = x.clone().chunk(wire.world), x.chunk(wire.world)[wire.rank]
    others = [rank for rank in range(wire.world) if rank != ROOT]
    if wire.rank == ROOT:
        wire.exchange({}, {rank: y[rank] for rank in others})
        return torch.cat(y)
    wire.exchange({ROOT: mine}, {})
    return None


def scatter(wire: Wire, x: Tensor) -> Tensor:
    """Deal the root's chunks out: rank r gets chunk r."""
    chunks = x.clone().chunk(wire.world)
    if wire.rank == ROOT:
        wire.exchange({rank: chunks[rank] for rank in range(wire.world) if rank != ROOT}, {})
    else:
        wire.exchange({}, {ROOT: chunks[wire.rank]})
    return chunks[wire.rank].clone()


def reduce_scatter(wire: Wire, x: Tensor) -> Tensor:
    """Send a partial sum to the next rank in each step. After world - 1 steps rank r has the whole sum of chunk r."""
    chunks = x.clone().chunk(wire.world)
    arrived = torch.empty_like(chunks[0])
    for step in range(wire.world - 1):
        wire.exchange(
            {wire.next: chunks[(wire.rank - step - 1) % wire.world]},
            {wire.last: arrived},
        )
        chunks[(wire.rank - step - 2) % wire.world].add_(arrived)
    return chunks[wire.rank].clone()


def all_gather(wire: Wire, chunk: Tensor) -> Tensor:
    """Pass chunks on along the ring: world - 1 steps, in each of which all links carry one chunk."""
    y = torch.zeros(wire.world * len(chunk), dtype=chunk.dtype)
    chunks = y.chunk(wire.world)
    chunks[wire.rank].copy_(chunk)
    for step in range(wire.world - 1):
        wire.exchange(
            {wire.next: chunks[(wire.rank - step) % wire.world]},
            {wire.last: chunks[(wire.rank - step - 1) % wire.world]},
        )
    return y


def all_reduce(wire: Wire, x: Tensor) -> Tensor:
    """Reduce-scatter, then all-gather: every link carries (world - 1) / world of the tensor twice."""
    return all_gather(wire, reduce_scatter(wire, x))


def all_to_all(wire: Wire, x: Tensor) -> Tensor:
    """Send chunk c to rank c, and put what rank s sent at place s: a transposition of (rank, chunk)."""
    y = x.clone()
    chunks, arrived = x.chunk(wire.world), y.chunk(wire.world)
    others = [rank for rank in range(wire.world) if rank != wire.rank]
    wire.exchange({rank: chunks[rank] for rank in others}, {rank: arrived[rank] for rank in others})
    return y


def torch_outcome(name: str, x: Tensor, rank: int, world: int) -> Tensor | None:
    """Return the outcome of torch.distributed's own collective."""
    y, mine = x.clone(), x.chunk(world)[rank].clone()
    if name == "broadcast":
        dist.broadcast(y, ROOT)
    elif name == "reduce":
        dist.reduce(y, ROOT)
        return y if rank == ROOT else None
    elif name == "gather":
        parts = list(torch.empty_like(x).chunk(world)) if rank == ROOT else None
        dist.gather(mine, parts, ROOT)
        return torch.cat(parts) if parts else None
    elif name == "scatter":
        dist.scatter(mine, list(y.chunk(world)) if rank == ROOT else None, ROOT)
        return mine
    elif name == "reduce-scatter":
        dist.all_reduce(y)  # gloo of torch 2.11 has no reduce-scatter
        return y.chunk(world)[rank].clone()
    elif name == "all-gather":
        dist.all_gather(list(y.chunk(world)), mine)
    elif name == "all-reduce":
        dist.all_reduce(y)
    else:
        sent = [x.chunk(world)[to].clone() for to in range(world)]
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, sent)
        return torch.cat([parts[rank] for parts in gathered])
    return y


@dataclass(frozen=True)
class Collective:
    """One collective."""

    run: Callable[[Wire, Tensor], Tensor | None]
    does: str
    formula: str
    """Bytes that the busiest rank sends, for n ranks and S bytes of the whole tensor."""
    share: Callable[[int], float]
    """The same as a share of S."""
    takes_chunk: bool = False
    """The input is the rank's chunk, not the whole tensor."""


COLLECTIVES = {
    "broadcast": Collective(broadcast, "all get the root's tensor", "S", lambda n: 1),
    "reduce": Collective(reduce, "the root gets the sum", "S", lambda n: 1),
    "all-reduce": Collective(all_reduce, "all get the sum", "2 (n-1)/n S", lambda n: 2 * (n - 1) / n),
    "gather": Collective(gather, "the root gets a chunk of each", "S/n", lambda n: 1 / n),
    "scatter": Collective(scatter, "each gets a chunk of the root's", "(n-1)/n S", lambda n: (n - 1) / n),
    "all-gather": Collective(all_gather, "all get a chunk of each", "(n-1)/n S", lambda n: (n - 1) / n, True),
    "reduce-scatter": Collective(reduce_scatter, "each gets a chunk of the sum", "(n-1)/n S", lambda n: (n - 1) / n),
    "all-to-all": Collective(all_to_all, "each sends a chunk to each", "(n-1)/n S", lambda n: (n - 1) / n),
}


def start(rank: int, world: int, chunk: int) -> Tensor:
    """Return the tensor of a rank before: 11 12 13 on rank 0, 21 22 23 on rank 1, ..."""
    return torch.tensor([10.0 * (rank + 1) + n + 1 for n in range(world * chunk)])


def run_one(name: str, rank: int, world: int, chunk: int) -> dict[str, Any]:
    """Run a collective on all ranks and return its record."""
    collective, x = COLLECTIVES[name], start(rank, world, chunk)
    before = x.chunk(world)[rank] if collective.takes_chunk else x
    wire = Wire(rank, world)
    after = collective.run(wire, before)
    expected = torch_outcome(name, x, rank, world)
    equal = after is expected if after is None or expected is None else torch.equal(after, expected)
    mine = {
        "before": before.tolist(), "after": None if after is None else after.tolist(), "sends": wire.sends,
        "bytes": wire.bytes_sent(x.element_size()), "equal": equal,
    }  # fmt: skip
    ranks: list[Any] = [None] * world
    dist.all_gather_object(ranks, mine)
    whole = x.numel() * x.element_size()
    return {
        "collective": name, "does": collective.does, "ranks": ranks, "bytes_of_tensor": whole,
        "most_bytes": max(each["bytes"] for each in ranks), "formula": collective.formula,
        "formula_bytes": collective.share(world) * whole, "equal_to_torch": all(each["equal"] for each in ranks),
    }  # fmt: skip


def answer_questions(rank: int, world: int, chunk: int) -> list[dict[str, Any]]:
    """Run both sides of three identities. Return whether they are equal, and their bytes: of all ranks, and in turn.

    Bytes in turn: the longest send of each step, one step after the other. It decides the time where links are alike.
    """
    x = start(rank, world, chunk)
    mine = x.chunk(world)[rank]
    ring, broadcasts, in_parts, by_root = (Wire(rank, world) for _ in range(4))
    gathered = all_gather(ring, mine)
    one_by_one = torch.cat([broadcast(broadcasts, mine, root) for root in range(world)])
    summed = all_gather(in_parts, reduce_scatter(in_parts, x))
    torch_sum = x.clone()
    dist.all_reduce(torch_sum)
    total = reduce(by_root, x)
    shared = broadcast(by_root, x if total is None else total)
    checks = {
        "Is an all-gather n broadcasts, one from each rank?": (torch.equal(gathered, one_by_one), ring, broadcasts),
        "Is an all-reduce a reduce-scatter, then an all-gather?": (torch.equal(torch_sum, summed), None, in_parts),
        "Is it a reduce, then a broadcast, too?": (torch.equal(shared, summed), in_parts, by_root),
    }  # fmt: skip
    answers = []
    for question, (equal, *wires) in checks.items():
        sides: list[Any] = [None] * world
        sizes = [[(step, 4 * len(numbers)) for step, _, _, numbers in wire.sends] if wire else [] for wire in wires]
        dist.all_gather_object(sides, (equal, sizes))
        counted = []
        for side in zip(*(parts for _, parts in sides), strict=True):
            sends = [send for part in side for send in part]
            longest = {step: max(size for at, size in sends if at == step) for step, _ in sends}
            counted.append({"all_ranks": sum(size for _, size in sends), "in_turn": sum(longest.values())})
        equal_everywhere = all(same for same, _ in sides)
        answers.append({"question": question, "equal": equal_everywhere, "bytes": counted[wires[0] is None :]})
    return answers


def print_collective(record: dict[str, Any]) -> None:
    """Print what each rank holds before and after, each step's sends, and the bytes."""
    ranks = record["ranks"]
    print(f"\n{record['collective']}: {record['does']}")
    width = max(len(_numbers(each["before"])) for each in ranks)
    print(f"  {'':8}{'before':{width}}    after")
    for rank, each in enumerate(ranks):
        print(f"  rank {rank}  {_numbers(each['before']):{width}}    {_numbers(each['after'])}")
    sends = sorted(tuple(send) for each in ranks for send in each["sends"])
    for step in dict.fromkeys(send[0] for send in sends):
        moves = [f"{source} -> {to}: {_numbers(numbers)}" for at, source, to, numbers in sends if at == step]
        print(f"  step {step}   " + ",   ".join(moves))
    judged = "equal to" if record["equal_to_torch"] else "NOT EQUAL to"
    print(
        f"  the busiest rank sends {record['most_bytes']} bytes; {record['formula']} = {record['formula_bytes']:g}; "
        f"{judged} torch.distributed"
    )


def _numbers(numbers: list[float] | None) -> str:
    return "-" if numbers is None else " ".join(f"{number:g}" for number in numbers)


def print_answer(answer: dict[str, Any]) -> None:
    """Print a question and what running both sides says."""
    print(f"\n{answer['question']}")
    everywhere = " and ".join(f"{side['all_ranks']}" for side in answer["bytes"])
    in_turn = " and ".join(f"{side['in_turn']}" for side in answer["bytes"])
    print(f"  {'Yes' if answer['equal'] else 'No'}: equal numbers on every rank.")
    print(f"  Bytes of all ranks: {everywhere}; of them in turn, one step after the other: {in_turn}.")


def work(rank: int, world: int, options: argparse.Namespace) -> None:
    """Run what was asked for as one rank. Rank 0 prints."""
    dist.init_process_group("gloo", rank=rank, world_size=world)
    names = options.names or [*COLLECTIVES, QUESTIONS]
    records = [run_one(name, rank, world, options.chunk) for name in names if name != QUESTIONS]
    answers = answer_questions(rank, world, options.chunk) if QUESTIONS in names else []
    dist.destroy_process_group()
    if rank == 0 and options.json:
        print(json.dumps({"processes": world, "collectives": records, "questions": answers}))
    elif rank == 0:
        size = world * options.chunk
        print(f"{world} processes; S = {4 * size} bytes: {size} numbers of fp32, a chunk is {options.chunk} of them")
        for record in records:
            print_collective(record)
        for answer in answers:
            print_answer(answer)
    if not all(record["equal_to_torch"] for record in records) or not all(answer["equal"] for answer in answers):
        sys.exit(1)


def main() -> None:
    """Join torchrun's processes, or start some."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=", ".join([*COLLECTIVES, QUESTIONS]) + "; default: all"
    )
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=1, help="numbers of a chunk")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in (*COLLECTIVES, QUESTIONS)]:
        parser.error(f"{unknown[0]} is none of {', '.join([*COLLECTIVES, QUESTIONS])}")
    if not 1 <= options.processes <= 64 or options.chunk < 1:
        parser.error("--processes is 1 to 64, and --chunk 1 or more")
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    mp.spawn(work, (options.processes, options), nprocs=options.processes)


if __name__ == "__main__":
    main()

"""Ranks that serve one model together, each with a part of every layer (parallel/axes/tensor.py) and of the cache.

Rank 0 schedules and samples. Before each step it sends the step to the others. All compute it, and logits of the parts
of the vocabulary are gathered on rank 0. Other ranks know no requests: they `follow`.

Messages are integers, in one broadcast on the host, or two if there are many, and never objects.

Rank 0 also reads adapters, and broadcasts each tensor whole. Every rank cuts out its part as in training
(spec/weights/boxes.py): A is split like its matrix's inputs, B like the outputs, and experts like their stacks. First
come integers: the adapter's number, its rank, and which of its possible tensors it has.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum, auto
from math import prod
from typing import TypeVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.model.transformer import Transformer
from meshwright.parallel.groups.group import Group, is_lost_connection
from meshwright.parallel.groups.mesh import Mesh
from meshwright.serving.engine.rows.request_adapters import RequestAdapters, possible_parts
from meshwright.spec.errors import RunError, is_out_of_memory
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import LoRAShape, ModelShape
from meshwright.spec.weights.boxes import boxes_of, share


def adapter_words(number: int, tensors: Mapping[str, Tensor], lora: LoRAShape, shape: ModelShape) -> list[int]:
    """Return the integers that AdapterRoom reads."""
    parts = possible_parts(shape, lora.rank)
    return [number, lora.rank, *(index for index, part in enumerate(parts) if part.name in tensors)]


@final
class AdapterRoom:
    """Memory for this rank's part of an adapter, allocated before any tensor is sent."""

    def __init__(self, words: Sequence[int], shape: ModelShape, layout: Layout, rank: int, dtype: torch.dtype) -> None:
        """Allocate the memory. `words`: see adapter_words."""
        self.number, width, *indices = words
        known = possible_parts(shape, width)
        self._wanted = [known[index] for index in indices]
        self._boxes = boxes_of(self._wanted, shape, layout, rank)
        self._local = {name: torch.empty(box.sizes, dtype=dtype) for name, box in self._boxes.items()}
        # One buffer for the largest tensor: parts arrive one by one, and are cut out of it.
        self._whole = torch.empty(max((prod(part.shape) for part in self._wanted), default=0), dtype=dtype)

    def receive(self, tensors: Mapping[str, Tensor] | None, group: Group) -> dict[str, Tensor]:
        """Receive this rank's part of whole `tensors`, which only rank 0 has."""
        for part in self._wanted:
            whole = self._whole[: prod(part.shape)].view(part.shape)
            if tensors is not None:
                whole.copy_(tensors[part.name])
            # As bytes: the collective of a CPU does not know every dtype.
            group.broadcast(whole.view(torch.uint8))
            self._local[part.name].copy_(whole[self._boxes[part.name].slices])
        return self._local


T = TypeVar("T")
FIRST_NUMBERS = 1024
"""Integers of the first broadcast."""


class RankCommand(IntEnum):
    """Commands of rank 0 to the others."""

    SETUP = auto()
    """Settings of the runner: RunnerSetup in runner.py."""
    STEP = auto()
    """A step to compute: StepWriter in runner.py."""
    CLEAR = auto()
    """Blocks to set to zero."""
    ADAPTER = auto()
    """An adapter to load: adapter_words."""
    DROP = auto()
    """Number of an adapter to drop."""
    END = auto()
    """No more commands follow."""


@final
class ServingRanks:
    """The ranks of one group, as seen by one of them."""

    def __init__(self, mesh: Mesh, model: Transformer) -> None:
        """Take this rank's part of the model. The mesh has at least two ranks, all of them tp."""
        group = mesh["tp"]
        self._group, self._layout, self._shape, self._vocab = group, mesh.layout, model.shape, model.shape.vocab
        self._dtype = model.embed.weight.dtype
        self.size = group.size
        self.leads = group.index == 0
        """True on the rank that schedules."""
        self.row_multiple = group.size if model.seams.dense.gathers else 1
        """Rows of a pass are a multiple of this."""
        self.broken = False
        """True when a step has failed, or a rank is gone.

        Ranks are then out of step, and nothing more can be sent. Another thread may set it.
        """

    @property
    def _lost_message(self) -> str:
        return f"another one of the {self.size} ranks that serve this model has ended: start all of them again"

    @contextmanager
    def together(self) -> Iterator[None]:
        """Guard what all ranks do. Raises RunError when one of them is gone."""
        try:
            yield
        except BaseException as error:
            # Even if the error is ours: the others now wait in a collective that this rank left.
            self.broken = True
            if not is_lost_connection(error):
                raise
            raise RunError(self._lost_message) from error

    def send(self, kind: RankCommand, words: Sequence[int] = ()) -> None:
        """Send a command to all other ranks, which `receive` it."""
        if self.broken:
            raise RunError(self._lost_message)
        numbers = [kind, len(words), *words]
        # Receivers must know the size beforehand, so the first broadcast has a fixed one.
        numbers += [0] * (FIRST_NUMBERS - len(numbers))
        with self.together():
            self._group.broadcast(torch.tensor(numbers[:FIRST_NUMBERS]))
            if len(numbers) > FIRST_NUMBERS:
                self._group.broadcast(torch.tensor(numbers[FIRST_NUMBERS:]))

    def receive(self) -> tuple[RankCommand, list[int]]:
        """Wait for rank 0's next command."""
        with self.together():
            kind, length, *words = self._group.broadcast(torch.zeros(FIRST_NUMBERS, dtype=torch.int64)).tolist()
            if length > len(words):
                more = torch.zeros(length - len(words), dtype=torch.int64)
                words += self._group.broadcast(more).tolist()
        return RankCommand(kind), words[:length]

    def share_adapter(
        self, number: int, tensors: Mapping[str, Tensor], lora: LoRAShape, adapters: RequestAdapters
    ) -> bool:  # fmt: skip
        """Give all ranks their part of an adapter's whole tensors. See take_adapter."""
        words = adapter_words(number, tensors, lora, self._shape)
        self.send(RankCommand.ADAPTER, words)
        return self.take_adapter(words, adapters, tensors)

    def take_adapter(
        self, words: Sequence[int], adapters: RequestAdapters, tensors: Mapping[str, Tensor] | None = None
    ) -> bool:  # fmt: skip
        """Load this rank's part of an adapter after command ADAPTER. Rank 0 passes the `tensors`.

        Return False on all ranks, and have it on none, when one has no memory for its part.
        """
        with self.together():
            # Memory comes first, on all ranks: one that failed in the middle would leave the others waiting.
            room = self._on_all(lambda: AdapterRoom(words, self._shape, self._layout, self._group.index, self._dtype))
            if room is None:
                return False
            tensors_here = room.receive(tensors, self._group)

            def put() -> bool:
                adapters.put(room.number, tensors_here)
                return True

            if self._on_all(put):
                return True
            # Another rank had no memory. An adapter that only some ranks have would hang the next step.
            adapters.drop(room.number)
            return False

    def _on_all(self, work: Callable[[], T]) -> T | None:
        """Return the outcome of `work`, or None on all ranks when one has no memory for it."""
        outcome = None
        try:
            outcome = work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        lacking = self._group.all_reduce(torch.tensor(int(outcome is None)), "max")
        return None if lacking else outcome

    def drop_adapter(self, number: int) -> None:
        """Let all other ranks drop an adapter."""
        self.send(RankCommand.DROP, [number])

    def gather_logits(self, part: Tensor) -> Tensor:
        """Gather logits (R, V) from the ranks' parts (R, share of V), on all ranks."""
        most, sizes = self._sizes()
        # all_gather takes equal parts, and a vocabulary need not divide by the ranks.
        padded = self._group.all_gather(F.pad(part, (0, most - part.shape[1]))[None])
        return torch.cat([part_logits[:, :size] for part_logits, size in zip(padded, sizes, strict=True)], dim=1)

    def gather_on_rank_zero(self, part: Tensor) -> Tensor:
        """Gather logits (R, V) on rank 0. Other ranks get their own part."""
        if not self.leads:
            self._group.exchange([(part.contiguous(), 0)], [])[0].wait()
            return part
        _, sizes = self._sizes()
        parts = [part, *(part.new_empty(len(part), size) for size in sizes[1:])]
        for work in self._group.exchange([], [(buffer, rank) for rank, buffer in enumerate(parts) if rank]):
            work.wait()
        return torch.cat(parts, dim=1)

    def _sizes(self) -> tuple[int, list[int]]:
        sizes = [share(self._vocab, self.size, rank)[1] for rank in range(self.size)]
        return max(sizes), sizes

"""Ranks that serve one model together, each with a part of every layer (parallel/tensor.py) and of the cache.

The first rank schedules and samples. Before each step it says to the others what the step computes; all compute it, and
logits of the parts of the vocabulary come together on the first. Other ranks know no requests: they `follow`.

What is said are whole numbers, in one broadcast on the host, or two where they are many: never objects.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum, auto
from typing import TypeVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.model.transformer import Transformer
from meshwright.parallel.group import is_lost_connection
from meshwright.parallel.mesh import Mesh
from meshwright.serve.adapter_shares import AdapterRoom, adapter_words
from meshwright.serve.request_adapters import RequestAdapters
from meshwright.spec.boxes import share
from meshwright.spec.errors import RunError, is_out_of_memory
from meshwright.spec.lora import LoRAShape

T = TypeVar("T")
FIRST = 1024
"""Numbers of the first broadcast."""


class RankCommand(IntEnum):
    """What the first rank asks of the others."""

    SETUP = auto()
    """How steps are computed: runner_setup.py."""
    STEP = auto()
    """What one computes: step_words.py."""
    CLEAR = auto()
    """Blocks that become zero."""
    ADAPTER = auto()
    """One is loaded: adapter_shares.py."""
    DROP = auto()
    """Number of an adapter that nobody needs any more."""
    END = auto()
    """There are no more."""


@final
class ServingRanks:
    """The ranks of one group, as one of them sees them."""

    def __init__(self, mesh: Mesh, model: Transformer) -> None:
        """`model`: this rank's part. The mesh has at least two ranks, of which tp are all."""
        group = mesh["tp"]
        self._group, self._layout, self._shape, self._vocab = group, mesh.layout, model.shape, model.shape.vocab
        self._dtype = model.embed.weight.dtype
        self.size = group.size
        self.leads = group.index == 0
        """Whether this is the rank that schedules."""
        self.row_multiple = group.size if model.seams.dense.gathers else 1
        """What the rows of a pass are a multiple of."""
        self.broken = False
        """Whether a step has failed, or a rank is gone: ranks stand at different places, and nothing more can be said.
        Another thread may set it."""

    @property
    def _gone(self) -> str:
        return f"another one of the {self.size} ranks that serve this model has ended: start all of them again"

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do. RunError: one of them is gone."""
        try:
            yield
        except BaseException as error:
            self.broken = True
            if not is_lost_connection(error):
                raise
            raise RunError(self._gone) from error

    def say(self, kind: RankCommand, words: Sequence[int] = ()) -> None:
        """To all others, who `hear` it."""
        if self.broken:
            raise RunError(self._gone)
        said = [kind, len(words), *words]
        said += [0] * (FIRST - len(said))
        with self.together():
            self._group.broadcast(torch.tensor(said[:FIRST]))
            if len(said) > FIRST:
                self._group.broadcast(torch.tensor(said[FIRST:]))

    def hear(self) -> tuple[RankCommand, list[int]]:
        """What the first rank says next; waits for it."""
        with self.together():
            kind, length, *words = self._group.broadcast(torch.zeros(FIRST, dtype=torch.int64)).tolist()
            if length > len(words):
                more = torch.zeros(length - len(words), dtype=torch.int64)
                words += self._group.broadcast(more).tolist()
        return RankCommand(kind), words[:length]

    def share_adapter(
        self, number: int, tensors: Mapping[str, Tensor], lora: LoRAShape, beside: RequestAdapters
    ) -> bool:  # fmt: skip
        """Let all ranks have their part of an adapter's whole tensors `beside` the model; see take_adapter."""
        words = adapter_words(number, tensors, lora, self._shape)
        self.say(RankCommand.ADAPTER, words)
        return self.take_adapter(words, beside, tensors)

    def take_adapter(
        self, words: Sequence[int], beside: RequestAdapters, tensors: Mapping[str, Tensor] | None = None
    ) -> bool:  # fmt: skip
        """The same on a rank that has heard the words of ADAPTER; the first one has the `tensors`. False on all ranks
        where one has no memory for its part: then none has it."""
        with self.together():
            room = self._on_all(
                lambda: AdapterRoom(words, self._shape, self._layout, self._group.index, self._dtype)
            )  # fmt: skip
            if room is None:
                return False
            own = room.filled(tensors, self._group)

            def put() -> bool:
                beside.put(room.number, own)
                return True

            if self._on_all(put):
                return True
            beside.drop(room.number)
            return False

    def _on_all(self, do: Callable[[], T]) -> T | None:
        """What it finds; None on all ranks where one has no memory for it."""
        found = None
        try:
            found = do()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        lacking = self._group.all_reduce(torch.tensor(int(found is None)), "max")
        return None if lacking else found

    def drop_adapter(self, number: int) -> None:
        """Let no other rank have it any more."""
        self.say(RankCommand.DROP, [number])

    def whole_logits(self, part: Tensor) -> Tensor:
        """(R, V) of this rank's part (R, share of V), on all ranks."""
        most, sizes = self._sizes()
        padded = self._group.all_gather(F.pad(part, (0, most - part.shape[1]))[None])
        return torch.cat([one[:, :size] for one, size in zip(padded, sizes, strict=True)], dim=1)

    def first_rank_logits(self, part: Tensor) -> Tensor:
        """The same on the first rank; on others their part."""
        if not self.leads:
            self._group.exchange([(part.contiguous(), 0)], [])[0].wait()
            return part
        _, sizes = self._sizes()
        parts = [part, *(part.new_empty(len(part), size) for size in sizes[1:])]
        for work in self._group.exchange([], [(one, place) for place, one in enumerate(parts) if place]):
            work.wait()
        return torch.cat(parts, dim=1)

    def _sizes(self) -> tuple[int, list[int]]:
        sizes = [share(self._vocab, self.size, place)[1] for place in range(self.size)]
        return max(sizes), sizes

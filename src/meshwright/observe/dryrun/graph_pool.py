"""The memory that CUDA graphs keep between passes (layout.cuda_graphs), in a dry run: what a pass takes at the most is
held while none runs, since all graphs share one pool and nothing else may use it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from meshwright.observe.dryrun.storage_tracker import StorageWatch
from meshwright.parallel.graph_capture import NoCapture
from meshwright.parallel.pass_graphs import PassGraphs
from meshwright.spec.purpose import takes


class GraphPool(NoCapture):
    """Stands in for what captures; passes run as they are, in memory that is given back for them."""

    def __init__(self, watch: StorageWatch) -> None:
        self.watch, self.size_bytes = watch, 0
        self._held: Tensor | None = None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """A pass."""
        self._held = None
        before = self.watch.now
        yield
        self.size_bytes = max(self.size_bytes, self.watch.rise(before))
        self._held = _memory(self.size_bytes)


@takes("buffers")
def _memory(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def hold_pool(graphs: PassGraphs | None, watch: StorageWatch) -> None:
    """Have graphs keep the memory of their passes, as on a GPU."""
    if graphs is not None:
        graphs.capture = GraphPool(watch)

"""Compiled blocks in a dry run: the code that torch.compile writes for a GPU's kernels, on tensors without values.

What compiled code keeps and takes is not what the blocks' operations take one by one: norms, activations and repeated
keys are made again in the backward pass, which is one program with buffers of its own. It is lowered as on a GPU, its
memory taken as it says, and its kernels left out.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshwright import compat
from meshwright.compat import lowering
from meshwright.observe.dryrun.storage_tracker import StorageWatch
from meshwright.planner.cost.stack import TUNING_BYTES
from meshwright.spec.purpose import takes

_log = logging.getLogger("meshwright")


class LoweredBlocks:
    """Makes functions of compiled blocks for a watch, in a mode of fake tensors."""

    def __init__(self, fake: Any, watch: StorageWatch) -> None:
        self.fake, self.watch = fake, watch
        self.is_beyond = False
        """Whether the compiler has refused a block."""

    def compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """As torch.compile. Without gradients it runs as it is: no such pass holds most."""
        code = lowering.lowered(call, self._watched, _TunedKernel)

        def run(*given: Any) -> Any:
            if not torch.is_grad_enabled() or self.is_beyond:
                return call(*given)
            try:
                with compat.real_tensors(), self.fake:
                    return code(*given)
            except Exception as error:  # compilers fail in many ways, and a run then does not end before it begins
                self.is_beyond = True
                _log.warning(
                    "meshwright: note: a dry run cannot lower these blocks and counts them uncompiled (%s)",
                    str(error).partition("\n")[0],
                )
                return call(*given)

        return run

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """A pass, forward where the watch has been left for the compiler, backward where it has not."""
        with compat.real_tensors(), self.fake, self.watch:
            yield


class _TunedKernel:
    """A kernel of Triton, for which several sizes of blocks are tried at its first call, each with a buffer that
    empties the cache of the device. What it overwrites is copied to the host where a copy beside it would be the peak
    (torch 2.11 to 2.13, _inductor/runtime/triton_heuristics.py and benchmarking.py)."""

    def __init__(self) -> None:
        self.is_tuned = False

    def __call__(self) -> None:
        if not self.is_tuned:
            self.is_tuned = True
            _empty_cache()


@takes("temporaries")
def _empty_cache() -> None:
    torch.empty(TUNING_BYTES, dtype=torch.uint8, device="cpu")

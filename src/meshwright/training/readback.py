"""Numbers on their way from the device to the host: the copy is begun at once, and waited for when they are read."""

from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.training import step_clock


class Readback:
    """Some small fp32 tensors by name. `read` is the only place where a training step waits for the device."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._sizes = {name: value.numel() for name, value in values.items()}
        packed = torch.cat([value.detach().reshape(-1) for value in values.values()])
        self._host = packed.to("cpu", non_blocking=True)  # page-locked memory, where it comes from a GPU
        self.border = step_clock.mark_border(packed.device)
        """Behind the step and the copy."""

    def read(self) -> dict[str, list[float]]:
        """Waits until the device has come so far."""
        self.border.wait()
        numbers, found = self._host.tolist(), {}
        for name, size in self._sizes.items():
            found[name], numbers = numbers[:size], numbers[size:]
        return found

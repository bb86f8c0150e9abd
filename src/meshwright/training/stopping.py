"""How ranks agree to stop: all after the same step, whichever of them was asked or could not save."""

import torch
from torch import Tensor

from meshwright.parallel.group import Group
from meshwright.store.saver import Saver
from meshwright.training.interrupt import Interrupt

SIGNALS = ("SIGINT", "SIGTERM")
"""What may have asked a run to end; of two the first is named."""


class StopAgreement:
    """Whether any rank was asked to stop, or failed to write a checkpoint behind the training.

    Ranks say so to each other with every step (`begin`), and hear of it when the step's numbers are read (`hear`), so
    that no rank waits. While no step is under way they ask at once.
    """

    def __init__(self, world: Group, device: torch.device, stop: Interrupt, saver: Saver) -> None:
        self.world, self.device, self.stop, self.saver = world, device, stop, saver
        self.agreed: str | None = None
        """The signal for which all end before the last step, the same on every rank."""
        self._heard = [0.0] * (1 + len(SIGNALS))

    def begin(self) -> Tensor:
        """fp32: 1.0 where any rank failed, and for each of SIGNALS that any rank had."""
        flags = (bool(self.saver.failed()), *(self.stop.requested == signal for signal in SIGNALS))
        told = torch.stack([torch.full((), float(flag), device=self.device) for flag in flags])
        return self.world.all_reduce(told, "max")

    def hear(self, found: list[float]) -> None:
        """What `begin` gave, once it is on the host."""
        self._heard = found

    def reached(self, *, under_way: bool) -> bool:
        """Whether all end now. CheckpointError on all where one could not write. `under_way`: a step has begun whose
        numbers were not read."""
        asked, failed = self.stop.requested, bool(self.saver.failed())
        if self.world.size > 1:
            heard = self._heard if under_way else self.begin().tolist()
            asked = next((signal for signal, any_rank in zip(SIGNALS, heard[1:], strict=True) if any_rank), None)
            failed = bool(heard[0])
        if failed:
            self.saver.give_up()
        if asked is not None:  # a signal that came meanwhile stays for the next step
            self.agreed = self.stop.requested = asked
        return asked is not None

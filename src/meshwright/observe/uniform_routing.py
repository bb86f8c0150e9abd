"""How tokens go to experts in a run whose routers have no numbers: stated instead of computed."""

from dataclasses import dataclass

from torch import Tensor

from meshwright.parallel.group import Group
from meshwright.spec.errors import PlanError


@dataclass(frozen=True, slots=True)
class Routing:
    """Every rank sends this rank's experts `load` times an even share of its rows, and the others share the rest."""

    group: Group
    load: float = 1.0

    def counts(self, counts: Tensor, rows: int) -> list[list[int]]:
        """In the place of model.seams.counts_on_host: counts (1 or 2, X), of rows that leave and of those that arrive.

        PlanError where no expert elsewhere could give up so much.
        """
        experts = counts.shape[1]
        leaving = self._dealt(rows, experts)
        if len(counts) == 1:
            return [leaving]
        local = experts // self.group.size
        mine = leaving[self.group.index * local : (self.group.index + 1) * local]
        return [leaving, mine * self.group.size]

    def _dealt(self, rows: int, experts: int) -> list[int]:
        """Rows of one rank over all experts, the first ones taking what cannot be shared."""
        local = experts // self.group.size
        begin = self.group.index * local
        if self.load == 1.0 or local == experts:
            return _even(rows, experts)
        here = round(rows * local / experts * self.load)
        if not 0 <= here <= rows:
            raise PlanError(
                f"a load of {self.load:g} on one of {self.group.size} ranks is more than all rows: take less"
            )
        others = _even(rows - here, experts - local)
        return others[:begin] + _even(here, local) + others[begin:]


def _even(rows: int, places: int) -> list[int]:
    return [rows // places + (place < rows % places) for place in range(places)]

"""One half of the explorer's page: a model on a cluster, with the software that trains it and what a device costs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.planner.search.regions import Fixed
from meshwright.planner.step.predict import Estimator
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.spec.shape import ModelShape

FileSettings = Mapping[str, Mapping[str, str]]
"""File -> option -> how it is written, as `--tensor-model-parallel-size 8`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareRules:
    """Another training software: which layouts it offers, and how its files state one."""

    word: str
    """As `--for` takes it."""
    title: str
    fixed: Fixed
    """What restricts the map to its layouts."""
    refusals: tuple[Callable[[ModelShape, Layout], str], ...]
    """Each says why there is no such layout, or nothing."""
    settings: Callable[[Plan], FileSettings]
    """All that its files say of a plan."""
    known_errors: tuple[str, ...] = ()
    """Sentences: how far the planner is off, and what it cannot predict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """What a half of the page is about. The plan's layout does not matter."""

    plan: Plan
    of: Estimator
    command: str = ""
    """Of `meshwright plan`, what asks about the same model and cluster, for the page to complete; empty = none."""
    software: SoftwareRules | None = None
    """None = this package's own engine."""
    usd_per_hour: float = 0.0
    """Of one device; 0 = not known."""
    price_words: str = ""
    """Who asks that price, and when it was read."""

    @property
    def title(self) -> str:
        """The devices, and the software that is not this package's own."""
        cluster = self.plan.cluster
        return f"{cluster.devices} {cluster.device.name}" + (f", {self.software.word}" if self.software else "")

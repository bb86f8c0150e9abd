"""One half of the explorer's page: a model on a cluster, its training software, and the price of a device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.planner.search.regions import Fixed
from meshwright.planner.step.predict import Estimator
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.plan.plan import Plan

FileSettings = Mapping[str, Mapping[str, str]]
"""File -> option -> its text, as `--tensor-model-parallel-size 8`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareRules:
    """Another training software: the layouts it offers, and how its files state one."""

    word: str
    """Name, as `--for` takes it."""
    title: str
    fixed: Fixed
    """Restriction of the map to its layouts."""
    refusals: tuple[Callable[[ModelShape, Layout], str], ...]
    """Functions that each return the reason why there is no such layout, or an empty text."""
    settings: Callable[[Plan], FileSettings]
    """Function that returns all settings of a plan in its files."""
    known_errors: tuple[str, ...] = ()
    """Sentences on the planner's known errors, and on what it cannot predict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """Subject of a half of the page. The plan's layout does not matter."""

    plan: Plan
    estimator: Estimator
    command: str = ""
    """A `meshwright plan` command for the same model and cluster, which the page completes. Empty = none."""
    software: SoftwareRules | None = None
    """None = this package's own engine."""
    usd_per_hour: float = 0.0
    """Price of one device. 0 = not known."""
    price_words: str = ""
    """Provider of that price, and the day on which it was read."""

    @property
    def title(self) -> str:
        """The devices, and the software if it is not this package's own."""
        cluster = self.plan.cluster
        return f"{cluster.devices} {cluster.device.name}" + (f", {self.software.word}" if self.software else "")

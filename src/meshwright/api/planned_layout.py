"""A layout with its predicted cost."""

from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from meshwright import planfile
from meshwright.api.arguments import checked
from meshwright.api.markup import line, memory_bar, step_length, time_bar, whole
from meshwright.planner.explain import layout_words, range_words
from meshwright.planner.search.recommend import is_bold
from meshwright.planner.step.error_ranges import Ranges, fit_probability, ranges
from meshwright.planner.step.prediction import Prediction, usable_bytes
from meshwright.spec import Layout, Plan
from meshwright.spec.errors import ArgumentError
from meshwright.spec.units import count, gib


@dataclass(frozen=True, kw_only=True, repr=False)
class PlannedLayout:
    """One layout, with the predicted cost of a step."""

    prediction: Prediction
    tokens: float = 0.0
    """Token budget of the run, 0 = none."""

    @property
    def plan(self) -> Plan:
        """The plan, for `train`, `dry_run` and `profile`."""
        return self.prediction.plan

    @property
    def layout(self) -> Layout:
        """Its degrees."""
        return self.plan.layout

    @property
    def words(self) -> str:
        """The layout as it is printed."""
        return layout_words(self.layout)

    @property
    def step_seconds(self) -> float:
        """Time of one optimizer step."""
        return self.prediction.step_s

    @property
    def tokens_per_second_per_device(self) -> float:
        """Throughput, to compare with others."""
        return self.prediction.tokens_per_s_per_device

    @property
    def mfu_causal(self) -> float:
        """Share of the datasheet's peak, with attention counted by half."""
        return self.prediction.mfu(causal=True)

    @property
    def mfu_full(self) -> float:
        """Share of the datasheet's peak, with attention counted in full."""
        return self.prediction.mfu(causal=False)

    @property
    def bubble_fraction(self) -> float:
        """Waiting in the pipeline, over the work of the busiest rank."""
        return self.prediction.bubble_fraction

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the fullest rank."""
        return round(self.prediction.peak_bytes)

    @property
    def memory(self) -> dict[str, int]:
        """Parts of the peak: kind -> bytes."""
        return {kind: round(size) for kind, size in self.prediction.worst.kinds.items() if size}

    @property
    def time(self) -> dict[str, float]:
        """Parts of a step: part -> seconds."""
        parts = fields(self.prediction.time)
        return {part.name.removesuffix("_s"): getattr(self.prediction.time, part.name) for part in parts}

    @property
    def execution(self) -> tuple[str, ...]:
        """Sentences on how a GPU runs the passes, and what each alternative would take. Empty for other software."""
        return () if self.prediction.executions is None else self.prediction.executions.why

    @property
    def usable_bytes(self) -> float:
        """Memory of a device that a program can use. Infinite = unknown."""
        return usable_bytes(self.plan)

    @property
    def ranges(self) -> Ranges:
        """Range of each figure that nine of ten published runs lie in."""
        return ranges(self.prediction)

    @property
    def fit_probability(self) -> float:
        """Probability that it fits, from errors of predicted memory on published runs."""
        return fit_probability(self.prediction)

    @property
    def tight(self) -> bool:
        """Is hardly any memory left? The planner errs by several percent."""
        return is_bold(self.prediction)

    @checked
    def save(self, file: str | Path) -> Path:
        """Write the plan for `train`, with as many steps as the token budget gives."""
        best, recipe = self.plan, self.plan.recipe
        if self.tokens and not recipe.batch_ramp:
            steps = -(-int(self.tokens) // (recipe.global_batch * recipe.sequence))
            follows = recipe == replace(recipe, warmup_steps=-1)
            if steps >= 2**31:
                raise ArgumentError(
                    f"tokens={self.tokens:g} are {steps:,} steps, more than a recipe can have: take a larger "
                    "global_batch"
                )
            warmup = -1 if follows else min(recipe.warmup_steps, steps)
            best = replace(best, recipe=replace(recipe, steps=steps, warmup_steps=warmup))
        best.check()
        planfile.write(best, file, open_warmup=True, another="file (--save)")
        return Path(file)

    def row(self) -> dict[str, Any]:
        """Return its figures as a table row, named as in the JSON document."""
        names = ("step_seconds", "tokens_per_second_per_device", "mfu_causal", "mfu_full", "bubble_fraction",
                 "peak_bytes", "tight")  # fmt: skip
        return {"layout": self.words, **{name: getattr(self, name) for name in names}, **asdict(self.layout)}

    def __repr__(self) -> str:
        tight = ", tight" if self.tight else ""
        return (
            f"{self.words}: {step_length(self.step_seconds)} per step, "
            f"{count(self.tokens_per_second_per_device)} tokens/s per device, MFU {self.mfu_full:.1%}, "
            f"{gib(self.peak_bytes)}{tight}"
        )

    def _repr_html_(self) -> str:
        return whole(layout_html(self))


def layout_html(planned: PlannedLayout) -> str:
    """Return verdict, speed, memory and time as HTML."""
    room = planned.usable_bytes if isfinite(planned.usable_bytes) else 0.0
    fits = planned.peak_bytes <= planned.usable_bytes
    verdict = "Does not fit" if not fits else "Fits, with less than 95 %" if planned.tight else "Fits"
    memory = f"{gib(planned.peak_bytes)} of {gib(room)} per device" if room else gib(planned.peak_bytes)
    speed = (
        f"{step_length(planned.step_seconds)} per step, "
        f"{count(planned.tokens_per_second_per_device)} tokens/s per device, "
        f"MFU {planned.mfu_full:.1%} (full), {planned.mfu_causal:.1%} (causal)"
    )
    return "".join(
        (
            line(f"{verdict}: {planned.words}", "good" if fits and not planned.tight else "alarm"),
            line(speed),
            line(range_words(planned.prediction)),
            line(f"memory at the peak: {memory}"),
            memory_bar(planned.memory, room),
            line(f"a step: {step_length(planned.step_seconds)}"),
            time_bar(planned.time),
        )
    )


def layout_cells(planned: PlannedLayout) -> tuple[str, ...]:
    """Return the cells of a table row."""
    return (
        planned.words,
        step_length(planned.step_seconds),
        count(planned.tokens_per_second_per_device),
        f"{planned.mfu_full:.1%}",
        gib(planned.peak_bytes) + (" (tight)" if planned.tight else ""),
        f"{planned.bubble_fraction:.1%}",
    )

"""A layout with what it would cost."""

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
    """One layout, with what a step of it would cost."""

    prediction: Prediction
    tokens: float = 0.0
    """Budget of the run; 0 = none."""

    @property
    def plan(self) -> Plan:
        """What `train`, `dry_run` and `profile` take."""
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
        """Of one optimizer step."""
        return self.prediction.step_s

    @property
    def tokens_per_second_per_device(self) -> float:
        """The figure to compare with others."""
        return self.prediction.tokens_per_s_per_device

    @property
    def mfu_causal(self) -> float:
        """Share of the datasheet's peak, attention counted by half."""
        return self.prediction.mfu(causal=True)

    @property
    def mfu_full(self) -> float:
        """The same with attention counted in full."""
        return self.prediction.mfu(causal=False)

    @property
    def bubble_fraction(self) -> float:
        """Waiting in the pipeline, over the work of the busiest rank."""
        return self.prediction.bubble_fraction

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return round(self.prediction.peak_bytes)

    @property
    def memory(self) -> dict[str, int]:
        """What that peak is made of: kind -> bytes."""
        return {kind: round(size) for kind, size in self.prediction.worst.kinds.items() if size}

    @property
    def time(self) -> dict[str, float]:
        """What a step is spent on: part -> seconds."""
        parts = fields(self.prediction.time)
        return {part.name.removesuffix("_s"): getattr(self.prediction.time, part.name) for part in parts}

    @property
    def execution(self) -> tuple[str, ...]:
        """Sentences: how a GPU runs its passes, and what each other way would take; none of other software."""
        return () if self.prediction.executions is None else self.prediction.executions.why

    @property
    def usable_bytes(self) -> float:
        """What a program can have of a device; infinite where that is not known."""
        return usable_bytes(self.plan)

    @property
    def ranges(self) -> Ranges:
        """Of each figure, the range in which nine of ten published runs lie."""
        return ranges(self.prediction)

    @property
    def fit_probability(self) -> float:
        """That it fits, from the errors of predicted memory on published runs."""
        return fit_probability(self.prediction)

    @property
    def tight(self) -> bool:
        """Whether hardly any memory is left: the planner errs by several percent."""
        return is_bold(self.prediction)

    @checked
    def save(self, file: str | Path) -> Path:
        """Write the plan as `train` reads it, with as many steps as the token budget gives."""
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
        """Its figures under the names of the JSON document, for a table."""
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


def layout_html(one: PlannedLayout) -> str:
    """Verdict, speed, memory and time."""
    room = one.usable_bytes if isfinite(one.usable_bytes) else 0.0
    fits = one.peak_bytes <= one.usable_bytes
    verdict = "Does not fit" if not fits else "Fits, with less than 95 %" if one.tight else "Fits"
    of = f"{gib(one.peak_bytes)} of {gib(room)} per device" if room else gib(one.peak_bytes)
    speed = (
        f"{step_length(one.step_seconds)} per step, {count(one.tokens_per_second_per_device)} tokens/s per device, "
        f"MFU {one.mfu_full:.1%} (full), {one.mfu_causal:.1%} (causal)"
    )
    return "".join(
        (
            line(f"{verdict}: {one.words}", "good" if fits and not one.tight else "alarm"),
            line(speed),
            line(range_words(one.prediction)),
            line(f"memory at the peak: {of}"),
            memory_bar(one.memory, room),
            line(f"a step: {step_length(one.step_seconds)}"),
            time_bar(one.time),
        )
    )


def layout_cells(one: PlannedLayout) -> tuple[str, ...]:
    """A row of a table of layouts."""
    return (
        one.words,
        step_length(one.step_seconds),
        count(one.tokens_per_second_per_device),
        f"{one.mfu_full:.1%}",
        gib(one.peak_bytes) + (" (tight)" if one.tight else ""),
        f"{one.bubble_fraction:.1%}",
    )

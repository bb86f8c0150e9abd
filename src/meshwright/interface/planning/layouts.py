"""Layouts of a plan: the fields that --layout and --for fix, and the layouts answered."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import planfile
from meshwright.interface.answers.answer import checked
from meshwright.interface.answers.markup import line, memory_bar, step_length, time_bar, whole
from meshwright.planner.explain import layout_words, range_words
from meshwright.planner.search.recommend import is_bold
from meshwright.planner.step.prediction import Prediction, Ranges, fit_probability, ranges, usable_bytes
from meshwright.spec import Layout, Plan
from meshwright.spec.errors import ArgumentError, IllegalLayout, argument
from meshwright.spec.layout.layout import RECOMPUTE, check_word
from meshwright.spec.layout.schedule import NAMES
from meshwright.spec.presets import suggest
from meshwright.spec.rules.passes import CAPTURED, policies
from meshwright.spec.units import count, gib, many

if TYPE_CHECKING:
    from meshwright.planner.step.predict import Estimator
    from meshwright.stacks.declaration.software import TrainingSoftware

DEGREES = ("dp", "dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "vp", "zero", "micro_batch", "recompute_layers")
WORDS = ("recompute", "schedule", "sp", "offload", "cuda_graphs")
SEARCHED = (*DEGREES[1:], *WORDS)
CARRIED = ("kernels", "compile", "context", "context_split", "overlap")
"""Fields that no search varies. All layouts take them from the plan, or from this argument."""

LARGER_BATCHES = (2, 4, 8, 16, 32)
"""Multiples of a batch that are tried where software has no layout for it."""

Fixed = dict[str, tuple[Any, ...]]


def carried_layout(asked: Plan, texts: Sequence[str], stack: str = "") -> tuple[Plan, list[str]]:
    """Return the plan with the fields that no search varies (`kernels=reference`), and the remaining words.

    Raises ArgumentError for a choice of this package's engine where another `stack` trains.
    """
    changes: dict[str, Any] = {}
    searched: list[str] = []
    for word in re.sub(r"\([^)]*\)", " ", " ".join(texts)).replace(",", " ").split():
        key, equals, text = word.removeprefix("layout.").partition("=")
        if key in CARRIED and equals:
            check_word(key, text)
            if stack and key in ("kernels", "compile", "overlap"):
                rule = f"is a choice of Meshwright's engine, not of {stack}"
                raise ArgumentError("layout", word, rule, "leave it out")
            changes[key] = text
        else:
            searched.append(word)
    return replace(asked, layout=replace(asked.layout, **changes)), searched


def fixed_layout(asked: Plan, texts: Sequence[str]) -> Fixed:
    """Return {"dp": (8,), "tp": (2,)} of `dp=8,tp=2`.

    Also reads layouts as `plan` prints them (dp=2x4, sp, interleaved), with notes in brackets. The word `plan` fixes
    what no other word does, as in the plan.
    """
    fixed: Fixed = {}
    parts = re.sub(r"\([^)]*\)", " ", " ".join(texts)).replace(",", " ").split()
    for part in parts:
        for key, setting in parse_part(part) if part != "plan" else ():
            if fixed.setdefault(key, (setting,)) != (setting,):
                raise ArgumentError(
                    "layout",
                    rule=f"has {key}={_shown(fixed[key][0])} and {key}={_shown(setting)}",
                    remedy="take one of them",
                )
    if "plan" in parts:
        fixed = _layout_of_plan(asked, fixed) | fixed
    # Before the product is checked, since capturing fixes further degrees.
    if fixed.get("cuda_graphs") == ("on",):
        _fix_capturable(asked, fixed)
    _check_product(asked, fixed)
    if layers := fixed.get("recompute_layers", (0,))[0]:
        # A number of layers without a policy leaves the search the choice among those that recompute.
        fixed.setdefault("recompute", RECOMPUTE[1:])
        if fixed["recompute"] == ("none",):
            raise ArgumentError(
                "layout", rule=f"has recompute_layers={layers} and recompute=none", remedy="take another recompute"
            )
        if layers > asked.model.layers:
            raise ArgumentError(
                "layout", rule=f"has recompute_layers={layers}, and the model has {asked.model.layers} layers"
            )
    return fixed


def _layout_of_plan(asked: Plan, others: Fixed) -> Fixed:
    """Return every searched field as the plan has it, except those that follow from `others`."""
    following = {"schedule", "vp"} if "pp" in others else set()
    if "recompute" in others:
        following.add("recompute_layers")
    if others.keys() & {"dp", "dp_replicate", "tp", "cp", "pp"}:
        following.add("dp_shard")
    else:
        _check_world(asked)
    return {name: (getattr(asked.layout, name),) for name in SEARCHED if name not in following}


def parse_part(part: str, name: str = "layout") -> list[tuple[str, Any]]:
    """Return [("tp", 2)] of `tp=2`, a word of the argument `name`.

    Raises ArgumentError when the key or its value is none of a layout.
    """
    key, equals, text = part.partition("=")
    key, text = key.strip().removeprefix("layout."), text.strip()
    if not equals and key == "sp":
        return [("sp", True)]
    if not equals and key in NAMES:
        return [("schedule", key)]
    # dp=2x4 is how `plan` prints replicas times shards: its lines can be pasted back.
    replicate, x, shard = text.partition("x")
    if key == "dp" and x and replicate.isdecimal() and shard.isdecimal() and int(replicate) and int(shard):
        return [("dp_replicate", int(replicate)), ("dp_shard", int(shard))]
    return [(key, _parse_setting(name, part, key, text))]


def _parse_setting(name: str, part: str, key: str, text: str) -> Any:
    words = {"recompute": RECOMPUTE, "schedule": NAMES, "sp": ("true", "false"),
             "zero": ("0", "1", "2", "3"), "offload": ("off", "activations"),
             "cuda_graphs": ("auto", "off", "on")}  # fmt: skip
    if key in words and text in words[key]:
        return {"sp": text == "true", "zero": int(text) if text.isdecimal() else 0}.get(key, text)
    if key in words:
        raise ArgumentError(name, part, remedy=f"{key} takes {' or '.join(words[key])}")
    if key in DEGREES:
        least = 0 if key == "recompute_layers" else 1
        if text.isdecimal() and least <= int(text) < 2**31:
            return int(text)
        raise ArgumentError(name, part, remedy=f"{key} takes a whole number of {least} or more")
    if key in {field.name for field in fields(Layout)}:
        raise ArgumentError(name, part, remedy=f"plan does not search {key}; write layout.{key} into a plan file")
    raise ArgumentError(name, part, remedy=f"{key!r} is not a field of a layout; {suggest(key, [*DEGREES, *WORDS], 1)}")


def _check_world(asked: Plan) -> None:
    """Raise ArgumentError unless the plan's layout is for as many devices as the cluster has."""
    cluster, world = asked.cluster, asked.layout.world
    if world != cluster.devices:
        raise ArgumentError(
            "layout",
            "plan",
            f"is for {many(world, 'device')}, and the cluster has {cluster.devices} "
            f"({cluster.nodes} x {cluster.devices_per_node})",
            f"ask about {world} devices, or leave {argument('layout')} out to search one",
        )


def _fix_capturable(asked: Plan, fixed: Fixed) -> None:
    """Fix the values that CUDA graphs can capture. Raises ArgumentError if others are fixed."""
    for key, legal in {**CAPTURED, "recompute": policies(asked.layout)}.items():
        values = fixed.get(key, legal)
        if not set(values) <= set(legal):
            shown = " or ".join(map(_shown, legal))
            raise ArgumentError(
                "layout", rule=f"has cuda_graphs=on and {key}={_shown(values[0])}", remedy=f"take {key}={shown}"
            )
        fixed[key] = values


def _check_product(asked: Plan, fixed: Fixed) -> None:
    """Raise ArgumentError if the fixed values cannot all hold on these devices."""
    devices, cluster = asked.cluster.devices, asked.cluster
    dp = 1
    for axis in ("dp_replicate", "dp_shard"):
        dp *= fixed.get(axis, (1,))[0]
    # `dp` alone fixes a product whose factors stay open, so the factors may not contradict it.
    whole = fixed.get("dp", (dp,))[0]
    if whole % dp:
        raise ArgumentError(
            "layout", rule=f"has dp={whole}, which is dp_replicate x dp_shard, and {dp} does not divide it"
        )
    product = whole
    for axis in ("tp", "cp", "pp"):
        product *= fixed.get(axis, (1,))[0]
    if devices % product:
        raise ArgumentError(
            "layout",
            rule=(
                f"has degrees with the product {product}, which does not divide the {devices} devices of the "
                f"cluster ({cluster.nodes} x {cluster.devices_per_node})"
            ),
            remedy="take degrees that do",
        )
    schedule = fixed.get("schedule", ("1f1b",))[0]
    if schedule != "1f1b" and fixed.get("pp", (2,))[0] == 1:
        raise ArgumentError(
            "layout",
            rule=f"has schedule={schedule}, which is the order of a pipeline, and pp=1",
            remedy="leave one of them out",
        )


def _shown(value: Any) -> str:
    return str(value).lower()


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
            # Rounded up: a run may exceed its budget by a part of a step, and never falls short of it.
            steps = -(-int(self.tokens) // (recipe.global_batch * recipe.sequence))
            if steps >= 2**31:
                raise ArgumentError(
                    "tokens",
                    self.tokens,
                    f"are {steps:,} steps, more than a recipe can have",
                    "take a larger global_batch",
                )
            # A warm-up must not exceed a short run.
            warmup_steps = min(recipe.warmup_steps, steps)
            best = replace(best, recipe=replace(recipe, steps=steps, warmup_steps=warmup_steps))
        best.check()
        planfile.write(best, file, another="file (--save)")
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


def chosen_software(word: str) -> "TrainingSoftware | None":
    """Return the software of a word, None for this package's own engine. Raises PlanError for an unknown word."""
    if word in ("", "meshwright"):
        return None
    # Most plans are for this engine, and need no knowledge of other software.
    from meshwright.stacks.trainer_table import software

    return software(word)


def as_trained(trainer: "TrainingSoftware", plan: Plan) -> Plan:
    """Return the plan with all parts that the software trains.

    Raises PlanError, before the search, if it lacks the model or the recipe.
    """
    if plan.model.lora is not None:
        raise ArgumentError("stack", trainer.word, "writes full training", f"leave {argument('tune', 'lora')} out")
    if plan.recipe.precision != "bf16":
        device = plan.cluster.device
        has = device.bf16_matmul_flop_per_s or device.bf16_flop_per_s
        way = f"leave precision={plan.recipe.precision} out" if has else f"{device.name} has none, take another device"
        raise ArgumentError("stack", trainer.word, "is counted in bf16", way)
    if plan.teacher is not None:
        raise ArgumentError(
            "stack", trainer.word, "writes training without a teacher", f"leave {argument('teacher')} out"
        )
    # The facts refuse models and recipes. No layout is chosen yet, so a legal one stands in for it.
    trainer.facts(replace(plan, layout=replace(plan.layout, dp_replicate=1, micro_batch=1)))
    return replace(plan, model=trainer.trained_shape(plan.model))


def restricted(trainer: "TrainingSoftware", fixed: Fixed) -> Fixed:
    """Return the fixed fields, restricted to what the software offers. Raises ArgumentError if nothing is left."""
    restrictions = trainer.fixed()
    for key, values in fixed.items():
        offered = trainer.offered.get(key, values)
        allowed = tuple(value for value in values if value in offered)
        if not allowed:
            why = f" ({trainer.reasons[key]})" if key in trainer.reasons else ""
            words = " or ".join(str(value).lower() for value in offered)
            raise ArgumentError(
                "layout", rule=f"has {key}={str(values[0]).lower()}, and {trainer.word} has {words}{why}"
            )
        restrictions[key] = allowed
    return restrictions


def none_offered(trainer: "TrainingSoftware", estimator: "Estimator", plan: Plan, fixed: Fixed) -> Exception:
    """Return the error that no layout of the software exists for these devices.

    It names the smallest batch for which one fits, or is legal, or else the software's refusal of the nearest layout.
    """
    from meshwright.planner.search.ranking import search
    from meshwright.planner.step.predict import build_estimator

    devices, batch = f"{plan.cluster.devices} devices", plan.recipe.global_batch
    larger: dict[bool, int] = {}
    for factor in LARGER_BATCHES:
        asked = replace(plan, recipe=replace(plan.recipe, global_batch=batch * factor))
        # Other software is planned by data sheets.
        ranking = search(build_estimator(asked, estimator.stack), asked, fixed=restricted(trainer, fixed), listed=1)
        if ranking.legal:
            larger.setdefault(bool(ranking.best), batch * factor)
        if ranking.best:
            break
    lacks = f"{trainer.word} has no layout of {plan.model.name} on {devices}"
    remedy = f"take {argument('recipe', f'global_batch={larger.get(True) or larger[False]}')}" if larger else ""
    if larger and not fixed:
        return IllegalLayout(f"{lacks} for {many(batch, 'sequence')} per step: {remedy}")
    # Searched without the software's own limits, so that its refusal of the best layout names what it lacks.
    other = search(estimator, plan, fixed=fixed, listed=1)
    near = other.best[0] if other.best else other.nearest
    why = trainer.plan_refusal(near.plan) if near else ""
    settings = ", ".join(f"{key}={_shown(values[0])}" for key, values in fixed.items())
    having = f" with {settings}" if settings else ""
    return IllegalLayout(f"{lacks}{having}: {why}".rstrip(": ") + (f"; or {remedy}" if remedy else ""))

"""Rules of objectives: which plans can distil or compare answers. Each refusal names the nearest legal change."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Final

from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule import V_PLACED
from meshwright.spec.model.shape import NO_TARGETS, ModelShape
from meshwright.spec.recipe.recipe import CROSS_ENTROPY, DISTILL, NO_SCHEME, PREFERENCES, Recipe
from meshwright.spec.rules.legal import layout_violations

FORWARD_ONLY = "only the teacher's likeliest tokens are stored, from which a student would learn to shift away"
PLAIN: Final = "afab"
"""Schedule of a teacher's forward passes. All schedules with stages in a line share it."""
SETTINGS = tuple(field.name for field in fields(Recipe) if field.name.startswith("distillation_"))
_DEFAULT = Recipe()


def preference_violations(recipe: Recipe, *, form: str, train_on: str, packing: str) -> Iterator[str]:
    """Yield why a preference objective clashes with the data (Plan.violations)."""
    chosen, preferences = f"recipe.objective={recipe.objective}", ", ".join(PREFERENCES)
    if not recipe.traits.smooths and recipe.preference_smoothing:
        yield (
            f"recipe.preference_smoothing={recipe.preference_smoothing:g} belongs to recipe.objective=dpo, and "
            f"{chosen}: leave it out"
        )
    if not recipe.traits.pairs:
        if recipe.preference_beta != _DEFAULT.preference_beta:
            yield (
                f"recipe.preference_beta={recipe.preference_beta:g} belongs to recipe.objective={preferences}, and "
                f"{chosen}: leave it out, or take one of these"
            )
        return
    if form != "samples":
        yield (
            f"{chosen} compares answers, and data.form={form} has none: take data.form=samples, or "
            f"recipe.objective={CROSS_ENTROPY}"
        )
    if train_on == "all":
        yield f"{chosen} compares answers, and data.train_on=all counts their prompts too: take data.train_on=auto"
    if packing == "off" and not recipe.document_mask:
        yield f"{chosen} has two answers in a row, which must not see one another: take recipe.document_mask=true"
    if recipe.noise_scale_every:
        yield (
            f"recipe.noise_scale_every={recipe.noise_scale_every} measures tokens, and {chosen} counts pairs: "
            "take recipe.noise_scale_every=0"
        )
    if recipe.sequence < 4:
        yield f"recipe.sequence={recipe.sequence} has no room for two answers: take recipe.sequence=4 or more"


def distillation_violations(
    recipe: Recipe, student: ModelShape, teacher: ModelShape | None, layout: Layout, *, drawn: bool, mixed: bool
) -> Iterator[str]:
    """Yield why a recipe with this student and teacher is illegal (Plan.violations).

    Args:
        drawn: The student's weights are random.
        mixed: The data is a mixture of several texts.
    """
    chosen = f"recipe.objective={recipe.objective}"
    if not recipe.traits.teacher:
        for name in SETTINGS:
            if getattr(recipe, name) != getattr(_DEFAULT, name):
                yield (
                    f"recipe.{name}={getattr(recipe, name):g} belongs to recipe.objective={DISTILL}, and {chosen}: "
                    "leave it out"
                )
        if teacher is not None:
            yield (
                f"teacher={teacher.name} belongs to recipe.objective={DISTILL}, and {chosen}: leave it out, or take "
                f"recipe.objective={DISTILL}"
            )
        return
    if teacher is None:
        yield (
            f"{chosen} learns from a teacher, and there is none: give teacher=DIR, a Hugging Face folder or a run, "
            f"or take recipe.objective={CROSS_ENTROPY}"
        )
        return
    # The rules below assume a teacher.
    yield from _offline(recipe, mixed=mixed)
    yield from _on_policy(recipe, student, teacher, layout)
    yield from _vocabularies(student, teacher, layout, drawn=drawn)
    if recipe.noise_scale_every:
        yield (
            f"recipe.noise_scale_every={recipe.noise_scale_every} measures the noise of cross-entropy, and {chosen}: "
            "take recipe.noise_scale_every=0"
        )
    if teacher.positions == "learned" and recipe.sequence > teacher.max_positions:
        yield (
            f"recipe.sequence={recipe.sequence} exceeds the {teacher.max_positions} learned positions of the teacher: "
            f"take recipe.sequence={teacher.max_positions}"
        )
    if teacher.lora is not None and teacher.lora.targets != NO_TARGETS:
        yield (
            f"teacher.lora.targets={teacher.lora.targets} would add adapters that nobody trains: take "
            f"teacher.lora.targets={NO_TARGETS}, for codes alone"
        )
    yield from _laid_out(recipe, student, teacher, layout)


def _offline(recipe: Recipe, *, mixed: bool) -> Iterator[str]:
    top = recipe.distillation_top_k
    if not top:
        return
    if recipe.distillation_beta:
        yield (
            f"recipe.distillation_beta={recipe.distillation_beta:g} with recipe.distillation_top_k={top}: "
            f"{FORWARD_ONLY}: take recipe.distillation_beta=0, or recipe.distillation_top_k=0"
        )
    if mixed:
        yield (
            f"recipe.distillation_top_k={top} is stored for the rows of one text, and data.mixture has several: take "
            "recipe.distillation_top_k=0, or put them into one file, as data.path"
        )


SAMPLES_UNDER: dict[str, object] = {"zero": 0, "tp": 1, "cp": 1, "pp": 1, "ep": 1, "offload": "off"}
"""Values of a layout under which each rank holds whole weights and samples on its own."""


def _on_policy(recipe: Recipe, student: ModelShape, teacher: ModelShape, layout: Layout) -> Iterator[str]:
    share = recipe.distillation_on_policy
    if not share:
        if recipe.distillation_sampling != _DEFAULT.distillation_sampling:
            yield (
                f"recipe.distillation_sampling={recipe.distillation_sampling:g} is of answers that the student writes, "
                "and recipe.distillation_on_policy=0 has none: leave it out, or take recipe.distillation_on_policy=0.5"
            )
        return
    on_policy = f"recipe.distillation_on_policy={share:g}"
    for key, legal in SAMPLES_UNDER.items():
        # On one rank nothing is cut, and ZeRO cuts nothing without data parallelism.
        if layout.world > 1 and (setting := getattr(layout, key)) != legal and not (key == "zero" and layout.dp == 1):
            yield (
                f"{on_policy} has every rank sample with whole weights, and layout.{key}={setting} cuts them: take "
                f"layout.{key}={legal}"
            )
    if recipe.distillation_top_k:
        yield (
            f"{on_policy} writes new answers, and recipe.distillation_top_k={recipe.distillation_top_k} asks the "
            "teacher before there are any: take recipe.distillation_top_k=0"
        )
    if recipe.distillation_hard:
        yield (
            f"{on_policy} would train on the student's own words as if they were text, by recipe.distillation_hard="
            f"{recipe.distillation_hard:g}: take recipe.distillation_hard=0"
        )
    if student.vocab > teacher.vocab:
        yield (
            f"{on_policy} may write tokens that teacher.vocab={teacher.vocab} lacks, since "
            f"model.vocab={student.vocab}: take a student with model.vocab={teacher.vocab}"
        )


def _vocabularies(student: ModelShape, teacher: ModelShape, layout: Layout, *, drawn: bool) -> Iterator[str]:
    if student.vocab == teacher.vocab:
        return
    both = f"model.vocab={student.vocab} and teacher.vocab={teacher.vocab}"
    if drawn:
        yield f"{both} differ, and the student has yet to learn what its tokens mean: take model.vocab={teacher.vocab}"
    elif layout.tp > 1:
        yield (
            f"{both} differ, and layout.tp={layout.tp} would cut them at different tokens: take layout.tp=1, or a "
            f"student with model.vocab={teacher.vocab}"
        )


def teacher_layout(layout: Layout, teacher: ModelShape) -> Layout:
    """Return the layout of a teacher that runs beside the student.

    A teacher has neither gradients nor optimizer states, so ZeRO 1 and 2 leave it whole, and it stores nothing for a
    backward pass. In a pipeline it uses the student's ranks with its own layers dealt evenly. Its last stage is on the
    rank of the student's last stage.
    """
    # A dense teacher has no experts to spread. Other schedules than a V share the plain order of forward passes.
    spreads, in_v = layout.ep if teacher.moe else 1, layout.schedule in V_PLACED
    return replace(
        layout, zero=3 if layout.zero == 3 else 0, recompute="none", recompute_layers=0, offload="off", ep=spreads,
        ep_chunks=layout.ep_chunks if spreads > 1 else 0, stages=(),
        schedule=layout.schedule if in_v or layout.pp == 1 else PLAIN, vp=layout.vp if in_v else 1,
    )  # fmt: skip


def _laid_out(recipe: Recipe, student: ModelShape, teacher: ModelShape, layout: Layout) -> Iterator[str]:
    """Yield violations of the teacher alone. It has its student's layout, online or asked once."""
    # Settings of training, which a teacher is exempt from.
    plain = replace(
        recipe, products="same", fake_quantize=NO_SCHEME, dropout=0.0, noise_scale_every=0, optimizer_states="fp32",
        master_weights="fp32",
    )  # fmt: skip
    of_student = layout_violations(student, recipe, layout)
    for sentence in layout_violations(teacher, plain, teacher_layout(layout, teacher)):
        if sentence not in of_student:  # reported once already
            yield f"of the teacher: {sentence}"

"""Rules of plans: which layouts a model and a recipe allow, and which plans can distil or compare answers.

Every rule is stated once. A refusal is a sentence with the rule, the clashing numbers and the nearest legal change. The
planner's search, the engine and the command line all apply these rules.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Final

from meshwright.spec.errors import IllegalLayout, PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.schedule import V_PLACED, refusal, stage_layers
from meshwright.spec.model.shape import NO_TARGETS, ModelShape
from meshwright.spec.recipe.recipe import CROSS_ENTROPY, DISTILL, NO_SCHEME, PREFERENCES, Recipe
from meshwright.spec.rules.passes import capturing_refusals, fake_quantization_refusals, frozen_code_refusals
from meshwright.spec.weights.boxes import cut_blocks
from meshwright.spec.weights.inventory import parameters, tp_holders

NARROW_MULTIPLE = 16
"""Both dims of a matrix must be multiples of this for 8-bit tensor cores."""
Rule = Callable[[ModelShape, Recipe, Layout], Iterator[str]]
FORWARD_ONLY = "only the teacher's likeliest tokens are stored, from which a student would learn to shift away"
PLAIN: Final = "afab"
"""Schedule of a teacher's forward passes. All schedules with stages in a line share it."""
DISTILLATION_SETTINGS = tuple(field.name for field in fields(Recipe) if field.name.startswith("distillation_"))
_DEFAULT = Recipe()
SAMPLES_UNDER: dict[str, object] = {"zero": 0, "tp": 1, "cp": 1, "pp": 1, "ep": 1, "offload": "off"}
"""Values of a layout under which each rank holds whole weights and samples on its own."""


def layout_violations(shape: ModelShape, recipe: Recipe, layout: Layout) -> list[str]:
    """List why this layout is illegal. Empty = legal."""
    return [sentence for rule in RULES for sentence in rule(shape, recipe, layout)]


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(small + [number // d for d in reversed(small) if d * d != number])


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of `number` nearest to `wanted`, the smaller of two equally near ones."""
    return min(divisors(number), key=lambda d: (abs(d - wanted), d))


def _tensor(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    tp, refused = layout.tp, []
    if shape.heads % tp:
        refused.append(f"layout.tp={tp} does not divide the {shape.heads} attention heads")
    elif not _deals_key_heads(shape, tp):
        refused.append(f"layout.tp={tp} and the {shape.kv_heads} key heads: one must divide the other")
    if tp > shape.ffn or tp > shape.vocab:
        refused.append(f"layout.tp={tp} exceeds model.ffn={shape.ffn} or model.vocab={shape.vocab}")
    if shape.moe is not None and layout.ep == 1 and tp > shape.moe.ffn:
        refused.append(f"layout.tp={tp} exceeds model.moe.ffn={shape.moe.ffn}, and layout.ep=1 spreads no experts")
    if refused:
        # One degree resolves all of them, so every refusal ends with the same advice.
        advice = f"take {_nearest_tp(shape, recipe, layout)}"
        yield from (f"{sentence}{'; ' if ':' in sentence else ': '}{advice}" for sentence in refused)
    if layout.sp and tp == 1:
        yield "layout.sp=true shares the sequence among tp ranks, and layout.tp=1: take layout.sp=false or a larger tp"
    local = recipe.sequence // layout.cp
    if layout.sp and local % tp:
        # Experts spread over ep need sp, since each rank sends tokens of its own.
        instead = "" if layout.ep > 1 else " or layout.sp=false"
        yield (
            f"layout.sp=true cuts a rank's {local} positions into layout.tp={tp} equal parts: "
            f"take recipe.sequence={_up(recipe.sequence, _unit(layout))}{instead}"
        )
    if layout.tp_chunks > 1:
        # sequence parallelism shares each chunk among the tp ranks
        parts = layout.tp_chunks * (tp if layout.sp else 1)
        if tp == 1:
            yield f"layout.tp_chunks={layout.tp_chunks} cuts what tp ranks exchange, and layout.tp=1: leave it out"
        elif local % parts:
            cut = f"layout.tp_chunks={layout.tp_chunks} cuts a rank's {local} positions into {parts} equal parts"
            yield f"{cut}: leave it out"


def _deals_key_heads(shape: ModelShape, tp: int) -> bool:
    """Return whether each tp rank has equally many key heads, or each key head equally many ranks."""
    # Latent attention makes the keys of all heads from one vector, so only the query heads count.
    return shape.mla is not None or shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0


def _nearest_tp(shape: ModelShape, recipe: Recipe, layout: Layout) -> str:
    """Return the nearest degree that no rule refuses, in words of the command line."""
    moe, others, local = shape.moe, layout.dp_shard * layout.cp, recipe.sequence // layout.cp
    widest = min(shape.ffn, shape.vocab, moe.ffn if moe and layout.ep == 1 else shape.ffn)
    legal = [
        tp
        for tp in range(1, min(shape.heads, widest) + 1)
        if shape.heads % tp == 0
        and _deals_key_heads(shape, tp)
        and (tp == 1 or not layout.sp or local % tp == 0)
        and others * tp % layout.ep == 0
    ]
    tp = min(legal, key=lambda tp: (abs(tp - layout.tp), tp), default=1)
    # What a single rank cannot have must be turned off along with it.
    alone = " layout.sp=false" if tp == 1 and layout.sp else ""
    return f"layout.tp={tp}{alone}" + ("" if legal else " layout.ep=1")


def _unit(layout: Layout) -> int:
    """Return the number that the sequence must be a multiple of."""
    return layout.sequence_parts * (layout.tp if layout.sp else 1)


def _up(number: int, unit: int) -> int:
    """Return the multiple of `unit` nearest to `number`, at least one unit."""
    return max(1, round(number / unit)) * unit


def _context(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    if recipe.sequence % layout.sequence_parts:
        how = "two chunks for each of" if layout.context_split == "zigzag" else "a part for each of"
        yield (
            f"recipe.sequence={recipe.sequence} cannot be cut into {how} layout.cp={layout.cp} ranks: "
            f"take recipe.sequence={_up(recipe.sequence, _unit(layout))}"
        )


def _pipeline(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    stages = layout.pp * layout.vp
    name = layout.schedule
    if layout.pp == 1:
        if layout.vp > 1:
            yield f"layout.vp={layout.vp} cuts a pipeline rank's layers, and layout.pp=1: take layout.vp=1"
        if layout.stages:
            number = len(layout.stages)
            # Offer the degree for which these stages would be right, if there is one.
            fits = sum(layout.stages) == shape.layers and layout.vp == 1 and name not in V_PLACED and number > 1
            yield (
                f"layout.stages={list(layout.stages)} deals layers to {number} pipeline stages, and layout.pp=1: "
                f"take layout.stages=[]" + (f" or layout.pp={number}" if fits else "")
            )
        return
    if stages > shape.layers:
        yield (
            f"layout.pp={layout.pp} x layout.vp={layout.vp} stages exceed the model's {shape.layers} layers: "
            f"take {_fewer_stages(shape, recipe, layout)}"
        )
    elif layout.stages and (len(layout.stages), sum(layout.stages)) != (stages, shape.layers):
        even = [len(layers) for layers in stage_layers(shape.layers, stages)]
        by_hand = (
            f"layout.stages={list(layout.stages)} deals {sum(layout.stages)} layers to {len(layout.stages)} stages"
        )
        yield (
            f"{by_hand}, and layout.pp={layout.pp} x layout.vp={layout.vp} stages want the model's {shape.layers}: "
            f"take layout.stages={even}"
        )


def _tied_ends(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    if shares_tied_ends(shape, layout):
        yield (
            f"layout.schedule={layout.schedule} puts both ends of the model, with their tied matrix, on one rank, "
            "which data parallelism cannot share yet: take layout.schedule=interleaved, or layout.schedule=zb-h1 "
            "layout.vp=1"
        )


def _schedule(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    if layout.pp == 1:
        return
    # A batch that cannot be cut evenly has a refusal of its own (`batch_refusals`).
    for batch in set(recipe.global_batches):
        count = layout.even_micro_batches(batch)
        sentence = refusal(layout.schedule, layout.pp, count, layout.vp) if count else None
        if sentence is not None:
            yield sentence


def _fewer_stages(shape: ModelShape, recipe: Recipe, layout: Layout) -> str:
    """Return the most pipeline ranks that layers and schedule allow, in words of the command line."""
    alone = layout.schedule if layout.schedule not in V_PLACED else "zb-h1"
    # batches that cannot be cut evenly have a refusal of their own
    counts = [count for batch in set(recipe.global_batches) if (count := layout.even_micro_batches(batch))]
    # Best first: the schedule as it is, then one stage per rank, each with as many ranks as possible.
    legal: Iterator[dict[str, object]] = (
        {"pp": pp, "vp": vp, "schedule": schedule}
        for schedule, vp in ((layout.schedule, layout.vp), (alone, 1))
        for pp in range(min(layout.pp, shape.layers // vp), 1, -1)
        if not any(refusal(schedule, pp, count, vp) for count in counts)
    )
    unpiped: dict[str, object] = {"pp": 1, "vp": 1}
    settings = next(legal, unpiped)
    if layout.stages:
        settings["stages"] = "[]"  # sizes by hand are for the old number of stages
    return " ".join(f"layout.{key}={setting}" for key, setting in settings.items() if getattr(layout, key) != setting)


def shares_tied_ends(shape: ModelShape, layout: Layout) -> bool:
    """Return whether one rank holds both ends of a tied matrix that data-parallel ranks share, too."""
    return shape.tied and layout.pp > 1 and layout.schedule in V_PLACED and layout.dp * layout.cp > 1


def _expert(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    ep = layout.ep
    if ep == 1:
        if layout.ep_chunks > 1:
            yield f"layout.ep_chunks={layout.ep_chunks} cuts what ep ranks exchange, and layout.ep=1: leave it out"
        return
    if shape.moe is None:
        yield f"layout.ep={ep} spreads experts, and the model has none: take layout.ep=1"
        return
    ranks = layout.dp_shard * layout.cp * layout.tp
    # ep must divide both the experts and the ranks that it borrows.
    near = nearest_divisor(math.gcd(shape.moe.experts, ranks), ep)
    if shape.moe.experts % ep:
        yield f"layout.ep={ep} does not divide the {shape.moe.experts} experts: take layout.ep={near}"
    if ranks % ep:
        yield (
            f"layout.ep={ep} is carved out of dp_shard x cp x tp = {ranks} ranks and does not divide them: "
            f"take layout.ep={near}"
        )
    local = max(1, shape.moe.experts // ep)
    if layout.ep_chunks > 1 and local % layout.ep_chunks:
        yield (
            f"layout.ep_chunks={layout.ep_chunks} does not divide the {local} experts of a rank: "
            f"take layout.ep_chunks={nearest_divisor(local, layout.ep_chunks)}"
        )
    if layout.ep_chunks > 1 and layout.splits_backward:
        yield (
            f"layout.ep_chunks={layout.ep_chunks} cuts stacks of experts, and layout.schedule={layout.schedule} leaves "
            "the gradients of whole stacks for later: take layout.ep_chunks=1 or layout.schedule=1f1b"
        )
    if layout.tp > 1 and not layout.sp:
        yield f"layout.ep={ep} with layout.tp={layout.tp}: each rank needs tokens of its own; take layout.sp=true"


def _data(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    if layout.zero and layout.dp_shard * layout.cp == 1:
        instead = ", or dp_shard instead of dp_replicate" if layout.dp_replicate > 1 else ""
        yield f"layout.zero={layout.zero} shards over dp_shard x cp, which is one rank: take layout.zero=0{instead}"


def _narrow_products(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    if recipe.products == "same":
        return
    if recipe.precision != "bf16":
        yield (
            f"recipe.products={recipe.products} rounds bf16 operands, not {recipe.precision} ones: "
            "take recipe.precision=bf16"
        )
    rounded = ("attention", "mlp", "expert") if recipe.products == "fp8-all" else ("attention", "mlp")
    for parameter in parameters(shape):
        if parameter.group in rounded and parameter.decays:
            # ep spreads whole experts, and neighbours may hold the same key heads.
            whole = parameter.group == "expert" and layout.ep > 1
            ranks = 1 if whole else layout.tp // tp_holders(parameter, shape, layout)
            sizes = [
                size // ranks if axis == "tp" else size
                for size, axis in zip(parameter.shape, parameter.axes, strict=True)
            ][-2:]
            if any(size % NARROW_MULTIPLE for size in sizes):
                yield (
                    f"recipe.products={recipe.products} needs matrices of multiples of {NARROW_MULTIPLE}, and "
                    f"{parameter.name} is {sizes[0]} x {sizes[1]} on each of {layout.tp} tp ranks: take "
                    f"recipe.products={'fp8' if parameter.group == 'expert' else 'same'}"
                )
                return


def _recomputation(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    if layout.recompute_layers and layout.recompute == "none":
        yield (
            f"layout.recompute_layers={layout.recompute_layers} says how many layers recompute, and "
            "layout.recompute=none recomputes nothing: take layout.recompute=full or layout.recompute_layers=0"
        )
    if layout.offload != "off" and layout.recompute not in layout.policies:
        yield (
            f"layout.offload={layout.offload} moves what blocks save, and layout.recompute={layout.recompute} keeps "
            f"some of it by itself: take layout.recompute={', '.join(layout.policies[:-1])} or {layout.policies[-1]}, "
            "or layout.offload=off"
        )


def _randomness(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    if recipe.noise_scale_every and layout.world > 1:
        yield (
            f"recipe.noise_scale_every={recipe.noise_scale_every} compares micro-batches on one device, and the layout "
            f"has {layout.world} ranks: take recipe.noise_scale_every=0"
        )


def _masters(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield a refusal that no layout resolves. `plan` fills in a precision, so the recipe alone cannot check this."""
    if recipe.master_weights == "none" and recipe.precision != "bf16":
        yield (
            f"recipe.master_weights=none rounds bf16 weights, and recipe.precision={recipe.precision}: "
            "take recipe.precision=bf16 or recipe.master_weights=fp32"
        )


def _state_blocks(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield refusals of layouts that are legal otherwise."""
    tp, ep, ranks = layout.tp, layout.ep, layout.dp_shard * layout.cp
    experts = shape.moe.experts if shape.moe else 1
    # parts of matrices exist only for degrees that divide; other rules refuse the rest
    if recipe.optimizer_states != "int8" or shape.heads % tp or experts % ep or ranks * tp % ep:
        return
    # ZeRO may cut stacks of experts inside a row. Others it cuts along rows, whatever the number of sharers.
    sharers = (ranks * tp // ep if ep > 1 else ranks) if layout.zero else 1
    if cut := cut_blocks(shape, tp, ep, sharers if shape.moe else 1):
        name, length, block = cut
        how = f"layout.tp={tp}" if tp > 1 else f"layout.zero={layout.zero}"
        yield (
            f"recipe.optimizer_states=int8 scales {name} in blocks of {block} elements of a row, and {how} leaves a "
            f"rank {length} of a row: take recipe.optimizer_states=bf16, or a degree that leaves a multiple of {block}"
        )


def _linear_attention(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield layouts and recipes that the planner does not count for linear attention, which is never trained here."""
    linear = shape.unbuilt.linear if shape.unbuilt else None
    if linear is None:
        return
    if linear.key_heads % layout.tp:
        heads = f"{linear.key_heads} key heads of linear attention"
        yield f"layout.tp={layout.tp} does not divide the {heads}: take layout.tp=1"
    if layout.cp > 1:
        yield (
            f"layout.cp={layout.cp} shares a sequence among ranks, for which states of linear attention are not "
            "counted: take layout.cp=1"
        )
    if recipe.optimizer == "muon":
        yield "recipe.optimizer=muon is not counted for layers of linear attention: take recipe.optimizer=adamw"


def batch_refusals(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield a refusal for each batch, also of a ramp, that cannot be cut into equal micro-batches."""
    for batch in recipe.global_batches:
        try:
            layout.micro_batches(batch)
        # the layout states this rule itself, and its error is the refusal
        except IllegalLayout as error:
            yield str(error)


def position_refusals(shape: ModelShape, recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield a refusal of a sequence longer than learned positions. No layout resolves it."""
    if shape.positions == "learned" and recipe.sequence > shape.max_positions:
        yield (
            f"recipe.sequence={recipe.sequence} exceeds the {shape.max_positions} learned positions "
            f"of the model: take recipe.sequence={shape.max_positions}"
        )


RULES: tuple[Rule, ...] = (
    _tensor, _context, _pipeline, _tied_ends, _schedule, _expert, _data, _recomputation, frozen_code_refusals,
    _linear_attention, fake_quantization_refusals, capturing_refusals, _randomness, _masters, _state_blocks,
    _narrow_products,
)  # fmt: skip
"""Rules in the order in which refusals are reported. The explorer's page has a table of each
(planner/explorer/legal_tables.py), made by calling it: a rule reads fields and properties and copies neither."""


def check_offload(layout: Layout, device: str) -> None:
    """Raise PlanError where activations would move from a CPU's memory into the same."""
    if layout.offload != "off" and device == "cpu":
        raise PlanError(
            f"layout.offload={layout.offload} moves to host memory, which is all that a CPU has: take "
            "layout.offload=off"
        )


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
        for name in DISTILLATION_SETTINGS:
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
    """Return the layout of a teacher that runs along with the student.

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

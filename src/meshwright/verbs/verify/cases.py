"""Random legal cases of `verify`, from (seed, index) alone, and their text on one line.

    kv_heads=1 heads=2 tp=2 clip=0.05

Keys of the text are the fields of Case, ModelShape and Layout. The prefixes `moe.`, `mla.`, `rope_scaling.` and `lora.`
name fields of parts of a shape, and `teacher.` those of a teacher. Omitted fields have their default, or that of BASE.

The degrees of the layout are drawn first. The shape is then made so that they divide it, with odd sizes everywhere
else. A case that still breaks a rule is drawn again. Later features are drawn after the others, so that earlier seeds
draw the same cases.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from math import gcd
from random import Random
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from meshwright.kernels.linear.fp8 import MULTIPLE
from meshwright.observe.oracle.one_device import Case, DrawnTeacher
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import OFFLOADED, RECOMPUTE, Layout
from meshwright.spec.layout.schedule import KINDS, NAMES, SPLIT
from meshwright.spec.model.quantization_schemes import SCHEMES
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.presets import PARTS, suggest
from meshwright.spec.rules.legal import distillation_violations, layout_violations
from meshwright.spec.rules.passes import learnable

BASE: Mapping[str, Any] = {
    "vocab": 61, "layers": 2, "hidden": 24, "heads": 4, "ffn": 40, "max_positions": 64, "compile": "off",
    "moe.experts": 4, "moe.top_k": 2, "moe.ffn": 12,
    "mla.q_rank": 0, "mla.kv_rank": 10, "mla.nope_dim": 6, "mla.rope_dim": 4, "mla.v_dim": 5,
    "rope_scaling.kind": "linear", "rope_scaling.factor": 2.0, "rope_scaling.original_positions": 16,
    "lora.rank": 3, "lora.alpha": 6.0,
}  # fmt: skip
"""Values of fields without a default, or whose default does not suit tiny models on a CPU."""

TEACHER = "teacher."
SKIPPED_FIELDS = ("name", "shape", "teacher", *PARTS)
MARKERS = (TEACHER + "layers",)
"""Keys that show that a part exists, though they have a default."""
Settings = dict[str, Any]
"""Values by key; only those that differ from the defaults."""

WORLDS = {1: 1, 2: 4, 3: 2, 4: 5, 5: 1, 6: 3, 7: 1, 8: 3}
"""Weights with which each number of processes is drawn."""
# No number of ranks from 2 on that is drawn divides them, so every split has an uneven last part.
VOCABULARIES = (31, 37, 41, 53, 61, 67, 97)
"""Primes."""
DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
ATTEMPTS = 1000
MOST_SEQUENCES = 28
"""Most sequences of a step: more make a case slow and find nothing."""
MOST_NARROW = 3
"""Most layers of a case in fp8: with 8 layers, gradients on one device differ by 0.4 of their length from fp32."""
MORE_SHAPES = 0.3
"""Share of cases with an optional part of a shape (experts, latent attention, tied head, window)."""
CODES = 0.5
"""Share of cases whose frozen weights are codes, where possible."""
SHARED_CODES = 0.5
"""Share of these whose codes ZeRO-3 shards, where possible."""
BASES = ("nf4", "nf4-double", "int4-hqq", "int3", "int4-g16-zeros-fp16", "int8-rows-sym-fp32", "nf4-g32-sym-double")
"""Schemes with groups that cuts of inputs meet or split, and scales per row, per group and as codes."""
ROWS_BASE = "llm-int8"
"""Scheme whose products also round activations."""
ROUNDED = 0.3
"""Share of cases whose matrices are rounded in every product, where possible."""
DROPOUT = 0.3
"""Share of cases with dropout, and of those with adapters whose adapters have it."""
ADAPTERS = 0.25
TEACHERS = 0.25
MUON = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnCase:
    """A training case, and the layout that is compared with one device."""

    case: Case
    layout: Layout


def _fields_by_key(kind: type, prefix: str = "") -> Iterator[tuple[str, "Field[Any]", Any]]:
    # Dataclass fields hold annotations as written, which may be strings: only resolved hints can parse a word.
    hints = get_type_hints(kind)
    for field in fields(kind):
        if prefix or field.name not in SKIPPED_FIELDS:
            yield prefix + field.name, field, hints[field.name]


TABLES = {
    kind: list(_fields_by_key(kind, prefix))
    for kind, prefix in (
        (ModelShape, ""),
        *((part, name + ".") for name, part in PARTS.items()),
        (DrawnTeacher, TEACHER),
        (Layout, ""),
        (Case, ""),
    )
}
HINTS: Mapping[str, Any] = {key: hint for table in TABLES.values() for key, _, hint in table}


def format_case(drawn: DrawnCase) -> str:
    """Return one line from which `parse_case` makes the same case."""
    return " ".join(f"{key}={_format_value(value)}" for key, value in settings_of(drawn).items())


def parse_case(text: str) -> DrawnCase:
    """Parse a line. Raises PlanError for an unknown key or value, and for an illegal layout."""
    return build_case({key: _parse_word(key, word) for key, word in _split_words(text)})


def settings_of(drawn: DrawnCase) -> Settings:
    """Return the settings that differ from defaults, and those that show that a part exists."""
    shape = drawn.case.shape
    settings: Settings = {}
    derived = _derived(shape)
    for kind, owner in ((ModelShape, shape), *((part, getattr(shape, name)) for name, part in PARTS.items()),
                        (DrawnTeacher, drawn.case.teacher), (Layout, drawn.layout), (Case, drawn.case)):  # fmt: skip
        for key, field, _ in TABLES[kind] if owner is not None else []:
            setting = getattr(owner, field.name)
            # A part whose settings all equal their defaults would otherwise vanish from the line, and with it the part
            # itself.
            is_marker = ("." in key and field.default is MISSING) or key in MARKERS
            if is_marker or setting != derived.get(key, _default(key, field)):
                settings[key] = setting
    return settings


def _derived(shape: ModelShape) -> Settings:
    """Return fields that a shape fills in by itself."""
    head_dim = shape.mla.nope_dim + shape.mla.rope_dim if shape.mla else shape.hidden // shape.heads
    return {"kv_heads": shape.heads} | ({"head_dim": head_dim} if shape.mla or shape.hidden % shape.heads == 0 else {})


def build_case(settings: Settings) -> DrawnCase:
    """Build a case from settings. Raises PlanError when they are illegal."""
    parts = {
        name: _build(part, settings) for name, part in PARTS.items() if any(k.startswith(name + ".") for k in settings)
    }
    shape = _build(ModelShape, settings, **parts)
    layout = _build(Layout, settings)
    teacher = _build(DrawnTeacher, settings) if any(key.startswith(TEACHER) for key in settings) else None
    drawn = DrawnCase(case=_build(Case, settings, shape=shape, teacher=teacher), layout=layout)
    refusals = violations(drawn)
    if refusals:
        raise PlanError(refusals[0])
    return drawn


def violations(drawn: DrawnCase) -> list[str]:
    """Return why the layout cannot train the case. Empty = it can."""
    case, layout = drawn.case, drawn.layout
    if case.shape.positions == "learned" and case.sequence > case.shape.max_positions:
        return [f"sequence={case.sequence} exceeds max_positions={case.shape.max_positions}: take a shorter sequence"]
    # Steps may differ in their batch, and each batch must be divisible by the ranks and micro-batches.
    for batch in sorted({case.sequences(step) for step in range(1, case.steps + 1)}):
        recipe = replace(case.recipe, sequence=case.sequence, global_batch=batch)
        refusals = layout_violations(case.shape, recipe, layout)
        if case.teacher:
            theirs = case.teacher.shape(case.shape)
            refusals += distillation_violations(recipe, case.shape, theirs, layout, drawn=False, mixed=False)
        if refusals:
            return refusals
        # It raises PlanError itself for a batch that micro-batches do not divide.
        layout.micro_batches(batch)
    return []


def _build(kind: type, settings: Settings, **parts: Any) -> Any:
    field_values = {field.name: settings.get(key, _default(key, field)) for key, field, _ in TABLES[kind]}
    return kind(**field_values, **parts)


def _default(key: str, field: "Field[Any]") -> Any:
    return BASE.get(key, field.default)


def _split_words(text: str) -> Iterator[tuple[str, str]]:
    seen = set()
    for part in text.split():
        key, equals, word = part.partition("=")
        if not equals or not word:
            raise PlanError(f"--case: {part!r} is not KEY=VALUE, such as kv_heads=1")
        if key not in HINTS:
            raise PlanError(f"--case: {key!r} is not known; {suggest(key, HINTS, 1)}")
        if key in seen:
            raise PlanError(f"--case: {key!r} is given twice")
        seen.add(key)
        yield key, word


def _format_value(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse_word(key: str, word: str) -> Any:
    hint = HINTS[key]
    # Only `T | None` occurs here, and None is never written: parse the word as T.
    if get_origin(hint) is UnionType:
        hint = next(alternative for alternative in get_args(hint) if alternative is not NoneType)
    if get_origin(hint) is Literal:
        values_by_word = {_format_value(value): value for value in get_args(hint)}
        if word not in values_by_word:
            raise PlanError(f"--case: {key}={word} is unknown: take one of {', '.join(values_by_word)}")
        return values_by_word[word]
    try:
        if get_origin(hint) is tuple:
            return tuple(map(int, word.split(",")))
        if hint is bool:
            return {"true": True, "false": False}[word]
        return hint(word)
    except (ValueError, KeyError):
        kind = "numbers with commas" if get_origin(hint) is tuple else {bool: "true or false"}.get(hint, "a number")
        raise PlanError(f"--case: {key}={word} must be {kind}") from None


def random_case(seed: int, index: int, processes: int = 8, *, compiled: bool = False) -> DrawnCase:
    """Return case `index` of a seed, the same on every machine. `compiled` compiles blocks."""
    # Python hashes a text seed by SHA-512, so the draws are equal on every platform and version.
    random = Random(f"{seed}:{index}")
    for _ in range(ATTEMPTS):
        settings = _draw_layout(random, processes)
        settings |= _draw_shape(random, settings)
        settings |= _draw_stages(random, settings)
        settings |= _draw_recipe(random, settings)
        settings |= _draw_fp8(random, settings) | ({"compile": "on"} if compiled else {})
        settings |= _draw_expert_chunks(random, settings)
        settings |= {"optimizer": "muon"} if often(random, MUON) else {}
        settings |= draw_adapters(random, settings)  # after the others, so that earlier seeds draw the same cases
        settings |= draw_teacher(random, settings)  # and this after it
        # Later features are drawn last: a draw in between would shift all that follow, and every seed would give
        # another case.
        settings |= draw_codes(random, settings) | draw_rounding(random, settings)
        settings |= draw_dropout(random, settings)
        try:
            return _drop_unused(build_case(settings))
        except PlanError:
            continue
    raise PlanError(f"no legal case in {ATTEMPTS} draws for seed={seed}, index={index}: take more processes")


def _drop_unused(drawn: DrawnCase) -> DrawnCase:
    """Reset settings without an effect, so that they are not shown."""
    layout = drawn.layout
    if layout.cp == 1:
        layout = replace(layout, context="ring", context_split="zigzag")
    return replace(drawn, layout=layout)


def _draw_layout(random: Random, processes: int) -> Settings:
    """Draw degrees of a random number of processes, and the use of each."""
    worlds = {world: weight for world, weight in WORLDS.items() if world <= processes}
    world = random.choices(list(worlds), list(worlds.values()))[0]
    degrees = dict.fromkeys(DEGREES, 1)
    while world > 1:
        # Any divisor may go to any axis: degrees such as dp_shard=4 must occur as well as products of smaller ones.
        factor = random.choice([n for n in range(2, world + 1) if world % n == 0])
        degrees[random.choice(DEGREES)] *= factor
        world //= factor
    layout: Settings = dict(degrees)
    layout["sp"] = degrees["tp"] > 1 and often(random, 0.5)
    layout["tp_chunks"] = random.choice((0, 2, 3)) if degrees["tp"] > 1 else 0
    layout["zero"] = random.randrange(4) if degrees["dp_shard"] * degrees["cp"] > 1 else 0
    layout["context"] = random.choice(("ring", "all-gather"))
    layout["context_split"] = random.choice(("zigzag", "zigzag", "striped", "chunks"))
    layout["recompute"] = random.choice(("none", *RECOMPUTE))
    if layout["recompute"] != "none" and often(random, 0.4):
        layout["recompute_layers"] = random.randint(1, 3)
    layout["offload"] = "activations" if layout["recompute"] in OFFLOADED and often(random, 0.3) else "off"
    # Reference kernels are slower and hide errors of the fast ones, so they are drawn once in six cases.
    layout["kernels"] = random.choice(("auto", "auto", "auto", "auto", "auto", "reference"))
    if degrees["pp"] > 1:
        layout["schedule"] = random.choice(NAMES)
        kind = KINDS[layout["schedule"]]
        deeper = (1, kind.stages, kind.stages + 1) if kind.deeper else ()
        layout["vp"] = random.choice((kind.stages, *deeper))
    return layout


def _draw_shape(random: Random, layout: Settings) -> Settings:
    tp, stages = layout["tp"], layout["pp"] * layout.get("vp", 1)
    latent, routed = often(random, MORE_SHAPES / 2), often(random, MORE_SHAPES)
    # Heads are multiples of tp, as its rule asks. Other sizes ignore it: round ones hide wrong cuts.
    heads = tp * random.choice((1, 1, 2, 3) if tp > 1 else (1, 2, 3, 4, 6))
    shape: Settings = {
        "vocab": random.choice(VOCABULARIES),
        "layers": max(1, stages + random.randrange(4)) if stages > 1 else random.randint(1, 4),
        "hidden": random.randint(12, 40),
        "heads": heads,
        "ffn": random.randint(max(8, tp), 48),
        "norm": random.choice(("rmsnorm", "rmsnorm", "layernorm")),
        "mlp": random.choice(("swiglu", "swiglu", "gelu", "gelu_tanh")),
        "qkv_bias": often(random, 0.4),
        "out_bias": often(random, 0.4),
        "mlp_bias": often(random, 0.4),
        "tied": often(random, MORE_SHAPES),
    }
    if often(random, 2 * MORE_SHAPES / 2):
        shape["window"] = random.randint(1, 12)
        shape["window_from_layer"] = random.randint(0, shape["layers"])
    if latent:
        shape |= _draw_latent_attention(random)
    else:
        shape |= _draw_plain_attention(random, heads, tp)
    if routed:
        shape |= _draw_experts(random, layout, shape["layers"])
    if shape.get("positions") != "learned":
        shape |= _draw_rotation(random)
    return shape


def _draw_plain_attention(random: Random, heads: int, tp: int) -> Settings:
    """Draw key heads from one to all, as tp allows, and odd head sizes where nothing is rotated."""
    # Key heads are either split over tp or repeated on its ranks: one number must divide the other.
    legal = [n for n in range(1, heads + 1) if heads % n == 0 and (n % tp == 0 or tp % n == 0)]
    attention: Settings = {"kv_heads": random.choice([1, *legal]), "qk_norm": often(random, MORE_SHAPES)}
    if often(random, 0.25):
        return attention | {"positions": "learned", "head_dim": random.choice((3, 5, 7, 8, 9, 11))}
    # Rotary embeddings turn pairs of numbers, so the head size is even wherever positions are rotated.
    return attention | {"head_dim": random.choice((4, 6, 8, 10, 14) if attention["qk_norm"] else (2, 4, 6, 8, 10, 14))}


def _draw_latent_attention(random: Random) -> Settings:
    nope, rope = random.randint(3, 8), random.choice((2, 4, 6))
    return {
        "mla.q_rank": random.choice((0, random.randint(5, 14))),
        "mla.kv_rank": random.randint(5, 14),
        "mla.nope_dim": nope,
        "mla.rope_dim": rope,
        "mla.v_dim": random.randint(3, nope + rope + 3),
    }


def _draw_experts(random: Random, layout: Settings, layers: int) -> Settings:
    # Experts are spread over the ranks of these axes; ep must divide both the ranks and the experts.
    ranks = layout["dp_shard"] * layout["cp"] * layout["tp"]
    experts = random.choice((3, 4, 5, 6, 7, 8))
    shared = gcd(experts, ranks)
    degrees = [n for n in range(1, shared + 1) if shared % n == 0]
    # One expert in a group leaves nothing to choose within it, so groups are fewer than experts.
    groups = random.choice([n for n in range(1, experts + 1) if experts % n == 0 and n < experts])
    top_groups = random.randint(1, groups)
    moe: Settings = {
        "moe.experts": experts,
        "moe.top_k": random.randint(1, min(3, experts // groups * top_groups)),
        "moe.ffn": random.randint(max(4, layout["tp"]), 16),
        "moe.shared_experts": random.choice((0, 0, 1, 2)),
        "moe.first_dense": random.choice((0, 0, random.randint(0, layers))),
        "moe.scoring": random.choice(("softmax", "softmax", "sigmoid")),
        "moe.normalize_top_k": often(random, 0.6),
        "moe.groups": groups,
        "moe.top_groups": top_groups,
        "moe.routed_scale": random.choice((1.0, 1.0, 2.5)),
        "moe.correction_bias": often(random, 0.3),
    }
    # The largest degree crosses most ranks, and few draws would reach it by chance.
    ep = degrees[-1] if often(random, 0.6) else random.choice(degrees)
    return moe | ({"ep": ep} | ({"sp": True} if layout["tp"] > 1 else {}) if ep > 1 else {})


def _draw_rotation(random: Random) -> Settings:
    rotation: Settings = {"rope_interleaved": often(random, 0.3), "rope_theta": random.choice((100.0, 10000.0))}
    kind = random.choice((None, None, None, "linear", "llama3", "yarn"))
    if kind:
        rotation |= {
            "rope_scaling.kind": kind,
            "rope_scaling.factor": random.choice((2.0, 3.5)),
            "rope_scaling.original_positions": random.choice((8, 16)),
        }
    if kind == "yarn" and often(random, 0.5):
        rotation |= {"rope_scaling.mscale": 1.0, "rope_scaling.mscale_all_dim": random.choice((0.0, 0.7))}
    return rotation


def _draw_stages(random: Random, settings: Settings) -> Settings:
    stages = settings["pp"] * settings.get("vp", 1)
    if settings["pp"] == 1 or not often(random, 0.3):
        return {}
    cuts = sorted(random.sample(range(1, settings["layers"]), min(stages, settings["layers"]) - 1))
    return {"stages": tuple(end - start for start, end in zip([0, *cuts], [*cuts, settings["layers"]], strict=True))}


def _draw_recipe(random: Random, settings: Settings) -> Settings:
    dp, pp = settings["dp_replicate"] * settings["dp_shard"], settings["pp"]
    chunks = settings["cp"] * (2 if settings["cp"] > 1 and settings["context_split"] == "zigzag" else 1)
    # A sequence is cut by context chunks, then by sequence parallelism, then into pieces that overlap exchanges.
    unit = chunks * (settings["tp"] if settings["sp"] else 1) * max(1, settings["tp_chunks"])
    rows = random.choice((1, 1, 2))
    passes = random.randint(pp, 3 * pp) if pp > 1 else random.randint(1, 4)
    batch = dp * rows * max(1, min(passes, MOST_SEQUENCES // (dp * rows)))
    sequence = unit * random.randint(max(1, -(-6 // unit)), max(1, 20 // unit))
    recipe: Settings = {
        "sequence": sequence,
        "global_batch": batch,
        "micro_batch": rows if pp > 1 or often(random, 0.8) else 0,
        "seed": random.randrange(1000),
        "clip": random.choice((0.0, 0.05, 1.0, 1000.0)),
        "packed": often(random, 0.3),
        "precision": random.choices(("fp32", "bf16", "fp16"), (12, 2, 3))[0],
        "balance_loss": random.choice((0.0, 0.01, 0.3)) if "moe.experts" in settings else 0.01,
    }
    if often(random, 0.3):
        recipe["batches"] = tuple(dp * rows * random.randint(1, max(1, batch // (dp * rows))) for _ in range(2))
    if often(random, 0.4):
        recipe["empty"] = _draw_empty_sequences(random, dp, rows, batch)
    if often(random, 0.15):
        recipe["last_target"] = random.randint(1, sequence)
    # An overflow in one sequence must make every rank skip the step and halve the same loss scale.
    if recipe["precision"] == "fp16" and often(random, 0.6):
        recipe["overflow"], recipe["overflow_sequence"] = random.choice((1, 2)), random.randrange(batch)
    recipe |= _draw_states(random, recipe["precision"])
    if recipe["precision"] != "fp32":
        recipe["kernels"] = "auto"  # the reference ones round elsewhere than the kernels of one device
    if recipe["precision"] != "fp32" and "moe.experts" in settings:  # else a token that two experts want almost equally
        recipe |= {"moe.top_k": settings["moe.experts"], "moe.groups": 1, "moe.top_groups": 1}  # goes to either
    return recipe


def _draw_states(random: Random, precision: str) -> Settings:
    """Draw narrow states at times; 8-bit ones with matrices large enough for them."""
    states: Settings = {}
    if precision == "bf16" and often(random, 0.3):
        states["master_weights"] = "none"
    if often(random, 0.2):
        states["optimizer_states"] = random.choice(("bf16", "int8"))
        # Small tensors keep plain states, so an 8-bit state is only tested with matrices above that size.
        if states["optimizer_states"] == "int8":
            states |= {"hidden": random.randint(64, 80), "ffn": random.choice((64, 128, 256, 500))}
    return states


def _draw_fp8(random: Random, settings: Settings) -> Settings:
    """Draw products in fp8 at times, with the matrix sizes that these need."""
    if settings["precision"] != "bf16" or "mla.kv_rank" in settings or settings["layers"] > MOST_NARROW:
        return {}
    if not often(random, 0.6):
        return {}
    unit = MULTIPLE * settings["tp"]
    units = random.randint(2, 4)
    every = "fp8-all" if units == 3 else "fp8"  # no draw of its own
    fp8: Settings = {"products": every, "head_dim": MULTIPLE, "hidden": unit * units}
    fp8["ffn"] = unit * random.randint(1, 2)
    # Every width of a product in fp8 is a multiple of 16 on each rank of tp.
    # The experts multiply in fp8 as well, so their width obeys the same rule.
    return fp8 | ({"moe.ffn": unit} if "moe.ffn" in settings else {})


def _draw_expert_chunks(random: Random, settings: Settings) -> Settings:
    local = settings.get("moe.experts", 0) // settings.get("ep", 1)
    if settings.get("ep", 1) == 1 or settings.get("schedule") in SPLIT:
        return {}
    # 0 leaves the number of pieces to the engine.
    return {"ep_chunks": random.choice([0, *(n for n in range(2, local + 1) if local % n == 0)])}


def _draw_empty_sequences(random: Random, dp: int, rows: int, batch: int) -> tuple[int, ...]:
    """Draw sequences without targets: of one reader, of one micro-batch on all readers or one, or any."""
    of_reader = batch // dp
    passes = max(1, of_reader // rows)
    reader, pass_number = random.randrange(dp), random.randrange(passes)
    micro_batch = [[who * of_reader + pass_number * rows + row for row in range(rows)] for who in range(dp)]
    kinds: Sequence[Sequence[int]] = (
        range(reader * of_reader, (reader + 1) * of_reader),
        [row for rows_of_reader in micro_batch for row in rows_of_reader],
        micro_batch[reader],
        random.sample(range(batch), random.randint(1, max(1, batch // 2))),
    )
    empty_sequences = sorted(random.choice(kinds))
    # A batch without any target has no loss, so one sequence stays.
    return tuple(empty_sequences if len(empty_sequences) < batch else empty_sequences[1:])


def often(random: Random, share: float) -> bool:
    """Return True in that share of the draws."""
    return random.random() < share


def draw_adapters(random: Random, settings: Settings) -> Settings:
    """Draw frozen weights with adapters, with a rank that suits fp8 products."""
    if not often(random, ADAPTERS):
        return {}
    targets = random.choice(("all", "all", "all", "attention", "mlp", "q,v", "o,down", "v,up"))
    lora: Settings = {"lora.targets": targets, "lora.rslora": often(random, 0.3)}
    lora["lora.rank"] = MULTIPLE if "products" in settings else random.choice((1, 2, 3, 5, 8))
    lora |= {"lora.alpha": random.choice((4.0, 16.0)), "lora.dora": often(random, 0.3)}
    plain = settings["precision"] == "fp32" and "compile" not in settings
    if plain and often(random, CODES):  # each rank quantizes what one device does
        lora["lora.base"] = random.choice(BASES)
        # Codes are sharded by ZeRO-3 alone, which few draws combine with a quantized base by chance.
        if settings["pp"] == 1 and settings["dp_shard"] * settings["cp"] > 1 and often(random, SHARED_CODES):
            lora["zero"] = 3
    return lora


def draw_teacher(random: Random, settings: Settings) -> Settings:
    """Draw a teacher that is smaller than its student, as large, or has a few more layers."""
    if not often(random, TEACHERS):
        return {}
    stages = settings["pp"] * settings.get("vp", 1)
    narrow = "products" in settings  # sizes of the teacher are then those of the student, some smaller than fp8's
    return {
        "teacher.layers": max(stages, random.randint(1, 4)),
        "teacher.hidden": settings["hidden"] if narrow else random.randint(12, settings["hidden"]),
        "teacher.ffn": settings["ffn"] if narrow else random.randint(max(4, settings["tp"]), settings["ffn"]),
        "teacher.dense": "moe.experts" in settings and often(random, 0.3),
        "teacher.filled": random.choice((0, 0, 0, 5)) if settings["tp"] == 1 else 0,
        "teacher.beta": random.choice((0.0, 0.0, 0.5, 0.1, 1.0)),
        "teacher.temperature": random.choice((1.0, 1.0, 0.7, 2.0)),
        "teacher.hard": random.choice((0.0, 0.0, 0.3)),
    }


def draw_codes(random: Random, settings: Settings) -> Settings:
    """Draw codes of a teacher, or LLM.int8() as the base of adapters, at times."""
    codes: Settings = {}
    if settings["precision"] == "fp32" and "teacher.layers" in settings and often(random, CODES):
        codes["teacher.base"] = random.choice(BASES)
    if "lora.base" in settings and settings["tp"] == 1 and often(random, CODES):
        codes["lora.base"] = ROWS_BASE
    return codes


def draw_rounding(random: Random, settings: Settings) -> Settings:
    """Draw matrices that are rounded in every product, at times.

    Real zeros need whole groups, so each rank then gets inputs of whole groups.
    """
    rounds_otherwise = {"products", "compile", "lora.rank", "optimizer_states"} & settings.keys()
    if settings["precision"] != "fp32" or rounds_otherwise or not often(random, ROUNDED):
        return {}
    rounding: Settings = {"fake_quantize": random.choice(learnable())}
    scheme = SCHEMES[rounding["fake_quantize"]]
    if settings["tp"] > 1 and scheme.zeros == "real":
        unit = settings["tp"] * scheme.group
        rounding |= {"ffn": unit, "mla.v_dim" if "mla.kv_rank" in settings else "head_dim": scheme.group}
        rounding |= {"moe.ffn": unit} if "moe.ffn" in settings else {}
    return rounding


def draw_dropout(random: Random, settings: Settings) -> Settings:
    """Draw dropout of the model, of its adapters or of both, at times."""
    drops: Settings = {}
    if often(random, DROPOUT):
        drops["dropout"] = random.choice((0.1, 0.3))
    if "lora.rank" in settings and not settings.get("lora.dora") and often(random, DROPOUT):
        drops["lora.dropout"] = random.choice((0.1, 0.5))
    return drops

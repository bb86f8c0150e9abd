"""A case and its layout as one line of KEY=VALUE words, and back: the format of `meshwright verify --case`.

    kv_heads=1 heads=2 tp=2 clip=0.05

Keys are the fields of Case, ModelShape and Layout. The prefixes `moe.`, `mla.`, `rope_scaling.` and `lora.` name fields
of parts of a shape, and `teacher.` those of a teacher. Omitted fields have their default, or the value in BASE.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from meshwright.observe.oracle.drawn_teacher import DrawnTeacher
from meshwright.observe.oracle.one_device import Case
from meshwright.spec.errors import PlanError
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.presets import PARTS, suggest
from meshwright.spec.rules.legal import layout_violations
from meshwright.spec.rules.objectives import distillation_violations

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnCase:
    """A training case, and the layout that is compared with one device."""

    case: Case
    layout: Layout


def _fields_by_key(kind: type, prefix: str = "") -> Iterator[tuple[str, "Field[Any]", Any]]:
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
    for batch in sorted({case.sequences(step) for step in range(1, case.steps + 1)}):
        recipe = replace(case.recipe, sequence=case.sequence, global_batch=batch)
        refusals = layout_violations(case.shape, recipe, layout)
        if case.teacher:
            theirs = case.teacher.shape(case.shape)
            refusals += distillation_violations(recipe, case.shape, theirs, layout, drawn=False, mixed=False)
        if refusals:
            return refusals
        layout.micro_batches(batch)
    return []


def _build(kind: type, settings: Settings, **parts: Any) -> Any:
    named = {field.name: settings.get(key, _default(key, field)) for key, field, _ in TABLES[kind]}
    return kind(**named, **parts)


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
    if get_origin(hint) is UnionType:
        hint = next(alternative for alternative in get_args(hint) if alternative is not NoneType)
    if get_origin(hint) is Literal:
        known = {_format_value(value): value for value in get_args(hint)}
        if word not in known:
            raise PlanError(f"--case: {key}={word} is unknown: take one of {', '.join(known)}")
        return known[word]
    try:
        if get_origin(hint) is tuple:
            return tuple(map(int, word.split(",")))
        if hint is bool:
            return {"true": True, "false": False}[word]
        return hint(word)
    except (ValueError, KeyError):
        kind = "numbers with commas" if get_origin(hint) is tuple else {bool: "true or false"}.get(hint, "a number")
        raise PlanError(f"--case: {key}={word} must be {kind}") from None

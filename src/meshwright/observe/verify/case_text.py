"""A case and its layout as one line of KEY=VALUE words, and back: what `meshwright verify --case` reads.

    kv_heads=1 heads=2 tp=2 clip=0.05

Keys are the fields of Case, ModelShape and Layout; with `moe.`, `mla.`, `rope_scaling.` and `lora.` before them those
of parts of a shape, and with `teacher.` those of a teacher. A field that is not written has its default; for fields
without one it is that of BASE.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from meshwright.observe.verify.drawn_teacher import DrawnTeacher
from meshwright.observe.verify.one_device import Case
from meshwright.spec.distillation_rules import distillation_violations
from meshwright.spec.errors import PlanError
from meshwright.spec.layout import Layout
from meshwright.spec.legal import layout_violations
from meshwright.spec.presets import PARTS, suggested
from meshwright.spec.shape import ModelShape

BASE: Mapping[str, Any] = {
    "vocab": 61, "layers": 2, "hidden": 24, "heads": 4, "ffn": 40, "max_positions": 64, "compile": "off",
    "moe.experts": 4, "moe.top_k": 2, "moe.ffn": 12,
    "mla.q_rank": 0, "mla.kv_rank": 10, "mla.nope_dim": 6, "mla.rope_dim": 4, "mla.v_dim": 5,
    "rope_scaling.kind": "linear", "rope_scaling.factor": 2.0, "rope_scaling.original_positions": 16,
    "lora.rank": 3, "lora.alpha": 6.0,
}  # fmt: skip
"""Values of fields that have no default, and of those whose default is not meant for tiny models on a CPU."""

TEACHER = "teacher."
LEFT_OUT = ("name", "shape", "teacher", *PARTS)
ALWAYS = (TEACHER + "layers",)
"""Keys that say that there is the part, though they have a default."""
Settings = dict[str, Any]
"""Values by key; only those that differ from the defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What is trained, and the layout that is held against one device."""

    case: Case
    layout: Layout


def _keys(kind: type, prefix: str = "") -> Iterator[tuple[str, "Field[Any]", Any]]:
    hints = get_type_hints(kind)
    for field in fields(kind):
        if prefix or field.name not in LEFT_OUT:
            yield prefix + field.name, field, hints[field.name]


TABLES = {
    kind: list(_keys(kind, prefix))
    for kind, prefix in (
        (ModelShape, ""),
        *((part, name + ".") for name, part in PARTS.items()),
        (DrawnTeacher, TEACHER),
        (Layout, ""),
        (Case, ""),
    )
}
HINTS: Mapping[str, Any] = {key: hint for table in TABLES.values() for key, _, hint in table}


def text_of(drawn: Drawn) -> str:
    """One line from which `drawn_of` makes the same again."""
    return " ".join(f"{key}={_word(value)}" for key, value in settings_of(drawn).items())


def drawn_of(text: str) -> Drawn:
    """What a line says; PlanError for a key or value that is unknown, and for a layout that is illegal."""
    return drawn_from({key: _value(key, word) for key, word in _split(text)})


def settings_of(drawn: Drawn) -> Settings:
    """What is not as in BASE or the defaults. The fields of a part that have no default are always among it: they say
    that there is the part."""
    shape = drawn.case.shape
    found: Settings = {}
    derived = _derived(shape)
    for kind, owner in ((ModelShape, shape), *((part, getattr(shape, name)) for name, part in PARTS.items()),
                        (DrawnTeacher, drawn.case.teacher), (Layout, drawn.layout), (Case, drawn.case)):  # fmt: skip
        for key, field, _ in TABLES[kind] if owner is not None else []:
            value = getattr(owner, field.name)
            said = ("." in key and field.default is MISSING) or key in ALWAYS
            if said or value != derived.get(key, _default(key, field)):
                found[key] = value
    return found


def _derived(shape: ModelShape) -> Settings:
    """Fields that a shape fills in by itself."""
    own = shape.mla.nope_dim + shape.mla.rope_dim if shape.mla else shape.hidden // shape.heads
    return {"kv_heads": shape.heads} | ({"head_dim": own} if shape.mla or shape.hidden % shape.heads == 0 else {})


def drawn_from(settings: Settings) -> Drawn:
    """As `drawn_of`, of values; PlanError where they are illegal."""
    parts = {
        name: _made(part, settings) for name, part in PARTS.items() if any(k.startswith(name + ".") for k in settings)
    }
    shape = _made(ModelShape, settings, **parts)
    layout = _made(Layout, settings)
    teacher = _made(DrawnTeacher, settings) if any(key.startswith(TEACHER) for key in settings) else None
    drawn = Drawn(case=_made(Case, settings, shape=shape, teacher=teacher), layout=layout)
    refusals = violations(drawn)
    if refusals:
        raise PlanError(refusals[0])
    return drawn


def violations(drawn: Drawn) -> list[str]:
    """Why the layout cannot train the case; empty = it can."""
    case, layout = drawn.case, drawn.layout
    if case.shape.positions == "learned" and case.sequence > case.shape.max_positions:
        return [f"sequence={case.sequence} exceeds max_positions={case.shape.max_positions}: take a shorter sequence"]
    for batch in sorted({case.sequences(step) for step in range(1, case.steps + 1)}):
        recipe = replace(case.recipe, sequence=case.sequence, global_batch=batch)
        found = layout_violations(case.shape, recipe, layout)
        if case.teacher:
            theirs = case.teacher.shape(case.shape)
            found += distillation_violations(recipe, case.shape, theirs, layout, drawn=False, mixed=False)
        if found:
            return found
        layout.micro_batches(batch)
    return []


def _made(kind: type, settings: Settings, **given: Any) -> Any:
    named = {field.name: settings.get(key, _default(key, field)) for key, field, _ in TABLES[kind]}
    return kind(**named, **given)


def _default(key: str, field: "Field[Any]") -> Any:
    return BASE.get(key, field.default)


def _split(text: str) -> Iterator[tuple[str, str]]:
    seen = set()
    for part in text.split():
        key, equals, word = part.partition("=")
        if not equals or not word:
            raise PlanError(f"--case: {part!r} is not KEY=VALUE, such as kv_heads=1")
        if key not in HINTS:
            raise PlanError(f"--case: {key!r} is not known; {suggested(key, HINTS, 1)}")
        if key in seen:
            raise PlanError(f"--case: {key!r} is given twice")
        seen.add(key)
        yield key, word


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(key: str, word: str) -> Any:
    """The value of a word, of the kind that the field has."""
    hint = HINTS[key]
    if get_origin(hint) is UnionType:
        hint = next(one for one in get_args(hint) if one is not NoneType)
    if get_origin(hint) is Literal:
        known = {_word(value): value for value in get_args(hint)}
        if word not in known:
            raise PlanError(f"--case: {key}={word} is unknown: take one of {', '.join(known)}")
        return known[word]
    try:
        if get_origin(hint) is tuple:
            return tuple(int(one) for one in word.split(","))
        if hint is bool:
            return {"true": True, "false": False}[word]
        return hint(word)
    except (ValueError, KeyError):
        kind = "numbers with commas" if get_origin(hint) is tuple else {bool: "true or false"}.get(hint, "a number")
        raise PlanError(f"--case: {key}={word} must be {kind}") from None

"""A config.json as a shape to plan with: also of families that the engine does not train, and strictly.

A key that nobody here understands, and that is on no list of harmless ones, is refused: it could change the sizes.
"""

from collections.abc import Mapping
from typing import Any

from meshwright.model.hub.config import CODED, shape_from_config, written_keys
from meshwright.model.hub.entries import Entries
from meshwright.model.hub.families import FAMILIES
from meshwright.model.hub.ignored_keys import unknown_keys
from meshwright.model.hub.planned_families import ALIASES, PLANNED, READ, WRAPPERS, PlannedFamily
from meshwright.spec.errors import HubError, PlanError
from meshwright.spec.shape import MOST_LAYERS, ModelShape

SIZES = {
    "vocab": "vocab_size", "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "ffn": "intermediate_size",
    "max_positions": "max_position_embeddings",
}  # fmt: skip
OPTIONAL = ("kv_heads", "head_dim")


class _Read(dict[str, object]):
    """A config that knows which of its keys were asked for."""

    def __init__(self, config: Mapping[str, object]) -> None:
        super().__init__(config)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)


def is_planned(config: Mapping[str, object]) -> bool:
    """Whether a config is of a family that is planned and not trained; of phi3 some are."""
    kind = _kind(config)
    return kind in WRAPPERS or (kind in PLANNED and (kind not in FAMILIES or bool(planned_shape(config).plan_only)))


def planned_shape(config: Mapping[str, object]) -> ModelShape:
    """The shape of a config, with the parts that the engine does not have (`ModelShape.plan_only` names them).

    HubError: an unknown family, a key that is not known and could change the shape, or errors as shape_from_config.
    """
    kind = _kind(config)
    if kind in WRAPPERS:
        return planned_shape(_text(config, WRAPPERS[kind]))
    if kind in ALIASES:
        config = {**config, "model_type": ALIASES[kind], "architectures": [FAMILIES[ALIASES[kind]].architecture]}
    if kind not in FAMILIES and kind not in PLANNED and kind not in ALIASES:
        known = ", ".join((*FAMILIES, *(name for name in PLANNED if name not in FAMILIES), *WRAPPERS, *ALIASES))
        raise HubError(f"config.json: model_type={kind!r} is not known to the planner (known: {known})")
    read = _Read(config)
    family = PLANNED.get(str(kind))
    found = _shape(read, family) if family else None
    if found is None or not found.plan_only:
        found = shape_from_config(read)
        read.asked |= written_keys(found)  # as the length of windows, which nobody reads where there are none
    unknown = unknown_keys(config, {*read.asked, *READ, *(family.read if family else ())})
    for key, value in unknown.items():
        raise HubError(
            f"config.json: {key}={repr(value)[:60]} is not known and could change the shape: remove the key "
            "if it does not"
        )
    return found


def _kind(config: Mapping[str, object]) -> object:
    kind = config.get("model_type")
    return kind.removeprefix(CODED) if isinstance(kind, str) else kind


def _text(config: Mapping[str, object], kind: str) -> dict[str, object]:
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        raise HubError(f"config.json: text_config={inner!r} must be an object: the language model is described there")
    outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**outer, **inner, "model_type": kind}


def _shape(read: _Read, family: PlannedFamily) -> ModelShape:
    entries = Entries(_Default(read, family.defaults))
    for key in ("hidden_act", "hidden_activation"):
        entries.allow(key, (*family.activations, None))
    sizes: dict[str, Any] = {}
    for name, key in SIZES.items():
        sizes[name] = (entries.maybe_integer(key) or 0) if name in OPTIONAL else entries.integer(key)
    if sizes["layers"] > MOST_LAYERS:
        raise entries.fail(f"num_hidden_layers={sizes['layers']} must be at most {MOST_LAYERS}")
    sizes["norm_eps"] = entries.number(family.eps_key)
    sizes["tied"] = entries.flag("tie_word_embeddings", False)
    sizes["rope_theta"] = _theta(entries)
    try:
        return ModelShape(name=str(read.get("model_type")), **{**sizes, **family.parts(entries)})
    except PlanError as error:
        raise error if isinstance(error, HubError) else entries.fail(str(error)) from error


class _Default(_Read):
    """A config with what its absent keys stand for; who asks it asks the config."""

    def __init__(self, config: _Read, defaults: Mapping[str, object]) -> None:
        super().__init__({**defaults, **config})
        self.asked = config.asked


def _theta(entries: Entries) -> float:
    """Of the layers that see all, where kinds of layers have their own."""
    inner = entries.values.get("rope_parameters")
    if isinstance(inner, dict):
        inner = inner.get("full_attention", inner)
        if "rope_theta" in inner:
            return float(inner["rope_theta"])
    return entries.number("rope_theta", 10000.0)

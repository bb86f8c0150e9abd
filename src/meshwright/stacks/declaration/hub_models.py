"""Models by their names on the Hugging Face Hub: presets, tuned copies of them, and published shapes beside them."""

import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any

from meshwright.spec import ModelShape, presets
from meshwright.spec.errors import PlanError

TABLE = "hub_models.toml"
UNSHAPED = ("base", "source", "parameters")
"""What a table says beside fields of its shape."""
MARKS = re.compile(
    r"^(meta-)|-(hf|instruct|chat|base|it|pt|thinking|fp16|bf16|\d{4}|v\d(\.\d)?|bnb-4bit|bnb-nf4|unsloth)$"
)
"""What is added to a model's name for a tuned or converted copy, whose matrices are the same."""
FAMILY = re.compile(
    r"(?<![a-z0-9])(llama|qwen|gemma|mistral|mixtral|olmo|phi|gpt-oss)-?v?(\d+(?:\.\d+|-\d(?![\w.]))?)?(?![\d.]|b\b)(?:.*?)"
    r"(?<![\dx.])(\d+(?:\.\d+)?b|8x\d+b)(?![a-z0-9])"
)
"""In the name of a copy: family, version, size."""
OTHER_PARTS = re.compile(
    r"vl\b|vision|audio|omni|multimodal|moe|reward|\brm\b|embed|rerank|guard|draft|eagle|medusa|pruned|"
    r"minitron|distill|-a\d+b|coder-next|scout|maverick|franken|(?<!8)x\d+b|8x8b"
)
"""In names of models that have more, or others, than the matrices of their family."""


@cache
def hub_names() -> Mapping[str, str]:
    """Preset -> its name on the Hugging Face hub, as its source says."""
    names = {}
    for name in presets.model_names():
        link = re.search(r"huggingface\.co/([\w.-]+/[\w.-]+)/", presets.published(name).source)
        if link:
            names[name] = link[1]
    return names


def hub_name(shape: ModelShape) -> str | None:
    """Of a preset; None for another shape."""
    return hub_names().get(shape.name)


@cache
def published_models() -> Mapping[str, Mapping[str, Any]]:
    """Name -> what the table has of it, beside presets."""
    return _table()["like"]  # type: ignore[no-any-return]  # a table of tables


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("meshwright.stacks").joinpath(TABLE).read_text(encoding="utf-8"))


@cache
def published_shape(name: str) -> ModelShape:
    """A preset, or a shape of the table; PlanError where there is neither."""
    return presets.shape_of(_fields(name))


def _fields(name: str) -> Mapping[str, Any]:
    entry = published_models().get(name)
    if entry is None:
        return presets.published(name).fields
    changed = {key: value for key, value in entry.items() if key not in UNSHAPED}
    base = {key: value for key, value in _fields(entry["base"]).items() if key != "unbuilt"}
    return {**base, **changed, "name": name}


def preset_of_hub(name: str) -> ModelShape | None:
    """The shape that a hub name means, of a copy that was tuned or converted too; None where there is none."""
    for preset, hub in hub_names().items():
        if hub.lower() == name.lower():
            return presets.model(preset)
    plain = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    while True:
        for pattern, preset in _table()["same"].items():
            if match := re.fullmatch(pattern, plain):
                return published_shape(match.expand(preset))
        with suppress(PlanError):
            return published_shape(plain)
        shorter = MARKS.sub("", plain, count=1)
        if shorter == plain:
            return None
        plain = shorter


def likely_preset(name: str) -> ModelShape | None:
    """The preset whose family, version and size stand in a name or path: of a copy that was tuned by others. None where
    none does, or where the name speaks of other parts than the family's. A guess: to be said."""
    for part in reversed(name.lower().replace("_", "-").split("/")):
        exact = preset_of_hub(part) if part else None
        matches = ((re.fullmatch(pattern, part), preset) for pattern, preset in _table()["tuned"].items())
        tuned = next((match.expand(preset) for match, preset in matches if match), None)
        if exact is not None or tuned:
            return exact or published_shape(str(tuned))
        sized = FAMILY.search(part)
        if sized is None or OTHER_PARTS.search(part):
            continue
        family, version, size = sized[1], (sized[2] or "").replace("-", "."), sized[3]
        words = (f"{family}-{version}-{size}", f"{family}{version}-{size}", f"{family}-{size}") if version else (
            f"{family}-{size}",)  # fmt: skip
        for word in words:
            with suppress(PlanError):
                return presets.model(word)
    return None

"""Models by their names on the Hugging Face Hub: presets, fine-tuned copies of them, and other published shapes."""

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
"""Entries of the table that are not fields of a shape."""
MARKS = re.compile(
    r"^(meta-)|-(hf|instruct|chat|base|it|pt|thinking|fp16|bf16|\d{4}|v\d(\.\d)?|bnb-4bit|bnb-nf4|unsloth)$"
)
"""Suffixes and prefixes of fine-tuned or converted copies, whose matrices are the same."""
FAMILY = re.compile(
    r"(?<![a-z0-9])(llama|qwen|gemma|mistral|mixtral|olmo|phi|gpt-oss)-?v?(\d+(?:\.\d+|-\d(?![\w.]))?)?(?![\d.]|b\b)(?:.*?)"
    r"(?<![\dx.])(\d+(?:\.\d+)?b|8x\d+b)(?![a-z0-9])"
)
"""Family, version and size within the name of a copy."""
OTHER_PARTS = re.compile(
    r"vl\b|vision|audio|omni|multimodal|moe|reward|\brm\b|embed|rerank|guard|draft|eagle|medusa|pruned|"
    r"minitron|distill|-a\d+b|coder-next|scout|maverick|franken|(?<!8)x\d+b|8x8b"
)
"""Words in names of models whose parts differ from those of their family."""


@cache
def hub_names() -> Mapping[str, str]:
    """Return the name on the Hugging Face Hub of each preset, read from the link of its source."""
    names = {}
    for name in presets.model_names():
        link = re.search(r"huggingface\.co/([\w.-]+/[\w.-]+)/", presets.published(name).source)
        if link:
            names[name] = link[1]
    return names


def hub_name(shape: ModelShape) -> str | None:
    """Return the name of a preset on the Hub, or None for any other shape."""
    return hub_names().get(shape.name)


@cache
def published_models() -> Mapping[str, Mapping[str, Any]]:
    """Return the models of the table that are no presets: their fields by name."""
    return _table()["like"]  # type: ignore[no-any-return]  # a table of tables


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("meshwright.stacks").joinpath(TABLE).read_text(encoding="utf-8"))


@cache
def published_shape(name: str) -> ModelShape:
    """Return the shape of a preset or of a model of the table. Raises PlanError for an unknown name."""
    return presets.shape_of(_fields(name))


def _fields(name: str) -> Mapping[str, Any]:
    entry = published_models().get(name)
    if entry is None:
        return presets.published(name).fields
    changed = {key: value for key, value in entry.items() if key not in UNSHAPED}
    base = {key: value for key, value in _fields(entry["base"]).items() if key != "unbuilt"}
    return {**base, **changed, "name": name}


def preset_of_hub(name: str) -> ModelShape | None:
    """Return the shape that a Hub name means, also for fine-tuned or converted copies, or None."""
    for preset, hub in hub_names().items():
        if hub.lower() == name.lower():
            return presets.model(preset)
    # Names of copies say what was done to the model: one mark after another is cut off until a name is known.
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
    """Return the preset whose family, version and size stand in a name or a path, or None.

    Names that mention parts which the family lacks give None. The answer is a guess, so tell the user.
    """
    # The last part of a path is the model; folders above it may name it too.
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

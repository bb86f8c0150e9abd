"""Rotary keys of a config.json, in both spellings: rope_theta + rope_scaling (v4) and rope_parameters (v5)."""

import math

from meshwright.model.hub.entries import Entries
from meshwright.spec.shape import ModelShape, RopeScaling, temperature

KINDS = ("linear", "llama3", "yarn")


def read_rope(entries: Entries, *, theta: float) -> dict[str, object]:
    """Read rope_theta and rope_scaling of the shape. `theta` is the default of the family."""
    inner = entries.inner("rope_scaling") or entries.inner("rope_parameters") or Entries({}, entries.where)
    if any(isinstance(value, dict) for value in inner.values.values()):
        raise inner.fail("rotary settings per kind of layer are not supported (give one for all layers)")
    stated = inner if "rope_theta" in inner else entries
    for part in (entries, inner):
        part.allow("partial_rotary_factor", (1.0, None))
    return {"rope_theta": stated.number("rope_theta", theta), "rope_scaling": _read_scaling(entries, inner)}


def _read_scaling(entries: Entries, inner: Entries) -> RopeScaling | None:
    kind = inner.text("rope_type", inner.values.get("type", "default"))
    if kind == "default":
        inner.allow("mrope_section", (None,))
        return None
    if kind == "dynamic":  # it only changes positions beyond max_position_embeddings
        return None
    if kind not in KINDS:
        raise inner.fail(f"rope scaling {kind!r} is not supported (supported: {', '.join(KINDS)})")
    positions = entries.integer("max_position_embeddings")
    if kind == "linear":
        factor = inner.number("factor")
        return RopeScaling(kind="linear", factor=factor, original_positions=max(1, round(positions / max(1.0, factor))))
    # Also read outside of the rotary settings, where transformers gives it priority.
    inside = inner.maybe_integer("original_max_position_embeddings")
    original = entries.maybe_integer("original_max_position_embeddings") or inside or positions
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=inner.number("factor"),
            original_positions=original,
            low_frequency_factor=inner.number("low_freq_factor"),
            high_frequency_factor=inner.number("high_freq_factor"),
        )
    return _read_yarn(inner, original, positions, latent="kv_lora_rank" in entries)


def _read_yarn(inner: Entries, original: int, positions: int, *, latent: bool) -> RopeScaling:
    """Read YaRN's settings. mscale counts only beside mscale_all_dim.

    Otherwise the attention factor is the paper's 0.1 ln(factor) + 1. A stated factor becomes a quotient of both
    mscales. With latent attention mscale_all_dim scales scores too, so a stated factor is refused.
    """
    inner.allow("truncate", (True, None))
    factor = positions / max(1, original) if inner.raw("factor", None) is None else inner.number("factor")
    all_dim = inner.number("mscale_all_dim", 0.0)
    mscale = inner.number("mscale", 0.0) if all_dim else 0.0
    if inner.raw("attention_factor", None) is not None:
        implied = temperature(factor, mscale or 1.0) / (temperature(factor, all_dim) if mscale else 1.0)
        stated = inner.number("attention_factor")
        if not math.isclose(stated, implied, rel_tol=1e-6):
            if latent or factor <= 1 or not 0.01 <= stated <= 100:  # beyond this range the quotient is not exact
                raise inner.fail(f"attention_factor={stated:g} is not supported, only {implied:.6g}")
            mscale, all_dim = _mscales(stated, factor)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_positions=original,
        beta_fast=inner.number("beta_fast") if inner.values.get("beta_fast") else 32.0,
        beta_slow=inner.number("beta_slow") if inner.values.get("beta_slow") else 1.0,
        mscale=mscale,
        mscale_all_dim=all_dim,
    )


def _mscales(attention: float, factor: float) -> tuple[float, float]:
    """Return an mscale and mscale_all_dim whose temperatures have this quotient."""
    below = max(1.0, 1.0 / attention) + 0.1  # above 1 for both, since 0 would mean that one is not stated
    unit = temperature(factor, 1.0) - 1.0
    return (attention * below - 1.0) / unit, (below - 1.0) / unit


def write_rope(shape: ModelShape) -> dict[str, object]:
    """Write both spellings at once: a v4 reader that met only rope_parameters would silently take theta = 10000."""
    scaling = _write_scaling(shape.rope_scaling) if shape.rope_scaling else {}
    kind = scaling.get("rope_type", "default")
    return {
        "rope_theta": shape.rope_theta,
        "rope_scaling": {**scaling, "type": kind} if scaling else None,
        "rope_parameters": {**scaling, "rope_theta": shape.rope_theta, "rope_type": kind},
    }


def _write_scaling(scaling: RopeScaling) -> dict[str, object]:
    config: dict[str, object] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        config["original_max_position_embeddings"] = scaling.original_positions
    if scaling.kind == "llama3":
        config["low_freq_factor"] = scaling.low_frequency_factor
        config["high_freq_factor"] = scaling.high_frequency_factor
    if scaling.kind == "yarn":
        config |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        config |= {"mscale": scaling.mscale} if scaling.mscale else {}
        config |= {"mscale_all_dim": scaling.mscale_all_dim} if scaling.mscale_all_dim else {}
    return config

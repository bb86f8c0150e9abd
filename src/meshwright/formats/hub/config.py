"""Conversion between a ModelShape and config.json of a Hugging Face directory, and its JSON files, without torch."""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from meshwright.formats.hub.families import FAMILIES, Entries, HubFamily
from meshwright.spec.errors import HubError, PlanError
from meshwright.spec.hub_names import explain_missing
from meshwright.spec.model.shape import MOST_LAYERS, ModelShape, RopeScaling

DTYPES = ("float32", "bfloat16", "float16")
CODED = "meshwright-"
"""Prefix of the model_type of folders with codes in our layout.

Other software that knew the type would skip the codes with a warning, and open the model with random weights.
"""
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
QUANTIZATION = "quantization_config"
"""Key of a config that describes how weights are quantized."""
MOST_JSON_BYTES = 2**24
"""Largest file read beside the weights. The largest published config has 2**18 bytes."""
MOST_TOKENIZER_BYTES = 2**27
"""Largest tokenizer read. One of 262,144 words has 2**25 bytes."""
TOKENIZER_CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def shape_from_config(config: Mapping[str, object]) -> ModelShape:
    """Read the shape that a config.json describes, in v4 or v5 spelling. Raises HubError when unsupported."""
    entries = Entries(config)
    # Folders of ours with codes have a type that other software does not know.
    name = entries.text("model_type").removeprefix(CODED)
    if name not in FAMILIES:
        raise entries.fail(f"model_type {name!r} is not supported (supported: {', '.join(FAMILIES)})")
    family = FAMILIES[name]
    _check_architecture(entries, family)
    _check_quantization(entries)
    for key, supported in family.only.items():
        entries.allow(key, supported)
    shape_fields: dict[str, Any] = {field: entries.integer(key) for field, key in family.sizes.items()}
    if shape_fields["layers"] > MOST_LAYERS:
        raise entries.fail(f"{family.sizes['layers']}={shape_fields['layers']} must be at most {MOST_LAYERS}")
    shape_fields |= family.fixed
    shape_fields["norm_eps"] = entries.number(family.eps_key, family.eps)
    shape_fields["tied"] = entries.flag("tie_word_embeddings", family.tied)
    try:
        for part in family.parts:
            shape_fields |= part.read(entries)
        return ModelShape(name=name, family=name, **shape_fields)  # type: ignore[arg-type]  # one of FAMILIES, checked above
    except PlanError as error:
        raise entries.fail(str(error)) from error


def dtype_from_config(config: Mapping[str, object]) -> str:
    """Return float32, bfloat16 or float16 from `dtype` (v5) or `torch_dtype` (v4). Defaults to float32."""
    entries = Entries(config)
    dtype = entries.raw("dtype", None) or entries.raw("torch_dtype", None) or "float32"
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise entries.fail(f"dtype={dtype!r} is not supported (supported: {', '.join(DTYPES)})")
    return name


def config_from_shape(
    shape: ModelShape, *, dtype: str, ids: Mapping[str, int] | None = None, dropout: float = 0.0
) -> dict[str, object]:
    """Build the config.json of a shape, readable by transformers v4 and v5. `ids` are those of marks, as bos_token_id.

    Raises HubError when the family's format cannot hold the shape. It names the field, and the families that can.
    """
    problem = unwritable(shape)
    if problem:
        raise HubError(problem)
    return {
        **_write_shape(shape),
        # null, since an absent mark would be read as an id of the original vocabulary.
        **dict.fromkeys(FAMILIES[shape.family].marks),
        **(ids or {}),
        # v4 reads the first, v5 the second.
        "torch_dtype": dtype,
        "dtype": dtype,
        **dict.fromkeys(FAMILIES[shape.family].dropouts, dropout),
        "use_cache": True,
    }


def written_keys(shape: ModelShape) -> frozenset[str]:
    """Return the keys that the config.json of a shape has. Whoever writes them understands them."""
    return frozenset(_write_shape(shape))


def unwritable(shape: ModelShape) -> str:
    """Return why the shape would not be read back unchanged from a directory of its family. Empty = it would."""
    loss = _first_loss(shape)
    if not loss:
        return ""
    others = [name for name in FAMILIES if not _first_loss(replace(shape, family=name))]  # type: ignore[arg-type]  # one of the families
    advice = f"take model.family={' or '.join(others)}" if others else "no supported family can hold it"
    return f"{loss} in a Hugging Face directory of family {shape.family}: {advice}"


def canonical(shape: ModelShape) -> ModelShape:
    """Return the shape with one fixed value for each field that changes no arithmetic or that no directory holds."""
    neutral: dict[str, Any] = {"name": "custom", "lora": None}
    if shape.family != "deepseek_v3":
        neutral["rope_interleaved"] = False
    if shape.positions == "learned":
        neutral |= {"rope_theta": 10000.0, "rope_scaling": None}
    elif shape.rope_scaling is not None:
        neutral["rope_scaling"] = _canonical_scaling(shape.rope_scaling, latent=shape.mla is not None)
    if shape.mla is not None:
        neutral |= {"head_dim": shape.mla.nope_dim + shape.mla.rope_dim, "kv_heads": shape.heads, "qk_norm": False}
    if shape.moe is not None and shape.moe.first_dense >= shape.layers:
        neutral["moe"] = None
    if shape.moe is not None and shape.moe.first_dense == 0:
        neutral |= {"ffn": shape.moe.ffn, "mlp_bias": False}
    if shape.window == 0 or shape.window_from_layer >= shape.layers:
        neutral |= {"window": 0, "window_from_layer": 0}
    return replace(shape, **neutral)


def _canonical_scaling(scaling: RopeScaling, *, latent: bool) -> RopeScaling:
    """Keep only the fields that the kind of scaling reads. YaRN reads mscale only together with mscale_all_dim."""
    used: tuple[str, ...] = ("factor",)
    if scaling.kind == "llama3":
        used += ("original_positions", "low_frequency_factor", "high_frequency_factor")
    if scaling.kind == "yarn":
        both = bool(scaling.mscale and scaling.mscale_all_dim)
        used += ("original_positions", "beta_fast", "beta_slow")
        used += (("mscale",) if both else ()) + (("mscale_all_dim",) if both or latent else ())
    read: dict[str, Any] = {"original_positions": 1, **{name: getattr(scaling, name) for name in used}}
    return RopeScaling(kind=scaling.kind, **read)


def _write_shape(shape: ModelShape) -> dict[str, object]:
    """Return the entries of the config that follow from the shape alone."""
    family = FAMILIES[shape.family]
    config: dict[str, object] = {"architectures": [family.architecture], "model_type": shape.family}
    config |= {key: getattr(shape, field) for field, key in family.sizes.items()}
    config |= {family.eps_key: shape.norm_eps, "tie_word_embeddings": shape.tied}
    config |= {key: supported[0] for key, supported in family.only.items()}
    for part in family.parts:
        config |= part.write(shape)
    return config


def _first_loss(shape: ModelShape) -> str:
    """Return the first field that its family's config does not carry through, as the head of a sentence."""
    if shape.family == "llama" and shape.hidden % shape.heads:
        return f"model.hidden={shape.hidden} must be a multiple of model.heads={shape.heads}"
    # Written and read back: no second list of what a family can hold has to be kept in step.
    try:
        back = canonical(shape_from_config(_write_shape(shape)))
    except HubError as error:
        return f"this shape cannot be written ({error})"
    ours = canonical(shape)
    # Nested parts first: their fields explain differences of others.
    for field in sorted(fields(ModelShape), key=lambda field: field.name not in ("moe", "mla")):
        want, got = getattr(ours, field.name), getattr(back, field.name)
        if want != got:
            return _difference(f"model.{field.name}", want, got)
    return ""


def _difference(name: str, want: object, got: object) -> str:
    """Describe the one number that differs inside nested parts."""
    if type(want) is type(got) and hasattr(want, "__dataclass_fields__"):
        for inner in want.__dataclass_fields__:
            if getattr(want, inner) != getattr(got, inner):
                return _difference(f"{name}.{inner}", getattr(want, inner), getattr(got, inner))
    if want is None or hasattr(want, "__dataclass_fields__"):
        return f"{name} cannot be {'absent' if want is None else 'given'}"
    return f"{name}={want} cannot be written (it would be read back as {got})"


def _check_architecture(entries: Entries, family: HubFamily) -> None:
    listed = entries.raw("architectures", None) or [family.architecture]
    if not isinstance(listed, list) or family.architecture not in listed:
        shown = ", ".join(map(str, listed)) if isinstance(listed, list) else repr(listed)
        raise entries.fail(f"architecture {shown} is not a causal language model (expected {family.architecture})")


def _check_quantization(entries: Entries) -> None:
    """Raise HubError for quantized weights other than block-wise fp8."""
    quantization = entries.inner("quantization_config")
    if quantization is not None:
        method = quantization.text("quant_method", "")
        if method != "fp8" or not quantization.raw("weight_block_size", None):
            software = repr(method) if method else "software that names no quant_method, as MLX does"
            raise quantization.fail(
                f"the weights were quantized by {software}, and only block-wise fp8 can be read: use the folder they "
                "were quantized from"
            )


def read_config(folder: Path, *, quantized: bool = False) -> tuple[dict[str, Any], ModelShape, str]:
    """Return the config of a directory, its shape, and the name of its weights' dtype. Raises HubError.

    With `quantized` the caller reads the config's quantization itself.
    """
    if not folder.is_dir():
        instead = "a Hugging Face directory with config.json and *.safetensors"
        raise HubError(
            f"{folder} is a file: give {instead}" if folder.exists() else explain_missing(str(folder), instead)
        )
    config = read_json(folder / CONFIG)
    if config is None:
        also = f"; it is a run: `meshwright export {folder} OUT` makes one" if (folder / "plan.yaml").is_file() else ""
        if (folder / "adapter_config.json").is_file():
            also = "; it is an adapter: give its base, or export the run without --adapter, which merges both"
        raise HubError(f"{folder} has no {CONFIG}: it is no Hugging Face directory{also}")
    described = {key: value for key, value in config.items() if not quantized or key != QUANTIZATION}
    try:
        shape, dtype = shape_from_config(described), dtype_from_config(config)
    except HubError as error:
        raise HubError(f"{folder}/{error}") from error
    return config, replace(shape, name=folder.resolve().name), dtype


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file, or None if there is no file. Raises HubError for other contents."""
    if not path.is_file():
        return None
    most = MOST_TOKENIZER_BYTES if path.name in (TOKENIZER, TOKENIZER_CONFIG) else MOST_JSON_BYTES
    if path.stat().st_size > most:
        raise HubError(f"{path} has {path.stat().st_size:,} bytes, and at most {most:,} are read")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise HubError(f"{path} is not JSON, or nested too deep ({error}): copy or download it again") from error
    if not isinstance(content, dict):
        raise HubError(f"{path} must hold a JSON object")
    return content

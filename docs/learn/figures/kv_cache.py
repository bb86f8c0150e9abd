"""Bytes of keys and values by kind of attention, for each position of the sliders."""

from dataclasses import replace
from typing import Any

from meshwright.planner.serving.cached_layers import sequence_bytes, served
from meshwright.spec import presets
from meshwright.spec.model.shape import MLAShape, ModelShape
from meshwright.spec.weights.inventory import num_parameters

TITLE = "Memory of keys and values"
PUBLISHED = ("llama-2-7b", "llama-3.1-8b", "llama-3.1-70b", "deepseek-v3")
KIB, GIB = 2**10, 2**30
MODELS = ("llama-3.1-8b", "llama-3.1-70b")
WIDTHS = {"bf16": 2.0, "fp8": 1.0}
TOKENS = (1, 1024, 4096, 8192, 32768, 131072)
SEQUENCES = (1, 4, 16, 64, 256)
GPU = "H100-SXM-80"


def kinds(shape: ModelShape) -> dict[str, ModelShape]:
    """The same model with other keys and values. MLA has the latent of DeepSeek-V2 and V3."""
    latent = MLAShape(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    return {
        f"MHA: {shape.heads} key heads": replace(shape, kv_heads=shape.heads),
        f"GQA: {shape.kv_heads} key heads": shape,
        "MQA: 1 key head": replace(shape, kv_heads=1),
        "MLA: latent of 512, key of 64": replace(
            shape, kv_heads=shape.heads, head_dim=latent.nope_dim + latent.rope_dim, mla=latent
        ),
    }


def data() -> dict[str, Any]:
    """Bytes by model, format, tokens, sequences and kind."""
    from docs.pictures.figures import usable  # it reads docs.generate, which reads this module

    shapes = {model: kinds(presets.model(model)) for model in MODELS}

    def sizes(model: str, width: float, tokens: int, sequences: int) -> list[float]:
        return [sequences * sequence_bytes(served(shape), tokens, width) for shape in shapes[model].values()]

    return {
        "gpu": {"name": GPU, "bytes": usable() * GIB},
        "weights": {model: 2 * num_parameters(presets.model(model)) for model in MODELS},
        "tokens": TOKENS,
        "sequences": SEQUENCES,
        "kinds": {model: list(each) for model, each in shapes.items()},
        "bytes": {
            model: {
                name: [[sizes(model, width, tokens, sequences) for sequences in SEQUENCES] for tokens in TOKENS]
                for name, width in WIDTHS.items()
            }
            for model in MODELS
        },
    }


def table(_: str = "") -> str:
    """Rows of published models in bf16, and of the 8B model with other attention."""
    rows = {name: (presets.model(name).attention_words, presets.model(name)) for name in PUBLISHED}
    others = kinds(presets.model(MODELS[0]))
    rows |= {f"{MODELS[0]} as {name[:3]}": (name, shape) for name, shape in others.items() if name[:3] != "GQA"}
    lines = [
        "| model | attention | KiB per token | sequence of 8,192, GiB | 64 of these, GiB |",
        "|---|---|---:|---:|---:|",
    ]
    for name, (kind, shape) in rows.items():
        token, sequence = (sequence_bytes(served(shape), tokens, 2) for tokens in (1, 8192))
        lines.append(f"| {name} | {kind} | {token / KIB:.1f} | {sequence / GIB:.2f} | {64 * sequence / GIB:.1f} |")
    return "\n".join(lines) + "\n"

"""Shapes of the models that published rows name: from the presets, or here with the source of each.

Tables of measurements often print a model's name and no sizes. Others print sizes, but not whether head and embedding
are one matrix. Models that no `ModelShape` describes (state-space layers) are in UNDESCRIBED with the reason.
"""

import re
from dataclasses import replace
from functools import cache

from meshwright.spec.model.shape import MLAShape, ModelShape, MoEShape
from meshwright.spec.presets import model
from meshwright.spec.weights.inventory import num_parameters

PRESETS = (
    (r"deepseek-?v3", "deepseek-v3"),
    (r"qwen3-30b-a3b", "qwen3-30b-a3b"),
    (r"qwen3-235b-a22b", "qwen3-235b-a22b"),
    (r"gpt-?oss-?120b", "gpt-oss-120b"),
    (r"kimi-?k2", "kimi-k2"),
    (r"mixtral-8x22b", "mixtral-8x22b"),
    (r"mixtral-8x7b", "mixtral-8x7b"),
    (r"llama-?2-7b", "llama-2-7b"),
    (r"llama-?2-13b", "llama-2-13b"),
    (r"llama-?2-70b", "llama-2-70b"),
    (r"llama-?3(\.1)?-8b", "llama-3.1-8b"),
    (r"llama-?3(\.1)?-70b", "llama-3.1-70b"),
    (r"llama-?3(\.1)?-405b", "llama-3.1-405b"),
    (r"llama-?3\.2-3b", "llama-3.2-3b"),
    (r"llama-?3\.2-1b", "llama-3.2-1b"),
)
"""(pattern of a name in lower case with dashes, preset)."""
UNDESCRIBED = (
    (r"nemotron-3-|nemotron-3-5", "has state-space layers, which no shape here describes"),
    (r"deepseek-?v4", "has no published shape here"),
)
FIRST_LAST = {
    "gpt-22b": (48, 6144, 64), "gpt-175b": (96, 12288, 96), "gpt-530b": (105, 20480, 128), "gpt-1t": (128, 25600, 160),
}  # fmt: skip
"""(layers, hidden, heads) of Korthikanti et al. 2022, table 3. The vocabulary is 51,200, the sequence 2,048."""
NANOTRON = {
    "llama-like-1b": (16, 2048, 32, 32, 8192, True), "llama-like-3b": (28, 3072, 32, 32, 8192, True),
    "llama-like-8b": (32, 4096, 32, 32, 14336, False), "llama-like-80b": (80, 8192, 64, 64, 28672, False),
    "llama-like-70b-gqa8": (80, 8192, 64, 8, 28672, False),
}  # fmt: skip
"""(layers, hidden, heads, key heads, ffn, tied) of huggingface/nanotron scripts/scaling_benchmarks.py.
The vocabulary is 131,072. Tied follows from the parameter counts printed next to them (1.34 and 3.57 billion).
"""


def shape_named(name: str, sequence: int) -> ModelShape | None:
    """Return the shape of a named model. None = not known. Raises ValueError when none can describe it."""
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    for pattern, reason in UNDESCRIBED:
        if re.search(pattern, plain):
            raise ValueError(f"model={name!r} {reason}")
    preset = next((preset for pattern, preset in PRESETS if re.search(pattern, plain)), None)
    if preset:
        return replace(model(preset), name=name)
    if plain in FIRST_LAST:
        layers, hidden, heads = FIRST_LAST[plain]
        return gpt(name, layers, hidden, heads, vocab=51200, positions=sequence)
    if plain in NANOTRON:
        layers, hidden, heads, kv_heads, ffn, tied = NANOTRON[plain]
        return ModelShape(
            name=name, vocab=131072, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, tied=tied,
            max_positions=max(sequence, 4096),
        )  # fmt: skip
    return _others(sequence).get(re.sub(r"[^a-z0-9]", "", plain))


def gpt(name: str, layers: int, hidden: int, heads: int, *, vocab: int, positions: int, ffn: int = 0) -> ModelShape:
    """Return a GPT as in the papers: learned positions, biases everywhere, a fourfold MLP, tied ends."""
    return ModelShape(
        name=name, family="gpt2", vocab=vocab, layers=layers, hidden=hidden, heads=heads, ffn=ffn or 4 * hidden,
        norm="layernorm", mlp="gelu_tanh", positions="learned", max_positions=positions, qkv_bias=True, out_bias=True,
        mlp_bias=True, tied=True,
    )  # fmt: skip


@cache
def _others(sequence: int) -> dict[str, ModelShape]:

    def nemotron(name: str, layers: int, hidden: int, heads: int, kv_heads: int) -> ModelShape:
        plain = gpt(name, layers, hidden, heads, vocab=256000, positions=max(sequence, 4096))
        return replace(
            plain, kv_heads=kv_heads, positions="rope", qkv_bias=False, out_bias=False, mlp_bias=False, tied=False
        )

    longest = max(sequence, 4096)
    kimi = ModelShape(
        name="kimi-k2", family="deepseek_v3", vocab=163840, layers=61, hidden=7168, heads=64, ffn=18432,
        max_positions=longest,
        moe=MoEShape(experts=384, top_k=8, ffn=2048, shared_experts=1, first_dense=1, scoring="sigmoid"),
        mla=MLAShape(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
    )  # fmt: skip
    codellama = ModelShape(
        name="llama2-34b", vocab=32000, layers=48, hidden=8192, heads=64, kv_heads=8, ffn=22016, max_positions=longest
    )
    return {
        "kimik2": kimi,  # moonshotai/Kimi-K2-Base config.json
        "llama234b": codellama,  # codellama/CodeLlama-34b-hf config.json, whose vocabulary is that of Llama 2
        "nemotron8b": nemotron("nemotron-8b", 32, 4096, 32, 32),  # NVIDIA/NeMo llm/gpt/model/nemotron.py
        "nemotron22b": nemotron("nemotron-22b", 40, 6144, 48, 48),
        "nemotron340b": nemotron("nemotron-340b", 96, 18432, 96, 8),
    }


def tied_by_count(shape: ModelShape, parameters: float) -> ModelShape:
    """Return the shape with tied or untied ends, whichever is nearer to a printed parameter count."""
    other = replace(shape, tied=not shape.tied)
    miss = {form.tied: abs(num_parameters(form) - parameters) for form in (shape, other)}
    return shape if miss[shape.tied] <= miss[other.tied] else other

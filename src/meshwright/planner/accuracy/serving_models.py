"""Models that published serving benchmarks name, from their config.json on huggingface.co."""

import re
from dataclasses import replace
from functools import cache

from meshwright.planner.serving.cached_layers import CachedLayers, ServedModel, served
from meshwright.spec.model.shape import MLAShape, ModelShape, MoEShape
from meshwright.spec.model.unbuilt_parts import LinearAttention, UnbuiltParts
from meshwright.spec.presets import model

LONGEST = 131072


def _gpt_oss() -> ServedModel:
    """Return openai/gpt-oss-120b: every second layer sees 128 tokens."""
    shape = ModelShape(
        name="gpt-oss-120b", vocab=201088, layers=36, hidden=2880, heads=64, kv_heads=8, head_dim=64, ffn=2880,
        qkv_bias=True, out_bias=True, max_positions=LONGEST, moe=MoEShape(experts=128, top_k=4, ffn=2880),
    )  # fmt: skip
    return ServedModel(shape, (CachedLayers(18), CachedLayers(18, window=128)))


def _minimax() -> ServedModel:
    """Return MiniMaxAI/MiniMax-M2.5."""
    shape = ModelShape(
        name="minimax-m2.5", vocab=200064, layers=62, hidden=3072, heads=48, kv_heads=8, head_dim=128, ffn=1536,
        max_positions=LONGEST, moe=MoEShape(experts=256, top_k=8, ffn=1536, scoring="sigmoid"),
    )  # fmt: skip
    return served(shape)


def _kimi() -> ServedModel:
    """Return the language model of moonshotai/Kimi-K2.5."""
    shape = ModelShape(
        name="kimi-k2.5", family="deepseek_v3", vocab=163840, layers=61, hidden=7168, heads=64, ffn=18432,
        max_positions=LONGEST,
        moe=MoEShape(experts=384, top_k=8, ffn=2048, shared_experts=1, first_dense=1, scoring="sigmoid"),
        mla=MLAShape(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
    )  # fmt: skip
    return served(shape)


def _qwen_next() -> ServedModel:
    """Return the language model of Qwen/Qwen3.5-397B-A17B."""
    linear = LinearAttention(full_every=4, key_heads=16, value_heads=64, taps=4)
    shape = ModelShape(
        name="qwen3.5-397b-a17b", vocab=248320, layers=60, hidden=4096, heads=32, kv_heads=2, head_dim=256, ffn=1024,
        max_positions=LONGEST, moe=MoEShape(experts=512, top_k=10, ffn=1024, shared_experts=1),
        unbuilt=UnbuiltParts(linear=linear, gated_attention=True),
    )  # fmt: skip
    return served(shape)


def _glm() -> ServedModel:
    """Return zai-org/GLM-5: attention reads 2,048 positions that an indexer chooses."""
    shape = ModelShape(
        name="glm-5", family="deepseek_v3", vocab=154880, layers=78, hidden=6144, heads=64, ffn=12288,
        max_positions=LONGEST,
        moe=MoEShape(experts=256, top_k=8, ffn=2048, shared_experts=1, first_dense=3, scoring="sigmoid"),
        mla=MLAShape(q_rank=2048, kv_rank=512, nope_dim=192, rope_dim=64, v_dim=256),
    )  # fmt: skip
    return served(shape)._replace(selected=2048)


MADE = (
    (r"gpt-oss-120b", _gpt_oss), (r"minimax-m2\.5", _minimax), (r"kimi-k2\.5", _kimi),
    (r"qwen3\.5-397b", _qwen_next), (r"glm-5(?!\.)", _glm),
)  # fmt: skip
PRESETS = (
    (r"deepseek-(r1|v3)(?!\.)", "deepseek-v3"), (r"qwen3-235b", "qwen3-235b-a22b"), (r"qwen3-32b", "qwen3-32b"),
    (r"qwen3-30b", "qwen3-30b-a3b"), (r"qwen3-8b", "qwen3-8b"), (r"llama-3\.1-8b", "llama-3.1-8b"),
    (r"llama-3\.[13]-70b", "llama-3.1-70b"), (r"llama-3\.1-405b", "llama-3.1-405b"),
    (r"mixtral-8x7b", "mixtral-8x7b"), (r"mixtral-8x22b", "mixtral-8x22b"),
)  # fmt: skip


@cache
def served_model(path: str) -> ServedModel | None:
    """Return a model by the end of its path on huggingface.co. None = not known."""
    name = path.rsplit("/", 1)[-1].lower()
    for pattern, made in MADE:
        if re.search(pattern, name):
            return made()
    preset = next((preset for pattern, preset in PRESETS if re.search(pattern, name)), None)
    return served(replace(model(preset), name=name)) if preset else None

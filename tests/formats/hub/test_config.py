"""config.json to shape and back: both spellings, every published model, and what is refused."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.formats.hub import canonical, config_from_shape, shape_from_config, unwritable
from meshwright.formats.hub.config import dtype_from_config
from meshwright.spec import MLAShape, ModelShape, MoEShape, RopeScaling, presets
from meshwright.spec.errors import HubError

# As published with Llama-3.1-8B: only the keys that transformers v4 knows.
LLAMA_31 = json.loads("""{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
  "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false,
  "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
  "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.43.0.dev0", "use_cache": true, "vocab_size": 128256}""")
SCALING = LLAMA_31["rope_scaling"]
MLA = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "q_lora_rank": None}
DEEPSEEK = {
    **LLAMA_31,
    **MLA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 32,
    "n_routed_experts": 16,
    "moe_intermediate_size": 8,
    "n_group": 4,
    "topk_group": 2,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
TINY = {"vocab": 64, "layers": 4, "hidden": 32, "heads": 4, "ffn": 48, "max_positions": 128}


def tiny(**changes: Any) -> ModelShape:
    return ModelShape(**{**TINY, **changes})


def v5(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config in the keys of v5 alone."""
    others = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    return {
        **others,
        "dtype": config["torch_dtype"],
        "rope_parameters": {**scaling, "rope_theta": config["rope_theta"]},
    }


@pytest.mark.parametrize("config", [LLAMA_31, v5(LLAMA_31)], ids=["v4", "v5"])
def test_llama_31_is_read_in_both_spellings(config: dict[str, Any]) -> None:
    assert canonical(shape_from_config(config)) == canonical(presets.model("llama-3.1-8b"))
    assert dtype_from_config(config) == "bfloat16"


def test_both_spellings_are_written() -> None:
    config = config_from_shape(
        presets.model("llama-3.1-8b"), dtype="bfloat16", ids={"bos_token_id": 1, "eos_token_id": 2}, dropout=0.1
    )
    scaling = {key: float(value) if key == "factor" else value for key, value in SCALING.items()}
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == {**scaling, "type": "llama3"}
    assert config["rope_parameters"] == {**scaling, "rope_theta": 500000.0}
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert (config["bos_token_id"], config["eos_token_id"], config["attention_dropout"]) == (1, 2, 0.1)
    assert shape_from_config(v5(config)) == shape_from_config(config)


@pytest.mark.parametrize("name", [name for name in presets.model_names() if not presets.model(name).plan_only])
def test_every_published_shape_survives_its_config(name: str) -> None:
    shape = presets.model(name)
    config = json.loads(json.dumps(config_from_shape(shape, dtype="bfloat16")))
    assert canonical(shape_from_config(config)) == canonical(shape)


@pytest.mark.parametrize(
    "shape",
    [
        tiny(rope_scaling=RopeScaling(kind="linear", factor=2.0, original_positions=64)),
        tiny(rope_scaling=RopeScaling(kind="yarn", factor=2.0, original_positions=64, mscale=0.5, mscale_all_dim=0.7)),
        tiny(rope_interleaved=True, qkv_bias=True, out_bias=True, mlp_bias=True),
        tiny(family="qwen2", qkv_bias=True, window=9, window_from_layer=2),
        tiny(family="qwen2", qkv_bias=True, window=9, window_from_layer=7),
        tiny(family="qwen3_moe", qk_norm=True, moe=MoEShape(experts=4, top_k=2, ffn=8, first_dense=2)),
        tiny(
            family="gpt2",
            norm="layernorm",
            positions="learned",
            mlp="gelu",
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
        ),
        tiny(family="deepseek_v3", mla=MLAShape(q_rank=0, kv_rank=8, nope_dim=6, rope_dim=4, v_dim=10)),
    ],
    ids=["linear", "yarn", "biases", "window", "no-window", "dense-first", "gelu", "latent-dense"],
)
def test_variants_survive_their_config(shape: ModelShape) -> None:
    config = config_from_shape(shape, dtype="float32")
    assert canonical(shape_from_config(config)) == canonical(shape)


@pytest.mark.parametrize(
    ("shape", "field", "advice"),
    [
        (tiny(qk_norm=True), "model.qk_norm=True", "model.family=qwen3"),
        (tiny(qkv_bias=True), "model.out_bias=False", "model.family=qwen2"),
        (tiny(family="qwen2"), "model.qkv_bias=False", "model.family=llama"),
        (tiny(window=8), "model.window=8", "model.family=mistral"),
        (tiny(family="mistral", moe=MoEShape(experts=4, top_k=2, ffn=8)), "model.moe", "model.family=mixtral"),
        (
            tiny(family="mixtral", moe=MoEShape(experts=4, top_k=2, ffn=8, routed_scale=2.0)),
            "moe.routed_scale=2.0",
            "no",
        ),
        (tiny(norm="layernorm"), "model.norm=layernorm", "no supported family"),
        (tiny(hidden=34, head_dim=8), "model.hidden=34", "model.family=mistral"),
    ],
)
def test_what_a_family_cannot_hold_is_refused_with_the_field_and_a_family(
    shape: ModelShape, field: str, advice: str
) -> None:
    problem = unwritable(shape)
    assert field in problem and advice in problem and "\n" not in problem
    with pytest.raises(HubError, match=r"directory of family"):
        config_from_shape(shape, dtype="float32")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA_31, "model_type": "bert"}, ["'bert'", "llama, mistral, mixtral"]),
        ({**LLAMA_31, "architectures": ["LlamaForSequenceClassification"]}, ["not a causal language model"]),
        ({**LLAMA_31, "architectures": "LlamaForCausalLM"}, ["expected LlamaForCausalLM"]),
        ({**LLAMA_31, "rope_scaling": {"type": "ntk", "factor": 2.0}}, ["'ntk'", "linear, llama3, yarn"]),
        ({**LLAMA_31, "rope_scaling": {**SCALING, "rope_type": "longrope"}}, ["'longrope'"]),
        ({**LLAMA_31, "rope_scaling": {**SCALING, "factor": float("nan")}}, ["factor=nan"]),
        (
            {**LLAMA_31, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1e-9}},
            ["attention_factor=1e-09 is not supported, only 1.13863"],
        ),
        (
            {**DEEPSEEK, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 2.0}},
            ["attention_factor=2 is not supported, only 1.13863"],
        ),
        ({**LLAMA_31, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}, ["truncate"]),
        ({**LLAMA_31, "rope_scaling": {"full_attention": {"rope_theta": 1.0}}}, ["per kind of layer"]),
        ({**LLAMA_31, "partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        ({**LLAMA_31, "hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
        ({**LLAMA_31, "hidden_size": -1}, ["hidden_size=-1"]),
        ({**LLAMA_31, "num_hidden_layers": 10**12, "model_type": "qwen3_moe", "architectures": []}, ["at most 10000"]),
        ({**LLAMA_31, "hidden_size": "big"}, ["hidden_size='big'"]),
        ({key: value for key, value in LLAMA_31.items() if key != "vocab_size"}, ["vocab_size is missing"]),
        ({**LLAMA_31, "num_key_value_heads": 5}, ["kv_heads=5"]),
        ({**LLAMA_31, "quantization_config": {"quant_method": "gptq"}}, ["'gptq'", "fp8"]),
        ({**DEEPSEEK, "scoring_func": "softmax"}, ["scoring_func='softmax'"]),
        ({**DEEPSEEK, "topk_method": "greedy"}, ["topk_method='greedy'"]),
        ({**DEEPSEEK, "moe_layer_freq": 2}, ["moe_layer_freq=2"]),
        ({**DEEPSEEK, "num_key_value_heads": 8}, ["num_key_value_heads"]),
        ({**DEEPSEEK, "qk_rope_head_dim": 3}, ["rope_dim=3"]),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx"]),
        ({**GPT2, "activation_function": "relu"}, ["'relu'", "'gelu_new'"]),
        (
            {**LLAMA_31, "model_type": "qwen3_moe", "architectures": None, "decoder_sparse_step": 2},
            ["decoder_sparse_step=2", "dense layers first"],
        ),
        (
            {
                **LLAMA_31,
                "model_type": "qwen2",
                "architectures": None,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] + ["full_attention"] * 31,
            },
            ["layer_types"],
        ),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(HubError) as error:
        shape_from_config(config)
    assert all(word in str(error.value) for word in ["config.json", *words])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "window", "first"),
    [
        ({"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 2}, 0, 0),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}, 7, 2),
        ({"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 32}, 0, 0),
        ({"use_sliding_window": True, "sliding_window": None}, 0, 0),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 30 + ["sliding_attention"] * 2}, 4096, 30),
        ({"model_type": "mistral"}, 4096, 0),
        ({"model_type": "mistral", "sliding_window": None}, 0, 0),
        ({"model_type": "mixtral"}, 0, 0),
        ({"model_type": "llama", "sliding_window": 7}, 0, 0),
    ],
)
def test_windows_as_each_family_spells_them(changes: dict[str, Any], window: int, first: int) -> None:
    shape = shape_from_config({**LLAMA_31, "model_type": "qwen2", "architectures": None, **changes})
    assert (shape.window, shape.window_from_layer) == (window, first)


def test_what_an_absent_key_stands_for() -> None:
    """Old directories leave out what later became a key."""
    sizes = {"hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"}
    bare = {key: value for key, value in LLAMA_31.items() if key in sizes} | {"max_position_embeddings": 2048}
    llama = shape_from_config({**bare, "model_type": "llama"})
    assert (llama.kv_heads, llama.head_dim, llama.norm_eps, llama.rope_theta) == (32, 128, 1e-6, 10000.0)
    assert not llama.tied and dtype_from_config(bare) == "float32"
    assert shape_from_config({**bare, "model_type": "mixtral"}).rope_theta == 1e6
    assert shape_from_config({**bare, "model_type": "qwen3", "num_key_value_heads": None}).head_dim == 128
    gpt2 = shape_from_config(GPT2)
    assert (gpt2.ffn, gpt2.tied, gpt2.mlp, gpt2.norm_eps) == (64, True, "gelu_tanh", 1e-5)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
BASES = {"llama": LLAMA_31, "deepseek_v3": DEEPSEEK, "gpt2": GPT2, "qwen3_moe": LLAMA_31, "qwen2": LLAMA_31}
KEYS = sorted({key for base in BASES.values() for key in base} | {"layer_types", "mlp_only_layers", "sliding_window"})


@settings(max_examples=300, deadline=None)
@given(
    family=st.sampled_from(sorted(BASES)),
    changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3),
    scaling=st.dictionaries(st.sampled_from(sorted(SCALING)), JSON, max_size=2),
)
def test_any_config_gives_a_shape_or_one_line(family: str, changes: dict[str, Any], scaling: dict[str, Any]) -> None:
    config = {**BASES[family], "architectures": None, "model_type": family, **changes}
    if isinstance(config.get("rope_scaling"), dict):
        config["rope_scaling"] = {**config["rope_scaling"], **scaling}
    try:
        shape = shape_from_config(config)
    except HubError as error:
        assert "\n" not in str(error)
    else:
        assert canonical(
            shape_from_config(config_from_shape(shape, dtype="float32", ids={"bos_token_id": 0, "eos_token_id": 0}))
        ) == canonical(shape)

"""Configs of published models, as facts: the planner reads their sizes, and refuses a key that it does not know."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.formats.hub import download
from meshwright.formats.hub.config import canonical, config_from_shape, unwritable
from meshwright.formats.hub.families import FAMILIES
from meshwright.formats.hub.planned_families import HARMLESS, HARMLESS_PATTERN, PLANNED, is_planned, planned_shape
from meshwright.interface.planning.plan_reading import is_hub_name
from meshwright.interface.planning.plan_request import config_folder
from meshwright.model.transformer import skeleton
from meshwright.spec import num_parameters, presets
from meshwright.spec.errors import HubError, PlanError
from meshwright.spec.model.shape import ModelShape
from meshwright.spec.model.unbuilt_parts import UnbuiltParts
from meshwright.verbs.main import main
from meshwright.verbs.plan import answer as planning

_SIZES = (
    "vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "max_position_embeddings",
)  # fmt: skip


def _config(kind: str, sizes: str, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **dict(zip(_SIZES, map(int, sizes.split()), strict=True)), **more}


_MARKS = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "torch_dtype": "bfloat16", "use_cache": True}
GEMMA_2 = _config(
    "gemma2", "256000 42 3584 16 8 14336 8192", head_dim=256, hidden_act="gelu_pytorch_tanh", attention_bias=False,
    hidden_activation="gelu_pytorch_tanh", sliding_window=4096, query_pre_attn_scalar=256, rms_norm_eps=1e-6,
    attn_logit_softcapping=50.0, final_logit_softcapping=30.0, rope_theta=10000.0, cache_implementation="hybrid",
    initializer_range=0.02, architectures=["Gemma2ForCausalLM"], transformers_version="4.42.0.dev0", **_MARKS,
)  # fmt: skip
GEMMA_3_1B = _config(
    "gemma3_text", "262144 26 1152 4 1 6912 32768", head_dim=256, hidden_activation="gelu_pytorch_tanh",
    sliding_window=512, sliding_window_pattern=6, query_pre_attn_scalar=256, rms_norm_eps=1e-6, rope_scaling=None,
    rope_theta=1000000, rope_local_base_freq=10000, attn_logit_softcapping=None, final_logit_softcapping=None, **_MARKS,
)  # fmt: skip
GEMMA_3_27B = {
    "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 256,
    "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144,
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_hidden_layers": 62, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip
OLMO_2 = _config(
    "olmo2", "100352 32 4096 32 32 11008 4096", attention_bias=False, hidden_act="silu", rms_norm_eps=1e-6,
    rope_theta=500000, tie_word_embeddings=False, rope_scaling=None,
)  # fmt: skip
PHI_3 = _config(
    "phi3", "32064 32 3072 32 32 8192 4096", original_max_position_embeddings=4096, sliding_window=2047,
    rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, resid_pdrop=0.0, embd_pdrop=0.0, hidden_act="silu",
    attention_bias=False, tie_word_embeddings=False, auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
)  # fmt: skip
PHI_3_LONG = {
    **PHI_3, "max_position_embeddings": 131072, "sliding_window": 262144,
    "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48},
}  # fmt: skip
PHI_4_MINI = _config(
    "phi3", "200064 32 3072 24 8 8192 131072", original_max_position_embeddings=4096, sliding_window=262144,
    partial_rotary_factor=0.75, rms_norm_eps=1e-5, tie_word_embeddings=True, hidden_act="silu", full_attn_mod=1,
    interpolate_factor=1, lm_head_bias=False, mlp_bias=False,
    rope_scaling={"type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48},
)  # fmt: skip
GPT_OSS = _config(
    "gpt_oss", "201088 24 2880 64 8 2880 131072", head_dim=64, num_local_experts=32, num_experts_per_tok=4,
    experts_per_token=4, attention_bias=True, sliding_window=128, swiglu_limit=7.0, rms_norm_eps=1e-5,
    initial_context_length=4096, rope_theta=150000, hidden_act="silu", router_aux_loss_coef=0.9,
    layer_types=["sliding_attention", "full_attention"] * 12, quantization_config={"quant_method": "mxfp4"},
    rope_scaling={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
)  # fmt: skip
SCOUT = {
    "model_type": "llama4", "vision_config": {"hidden_size": 1408}, "image_token_index": 200092,
    "text_config": _config(
        "llama4_text", "202048 48 5120 40 8 8192 10485760", intermediate_size_mlp=16384, head_dim=128,
        num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1, use_qk_norm=True,
        attention_chunk_size=8192, attn_scale=0.1, floor_scale=8192, attn_temperature_tuning=4, no_rope_layers=[],
        for_llm_compressor=False, rms_norm_eps=1e-5, rope_theta=500000.0, router_jitter_noise=0.0, hidden_act="silu",
        attention_bias=False, output_router_logits=False, router_aux_loss_coef=0.001,
    ),
}  # fmt: skip
NEMOTRON = _config(
    "nemotron", "256000 96 18432 96 8 73728 4096", hidden_act="relu2", norm_eps=1e-5, partial_rotary_factor=0.5,
    attention_bias=False, mlp_bias=False, rope_theta=10000, head_dim=192,
)  # fmt: skip
GLM_AIR = _config(
    "glm4_moe", "151552 46 4096 96 8 10944 131072", head_dim=128, n_routed_experts=128, num_experts_per_tok=8,
    n_shared_experts=1, moe_intermediate_size=1408, first_k_dense_replace=1, n_group=1, topk_group=1,
    norm_topk_prob=True, routed_scaling_factor=1.0, attention_bias=True, use_qk_norm=False, partial_rotary_factor=0.5,
    num_nextn_predict_layers=1, rope_scaling=None, rope_theta=1000000, hidden_act="silu", rms_norm_eps=1e-5,
)  # fmt: skip
MINIMAX = _config(
    "minimax_m2", "200064 62 3072 48 8 1536 196608", head_dim=128, num_local_experts=256, num_experts_per_tok=8,
    rotary_dim=64, use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True,
    attn_type_list=[1] * 62, rope_theta=5000000, rms_norm_eps=1e-6, hidden_act="silu", use_mtp=True,
    num_mtp_modules=3, mtp_transformer_layers=1, shared_intermediate_size=0,
)  # fmt: skip
KIMI = _config(
    "kimi_k2", "163840 61 7168 64 64 18432 131072", architectures=["DeepseekV3ForCausalLM"], q_lora_rank=1536,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=384,
    num_experts_per_tok=8, moe_intermediate_size=2048, n_shared_experts=1, first_k_dense_replace=1, n_group=1,
    topk_group=1, moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True,
    routed_scaling_factor=2.827, rms_norm_eps=1e-6, rope_theta=50000.0, hidden_act="silu", seq_aux=True,
    aux_loss_alpha=0.001, ep_size=1, num_nextn_predict_layers=0, attention_bias=False, pretraining_tp=1,
    rope_scaling={
        "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
)  # fmt: skip
_GATED_DELTA = {
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "head_dim": 256, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
QWEN_NEXT = _config(
    "qwen3_next", "151936 48 2048 16 2 5120 262144", architectures=["Qwen3NextForCausalLM"], decoder_sparse_step=1,
    mlp_only_layers=[], moe_intermediate_size=512, norm_topk_prob=True, num_experts=512, num_experts_per_tok=10,
    partial_rotary_factor=0.25, rope_scaling=None, rope_theta=10000000, router_aux_loss_coef=0.001,
    shared_expert_intermediate_size=512, **_GATED_DELTA, **_MARKS,
)  # fmt: skip
QWEN_35_TEXT = _config(
    "qwen3_5_text", "248320 32 4096 16 4 12288 262144", attn_output_gate=True, mamba_ssm_dtype="float32",
    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 8, mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False, **_GATED_DELTA,
    rope_parameters={"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
                     "rope_theta": 10000000, "partial_rotary_factor": 0.25},
)  # fmt: skip
QWEN_35_9B = {
    "model_type": "qwen3_5", "vision_config": {"depth": 27}, "tie_word_embeddings": False, "text_config": QWEN_35_TEXT,
}  # fmt: skip
_RESIDUALS = {f"layernorm_{half}_{end}": 3.5565588200778455 if end == "alpha" else 1.0
              for half in ("full_attention", "linear_attention", "mlp") for end in ("alpha", "beta")}  # fmt: skip
MINIMAX_01 = _config(
    "minimax_text_01", "200064 80 6144 64 8 9216 10240000", head_dim=128, attn_type_list=([0] * 7 + [1]) * 10,
    num_local_experts=32, num_experts_per_tok=2, postnorm=True, rotary_dim=64, rope_theta=10000000, rms_norm_eps=1e-5,
    hidden_act="silu", shared_intermediate_size=0, shared_moe_mode="sigmoid", sliding_window=None, **_RESIDUALS,
)  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-2-9b": GEMMA_2, "gemma-3-1b": GEMMA_3_1B, "gemma-3-27b": GEMMA_3_27B, "olmo-2-7b": OLMO_2,
    "phi-3-mini-4k": PHI_3, "phi-4-mini": PHI_4_MINI, "gpt-oss-20b": GPT_OSS, "llama-4-scout": SCOUT,
    "nemotron-4-340b": NEMOTRON, "glm-4.5-air": GLM_AIR, "minimax-m2": MINIMAX, "kimi-k2": KIMI,
    "qwen3-next-80b-a3b": QWEN_NEXT, "minimax-text-01": MINIMAX_01,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_preset_and_counts_what_is_published(name: str) -> None:
    shape, preset = planned_shape(PUBLISHED[name]), presets.model(name)
    assert num_parameters(shape) == presets.published(name).parameters
    for field in ("window", "qk_norm", "head_dim", "moe", "mla", "unbuilt", "mlp", "norm", "tied", "norm_eps"):
        if name != "nemotron-4-340b" or field != "norm_eps":
            assert getattr(shape, field) == getattr(preset, field), field


def test_what_differs_is_named() -> None:
    assert "GeGLU" in planned_shape(GEMMA_2).plan_only and "one of 2 layers" in planned_shape(GEMMA_2).plan_only
    assert "attention sinks" in planned_shape(GPT_OSS).plan_only
    assert planned_shape(PHI_3).plan_only == planned_shape(KIMI).plan_only == ""
    assert "LongRoPE" in planned_shape(PHI_3_LONG).plan_only
    assert [is_planned(config) for config in (PHI_3, PHI_3_LONG, OLMO_2, KIMI)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba2"}, "model_type='mamba2' is not known to the planner"),
        ({**QWEN_NEXT, "decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        ({**QWEN_NEXT, "shared_expert_intermediate_size": 700}, "=700 is not a multiple of moe_intermediate_size=512"),
        ({**QWEN_NEXT, "layer_types": ["sliding_attention"] * 48}, "layer_types holds sliding_attention"),
        ({**QWEN_NEXT, "linear_num_value_heads": 24}, "value_heads=24 is not a multiple of key_heads=16"),
        ({**MINIMAX_01, "attn_type_list": [0, 1, 1, 0] * 20}, "layer 2 is full_attention"),
        ({**MINIMAX_01, "shared_intermediate_size": 9216}, "shared_intermediate_size=9216 is not supported"),
        ({}, "model_type=None is not known"),
        ({**OLMO_2, "moe_lora_rank": 8}, "moe_lora_rank=8 is not known and could change the shape"),
        ({**KIMI, "index_topk": 2048}, "index_topk=2048 is not known"),
        ({**GPT_OSS, "layer_types": ["linear_attention"] * 24}, "layer_types holds linear_attention"),
        ({**GPT_OSS, "layer_types": ["full_attention"] * 23 + ["sliding_attention"]}, "layer 23 is sliding_attention"),
        ({**MINIMAX, "attn_type_list": [0, 1] * 31}, "lightning attention"),
        ({**NEMOTRON, "hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({key: value for key, value in OLMO_2.items() if key != "hidden_size"}, "hidden_size is missing"),
        ({**OLMO_2, "num_key_value_heads": 5}, "kv_heads=5"),
        ({**SCOUT, "text_config": None}, "text_config=None must be an object"),
        ({**OLMO_2, "num_hidden_layers": 10**9}, "must be at most 10000"),
    ],
)
def test_what_is_not_known_is_refused_by_its_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(HubError) as error:
        planned_shape(config)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [*FAMILIES, *(kind for kind in PLANNED if not kind.startswith("minimax"))])
def test_the_defaults_of_transformers_are_planned(kind: str) -> None:
    """Every key that transformers writes of a family is understood, those too that only some values make matter."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind)
    shape = planned_shape({**config.to_dict(), "dtype": "bfloat16"})
    assert shape.layers == config.num_hidden_layers and shape.vocab == config.vocab_size


@pytest.mark.parametrize("name", presets.model_names())
def test_what_is_exported_is_planned(name: str) -> None:
    shape = presets.model(name)
    if shape.plan_only or unwritable(shape):
        pytest.skip("no directory holds it")
    assert canonical(planned_shape(config_from_shape(shape, dtype="bfloat16"))) == canonical(shape)


PUBLISHED_BESIDE: dict[str, dict[str, Any]] = {
    "llama": {
        "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"},
        "pretraining_tp": 1, "_name_or_path": "/raid/model", "max_sequence_length": 2048, "neftune_noise_alpha": 5.0,
        "model_max_length": 4096,
    },
    "mistral": {"max_sequence_length": 131072, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "qwen2": {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28, "use_mrope": False,
              "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}},
    "qwen3": {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 36},
    "qwen3_moe": {"use_sliding_window": False, "max_window_layers": 48, "mlp_only_layers": [], "use_qk_norm": True,
                  "qkv_bias": False, "shared_expert_intermediate_size": 0},
    "gpt2": {
        "n_ctx": 1024, "summary_type": "cls_index", "summary_use_proj": True, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_activation": None, "task_specific_params": {"text-generation": {}},
        "_num_labels": 1, "prefix": None, "num_labels": 1, "output_past": True,
    },
    "deepseek_v3": {
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "ep_size": 1, "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1, "seq_aux": True, "aux_loss_alpha": 0.001, "qk_head_dim": 192,
    },
}  # fmt: skip
"""Keys of published files beside those that a shape is read from."""


@pytest.mark.parametrize("kind", PUBLISHED_BESIDE)
def test_keys_of_published_files_change_no_shape(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind).to_dict()
    for key in ("layer_types", "max_window_layers", "sliding_window"):
        config.pop(key, None)
    assert planned_shape({**config, **PUBLISHED_BESIDE[kind]}) == planned_shape(config)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [("gpt2", "n_ctx", 512), ("deepseek_v3", "qk_head_dim", 128), ("llama", "rope_interleaved", True),
     ("qwen3_moe", "use_qk_norm", False), ("smollm3", "no_rope_layers", [0] * 36)],
)  # fmt: skip
def test_a_key_that_contradicts_another_is_refused(kind: str, key: str, value: object) -> None:
    transformers = pytest.importorskip("transformers")
    with pytest.raises(HubError, match=f"{key}="):
        planned_shape({**transformers.AutoConfig.for_model(kind).to_dict(), key: value})


KEYS = st.text("abcdefghijklmnopqrstuvwxyz", min_size=3, max_size=9).map(lambda word: f"q{word}_dim")


@settings(deadline=None, max_examples=30)
@given(KEYS, st.one_of(st.integers(1), st.floats(0.1, 9.0), st.text(min_size=1), st.lists(st.integers(), min_size=1)))
def test_any_other_key_is_refused_with_its_name_and_one_that_is_off_is_not(key: str, value: object) -> None:
    if HARMLESS_PATTERN.fullmatch(key):
        return
    with pytest.raises(HubError, match=f"{key}="):
        planned_shape({**OLMO_2, key: value})
    for off in (None, False, [], {}):
        assert planned_shape({**OLMO_2, key: off}) == planned_shape(OLMO_2)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(sorted({key for keys in HARMLESS.values() for key in keys} - {"model_type", "tie_word_embeddings"}))
)
def test_harmless_keys_change_nothing(key: str) -> None:
    assert planned_shape({**OLMO_2, key: "anything"}) == planned_shape(OLMO_2)


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "vocab_size": 512, "num_hidden_layers": 12, "max_position_embeddings": 64}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 160, "interleave_moe_layer_step": 3},
    "minimax": {"num_local_experts": 4, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3},
    "qwen3_next": {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 1024},
    "qwen3_5_moe_text": {"num_experts": 4, "num_experts_per_tok": 2, "linear_num_key_heads": 2},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                 "first_k_dense_replace": 2},
}  # fmt: skip


OWN_CODE = ("minimax_text_01", "minimax_m1")
"""Families that transformers has under another name."""


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in PLANNED if kind not in OWN_CODE])
def test_a_small_one_counts_as_transformers_does(kind: str) -> None:
    """Its own config.json, with all keys that its class writes, is read, and none of them is unknown."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle here and is not installed")
    import torch

    ours = EXPERTS.get(kind, {})
    marks = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(kind, **SMALL, **ours, **marks)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum({id(parameter): parameter.numel() for parameter in model.parameters()}.values())
    assert num_parameters(planned_shape(json.loads(config.to_json_string(use_diff=False)))) == counted


def test_a_dense_hybrid_is_planned_without_its_layer_for_a_further_token() -> None:
    shape = planned_shape(QWEN_35_9B)
    assert shape.moe is None and [bool(shape.linear_of(layer)) for layer in range(4)] == [True, True, True, False]
    assert "linear attention (gated delta rule) in all but one of 4 layers" in shape.plan_only
    assert planned_shape(QWEN_35_TEXT) == shape


@pytest.mark.long
def test_a_folder_and_a_file_are_planned_and_training_refuses_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {**OLMO_2, "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
             "num_key_value_heads": 4}  # fmt: skip
    folder = tmp_path / "olmo"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small))
    (tmp_path / "other.json").write_text(json.dumps(small))
    for path in (folder, folder / "config.json", tmp_path / "other.json"):
        answer = planning.plan(str(path), cluster="h100", recipe=["sequence=512", "global_batch=8"])
        assert "norms behind" in answer.plan.model.plan_only
        assert answer.plan.model.name == ("other" if path.suffix and path.stem == "other" else "olmo")
        assert any(caveat.startswith("Plan only:") for caveat in answer.to_dict()["caveats"])
    message = "plan only: the engine does not have norms behind a block's halves"
    assert main(["train", f"model={folder}", "model.init=random", f"run={tmp_path / 'run'}", "recipe.steps=1"]) != 0
    assert message in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps({**small, "new_gate_rank": 4}))
    assert main(["plan", str(folder), "--cluster", "h100"]) != 0
    assert f"{folder}/config.json: new_gate_rank=4 is not known" in capsys.readouterr().err


def test_the_engine_builds_no_shape_with_unbuilt_parts() -> None:
    shape = ModelShape(
        vocab=64, layers=1, hidden=16, heads=2, ffn=32, max_positions=8, unbuilt=UnbuiltParts(sinks=True)
    )
    with pytest.raises(PlanError, match="plan only: the engine does not have attention sinks"):
        skeleton(shape)


@pytest.mark.parametrize(
    ("name", "asked"),
    [("google/gemma-9", True), ("Qwen/Qwen3-8B", False), ("./x/y", False), ("a/b/c", False), ("gpt2", False),
     ("runs/plan.yaml", False), ("some/config.json", False)],
)  # fmt: skip
def test_names_that_the_hub_is_asked_for(name: str, asked: bool) -> None:
    assert is_hub_name(name) == asked


UNREACHABLE = "import socket\ndef lost(*_, **__): raise socket.gaierror(-2, 'no network')\nsocket.getaddrinfo = lost\n"
SILENT = "import socket, time\nsocket.getaddrinfo = lambda *_, **__: time.sleep(60)\n"


@pytest.mark.parametrize(
    ("network", "offline", "reason"),
    [(UNREACHABLE, "0", "and https://huggingface.co cannot be reached: "),
     (SILENT, "0", "and https://huggingface.co cannot be reached: "),
     ("", "1", "and HF_HUB_OFFLINE forbids downloads: unset it; or ")],
)  # fmt: skip
def test_a_hub_that_is_not_reached_is_one_sentence_with_the_command(
    network: str, offline: str, reason: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="transformers is the oracle here and is not installed")
    words = ["plan", "google/gemma-9", "--cluster", "h100"]
    call = f"from meshwright.verbs.main import main\nraise SystemExit(main({words}))"
    names = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": offline, "HF_ENDPOINT": "https://huggingface.co"}
    ended = subprocess.run(
        [sys.executable, "-c", network + call], env={**os.environ, **names}, capture_output=True, text=True, timeout=20
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr == (
        "meshwright: MODEL google/gemma-9 is no preset, no folder here and not in the Hugging Face cache, "
        f"{reason}where there is a network, run `hf download google/gemma-9 config.json --local-dir gemma-9`, "
        "and give gemma-9\n"
    )


def test_a_config_in_the_hubs_cache_is_read_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(download, "hub_answers", lambda: pytest.fail("the network was asked"))
    commit = "0" * 40
    folder = tmp_path / "models--google--gemma-9"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "snapshots" / commit / "config.json").write_text("{}")
    assert config_folder("google/gemma-9") == folder / "snapshots" / commit


@pytest.mark.parametrize("verb", [["tune", "data=README.md"], ["dryrun"]])
def test_a_hub_name_as_a_model_to_train_says_how_to_download_it(
    verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb, "model=acme/tiny-9b"]) == 2
    assert "run `hf download acme/tiny-9b --local-dir tiny-9b` and give model=tiny-9b" in capsys.readouterr().err

"""Presets: every published count is met exactly, by our counting and by another's; names; devices."""

import tomllib
import warnings
from importlib.resources import files
from typing import Any

import pytest

from meshwright.spec import ModelShape, num_active_parameters, num_parameters, parameters, presets
from meshwright.spec.errors import PlanError

MODELS = presets.model_names()
EXPERTS = [name for name in MODELS if presets.model(name).moe]


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_published_count(name: str) -> None:
    assert num_parameters(presets.model(name)) == presets.published(name).parameters


# A second list by hand, so that a slip in a preset cannot mend its own test.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-355m", 354_823_168),
        ("gpt2-774m", 774_030_080),
        ("gpt2-1.5b", 1_557_611_200),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("deepseek-v3", 671_026_404_352),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-3-1b", 999_885_952),
        ("phi-3-mini-4k", 3_821_079_552),
        ("phi-4", 14_659_507_200),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("qwen3-next-80b-a3b", 79_674_391_296),
    ],
)
def test_known_counts(name: str, count: int) -> None:
    assert num_parameters(presets.model(name)) == count


def test_gpt3_is_the_count_of_its_paper() -> None:
    """Table D.1 of arXiv:2005.14165 says 174,600 million."""
    assert round(num_parameters(presets.model("gpt3-175b")) / 1e8) == 1746


@pytest.mark.parametrize("name", [name for name in EXPERTS if presets.published(name).active])
def test_active_parameters_are_the_published_figure(name: str) -> None:
    """Counts agree to one unit of the last printed digit: Qwen cuts 3.35 to 3.3."""
    known, shape = presets.published(name), presets.model(name)
    figure = known.active.removesuffix("B")
    unit = 10.0 ** -len(figure.partition(".")[2])
    left_out = sum(p.numel for p in parameters(shape) if p.group == known.active_without)
    assert bool(left_out) == bool(known.active_without)
    assert abs((num_active_parameters(shape) - left_out) / 1e9 - float(figure)) < unit


@pytest.mark.parametrize("name", MODELS)
def test_transformers_counts_the_same(name: str) -> None:
    """The same sizes as a model of `transformers` without storage; layers repeat: two builds give any depth."""
    shape = presets.model(name)
    if name == "grok-1":  # transformers has none: xai-org/grok-1's model.py, by hand
        block = 2 * 6144 * 48 * 128 + 2 * 6144 * 8 * 128 + 8 * (3 * 6144 * 32768 + 6144) + 4 * 6144
        assert num_parameters(shape) == 64 * block + 131072 * 6144 + 6144
        return
    if shape.unbuilt is not None and (shape.unbuilt.routed_every > 1 or shape.unbuilt.linear):
        assert _count_elsewhere(shape, shape.layers) == num_parameters(shape)
        return
    dense = shape.moe.first_dense if shape.moe else 0
    single, double = (_count_elsewhere(shape, dense + layers) for layers in (1, 2))
    assert single + (shape.layers - dense - 1) * (double - single) == num_parameters(shape)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("GPT2Config", "gpt2-124m"),
        ("LlamaConfig", "llama-2-7b"),
        ("MistralConfig", "mistral-7b-v0.1"),
        ("MixtralConfig", "mixtral-8x7b"),
        ("DeepseekV3Config", "deepseek-v3"),
    ],
)
def test_the_sizes_transformers_ships(config: str, name: str) -> None:
    """If a family's config class has a published model as its default, the preset has its sizes."""
    shape, theirs = presets.model(name), getattr(_transformers(), config)()
    assert (theirs.hidden_size, theirs.num_hidden_layers) == (shape.hidden, shape.layers)
    assert (theirs.num_attention_heads, theirs.vocab_size) == (shape.heads, shape.vocab)
    assert theirs.tie_word_embeddings == shape.tied
    if shape.family != "gpt2":
        assert (theirs.intermediate_size, theirs.num_key_value_heads) == (shape.ffn, shape.kv_heads)


GPT2 = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}


def _transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers", reason="transformers, the independent count, is not installed")


def _config(shape: ModelShape) -> dict[str, Any]:
    """Names of our fields in `transformers`."""
    fields: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tied,
    }
    if shape.family == "gpt2":
        return {GPT2.get(key, key): value for key, value in fields.items()}
    fields |= {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
    if shape.moe:
        experts = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "deepseek_v3": "n_routed_experts"}
        fields[experts.get(shape.family, "num_local_experts")] = shape.moe.experts
        fields |= {"num_experts_per_tok": shape.moe.top_k, "moe_intermediate_size": shape.moe.ffn}
        fields |= {"n_shared_experts": shape.moe.shared_experts, "first_k_dense_replace": shape.moe.first_dense}
    if shape.mla:
        fields |= {"q_lora_rank": shape.mla.q_rank, "kv_lora_rank": shape.mla.kv_rank, "v_head_dim": shape.mla.v_dim}
        fields |= {"qk_nope_head_dim": shape.mla.nope_dim, "qk_rope_head_dim": shape.mla.rope_dim}
        fields["head_dim"] = shape.mla.rope_dim
    return fields


PEERS = {
    "gemma-2": "gemma2", "gemma-3": "gemma3_text", "phi": "phi3", "olmo-2": "olmo2", "gpt-oss": "gpt_oss",
    "nemotron": "nemotron", "glm": "glm4_moe", "minimax-text": "minimax", "minimax": "minimax_m2",
    "llama-4": "llama4_text", "qwen3-next": "qwen3_next",
}  # fmt: skip
"""Beginning of a preset's name -> what transformers calls the family, where the engine has none of it."""


def _planned(shape: ModelShape) -> dict[str, Any]:
    """Names in `transformers` of further fields, for families that are planned only."""
    fields: dict[str, Any] = {"attention_bias": shape.qkv_bias, "use_qk_norm": shape.qk_norm, "pad_token_id": 0}
    if shape.moe:
        fields |= {"num_local_experts": shape.moe.experts, "n_routed_experts": shape.moe.experts}
    linear = shape.unbuilt.linear if shape.unbuilt else None
    if linear:
        kinds = ["linear_attention" if linear.covers(layer) else "full_attention" for layer in range(shape.layers)]
        fields |= {"layer_types": kinds, "linear_num_key_heads": linear.key_heads}
        fields |= {"linear_num_value_heads": linear.value_heads, "linear_conv_kernel_dim": linear.taps}
    if shape.moe and linear:
        fields |= {"num_experts": shape.moe.experts, "moe_intermediate_size": shape.moe.ffn}
        fields |= {"shared_expert_intermediate_size": shape.moe.shared_experts * shape.moe.ffn}
    if shape.moe and shape.unbuilt and shape.unbuilt.chunk:
        fields |= {"intermediate_size": shape.moe.ffn, "intermediate_size_mlp": shape.ffn}
        fields |= {"interleave_moe_layer_step": shape.unbuilt.routed_every}
    return fields


def _count_elsewhere(shape: ModelShape, layers: int) -> int:
    transformers = _transformers()
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fields = _config(shape) | {"n_layer" if shape.family == "gpt2" else "num_hidden_layers": layers}
        peer = next((peer for start, peer in PEERS.items() if shape.name.startswith(start)), shape.family)
        fields |= _planned(shape) if peer != shape.family or peer == "phi3" else {}
        config = transformers.AutoConfig.for_model(peer, **fields)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    return int(sum({id(p): p.numel() for p in model.parameters()}.values()))


@pytest.mark.parametrize("folder", ["models", "devices"])
def test_every_number_has_a_source(folder: str) -> None:
    for entry in files(presets).joinpath(folder).iterdir():
        if not entry.name.endswith(".toml"):
            continue
        table = tomllib.loads(entry.read_text(encoding="utf-8"))
        for name, preset in table.get("models", table).items():
            assert preset["source"], name
            assert preset.get("parameters_source") if folder == "models" else preset["certainty"], name
            assert ("active" in preset) <= ("active_source" in preset), name
            assert ("watts" in preset) == ("watts_source" in preset), name


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"hiden": 8}, "model.hiden is not known; nearest: hidden"),
        ({"moe": {"expert": 8}}, "moe.expert is not known; nearest: experts"),
        ({"moe": {"experts": 8}}, "moe.top_k is missing"),
        ({}, "model.vocab is missing"),
    ],
)
def test_a_key_that_a_shape_has_not_is_refused(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        presets.shape_of(fields)


def test_presets_carry_their_name_and_fit_their_family() -> None:
    for name in MODELS:
        shape = presets.model(name)
        assert shape.name == name
        assert (shape.family == "gpt2") == (shape.positions == "learned")
        assert (shape.family == "deepseek_v3") == (shape.mla is not None)
        if not shape.plan_only:
            assert (shape.family in ("mixtral", "qwen3_moe", "deepseek_v3")) == (shape.moe is not None)
            assert shape.qk_norm == shape.family.startswith("qwen3")


def test_deepseek_is_whole() -> None:
    shape = presets.model("deepseek-v3")
    assert shape.moe is not None and shape.mla is not None and shape.rope_scaling is not None
    assert (shape.moe.experts, shape.moe.top_k, shape.moe.groups, shape.moe.top_groups) == (256, 8, 8, 4)
    assert (shape.moe.scoring, shape.moe.correction_bias, shape.moe.routed_scale) == ("sigmoid", True, 2.5)
    assert (shape.moe.first_dense, shape.rope_interleaved, shape.rope_scaling.kind) == (3, True, "yarn")
    assert shape.head_dim == 192


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gpt2", "gpt2-124m"),
        ("GPT2-XL", "gpt2-1.5b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("llama_3.1_8b", "llama-3.1-8b"),
        ("mistral-7b", "mistral-7b-v0.1"),
    ],
)
def test_other_spellings(name: str, meant: str) -> None:
    assert presets.model(name) == presets.model(meant)


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"model='llama-3.1-9b' is not known; nearest: llama-3.1-8b"):
        presets.model("llama-3.1-9b")
    with pytest.raises(PlanError, match=r"cluster='h10x8' is not known; nearest: h100"):
        presets.cluster("h10x8")
    with pytest.raises(PlanError, match=r"known: [\w, .-]+ and \d+ more$"):
        presets.model("")


@pytest.mark.parametrize(
    ("name", "device", "devices"),
    [
        ("local", "local", 1),
        ("localx2", "local", 2),
        ("h100", "H100-SXM-80", 1),
        ("H100x8", "H100-SXM-80", 8),
        ("mi300x", "MI300X", 1),
        ("mi300xx8", "MI300X", 8),
        ("rtx4090", "RTX-4090", 1),
        ("4090x2", "RTX-4090", 2),
        ("a100-80x16", "A100-SXM-80", 16),
    ],
)
def test_cluster_names(name: str, device: str, devices: int) -> None:
    cluster = presets.cluster(name)
    assert (cluster.device.name, cluster.devices) == (device, devices)
    assert presets.cluster(name, nodes=3).devices == 3 * devices


@pytest.mark.parametrize("name", ["x8", "h100x", "h100x-1", "h100x8x8", "h100x" + "9" * 5000])
def test_cluster_names_that_are_none(name: str) -> None:
    with pytest.raises(PlanError, match="is not known"):
        presets.cluster(name)


def test_empty_nodes_are_refused() -> None:
    with pytest.raises(PlanError, match="a node has 1 to 65,536 devices"):
        presets.cluster("h100x0")


def test_device_units() -> None:
    h100 = presets.device("h100")
    assert h100.memory_bytes == 80 * 2**30
    assert h100.bf16_flop_per_s == 989.4e12
    assert h100.bf16_matmul_flop_per_s == 794.5e12
    assert h100.memory_bytes_per_s == 3350e9
    assert (h100.link_bytes_per_s, h100.network_bytes_per_s) == (450e9, 50e9)


def test_no_measured_product_beats_its_peak() -> None:
    for name in presets.device_names():
        known = presets.device(name)
        assert known.bf16_matmul_flop_per_s <= known.bf16_flop_per_s
        assert known.fp8_matmul_flop_per_s <= known.fp8_flop_per_s
        if name != "local":
            assert 0 < known.half_flop_per_s <= known.fp8_flop_per_s or known.fp8_flop_per_s == 0
            assert bool(known.bf16_flop_per_s) != bool(known.fp16_flop_per_s), "fp16 stands for a device without bf16"
            assert known.memory_bytes >= 16 * 2**30 and known.memory_bytes_per_s > 5e10


def test_two_presets_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="defined twice"):
        presets._add({"a": 1}, ["b", "a"], 2)


@pytest.mark.parametrize("name", ["a100-40gbx4", "4xA100-40GB", "a100-40x4", "4xa100-40"])
def test_a_device_is_named_as_shops_and_people_name_it(name: str) -> None:
    cluster = presets.cluster(name)
    assert (cluster.device.name, cluster.devices_per_node) == ("A100-SXM-40", 4)


@pytest.mark.parametrize(
    ("name", "device", "number"),
    [
        ("A100-SXM4-40GB", "A100-SXM-40", 1), ("NVIDIA A100-SXM4-80GB", "A100-SXM-80", 1),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80", 1), ("h100-80gbx8", "H100-SXM-80", 8),
        ("H100 PCIe", "H100-PCIe-80", 1),
        ("h200-141gb", "H200-SXM", 1), ("4x RTX 4090", "RTX-4090", 4), ("2x4090", "RTX-4090", 2),
        ("rtx4090x2", "RTX-4090", 2), ("NVIDIA GeForce RTX 3090", "RTX-3090", 1), ("l40s x4", "L40S", 4),
        ("AMD Instinct MI300X 192GB", "MI300X", 1), ("mi300xx8", "MI300X", 8), ("8xMI300X", "MI300X", 8),
        ("GB200 NVL72", "GB200", 72), ("Tesla V100-SXM2-32GB", "V100-SXM-32", 1), ("v100-16gb", "V100-SXM-16", 1),
        ("Tesla T4", "T4", 1), ("A10G x4", "A10G", 4), ("RTX A6000", "RTX-A6000", 1), ("h100 x 8", "H100-SXM-80", 8),
        ("h100:8", "H100-SXM-80", 8),
    ],
)  # fmt: skip
def test_a_device_is_named_as_drivers_and_data_sheets_name_it(name: str, device: str, number: int) -> None:
    cluster = presets.cluster(name)
    assert (cluster.device.name, cluster.devices_per_node) == (device, number)
    assert presets.device_note(name) == ""


def test_every_name_of_a_device_means_it_alone_and_in_a_node() -> None:
    for name, known in presets._devices().items():
        assert presets.device(name) is known and presets.devices_in_node(f"{name}x8") == (known, 8)
        assert presets.device(known.name).name == known.name


@pytest.mark.parametrize("name", ["rtx4090-48gb", "A100-PCIE-40GB", "a100-999gb", "h100-nvl", "80gb", "NVIDIA", "8x"])
def test_a_size_that_no_such_device_has_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="is not known"):
        presets.cluster(name)


def test_an_alias_of_a_gpu_that_is_sold_with_other_memory_says_which_it_is_taken_for() -> None:
    assert presets.device_note("a100x4") == ("a100 is taken as A100-SXM-80 (80 GiB); there are also a100-40 (40 GiB).")
    assert "a100-80" not in presets.device_note("a100x4")
    for plain in ("a100-40gbx4", "a100-80x4", "b200x8", "mi300x"):
        assert presets.device_note(plain) == ""
    assert presets.cluster("8xH100").devices_per_node == 8 and presets.cluster("mi300x").devices_per_node == 1


def test_a_node_larger_than_any_that_is_sold_is_said() -> None:
    note = "h100x64 is one node of 64 devices. Nodes of 8 are --cluster h100x8 --nodes 8."
    assert presets.device_note("h100x64") == presets.device_note("64xH100") == note
    for name in ("h100x8", "v100x16", "gb200x72", "tpu-v5px64"):
        assert "one node" not in presets.device_note(name)


@pytest.mark.parametrize(
    ("name", "device", "number", "gigabytes"),
    [
        ("dgx-h100", "H100-SXM-80", 8, 50), ("DGX H100", "H100-SXM-80", 8, 50), ("p5.48xlarge", "H100-SXM-80", 8, 50),
        ("p4d.24xlarge", "A100-SXM-40", 8, 6.25), ("a3-highgpu-8g", "H100-SXM-80", 8, 12.5),
        ("Standard_ND96isr_H100_v5", "H100-SXM-80", 8, 50), ("BM.GPU.H100.8", "H100-SXM-80", 8, 50),
        ("g5.12xlarge", "A10G", 4, 1.25), ("p3.2xlarge", "V100-SXM-16", 1, 6.25),
    ],
)  # fmt: skip
def test_a_machine_is_named_as_its_seller_names_it(name: str, device: str, number: int, gigabytes: float) -> None:
    cluster = presets.cluster(name, nodes=2)
    assert (cluster.device.name, cluster.devices_per_node, cluster.nodes) == (device, number, 2)
    assert cluster.device.network_bytes_per_s == gigabytes * 1e9
    assert presets.device_note(name).startswith(f"{name} is taken as {number} {device}")


def test_every_machine_has_a_known_device_and_no_name_of_one() -> None:
    for sold in presets.machines():
        assert sold.device in presets.device_names() and 1 <= sold.devices <= presets.LARGEST_NODE
        for name in sold.names:
            assert presets.machine(name) is sold and name not in presets._devices()
    with pytest.raises(PlanError, match=r"cluster='dgx-h1000' is not known; nearest: dgx-h100"):
        presets.cluster("dgx-h1000")


def test_nodes_of_one_device_that_nobody_asked_for_are_said() -> None:
    note = "h100 --nodes 8 is 8 nodes of one device. One node of 8 is --cluster h100x8."
    assert presets.device_note("H100", 8) == note
    assert presets.device_note("h100x1", 8) == presets.device_note("h100x8", 8) == presets.device_note("h100") == ""

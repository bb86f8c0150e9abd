"""Memory of served models: by hand from configurations of transformers, and against what the engine really holds."""

from dataclasses import replace

import pytest
import torch

import meshwright as mw
from meshwright import compat
from meshwright.model import build
from meshwright.planner.kernels.fitted_kernel import silicon_of
from meshwright.planner.serving import serving_memory as serving_memory_module
from meshwright.planner.serving.cached_layers import (
    CachedLayers,
    ServedModel,
    elements_per_position,
    sequence_bytes,
    served,
)
from meshwright.planner.serving.deployment import (
    BF16,
    MESHWRIGHT,
    VLLM,
    Deployment,
    EngineDegrees,
    formats_of,
    meshwright_on,
)
from meshwright.planner.serving.serving_memory import (
    BLOCK,
    adapters_bytes,
    graphs_bytes,
    serving_memory,
    weights_bytes,
)
from meshwright.serving.engine.cache.paged_cache import PagedCache
from meshwright.serving.engine.engine_options import EngineOptions
from meshwright.serving.engine.rows.request_adapters import ServedAdapter
from meshwright.serving.engine.serving_engine import ServingEngine
from meshwright.serving.engine.step_graphs import StepMemory
from meshwright.spec import Layout, presets
from meshwright.spec.errors import ArgumentError, IllegalLayout, PlanError
from meshwright.spec.layout.cluster import Device
from meshwright.spec.model.shape import LoRAShape, ModelShape
from meshwright.spec.plan.execution import MEMORY_SHARE
from meshwright.spec.weights.boxes import boxes_of
from meshwright.spec.weights.inventory import num_parameters, parameters


def deployment(name: str, quantization: str = "bf16", device: str = "h100", **degrees: int) -> Deployment:
    shape = presets.model(name)
    return Deployment(
        model=served(shape), device=presets.device(device), degrees=EngineDegrees(**degrees),
        formats=formats_of(quantization, experts=shape.moe is not None), framework=VLLM,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("llama-3.1-8b", 32 * 2 * 8 * 128 * 2),  # 32 layers, 8 key heads of 128, keys and values, bf16: 128 KiB
        ("llama-2-7b", 32 * 2 * 32 * 128 * 2),  # as many key heads as heads: 512 KiB
        ("qwen3-32b", 64 * 2 * 8 * 128 * 2),
        ("deepseek-v3", 61 * (512 + 64) * 2),  # a latent of 512 and a rotated key of 64: 68.6 KiB
    ],
)
def test_bytes_of_a_token_are_those_of_the_configuration(name: str, per_token: int) -> None:
    model = served(presets.model(name))
    assert sequence_bytes(model, 1000, 2.0) == 1000 * per_token
    assert sequence_bytes(model, 1000, 1.0) == 500 * per_token


@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen3Config", "MistralConfig", "DeepseekV3Config"])
def test_they_agree_with_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, kind)()
    latent = getattr(config, "kv_lora_rank", None)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if latent:
        elements = config.kv_lora_rank + config.qk_rope_head_dim
        shape = presets.model("deepseek-v3")
        assert elements_per_position(shape) == elements
        return
    shape = ModelShape(
        vocab=config.vocab_size, layers=config.num_hidden_layers, hidden=config.hidden_size, head_dim=head,
        heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, ffn=config.intermediate_size,
        max_positions=4096,
    )  # fmt: skip
    assert elements_per_position(shape) == 2 * config.num_key_value_heads * head


def test_tensor_parallel_ranks_share_key_heads_and_each_has_at_least_one() -> None:
    model = served(presets.model("llama-3.1-8b"))
    whole = sequence_bytes(model, 100, 2.0)
    assert [sequence_bytes(model, 100, 2.0, tp) for tp in (2, 8, 16)] == [whole / 2, whole / 8, whole / 8]
    latent = served(presets.model("deepseek-v3"))
    assert sequence_bytes(latent, 100, 2.0, 8) == sequence_bytes(latent, 100, 2.0)


def test_windows_and_states_bound_what_a_long_sequence_takes() -> None:
    shape = presets.model("llama-3.1-8b")
    each = 2 * 8 * 128 * 2
    half = ServedModel(shape, (CachedLayers(16), CachedLayers(16, window=128)))
    assert sequence_bytes(half, 1000, 2.0) == 16 * each * (1000 + 128)
    assert sequence_bytes(half, 100, 2.0) == 32 * each * 100
    states = ServedModel(shape, (CachedLayers(8), CachedLayers(24, state_elements=1000)))
    assert sequence_bytes(states, 10, 2.0) == 8 * each * 10 + 24 * 2000


def test_weights_are_two_bytes_of_every_parameter_in_bf16() -> None:
    for name in ("llama-3.1-8b", "deepseek-v3"):
        assert weights_bytes(deployment(name)) == 2 * num_parameters(presets.model(name))


def test_ranks_together_hold_all_weights_and_what_each_needs_twice() -> None:
    single = weights_bytes(deployment("llama-3.1-8b"))
    eight = 8 * weights_bytes(deployment("llama-3.1-8b", tp=8))
    assert single < eight < 1.001 * single  # norms are whole on every rank
    spread = deployment("deepseek-v3", tp=8, expert_ep=8)
    cut = deployment("deepseek-v3", tp=8, expert_tp=8)
    assert weights_bytes(spread) == weights_bytes(cut)


def test_formats_leave_embedding_and_head_in_16_bit() -> None:
    shape = presets.model("llama-3.1-8b")
    ends = 2 * shape.vocab * shape.hidden
    whole = num_parameters(shape)
    stored = weights_bytes(deployment("llama-3.1-8b", "fp8"))
    assert stored == pytest.approx(whole - ends + 2 * ends, rel=1e-4)
    mixture = formats_of("nvfp4", experts=True)
    assert mixture.attention == BF16 and mixture.experts.width == 0.5625
    assert formats_of("int8", experts=False).mlp.width == pytest.approx(1.0, rel=0.01)
    with pytest.raises(PlanError, match="take one of"):
        formats_of("int1", experts=False)


def test_largest_concurrency_is_what_fits_beside_the_weights() -> None:
    memory = serving_memory(deployment("llama-3.1-8b"), 2048)
    taken = memory.weights_bytes + memory.activations_bytes
    assert taken + memory.most_sequences * memory.sequence_bytes <= memory.usable_bytes
    assert taken + (memory.most_sequences + 1) * memory.sequence_bytes > memory.usable_bytes
    assert serving_memory(deployment("llama-3.1-405b"), 2048).most_sequences == 0


def test_more_ranks_narrower_weights_and_shorter_sequences_hold_more() -> None:
    def most(length: int = 4096, quantization: str = "bf16", tp: int = 1) -> float:
        return serving_memory(deployment("qwen3-32b", quantization, tp=tp), length).most_sequences

    assert most() < most(tp=2) < most(tp=4)
    assert most() < most(quantization="fp8") < most(quantization="int4_wo")
    assert most(8192) < most(4096) < most(1024)


def engine_on_gpu(device: Device, shape: ModelShape) -> EngineOptions:
    """The engine's options on such a GPU, which says how many processors it has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "processors", lambda _: silicon_of(device).processors)
        return EngineOptions().on_device(torch.device("cuda", 0), shape.hidden)


@pytest.mark.parametrize(
    ("device", "model", "tokens"),
    [("h200-sxm", "llama-3.1-8b", 8192), ("h200-sxm", "llama-3.1-70b", 4096), ("a100-80", "llama-3.1-8b", 4096),
     ("h200-sxm", "llama-3.2-1b", 16384), ("l4", "llama-3.1-8b", 4096)],
)  # fmt: skip
def test_plans_have_the_defaults_of_the_engine(device: str, model: str, tokens: int) -> None:
    shape, target = presets.model(model), presets.device(device)
    options, planned = engine_on_gpu(target, shape), meshwright_on(target, shape.hidden)
    assert options.most_tokens == planned.budget == tokens
    assert options.most_sequences == planned.sequences == 256
    assert options.memory_share == planned.cache_share == 0.9
    assert options.cache_bytes == 0
    on_cpu, here = EngineOptions().on_device(torch.device("cpu"), shape.hidden), presets.device("local")
    assert (on_cpu.most_tokens, on_cpu.most_sequences, on_cpu.cache_bytes) == (512, 64, 2**30)
    assert meshwright_on(here, shape.hidden) == MESHWRIGHT and on_cpu.most_tokens == MESHWRIGHT.budget


def test_plans_make_no_more_answers_at_once_than_the_engine() -> None:
    """Beyond its sequences more requests in flight wait: a token comes no later for them, and no sooner."""
    plan = "llama-3.1-8b"
    few, many = (
        mw.plan_serving(plan, cluster="h200x1", framework="meshwright", concurrency=concurrency)
        for concurrency in (256, 512)
    )
    unlimited = mw.plan_serving(plan, cluster="h200x1", concurrency=512)
    assert few.best.served and many.best.served and unlimited.best.served
    assert many.best.served.per_token_s < 1.05 * few.best.served.per_token_s
    assert many.best.served.first_token_s > 10 * few.best.served.first_token_s


def test_cuda_graphs_of_our_engine_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What graphs read and leave is what the engine makes for them, but for a block that pads tables; one GPU has them,
    but for quantized experts."""
    shape = presets.model("llama-3.1-8b")
    plain = deployment("llama-3.1-8b")
    ours = replace(plain, framework=meshwright_on(plain.device, shape.hidden))
    rows = engine_on_gpu(plain.device, shape).most_sequences
    assert EngineOptions().block == BLOCK
    whole = graphs_bytes(ours, 2048)
    assert graphs_bytes(ours, 64) < whole < graphs_bytes(ours, 100_000) < 2**32
    memory = serving_memory(ours, 2048)
    assert memory.graphs_bytes == whole
    left = memory.usable_bytes - memory.weights_bytes - memory.activations_bytes - whole
    assert memory.cache_bytes == MEMORY_SHARE * left
    monkeypatch.setattr(serving_memory_module, "GRAPH_POOLS", 0.0)
    blocks = 1 + rows * shape.max_positions // BLOCK
    held = StepMemory(rows, blocks, shape.vocab, torch.device("cpu"))
    assert graphs_bytes(ours, 2048) + 8 == held.bytes
    none = [
        deployment("llama-3.1-8b"), replace(deployment("mixtral-8x7b", "fp8"), framework=MESHWRIGHT),
        replace(deployment("llama-3.1-8b", tp=2), framework=MESHWRIGHT),
        replace(deployment("deepseek-v3"), framework=MESHWRIGHT),
    ]  # fmt: skip
    assert [graphs_bytes(without_graphs, 2048) for without_graphs in none] == [0.0] * 4


def on_this_machine(shape: ModelShape) -> Deployment:
    return Deployment(
        model=served(shape), device=presets.device("local"), degrees=EngineDegrees(), framework=MESHWRIGHT,
        formats=formats_of("fp32", experts=True), cache_width=4.0,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["llama-tiny", "moe-tiny"])
def test_the_engine_holds_what_is_planned(name: str) -> None:
    shape = presets.model(name)
    model = build(shape, dtype=torch.float32, device=torch.device("cpu"), initialize=False)
    cache = PagedCache(model, 20, 16)
    planned = sequence_bytes(served(shape), (20 + 2) * 16, 4.0)
    assert cache.bytes == planned
    assert weights_bytes(on_this_machine(shape)) == sum(parameter.nbytes for parameter in model.parameters())


LORA = LoRAShape(rank=12, targets="all")


@pytest.mark.parametrize("name", ["llama-tiny", "moe-tiny"])
def test_adapters_take_what_the_engine_says(name: str) -> None:
    """A and B, and once more for compiled loops."""
    shape = presets.model(name)
    low = [parameter for parameter in parameters(replace(shape, lora=LORA)) if parameter.adapts]
    adapters = {
        called: ServedAdapter(LORA, {parameter.name: torch.randn(parameter.shape) for parameter in low})
        for called in "abc"
    }
    engine = ServingEngine(build(shape), EngineOptions(most_sequences=2), adapters=adapters)
    served_with = replace(on_this_machine(shape), adapters=3, adapter=LORA)
    assert adapters_bytes(served_with) == engine.adapters.bytes > 0
    without = serving_memory(replace(served_with, adapter=None), 64)
    assert serving_memory(served_with, 64).held_bytes - without.held_bytes == engine.adapters.bytes


@pytest.mark.parametrize(
    ("name", "layout", "degrees"),
    [
        ("llama-3.1-8b", Layout(tp=4), {"tp": 4}),
        ("qwen2.5-0.5b", Layout(tp=2), {"tp": 2}),
        ("deepseek-v3", Layout(tp=8), {"tp": 8, "expert_tp": 8}),
        ("mixtral-8x7b", Layout(tp=4, ep=4, sp=True), {"tp": 4, "expert_ep": 4}),
    ],
)
def test_ranks_share_adapters_as_the_engine_cuts_them(name: str, layout: Layout, degrees: dict[str, int]) -> None:
    """A of what reads the hidden states is whole on each."""
    served_with = replace(deployment(name, **degrees), adapters=2, adapter=LORA)
    shape = replace(served_with.model.shape, lora=LORA)
    low = [single for single in parameters(shape) if single.adapts]
    each = [sum(box.numel for box in boxes_of(low, shape, layout, rank).values()) for rank in range(layout.tp)]
    assert adapters_bytes(served_with) == 2 * 2.0 * each[0] and len(set(each)) == 1
    single = EngineDegrees()
    assert (
        adapters_bytes(served_with) * layout.tp
        > adapters_bytes(replace(served_with, degrees=single))
        > adapters_bytes(served_with)
    )


def test_adapters_make_room_for_fewer_sequences() -> None:
    plain, many = (mw.plan_serving("llama-3.1-8b", cluster="h100x1", adapters=number) for number in (0, 64))
    assert many.best.memory.cache_bytes == plain.best.memory.cache_bytes - many.best.memory.adapters_bytes
    assert many.best.most_requests < plain.best.most_requests
    assert many.to_dict()["best"]["adapters_bytes"] == round(many.best.memory.adapters_bytes)
    for words, message in (
        ({"adapter_targets": "head"}, "adapter_targets='head'"),
        ({"adapter_rank": 0}, "adapter_rank=0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            mw.plan_serving("llama-3.1-8b", cluster="h100x1", adapters=1, **words)  # type: ignore[arg-type]  # of each


def test_degrees_that_cannot_be_are_refused() -> None:
    with pytest.raises(IllegalLayout, match="does not divide"):
        deployment("llama-3.1-8b", tp=5)
    with pytest.raises(IllegalLayout, match="is not the 8 GPUs"):
        deployment("deepseek-v3", tp=8, expert_ep=4)

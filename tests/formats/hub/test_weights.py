"""Weights on disk: shards, names of every family, and every way a directory can be broken."""

import json
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.formats.hub import load_weights, save_weights
from meshwright.formats.hub.weight_names import ROWS, bindings, tensor_sizes
from meshwright.spec import MLAShape, ModelShape, MoEShape, parameters
from meshwright.spec.errors import HubError

SIZES: dict[str, Any] = {
    "vocab": 24,
    "layers": 2,
    "hidden": 8,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 12,
    "max_positions": 16,
}
MOE = MoEShape(experts=4, top_k=2, ffn=6)
LLAMA = ModelShape(**SIZES)
BIASED = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
SHAPES = {
    "llama": replace(LLAMA, **BIASED),
    "mistral": replace(LLAMA, family="mistral", tied=True),
    "mixtral": replace(LLAMA, family="mixtral", moe=MOE),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True),
    "phi3": replace(LLAMA, family="phi3"),
    "phi3-interleaved": replace(LLAMA, family="phi3", rope_interleaved=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True),
    "qwen3_moe": replace(LLAMA, family="qwen3_moe", qk_norm=True, moe=replace(MOE, first_dense=1)),
    "deepseek_v3": replace(
        LLAMA,
        family="deepseek_v3",
        kv_heads=4,
        moe=replace(MOE, first_dense=1, shared_experts=1, scoring="sigmoid", correction_bias=True),
        mla=MLAShape(q_rank=6, kv_rank=4, nope_dim=2, rope_dim=4, v_dim=3),
    ),
    "gpt2": replace(
        LLAMA, family="gpt2", kv_heads=4, norm="layernorm", positions="learned", mlp="gelu_tanh", tied=True, **BIASED
    ),
}


def random_tensors(shape: ModelShape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator) for name, size in tensor_sizes(shape).items()}


def loaded(folder: Path, shape: ModelShape) -> dict[str, Tensor]:
    read_tensors: dict[str, Tensor] = {}
    load_weights(folder, shape, lambda name, tensor: read_tensors.update({name: tensor}))
    return read_tensors


def saved(folder: Path, shape: ModelShape = LLAMA, **options: Any) -> dict[str, Tensor]:
    """Write a random model; returns its tensors by our names."""
    folder.mkdir(exist_ok=True)
    tensors = random_tensors(shape)
    save_weights(folder, tensors.items(), shape, **{"dtype": torch.float32, **options})
    return tensors


def assert_same(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[name], wanted[name]) for name in wanted)


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of a directory of one file, by their names."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", ROWS)
def test_every_tensor_of_a_shape_has_one_place_in_its_family(family: str) -> None:
    shape = SHAPES[family]
    bound = bindings(shape)
    ours = [name for binding in bound for name in binding.ours]
    theirs = [name for binding in bound for name in binding.theirs]
    assert sorted(ours) == sorted(tensor_sizes(shape)) and {p.name for p in parameters(shape)} <= set(ours)
    assert len(theirs) == len(set(theirs))


@pytest.mark.parametrize("family", ROWS)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 2000])
def test_weights_come_back_bit_for_bit(family: str, max_shard_bytes: int, tmp_path: Path) -> None:
    wanted = saved(tmp_path, SHAPES[family], max_shard_bytes=max_shard_bytes)
    assert_same(loaded(tmp_path, SHAPES[family]), wanted)


def test_neighbouring_rotary_pairs_are_written_as_halves_and_come_back(tmp_path: Path) -> None:
    shape = replace(LLAMA, family="qwen3", qk_norm=True, rope_interleaved=True, head_dim=6)
    wanted = saved(tmp_path, shape)
    theirs = load_file(tmp_path / "model.safetensors")
    ours, there = wanted["layers.0.attention.q_norm.weight"], theirs["model.layers.0.self_attn.q_norm.weight"]
    assert torch.equal(there, ours[[0, 2, 4, 1, 3, 5]])
    query, there = wanted["layers.0.attention.q.weight"], theirs["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(there[6:12], query[6:12][[0, 2, 4, 1, 3, 5]])
    assert_same(loaded(tmp_path, shape), wanted)


def test_shards_have_the_usual_names_sizes_and_index(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_bytes=1000, dtype=torch.bfloat16)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert len(files) > 2
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    total = 0
    for file in files:
        tensors = load_file(file)
        bytes_in_file = sum(tensor.nbytes for tensor in tensors.values())
        total += bytes_in_file
        assert bytes_in_file <= 1000 or len(tensors) == 1
        assert all(index["weight_map"][name] == file.name for name in tensors)
        assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
        length = int.from_bytes(file.read_bytes()[:8], "little")
        assert length % 8 == 0
        assert json.loads(file.read_bytes()[8 : 8 + length])["__metadata__"] == {"format": "pt"}
    assert index["metadata"] == {"total_size": total, "total_parameters": total // 2}


def test_one_file_where_it_fits_and_correction_biases_stay_fp32(tmp_path: Path) -> None:
    saved(tmp_path, SHAPES["deepseek_v3"], dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    dtypes = {name: tensor.dtype for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert dtypes.pop("model.layers.1.mlp.gate.e_score_correction_bias") == torch.float32
    assert set(dtypes.values()) == {torch.float16}


def test_order_does_not_matter_and_no_tensor_waits_in_memory(tmp_path: Path) -> None:
    tensors = random_tensors(SHAPES["qwen3_moe"])
    alive: list[weakref.ref[Tensor]] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name in sorted(tensors, reverse=True):
            assert sum(reference() is not None for reference in alive) <= 1, "an earlier tensor is still held"
            fresh = tensors[name].clone()
            alive.append(weakref.ref(fresh))
            yield name, fresh
            del fresh

    save_weights(tmp_path, stream(), SHAPES["qwen3_moe"], dtype=torch.float32, max_shard_bytes=2000)
    sums: dict[str, float] = {}
    alive.clear()

    def put(name: str, tensor: Tensor) -> None:
        assert sum(reference() is not None for reference in alive) <= 1, "an earlier tensor is still held"
        alive.append(weakref.ref(tensor))
        sums[name] = tensor.double().sum().item()

    load_weights(tmp_path, SHAPES["qwen3_moe"], put)
    assert sums == {name: tensor.double().sum().item() for name, tensor in tensors.items()}


def test_names_without_the_prefix_of_the_body_are_read(tmp_path: Path) -> None:
    for family, prefix in (("gpt2", "transformer."), ("llama", "model.")):
        wanted = saved(tmp_path, SHAPES[family])

        def strip(tensors: dict[str, Tensor], prefix: str = prefix) -> None:
            for name in list(tensors):
                tensors[name.removeprefix(prefix)] = tensors.pop(name)

        rewritten(tmp_path, strip)
        assert_same(loaded(tmp_path, SHAPES[family]), wanted)


def test_a_tied_head_is_not_written_and_accepted_when_equal(tmp_path: Path) -> None:
    shape = SHAPES["mistral"]
    tensors = random_tensors(shape)
    both = {**tensors, "head.weight": tensors["embed.weight"]}
    save_weights(tmp_path, both.items(), shape, dtype=torch.float32)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    rewritten(tmp_path, lambda stored: stored.update({"lm_head.weight": tensors["embed.weight"].clone()}))
    assert_same(loaded(tmp_path, shape), tensors)
    rewritten(tmp_path, lambda stored: stored["lm_head.weight"].add_(1))
    with pytest.raises(HubError, match=r"lm_head\.weight differs .* tie_word_embeddings=true"):
        loaded(tmp_path, shape)


def test_tables_of_old_directories_and_prediction_layers_are_passed_over(tmp_path: Path) -> None:
    wanted = saved(tmp_path, SHAPES["deepseek_v3"])
    extra = ("eh_proj.weight", "enorm.weight", "embed_tokens.weight", "mlp.gate.weight")
    more = {f"model.layers.2.{name}": torch.zeros(2) for name in extra}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    rewritten(tmp_path, lambda stored: stored.update(more))
    assert_same(loaded(tmp_path, SHAPES["deepseek_v3"]), wanted)
    wanted = saved(tmp_path, SHAPES["gpt2"])
    rewritten(tmp_path, lambda stored: stored.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}))
    assert_same(loaded(tmp_path, SHAPES["gpt2"]), wanted)


def test_fp8_by_blocks_is_read_with_its_scales(tmp_path: Path) -> None:
    shape = replace(LLAMA, hidden=20, head_dim=6)
    wanted = saved(tmp_path, shape)
    (tmp_path / "config.json").write_text('{"quantization_config": {"weight_block_size": [8, 16]}}')
    name = "model.layers.0.self_attn.o_proj.weight"

    def quantize(tensors: dict[str, Tensor]) -> None:
        tensors[name + "_scale_inv"] = torch.rand(3, 2) + 0.5
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    rewritten(tmp_path, quantize)
    stored = load_file(tmp_path / "model.safetensors")
    read_tensors = loaded(tmp_path, shape)
    ours = read_tensors.pop("layers.0.attention.o.weight")
    for row in range(20):
        for column in range(24):
            scale = stored[name + "_scale_inv"][row // 8, column // 16]
            assert ours[row, column] == stored[name][row, column].float() * scale
    wanted.pop("layers.0.attention.o.weight")
    assert_same(read_tensors, wanted)
    for size in ([0, 16], [-8, 16], ["8", 16], [8.5, 16], [8], None):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": size}}))
        with pytest.raises(HubError, match="weight_block_size for its fp8 weights"):
            loaded(tmp_path, shape)
    (tmp_path / "config.json").write_text('{"quantization_config": {"weight_block_size": [1000000000000, 16]}}')
    rewritten(tmp_path, lambda tensors: tensors.update({name + "_scale_inv": torch.full((1, 2), 2.0)}))
    assert torch.equal(loaded(tmp_path, shape)["layers.0.attention.o.weight"], 2 * stored[name].float())
    before = (tmp_path / "model.safetensors").read_bytes()
    no_number = torch.full((20, 24), torch.nan)
    for part, wrong in ((name + "_scale_inv", no_number[:1, :2]), (name, no_number.to(torch.float8_e4m3fn))):
        rewritten(tmp_path, methodcaller("update", {part: wrong}))
        with pytest.raises(HubError, match=rf"{name} or its scales are infinite or NaN"):
            loaded(tmp_path, shape)
        (tmp_path / "model.safetensors").write_bytes(before)
    rewritten(tmp_path, lambda tensors: tensors.update({name + "_scale_inv": torch.ones(3, 3)}))
    with pytest.raises(HubError, match=r"scales \[3, 3\] do not fit"):
        loaded(tmp_path, shape)
    rewritten(tmp_path, lambda tensors: tensors.pop(name + "_scale_inv"))
    with pytest.raises(HubError, match="scale is not known"):
        loaded(tmp_path, shape)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks 1 tensors of a llama of 2 layers, first model.norm.weight"),
        (lambda t: t.update({"model.layers.2.x": torch.zeros(1)}), "holds 1 tensors .* first model.layers.2.x"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(9)}), r"model.norm.weight is \[9\] .* says \[8\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(8, dtype=torch.int64)}), "torch.int64"),
    ],
    ids=["missing", "unexpected", "misshapen", "integers"],
)
def test_wrong_tensors_are_refused_before_any_is_given(change: Any, words: str, tmp_path: Path) -> None:
    saved(tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(HubError, match=words) as error:
        load_weights(tmp_path, LLAMA, lambda name, tensor: pytest.fail(f"{name} was given"))
    assert "\n" not in str(error.value)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def replace_in(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (
            lambda d: (d / "model-00002-of-00004.safetensors").unlink(),
            "lacks 1 of 4 shards, first model-00002-of-00004",
        ),
        (
            lambda d: truncate(d / "model-00003-of-00004.safetensors"),
            "model-00003-of-00004.safetensors is truncated",
        ),
        (lambda d: (d / "model-00001-of-00004.safetensors").write_bytes(b"\x08"), "truncated or no safetensors file"),
        (lambda d: (d / "model-00001-of-00004.safetensors").write_bytes(b"<!DOCTYPE html>"), "no safetensors file"),
        (lambda d: replace_in(d / "model-00001-of-00004.safetensors", b'"F32"', b'"F3x"'), "damaged header"),
        (lambda d: replace_in(d / "model-00001-of-00004.safetensors", b'{"__', b'["__'), "damaged header"),
        (lambda d: replace_in(d / "model-00001-of-00004.safetensors", b"[24,8]", b"[-2,8]"), "damaged header"),
        (lambda d: replace_in(d / "model-00001-of-00004.safetensors", b"[24,8]", b"[23,8]"), "damaged header"),
        (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "not an index"),
        (lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}'), "not an index"),
        (lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}'), "beside it"),
        (
            lambda d: replace_in(d / "model.safetensors.index.json", b"model.norm", b"model.form"),
            "do not belong together",
        ),
        (lambda d: (d / "model.safetensors.index.json").unlink(), "neither model.safetensors nor"),
    ],
)
def test_broken_files_are_refused_in_one_line(breakage: Any, words: str, tmp_path: Path) -> None:
    saved(tmp_path, max_shard_bytes=1800)
    breakage(tmp_path)
    with pytest.raises(HubError, match=words) as error:
        load_weights(tmp_path, LLAMA, lambda name, tensor: pytest.fail(f"{name} was given"))
    assert "\n" not in str(error.value)


def test_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(HubError, match=r"only as pickles \(pytorch_model\.bin\), which may run code"):
        loaded(tmp_path, LLAMA)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("norm.weight"), "1 tensors were not given, first model.norm.weight"),
        (lambda t: t.update({"nrm.weight": torch.zeros(8)}), "nrm.weight is no parameter"),
        (lambda t: t.update({"norm.weight": torch.zeros(7)}), r"norm.weight is \[7\] where this shape has \[8\]"),
    ],
)
def test_wrong_tensors_are_not_written(change: Any, words: str, tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    change(tensors)
    with pytest.raises(HubError, match=words):
        save_weights(tmp_path, tensors.items(), LLAMA, dtype=torch.float32)


def test_a_tensor_given_twice_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    twice = [*tensors.items(), ("norm.weight", tensors["norm.weight"])]
    with pytest.raises(HubError, match="given twice"):
        save_weights(tmp_path, twice, LLAMA, dtype=torch.float32)


def test_a_shape_that_the_family_has_no_name_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"family llama has no place for layers\.0\.mlp\.router\.weight"):
        saved(tmp_path, replace(LLAMA, moe=MOE))

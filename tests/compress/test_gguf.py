"""GGUF files: written, read back to the bit, refused at the start where llama.cpp would compute something else."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.compress import gguf_stream
from meshwright.compress.gguf_stream import plan_gguf, write_gguf
from meshwright.compress.original import OriginalModel
from meshwright.data import Tokenizer
from meshwright.formats.gguf.header import COUNT_KEY, NUMBER_KEY, TENSORS_KEY, read_gguf_header, read_gguf_parts
from meshwright.formats.gguf.metadata import OURS
from meshwright.formats.gguf.model import GGUFWriter, PlannedBlocks, open_gguf
from meshwright.formats.gguf.vocabulary import RULES, WHOLE, split_by
from meshwright.formats.hub.weight_names import tensor_sizes
from meshwright.kernels.quantized.gguf_blocks import decode, encode
from meshwright.spec import ModelShape, MoEShape
from meshwright.spec.errors import ArgumentError, HubError, PlanError
from meshwright.spec.model.shape import MLAShape, RopeScaling
from meshwright.spec.weights.gguf_schemes import GGUF_SCHEMES
from meshwright.verbs.main import main
from tests.data.tokenizers_for_tests import WRITTEN
from tests.data.tokenizers_for_tests import written as tokenizer_folder
from tests.training.test_weights import directory

SIZES: dict[str, Any] = {
    "name": "dot", "vocab": 2100, "layers": 2, "hidden": 64, "heads": 4, "ffn": 96, "max_positions": 256,
}  # fmt: skip
EXPERTS = MoEShape(experts=4, top_k=2, ffn=32)
BIASED: dict[str, Any] = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
SHAPES = {
    "llama": ModelShape(**SIZES, kv_heads=2, norm_eps=1e-6, rope_theta=5e5),
    "neighbours": ModelShape(**SIZES, kv_heads=2, rope_interleaved=True),
    "biases": ModelShape(**SIZES, **BIASED, tied=True),
    "linear": ModelShape(**SIZES, rope_scaling=RopeScaling(kind="linear", factor=4, original_positions=64)),
    "yarn": ModelShape(
        **SIZES, head_dim=32, rope_scaling=RopeScaling(kind="yarn", factor=4, original_positions=64, beta_fast=24)
    ),
    "llama3": ModelShape(
        **SIZES, head_dim=32,
        rope_scaling=RopeScaling(kind="llama3", factor=8, original_positions=96, low_frequency_factor=1.5),
    ),
    "mistral": ModelShape(**SIZES, family="mistral", kv_heads=2),
    "mixtral": ModelShape(**SIZES | {"ffn": 32}, family="mixtral", kv_heads=2, moe=EXPERTS),
    "qwen2": ModelShape(**SIZES, family="qwen2", kv_heads=2, qkv_bias=True, tied=True),
    "qwen3": ModelShape(**SIZES, family="qwen3", kv_heads=2, qk_norm=True, head_dim=32),
    "qwen3_moe": ModelShape(**SIZES, family="qwen3_moe", kv_heads=2, qk_norm=True, moe=EXPERTS),
    "gpt2": ModelShape(
        **SIZES, **BIASED, family="gpt2", norm="layernorm", positions="learned", mlp="gelu_tanh", tied=True
    ),
}  # fmt: skip


def drawn(shape: ModelShape) -> dict[str, Tensor]:
    """Weights by name; norms near 1."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(size, generator=generator) * 0.12 + (1 if name.endswith("norm.weight") else 0)
        for name, size in tensor_sizes(shape).items()
    }


def model_of(shape: ModelShape, tokenizer: Tokenizer | None = None, **more: Any) -> OriginalModel:
    actual = drawn(shape)
    inputs: dict[str, Any] = {
        "shape": shape, "dtype": torch.float32, "tokenizer": tokenizer or Tokenizer.shipped(), "chat_template": None,
        "generation": None, "dropout": 0.0,
        "weights": lambda dtype: ((name, tensor.to(dtype)) for name, tensor in actual.items()),
    }  # fmt: skip
    return OriginalModel(**inputs | more)


def written(path: Path, original: OriginalModel, scheme: str | None = None, dtype: torch.dtype = torch.float32) -> Path:
    """The file, whose size was known before."""
    plan = plan_gguf(original, dtype, GGUF_SCHEMES[scheme] if scheme else None)
    assert write_gguf(path, original, plan) == plan.bytes == path.stat().st_size
    return path


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, torch.float32) for name in SHAPES),
    *((name, dtype) for name in ("llama", "qwen3_moe", "gpt2") for dtype in (torch.float16, torch.bfloat16)),
])  # fmt: skip
def test_files_are_read_back_to_the_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    shape, before = SHAPES[name], drawn(SHAPES[name])
    actual = open_gguf(written(tmp_path / "a.gguf", model_of(shape), dtype=dtype))
    assert actual.shape == replace(shape, rope_interleaved=False) and actual.dtype == dtype
    for key, tensor in actual.weights(torch.float32):
        wide = tensor.dim() == 1 or key.endswith("router.weight") or key.startswith("positions")
        rotary = shape.rope_interleaved and key.split(".")[-2] in ("q", "k")
        expected = before[key].float() if wide else before[key].to(dtype).float()
        rows = [expected.unflatten(0, (-1, 8, 2)).transpose(1, 2).flatten(0, 2)] if rotary else [expected]
        assert torch.equal(tensor, rows[0]), key
    opened = mw.load(tmp_path / "a.gguf")
    assert opened.tokenizer is not None and opened.tokenizer.fingerprint == Tokenizer.shipped().fingerprint


@pytest.mark.parametrize("scheme", GGUF_SCHEMES)
def test_codes_stand_for_what_their_blocks_say(scheme: str, tmp_path: Path) -> None:
    shape = replace(SHAPES["llama"], hidden=256, head_dim=64, ffn=288, vocab=2048)
    opened = open_gguf(written(tmp_path / "a.gguf", model_of(shape), scheme))
    before, restored = drawn(shape), dict(opened.weights(torch.float32))
    kinds = {name: tensor.kind.name for name, tensor in opened.header.tensors.items()}
    for ours, theirs in (("layers.0.mlp.up.weight", "blk.0.ffn_up.weight"), ("embed.weight", "token_embd.weight")):
        assert torch.equal(restored[ours], decode(kinds[theirs], encode(kinds[theirs], before[ours])))
    assert kinds["blk.1.attn_norm.weight"] == "F32" and kinds["output.weight"] in ("Q8_0", "Q6_K")
    assert kinds["blk.0.ffn_down.weight"] in ("Q8_0", "Q5_0", "Q5_1", "Q4_0")  # 288 inputs are no whole super-block


def test_keys_are_those_of_llama_cpp(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}"
    original = model_of(SHAPES["mixtral"], chat_template=template, generation={"eos_token_id": [0, 7]})
    keys = read_gguf_header(written(tmp_path / "a.gguf", original, "q4_0")).keys
    assert next(iter(keys)) == "general.architecture" and keys["general.architecture"] == "llama"
    assert keys["general.file_type"] == 2 and keys["general.quantization_version"] == 2
    assert keys["llama.expert_count"] == 4 and keys["llama.expert_used_count"] == 2
    assert keys["llama.attention.head_count_kv"] == 2 and keys["llama.rope.dimension_count"] == 16
    assert keys["tokenizer.chat_template"] == template and keys["tokenizer.ggml.eot_token_id"] == 7
    tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(kinds, list) and len(tokens) == len(kinds) == 2100
    assert (kinds[0], kinds[1], kinds[2099]) == (3, 1, 5) and len(set(tokens)) == 2100
    opened = mw.load(tmp_path / "a.gguf")
    assert opened.stop_ids == (0, 7) and opened.tokenizer is not None and opened.tokenizer.chat_template == template
    assert opened.chat_template()[1].render([{"role": "user", "content": "hm"}], prompt=True).text == "hm"


def test_a_window_bounds_the_context(tmp_path: Path) -> None:
    """llama.cpp has no sliding window there; up to its length there is none to see."""
    shape = replace(SHAPES["mistral"], window=64)
    opened = open_gguf(written(tmp_path / "a.gguf", model_of(shape)))
    assert opened.shape == replace(shape, window=0, max_positions=64)


def rewritten(path: Path, change: dict[str, Any], tensors: dict[str, str | None] | None = None) -> Path:
    """The file with other keys (None = without) and other names of tensors (None = without)."""
    header, names = read_gguf_header(path), tensors or {}
    keys = {key: value for key, value in (dict(header.keys) | change).items() if value is not None}
    stored = {name: tensor for name, tensor in header.tensors.items() if names.get(name, "") is not None}
    planned = [
        PlannedBlocks(name=names.get(name) or name, size=entry.size, kind=entry.kind) for name, entry in stored.items()
    ]
    new = path.with_name("changed.gguf")
    with GGUFWriter(new, keys, planned) as writer:
        for name, entry in stored.items():
            writer.write(names.get(name) or name, entry.read())
    return new


def test_files_of_others_have_no_keys_of_ours(tmp_path: Path) -> None:
    """Llama-3's numbers then follow from the factors, and a tokenizer.json from tokens and merges."""
    scaling = RopeScaling(kind="llama3", factor=32, original_positions=8192)
    shape = replace(SHAPES["llama3"], rope_scaling=scaling, rope_theta=5e5)
    tokenizer = json.loads(Tokenizer.shipped().json)
    tokenizer["pre_tokenizer"] = split_by(RULES["qwen2"])
    original = model_of(shape, Tokenizer(json.dumps(tokenizer), bos=None, eos="<|endoftext|>"))
    path = written(tmp_path / "a.gguf", original, dtype=torch.float16)
    header = read_gguf_header(path)
    gone = dict.fromkeys([WHOLE, *(key for key in header.keys if key.startswith(OURS))])
    loaded = mw.load(rewritten(path, gone))
    assert loaded.model.shape == shape and loaded.tokenizer is not None and original.tokenizer is not None
    for text in ("def f(x):\n    return [1, 22]  # caf\u00e9's\n", "<|endoftext|>a"):
        assert loaded.tokenizer.encode(text).tolist() == original.tokenizer.encode(text).tolist()
        assert loaded.tokenizer.begin(text) == original.tokenizer.begin(text)
    plain = mw.load(rewritten(path, gone | {"tokenizer.ggml.pre": "of-mars"}))
    assert plain.tokenizer is None and plain.generate([1, 2], max_new_tokens=2).ids


def marked_tokenizer() -> Tokenizer:
    """A BPE that spells spaces as a mark and falls back to bytes, as Llama-2's."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, processors, trainers

    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    back = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(back)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    library.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    library.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    spec = json.loads(library.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]
    return Tokenizer(json.dumps(spec), bos="<s>", eos="</s>")


def test_a_tokenizer_with_marks_for_spaces_goes_there_and_back(tmp_path: Path) -> None:
    tokenizer = marked_tokenizer()
    path = written(tmp_path / "a.gguf", model_of(SHAPES["llama"], tokenizer))
    keys = read_gguf_header(path).keys
    assert keys["tokenizer.ggml.model"] == "llama" and keys["tokenizer.ggml.add_bos_token"] is True
    again = mw.load(rewritten(path, {WHOLE: None})).tokenizer
    assert again is not None
    for text in ("def rewritten(path: Path):\n    return None", "\u4f60 caf\u00e9  two"):
        assert again.begin(text) == tokenizer.begin(text)
        assert again.decode(again.encode(text)) == text


def test_a_template_for_tools_goes_there_and_back(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    plain = Tokenizer.shipped()
    tokenizer = Tokenizer(**{**plain.parts, "template": "{{ 1 }}", "tool_template": "{{ tools }}"})
    original = replace(model_of(SHAPES["llama"], tokenizer), chat_template="{{ 1 }}")
    path = written(tmp_path / "a.gguf", original)
    keys = read_gguf_header(path).keys
    assert keys[gguf.Keys.Tokenizer.CHAT_TEMPLATE_N.format(name="tool_use")] == "{{ tools }}"
    assert keys[gguf.Keys.Tokenizer.CHAT_TEMPLATES] == ["tool_use"]
    again = mw.load(path).tokenizer
    assert again is not None and (again.chat_template, again.tool_template) == ("{{ 1 }}", "{{ tools }}")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_text_begins_there_as_in_the_folder(name: str, tmp_path: Path) -> None:
    """The writer of llama.cpp reads the post-processor where no config says otherwise; GLM-4's two tokens have no
    place in a file."""
    gguf = pytest.importorskip("gguf")
    folder = tokenizer_folder(tmp_path, name, add_bos_token=None)
    theirs = gguf.SpecialVocab(folder).add_special_token.get("bos", False)
    tokenizer = Tokenizer.load(folder)
    shape = replace(SHAPES["llama"], vocab=tokenizer.vocab)
    path = written(tmp_path / "a.gguf", model_of(shape, tokenizer))
    assert read_gguf_header(path).keys["tokenizer.ggml.add_bos_token"] is (theirs and not name.startswith("GLM"))
    again = mw.load(path).tokenizer
    assert again is not None and again.begin("Hi there") == tokenizer.begin("Hi there")


@pytest.mark.parametrize(("shape", "message"), [
    (replace(SHAPES["llama"], family="deepseek_v3", kv_heads=4, mla=MLAShape(
        q_rank=0, kv_rank=16, nope_dim=8, rope_dim=8, v_dim=16), head_dim=16), "cannot hold family deepseek_v3"),
    (replace(SHAPES["qwen3"], qkv_bias=True, out_bias=True), "qwen3 has no biases of attention"),
    (replace(SHAPES["qwen3_moe"], moe=replace(EXPERTS, first_dense=1)), "no dense layers among routed ones"),
    (replace(SHAPES["qwen3_moe"], moe=replace(EXPERTS, normalize_top_k=False)), "scores of experts that do not sum"),
    (replace(SHAPES["qwen2"], rope_scaling=RopeScaling(kind="llama3", factor=8, original_positions=64)),
     "qwen2 has no model.rope_scaling.kind=llama3"),
    (replace(SHAPES["llama"], rope_scaling=RopeScaling(
        kind="yarn", factor=4, original_positions=64, mscale=1, mscale_all_dim=0.5)), "no model.rope_scaling.mscale"),
    (replace(SHAPES["qwen2"], head_dim=32), "no model.head_dim=32 with 4 heads of 64"),
    (replace(SHAPES["gpt2"], mlp="gelu"), "gpt2 has no model.mlp=gelu"),
    (replace(SHAPES["llama"], qk_norm=True), "model.qk_norm=True cannot be written"),
])  # fmt: skip
def test_what_llama_cpp_would_not_compute_is_refused_at_the_start(shape: ModelShape, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_gguf(model_of(shape), torch.float32)


@pytest.mark.parametrize(("keys", "tensors", "message"), [
    ({"general.architecture": "mamba"}, {}, "architecture mamba is not supported .supported: llama, qwen2"),
    ({"general.architecture": None}, {}, "has no key general.architecture"),
    ({"llama.block_count": None}, {}, "has no key llama.block_count, which must be a whole number"),
    ({"llama.block_count": 3}, {}, "lacks 9 tensors of a llama of 3 layers, first blk.2.attn_k.weight"),
    ({"llama.block_count": 2**31}, {}, "llama.block_count is 2147483648, and must be a whole number from 1 to 9999"),
    ({"llama.embedding_length": 32}, {}, "token_embd.weight is \\[2100, 64\\] where its keys say \\[2100, 32\\]"),
    ({"llama.attention.head_count": "four"}, {}, "head_count is 'four', and must be a whole number"),
    ({"llama.attention.head_count_kv": 3}, {}, "model.heads=4 is not a multiple"),
    ({"llama.attention.value_length": 8}, {}, "llama.attention.value_length=8 differs from a head's 16"),
    ({"llama.attention.layer_norm_rms_epsilon": 0.0}, {}, "is 0.0, and must be a number above 0"),
    ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, {}, "type='longrope' is not supported"),
    ({"llama.attention.sliding_window": 128}, {}, "llama.attention.sliding_window=128 is not supported"),
    ({}, {"token_embd.weight": None}, "no tensor token_embd.weight"),
    ({}, {"blk.1.ffn_up.weight": "blk.1.ffn_pu.weight"}, "lacks 1 tensors .*, first blk.1.ffn_up.weight"),
    ({}, {"output.weight": "more.weight"}, "holds 1 tensors .* does not have, first more.weight"),
    ({"tokenizer.ggml.eos_token_id": 9999}, {}, "its eos token is 9999, and it has 2100 tokens"),
    ({WHOLE: "{}"}, {}, "its tokenizer is damaged"),
    ({WHOLE: None, "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["no yes"]}, {}, "merges names tokens"),
])  # fmt: skip
@pytest.mark.long
def test_a_file_whose_parts_do_not_fit_is_refused(
    keys: dict[str, Any], tensors: dict[str, str | None], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.gguf", model_of(SHAPES["llama"]))
    with pytest.raises(HubError, match=message):
        mw.load(rewritten(path, keys, tensors))


def test_codes_that_stand_for_no_number_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf", model_of(SHAPES["llama"]), "q8_0")
    entry = read_gguf_header(path).tensors["blk.1.attn_q.weight"]
    raw = bytearray(path.read_bytes())
    raw[entry.start : entry.start + 2] = b"\xff\xff"
    path.write_bytes(raw)
    with pytest.raises(HubError, match=r"blk.1.attn_q.weight is infinite or NaN"):
        mw.load(path)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    shape, good = SHAPES["llama"], drawn(SHAPES["llama"])
    for name, value, message in (("layers.1.mlp.up.weight", torch.nan, "has weights that are infinite or NaN"),
                           ("layers.1.mlp.up.weight", 1e6, "beyond what F16 can say: take dtype='bf16'")):  # fmt: skip
        bad = {**good, name: good[name].clone()}
        bad[name][3, 4] = value
        original = model_of(shape, weights=lambda dtype, bad=bad: iter(bad.items()))
        with pytest.raises(PlanError, match=message):
            write_gguf(tmp_path / "a.gguf", original, plan_gguf(original, torch.float16))
        assert not list(tmp_path.iterdir())
    original = model_of(shape, weights=lambda dtype: iter(list(good.items())[:5]))
    with pytest.raises(HubError, match="tensors were not given"):
        write_gguf(tmp_path / "a.gguf", original, plan_gguf(original, torch.float16))
    assert not list(tmp_path.iterdir())


def test_one_tensor_is_alive_at_a_time(tmp_path: Path) -> None:
    import weakref

    shape = SHAPES["llama"]
    alive: list[weakref.ref[Tensor]] = []

    def weights(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, size in tensor_sizes(shape).items():
            assert sum(reference() is not None for reference in alive) <= 1
            tensor = torch.zeros(size, dtype=dtype)
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    written(tmp_path / "a.gguf", model_of(shape, weights=weights), "q8_0")


def test_rows_are_encoded_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = model_of(SHAPES["qwen3_moe"])
    whole = written(tmp_path / "a.gguf", original, "q4_k_m").read_bytes()
    monkeypatch.setattr(gguf_stream, "CHECKED", 200)
    assert written(tmp_path / "b.gguf", original, "q4_k_m").read_bytes() == whole


def test_a_tokenizer_without_ends_and_none_at_all_are_said() -> None:
    spec = json.loads(Tokenizer.bytes().json)
    plan = plan_gguf(model_of(SHAPES["llama"], Tokenizer(json.dumps(spec))), torch.float32)
    assert "names no end of a text" in plan.note
    plan = plan_gguf(replace(model_of(SHAPES["llama"]), tokenizer=None), torch.float32)
    assert "takes token ids alone" in plan.note and plan.keys["tokenizer.ggml.model"] == "none"
    with pytest.raises(PlanError, match="has no place for a WordLevel tokenizer"):
        model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
        plan_gguf(model_of(SHAPES["llama"], Tokenizer(json.dumps(spec | {"model": model}))), torch.float32)
    with pytest.raises(PlanError, match="the tokenizer has 2048 tokens, and the model 100 rows"):
        plan_gguf(model_of(replace(SHAPES["llama"], vocab=100)), torch.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face directory `hf`, with a text beside it."""
    directory(tmp_path / "hf", replace(SHAPES["llama"], vocab=2048))
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n\nclass A:\n    pass\n\n" * 300)
    return tmp_path


@pytest.mark.parametrize("scheme", ["q8_0", "q4_k_m"])
def test_the_verb_quantizes_measures_and_others_read(
    scheme: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, data = folder / "q.gguf", ["--data", str(folder / "text.txt")]
    words = ["quantize", str(folder / "hf"), "--scheme", scheme, "-o", str(out), *data, "--sequences", "16"]
    assert main([*words, "--json", "--max-kl", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bytes"] == document["predicted_bytes"] == out.stat().st_size and document["format"] == "gguf"
    assert 0 < document["kl"] < 0.5 and document["passed"] and document["tokens"] > 500
    names = [layer["name"] for layer in document["layers"]]
    assert "embed.weight" in names and "layers.1.mlp.down.weight" in names and "norm.weight" not in names
    errors = [layer["output_error"] for layer in document["layers"] if layer["name"].startswith("layers.")]
    assert all(0 < error < 0.2 for error in errors)
    assert main(["generate", str(out), "--prompt", "def", "--greedy", "--max-new-tokens", "4"]) == 0
    assert main(["eval", str(out), *data, "--json"]) == 0
    loss = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    assert loss == pytest.approx(mw.load(folder / "hf").evaluate(folder / "text.txt").loss, rel=0.02)
    again = mw.quantize(out, "int8", folder / "again", data=folder / "text.txt", sequences=16)
    assert again.quality is not None and again.quality.kl < 0.01


def test_what_is_printed_says_how_text_is_cut(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quantize", str(folder / "hf"), "--scheme", "q8_0", "-o", str(folder / "q.gguf"), "--no-quality"]
    assert main([*words, "--keep", "layers.0.mlp.*"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "WRITTEN" in printed
        and "as predicted" in printed
        and "file " in printed
        and "norms, biases, routers" in printed
    )
    assert "llama.cpp has no rule for words like this tokenizer's; the nearest, dbrx" in printed
    assert "train with data.tokenizer=bytes or the tokenizer.json of GPT-2, Llama 3 or Qwen2" in printed
    kinds = {name: tensor.kind.name for name, tensor in read_gguf_header(folder / "q.gguf").tensors.items()}
    assert kinds["blk.0.ffn_up.weight"] == "F32" and kinds["blk.1.ffn_up.weight"] == "Q8_0"


def test_export_writes_a_file_without_codes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(folder / "hf"), str(folder / "a.gguf"), "--dtype", "fp16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bytes"] == document["predicted_bytes"] == os.path.getsize(folder / "a.gguf")
    assert open_gguf(folder / "a.gguf").kinds.keys() == {"F16", "F32"}
    ids = [mw.load(folder / name).generate([5, 6], max_new_tokens=9, temperature=0.0).ids for name in ("hf", "a.gguf")]
    assert ids[0] == ids[1]
    assert main(["export", str(folder / "hf"), str(folder / "a.gguf")]) == 2
    assert "is there already: take another name" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "kind", "message"), [
    ({"scheme": "int8", "format": "gguf"}, ArgumentError, "a GGUF file has its own schemes, q8_0, q6_k"),
    ({"scheme": "q8_0", "format": "compressed-tensors"}, ArgumentError, "a GGUF file has its own schemes"),
    ({"scheme": "q8_0", "group": 32}, ArgumentError, "group=32 is not for GGUF files"),
    ({"scheme": "q8_0", "out": "folder"}, PlanError, "name ends with .gguf: take .*folder.gguf"),
    ({"scheme": "q8_0", "keep": ["head"]}, ArgumentError, "keep='head' names no matrix"),
    ({"scheme": "q8_1"}, ArgumentError, "scheme='q8_1' is not known: take one of int8.*nearest: q8_0"),
])  # fmt: skip
def test_bad_input_is_refused_before_anything_is_made(
    change: dict[str, Any], kind: type[Exception], message: str, folder: Path
) -> None:
    inputs = {"model": folder / "hf", "out": folder / change.pop("out", "q.gguf"), **change}
    with pytest.raises(kind, match=message):
        mw.quantize(**inputs)
    assert not (folder / "q.gguf").exists()


def in_parts(path: Path, count: int, folder: Path) -> list[Path]:
    """A file as llama-gguf-split writes it: tensors in runs, the keys of the model in the first part alone."""
    header = read_gguf_header(path)
    names, actual = list(header.tensors), []
    each = -(-len(names) // count)
    for number in range(count):
        ours = names[number * each : (number + 1) * each]
        keys: dict[str, Any] = dict(header.keys) if number == 0 else {}
        keys |= {NUMBER_KEY: number, COUNT_KEY: count, TENSORS_KEY: len(names)}
        actual.append(folder / f"m-{number + 1:05}-of-{count:05}.gguf")
        planned = [
            PlannedBlocks(name=name, size=header.tensors[name].size, kind=header.tensors[name].kind) for name in ours
        ]
        with GGUFWriter(actual[-1], keys, planned) as writer:
            for name in ours:
                writer.write(name, header.tensors[name].read())
    return actual


def test_a_file_in_parts_is_read_by_its_first(tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf", model_of(SHAPES["llama"]), "q8_0")
    parts = in_parts(path, 3, tmp_path)
    assert read_gguf_header(parts[1]).keys.keys() == {NUMBER_KEY, COUNT_KEY, TENSORS_KEY}
    whole, joined = open_gguf(path), open_gguf(parts[0])
    assert {tensor.file for tensor in joined.header.tensors.values()} == set(parts)
    for (name, right), (also, tensor) in zip(whole.weights(torch.float32), joined.weights(torch.float32), strict=True):
        assert name == also and torch.equal(right, tensor)
    assert mw.load(parts[0]).tokenizer is not None


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf", model_of(SHAPES["llama"]), "q8_0")
    first, second, third = in_parts(path, 3, tmp_path)
    with pytest.raises(HubError, match=rf"is part 2 of 3: give the first, {first.name}"):
        read_gguf_parts(second)
    content, whole = third.read_bytes(), second.read_bytes()
    third.write_bytes(whole)
    with pytest.raises(HubError, match="the header says part 2 of 3, and the file name says 3 of 3"):
        read_gguf_parts(first)
    third.unlink()
    with pytest.raises(HubError, match=rf"has 3 parts, and {third.name} is not beside it"):
        read_gguf_parts(first)
    third.write_bytes(content)
    (tmp_path / "other").mkdir()
    fewer = model_of(replace(SHAPES["llama"], layers=1))
    other = in_parts(written(tmp_path / "other" / "b.gguf", fewer, "q8_0"), 3, tmp_path / "other")
    third.write_bytes(other[2].read_bytes())
    with pytest.raises(HubError, match="a part is of another file"):
        read_gguf_parts(first)
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(
        HubError, match=r"is part 1 of 3, but its name does not say so: rename it, as NAME-00001-of-00003\.gguf"
    ):
        read_gguf_parts(tmp_path / "renamed.gguf")

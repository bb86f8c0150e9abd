"""llama.cpp itself opens our files: the same logits, the same greedy tokens, the same tokens of a text, the same types
of tensors as its own quantizer; the `gguf` package reads the same weights."""

import ctypes
import json
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright.compress.gguf_stream import plan_gguf
from meshwright.data import Tokenizer
from meshwright.data.tokens.tokenizer import SEPARATOR
from meshwright.formats.gguf.header import read_gguf_header
from meshwright.formats.gguf.vocabulary import RULES, SAMPLE, split_by
from meshwright.kernels.quantized.gguf_blocks import decode, encode
from meshwright.spec import ModelShape, MoEShape
from meshwright.spec.weights.gguf_schemes import BLOCK_TYPES, GGUF_SCHEMES, GGUFScheme
from meshwright.verbs.main import main
from tests.compress.test_gguf import SHAPES, SIZES, marked_tokenizer, model_of, written
from tests.kernels.test_blocks import weights

pytestmark = pytest.mark.filterwarnings("ignore")  # llama_cpp leaves files open
F32 = 0
"""ggml's number of the type, for the cache of keys and values: its usual fp16 would hide errors below 1e-3."""
TEXT = "def area(width, height):\n    return width * height\n\n\nclass Box:\n    def __init__(self, width):\n"
LEARNER = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 257, "max_positions": 256}
ALL_F32 = GGUFScheme(name="f32", about="numbers alone", main="F32", file_type=0)


def llama_cpp() -> Any:
    pytest.importorskip("llama_cpp")
    return import_module("llama_cpp")


@contextmanager
def opened(path: Path, **more: Any) -> Iterator[Any]:
    """A file in llama.cpp, on one thread, with exact sums."""
    llama = llama_cpp().Llama(
        str(path), n_ctx=256, n_batch=256, n_threads=1, n_threads_batch=1, logits_all=True, flash_attn=False,
        type_k=F32, type_v=F32, verbose=False, **more,
    )  # fmt: skip
    try:
        yield llama
    finally:
        llama.close()


def vocabulary_of(path: Path) -> Any:
    """A file in llama.cpp, of which it reads the tokenizer alone."""
    return llama_cpp().Llama(str(path), vocab_only=True, verbose=False)


def logits(model: Any, ids: list[int]) -> Tensor:
    model.reset()
    model.eval(ids)
    return torch.tensor(model.scores[: len(ids)])


def tokens(count: int) -> list[int]:
    actual: list[int] = torch.randint(1, 2000, (count,), generator=torch.Generator().manual_seed(2)).tolist()
    return actual


@pytest.mark.parametrize("name", [*SHAPES, "window"])
def test_logits_are_ours(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name] if name in SHAPES else replace(SHAPES["mistral"], window=64)
    path, ids = written(tmp_path / "a.gguf", model_of(shape)), tokens(60)
    with opened(path) as model, torch.no_grad():
        theirs = logits(model, ids)
    ours = mw.load(path).model(torch.tensor([ids]))[0]
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error < (1e-3 if name == "gpt2" else 1e-5)  # its GELU is a table of fp16 numbers
    assert bool((ours.argmax(-1) == theirs.argmax(-1)).all())


def test_a_trained_model_answers_with_the_same_tokens(tmp_path: Path) -> None:
    """A run, its checkpoint exported in fp16, a text as a prompt: greedy, a hundred tokens long."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 200, encoding="utf-8")
    mw.train(
        model=LEARNER, data={"path": str(text), "tokenizer": "bytes"}, run=str(tmp_path / "run"), watchers=(),
        recipe={"steps": 80, "sequence": 96, "global_batch": 8, "learning_rate": 3e-3}, dry_run=False,
    )  # fmt: skip
    path = tmp_path / "model.gguf"
    assert main(["export", str(tmp_path / "run"), str(path), "--dtype", "fp16"]) == 0
    generated = mw.load(path).generate("def area(", max_new_tokens=100, temperature=0.0)
    assert generated.text is not None and TEXT[9:60] in generated.text, (
        "it has not learnt its text: this would show little"
    )
    with opened(path) as model:
        ids = model.tokenize(b"def area(", add_bos=True, special=False)
        assert ids == list(generated.prompt_ids)
        theirs = []
        for token in model.generate(ids, temp=0.0, repeat_penalty=1.0):
            theirs.append(token)
            if len(theirs) == len(generated.ids):
                break
        answer = model.create_completion("def area(", max_tokens=100, temperature=0.0, repeat_penalty=1.0)
    assert theirs == list(generated.ids)
    assert answer["choices"][0]["text"] == generated.text


@pytest.mark.parametrize("name", [*RULES, "bytes", "marks"])
def test_texts_have_the_same_tokens(name: str, tmp_path: Path) -> None:
    if name in RULES:
        spec = json.loads(Tokenizer.shipped().json)
        spec["pre_tokenizer"] = split_by(RULES[name])
        spec["model"]["ignore_merges"] = RULES[name].whole_words
        tokenizer = Tokenizer(json.dumps(spec), bos="<|endoftext|>", eos="<|endoftext|>")
    else:
        tokenizer = Tokenizer.bytes() if name == "bytes" else marked_tokenizer()
    path = written(tmp_path / "a.gguf", model_of(SHAPES["llama"], tokenizer))
    vocabulary = vocabulary_of(path)
    ours = tokenizer.begin(SAMPLE)
    assert vocabulary.tokenize(SAMPLE.encode(), add_bos=True, special=False) == ours
    begun = (tokenizer.bos, " ") if name == "marks" else (None, "")  # a space stands before every text there
    assert vocabulary.detokenize([id for id in ours if id != begun[0]]) == (begun[1] + SAMPLE).encode()
    assert (vocabulary.token_bos(), vocabulary.token_eos()) == (tokenizer.bos, tokenizer.eos)
    vocabulary.close()


SCRIPTS = (
    "don't", "we'LL", "'session", "'s", "12345", "3.14", "x+=1;", "...append", "__init__", "foo.bar()",
    "na\u00efve", "\u03a9\u03bc\u03ad\u03b3\u03b1", "\u043f\u0440\u0438\u0432\u0435\u0442",
    "\u4f60\u597d\u4e16\u754c", "\u3053\u3093", "\uc548\ub155", "\u0645\u0631\u062d\u0628\u0627",
    "\u0928\u092e\u0938\u094d\u0924\u0947", "\U0001f600\U0001f44d\U0001f3fd", "e\u0301", "\u00a0", "\u2003",
    "\u200b", "\u2028", "\u00bd", "\u2167", "\u0661\u0662",
)  # fmt: skip
GAPS = (" ", "  ", "\n", "\n\n", "\n    ", "\t", "\r\n", "\r\n\t\t", " \n ", "", "   \n\n  ")
"""What stands between words: where the rules of llama.cpp differ most."""


@pytest.mark.parametrize("name", [*(rule for rule in RULES if rule not in ("tekken", "gpt-4o")), "bytes"])
def test_random_texts_of_many_scripts_have_the_same_tokens(name: str, tmp_path: Path) -> None:
    """Not those of `tekken` and `gpt-4o`: llama.cpp spells their rules without combining marks."""
    spec = json.loads(Tokenizer.shipped().json)
    if name in RULES:
        spec["pre_tokenizer"], spec["model"]["ignore_merges"] = split_by(RULES[name]), RULES[name].whole_words
    tokenizer = Tokenizer.bytes() if name == "bytes" else Tokenizer(json.dumps(spec), bos=SEPARATOR, eos=SEPARATOR)
    draw = random.Random(7)
    with closing(vocabulary_of(written(tmp_path / "a.gguf", model_of(SHAPES["llama"], tokenizer)))) as theirs:
        for _ in range(500):
            text = "".join(draw.choice(SCRIPTS) + draw.choice(GAPS) for _ in range(draw.randrange(1, 20)))
            assert theirs.tokenize(text.encode(), add_bos=True, special=False) == tokenizer.begin(text), repr(text)


WIDE: dict[str, Any] = SIZES | {"layers": 9, "hidden": 256, "ffn": 512, "vocab": 300}
TYPED = {
    "llama": ModelShape(**WIDE, kv_heads=2),
    "tied": ModelShape(**WIDE, family="qwen2", kv_heads=2, qkv_bias=True, tied=True),
    "eight experts": ModelShape(
        **WIDE | {"layers": 3, "ffn": 256}, family="mixtral", kv_heads=2, moe=MoEShape(experts=8, top_k=2, ffn=256)
    ),
    "narrow": ModelShape(**WIDE | {"hidden": 192, "ffn": 320, "heads": 3}),
    "gpt2": replace(SHAPES["gpt2"], layers=9, hidden=256, ffn=512, vocab=300, head_dim=64),
}


def their_file(path: Path, scheme: GGUFScheme, out: Path) -> Path:
    """The file at `path` as llama-quantize makes it smaller."""
    library = llama_cpp()
    settings = library.llama_model_quantize_default_params()
    settings.ftype, settings.nthread, settings.allow_requantize = scheme.file_type, 1, True
    assert library.llama_model_quantize(str(path).encode(), str(out).encode(), ctypes.byref(settings)) == 0
    return out


def their_codes(kind: str, weight: Tensor) -> Tensor:
    """Bytes of weights (rows, K) fp32 as ggml has them."""
    library: Any = llama_cpp().llama_cpp
    quantize = ctypes.CDLL(str(next(Path(library.__file__).parent.glob("lib/libggml-base.so*")))).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    buffer = torch.zeros(len(weight), BLOCK_TYPES[kind].num_bytes((1, weight.shape[1])), dtype=torch.uint8)
    quantize(BLOCK_TYPES[kind].number, weight.data_ptr(), buffer.data_ptr(), 0, *weight.shape, None)
    return buffer


@pytest.mark.parametrize("name", TYPED)
def test_types_and_size_are_those_of_its_own_quantizer(name: str, tmp_path: Path) -> None:
    original = model_of(TYPED[name], Tokenizer.bytes())
    path = written(tmp_path / "a.gguf", original)
    for scheme in GGUF_SCHEMES.values():
        theirs = their_file(path, scheme, tmp_path / f"{scheme.name}.gguf")
        header, plan = read_gguf_header(theirs), plan_gguf(original, torch.float32, scheme)
        kinds = {key: tensor.kind.name for key, tensor in header.tensors.items()}
        assert {tensor.name: tensor.kind.name for tensor in plan.tensors} == kinds, scheme.name
        assert abs(plan.bytes - theirs.stat().st_size) <= 64


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_codes_are_those_of_its_library_or_nearer(kind: str) -> None:
    weight = weights()
    theirs, ours = their_codes(kind, weight), encode(kind, weight)
    if kind.endswith("K"):
        errors = [float((decode(kind, entry) - weight).norm()) for entry in (ours, theirs)]
        assert errors[0] < errors[1]
    else:
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("scheme", GGUF_SCHEMES)
def test_it_restores_the_same_weights_and_runs_them(scheme: str, tmp_path: Path) -> None:
    """Its quantizer makes an fp32 file of ours. Its products round activations to 8 bits: near, and not equal."""
    shape = replace(SHAPES["llama"], hidden=256, head_dim=64, ffn=480)
    path, ids = written(tmp_path / "a.gguf", model_of(shape), scheme), tokens(60)
    restored = their_file(path, ALL_F32, tmp_path / "b.gguf")
    ours, theirs = read_gguf_header(path).tensors, read_gguf_header(restored).tensors
    assert {their_part.kind.name for their_part in theirs.values()} == {"F32"} and ours.keys() == theirs.keys()
    for name, our_part in ours.items():
        assert torch.equal(decode(our_part.kind.name, our_part.read()).float(), decode("F32", theirs[name].read())), (
            name
        )
    with opened(path) as model, torch.no_grad():
        actual = logits(model, ids)
    expected = mw.load(path).model(torch.tensor([ids]))[0].detach()
    assert float((actual - expected).norm() / expected.norm()) < 0.08


def test_the_gguf_package_reads_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    package: Any = import_module("gguf")
    quants: Any = import_module("gguf.quants")
    shape = replace(SHAPES["llama3"], hidden=256, ffn=512)
    path = written(tmp_path / "a.gguf", model_of(shape, chat_template="{{ x }}"), "q4_k_m")
    gguf_reader, header = package.GGUFReader(str(path)), read_gguf_header(path)
    assert {name: field.contents() for name, field in gguf_reader.fields.items() if not name.startswith("GGUF.")} == {
        name: pytest.approx(value) if isinstance(value, float) else value for name, value in header.keys.items()
    }
    assert [tensor.name for tensor in gguf_reader.tensors] == list(header.tensors)
    for entry in gguf_reader.tensors:
        ours = header.tensors[entry.name]
        theirs = torch.from_numpy(quants.dequantize(entry.data, entry.tensor_type).astype("float32"))
        assert torch.equal(theirs.view(ours.size), decode(ours.kind.name, ours.read()).float().view(ours.size))

"""Small tokenizers with the word patterns of well-known models, made on the spot."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from meshwright.data.tokens.tokenizer import CODE_PATTERN

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMES = ("gpt2", "llama3", "qwen2", "o200k", "code")

TEXT = """def greet(name, times=3):
    \"\"\"Say hello; it's the caller's name.\"\"\"

    for i in range(times):
        print(f"Hello, {name}!  {i:03d}")\t# we'll count 1234567


class Stra\u00dfe:\r\n    na\u00efve = "caf\u00e9 \u2014 \u65e5\u672c\u8a9e"\r\n
"""


@cache
def made(name: str) -> str:
    """The tokenizer.json of a BPE of some 330 tokens with the words of `name`."""
    library = tokenizers.Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name == "gpt2")
    pattern = {"llama3": LLAMA3, "qwen2": QWEN2, "o200k": O200K, "code": CODE_PATTERN}.get(name)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    library.pre_tokenizer = pre_tokenizers.Sequence([*split, level]) if split else level
    library.normalizer = normalizers.NFC() if name == "qwen2" else None
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([TEXT] * 2, trainer)
    return str(library.to_str())


@cache
def metaspace() -> str:
    """In the manner of Llama-2: a space mark before every text, bytes for what is unknown, no words."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    vocab |= {letter: 259 + number for number, letter in enumerate("\u2581abcdefghijklmnopqrstuvwxyz")}
    library = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return str(library.to_str())


def with_added(text: str, content: str, *, special: bool) -> str:
    """The same tokenizer.json with one added token more."""
    spec = json.loads(text)
    library = tokenizers.Tokenizer.from_str(json.dumps(spec))
    token = tokenizers.AddedToken(content, special=special, normalized=False)
    library.add_special_tokens([token]) if special else library.add_tokens([token])
    return str(library.to_str())


def marked(text: str) -> dict[str, Any]:
    """The content of a tokenizer.json with two marks more."""
    for token in ("<s>", "</s>"):
        text = with_added(text, token, special=True)
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def before(spec: dict[str, Any], *tokens: str, behind: tuple[str, ...] = ()) -> dict[str, Any]:
    """A post-processor that puts tokens before and behind a text."""
    ids = {token["content"]: token["id"] for token in spec["added_tokens"]}
    parts = [{"Sequence": {"id": "A", "type_id": 0}}]
    around = [[{"SpecialToken": {"id": token, "type_id": 0}} for token in side] for side in (tokens, behind)]
    special = {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in (*tokens, *behind)}
    single = [*around[0], *parts, *around[1]]
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}


LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
WRITTEN: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "SmolLM2-Instruct: named and never added": ("gpt2", lambda spec: LEVEL, {"add_prefix_space": False}),
    "Phi-4: no post-processor": ("o200k", lambda spec: None, {"add_bos_token": True}),
    "Llama-3: added behind the byte level": (
        "llama3", lambda spec: {"type": "Sequence", "processors": [LEVEL, before(spec, "<s>")]}, {},
    ),
    "Llama-2: added": ("metaspace", lambda spec: before(spec, "<s>"), {"add_bos_token": False}),
    "Phi-3: a Llama that adds none": ("metaspace", lambda spec: before(spec), {"add_bos_token": True}),
    "GLM-4: two tokens": ("llama3", lambda spec: before(spec, "</s>", "<s>"), {}),
}  # fmt: skip
"""Name -> (words of the tokenizer, post-processor, what its config says beside bos and eos)."""


def written(folder: Path, name: str, **config: Any) -> Path:
    """A folder with a tokenizer of WRITTEN; `config`: what else its tokenizer_config.json says."""
    words, processor, more = WRITTEN[name]
    spec = marked(metaspace() if words == "metaspace" else made(words))
    spec["post_processor"] = processor(spec)
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    marks = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(marks | more | config), encoding="utf-8")
    return folder

"""Conversion between a tokenizer and the keys of a GGUF file.

A byte-level BPE is the model `gpt2` there: tokens, merges, and the name of a rule for words. A BPE that spells spaces
as a mark and falls back to bytes is the model `llama`: tokens, and scores that order the merges. The tokenizer.json
itself is added under the key that the format has for it, so reading returns the same one.

llama.cpp's rules that cut text into words before it merges bytes are built in, and a file names one. A tokenizer with
another rule gets the name of the nearest one, and a note with the share of equal borders on a sample: ids are then
exact only where ids are given.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from meshwright.formats.gguf.header import GGUFHeader, Value, int_or
from meshwright.spec.errors import HubError, PlanError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = tuple(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{upper}{_LOWER}{lower}" for upper, lower in (("*", "+"), ("+", "*")))
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = "|".join(_CASES) + r"|\p{N}" + _SLASHED
_GPT4O = "|".join(f"{case}{_CONTRACTED}?" for case in _CASES) + r"|\p{N}{1,3}" + _SLASHED
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WordRule:
    """Built-in rule of llama.cpp."""

    name: str
    """Value of the key tokenizer.ggml.pre."""
    patterns: tuple[str, ...]
    """Patterns of words, one after the other, as a tokenizer.json spells them."""
    whole_words: bool = False
    """True if a word that is a token is never merged from parts (`ignore_merges`)."""


RULES: Mapping[str, WordRule] = {
    rule.name: rule
    for rule in (
        WordRule(name="gpt-2", patterns=(_GPT2,)),
        WordRule(name="llama-bpe", patterns=(_LLAMA3,), whole_words=True),
        WordRule(name="dbrx", patterns=(_LLAMA3,)),
        WordRule(name="qwen2", patterns=(_QWEN2,)),
        WordRule(name="tekken", patterns=(_TEKKEN,), whole_words=True),
        WordRule(name="gpt-4o", patterns=(_GPT4O,)),
        WordRule(name="smollm", patterns=(r"\p{N}", _GPT2)),
        WordRule(name="deepseek-v3", patterns=_DEEPSEEK3),
    )
}
ALSO: Mapping[str, str] = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "pixtral": "llama-bpe", "smaug-bpe": "dbrx", "phi-2": "gpt-2",
    "deepseek-r1-qwen": "qwen2", "megrez": "qwen2", "llama4": "gpt-4o", "starcoder": "smollm", "refact": "smollm",
    "command-r": "smollm", "codeshell": "smollm",
}  # fmt: skip
"""Other names of the same rules."""
SAMPLE = (
    "It's 12345 o'clock: the U.S. didn't win 3-2, they'd WE'LL see.\n\n"
    "class Reader:\n    def __init__(self, path='x.txt', *, count=1000):\n        self.path = path  # why?\n"
    "\n        if not path.exists():\n\t\traise ValueError(f\"{path!r} is'nt there\")\n        return {'a': [1, 22]}\n"
    'x += 1;\tfor(int i=0; i<10; i++) { camelCaseName(i); }\r\n<p class="a">caf\u00e9 na\u00efve \u4f60\u597d</p>\n'
)
"""Prose and code on which the share of equal borders is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRule:
    """Rule that a file names, and its agreement with the tokenizer."""

    name: str
    agreement: float
    """Share of borders between tokens that both have on the sample. 1 = the rule itself."""


def patterns_of(tokenizer: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the patterns of a tokenizer.json in order. None = it is not byte-level, or cuts in another way."""
    patterns, steps = [], _list_steps(tokenizer.get("pre_tokenizer"))
    if not any(step.get("type") == "ByteLevel" for step in steps):
        return None
    for step in steps:
        kind = step.get("type")
        if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            patterns.append(str(step.get("pattern", {}).get("Regex", "")))
        elif kind == "Digits" and step.get("individual_digits"):
            patterns.append(r"\p{N}")
        elif kind == "ByteLevel" and not step.get("add_prefix_space"):
            patterns += [_GPT2] if step.get("use_regex", True) else []
        else:
            return None
    return tuple(patterns)


def _list_steps(pre_tokenizer: Any) -> list[dict[str, Any]]:
    if not isinstance(pre_tokenizer, dict):
        return []
    parts = pre_tokenizer.get("pretokenizers")
    return list(parts) if isinstance(parts, list) else [pre_tokenizer]


def split_by(rule: WordRule) -> dict[str, Any]:
    """Return the pre-tokenizer of a tokenizer.json that cuts by a rule."""
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rule.patterns
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, level]}


def choose_rule(tokenizer: Mapping[str, Any]) -> ChosenRule:
    """Return the rule of a byte-level tokenizer.json, or the nearest one."""
    model = tokenizer["model"]
    patterns, whole_words = patterns_of(tokenizer), bool(model.get("ignore_merges"))
    if not model["merges"]:
        # Without merges, words do not matter.
        return ChosenRule(name="gpt-2", agreement=1.0)
    for rule in RULES.values():
        if (rule.patterns, rule.whole_words) == (patterns, whole_words):
            return ChosenRule(name=rule.name, agreement=1.0)
    borders = _token_borders(tokenizer)
    shares = {
        rule.name: _overlap(borders, _token_borders({**tokenizer, "pre_tokenizer": split_by(rule)}))
        for rule in RULES.values()
        if rule.whole_words == whole_words
    }
    best = max(shares, key=lambda name: shares[name])
    # Equal on the sample is not equal: a rule that differs must not count as the same.
    return ChosenRule(name=best, agreement=min(shares[best], 1 - 1e-6))


def _token_borders(tokenizer: Mapping[str, Any]) -> set[int]:
    encoding = tokenizers.Tokenizer.from_str(json.dumps(tokenizer)).encode(SAMPLE, add_special_tokens=False)
    return {end for _, end in encoding.offsets}


def _overlap(left: set[int], right: set[int]) -> float:
    return len(left & right) / max(1, len(left | right))


WHOLE = "tokenizer.huggingface.json"
TEMPLATE_KEY = "tokenizer.chat_template"
TOOL_TEMPLATE_KEY = f"{TEMPLATE_KEY}.tool_use"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens."""
EQUAL_THERE = (
    "Give llama.cpp token ids, or train with data.tokenizer=bytes or the tokenizer.json of GPT-2, Llama 3 or Qwen2"
)
"""Remedy that names tokenizers whose ids are llama.cpp's for every text."""
WITHOUT_END = "the tokenizer names no end of a text, and llama.cpp takes token 11 for it"
MANY_BEGIN = "llama.cpp puts no token before a text but its bos, and this tokenizer puts others there"
SPACE = "\u2581"
LONGEST_TOKEN = 512
"""Longest token, in characters, whose merges are searched."""
ENDS = ("eos", "eot", "eom")
BEGUN = ("llama-bpe", "llama3", "llama-v3", "pixtral", "tekken")
"""Rules with which a text starts with its first mark, where no key states it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFVocabulary:
    """Tokenizer of a file."""

    text: str
    """Contents of a tokenizer.json."""
    bos: str | None
    """Token that may begin a text. Whether it does is decided by the post-processor of `text`."""
    eos: str | None
    stop_ids: tuple[int, ...]


def vocabulary_keys(
    text: str | None,
    vocab: int,
    *,
    bos: int | None,
    eos: int | None,
    ends: tuple[int, ...],
    template: str | None,
    tool_template: str | None = None,
    begins: tuple[int, ...] = (),
) -> tuple[dict[str, Value], str]:
    """Return the keys of a tokenizer for a model with `vocab` rows, and a note for its user.

    Raises PlanError when llama.cpp has no such tokenizer.

    Args:
        text: Contents of the tokenizer.json. None = there is none.
        ends: Further ids that end a text.
        begins: Ids that begin every text.
    """
    if text is None:
        return {"tokenizer.ggml.model": "none"}, "no tokenizer is in it: llama.cpp takes token ids alone"
    tokenizer = json.loads(text)
    model, added = tokenizer["model"], {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    if model.get("type", "BPE") != "BPE":
        raise PlanError(f"a GGUF file has no place for a {model['type']} tokenizer: take a Hugging Face directory")
    words = {int(id): token for token, id in model["vocab"].items()} | {
        id: entry["content"] for id, entry in added.items()
    }
    # The model may have more rows than tokens (padding), not fewer.
    if max(words) >= vocab:
        raise PlanError(f"the tokenizer has {max(words) + 1} tokens, and the model {vocab} rows for them")
    byte_level = "ByteLevel" in json.dumps(tokenizer.get("pre_tokenizer"))
    kinds = [_token_type(id, words, added, model) for id in range(vocab)]
    keys: dict[str, Value] = {"tokenizer.ggml.model": "gpt2" if byte_level else "llama"}
    note = ""
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if byte_level:
        rule = choose_rule(tokenizer)
        keys["tokenizer.ggml.pre"] = rule.name
        if rule.agreement < 1:
            note = (
                f"llama.cpp has no rule for words like this tokenizer's; the nearest, {rule.name}, sets "
                f"{100 * rule.agreement:.0f}% of a sample's token borders alike. {EQUAL_THERE}"
            )
        note = note or ("" if eos is not None else WITHOUT_END)
        note = note or (MANY_BEGIN if begins not in ((), (bos,)) else "")
    else:
        keys |= {"tokenizer.ggml.pre": "default", **_space_keys(tokenizer)}
        keys["tokenizer.ggml.scores"] = _merge_scores(words, kinds, merges, vocab)
    # llama.cpp wants a unique text for every row.
    tokens = [words.get(id, f"[PAD{id}]") for id in range(vocab)]
    if len(set(tokens)) < vocab:
        raise PlanError("two tokens of the tokenizer are spelled alike, which llama.cpp refuses")
    keys["tokenizer.ggml.tokens"] = list(tokens)
    keys["tokenizer.ggml.token_type"] = list(kinds)
    if byte_level:
        keys["tokenizer.ggml.merges"] = list(merges)
    unknown = next((id for id, word in words.items() if word and word == model.get("unk_token")), None)
    ids = {"bos": bos, "eos": eos, "unknown": unknown}
    keys |= {f"tokenizer.ggml.{mark}_token_id": id for mark, id in ids.items() if id is not None}
    # The format has a key for one more end.
    other = next((id for id in ends if id != eos), None)
    keys |= {} if other is None else {"tokenizer.ggml.eot_token_id": other}
    keys |= {"tokenizer.ggml.add_bos_token": bool(begins) and begins == (bos,), "tokenizer.ggml.add_eos_token": False}
    keys |= {} if template is None else {TEMPLATE_KEY: template}
    if tool_template is not None:
        keys |= {TOOL_TEMPLATE_KEY: tool_template, "tokenizer.chat_templates": ["tool_use"]}
    return keys | {WHOLE: text}, note


def _token_type(id: int, words: Mapping[int, str], added: Mapping[int, Any], model: Mapping[str, Any]) -> int:
    if id not in words:
        return UNUSED
    if words[id] == model.get("unk_token"):
        return UNKNOWN
    if id in added:
        return CONTROL if added[id].get("special") else USER
    word = words[id]
    return BYTE if model.get("byte_fallback") and len(word) == 6 and word.startswith("<0x") else NORMAL


def _space_keys(tokenizer: Mapping[str, Any]) -> dict[str, Value]:
    """Return whether a text begins with a space. Raises PlanError when spaces are not spelled as a mark."""
    before, normalizer = (json.dumps(tokenizer.get(key), ensure_ascii=False) for key in ("pre_tokenizer", "normalizer"))
    if SPACE not in before + normalizer or not tokenizer["model"].get("byte_fallback"):
        raise PlanError(
            "GGUF cannot hold this tokenizer: it takes byte-level BPE, and SentencePiece-like BPE with byte "
            "fallback. Export a Hugging Face directory instead"
        )
    prefixed = '"Prepend"' in normalizer or '"first"' in before or '"always"' in before
    return {"tokenizer.ggml.add_space_prefix": prefixed}


def _merge_scores(words: Mapping[int, str], kinds: list[int], merges: list[str], vocab: int) -> list[Any]:
    """Return a score per token. Earlier merges score higher, since llama.cpp merges in order of scores."""
    order: dict[str, int] = {}
    # Several merges may make one token. The first of them decides when it is made.
    for merge in merges:
        order.setdefault(merge.replace(" ", ""), len(order))
    last = float(len(order))
    return [-float(order.get(words.get(id, ""), last)) if kinds[id] == NORMAL else 0.0 for id in range(vocab)]


def read_vocabulary(header: GGUFHeader) -> GGUFVocabulary | None:
    """Return the tokenizer, or None if there is none with known rules. Raises HubError when its parts do not fit."""
    keys = header.keys
    tokens = keys.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        return None
    marks = {mark: int_or(keys.get(f"tokenizer.ggml.{mark}_token_id"), -1) for mark in ("bos", *ENDS)}
    for mark, id in marks.items():
        if id >= len(tokens):
            raise HubError(f"{header.file}: its {mark} token is {id}, and it has {len(tokens)} tokens")
    stored_json = keys.get(WHOLE)
    text = stored_json if isinstance(stored_json, str) else _rebuild(header, tokens)
    if text is None:
        return None
    spelled = {mark: tokens[id] if id >= 0 else None for mark, id in marks.items()}
    ends = tuple(dict.fromkeys(id for mark in ENDS if (id := marks[mark]) >= 0))
    usual = keys.get("tokenizer.ggml.model") == "llama" or keys.get("tokenizer.ggml.pre") in BEGUN
    # A whole tokenizer.json says so itself. Only a rebuilt one needs the mark of the keys.
    if not isinstance(stored_json, str) and spelled["bos"] and keys.get("tokenizer.ggml.add_bos_token", usual):
        text = json.dumps({**json.loads(text), "post_processor": _begin_with(spelled["bos"], marks["bos"])})
    return GGUFVocabulary(text=text, bos=spelled["bos"], eos=spelled["eos"], stop_ids=ends)


def _begin_with(token: str, id: int) -> dict[str, Any]:
    mark = {"SpecialToken": {"id": token, "type_id": 0}}
    sides = [{"Sequence": {"id": side, "type_id": 0}} for side in "AB"]
    return {
        "type": "TemplateProcessing", "single": [mark, sides[0]], "pair": [mark, *sides],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    }  # fmt: skip


def _rebuild(header: GGUFHeader, tokens: list[str]) -> str | None:
    """Build a tokenizer.json from keys that other software has written."""
    kinds = header.keys.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list) or len(kinds) not in (0, len(tokens)):
        raise HubError(f"{header.file}: tokenizer.ggml.token_type must have one number per token")
    kinds = kinds or [NORMAL] * len(tokens)
    vocab = {token: id for id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}
    kind = header.keys.get("tokenizer.ggml.model")
    rebuilt = _rebuild_byte_level(header, vocab) if kind == "gpt2" else None
    rebuilt = _rebuild_marked(header, vocab, kinds) if kind == "llama" else rebuilt
    if rebuilt is None:
        return None
    added = [
        {"id": id, "content": tokens[id], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kind != USER}
        for id, kind in enumerate(kinds) if kind in (CONTROL, USER, UNKNOWN)
    ]  # fmt: skip
    rest = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None, "added_tokens": added}
    return json.dumps(rest | rebuilt)


def _bpe(vocab: Mapping[str, int], merges: list[list[str]], **more: Any) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocab, "merges": merges, **more,
    }  # fmt: skip


def _rebuild_byte_level(header: GGUFHeader, vocab: Mapping[str, int]) -> dict[str, Any] | None:
    """Rebuild the model `gpt2`. None = its rule for words is not known here."""
    merges, name = header.keys.get("tokenizer.ggml.merges"), str(header.keys.get("tokenizer.ggml.pre", ""))
    rule = RULES.get(ALSO.get(name, name))
    if rule is None or not isinstance(merges, list):
        return None
    pairs = [merge.split(" ", 1) for merge in merges if isinstance(merge, str)]
    if any(len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys() for pair in pairs):
        raise HubError(f"{header.file}: tokenizer.ggml.merges names tokens that its vocabulary does not have")
    return {
        "normalizer": {"type": "NFC"} if rule.name == "qwen2" else None,
        "pre_tokenizer": split_by(rule),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": _bpe(vocab, pairs, ignore_merges=rule.whole_words),
    }


def _rebuild_marked(header: GGUFHeader, vocab: Mapping[str, int], kinds: list[Any]) -> dict[str, Any]:
    """Rebuild the model `llama`. Every split of a token into two tokens is a merge, in the order of their scores."""
    scores = header.keys.get("tokenizer.ggml.scores")
    if (
        not isinstance(scores, list)
        or len(scores) != len(kinds)
        or not all(isinstance(score, float) for score in scores)
    ):
        raise HubError(f"{header.file}: tokenizer.ggml.scores must have one number per token")
    merges: list[tuple[float, int, int, str, str]] = []
    for token, id in vocab.items():
        # All splits of a token are tried, so a hostile one of a million characters would take hours.
        if kinds[id] == NORMAL and len(token) <= LONGEST_TOKEN:
            pairs = ((token[:split], token[split:]) for split in range(1, len(token)))
            merges += [(scores[id], len(a), len(b), a, b) for a, b in pairs if a in vocab and b in vocab]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    unknown_id = int_or(header.keys.get("tokenizer.ggml.unknown_token_id"), -1)
    unknown = next(
        (token for token, id in vocab.items() if id == unknown_id or (unknown_id < 0 and kinds[id] == UNKNOWN)), None
    )
    prefixed = header.keys.get("tokenizer.ggml.add_space_prefix", True)
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    ends: list[dict[str, Any]] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    ends += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    return {
        "normalizer": {
            "type": "Sequence", "normalizers": [*([{"type": "Prepend", "prepend": SPACE}] if prefixed else []), mark],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, *ends]},
        "model": _bpe(vocab, [[a, b] for *_, a, b in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }  # fmt: skip

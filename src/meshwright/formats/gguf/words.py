"""llama.cpp's rules that cut text into words before it merges bytes. They are built in, and a file names one.

A tokenizer with another rule gets the name of the nearest one, and a note with the share of equal borders on a sample:
ids are then exact only where ids are given.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

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
    patterns, whole = patterns_of(tokenizer), bool(model.get("ignore_merges"))
    if not model["merges"]:
        return ChosenRule(name="gpt-2", agreement=1.0)  # without merges, words do not matter
    for rule in RULES.values():
        if (rule.patterns, rule.whole_words) == (patterns, whole):
            return ChosenRule(name=rule.name, agreement=1.0)
    borders = _token_borders(tokenizer)
    shares = {
        rule.name: _overlap(borders, _token_borders({**tokenizer, "pre_tokenizer": split_by(rule)}))
        for rule in RULES.values()
        if rule.whole_words == whole
    }
    best = max(shares, key=lambda name: shares[name])
    return ChosenRule(name=best, agreement=min(shares[best], 1 - 1e-6))


def _token_borders(tokenizer: Mapping[str, Any]) -> set[int]:
    encoding = tokenizers.Tokenizer.from_str(json.dumps(tokenizer)).encode(SAMPLE, add_special_tokens=False)
    return {end for _, end in encoding.offsets}


def _overlap(left: set[int], right: set[int]) -> float:
    return len(left & right) / max(1, len(left | right))

"""Tokenizer: text to token ids and back, from a tokenizer.json, from bytes, or trained here.

Tokens named by files beside a tokenizer.json are merged into it, as transformers' AutoTokenizer does.
Tools that add tokens write them to `tokenizer_config.json` or `added_tokens.json`, and not always to tokenizer.json.
A token left out would be spelled by letters, and the model would never see it. See transformers,
`tokenization_utils_base.py` (`_from_pretrained`) and `tokenization_utils_tokenizers.py`
(`TokenizersBackend.__init__`).
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from meshwright.data.text import rows
from meshwright.data.tokens import word_encoder
from meshwright.data.tokens.text_stream import BYTE_TOKEN, UNFINISHED, TextStream, TokenTexts
from meshwright.spec.errors import DataError

TEMPLATE: Final = "chat_template.jinja"
TOOL_TEMPLATE: Final = "additional_chat_templates/tool_use.jinja"
SEPARATOR: Final = "<|endoftext|>"

CODE_PATTERN: Final = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+(?:[\r\n]+[ \t]*)?|\s*[\r\n]+[ \t]*|\s+(?!\S)|\s+"
)
"""Words of prose and code: one mark before a word belongs to it (` self`, `.append`, `_name`), and a line end includes
the indentation after it. At 2048 tokens it gives 5 % more bytes per token of Python than the patterns of GPT-2 and
Llama-3."""

Raw = bytes

_PAIRS: Final = (
    ("<|begin_of_text|>", "<|end_of_text|>"),
    ("<s>", "</s>"),
    ("<|endoftext|>", "<|endoftext|>"),
    ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    ("<bos>", "<eos>"),
    ("[BOS]", "[EOS]"),
)
"""Names of (begin, end) to look for if no tokenizer_config.json or special_tokens_map.json names them."""


def tokenizer_file(path: str | Path) -> Path:
    """Return the tokenizer.json at a path, or in the folder there. Raises DataError when there is none."""
    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise DataError(f"{file} does not exist: data.tokenizer takes auto, bytes, bpe:4096, or a tokenizer.json")
    return file


@final
class Tokenizer:
    """One tokenizer. Documents are `[begins] text [eos]`, or `[separator] text` if one token plays both.

    The post-processor puts `begins` before a text. A config may name a bos that is never put there.
    """

    def __init__(
        self,
        text: str,
        *,
        bos: str | None = None,
        eos: str | None = None,
        config: str | None = None,
        template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        """Build a tokenizer from the text of a tokenizer.json and the spelling of its marks.

        With only one of the two marks it plays both. The texts of tokenizer_config.json (`config`), chat_template.jinja
        (`template`) and an additional template for tools (`tool_template`) are kept next to it.
        """
        self._library = word_encoder.library(text)
        # Ids may have gaps, so the size is that of the largest id.
        ids = self._library.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError("the tokenizer has an empty vocabulary")
        self.vocab: Final = max(ids.values()) + 1
        """Number of ids: the model's vocabulary must be at least this."""
        for mark in (bos, eos):
            if mark is not None and mark not in ids:
                raise DataError(f"the tokenizer's config names {mark!r}, which its vocabulary does not hold")
        first, last = bos or eos, eos or bos
        self.bos: Final = None if first is None else ids[first]
        self.eos: Final = None if last is None else ids[last]
        self.begins: Final = word_encoder.ids_before(self._library)
        """Ids that stand before every text, as transformers adds them; often none."""
        if any(token >= self.vocab for token in self.begins):
            raise DataError(f"the tokenizer begins a text with token {max(self.begins)}, which its vocabulary lacks")
        self._marks = (first, last)
        self._config = config
        self._template, self._tool_template = template, tool_template
        self._encoder = word_encoder.encoder(self._library, self.vocab)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Load a tokenizer.json or the folder that holds one. Raises DataError when it cannot be read."""
        file = tokenizer_file(path)
        try:
            text = file.read_text(encoding="utf-8")
            library = word_encoder.library(text)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{file} is not a readable tokenizer.json: {' '.join(str(error).split())}") from error
        text, config = merge_neighbours(text, library, file), file.with_name(CONFIG)
        # Many tokenizers come without a config. Their vocabulary then shows the usual names.
        bos, eos = _read_marks(file) or _guess_marks(library)
        beside = {"config": config, "template": file.with_name(TEMPLATE), "tool_template": file.parent / TOOL_TEMPLATE}
        read = {name: path.read_text(encoding="utf-8") for name, path in beside.items() if path.is_file()}
        return cls(text, bos=bos, eos=eos, **read)

    @classmethod
    def shipped(cls) -> "Tokenizer":
        """Return the BPE of 2048 tokens that comes with the package, trained on the Python standard library."""
        text = resources.files("meshwright.data").joinpath("shipped", "tokenizer.json").read_text(encoding="utf-8")
        return cls(text, bos=SEPARATOR, eos=SEPARATOR)

    @classmethod
    def bytes(cls) -> "Tokenizer":
        """Return a tokenizer of 256 bytes, each its own id, and the separator."""
        vocab = {letter: byte for byte, letter in enumerate(word_encoder.byte_alphabet())}
        library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens([AddedToken(SEPARATOR, special=True, normalized=False)])
        return cls(library.to_str(), bos=SEPARATOR, eos=SEPARATOR)

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int) -> "Tokenizer":
        """Train a byte-level BPE of exactly `vocab` tokens with its separator. Raises DataError for too short texts."""
        if vocab < 257:
            raise DataError(f"a byte-level BPE needs at least 257 tokens (256 bytes and a separator), not {vocab}")
        library = tokenizers.Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(CODE_PATTERN), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        library.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=[SEPARATOR],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        library.train_from_iterator(texts, trainer)
        size = library.get_vocab_size()
        if size != vocab:
            raise DataError(f"the text is too short for {vocab} tokens: it yields {size}; take bpe:{size} or bytes")
        return cls(library.to_str(), bos=SEPARATOR, eos=SEPARATOR)

    @property
    def separator(self) -> bool:
        """One token is both begin and end of a document."""
        return self.bos is not None and self.bos == self.eos and self.begins in ((), (self.eos,))

    @property
    def document_marks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids before and behind each document of a corpus."""
        end = () if self.eos is None else (self.eos,)
        return (end, ()) if self.separator else (self.begins, end)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of what decides the ids. Post-processing counts only by what it puts before a text."""
        # Saving a tokenizer again may reorder its file, which changes no id.
        spec = json.loads(self.json)
        for unused in ("version", "truncation", "padding", "post_processor", "decoder"):
            spec.pop(unused, None)
        # The usual beginning is left out, so that older fingerprints stay valid.
        usual = () if self.bos in (None, self.eos) else (self.bos,)
        begins = [] if self.begins == usual else [self.begins]
        content = json.dumps([spec, self.bos, self.eos, *begins], sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    @property
    def chat_template(self) -> str | None:
        """Jinja template of conversations that came with the tokenizer: chat_template.jinja, else the config's.

        Of several named templates in tokenizer_config.json it is `default`.
        """
        return self._template or _template_in(self._named, "default")

    @property
    def tool_template(self) -> str | None:
        """Template of conversations with tools, if it is another one. A chat_template.jinja hides a named one."""
        return self._tool_template or (None if self._template else _template_in(self._named, "tool_use"))

    @property
    def parts(self) -> dict[str, Any]:
        """Arguments of `Tokenizer(**parts)` that rebuild it in another process: texts and None."""
        first, last = self._marks
        texts = {"text": self.json, "config": self._config, "template": self._template}
        return {**texts, "tool_template": self._tool_template, "bos": first, "eos": last}

    def with_template(self, template: str) -> "Tokenizer":
        """Return the tokenizer with another chat template for all conversations, which is saved with it."""
        return Tokenizer(**{**self.parts, "template": template, "tool_template": None})

    @property
    def spelled(self) -> dict[str, str]:
        """Special tokens by the names that templates use, such as bos_token."""
        marks = dict(zip(("bos_token", "eos_token"), (mark or "" for mark in self._marks), strict=True))
        tokens = {name: token for name, token in self._named.items() if name.endswith("_token")}
        contents = {
            name: token.get("content") if isinstance(token, Mapping) else token for name, token in tokens.items()
        }
        named = {name: content for name, content in contents.items() if isinstance(content, str)}
        return named if "eos_token" in named else {**marks, **named}  # what a config does not name, a template lacks

    @cached_property
    def _named(self) -> dict[str, Any]:
        config = json.loads(self._config) if self._config else {}
        return config if isinstance(config, dict) else {}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of its special tokens."""
        return frozenset(id for id, token in self._library.get_added_tokens_decoder().items() if token.special)

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token that this text spells. None = there is none."""
        token: int | None = self._library.token_to_id(text)
        return token if token in self.special_ids else None

    @property
    def json(self) -> str:
        """Content of its tokenizer.json."""
        return str(self._library.to_str(pretty=False))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of stored ids: uint16 up to 65536 ids, else uint32."""
        return np.dtype(f"u{word_encoder.id_bytes(self.vocab)}")

    def encode(self, text: str, *, special: bool = False) -> NDArray[np.integer[Any]]:
        """Return ids of a text, [S] of `dtype`, without marks. `special` parses "<|endoftext|>" and the like."""
        # Only prompts parse special tokens: in a corpus, text that spells one is text.
        if special:
            return np.array(self._with_special.encode(text, add_special_tokens=False).ids, dtype=self.dtype)
        # The library takes 100 bytes of memory per byte of text, so it gets pieces.
        parts = list(rows.cut(text))
        flags = b"\0" + b"\1" * (len(parts) - 1)
        return np.frombuffer(b"".join(self.encode_raw(parts, flags)), dtype=self.dtype)

    def begin(self, text: str) -> list[int]:
        """Return ids of a text to be continued, behind `begins`, special tokens parsed. Empty = the bos, if any."""
        ids: list[int] = self.encode(text, special=True).tolist()
        before = list(self.begins)
        # A model needs a token to continue from.
        if not ids and not before:
            return [] if self.bos is None else [self.bos]
        return ids if ids[: len(before)] == before else before + ids

    def encode_raw(self, texts: Sequence[str], flags: Raw) -> list[Raw]:
        """Return the ids of every piece as bytes of `dtype`. flags[i] = 1 if piece i continues a document."""
        return self._encoder(texts, flags)

    def decode(self, ids: Iterable[int] | NDArray[np.integer[Any]]) -> str:
        """Return the text of ids with marks spelled out. Bytes that are not a whole character become U+FFFD."""
        return str(self._library.decode([int(i) for i in ids], skip_special_tokens=False))

    @cached_property
    def texts(self) -> TokenTexts:
        """Texts of tokens that need no decoding of earlier ones."""
        return TokenTexts(self.decode, self._library.get_vocab(), json.loads(self.json).get("decoder"))

    def spell(self, token: int) -> str:
        """Return the text of one token behind others, with its leading space."""
        text = self.texts[token]
        return self.texts.spell(token) if text is None else text

    def token_bytes(self, token: int) -> Raw:
        """Return the UTF-8 bytes of one token, which may be a part of a character."""
        text, name = self.spell(token), self._library.id_to_token(token) or ""
        if UNFINISHED not in text:
            return text.encode()
        if BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(name[3:5])
        byte_of = {letter: byte for byte, letter in enumerate(word_encoder.byte_alphabet())}
        spelled = self.texts.byte_level and all(letter in byte_of for letter in name)
        return bytes(byte_of[letter] for letter in name) if spelled else text.encode()

    def continuation_text(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text of ids behind a prompt. SentencePiece loses its first space if decoded alone."""
        stream = TextStream(self.decode, prompt_ids, self.texts)
        return "".join([*map(stream.push, ids), stream.rest()])

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, and tokenizer_config.json with the names of its marks, into an existing folder.

        With a template for tools, all chat templates become files: a default file would hide a list in the config.
        """
        folder = Path(folder)
        library = tokenizers.Tokenizer.from_str(self.json)
        (folder / "tokenizer.json").write_text(library.to_str(pretty=True) + "\n", encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(self._config or self._minimal_config(), encoding="utf-8")
        default, with_tools = self.chat_template, self.tool_template
        if default is not None and (self._template is not None or with_tools is not None):
            (folder / TEMPLATE).write_text(default, encoding="utf-8")
        if with_tools is not None:
            (folder / TOOL_TEMPLATE).parent.mkdir(exist_ok=True)
            (folder / TOOL_TEMPLATE).write_text(with_tools, encoding="utf-8")

    def _minimal_config(self) -> str:
        bos, eos = self._marks
        config = {
            "bos_token": bos,
            "eos_token": eos,
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        return json.dumps(config, indent=2) + "\n"

    @cached_property
    def _with_special(self) -> tokenizers.Tokenizer:
        library = word_encoder.library(self.json)
        library.encode_special_tokens = False
        return library


def _template_in(config: Mapping[str, Any], name: str) -> str | None:
    """Return a named template of a tokenizer_config.json. A single unnamed one is the default."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}.get(
            name
        )
    elif name != "default":
        return None
    return template if isinstance(template, str) and template else None


def choose(setting: str, folder: Path | None, texts: Iterator[str]) -> Tokenizer:
    """Return the tokenizer of `data.tokenizer`: auto (from `folder`, else shipped), bytes, bpe:N or a path."""
    if setting == "auto":
        beside = folder is not None and (folder / "tokenizer.json").is_file()
        return Tokenizer.load(folder) if folder is not None and beside else Tokenizer.shipped()
    if setting == "bytes":
        return Tokenizer.bytes()
    if setting.startswith("bpe:"):
        return Tokenizer.train(texts, trained_vocab(setting))
    return Tokenizer.load(Path(setting).expanduser())


def trained_vocab(setting: str) -> int:
    """Return N of `bpe:N`."""
    try:
        return int(setting.removeprefix("bpe:"))
    except ValueError:
        raise DataError(f"data.tokenizer={setting} is not understood: give a number of tokens, as bpe:4096") from None


def _read_marks(file: Path) -> tuple[str | None, str | None] | None:
    """Return (bos, eos) as a neighbouring config names them. None = no config names them."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        neighbour = file.with_name(name)
        if not neighbour.is_file():
            continue
        try:
            config = json.loads(neighbour.read_text(encoding="utf-8"))
            bos, eos = (_spelling(config.get(key)) for key in ("bos_token", "eos_token"))
        except (ValueError, AttributeError, OSError, RecursionError) as error:
            raise DataError(f"{neighbour} is not readable JSON: {error}") from error
        if bos or eos:
            return bos, eos
    return None


def _spelling(token: Any) -> str | None:
    """Return the spelling of a token in a config, a string or an object with `content`. Raises ValueError otherwise."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str | None):
        raise ValueError(f"{str(content)[:80]!r} is no token")
    return content


def _guess_marks(library: tokenizers.Tokenizer) -> tuple[str | None, str | None]:
    known = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
    return next(((bos, eos) for bos, eos in _PAIRS if bos in known and eos in known), (None, None))


CONFIG: Final = "tokenizer_config.json"
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE: Final = ("extra_special_tokens", "additional_special_tokens")

Declared = tuple[int | None, AddedToken]
"""(id, token). The id is None if no file gives it."""


def merge_neighbours(text: str, library: tokenizers.Tokenizer, file: Path) -> str:
    """Return the text of a tokenizer.json with the tokens of its neighbours, which are also added to `library`.

    Raises DataError when a token's id is not the next one, or when a neighbour cannot be read.
    """
    names = (CONFIG, "special_tokens_map.json", "added_tokens.json")
    neighbours = {name: _read(file.with_name(name)) for name in names}
    try:
        declared = list(_list_declared(library, *neighbours.values()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file.with_name(CONFIG)} names tokens in a form that is not known: {error}") from error
    known = {token.content: token for token in library.get_added_tokens_decoder().values()}
    new = [(id, token) for id, token in declared if not _is_same(known.get(token.content), token)]
    for id, token in new:
        is_new = library.token_to_id(token.content) is None
        library.add_tokens([token])
        actual_id = library.token_to_id(token.content)
        if is_new and id is not None and actual_id != id:
            raise DataError(
                f"{file.with_name(CONFIG)} gives {token.content!r} the id {id}, but the next id of {file.name} is "
                f"{actual_id}: save the tokenizer again with the software that wrote it"
            )
    return str(library.to_str()) if new else text


def _list_declared(
    library: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, Any], added: Mapping[str, Any]
) -> Iterator[Declared]:
    """Yield tokens in the order in which transformers adds them.

    A named token that the vocabulary lacks is skipped: no file gives it an id, and no model has a row for it.
    """
    # A decoder lists all added tokens with their ids. Older files name them in the other two.
    decoder = config.get("added_tokens_decoder")
    if decoder is None:
        config = {**config, **special}
    more = [token for name in _MORE for token in _list_tokens(config.get(name))]
    others = (token for name, token in config.items() if name.endswith("_token") and name not in _NAMED)
    named = [token for token in map(_token, (config.get(name) for name in _NAMED)) if token is not None]
    if decoder is not None:
        marks = {token.content for token in named}
        for id, flags in sorted(decoder.items(), key=lambda pair: int(pair[0])):
            yield int(id), AddedToken(**{**flags, "special": flags.get("special") or flags["content"] in marks})
    else:
        marks = {token.content for token in (*named, *more)}
        for content, id in sorted(added.items(), key=lambda pair: pair[1]):
            mark = content in marks
            yield id, AddedToken(content, normalized=not mark, special=mark)
    have = {token.content for token in library.get_added_tokens_decoder().values()}
    have |= {token["content"] for token in (decoder or {}).values()} | (set() if decoder is not None else set(added))
    for token in named:
        if token.content not in have and library.token_to_id(token.content) is not None:
            yield None, token
    for token in (*_list_tokens([other for other in others if isinstance(other, str)]), *more):
        if token.content not in have:
            yield None, token


def _list_tokens(tokens: Any) -> Iterable[AddedToken]:
    """Return the tokens of a list, or of an object whose keys are names."""
    entries = tokens.values() if isinstance(tokens, Mapping) else tokens or ()
    return [token for token in map(_token, entries) if token is not None]


def _token(token: Any) -> AddedToken | None:
    """Return a special token from its spelling or from an object with `content`."""
    content = token.get("content") if isinstance(token, Mapping) else token
    if content and not isinstance(content, str):
        raise ValueError(f"{str(content)[:80]!r} is no token")
    if isinstance(token, Mapping):
        flags = {name: flag for name, flag in token.items() if name in _FLAGS}
        return AddedToken(token["content"], **{"normalized": False, **flags, "special": True})
    return AddedToken(token, special=True, normalized=False) if token else None


def _is_same(first: AddedToken | None, second: AddedToken) -> bool:
    return first is not None and all(getattr(first, name) == getattr(second, name) for name in _FLAGS)


def _read(file: Path) -> dict[str, Any]:
    """Return the object in a file. Empty = there is no file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{file} is not readable JSON: {error}") from error
    return content if isinstance(content, dict) else {}

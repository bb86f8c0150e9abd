"""Tokens named by files beside a tokenizer.json, merged into it as transformers' AutoTokenizer does.

Tools that add tokens write them to `tokenizer_config.json` or `added_tokens.json`, and not always to tokenizer.json.
A token left out would be spelled by letters, and the model would never see it. See transformers,
`tokenization_utils_base.py` (`_from_pretrained`) and `tokenization_utils_tokenizers.py`
(`TokenizersBackend.__init__`).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from meshwright.spec.errors import DataError

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

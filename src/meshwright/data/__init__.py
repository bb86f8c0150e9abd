"""Text on disk becomes numbered windows of tokens. numpy and tokenizers, no torch.

The names below are loaded when first used: an encoding worker and `meshwright --help` need almost none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.data.corpus import Corpus, TokenStream
    from meshwright.data.order import permute
    from meshwright.data.sources import Document, documents
    from meshwright.data.token_cache import prepare
    from meshwright.data.tokenizer import Tokenizer
    from meshwright.data.windows import Sampler, Sequences, windows_in_order

__all__ = [
    "Corpus",
    "Document",
    "Sampler",
    "Sequences",
    "TokenStream",
    "Tokenizer",
    "documents",
    "permute",
    "prepare",
    "windows_in_order",
]

_HOMES = {
    "prepare": "token_cache",
    "Corpus": "corpus",
    "TokenStream": "corpus",
    "permute": "order",
    "Document": "sources",
    "documents": "sources",
    "Tokenizer": "tokenizer",
    "Sampler": "windows",
    "Sequences": "windows",
    "windows_in_order": "windows",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

"""Text on disk becomes numbered windows of tokens. numpy and tokenizers, no torch.

The names below are loaded when first used: an encoding worker and `meshwright --help` need almost none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.data.corpus import Corpus as Corpus
    from meshwright.data.corpus import TokenStream as TokenStream
    from meshwright.data.preparation import prepare as prepare
    from meshwright.data.sources import Document as Document
    from meshwright.data.tokenizer import Tokenizer as Tokenizer
    from meshwright.data.windows import Sampler as Sampler
    from meshwright.data.windows import Sequences as Sequences

_HOMES = {
    "prepare": "preparation",
    "Corpus": "corpus",
    "TokenStream": "corpus",
    "Document": "sources",
    "Tokenizer": "tokenizer",
    "Sampler": "windows",
    "Sequences": "windows",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

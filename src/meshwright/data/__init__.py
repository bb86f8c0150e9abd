"""Conversion of text on disk into numbered windows of tokens. numpy and tokenizers, no torch.

The names below are loaded on first use: an encoding worker and `meshwright --help` need almost none of them.
"""

from typing import TYPE_CHECKING

from meshwright.spec.lazy_names import lazy_names

if TYPE_CHECKING:
    from meshwright.data.corpus import Corpus as Corpus
    from meshwright.data.corpus import TokenStream as TokenStream
    from meshwright.data.preparation import prepare as prepare
    from meshwright.data.sources import Document as Document
    from meshwright.data.tokenizer import Tokenizer as Tokenizer
    from meshwright.data.windows import Sampler as Sampler
    from meshwright.data.windows import Sequences as Sequences

__getattr__ = lazy_names(__name__, {
    "prepare": "preparation", "Corpus": "corpus", "TokenStream": "corpus", "Document": "sources",
    "Tokenizer": "tokenizer", "Sampler": "windows", "Sequences": "windows",
})  # fmt: skip

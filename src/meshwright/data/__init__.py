"""Conversion of text on disk into numbered windows of tokens. numpy and tokenizers, no torch.

The names below are loaded on first use: an encoding worker and `meshwright --help` need almost none of them.
"""

from typing import TYPE_CHECKING

from meshwright.spec.lazy_names import lazy_names

if TYPE_CHECKING:
    from meshwright.data.corpus.corpus import Corpus as Corpus
    from meshwright.data.corpus.corpus import TokenStream as TokenStream
    from meshwright.data.preparation import prepare as prepare
    from meshwright.data.sequences.windows import Sampler as Sampler
    from meshwright.data.sequences.windows import Sequences as Sequences
    from meshwright.data.text.sources import Document as Document
    from meshwright.data.tokens.tokenizer import Tokenizer as Tokenizer

__getattr__ = lazy_names(__name__, {
    "prepare": "preparation", "Corpus": "corpus.corpus", "TokenStream": "corpus.corpus", "Document": "text.sources",
    "Tokenizer": "tokens.tokenizer", "Sampler": "sequences.windows", "Sequences": "sequences.windows",
})  # fmt: skip

"""Advice before training: does the tokenizer suit the text and the model?"""

from collections.abc import Mapping
from itertools import groupby, islice

from meshwright.data.corpus.corpus import Corpus, TokenStream
from meshwright.data.tokens.tokenizer import Tokenizer
from meshwright.spec import Plan
from meshwright.spec.plan.plan import TEXT
from meshwright.spec.units import many

FEW_BYTES = 2.0
"""Bytes per token below which a tokenizer hardly joins anything: one made for other scripts spells the text by
bytes."""
LEAST_BYTES = 20_000
"""Shortest text that advice is based on."""
IDLE = 4
"""Ratio of the model's rows to the tokenizer's tokens from which advice is given."""
UNITS = "bytes"
_COLUMNS_NAMED = 4
LOOKED_AT = 2**14
"""Tokens at the beginning of each source that are searched for spelled special tokens."""
LONGEST_OF_HTML = 4
"""Letters of `</s>`, which is a token of Llama 2 and a tag of HTML."""


def advice(plan: Plan, corpus: Corpus) -> tuple[str, ...]:
    """Return sentences for the first lines of a run. Empty = everything fits."""
    sentences = []
    streams, tokenizer = (corpus.train, corpus.validation), corpus.tokenizer
    text, tokens = (sum(getattr(stream, f"num_{what}") for stream in streams) for what in ("bytes", "tokens"))
    poor = tokens > 0 and text / tokens < FEW_BYTES and text >= LEAST_BYTES and plan.data.tokenizer != UNITS
    if poor:
        size = max(512, min(plan.model.vocab, 4096))
        sentences.append(
            f"the tokenizer does not fit this text: {text / tokens:.2f} bytes per token; data.tokenizer=bpe:{size} "
            "trains one on it, which puts more text into as many tokens"
        )
    elif plan.model.vocab >= IDLE * tokenizer.vocab:
        sentences.append(
            f"model.vocab={plan.model.vocab} has {plan.model.vocab - tokenizer.vocab:,} rows that the "
            f"{tokenizer.vocab:,} tokens of the tokenizer never use: model.vocab={tokenizer.vocab} saves them"
        )
    if spelled := spelled_tokens(plan, corpus):
        sentences.append(
            f"the text spells {' and '.join(spelled)} of the tokenizer, and data.form=text reads them as letters: "
            "data.form=samples reads them as tokens, as transformers does"
        )
    if corpus.unread:
        sentences.append(f"columns that are not read: {named_columns(corpus.unread)}")
    if corpus.malformed.malformed:
        sentences.append(corpus.malformed.note)
    return tuple(sentences)


def spelled_tokens(plan: Plan, corpus: Corpus) -> tuple[str, ...]:
    """Return at most two special tokens that the beginning of a text spells, where they are encoded as letters."""
    if plan.data.form != TEXT:
        return ()
    special = (corpus.tokenizer.decode([token]) for token in sorted(corpus.tokenizer.special_ids))
    names = [name for name in special if len(name) > LONGEST_OF_HTML]
    beginnings = "\n".join(_letters(corpus.tokenizer, part) for part in corpus.train.parts)
    return tuple(name for name in names if name in beginnings)[:2]


def _letters(tokenizer: Tokenizer, stream: TokenStream) -> str:
    """Decode the first tokens, with a line for each piece between special ones."""
    ids = stream.read(0, min(stream.size, LOOKED_AT)).tolist()
    pieces = groupby(ids, key=tokenizer.special_ids.__contains__)
    return "\n".join(tokenizer.decode(list(piece)) for special, piece in pieces if not special)


def named_columns(unread: Mapping[str, int]) -> str:
    """Name the first few columns with the number of rows that have them."""
    columns = [f"{name} ({many(rows, 'row')})" for name, rows in islice(unread.items(), _COLUMNS_NAMED)]
    return ", ".join(columns) + (f" and {len(unread) - _COLUMNS_NAMED} more" if len(unread) > _COLUMNS_NAMED else "")


def how_often(times: float) -> str:
    """Say how many times a text is read."""
    return f"read {times:.1f} times" if times >= 1.05 else f"{times:.0%} of it is read"

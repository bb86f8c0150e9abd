"""Whether a tokenizer suits a text and a model, said before training and not after."""

from collections.abc import Mapping
from itertools import groupby, islice

from meshwright.data.corpus import Corpus, TokenStream
from meshwright.data.tokenizer import Tokenizer
from meshwright.spec import Plan
from meshwright.spec.plan import TEXT
from meshwright.spec.units import many

FEW_BYTES = 2.0
"""Bytes a token below which a tokenizer hardly joins anything: one made for other scripts spells the text by bytes."""
LEAST_BYTES = 20_000
"""A shorter text is no ground for advice."""
IDLE = 4
"""A model may have so many times the rows of its tokenizer before it is said."""
UNITS = "bytes"
_COLUMNS_NAMED = 4
LOOKED_AT = 2**14
"""Tokens at the beginning of each source in which spelled special tokens are looked for."""
LONGEST_OF_HTML = 4
"""Letters of `</s>`, which is a token of Llama 2 and a tag of HTML."""


def advice(plan: Plan, corpus: Corpus) -> tuple[str, ...]:
    """Sentences for the first lines of a run; none where all goes well together."""
    found = []
    streams, tokenizer = (corpus.train, corpus.validation), corpus.tokenizer
    text, tokens = (sum(getattr(stream, f"num_{what}") for stream in streams) for what in ("bytes", "tokens"))
    poor = tokens > 0 and text / tokens < FEW_BYTES and text >= LEAST_BYTES and plan.data.tokenizer != UNITS
    if poor:
        size = max(512, min(plan.model.vocab, 4096))
        found.append(
            f"the tokenizer hardly knows this text: {text / tokens:.2f} bytes per token; data.tokenizer=bpe:{size} "
            "trains one on it, and as many tokens then hold more text"
        )
    elif plan.model.vocab >= IDLE * tokenizer.vocab:
        found.append(
            f"model.vocab={plan.model.vocab} has {plan.model.vocab - tokenizer.vocab:,} rows that the "
            f"{tokenizer.vocab:,} tokens of the tokenizer never use: model.vocab={tokenizer.vocab} saves them"
        )
    if spelled := spelled_tokens(plan, corpus):
        found.append(
            f"the text spells {' and '.join(spelled)} of the tokenizer, and data.form=text reads them as letters: "
            "data.form=samples reads them as tokens, as transformers does"
        )
    if corpus.unread:
        found.append(f"columns that are not read: {named_columns(corpus.unread)}")
    if corpus.malformed.malformed:
        found.append(corpus.malformed.note)
    return tuple(found)


def spelled_tokens(plan: Plan, corpus: Corpus) -> tuple[str, ...]:
    """Special tokens that the beginning of a text spells, which is encoded as letters: at most two."""
    if plan.data.form != TEXT:
        return ()
    special = (corpus.tokenizer.decode([token]) for token in sorted(corpus.tokenizer.special_ids))
    names = [name for name in special if len(name) > LONGEST_OF_HTML]
    beginnings = "\n".join(_letters(corpus.tokenizer, part) for part in corpus.train.parts)
    return tuple(name for name in names if name in beginnings)[:2]


def _letters(tokenizer: Tokenizer, stream: TokenStream) -> str:
    """The text of the first tokens, a line for each piece between special ones."""
    ids = stream.read(0, min(stream.size, LOOKED_AT)).tolist()
    pieces = groupby(ids, key=tokenizer.special_ids.__contains__)
    return "\n".join(tokenizer.decode(list(piece)) for special, piece in pieces if not special)


def named_columns(unread: Mapping[str, int]) -> str:
    """Columns with the rows that have them: the first few."""
    found = [f"{name} ({many(rows, 'row')})" for name, rows in islice(unread.items(), _COLUMNS_NAMED)]
    return ", ".join(found) + (f" and {len(unread) - _COLUMNS_NAMED} more" if len(unread) > _COLUMNS_NAMED else "")


def how_often(times: float) -> str:
    """A text is read so many times."""
    return f"read {times:.1f} times" if times >= 1.05 else f"{times:.0%} of it is read"

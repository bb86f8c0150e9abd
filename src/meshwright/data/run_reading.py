"""What a run reads of each of its sources, said before its first step."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.data.advice import how_often
from meshwright.data.chat_template import DEFAULT, DEFAULT_WITHOUT_BOS
from meshwright.data.corpus import Corpus, MixedStream, Stream, TokenStream
from meshwright.data.mixed_rows import MixedRows
from meshwright.data.named_templates import fitting_formats
from meshwright.data.numbered_rows import NumberedRows, numbered_rows
from meshwright.data.sample_rows import SampleRows, trained_roles
from meshwright.spec import Data, Recipe
from meshwright.spec.plan import SAMPLES
from meshwright.spec.recipe import UNREAD, DataRead
from meshwright.spec.units import count, many

MOST_TIMES = 4
"""Repeated more often, a text teaches ever less (Muennighoff et al. 2023, arXiv:2305.16264)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReading:
    """One source, and what the run reads of it."""

    path: str
    share: float
    """Of the trained tokens, or of the pairs."""
    tokens: int
    """Of one pass, trained or not."""
    bytes_per_token: float
    """Of what is trained."""
    rows: int
    """Of one pass."""
    times: float
    """How often the run reads them."""
    overlong: int = 0
    """Samples longer than a row; 0 of text."""
    left_out: int = 0
    """Samples that no row has."""
    cut_tokens: int = 0
    """Of samples: behind the ends of rows."""
    pairs: bool = False
    """Its rows are preferences."""


def readings(
    data: Data, recipe: Recipe, stream: Stream, rows: NumberedRows, read: DataRead = UNREAD
) -> tuple[SourceReading, ...]:
    """Of each source of a mixture, in its order, or of the one source. `rows` are those of `stream`, shuffled; `read`
    is how far a run has come that goes on."""
    number = recipe.tokens_of_run(read) // recipe.sequence
    if not isinstance(stream, MixedStream) or not isinstance(rows, MixedRows):
        assert isinstance(stream, TokenStream), "only a mixture has a mixed stream"
        return (_reading(data, 1.0, stream, rows, number),)
    each = zip(data.sources, stream.weights, stream.parts, rows.rows, rows.interleaving.counts(number), strict=True)
    whole = sum(stream.weights)
    return tuple(_reading(one, weight / whole, part, own, read) for one, weight, part, own, read in each)


def _reading(data: Data, share: float, stream: TokenStream, rows: NumberedRows, read: int) -> SourceReading:
    fitted = rows.fitted if isinstance(rows, SampleRows) else None
    return SourceReading(
        path=data.path,
        share=share,
        tokens=stream.size,
        bytes_per_token=stream.bytes_per_token,
        rows=len(rows),
        times=read / len(rows),
        overlong=fitted.overlong if fitted else 0,
        left_out=fitted.left_out if fitted else 0,
        cut_tokens=fitted.cut_tokens if fitted else 0,
        pairs=isinstance(rows, SampleRows) and rows.pairs,
    )


def announced(
    data: Data, recipe: Recipe, stream: Stream, rows: NumberedRows, read: DataRead = UNREAD
) -> tuple[tuple[str, str], ...]:
    """(label, sentence) rows for the first lines of a run: each source of a mixture, the rows of samples, and notes on
    what does not fit, is repeated often, or is fewer rows than one step reads."""
    sources = readings(data, recipe, stream, rows, read)
    if isinstance(rows, MixedRows):
        lines = [("source", _source(source)) for source in sources]
        parts = list(zip(sources, rows.rows, strict=True))
    else:
        lines = [("rows", _rows(sources[0], rows))] if isinstance(rows, SampleRows) else []
        parts = [(sources[0], rows)]
    notes = [note for source, source_rows in parts for note in _notes(source, source_rows, data)]
    if isinstance(rows, SampleRows) and recipe.global_batch > len(rows):
        notes.append(
            f"a step reads {many(recipe.global_batch, 'row')}, and the samples fill {many(len(rows), 'row')}: "
            f"{many(recipe.steps, 'step')} may teach little; recipe.global_batch={len(rows)} makes more steps"
        )
    return (*lines, *(("note", note) for note in notes))


def _source(one: SourceReading) -> str:
    what = "pairs" if one.pairs else "trained tokens"
    return (
        f"{one.path}: {one.share:.1%} of the {what}, {count(one.tokens)} tokens of {one.bytes_per_token:.2f} "
        f"bytes in {many(one.rows, 'row')}, {how_often(one.times)}"
    )


def _rows(one: SourceReading, rows: SampleRows) -> str:
    kept = many(rows.fitted.kept, "pair" if rows.pairs else "sample")
    return f"{kept} in {many(one.rows, 'row')}, {1 - rows.packed.waste:.1%} full, {how_often(one.times)}"


def _notes(one: SourceReading, rows: NumberedRows, data: Data) -> Iterator[str]:
    name = f"{one.path}: " if data.mixture else ""
    if isinstance(rows, SampleRows):
        yield from (f"{name}{remark}" for remark in fit(rows, data))
    if data.mixture and one.times > MOST_TIMES:
        yield (
            f"{name}repeated {one.times:.1f} times, and beyond {MOST_TIMES} a repetition teaches little: take a lower "
            "weight, fewer steps, or more text"
        )


def plainly_written(data: Data, corpus: Corpus) -> Iterator[str]:
    """A note where turns are written by the plain template, as those of a model without one."""
    if data.form != SAMPLES or corpus.tokenizer.chat_template not in (DEFAULT, DEFAULT_WITHOUT_BOS):
        return
    if trained_roles(corpus.train) not in ((), ("other",)):
        named = fitting_formats(corpus.tokenizer)
        formats = f"data.template={named[0]} is a format whose tokens the vocabulary has, and " if named else ""
        yield (
            "turns are written by the plain template: headings (### user) and an end-of-text token behind answers; "
            f"{formats}data.template=FILE another, as the chat_template.jinja of a tuned model's folder"
        )


def unscored(data: Data, recipe: Recipe, corpus: Corpus) -> Iterator[str]:
    """A note where samples are held out and none of them fits in a row: such a run evaluates nothing."""
    parts = zip(data.sources or (data,), corpus.validation.parts, strict=True)
    held = [
        (part, numbered_rows(one, recipe, corpus, part, shuffle=False)) for one, part in parts if part.num_tokens > 1
    ]
    samples = sum(part.num_documents for part, rows in held if isinstance(rows, SampleRows))
    if samples and not any(len(rows) for _, rows in held):
        yield (
            f"none of {many(samples, 'held-out sample')} fits in a row of {recipe.sequence} tokens: nothing is "
            "evaluated; take a longer recipe.sequence, or data.overlong=truncate"
        )


def fit(rows: SampleRows, data: Data) -> Iterator[str]:
    """What becomes of samples, or pairs, that do not fit, and how many pairs compare nothing."""
    fitted, what = rows.fitted, "pair" if rows.pairs else "sample"
    if fitted.overlong and data.overlong == "truncate":
        yield (
            f"{many(fitted.overlong, what)} longer than a row lost {many(fitted.cut_tokens, 'token')} and the end "
            f"of an answer: a longer recipe.sequence keeps them, data.overlong=drop leaves such {what}s out"
        )
    if fitted.left_out:
        short = f", {fitted.untrained:,} of them without a trained token in a row's length" if fitted.untrained else ""
        yield f"{many(fitted.left_out, what)} left out{short}; `meshwright data show` has the lengths"
    if rows.same_pairs:
        has = "pair has" if rows.same_pairs == 1 else "pairs have"
        yield f"{rows.same_pairs:,} {has} two answers that are the same, of which nothing is learned to be better"

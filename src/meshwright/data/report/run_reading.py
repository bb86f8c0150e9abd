"""Report of what a run reads of each of its sources, before its first step."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.data.chat.named_templates import fitting_formats
from meshwright.data.chat.template import DEFAULT, DEFAULT_WITHOUT_BOS
from meshwright.data.corpus.corpus import Corpus, MixedStream, Stream, TokenStream
from meshwright.data.report.advice import how_often
from meshwright.data.sequences.mixed_rows import MixedRows
from meshwright.data.sequences.numbered_rows import NumberedRows, numbered_rows
from meshwright.data.sequences.sample_rows import SampleRows, trained_roles
from meshwright.spec import Data, Recipe
from meshwright.spec.plan.plan import SAMPLES
from meshwright.spec.recipe.recipe import UNREAD, DataRead
from meshwright.spec.units import count, many

MOST_TIMES = 4
"""Repetitions after which a text teaches ever less (Muennighoff et al. 2023, arXiv:2305.16264)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReading:
    """One source, and what the run reads of it."""

    path: str
    share: float
    """Share of the trained tokens, or of the pairs."""
    tokens: int
    """Tokens of one pass, trained or not."""
    bytes_per_token: float
    """UTF-8 bytes per trained token."""
    rows: int
    """Rows of one pass."""
    times: float
    """Passes that the run makes."""
    overlong: int = 0
    """Samples longer than a row. 0 for text."""
    left_out: int = 0
    """Samples that are in no row."""
    cut_tokens: int = 0
    """Tokens of samples behind the ends of rows."""
    pairs: bool = False
    """Its rows are preferences."""


def readings(
    data: Data, recipe: Recipe, stream: Stream, rows: NumberedRows, read: DataRead = UNREAD
) -> tuple[SourceReading, ...]:
    """Return what a run reads of each source, in the order of the mixture, or of its one source.

    `rows` are those of `stream`, shuffled. `read` is the progress of a resumed run.
    """
    number = recipe.tokens_of_run(read) // recipe.sequence
    if not isinstance(stream, MixedStream) or not isinstance(rows, MixedRows):
        assert isinstance(stream, TokenStream), "only a mixture has a mixed stream"
        return (_reading(data, 1.0, stream, rows, number),)
    each = zip(data.sources, stream.weights, stream.parts, rows.rows, rows.interleaving.counts(number), strict=True)
    whole = sum(stream.weights)
    return tuple(
        _reading(source, weight / whole, part, source_rows, rows_read)
        for source, weight, part, source_rows, rows_read in each
    )


def _reading(data: Data, share: float, stream: TokenStream, rows: NumberedRows, rows_read: int) -> SourceReading:
    fitted = rows.fitted if isinstance(rows, SampleRows) else None
    return SourceReading(
        path=data.path,
        share=share,
        tokens=stream.size,
        bytes_per_token=stream.bytes_per_token,
        rows=len(rows),
        times=rows_read / len(rows),
        overlong=fitted.overlong if fitted else 0,
        left_out=fitted.left_out if fitted else 0,
        cut_tokens=fitted.cut_tokens if fitted else 0,
        pairs=isinstance(rows, SampleRows) and rows.pairs,
    )


def announced(
    data: Data, recipe: Recipe, stream: Stream, rows: NumberedRows, read: DataRead = UNREAD
) -> tuple[tuple[str, str], ...]:
    """Return (label, sentence) lines for the start of a run.

    They name each source of a mixture and the rows of samples, and note what does not fit, is repeated often, or is
    fewer rows than one step reads.
    """
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


def _source(source: SourceReading) -> str:
    what = "pairs" if source.pairs else "trained tokens"
    return (
        f"{source.path}: {source.share:.1%} of the {what}, {count(source.tokens)} tokens of "
        f"{source.bytes_per_token:.2f} bytes in {many(source.rows, 'row')}, {how_often(source.times)}"
    )


def _rows(source: SourceReading, rows: SampleRows) -> str:
    samples = many(rows.fitted.retained, "pair" if rows.pairs else "sample")
    return f"{samples} in {many(source.rows, 'row')}, {1 - rows.packed.waste:.1%} full, {how_often(source.times)}"


def _notes(source: SourceReading, rows: NumberedRows, data: Data) -> Iterator[str]:
    name = f"{source.path}: " if data.mixture else ""
    if isinstance(rows, SampleRows):
        yield from (f"{name}{remark}" for remark in fit(rows, data))
    if data.mixture and source.times > MOST_TIMES:
        yield (
            f"{name}repeated {source.times:.1f} times, and beyond {MOST_TIMES} a repetition teaches little: take a "
            "lower weight, fewer steps, or more text"
        )


def plainly_written(data: Data, corpus: Corpus) -> Iterator[str]:
    """Yield a note if turns are written by the plain template, like those of a model without one."""
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
    """Yield a note if samples are held out and none of them fits in a row: the run then evaluates nothing."""
    parts = zip(data.sources or (data,), corpus.validation.parts, strict=True)
    held = [
        (part, numbered_rows(source, recipe, corpus, part, shuffle=False))
        for source, part in parts
        if part.num_tokens > 1
    ]
    samples = sum(part.num_documents for part, rows in held if isinstance(rows, SampleRows))
    if samples and not any(len(rows) for _, rows in held):
        yield (
            f"none of {many(samples, 'held-out sample')} fits in a row of {recipe.sequence} tokens: nothing is "
            "evaluated; take a longer recipe.sequence, or data.overlong=truncate"
        )


def fit(rows: SampleRows, data: Data) -> Iterator[str]:
    """Yield notes on samples, or pairs, that do not fit, and on pairs with equal answers."""
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
        yield f"{rows.same_pairs:,} {has} two equal answers, which teach nothing"

"""`meshwright data show [PLAN.yaml] [KEY=VALUE ...]`: what would be trained on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from meshwright import planfile
from meshwright.data import Corpus, prepare
from meshwright.data.preparation import form_of
from meshwright.data.report import DataView, SampleFigures, StreamFigures, Token, heading, named_columns, view
from meshwright.interface.answers.answer import check_page, write_page
from meshwright.interface.planning.plan_reading import read_folder
from meshwright.interface.terminal.screen_text import console, print_json, shown_path
from meshwright.spec import Data
from meshwright.spec.plan.plan import SAMPLES, STDLIB
from meshwright.spec.units import count, many, text_size
from meshwright.verbs.data.page import page, rows_of

_COLOURS = ("cyan", "yellow", "green", "magenta")
_NAMES_SHOWN = 3


def show(plan: Path | None, overrides: list[str], json: bool, html: Path | None = None) -> None:
    """Print source, split, tokenizer and a packed sequence.

    `plan`: None = the default plan. `html`: a page with more rows.
    """
    if html is not None:
        check_page(html, "data.html", "html")
    settings = planfile.read(plan, overrides, read_folder=read_folder)
    settings = replace(settings, data=_by_columns(settings.data, plan, overrides))
    rows = 1 if html is None else rows_of(settings.recipe.sequence)
    data_view = view(settings.data, settings.recipe, encode(settings.data, console(json=True)), rows=rows)
    if html is not None:
        write_page(html, page(data_view))
        if not json:
            print(f"{shown_path(html)}: {many(1 + len(data_view.more), 'row')}; open it in a browser")
            return
    if json:
        print_json(data_view)
        return
    out = console()
    sources = [_sources(data_view)] if data_view.sources else []
    for part in (_figures(data_view), *sources, _legend(data_view), _sequence(data_view)):
        out.print(part)


def _by_columns(data: Data, plan: Path | None, overrides: list[str]) -> Data:
    """Read rows of samples as such when no plan and no word names their form."""
    is_named = plan is not None or any(word.startswith("data.form=") for word in overrides)
    return data if is_named or data.mixture or data.path == STDLIB else replace(data, form=form_of(data))


def encode(data: Data, console: Console) -> Corpus:
    """Encode the corpus, with a progress bar on a terminal."""
    with encoding_bar(console, of_rows=data.form == SAMPLES) as advance:
        return prepare(data, progress=advance)


@contextmanager
def encoding_bar(console: Console, *, of_rows: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show progress on a terminal, and yield what takes (rows or bytes done, total)."""
    sizes = (MofNCompleteColumn(),) if of_rows else (DownloadColumn(binary_units=True), TransferSpeedColumn())
    columns = (TextColumn("encoding rows" if of_rows else "encoding"), BarColumn(), *sizes, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("encoding", total=None, visible=False)

        def advance(done: int, whole: int) -> None:
            bar.update(task, completed=done, total=whole, visible=True)

        yield advance


def _figures(data_view: DataView) -> Table:
    table = Table(title=Text(data_view.source), title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("")
    samples, windows = data_view.samples, f"windows of {data_view.sequence}"
    names = ("documents", "text", "tokens") if samples is None else (samples.things, "answers", "trained")
    for title in (*names, windows, "share"):
        table.add_column(title, justify="right")
    total_bytes = data_view.train.bytes + data_view.validation.bytes
    for name, side in (("trained on", data_view.train), ("held out", data_view.validation)):
        number = side.documents if data_view.samples is None else data_view.samples.counted(side.documents)
        table.add_row(name, f"{number:,}", *_row(side), f"{side.bytes / total_bytes:.2%}")
    return table


def _sources(data_view: DataView) -> Table:
    """Return a table of the sources of a mixture, and how often the run reads each."""
    table = Table(box=None, pad_edge=False)
    table.add_column("source")
    fitted = ("cut", "left out") if data_view.samples else ()
    for title in ("share", "tokens", "bytes per token", "windows", "read", *fitted):
        table.add_column(title, justify="right")
    for source in data_view.sources:
        figures = (f"{source.share:.1%}", count(source.tokens), f"{source.bytes_per_token:.2f}", f"{source.rows:,}")
        lengths = (f"{source.overlong:,}", f"{source.left_out:,}") if data_view.samples else ()
        table.add_row(source.path, *figures, f"{source.times:.2g} times", *lengths)
    return table


def _row(side: StreamFigures) -> tuple[str, ...]:
    return text_size(side.bytes), count(side.tokens), f"{side.windows:,}"


def _legend(data_view: DataView) -> Text:
    tokenizer = (
        f"tokenizer {data_view.tokenizer}: {data_view.vocab:,} ids, {data_view.bytes_per_token:.2f} bytes per token"
    )
    lines = [
        "",
        f"{tokenizer}; {_marks(data_view)}",
        f"files {data_view.files:,}; fingerprint {data_view.fingerprint[:16]}",
    ]
    if data_view.passed_over:
        names = ", ".join(Path(path).name for path in data_view.passed_over[:_NAMES_SHOWN])
        more = ", ..." if len(data_view.passed_over) > _NAMES_SHOWN else ""
        lines.append(f"passed over as binary: {len(data_view.passed_over)} ({names}{more})")
    if data_view.unread:
        lines.append(f"columns that are not read: {named_columns(data_view.unread)}")
    if data_view.malformed.malformed:
        lines.append(data_view.malformed.note)
    if data_view.samples is not None:
        lines += _sample_lines(data_view, data_view.samples)
        return Text("\n".join([*lines, ""]))
    ignored = sum(token.target is None for token in data_view.tokens)
    counts = f"{ignored} tokens whose target is ignored are struck through" if ignored else "every target counts"
    lines.append(f"sample {data_view.sample}, one colour per document, a shade per token; {counts}:")
    return Text("\n".join([*lines, ""]))


def _sample_lines(data_view: DataView, samples: SampleFigures) -> list[str]:
    """Describe the lengths of samples, what happens to long ones, and the meaning of the colours."""
    low, quarter, half, most, long, high = (f"{length:,}" for length in samples.lengths)
    cut = f"{samples.cut_tokens:,} tokens cut off"
    same = f"; {samples.same:,} pairs have two answers that are the same" if samples.same else ""
    green = "what is trained is green" if not samples.pairs else "better answers are green, worse ones red"
    return [
        f"{samples.trained_share:.1%} of the tokens of samples are trained; rows are {1 - samples.waste:.1%} full",
        f"tokens of a sample: {low} to {high}, half of them {half} or fewer ({quarter} to {most}; nine tenths {long})",
        f"{samples.things} longer than {data_view.sequence}: {samples.overlong:,} (data.overlong={samples.policy}); "
        f"left out: {samples.left_out:,}; {cut}{same}",
        f"row {data_view.sample}: {green}, what is masked grey, padding shown as dots:",
    ]


def _marks(data_view: DataView) -> str:
    if data_view.bos is None and data_view.eos is None:
        return "nothing marks the borders of documents"
    if data_view.samples is not None:
        return f"texts without a template end with {data_view.eos}"
    if data_view.bos == data_view.eos:
        return f"{data_view.bos} begins each document and ends the one before"
    return (
        f"documents are {data_view.bos} ... {data_view.eos}" if data_view.bos else f"documents end with {data_view.eos}"
    )


def _sequence(data_view: DataView) -> Text:
    text = Text()
    pairs = data_view.samples is not None and data_view.samples.pairs
    for number, (_, tokens) in enumerate(groupby(enumerate(data_view.tokens), lambda pair: pair[1].document)):
        document = list(tokens)
        if number or pairs:
            heading_text = heading([token for _, token in document], pairs)
            text.append("\n" * bool(number) + f"--- {heading_text} ---\n", style="bold reverse")
        for index, token in document:
            text.append("." if token.mark == "padding" else token.text, style=_style(token, index, pairs))
    return text


def _style(token: Token, index: int, pairs: bool = False) -> str:
    """Return the rich style of a token.

    Text alternates bright and dim to show token borders. Samples show trained, masked and padding tokens; in `pairs`,
    the worse answer is red.
    """
    if token.mark:
        trained = "bold red" if pairs and token.document % 2 else "bold green"
        return {"trained": trained, "masked": "bright_black", "padding": "dim"}[token.mark]
    shade = " dim" if index % 2 else ""
    return _COLOURS[token.document % len(_COLOURS)] + shade + (" strike" if token.target is None else "")

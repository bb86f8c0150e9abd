"""`meshwright data show [PLAN.yaml] [KEY=VALUE ...]`: what is trained, before anything is."""

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
from meshwright.api.documents import check_page, write_page
from meshwright.api.plan_reading import read_folder
from meshwright.cli.terminal.output import console, print_json
from meshwright.data import Corpus, prepare
from meshwright.data.advice import named_columns
from meshwright.data.preparation import form_of
from meshwright.data.show import DataView, SampleFigures, StreamFigures, Token, heading, view
from meshwright.observe.data_page.rows_page import page, rows_of
from meshwright.spec import Data
from meshwright.spec.plan import SAMPLES, STDLIB
from meshwright.spec.units import count, many, text_size

_COLOURS = ("cyan", "yellow", "green", "magenta")
_NAMES_SHOWN = 3


def show(plan: Path | None, overrides: list[str], json: bool, html: Path | None = None) -> None:
    """Print source, split, tokenizer and a packed sequence of a plan (None = the default one); `html`: also as a page,
    with more rows."""
    if html is not None:
        check_page(html, "data.html", option="--html ")
    settings = planfile.read(plan, overrides, read_folder=read_folder)
    settings = replace(settings, data=_by_columns(settings.data, plan, overrides))
    rows = 1 if html is None else rows_of(settings.recipe.sequence)
    found = view(settings.data, settings.recipe, encode(settings.data, console(json=True)), rows=rows)
    if html is not None:
        write_page(html, page(found))
        if not json:
            print(f"{html}: {many(1 + len(found.more), 'row')}; open it in a browser")
            return
    if json:
        print_json(found)
        return
    out = console()
    sources = [_sources(found)] if found.sources else []
    for part in (_figures(found), *sources, _legend(found), _sequence(found)):
        out.print(part)


def _by_columns(data: Data, plan: Path | None, overrides: list[str]) -> Data:
    """Rows of samples are read as such where nobody says what they are."""
    told = plan is not None or any(word.startswith("data.form=") for word in overrides)
    return data if told or data.mixture or data.path == STDLIB else replace(data, form=form_of(data))


def encode(data: Data, console: Console) -> Corpus:
    """The corpus, with a progress bar on a terminal while text is encoded."""
    of_rows = data.form == SAMPLES
    sizes = (MofNCompleteColumn(),) if of_rows else (DownloadColumn(binary_units=True), TransferSpeedColumn())
    columns = (TextColumn("encoding rows" if of_rows else "encoding"), BarColumn(), *sizes, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("encoding", total=None, visible=False)

        def advance(done: int, whole: int) -> None:
            bar.update(task, completed=done, total=whole, visible=True)

        return prepare(data, progress=advance)


def _figures(found: DataView) -> Table:
    table = Table(title=Text(found.source), title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("")
    names = ("documents", "text", "tokens", f"windows of {found.sequence}", "share")
    for title in names if found.samples is None else (found.samples.things, "answers", "trained", names[3], "share"):
        table.add_column(title, justify="right")
    whole = found.train.bytes + found.validation.bytes
    for name, side in (("trained on", found.train), ("held out", found.validation)):
        number = side.documents if found.samples is None else found.samples.counted(side.documents)
        table.add_row(name, f"{number:,}", *_row(side), f"{side.bytes / whole:.2%}")
    return table


def _sources(found: DataView) -> Table:
    """Each source of a mixture, and how often the run reads it."""
    table = Table(box=None, pad_edge=False)
    table.add_column("source")
    for title in (
        "share",
        "tokens",
        "bytes per token",
        "windows",
        "read",
        *(("cut", "left out") * bool(found.samples)),
    ):
        table.add_column(title, justify="right")
    for one in found.sources:
        figures = (f"{one.share:.1%}", count(one.tokens), f"{one.bytes_per_token:.2f}", f"{one.rows:,}")
        fitted = (f"{one.overlong:,}", f"{one.left_out:,}") if found.samples else ()
        table.add_row(one.path, *figures, f"{one.times:.2g} times", *fitted)
    return table


def _row(side: StreamFigures) -> tuple[str, ...]:
    return text_size(side.bytes), count(side.tokens), f"{side.windows:,}"


def _legend(found: DataView) -> Text:
    tokenizer = f"tokenizer {found.tokenizer}: {found.vocab:,} ids, {found.bytes_per_token:.2f} bytes per token"
    lines = ["", f"{tokenizer}; {_marks(found)}", f"files {found.files:,}; fingerprint {found.fingerprint[:16]}"]
    if found.passed_over:
        names = ", ".join(Path(path).name for path in found.passed_over[:_NAMES_SHOWN])
        more = ", ..." if len(found.passed_over) > _NAMES_SHOWN else ""
        lines.append(f"passed over as binary: {len(found.passed_over)} ({names}{more})")
    if found.unread:
        lines.append(f"columns that are not read: {named_columns(found.unread)}")
    if found.malformed.malformed:
        lines.append(found.malformed.note)
    if found.samples is not None:
        lines += _sample_lines(found, found.samples)
        return Text("\n".join([*lines, ""]))
    ignored = sum(token.target is None for token in found.tokens)
    counts = f"{ignored} tokens whose target is ignored are struck through" if ignored else "every target counts"
    lines.append(f"sample {found.sample}, one colour per document, a shade per token; {counts}:")
    return Text("\n".join([*lines, ""]))


def _sample_lines(found: DataView, samples: SampleFigures) -> list[str]:
    """How long they are, what becomes of long ones, and what the colours mean."""
    low, quarter, half, most, long, high = (f"{length:,}" for length in samples.lengths)
    cut = f"{samples.cut_tokens:,} tokens cut off"
    same = f"; {samples.same:,} pairs have two answers that are the same" if samples.same else ""
    green = "what is trained is green" if not samples.pairs else "better answers are green, worse ones red"
    return [
        f"{samples.trained_share:.1%} of the tokens of samples are trained; rows are {1 - samples.waste:.1%} full",
        f"tokens of a sample: {low} to {high}, half of them {half} or fewer ({quarter} to {most}; nine tenths {long})",
        f"{samples.things} longer than {found.sequence}: {samples.overlong:,} (data.overlong={samples.policy}); "
        f"left out: {samples.left_out:,}; {cut}{same}",
        f"row {found.sample}: {green}, what is masked grey, padding shown as dots:",
    ]


def _marks(found: DataView) -> str:
    if found.bos is None and found.eos is None:
        return "nothing marks the borders of documents"
    if found.samples is not None:
        return f"texts without a template end with {found.eos}"
    if found.bos == found.eos:
        return f"{found.bos} begins each document and ends the one before"
    return f"documents are {found.bos} ... {found.eos}" if found.bos else f"documents end with {found.eos}"


def _sequence(found: DataView) -> Text:
    text = Text()
    pairs = found.samples is not None and found.samples.pairs
    for number, (_, tokens) in enumerate(groupby(enumerate(found.tokens), lambda one: one[1].document)):
        own = list(tokens)
        if number or pairs:
            named = heading([token for _, token in own], pairs)
            text.append("\n" * bool(number) + f"--- {named} ---\n", style="bold reverse")
        for place, token in own:
            text.append("." if token.mark == "padding" else token.text, style=_style(token, place, pairs))
    return text


def _style(token: Token, place: int, pairs: bool = False) -> str:
    """Bright and dim in turn, so that the borders of tokens show; of samples, whether a token is trained, and of pairs
    in which answer."""
    if token.mark:
        trained = "bold red" if pairs and token.document % 2 else "bold green"
        return {"trained": trained, "masked": "bright_black", "padding": "dim"}[token.mark]
    shade = " dim" if place % 2 else ""
    return _COLOURS[token.document % len(_COLOURS)] + shade + (" strike" if token.target is None else "")

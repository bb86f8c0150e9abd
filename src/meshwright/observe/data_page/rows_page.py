"""The page of `data show`: figures, lengths, and rows of the run in which every token says what becomes of it.

Its style and script lie beside it and become one file with the rows, so that it opens from disk, offline. Nothing in it
is loaded from anywhere, and the rows can be read without the script.
"""

import json
from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files
from itertools import groupby

from meshwright.data.show import DataView, LengthBin, ShownRow, StreamFigures, Token, heading
from meshwright.planner.explorer.explorer_page import source
from meshwright.spec.units import count, text_size

TOKENS = 32_768
"""Of all rows of the page."""
ROWS = 8
"""Of the page, where they are short enough."""
COLOURS = 4
"""Of documents of a text, which take turns."""
PAD = "\u00b7"
HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
"""


def rows_of(sequence: int) -> int:
    """How many rows of this length the page holds."""
    return max(1, min(ROWS, TOKENS // sequence))


def page(found: DataView) -> str:
    """The HTML page."""
    rows, pairs = [ShownRow(number=found.sample, packed=found.packed, tokens=found.tokens), *found.more], _pairs(found)
    shown = "".join(_row(row, pairs) for row in rows)
    title = f"Data: {found.source}"
    body = [
        f"<header><h1>{escape(title)}</h1><p>{escape(_headline(found))}</p></header><main>",
        _section("Figures", _tiles(found) + _sides(found)),
        _section(
            f"Lengths of {'answers with their prompts' if pairs else _things(found)}, in tokens",
            "".join(_lengths(found)) + "".join(_fate(found)),
        ),
        *([_section("Who says it", "".join(_roles(found)))] if found.samples else ()),
        _section(
            f"Rows of {found.sequence:,} tokens",
            "".join(_legend(found)) + shown + _HELP,
        ),
        "</main>",
        *([f"<p class='small'>{escape(found.malformed.note)}</p>"] if found.malformed.malformed else ()),
        f"<footer class='small'>tokenizer {escape(found.tokenizer)}, {found.vocab:,} ids; fingerprint "
        f"{escape(found.fingerprint[:16])}</footer>",
    ]
    details = json.dumps([_details(row, pairs) for row in rows], separators=(",", ":")).replace("<", "\\u003c")
    style = source("colours.css") + report_style() + _own("rows_page.css")
    script = f"const ROWS = {details};\n{_own('rows_page.js')}"
    return (
        f"{HEAD}<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>{''.join(body)}"
        f"<script>{script}</script></body></html>\n"
    )


_HELP = (
    "<div class='help' id='said' aria-live='polite'>Point at or tap a token, or tab to a row and use the arrow keys: "
    "what becomes of the token appears here.</div>"
)


def _own(name: str) -> str:
    return (files("meshwright.observe.data_page") / name).read_text(encoding="utf-8")


def report_style() -> str:
    """Of all pages about runs."""
    return (files("meshwright.observe.report") / "page" / "page.css").read_text(encoding="utf-8")


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"


def _things(found: DataView) -> str:
    return found.samples.things if found.samples else "documents"


def _counted(found: DataView, side: StreamFigures) -> str:
    """Documents, samples or pairs."""
    return f"{found.samples.counted(side.documents) if found.samples else side.documents:,}"


def _headline(found: DataView) -> str:
    if found.samples is None:
        return f"{found.train.tokens:,} tokens of {found.train.documents:,} documents are trained"
    share = f"{found.samples.trained_share:.1%} of the tokens of {_counted(found, found.train)} {_things(found)}"
    return f"{share} are trained; rows are {1 - found.samples.waste:.1%} full"


def _tiles(found: DataView) -> str:
    samples = found.samples
    tiles = [(_counted(found, found.train), _things(found))]
    if samples is None:
        tiles += [(count(found.train.tokens), "tokens"), (f"{found.bytes_per_token:.2f}", "bytes per token")]
    else:
        tiles += [
            (f"{samples.trained_share:.1%}", "of their tokens are trained"),
            (f"{1 - samples.trained_share:.1%}", "are masked"),
            (f"{1 - samples.waste:.1%}", "of the places of rows are filled"),
        ]
        tiles += [(f"{samples.same:,}", "pairs with two answers that are the same")] if samples.same else []
    tiles.append((f"{found.train.windows:,}", f"rows of {found.sequence:,} tokens"))
    inner = "".join(f"<div class='tile'><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in tiles)
    return f"<div id='tiles'>{inner}</div>"


def _sides(found: DataView) -> str:
    """The split, as the terminal shows it."""
    names = ("documents", "text", "tokens") if found.samples is None else (_things(found), "answers", "trained tokens")
    whole = max(1, found.train.bytes + found.validation.bytes)
    rows = ""
    for name, side in (("trained on", found.train), ("held out", found.validation)):
        cells = "".join(f"<td>{cell}</td>" for cell in (_counted(found, side), *_side(side, whole)))
        rows += f"<tr><th>{name}</th>{cells}</tr>"
    head = "".join(f"<th>{name}</th>" for name in ("", *names, "rows", "share"))
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


def _side(side: StreamFigures, whole: int) -> tuple[str, ...]:
    return (
        text_size(side.bytes), f"{side.tokens:,}", f"{side.windows:,}", f"{side.bytes / whole:.2%}",
    )  # fmt: skip


def _lengths(found: DataView) -> Iterator[str]:
    """A bar for each power of two; what is longer than a row is in another colour."""
    most = max((one.count for one in found.lengths), default=1)
    yield "<table class='bars'><tbody>"
    for one in found.lengths:
        name = f"{one.begin:,}" if one.begin == one.end else f"{one.begin:,} to {one.end:,}"
        kind = _fits(one, found)
        bar = f"<i class='{kind}' style='width:{max(0.4, 100 * one.count / most) if one.count else 0:.1f}%'></i>"
        yield f"<tr><th>{name}</th><td>{bar}</td><td>{one.count:,}</td></tr>"
    yield "</tbody></table>"


def _fits(one: LengthBin, found: DataView) -> str:
    """Whether samples of these lengths have room in a row."""
    if found.samples is None or one.end <= found.sequence:
        return "within"
    return "over" if one.begin > found.sequence else "some"


def _fate(found: DataView) -> Iterator[str]:
    """What becomes of samples of these lengths."""
    samples = found.samples
    if samples is None:
        return
    kinds = (("within", "fit in a row"), ("some", "some are longer"), ("over", "are longer"))
    chips = "".join(f"<span><i class='chip {kind}'></i>{said}</span>" for kind, said in kinds)
    yield f"<div class='legend'>{chips}</div>"
    low, quarter, half, most, long, high = (f"{length:,}" for length in samples.lengths)
    yield f"<p class='small'>{low} to {high} tokens; half of them {half} or fewer ({quarter} to {most}; nine tenths "
    yield f"{long}). Longer than a row: {samples.overlong:,}, with {samples.cut_tokens:,} tokens cut off. Left out: "
    yield f"{samples.left_out:,}.</p>"


def _roles(found: DataView) -> Iterator[str]:
    assert found.samples is not None, "of samples alone"
    whole = max(1, sum(one.trained + one.masked for one in found.samples.roles))
    yield "<table class='bars'><thead><tr><th></th><th></th><th>trained</th><th>masked</th></tr></thead><tbody>"
    for one in found.samples.roles:
        parts = (("trained", one.trained), ("masked", one.masked))
        bars = "".join(f"<i class='{kind}' style='width:{100 * size / whole:.2f}%'></i>" for kind, size in parts)
        yield f"<tr><th>{escape(one.role)}</th><td>{bars}</td><td>{one.trained:,}</td><td>{one.masked:,}</td></tr>"
    yield "</tbody></table><p class='small'>other: what the template writes between, and texts that nobody says</p>"


def _legend(found: DataView) -> Iterator[str]:
    if found.samples is None:
        kinds = [(f"d{number}", "a document" if not number else "another one") for number in range(2)]
        kinds += [("ignored", "its next token is not predicted"), ("pad", "padding")]
    else:
        kinds = [("masked", "read, not trained"), ("pad", "padding")]
        better = "the better answer" if _pairs(found) else "trained"
        kinds = [("trained", better), *([("rejected", "the worse answer")] if _pairs(found) else []), *kinds]
    yield "<div class='legend'>"
    for kind, said in kinds:
        yield f"<span><i class='k {kind}'>{PAD if kind == 'pad' else 'abc'}</i> {said}</span>"
    yield "<span><b class='border'></b> border of documents, which do not see one another</span></div>"


def _pairs(found: DataView) -> bool:
    return found.samples is not None and found.samples.pairs


def _row(row: ShownRow, pairs: bool) -> str:
    """One row, its documents apart; it is read without the script too."""
    parts = []
    for _, tokens in groupby(enumerate(row.tokens), lambda pair: pair[1].document):
        own = list(tokens)
        parts.append(
            f"<div class='doc'><small>{_about([one for _, one in own], pairs)}</small>{_spans(own, pairs)}</div>"
        )
    label = f"Row {row.number}: arrow keys move from token to token"
    return (
        f"<h3>Row {row.number:,}</h3><div class='row' tabindex='0' role='group' aria-label='{label}' "
        f"aria-describedby='said'>{''.join(parts)}</div>"
    )


def _about(tokens: list[Token], pairs: bool) -> str:
    named = heading(tokens, pairs)
    if named == "padding":
        return f"padding, {len(tokens):,} places"
    trained = sum(one.mark == "trained" for one in tokens)
    kept = f", {trained:,} trained" if any(one.mark for one in tokens) else ""
    return f"{named}, {len(tokens):,} tokens{kept}"


def _spans(tokens: Iterable[tuple[int, Token]], pairs: bool) -> str:
    return "".join(f"<i class='k {_kind(one, pairs)}' data-p='{place}'>{_visible(one)}</i>" for place, one in tokens)


def _kind(token: Token, pairs: bool) -> str:
    if token.mark == "trained" and pairs and token.document % 2:
        return "rejected"
    if token.mark:
        return "pad" if token.mark == "padding" else token.mark
    return f"d{token.document % COLOURS}" + (" ignored" if token.target is None else "")


def _visible(token: Token) -> str:
    """The token as text: a line end is marked, control characters are pictures of themselves."""
    if token.mark == "padding":
        return PAD
    pictures = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    return escape(token.text.translate(pictures)).replace("\n", "<u>\u21b5</u>\n") or "<u>\u2205</u>"


def _details(row: ShownRow, pairs: bool) -> dict[str, object]:
    """What the script says of each token, column by column."""
    tokens = row.tokens
    roles = list(dict.fromkeys(one.role for one in tokens))
    own = {document: list(some) for document, some in groupby(tokens, lambda one: one.document)}
    return {
        "names": {document: heading(some, pairs) for document, some in own.items()},
        "row": row.number,
        "id": [one.id for one in tokens],
        "text": [one.text for one in tokens],
        "document": [one.document for one in tokens],
        "position": [one.position for one in tokens],
        "target": [-1 if one.target is None else one.target for one in tokens],
        "mark": [one.mark for one in tokens],
        "roles": roles,
        "role": [roles.index(one.role) for one in tokens],
    }

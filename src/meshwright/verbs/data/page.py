"""The page of `data show`: figures, lengths, and rows of the run in which every token shows its role.

Style and script lie beside this module and become one file with the rows, which opens from disk, offline, and loads
nothing. The rows can be read without the script.
"""

import json
from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files
from itertools import groupby

from meshwright.data.report import DataView, LengthBin, ShownRow, StreamFigures, Token, heading
from meshwright.interface.answers.markup import HEAD, report_style, section
from meshwright.planner.explorer.explorer_page import source
from meshwright.spec.units import count, text_size

TOKENS = 32_768
"""Most tokens in all rows of the page."""
ROWS = 8
"""Most rows of the page."""
COLOURS = 4
"""Colours that the documents of a text take in turn."""
PAD = "\u00b7"


def rows_of(sequence: int) -> int:
    """Return how many rows of this length the page holds."""
    return max(1, min(ROWS, TOKENS // sequence))


def page(view: DataView) -> str:
    """Return the HTML page."""
    rows, pairs = [ShownRow(number=view.sample, packed=view.packed, tokens=view.tokens), *view.more], _pairs(view)
    shown = "".join(_row(row, pairs) for row in rows)
    title = f"Data: {view.source}"
    body = [
        f"<header><h1>{escape(title)}</h1><p>{escape(_headline(view))}</p></header><main>",
        section("Figures", _tiles(view) + _split_table(view)),
        section(
            f"Lengths of {'answers with their prompts' if pairs else _unit_name(view)}, in tokens",
            "".join(_lengths(view)) + "".join(_length_legend(view)),
        ),
        *([section("Who says it", "".join(_roles(view)))] if view.samples else ()),
        section(f"Rows of {view.sequence:,} tokens", "".join(_legend(view)) + shown + _HELP),
        "</main>",
        *([f"<p class='small'>{escape(view.malformed.note)}</p>"] if view.malformed.malformed else ()),
        f"<footer class='small'>tokenizer {escape(view.tokenizer)}, {view.vocab:,} ids; fingerprint "
        f"{escape(view.fingerprint[:16])}</footer>",
    ]
    details = json.dumps([_details(row, pairs) for row in rows], separators=(",", ":")).replace("<", "\\u003c")
    style = source("colours.css") + report_style() + _read_part("page.css")
    script = f"const ROWS = {details};\n{_read_part('page.js')}"
    return (
        f"{HEAD}<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>{''.join(body)}"
        f"<script>{script}</script></body></html>\n"
    )


_HELP = (
    "<div class='help' id='said' aria-live='polite'>Point at or tap a token, or tab to a row and use the arrow keys: "
    "what becomes of the token appears here.</div>"
)


def _read_part(name: str) -> str:
    return (files("meshwright.verbs.data") / name).read_text(encoding="utf-8")


def _unit_name(view: DataView) -> str:
    return view.samples.things if view.samples else "documents"


def _count_units(view: DataView, side: StreamFigures) -> str:
    """Count documents, samples or pairs."""
    return f"{view.samples.counted(side.documents) if view.samples else side.documents:,}"


def _headline(view: DataView) -> str:
    if view.samples is None:
        return f"{view.train.tokens:,} tokens of {view.train.documents:,} documents are trained"
    share = f"{view.samples.trained_share:.1%} of the tokens of {_count_units(view, view.train)} {_unit_name(view)}"
    return f"{share} are trained; rows are {1 - view.samples.waste:.1%} full"


def _tiles(view: DataView) -> str:
    samples = view.samples
    tiles = [(_count_units(view, view.train), _unit_name(view))]
    if samples is None:
        tiles += [(count(view.train.tokens), "tokens"), (f"{view.bytes_per_token:.2f}", "bytes per token")]
    else:
        tiles += [
            (f"{samples.trained_share:.1%}", "of their tokens are trained"),
            (f"{1 - samples.trained_share:.1%}", "are masked"),
            (f"{1 - samples.waste:.1%}", "of the places of rows are filled"),
        ]
        tiles += [(f"{samples.same:,}", "pairs with two answers that are the same")] if samples.same else []
    tiles.append((f"{view.train.windows:,}", f"rows of {view.sequence:,} tokens"))
    inner = "".join(f"<div class='tile'><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in tiles)
    return f"<div id='tiles'>{inner}</div>"


def _split_table(view: DataView) -> str:
    names = ("documents", "text", "tokens") if view.samples is None else (_unit_name(view), "answers", "trained tokens")
    whole = max(1, view.train.bytes + view.validation.bytes)
    rows = ""
    for name, side in (("trained on", view.train), ("held out", view.validation)):
        cells = "".join(f"<td>{cell}</td>" for cell in (_count_units(view, side), *_split_cells(side, whole)))
        rows += f"<tr><th>{name}</th>{cells}</tr>"
    head = "".join(f"<th>{name}</th>" for name in ("", *names, "rows", "share"))
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


def _split_cells(side: StreamFigures, whole: int) -> tuple[str, ...]:
    return (
        text_size(side.bytes), f"{side.tokens:,}", f"{side.windows:,}", f"{side.bytes / whole:.2%}",
    )  # fmt: skip


def _lengths(view: DataView) -> Iterator[str]:
    """Yield a bar for each power of two. Samples longer than a row have another colour."""
    most = max((length_bin.count for length_bin in view.lengths), default=1)
    yield "<table class='bars'><tbody>"
    for length_bin in view.lengths:
        name = (
            f"{length_bin.begin:,}"
            if length_bin.begin == length_bin.end
            else f"{length_bin.begin:,} to {length_bin.end:,}"
        )
        kind = _fits(length_bin, view)
        width = max(0.4, 100 * length_bin.count / most) if length_bin.count else 0
        bar = f"<i class='{kind}' style='width:{width:.1f}%'></i>"
        yield f"<tr><th>{name}</th><td>{bar}</td><td>{length_bin.count:,}</td></tr>"
    yield "</tbody></table>"


def _fits(length_bin: LengthBin, view: DataView) -> str:
    """Return whether samples of these lengths fit into a row."""
    if view.samples is None or length_bin.end <= view.sequence:
        return "within"
    return "over" if length_bin.begin > view.sequence else "some"


def _length_legend(view: DataView) -> Iterator[str]:
    samples = view.samples
    if samples is None:
        return
    kinds = (("within", "fit in a row"), ("some", "some are longer"), ("over", "are longer"))
    chips = "".join(f"<span><i class='chip {kind}'></i>{label}</span>" for kind, label in kinds)
    yield f"<div class='legend'>{chips}</div>"
    low, quarter, half, most, long, high = (f"{length:,}" for length in samples.lengths)
    yield f"<p class='small'>{low} to {high} tokens; half of them {half} or fewer ({quarter} to {most}; nine tenths "
    yield f"{long}). Longer than a row: {samples.overlong:,}, with {samples.cut_tokens:,} tokens cut off. Left out: "
    yield f"{samples.left_out:,}.</p>"


def _roles(view: DataView) -> Iterator[str]:
    assert view.samples is not None, "of samples alone"
    whole = max(1, sum(role.trained + role.masked for role in view.samples.roles))
    yield "<table class='bars'><thead><tr><th></th><th></th><th>trained</th><th>masked</th></tr></thead><tbody>"
    for role in view.samples.roles:
        parts = (("trained", role.trained), ("masked", role.masked))
        bars = "".join(f"<i class='{kind}' style='width:{100 * size / whole:.2f}%'></i>" for kind, size in parts)
        yield f"<tr><th>{escape(role.role)}</th><td>{bars}</td><td>{role.trained:,}</td><td>{role.masked:,}</td></tr>"
    yield "</tbody></table><p class='small'>other: what the template writes between, and texts that nobody says</p>"


def _legend(view: DataView) -> Iterator[str]:
    if view.samples is None:
        kinds = [(f"d{number}", "a document" if not number else "another one") for number in range(2)]
        kinds += [("ignored", "its next token is not predicted"), ("pad", "padding")]
    else:
        kinds = [("masked", "read, not trained"), ("pad", "padding")]
        better = "the better answer" if _pairs(view) else "trained"
        kinds = [("trained", better), *([("rejected", "the worse answer")] if _pairs(view) else []), *kinds]
    yield "<div class='legend'>"
    for kind, label in kinds:
        yield f"<span><i class='k {kind}'>{PAD if kind == 'pad' else 'abc'}</i> {label}</span>"
    yield "<span><b class='border'></b> border of documents, which do not see one another</span></div>"


def _pairs(view: DataView) -> bool:
    return view.samples is not None and view.samples.pairs


def _row(row: ShownRow, pairs: bool) -> str:
    """Return one row with its documents apart, readable without the script."""
    parts = []
    for _, tokens in groupby(enumerate(row.tokens), lambda pair: pair[1].document):
        document_tokens = list(tokens)
        about = _about([token for _, token in document_tokens], pairs)
        parts.append(f"<div class='doc'><small>{about}</small>{_spans(document_tokens, pairs)}</div>")
    label = f"Row {row.number}: arrow keys move from token to token"
    return (
        f"<h3>Row {row.number:,}</h3><div class='row' tabindex='0' role='group' aria-label='{label}' "
        f"aria-describedby='said'>{''.join(parts)}</div>"
    )


def _about(tokens: list[Token], pairs: bool) -> str:
    named = heading(tokens, pairs)
    if named == "padding":
        return f"padding, {len(tokens):,} places"
    trained = sum(token.mark == "trained" for token in tokens)
    trained_text = f", {trained:,} trained" if any(token.mark for token in tokens) else ""
    return f"{named}, {len(tokens):,} tokens{trained_text}"


def _spans(tokens: Iterable[tuple[int, Token]], pairs: bool) -> str:
    return "".join(
        f"<i class='k {_kind(token, pairs)}' data-p='{position}'>{_visible(token)}</i>" for position, token in tokens
    )


def _kind(token: Token, pairs: bool) -> str:
    if token.mark == "trained" and pairs and token.document % 2:
        return "rejected"
    if token.mark:
        return "pad" if token.mark == "padding" else token.mark
    return f"d{token.document % COLOURS}" + (" ignored" if token.target is None else "")


def _visible(token: Token) -> str:
    """Return the token as text: line ends are marked, and control characters replaced by their pictures."""
    if token.mark == "padding":
        return PAD
    pictures = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    return escape(token.text.translate(pictures)).replace("\n", "<u>\u21b5</u>\n") or "<u>\u2205</u>"


def _details(row: ShownRow, pairs: bool) -> dict[str, object]:
    tokens = row.tokens
    roles = list(dict.fromkeys(token.role for token in tokens))
    documents = {document: list(group) for document, group in groupby(tokens, lambda token: token.document)}
    return {
        "names": {document: heading(group, pairs) for document, group in documents.items()},
        "row": row.number,
        "id": [token.id for token in tokens],
        "text": [token.text for token in tokens],
        "document": [token.document for token in tokens],
        "position": [token.position for token in tokens],
        "target": [-1 if token.target is None else token.target for token in tokens],
        "mark": [token.mark for token in tokens],
        "roles": roles,
        "role": [roles.index(token.role) for token in tokens],
    }

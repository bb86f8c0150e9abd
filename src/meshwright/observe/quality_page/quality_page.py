"""The page of `quantize --html`: size, how far predictions moved, and which matrices are to blame.

Its pictures are SVG in the page and need no script; its style lies beside it. It opens from disk, offline, and loads
nothing from anywhere.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from meshwright.observe.data_page.rows_page import HEAD, report_style
from meshwright.planner.explorer.explorer_page import source
from meshwright.spec.units import gib, many

BLAMED = 12
"""Matrices of the picture of the worst."""
WIDE, LEFT, RIGHT = 560, 150, 110
"""Units of a picture: its width, and what words beside it have."""
LOW, DECADES = -8.0, 10
"""Of the picture of tokens: the least KL as a power of ten, and how many are shown at most."""

OUTPUT, WEIGHT = "output error", "weight error"
"""What is known of a matrix."""

Row = Mapping[str, Any]


def page(document: Mapping[str, Any]) -> str:
    """The page of the document that `quantize --json` prints."""
    layers: Sequence[Row] = document["layers"]
    title = f"Quantized: {Path(document['out']).name}"
    body = [
        f"<header><h1>{escape(title)}</h1><p>{escape(_headline(document))}</p></header><main>",
        f"<div id='tiles'>{''.join(_tiles(document))}</div>",
        _section("Size of the weights", _sizes(document)),
        *([_section("How far predictions moved", _divergence(document))] if document["kl_quantiles"] else ()),
        _section("Where the error is", _error_map(layers)),
        _section("What moved most", _blamed(layers)),
        _section(f"All {many(len(layers), 'matrix', 'matrices')}", _table(layers)),
        _section("How it was made", _made(document)),
        "</main>",
    ]
    style = source("colours.css") + report_style() + _own("quality_page.css")
    head = f"{HEAD}<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n"
    return f"{head}<body>{''.join(body)}</body></html>\n"


def _own(name: str) -> str:
    return (files("meshwright.observe.quality_page") / name).read_text(encoding="utf-8")


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"


def _number(value: float | None, digits: int = 3) -> str:
    return "not finite" if value is None else f"{value:.{digits}g}"


def _share(value: float | None, digits: int = 1) -> str:
    return "unknown" if value is None else f"{100 * value:.{digits}f}%"


def _headline(document: Row) -> str:
    if document["tokens"] is None:
        return f"{document['scheme']}; quality was not measured"
    moved = "no finite number of" if document["kl"] is None else _number(document["kl"])
    word = "within" if document["passed"] else "beyond"
    return (
        f"{document['scheme']}: predictions moved by {moved} nats per token, {word} {_limit(document, 'the limit of')}"
    )


def _limit(document: Row, words: str = "limit") -> str:
    """An infinite one is null in the document."""
    return "no limit" if document["max_kl"] is None else f"{words} {document['max_kl']:g}"


def _tiles(document: Row) -> Iterator[str]:
    ratio = document["bytes_before"] / document["bytes"]
    yield _tile(f"{ratio:.2f}x", "smaller", f"{gib(document['bytes_before'])} to {gib(document['bytes'])}")
    if document["tokens"] is not None:
        error = f"\u00b1 {_number(document['kl_error'], 2)}; 99% of tokens below {_number(document['kl_p99'])}"
        kind = "good" if document["passed"] else "alarm"
        yield _tile(_number(document["kl"]), f"KL, nats per token; {_limit(document)}", error, kind)
        yield _tile(_share(document["top1"]), "of tokens have the same likeliest one", "top-1 agreement")
        before, after = (_number(document[f"perplexity_{when}"], 4) for when in ("before", "after"))
        yield _tile(after, "perplexity after", f"{before} before")
    if document["outlier_share"] or document["scheme"] == "llm-int8":
        yield _tile(_share(document["outlier_share"], 2), "of inputs stay in 16 bit", "outliers")


def _tile(figure: str, words: str, small: str, kind: str = "") -> str:
    colour = f" class='{kind}'" if kind else ""
    below = f"<span>{escape(words)}</span><small>{escape(small)}</small>"
    return f"<div class='tile'><b{colour}>{escape(figure)}</b>{below}</div>"


def _picture(height: int, parts: Iterable[str], words: str) -> str:
    label = escape(words, quote=True)
    svg = f"<svg viewBox='0 0 {WIDE} {height}' role='img' aria-label='{label}'>{''.join(parts)}</svg>"
    return f"<div class='scroll'>{svg}</div>"


def _words(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    colour = f" class='{kind}'" if kind else ""
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'{colour}>{escape(text)}</text>"


def _bar(y: float, length: float, kind: str, said: str, *, x: float = LEFT) -> str:
    place = f"x='{x:.1f}' y='{y:.1f}' width='{max(length, 1):.1f}' height='16'"
    return f"<rect class='{kind}' {place}><title>{escape(said)}</title></rect>"


def _sizes(document: Row) -> str:
    """Bytes before, after and as predicted, to one scale."""
    codes = sum(one["bytes"] for one in document["layers"])
    rows = (
        ("before", document["bytes_before"], 0),
        ("predicted", document["predicted_bytes"], 0),
        ("after", document["bytes"], codes),
    )
    scale = (WIDE - LEFT - RIGHT) / max(size for _, size, _ in rows)
    parts = []
    for place, (name, size, quantized) in enumerate(rows):
        y = 6 + 26 * place
        parts += [_words(LEFT - 10, y + 12, name, "end", "name"), _bar(y, size * scale, name, f"{size:,} bytes")]
        if quantized:
            said = f"{quantized:,} bytes of quantized matrices: codes and scales"
            parts.append(_bar(y, quantized * scale, "codes", said))
        parts.append(_words(LEFT + size * scale + 8, y + 12, gib(size)))
    same = "the file is as large as predicted, to the byte"
    if document["bytes"] != document["predicted_bytes"]:
        same = f"predicted {document['predicted_bytes']:,} bytes, written {document['bytes']:,}"
    legend = (
        "<div class='legend'><span><i class='chip codes'></i>quantized matrices</span>"
        f"<span><i class='chip after'></i>what is left as it was</span><span>{same}</span></div>"
    )
    return _picture(84, parts, "bytes before, predicted and after") + legend


def _powers(values: Iterable[float | None]) -> tuple[int, int]:
    """Powers of ten below and above them, one apart at least."""
    known = [log10(one) for one in values if one and one > 10**LOW] or [0.0]
    top = ceil(max(known))
    return min(top - 1, max(floor(min(known)), top - DECADES)), top


def _divergence(document: Row) -> str:
    """KL of the tokens in order, on a logarithmic scale, with mean and limit. What is not finite is at its top."""
    shares, nats = zip(*document["kl_quantiles"], strict=True)
    if all(one is not None and one <= 10**LOW for one in nats):
        return "<p>No token's predictions moved by 1e-8 nats.</p>"
    marks = {"limit": document["max_kl"], "mean": document["kl"]}
    low, top = _powers((*nats, *marks.values()))
    height, left, right = 250, 60, WIDE - RIGHT

    def x(share: float) -> float:
        return left + share * (right - left)

    def y(value: float | None) -> float:
        power = top if value is None else low if value <= 10**low else log10(value)
        return 10 + (top - power) / (top - low) * (height - 50)

    parts = []
    for power in range(low, top + 1):
        parts.append(f"<line class='grid' x1='{left}' x2='{right}' y1='{y(10**power):.1f}' y2='{y(10**power):.1f}'/>")
        parts.append(_words(left - 8, y(10**power) + 4, f"{10.0**power:g}", "end"))
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(_words(x(share), height - 22, f"{share:.0%}", "middle"))
    parts.append(_words(x(0.5), height - 5, "share of tokens that moved by at most so many nats", "middle"))
    line = " ".join(f"{x(share):.1f},{y(value):.1f}" for share, value in zip(shares, nats, strict=True))
    parts.append(f"<polyline class='line tokens' points='{line}'/>")
    for share, value in zip(shares, nats, strict=True):
        most = "not finite" if value is None else f"moved by at most {_number(value)} nats"
        place = f"cx='{x(share):.1f}' cy='{y(value):.1f}' r='3'"
        parts.append(f"<circle class='tokens' {place}><title>{share:.1%} of tokens: {most}</title></circle>")
    shown = sorted((value, name) for name, value in marks.items() if value and value >= 10**low)
    for (value, name), down in zip(shown, (10, -1), strict=False):  # the words of one below the other's
        parts.append(f"<line class='{name}' x1='{left}' x2='{right}' y1='{y(value):.1f}' y2='{y(value):.1f}'/>")
        kind = "limit-words" if name == "limit" else "name"
        parts.append(_words(right + 6, y(value) + down, f"{name} {value:.3g}", kind=kind))
    said = "KL(before || after) of each token's predictions: 0 = they are the same. The limit is one of the mean."
    return _picture(height, parts, "KL of the tokens in order") + f"<p class='small'>{said}</p>"


def _kinds(layers: Sequence[Row]) -> tuple[list[str], list[int], dict[tuple[str, int], Row]]:
    """Kinds of matrices, numbers of blocks, and the matrix of each; of names such as layers.3.mlp.up.weight."""
    found: dict[tuple[str, int], Row] = {}
    for one in layers:
        match = re.fullmatch(r"layers\.(\d+)\.(.+?)(\.weight)?", one["name"])
        found[(match[2], int(match[1])) if match else (one["name"], 0)] = one
    kinds = list(dict.fromkeys(kind for kind, _ in found))
    return kinds, sorted({block for _, block in found}), found


def _error(one: Row) -> tuple[float | None, str]:
    """Of its output; of its weights where outputs were not compared. With what it is."""
    if one["output_error"] is not None:
        return one["output_error"], OUTPUT
    return one["weight_error"], WEIGHT


def _scales(layers: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Of each error that some have, the powers of ten that are faint and strong; a factor of two apart at least."""
    powers: dict[str, list[float]] = {}
    for error, what in map(_error, layers):
        powers.setdefault(what, []).extend([log10(error)] if error else [])
    return {what: (min(*found, max(found) - log10(2)), max(found)) for what, found in powers.items() if found}


def _error_map(layers: Sequence[Row]) -> str:
    """Kinds of matrices over blocks: the stronger, the larger the error. Those of outputs and of weights have a
    scale and a colour each: they do not compare."""
    kinds, blocks, found = _kinds(layers)
    scales = _scales(layers)
    side = min(28.0, (WIDE - LEFT - 10) / len(blocks))
    tall = min(side, 22.0) if side > 8 else 14.0
    parts = []
    for row, kind in enumerate(kinds):
        parts.append(_words(LEFT - 8, 14 + tall * (row + 0.5), kind, "end", "name"))
        for column, block in enumerate(blocks):
            one = found.get((kind, block))
            if one is None:
                continue
            error, what = _error(one)
            low, high = scales.get(what, (0.0, 1.0))
            depth = (log10(error) - low) / (high - low) if error else 0.0
            said = f"{one['name']}: {what} {_number(error)}, {one['scheme']}"
            place = f"x='{LEFT + side * column:.1f}' y='{10 + tall * row:.1f}'"
            size = f"width='{max(side - 1, 1):.1f}' height='{tall - 1:.1f}'"
            parts.append(
                f"<rect class='cell {what.partition(' ')[0]}' {place} {size} "
                f"style='fill-opacity:{0.08 + 0.92 * depth:.2f}'><title>{escape(said)}</title></rect>"
            )
    under = 10 + tall * len(kinds) + 14
    step = max(1, ceil(24 / side))
    parts += [
        _words(LEFT + side * (column + 0.5), under, str(block), "middle")
        for column, block in enumerate(blocks)
        if column % step == 0
    ]
    legend = "".join(
        f"<span><i class='chip {what.partition(' ')[0]}'></i>{what}, from {10**low:.1e} (faint) to {10**high:.1e} "
        f"(strong){'' if what == OUTPUT else ', where outputs were not compared'}</span>"
        for what, (low, high) in scales.items()
    )
    picture = _picture(int(under + 8), parts, "error by kind of matrix and block")
    return f"{picture}<div class='legend'><span>block, from the left</span>{legend}</div>"


def _blamed(layers: Sequence[Row]) -> str:
    known = sorted((one for one in layers if one["output_error"]), key=lambda one: -one["output_error"])[:BLAMED]
    if not known:
        return "<p>Outputs were not compared, or none moved.</p>"
    left = LEFT + 50
    scale = (WIDE - left - RIGHT) / known[0]["output_error"]
    parts = []
    for place, one in enumerate(known):
        y, length = 4 + 24 * place, one["output_error"] * scale
        name = one["name"].removesuffix(".weight")
        parts += [
            _words(left - 10, y + 12, name, "end", "name"),
            _bar(y, length, "worst", f"{one['name']}: {one['output_error']:.3e}", x=left),
            _words(left + length + 8, y + 12, f"{one['output_error']:.1e}"),
        ]
    said = (
        "<p class='small'>Output error: |y - y'|\u00b2 / |y|\u00b2, with y what a matrix makes of its inputs before, "
        "and y' what the quantized one makes of the same inputs.</p>"
    )
    return _picture(24 * len(known) + 4, parts, "matrices whose outputs moved most") + said


def _table(layers: Sequence[Row]) -> str:
    heads = ("matrix", "scheme", "bytes", "weight error", "output error", "inputs in 16 bit")
    rows = "".join(
        f"<tr><th scope='row'>{escape(one['name'])}</th><td>{escape(one['scheme'])}</td><td>{one['bytes']:,}</td>"
        f"<td>{_number(one['weight_error'])}</td>"
        f"<td>{'' if one['output_error'] is None else format(one['output_error'], '.2e')}</td>"
        f"<td>{_share(one['outliers'], 2)}</td></tr>"
        for one in layers
    )
    head = "".join(f"<th scope='col'>{name}</th>" for name in heads)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<details><summary>Show them</summary><div class='scroll'>{table}</div></details>"


def _made(document: Row) -> str:
    found = [("format", document["format"]), ("scheme", document["scheme"])]
    if document["tokens"] is not None:
        found.append(("measured on", f"{document['tokens']:,} tokens of held-out text"))
    if document["calibration_tokens"]:
        found.append(("calibrated on", f"{document['calibration_tokens']:,} tokens of {document['calibration_text']}"))
    if document["budget_bytes"] is not None:
        each = ", ".join(
            f"{bits} bits for {many(number, 'matrix', 'matrices')}" for bits, number in document["bits"].items()
        )
        found.append(("budget", f"{document['budget_bytes']:,} bytes: {each}"))
    rare = [
        f"{many(one['uncalibrated'], 'expert')} of {one['name']}" for one in document["layers"] if one["uncalibrated"]
    ]
    if rare:
        found.append(("rounded to nearest", f"{', '.join(rare)}, which the text hardly reached"))
    if document["skipped"]:
        found.append(("left as they are", ", ".join(document["skipped"])))
    if document["note"]:
        found.append(("note", document["note"]))
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in found) + "</dl>"

"""The page of `quantize --html`: size, movement of predictions, and the matrices responsible.

Its pictures are SVG without scripts; its style lies beside this module. The page opens from disk, offline, and loads
nothing.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from meshwright.interface.answers.markup import HEAD, report_style, section
from meshwright.planner.explorer.explorer_page import source
from meshwright.spec.model.quantization_schemes import keeps_outliers
from meshwright.spec.units import gib, many

BLAMED = 12
WIDE, LEFT, RIGHT = 560, 150, 110
"""Width of a picture, and space for words on its left and right."""
LOW, DECADES = -8.0, 10
"""Least KL in the picture of tokens as a power of ten, and most decades shown."""

OUTPUT, WEIGHT = "output error", "weight error"
"""The two errors of a matrix."""

Row = Mapping[str, Any]


def page(document: Mapping[str, Any]) -> str:
    """Return the page of the document that `quantize --json` prints."""
    layers: Sequence[Row] = document["layers"]
    title = f"Quantized: {Path(document['out']).name}"
    body = [
        f"<header><h1>{escape(title)}</h1><p>{escape(_headline(document))}</p></header><main>",
        f"<div id='tiles'>{''.join(_tiles(document))}</div>",
        section("Size of the weights", _sizes(document)),
        *([section("How far predictions moved", _divergence(document))] if document["kl_quantiles"] else ()),
        section("Where the error is", _error_map(layers)),
        section("What moved most", _blamed(layers)),
        *([section("Numbers before and after", _histograms(document["histograms"]))] if document["histograms"] else ()),
        section(f"All {many(len(layers), 'matrix', 'matrices')}", _table(layers)),
        section("How it was made", _provenance(document)),
        "</main>",
    ]
    style = source("colours.css") + report_style() + _read_part("page.css")
    head = f"{HEAD}<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n"
    return f"{head}<body>{''.join(body)}</body></html>\n"


def _read_part(name: str) -> str:
    return (files("meshwright.verbs.quantize") / name).read_text(encoding="utf-8")


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
    """Format the limit. null in the document means infinite."""
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
    if document["outlier_share"] or keeps_outliers(document["scheme"]):
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


def _bar(y: float, length: float, kind: str, title: str, *, x: float = LEFT) -> str:
    position = f"x='{x:.1f}' y='{y:.1f}' width='{max(length, 1):.1f}' height='16'"
    return f"<rect class='{kind}' {position}><title>{escape(title)}</title></rect>"


def _sizes(document: Row) -> str:
    """Draw bytes before, predicted and after, to one scale."""
    codes = sum(layer["bytes"] for layer in document["layers"])
    rows = (
        ("before", document["bytes_before"], 0),
        ("predicted", document["predicted_bytes"], 0),
        ("after", document["bytes"], codes),
    )
    scale = (WIDE - LEFT - RIGHT) / max(size for _, size, _ in rows)
    parts = []
    for index, (name, size, quantized) in enumerate(rows):
        y = 6 + 26 * index
        parts += [_words(LEFT - 10, y + 12, name, "end", "name"), _bar(y, size * scale, name, f"{size:,} bytes")]
        if quantized:
            title = f"{quantized:,} bytes of quantized matrices: codes and scales"
            parts.append(_bar(y, quantized * scale, "codes", title))
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
    """Return powers of ten below and above the values, at least one apart."""
    logarithms = [log10(value) for value in values if value and value > 10**LOW] or [0.0]
    top = ceil(max(logarithms))
    return min(top - 1, max(floor(min(logarithms)), top - DECADES)), top


def _divergence(document: Row) -> str:
    """Draw the KL of the tokens on a logarithmic scale, with mean and limit; infinite values at the top."""
    shares, nats = zip(*document["kl_quantiles"], strict=True)
    if all(nat is not None and nat <= 10**LOW for nat in nats):
        return "<p>No token's predictions moved by 1e-8 nats.</p>"
    marks = {"limit": document["max_kl"], "mean": document["kl"]}
    low, top = _powers((*nats, *marks.values()))
    height, left, right = 250, 60, WIDE - RIGHT

    def x(share: float) -> float:
        return left + share * (right - left)

    def y(divergence: float | None) -> float:
        power = top if divergence is None else low if divergence <= 10**low else log10(divergence)
        return 10 + (top - power) / (top - low) * (height - 50)

    parts = []
    for power in range(low, top + 1):
        parts.append(f"<line class='grid' x1='{left}' x2='{right}' y1='{y(10**power):.1f}' y2='{y(10**power):.1f}'/>")
        parts.append(_words(left - 8, y(10**power) + 4, f"{10.0**power:g}", "end"))
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(_words(x(share), height - 22, f"{share:.0%}", "middle"))
    parts.append(_words(x(0.5), height - 5, "share of tokens that moved by at most so many nats", "middle"))
    line = " ".join(f"{x(share):.1f},{y(divergence):.1f}" for share, divergence in zip(shares, nats, strict=True))
    parts.append(f"<polyline class='line tokens' points='{line}'/>")
    for share, divergence in zip(shares, nats, strict=True):
        most = "not finite" if divergence is None else f"moved by at most {_number(divergence)} nats"
        position = f"cx='{x(share):.1f}' cy='{y(divergence):.1f}' r='3'"
        parts.append(f"<circle class='tokens' {position}><title>{share:.1%} of tokens: {most}</title></circle>")
    shown = sorted((divergence, name) for name, divergence in marks.items() if divergence and divergence >= 10**low)
    for (divergence, name), down in zip(shown, (10, -1), strict=False):  # the words of one below the other's
        parts.append(
            f"<line class='{name}' x1='{left}' x2='{right}' y1='{y(divergence):.1f}' y2='{y(divergence):.1f}'/>"
        )
        kind = "limit-words" if name == "limit" else "name"
        parts.append(_words(right + 6, y(divergence) + down, f"{name} {divergence:.3g}", kind=kind))
    legend = "KL(before || after) of each token's predictions: 0 = they are the same. The limit is one of the mean."
    return _picture(height, parts, "KL of the tokens in order") + f"<p class='small'>{legend}</p>"


def _kinds(layers: Sequence[Row]) -> tuple[list[str], list[int], dict[tuple[str, int], Row]]:
    """Return kinds of matrices, block numbers, and the matrix of each, by names such as layers.3.mlp.up.weight."""
    layers_by_position: dict[tuple[str, int], Row] = {}
    for layer in layers:
        match = re.fullmatch(r"layers\.(\d+)\.(.+?)(\.weight)?", layer["name"])
        layers_by_position[(match[2], int(match[1])) if match else (layer["name"], 0)] = layer
    kinds = list(dict.fromkeys(kind for kind, _ in layers_by_position))
    return kinds, sorted({block for _, block in layers_by_position}), layers_by_position


def _error(layer: Row) -> tuple[float | None, str]:
    """Return the error of its output, or of its weights if outputs were not compared, and which one it is."""
    if layer["output_error"] is not None:
        return layer["output_error"], OUTPUT
    return layer["weight_error"], WEIGHT


def _scales(layers: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Return the faint and strong powers of ten of each error that occurs, at least a factor of two apart."""
    powers: dict[str, list[float]] = {}
    for error, what in map(_error, layers):
        powers.setdefault(what, []).extend([log10(error)] if error else [])
    return {what: (min(*logs, max(logs) - log10(2)), max(logs)) for what, logs in powers.items() if logs}


def _error_map(layers: Sequence[Row]) -> str:
    """Draw kinds of matrices over blocks: the stronger, the larger the error.

    Errors of outputs and of weights have separate scales and colours: they do not compare.
    """
    kinds, blocks, layers_by_position = _kinds(layers)
    scales = _scales(layers)
    side = min(28.0, (WIDE - LEFT - 10) / len(blocks))
    tall = min(side, 22.0) if side > 8 else 14.0
    parts = []
    for row, kind in enumerate(kinds):
        parts.append(_words(LEFT - 8, 14 + tall * (row + 0.5), kind, "end", "name"))
        for column, block in enumerate(blocks):
            layer = layers_by_position.get((kind, block))
            if layer is None:
                continue
            error, what = _error(layer)
            low, high = scales.get(what, (0.0, 1.0))
            depth = (log10(error) - low) / (high - low) if error else 0.0
            title = f"{layer['name']}: {what} {_number(error)}, {layer['scheme']}"
            position = f"x='{LEFT + side * column:.1f}' y='{10 + tall * row:.1f}'"
            size = f"width='{max(side - 1, 1):.1f}' height='{tall - 1:.1f}'"
            parts.append(
                f"<rect class='cell {what.partition(' ')[0]}' {position} {size} "
                f"style='fill-opacity:{0.08 + 0.92 * depth:.2f}'><title>{escape(title)}</title></rect>"
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
    moved = (layer for layer in layers if layer["output_error"])
    worst_layers = sorted(moved, key=lambda layer: -layer["output_error"])[:BLAMED]
    if not worst_layers:
        return "<p>Outputs were not compared, or none moved.</p>"
    left = LEFT + 50
    scale = (WIDE - left - RIGHT) / worst_layers[0]["output_error"]
    parts = []
    for index, layer in enumerate(worst_layers):
        y, length = 4 + 24 * index, layer["output_error"] * scale
        name = layer["name"].removesuffix(".weight")
        parts += [
            _words(left - 10, y + 12, name, "end", "name"),
            _bar(y, length, "worst", f"{layer['name']}: {layer['output_error']:.3e}", x=left),
            _words(left + length + 8, y + 12, f"{layer['output_error']:.1e}"),
        ]
    legend = (
        "<p class='small'>Output error: |y - y'|\u00b2 / |y|\u00b2, with y what a matrix makes of its inputs before, "
        "and y' what the quantized one makes of the same inputs.</p>"
    )
    return _picture(24 * len(worst_layers) + 4, parts, "matrices whose outputs moved most") + legend


def _histograms(matrices: Sequence[Row]) -> str:
    """Draw weights and inputs of each matrix, and the largest input of each column; a block opens by itself."""
    blocks: dict[str, list[Row]] = {}
    for matrix in matrices:
        match = re.match(r"layers\.(\d+)\.", matrix["name"])
        blocks.setdefault(f"block {match[1]}" if match else matrix["name"], []).append(matrix)
    strongest = max(blocks, key=lambda block: max(_strength(matrix) for matrix in blocks[block]))
    parts = []
    for block, members in blocks.items():
        outliers = sum(len(matrix["outliers"]) for matrix in members)
        summary = f"{block}: {many(outliers, 'outlier column', 'outlier columns')}"
        pictures = "".join(map(_matrix_histograms, members))
        opened = " open" if block == strongest else ""
        parts.append(f"<details{opened}><summary>{escape(summary)}</summary>{pictures}</details>")
    legend = (
        "<div class='legend'><span><i class='chip before'></i>before</span><span><i class='chip after-line'></i>after "
        "rounding</span><span><i class='chip outlier'></i>outlier column</span></div><p class='small'>Heights of "
        "histograms are logarithms of counts. Inputs are those of one batch of the text. A column is an outlier if it "
        "stays in 16 bits, else if its largest input is 6 times that of the median column. The block with the "
        "strongest column is open.</p>"
    )
    return legend + "".join(parts)


def _strength(matrix: Row) -> float:
    """Return how far the strongest column exceeds the median one."""
    peaks = sorted(matrix["column_peaks"])
    return float(peaks[-1] / (peaks[len(peaks) // 2] or 1.0))


def _matrix_histograms(matrix: Row) -> str:
    marked = len(matrix["outliers"])
    apart = "in 16 bits" if matrix["kept_apart"] else "rounded like the others"
    words = f"{marked} of {matrix['columns']:,} columns are outliers, {apart}" if marked else "no outlier column"
    pictures = _histogram_pair("weights", matrix["weights"]) + _histogram_pair("inputs", matrix["inputs"])
    name = escape(matrix["name"].removesuffix(".weight"))
    return f"<h3>{name}</h3><p class='small'>{words}</p><div class='pair'>{pictures}{_columns(matrix)}</div>"


SMALL, TALL = 300, 96
"""Width and height of the pictures of a matrix."""


def _small_picture(parts: Iterable[str], words: str) -> str:
    label = escape(words, quote=True)
    return f"<svg class='small' viewBox='0 0 {SMALL} {TALL}' role='img' aria-label='{label}'>{''.join(parts)}</svg>"


def _histogram_pair(what: str, pair: Sequence[Row]) -> str:
    """Draw two histograms on one axis: the first filled, the second as a line."""
    low, high = min(each["low"] for each in pair), max(each["high"] for each in pair)
    spread, bottom = (high - low) or 1.0, TALL - 30
    most = max(max(each["counts"]) for each in pair)
    parts = []
    for histogram, kind in zip(pair, ("before", "after-line"), strict=True):
        counts = histogram["counts"]
        width = (histogram["high"] - histogram["low"]) / len(counts)
        points = []
        for index, count in enumerate(counts):
            y = bottom - (bottom - 4) * log10(1 + count) / log10(1 + most)
            for edge in (index, index + 1):
                points.append(f"{(histogram['low'] + width * edge - low) / spread * SMALL:.1f},{y:.1f}")
        ends = (points[0].split(",")[0], points[-1].split(",")[0])
        parts.append(f"<polygon class='{kind}' points='{ends[0]},{bottom} {' '.join(points)} {ends[1]},{bottom}'/>")
    zeros = f"exactly 0: {_share(pair[0]['zeros'])} before, {_share(pair[1]['zeros'])} after"
    parts += [
        _words(0, TALL - 17, f"{low:.3g}"), _words(SMALL / 2, TALL - 17, what, "middle", "name"),
        _words(SMALL, TALL - 17, f"{high:.3g}", "end"), _words(SMALL / 2, TALL - 3, zeros, "middle"),
    ]  # fmt: skip
    return _small_picture(parts, f"{what} from {low:.3g} to {high:.3g}; {zeros}")


def _columns(matrix: Row) -> str:
    """Draw the largest input of each column, outliers marked."""
    peaks, bottom = matrix["column_peaks"], TALL - 30
    run = ceil(matrix["columns"] / len(peaks))
    marked = {column // run for column in matrix["outliers"]}
    wide, most = SMALL / len(peaks), max(peaks) or 1.0
    outline, strong = [f"M0,{bottom}"], []
    for index, peak in enumerate(peaks):
        left, high = wide * index, (bottom - 4) * peak / most
        if index not in marked:
            outline.append(f"V{bottom - high:.1f}h{wide:.2f}")
            continue
        outline.append(f"V{bottom}h{wide:.2f}")
        columns = f"column {index * run}" if run == 1 else f"columns {index * run} to {(index + 1) * run - 1}"
        position = f"x='{left:.1f}' y='{bottom - high:.1f}' width='{max(wide, 2):.1f}' height='{high:.1f}'"
        strong.append(f"<rect class='outlier' {position}><title>{columns}: at most {peak:.3g}</title></rect>")
    parts = [f"<path class='before' d='{''.join(outline)}V{bottom}Z'/>", *strong]
    median = sorted(peaks)[len(peaks) // 2]
    words = f"largest input {_number(max(peaks))}, of the median {_number(median)}"
    parts += [_words(SMALL / 2, TALL - 17, "columns", "middle", "name"), _words(SMALL / 2, TALL - 3, words, "middle")]
    return _small_picture(parts, words)


def _table(layers: Sequence[Row]) -> str:
    heads = ("matrix", "scheme", "bytes", "weight error", "output error", "inputs in 16 bit")
    rows = "".join(
        f"<tr><th scope='row'>{escape(layer['name'])}</th><td>{escape(layer['scheme'])}</td><td>{layer['bytes']:,}</td>"
        f"<td>{_number(layer['weight_error'])}</td>"
        f"<td>{'' if layer['output_error'] is None else format(layer['output_error'], '.2e')}</td>"
        f"<td>{_share(layer['outliers'], 2)}</td></tr>"
        for layer in layers
    )
    head = "".join(f"<th scope='col'>{name}</th>" for name in heads)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<details><summary>Show them</summary><div class='scroll'>{table}</div></details>"


def _provenance(document: Row) -> str:
    entries = [("format", document["format"]), ("scheme", document["scheme"])]
    if document["tokens"] is not None:
        entries.append(("measured on", f"{document['tokens']:,} tokens of held-out text"))
    if document["calibration_tokens"]:
        entries.append(
            ("calibrated on", f"{document['calibration_tokens']:,} tokens of {document['calibration_text']}")
        )
    if document["budget_bytes"] is not None:
        matrices_by_bits = ", ".join(
            f"{bits} bits for {many(number, 'matrix', 'matrices')}" for bits, number in document["bits"].items()
        )
        entries.append(("budget", f"{document['budget_bytes']:,} bytes: {matrices_by_bits}"))
    rare = [
        f"{many(layer['uncalibrated'], 'expert')} of {layer['name']}"
        for layer in document["layers"]
        if layer["uncalibrated"]
    ]
    if rare:
        entries.append(("rounded to nearest", f"{', '.join(rare)}, which the text hardly reached"))
    if document["skipped"]:
        entries.append(("left as they are", ", ".join(document["skipped"])))
    if document["note"]:
        entries.append(("note", document["note"]))
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in entries) + "</dl>"

"""The page of a run, from its JSON alone."""

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.case import BARS

Document = dict[str, Any]
PASSES = ("forward", "backward", "full")
EAGER = "eager"


def page(document: Document) -> str:
    """Markdown."""
    return (
        "\n".join(
            [
                *_head(document),
                *_kernels(document),
                *_steps(document),
                *_engine_steps(document),
                *_serving(document),
                *_http(document),
                *_rest(document),
            ]
        )
        + "\n"
    )


def _head(document: Document) -> Iterator[str]:
    machine = document["machine"]
    yield f"# Kernels and steps on {machine['name']}, {document['date']}"
    yield ""
    yield "Written by `python -m benchmarks.gpu` from the JSON beside it. [How to read and repeat it](README.md)."
    yield ""
    yield "| | |\n|---|---|"
    yield f"| command | `{document['command']}` |"
    yield f"| commit | {machine['commit']} |"
    versions = [f"{name} {version or 'none'}" for name, version in machine["versions"].items()]
    yield f"| versions | {', '.join(versions)} |"
    for name in ("memory_bytes", "cache_bytes", "processors", "capability", "cuda", "cudnn"):
        if name in machine:
            yield f"| {name.replace('_', ' ')} | {machine[name]} |"
    for name, value in machine.get("under_load", {}).items():
        yield f"| {name.replace('_', ' ')}, under load | {value} |"
    ceilings = document["ceilings"]
    yield f"| copy, measured | {ceilings['bytes_per_s'] / 1e9:,.1f} GB/s read and written |"
    for dtype, rate in ceilings["flop_per_s"].items():
        yield f"| {dtype} product, measured | {rate / 1e12:,.2f} TFLOP/s |"
    yield ""


def _kernels(document: Document) -> Iterator[str]:
    if not document["kernels"]:
        return
    yield "## Kernels\n"
    yield (
        "Median of runs that take turns, each with inputs from memory; in brackets the share of the roofline that was "
        "measured above. `*` is what training takes by itself. Error: how many times as far from fp64 as plain code of "
        f"the same dtype ({', '.join(f'{kind} at most {bar:g}' for kind, bar in BARS.items())})."
    )
    for row in document["kernels"]:
        yield ""
        yield f"### {row['operation']}, {row['size']}, {row['dtype']}\n"
        if row.get("judged_at") and row["judged_at"] != row["size"]:
            yield f"Errors at {row['judged_at']}.\n"
        parts = [part for part in PASSES if part in row["floor_seconds"]]
        yield f"| contestant | {' | '.join(parts)} | 8 of 10 runs | launch | peak | error |"
        yield "|---" * (len(parts) + 5) + "|"
        yield f"| roofline | {' | '.join(_time(row['floor_seconds'][part]) for part in parts)} | | | | |"
        for name, contestant in row["contestants"].items():
            mark = " *" if name == row["chosen"] else ""
            yield f"| {name}{mark} | {' | '.join(_cells(name, contestant, parts))} |"
        yield f"\n{_speeds(row)}" if _speeds(row) else ""


def _speeds(row: Document) -> str:
    """How the chosen one of ours compares with every contestant, by the whole of its passes."""
    part = [part for part in PASSES if part in row["floor_seconds"]][-1]
    times = {
        name: contestant["seconds"][part]["median"]
        for name, contestant in row["contestants"].items()
        if "seconds" in contestant
    }
    mine = times.pop(row["chosen"], None)
    if mine is None or not times:
        return ""
    return (
        f"Speed of {row['chosen']}: " + ", ".join(f"{time / mine:.2f} x {name}" for name, time in times.items()) + "."
    )


def _cells(name: str, contestant: Document, parts: list[str]) -> Iterator[str]:
    why = contestant.get("failed") or contestant.get("left_out")
    if why:
        yield from [why.replace("|", "/"), *[""] * (len(parts) + 3)]
        return
    for part in parts:
        yield f"{_time(contestant['seconds'][part]['median'])} ({contestant['roofline'].get(part, 0) * 100:.0f} %)"
    whole = contestant["seconds"][parts[-1]]
    yield f"{_time(whole['low'])} to {_time(whole['high'])}"
    yield _time(contestant["host_seconds"])
    yield _bytes(contestant["peak_bytes"])
    yield "1, the measure" if name == EAGER else _error(contestant.get("judged"))


def _error(judged: Document | None) -> str:
    if judged is None:
        return "not measured"
    if "failed" in judged:
        return str(judged["failed"]).replace("|", "/")
    ratios = ", ".join(f"{ratio:.2f}" for ratio in judged["ratios"].values())
    return ratios if judged["holds"] else f"**{ratios}**"


def _steps(document: Document) -> Iterator[str]:
    if not document["steps"]:
        return
    yield "\n## Whole steps\n"
    yield (
        "AdamW with fp32 moments and fp32 weights to update, clipping at 1, no recomputation. MFU half counts the keys "
        "a query may see, full all of them; in brackets MFU of the product measured above."
    )
    for row in document["steps"]:
        layers = "" if row["layers"] == row["of_layers"] else f", {row['layers']} of its {row['of_layers']} layers"
        yield f"\n### {row['model']}{layers}, {row['rows']} x {row['sequence']:,} tokens, {row['precision']}\n"
        yield "| contestant | step | 8 of 10 | tokens/s | MFU half | MFU full | peak | predicted |\n" + "|---" * 8 + "|"
        for name, contestant in row["contestants"].items():
            yield f"| {name} | {' | '.join(_step_cells(contestant))} |"


def _step_cells(contestant: Document) -> Iterator[str]:
    why = contestant.get("failed") or contestant.get("left_out")
    if why:
        yield from [why.replace("|", "/"), *[""] * 6]
        return
    seconds = contestant["seconds"]
    yield _time(seconds["median"])
    yield f"{_time(seconds['low'])} to {_time(seconds['high'])}"
    yield f"{contestant['tokens_per_s']:,.0f}"
    for convention in ("half", "full"):
        sheet, measured = (contestant["mfu"].get(peak, {}).get(convention) for peak in ("datasheet", "measured"))
        yield f"{'unknown' if sheet is None else f'{sheet * 100:.1f} %'} ({measured * 100:.1f} %)"
    yield _bytes(contestant["peak_bytes"])
    yield _bytes(contestant.get("predicted_peak_bytes"))


def _engine_steps(document: Document) -> Iterator[str]:
    if not document.get("engine_steps"):
        return
    yield "\n## Steps of the engine\n"
    yield "In bf16 and compiled, but for what stands under *settings*; in brackets what the planner is off.\n"
    yield "| model | sequences x tokens x micro-batches | settings | step | tokens/s | peak |\n" + "|---" * 6 + "|"
    for row in document["engine_steps"]:
        layers = "" if row["layers"] == row["of_layers"] else f", {row['layers']} layers"
        size = f"{row['micro_batch']} x {row['sequence']:,} x {row['accumulation']}"
        begun = f"| {row['model']}{layers} | {size} | {row['words']} |"
        if "failed" in row:
            yield f"{begun} {row['failed'].replace('|', '/')} | | |"
            continue
        seconds, peak = row["seconds"]["median"], row["peak_bytes"]
        yield (
            f"{begun} {_time(seconds)}{_off(row['planned_s'], seconds)} | {row['tokens'] / seconds:,.0f} | "
            f"{_bytes(peak)}{_off(row['planned_peak_bytes'], peak)} |"
        )


def _off(planned: float | None, measured: float | None) -> str:
    return f" ({(planned / measured - 1) * 100:+.1f} %)" if planned and measured else ""


def _serving(document: Document) -> Iterator[str]:
    if not document.get("serving"):
        return
    yield "\n## Serving\n"
    yield (
        "Requests that come at once, answered greedily. First: until every answer has begun. Step: of those after "
        "that. Tokens/s: of all answers over the whole time."
    )
    for row in document["serving"]:
        yield f"\n### {row['model']}{', ' + row['scheme'] if row['scheme'] else ''} (graphs: {row['graphs']})\n"
        yield "| requests x prompt + answer | first | step | tokens/s | tokens/s after the first |\n" + "|---" * 5 + "|"
        for title, load in row["loads"].items():
            why = load.get("failed") or load.get("left_out")
            if why:
                yield f"| {title} | {why.replace('|', '/')} | | | |"
                continue
            times = [_time(load[key]) if key in load else "" for key in ("first_s", "step_s")]
            after = f"{load['decode_tokens_per_s']:,.0f}" if "decode_tokens_per_s" in load else ""
            yield f"| {title} | {times[0]} | {times[1]} | {load['tokens_per_s']:,.0f} | {after} |"


def _http(document: Document) -> Iterator[str]:
    if not document.get("http"):
        return
    yield "\n## Over HTTP\n"
    yield (
        "The same load by the engine alone, then from the server to streaming clients in a process of their own. "
        "Tokens/s: of all answers over the whole time. Gaps: between the moments in which a client receives something."
    )
    yield "\n| model | clients x prompt + answer | engine | HTTP | share | first token, p50 | gaps, p50 | p99 | cores |"
    yield "|---" * 9 + "|"
    for row in document["http"]:
        begun = f"| {row['model']} | {row['load']} | {row['engine']['tokens_per_s']:,.0f} tokens/s"
        if "http" not in row:
            yield f"{begun} | {row['left_out']} | | | | | |"
            continue
        http = row["http"]
        times = " | ".join(_time(http[key] / 1e3) for key in ("first_token_p50_ms", "gap_p50_ms", "gap_p99_ms"))
        cores = ", ".join(f"{name} {http[f'{name}_core_share']:.2f}" for name in ("engine", "front", "client"))
        yield (
            f"{begun} | {http['whole_tokens_per_second']:,.0f} tokens/s | {row['share_of_engine'] * 100:.0f} % | "
            f"{times} | {cores} |"
        )


def _rest(document: Document) -> Iterator[str]:
    yield "\n## Left out\n"
    left = [f"- {name}: no time left in {document['minutes']:g} minutes" for name in document["left_out"]]
    left += [f"- {name}" for name in (*document["absent"], *document["broken"])]
    yield "\n".join(left) if left else "Nothing."
    yield f"\nThe run took {document['took_s'] / 60:.1f} of {document['minutes']:g} minutes."


def _time(seconds: float) -> str:
    """Three significant digits, in the unit that suits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _bytes(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"

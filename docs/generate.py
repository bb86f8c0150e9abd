"""Writes the parts of the pages that the program knows better than a writer: figures, outputs, keys, verbs.

    python -m docs.generate            # write them anew
    python -m docs.generate --check    # name the pages that are out of date; exit code 1 if there are any

A part stands between two comments, and the first says what fills it:

    <!-- generated: output meshwright plan llama-3.1-8b --cluster h100x8 --nodes 4 -->
    <!-- generated: output python examples/collectives.py all-reduce -->
    <!-- generated: table zero -->
    <!-- generated: bandwidth -->
    <!-- generated: keys recipe -->
    <!-- generated: schemes -->
    <!-- generated: trl -->
    <!-- generated: kv-cache -->
    <!-- generated: presets devices -->
    <!-- generated: packages -->
    <!-- generated: source src/meshwright/training/objectives/objectives.py ORPO log_odds -->
    <!-- /generated -->

Everything here is predicted or declared, nothing is measured: the same commit gives the same text on every machine.
"""

import argparse
import ast
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from textwrap import TextWrapper, dedent
from typing import Any

from docs import bandwidth
from docs.learn.figures import kv_cache
from docs.packages import packages
from docs.tables import TABLES, Table

ROOT = Path(__file__).resolve().parent.parent
PART = re.compile(r"(?P<open><!-- generated: (?P<what>.+?) -->\n).*?(?P<close><!-- /generated -->)", re.DOTALL)
COLUMNS = 88
GIB = 2**30
WRAP = TextWrapper(COLUMNS, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
COMMAND = TextWrapper(COLUMNS - 4, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def pages() -> list[Path]:
    """Every page that may have generated parts."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


@cache
def run(words: tuple[str, ...]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of one `meshwright` command, in this process, at a fixed width and without colour."""
    from meshwright.verbs.main import main
    from meshwright.verbs.rent.command import SEARCHING

    told, complained = io.StringIO(), io.StringIO()
    environment = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS=str(COLUMNS), NO_COLOR="1")
    try:
        with redirect_stdout(told), redirect_stderr(complained):
            code = main(list(words))
    finally:
        for name, value in environment.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    # Whether a search lasts long enough to be announced depends on the machine.
    return code, told.getvalue(), complained.getvalue().replace(f"{SEARCHING}\n", "")


def output(command: str) -> str:
    """A command and what it prints, as a block; lines that a terminal would break are broken between words."""
    words = shlex.split(command.replace("\\\n", " "))
    if words[0] == "python":
        text = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    else:
        _, told, complained = run(tuple(words[1:]))
        text = told + complained
    lines = [part for line in text.rstrip().splitlines() for part in WRAP.wrap(line) or [""]]
    shown = " \\\n".join(COMMAND.wrap(command))
    return "```console\n$ " + shown + "\n" + "\n".join(lines) + "\n```\n"


def table(name: str) -> str:
    """Rows of plans, one `meshwright plan` each, and the command of them all."""
    asked: Table = TABLES[name]
    lines = [f"| {asked.head} | {' | '.join(asked.columns)} |", "|---|" + "---|" * len(asked.columns)]
    for label, row in asked.rows.items():
        _, told, complained = run(asked.words(row))
        if not told:
            raise SystemExit(f"{name}, {label}: {complained}")
        document = json.loads(told)
        lines.append(f"| {label} | {' | '.join(CELLS[column](document) for column in asked.columns)} |")
    return "\n".join(lines) + f"\n\nOne command per row; the first is `{asked.command}`.\n"


def _gib(*kinds: str) -> Callable[[Any], str]:
    def text(document: Any) -> str:
        return _digits(sum(row["bytes"] for row in document["memory"] if row["kind"] in kinds) / GIB)

    return text


def _digits(value: float) -> str:
    """Three significant digits, without an exponent; 0 is 0."""
    decimals = next((digits for digits, least in enumerate((99.95, 9.995, 0.9995)) if value >= least), 3)
    return f"{value:,.{decimals}f}" if value else "0"


def _peak(document: Any) -> str:
    return _digits(document["peak_bytes"] / GIB)


def _fits(document: Any) -> str:
    from meshwright.planner.memory.rank_memory import DRIVER_BYTES
    from meshwright.planner.step.prediction import LIKELY

    usable = document["plan"]["cluster"]["device"]["memory_bytes"] - DRIVER_BYTES
    if document["peak_bytes"] > usable:
        return "**no**"
    return "yes" if document["fit_probability"] >= LIKELY else f"tight: {100 * document['fit_probability']:.0f} %"


def _sent(*axes: str) -> Callable[[Any], str]:
    def text(document: Any) -> str:
        sent = sum(row["bytes"] for row in document["traffic"] if not axes or row["axis"] in axes)
        return _digits(sent / 1e9)

    return text


def _ms(part: str) -> Callable[[Any], str]:
    def text(document: Any) -> str:
        return _digits(1e3 * sum(row["seconds"] for row in document["time"] if row["what"] == part))

    return text


CELLS: dict[str, Callable[[Any], str]] = {
    "parameters, GiB": _gib("parameters", "shards"),
    "gradients, GiB": _gib("gradients"),
    "optimizer, GiB": _gib("masters", "moments", "counters"),
    "moments, GiB": _gib("moments"),
    "states, GiB": _gib("parameters", "shards", "gradients", "masters", "moments", "counters"),
    "activations, GiB": _gib("activations"),
    "in host memory, GiB": lambda document: _digits(document["host_bytes"] / GIB),
    "of a node, GiB": lambda document: _digits(document["node_bytes"] / GIB),
    "peak, GiB": _peak,
    "fits 80 GB": _fits,
    "sent, GB": _sent(),
    "sent by tp, GB": _sent("tp"),
    "sent by cp, GB": _sent("cp"),
    "sent by pp, GB": _sent("pp"),
    "sent by ep, GB": _sent("ep"),
    "update, ms": _ms("optimizer"),
    "Muon's products and exchange, ms": _ms("muon"),
    "step, s": lambda document: _digits(document["step_seconds"]),
    "bubble": lambda document: f"{100 * document['bubble_fraction']:.1f} %",
    "MFU (full)": lambda document: f"{100 * document['mfu_full']:.1f} %",
}
"""Columns of a table, from the document that `plan --json` prints."""


def keys(section: str) -> str:
    """The keys of one section of a plan, from its JSON Schema."""
    from meshwright import planfile

    lines = ["| key | default | values | meaning |", "|---|---|---|---|"]
    section_schema = planfile.schema()["$defs"][section]
    for name, key_schema in section_schema["properties"].items():
        missing = "required" if name in section_schema.get("required", ()) else ""
        default = f"`{json.dumps(key_schema['default'])}`" if "default" in key_schema else missing
        lines.append(f"| `{name}` | {default} | {_values(key_schema)} | {_cell(key_schema.get('description', ''))} |")
    return "\n".join(lines) + "\n"


def _values(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_values(branch) for branch in schema["anyOf"]))
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    names = {
        "integer": "whole number",
        "number": "number",
        "boolean": "`true`, `false`",
        "array": "list",
        "null": "`null`",
    }
    return names.get(schema.get("type", ""), "text")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def verbs(_: str = "") -> str:
    """Every verb with its options, from the command line's own parser."""
    import typer.main

    from meshwright.verbs.commands import application

    return "\n".join(_verbs(typer.main.get_command(application()), "##"))


def _verbs(group: Any, level: str) -> Iterator[str]:
    from meshwright.verbs.commands import FORMER

    for name, verb in sorted(group.commands.items()):
        yield f"{level} {name}\n\n{_cell(verb.help or '')}\n"
        options = [
            option for option in verb.params if option.param_type_name == "option" and "--help" not in option.opts
        ]
        if options:
            yield "| option | meaning |\n|---|---|"
            for option in options:
                names = [name for name in option.opts if name not in FORMER]
                yield f"| `{', '.join(names)}` | {_cell(option.help or '')} |"
            yield ""
        if hasattr(verb, "commands"):
            yield from _verbs(verb, level + "#")


def gguf_schemes() -> str:
    """Those of GGUF files, with the bits that an 8B model has per weight, everything in it counted."""
    from math import prod

    from meshwright.formats.gguf.metadata import architecture_of, gguf_bindings
    from meshwright.spec.presets import model
    from meshwright.spec.weights.gguf_schemes import BLOCK_TYPES, GGUF_SCHEMES

    shape = model("llama-3.1-8b")
    sizes = {
        name: size for binding in gguf_bindings(shape, architecture_of(shape)) for name, size in binding.theirs.items()
        if len(size) > 1
    }  # fmt: skip
    lines = [
        "| scheme | what it is | bits per weight | usual KL, nats per token | limit |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for scheme in GGUF_SCHEMES.values():
        held = sum(BLOCK_TYPES[scheme.kind_of(name, size[-1], shape)].num_bytes(size) for name, size in sizes.items())
        bits = f"{8 * held / sum(map(prod, sizes.values())):.3g}"
        low, high = scheme.expected_kl
        lines.append(f"| `{scheme.name}` | {_cell(scheme.about)} | {bits} | {low:g} to {high:g} | {scheme.max_kl:g} |")
    return "\n".join(lines) + "\n"


def schemes(which: str = "") -> str:
    """The schemes of quantization, as they are declared."""
    if which == "gguf":
        return gguf_schemes()
    from meshwright.spec.model.quantization_schemes import SCHEMES

    lines = [
        "| scheme | what it is | bits per weight | usual KL, nats per token | limit |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for scheme in SCHEMES.values():
        low, high = scheme.expected_kl
        bits = f"{scheme.bits_per_weight(4096, 4096):.3g}"
        lines.append(f"| `{scheme.name}` | {_cell(scheme.about)} | {bits} | {low:g} to {high:g} | {scheme.max_kl:g} |")
    return "\n".join(lines) + "\n"


def preset_table(which: str) -> str:
    """devices, sources, machines or models: what the presets say."""
    from docs import preset_tables

    made = {
        "devices": preset_tables.devices, "sources": preset_tables.device_sources, "models": preset_tables.models,
        "machines": preset_tables.machines,
    }  # fmt: skip
    return made[which]()


def source(words: str) -> str:
    """Definitions of a file of the repository, as a block: `source FILE ORPO log_odds`."""
    path, *names = words.split()
    text = (ROOT / path).read_text(encoding="utf-8")
    parts = {
        node.name: dedent(
            "\n".join(
                text.splitlines()[min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1 : node.end_lineno]
            )
        )
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    block = "\n\n\n".join(parts[name] for name in names)
    return f"```python\n{block}\n```\n"


def trl_flags(_: str = "") -> str:
    """Flags of TRL's scripts, and what `tune --from-trl` makes of them."""
    from meshwright.verbs.tune.trl_flags import FLAGS

    rows = (f"| {', '.join(f'`--{name}`' for name in flag.names)} | {flag.keys} |" for flag in FLAGS)
    return "\n".join(["| TRL | here |", "|---|---|", *rows]) + "\n"


FILLED_BY: dict[str, Callable[[str], str]] = {
    "kv-cache": kv_cache.table,
    "output": output, "table": table, "keys": keys, "verbs": verbs, "schemes": schemes,
    "trl": trl_flags, "bandwidth": bandwidth.table, "source": source, "presets": preset_table, "packages": packages,
}  # fmt: skip


def filled(text: str) -> str:
    """A page with its generated parts as they should be."""

    def fill(match: re.Match[str]) -> str:
        kind, _, rest = match["what"].partition(" ")
        return match["open"] + FILLED_BY[kind](rest) + match["close"]

    return PART.sub(fill, text)


def main(words: Sequence[str] | None = None) -> int:
    """Write all pages, or with --check only compare them."""
    reader = argparse.ArgumentParser(prog="python -m docs.generate", description="Write the pages' generated parts.")
    reader.add_argument("--check", action="store_true", help="only name the stale pages; exit code 1 if there are any")
    options = reader.parse_args(words)
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        wanted = filled(text)
        if wanted != text:
            stale.append(page.relative_to(ROOT).as_posix())
            if not options.check:
                page.write_text(wanted, encoding="utf-8")
    print("\n".join(stale) or "every generated part is up to date")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())

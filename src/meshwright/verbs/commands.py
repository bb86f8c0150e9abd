"""The typer application of all verbs. Running a verb imports its own room only."""

import re
import shlex
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from meshwright.interface.options import Words
from meshwright.interface.terminal import help
from meshwright.interface.terminal.screen_text import WIDEST
from meshwright.spec.errors import Writer

EXIT = typer.Exit
"""Exception that ends a verb with an exit code of its own."""

USAGE_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Base class of parser errors. Some versions of typer carry their own copy of click."""
TYPES = {"int": "INT", "float": "NUMBER", "str": "NAME", "path": "FILE"}
"""Typer's name of a type -> its name in the help."""
FORMER = ("--output",)
"""Former names of options, still accepted and no longer shown."""
FUNCTIONS = {"eval": "evaluate", "import": "import_"}
"""Verb -> name of its function, where the two differ."""
FOLDERS = {"import": "import_"}
"""Verb -> name of its folder, where the two differ."""


class KnownHelp:
    """A command or group whose --help defaults to false.

    typer reads an unknown default through pydantic, which costs 90 ms.
    """

    def get_help_option(self, ctx: Any) -> Any:
        """Return typer's help option with a default."""
        option = super().get_help_option(ctx)  # type: ignore[misc]  # of the other base class
        if option is not None and option.default is None:
            option.default = False
        return option


class Verb(KnownHelp, TyperCommand):
    """A command whose help calls types NAME, INT, FILE."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments by name and options with their types, each under its panel."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            argument = parameter.param_type_name == "argument"
            if record is not None:
                title = "Arguments" if argument else getattr(parameter, "rich_help_panel", None) or "Options"
                text = re.sub(r"x>=(\S+?)(?=])", r"at least \1", record[1])
                sections.setdefault(title, []).append((_shown_name(record[0], argument=argument), text))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _shown_name(name: str, *, argument: bool) -> str:
    if argument:  # its name needs no type next to it
        return re.sub(r" <[^<>]*>$", "", name)
    name = re.sub(rf", (?:{'|'.join(FORMER)})\b", "", name)
    return re.sub(r"<(?:list\[)?(\w+)\]?>", lambda kind: TYPES.get(kind[1].lower(), kind[1].upper()), name)


class Verbs(KnownHelp, TyperGroup):
    """A group of commands."""


def application(verbs: Iterable[str] = help.VERBS) -> typer.Typer:
    """Return the typer program with these verbs."""
    # Plain help: rich's costs 60 ms of imports on every start.
    program = typer.Typer(
        cls=Verbs,
        name="meshwright",
        help=help.ABOUT,
        rich_markup_mode=None,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST},
    )
    for verb in verbs:
        if verb == "data":
            program.add_typer(data, name=verb)
            continue
        function = getattr(
            import_module(f"meshwright.verbs.{FOLDERS.get(verb, verb)}.command"), FUNCTIONS.get(verb, verb)
        )
        program.command(cls=Verb, name=verb, short_help=help.VERBS[verb])(function)
    program.callback()(options)
    return program


data = typer.Typer(cls=Verbs, help="Look at text and tokens, or encode them.", short_help=help.VERBS["data"])


@data.command(cls=Verb, name="show", short_help="Show the first packed sequence, and what it comes from.")
def data_show(
    words: Words = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page with more rows, for a browser.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON document.")] = False,
) -> None:
    """Show text, split, tokenizer and the first packed sequence of a plan, which is given as for train."""
    from meshwright.interface.planning.plan_reading import sort_words
    from meshwright.verbs.data.command import show

    path, overrides, _ = sort_words(words or ())
    show(path, overrides, json, html)


@data.command(cls=Verb, name="prepare", short_help="Encode text into a token store, on one machine or many.")
def data_prepare(
    words: Words = None,
    out: Annotated[
        str, typer.Option("-o", "--out", metavar="STORE", help="Folder or URL of the store, new or begun before.")
    ] = "",
    part: Annotated[
        str, typer.Option(metavar="I/N", help="Encode this part of N, each on a machine of its own.")
    ] = "1/1",
    processes: Annotated[
        int | None, typer.Option(help="Encoding processes.  [default: one per core]", show_default=False)
    ] = None,
    shard_tokens: Annotated[int, typer.Option(help="Approximate tokens per shard.")] = 2**24,
    json: Annotated[bool, typer.Option("--json", help="Print what was done as one JSON document.")] = False,
) -> None:
    """Encode the text of a plan's data, which is given as for train, into a token store: data=STORE trains from it.

    A run that ends early goes on where it was when it is repeated.
    """
    from meshwright.interface.planning.plan_reading import sort_words
    from meshwright.verbs.data.prepare import prepare

    path, overrides, _ = sort_words(words or ())
    prepare(path, overrides, out=out, part=part, processes=processes, shard_tokens=shard_tokens, json=json)


def options() -> None:
    """Take no options: verbs/main.py handles --debug, --version and --help of the whole program."""


def _parser(words: Sequence[str]) -> Any:
    """Return the parser of the requested verb, or of all verbs when it is unknown: typer then suggests the nearest."""
    verb = next(iter(words), "")
    return typer.main.get_command(application([verb] if verb in help.VERBS else help.VERBS))


def run(words: Sequence[str]) -> None:
    """Parse and run one verb. Errors of typer and of the verb propagate, and the process does not end."""
    verbs = _parser(words)
    with verbs.make_context("meshwright", list(words)) as context:
        verbs.invoke(context)


def option_writer(words: Sequence[str]) -> Writer:
    """Return a writer of arguments as the user of this verb types them: --tokens 15T, MODEL gpt2, or KEY=VALUE.

    It takes an argument's name, its value as a Python literal, and the value as text. Empty = the name alone.
    """
    verb: Any = _parser(words)
    for word in words:  # `data show` is a verb of a group
        verb = getattr(verb, "commands", {}).get(word, verb)
    spellings: dict[str, tuple[str, str]] = {}
    for parameter in verb.params:
        if parameter.param_type_name == "argument":
            spellings[parameter.name] = re.split(r"\W", parameter.metavar.strip("[]"))[0], ""
            continue
        names = [option for option in parameter.opts if option.startswith("--")]
        switches_off = next(iter(parameter.secondary_opts), "")
        # A parameter may have another name than its option, as `stack` of --for has.
        spellings |= {name[2:].replace("-", "_"): (names[0], switches_off) for name in names}
        spellings.setdefault(parameter.name, (next(iter(names), ""), switches_off))

    def write(name: str, literal: str, text: str) -> str:
        spelling, switches_off = spellings.get(name, ("", ""))
        if not spelling:
            return f"{name}={shlex.quote(text) if text else ''}"
        if literal in ("True", "False"):
            return spelling if literal == "True" else switches_off or f"{name}=False"
        return f"{spelling} {shlex.quote(text)}" if literal else spelling

    return write

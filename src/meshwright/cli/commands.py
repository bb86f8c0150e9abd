"""Verbs, one a file, as a typer application. A verb that is run loads its own file and no other's."""

import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from meshwright.cli.inputs.plan_arguments import Words
from meshwright.cli.terminal import help
from meshwright.cli.terminal.screen_text import WIDEST

EXIT = typer.Exit
"""How a verb ends with an exit code of its own."""

USAGE_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Base of what the parser raises; some versions of typer carry their own copy of click."""


class Verb(TyperCommand):
    """A command whose help names types as NAME, INT, FILE. Its --help is false, not unknown, when absent: typer reads
    the unknown through pydantic, 90 ms."""

    def get_help_option(self, ctx: Any) -> Any:
        """As typer makes it, with a default."""
        return _known(super().get_help_option(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments by their name, options with a word for what they take, each under its group."""
        found: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            argument = parameter.param_type_name == "argument"
            if record is not None:
                title = "Arguments" if argument else getattr(parameter, "rich_help_panel", None) or "Options"
                found.setdefault(title, []).append((_named(record[0], argument=argument), _ranged(record[1])))
        for title, rows in found.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


TYPES = {"int": "INT", "float": "NUMBER", "str": "NAME", "path": "FILE"}
"""What typer calls a type, and what the help calls it."""


FORMER = ("--output",)
"""Names of options that are still read, and no longer shown."""


def _named(name: str, *, argument: bool) -> str:
    if argument:  # its name says what it is
        return re.sub(r" <[^<>]*>$", "", name)
    name = re.sub(rf", (?:{'|'.join(FORMER)})\b", "", name)
    return re.sub(r"<(?:list\[)?(\w+)\]?>", lambda kind: TYPES.get(kind[1].lower(), kind[1].upper()), name)


def _ranged(what: str) -> str:
    """What an option does; its least value in words."""
    return re.sub(r"x>=(\S+?)(?=])", r"at least \1", what)


class Verbs(TyperGroup):
    """The same for a group of commands."""

    def get_help_option(self, ctx: Any) -> Any:
        """As typer makes it, with a default."""
        return _known(super().get_help_option(ctx))


def _known(option: Any) -> Any:
    if option is not None and option.default is None:
        option.default = False
    return option


FUNCTIONS = {"eval": "evaluate", "import": "import_"}
"""Of the verbs that are not called as their function."""
FILES = {"import": "import_"}
"""Of the verbs that are not called as their file in cli/verbs."""


def application(verbs: Iterable[str] = help.VERBS) -> typer.Typer:
    """The program with these verbs."""
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
        function = getattr(import_module(f"meshwright.cli.verbs.{FILES.get(verb, verb)}"), FUNCTIONS.get(verb, verb))
        program.command(cls=Verb, name=verb, short_help=help.VERBS[verb])(function)
    program.callback()(options)
    return program


data = typer.Typer(cls=Verbs, help="Look at text, split and tokens before training.", short_help=help.VERBS["data"])


@data.command(cls=Verb, name="show", short_help="Show the first packed sequence, and what it comes from.")
def data_show(
    words: Words = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE.html", help="Write a page with more rows, for a browser.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON document.")] = False,
) -> None:
    """Show text, split, tokenizer and the first packed sequence of a plan, which is given as for train."""
    from meshwright.api.plan_reading import sort_words
    from meshwright.cli.verbs.data import show

    path, overrides, _ = sort_words(words or ())
    show(path, overrides, json, html)


def options() -> None:
    """A group without options of its own: cli/main.py takes --debug, --version and --help of the whole program."""


def _parser(words: Sequence[str]) -> Any:
    """With the verb that is asked for; with all where there is no such verb, since the nearest is then named."""
    asked = next(iter(words), "")
    return typer.main.get_command(application([asked] if asked in help.VERBS else help.VERBS))


def run(words: Sequence[str]) -> None:
    """Parse and run one verb; it raises what typer and the verb raise, and does not end the process."""
    verbs = _parser(words)
    with verbs.make_context("meshwright", list(words)) as context:
        verbs.invoke(context)


def in_options(line: str, words: Sequence[str]) -> str:
    """A sentence that names arguments of Python functions, with the options of this verb: tokens=15T is --tokens 15T,
    dry_run=False is --no-dry-run, model='x' is MODEL 'x' and another run= another RUN where those are arguments."""
    verb: Any = _parser(words).commands.get(next(iter(words), ""))
    places = {one.name: re.split(r"\W", one.metavar.strip("[]"))[0] for one in _parameters(verb, "argument")}
    line = re.sub(r"another (\w+)=", lambda found: f"another {places.get(found[1], found[1] + '=')}", line)
    line = re.sub(r"^(\w+)=(?=')", lambda found: f"{places.get(found[1], found[1] + '=')} ".replace("= ", "="), line)
    options: dict[str, str] = {}
    for one in _parameters(verb, "option"):
        long = [option for option in (*one.opts, *one.secondary_opts) if option.startswith("--")]
        options |= {name[2:].replace("-", "_"): name for name in long}
        options.setdefault(one.name, next(iter(long), ""))

    def option(found: re.Match[str]) -> str:
        name, truth, quoted, follows = found.groups()
        known = options.get(f"no_{name}" if truth == "False" else name, "")
        return f"{known} {quoted or ''}" if known and (quoted or follows) else known or found[0]

    return re.sub(r"""(?<![\w.'"-])(?<!\d: )(\w+)=(?:(True|False)\b|"([^"]*)"|(?=([^\s:,;]))|)""", option, line)


def _parameters(verb: Any, kind: str) -> list[Any]:
    return [one for one in verb.params if one.param_type_name == kind] if verb else []

"""The `meshwright` command: one verb a file; here they are gathered, and every failure becomes one line."""

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from meshwright import __version__
from meshwright.cli.inputs.plan_words import Words
from meshwright.cli.process.environment import described, set_defaults
from meshwright.cli.process.failure import explain
from meshwright.cli.process.launch import fail, processes, rank
from meshwright.cli.verbs.accuracy import accuracy
from meshwright.cli.verbs.calibrate import calibrate
from meshwright.cli.verbs.compare import compare
from meshwright.cli.verbs.doctor import doctor
from meshwright.cli.verbs.dryrun import dryrun
from meshwright.cli.verbs.eval import evaluate
from meshwright.cli.verbs.explore import explore
from meshwright.cli.verbs.export import export
from meshwright.cli.verbs.generate import generate
from meshwright.cli.verbs.import_ import import_
from meshwright.cli.verbs.init import init
from meshwright.cli.verbs.plan import plan
from meshwright.cli.verbs.profile import profile
from meshwright.cli.verbs.quickstart import quickstart
from meshwright.cli.verbs.report import report
from meshwright.cli.verbs.schema import schema
from meshwright.cli.verbs.train import train
from meshwright.cli.verbs.verify import verify

BROKEN_PIPE = 141
"""What a shell reports for a program that wrote to a closed pipe."""

USAGE_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Base of what the parser raises; some versions of typer carry their own copy of click."""


class Verb(TyperCommand):
    """A command whose --help is false, not unknown, when absent: typer reads the unknown through pydantic, 90 ms."""

    def get_help_option(self, ctx: typer.Context) -> Any:
        """As typer makes it, with a default."""
        return _known(super().get_help_option(ctx))


class Verbs(TyperGroup):
    """The same for a group of commands."""

    def get_help_option(self, ctx: typer.Context) -> Any:
        """As typer makes it, with a default."""
        return _known(super().get_help_option(ctx))


def _known(option: Any) -> Any:
    if option is not None and option.default is None:
        option.default = False
    return option


# Plain help: rich's costs 60 ms of imports on every start.
app = typer.Typer(
    cls=Verbs,
    name="meshwright",
    help="Trains transformer language models: from text on disk to a model that others can load.",
    epilog="Start with: meshwright quickstart",
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=Verb, name="quickstart", short_help="Train a first model, here and now.")(quickstart)
app.command(cls=Verb, name="init", short_help="Print a commented plan.")(init)
app.command(cls=Verb, name="plan", short_help="Rank the layouts of a model on a cluster.")(plan)
app.command(cls=Verb, name="calibrate", short_help="Measure this machine for plan.")(calibrate)
app.command(cls=Verb, name="explore", short_help="Write a page of all layouts.")(explore)
app.command(cls=Verb, name="dryrun", short_help="Peak memory and traffic of a plan, without its hardware.")(dryrun)
app.command(cls=Verb, name="profile", short_help="Measure a few real steps of a plan.")(profile)
app.command(cls=Verb, name="train", short_help="Train a plan.")(train)
app.command(cls=Verb, name="compare", short_help="Planned, dry run and measured, row by row.")(compare)
app.command(cls=Verb, name="report", short_help="Write a page of one or several runs.")(report)
app.command(cls=Verb, name="generate", short_help="Continue a prompt.")(generate)
app.command(cls=Verb, name="eval", short_help="Score a model on a text.")(evaluate)
app.command(cls=Verb, name="export", short_help="Write a run as a Hugging Face directory.")(export)
app.command(cls=Verb, name="import", short_help="Make a run of a Hugging Face directory.")(import_)
app.command(cls=Verb, name="verify", short_help="Compare every kind of layout with one device.")(verify)
app.command(cls=Verb, name="doctor", short_help="Check whether this machine is fit to train.")(doctor)
app.command(cls=Verb, name="accuracy", short_help="Score the planner on published runs.")(accuracy)
app.command(cls=Verb, name="schema", short_help="Print the JSON Schema of plan files.")(schema)
data = typer.Typer(
    cls=Verbs, help="Look at text, split and tokens before training.", short_help="Show text, split and tokens."
)
app.add_typer(data, name="data")


@data.command(cls=Verb, name="show", short_help="Show the first packed sequence, and what it comes from.")
def data_show(
    words: Words = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON document.")] = False,
) -> None:
    """Show text, split, tokenizer and the first packed sequence of a plan, which is given as for train."""
    from meshwright.api.plan_reading import sort_words
    from meshwright.cli.verbs.data import show

    path, overrides, _ = sort_words(words or ())
    show(path, overrides, json)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"meshwright {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error, and warnings.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before or after the verb; `main` has taken --debug out already, here it is only declared for the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and give its exit code: 0 done, 1 failed, 2 bad input, 3 does not fit, 4 outside tolerance,
    141 nobody reads stdout."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"] or ["--help"]
    if not debug:
        warnings.simplefilter("ignore")
    set_defaults(os.environ)
    if debug and rank() == 0:
        print("\n".join(f"meshwright: environment: {line}" for line in described(os.environ)), file=sys.stderr)
    if processes() > 1 and not debug:
        # Before torch is loaded: its sockets warn with the whole C++ stack of what then becomes one line here.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        # Not app(...): it would answer Ctrl-C and closed pipes in its own words.
        verbs = typer.main.get_command(app)
        with verbs.make_context("meshwright", words) as context:
            verbs.invoke(context)
        sys.stdout.flush()
        return 0
    except BrokenPipeError as error:
        _close_stdout()
        if processes() > 1:  # the others must learn why this rank ends
            fail(error, f"rank {rank()} ended: nothing reads its stdout any more (a closed pipe)", BROKEN_PIPE)
        return BROKEN_PIPE
    except typer.Exit as request:
        return request.exit_code
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            import traceback

            traceback.print_exc()
        line, code = _usage(error, words) if isinstance(error, USAGE_ERROR) else explain(error)
        if processes() > 1:
            fail(error, line, code)
        else:
            print(f"meshwright: {line}", file=sys.stderr)
        return code


def _usage(error: Exception, words: Sequence[str]) -> tuple[str, int]:
    """What the parser refused, and where the right spelling is shown."""
    verbs = {entry.name for entry in (*app.registered_commands, *app.registered_groups)}
    verb = next((f"{word} " for word in words if word in verbs), "")
    message = " ".join(error.format_message().split()).rstrip(".")  # type: ignore[attr-defined]
    return f"{message}: see meshwright {verb}--help", 2


def _close_stdout() -> None:
    """The reader is gone; without this the interpreter complains once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""The `meshwright` command: every failure becomes one line; verbs are loaded only when one of them is to be run."""

import os
import sys
import warnings
from collections.abc import Sequence

BROKEN_PIPE = 141
"""What a shell reports for a program that wrote to a closed pipe."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and give its exit code: 0 done, 1 failed, 2 bad input, 3 does not fit, 4 outside tolerance,
    141 nobody reads stdout."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"] or ["--help"]
    if words[0] in ("-h", "--help", "--version"):
        return _told(words[0])
    from meshwright.cli.process.accelerate import number_ranks
    from meshwright.cli.process.environment import described, set_defaults
    from meshwright.cli.process.launch import processes, rank

    number_ranks(os.environ)
    if not debug:
        warnings.simplefilter("ignore")
    set_defaults(os.environ)
    if debug and rank() == 0:
        print("\n".join(f"meshwright: environment: {line}" for line in described(os.environ)), file=sys.stderr)
    if processes() > 1 and not debug:
        # Before torch is loaded: its sockets warn with the whole C++ stack of what then becomes one line here.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return _ran(words, debug=debug)


def _told(option: str) -> int:
    """Print the version or the list of verbs; neither needs a verb, so they come at once."""
    try:
        if option == "--version":
            from meshwright import __version__

            print(f"meshwright {__version__}")
        else:
            from meshwright.cli.terminal.help import lines

            print("\n".join(lines()))
        sys.stdout.flush()
    except BrokenPipeError:
        _close_stdout()
        return BROKEN_PIPE
    return 0


def _ran(words: Sequence[str], *, debug: bool) -> int:
    """Not typer's own way to run a program: it would answer Ctrl-C and closed pipes in its own words."""
    from meshwright.cli.process.failure import explain, refused
    from meshwright.cli.process.launch import fail, processes, rank
    from meshwright.spec.errors import MeshwrightError

    try:
        from meshwright.cli import commands

        commands.run(words)
        sys.stdout.flush()
        return 0
    except BrokenPipeError as error:
        _close_stdout()
        if processes() > 1:  # the others must learn why this rank ends
            fail(error, f"rank {rank()} ended: nothing reads its stdout any more (a closed pipe)", BROKEN_PIPE)
        return BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:
        from meshwright.cli import commands

        if isinstance(error, commands.EXIT):
            return int(error.exit_code)
        if debug:
            import traceback

            traceback.print_exc()
        line, code = refused(error, words) if isinstance(error, commands.USAGE_ERROR) else explain(error)
        line = commands.in_options(line, words) if isinstance(error, MeshwrightError) else line
        if processes() > 1:
            fail(error, line, code)
        else:
            print(f"meshwright: {line}", file=sys.stderr)
        return code


def _close_stdout() -> None:
    """The reader is gone; without this the interpreter complains once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

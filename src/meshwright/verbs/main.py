"""The `meshwright` command. Every failure becomes one line, and a verb is imported only when it runs."""

import os
import sys
import warnings
from collections.abc import Sequence

BROKEN_PIPE = 141
"""Exit code that a shell reports for a program that wrote to a closed pipe."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code.

    0 done, 1 failed, 2 bad input, 3 does not fit, 4 outside tolerance, 130 interrupted, 141 nobody reads stdout.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"] or ["--help"]
    if words[0] in ("-h", "--help", "--version"):
        return _print_overview(words[0])
    from meshwright.interface.process import environment

    # Before any verb is imported: torch reads the environment when it is loaded.
    environment.number_mpi_ranks(os.environ)
    if not debug:
        warnings.simplefilter("ignore")
    environment.set_defaults(os.environ)
    if debug and environment.rank() == 0:
        print(
            "\n".join(f"meshwright: environment: {line}" for line in environment.describe_defaults(os.environ)),
            file=sys.stderr,
        )
    if environment.processes() > 1 and not debug:
        # Before torch is loaded: its sockets warn with the whole C++ stack of what then becomes one line here.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return _run(words, debug=debug)


def _print_overview(option: str) -> int:
    """Print the version or the list of verbs, without importing any verb."""
    try:
        if option == "--version":
            from meshwright import __version__

            print(f"meshwright {__version__}")
        else:
            from meshwright.interface.terminal.help import lines

            print("\n".join(lines()))
        sys.stdout.flush()
    except BrokenPipeError:
        _close_stdout()
        return BROKEN_PIPE
    return 0


def _run(words: Sequence[str], *, debug: bool) -> int:
    """Run a verb. Typer's own runner would answer Ctrl-C and closed pipes in its own words."""
    from meshwright.interface.process.environment import processes, rank
    from meshwright.interface.process.failure import USAGE, explain, explain_usage
    from meshwright.interface.process.launch import fail
    from meshwright.spec.errors import MeshwrightError

    try:
        from meshwright.verbs import commands

        if any("://" in word for word in words):
            from meshwright.interface.urls import has_urls, with_local_paths

            if has_urls(words):
                with with_local_paths(words) as local_words:
                    commands.run(local_words)
                sys.stdout.flush()
                return 0
        commands.run(words)
        sys.stdout.flush()
        return 0
    except BrokenPipeError as error:
        _close_stdout()
        if processes() > 1:  # the others must learn why this rank ends
            fail(error, f"rank {rank()} ended: nothing reads its stdout any more (a closed pipe)", BROKEN_PIPE)
        return BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:
        from meshwright.verbs import commands

        # A verb that has already said everything ends with a code and no line.
        if isinstance(error, commands.EXIT):
            return int(error.exit_code)
        if debug:
            import traceback

            traceback.print_exc()
        is_usage = isinstance(error, commands.USAGE_ERROR)
        if is_usage:
            line, code = explain_usage(error, words), USAGE
        elif isinstance(error, MeshwrightError):
            # Errors mark arguments of Python; the user of a verb knows its options.
            line, code = explain(error, commands.option_writer(words))
        else:
            line, code = explain(error)
        if processes() > 1:
            fail(error, line, code)
        else:
            print(f"meshwright: {line}", file=sys.stderr)
        return code


def _close_stdout() -> None:
    """Redirect stdout to the null device, else the interpreter complains again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""Run a command once and read the figures of all claims that share it."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claims.table import Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a command left behind."""

    status: int
    seconds: float
    stdout: str
    stderr: str


MISSING = re.compile(r"could not import '[^']+'")
"""What pytest says of tests that it left out because a package is not installed: their claim is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A figure, or why there is none: `error` fails the claim, `skipped` leaves its last figure standing."""

    figure: float | None = None
    error: str = ""
    skipped: str = ""


def by_command(claims: Iterable[Claim]) -> dict[str, list[Claim]]:
    """Claims grouped by command, in the order of the table: an identical command runs once."""
    groups: dict[str, list[Claim]] = {}
    for claim in claims:
        groups.setdefault(claim.command, []).append(claim)
    return groups


def execute(command: str, limit_s: float, root: Path) -> Finished:
    """Run a command in `root`, this interpreter's directory first on the path; it and its children end at the limit.

    Paths of this machine are shortened in what it says: the page goes into the repository.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    start = time.perf_counter()
    try:
        process = subprocess.Popen(
            shlex.split(command),
            cwd=root,
            env={**os.environ, "PATH": path, "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        return Finished(status=127, seconds=0.0, stdout="", stderr=_without_paths(str(error), root))
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return Finished(status=124, seconds=limit_s, stdout="", stderr=f"stopped after {limit_s:g} s")
    except BaseException:
        _end(process)
        raise
    seconds = time.perf_counter() - start
    return Finished(status=process.returncode, seconds=seconds, stdout=stdout, stderr=_without_paths(stderr, root))


def read(claim: Claim, finished: Finished) -> Reading:
    """The claim's figure in the claim's unit."""
    if claim.read == "exit status":
        if not finished.status and (missing := MISSING.search(finished.stdout)):
            return Reading(skipped=missing.group())
        return Reading(figure=float(finished.status), error=_last_line(finished) if finished.status else "")
    if finished.status != 0:
        return Reading(error=f"exit status {finished.status}: {_last_line(finished)}")
    if claim.read == "seconds":
        return Reading(figure=finished.seconds / claim.scale)
    document = _document(finished.stdout)
    if isinstance(document, dict) and "skipped" in document:
        return Reading(skipped=str(document["skipped"]))
    try:
        return Reading(figure=float(_lookup(document, claim.read)) / claim.scale)
    except (KeyError, IndexError, TypeError, ValueError):
        return Reading(error=f"no number at {claim.read!r} in what the command printed")


def _document(stdout: str) -> Any:
    """The JSON document on stdout: all of it, or its last line; None when there is none."""
    for text in (stdout, *stdout.strip().splitlines()[-1:]):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    return None


def _lookup(document: Any, path: str) -> Any:
    for key in path.split("."):
        document = document[int(key)] if isinstance(document, list) else document[key]
    return document


def _without_paths(text: str, root: Path) -> str:
    return text.replace(str(root), ".").replace(sys.prefix, "PREFIX").replace(str(Path.home()), "~")


def _last_line(finished: Finished) -> str:
    lines = (finished.stderr.strip() or finished.stdout.strip()).splitlines()
    return lines[-1].strip()[:300] if lines else "no output"


def _end(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()

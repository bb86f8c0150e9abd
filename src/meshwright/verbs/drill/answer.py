"""A drill: short runs of a plan that break on purpose, each compared with one that nothing disturbs."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import IO, Any

from meshwright.interface.answers.answer import Answer, checked
from meshwright.interface.answers.markup import table
from meshwright.interface.terminal.screen_text import aligned
from meshwright.spec.errors import ArgumentError, PlanError, RunError, argument
from meshwright.spec.presets import suggest
from meshwright.spec.units import many
from meshwright.store.durable import refuse_nonempty, refuse_unwritable
from meshwright.store.run_folder import MetricsLog
from meshwright.training.step.watch import read_goodput
from meshwright.verbs.drill.faults import FAULTS, Fault
from meshwright.verbs.drill.object_store import BUCKET, FaultyStore, client_environment, serve

STEPS, EVERY, FAULT_STEP = 60, 4, 10
"""Steps of each run, steps between two checkpoints, and the step of the fault."""
HANG_S, HANG_STEPS = 5.0, 20
"""Limit of a step without progress: so many seconds, or so many steps of the undisturbed run."""
STARTS = 3
"""Starts of the launcher, as a scheduler would repeat them, until the run is done."""
LIMIT_S, END_S = 1800.0, 60.0
"""Longest time of one start, and of its end after SIGTERM."""
SMALL = (
    "model.layers=2", "model.hidden=64", "model.heads=2", "model.kv_heads=2", "model.ffn=128", "recipe.sequence=64",
    "recipe.global_batch=8", "layout.dp_shard=2", "layout.zero=1",
)  # fmt: skip
"""Plan of a drill without a plan: seconds on two cores."""
RUN_LINES = ("meshwright: ", "passed over: ", "note   ", "rank ")
"""Beginnings of lines that the run says about itself, the launcher's and torch's not among them."""
HEAD = ("fault", "noticed after", "lost", "outcome", "what the run says")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of one fault."""

    fault: str
    what: str
    line: str
    """The line that names the fault. Empty = none did."""
    noticed_seconds: float | None
    """Time from the fault to that line. None = no such line."""
    lost_seconds: float
    """Time that the run took longer than the one without a fault."""
    starts: int
    """Number of times that the launcher was started. 2 or more = a scheduler has to start the job again."""
    problem: str
    """Why this fault is not survived. Empty = the run went on by itself, with the same losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill(Answer):
    """Result of a drill: an outcome for each fault. A table on a page."""

    ranks: int
    folder: str
    outcomes: tuple[Outcome, ...]
    skipped: str
    """Faults that could not be tried, and why. Empty = none."""

    @property
    def problems(self) -> int:
        """Number of faults that were not survived."""
        return sum(bool(outcome.problem) for outcome in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        """Return the document of --json."""
        return {"kind": "drill", **asdict(self)}

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per fault."""
        return [asdict(outcome) for outcome in self.outcomes]

    def lines(self) -> Iterator[str]:
        """Yield the table, one line per fault, and the sum."""
        rows = [HEAD[:-1], *(self._cells(outcome)[:-1] for outcome in self.outcomes)]
        yield from (line.rstrip() for line in aligned(rows, left=len(HEAD)))
        yield ""
        for outcome in self.outcomes:
            if outcome.line:
                yield f"{outcome.fault}: {outcome.line}"
        if self.skipped:
            yield f"not tried: {self.skipped}"
        survived = len(self.outcomes) - self.problems
        yield f"{survived} of {many(len(self.outcomes), 'fault')} survived on {many(self.ranks, 'rank')}"

    def _cells(self, outcome: Outcome) -> tuple[str, ...]:
        noticed = "" if outcome.noticed_seconds is None else f"{outcome.noticed_seconds:.1f} s"
        fault = f"{outcome.fault}: {outcome.what}"
        ended = outcome.problem or ("went on" if outcome.starts == 1 else "went on when started again")
        return fault, noticed, f"{outcome.lost_seconds:.0f} s", ended, outcome.line

    def _repr_html_(self) -> str:
        return table(HEAD, [self._cells(outcome) for outcome in self.outcomes])


@checked
def drill(
    *words: str, only: Sequence[str] = (), out: str | Path = "drill", start: str = "", steps: int = STEPS
) -> Drill:
    """Train a plan for some steps without a fault, then once with each, and compare the losses.

    Args:
        words: A plan file and KEY=VALUE changes. None = a small plan on two ranks.
        only: Names of faults. Empty = all.
        out: Folder for the runs, new or empty.
        start: Words of the command that starts one process per rank, before `-m`. Empty = torchrun on this machine.
        steps: Steps of each run.

    Raises:
        PlanError, ArgumentError, RunError: The plan cannot run, or its run without a fault fails.
    """
    names = [fault.name for fault in FAULTS]
    if unknown := next((name for name in only if name not in names), ""):
        raise ArgumentError("only", unknown, "is no fault", suggest(unknown, names))
    if steps < FAULT_STEP + EVERY:
        raise ArgumentError(
            "steps", steps, f"must be at least {FAULT_STEP + EVERY}: a fault comes in step {FAULT_STEP}"
        )
    folder = Path(out)
    refuse_nonempty(folder, "out")
    refuse_unwritable(folder, "out")
    folder.mkdir(parents=True, exist_ok=True)
    drill_runs = _Runs(folder, _words(words, folder, steps), start, steps)
    wanted = [fault for fault in FAULTS if not only or fault.name in only]
    skipped: list[str] = []
    if steps < STEPS and any(fault.name == "slow" for fault in wanted):
        skipped.append(f"slow: needs {argument('steps', STEPS)}")
        wanted = [fault for fault in wanted if fault.name != "slow"]
    with ExitStack() as stack:
        if any(fault.store_mode for fault in wanted):
            try:
                address, drill_runs.store = stack.enter_context(serve())
                drill_runs.store_environment = client_environment(address)
            except PlanError as error:
                if only:
                    raise
                skipped.append(f"{', '.join(fault.name for fault in wanted if fault.store_mode)}: {error}")
                wanted = [fault for fault in wanted if not fault.store_mode]
        drill_runs.measure()
        outcomes = tuple(drill_runs.disturb(fault) for fault in wanted)
    return Drill(ranks=drill_runs.ranks, folder=str(folder), outcomes=outcomes, skipped="; ".join(skipped))


def _words(words: Sequence[str], folder: Path, steps: int) -> list[str]:
    """Return the words of `train`, without run and store."""
    if not words:
        texts = folder / "texts"
        texts.mkdir()
        lines = (f"def f{number}(x):\n    return x + {number}\n\n\n" for number in range(2000))
        (texts / "text.txt").write_text("".join(lines), encoding="utf-8")
        words = (*SMALL, f"data={texts}")
    # The store of a plan is for its real run, and a step that is skipped would hide a fault.
    return [
        *words, f"recipe.steps={steps}", f"recipe.checkpoint_every={EVERY}", "recipe.eval_every=0",
        "recipe.keep_last=3", "recipe.skip_nonfinite=0", "recipe.rollback_spikes=0", "store=", "resume=auto",
    ]  # fmt: skip


class _Runs:
    """The runs of a drill in one folder, one after the other."""

    def __init__(self, folder: Path, words: list[str], start: str, steps: int) -> None:
        from meshwright.interface.planning.plan_reading import read_plan

        self.folder, self.words, self.steps = folder, words, steps
        plan, _ = read_plan(words, {}, processes=None)
        self.ranks = plan.layout.world
        if self.ranks < 2:
            raise PlanError(f"the plan has one rank, and a drill needs two: take {argument('layout.dp_shard', 2)}")
        here = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(self.ranks)]
        self.launcher = shlex.split(start) or [*here, "--max-restarts", "1"]
        self.store_environment: dict[str, str] = {}
        self.store: FaultyStore | None = None
        self.hang_s, self.undisturbed_s, self.losses = HANG_S, 0.0, dict[int, float]()

    def measure(self) -> None:
        """Train without a fault, for the losses and the time of a step. Raises RunError when that fails."""
        run = self.folder / "undisturbed"
        began_s = time.monotonic()
        code, printed = self._start(run, None)
        self.undisturbed_s = time.monotonic() - began_s
        self.losses = read_losses(run)
        if len(self.losses) != self.steps:
            last = printed[-1][1] if printed else "see what it printed"
            raise RunError(f"the run without a fault ended with code {code} after step {len(self.losses)}: {last}")
        if account := read_goodput(run / "goodput.jsonl"):
            self.hang_s = max(HANG_S, HANG_STEPS * account.productive_seconds / self.steps)

    def disturb(self, fault: Fault) -> Outcome:
        """Train with a fault, again and again until the run is done."""
        run, mark = self.folder / fault.name, self.folder / f"{fault.name}.mark"
        if self.store is not None:
            self.store.set_mode(fault.store_mode)
        printed: list[tuple[float, str]] = []
        starts, began_s = 0, time.monotonic()
        while starts < STARTS and len(read_losses(run)) < self.steps:
            starts += 1
            printed += self._start(run, fault)[1]
        named = next(((when, line) for when, line in printed if fault.says and re.search(fault.says, line)), None)
        lost_s = max(0.0, time.monotonic() - began_s - self.undisturbed_s)
        losses = read_losses(run)
        noticed_s = None
        if named is not None and mark.is_file():
            noticed_s = max(0.0, named[0] - float(mark.read_text(encoding="utf-8").split()[0]))
        problem = ""
        if not mark.is_file():
            problem = "the fault did not happen"
        elif len(losses) < self.steps:
            problem = f"ended after step {len(losses)}: {printed[-1][1] if printed else 'it printed nothing'}"
        elif losses != self.losses:
            step = next(step for step, loss in self.losses.items() if losses.get(step) != loss)
            problem = f"other losses from step {step} on"
        elif fault.says and named is None:
            problem = "nothing named it"
        return Outcome(
            fault=fault.name, what=fault.what, line=named[1] if named else "", noticed_seconds=noticed_s,
            lost_seconds=lost_s, starts=starts, problem=problem,
        )  # fmt: skip

    def _start(self, run: Path, fault: Fault | None) -> tuple[int, list[tuple[float, str]]]:
        """Start the launcher once and wait for all its processes. Returns its exit code, and (time, line) of ours."""
        name, rank = (fault.name, fault.rank) if fault else ("none", 0)
        mark = self.folder / f"{name}.mark"
        disturbed = ["-m", "meshwright.verbs.drill.faults", name, str(FAULT_STEP), str(rank), str(mark)]
        words = ["train", *self.words, f"run={run}", "--no-dry-run", f"--hang-after={self.hang_s:g}"]
        environment = dict(os.environ)
        if fault is not None and fault.store_mode:
            environment |= self.store_environment
            words += [f"store.url=s3://{BUCKET}/{name}", "store.keep_last=3"]
        process = subprocess.Popen(
            [*self.launcher, *disturbed, *words], env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        printed: list[tuple[float, str]] = []
        # Its pipe stays open in the ranks, also when the launcher itself is gone.
        reader = Thread(target=_read, args=(process.stdout, self.folder / f"{run.name}.log", printed), daemon=True)
        reader.start()
        end_s = time.monotonic() + LIMIT_S
        signalled = mark.exists()
        try:
            while reader.is_alive() and time.monotonic() < end_s:
                if fault is not None and fault.launcher is not None and not signalled and mark.exists():
                    signalled = True
                    process.send_signal(fault.launcher)
                reader.join(0.05)
        finally:
            # After Ctrl-C too: the launcher ends its ranks, which have sessions of their own.
            if reader.is_alive():
                process.terminate()
                reader.join(END_S)
                process.kill()
        return process.wait(), printed


def _read(stream: IO[str], log: Path, printed: list[tuple[float, str]]) -> None:
    """Copy a stream into a file, and note when each line of ours came."""
    with stream, log.open("a", encoding="utf-8") as file:
        for line in stream:
            file.write(line)
            file.flush()
            if line.startswith(RUN_LINES):
                printed.append((time.time(), line.removeprefix(RUN_LINES[0]).rstrip()))


def read_losses(run: Path) -> dict[int, float]:
    """Return step -> loss of a run. Empty = it has no step."""
    return {row["step"]: row["loss"] for row in MetricsLog.read(run / "metrics.jsonl") if "kind" not in row}

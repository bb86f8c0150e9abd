"""The Watcher protocol, the records that watchers get, the account of wall time, watchers of services. No torch.

TensorBoard and Weights & Biases are extras.
"""

import importlib
import json
import logging
import math
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from meshwright.spec import Plan
from meshwright.spec.errors import RunError
from meshwright.spec.extras import require
from meshwright.spec.units import duration, many
from meshwright.store.durable import replace_file, report_in_one_line
from meshwright.store.run_folder import MetricsLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Statements about a run before it begins, by the plan, the dry run and the trainer."""

    sentences: tuple[tuple[str, str], ...] = ()
    """(label, sentence) of the plan and of the dry run."""
    dry_run: Mapping[str, Any] | None = None
    """The document of a dry run, stored in the run folder. None = there was none."""
    with_documents: Callable[[float], tuple[tuple[str, str], ...]] | None = None
    """Further sentences for packed documents of that many tokens (data.windows.Sequences.document_tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Facts about a run before the first step."""

    plan: Plan
    parameters: int
    device: str
    """Name for people: "CPU, 2 threads" or the GPU's name."""
    first_step: int
    """Steps already done when this process begins. 0 for a fresh run."""
    steps: int
    batch_equation: str
    """`global batch 32 sequences = micro-batch 8 x accumulation 4 x dp 1`."""
    train_tokens: int
    """Tokens of the training text, once through."""
    run_tokens: int
    """Tokens that the whole run reads."""
    bytes_per_token: float
    """Bytes per token of the held-out text. Converts nats per token into bits per byte."""
    peak_flop_per_s: float | None
    """The peak that MFU refers to. None = unknown, and MFU is not printed."""
    losses: tuple[float, ...] = ()
    """Losses of the last logged steps before first_step, for a curve that continues."""
    foreseen: tuple[tuple[str, str], ...] = ()
    """(label, sentence) of plan and dry run."""
    notes: tuple[str, ...] = ()
    """Further notes for people, one sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step. None = not measured in this step, or not known on this machine."""

    step: int
    """Number of steps done, from 1."""
    loss: float
    """Nats per valid token of the step."""
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Cumulative over the whole run."""
    tokens_per_second: float
    seconds: float
    """Cumulative time of all steps."""
    step_seconds: float
    """Time between the ends of the step before and of this one by the device's clock, without pause_seconds."""
    data_wait_seconds: float
    """The host's wait for the batch. A GPU may compute the step before meanwhile."""
    allocated_bytes: int
    """Peak of live tensors (GPU), or resident memory of the process (CPU)."""
    reserved_bytes: int
    """Held by the allocator."""
    pause_seconds: float | None = None
    """Evaluation, samples and checkpoint between the step before and this one. None = none."""
    mfu_causal: float | None = None
    """Share of the peak, with half of attention counted."""
    mfu_full: float | None = None
    hfu: float | None = None
    """Share of the peak, with recomputation counted."""
    noise_scale_tokens: float | None = None
    """Gradient noise scale (McCandlish et al. 2018) in tokens."""
    balance_loss: float | None = None
    """Load-balance loss of a mixture of experts, before its weight."""
    loss_scale: float | None = None
    """fp16 only."""
    global_batch: int
    """Sequences of this step."""
    skipped: str | None = None
    """Why the step changed no weight: `overflow` (fp16), `non-finite`, `spike`. None = it did."""
    skipped_steps: int | None = None
    """Skipped steps of the run so far. None = none."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Further figures of the objective by name. Of pairs: rewards, margin and accuracy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceScore:
    """An evaluation on the held-out part of one source of a mixture."""

    path: str
    loss: float
    """Nats per token. Of pairs: the mean of the objective."""
    bits_per_byte: float | None
    """None = the objective is not cross-entropy."""
    tokens: int
    """Tokens that were scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoss:
    """Loss of one role's words in held-out conversations."""

    loss: float
    """Nats per token."""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalMetrics:
    """One evaluation on held-out text."""

    step: int
    loss: float
    """Nats per token. Of pairs: the mean of the objective."""
    perplexity: float | None
    """None = the objective is not cross-entropy."""
    bits_per_byte: float | None
    tokens: int
    """Tokens that were scored."""
    seconds: float
    figures: Mapping[str, float] = field(default_factory=dict)
    """Figures of the objective by name. Of pairs: rewards, margin and accuracy."""
    sources: tuple[SourceScore, ...] | None = None
    """Each source of a mixture. The figures above are their means by weight. None = there is one text."""
    roles: Mapping[str, RoleLoss] | None = None
    """Loss of each role, when several roles of conversations are trained."""


def numbers(metrics: StepMetrics | EvalMetrics) -> dict[str, Any]:
    """Return every known field of a record by name, figures among them."""
    fields = asdict(metrics)
    fields |= fields.pop("figures")
    return {name: value for name, value in fields.items() if value is not None}


PARTS = ("start", "steps", "data", "evaluation", "save", "other")
"""Parts of a process's time. `other` follows the last step: the plot, the ledger."""
ACCOUNT_BYTES = 512
"""Length of a line of goodput.jsonl. It lies within one page, so no kill tears it."""
ROLLBACK, SLOW_RANK = "rollback", "slow rank"
"""Kinds of records in metrics.jsonl, in addition to steps and evaluations."""
ROLLED_BACK = "rolled back"
"""`stopped` of a line that ends where a process goes back to an earlier checkpoint, and begins another line."""


class SessionLog:
    """Accounts for the wall time of this process in a line of goodput.jsonl, which is rewritten after each step.

    `silent` writes nothing; every rank but the first is silent.

    Args:
        begun: Seconds since 1970 at which the process began.
        first_step: Steps done before: those of the checkpoint that it resumed from.
    """

    def __init__(self, path: Path, *, begun: float, first_step: int, silent: bool = False) -> None:
        self.path = path
        self.record = _new_account(begun, first_step)
        self._compiled_before_s = 0.0
        self._lap_began = time.perf_counter() - max(0.0, time.time() - begun)
        self._handle: int | None = None
        self._offset = 0
        if not silent:
            with report_in_one_line(path):
                self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                # A power cut may leave a part of a line, which is overwritten.
                self._offset = os.fstat(self._handle).st_size // ACCOUNT_BYTES * ACCOUNT_BYTES

    def end_lap(self, part: str) -> None:
        """Add the time since the last lap to a part, and write the line."""
        now = time.perf_counter()
        self.record[part] += now - self._lap_began
        self._lap_began = now
        self._write()

    def _write(self) -> None:
        if self._handle is None:
            return
        account = {name: round(entry, 4) if isinstance(entry, float) else entry for name, entry in self.record.items()}
        line = json.dumps(account).encode().ljust(ACCOUNT_BYTES - 1) + b"\n"
        with report_in_one_line(self.path):
            os.pwrite(self._handle, line, self._offset)

    def count_step(self, step: int, exposed_wait_s: float, compile_s: float) -> None:
        """Note the last step that is done.

        `exposed_wait_s`: time of this step without work, for want of data. `compile_s`: time of all steps so far by
        which those that compiled were longer than the others.
        """
        self.record["step"], self.record["compile"] = step, max(0.0, compile_s - self._compiled_before_s)
        self.record["steps"] -= exposed_wait_s
        self.record["data"] += exposed_wait_s

    def mark_save(self) -> None:
        """Note the useful time until this checkpoint: a later process may resume from it."""
        self.record["saves"] += 1
        useful_s = round(max(0.0, self.record["steps"] - self.record["compile"]), 4)
        # The newest may still be uncommitted, so the one before counts too.
        self.record["marks"] = [*self.record["marks"][-1:], [self.record["step"], useful_s]]

    def roll_back(self, step: int) -> None:
        """Go on in another line from an earlier step, whose checkpoint was loaded since the last lap."""
        self.record["stopped"] = ROLLED_BACK
        self._write()
        self._compiled_before_s += self.record["compile"]
        self.record = _new_account(time.time() - (time.perf_counter() - self._lap_began), step)
        self._offset += ACCOUNT_BYTES
        self.end_lap("start")

    def close(self, stopped: str = "") -> None:
        """End the account. `stopped`: as in the summary of a run; empty = an error ended it."""
        self.record["stopped"] = stopped
        if stopped:
            self.end_lap("other")
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _new_account(begun: float, first_step: int) -> dict[str, Any]:
    return {
        "begun": round(begun, 3), "first_step": first_step, "step": first_step, "stopped": "", "saves": 0,
        "compile": 0.0, "marks": [], **dict.fromkeys(PARTS, 0.0),
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The wall time of a run over all its processes, by rank 0's clock. The parts sum to `wall_seconds`."""

    processes: int
    interruptions: int
    """Processes that a failure, a kill or SIGTERM ended, and that another one followed."""
    steps: int
    """Steps that count."""
    saves: int
    wall_seconds: float
    """Time from the begin of the first process to the last record of the last one, without `idle_seconds`."""
    productive_seconds: float
    """Steps that count, without their wait for data."""
    start_seconds: float
    """First process: import, join, load, and the extra time of steps that compile."""
    evaluation_seconds: float
    """Evaluations and samples."""
    save_seconds: float
    """Time that training waited for checkpoints."""
    data_wait_seconds: float
    """Time without work, for want of data."""
    lost_seconds: float
    """Steps that a later process repeated, or that were made again after a spike of the loss."""
    restart_seconds: float
    """Time from the last record of an interrupted process to the first step of the next, and what that one compiled.
    Going back after a spike counts here too."""
    other_seconds: float
    idle_seconds: float
    """Time between a process that had finished, or that Ctrl-C had ended, and the next."""

    @property
    def share(self) -> float:
        """Productive time over wall time."""
        return self.productive_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def words(self) -> str:
        """One line for people."""
        spent = {
            "lost work": self.lost_seconds, "restarts": self.restart_seconds, "start": self.start_seconds,
            "evaluation and samples": self.evaluation_seconds, "saves": self.save_seconds,
            "wait for data": self.data_wait_seconds, "other": self.other_seconds,
        }  # fmt: skip
        shares = [f", {name} {seconds / self.wall_seconds:.1%}" for name, seconds in spent.items() if seconds]
        over = f"{duration(self.wall_seconds)} in {many(self.processes, 'process', 'processes')}"
        return f"goodput {self.share:.1%} of {over}{''.join(shares)}"


def read_goodput(path: Path) -> Goodput | None:
    """Add up the accounts of a run. None = there are none. Raises RunError for a damaged file."""
    records = MetricsLog.read(path)
    try:
        return _add_accounts(records) if records else None
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged or of another program ({error!r}): remove it") from None


def _add_accounts(records: list[dict[str, Any]]) -> Goodput:
    spent = dict.fromkeys((*PARTS, "lost", "restart", "idle"), 0.0)
    interruptions, last = 0, len(records) - 1
    resumed_at = records[-1]["step"]
    for number in range(last, -1, -1):
        record = records[number]
        useful_s, kept_s = _useful_seconds(record, resumed_at)
        resumed_at = min(resumed_at, record["first_step"])
        spent["steps"] += kept_s
        spent["lost"] += useful_s - kept_s
        before_s = record["start"] + record["steps"] - useful_s
        for part in ("data", "evaluation", "save", "other"):
            spent[part] += record[part]
        if not number:
            spent["start"] = before_s
            continue
        earlier = records[number - 1]
        gap_s = max(0.0, record["begun"] - earlier["begun"] - sum(earlier[part] for part in PARTS))
        by_choice = earlier["stopped"] in ("done", "interrupted")
        interruptions += not by_choice and earlier["stopped"] != ROLLED_BACK
        spent["idle" if by_choice else "restart"] += gap_s
        spent["restart"] += before_s
    return Goodput(
        processes=len(records) - sum(record["stopped"] == ROLLED_BACK for record in records[:-1]),
        interruptions=interruptions, steps=records[-1]["step"],
        saves=sum(record["saves"] for record in records), wall_seconds=sum(spent.values()) - spent["idle"],
        productive_seconds=spent["steps"], start_seconds=spent["start"], evaluation_seconds=spent["evaluation"],
        save_seconds=spent["save"], data_wait_seconds=spent["data"], lost_seconds=spent["lost"],
        restart_seconds=spent["restart"], other_seconds=spent["other"], idle_seconds=spent["idle"],
    )  # fmt: skip


def _useful_seconds(record: Mapping[str, Any], resumed_at: int) -> tuple[float, float]:
    """Return the time of a process's steps without compilation, and that of its steps up to `resumed_at`.

    Between checkpoints, whose times are known, steps count as equally long.
    """
    useful_s = max(0.0, record["steps"] - record["compile"])
    points = [(record["first_step"], 0.0), *record["marks"], (record["step"], useful_s)]
    for (step, until_s), (next_step, next_s) in pairwise(points):
        if resumed_at < next_step:
            # A process that died in its first step has made none.
            share = max(0, resumed_at - step) / max(1, next_step - step)
            return useful_s, min(useful_s, until_s + share * (next_s - until_s))
    return useful_s, useful_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Outcome of a run."""

    step: int
    steps: int
    loss: float
    """Loss of the last step, nats per token."""
    eval_loss: float | None = None
    """Loss of the last evaluation. None = there was none."""
    best_eval_loss: float | None = None
    best_step: int | None = None
    bits_per_byte: float | None = None
    """Bits per byte of the last evaluation."""
    tokens: int
    seconds: float
    """Time of all steps of the run, without evaluations and checkpoints."""
    process_steps: int = 0
    """Steps of this process, fewer than `step` in a resumed run."""
    process_tokens: int = 0
    process_seconds: float = 0.0
    tokens_per_second: float
    """process_tokens / process_seconds. 0 = no step was left for this process."""
    starting_steps: int = 0
    """The first step of this process, and those for which code was compiled."""
    starting_seconds: float = 0.0
    """Time of these steps."""
    steady_tokens_per_second: float | None = None
    """Speed of all other steps of this process. None = there was none."""
    paused_seconds: float = 0.0
    """Evaluations, samples and checkpoints of this process, which `seconds` leaves out."""
    saving_seconds: float = 0.0
    """Time that steps and the end waited for checkpoints."""
    malformed_rows: int = 0
    """Rows that data.malformed=skip left out."""
    peak_allocated_bytes: int
    checkpoint: Path | None
    """The last checkpoint. None = none was written."""
    stopped: str
    """`done`, or why the run ended early: `interrupted` (Ctrl-C), `terminated` (SIGTERM), `preempted` (SIGUSR1)."""
    goodput: Goodput | None = None
    """The wall time of all processes of the run. None = on another rank than the first, or not known."""


@runtime_checkable
class Watcher(Protocol):
    """Observer of a run: a display, a file, a tracking service. Called on rank 0, between steps.

    Subclasses override what they need; the rest does nothing.
    """

    def started(self, info: RunInfo) -> None:
        """Receive what is known, once, before the first step."""
        return

    def stepped(self, metrics: StepMetrics) -> None:
        """Receive a logged step."""
        return

    def evaluated(self, metrics: EvalMetrics) -> None:
        """Receive an evaluation on held-out text."""
        return

    def saved(self, step: int, path: Path) -> None:
        """Receive the path of a committed checkpoint."""
        return

    def stored(self, step: int, url: str) -> None:
        """Receive the URL of the store that has the checkpoint of a step now."""
        return

    def ended(self, summary: Summary) -> None:
        """Receive the outcome, once, when the run has finished or was interrupted. Not called after an exception."""
        return


class Forgiving:
    """A watcher whose failures after the start do not end a long run. After a failure it is not called again."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher, self.failed = watcher, False

    def started(self, info: RunInfo) -> None:
        """Start the watcher. A service that cannot be reached now is an error."""
        self.watcher.started(info)

    def stepped(self, metrics: StepMetrics) -> None:
        """Forward a logged step."""
        self._forward(lambda: self.watcher.stepped(metrics))

    def evaluated(self, metrics: EvalMetrics) -> None:
        """Forward an evaluation."""
        self._forward(lambda: self.watcher.evaluated(metrics))

    def saved(self, step: int, path: Path) -> None:
        """Forward the path of a committed checkpoint."""
        self._forward(lambda: self.watcher.saved(step, path))

    def stored(self, step: int, url: str) -> None:
        """Forward the URL of the store."""
        self._forward(lambda: self.watcher.stored(step, url))

    def ended(self, summary: Summary) -> None:
        """Forward the outcome."""
        self._forward(lambda: self.watcher.ended(summary))

    def _forward(self, call: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            call()
        # A service may raise anything, and a run of days must not end for a lost connection.
        except Exception as error:
            self.failed = True
            log.warning(
                "%s failed and gets no more records; training continues: %r", type(self.watcher).__name__, error
            )


class Scalars(Watcher):
    """Watcher that writes the numbers of steps and evaluations, one scalar each."""

    def stepped(self, metrics: StepMetrics) -> None:
        """Write the numbers of the step."""
        self.write("train", _numbers(metrics), metrics.step)

    def evaluated(self, metrics: EvalMetrics) -> None:
        """Write the numbers of the evaluation."""
        self.write("eval", _numbers(metrics), metrics.step)

    @abstractmethod
    def write(self, group: str, numbers: Mapping[str, float], step: int) -> None:
        """Write each number as GROUP/NAME."""


class TensorBoard(Scalars):
    """Scalars under RUN/tensorboard, one tag per field, over steps."""

    def __init__(self) -> None:
        require("tensorboard", "--tensorboard")
        self._module = importlib.import_module("torch.utils.tensorboard")

    def started(self, info: RunInfo) -> None:
        """Open the event file. TensorBoard itself hides steps beyond the one resumed from."""
        folder = Path(info.plan.run) / "tensorboard"
        self._writer = self._module.SummaryWriter(str(folder), purge_step=info.first_step + 1)
        self._writer.add_text("plan", f"```\n{json.dumps(asdict(info.plan), indent=2)}\n```")

    def ended(self, summary: Summary) -> None:
        """Close the event file."""
        self._writer.close()

    def write(self, group: str, numbers: Mapping[str, float], step: int) -> None:
        """Write each number to the event file."""
        for name, value in numbers.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)


class WandB(Scalars):
    """A Weights & Biases run named like the run folder; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self) -> None:
        require("wandb", "--wandb")
        self._wandb = importlib.import_module("wandb")

    def started(self, info: RunInfo) -> None:
        """Open the run. A resumed folder continues the same one."""
        folder = Path(info.plan.run)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project="meshwright",
            name=folder.name,
            id=_stable_id(folder),
            resume="allow",
            dir=str(folder),
            config=asdict(info.plan),
        )

    def ended(self, summary: Summary) -> None:
        """Close the run."""
        self._run.finish()

    def write(self, group: str, numbers: Mapping[str, float], step: int) -> None:
        """Log all numbers of the step in one call."""
        self._run.log({f"{group}/{name}": value for name, value in numbers.items()}, step=step)


def _numbers(metrics: StepMetrics | EvalMetrics) -> dict[str, float]:
    """Return every finite number of a record, except the step."""
    fields = numbers(metrics)
    fields.pop("step")
    return {name: value for name, value in fields.items() if isinstance(value, int | float) and math.isfinite(value)}


def _stable_id(folder: Path) -> str:
    """Return the id written on first use, so that a resumed run continues in the same place."""
    path = folder / "wandb-id"
    if not path.exists():
        import secrets

        replace_file(path, secrets.token_hex(4).encode())
    return path.read_text(encoding="ascii").strip()

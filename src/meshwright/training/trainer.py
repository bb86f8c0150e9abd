"""The loop over steps: feed, step, evaluate, save, report; until the last step or an interruption."""

import logging
import math
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from meshwright.data import Corpus
from meshwright.data.corpus.corpus import TokenStream
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.parallel.engine import check_replicas
from meshwright.parallel.health.heartbeat import Heartbeat
from meshwright.spec import Data, Plan
from meshwright.spec.errors import CheckpointError, NonFiniteLoss, StoreError
from meshwright.spec.recipe.recipe import DataRead
from meshwright.spec.rules.passes import draws_dropout
from meshwright.store import checkpoint, checkpoint_folder
from meshwright.store.run_folder import MetricsLog, RunFolder, write_document
from meshwright.store.saver import Saver
from meshwright.training import device
from meshwright.training.job import Job, copy_to_machines, replace_from_store
from meshwright.training.objectives.objectives import TEXT, Task
from meshwright.training.optimizer.optimizer import learning_rate
from meshwright.training.records import (
    PendingStep,
    StepClock,
    StepLedger,
    build_metrics,
    name_non_finite_rank,
    run_info,
    run_notes,
    start_readback,
)
from meshwright.training.run_samples import RunSamples
from meshwright.training.step.batches import Feed, PackedRows, Share, split
from meshwright.training.step.evaluate import HeldOutRows, score_sources
from meshwright.training.step.interrupt import SIGNALS, Interrupt, StopAgreement
from meshwright.training.step.spikes import Spike
from meshwright.training.step.state import TrainState
from meshwright.training.step.step import train_step
from meshwright.training.step.watch import (
    ROLLBACK,
    SLOW_RANK,
    EvalMetrics,
    RunInfo,
    SessionLog,
    Summary,
    Watcher,
    numbers,
    read_goodput,
)

if TYPE_CHECKING:
    from meshwright.store.mirror import Mirror

logger = logging.getLogger(__name__)


def reads_late(device: torch.device) -> bool:
    """Return whether a step's numbers are read while the next one runs, so that a GPU always has work.

    On a CPU a step is over when its call returns.
    """
    return device.type == "cuda"


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The loop over steps, with everything that a step needs."""

    job: Job
    state: TrainState
    corpus: Corpus
    folder: RunFolder
    """Written by rank 0 alone, read by all."""
    share: Share
    """Part of every step's rows that this rank reads."""
    watchers: tuple[Watcher, ...]
    task: Task = TEXT
    """Objective of a step, and its inputs in addition to the text."""
    changes: tuple[str, ...] = ()
    """Differences from the run that it resumes, as `key=value (was value)`."""
    plan: Plan = field(init=False)
    device: torch.device = field(init=False)
    pulse: Heartbeat = field(init=False)
    saver: Saver = field(init=False)
    ledger: StepLedger = field(init=False)
    samples: RunSamples = field(init=False)
    late: bool = field(init=False)
    """True when a step's numbers are read while the next one runs."""
    _stop: StopAgreement = field(init=False)
    _pending: deque[PendingStep] = field(init=False, default_factory=deque)
    _clock: StepClock = field(init=False)
    _session: SessionLog = field(init=False)
    _last_loss: float = field(init=False, default=math.nan)
    _spike: Spike | None = field(init=False, default=None)
    """A reason to go back, found in the steps that were read last."""

    def __post_init__(self) -> None:
        self.plan, self.device, self.pulse = self.job.plan, self.job.device, self.job.pulse
        self.late = reads_late(self.device)
        mesh = self.state.engine.mesh
        # Stages have other layers, and ranks of a group of experts get as many tokens as the text sends them.
        self.pulse.role = f"stage {mesh['pp'].index}, experts {mesh['ep'].index}"
        self.ledger = StepLedger(self.state, self.task.objective)
        self.samples = RunSamples(self.plan, self.corpus, self.folder)
        self.saver = Saver(
            self.folder.checkpoints,
            keep_last=self.plan.recipe.keep_last,
            group=self.job.saving,
            saved=lambda step, path: self._notify("saved", step, path),
            stored=lambda step: self._notify("stored", step, self.plan.store.url),
            begun=self.pulse.piece_begun,
            mirror=self._open_mirror(),
            sharing=self.job.sharing,
        )

    def _open_mirror(self) -> "Mirror | None":
        """Return the upload of checkpoints, which begins with the saver. None = the plan has no store."""
        if self.job.ownership is None:
            return None
        from meshwright.store.mirror import Mirror

        world = self.state.engine.mesh["world"]
        return Mirror(
            self.plan.store, self.job.ownership, rank=world.index, writers=world.size, waiting=self.pulse.piece_begun
        )

    def train(self, stop: Interrupt) -> Summary:
        """Run steps until the last one, an interruption, or a non-finite loss."""
        recipe, progress = self.plan.recipe, self.state.progress
        # Rows have numbers, so that a resumed run continues with the next row, under any layout.
        sampler = numbered_rows(self.plan.data, recipe, self.corpus, self.corpus.train, shuffle=True)
        balanced = self.plan.model.moe is not None and recipe.balance_loss > 0
        rows = PackedRows(
            sampler, recipe.document_mask, self.task.read_training_answers, self.task.read_rows, padding=balanced
        )
        seed = recipe.seed if draws_dropout(self.plan.model, recipe) else None
        feed = Feed(rows, self.device, share=self.share, dropout_seed=seed)
        log = MetricsLog(self.folder.metrics, silent=not self.is_rank_zero)
        if self.is_rank_zero and self.job.forecast.dry_run is not None:
            write_document(self.folder.dry_run, self.job.forecast.dry_run)
        # Watchers come before the first step: a service that cannot be reached ends the run here.
        self._notify("started", self._describe_run())
        if self.plan.store.url:
            from meshwright.store.stored_run import RUN_ID, write_run_id

            # Only now: the folder of a run that was refused goes away: its store would belong to no run.
            self.job.rank_zero.run(lambda: write_run_id(self.plan.store, self.job.resume, self.folder.path))
            copy_to_machines(self.job, self.folder.path / RUN_ID)
        self.state.engine.train()
        # Signals reach ranks at different times, so all must agree on the step after which they stop.
        self._stop = StopAgreement(self.state.engine.mesh["world"], self.device, stop, self.saver)
        saved = progress.step
        score: float | None = None
        # A finished run that is started again does no work, so its account stays as it is.
        self._session = SessionLog(
            self.folder.goodput,
            begun=self.pulse.begun,
            first_step=progress.step,
            silent=not self.is_rank_zero or progress.step >= recipe.steps,
        )
        self._session.end_lap("start")
        self._clock = StepClock(self.device)
        try:
            with self.saver:
                self.saver.upload_resumed(progress.step, self.job.stored_step)
                while progress.step < recipe.steps and not self._stop.reached(under_way=bool(self._pending)):
                    self._begin_step(feed)
                    evaluates = _due(progress.step, recipe.eval_every, recipe.steps)
                    saves = _due(progress.step, recipe.checkpoint_every, recipe.steps)
                    samples = self.samples.due(progress.step)
                    # Evaluation, samples and checkpoint read the weights of this very step: its numbers come first.
                    self._record_steps(log, keep=int(self.late and not (evaluates or saves or samples)))
                    self._session.end_lap("steps")
                    if self._spike is not None and self._roll_back(self._spike, log):
                        progress, score = self.state.progress, None
                        saved = progress.step
                        continue
                    score = self._evaluate(log) if evaluates else None
                    if samples:
                        self.samples.take(self.state.engine, progress.step)
                    if evaluates or samples:
                        self._session.end_lap("evaluation")
                    if saves:
                        self._save(log, score, goes_on=progress.step < recipe.steps)
                        saved = progress.step
                    if evaluates or samples or saves:
                        self._clock.end_pause()
                self._record_steps(log)
                self._session.end_lap("steps")
                # An interrupted run does not go back any more.
                if self._spike is not None and self._spike.error is not None:
                    raise self._spike.error()
                # An interruption came between two checkpoints, and its work is kept.
                if saved != progress.step:
                    self._save(log, score)
                    self._clock.end_pause()
            # Leaving the saver waits for the last checkpoint.
            self._session.end_lap("save")
        except BaseException:
            self._session.close()
            raise
        finally:
            feed.close()
            log.close()
        return self._finish(stop)

    @property
    def is_rank_zero(self) -> bool:
        """True on the rank that writes and reports."""
        return self.state.engine.mesh.rank == 0

    def _begin_step(self, feed: Feed) -> None:
        """Begin the next step. Its numbers are read later."""
        recipe, layout, progress = self.plan.recipe, self.plan.layout, self.state.progress
        step = progress.step + 1
        # The watchdog names this step when a rank hangs in it.
        self.pulse.step = step
        count = recipe.global_batch_at(progress.tokens)
        # The next batch may be larger (a batch ramp), and its thread starts to read it now.
        following = recipe.global_batch_at(progress.tokens + count * recipe.sequence)
        asked_s = time.perf_counter()
        batch = feed.take(progress.cursor, count, following if progress.step + 1 < recipe.steps else 0)
        waited = time.perf_counter() - asked_s
        self._clock.feed()
        self.ledger.begin()
        outcome = train_step(
            self.state.engine,
            self.state.optimizer,
            split(self.task.rows(batch, self.state.engine, progress.cursor), layout.micro_batch_of(count)),
            rate=learning_rate(recipe, step),
            clip=recipe.clip,
            balance_loss=recipe.balance_loss,
            scaler=self.state.scaler,
            skipper=self.state.skipper,
            spike_factor=recipe.skip_spikes if step > recipe.rising_steps else 0.0,
            measure_noise=bool(recipe.noise_scale_every) and step % recipe.noise_scale_every == 0,
            before_update=self.ledger.look,
            objective=self.task.objective,
        )
        self.ledger.end(step)
        progress.step, progress.cursor = step, progress.cursor + count
        progress.tokens += count * recipe.sequence
        numbers = start_readback(
            outcome,
            skipping=self.state.skipper.state,
            loss_scale=self.state.scaler.scale if self.state.scaler else None,
            # The agreement travels with the numbers: a collective of its own would wait for the device.
            stop=self._stop.announce() if self.late and self._stop.world.size > 1 else None,
        )
        pending = PendingStep(
            step=step,
            global_batch=count,
            tokens=progress.tokens,
            span=self._clock.end_step(numbers.border),
            data_wait_s=waited,
            part=outcome.part,
            micro_tokens=outcome.micro_tokens,
            numbers=numbers,
        )
        self._pending.append(pending)

    def _record_steps(self, log: MetricsLog, *, keep: int = 0) -> None:
        """Read, record and report the steps that were begun, except the last `keep` ones."""
        while len(self._pending) > keep:
            self._record_step(self._pending.popleft(), log)

    def _record_step(self, pending: PendingStep, log: MetricsLog) -> None:
        recipe, progress = self.plan.recipe, self.state.progress
        values = self._read_numbers(pending)
        # Only now is the step known to have ended: on a GPU its call returned long before.
        self.pulse.step_ended(pending.span.seconds)
        progress.seconds += pending.span.seconds
        self._clock.count(pending.span, pending.global_batch * recipe.sequence)
        # A GPU computes the step before during the host's wait: only time without work counts. What the first step
        # waits for is the start of the reader, and is counted with its compilation.
        exposed_wait_s = 0.0 if pending.span.compiled else min(pending.data_wait_s, pending.span.idle_s)
        self._session.count_step(pending.step, exposed_wait_s, self._clock.compile_s)
        # Norms of micro-batches and of their sum are two batch sizes, which the noise scale needs.
        if pending.micro_tokens:
            progress.noise.add(values["micro_squared"], pending.micro_tokens, values["grad_norm"][0] ** 2)
        metrics = build_metrics(
            self.plan,
            pending,
            values,
            device_used=self.device,
            run_s=progress.seconds,
            noise_scale_tokens=progress.noise.tokens,
        )
        self._last_loss = metrics.loss
        # The loss of a warm-up may rise.
        if recipe.rollback_spikes and pending.step > recipe.rising_steps:
            self._spike = self.state.spikes.judge(pending.step, metrics.loss) or self._spike
        log.append(numbers(metrics))
        while self.pulse.slow_ranks:
            slow = self.pulse.slow_ranks.popleft()
            self._warn(str(slow))
            log.append({"step": pending.step, "kind": SLOW_RANK, **asdict(slow)})
        if _due(pending.step, recipe.log_every, recipe.steps) or metrics.skipped in ("non-finite", "spike"):
            self._notify("stepped", metrics)

    def _read_numbers(self, pending: PendingStep) -> dict[str, list[float]]:
        """Return the numbers of a step. Raises NonFiniteLoss after more bad steps in a row than the recipe skips.

        With recipe.rollback_spikes, the run may go back instead.
        """
        values = pending.numbers.read()
        if "stop" in values:
            self._stop.receive(values["stop"])
        in_a_row, most = int(values["skipping"][2]), self.plan.recipe.skip_nonfinite
        if in_a_row <= most:
            return values
        loss, error = values["loss"][0], partial(self._non_finite_step, pending, values, self.pulse.calls.last)
        if not self.plan.recipe.rollback_spikes:
            raise error()
        words = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {values['grad_norm'][0]}"
        self._spike = Spike(begun=pending.step - most, words=f"{words} in step {pending.step}", error=error)
        return values

    def _non_finite_step(self, pending: PendingStep, values: dict[str, list[float]], last: str) -> NonFiniteLoss:
        """Return the error of a step that is bad, after as many as the recipe skips. All ranks call this."""
        loss, most = values["loss"][0], self.plan.recipe.skip_nonfinite
        row = f", as were {most} before it (recipe.skip_nonfinite={most})" if most else ""
        # A collective on every rank, whatever its own loss: ranks that disagree about that must still do the same.
        who = name_non_finite_rank(self._stop.world, pending.part) if self._stop.world.size > 1 else ""
        if math.isfinite(loss):  # gradients are summed over ranks before anyone can look, so no rank can be named
            norm = values["grad_norm"][0]
            return self._non_finite_error(pending.step, "all ranks, backward", last, "gradient norm", norm, row)
        return self._non_finite_error(pending.step, f"{who}, forward", last, "loss", loss, row)

    def _non_finite_error(
        self, step: int, who: str, call: str, what: str, number: float, row: str = ""
    ) -> NonFiniteLoss:
        where = f" ({who}, last collective {call})" if self.plan.layout.world > 1 else ""
        # A save under way may still become the last good checkpoint that the message names.
        self.saver.settle()
        last = checkpoint.find_latest(self.folder.checkpoints) if self.job.sharing is None else self.plan.store.url
        remaining = f"the last good checkpoint is {last}" if last else "no checkpoint had been written yet"
        return NonFiniteLoss(
            f"step {step}{where}: the {what} is {number}{row}; {remaining}. Lower recipe.learning_rate (now "
            f"{self.plan.recipe.learning_rate}), lengthen recipe.warmup_steps, or look at the data of this step"
        )

    def _roll_back(self, spike: Spike, log: MetricsLog) -> bool:
        """Load the newest checkpoint from before a spike, and skip the data read since. All ranks together.

        Returns False when there is none, or no rollback is left, and the run goes on. Raises the error of the spike
        if it has one.
        """
        abandoned, most = self.state.progress, self.plan.recipe.rollback_spikes
        self._spike, rollbacks = None, self.state.spikes.rollbacks + 1
        self.saver.wait(uploads=True)
        folder, begun = self.folder.checkpoints, self.pulse.piece_begun
        checkpoints = self.job.rank_zero.broadcast(lambda: checkpoint_folder.list_checkpoints(folder))
        earlier = [folder / saved.name for saved in checkpoints[::-1] if saved.step < spike.begun]
        path, fetch = None, partial(replace_from_store, self.job)
        why = "the one rollback is used up" if most == 1 else f"all {most} rollbacks are used up"
        if rollbacks <= most:
            why = "no checkpoint is from before it"
            try:
                path = checkpoint.find_newest_whole(earlier, begun=begun, fetch=fetch)
                # The store may reach further back than a disk that was new at the start.
                path = path or fetch(folder / f"step-{spike.begun - 1:06d}", None)
            except (CheckpointError, StoreError) as error:  # on all ranks alike
                why = str(error)
        if path is None:
            if spike.error is not None:
                raise spike.error()
            whole = [folder / saved.name for saved in checkpoints if saved.step < spike.begun and not saved.problem]
            remains, is_kept = "", False
            if self.is_rank_zero and whole and rollbacks > most and not self.state.spikes.is_kept:
                try:
                    remains = f". {checkpoint_folder.keep_aside(whole[-1], begun)} is from before it, and stays"
                    is_kept = True
                except OSError as error:
                    reason = (error.strerror or str(error)).lower()
                    remains = f". {whole[-1]} is from before it: copy it, since later saves remove it ({reason})"
            self.state.spikes.accept(is_kept=is_kept)
            self._warn(f"{spike.words}: {why}, and the run goes on (recipe.rollback_spikes){remains}")
            return False
        # A step under way on a GPU belongs to what is abandoned.
        self._pending.clear()
        self.state.load(path)
        progress, step = self.state.progress, self.state.progress.step
        skipped = abandoned.cursor - progress.cursor
        # The next step reads what no step has read. Its rate is that of its number, as before.
        progress.cursor, self.state.spikes.rollbacks = abandoned.cursor, rollbacks
        if self.is_rank_zero:
            # Whoever takes the last checkpoint shall not get one within the spike.
            checkpoint_folder.remove_surplus(folder, step, self.plan.recipe.keep_last)
            for records in (log, MetricsLog(self.folder.samples)):
                records.truncate_to(step)
        self.saver.go_back(path)
        # Counted as a part of the next step: a run that resumes from this checkpoint drops it, and writes it again.
        log.append(
            {"step": step + 1, "kind": ROLLBACK, "begun": spike.begun, "ended": abandoned.step,
             "skipped_rows": skipped, "rollbacks": rollbacks}
        )  # fmt: skip
        self._warn(
            f"{spike.words}: back to {path.name}, and {skipped} rows are skipped (rollback {rollbacks} of at most "
            f"{most})"
        )
        self._session.roll_back(step)
        self._clock.end_pause()
        return True

    def _warn(self, line: str) -> None:
        if self.is_rank_zero:
            logger.warning(line)

    def _evaluate(self, log: MetricsLog) -> float | None:
        """Record, report and return the held-out loss. None = nothing is held out."""
        recipe, progress = self.plan.recipe, self.state.progress
        metrics = score_sources(self.plan.data, self.corpus.validation, recipe.eval_sequences, self._score)
        if metrics is None:
            return None
        if not math.isfinite(metrics.loss):
            raise self._non_finite_error(
                progress.step, "all ranks, evaluate", self.pulse.calls.last, "held-out loss", metrics.loss
            )
        progress.eval_loss = metrics.loss
        if progress.best_eval_loss is None or metrics.loss < progress.best_eval_loss:
            progress.best_eval_loss, progress.best_step = metrics.loss, progress.step
        log.append({"step": progress.step, "kind": "eval", **numbers(metrics)})
        self._notify("evaluated", metrics)
        return metrics.loss

    def _score(self, data: Data, stream: TokenStream, limit: int) -> EvalMetrics:
        recipe = self.plan.recipe
        rows = HeldOutRows(
            rows=numbered_rows(data, recipe, self.corpus, stream, shuffle=False), stream=stream,
            document_mask=recipe.document_mask, at_once=self.plan.layout.micro_batch_of(recipe.global_batch),
            limit=limit, objective=self.task.scored, read_answers=self.task.read_validation_answers,
        )  # fmt: skip
        return rows.evaluate(self.state.engine, self.device, self.share, step=self.state.progress.step)

    def _save(self, log: MetricsLog, score: float | None, *, goes_on: bool = False) -> None:
        """Save a checkpoint. `score` is the held-out loss of these very weights, None = not evaluated."""
        progress = self.state.progress
        # Before anything is written: a flipped bit in one copy must not become a checkpoint.
        check_replicas(self.state.engine, progress.step)
        # Metrics must be on disk first: a resumed run cuts them at the checkpoint's step.
        log.sync()
        fingerprints = self.corpus.fingerprint, self.corpus.tokenizer.fingerprint
        values = self.state.values(self.plan.recipe, *fingerprints, self.plan.data)
        self.saver.save(progress.step, self.state.tensors(), values, score, last=not goes_on)
        self._session.mark_save()
        self._session.end_lap("save")

    def _describe_run(self) -> RunInfo:
        progress = self.state.progress
        shows_earlier_losses = self.watchers and progress.step
        return run_info(
            self.plan,
            self.corpus,
            self.device,
            read=DataRead(steps=progress.step, rows=progress.cursor, tokens=progress.tokens),
            losses=MetricsLog.losses(self.folder.metrics, self.plan.recipe.log_every) if shows_earlier_losses else (),
            forecast=self.job.forecast,
            notes=tuple(
                run_notes(
                    self.plan,
                    self.device,
                    *self.samples.notes(),
                    steps_done=self.state.progress.step,
                    length=next((key for key in ("epochs", "tokens") if getattr(self.plan.recipe, key)), "steps"),
                    changes=", ".join(self.changes),
                )
            ),
        )

    def _finish(self, stop: Interrupt) -> Summary:
        from meshwright.training.plot import loss_plot

        # Whoever sent a signal may not wait long enough for a picture.
        if self.is_rank_zero and stop.requested is None and (records := MetricsLog.read(self.folder.metrics)):
            loss_plot(records, self.folder.loss_plot)
        ledger = self.ledger.document(self.device, self.plan) if self.ledger.step else None
        if self.is_rank_zero and ledger:
            write_document(self.folder.ledger, ledger)
        self._clock.close()
        progress, validation, clock = self.state.progress, self.corpus.validation, self._clock
        bits = None
        if progress.eval_loss is not None and not self.plan.recipe.traits.pairs:
            bits = progress.eval_loss / math.log(2) / validation.bytes_per_token
        stopped = SIGNALS.get(self._stop.agreed or "", "done")
        self._session.close(stopped)
        if self.is_rank_zero and self.job.ownership is not None:
            from meshwright.store.mirror import upload_last_records

            upload_last_records(self.plan.store, self.job.ownership, self.folder.path)
        summary = Summary(
            step=progress.step,
            steps=self.plan.recipe.steps,
            loss=self._last_loss,
            eval_loss=progress.eval_loss,
            best_eval_loss=progress.best_eval_loss,
            best_step=progress.best_step,
            bits_per_byte=bits,
            tokens=progress.tokens,
            seconds=progress.seconds,
            process_steps=clock.steps,
            process_tokens=clock.tokens,
            process_seconds=clock.seconds,
            tokens_per_second=clock.tokens / clock.seconds if clock.seconds else 0.0,
            starting_steps=clock.starting_steps,
            starting_seconds=clock.starting_s,
            steady_tokens_per_second=clock.steady_tokens_per_second,
            paused_seconds=clock.paused_s,
            saving_seconds=self.saver.blocked_s,
            malformed_rows=self.corpus.malformed.malformed,
            peak_allocated_bytes=device.peak_bytes(self.device),
            # Where machines share no folder, only a store has whole ones.
            checkpoint=self.saver.newest or checkpoint.find_latest(self.folder.checkpoints),
            stopped=stopped,
            goodput=read_goodput(self.folder.goodput) if self.is_rank_zero else None,
        )
        self._notify("ended", summary)
        return summary

    def _notify(self, event: str, *details: Any) -> None:
        for watcher in self.watchers:
            getattr(watcher, event)(*details)


def _due(step: int, every: int, last: int) -> bool:
    """Return whether something is due: every so many steps, and at the last one. 0 = at the last one only."""
    return step == last or (bool(every) and step % every == 0)

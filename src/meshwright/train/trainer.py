"""The loop over steps: feed, step, evaluate, save, tell; until the last one or an interruption."""

import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from meshwright.data import Corpus, Sampler
from meshwright.model.hub import unwritable
from meshwright.parallel.apply import schedule_notes
from meshwright.parallel.group import Group
from meshwright.parallel.pulse import Pulse
from meshwright.spec import Plan, num_parameters
from meshwright.spec.errors import NonFiniteLoss
from meshwright.spec.flop import TokenFlop, token_flop
from meshwright.train import checkpoint, device
from meshwright.train.batches import Feed, Share, held_out, split
from meshwright.train.evaluate import evaluate
from meshwright.train.interrupt import Interrupt
from meshwright.train.ledger import StepLedger
from meshwright.train.rate import learning_rate
from meshwright.train.run import MetricsLog, RunFolder
from meshwright.train.saver import Saver
from meshwright.train.state import TrainState
from meshwright.train.step import StepResult, train_step
from meshwright.train.watch import EvalMetrics, Foreseen, RunInfo, StepMetrics, Summary, Watcher

SIGNALS = (None, "SIGTERM", "SIGINT")
"""What may have asked a run to end, as ranks tell each other."""
SMALLEST_LOSS_SCALE = 1.0
"""fp16: below this scale the overflow is not the scale's fault any more."""


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The loop over steps; holds what every step needs."""

    plan: Plan
    state: TrainState
    corpus: Corpus
    folder: RunFolder
    """Written by the first rank alone, read by all."""
    share: Share
    """What this rank reads of every step."""
    device: torch.device
    pulse: Pulse
    """Told of each step."""
    saving: Group | None
    """Of the thread that writes checkpoints; None = they are written between steps."""
    watchers: tuple[Watcher, ...]
    changes: tuple[str, ...] = ()
    """What this run does otherwise than the one it goes on from, `key=value (was value)`."""
    foreseen: Foreseen = field(default_factory=Foreseen)
    """What is known of the run before it begins."""
    saver: Saver = field(init=False)
    ledger: StepLedger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = StepLedger(self.state)
        self.saver = Saver(
            self.folder.checkpoints,
            keep_last=self.plan.recipe.keep_last,
            group=self.saving,
            saved=lambda step, path: self._tell("saved", step, path),
            begun=self.pulse.piece_begun,
        )

    def train(self, stop: Interrupt) -> Summary:
        """Steps until the last one, an interruption or a loss that is no number."""
        recipe, progress = self.plan.recipe, self.state.progress
        sampler = self._sampler(self.corpus.train, shuffle=True)
        feed = Feed(sampler, self.device, document_mask=recipe.document_mask, share=self.share)
        log = MetricsLog(self.folder.metrics, silent=not self.is_first)
        if self.is_first and self.foreseen.dry_run is not None:
            self.folder.keep_dry_run(self.foreseen.dry_run)
        self._tell("started", self._info())
        self.state.engine.train()
        begun, first_tokens, loss, saved = time.perf_counter(), progress.tokens, math.nan, progress.step
        score: float | None = None
        try:
            with self.saver:
                while progress.step < recipe.steps and not self._stops(stop):
                    metrics = self._step(feed)
                    loss = metrics.loss
                    log.append(_record(metrics))
                    if _due(progress.step, recipe.log_every, recipe.steps):
                        self._tell("stepped", metrics)
                    score = self._evaluate(log) if _due(progress.step, recipe.eval_every, recipe.steps) else None
                    if _due(progress.step, recipe.checkpoint_every, recipe.steps):
                        self._save(log, score, goes_on=progress.step < recipe.steps)
                        saved = progress.step
                if saved != progress.step:
                    self._save(log, score)
        finally:
            feed.close()
            log.close()
        return self._finish(loss, time.perf_counter() - begun, progress.tokens - first_tokens, stop)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and speaks for all."""
        return self.state.engine.mesh.rank == 0

    def _stops(self, stop: Interrupt) -> bool:
        """Whether any rank was asked to stop: all end after the same step. CheckpointError on all where one could not
        write in the background."""
        world, asked, failed = self.state.engine.mesh["world"], stop.requested, int(self.saver.failed())
        if world.size > 1:
            told = torch.tensor((SIGNALS.index(asked), failed), dtype=torch.int32, device=self.device)
            signal, failed = world.all_reduce(told, "max").tolist()
            asked = SIGNALS[signal]
        if failed:
            self.saver.give_up()
        if asked is not None:  # a signal that came meanwhile stays for the next step
            stop.requested = asked
        return asked is not None

    def _sampler(self, stream: Any, *, shuffle: bool) -> Sampler:
        return Sampler(
            stream,
            sequence=self.plan.recipe.sequence,
            tokenizer_separator=self.corpus.tokenizer.separator,
            seed=self.plan.recipe.seed,
            shuffle=shuffle,
        )

    def _step(self, feed: Feed) -> StepMetrics:
        recipe, layout, progress = self.plan.recipe, self.plan.layout, self.state.progress
        started, step = time.perf_counter(), progress.step + 1
        self.pulse.step = step
        count = recipe.global_batch_at(progress.tokens)
        following = recipe.global_batch_at(progress.tokens + count * recipe.sequence)
        batch = feed.take(progress.cursor, count, following if progress.step + 1 < recipe.steps else 0)
        waited = time.perf_counter() - started
        measure = bool(recipe.noise_scale_every) and step % recipe.noise_scale_every == 0
        self.ledger.begin()
        result = train_step(
            self.state.engine,
            self.state.optimizer,
            split(batch, layout.micro_batch_of(count)),
            rate=learning_rate(recipe, step),
            clip=recipe.clip,
            balance_loss=recipe.balance_loss,
            scaler=self.state.scaler,
            measure_noise=measure,
            before_update=self.ledger.look,
        )
        self.ledger.end(step)
        loss, norm = self._check(step, result)
        if measure:
            squared = [value.item() for value in result.micro_squared]
            progress.noise.add(squared, result.micro_tokens, norm**2)
        elapsed = time.perf_counter() - started
        self.pulse.step_ended(elapsed)
        tokens = count * recipe.sequence
        progress.step, progress.cursor = step, progress.cursor + count
        progress.tokens, progress.seconds = progress.tokens + tokens, progress.seconds + elapsed
        return self._metrics(result, loss, norm, count, elapsed, waited)

    def _check(self, step: int, result: StepResult) -> tuple[float, float]:
        """Loss and gradient norm as numbers; a loss that is none ends the run (the weights were not touched)."""
        loss, norm = torch.stack((result.loss, result.grad_norm)).tolist()
        scaler = self.state.scaler
        overflow_is_normal = scaler is not None and scaler.scale.item() >= SMALLEST_LOSS_SCALE
        if math.isfinite(loss) and (math.isfinite(norm) or overflow_is_normal):
            return loss, norm
        last = self.pulse.calls.last
        if math.isfinite(loss):  # a gradient is a sum over ranks before anybody can look at it
            raise self._not_finite(step, "all ranks, backward", last, "gradient norm", norm)
        raise self._not_finite(step, f"{self._first_without_number(result)}, forward", last, "loss", loss)

    def _first_without_number(self, result: StepResult) -> str:
        """The first rank whose own part of the loss is none; asked only when the sum is none."""
        finite = self.state.engine.mesh["world"].all_gather(torch.isfinite(result.part).reshape(1)).tolist()
        return "all ranks" if all(finite) else f"rank {finite.index(False)}"

    def _not_finite(self, step: int, who: str, call: str, what: str, value: float) -> NonFiniteLoss:
        where = f" ({who}, last collective {call})" if self.plan.layout.world > 1 else ""
        self.saver.settle()
        last = checkpoint.latest(self.folder.checkpoints)
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint had been written yet"
        return NonFiniteLoss(
            f"step {step}{where}: the {what} is {value}; {kept}. Lower recipe.learning_rate (now "
            f"{self.plan.recipe.learning_rate}), lengthen recipe.warmup_steps, or look at the data of this step"
        )

    def _metrics(
        self, result: StepResult, loss: float, norm: float, count: int, elapsed: float, waited: float
    ) -> StepMetrics:
        plan, progress = self.plan, self.state.progress
        use = device.memory(self.device)
        rate = count * plan.recipe.sequence / elapsed
        peak = device.peak_flop_per_s(self.device, plan.recipe.precision, plan.cluster.device)
        peak = peak * plan.layout.world if peak else None
        causal, full = self._flop(causal=True), self._flop(causal=False)
        return StepMetrics(
            step=progress.step,
            loss=loss,
            grad_norm=norm,
            lr=learning_rate(plan.recipe, progress.step),
            tokens=progress.tokens,
            tokens_per_second=rate,
            seconds=progress.seconds,
            step_seconds=elapsed,
            data_wait_seconds=waited,
            allocated_bytes=use.allocated_bytes,
            reserved_bytes=use.reserved_bytes,
            mfu_causal=rate * causal.training / peak if peak else None,
            mfu_full=rate * full.training / peak if peak else None,
            hfu=rate * causal.hardware(plan.layout.recompute) / peak if peak else None,
            noise_scale_tokens=progress.noise.tokens,
            balance_loss=None if result.balance is None else result.balance.item(),
            loss_scale=self.state.scaler.scale.item() if self.state.scaler else None,
            global_batch=count,
        )

    def _flop(self, *, causal: bool) -> TokenFlop:
        return token_flop(self.plan.model, self.plan.recipe.sequence, causal=causal)

    def _evaluate(self, log: MetricsLog) -> float | None:
        """The held-out loss, recorded and told; None where nothing is held out."""
        recipe, progress, stream = self.plan.recipe, self.state.progress, self.corpus.validation
        if stream.num_tokens < 2:
            return None
        batches = held_out(
            self._sampler(stream, shuffle=False),
            self.device,
            rows=self.plan.layout.micro_batch_of(recipe.global_batch),
            limit=recipe.eval_sequences,
            document_mask=recipe.document_mask,
            share=self.share,
        )
        metrics = evaluate(
            self.state.engine, batches, step=progress.step, tokens_per_byte=stream.num_tokens / max(1, stream.num_bytes)
        )
        if not metrics.tokens:
            return None
        if not math.isfinite(metrics.loss):
            raise self._not_finite(
                progress.step, "all ranks, evaluate", self.pulse.calls.last, "held-out loss", metrics.loss
            )
        progress.eval_loss = metrics.loss
        if progress.best_eval_loss is None or metrics.loss < progress.best_eval_loss:
            progress.best_eval_loss, progress.best_step = metrics.loss, progress.step
        log.append({"step": progress.step, "kind": "eval", **_record(metrics)})
        self._tell("evaluated", metrics)
        return metrics.loss

    def _save(self, log: MetricsLog, score: float | None, *, goes_on: bool = False) -> None:
        """`score`: the held-out loss of these very weights, None where they were not evaluated."""
        progress = self.state.progress
        log.sync()
        self.saver.save(
            progress.step,
            self.state.tensors(),
            self.state.values(self.plan.recipe, self.corpus.fingerprint),
            score,
            last=not goes_on,
        )

    def _info(self) -> RunInfo:
        plan, layout = self.plan, self.plan.layout
        batch = plan.recipe.global_batch
        validation = self.corpus.validation
        return RunInfo(
            plan=plan,
            parameters=num_parameters(plan.model),
            device=device.title(self.device),
            first_step=self.state.progress.step,
            steps=plan.recipe.steps,
            batch_equation=(
                f"global batch {batch} sequences = micro-batch {layout.micro_batch_of(batch)} "
                f"x accumulation {layout.micro_batches(batch)} x dp {layout.dp}"
            ),
            train_tokens=self.corpus.train.num_tokens,
            bytes_per_token=validation.num_bytes / max(1, validation.num_tokens),
            peak_flop_per_s=device.peak_flop_per_s(self.device, plan.recipe.precision, plan.cluster.device),
            losses=self._losses_before(),
            foreseen=self.foreseen.sentences,
            notes=self._notes(),
        )

    def _losses_before(self) -> tuple[float, ...]:
        goes_on = self.watchers and self.state.progress.step
        return MetricsLog.losses(self.folder.metrics, self.plan.recipe.log_every) if goes_on else ()

    def _notes(self) -> tuple[str, ...]:
        plan, found = self.plan, []
        if plan.model.positions == "rope" and plan.recipe.sequence > plan.model.max_positions:
            found.append(
                f"sequences of {plan.recipe.sequence} tokens exceed the {plan.model.max_positions} positions "
                "the model is meant for"
            )
        found += schedule_notes(plan.layout, self.device)
        problem = unwritable(plan.model)
        if problem:
            found.append(f"this model cannot be exported to a Hugging Face directory: {problem}")
        if self.state.progress.step >= plan.recipe.steps:
            found.append(f"all {plan.recipe.steps} steps were already done: raise recipe.steps to go on")
        if self.changes:
            found.append(f"goes on otherwise than before: {', '.join(self.changes)}")
        return tuple(found)

    def _finish(self, loss: float, seconds: float, tokens: int, stop: Interrupt) -> Summary:
        from meshwright.train.plot import loss_plot

        waited_for = stop.requested is not None  # who sent a signal waits, and may not for long
        if self.is_first and not waited_for and (records := MetricsLog.read(self.folder.metrics)):
            loss_plot(records, self.folder.loss_plot)
        ledger = self.ledger.document(self.device) if self.ledger.step else None
        if self.is_first and ledger:
            self.folder.keep_ledger(ledger)
        progress, validation = self.state.progress, self.corpus.validation
        bits = None
        if progress.eval_loss is not None:
            bits = progress.eval_loss / math.log(2) * validation.num_tokens / max(1, validation.num_bytes)
        summary = Summary(
            step=progress.step,
            steps=self.plan.recipe.steps,
            loss=loss,
            eval_loss=progress.eval_loss,
            best_eval_loss=progress.best_eval_loss,
            best_step=progress.best_step,
            bits_per_byte=bits,
            tokens=progress.tokens,
            seconds=progress.seconds,
            tokens_per_second=tokens / seconds if seconds else 0.0,
            saving_seconds=self.saver.blocked_s,
            peak_allocated_bytes=device.peak_bytes(self.device),
            checkpoint=checkpoint.latest(self.folder.checkpoints),
            stopped={"SIGINT": "interrupted", "SIGTERM": "terminated"}.get(stop.requested or "", "done"),
        )
        self._tell("ended", summary)
        return summary

    def _tell(self, what: str, *given: Any) -> None:
        for watcher in self.watchers:
            getattr(watcher, what)(*given)


def _due(step: int, every: int, last: int) -> bool:
    """Every so many steps, and at the last one; 0 = at the last one only."""
    return step == last or (bool(every) and step % every == 0)


def _record(metrics: StepMetrics | EvalMetrics) -> dict[str, Any]:
    """A metrics object as a JSON line, unknown figures left out."""
    return {name: value for name, value in asdict(metrics).items() if value is not None}

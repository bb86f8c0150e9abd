"""Whole runs: what they record and say, when they evaluate and save, and how they end when something is wrong."""

import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.data import Sampler, prepare
from meshwright.spec import BatchStage, Cluster, Data, Plan, num_parameters, presets
from meshwright.spec.errors import CheckpointError, DataError, MeshwrightError, NonFiniteLoss, PlanError
from meshwright.store import checkpoint
from meshwright.store.run_folder import MetricsLog, RunFolder
from meshwright.training import device, loop, trainer
from meshwright.training.optimizer.optimizer import learning_rate
from meshwright.training.optimizer.precision import LossScaler
from meshwright.training.step.watch import EvalMetrics
from tests.training import running
from tests.training.running import MOE, SHAPE, Crashed, Notes, PowerCut, Terminated, metrics, steps_of, tensors

Make = Callable[..., Plan]


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return running.write_texts(tmp_path_factory.mktemp("loop") / "texts")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture, which costs a second a run (one test wants it), and no waiting for the disk: the machine lives on."""
    monkeypatch.setattr(os, "fsync", lambda number: None)
    monkeypatch.setattr("meshwright.training.plot.loss_plot", lambda records, path, **options: None)


@pytest.fixture
def make(texts: Path, tmp_path: Path) -> Make:
    """A plan in tmp_path/run, with changes."""
    return partial(running.plan, texts, tmp_path / "run")


def ended_at(error: MeshwrightError) -> str:
    text = str(error)
    assert "\n" not in text
    return text


def test_the_gpu_that_is_there_becomes_the_plans(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And stays so in the run folder: who compares the run elsewhere has no such GPU."""
    h200 = presets.device("h200")
    monkeypatch.setattr(device, "known_device", lambda target: h200)
    notes = Notes()
    loop.run(make(steps=1), watchers=[notes])
    assert notes.info is not None and notes.info.plan.cluster == Cluster(device=h200)
    assert RunFolder.open(tmp_path / "run").plan.cluster == Cluster(device=h200)
    monkeypatch.undo()
    loop.run(make(steps=2), resume="auto")
    assert RunFolder.open(tmp_path / "run").plan.cluster == Cluster(), "on a CPU a plan names none"


def test_what_a_run_records_and_says(make: Make, tmp_path: Path) -> None:
    notes = Notes()
    plan = make()
    summary = loop.run(plan, watchers=[notes])
    rows = MetricsLog.read(tmp_path / "run" / "metrics.jsonl")
    steps = [row for row in rows if "kind" not in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10, 11, 12, 12]
    for number, row in enumerate(steps, start=1):
        assert row["tokens"] == number * 4 * 12 and row["global_batch"] == 4
        assert row["lr"] == learning_rate(plan.recipe, number)
        assert 0 < row["loss"] < 7 and row["grad_norm"] > 0
        assert row["tokens_per_second"] == pytest.approx(48 / row["step_seconds"])
        assert 0 <= row["data_wait_seconds"] <= row["step_seconds"]
        assert 0 < row["allocated_bytes"] <= row["reserved_bytes"]
        assert not {"mfu_causal", "mfu_full", "hfu", "loss_scale", "balance_loss", "noise_scale_tokens"} & set(row)
    seconds = [row["seconds"] for row in steps]
    assert seconds == sorted(seconds) and seconds[-1] == pytest.approx(sum(row["step_seconds"] for row in steps))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3, "it learns"

    evaluations = [row for row in rows if row.get("kind") == "eval"]
    assert [row["step"] for row in evaluations] == [5, 10, 12]
    assert all(row["tokens"] <= 6 * 12 and row["bits_per_byte"] > 0 for row in evaluations)
    assert [(e.step, e.loss) for e in notes.evaluations] == [(row["step"], row["loss"]) for row in evaluations]
    assert [(s.step, s.loss) for s in notes.steps] == [(row["step"], row["loss"]) for row in steps]

    assert notes.saves == [4, 8, 12]
    assert notes.info is not None and notes.summary == summary
    assert summary.tokens_per_second == summary.tokens / summary.seconds, "figures of one line agree"
    assert notes.info.parameters == num_parameters(SHAPE) and notes.info.first_step == 0 and notes.info.steps == 12
    expected = "global batch 4 sequences = micro-batch 2 x accumulation 2 x dp 1: 48 tokens a step"
    assert notes.info.batch_equation == expected and notes.info.peak_flop_per_s is None
    assert (summary.step, summary.steps, summary.stopped) == (12, 12, "done")
    assert summary.loss == steps[-1]["loss"] and summary.eval_loss == evaluations[-1]["loss"]
    assert summary.bits_per_byte == pytest.approx(evaluations[-1]["bits_per_byte"])
    best = min(evaluations, key=lambda row: row["loss"])
    assert (summary.best_eval_loss, summary.best_step) == (best["loss"], best["step"])
    assert summary.tokens == 12 * 48 and summary.checkpoint == tmp_path / "run" / "checkpoints" / "step-000012"
    assert RunFolder.open(tmp_path / "run").plan == plan


def test_the_picture_of_the_loss(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    loop.run(make(steps=2))
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_two_runs_of_one_plan_are_equal_and_another_seed_is_not(texts: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        loop.run(running.plan(texts, tmp_path / name, steps=4, dropout=0.1, seed=seed))
    running.assert_same_end(tmp_path / "a", tmp_path / "b")
    losses = [[row["loss"] for row in metrics(tmp_path / name)] for name in "ac"]
    assert losses[0][0] != losses[1][0]


@pytest.mark.parametrize(
    ("eval_every", "checkpoint_every", "evaluated", "saved"),
    [(0, 0, [12], [12]), (5, 0, [5, 10, 12], [12]), (1, 5, list(range(1, 13)), [5, 10, 12]), (100, 100, [12], [12])],
)
def test_when_it_evaluates_and_saves(
    make: Make, eval_every: int, checkpoint_every: int, evaluated: list[int], saved: list[int]
) -> None:
    notes = Notes()
    loop.run(make(eval_every=eval_every, checkpoint_every=checkpoint_every), watchers=[notes])
    assert [e.step for e in notes.evaluations] == evaluated and notes.saves == saved


def test_without_held_out_text_nothing_is_evaluated(make: Make, tmp_path: Path) -> None:
    notes = Notes()
    plan = make(steps=4, eval_every=1)
    summary = loop.run(replace(plan, data=replace(plan.data, validation=0.0)), watchers=[notes])
    assert notes.evaluations == [] and not list(steps_of(metrics(tmp_path / "run"), "eval"))
    assert summary.eval_loss is None and summary.bits_per_byte is None and summary.best_step is None
    assert [saved.score for saved in checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")] == [None]


def test_every_step_is_recorded_however_rarely_it_is_told(make: Make, tmp_path: Path) -> None:
    notes = Notes()
    loop.run(make(log_every=5), watchers=[notes])
    assert [told.step for told in notes.steps] == [5, 10, 12]
    assert list(steps_of(metrics(tmp_path / "run"))) == list(range(1, 13))


def test_a_checkpoints_score_is_the_loss_of_its_own_weights(make: Make, tmp_path: Path) -> None:
    """Evaluated at 3, 6, 9, 12 and saved at 2, 4 ... 12: only 6 and 12 have one. So it is after a resume from 4."""
    plan = make(eval_every=3, checkpoint_every=2, keep_last=9)
    with pytest.raises(PowerCut):
        loop.run(plan, watchers=[Crashed(5)])
    loop.run(plan, resume="auto")
    losses = {row["step"]: row["loss"] for row in metrics(tmp_path / "run") if row.get("kind") == "eval"}
    scores = {saved.step: saved.score for saved in checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")}
    assert scores == {2: None, 4: None, 6: losses[6], 8: None, 10: None, 12: losses[12]}


def test_a_checkpoint_that_an_interruption_makes_has_a_score_only_if_it_was_evaluated(
    texts: Path, tmp_path: Path
) -> None:
    for step in (5, 7):
        plan = running.plan(texts, tmp_path / str(step), checkpoint_every=0)
        summary = loop.run(plan, watchers=[Terminated(step)])
        [saved] = checkpoint.list_checkpoints(tmp_path / str(step) / "checkpoints")
        assert saved.step == summary.step == step
        assert saved.score == (summary.eval_loss if step == 5 else None)
        assert summary.eval_loss is not None


@pytest.mark.parametrize(
    ("number", "stopped"),
    [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated"), (signal.SIGUSR1, "preempted")],
    ids=str,
)
def test_signals_end_it_after_the_step_with_a_checkpoint(
    make: Make, tmp_path: Path, number: signal.Signals, stopped: str
) -> None:
    before = signal.getsignal(number)
    notes = Terminated(6, number)
    summary = loop.run(make(), watchers=[notes])
    assert (summary.step, summary.stopped) == (6, stopped) and notes.saves == [4, 6] and notes.summary == summary
    assert list(steps_of(metrics(tmp_path / "run"))) == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "run" / "loss.png").exists(), "who sent the signal may not wait for a picture"
    assert signal.getsignal(number) == before


def test_every_step_is_given_what_the_recipe_says(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next sequences of the run's order, none left out and none twice."""
    calls: list[dict[str, Any]] = []
    read: list[torch.Tensor] = []
    real = trainer.train_step

    def watch(model: Any, optimizer: Any, batches: Any, **options: Any) -> Any:
        calls.append(options)
        read.extend(batch.tokens for batch in batches)
        return real(model, optimizer, batches, **options)

    monkeypatch.setattr(trainer, "train_step", watch)
    plan = make(clip=0.7, balance_loss=0.3, noise_scale_every=4, micro_batch=1)
    loop.run(plan)
    assert [options["rate"] for options in calls] == [learning_rate(plan.recipe, step) for step in range(1, 13)]
    assert {(options["clip"], options["balance_loss"], options["scaler"]) for options in calls} == {(0.7, 0.3, None)}
    assert [options["measure_noise"] for options in calls] == [step % 4 == 0 for step in range(1, 13)]
    order = Sampler(prepare(plan.data).train, sequence=12, tokenizer_separator=True, seed=plan.recipe.seed)
    assert torch.equal(torch.cat(read), torch.from_numpy(order.take(0, 48).tokens))


def test_a_ramp_changes_the_accumulation_at_its_token(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 48 tokens on 4 sequences, from 193 on 6, always two at a time."""
    micro_batches: list[list[int]] = []
    real = trainer.train_step

    def watch(model: Any, optimizer: Any, batches: Any, **options: Any) -> Any:
        micro_batches.append([len(batch.tokens) for batch in batches])
        return real(model, optimizer, batches, **options)

    monkeypatch.setattr(trainer, "train_step", watch)
    stages = (BatchStage(tokens=48, global_batch=4), BatchStage(tokens=193, global_batch=6))
    loop.run(make(global_batch=2, batch_ramp=stages, steps=8))
    rows = [row for row in metrics(tmp_path / "run") if "kind" not in row]
    seen, sizes = 0, []
    for row in rows:
        sizes.append(2 if seen < 48 else 4 if seen < 193 else 6)
        seen += sizes[-1] * 12
        assert (row["global_batch"], row["tokens"]) == (sizes[-1], seen)
    assert sizes == [2, 2, 4, 4, 4, 4, 6, 6]
    assert micro_batches == [[2] * (size // 2) for size in sizes]


def test_the_noise_scale_is_measured_every_so_often_and_kept(make: Make, tmp_path: Path) -> None:
    loop.run(make(noise_scale_every=3, global_batch=8, micro_batch=1, learning_rate=1e-4))
    rows = [row for row in metrics(tmp_path / "run") if "kind" not in row]
    scales = [row.get("noise_scale_tokens") for row in rows]
    assert scales[:2] == [None, None] and scales[2] is not None and scales[2] > 0
    assert scales[3] == scales[4] == scales[2] != scales[5]


def test_experts_report_their_balance(make: Make, tmp_path: Path) -> None:
    loop.run(make(shape=MOE, steps=3))
    assert all(0.9 < row["balance_loss"] < 4 for row in metrics(tmp_path / "run") if "kind" not in row)


def poison(monkeypatch: pytest.MonkeyPatch, step: int, how: Callable[[Any], None]) -> None:
    """Do something to the model before a step of the next run."""
    real, calls = trainer.train_step, iter(range(1, 10_000))

    def disturbed(engine: Any, *arguments: Any, **options: Any) -> Any:
        if next(calls) == step:
            how(engine.model)
        return real(engine, *arguments, **options)

    monkeypatch.setattr(trainer, "train_step", disturbed)


def make_nan(model: Any) -> None:
    with torch.no_grad():
        model.layers["0"].mlp.up.weight[0, 0] = torch.nan


def spoil_gradient(model: Any) -> None:
    model.embed.weight.register_hook(lambda gradient: gradient * torch.inf)


@pytest.mark.parametrize(
    ("how", "words"), [(make_nan, "the loss is nan"), (spoil_gradient, "the gradient norm is nan")]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_that_is_no_number_ends_the_run_at_once(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[[Any], None], words: str, precision: str
) -> None:
    """Between two lines of the log; the last checkpoint is as good as it was, and training goes on from it."""
    plan = make(log_every=10, precision=precision)
    notes = Notes()
    poison(monkeypatch, 7, how)
    with pytest.raises(NonFiniteLoss) as caught:
        loop.run(plan, watchers=[notes])
    last = tmp_path / "run" / "checkpoints" / "step-000004"
    text = ended_at(caught.value)
    assert text.startswith(
        f"step 7: {words}; the last good checkpoint is {last}. Lower recipe.learning_rate (now 0.005)"
    )
    assert notes.saves == [4] and notes.summary is None
    assert list(steps_of(metrics(tmp_path / "run"))) == [1, 2, 3, 4, 5, 6]
    assert checkpoint.find_latest(tmp_path / "run" / "checkpoints") == last
    assert all(tensor.isfinite().all() for name, tensor in tensors(last).items() if not name.startswith("rng."))

    monkeypatch.undo()
    monkeypatch.setattr("meshwright.training.plot.loss_plot", lambda records, path: None)
    loop.run(plan, resume="auto")
    whole = replace(plan, run=str(tmp_path / "whole"))
    loop.run(whole)
    running.assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_before_the_first_checkpoint_it_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 2, make_nan)
    with pytest.raises(NonFiniteLoss, match="step 2: the loss is nan; no checkpoint had been written yet"):
        loop.run(make())


def test_weights_without_a_held_out_loss_are_not_saved(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What made it NaN is in the weights that the step before left."""

    def broken(model: Any, batches: Any, *, step: int, **_: Any) -> EvalMetrics:
        loss = math.nan if step == 8 else 5.0
        return EvalMetrics(step=step, loss=loss, perplexity=loss, bits_per_byte=loss, tokens=9, seconds=0.0)

    monkeypatch.setattr("meshwright.training.step.evaluate.evaluate", broken)
    with pytest.raises(NonFiniteLoss, match=r"step 8: the held-out loss is nan; the last good checkpoint is .*000004"):
        loop.run(make(eval_every=4))
    assert [saved.step for saved in checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")] == [4]


def test_fp16_overflows_are_skipped_and_told(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LossScaler", partial(LossScaler, initial=2.0**26))
    loop.run(make(precision="fp16", noise_scale_every=1, steps=20))
    rows = [row for row in metrics(tmp_path / "run") if "kind" not in row]
    skipped = [row for row in rows if not math.isfinite(row["grad_norm"])]
    assert 0 < len(skipped) < 15 and skipped == rows[: len(skipped)]
    assert [row["loss_scale"] for row in skipped] == [2.0 ** (25 - i) for i in range(len(skipped))]
    assert {row["loss_scale"] for row in rows[len(skipped) :]} == {skipped[-1]["loss_scale"]}
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert all(math.isfinite(row["noise_scale_tokens"]) for row in rows if "noise_scale_tokens" in row)


def test_fp16_that_overflows_at_every_scale_ends(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 1, spoil_gradient)
    with pytest.raises(NonFiniteLoss, match="step 17: the gradient norm is"):
        loop.run(make(precision="fp16", steps=40))


def test_a_vocabulary_smaller_than_the_tokenizers(make: Make, tmp_path: Path) -> None:
    with pytest.raises(PlanError) as caught:
        loop.run(make(shape=replace(SHAPE, vocab=256)))
    text = ended_at(caught.value)
    assert "model.vocab=256 is smaller than the tokenizer's 257 tokens: take model.vocab=384" in text
    assert not (tmp_path / "run").exists()
    loop.run(make(shape=replace(SHAPE, vocab=384), steps=1))


def test_a_sequence_longer_than_the_data(make: Make) -> None:
    with pytest.raises(DataError, match=r"recipe\.sequence=9000 needs 9001 tokens and the data has \d+: take recipe"):
        loop.run(make(sequence=9000))
    loop.run(make(steps=1))


def test_learned_positions_are_a_limit_and_rotary_ones_a_note(make: Make, tmp_path: Path) -> None:
    gpt2 = replace(SHAPE, family="gpt2", positions="learned", norm="layernorm", mlp="gelu_tanh")
    with pytest.raises(PlanError, match=r"recipe\.sequence=40 exceeds the 32 learned positions"):
        loop.run(make(shape=gpt2, sequence=40))
    notes = Notes()
    loop.run(make(sequence=40, steps=1), watchers=[notes])
    assert notes.info is not None
    assert any("sequences of 40 tokens exceed the 32 positions" in note for note in notes.info.notes)


@pytest.fixture
def begun(make: Make) -> Plan:
    """A run that was ended after six of twelve steps."""
    plan = make()
    loop.run(plan, watchers=[Terminated(6)])
    return plan


def refused(plan: Plan, run: Path, resume: str = "auto") -> str:
    """A refusal to go on, which must leave the run as it was."""
    contents = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file() and path.name != ".lock"}
    with pytest.raises(CheckpointError) as caught:
        loop.run(plan, resume=resume)
    for path, content in contents.items():
        assert path.read_bytes() == content, path
    return ended_at(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence": 10}, "trained with recipe.sequence=12, the plan says recipe.sequence=10"),
        ({"seed": 3}, "trained with recipe.seed=0, the plan says recipe.seed=3"),
        ({"shape": replace(SHAPE, ffn=32)}, "is of another model: 'model.layers.0.mlp.gate.weight' is [24, 16]"),
        ({"shape": MOE}, "is of another model"),
        ({"shape": replace(SHAPE, layers=3)}, "it has no 'model.layers.2."),
        ({"precision": "bf16"}, "of recipe.precision=fp32, and the plan has recipe.precision=bf16"),
    ],
    ids=["sequence", "seed", "ffn", "moe", "layers", "precision"],
)
def test_a_plan_that_does_not_fit_the_checkpoint(
    begun: Plan, make: Make, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    assert words in refused(make(**changes), tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").plan == begun


def test_other_texts_are_no_place_to_go_on_in(begun: Plan, tmp_path: Path) -> None:
    other = running.write_texts(tmp_path / "other")
    (other / "00.txt").write_text("something else, and longer than before\n" * 30)
    text = refused(replace(begun, data=replace(begun.data, path=str(other))), tmp_path / "run")
    assert "trained with other text" in text and "start a new run from its export" in text


def test_a_checkpoint_that_is_not_there(begun: Plan, tmp_path: Path) -> None:
    assert "is no checkpoint" in refused(begun, tmp_path / "run", str(tmp_path / "run" / "checkpoints" / "step-000099"))


def test_without_resume_a_run_is_not_overwritten(begun: Plan, tmp_path: Path) -> None:
    before = metrics(tmp_path / "run")
    with pytest.raises(MeshwrightError, match="resume=auto continues it"):
        loop.run(begun)
    assert metrics(tmp_path / "run") == before


def test_raised_steps_go_on_and_all_done_is_said(begun: Plan, make: Make, tmp_path: Path) -> None:
    loop.run(begun, resume="auto")
    notes = Notes()
    summary = loop.run(begun, watchers=[notes], resume="auto")
    assert notes.info is not None and notes.info.first_step == 12 and notes.steps == [] and notes.saves == []
    assert any("all 12 steps were already done: raise recipe.steps" in note for note in notes.info.notes)
    assert (summary.step, summary.stopped) == (12, "done") and summary.eval_loss is not None

    notes = Notes()
    loop.run(make(steps=10, learning_rate=0.5), watchers=[notes], resume="auto")
    assert notes.info is not None
    [warning] = [note for note in notes.info.notes if "learning_rate" in note]
    assert (
        "no step is left for" in warning
        and "recipe.learning_rate=0.5 (was 0.005)" in warning
        and "another run=" in warning
    )
    assert RunFolder.open(tmp_path / "run").plan == begun, "no step was made by the other plan"

    longer = make(steps=15)
    notes = Notes()
    summary = loop.run(longer, watchers=[notes], resume="auto")
    assert [told.step for told in notes.steps] == [13, 14, 15] and summary.step == 15
    assert notes.steps[0].lr == learning_rate(longer.recipe, 13) and notes.steps[0].tokens == 13 * 48
    assert list(steps_of(metrics(tmp_path / "run"))) == list(range(1, 16))
    assert RunFolder.open(tmp_path / "run").plan == longer
    assert any("resuming with changes: recipe.steps=15 (was 12)" in note for note in notes.info.notes)


def test_a_refused_sequence_leaves_no_folder(make: Make, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs 1000001 tokens and the data has"):
        loop.run(make(sequence=1_000_000))
    assert not (tmp_path / "run").exists()


def test_auto_begins_where_there_is_nothing_yet(make: Make) -> None:
    assert loop.run(make(steps=2), resume="auto").step == 2


def test_another_runs_checkpoint_by_its_path(begun: Plan, make: Make, tmp_path: Path) -> None:
    """It goes on from there in a folder of its own; the other run stays."""
    before = metrics(tmp_path / "run")
    saved = checkpoint.find_latest(tmp_path / "run" / "checkpoints")
    summary = loop.run(replace(begun, run=str(tmp_path / "fork")), resume=str(saved))
    assert summary.step == 12 and list(steps_of(metrics(tmp_path / "fork"))) == list(range(7, 13))
    assert metrics(tmp_path / "run") == before


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_alone_are_a_beginning(make: Make, tmp_path: Path, precision: str) -> None:
    """As an import leaves them: no optimizer, no counters."""
    plan = make(precision=precision, steps=3, learning_rate=0.0)
    other = replace(plan, run=str(tmp_path / "other"), recipe=replace(plan.recipe, seed=9))
    loop.run(other)
    weights = {
        name: tensor
        for name, tensor in tensors(tmp_path / "other" / "checkpoints" / "step-000003").items()
        if name.startswith("model.")
    }
    run = tmp_path / "run"
    saved = checkpoint.save(run / "checkpoints", step=0, tensors=weights, values={}, score=None, keep_last=1)
    (run / "plan.yaml").write_bytes((tmp_path / "other" / "plan.yaml").read_bytes())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (run / name).write_bytes((tmp_path / "other" / name).read_bytes())
    notes = Notes()
    loop.run(plan, watchers=[notes], resume="auto")
    assert saved.exists() and [told.step for told in notes.steps] == [1, 2, 3]
    after = tensors(run / "checkpoints" / "step-000003")
    for name, tensor in weights.items():
        assert torch.equal(after[name], tensor), "a rate of 0 moves nothing"


def test_data_of_a_plan_may_be_a_path(texts: Path, tmp_path: Path) -> None:
    plan = replace(running.plan(texts, tmp_path / "run", steps=1), data=Data(path=str(texts), tokenizer="bytes"))
    assert loop.run(plan).step == 1

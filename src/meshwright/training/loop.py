"""A run from its plan to its end: prepare the data and the folder, build or resume the state, train."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from meshwright import planfile
from meshwright.data import Corpus
from meshwright.data.report import advice, describe_run
from meshwright.data.sequences.numbered_rows import NumberedRows
from meshwright.parallel import Mesh, build_engine
from meshwright.parallel.apply import round_weights
from meshwright.parallel.health.heartbeat import Heartbeat
from meshwright.spec import Plan, Recipe
from meshwright.spec.errors import MeshwrightError
from meshwright.spec.memory.held import shards_are_masters
from meshwright.spec.plan.plan import RANDOM
from meshwright.spec.recipe.recipe import NO_SCHEME, DataRead
from meshwright.store import checkpoint, checkpoint_folder
from meshwright.store.default_folders import point_latest
from meshwright.store.model_weights import base_fingerprint
from meshwright.store.run_folder import MetricsLog, RunFolder
from meshwright.training.job import (
    Job,
    Preflight,
    Settle,
    catch_interrupts,
    check_resumed,
    dotted_keys,
    find_data_read,
    load_corpus,
    open_job,
    open_run_folder,
    own_store,
    replace_from_store,
)
from meshwright.training.objectives.objectives import AnswerSampler, Task, build_on_policy
from meshwright.training.objectives.reference import Reference, holds_weights_only
from meshwright.training.objectives.teacher import build_distillation
from meshwright.training.optimizer.optimizer import Optimizer, rate_jump
from meshwright.training.optimizer.precision import DTYPES, LossScaler, StepSkipper, reduce_dtype
from meshwright.training.step.batches import Share
from meshwright.training.step.interrupt import Interrupt
from meshwright.training.step.state import Progress, TrainState, init_sentence, seed_everything, take_weights
from meshwright.training.step.watch import Summary, Watcher
from meshwright.training.trainer import Trainer

if TYPE_CHECKING:
    from meshwright.training.objectives.teacher_targets import TeacherTargets


def run(
    plan: Plan,
    *,
    watchers: Sequence[Watcher] = (),
    resume: str = "no",
    progress: Callable[[int, int], None] | None = None,
    pulse: Heartbeat | None = None,
    preflight: Preflight | None = None,
    settle: Settle | None = None,
    machines: int = 1,
    sampler: AnswerSampler | None = None,
) -> Summary:
    """Train a plan in its run folder. Ctrl-C, SIGTERM and SIGUSR1 save and end cleanly.

    Args:
        watchers: Observers on rank 0. A run folder `DIR/auto` is chosen here, and they are told which.
        resume: no, auto (the newest checkpoint, if any) or a checkpoint's path.
        progress: Called with (bytes done, bytes) while the text is encoded.
        pulse: Heartbeat for a watchdog.
        preflight: Called once on rank 0 before anything is read or made. Its errors end all ranks.
        settle: Chooses how passes run on a GPU.
        machines: Ranks are spread evenly over them.
        sampler: Writes the answers of recipe.distillation_on_policy.
    """
    # Ranks agree on one plan and refuse it before anything is written.
    job = open_job(plan, resume, pulse=pulse or Heartbeat(), preflight=preflight, settle=settle, machines=machines)
    with own_store(job):
        corpus, rows = load_corpus(job, progress)
        with open_run_folder(job, corpus) as folder, catch_interrupts(job) as interrupt:
            start = find_start(job, corpus, rows, folder)
            # Before the student exists: its teacher may need the memory.
            targets = store_teacher_targets(job, corpus, start, interrupt)
            state, share = restore_or_initialize(job, start)
            task = build_task(job, corpus, start, share, targets, sampler)
            announce_run(job, corpus, rows, start)
            # Nothing is refused from here on, so the plan of an earlier run may be replaced.
            changes = commit_plan(job, start, state.progress.step)
            trainer = Trainer(
                job=job, state=state, corpus=corpus, folder=start.folder, share=share, task=task, changes=changes,
                watchers=tuple(watchers) if job.rank_zero.is_here else (),
            )  # fmt: skip
            return trainer.train(interrupt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The point that a run starts from: nothing, an imported model, or a checkpoint of earlier steps."""

    folder: RunFolder
    checkpoint_path: Path | None
    """Verified. None = the run is new."""
    read: DataRead
    """Data that earlier steps have read."""
    earlier_recipe: Recipe | None
    """Recipe of the run that the checkpoint belongs to. None = unknown."""
    reference: Reference


def find_start(job: Job, corpus: Corpus, rows: NumberedRows, folder: RunFolder) -> Start:
    """Find and verify the checkpoint to resume from. Raises CheckpointError when the plan cannot resume from it."""
    checkpoint_path = find_checkpoint(job, folder)
    if checkpoint_path is not None:
        check_resumed(job.plan, corpus, checkpoint_path)
    read = find_data_read(checkpoint_path)
    earlier_recipe = job.rank_zero.run(lambda: _recipe_of_run(checkpoint_path))
    # Remaining steps are counted from the data read so far, perhaps in steps of another size.
    job.plan = replace(job.plan, recipe=job.plan.recipe.over(len(rows), read))
    reference = Reference(
        plan=job.plan, corpus=corpus, device=job.device, rank_zero=job.rank_zero, run=folder.path,
        checkpoint_path=checkpoint_path,
    )  # fmt: skip
    return Start(
        folder=replace(folder, plan=job.plan), checkpoint_path=checkpoint_path, read=read,
        earlier_recipe=earlier_recipe, reference=reference,
    )  # fmt: skip


def find_checkpoint(job: Job, folder: RunFolder) -> Path | None:
    """Return the verified checkpoint to resume from. None = the run starts anew.

    resume=auto skips damaged checkpoints; a named one that is damaged raises CheckpointError.
    """
    if job.resume == "no":
        return None
    if job.resume != "auto":
        return checkpoint.verify_named(Path(job.resume), begun=job.pulse.piece_begun)
    if job.sharing is not None:
        # Folders of one name on two machines may be of two courses of training: the store has one.
        return job.fetched
    # Other ranks may see the shared folder a moment later: they take rank 0's list.
    candidates = job.rank_zero.broadcast(lambda: checkpoint_folder.list_newest_first(folder.checkpoints))
    fetch = partial(replace_from_store, job)
    return checkpoint.find_newest_whole(candidates, begun=job.pulse.piece_begun, fetch=fetch)


def _recipe_of_run(checkpoint_path: Path | None) -> Recipe | None:
    with suppress(MeshwrightError):
        return RunFolder.open(checkpoint_path.parent.parent).plan.recipe if checkpoint_path is not None else None
    return None


def store_teacher_targets(job: Job, corpus: Corpus, start: Start, interrupt: Interrupt) -> "TeacherTargets | None":
    """Compute what is missing of a teacher's stored targets. None = the recipe has none.

    This comes before the student is built, which would not fit together with its teacher.
    """
    if not job.plan.recipe.distillation_top_k:
        return None
    from meshwright.training.objectives.teacher_targets import store_targets

    return store_targets(job.plan, corpus, start.read, job.mesh, job.device, job.rank_zero, interrupt)


def restore_or_initialize(job: Job, start: Start) -> tuple[TrainState, Share]:
    """Build the state of a run, from its checkpoint or from first weights, and the share of the rows that a rank reads.

    The reference of an objective over pairs is measured in between, while the first weights are in memory.
    """
    plan, reference, checkpoint_path = job.plan, start.reference, start.checkpoint_path
    is_random, has_adapters = plan.init == RANDOM, plan.model.lora is not None
    # A checkpoint holds only what is trained: an adapter's frozen base comes from its source in every process.
    needs_first_weights = checkpoint_path is None or reference.needs_first_weights or has_adapters
    state = new_state(
        plan, job.mesh, job.device, initialize=needs_first_weights and is_random,
        adapters=needs_first_weights and has_adapters,
    )  # fmt: skip
    state.base, state.first_weights = base_fingerprint(plan), reference.first_weights
    columns = state.engine.columns(plan.recipe.sequence)
    share = Share(index=job.mesh.reader, parts=plan.layout.dp, columns=columns)
    if needs_first_weights and not is_random:
        take_weights(state, plan)
    if checkpoint_path is None and not is_random:
        job.add_lines(("init", init_sentence(plan)))
    if reference.needs_first_weights:
        reference.measure(state.engine, share)
    if checkpoint_path is not None:
        load_checkpoint(state, start.folder, checkpoint_path)
    # An imported checkpoint is itself the first weights.
    reference.measure(state.engine, share)
    if reference.sentence:
        job.add_lines(("reference", reference.sentence))
    return state, share


def new_state(plan: Plan, mesh: Mesh, device: torch.device, *, initialize: bool, adapters: bool = False) -> TrainState:
    """Build a plan's model over the mesh with its optimizer, before the first step.

    Without `initialize` weights stay uninitialized, for callers that load a checkpoint or need only sizes. `adapters`
    initializes adapters alone.
    """
    recipe, rounds = plan.recipe, plan.recipe.fake_quantize != NO_SCHEME
    # Ranks with the same tokens draw the same dropout; stages of a pipeline draw their own.
    seed_everything(recipe.seed + mesh.reader + plan.layout.dp * mesh["pp"].index)
    engine = build_engine(
        plan.model, replace(plan.layout, compile="off") if rounds else plan.layout, mesh=mesh, device=device,
        dtype=DTYPES[recipe.precision], reduce_dtype=reduce_dtype(recipe), micro_batches=plan.micro_batches,
        seed=recipe.seed, dropout=recipe.dropout, products=recipe.products, initialize=initialize, adapters=adapters,
        masters=shards_are_masters(recipe.precision, plan.layout, recipe.storage, recipe.reduce_dtype),
    )  # fmt: skip
    round_weights(engine, recipe.fake_quantize)
    scaler = LossScaler(device) if recipe.precision == "fp16" else None
    return TrainState(engine, Optimizer.for_engine(engine, recipe), scaler, Progress(), StepSkipper(device))


def load_checkpoint(state: TrainState, folder: RunFolder, checkpoint_path: Path) -> None:
    """Restore the state from a checkpoint. An imported one gives only weights, and training starts at step 0."""
    if holds_weights_only(checkpoint_path):
        # An imported model has neither moments nor counters to restore.
        weights = state.model_tensors()
        checkpoint.load(checkpoint_path, weights, verified=True)
        state.take_weights(weights)
        return
    state.load(checkpoint_path)
    if state.engine.mesh.rank == 0:
        # Records of steps after the checkpoint belong to a course of training that is abandoned.
        for path in (folder.metrics, folder.samples):
            MetricsLog(path).truncate_to(state.progress.step)


def build_task(
    job: Job, corpus: Corpus, start: Start, share: Share, targets: "TeacherTargets | None",
    sampler: AnswerSampler | None,
) -> Task:  # fmt: skip
    """Return what the run minimizes. A teacher that runs along with the student is built here."""
    if not job.plan.recipe.traits.teacher:
        return start.reference.task()
    writer = build_on_policy(job.plan, corpus, start.folder, share, sampler)
    objective = build_distillation(job.plan, job.mesh, job.device)
    sentence = targets.sentence if targets else "runs along with the student, in every step"
    job.add_lines(("teacher", f"{job.plan.teacher_init}, {sentence}"))
    return Task(objective=objective, read_rows=targets.read_rows if targets else None, on_policy=writer)


def announce_run(job: Job, corpus: Corpus, rows: NumberedRows, start: Start) -> None:
    """Add what a user should read before the first step to the forecast."""
    plan, earlier = job.plan, start.earlier_recipe
    jump = rate_jump(earlier, plan.recipe, start.read.steps) if earlier is not None else None
    notes = [note for note in (job.leftover_warning, job.disk_warning, jump) if note]
    scheme = plan.recipe.fake_quantize
    if scheme != NO_SCHEME:
        notes.append(
            f"weights are rounded in every product (recipe.fake_quantize={scheme}), and blocks run uncompiled: "
            f"write the codes with `meshwright quantize {plan.run} --scheme {scheme}`; export and eval take the "
            "weights behind them"
        )
    notes += advice(plan, corpus)
    job.add_lines(*describe_run(plan.data, plan.recipe, corpus.train, rows, start.read))
    job.add_lines(*(("note", note) for note in notes))


def commit_plan(job: Job, start: Start, steps_done: int) -> tuple[str, ...]:
    """Write the plan into the run folder and point `latest` there. Nothing can be refused any more.

    Returns the changes to the earlier plan, on rank 0. The plan of a finished run is not replaced.
    """
    folder, plan = start.folder, job.plan

    def write() -> tuple[str, ...]:
        earlier = _keys_of_run(folder) if steps_done else {}
        # A finished run that is started again does nothing, and its plan is the one that it was trained by.
        if steps_done < plan.recipe.steps or not (folder.path / "plan.yaml").is_file():
            folder.keep_plan()
        point_latest(folder.path)
        return tuple(
            f"{key}={setting} (was {earlier[key]})"
            for key, setting in dotted_keys(planfile.dump(planfile.absolute(plan)))
            if earlier.get(key, setting) != setting
        )

    return job.rank_zero.run(write) or ()


def _keys_of_run(folder: RunFolder) -> dict[str, object]:
    try:
        return dict(dotted_keys(planfile.dump(planfile.absolute(RunFolder.open(folder.path).plan))))
    except MeshwrightError:  # a plan of another version
        return {}

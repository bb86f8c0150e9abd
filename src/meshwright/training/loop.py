"""A run from its plan to its end: prepare the data and the folder, build or resume the state, train."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meshwright import __version__, planfile
from meshwright.data import Corpus
from meshwright.data import prepare as prepare_data
from meshwright.data.advice import advice
from meshwright.data.numbered_rows import numbered_rows
from meshwright.data.run_reading import announced
from meshwright.parallel import Mesh, build_engine, make_mesh
from meshwright.parallel.agree import RankZero, check_same
from meshwright.parallel.compiling import missing_anywhere
from meshwright.parallel.health.heartbeat import Heartbeat
from meshwright.parallel.mesh import saving_group
from meshwright.parallel.pass_graphs import check_device
from meshwright.parallel.rounding import round_weights
from meshwright.spec import Plan, Recipe
from meshwright.spec.errors import MeshwrightError, PlanError
from meshwright.spec.held import shards_are_masters
from meshwright.spec.plan import RANDOM
from meshwright.spec.recipe import NO_SCHEME, UNREAD
from meshwright.store import checkpoint, checkpoint_folder, default_folders
from meshwright.store.base_weights import base_fingerprint
from meshwright.store.run_folder import MetricsLog, RunFolder
from meshwright.training import device, pretrained
from meshwright.training.batches import Share
from meshwright.training.disk import check_space
from meshwright.training.fits import check_fits
from meshwright.training.interrupt import Interrupt
from meshwright.training.objectives import Task
from meshwright.training.on_policy import AnswerSampler, on_policy
from meshwright.training.optimizer import Optimizer
from meshwright.training.precision import DTYPES, LossScaler, reduce_dtype
from meshwright.training.rate import rate_jump
from meshwright.training.reference import Reference, holds_weights_only
from meshwright.training.resume_checks import check_resume, check_resumed, data_read
from meshwright.training.skipping import StepSkipper
from meshwright.training.state import Progress, TrainState, seed_everything
from meshwright.training.teacher import check_shared, distillation
from meshwright.training.trainer import Trainer
from meshwright.training.watch import Foreseen, Summary, Watcher

MEASURED_ROWS = 256
"""Of the data, whose documents are measured at the start."""
ECHO_S = 1.0
"""A launcher passes on the Ctrl-C that its processes have already had from the terminal."""

Settle = Callable[[Plan, str], tuple[Plan, str]]
"""(plan, what a machine lacks to compile) -> the plan without auto in compile and cuda_graphs, and why."""


def run(
    plan: Plan,
    *,
    watchers: Sequence[Watcher] = (),
    resume: str = "no",
    progress: Callable[[int, int], None] | None = None,
    pulse: Heartbeat | None = None,
    preflight: Callable[[Plan, torch.device], Foreseen] | None = None,
    settle: Settle | None = None,
    machines: int = 1,
    sampler: AnswerSampler | None = None,
) -> Summary:
    """Train a plan in its run folder; `resume` is no, auto (the newest checkpoint, if any) or a checkpoint's path.

    A run folder `DIR/auto` is chosen here (store/default_folders.py): watchers are told which. `progress` is told of
    the encoding of the text: bytes done, bytes in all; `pulse`, for a watchdog, of each step.
    `preflight` is asked once by the first rank before anything is read or made; what it raises ends all ranks.
    `settle` says how passes run on a GPU.
    Ranks are spread evenly over `machines`. `sampler` makes the answers of recipe.distillation_on_policy.
    Ctrl-C and SIGTERM save and end cleanly.
    """
    plan.check_runs()
    pulse = pulse or Heartbeat()
    mesh = make_mesh(plan.layout, traffic=pulse.calls)
    rank_zero = RankZero(mesh["world"])
    check_same(mesh["world"], "plans or versions", _started_with(plan, resume))
    plan = replace(plan, run=rank_zero.broadcast(lambda: default_folders.begun(plan, resume)))
    left = rank_zero.run(lambda: default_folders.left_alone(plan, resume))
    rank_zero.run(lambda: check_resume(plan, resume))
    target = device.pick_device()
    plan = replace(
        plan, cluster=rank_zero.broadcast(lambda: device.cluster_of(plan, device.known_device(target), machines))
    )
    plan, execution = settled(plan, target, rank_zero, settle)
    rank_zero.run(lambda: check_fits(plan, target, machines=machines))
    if plan.layout.offload != "off" and target.type == "cpu":
        raise PlanError(
            f"layout.offload={plan.layout.offload} moves to host memory, which is all that a CPU has: take "
            "layout.offload=off"
        )
    check_device(plan.model, plan.layout, target, DTYPES[plan.recipe.precision])
    crowded = rank_zero.run(lambda: check_space(plan))
    foreseen = rank_zero.run(lambda: preflight(plan, target)) if preflight is not None else None
    foreseen = _also_said(foreseen, ("execution", execution)) if execution else foreseen
    recipe = plan.recipe
    device.prepare(
        target, recipe.precision, tf32=recipe.tf32, deterministic=recipe.deterministic, products=recipe.products
    )
    saving = saving_group(mesh) if plan.layout.saves_behind(target.type) else None
    corpus = rank_zero.run_first(lambda: prepare_data(plan.data, progress=progress if rank_zero.is_here else None))
    _check_vocabulary(plan, corpus)
    check_shared(plan, corpus.tokenizer)
    # Refuses a short text before a run folder is made.
    rows = numbered_rows(plan.data, plan.recipe, corpus, corpus.train, shuffle=True)
    plan = replace(plan, recipe=plan.recipe.over(len(rows), UNREAD if resume == "no" else None))
    if foreseen is not None and foreseen.with_documents is not None:
        told = foreseen.with_documents(rows.take(0, min(len(rows), MEASURED_ROWS)).document_tokens)
        foreseen = _also_said(foreseen, *told)
    if plan.recipe.epochs:
        crowded = rank_zero.run(lambda: check_space(plan))
    named = plan.run
    plan = replace(plan, run=rank_zero.broadcast(lambda: default_folders.settled(plan)))
    with (
        _folder(plan, corpus, resume, rank_zero, new=plan.run != named) as folder,
        Interrupt(echo_s=ECHO_S if mesh["world"].size > 1 else 0.0, speaks=rank_zero.is_here) as stop,
    ):
        found = _checkpoint_of(folder, resume, rank_zero, pulse)
        drawn, frozen = plan.init == RANDOM, plan.model.lora is not None
        if found is not None:
            check_resumed(plan, corpus, found)
        read = data_read(found)
        before = rank_zero.run(lambda: _kept_recipe(found))
        # Its steps are counted from what was read, perhaps in steps of another size.
        plan = replace(plan, recipe=plan.recipe.over(len(rows), read))
        folder = replace(folder, plan=plan)
        reference = Reference(
            plan=plan, corpus=corpus, device=target, rank_zero=rank_zero, run=folder.path, found=found
        )
        begins = found is None or reference.lost or frozen  # a checkpoint holds what is trained
        answers = None
        if recipe.distillation_top_k:
            from meshwright.training.teacher_targets import ask

            answers = ask(plan, corpus, read, mesh, target, rank_zero, stop)
        state = new_state(plan, mesh, target, initialize=begins and drawn, adapters=begins and frozen)
        state.base, state.first_weights = base_fingerprint(plan), reference.first_weights
        columns = state.engine.columns(plan.recipe.sequence)
        share = Share(index=mesh.reader, parts=plan.layout.dp, columns=columns)
        if begins and not drawn:
            pretrained.take_weights(state, plan)
        if found is None and not drawn:
            foreseen = _also_said(foreseen, ("init", pretrained.said(plan)))
        if reference.lost:
            reference.measure(state.engine, share)
        if found is not None:
            _resume(state, plan, corpus, folder, found)
        reference.measure(state.engine, share)
        if reference.said:
            foreseen = _also_said(foreseen, ("reference", reference.said))
        task = reference.task()
        if recipe.traits.teacher:
            writes = on_policy(plan, corpus, folder, share, sampler)
            objective = distillation(plan, mesh, target)
            task = Task(objective=objective, of_rows=answers.of_rows if answers else None, on_policy=writes)
            said = answers.said if answers else "beside the student, in every step"
            foreseen = _also_said(foreseen, ("teacher", f"{plan.teacher_init}, {said}"))
        jump = rate_jump(before, plan.recipe, read.steps) if before is not None else None
        remarks = (*(said for said in (left, crowded, jump) if said), *rounding_notes(plan), *advice(plan, corpus))
        reads = announced(plan.data, plan.recipe, corpus.train, rows, read)
        foreseen = _also_said(foreseen, *reads, *(("note", remark) for remark in remarks))
        changes = rank_zero.run(lambda: _begun(folder, plan, state.progress.step)) or ()
        trainer = Trainer(
            plan=plan,
            state=state,
            corpus=corpus,
            folder=folder,
            share=share,
            task=task,
            device=target,
            pulse=pulse,
            saving=saving,
            watchers=tuple(watchers) if rank_zero.is_here else (),
            changes=changes,
            foreseen=foreseen or Foreseen(),
        )
        return trainer.train(stop)


def _started_with(plan: Plan, resume: str) -> str:
    """What must be the same on every rank, a line for each key."""
    keys = (f"{key}={value}" for key, value in _lines("", planfile.dump(plan)))
    return "\n".join((f"meshwright {__version__}", f"resume={resume}", *keys))


def _lines(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all that lies in a document."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _lines(f"{name}.{key}" if name else key, item)
    else:
        yield name, value


@contextmanager
def _folder(plan: Plan, corpus: Corpus, resume: str, rank_zero: RankZero, *, new: bool) -> Iterator[RunFolder]:
    """The run folder, made and locked by the first rank, looked at by the others; a `new` one goes where no run began
    in it."""
    path = Path(plan.run)
    with ExitStack() as stack:
        if new and rank_zero.is_here:
            stack.push(lambda kind, error, trace: default_folders.drop_unbegun(path) if kind else None)
        made = rank_zero.run(lambda: _made(path, plan, corpus, resume))
        yield stack.enter_context(made) if made is not None else RunFolder(path=path, plan=plan)


def _made(path: Path, plan: Plan, corpus: Corpus, resume: str) -> RunFolder:
    """The run folder, taken."""
    folder = RunFolder.create(path, plan, corpus.tokenizer, resume=resume != "no")
    if resume in ("no", "auto") and not checkpoint_folder.listing(folder.checkpoints):
        pretrained.keep_beside(plan, path, corpus.tokenizer)
    return folder


def settled(plan: Plan, target: torch.device, rank_zero: RankZero, settle: Settle | None) -> tuple[Plan, str]:
    """The plan as its passes are run here, on every rank, and why; a CPU runs them plainly, whatever is left open."""
    if settle is None or target.type != "cuda":
        return device.deterministic_plan(plan, target), ""
    lacks = missing_anywhere(target, rank_zero.world)
    return rank_zero.broadcast(lambda: settle(plan, lacks))


def _also_said(foreseen: Foreseen | None, *rows: tuple[str, str]) -> Foreseen:
    """With more rows of the first lines."""
    known = foreseen or Foreseen()
    return replace(known, sentences=(*known.sentences, *rows))


def _check_vocabulary(plan: Plan, corpus: Corpus) -> None:
    if corpus.tokenizer.vocab > plan.model.vocab:
        raise PlanError(
            f"model.vocab={plan.model.vocab} is smaller than the tokenizer's {corpus.tokenizer.vocab} tokens: "
            f"take model.vocab={-(-corpus.tokenizer.vocab // 128) * 128} or another data.tokenizer"
        )


def _begun(folder: RunFolder, plan: Plan, steps_done: int) -> tuple[str, ...]:
    """Nothing can be refused any more: keep the plan, and have `latest` lead here. As _keep_plan."""
    changes = _keep_plan(folder, plan, steps_done)
    default_folders.point_latest(folder.path)
    return changes


def _keep_plan(folder: RunFolder, plan: Plan, steps_done: int) -> tuple[str, ...]:
    """Write the plan into the run folder, unless all steps are done; returns the changes to what stood there."""
    before = _kept_keys(folder) if steps_done else {}
    if steps_done < plan.recipe.steps or not (folder.path / "plan.yaml").is_file():
        folder.keep_plan()
    now = dict(_lines("", planfile.dump(planfile.absolute(plan))))
    return tuple(f"{key}={value} (was {before[key]})" for key, value in now.items() if before.get(key, value) != value)


def _kept_keys(folder: RunFolder) -> dict[str, Any]:
    """The plan that the run folder has, by dotted keys; nothing where it is of another version."""
    try:
        return dict(_lines("", planfile.dump(planfile.absolute(RunFolder.open(folder.path).plan))))
    except MeshwrightError:
        return {}


def _kept_recipe(found: Path | None) -> Recipe | None:
    """The recipe by which the run of a checkpoint went, where it can be read."""
    with suppress(MeshwrightError):
        return RunFolder.open(found.parent.parent).plan.recipe if found is not None else None
    return None


def new_state(
    plan: Plan, mesh: Mesh, target: torch.device, *, initialize: bool, adapters: bool = False
) -> TrainState:  # fmt: skip
    """A plan's model laid over the mesh, with its optimizer, before the first step; not `initialize`: the weights are
    left as memory is, for whoever reads them from a checkpoint or wants only their sizes. `adapters`: all but these."""
    recipe, rounds = plan.recipe, plan.recipe.fake_quantize != NO_SCHEME
    seed_everything(recipe.seed + mesh.reader + plan.layout.dp * mesh["pp"].index)
    engine = build_engine(
        plan.model,
        replace(plan.layout, compile="off") if rounds else plan.layout,
        mesh=mesh,
        device=target,
        dtype=DTYPES[recipe.precision],
        reduce_dtype=reduce_dtype(recipe),
        micro_batches=plan.micro_batches,
        seed=recipe.seed,
        dropout=recipe.dropout,
        products=recipe.products,
        initialize=initialize,
        adapters=adapters,
        masters=shards_are_masters(recipe.precision, plan.layout, recipe.storage, recipe.reduce_dtype),
    )
    round_weights(engine, recipe.fake_quantize)
    scaler = LossScaler(target) if recipe.precision == "fp16" else None
    return TrainState(engine, Optimizer.of(engine, recipe), scaler, Progress(), StepSkipper(target))


def rounding_notes(plan: Plan) -> list[str]:
    """What a run should know whose weights are rounded."""
    scheme = plan.recipe.fake_quantize
    if scheme == NO_SCHEME:
        return []
    return [
        f"weights are rounded in every product (recipe.fake_quantize={scheme}), and blocks run uncompiled: write the "
        f"codes with `meshwright quantize {plan.run} --scheme {scheme}`; export and eval take the weights behind them"
    ]


def _checkpoint_of(folder: RunFolder, resume: str, rank_zero: RankZero, pulse: Heartbeat) -> Path | None:
    """What `resume` means now, verified: of our own choice damaged ones are passed over, one that was named is not."""
    if resume == "no":
        return None
    if resume != "auto":
        return checkpoint.named(Path(resume), begun=pulse.piece_begun)
    candidates = rank_zero.broadcast(lambda: checkpoint_folder.newest_first(folder.checkpoints))
    return checkpoint.newest_whole(candidates, begun=pulse.piece_begun)


def _resume(state: TrainState, plan: Plan, corpus: Corpus, folder: RunFolder, found: Path) -> None:
    """Continue from a checkpoint; one that holds weights only (an import) gives the weights and starts at step 0."""
    if holds_weights_only(found):
        weights = state.model_tensors()
        checkpoint.load(found, weights, verified=True)
        state.take_weights(weights)
        return
    tensors = state.tensors()
    checkpoint.load(found, tensors, verified=True)
    state.restore(tensors, checkpoint.values(found))
    if state.engine.mesh.rank == 0:
        for path in (folder.metrics, folder.samples):
            MetricsLog(path).truncate_to(state.progress.step)

"""A run before its model exists: the plan on its ranks, the text, the run folder, the checkpoint to resume.

Each of these can still refuse.
"""

import json
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from meshwright import __version__, planfile
from meshwright.data import Corpus
from meshwright.data import prepare as prepare_data
from meshwright.data.sequences.numbered_rows import NumberedRows, numbered_rows
from meshwright.formats.hub.config import GENERATION
from meshwright.parallel import Mesh, make_mesh
from meshwright.parallel.blocks.compiling import find_missing_tool
from meshwright.parallel.groups.group import Group, RankZero, agree, check_same
from meshwright.parallel.groups.mesh import saving_group
from meshwright.parallel.health.heartbeat import Heartbeat
from meshwright.parallel.pipeline.pass_graphs import check_device
from meshwright.spec import Plan, parameters
from meshwright.spec.errors import CheckpointError, DamagedCheckpoint, PlanError, RunError, StoreError, argument
from meshwright.spec.recipe.recipe import UNREAD, DataRead
from meshwright.spec.rules.legal import check_offload
from meshwright.store import checkpoint, checkpoint_folder
from meshwright.store.default_folders import drop_unbegun, explain_new_run, find_begun_run, is_open, settle_run
from meshwright.store.durable import replace_file, report_in_one_line
from meshwright.store.model_weights import base_fingerprint
from meshwright.store.run_folder import RunFolder, RunLock
from meshwright.training import device as devices
from meshwright.training.fits import check_fits, check_space
from meshwright.training.objectives.reference import holds_weights_only
from meshwright.training.objectives.teacher import check_teacher, check_vocabulary
from meshwright.training.optimizer.precision import DTYPES
from meshwright.training.step.interrupt import Interrupt
from meshwright.training.step.state import DATA_KEYS, STATE_KEYS, TEXT, check_weights, keep_extra_files, mixture_weights
from meshwright.training.step.watch import Forecast

if TYPE_CHECKING:
    from meshwright.store.folder_ranks import FolderRanks
    from meshwright.store.owner import Ownership
    from meshwright.store.stored_run import StoredRun

log = logging.getLogger(__name__)
LABELS = ("model.name", "model.family", "model.init")
"""Keys of a model on which no tensor of a checkpoint depends."""
MEASURED_ROWS = 256
"""Rows whose documents are measured at the start."""
ECHO_S = 1.0
"""A launcher forwards the Ctrl-C that its processes already got from the terminal."""
Preflight = Callable[[Plan, torch.device], Forecast]
"""(plan, device) -> what is known about the run. What it raises ends all ranks."""
Settle = Callable[[Plan, str], tuple[Plan, str]]
"""(plan, what a machine lacks to compile) -> the plan without auto in compile and cuda_graphs, and why."""


def check_resume(plan: Plan, resume: str) -> int | None:
    """Check, before anything is prepared, that the checkpoint to resume from and the first weights exist.

    Returns the newest step in the plan's store. None = the store holds no checkpoint, or the plan has none.
    """
    if resume == "no":
        checkpoint_folder.refuse_taken(Path(plan.run))
    checkpoint_folder.check_resume(resume)
    stored_step = None
    if plan.store.url:
        from meshwright.store.stored_run import check_store

        stored_step = check_store(plan.store, resume, Path(plan.run))
        if stored_step is not None and resume == "auto":
            check_stored_model(plan)
    # Only a run that begins reads first weights; adapters need their base every time.
    fresh = resume == "no" or (
        resume == "auto"
        and stored_step is None
        and not checkpoint_folder.list_checkpoints(Path(plan.run) / "checkpoints")
    )
    if fresh or plan.model.lora is not None:
        check_weights(plan)
    check_teacher(plan)
    return stored_step


def check_resumed(plan: Plan, corpus: Corpus, checkpoint_path: Path) -> None:
    """Raise CheckpointError unless the run can resume from the checkpoint as the plan says."""
    if holds_weights_only(checkpoint_path):
        if plan.model.lora is not None:
            raise CheckpointError(
                f"{checkpoint_path} holds all weights, and adapters need those of a folder: export the run, and give "
                f"its folder as {argument('model', 'DIR')}"
            )
        return
    check_values(plan, corpus, checkpoint.read_values(checkpoint_path), checkpoint_path)


def check_stored_model(plan: Plan) -> None:
    """Raise CheckpointError if the run in the plan's store has another model. Its plan.yaml tells, which is small."""
    stored_plan = plan
    with TemporaryDirectory(prefix="meshwright-") as folder, suppress(FileNotFoundError, PlanError):
        file = Path(folder) / "plan.yaml"
        file.write_bytes((_open_store(plan.store.url).location / file.name).read())
        stored_plan = planfile.read(file, notes=[])
    if parameters(stored_plan.model) == parameters(plan.model):
        return
    theirs, ours = (dict(dotted_keys(planfile.dump(each)["model"], "model.")) for each in (stored_plan, plan))
    keys = [key for key in ours | theirs if theirs.get(key) != ours.get(key) and key not in LABELS]
    differences = ", ".join(f"{key}={theirs.get(key)} there and {ours.get(key)} here" for key in keys) or "see there"
    raise CheckpointError(
        f"{argument('store.url', plan.store.url)} holds a run of another model ({differences}): take the model of its "
        f"plan.yaml, or choose another {argument('store.url')}"
    )


def check_stored_values(plan: Plan, corpus: Corpus, stored: "StoredRun", name: str) -> None:
    """Raise CheckpointError for a checkpoint in the store that the plan cannot resume from, before its download."""
    values: dict[str, Any] = {}
    # A damaged one is left to the download, which passes over it.
    with suppress(FileNotFoundError, DamagedCheckpoint):
        content = (stored.checkpoints / name / checkpoint.STATE).read()
        if checkpoint_folder.new_hash(content).hexdigest() in {file.sha256 for file in stored.read_commit(name).files}:
            values = json.loads(content)
    if "seed" in values:  # an imported model has none, and resumes under any recipe
        check_values(plan, corpus, values, f"{argument('store.url', plan.store.url)}: {name}")


def check_values(plan: Plan, corpus: Corpus, values: dict[str, Any], checkpoint_path: Path | str) -> None:
    """Raise CheckpointError unless a run resumes from a checkpoint with these values. `checkpoint_path`: its name."""
    recipe, data, samples = plan.recipe, plan.data, plan.data.form == "samples"
    positions = {
        "recipe.sequence": (values["sequence"], recipe.sequence),
        "recipe.seed": (values["seed"], recipe.seed),
        "data.mixture.weight": (values.get("weights", []), mixture_weights(data)),
        **{f"data.{what}": (values.get(what), getattr(data, what)) for what in DATA_KEYS if samples},
        "data.malformed": (values.get("malformed", TEXT.malformed), data.malformed),
    }
    for what, (saved, planned) in positions.items():
        if saved != planned:
            raise _position_error(checkpoint_path, f"{what}={saved}", f"{what}={planned}")
    # An older checkpoint records no precision, and another one is refused when its tensors are read.
    for key, default in {"precision": recipe.precision, **STATE_KEYS}.items():
        saved, planned = values.get(key, default), getattr(recipe, key)
        if saved != planned:
            what = "weights" if key == "precision" else "optimizer states"
            raise CheckpointError(
                f"{checkpoint_path} holds {what} of recipe.{key}={saved}, and the plan has "
                f"recipe.{key}={planned}: take recipe.{key}={saved}, or start a new run from its export"
            )
    if values["data"] != corpus.fingerprint:
        others = ", another template, train_on or thinking" if samples else ""
        raise _position_error(
            checkpoint_path, f"other text or another split or tokenizer{others}", f"data={data.title}"
        )
    if values.get("base", "") != base_fingerprint(plan):
        raise CheckpointError(
            f"{checkpoint_path} holds an adapter for other weights than those of model.init={plan.init}: give the "
            "folder that it was trained with, and its model.lora.base"
        )
    # A checkpoint of an older version does not say it.
    scale, lora = values.get("adapter_scale"), plan.model.lora
    if scale is not None and lora is not None and scale != lora.scale:
        raise CheckpointError(
            f"the adapter's scale would change: {checkpoint_path} was trained with {scale:g}, and "
            f"model.lora.alpha={lora.alpha:g} gives {lora.scale:g}. Keep alpha and rslora of the run, or "
            "start a new run from its export"
        )


def find_data_read(checkpoint_path: Path | None) -> DataRead:
    """Return what the run of a checkpoint had read: nothing without a checkpoint, or with an imported one."""
    if checkpoint_path is None or holds_weights_only(checkpoint_path):
        return UNREAD
    values = checkpoint.read_values(checkpoint_path)
    return DataRead(steps=values["step"], rows=values["cursor"], tokens=values["tokens"])


def _position_error(checkpoint_path: Path | str, saved: str, planned: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint_path}: trained with {saved}, the plan says {planned}: the place in the data cannot be carried "
        "over; keep what it was trained with, or start a new run from its export"
    )


@dataclass(slots=True, kw_only=True)
class Job:
    """A run on this rank.

    Each step of the preparation makes its plan more definite and its forecast longer.
    """

    plan: Plan
    resume: str
    """no, auto, or the path of a checkpoint."""
    mesh: Mesh
    rank_zero: RankZero
    device: torch.device
    pulse: Heartbeat
    """Heartbeat that a watchdog reads."""
    saving: Group | None
    """Group of the thread that writes checkpoints. None = they are written between steps."""
    forecast: Forecast = field(default_factory=Forecast)
    leftover_warning: str | None
    """About an earlier run that this plan could have resumed, on rank 0. None = there is none."""
    disk_warning: str | None
    """About checkpoints that do not fit, on rank 0."""
    stored_step: int | None
    """Newest step in the plan's store when the job began, on rank 0. None = the store had none."""
    sharing: "FolderRanks | None"
    """The ranks that see this rank's run folder. None = all see one."""
    ownership: "Ownership | None" = None
    """Ownership of the run behind the plan's store, claimed on rank 0. None = the plan has no store."""
    fetched: Path | None = None
    """Checkpoint that was brought from the plan's store, to each machine. None = none was needed."""

    def add_lines(self, *lines: tuple[str, str]) -> None:
        """Add (label, sentence) lines to the forecast."""
        self.forecast = replace(self.forecast, sentences=(*self.forecast.sentences, *lines))


def open_job(
    plan: Plan, resume: str, *, pulse: Heartbeat, preflight: Preflight | None, settle: Settle | None, machines: int
) -> Job:  # fmt: skip
    """Agree on one plan, choose device and execution, and refuse what cannot run before anything is written.

    All ranks call this together. Every check that reads files runs on rank 0 alone.
    """
    plan.check_runs()
    mesh = make_mesh(plan.layout, traffic=pulse.calls)
    rank_zero = RankZero(mesh["world"])
    # Before anything else is exchanged: other plans would mean other collectives.
    check_same(mesh["world"], "plans or versions", _describe_start(plan, resume))
    plan = replace(plan, run=rank_zero.broadcast(lambda: find_begun_run(plan, resume)))
    leftover_warning = rank_zero.run(lambda: explain_new_run(plan, resume))
    stored_step = rank_zero.run(lambda: check_resume(plan, resume))
    # Every rank uploads, and machines may differ in credentials and installed libraries.
    agree(lambda: None if rank_zero.is_here else check_rights(plan), mesh["world"].process_group)
    sharing = None
    if mesh["world"].size > 1:
        from meshwright.store.folder_ranks import find_folder_ranks

        sharing = find_folder_ranks(Path(plan.run).parent if is_open(plan.run) else Path(plan.run), rank_zero)
    if sharing is not None:
        check_without_common_folder(plan, resume)

    device = devices.pick_device()
    # From one rank to all: machines of a mixed cluster would plan for different devices.
    cluster = rank_zero.broadcast(lambda: devices.cluster_of(plan, devices.known_device(device), machines))
    plan = replace(plan, cluster=cluster)
    plan, execution = settle_execution(plan, device, rank_zero, settle)
    rank_zero.run(lambda: check_fits(plan, device, machines=machines))
    check_offload(plan.layout, device.type)
    check_device(plan.model, plan.layout, device, DTYPES[plan.recipe.precision])
    disk_warning = rank_zero.run(lambda: check_space(plan))
    forecast = rank_zero.run(lambda: preflight(plan, device)) if preflight is not None else None

    recipe = plan.recipe
    devices.prepare(
        device, recipe.precision, tf32=recipe.tf32, deterministic=recipe.deterministic, products=recipe.products
    )
    job = Job(
        plan=plan, resume=resume, mesh=mesh, rank_zero=rank_zero, device=device, pulse=pulse,
        saving=saving_group(mesh) if plan.layout.saves_behind(device.type) else None,
        forecast=forecast or Forecast(), leftover_warning=leftover_warning, disk_warning=disk_warning,
        stored_step=stored_step, sharing=sharing,
    )  # fmt: skip
    if execution:
        job.add_lines(("execution", execution))
    if sharing is not None:
        job.add_lines(("store", f"machines share no run folder: whole checkpoints are in {plan.store.url} alone"))
    return job


def settle_execution(plan: Plan, device: torch.device, rank_zero: RankZero, settle: Settle | None) -> tuple[Plan, str]:
    """Return the plan with its way to run passes on this machine, and why.

    All ranks get the same one. A CPU has only one way.
    """
    if settle is None or device.type != "cuda":
        return devices.deterministic_plan(plan, device), ""
    lacks = find_missing_tool(device, rank_zero.world)
    return rank_zero.broadcast(lambda: settle(plan, lacks))


@contextmanager
def own_store(job: Job) -> Iterator[None]:
    """Own the run behind the plan's store, if it has one. Raises StoreError while another process trains it."""
    if not job.plan.store.url:
        yield
        return
    from meshwright.remote.locations import Location
    from meshwright.store.owner import Ownership
    from meshwright.store.stored_run import check_store

    job.ownership = ownership = Ownership(Location.open(job.plan.store.url))
    try:
        job.rank_zero.run(ownership.claim)
        # The owner before may have saved while this process waited.
        job.stored_step = job.rank_zero.run(lambda: check_store(job.plan.store, job.resume, Path(job.plan.run)))
        yield
    finally:
        ownership.release()


def load_corpus(job: Job, progress: Callable[[int, int], None] | None) -> tuple[Corpus, NumberedRows]:
    """Prepare the text on rank 0, read it on all ranks, and number its rows. `progress` gets (bytes done, bytes)."""
    rank_zero, plan = job.rank_zero, job.plan
    progress = progress if rank_zero.is_here else None
    corpus = rank_zero.run_first(lambda: prepare_data(plan.data, progress=progress))
    if corpus.tokenizer.vocab > plan.model.vocab:
        raise PlanError(
            f"model.vocab={plan.model.vocab} is smaller than the tokenizer's {corpus.tokenizer.vocab} tokens: "
            f"take model.vocab={-(-corpus.tokenizer.vocab // 128) * 128} or another data.tokenizer"
        )
    check_vocabulary(plan, corpus.tokenizer)

    # Raises for a text that is too short before a run folder is created.
    rows = numbered_rows(plan.data, plan.recipe, corpus, corpus.train, shuffle=True)
    job.plan = replace(plan, recipe=plan.recipe.over(len(rows), UNREAD if job.resume == "no" else None))
    if job.forecast.with_documents is not None:
        measured = rows.take(0, min(len(rows), MEASURED_ROWS)).document_tokens
        job.add_lines(*job.forecast.with_documents(measured))
    # The number of steps of an epoch, and so of checkpoints, is known only now.
    if job.plan.recipe.epochs:
        job.disk_warning = rank_zero.run(lambda: check_space(job.plan))
    return corpus, rows


@contextmanager
def open_run_folder(job: Job, corpus: Corpus) -> Iterator[RunFolder]:
    """Create or reopen the run folder. Rank 0 holds its lock; other ranks only read it."""
    planned_run = job.plan.run
    job.plan = replace(job.plan, run=job.rank_zero.broadcast(lambda: settle_run(job.plan)))
    path = Path(job.plan.run)
    with ExitStack() as stack:
        if job.plan.run != planned_run and job.rank_zero.is_here:
            # A folder that was just chosen goes away again if no run starts in it.
            stack.push(lambda kind, error, trace: drop_unbegun(path) if kind else None)
        if lock := prepare_machines(job, path):
            stack.callback(lock.release)
        fetch_newest(job, path, corpus)
        created = job.rank_zero.run(lambda: _create_folder(job, path, corpus))
        copy_to_machines(job, path / GENERATION)
        yield stack.enter_context(created) if created is not None else RunFolder(path=path, plan=job.plan)


def _create_folder(job: Job, path: Path, corpus: Corpus) -> RunFolder:
    folder = RunFolder.create(path, job.plan, corpus.tokenizer, resume=job.resume != "no")
    if job.resume in ("no", "auto") and not checkpoint_folder.list_checkpoints(folder.checkpoints):
        keep_extra_files(job.plan, path, corpus.tokenizer)
    return folder


def check_rights(plan: Plan) -> None:
    """Raise StoreError unless this machine may write to the plan's store, if it has one."""
    if plan.store.url:
        _open_store(plan.store.url).location.refuse_unwritable("store.url")


def check_without_common_folder(plan: Plan, resume: str) -> None:
    """Raise PlanError unless a plan can run on machines that share no run folder."""
    where = f"not every rank sees {argument('run', plan.run)} of rank 0"
    if not plan.store.url:
        raise PlanError(
            f"{where}, and no machine would have a whole checkpoint: choose a folder that all machines share, or let "
            f"them meet in an object store ({argument('store.url', 'URL')})"
        )
    recipe = plan.recipe
    if recipe.rollback_spikes:
        raise PlanError(
            f"{where}, and recipe.rollback_spikes={recipe.rollback_spikes} goes back on local disk: choose a folder "
            "that all machines share, or recipe.rollback_spikes=0"
        )
    if recipe.traits.pairs or recipe.distillation_top_k:
        key = f"recipe.objective={recipe.objective}" if recipe.traits.pairs else "recipe.distillation_top_k"
        raise PlanError(f"{where}, and {key} has tables that all ranks read: choose a folder that all machines share")
    if is_open(plan.run):
        raise PlanError(f"{where}, and each machine would choose another one: name it, as {argument('run', 'runs/a')}")
    if resume not in ("no", "auto"):
        raise PlanError(f"{where}, nor {argument('resume', resume)}: resume=auto brings the newest of the store")


def prepare_machines(job: Job, run: Path) -> RunLock | None:
    """Make and lock the run folder on each machine that does not see rank 0's, unless it holds another run.

    All ranks together. Returns the lock, on the first rank of each of these machines.
    """
    if job.sharing is None:
        return None
    from meshwright.store.stored_run import read_local_id

    run_id = job.rank_zero.broadcast(lambda: _open_store(job.plan.store.url).read_id() or read_local_id(run))

    def prepare() -> RunLock:
        checkpoints, local_id = run / "checkpoints", read_local_id(run)
        if local_id != run_id if local_id else checkpoint_folder.list_checkpoints(checkpoints):
            raise RunError(f"{run} on {socket.gethostname()} holds another run: choose another {argument('run')}")
        with report_in_one_line(run):
            checkpoints.mkdir(parents=True, exist_ok=True)
            lock = RunLock.take(run)
            checkpoint_folder.sweep(checkpoints)
        return lock

    is_first = job.sharing.index == 0 and not job.rank_zero.is_here
    return agree(prepare if is_first else lambda: None, job.mesh["world"].process_group)


def copy_to_machines(job: Job, file: Path) -> None:
    """Copy a small file of the run folder from rank 0 to the machines that do not see it, or remove it there."""
    if job.sharing is None:
        return
    content = job.rank_zero.broadcast(lambda: file.read_bytes() if file.exists() else b"")

    def write() -> None:
        with report_in_one_line(file.parent):
            if content:
                replace_file(file, content)
            else:
                file.unlink(missing_ok=True)

    is_first = job.sharing.index == 0 and not job.rank_zero.is_here
    agree(write if is_first else lambda: None, job.mesh["world"].process_group)


def fetch_newest(job: Job, run: Path, corpus: Corpus) -> None:
    """Bring the newest checkpoint of the plan's store to local disk, unless that has one as new. All ranks together."""
    if not job.plan.store.url or job.resume != "auto":
        return
    from meshwright.store.stored_run import choose_newer

    stored = _open_store(job.plan.store.url)
    damaged: list[str] = []

    def take_lock() -> RunLock:
        run.mkdir(parents=True, exist_ok=True)
        return RunLock.take(run)

    def choose() -> str:
        name = choose_newer(stored, run, damaged, everywhere=job.sharing is not None)
        if name:
            check_stored_values(job.plan, corpus, stored, name)
            stored.fetch_records(run)
        local = checkpoint_folder.find_latest(run / "checkpoints") if job.sharing is not None else None
        if local is not None and local.name > name.rpartition("-")[0]:
            log.warning("%s is on this machine alone, so it is not used: a run on this machine uploads it", local)
        return name

    # Another process may train here: it is refused before anything is written, and until the checkpoint is there.
    lock = job.rank_zero.run(take_lock)
    try:
        while name := job.rank_zero.broadcast(choose):
            try:
                path = _fetch(job, stored, name, run / "checkpoints")
            except DamagedCheckpoint as error:
                if job.rank_zero.is_here:
                    log.warning("passed over: %s", error)
                damaged.append(name)
                continue
            job.add_lines(("resume", f"{path.name} was fetched from {stored.location}"))
            job.fetched = path
            return
    finally:
        if lock is not None:
            lock.release()


def replace_from_store(job: Job, path: Path, older: Path | None) -> Path | None:
    """Fetch what the store has of a damaged local checkpoint, or else the newest that is newer than `older`.

    All ranks together. Returns the path of what was fetched. None = the store has neither.
    """
    if not job.plan.store.url:
        return None
    stored = _open_store(job.plan.store.url)
    for name in job.rank_zero.broadcast(lambda: stored.find_replacements(path, older)):
        with suppress(CheckpointError):
            return _fetch(job, stored, name, path.parent)
    return None


def _open_store(url: str) -> "StoredRun":
    from meshwright.remote.locations import Location
    from meshwright.store.stored_run import StoredRun

    return StoredRun(Location.open(url))


def _fetch(job: Job, stored: "StoredRun", name: str, checkpoints: Path) -> Path:
    """Download a checkpoint, each rank a part of its files. Raises CheckpointError on all ranks if one fails.

    Where machines share no folder, each of them gets all files.
    """
    world = job.mesh["world"]
    sharing, path = job.sharing or world, checkpoints / name.rpartition("-")[0]

    def fetch_part() -> Path:
        try:
            with report_in_one_line(checkpoints):
                return stored.fetch(name, checkpoints, (sharing.index, sharing.size), job.pulse.piece_begun)
        except StoreError as error:
            raise (DamagedCheckpoint if error.is_damage else CheckpointError)(str(error)) from None

    def publish() -> Path:
        with report_in_one_line(checkpoints):
            return stored.publish(name, hidden) if sharing.index == 0 else path

    hidden = agree(fetch_part, world.process_group)
    return agree(publish, world.process_group)


def catch_interrupts(job: Job) -> Interrupt:
    """Return the signal handlers of a run."""
    return Interrupt(echo_s=ECHO_S if job.mesh["world"].size > 1 else 0.0, speaks=job.rank_zero.is_here)


def _describe_start(plan: Plan, resume: str) -> str:
    """Return what must be the same on every rank, one line per key."""
    keys = (f"{key}={setting}" for key, setting in dotted_keys(planfile.dump(plan)))
    return "\n".join((f"meshwright {__version__}", f"resume={resume}", *keys))


def dotted_keys(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, setting) of all entries in a document."""
    for key, setting in document.items():
        if isinstance(setting, dict):
            yield from dotted_keys(setting, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", setting

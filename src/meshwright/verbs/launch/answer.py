"""Files that start a plan on a cluster: launch.sh for each node, and a job for Slurm, a JobSet or a SkyPilot task.

Their texts are in job_files/, where @WORD@ stands for what a plan changes. launch.sh ends with 75 when the run is not
done and has saved something new. That code alone decides whether a scheduler starts it again.
"""

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from glob import iglob
from importlib.resources import files
from pathlib import Path
from textwrap import indent
from typing import Any

from meshwright import __version__, planfile
from meshwright.interface.answers.answer import Answer, HasPlan, checked
from meshwright.interface.answers.markup import table, whole
from meshwright.interface.planning.plan_reading import read_plan
from meshwright.planner.rent.goodput import Conditions
from meshwright.planner.rent.run_on import checkpoint_of
from meshwright.planner.step.predict import predict
from meshwright.planner.step.prediction import usable_bytes
from meshwright.remote.locations import EXTRAS, is_url, scheme
from meshwright.spec import Plan
from meshwright.spec.errors import ArgumentError, IllegalLayout, PlanError, argument
from meshwright.spec.plan.plan import STDLIB, differences, nearest_layouts, world_violation
from meshwright.spec.presets import suggest
from meshwright.spec.units import many, short_gib
from meshwright.stacks.config_files import PORT, node_head, slurm_head, srun_lines
from meshwright.store.default_folders import is_open
from meshwright.store.durable import NODE_DISKS, file_system, refuse_nonempty, refuse_unwritable, report_in_one_line

STARTS = {
    "slurm": "sbatch --time=24:00:00 launch.sbatch",
    "kubernetes": "kubectl apply -f jobset.yaml",
    "skypilot": "sky jobs launch skypilot.yaml",
}
"""Value of --to -> command that starts the job, in its folder. The last word is its file."""
LEAST_GRACE_S, MOST_GRACE_S = 120, 65_535
"""Slurm sends a signal up to 60 s early, and takes no longer time than this."""
BLOCK = "    "
"""Indent of a file's text in jobset.yaml."""
MOUNT, FILES = "/meshwright", "/launch"
"""Folders on a node that is a container or rented: a volume that all nodes share, and plan.yaml with launch.sh."""
UPLOAD = 500.0
"""Bandwidth of a node to an object store in MB/s, where the plan does not limit it. Assumed."""
LOCAL = "/var/tmp/meshwright"
"""Folder on the disk of a rented node, for a run whose checkpoints meet in an object store."""
SKY_NAMES = (
    (r"(A100)-\w+-80", r"\1-80GB"), (r"(V100)-\w+-32", r"\1-32GB"), (r"RTX-(A?\d+)", r"RTX\1"),
    (r"RTX-6000-Ada", "RTX6000-Ada"), (r"(G?[ABHV]\d+)-.*", r"\1"),
)  # fmt: skip
"""Name of a device -> SkyPilot's name of its accelerator, where they differ."""
SETUP = "# Yours, where your package index has no such version: the path of a wheel, or of a clone in this folder.\n"
SHORT_WARMUP = 0.1
"""Share of the default warm-up below which a note is printed."""
RENDEZVOUS = (
    '--rdzv_id "${RUN##*/}" --rdzv_backend c10d --rdzv_endpoint "$HEAD:$PORT" \\\n'
    '    --rdzv_conf "is_host=$([ "$NODE_RANK" = 0 ] && echo true || echo false)"'
)
"""Rendezvous of several nodes. is_host spares torchrun a guess by name, which fails where a node has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Names and sizes that the files of a target share."""

    plan: Plan
    """The plan, with the run folder as the nodes see it."""
    name: str
    """Lower case letters, digits and hyphens, as in a DNS name."""
    grace_s: int
    image: str
    storage_gib: int
    """Room for all checkpoints that exist at once."""
    is_named_after_model: bool

    def texts(self, to: str) -> dict[str, str]:
        """Return the text of each file but plan.yaml, by name."""
        # Nodes are new at each start, and only the volume lasts.
        script = self._node_script(has_volume=to != "slurm" and not self.plan.store.url)
        if to == "slurm":
            return {"launch.sh": script, "launch.sbatch": self._slurm_job()}
        if to == "skypilot":
            return {"launch.sh": script, "skypilot.yaml": self._sky_task()}
        return {"jobset.yaml": self._job_set(script)}

    def _slurm_job(self) -> str:
        directives = ("--requeue", "--open-mode=append", f"--signal=B:USR1@{self.grace_s}")
        head = slurm_head(self.plan, self._title, name=self.name, directives=directives)
        # Nodes end by themselves a moment after the first: the rest of the grace is theirs.
        srun = srun_lines(self.plan, f"--wait={self.grace_s}")
        return _fill("launch.sbatch", {"head": "\n".join(head), "srun": "\n".join(srun)})

    def _sky_task(self) -> str:
        url, words = self.plan.store.url, self._cluster_words()
        extras = sorted({extra for each in self.urls if (extra := EXTRAS.get(scheme(each), ""))})
        # A recovery weeks later must not install another version.
        chosen = f"[{','.join(extras)}]" if extras else ""
        package = f"'meshwright{chosen}=={__version__}'"
        words |= {
            "resources": "".join(self._sky_resources()),
            "setup": "" if self.image else f"{SETUP}setup: pip install {package}\n",
            "volume": "" if url else _fill("volume.yaml", words),
            "yours": "" if url else "\n# Yours to set: VOLUME.",
            # SkyPilot's fast networks (EFA, GPUDirect, Nebius) join NVIDIA's GPUs alone.
            "fabric": words["fabric"] if words["vendor"] == "nvidia.com" else None,
        }
        return _fill("skypilot.yaml", words)

    def _job_set(self, script: str) -> str:
        cluster, url, words = self.plan.cluster, self.plan.store.url, self._cluster_words()
        claimed = f"persistentVolumeClaim: {{claimName: {self.name}-run}}"
        words |= {"access": "ReadWriteMany" if cluster.nodes > 1 else "ReadWriteOnce", "storage": f"{self.storage_gib}"}
        words |= {
            "plan": indent(planfile.content(self.plan, Path(FILES)).rstrip(), BLOCK),
            "node": indent(script.rstrip(), BLOCK),
            "claim": "" if url else _fill("claim.yaml", words), "devices": f"{cluster.devices_per_node}",
            "gpu": "" if cluster.device.is_gpu else None, "urls": "" if self.urls else None,
            "yours": "" if self.image else " Yours to set: IMAGE.",
            "volume": f"emptyDir: {{sizeLimit: {self.storage_gib}Gi}}" if url else claimed, "disk": "" if url else None,
        }  # fmt: skip
        return _fill("jobset.yaml", words)

    @property
    def urls(self) -> list[str]:
        """URLs that nodes read, and that of the store."""
        data = self.plan.data
        return sorted(filter(is_url, {self.plan.store.url, data.path, *(source.path for source in data.sources)}))

    def _cluster_words(self) -> dict[str, str | None]:
        """Return the words that a SkyPilot task and a JobSet share."""
        cluster = self.plan.cluster
        # A run that its user has put elsewhere must be on the volume too.
        mount = str(Path(self.plan.run).parent)
        return {
            "title": self._title, "name": self.name, "nodes": str(cluster.nodes), "grace": str(self.grace_s),
            "mount": mount, "port": str(PORT), "image": self.image or "IMAGE",
            "vendor": "amd.com" if cluster.device.name.startswith(("MI", "AMD")) else "nvidia.com",
            "fabric": "" if cluster.device.is_gpu and cluster.nodes > 1 else None,
        }  # fmt: skip

    @property
    def _title(self) -> str:
        cluster = self.plan.cluster
        machines = f"{many(cluster.nodes, 'node')} x {cluster.devices_per_node} {cluster.device.name}"
        return f"Written by meshwright launch: {self.plan.model.name} on {machines}"

    def _node_script(self, *, has_volume: bool) -> str:
        rendezvous = RENDEZVOUS if self.plan.cluster.nodes > 1 else "--standalone"
        exports = "\n".join(self._exports(has_volume=has_volume))
        words = {"run": shlex.quote(self.plan.run), "rendezvous": rendezvous, "exports": exports}
        return _fill("launch.sh", {"head": "\n".join(node_head(self.plan, self._title)), **words})

    def _exports(self, *, has_volume: bool) -> Iterator[str]:
        """Yield environment variables that the user has not set, each below its reason."""
        is_gpu = self.plan.cluster.device.is_gpu
        reasons = {
            "PYTHONUNBUFFERED=1": "Lines reach the log as they are written, also just before a kill.",
            f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={self.grace_s}": "torchrun kills its workers 30 s after SIGTERM, which "
            "may be too soon for a step and a save.",
        }
        if has_volume:
            reasons["XDG_CACHE_HOME=${RUN%/*}/.cache"] = (
                "Encoded text and models of the Hub are there at the next start too."
            )
        if is_gpu:
            reasons["NCCL_DEBUG=WARN"] = "NCCL names the cause of an error. Else it is `unhandled system error`."
        for word, reason in reasons.items():
            name, _, setting = word.partition("=")
            yield f'# {reason}\nexport {name}="${{{name}:-{setting}}}"'
        if self.plan.cluster.nodes > 1:
            yield "# Yours, where nodes reach each other by another network interface than is guessed:"
            yield f"# export {'NCCL' if is_gpu else 'GLOO'}_SOCKET_IFNAME=eth0"

    def _sky_resources(self) -> Iterator[str]:
        device = self.plan.cluster.device
        names = (
            re.sub(pattern, name, device.name) for pattern, name in SKY_NAMES if re.fullmatch(pattern, device.name)
        )
        if device.is_gpu:
            yield f"  accelerators: {next(names, device.name)}:{self.plan.cluster.devices_per_node}\n"
        if self.image:
            yield f"  image_id: docker:{self.image}\n"
        if self.plan.store.url:
            yield f"  disk_size: {self.storage_gib}\n"


def _fill(name: str, words: Mapping[str, str | None]) -> str:
    """Return a text of job_files with the words of a plan. Lines with a word that is None are left out."""
    lines = (files(__package__) / "job_files" / name).read_text(encoding="utf-8").splitlines(keepends=True)
    applicable = (line for line in lines if all(words[word] is not None for word in re.findall(r"@(\w+)@", line)))
    return re.sub(r"@(\w+)@", lambda match: words[match[1]] or "", "".join(applicable))


@dataclass(frozen=True, kw_only=True, repr=False)
class LaunchAnswer(Answer):
    """Files of a job, and what to know before it starts."""

    job: Job
    to: str
    folder: Path
    files: tuple[Path, ...]
    notes: tuple[str, ...]

    @property
    def plan(self) -> Plan:
        """The plan that the job trains."""
        return self.job.plan

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `meshwright launch --json` prints."""
        cluster = self.plan.cluster
        return {
            "to": self.to, "out": str(self.folder), "files": [path.name for path in self.files], "run": self.plan.run,
            "nodes": cluster.nodes, "processes_per_node": cluster.devices_per_node, "grace_seconds": self.job.grace_s,
            "start": STARTS[self.to], "notes": list(self.notes),
        }  # fmt: skip

    def sentences(self) -> Iterator[str]:
        """Yield what was written, notes, and how to start it."""
        yield f"{self.folder}: {', '.join(path.name for path in self.files)}"
        yield f"run: {self.plan.run}; {self.job.grace_s} s to finish a step and save before machines are taken"
        yield from (f"note: {note}" for note in self.notes)
        yield f"start: cd {shlex.quote(str(self.folder))} && {STARTS[self.to]}"

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per file."""
        return [{"file": str(path), "bytes": path.stat().st_size} for path in self.files]

    def __repr__(self) -> str:
        return "\n".join(self.sentences())

    def _repr_html_(self) -> str:
        return whole(table(("file", "bytes"), [tuple(row.values()) for row in self.rows()]))


@checked
def launch(
    *plan: str | Path | Plan | HasPlan,
    to: str,
    out: str | Path | None = None,
    grace: int | None = None,
    image: str = "",
    **keys: Any,
) -> LaunchAnswer:
    """Write the files that start a plan on a cluster, into a new folder. Nothing is started.

    Args:
        plan: A plan file, a plan or an answer about one, and KEY=VALUE changes.
        to: slurm, kubernetes or skypilot.
        out: The folder. None = the name of `to`.
        grace: Seconds to finish a step and save before the machines are taken. None = counted from the plan.
        image: Container image with Meshwright. Empty = its user puts one in.
        keys: Keys of a plan file, as cluster="h100x8".

    Raises:
        PlanError, ArgumentError, RunError: The plan cannot run on its cluster, or the folder is not empty.
    """
    if to not in STARTS:
        raise ArgumentError("to", to, "is not known", suggest(to, STARTS))
    if grace is not None and not 1 <= grace <= MOST_GRACE_S:
        raise ArgumentError("grace", grace, f"must be at least 1 and at most {MOST_GRACE_S:,} seconds")
    if image and to == "slurm":
        raise ArgumentError("image", image, remedy="is for kubernetes and skypilot; Slurm's jobs keep your environment")
    parsed, _ = read_plan(plan, keys, processes=None)
    cluster = parsed.cluster
    if cluster.device.plan_only:
        raise PlanError(f"the plan cannot run on {cluster.device.name}: {cluster.device.plan_only}")
    _refuse_other_world(parsed)
    if parsed.recipe.rollback_spikes and parsed.store.url and to != "slurm" and cluster.nodes > 1:
        asked = f"recipe.rollback_spikes={parsed.recipe.rollback_spikes}"
        remedy = (
            "take recipe.rollback_spikes=0, or leave out the store: the run is then on a volume that all nodes share"
        )
        raise PlanError(f"{asked} goes back on local disk, and these nodes share none with a store: {remedy}")
    folder = Path(out or to)
    refuse_nonempty(folder, "out")
    refuse_unwritable(folder, "out")
    job = _job(parsed, to, folder, grace, image)
    with report_in_one_line(folder, argument("out")):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in job.texts(to).items():
            (folder / name).write_text(text, encoding="utf-8")
    if to != "kubernetes":  # jobset.yaml holds the plan
        planfile.write(job.plan, folder / "plan.yaml", another=argument("out"))
    notes = tuple(_notes(job, to, folder.resolve()))
    return LaunchAnswer(job=job, to=to, folder=folder, files=tuple(sorted(folder.iterdir())), notes=notes)


def _refuse_other_world(plan: Plan) -> None:
    """Raise IllegalLayout for a layout that does not fill the cluster, with what does."""
    cluster, world = plan.cluster, plan.layout.world
    if not (violation := world_violation(plan, cluster.devices, cluster.nodes)):
        return
    machines = f"the cluster has {many(cluster.nodes, 'node')} of {many(cluster.devices_per_node, 'device')}"
    nodes, rest = divmod(world, cluster.devices_per_node)
    remedies = [differences(plan.layout, layout) for layout in nearest_layouts(plan, cluster.devices)[:2]]
    if not rest and not replace(plan, cluster=replace(cluster, nodes=nodes)).violations():
        remedies.insert(0, f"cluster.nodes={nodes}")
    # Where the number is right, or no other helps, another rule is broken, and its own sentence says what to do.
    if world == cluster.devices or not remedies:
        raise IllegalLayout(f"{machines}, one process on each: {violation}")
    if cluster.device.is_gpu:
        remedies.append("a layout that `meshwright plan PLAN.yaml --save FILE` chooses")
    ranks = many(world, "rank")
    raise IllegalLayout(f"{machines}, one process on each, and the layout {ranks}: take {', or '.join(remedies)}")


def _job(parsed: Plan, to: str, folder: Path, grace: int | None, image: str) -> Job:
    """Choose the run folder, since each start must find the run of the one before; count time and room of saves."""
    plan, run = planfile.absolute(parsed), Path(parsed.run)
    label = parsed.model.name if is_open(parsed.run) else run.name
    name = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:40].strip("-") or "run"
    if to == "slurm":
        run = folder.resolve() / "run" if is_open(parsed.run) else Path(plan.run)
    elif is_open(parsed.run) or not run.is_absolute():
        run = Path(LOCAL if plan.store.url and to == "skypilot" else MOUNT) / name
    saves = checkpoint_of(plan, Conditions())
    step_s = predict(plan).step_s if plan.cluster.device.is_gpu else 0.0
    upload_s = saves.total_bytes / (1e6 * (plan.store.bandwidth or UPLOAD * plan.cluster.nodes))
    # Twice the planned time, and a minute: a store may be busy, and a signal up to a minute early.
    counted_s = step_s + saves.stall_s + saves.write_s + (upload_s if plan.store.url else 0.0)
    counted = 60 * math.ceil(1 + 2 * counted_s / 60)
    # In addition the best, the one that is being written, and perhaps one from before a spike.
    checkpoints = plan.recipe.keep_last + 2 + bool(plan.recipe.rollback_spikes)
    return Job(
        plan=replace(plan, run=str(run)),
        name=name,
        grace_s=grace or min(MOST_GRACE_S, max(LEAST_GRACE_S, counted)),
        image=image,
        is_named_after_model=is_open(parsed.run),
        storage_gib=10 + math.ceil(checkpoints * saves.total_bytes / 2**30),
    )


def _notes(job: Job, to: str, folder: Path) -> Iterator[str]:
    plan, cluster = job.plan, job.plan.cluster
    if not cluster.device.is_gpu:
        yield f"cluster.device {cluster.device.name} is no known GPU, so none is requested: cluster=h100x8 names one"
    else:
        expected = predict(plan)
        if not expected.fits:
            room = short_gib(usable_bytes(plan))
            yield f"it does not fit: a device needs {short_gib(expected.peak_bytes)} of {room}; see meshwright plan"
    recipe, steps = plan.recipe, plan.recipe.over(0, None).steps
    if plan.data.path == STDLIB and not plan.data.sources:
        yield "it trains on the built-in text: data=PATH names yours, and data.tokenizer the model's tokenizer"
    default = replace(recipe, steps=steps, warmup_steps=-1).rising_steps
    if 0 < recipe.warmup_steps < SHORT_WARMUP * default:
        yield f"recipe.warmup_steps={recipe.warmup_steps} is short for {steps:,} steps: the default is {default:,}"
    if job.is_named_after_model and to != "slurm":
        yield f"run and job are named after the model: run={Path(plan.run).parent}/NAME keeps a second experiment apart"
    if urls := [url for url in job.urls if url != plan.store.url]:
        yield f"nodes need the right to read {', '.join(urls)}: a role, or variables in the job's file"
    for source in (*(source.path for source in plan.data.sources), plan.data.path, plan.init, plan.teacher_init):
        if Path(source).is_absolute():
            is_here = Path(source).exists() or any(iglob(source, recursive=True))
            missing = "" if is_here else "is not on this machine, and "
            where = ", in the image or a volume" if to != "slurm" else ""
            yield f"{source} {missing}must be readable on every node{where}"
    if plan.store.url and to != "slurm":
        yield f"nodes need the right to read and write {plan.store.url}: a role, or variables in the job's file"
    shared = {folder} if plan.store.url else {folder, Path(plan.run)}
    for path in shared if to == "slurm" and cluster.nodes > 1 else ():
        if (kind := file_system(path)) in NODE_DISKS and folder not in path.parents:
            yield f"{path} is on {kind} of this machine: all {cluster.nodes} nodes must see the same folder"

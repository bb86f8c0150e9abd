"""Files of `launch`: run by bash with stand-ins, by bash and torchrun for real, and held against published schemas.

docs/launch.md says what was run on a real Slurm.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright import __version__
from meshwright.verbs.launch.answer import STARTS
from tests.verbs.toy import RECIPE, SHAPE, call, refused, write_texts

BIG = [
    "model=llama-3.1-8b", "cluster=h100x8", "cluster.nodes=4", "layout.dp_shard=auto", "layout.zero=3",
    "recipe.precision=bf16", "recipe.global_batch=64",
]  # fmt: skip
WORKER = """\
import pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: (pathlib.Path({saved!r}).mkdir(parents=True), sys.exit(0)))
pathlib.Path({ready!r}).touch()
time.sleep(30)
"""


def written(capsys: pytest.CaptureFixture[str], to: str, folder: Path, *words: str) -> dict[str, Any]:
    """The document of a launch."""
    code, out, errors = call(capsys, "launch", *(words or BIG), "--to", to, "-o", folder, "--json")
    assert code == 0, errors
    return dict(json.loads(out))


def stand_in(folder: Path, name: str, lines: str) -> dict[str, str]:
    """An environment where a program is these lines of bash."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{lines}\n")
    (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "NODE_RANK": "1", "HEAD": "first"}


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("exit 0", 0), ("sleep 0.1; mkdir -p {run}/checkpoints/step-000007; exit 1", 75), ("exit 1", 1),
        ("exit 127", 127),
        # What is there already is nothing new, and an unfinished checkpoint is none.
        ("mkdir -p {run}/checkpoints/.saving-step-000009; exit 1", 1),
        # An upload, what was not uploaded where nodes share no folder, and a checkpoint that was fetched.
        ("sleep 0.1; touch {run}/checkpoints/.uploaded; exit 1", 75),
        ("sleep 0.1; mkdir -p {run}/checkpoints/.parts-step-000007; exit 1", 1),
        ("sleep 0.1; mkdir -p {run}/checkpoints/step-000007; touch -d @0 {run}/checkpoints/step-000007; exit 1", 1),
    ],
)  # fmt: skip
def test_the_exit_code_says_if_a_start_again_helps(
    lines: str, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = written(capsys, "slurm", tmp_path / "a job")
    (Path(document["run"]) / "checkpoints" / "step-000005").mkdir(parents=True)
    run = str(document["run"]).replace(" ", r"\ ")
    environment = stand_in(tmp_path / "bin", "torchrun", lines.format(run=run))
    ended = subprocess.run(
        ["bash", tmp_path / "a job" / "launch.sh"], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == code
    assert ("not started again" in ended.stderr) == (code not in (0, 75)), ended.stderr


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_reaches_the_workers_of_torchrun(
    number: signal.Signals, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As SIGUSR1, which torchrun itself does not pass on; workers are in a session of their own."""
    run = Path(written(capsys, "slurm", tmp_path / "job")["run"])
    ready = tmp_path / "ready"
    (tmp_path / "worker.py").write_text(WORKER.format(saved=str(run / "checkpoints" / "step-000007"), ready=str(ready)))
    lines = f"{sys.executable} {tmp_path}/worker.py & wait"
    environment = stand_in(tmp_path / "bin", "torchrun", lines)
    job = subprocess.Popen(["bash", tmp_path / "job" / "launch.sh"], env=environment, start_new_session=True)
    while not ready.exists():
        time.sleep(0.02)
    job.send_signal(number)
    assert job.wait(20) == 75


@pytest.mark.parametrize(("code", "requeued"), [(75, True), (0, False), (1, False)])
def test_slurm_requeues_a_run_that_is_not_done(
    code: int, requeued: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    document = written(capsys, "slurm", folder)
    text = (folder / "launch.sbatch").read_text()
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    wanted = ("nodes=4", "ntasks-per-node=1", "gpus-per-node=8", "requeue", "open-mode=append")
    assert {f"--{word}" for word in wanted} | {f"--signal=B:USR1@{document['grace_seconds']}"} <= {*directives}
    # Off, and among the directives when one # is taken away: sbatch reads none below the first command.
    assert not any(option.startswith(("--partition", "--account")) for option in directives)
    before = text[: text.index("\nset -e")]
    assert "\n##SBATCH --partition=PARTITION\n" in before and "\n##SBATCH --account=ACCOUNT\n" in before
    stand_in(tmp_path / "bin", "scontrol", f'echo "$*" >> {tmp_path}/asked; echo first')
    environment = stand_in(tmp_path / "bin", "srun", f"exit {code}")
    ended = subprocess.run(
        ["bash", folder / "launch.sbatch"], check=False, capture_output=True,
        env={**environment, "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "first"},
    )  # fmt: skip
    assert ended.returncode == code
    assert ("requeue 7" in (tmp_path / "asked").read_text().splitlines()) == requeued


def test_a_jobset_has_what_its_schema_and_its_scheduler_ask_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """JobSet v1alpha2 (kubernetes-sigs/jobset): field names of its CRD, pods named JOBSET-JOB-0-INDEX.SUBDOMAIN."""
    written(capsys, "kubernetes", tmp_path / "job")
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["jobset.yaml"]
    files, claim, jobset = yaml.safe_load_all((tmp_path / "job" / "jobset.yaml").read_text())
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    spec = jobset["spec"]
    assert spec.keys() <= {
        "coordinator", "failurePolicy", "managedBy", "network", "replicatedJobs", "startupPolicy", "successPolicy",
        "suspend", "ttlSecondsAfterFinished", "volumeClaimPolicies",
    }  # fmt: skip
    [replicated] = spec["replicatedJobs"]
    job, name = replicated["template"]["spec"], jobset["metadata"]["name"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (4, 4, "Indexed")
    # Kubernetes takes a podFailurePolicy only with restartPolicy Never.
    assert pod["restartPolicy"] == "Never" and job["backoffLimit"] == 0
    assert pod["terminationGracePeriodSeconds"] >= 120
    variables = {variable["name"]: variable for variable in container["env"]}
    assert variables["HEAD"]["value"] == f"{name}-{replicated['name']}-0-0.{spec['network']['subdomain']}"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory"}
    assert volumes["run"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    # 14 bytes per parameter (bf16, fp32 weights and two moments): 112 GB, of which five may exist at once.
    gib = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi"))
    assert 4 * 112.4e9 / 2**30 <= gib <= 5 * 112.4e9 / 2**30 + 10
    # The files survive as they were through YAML.
    assert yaml.safe_load(files["data"]["plan.yaml"])["run"].startswith("/meshwright/")
    script = subprocess.run(["bash", "-n"], input=files["data"]["launch.sh"], text=True, check=False)
    assert script.returncode == 0


def switched_on(text: str) -> str:
    """A file with each line below `# Yours, ...:` switched on, as a user would."""
    return re.sub(r"^( *)# Yours, .*:\n\1# ", r"\1", text, flags=re.MULTILINE)


def test_lines_that_clusters_ask_for_are_correct_when_switched_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Fields of the CRD's container and pod, of a claim, and Kueue's label. Off, they change nothing."""
    urls = ["data=s3://texts/a", "data.tokenizer=bytes"]
    written(capsys, "kubernetes", tmp_path / "job", *BIG, *urls)
    text = (tmp_path / "job" / "jobset.yaml").read_text()
    _, claim, jobset = yaml.safe_load_all(switched_on(text))
    assert claim["spec"].pop("storageClassName") == "CLASS"
    assert jobset["metadata"].pop("labels") == {"kueue.x-k8s.io/queue-name": "QUEUE"}
    # Kueue's webhook suspends a JobSet with its label.
    assert "suspend" not in jobset["spec"]
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod.pop("serviceAccountName") == "ACCOUNT"
    assert pod.pop("nodeSelector") == {"LABEL": "VALUE"}
    assert pod.pop("tolerations") == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert container.pop("envFrom") == [{"secretRef": {"name": "SECRET"}}]
    assert container.pop("securityContext") == {"capabilities": {"add": ["IPC_LOCK"]}}
    limits = container["resources"]["limits"]
    assert (limits.pop("rdma/hca"), limits.pop("vpc.amazonaws.com/efa")) == (1, 32)
    _, *off = yaml.safe_load_all(text)
    assert [claim, jobset] == off


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        ([*BIG, "cluster.nodes=1"], ("rdma/hca", "IPC_LOCK", "envFrom", "serviceAccountName")),
        ([*BIG, "store=s3://bucket/a"], ("storageClassName",)),
        (["layout.dp_shard=2", "cluster.nodes=2", "model=llama-tiny"], ("rdma/hca", "IPC_LOCK", "resources:\n")),
    ],
)
def test_no_line_is_written_for_what_a_plan_lacks(
    words: list[str], absent: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written(capsys, "kubernetes", tmp_path / "job", *words)
    text = (tmp_path / "job" / "jobset.yaml").read_text()
    optional = ("rdma/hca", "IPC_LOCK", "envFrom", "serviceAccountName", "storageClassName", "queue-name")
    assert not [word for word in absent if word in text]
    assert all(word in text for word in {*optional} - {*absent} - {"envFrom", "serviceAccountName"})
    assert ("envFrom" in text) == ("store=s3://bucket/a" in words)


def test_a_path_that_is_not_here_is_noted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A pattern counts as here where it matches a file."""
    here = write_texts(tmp_path / "texts")
    for number, path in enumerate((tmp_path / "nothere", here, f"{here}/**/*")):
        words = [*BIG, f"data={path}", "data.tokenizer=bytes"]
        notes = written(capsys, "slurm", tmp_path / f"{number}", *words)["notes"]
        missing = "is not on this machine, and " if number == 0 else ""
        assert f"{path} {missing}must be readable on every node" in notes


def test_what_a_job_would_find_out_late_is_noted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    huge = ["model=llama-3.1-405b", "cluster=h100x8", "layout.dp_shard=8", "recipe.global_batch=8"]
    notes = written(capsys, "slurm", tmp_path / "huge", *huge, "data=s3://texts/a", "data.tokenizer=bytes")["notes"]
    pattern = r"it does not fit: a device needs [\d.,]+ GiB of [\d.]+ GiB; see meshwright plan"
    assert any(re.match(pattern, note) for note in notes), notes
    assert "nodes need the right to read s3://texts/a: a role, or variables in the job's file" in notes
    written(capsys, "skypilot", tmp_path / "sky", *BIG, "data=s3://texts/a", "data.tokenizer=bytes")
    setup = yaml.safe_load((tmp_path / "sky" / "skypilot.yaml").read_text())["setup"]
    assert setup == f"pip install 'meshwright[s3]=={__version__}'"


def test_nodes_that_meet_in_a_store_share_no_volume(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [*BIG, "store=s3://bucket/a"]
    notes = written(capsys, "kubernetes", tmp_path / "job", *words)["notes"]
    assert "nodes need the right to read and write s3://bucket/a: a role, or variables in the job's file" in notes
    _, jobset = yaml.safe_load_all((tmp_path / "job" / "jobset.yaml").read_text())
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    [size] = (volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if volume["name"] == "run")
    # 112 GB a checkpoint.
    assert int(size.removesuffix("Gi")) * 2**30 >= 3 * 112.4e9
    # An upload of 112 GB through four nodes at 500 MB/s takes 56 s, and twice that is waited for.
    assert pod["terminationGracePeriodSeconds"] >= 120 + 2 * 56
    run = written(capsys, "skypilot", tmp_path / "task", *words)["run"]
    task = yaml.safe_load((tmp_path / "task" / "skypilot.yaml").read_text())
    assert "volumes" not in task and task["setup"] == f"pip install 'meshwright[s3]=={__version__}'"
    assert task["resources"]["disk_size"] == int(size.removesuffix("Gi"))
    # A folder that a user without rights of root can make.
    assert run.startswith("/var/tmp/")
    assert written(capsys, "slurm", tmp_path / "slurm", *words, "run=/dev/shm/a")["run"] == "/dev/shm/a"
    text = (tmp_path / "slurm" / "plan.yaml").read_text()
    assert "store" in yaml.safe_load(text)


def test_what_a_start_encodes_is_there_at_the_next_where_a_volume_lasts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The script runs here, with torchrun replaced by one that tells the variable. The user's setting wins."""
    volume, text = tmp_path / "volume", {}
    for to, words in (("skypilot", []), ("slurm", []), ("skypilot", ["store=s3://bucket/a"])):
        folder = tmp_path / f"{len(text)}"
        written(capsys, to, folder, *BIG, "cluster.nodes=1", "layout.dp_shard=8", f"run={volume}/a", *words)
        environment = stand_in(tmp_path / "bin", "torchrun", 'echo "cache ${XDG_CACHE_HOME:-none}"')
        environment.pop("XDG_CACHE_HOME", None)
        for setting in ({}, {"XDG_CACHE_HOME": "/mine"}):
            ended = subprocess.run(
                ["bash", folder / "launch.sh"], env=environment | setting, capture_output=True, text=True, check=False
            )
            text[to, *words, *setting] = ended.stdout.strip()
    assert text["skypilot",] == f"cache {volume}/.cache" and text["slurm",] == "cache none"
    assert text["skypilot", "store=s3://bucket/a"] == "cache none"
    assert text["skypilot", "XDG_CACHE_HOME"] == "cache /mine"


def test_lines_of_several_nodes_are_told_apart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for nodes in (1, 4):
        written(capsys, "slurm", tmp_path / f"{nodes}", *BIG, f"cluster.nodes={nodes}", f"layout.dp_shard={8 * nodes}")
        assert (" --label " in (tmp_path / f"{nodes}" / "launch.sbatch").read_text()) == (nodes > 1)


def test_nodes_without_a_volume_may_be_asked_for_room(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written(capsys, "kubernetes", tmp_path / "job", *BIG, "store=s3://bucket/a")
    _, jobset = yaml.safe_load_all(switched_on((tmp_path / "job" / "jobset.yaml").read_text()))
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    [size] = (volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if volume["name"] == "run")
    assert pod["containers"][0]["resources"]["requests"] == {"ephemeral-storage": size}


def test_a_task_is_one_that_skypilot_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sky = pytest.importorskip("sky")
    written(capsys, "skypilot", tmp_path / "job", *BIG, "cluster=a100-80x8", "cluster.nodes=4")
    task = sky.Task.from_yaml(str(tmp_path / "job" / "skypilot.yaml"))
    [resources] = task.resources
    assert task.num_nodes == 4 and resources.accelerators == {"A100-80GB": 8}
    assert resources.job_recovery["recover_on_exit_codes"] == [75]
    assert resources.network_tier is not None and resources.network_tier.value == "best"


@pytest.mark.parametrize(
    ("words", "tier"),
    [
        (["cluster=h100x8", "cluster.nodes=4"], "best"),
        (["cluster=h100x8"], None),
        (["cluster=mi300xx8", "cluster.nodes=4"], None),
    ],
)
def test_the_fast_network_is_asked_for_where_it_may_exist(
    words: list[str], tier: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written(capsys, "skypilot", tmp_path / "job", *BIG, *words)
    task = yaml.safe_load((tmp_path / "job" / "skypilot.yaml").read_text())
    assert task["resources"].get("network_tier") == tier


def test_what_is_wrong_is_said_before_anything_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "job"
    assert "--to slurn is not known: nearest: slurm" in refused(capsys, "launch", *BIG, "--to", "slurn", "-o", folder)
    line = refused(capsys, "launch", *BIG, "layout.dp_shard=16", "--to", "slurm", "-o", folder)
    assert "the cluster has 4 nodes of 8 devices, one process on each, and the layout 16 ranks: take " in line
    assert "take cluster.nodes=2, or layout.dp_shard=32, or " in line and "started" not in line
    assert "or a layout that `meshwright plan PLAN.yaml --save FILE` chooses" in line
    # No number of nodes has 12 devices.
    line = refused(capsys, "launch", *BIG, "layout.dp_shard=12", "--to", "slurm", "-o", folder)
    assert "12 ranks: take layout.dp_shard=32, or " in line and "cluster.nodes" not in line
    assert "--grace 0 must be at least 1" in refused(capsys, "launch", *BIG, "--to", "slurm", "--grace", "0")
    assert "TPU" in refused(capsys, "launch", *BIG, "cluster=tpu-v5px8", "--to", "slurm", "-o", folder)
    assert not folder.exists()
    written(capsys, "slurm", folder)
    assert "is not empty" in refused(capsys, "launch", *BIG, "--to", "slurm", "-o", folder)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs Linux's /proc to know a file system")
def test_a_folder_of_one_machine_is_noted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """/dev/shm is on every Linux, and always of one machine."""
    shared = Path("/dev/shm")
    words = [*BIG, f"run={shared}/a"]
    assert any("/dev/shm/a is on tmpfs" in note for note in written(capsys, "slurm", tmp_path / "a", *words)["notes"])
    for number, more in enumerate(("cluster.nodes=1", "store=s3://bucket/a")):
        document = written(capsys, "slurm", tmp_path / f"b{number}", *words, more)
        assert not any("tmpfs" in note for note in document["notes"])


@pytest.mark.parametrize("to", STARTS)
def test_each_target_names_its_file_and_command(to: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = written(capsys, to, tmp_path / "job")
    assert document["start"].split()[-1] in document["files"]
    assert (document["nodes"], document["processes_per_node"]) == (4, 8)


@pytest.mark.slow
def test_a_signal_saves_and_the_next_start_continues_the_same_curve(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """bash, torchrun and two ranks, all real."""
    words = [
        *SHAPE, *RECIPE, "recipe.steps=300", "recipe.checkpoint_every=0", "recipe.log_every=1", "layout.dp_shard=2",
        "cluster.devices_per_node=2", f"data={write_texts(tmp_path / 'texts')}",
    ]  # fmt: skip
    losses = []
    for folder, is_stopped in ((tmp_path / "whole", False), (tmp_path / "stopped", True)):
        metrics = Path(written(capsys, "slurm", folder, *words)["run"]) / "metrics.jsonl"
        start = ["bash", str(folder / "launch.sh")]
        if is_stopped:
            job = subprocess.Popen(start, stdout=subprocess.DEVNULL)
            while not metrics.exists() or metrics.read_text().count("\n") < 5:
                assert job.poll() is None
                time.sleep(0.1)
            job.send_signal(signal.SIGUSR1)
            assert job.wait(60) == 75
            assert metrics.read_text().count("\n") < 300
        assert subprocess.run(start, stdout=subprocess.DEVNULL, check=False).returncode == 0
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        losses.append([record["loss"] for record in records if record.get("kind") != "eval"])
    assert len(losses[0]) == 300 and losses[0] == losses[1]


def test_what_a_long_run_lacks_is_noted_and_what_nodes_cannot_do_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    long = [*BIG, "recipe.steps=200000", "recipe.warmup_steps=20"]
    notes = " ".join(written(capsys, "kubernetes", tmp_path / "a", *long)["notes"])
    assert "trains on the built-in text" in notes and "recipe.warmup_steps=20 is short for 200,000 steps" in notes
    assert "run=/meshwright/NAME keeps a second experiment apart" in notes
    named = [*BIG, "recipe.steps=200000", "recipe.warmup_steps=2000", "run=/meshwright/b", f"data={tmp_path}"]
    assert "NAME" not in str(notes := written(capsys, "kubernetes", tmp_path / "b", *named)["notes"])
    assert not any("short for" in note or "built-in" in note for note in notes)
    back = ["recipe.rollback_spikes=1", "store=s3://bucket/a"]
    line = refused(capsys, "launch", *BIG, *back, "--to", "kubernetes", "-o", tmp_path / "c")
    assert "these nodes share none with a store: take recipe.rollback_spikes=0" in line
    assert written(capsys, "slurm", tmp_path / "d", *BIG, *back)["nodes"] == 4

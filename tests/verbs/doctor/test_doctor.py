"""Every check of the doctor, given something broken: it says what is wrong and what to do."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.kernels import fast
from meshwright.kernels.experts import experts as expert_kernels
from meshwright.observe.ranks import RankError, on_ranks
from meshwright.parallel.groups.group import Group
from meshwright.spec.layout.cluster import Device
from meshwright.spec.layout.layout import Layout
from meshwright.store import checkpoint
from meshwright.verbs.doctor import engine, machine, network
from meshwright.verbs.doctor.answer import Examination, examine
from meshwright.verbs.doctor.command import lines
from meshwright.verbs.doctor.findings import Finding, failure, merge_ranks, ok, run_check, verdict, warning
from meshwright.verbs.doctor.network import NetworkLink
from meshwright.verbs.main import main

CPU = torch.device("cpu")


def says(finding: Finding, state: str, *words: str) -> None:
    """A finding of this state, whose sentences hold the words; what is wrong comes with advice."""
    text = f"{finding.observation} | {finding.advice}"
    assert finding.state == state, finding
    assert all(word in text for word in words), text
    assert finding.advice or state in ("ok", "skipped")


# the machine


def test_versions() -> None:
    says(machine.check_versions(), "ok")
    says(machine.check_versions(python=(3, 10)), "failure", "Python 3.10", "use Python 3.11")
    says(machine.check_versions(torch_version="2.10.1+cu128"), "failure", "torch 2.10.1", "pip install 'torch>=2.11")
    says(machine.check_versions(torch_version="2.14.0"), "failure", "not supported")


def test_a_quota_below_the_cores(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("50000 100000\n")
    says(machine.check_cores(quota), "warning", "the time of 0.5", "OMP_NUM_THREADS=1")
    quota.write_text("max 100000\n")
    says(machine.check_cores(quota), "ok")


def test_memory_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()

    def told(free: int, swap_free: int) -> Finding:
        lines = (
            f"MemTotal: {2**24} kB",
            f"MemAvailable: {free} kB",
            f"SwapTotal: {2**22} kB",
            f"SwapFree: {swap_free} kB",
        )
        (tmp_path / "proc/meminfo").write_text("\n".join(lines))
        return machine.check_memory(tmp_path)

    says(told(2**20, 2**22), "failure", "1.00 GiB of 16.00 GiB free", "end other programs")
    says(told(2**23, 0), "warning", "4.00 GiB swapped out")
    says(told(2**23, 2**22), "ok")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (group / "memory.max").write_text(f"{2**32}\n")
    (group / "memory.current").write_text(f"{3 * 2**30}\n")
    says(told(2**23, 2**22), "failure", "1.00 GiB of 4.00 GiB free")


def test_a_container_with_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 * 2**20))
    says(machine.check_shared_memory(tmp_path), "warning", "64.0 MiB", "--shm-size")


def test_few_open_files() -> None:
    says(machine.check_open_files(1024), "warning", "1024", "ulimit -n")
    says(machine.check_open_files(65536), "ok")


def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(machine, "SLOW_DISK_BYTES_PER_S", 0)
        says(machine.check_disk(tmp_path / "not yet there", 2**20), "ok", "written at")
    with monkeypatch.context() as changed:
        changed.setattr(machine, "SLOW_DISK_BYTES_PER_S", 1e15)
        says(machine.check_disk(tmp_path, 2**20), "warning", "save less often")
    with monkeypatch.context() as changed:
        changed.setattr(machine.tempfile, "TemporaryFile", _refuse)
        says(machine.check_disk(tmp_path, 2**20), "failure", "cannot be written: Read-only file system")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    says(machine.check_disk(tmp_path, 2**20), "warning", "1.0 MiB free", "free some space")


def _refuse(**keywords: Any) -> None:
    raise OSError(30, "Read-only file system")


def test_other_programs() -> None:
    says(machine.check_other_programs(load=9.0, cores=4), "warning", "load 9.0 on 4 cores")
    says(machine.check_other_programs(load=0.1, cores=4), "ok")


# accelerators

BUILD = machine.Build(cuda="13.0", available=True, driver="580.1", names=("NVIDIA H100", "NVIDIA H100"))


def test_gpus() -> None:
    says(machine.check_gpus(BUILD), "ok", "2 x NVIDIA H100")
    says(machine.check_gpus(replace(BUILD, names=("A", "B"))), "warning", "equal GPUs")
    says(
        machine.check_gpus(replace(BUILD, cuda=None, available=False)),
        "failure",
        "CPU build",
        "install a CUDA build",
    )
    old = replace(BUILD, available=False, reason="The NVIDIA driver on your system is too old")
    says(machine.check_gpus(old), "failure", "too old", "update the driver")
    says(machine.check_gpus(replace(BUILD, driver="", available=False)), "ok", "the CPU is used")


def test_a_driver_is_found_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\nGCC version: 12\n")
    assert machine.read_build(file).driver == "580.65.06"
    assert machine.read_build(tmp_path / "none").driver == ""


def test_libraries_and_compilers() -> None:
    says(machine.check_libraries(False, gloo=False), "failure", "no Gloo")
    says(machine.check_libraries(True, nccl=False, gloo=True), "failure", "no NCCL")
    says(
        machine.check_compiler(True, triton=False, compilers=()),
        "warning",
        "a C compiler and Triton",
        "pip install triton",
    )
    says(machine.check_compiler(True, triton=True, compilers=("gcc",)), "ok")
    says(machine.check_compiler(False, triton=False, compilers=("cc",), loops=True), "ok", "cc")
    says(machine.check_compiler(False, compilers=(), loops=False), "warning", "no C compiler", "2 to 3 times", "gcc")
    says(machine.check_compiler(False, compilers=("clang",), loops=False), "warning", "clang", "OpenMP")


# kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_this_machine_are_right(dtype: torch.dtype) -> None:
    for check in (
        engine.check_attention,
        engine.check_flash_parts,
        engine.check_experts,
        engine.check_loss,
    ):
        says(check(CPU, dtype), "ok")


def broken(**kernel: Callable[..., Any]) -> Any:
    return replace(fast(), **kernel)


def test_attention_that_forgets_its_mask() -> None:
    def blind(q: Tensor, k: Tensor, v: Tensor, mask: Any, **keywords: Any) -> Tensor:
        attended: Tensor = fast().attend(q, k, v, type(mask)(), **keywords)
        return attended

    finding = engine.check_attention(CPU, torch.float32, broken(attend=blind))
    says(finding, "failure", "(packed", "layout.kernels=reference")


def test_attention_that_gives_no_numbers() -> None:
    def nothing(q: Tensor, k: Tensor, v: Tensor, mask: Any, **keywords: Any) -> Tensor:
        attended: Tensor = fast().attend(q, k, v, mask, **keywords) * float("nan")
        return attended

    says(engine.check_attention(CPU, torch.float32, broken(attend=nothing)), "failure", "largest error inf")


def test_a_log_sum_exp_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = engine.compat.flash_attention

    def base_two(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        out, lse = flash(*arguments, **keywords)
        return out, lse / 0.6931

    monkeypatch.setattr(engine.compat, "flash_attention", base_two)
    says(engine.check_flash_parts(CPU, torch.float32), "failure", "largest error")


def test_an_expert_without_tokens_that_learns() -> None:
    """What grouped products of torch do on some GPUs: garbage for groups without rows."""

    class Garbage(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Tensor, weights: Tensor, counts: Any) -> Tensor:
            ctx.save_for_backward(rows, weights)
            ctx.counts = counts
            return fast().expert_linear(rows, weights, counts)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            rows, weights = ctx.saved_tensors
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (rows, weights)]
                gradients = torch.autograd.grad(fast().expert_linear(*leaves, ctx.counts), leaves, gradient)
            gradients[1][1] = 7.0
            return *gradients, None

    made = broken(expert_linear=lambda rows, weights, counts: Garbage.apply(rows, weights, counts))
    says(engine.check_experts(CPU, torch.float32, made), "failure", "experts [1] had no token", "172439")


def test_experts_that_are_mixed_up() -> None:
    def shifted(rows: Tensor, weights: Tensor, counts: Any) -> Tensor:
        return expert_kernels.expert_linear(rows, weights.roll(1, 0), counts)

    assert engine.check_experts(CPU, torch.float32, broken(expert_linear=shifted)).state == "failure"


def test_a_loss_over_all_targets() -> None:
    def all_count(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = fast().linear_cross_entropy(x, w, targets.clamp(min=0))
        return loss

    says(
        engine.check_loss(CPU, torch.float32, broken(linear_cross_entropy=all_count)),
        "failure",
        "(head and loss)",
    )


def test_products_that_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Device(name="known", bf16_matmul_flop_per_s=800e12, bf16_flop_per_s=989e12)
    monkeypatch.setattr(engine, "known_device", lambda device: known)
    says(engine.check_products(CPU, torch.bfloat16, 300e12), "warning", "300 TFLOP/s", "38% of what", "nvidia-smi")
    says(engine.check_products(CPU, torch.bfloat16, 700e12), "ok")


# links

NODES = [0, 0, 1, 1]


def fabric(slow: dict[tuple[int, int], float] | None = None) -> list[NetworkLink]:
    """Four ranks on two nodes: 100 GB/s within, 25 between."""
    pairs = [(source, (source + stride) % 4) for stride in (1, 2) for source in range(4)]
    rates = {pair: 100e9 if NODES[pair[0]] == NODES[pair[1]] else 25e9 for pair in pairs}
    return [
        NetworkLink(source, target, (slow or {}).get((source, target), rate))
        for (source, target), rate in rates.items()
    ]


def test_a_slow_link_is_named() -> None:
    says(network.judge_links(fabric(), NODES), "ok", "100 GB/s within a node", "25 GB/s between nodes")
    finding = network.judge_links(fabric({(1, 2): 3e9}), NODES)
    says(finding, "failure", "rank 1 (node 0) to rank 2 (node 1) has 3 GB/s, others between nodes 25", "cable")
    assert finding.figures["slow"] == [[1, 2, 3e9]]


def test_a_rank_all_of_whose_links_are_slow_is_named() -> None:
    slow = {(link.source, link.target): 2e9 for link in fabric() if 2 in (link.source, link.target)}
    says(network.judge_links(fabric(slow), NODES), "failure", "all links of rank 2 (node 1) are slow", "PCIe")


def test_a_slow_rank_is_named() -> None:
    says(network.judge_ranks([1e12, 1e12, 5e11, 1e12], NODES), "warning", "rank 2 (node 1): products at 50%")
    says(network.judge_ranks([1e12, 0.95e12, 1e12], [0, 0, 0]), "ok", "slowest 95%")


def collect(break_it: str) -> tuple[Finding, int]:
    """On a rank: the collectives' finding, and how many links are measured."""
    import torch.distributed as dist

    class Wrong(Group):
        def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
            return super().all_reduce(x, op) * (1.0 if not break_it else 1.5)

    world = Wrong("world", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    return network.check_collectives(world, CPU), len(network.measure_links(world, CPU))


def test_collectives_on_real_processes() -> None:
    for finding, count in on_ranks(3, collect, ""):
        says(finding, "ok", "all-reduce", "are right on 3 ranks")
        assert count == 6, "three ranks, strides 1 and 2"
    for finding, _ in on_ranks(2, collect, "yes"):
        says(finding, "failure", "all-reduce gave wrong numbers", "Do not train")


# the engine


def test_a_schedule_that_hangs_and_one_that_is_wrong() -> None:
    def hangs(world: int, function: Any, cases: Any, *arguments: Any, **keywords: Any) -> list[Any]:
        assert len(cases) == 1, "each schedule is tried in fresh processes"
        [(case, layout)] = cases
        if layout.schedule == "zb-h1":
            raise RankError(f"ranks [0, 1] of 2 did not answer within {keywords['limit_s']:.0f} s")
        rank = function([(case, Layout(compile="off"))], "cpu")
        if layout.schedule == "zb-v":
            rank[0] = replace(rank[0], losses=tuple(2 * loss for loss in rank[0].losses))
        return [rank, rank]

    finding = engine.check_schedules("cpu", 2, hangs)
    says(finding, "failure", "pp zb-h1", "hangs (no step in 60 s) (and 1 more)", "do not train with it")
    assert set(finding.figures["wrong"]) == {"pp zb-h1, micro-batches of 1", "pp zb-v, micro-batches of 1"}
    says(engine.check_schedules("cuda", 1), "skipped")


@pytest.mark.slow
def test_axes_of_this_machine() -> None:
    says(engine.check_axes("cpu", 2), "ok", "tp + sp")


def test_a_checkpoint_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says(engine.check_checkpoint(CPU, tmp_path), "ok")
    with monkeypatch.context() as changed:
        load = engine.checkpoint.load

        def flipped(path: Path, tensors: dict[str, Tensor], **keywords: Any) -> Any:
            values = load(path, tensors, **keywords)
            tensors["weight"][0, 0] += 1
            return values

        changed.setattr(engine.checkpoint, "load", flipped)
        says(engine.check_checkpoint(CPU, tmp_path), "failure", "came back different: weight")
    monkeypatch.setattr(engine, "set_rng_state", lambda *arguments: checkpoint.set_rng_state({}, {}))
    says(engine.check_checkpoint(CPU, tmp_path), "failure", "what is drawn afterwards")


def disturbed(check: str, bad: int, folder: str) -> Finding:
    """On a rank: a check of which a part that needs no other rank fails on rank `bad`, and what all have gathered."""
    import torch.distributed as dist

    world = Group("world", (0, 1), dist.get_rank(), dist.group.WORLD)
    checks: dict[str, tuple[Callable[[], Finding], Any, str]] = {
        "folder": (lambda: engine.check_checkpoint(CPU, Path(folder), world), Path, "mkdir"),
        "place": (lambda: engine.check_checkpoint(CPU, Path(folder), world), engine.tempfile, "mkdtemp"),
        "states": (lambda: engine.check_checkpoint(CPU, Path(folder), world), engine, "rng_state"),
        "looking": (lambda: engine.check_checkpoint(CPU, Path(folder), world), Path, "is_dir"),
        "collectives": (lambda: network.check_collectives(world, CPU), torch, "arange"),
        "links": (lambda: network.judge_links(network.measure_links(world, CPU), [0, 0]), torch, "empty_like"),
    }
    run, owner, name = checks[check]

    def fails(*arguments: Any, **keywords: Any) -> Any:
        raise OSError(30, "Read-only file system", "/home/somebody/runs")

    with pytest.MonkeyPatch.context() as patch:
        if world.index == bad:
            patch.setattr(owner, name, fails)
        finding = run_check(check, run)
    return merge_ranks(network.gather_from_all(world, [finding]), [0, 0])[0]


@pytest.mark.parametrize(
    ("check", "bad"),
    [("folder", 0), ("folder", 1), ("place", 0), ("states", 1), ("looking", 1), ("collectives", 1), ("links", 0)],
)
def test_a_check_that_fails_on_one_rank_ends_on_all(check: str, bad: int, tmp_path: Path) -> None:
    """A rank that went on alone would gather findings while the others wait for it within the check."""
    for finding in on_ranks(2, disturbed, check, bad, str(tmp_path), limit_s=20):
        says(finding, "failure", f"rank {bad}: Read-only file system")
        assert "somebody" not in finding.observation


def test_a_step_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    says(engine.check_step_speed(CPU, seconds_of_step=1.0), "ok", "1,024 tokens/s")
    monkeypatch.setattr(engine.train_device, "peak_flop_per_s", lambda *arguments: 1e15)
    says(engine.check_step_speed(CPU, seconds_of_step=1.0), "warning", "MFU 0%", "see products")


# together


def test_a_check_that_breaks_is_a_failure() -> None:
    def breaks() -> Finding:
        raise ZeroDivisionError("a fault of this machine")

    says(run_check("disk", breaks), "failure", "the check itself failed: ZeroDivisionError: a fault")


def test_ranks_that_differ_are_named() -> None:
    bad = failure("memory", "1.00 GiB of 16.00 GiB free", "end other programs")
    ranks = [[ok("memory", "fine")], [bad], [ok("memory", "fine")], [bad]]
    (finding,) = merge_ranks(ranks, NODES)
    assert finding.observation == "ranks 1 (node 0), 3 (node 1): 1.00 GiB of 16.00 GiB free"
    assert merge_ranks([[bad]] * 3, [0, 0, 0])[0].observation == bad.observation
    assert verdict([ok("a", ""), warning("b", "", "x")]) == "warning"


def test_the_verdict_comes_first_and_advice_with_what_is_wrong() -> None:
    examination = Examination(
        findings=(ok("cores", "2"), failure("links", "rank 1 to rank 2 has 3 GB/s", "look at the cable")),
        ranks=4, node_names=("a", "b"), seconds=61.0,
    )  # fmt: skip
    text = lines(examination)
    assert text[0] == "NOT fit to train: 1 failure, 0 warnings (2 checks, 4 ranks on 2 nodes, 1 min 01 s)"
    assert text[2:4] == ["FAILURE  links: rank 1 to rank 2 has 3 GB/s", "  look at the cable"]
    assert text[-2:] == ["node 0 = a", "node 1 = b"]
    assert "a" not in json.dumps([examination.document()["nodes"]]), "a document that is sent names no machine"


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor", "--quick", "--json", "--runs", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    checks = {check["check"]: check for check in document["checks"]}
    assert document["verdict"] in ("ok", "warning") and checks["links"]["state"] == "ok"
    assert {"versions", "memory", "attention", "experts", "checkpoint"} <= checks.keys()
    monkeypatch.setattr(machine, "LEAST_FREE_BYTES", 2**60)
    assert main(["doctor", "--quick", "--runs", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("NOT fit to train: 1 failure")


@pytest.mark.slow
def test_a_launched_world(tmp_path: Path) -> None:
    """Two nodes of one process each, as torchrun starts them."""
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "meshwright", "doctor", "--json", "--runs"]
    ended = subprocess.run(
        [sys.executable, *words, str(tmp_path)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    document = json.loads(ended.stdout)
    checks = {check["check"]: check for check in document["checks"]}
    assert document["ranks"] == 2 and checks["collectives"]["state"] == "ok" and "equal ranks" in checks


def test_examine_is_whole() -> None:
    examination = examine(Path(), quick=True)
    assert all(finding.advice for finding in examination.findings if finding.state in ("failure", "warning"))

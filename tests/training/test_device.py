"""The device of a run: its memory, and the preset that its driver's name means."""

import mmap
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.kernels import chooser
from meshwright.kernels.c import training_rows
from meshwright.spec import Cluster, Device, Layout, Plan, Recipe, presets
from meshwright.spec.model.shape import LoRAShape
from meshwright.training import device, records

CPU = torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize(
    ("reported", "gib", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100-SXM-80"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-SXM-40"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100-SXM-40"),
        ("NVIDIA A100 80GB PCIe", 79.3, "A100-PCIe-80"),
        ("NVIDIA H100 80GB HBM3", 79.2, "H100-SXM-80"),
        ("NVIDIA H100 PCIe", 79.2, "H100-PCIe-80"),
        ("NVIDIA H200", 139.8, "H200-SXM"),
        ("NVIDIA B200", 178.4, "B200-SXM"),
        ("NVIDIA GB200", 184.0, "GB200"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX-4090"),
        ("NVIDIA GeForce RTX 5090", 31.4, "RTX-5090"),
        ("NVIDIA GeForce RTX 3090", 23.6, "RTX-3090"),
        ("NVIDIA RTX A6000", 47.5, "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, "RTX-6000-Ada"),
        ("NVIDIA GH200 480GB", 95.6, "GH200"),
        ("NVIDIA GH200 144G HBM3e", 139.8, "GH200-141"),
        ("Tesla V100-SXM2-32GB", 31.7, "V100-SXM-32"),
        ("Tesla V100-SXM2-16GB", 15.8, "V100-SXM-16"),
        ("Tesla V100-PCIE-32GB", 31.7, "V100-PCIe-32"),
        ("Tesla T4", 14.6, "T4"),
        ("NVIDIA A10", 22.5, "A10"),
        ("NVIDIA A10G", 22.3, "A10G"),
        ("NVIDIA L4", 22.2, "L4"),
        ("AMD Instinct MI250X", 64.0, "MI250X"),
        ("AMD Instinct MI300X", 191.7, "MI300X"),
    ],
)
def test_names_as_drivers_spell_them(reported: str, gib: float, expected: str) -> None:
    matched = device.match_device(reported, int(gib * GIB))
    assert matched is not None and matched.name == expected


@pytest.mark.parametrize(
    ("reported", "gib"),
    [
        ("NVIDIA H100 NVL", 93.1),
        ("NVIDIA H200 NVL", 139.8),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6),
        ("NVIDIA GeForce RTX 4090 D", 23.6),
        ("NVIDIA GeForce RTX 3090 Ti", 23.6),
        ("NVIDIA A40", 44.4),
        ("NVIDIA L40", 44.4),
        ("NVIDIA H20", 95.6),
        ("Tesla P100-SXM2-16GB", 15.9),
        ("", 80.0),
    ],
)
def test_others_are_not_known_and_get_no_peak(reported: str, gib: float) -> None:
    assert device.match_device(reported, int(gib * GIB)) is None


@pytest.mark.parametrize(
    ("reported", "expected"),
    [("NVIDIA H200", "H200-SXM"), ("NVIDIA H100 80GB HBM3", "H100-SXM-80"), ("NVIDIA H100 PCIe", "H100-PCIe-80"),
     ("NVIDIA GH200 480GB", None), ("CPU, 2 threads", None), ("", None)],
)  # fmt: skip
def test_a_name_alone_tells_a_chip_that_comes_in_one_size(reported: str, expected: str | None) -> None:
    matched = device.match_device(reported)
    assert (matched.name if matched else None) == expected


def test_a_plan_without_a_device_gets_the_one_that_is_there() -> None:
    tiny = presets.model("llama-tiny")
    plan = Plan(model=tiny, layout=Layout(dp_shard=8, micro_batch=1), recipe=Recipe(global_batch=8))
    h200 = presets.device("h200")
    assert device.cluster_of(plan, h200, 2) == Cluster(device=h200, devices_per_node=4, nodes=2)
    assert device.cluster_of(plan, None, 1) == plan.cluster, "a CPU, or a GPU without a preset"
    named = replace(plan, cluster=presets.cluster("a100x8"))
    assert device.cluster_of(named, h200, 1) == named.cluster


def test_every_preset_is_found_by_its_own_name() -> None:
    for name in presets.device_names():
        preset = presets.device(name)
        if preset.memory_bytes:
            matched = device.match_device(preset.name, int(preset.memory_bytes * 0.99))
            assert matched is not None and matched.name == preset.name


def test_a_cpu_has_no_preset_and_its_peak_only_if_the_plan_says_so() -> None:
    assert device.known_device(CPU) is None
    local = Device(name="local")
    assert device.peak_flop_per_s(CPU, "bf16", local) is None
    calibrated = replace(local, bf16_flop_per_s=2e11)
    assert device.peak_flop_per_s(CPU, "bf16", calibrated) == device.peak_flop_per_s(CPU, "fp16", calibrated) == 2e11
    assert device.peak_flop_per_s(CPU, "fp32", calibrated) is None, "a 16-bit peak says nothing of fp32"


def test_memory_of_the_process() -> None:
    """mmap alone is sure to be fresh: a tensor may lie in memory that the process already held."""
    before = device.memory(CPU)
    assert 10 * 2**20 < before.allocated_bytes <= before.reserved_bytes
    with mmap.mmap(-1, 64 * 2**20) as held:
        held.write(b"x" * len(held))
        after = device.memory(CPU)
    assert after.allocated_bytes - before.allocated_bytes > 32 * 2**20
    assert after.reserved_bytes >= after.allocated_bytes


def test_titles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.title(CPU) == "CPU, 1 thread"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert device.title(CPU) == "CPU, 4 threads"


def test_the_device_there_is() -> None:
    assert device.pick_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    for precision in ("fp32", "bf16", "fp16"):
        device.prepare(CPU, precision)


@pytest.fixture
def process_settings() -> Iterator[None]:
    """Put back what `prepare` sets for the whole process."""
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    fill, benchmark = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.backends.cudnn.benchmark = benchmark


@pytest.mark.usefixtures("process_settings")
def test_tf32_is_what_the_recipe_says_whatever_was_set_before() -> None:
    """On a CPU build too: the switch is torch's, no GPU is asked."""
    gpu = torch.device("cuda")
    for tf32 in (True, False, True):
        device.prepare(gpu, "fp32", tf32=tf32)
        assert torch.backends.cuda.matmul.allow_tf32 == tf32
        assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if tf32 else "ieee")
    before = torch.get_float32_matmul_precision()
    device.prepare(CPU, "fp32", tf32=False)
    assert torch.get_float32_matmul_precision() == before, "nothing of a CPU's"


@pytest.mark.usefixtures("process_settings")
def test_deterministic_refuses_what_has_no_deterministic_kernel() -> None:
    device.prepare(CPU, "fp32")
    assert not torch.are_deterministic_algorithms_enabled()
    device.prepare(CPU, "fp32", deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    device.prepare(CPU, "fp32")
    assert torch.are_deterministic_algorithms_enabled(), "a program may have asked for it itself"


@pytest.mark.gpu
def test_a_gpu_says_its_name_and_counts_its_memory() -> None:
    gpu = device.pick_device()
    assert device.title(gpu) == torch.cuda.get_device_name(gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    held = torch.ones(2**20, device=gpu)
    use = device.memory(gpu)
    assert use.reserved_bytes >= use.allocated_bytes >= held.nbytes


def test_a_run_says_which_kernels_it_takes() -> None:
    plan = Plan(
        model=presets.model("llama-tiny"), recipe=Recipe(), layout=Layout(), cluster=presets.cluster("h100x8")
    )  # fmt: skip
    asked = replace(plan, layout=Layout(kernels="triton"))
    assert device.kernel_notes(plan, CPU, compiled=False) == []
    (line,) = device.kernel_notes(replace(plan, layout=Layout(kernels="reference")), CPU, compiled=False)
    assert "keeps more activations" in line
    (line,) = device.kernel_notes(asked, CPU, compiled=False)
    assert line.startswith("kernels: loss_rows, rms_norm, add_rms_norm, swiglu, rope, attention: torch (a CPU)")
    narrow = replace(asked, recipe=Recipe(optimizer_states="int8"))
    (line,) = device.kernel_notes(narrow, CPU, compiled=True)
    assert line.startswith("kernels: loss_rows, narrow_adamw: torch (a CPU)")
    (line,) = device.kernel_notes(plan, torch.device("cuda", 0), compiled=True)
    assert line.startswith("kernels: loss_rows: ") and line.endswith("; the compiler fuses the rest")


def test_a_run_says_what_triton_does_not_know_of_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, str] = {}

    def choice(name: str, *_: Any, feature: str = "", **__: Any) -> chooser.Implementation:
        asked[name] = feature
        return chooser.Implementation(name, "torch", "")

    monkeypatch.setattr(chooser, "choice", choice)
    plain = Plan(model=presets.model("llama-tiny"), recipe=Recipe(), layout=Layout(kernels="triton"))
    window = replace(plain, model=replace(plain.model, window=16))
    far = replace(plain, model=replace(plain.model, window=plain.recipe.sequence))
    ranks = replace(plain, layout=Layout(kernels="triton", cp=2))
    for plan, reason in ((plain, ""), (window, "a window"), (far, ""), (ranks, "context parallelism")):
        device.kernel_notes(plan, CPU, compiled=False)
        assert asked["attention"] == reason


def test_a_cpu_without_a_compiler_says_what_it_is_slower_in(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = replace(presets.model("llama-tiny"), heads=2, kv_heads=1, head_dim=64)
    plan = Plan(model=wide, recipe=Recipe(sequence=256), layout=Layout())
    monkeypatch.setattr(training_rows, "is_compiled", lambda: True)
    assert device.kernel_notes(plan, CPU, compiled=False) == []
    assert device.attention_kernel(plan, CPU) == "compiled loops"
    monkeypatch.setattr(training_rows, "is_compiled", lambda: False)
    [note] = device.kernel_notes(plan, CPU, compiled=False)
    assert "no C compiler" in note and device.attention_kernel(plan, CPU) != "compiled loops"
    short = replace(plan, recipe=Recipe(sequence=128))
    assert device.kernel_notes(short, CPU, compiled=False) == [], "it would not have been compiled there either"
    dropped = replace(plan, recipe=Recipe(sequence=256, dropout=0.1))
    assert device.kernel_notes(dropped, CPU, compiled=False) == []


@pytest.mark.parametrize("name", ["codes", "rounded"])
def test_blocks_that_cannot_be_compiled_are_not_said_to_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "is_compiled", lambda *_: True)
    plan = Plan(
        model=presets.model("llama-tiny"), recipe=Recipe(), layout=Layout(kernels="triton"),
        cluster=presets.cluster("h100x8"),
    )  # fmt: skip
    codes = replace(plan, model=replace(plan.model, lora=LoRAShape(rank=4, base="nf4")))
    rounded = replace(plan, recipe=replace(plan.recipe, fake_quantize="nf4"))
    for asked, compiled in ((plan, True), ({"codes": codes, "rounded": rounded}[name], False)):
        notes = " ".join(records.run_notes(asked, CPU, steps_done=0, length="steps", changes=""))
        assert ("the compiler fuses the rest" in notes) == compiled and ("swiglu" in notes) != compiled


def test_the_peak_of_a_process_is_not_its_parents() -> None:
    held = bytearray(2**30)
    held[::4096] = b"1" * (2**30 // 4096)
    ask = "from meshwright.training.device import resident_peak_bytes; print(resident_peak_bytes())"
    child = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert 2**25 < int(child.stdout) < len(held)

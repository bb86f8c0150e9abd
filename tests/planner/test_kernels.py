"""Times of single kernels: what holds of any device, and near the published rows where those are at hand."""

import csv
import itertools
import statistics
from pathlib import Path

import pytest

from meshwright.planner.kernels import Collective, Decode, FusedExperts, Operation, Prefill, kernel_seconds
from meshwright.planner.kernels.fitted_kernel import chip_of
from meshwright.planner.kernels.kernel_operations import Product
from meshwright.spec import presets
from meshwright.spec.layout.cluster import Device

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT.parent / "shared" / "published"
DEVICES = ["a100", "h100", "h200", "b200", "gb200", "gb300", "l40s", "mi300x"]
SOME = (
    Product(4096, 4096, 4096),
    Prefill(4, 4096, 32, 8),
    Decode(64, 4096, 32, 8),
    FusedExperts(512, 4096, 1536, 8, 128),
)


def seconds(name: str, work: Operation) -> float:
    return kernel_seconds(presets.device(name), work)


@pytest.mark.parametrize("name", DEVICES)
def test_a_larger_product_takes_no_less(name: str) -> None:
    """Within 15 %: another tile may serve the larger one better (measured: A100, m = 32 and 33)."""
    sizes = [2**power for power in range(4, 15)]
    for shape in ((0, 4096, 4096), (4096, 0, 4096), (4096, 4096, 0)):
        times = [seconds(name, Product(*(side or size for side in shape))) for size in sizes]
        assert all(above > 0.85 * below for below, above in itertools.pairwise(times))


@pytest.mark.parametrize("name", DEVICES)
def test_no_kernel_beats_the_data_sheet(name: str) -> None:
    device = presets.device(name)
    for m, k, n in ((1, 4096, 4096), (128, 8192, 8192), (8192, 8192, 8192), (16384, 4096, 14336)):
        work = Product(m, k, n)
        assert work.flop / seconds(name, work) < device.bf16_flop_per_s
        assert seconds(name, work) > 0
    causal = Prefill(8, 16384, 32, 8)
    assert 2 * 8 * 32 * 16384**2 * 128 / seconds(name, causal) < device.bf16_flop_per_s
    read = Decode(256, 32768, 32, 8)
    assert 4 * 256 * 32768 * 8 * 128 / seconds(name, read) < 1.05 * device.memory_bytes_per_s


@pytest.mark.parametrize("name", DEVICES)
def test_the_smallest_take_a_launch(name: str) -> None:
    for tiny in (Product(1, 32, 32), Prefill(1, 1, 1, 1), Decode(1, 2, 1, 1), FusedExperts(1, 4096, 1024, 1, 8)):
        assert 1e-6 < seconds(name, tiny) < 1e-3
    assert seconds(name, Product(1, 32, 32)) == pytest.approx(seconds(name, Product(4, 32, 32)), rel=0.2)


def test_a_batch_of_products_takes_longer_than_one() -> None:
    single, many = (seconds("h100", Product(512, 1024, 1024, batch)) for batch in (1, 64))
    assert 5 * single < many < 64 * single


def test_fp8_is_faster_where_it_is_worth_its_quantization() -> None:
    assert seconds("h100", Product(8192, 8192, 8192, 1, 1)) < 0.75 * seconds("h100", Product(8192, 8192, 8192))
    assert seconds("h100", Product(16, 512, 512, 1, 1)) > seconds("h100", Product(16, 512, 512))


def test_an_unknown_device_is_served() -> None:
    device = Device(name="Z1", bf16_flop_per_s=500e12, memory_bytes_per_s=2e12)
    slower = Device(name="Z1", bf16_flop_per_s=250e12, memory_bytes_per_s=1e12)
    for work in SOME:
        assert 0 < kernel_seconds(device, work) < kernel_seconds(slower, work)


@pytest.mark.parametrize("name", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])
def test_collectives_grow_with_bytes_and_never_beat_the_link(name: str) -> None:
    for device in ("a100", "h100", "b200"):
        sizes = [2**power for power in range(9, 31)]
        times = [seconds(device, Collective(name, size, 8)) for size in sizes]
        assert all(above > 0.8 * below for below, above in itertools.pairwise(times))
        sent = sizes[-1] * 7 / 8
        assert sent / times[-1] < 1.05 * chip_of(presets.device(device)).link * 1e6


def test_shipped_times_are_near_the_published_rows() -> None:
    path = PUBLISHED / "kernel_gemm.csv"
    if not path.is_file():
        pytest.skip("the published kernel times are not here: ../shared/published/kernel_gemm.csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[::797]
    names = {"A100-SXM-80": "a100", "H100-SXM-80": "h100", "H200-SXM": "h200", "B200": "b200", "GB200": "gb200"}
    errors = []
    for row in rows:
        width = 2.0 if row["dtype"] == "bfloat16" else 1.0
        work = Product(float(row["m"]), float(row["k"]), float(row["n"]), 1.0, width)
        errors.append(abs(seconds(names[row["gpu"]], work) / (float(row["us"]) / 1e6) - 1))
    assert len(errors) > 100
    assert statistics.median(errors) < 0.05

"""Seconds of operations and of exchanges: what no model of a device may break, and figures that others measured."""

from dataclasses import replace

import pytest

from meshwright.planner.cost.exchanges import Links, links_of
from meshwright.planner.cost.speeds import Speeds, speeds_of
from meshwright.planner.cost.work import MemoryPass
from meshwright.planner.kernels.kernel_operations import AttentionCore, Product
from meshwright.spec import Cluster, presets

DEVICES = ["a100", "h100", "h200", "b200", "gb200", "mi300x"]
A100_ALL_REDUCE = {
    (2, 8): 86.9, (2, 64): 404.7, (2, 1024): 5442.8,
    (4, 8): 116.8, (4, 64): 543.8, (4, 1024): 7259.4,
    (8, 8): 134.3, (8, 64): 579.9, (8, 1024): 8193.0,
}  # fmt: skip
"""(ranks of a node, MiB) -> microseconds: VIA-Research/vTrain trace/a100 (MIT-style licence)."""


def speeds(name: str) -> Speeds:
    return speeds_of(presets.device(name))


def links(name: str, nodes: int = 1) -> Links:
    return links_of(Cluster(device=presets.device(name), devices_per_node=8, nodes=nodes))


@pytest.mark.parametrize("name", DEVICES)
def test_no_product_beats_the_data_sheet(name: str) -> None:
    device, rates = presets.device(name), speeds(name)
    for m, k, n in ((8192, 8192, 8192), (16384, 4096, 14336), (4096, 53248, 16384), (1, 4096, 4096)):
        work = Product(m, k, n)
        assert work.flop / rates.seconds(work) < device.bf16_flop_per_s


@pytest.mark.parametrize("name", DEVICES)
def test_large_products_reach_most_of_it_and_small_ones_do_not(name: str) -> None:
    rates = speeds(name)

    def share(size: int) -> float:
        work = Product(size, size, size)
        return work.flop / rates.seconds(work) / rates.matmul_flop_per_s

    assert share(16384) > 0.7
    assert share(128) < share(512) < share(2048) < share(16384)


def test_a_thin_product_is_bound_by_memory() -> None:
    rates = speeds("a100")
    work = Product(8, 8192, 8192)
    assert rates.seconds(work) == pytest.approx(2 * 8192 * 8192 / (2039e9 * rates.memory_share), rel=0.25)


def test_odd_rows_feed_no_tensor_core() -> None:
    rates = speeds("a100")
    assert rates.seconds(Product(8192, 2048, 50257)) > 2 * rates.seconds(Product(8192, 2048, 50304))


def test_narrow_operands_are_faster_where_the_device_has_them() -> None:
    def seconds(name: str, width: float) -> float:
        return speeds(name).seconds(Product(8192, 8192, 8192, 1.0, width))

    assert seconds("a100", 1) == pytest.approx(seconds("a100", 2), rel=0.05)
    assert 1.5 < seconds("h100", 2) / seconds("h100", 1) < 2.1
    assert 1.5 < seconds("gb200", 1) / seconds("gb200", 0.5) < 2.1


def test_attention_gains_with_length_and_generation() -> None:
    device = presets.device("h100")

    def rate(flash: int, sequence: float) -> float:
        return 1e15 / speeds_of(device, flash).seconds(AttentionCore(1e15, sequence=sequence))

    assert rate(2, 512) < rate(2, 4096) < rate(2, 65536)
    assert rate(1, 4096) < rate(2, 4096) < rate(3, 4096) < 800e12


def test_a_pass_is_memory_and_launches() -> None:
    rates = speeds("h100")
    assert rates.seconds(MemoryPass(0.0, 3)) == pytest.approx(3 * rates.launch_s)
    assert rates.seconds(MemoryPass(3.35e9)) == pytest.approx(1e-3 / rates.memory_share, rel=0.01)


@pytest.mark.parametrize(("ranks", "size"), A100_ALL_REDUCE)
def test_all_reduces_of_a_node_take_what_was_measured(ranks: int, size: int) -> None:
    seconds = links("a100").seconds("all-reduce", size * 2**20, ranks)
    assert seconds == pytest.approx(A100_ALL_REDUCE[ranks, size] * 1e-6, rel=0.22)


@pytest.mark.parametrize("collective", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])
def test_more_bytes_and_more_nodes_take_longer(collective: str) -> None:
    cluster_links = links("h100", 64)
    for ranks in (2, 8, 64, 512):
        times = [cluster_links.seconds(collective, 2.0**power, ranks) for power in range(10, 34, 4)]
        assert times == sorted(times)
    for size in (2**20, 2**30):
        times = [cluster_links.seconds(collective, size, ranks) for ranks in (8, 16, 64, 512)]
        assert times == sorted(times)


def test_the_switch_sums_from_five_ranks_on() -> None:
    """H200 (nccl-tests, 8 GiB): 364 GB/s of bus bandwidth with 4 ranks, 470 with 8; gathers stay at 361."""
    node_links = links("h200")
    size = 8 * 2**30

    def bus(collective: str, ranks: int) -> float:
        rounds = 2 if collective == "all-reduce" else 1
        return rounds * (ranks - 1) / ranks * size / node_links.seconds(collective, size, ranks) / 1e9

    assert bus("all-reduce", 4) == pytest.approx(364, rel=0.03)
    assert bus("all-reduce", 8) == pytest.approx(470, rel=0.03)
    assert bus("all-gather", 8) == pytest.approx(361, rel=0.03)


def test_ranks_of_a_node_use_its_network_cards_together() -> None:
    """Eight groups of one rank each share the cards as one group of eight does."""
    cluster_links = links("h100", 2)
    assert (
        cluster_links.span(16, 1) == (8, 2)
        and cluster_links.span(2, 8) == (1, 2)
        and cluster_links.span(8, 4) == (2, 4)
    )
    assert cluster_links.bandwidth(8, 2) == 8 * cluster_links.bandwidth(1, 2)
    assert cluster_links.seconds("all-gather", 2**30, 2, 8) > 4 * cluster_links.seconds("all-gather", 2**30, 16, 1)


def test_between_two_nodes_an_all_reduce_sends_half_of_what_a_ring_does() -> None:
    """Each node sends its sum and gets the other's: as long as one gather, where the network is what takes the time."""
    cluster_links = replace(links("h100", 2), network_bytes_per_s=10e9)
    assert cluster_links.seconds("all-reduce", 2**30, 16) < 1.2 * cluster_links.seconds("all-gather", 2**30, 16)
    assert cluster_links.seconds("all-reduce", 2**30, 64) > 1.5 * cluster_links.seconds("all-gather", 2**30, 64)

"""Prices: the shipped table, and what is refused of a user's, with its place."""

from datetime import date
from pathlib import Path

import pytest

from meshwright.planner.rent import prices
from meshwright.planner.rent.clusters import left_out
from meshwright.planner.rent.prices import rows
from meshwright.spec import presets
from meshwright.spec.errors import PlanError


def test_every_shipped_price_has_a_source_and_a_day() -> None:
    table = prices.shipped()
    assert len(table.offers) > 20
    for price in table.offers:
        assert price.source.startswith("https://") and price.provider and price.product, price
        assert date(2026, 1, 1) < date.fromisoformat(price.read_on) <= date(2026, 12, 31)
        assert presets.device(price.key).name == price.device
        assert 0.05 < price.usd_per_hour < 50


def test_rows_of_devices_that_are_not_known_here_are_left_out_of_the_shipped_table_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("device,usd_per_gpu_hour\nGH1000,3\n")
    with pytest.raises(PlanError, match=r"mine.csv:2: column device: 'GH1000' is not known; nearest: "):
        prices.read(file)


def test_the_lowest_price_is_taken_and_many_nodes_need_a_network() -> None:
    table = prices.shipped()
    alone, joined = table.lowest("H100-SXM-80", many=False), table.lowest("H100-SXM-80", many=True)
    assert alone is not None and joined is not None and alone.usd_per_hour < joined.usd_per_hour
    assert joined.many_nodes and not alone.many_nodes
    assert table.lowest("L40S", many=True) is None
    assert "MI325X" in table.unpriced() and table.lowest("MI325X", many=False) is None


def test_a_users_table_stands_in_place_of_the_shipped_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("\ufeffdevice, usd_per_gpu_hour ,nodes,per_node\nh100,2.5,one,4\n\nMI300X,1.5,,\n")
    table = prices.read(file)
    assert [(price.device, price.usd_per_hour, price.many_nodes, price.per_node) for price in table.offers] == [
        ("H100-SXM-80", 2.5, False, 4), ("MI300X", 1.5, True, 8),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device\nh100\n", "mine.csv:1: column usd_per_gpu_hour is missing"),
        ("device,usd_per_gpu_hour,pricee\nh100,1,2\n", "mine.csv:1: column 'pricee' is not known; known: device, "),
        ("device,usd_per_gpu_hour\nh100,abc\n", "mine.csv:2: column usd_per_gpu_hour: 'abc' must be a number above 0"),
        ("device,usd_per_gpu_hour\nh100,-1\n", "mine.csv:2: column usd_per_gpu_hour: '-1' must be a number above 0"),
        ("device,usd_per_gpu_hour\nh100,nan\n", "mine.csv:2: column usd_per_gpu_hour: 'nan' must be a number above 0"),
        ("device,usd_per_gpu_hour\nh100,\n", "mine.csv:2: column usd_per_gpu_hour: '' must be a number above 0"),
        ("device,usd_per_gpu_hour,nodes\nh100,1,few\n", "mine.csv:2: column nodes: 'few' must be one of one, many"),
        ("device,usd_per_gpu_hour,per_node\nh100,1,2.5\n", "mine.csv:2: column per_node: '2.5' must be a whole number"),
        ("device,usd_per_gpu_hour\nh100,1,2\n", "mine.csv:2: 3 cells, and the first line has 2"),
        ("device,usd_per_gpu_hour\nlocal,1\n", "mine.csv:2: column device: 'local' is not known"),
        ("device,usd_per_gpu_hour,device\nh100,1,h200\n", "mine.csv:1: column device is there twice"),
        ("device,usd_per_gpu_hour\nh100," + 200_000 * "9" + "\n", "mine.csv:2: no CSV (field larger than"),
        ("device,usd_per_gpu_hour\n", "no row"),
        ("", "mine.csv:1: column device is missing"),
    ],
)
def test_bad_rows_are_refused_with_file_line_and_column(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(text)
    with pytest.raises(PlanError) as error:
        prices.read(file)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        prices.read(tmp_path / "no.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="it is not UTF-8"):
        prices.read(tmp_path / "binary.csv")
    with pytest.raises(PlanError, match="larger than 16,777,216 bytes"):
        prices.read(Path("/dev/zero"))


def test_priced_devices_have_watts_with_a_source() -> None:
    assert presets.device("h100").watts == 700
    known = [presets.device(price.key) for price in prices.shipped().offers]
    assert sum(bool(device.watts) for device in known) > 0.8 * len(known)
    assert all(device.watts_source for device in known if device.watts)


def test_quoted_cells_may_hold_commas() -> None:
    [row] = rows('device,usd_per_gpu_hour\n"h100","1"\n', "f", prices.NEEDED, prices.COLUMNS)
    assert row.text("device") == "h100" and row.line == 2


def test_a_device_with_a_price_and_no_bf16_products_is_named() -> None:
    lacking = left_out(prices.shipped())
    assert lacking == {"T4": "bf16_flop_per_s"}

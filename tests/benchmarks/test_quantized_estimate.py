"""Products with quantized matrices by counting: where the choice changes over, and what is not slower than bf16."""

import pytest

pytest.importorskip("triton")

from benchmarks import quantized_estimate as estimate
from meshwright.kernels.quantized.device_products import FUSED_ROWS

LARGE = "llama-3.1-8b"


def layer_us(how, name: str, rows: int, scheme: str) -> float:  # type: ignore[no-untyped-def]  # fused or slabs
    kernel = estimate.from_memory(name)
    return sum(how(kernel, work, scheme) for work in estimate.layer(LARGE, rows))


@pytest.mark.parametrize("name", estimate.DEVICES)
def test_the_choice_changes_over_where_the_other_form_is_the_faster_one(name: str) -> None:
    for scheme in ("int4-rtn", "int4-sym"):
        for rows, wins, loses in (
            (FUSED_ROWS, estimate.fused, estimate.slabs),
            (2 * FUSED_ROWS, estimate.slabs, estimate.fused),
        ):
            assert layer_us(wins, name, rows, scheme) < layer_us(loses, name, rows, scheme) * 1.1


@pytest.mark.parametrize("name", estimate.DEVICES)
def test_a_few_rows_are_faster_than_in_bf16(name: str) -> None:
    """One row always; 16 by tensor cores, but for the table of nf4 beside the memory of a B200."""
    for scheme in ("int4-rtn", "int4-sym", "nf4", "int8", "fp8"):
        assert estimate.speed(name, LARGE, 1, scheme) > (1.05 if scheme == "fp8" else 1.3)
        least = 0.85 if (name, scheme) == ("b200", "nf4") else 1.0
        assert min(estimate.speed(name, LARGE, rows, scheme) for rows in (4, 16)) > least


@pytest.mark.parametrize("name", estimate.DEVICES)
def test_8_bits_are_faster_with_any_number_of_rows(name: str) -> None:
    assert min(estimate.speed(name, LARGE, rows, "int8") for rows in estimate.ROWS) > 1.2


def test_many_rows_hide_what_restoring_costs() -> None:
    speeds = [estimate.speed("h100", LARGE, rows, "int4-rtn") for rows in (1024, 4096, 16384)]
    assert speeds == sorted(speeds) and 0.95 < speeds[-1] < 1.0


def test_a_table_has_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "DEVICES", ("a100-80", "h200"))
    monkeypatch.setattr(estimate, "MODELS", ("llama-3.2-1b",))
    items = list(estimate.table())
    assert len(items) == len(estimate.MODELS) * len(estimate.DEVICES) * len(estimate.SHOWN)
    assert all(set(item.speeds) == set(estimate.ROWS) and min(item.speeds.values()) > 0.3 for item in items)


@pytest.mark.parametrize("name", estimate.DEVICES)
def test_middle_batches_of_4_bits_come_near_bf16(name: str) -> None:
    """Fewer instructions a code, two programs a processor, and K cut where that takes less time (decision 54)."""
    for scheme in ("int4-rtn", "int4-sym"):
        speeds = [estimate.speed(name, LARGE, rows, scheme) for rows in (64, 128, 256, 512)]
        assert all(speed > least for speed, least in zip(speeds, (1.15, 0.94, 0.78, 0.70), strict=True))


def test_more_programs_hide_the_shorter_unit() -> None:
    times = [estimate.taking_turns(1.0, 2.0, programs) for programs in (1, 2, 3, 50)]
    assert times[0] == 3.0 and times == sorted(times, reverse=True) and times[-1] == pytest.approx(2.0)
    assert estimate.taking_turns(2.0, 2.0, 2) == 3.0

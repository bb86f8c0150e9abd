"""Ledger: sums, groups and differences agree with each other."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from meshwright.spec import Entry, Ledger

ENTRIES = st.lists(
    st.builds(
        Entry,
        kind=st.sampled_from(["memory", "traffic"]),
        what=st.sampled_from(["parameters", "gradients", "activations"]),
        axis=st.sampled_from(["", "tp", "dp_shard"]),
        rank=st.integers(0, 3),
        quantity=st.integers(0, 2**40),
        unit=st.sampled_from(["bytes", "calls"]),
    )
)


@given(ENTRIES)
def test_groups_add_up_to_the_total(entries: Sequence[Entry]) -> None:
    ledger = Ledger(tuple(entries))
    for fields in (("what",), ("rank", "axis"), ("kind", "what", "rank"), ()):
        assert sum(ledger.by(*fields).values()) == ledger.total()
    assert ledger.total("calls") == sum(e.quantity for e in entries if e.unit == "calls")


@given(ENTRIES, ENTRIES)
def test_sums_and_differences(mine: Sequence[Entry], others: Sequence[Entry]) -> None:
    a, b = Ledger(tuple(mine)), Ledger(tuple(others))
    assert (a + b).total() == a.total() + b.total()
    assert list(a + b) == [*mine, *others]
    difference = a.minus(b, "what")
    assert sum(difference.values()) == a.total() - b.total()
    assert set(difference) == set(a.by("what")) | set(b.by("what"))
    assert set(a.minus(a, "what", "rank").values()) <= {0}


@given(ENTRIES)
def test_parts_make_the_whole(entries: Sequence[Entry]) -> None:
    ledger = Ledger(tuple(entries))
    kinds = [ledger.only(kind=kind) for kind in ("memory", "traffic")]
    assert sum(part.total() for part in kinds) == ledger.total()
    assert all(e.rank == 1 and e.kind == "memory" for e in ledger.only(kind="memory", rank=1))


def test_nothing_costs_nothing() -> None:
    assert Ledger().total() == 0
    assert Ledger().by("what") == {}

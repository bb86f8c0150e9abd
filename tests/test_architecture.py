"""The picture of the architecture shows the imports that the code has."""

from itertools import combinations

from docs import architecture
from docs.packages import BELOW


def test_the_picture_is_drawn_from_todays_imports() -> None:
    assert architecture.main(["--check"]) == 0, "run `python -m docs.architecture`"


def test_every_package_has_a_box_above_all_that_it_imports() -> None:
    places = architecture.positions()
    assert set(places) == set(BELOW)
    for upper, direct in architecture.imports().items():
        assert all(places[upper][1] < places[lower][1] for lower in direct), upper


def test_arrows_lead_to_every_import() -> None:
    reached: dict[str, set[str]] = {name: set() for name in BELOW}
    for name in sorted(BELOW, key=architecture.level):
        for upper, lower in architecture.arrows():
            if upper == name:
                reached[name] |= {lower} | reached[lower]
    assert reached == {name: set(architecture.below(name)) for name in BELOW}


def test_boxes_do_not_overlap() -> None:
    places = sorted(architecture.positions().values())
    for (x, y), (other_x, other_y) in combinations(places, 2):
        assert abs(x - other_x) >= architecture.WIDTH or abs(y - other_y) >= architecture.HEIGHT

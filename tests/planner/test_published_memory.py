"""Memory beside published measurements, where their tables are at hand.

Constants of the stacks were chosen with the 1B and 8B rows of the sweep with nanotron in view, not with its others;
and with the rows of Aleph Alpha in view, all of them.
"""

import csv
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

from meshwright.planner.predict import estimator
from meshwright.planner.prediction import Prediction
from meshwright.planner.published import Row, read
from meshwright.planner.stacks import MEGATRON_2022
from meshwright.spec.plan import Plan
from tests.planner.test_closed_forms import TABLE, paper

ROOT = Path(__file__).resolve().parent.parent.parent
Found = list[tuple[Row, Prediction]]


def table(name: str) -> Path:
    """A published table, from MESHWRIGHT_PUBLISHED or from beside the checkout; else a skip."""
    for place in (os.environ.get("MESHWRIGHT_PUBLISHED"), ROOT.parent / "shared" / "published"):
        if place and (Path(place) / name).is_file():
            return Path(place) / name
    pytest.skip(f"{name} is not here: set MESHWRIGHT_PUBLISHED to the folder of published tables")


@pytest.fixture(scope="module")
def runs() -> dict[str, Found]:
    """Rows that say something about memory, by software; of the sweep with nanotron every third."""
    found: dict[str, Found] = defaultdict(list)
    for line, row in enumerate(read(table("training_throughput.csv"))):
        if not isinstance(row, Row) or (row.stack.name == "nanotron" and line % 3):
            continue
        if row.peak_bytes or row.stack.name == "aleph-alpha-scaling":
            found[row.stack.name].append((row, estimator(row.plan, row.stack).predict(row.plan)))
    return found


def errors(found: Found) -> list[float]:
    """Relative, of the peaks."""
    return [abs(p.reported_bytes / row.peak_bytes - 1) for row, p in found if row.peak_bytes]


def test_nanotron(runs: dict[str, Found]) -> None:
    """Rows of one layout that differ in replicas or ZeRO only deviate by 5 % from each other, a twentieth by 21 %."""
    sweep = [pair for pair in runs["nanotron"] if pair[0].columns["mem_unit"]]
    held_out = [(row, p) for row, p in sweep if not row.plan.model.name.endswith(("1B", "8B"))]
    assert mean(errors(held_out)) < 0.105
    assert mean(errors(sweep)) < 0.12


def test_torchtitan(runs: dict[str, Found]) -> None:
    assert mean(errors(runs["torchtitan"])) < 0.06


def test_out_of_memory_or_not(runs: dict[str, Found]) -> None:
    told = [(row.out_of_memory, p.fits) for row, p in runs["aleph-alpha-scaling"] if row.out_of_memory or row.step_s]
    assert mean(burst != fits for burst, fits in told) > 0.985
    assert mean(fits for burst, fits in told if burst) < 0.015


def activations() -> Iterator[tuple[str, str, str, float]]:
    """(figure, model, recomputation, value) of Korthikanti et al. 2022."""
    with table("peak_memory.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["source"].startswith("Korthikanti"):
                yield row["quantity"], row["model"].removeprefix("gpt-").lower(), row["recompute"], float(row["value"])


def first_stage(plan: Plan) -> dict[str, float]:
    """Bytes by kind of the first pipeline rank, in-flight micro-batches by closed form."""
    return estimator(plan, MEGATRON_2022).measure(plan.layout, exact=False)[1][0].kinds


def test_korthikanti() -> None:
    """Figure 1 (12 bars) and figure 7 (20): within 3 % on average."""
    found = []
    for quantity, model, recompute, value in activations():
        policy = {
            "sp": "SP" in recompute,
            "recompute": "selective" if "selective" in recompute else "full" if recompute == "full" else "none",
        }
        kinds = first_stage(paper(*TABLE[model], **policy))
        if quantity == "params+grads+optimizer":
            told = sum(kinds[kind] for kind in ("parameters", "gradients", "masters", "moments")) / 2**30
        elif quantity == "activations":
            told = kinds["activations"] / 2**30
        else:
            told = 100 * kinds["activations"] / first_stage(paper(*TABLE[model]))["activations"]
        found.append(abs(told / value - 1))
    assert len(found) == 32
    assert mean(found[:12]) < 0.03
    assert mean(found[12:]) < 0.01

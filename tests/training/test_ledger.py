"""RUN/ledger.json: what a step of the first rank sends and holds, as any run leaves it."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.observe.ranks import on_ranks
from meshwright.spec import Layout, num_parameters
from meshwright.spec.memory.held import memory
from meshwright.training import loop
from tests.training import running
from tests.training.running import SHAPE

LAYOUT = Layout(dp_shard=2, zero=3, micro_batch=2, compile="off")


def _train(texts: str, run: str, layout: Layout) -> dict[str, Any]:
    os.fsync = lambda number: None
    plan = running.plan(Path(texts), Path(run), steps=2)
    loop.run(replace(plan, layout=layout, data=replace(plan.data, validation=0.0)))
    document: dict[str, Any] = (
        json.loads(Path(run, "ledger.json").read_text()) if Path(run, "ledger.json").exists() else {}
    )
    return document


def held(layout: Layout) -> dict[str, int]:
    return memory(SHAPE, layout, "fp32")["update"]


@pytest.mark.parametrize("layout", [Layout(micro_batch=2, compile="off"), LAYOUT], ids=["rank", "two"])
def test_a_run_leaves_its_ledger(layout: Layout, tmp_path: Path) -> None:
    texts = running.write_texts(tmp_path / "texts")
    document = on_ranks(layout.world, _train, str(texts), str(tmp_path / "run"), layout)[0]
    assert {key: document[key] for key in ("source", "rank", "step")} == {"source": "measured", "rank": 0, "step": 2}
    assert {row["kind"]: row["bytes"] for row in document["memory"]} == held(layout)
    assert [rank["rank"] for rank in document["ranks"]] == [0]
    assert all(document["ranks"][0][key] == document[key] for key in ("traffic", "memory"))
    assert document["device"] == "cpu" and "peaks" not in document  # resident memory is no peak of tensors
    assert document["environment"]["processes"] == layout.world
    assert document["environment"]["attention"] in ("flash", "blockwise")
    sent = {(row["axis"], row["collective"]): (row["calls"], row["bytes"]) for row in document["traffic"]}
    if layout.world == 1:
        assert sent == {}
        return
    units = SHAPE.layers + 2
    assert sent["shard", "reduce_scatter"][0] == units and sent["shard", "all_gather"][0] == 2 * units - 1
    assert sent["shard", "reduce_scatter"][1] >= 4 * num_parameters(SHAPE) // 2
    assert set(sent) == {
        ("data", "all_reduce"),
        ("losses", "all_reduce"),
        ("world", "all_reduce"),
        ("shard", "all_gather"),
        ("shard", "reduce_scatter"),
    }


def test_one_rank_of_each_pipeline_place_is_told(tmp_path: Path) -> None:
    texts, layout = running.write_texts(tmp_path / "texts"), Layout(pp=2, tp=2, micro_batch=2, compile="off")
    document = on_ranks(layout.world, _train, str(texts), str(tmp_path / "run"), layout)[0]
    assert [rank_document["rank"] for rank_document in document["ranks"]] == [0, 2]
    first, last = (
        {(row["axis"], row["collective"]): row["calls"] for row in rank_document["traffic"]}
        for rank_document in document["ranks"]
    )
    assert first["pp", "send"] == last["pp", "send"] > 0
    weights = [
        row["bytes"]
        for rank_document in document["ranks"]
        for row in rank_document["memory"]
        if row["kind"] == "parameters"
    ]
    counted = [memory(SHAPE, layout, "fp32", rank)["update"] for rank in (0, 2)]
    assert weights == [kinds["parameters"] for kinds in counted]

"""Held-out loss by role: what each role's tokens lose by one whole forward pass, summing to the whole loss, under every
kind of layout."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.data import prepare
from meshwright.data.chat.rendering import ROLES
from meshwright.data.sequences.sample_rows import SampleRows, trained_roles
from meshwright.interface.trained.opening import load
from meshwright.observe.oracle.features import shrink
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout
from meshwright.training import loop
from meshwright.training.step.batches import Share, select, split
from meshwright.training.step.evaluate import role_losses, row_losses, summed_loss
from meshwright.verbs.main import main
from tests.training.running import Notes
from tests.training.test_tuning import files as files  # a folder with a model and conversations
from tests.training.test_tuning import plan
from tests.training.tiny import batch

TRAINED = ["data.train_on=assistant,user", "data.validation=0.3", "recipe.eval_sequences=0", "recipe.steps=2"]


def test_each_token_is_counted_for_who_says_it(files: Path) -> None:
    """Held against the conversations themselves: whole turns, end-of-turn tokens with the answer that they end."""
    asked, watcher = plan(files, *TRAINED), Notes()
    loop.run(asked, watchers=[watcher])
    metrics = watcher.evaluations[-1]
    assert metrics.roles is not None and set(metrics.roles) == {"user", "assistant"}
    assert metrics.tokens == sum(score.tokens for score in metrics.roles.values())
    whole = sum(score.loss * score.tokens for score in metrics.roles.values()) / metrics.tokens
    assert metrics.loss == pytest.approx(whole, rel=1e-9)

    trained, corpus = load(files / "run"), prepare(asked.data)
    stream, tokenizer = corpus.validation, corpus.tokenizer
    assert trained_roles(stream) == ("user", "assistant") and stream.marks is not None
    sums, counts = dict.fromkeys(metrics.roles, 0.0), dict.fromkeys(metrics.roles, 0)
    borders = [*stream.starts.tolist(), len(stream.tokens)]
    for begin, end in itertools.pairwise(borders):
        ids = stream.tokens[begin:end].astype("int64")
        with torch.no_grad():
            logs = trained.model(torch.tensor(ids)[None])[0].log_softmax(-1)
        spoken = [tokenizer.spell(token) for token in ids.tolist()]
        role, text = "", ""
        for position, word in enumerate(spoken):
            if "".join(spoken[position : position + 6]).startswith("<user>"):
                role = "user"  # a turn of a user is trained with its heading
            elif text.endswith("<assistant>"):
                role, text = "assistant", ""
            text += word
            if position and stream.marks[begin + position] & 0x80:
                sums[role] -= logs[position - 1, ids[position]].item()
                counts[role] += 1
    for name, score in metrics.roles.items():
        marks = stream.marks[stream.marks >= 0x80] & 0x7F
        assert score.tokens <= int((marks == ROLES.index(name)).sum())
        assert score.tokens == counts[name], name
        assert score.loss * score.tokens == pytest.approx(sums[name], rel=1e-4), name


def test_one_role_has_no_table_of_its_own(files: Path) -> None:
    asked, watcher = plan(files, "data.validation=0.3", "recipe.steps=2"), Notes()
    loop.run(asked, watchers=[watcher])
    assert watcher.evaluations[-1].roles is None


def test_eval_says_it(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop.run(plan(files, *TRAINED))
    assert main(["eval", str(files / "run"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["roles"]) == {"user", "assistant"} and document["roles"]["user"]["tokens"] > 0
    assert main(["eval", str(files / "run")]) == 0
    assert f"; user {document['roles']['user']['loss']:.4f}, assistant " in capsys.readouterr().out


def test_rows_by_themselves_add_up(files: Path) -> None:
    from meshwright.parallel import on_one_device

    loop.run(plan(files, *TRAINED))
    trained = load(files / "run")
    rows = trained.held_out_rows(None, 0)
    sums = row_losses(on_one_device(trained.model), rows.batches(torch.device("cpu"), by_role=True))
    assert isinstance(rows.rows, SampleRows) and sums.shape == (2, len(rows.rows), len(ROLES))
    whole = trained.evaluate()
    assert sums[0].sum().item() / sums[1].sum().item() == pytest.approx(whole.loss, rel=1e-6)
    assert int(sums[1].sum()) == whole.tokens


ROWS, LENGTH = 4, 12
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "sp": True},
    {"dp_shard": 2, "zero": 3},
    {"pp": 2},
    {"cp": 2, "zero": 0},
]


def _by_layout(layouts: list[dict[str, Any]]) -> list[list[float]]:
    """Nats and targets by role, twice, and the whole loss as training evaluates it."""
    process_groups: ProcessGroups = {}
    results = []
    roles = torch.randint(len(ROLES), (ROWS, LENGTH), generator=torch.Generator().manual_seed(5)).to(torch.uint8)
    whole = replace(batch(ROWS, LENGTH, valid=[12, 3, 7, 12]), more={"roles": roles})
    for each in layouts:
        layout = Layout(compile="off", micro_batch=2, **each)
        mesh = make_mesh(layout, rank=None if layout.world > 1 else 0, process_groups=process_groups)
        engine = build_engine(shrink("llama-3.1-8b"), layout, mesh=mesh)
        share = Share(
            index=mesh["data"].index if layout.cp == 1 else 0, parts=layout.dp, columns=engine.columns(LENGTH)
        )
        batches = split(select(whole, share), 1)
        sums = [role_losses(engine, batches) for _ in range(2)]
        assert torch.equal(*sums)
        loss, counted = summed_loss(engine, batches)
        results.append([*sums[0].flatten().tolist(), loss[0].item(), counted[1].item()])
    return results


def test_every_layout_finds_the_same() -> None:
    [alone] = _by_layout([{}])
    roles = len(ROLES)
    assert sum(alone[:roles]) == pytest.approx(alone[-2]) and sum(alone[roles : 2 * roles]) == alone[-1]
    for rank in on_ranks(2, _by_layout, LAYOUTS):
        for each, sums in zip(LAYOUTS, rank, strict=True):
            assert sums == pytest.approx(alone, rel=1e-5), each

"""Twenty steps of training beside a hand-written AdamW around models of transformers: the weights agree."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshwright.observe.oracle.one_device import RankOutcome, assemble
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import build_engine, make_mesh
from meshwright.parallel.axes.data import local
from meshwright.parallel.groups.group import gather_objects
from meshwright.parallel.groups.mesh import ProcessGroups
from meshwright.spec import Layout, ModelShape, Recipe
from meshwright.training.optimizer.optimizer import Optimizer, learning_rate
from meshwright.training.step.batches import Batch, Share, select, split
from meshwright.training.step.step import train_step
from tests.oracle import adamw
from tests.oracle.adamw import Run, named_as_ours, trained

ONE, MANY = 1e-6, 1e-5
"""Largest difference of a weight, as a share of the largest of its tensor: on one device, and under a layout."""
FAMILIES = {
    "llama": Run(peer="llama", schedule="cosine"),
    "llama with one key head": Run(peer="llama-mqa-tied", schedule="wsd"),
    "mistral with a window": Run(peer="mistral-window", schedule="linear"),
    "qwen2, biases and a tied head": Run(peer="qwen2-tied-yarn", schedule="wsd"),
    "qwen3": Run(peer="qwen3", schedule="cosine"),
    "mixtral": Run(peer="mixtral", schedule="linear"),
    "gpt2": Run(peer="gpt2", schedule="cosine"),
}
DEEP, TIED = Run(peer="llama", schedule="cosine", layers=4), Run(peer="llama-mqa-tied", schedule="wsd", layers=4)
BIASED = Run(peer="qwen2-tied-yarn", schedule="linear", layers=4)
LAYOUTS: list[tuple[Run, dict[str, Any]]] = [
    (FAMILIES["llama with one key head"], {"tp": 4}),
    (FAMILIES["llama with one key head"], {"tp": 2, "dp_shard": 2, "sp": True, "zero": 3, "micro_batch": 2}),
    (FAMILIES["qwen3"], {"cp": 2, "dp_shard": 2, "zero": 1, "micro_batch": 2}),
    (FAMILIES["mistral with a window"], {"dp_shard": 4, "zero": 2, "micro_batch": 1}),
    (FAMILIES["gpt2"], {"dp_replicate": 2, "dp_shard": 2, "zero": 3}),
    (FAMILIES["mixtral"], {"dp_shard": 2, "tp": 2, "sp": True, "ep": 4, "micro_batch": 2}),
    (FAMILIES["mixtral"], {"dp_shard": 4, "ep": 2, "zero": 2}),
    (BIASED, {"pp": 2, "tp": 2, "micro_batch": 2}),
    (TIED, {"pp": 2, "tp": 2, "vp": 2, "schedule": "interleaved", "micro_batch": 2}),
    (DEEP, {"pp": 2, "dp_shard": 2, "schedule": "zb-h1", "zero": 1, "micro_batch": 1}),
]
Weights = dict[str, "np.ndarray[Any, Any]"]
Expected = tuple[Run, ModelShape, Weights, Weights]
"""A run with its shape, its first weights and those that the oracle ends with. As arrays: processes that are given
tensors share a file for each."""


def expected(run: Run, folder: Path) -> Expected:
    model = run.model()
    shape, first = named_as_ours(model, folder / "first")
    clipped = trained(model, run.schedule)
    assert sum(factor < 1 for factor in clipped) >= 5, "clipping must matter"
    last = named_as_ours(model, folder / "last")[1]
    return run, shape, *({name: w.numpy() for name, w in weights.items()} for weights in (first, last))


def train(reference: Expected, layout: Layout, process_groups: ProcessGroups) -> dict[str, Any]:
    """This rank's boxes of the weights after as many steps of ours."""
    run, shape, first, _ = reference
    mesh = make_mesh(layout, rank=None if layout.world > 1 else 0, process_groups=process_groups)
    number = layout.micro_batches(adamw.BATCH)
    engine = build_engine(shape, layout, mesh=mesh, micro_batches=number, initialize=False)
    with torch.no_grad():
        for name, box in engine.local_boxes().items():
            local(engine.parameters[name]).copy_(torch.from_numpy(first[name][box.slices]))
    recipe = Recipe(
        steps=adamw.STEPS, sequence=adamw.SEQUENCE, global_batch=adamw.BATCH, learning_rate=adamw.RATE,
        learning_rate_schedule=run.schedule, warmup_steps=adamw.WARMUP,
        decay_steps=adamw.DECAY if run.schedule == "wsd" else 0, beta1=adamw.BETA1, beta2=adamw.BETA2,
        epsilon=adamw.EPSILON, weight_decay=adamw.DECAYS, clip=adamw.CLIP,
    )  # type: ignore[arg-type]  # fmt: skip
    engine.train()
    optimizer = Optimizer(engine.parameters.items(), recipe)
    share = Share(index=mesh.reader, parts=layout.dp, columns=engine.columns(adamw.SEQUENCE))
    for step in range(1, adamw.STEPS + 1):
        tokens, targets = adamw.batch(step)
        mine = select(Batch(tokens=tokens, targets=targets), share)
        batches = split(mine, layout.micro_batch_of(adamw.BATCH))
        train_step(engine, optimizer, batches, rate=learning_rate(recipe, step), clip=recipe.clip, balance_loss=0.0)
    engine.reshard()
    boxes = engine.local_boxes()
    return {name: (boxes[name], local(p.detach()).clone()) for name, p in engine.parameters.items()}


def worst(reference: Expected, ranks: list[dict[str, Any]]) -> tuple[float, str]:
    """The largest difference of any weight, and where."""
    whole = assemble([RankOutcome((), (), held) for held in ranks])
    assert whole.keys() == reference[3].keys()
    return max((float(abs(whole[n].double().numpy() - w).max() / abs(w).max()), n) for n, w in reference[3].items())


@pytest.mark.parametrize("name", FAMILIES)
def test_one_device_trains_what_the_oracle_trains(name: str, tmp_path: Path) -> None:
    reference = expected(FAMILIES[name], tmp_path)
    error, where = worst(reference, [train(reference, Layout(compile="off"), {})])
    print(f"{name}: {error:.1e} ({where})")
    assert error <= ONE, where


def _errors(wanted: list[tuple[Expected, dict[str, Any]]]) -> list[tuple[float, str]]:
    process_groups: ProcessGroups = {}
    actual = []
    for reference, options in wanted:
        ranks = gather_objects(train(reference, Layout(compile="off", **options), process_groups), None)
        actual.append(worst(reference, ranks))
    return actual


@pytest.mark.slow
def test_layouts_train_what_the_oracle_trains(tmp_path: Path) -> None:
    runs = {id(run): expected(run, tmp_path / str(index)) for index, (run, _) in enumerate(LAYOUTS)}
    wanted = [(runs[id(run)], options) for run, options in LAYOUTS]
    errors = on_ranks(4, _errors, wanted, limit_s=600)[0]
    off = []
    for (run, options), (error, where) in zip(LAYOUTS, errors, strict=True):
        print(f"{run.peer}, {options}: {error:.1e} ({where})")
        off += [f"{run.peer}, {options}: {error:.1e} of {where}"] if not error <= MANY else []
    assert not off, "\n".join(off)

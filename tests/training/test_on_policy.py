"""Students that write the answers they are taught on: which tokens, which steps, and the same again."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.data import prepare
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.interface.trained.opening import load
from meshwright.model import build
from meshwright.observe.dryrun.simulate import dry_run
from meshwright.observe.ranks import on_ranks
from meshwright.parallel import on_one_device
from meshwright.planner.step.predict import predict
from meshwright.serving.engine.cache.paged_cache import PagedCache
from meshwright.serving.engine.serving_engine import sample_answers
from meshwright.spec import Layout, MLAShape, Plan
from meshwright.spec.errors import IllegalLayout
from meshwright.spec.memory.held import SAMPLING_BLOCK, SPARE_BLOCKS, at_once, cache_bytes
from meshwright.training import loop
from meshwright.training.objectives.objectives import Gap, OnPolicy, find_gaps, write_answers
from meshwright.training.step.batches import Batch, Share, to_batch
from tests.training.distilling import STUDENT, student_plan, taught
from tests.training.running import Notes, Terminated

NONE = -100


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught(tmp_path_factory.mktemp("taught"))


def _batch(tokens: list[list[int]], targets: list[list[int]], documents: list[list[int]] | None = None) -> Batch:
    borders = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    return Batch(tokens=torch.tensor(tokens), targets=torch.tensor(targets), documents=borders)


def test_answers_stand_behind_prompts_and_alone_are_targets() -> None:
    """A row of text keeps its first half; of two documents each keeps what stands before its last answer."""
    batch = _batch(
        [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7]],
        [[2, 3, 4, 5, 6, 7, 8], [NONE, 3, NONE, 5, NONE, 7, 8]],
        [[0] * 7, [0, 0, 0, 0, 1, 1, 1]],
    )
    answer_gaps = list(find_gaps(batch))
    assert answer_gaps == [Gap(0, 0, 3, 4), Gap(1, 0, 3, 1), Gap(1, 4, 5, 2)]
    made = write_answers(batch, answer_gaps, [[91, 92], [93], [94, 95]])
    assert made.tokens.tolist() == [[1, 2, 3, 4, 91, 6, 7], [1, 2, 3, 4, 5, 6, 94]]
    assert made.targets.tolist() == [[NONE] * 3 + [91, 92, NONE, NONE], [NONE] * 3 + [93, NONE, 94, 95]]
    assert (made.valid, made.valid_of_rows) == (5, (2, 3))
    assert batch.tokens[0, 4] == 5, "the batch that was read is as it was"


def test_what_has_no_target_is_not_written() -> None:
    assert not list(find_gaps(_batch([[1, 2, 3]], [[NONE] * 3])))
    assert list(find_gaps(_batch([[1, 2, 3]], [[NONE, NONE, 4]]))) == [Gap(0, 0, 2, 1)]


def _asked(teacher: Path, run: Path, **recipe: Any) -> Plan:
    asked = student_plan(teacher, run, **{"distillation_on_policy": 1.0, "distillation_beta": 0.5, **recipe})
    return replace(asked, layout=Layout(compile="off", micro_batch=2, zero=0))


def _figures(asked: Plan, **options: Any) -> list[tuple[float, ...]]:
    watcher = options.pop("watcher", None) or Notes()
    loop.run(asked, watchers=[watcher], sampler=sample_answers, **options)
    return [(step.loss, step.grad_norm) for step in watcher.steps]


def test_a_share_of_the_steps_is_written_by_the_student(teacher: Path, tmp_path: Path) -> None:
    asked = _asked(teacher, tmp_path / "run", distillation_on_policy=0.25)
    writer = OnPolicy(plan=asked, share=Share(), stop_ids=(), sampler=sample_answers)
    counts = Counter(writer.due(cursor) for cursor in range(0, 8000, 4))
    assert 0.2 < counts[True] / counts.total() < 0.3
    other = replace(writer, plan=replace(asked, recipe=replace(asked.recipe, seed=1)))
    assert [writer.due(n) for n in range(99)] != [other.due(n) for n in range(99)]


def test_the_first_step_is_the_divergence_of_what_the_student_wrote(teacher: Path, tmp_path: Path) -> None:
    """Against whole logits of both models, over tokens that the engine sampled from the first weights."""
    asked = _asked(teacher, tmp_path / "run", steps=1)
    recipe, corpus = asked.recipe, prepare(asked.data)
    rows = numbered_rows(asked.data, recipe, corpus, corpus.train, shuffle=True).take(0, recipe.global_batch)
    batch = to_batch(rows, torch.device("cpu"), document_mask=True)
    student = build(asked.model, seed=recipe.seed)
    ends = (corpus.tokenizer.eos,) if corpus.tokenizer.eos is not None else ()
    writer = OnPolicy(plan=asked, share=Share(), stop_ids=ends, sampler=sample_answers)
    made = writer.rows(batch, on_one_device(student, asked.layout), 0)
    assert (made.tokens != batch.tokens).any() and 0 < made.valid < batch.valid
    mask_inputs = {"positions": made.positions, "documents": made.documents}
    with torch.no_grad():
        ours, goal = (
            model(made.tokens, **mask_inputs)[..., :257].log_softmax(-1)
            for model in (student, load(Path(asked.teacher_init)).model)
        )
        mixed = torch.logaddexp(ours, goal) - torch.tensor(2.0).log()
        each = [0.5 * F.kl_div(mixed, x, reduction="none", log_target=True).sum(-1) for x in (ours, goal)]
        loss = (each[0] + each[1])[made.targets >= 0].mean()
    assert _figures(asked)[0][0] == pytest.approx(loss.item(), rel=1e-5)


def test_a_run_that_goes_on_writes_the_same(teacher: Path, tmp_path: Path) -> None:
    """To the bit, with steps of both kinds on both sides of the stop."""
    asked = _asked(teacher, tmp_path / "whole", steps=6, distillation_on_policy=0.5)
    whole = _figures(asked)
    stopped = replace(asked, run=str(tmp_path / "stopped"))
    first = _figures(stopped, watcher=Terminated(3))
    assert len(first) == 3
    assert first + _figures(stopped, resume="auto") == whole


def _on_two(asked: Plan) -> list[tuple[float, ...]]:
    return _figures(asked)


@pytest.mark.long
def test_replicas_write_their_own_rows_and_together_the_same(teacher: Path, tmp_path: Path) -> None:
    """The first step, whose weights are the same to the bit, and the next ones within rounding."""
    asked = _asked(teacher, tmp_path / "one", distillation_sampling=0.7)
    right = _figures(asked)
    layout = replace(asked.layout, dp_replicate=2)
    [curve, _] = on_ranks(2, _on_two, replace(asked, run=str(tmp_path / "two"), layout=layout))
    for (loss, norm), (expected, also) in zip(curve, right, strict=True):
        assert loss == pytest.approx(expected, rel=1e-5) and norm == pytest.approx(also, rel=1e-4)


def test_what_cannot_sample_is_refused_at_the_start(teacher: Path, tmp_path: Path) -> None:
    asked = _asked(teacher, tmp_path / "run")
    cases: dict[str, dict[str, Any]] = {
        "layout.tp=2 cuts them: take layout.tp=1": {"layout": Layout(tp=2)},
        "layout.zero=3 cuts them: take layout.zero=0": {"layout": Layout(dp_shard=2, zero=3)},
        "layout.pp=2 cuts them: take layout.pp=1": {"layout": Layout(pp=2)},
        "asks the teacher before there are any": {
            "recipe": replace(asked.recipe, distillation_top_k=8, distillation_beta=0.0)
        },
        "as if they were text": {"recipe": replace(asked.recipe, distillation_hard=0.5)},
        "may write tokens that teacher.vocab=257 lacks": {"model": replace(STUDENT, vocab=384), "init": str(teacher)},
        "recipe.distillation_on_policy=0 has none": {
            "recipe": replace(asked.recipe, distillation_on_policy=0.0, distillation_sampling=0.5)
        },
    }
    for sentence, changes in cases.items():
        with pytest.raises(IllegalLayout, match=sentence):
            replace(asked, **changes).check()


@pytest.mark.parametrize("latent", [False, True])
def test_the_cache_is_counted_as_it_is_made(teacher: Path, tmp_path: Path, latent: bool) -> None:
    asked = _asked(teacher, tmp_path / "run")
    mla = MLAShape(q_rank=0, kv_rank=10, nope_dim=6, rope_dim=4, v_dim=5)
    shape = replace(STUDENT, mla=mla, kv_heads=STUDENT.heads, head_dim=10) if latent else STUDENT
    blocks = at_once(asked.recipe, asked.layout) * -(-asked.recipe.sequence // SAMPLING_BLOCK)
    made = PagedCache(build(shape), blocks, SAMPLING_BLOCK)
    assert made.number + SPARE_BLOCKS == blocks + 2
    assert made.bytes == cache_bytes(shape, asked.recipe, asked.layout, 4)


def test_a_large_cache_is_the_peak_of_plan_and_dry_run(teacher: Path, tmp_path: Path) -> None:
    """Many long rows of a small model, in micro-batches of one: sampling holds more than any pass."""
    asked = _asked(teacher, tmp_path / "run")
    wide = replace(STUDENT, max_positions=512, kv_heads=2, head_dim=64, layers=8)
    recipe = replace(asked.recipe, global_batch=64, sequence=512)
    large = replace(asked, model=wide, recipe=recipe, layout=replace(asked.layout, micro_batch=1))
    simulated, planned = dry_run(large, device="cpu").worst, predict(large).worst
    assert simulated.when.startswith("sample") and planned.when == "sampling"
    assert planned.total_bytes - planned.kinds["reserve"] == pytest.approx(simulated.peak_bytes, rel=0.05)

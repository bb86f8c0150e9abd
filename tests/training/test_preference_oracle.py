"""DPO and IPO against TRL: loss, norm of the gradient and rewards of every step, alone and under layouts."""

import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.data import prepare
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.data.sequences.sample_rows import SampleRows
from meshwright.observe.ranks import on_ranks
from meshwright.spec import Plan
from meshwright.training.objectives.objectives import ORPO, PairSide
from tests.training import pairs

STEPS = 20
SETTINGS = (f"recipe.steps={STEPS}", "recipe.clip=1", "recipe.learning_rate=1e-3")
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one device": (),
    "unpacked": ("data.packing=off",),
    "tp=2": ("layout.tp=2", "layout.sp=true"),
    "cp=2": ("layout.cp=2",),
    "pp=2": ("layout.pp=2", "layout.schedule=zb-h1", "layout.micro_batch=1"),
    "zero=3": ("layout.dp_shard=2", "layout.zero=3", "layout.micro_batch=1"),
}
NAMES = {
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "rewards/margins": "reward_margin",
    "rewards/accuracies": "accuracy",
}


def order(plan: Plan) -> list[list[int]]:
    """Which pairs of the file each step of the run reads."""
    corpus = prepare(plan.data)
    rows = numbered_rows(plan.data, plan.recipe, corpus, corpus.train, shuffle=True)
    assert isinstance(rows, SampleRows)
    numbers = []
    for step in range(STEPS):
        batch = rows.take(step * plan.recipe.global_batch, plan.recipe.global_batch)
        assert batch.answers is not None
        numbers.append([number // 2 for row in batch.answers.tolist() for number in row[::2] if number >= 0])
    return numbers


def trl_curve(folder: Path, loss_type: str, batches: list[list[int]], messages: bool = False) -> list[dict[str, float]]:
    """Of TRL's own trainer, model and tokenization, over the pairs in this order."""
    import datasets
    import transformers
    import trl

    steps: list[dict[str, float]] = []

    class InOrder(trl.DPOTrainer):  # type: ignore[name-defined,misc]  # trl exports lazily
        """Reads the batches of the other run, and keeps each loss unrounded."""

        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            result = super().compute_loss(*arguments, **named)
            steps.append({"loss": (result[0] if isinstance(result, tuple) else result).item()})
            return result

    config = trl.DPOConfig(
        output_dir=str(folder / "trl"), loss_type=[loss_type], beta=0.1, max_steps=STEPS, learning_rate=1e-3,
        lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, weight_decay=0.0,
        max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False, max_length=None, disable_tqdm=True, per_device_train_batch_size=1,
    )  # fmt: skip
    trainer = InOrder(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32),
        args=config,
        train_dataset=datasets.Dataset.from_list(pairs.preferences(24, messages=messages)),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "hf"),
    )
    trainer.train()
    records = [row for row in trainer.state.log_history if "grad_norm" in row]
    assert len(steps) == len(records) == STEPS
    for step, row in zip(steps, records, strict=True):
        step["grad_norm"] = row["grad_norm"]
        step |= {ours: row[theirs] for theirs, ours in NAMES.items()}
    return steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers")
        pytest.importorskip("trl")
        pytest.importorskip("datasets")
    return pairs.write(tmp_path_factory.mktemp("pairs"))


@cache
def oracle(folder: Path, loss_type: str, packing: str) -> list[dict[str, float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        batches = order(pairs.plan(folder, *SETTINGS, f"data.packing={packing}"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers about TRL, of TRL about its options
        return trl_curve(folder, loss_type, batches)


@pytest.mark.slow
def test_the_odds_ratio_is_that_of_trl(folder: Path) -> None:
    """Its own function, given mean log-probabilities: what ORPO adds to cross-entropy, and the rewards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.orpo import ORPOTrainer

        better, worse = -torch.rand(2, 64, dtype=torch.float64) * 5 - 0.01
        stands_for = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device=torch.device("cpu")))
        ratio, *rewards = ORPOTrainer.odds_ratio_loss(stands_for, better, worse)[:3]
    tokens, unread = torch.full_like(better, 7.0), torch.zeros_like(better)
    sides = [PairSide(mean * tokens, tokens, unread) for mean in (better, worse)]
    compared = ORPO(sequence=8, beta=0.3).compare(*sides)
    torch.testing.assert_close(compared.loss.float(), -better.float() - ratio, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip((compared.better, compared.worse), rewards, strict=True):
        torch.testing.assert_close(ours.float(), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("objective", ["dpo", "ipo"])
def test_every_step_is_that_of_trl(folder: Path, objective: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*SETTINGS, f"recipe.objective={objective}", *LAYOUTS[name])
    packing = "off" if "data.packing=off" in words else "best-fit"
    expected = oracle(folder, {"dpo": "sigmoid", "ipo": "ipo"}[objective], packing)
    run = f"{objective}-{name}".replace(" ", "-")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    ranks = 1 if "2" not in name and "3" not in name else 2
    curves = on_ranks(ranks, pairs.curve, str(folder), run, words) if ranks > 1 else None
    our_curve = curves[0] if curves else pairs.curve(str(folder), run, words)
    same(our_curve, expected)


@pytest.mark.slow
def test_conversations_are_those_of_trl(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template's text and tokens, and which of them are an answer, by TRL's own code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pairs.write(tmp_path, messages=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = trl_curve(tmp_path, "sigmoid", order(pairs.plan(tmp_path, *SETTINGS)), messages=True)
    same(pairs.curve(str(tmp_path), "run", SETTINGS), expected)


def same(curve: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Within 1e-4."""
    assert len(curve) == STEPS
    for step, (ours, theirs) in enumerate(zip(curve, expected, strict=True), start=1):
        for what in ("loss", "grad_norm", *NAMES.values()):
            if what == "accuracy" and step == 1:
                continue  # both margins are 0 but for rounding
            assert ours[what] == pytest.approx(theirs[what], rel=1e-4, abs=1e-4), (step, what)

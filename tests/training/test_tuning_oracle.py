"""Fine-tuning on conversations against TRL's SFTTrainer, of all weights and of PEFT's adapters: loss and norm of the
gradient of every step, alone and under layouts."""

import os
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import planfile
from meshwright.data import prepare
from meshwright.data.sequences.numbered_rows import numbered_rows
from meshwright.data.sequences.sample_rows import SampleRows
from meshwright.formats.hub.adapter import save_adapter
from meshwright.interface.planning.plan_reading import read_folder
from meshwright.observe.ranks import on_ranks
from meshwright.spec import Plan
from meshwright.training import loop
from tests.training.running import Notes
from tests.training.test_adapters import first_weights
from tests.training.test_tuning import conversations, write

STEPS = 20
WORDS = (
    "data.form=samples", "data.validation=0", "recipe.sequence=64", "recipe.global_batch=4", f"recipe.steps={STEPS}",
    "recipe.warmup_steps=0", "recipe.learning_rate=1e-3", "recipe.learning_rate_schedule=constant",
    "recipe.weight_decay=0", "recipe.clip=1", "recipe.epsilon=1e-8", "recipe.eval_every=0",
    "recipe.checkpoint_every=0",
)  # fmt: skip
LORA = ("model.lora=4", "model.lora.alpha=8", "recipe.learning_rate=1e-2", "recipe.epsilon=1e-6")
WEIGHTS: dict[str, tuple[str, ...]] = {
    "all": (),
    "lora": LORA,
    "rslora": (*LORA, "model.lora.rslora=true"),
    "dora": (*LORA, "model.lora.dora=true"),
}
LAYOUTS: dict[str, tuple[str, ...]] = {
    "one device": (),
    "unpacked": ("data.packing=off",),
    "tp=2": ("layout.tp=2", "layout.sp=true"),
    "cp=2": ("layout.cp=2",),
    "pp=2": ("layout.pp=2", "layout.schedule=zb-h1", "layout.micro_batch=1"),
    "zero=3": ("layout.dp_shard=2", "layout.zero=3", "layout.micro_batch=1"),
}


def plan(folder: Path, *words: str, run: str = "run") -> Plan:
    words_of_plan = [f"model={folder / 'hf'}", f"data={folder / 'chat.jsonl'}", f"run={folder / run}", *WORDS, *words]
    return planfile.read(None, words_of_plan, read_folder=read_folder)


def curve(folder: str, run: str, words: tuple[str, ...]) -> list[tuple[float, float]]:
    """(loss, norm of the gradient) of each step of a run on these ranks."""
    os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
    watcher = Notes()
    loop.run(plan(Path(folder), *words, run=run), watchers=[watcher])
    return [(step.loss, step.grad_norm) for step in watcher.steps]


def order(asked: Plan) -> list[list[tuple[int, ...]]]:
    """The tokens of the conversations that each step of the run trains on."""
    corpus = prepare(asked.data)
    rows = numbered_rows(asked.data, asked.recipe, corpus, corpus.train, shuffle=True)
    assert isinstance(rows, SampleRows)
    numbers = []
    for step in range(STEPS):
        batch, here = rows.take(step * asked.recipe.global_batch, asked.recipe.global_batch), []
        for ids, documents, targets in zip(batch.tokens, batch.documents, batch.targets, strict=True):
            for document in range(documents[-1] + 1):
                if (targets[documents == document] >= 0).any():  # else padding
                    here.append(tuple(ids[documents == document].tolist()))
        numbers.append(here)
    return numbers


def trl_curve(folder: Path, asked: Plan) -> list[tuple[float, float]]:
    """Of TRL's own trainer, model, template, mask and adapters (PEFT's), over the same conversations step by step."""
    import datasets
    import peft
    import transformers
    import trl

    wanted, losses = order(asked), []

    class InOrder(trl.SFTTrainer):  # type: ignore[name-defined,misc]  # trl exports lazily
        """Reads the batches of the other run, and keeps each loss unrounded."""

        def get_train_dataloader(self) -> Any:
            numbers = {tuple(row["input_ids"]): number for number, row in enumerate(self.train_dataset)}
            assert len(numbers) == len(self.train_dataset)
            batches = [[numbers[tokens] for tokens in step] for step in wanted]
            return torch.utils.data.DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            result = super().compute_loss(*arguments, **named)
            losses.append((result[0] if isinstance(result, tuple) else result).item())
            return result

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    if asked.model.lora:
        adapter = Path(tempfile.mkdtemp(dir=folder))
        save_adapter(adapter, first_weights(asked), asked.model, base=asked.init, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    recipe = asked.recipe
    config = trl.SFTConfig(
        output_dir=str(folder / "trl"), max_steps=STEPS, learning_rate=recipe.learning_rate,
        lr_scheduler_type="constant", adam_beta1=recipe.beta1, adam_beta2=recipe.beta2, adam_epsilon=recipe.epsilon,
        weight_decay=0.0, max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        bf16=False, gradient_checkpointing=False, max_length=None, disable_tqdm=True, per_device_train_batch_size=1,
        assistant_only_loss=True, eos_token=None,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = InOrder(
        model=model, args=config, train_dataset=datasets.Dataset.from_list(conversations(24)),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    return list(zip(losses, norms, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers")
        pytest.importorskip("trl")
        pytest.importorskip("datasets")
        pytest.importorskip("peft")
    return write(tmp_path_factory.mktemp("tuning"))


@cache
def oracle(folder: Path, weights: str, packing: str) -> list[tuple[float, float]]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers about TRL, of TRL about its options
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        return trl_curve(folder, plan(folder, *WEIGHTS[weights], f"data.packing={packing}"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of TRL's, PEFT's and transformers' own
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_step_is_that_of_trl(folder: Path, weights: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*WEIGHTS[weights], *LAYOUTS[layout])
    expected = oracle(folder, weights, "off" if "data.packing=off" in words else "best-fit")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    run = f"{weights}-{layout}".replace(" ", "-")
    parallel = any(word.startswith("layout.") for word in words)
    our_curve = on_ranks(2, curve, str(folder), run, words)[0] if parallel else curve(str(folder), run, words)
    assert len(our_curve) == STEPS
    for step, (ours, theirs) in enumerate(zip(our_curve, expected, strict=True), start=1):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4), step  # loss, and norm of the gradient
    assert expected[-1][0] < expected[0][0] - 0.01

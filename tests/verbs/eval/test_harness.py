"""Tasks of lm-evaluation-harness: log-likelihoods, texts and answers are those of `transformers` through the harness's
own model class, on the same directory and the same tasks."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright import evaluate as score_on_tasks
from meshwright.data import Tokenizer
from meshwright.interface.trained.opening import load
from meshwright.spec.errors import ArgumentError, DataError
from meshwright.verbs.eval.paired_statistics import Aggregate, estimate
from meshwright.verbs.main import main
from tests.training.test_tuning import CHATML
from tests.training.test_weights import SHAPES, directory
from tests.verbs.eval.task_folder import items, task_folder

harness = pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models and the tasks; data sets of the harness are cached there too."""
    root = tmp_path_factory.mktemp("harness")
    directory(root / "llama", SHAPES["llama"])
    directory(root / "gpt2", SHAPES["gpt2"])
    directory(root / "other", replace(SHAPES["llama"], ffn=32))
    for name in ("llama", "other"):
        (root / name / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    task_folder(root / "tasks")
    return root


def asked(*pairs: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=pair, task_name="asked") for pair in pairs]


def ours(path: Path, *, chat: bool = False, tokens: int = 256) -> Any:
    from meshwright.verbs.eval.harness_model import HarnessModel, TextModel

    opened = load(path)
    tokenizer, template = opened.chat_template()
    return HarnessModel(
        TextModel(
            model=opened.model, tokenizer=tokenizer, begin=opened.encode, stop_ids=opened.stop_ids,
            template=template if chat else None, tokens_per_pass=tokens,
        )
    )  # fmt: skip


def theirs(path: Path) -> Any:
    pytest.importorskip("transformers", reason="transformers is the oracle here and is not installed")
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(path), device="cpu", dtype="float32", batch_size=3)


PAIRS = [
    *((str(row["question"]), str(choice)) for row in items(9) for choice in row["choices"]),  # type: ignore[attr-defined]
    ("", "hello there"),
    ("ends with blanks  ", "and goes on"),
    ("x " * 90, "far beyond the positions"),
]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("tokens", [40, 4096])
def test_log_likelihoods_are_those_of_transformers(folder: Path, name: str, tokens: int) -> None:
    scores = ours(folder / name, tokens=tokens).loglikelihood(asked(*PAIRS))
    expected = theirs(folder / name).loglikelihood(asked(*PAIRS), disable_tqdm=True)
    assert len(scores) == len(PAIRS)
    for score, wanted, pair in zip(scores, expected, PAIRS, strict=True):
        assert score[0] == pytest.approx(wanted[0], abs=2e-4), pair
        assert score[1] == wanted[1], pair


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_whole_texts_are_those_of_transformers(folder: Path, name: str) -> None:
    texts = [(str(row["long"]) * 3,) for row in items(14)]
    assert max(len(Tokenizer.shipped().encode(text)) for (text,) in texts) > 64 * 2 - 1, "windows"
    scores = ours(folder / name).loglikelihood_rolling(asked(*texts))
    assert scores == pytest.approx(theirs(folder / name).loglikelihood_rolling(asked(*texts)), rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_answers_are_those_of_transformers(folder: Path, name: str) -> None:
    """Greedy, cut at the first end, prompts of several lengths; one is longer than the positions."""
    settings = {"until": ["e", "12"], "max_gen_toks": 7, "do_sample": False}
    questions = [*((str(row["question"]), settings) for row in items()), ("x " * 90, settings)]
    answers = ours(folder / name).generate_until(asked(*questions))
    expected = [theirs(folder / name).generate_until(asked(row), disable_tqdm=True)[0] for row in questions]
    assert answers == expected and len(set(answers)) > 2


def test_an_answer_does_not_depend_on_the_questions_beside_it(folder: Path) -> None:
    """Sampled, so that the last digits of logits would show sooner or later; and ended by more ends than a request of
    the server may have."""
    settings = {"until": [f"{row}." for row in range(20)], "max_gen_toks": 24, "temperature": 1.2, "do_sample": True}
    questions = [(str(row["question"]), settings) for row in items()]
    together = ours(folder / "llama").generate_until(asked(*questions))
    again = ours(folder / "llama").generate_until(asked(*questions[:5]))
    assert together[:5] == again and len(set(together)) > 6


def test_sampled_answers_differ_and_come_again(folder: Path) -> None:
    settings = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    model = ours(folder / "llama")
    first = model.generate_until(asked(*[("what", settings)] * 4))
    assert len(set(first)) == 4 and model.generate_until(asked(*[("what", settings)] * 4)) == first
    with pytest.raises(DataError, match="num_beams is not known here"):
        model.generate_until(asked(("what", {"num_beams": 4})))


def test_a_chat_is_written_by_the_template(folder: Path) -> None:
    model = ours(folder / "llama", chat=True)
    history = [{"role": "user", "content": "say 3"}]
    assert model.apply_chat_template(history) == "<user>say 3\n<assistant>"
    begun = [*history, {"role": "assistant", "content": "Sure:"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False) == "<user>say 3\n<assistant>Sure:"
    assert model.chat_template() == CHATML and ours(folder / "llama").chat_template() == ""


def test_figures_and_errors_are_those_of_the_harness(folder: Path) -> None:
    """All tasks, with its own evaluator over `transformers`."""
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    from meshwright.verbs.eval.request import task_configs

    scored = {(row.task, row.metric): row for row in score_on_tasks(folder / "llama", tasks=folder / "tasks").figures}
    paths = [folder / f"{config['task']}.json" for config in task_configs([str(folder / "tasks")])]
    for path, config in zip(paths, task_configs([str(folder / "tasks")]), strict=True):
        path.write_text(json.dumps(config))
    loaded = TaskManager(include_defaults=False).load([str(path) for path in paths])
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=task.get_config("num_fewshot") or 0)
        task.set_fewshot_seed(seed=1234)
    expected = evaluate(theirs(folder / "llama"), loaded, bootstrap_iters=2)
    compared = 0
    for task, figures in expected["results"].items():
        for key, value in figures.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr"):
                continue
            figure = scored[task, metric]
            assert figure.value.value == pytest.approx(value, rel=1e-4), (task, metric)
            error = figures[f"{metric}_stderr,{chosen}"]
            if task != "texts":  # its error is a bootstrap
                assert figure.value.error == pytest.approx(error), (task, metric)
            compared += 1
    assert compared == len(scored) == 6


def test_two_models_are_paired_by_item(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(folder / "llama"), "--tasks", str(folder / "tasks" / "sums.yaml")]
    assert main([*words, "--against", str(folder / "other"), "--json"]) == 0
    comparison = json.loads(capsys.readouterr().out)
    assert [row["metric"] for row in comparison["figures"]] == ["acc", "acc_norm"]
    for row in comparison["figures"]:
        assert row["difference"]["value"] == pytest.approx(row["value"]["value"] - row["before"]["value"])
        assert row["items"] == 12 and row["verdict"] in ("better", "worse", "within noise")
    assert main([*words, "--against", str(folder / "llama")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("NOT BETTER  0 of 2 figures better, 2 within noise")
    assert "+0.000 ± 0.000  within noise" in printed


def test_items_shots_and_chat(folder: Path) -> None:
    path = folder / "tasks" / "letters.yaml"
    few = score_on_tasks(folder / "llama", tasks=str(path), limit=5, shots=1, chat=True)
    assert [row.items for row in few.figures] == [5]
    assert few.rows()[0]["task"] == "letters" and "<table>" in few._repr_html_()


def spoiled(path: Path, change: Callable[[str], str]) -> Path:
    task_folder(path, "sums")
    file = path / "sums.yaml"
    file.write_text(change(file.read_text()))
    return path


CASES: dict[str, tuple[Callable[[str], str], str]] = {
    "hub": (
        lambda text: text.replace("json\n", "Rowan/hellaswag\n").replace("dataset_kwargs", "x"),
        "Nothing is downloa",
    ),
    "file": (lambda text: text.replace("items.jsonl", "none.jsonl"), "there is no .*none.jsonl"),
    "yaml": (lambda text: text + "\n  ]: :", "cannot be read"),
    "split": (lambda text: text.replace("test_split: test", "test_split: dev"), "sums.yaml\\) cannot be loaded|fail"),
    "field": (lambda text: text.replace("{{question}}", "{{nothing.at.all}}"), "cannot be loaded|the tasks sums fail"),
    "none": (lambda text: text.replace("task: sums", "x: 1"), "holds no task"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_task_that_cannot_be_run_is_one_sentence(folder: Path, tmp_path: Path, case: str) -> None:
    change, message = CASES[case]
    with pytest.raises(DataError, match=message) as caught:
        score_on_tasks(folder / "llama", tasks=spoiled(tmp_path / "tasks", change))
    assert "\n" not in str(caught.value)


def test_what_contradicts_itself_is_refused(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot be scored together"):
        score_on_tasks(folder / "llama", tasks=folder / "tasks", data="x")
    with pytest.raises(ArgumentError, match="limit=0 must be 1"):
        score_on_tasks(folder / "llama", tasks=folder / "tasks", limit=0)
    with pytest.raises(DataError, match="two tasks are named sums"):
        score_on_tasks(folder / "llama", tasks=[str(folder / "tasks"), str(folder / "tasks" / "sums.yaml")])


def test_a_perplexity_is_that_of_all_tokens() -> None:
    figure = Aggregate(kind="other", combine=lambda pairs: sum(a for a, _ in pairs) / sum(b for _, b in pairs))
    estimated = estimate([(1.0, 2), (5.0, 4), (2.0, 1), (9.0, 8)], figure)
    assert estimated.value == pytest.approx(17 / 15) and estimated.error is not None and estimated.error > 0
    assert torch.isfinite(torch.tensor(estimated.error))

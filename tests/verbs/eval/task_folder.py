"""A folder of small tasks of every kind, with their data beside them."""

import json
from pathlib import Path

SUMS = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: items.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - metric: acc
  - metric: acc_norm
"""
LETTERS = """
include: sums.yaml
task: letters
doc_to_choice: ["A", "B", "C"]
num_fewshot: 2
fewshot_split: test
metric_list:
  - metric: acc
"""
TEXTS = """
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: items.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{long}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""
ANSWERS = """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: items.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e", "12"], max_gen_toks: 7}
metric_list:
  - metric: exact_match
"""
TASKS = {"sums": SUMS, "letters": LETTERS, "texts": TEXTS, "answers": ANSWERS}


def items(number: int = 12) -> list[dict[str, object]]:
    """Questions of several lengths, some of them answered by one token and some by many."""
    rows: list[dict[str, object]] = []
    for index in range(number):
        rows.append({
            "question": f"{'So ' * (index % 4)}what is {index} and {index % 5}? ",
            "choices": [f" {index + index % 5}", f" {index + 1} or so", " no"],
            "gold": index % 3,
            "long": f"number {index}, " * (index + 1),
        })  # fmt: skip
    return rows


def task_folder(folder: Path, *names: str) -> Path:
    """The tasks of these names, or all."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, items())) + "\n", encoding="utf-8")
    for name in names or TASKS:
        (folder / f"{name}.yaml").write_text(TASKS[name], encoding="utf-8")
    return folder

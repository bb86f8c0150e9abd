"""Reading: what a plan file and overrides mean, and the one line that answers each mistake."""

import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.planfile import read
from meshwright.planfile.reading import FolderModel
from meshwright.planfile.text import LARGEST_FILE_BYTES
from meshwright.spec import BatchStage, Cluster, Plan, presets
from meshwright.spec.errors import HubError, IllegalLayout, PlanError


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    return tmp_path / "plan.yaml"


def refusal(path: Path | None, *overrides: str) -> str:
    """The one line that a bad plan is answered with, without the folder the file lies in."""
    with pytest.raises(PlanError) as error:
        read(path, overrides)
    line = str(error.value)
    assert "\n" not in line
    return line.replace(f"{path.parent}/", "") if path else line


def test_nothing_given_is_the_default_plan() -> None:
    assert read(None) == Plan(model=presets.model("llama-tiny"))


def test_overrides_of_every_kind() -> None:
    plan = read(
        None,
        [
            *("model=llama-tiny", "model.layers=4", "data=./my_texts", "recipe.steps=500", "layout.tp=2", "run=runs/a"),
            *("recipe.precision=bf16", "layout.sp=true", "layout.zero=3", "cluster=h100x8", "cluster.nodes=2"),
            "recipe.batch_ramp=[{tokens: 1e6, global_batch: 64}]",
        ],
    )
    assert plan.model == replace(presets.model("llama-tiny"), layers=4, name="llama-tiny (changed)")
    assert (plan.data.path, plan.run, plan.recipe.steps) == ("./my_texts", "runs/a", 500)
    assert (plan.layout.tp, plan.layout.sp, plan.layout.zero) == (2, True, 3)
    assert plan.recipe.batch_ramp == (BatchStage(tokens=1_000_000, global_batch=64),)
    assert plan.cluster == presets.cluster("h100x8", nodes=2)


def test_overrides_win_in_their_order(plan_file: Path) -> None:
    plan_file.write_text("recipe: {steps: 7, lr: 1e-3}\nmodel: gpt2\n")
    plan = read(
        plan_file, ["recipe.steps=8", "recipe.steps=9", "recipe.learning_rate=2e-3", "model=moe-tiny"], notes=[]
    )
    assert (plan.recipe.steps, plan.recipe.learning_rate, plan.model.name) == (9, 2e-3, "moe-tiny")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("recipe.learning_rate=1e-4", 1e-4),
        ("recipe.learning_rate=3", 3.0),
        ("recipe.steps=1e3", 1000),
        ("recipe.steps=1_000", 1000),
        ("recipe.document_mask=no", False),
        ("recipe.document_mask=True", True),
        ("data.path=2024", "2024"),
        ("data.path=no", "no"),
        ("data.path=*.txt", "*.txt"),
        ("data.path=[ab]*.txt", "[ab]*.txt"),
        ("data.path=a: b", "a: b"),
        ("data.path=a=b", "a=b"),
        ("run=2024-01-01", "2024-01-01"),
        ("layout.zero=2", 2),
    ],
)
def test_a_word_means_what_its_field_needs(override: str, value: object) -> None:
    plan = read(None, [override])
    actual: object = plan
    for key in override.partition("=")[0].split("."):
        actual = getattr(actual, key)
    assert actual == value and type(actual) is type(value)


def test_the_same_words_in_a_file(plan_file: Path) -> None:
    plan_file.write_text("recipe:\n  learning_rate: 1e-4\n  steps: '50'\nrun: 007\ndata: no\nlayout:\n")
    plan = read(plan_file)
    folder = plan_file.parent  # what is relative in a file is of its folder
    places = str(folder / "007"), str(folder / "no")
    assert (plan.recipe.learning_rate, plan.recipe.steps, plan.run, plan.data.path) == (1e-4, 50, *places)


def test_a_preset_changed_derives_anew(plan_file: Path) -> None:
    plan_file.write_text("model: {preset: llama-tiny, hidden: 256, heads: 8}\n")
    assert read(plan_file).model.head_dim == 32
    plan_file.write_text("model: {preset: mixtral-8x7b, name: mine, moe: {top_k: 1}}\n")
    shape = read(plan_file).model
    assert shape.moe is not None and (shape.name, shape.moe.top_k, shape.moe.experts) == ("mine", 1, 8)
    assert read(plan_file, ["model.moe=null"]).model.moe is None


def test_a_device_by_figures(plan_file: Path) -> None:
    plan_file.write_text("cluster: {device: {preset: h100, memory_bytes: 5}, devices_per_node: 2}\n")
    assert read(plan_file).cluster.device == replace(presets.device("h100"), memory_bytes=5)
    assert read(None, ["cluster.device.memory_bytes=5"]).cluster.device.name == "custom"
    assert read(None, ["cluster.device=h200"]).cluster == Cluster(device=presets.device("h200"))


def test_folders_are_the_callers_business(tmp_path: Path) -> None:
    seen = []

    def read_folder(folder: Path) -> FolderModel:
        seen.append(folder)
        return FolderModel(shape=presets.model("gpt2"))

    plan = read(None, [f"model={tmp_path}", "model.layers=2"], read_folder=read_folder)
    assert (seen, plan.model.layers, plan.model.name) == ([tmp_path], 2, "gpt2-124m (changed)")
    assert "folders are not read here" in refusal(None, f"model={tmp_path}")
    assert "model='./nowhere' does not exist: give a preset" in refusal(None, "model=./nowhere")

    def broken(folder: Path) -> FolderModel:
        raise HubError(f"{folder}: no config.json")

    with pytest.raises(HubError, match=r"no config\.json"):
        read(None, [f"model={tmp_path}"], read_folder=broken)


def test_a_preset_goes_before_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "mine").mkdir()
    assert read(None, ["model=gpt2"]).model.name == "gpt2-124m"
    llama = presets.model("llama-2-7b")
    for folder in ("./gpt2", "mine"):
        assert read(None, [f"model={folder}"], read_folder=lambda _: FolderModel(shape=llama)).model == llama


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("recipe.lr=1e-3", "recipe.learning_rate", 1e-3),
        ("recipe.max_steps=9", "recipe.steps", 9),
        ("recipe.seq_len=64", "recipe.sequence", 64),
        ("recipe.global_batch_size=8", "recipe.global_batch", 8),
        ("recipe.dtype=bfloat16", "recipe.precision", "bf16"),
        ("layout.tp_size=2", "layout.tp", 2),
        ("layout.tensor-model-parallel-size=2", "layout.tp", 2),
        ("layout.micro_batch_size=4", "layout.micro_batch", 4),
        ("layout.gradient_checkpointing=true", "layout.recompute", "full"),
        ("layout.gradient_checkpointing=false", "layout.recompute", "none"),
        ("output_dir=out", "run", "out"),
    ],
)
def test_other_tools_names_are_read_and_said(override: str, key: str, value: object) -> None:
    notes: list[str] = []
    actual: object = read(None, [override], notes=notes)
    for name in key.split("."):
        actual = getattr(actual, name)
    assert actual == value
    assert notes == [f"{override.partition('=')[0]} is read as {key}"]


def test_without_a_list_of_notes_they_are_warnings() -> None:
    with pytest.warns(UserWarning, match=r"recipe\.lr is read as recipe\.learning_rate"):
        read(None, ["recipe.lr=1"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(None, ["recipe.learning-rate=1"])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("recipe:\n  stepz: 5\n", "plan.yaml:2: recipe.stepz is not known: the nearest known key is recipe.steps"),
        ("steps: 5\n", "plan.yaml:1: steps is not known: did you mean recipe.steps?"),
        ("lr: 5\n", "plan.yaml:1: lr is not known: did you mean recipe.learning_rate?"),
        ("recipe: {tp: 2}\n", "plan.yaml:1: recipe.tp is not known: did you mean layout.tp?"),
        ("modle: gpt2\n", "plan.yaml:1: modle is not known: the nearest known key is model"),
        (
            "model: {preset: gpt2, moe: {expert: 1}}\n",
            "model.moe.expert is not known: the nearest known key is model.moe.experts",
        ),
        ("layout: {dp: 2}\n", "plan.yaml:1: layout.dp is not known: it is layout.dp_replicate (whole copies)"),
        (
            "recipe:\n  min-learning-rate: 0.1\n",
            "plan.yaml:2: recipe.min-learning-rate is not known: it is now recipe.min_learning_rate_ratio",
        ),
        (
            "recipe: {schedule: wsd}\n",
            "plan.yaml:1: recipe.schedule is not known: it is now recipe.learning_rate_schedule",
        ),
        ("recipe: {gradient_accumulation_steps: 2}\n", "it follows from recipe.global_batch"),
        ("recipe:\n  lr: 1\n  learning_rate: 1\n", "plan.yaml:3: recipe.learning_rate is given twice, as lr and as"),
        ("recipe:\n  future_key: 1\nlayout:\n  other: 2\n", "plan.yaml:2: recipe.future_key is not known"),
        ("recipe:\n  steps: abc\n", "plan.yaml:2: recipe.steps=abc must be a whole number"),
        ("recipe:\n  steps: 5.5\n", "recipe.steps=5.5 must be a whole number"),
        ("recipe:\n  steps: true\n", "recipe.steps=true must be a whole number"),
        ("recipe:\n  steps: [1]\n", "recipe.steps=[...] must be a whole number"),
        ("recipe:\n  steps:\n", "recipe.steps=(nothing) must be a whole number"),
        ("recipe:\n  clip: high\n", "recipe.clip=high must be a number"),
        ("recipe:\n  document_mask: 2\n", "recipe.document_mask=2 must be true or false"),
        ("recipe:\n  precision: bf8\n", "recipe.precision=bf8 must be 'fp32', 'bf16' or 'fp16'"),
        ("layout:\n  zero: 4\n", "layout.zero=4 must be 0, 1, 2 or 3"),
        ("recipe: 5\n", "plan.yaml:1: recipe=5 must be a mapping of keys"),
        ("recipe:\n  batch_ramp: 3\n", "recipe.batch_ramp=3 must be a list"),
        (
            "recipe:\n  batch_ramp:\n  - {tokens: x, global_batch: 1}\n",
            "plan.yaml:3: recipe.batch_ramp.0.tokens=x must be",
        ),
        ("recipe:\n  batch_ramp: [{tokens: 1}]\n", "recipe.batch_ramp.0.global_batch is missing"),
        ("run: {a: 1}\n", "run={...} must be text"),
        ("model:\n", "plan.yaml:1: model=(nothing) must be one word or a mapping of keys"),
        ("model: {layers: 2}\n", "model.vocab is missing: give it, or start from a preset (and 4 more)"),
        ("model: lama-tiny\n", "plan.yaml:1: model='lama-tiny' is not known; nearest: llama-tiny"),
        ("model: {preset: gpt2, rope_scaling: linear}\n", "model.rope_scaling=linear must be a mapping of keys"),
        ("cluster: h10x8\n", "plan.yaml:1: cluster='h10x8' is not known; nearest: h100"),
        ("cluster: {device: {name: x, memory_bytes: -1}}\n", "cluster.device.memory_bytes=-1 must be"),
        ("recipe:\n  learning_rate: .nan\n", "recipe.learning_rate=.nan must be a number"),
        ("recipe:\n  learning_rate: nan\n", "plan.yaml:2: recipe.learning_rate=nan must be a finite number"),
        (
            "recipe:\n  learning_rate: -1\n",
            "plan.yaml:2: recipe.learning_rate=-1.0 must be a finite number of 0 or more",
        ),
        ("recipe:\n  clip: inf\n", "plan.yaml:2: recipe.clip=inf must be"),
        ("recipe:\n  seed: 1\n  warmup_steps: 900\n", "plan.yaml:3: recipe.warmup_steps=900 exceeds recipe.steps=500"),
        ("layout:\n  sp: true\n  tp: 0\n", "plan.yaml:3: layout.tp=0 must be at least 1"),
        ("model: {preset: llama-tiny, heads: 5}\n", "model.hidden=192 is not divisible by model.heads=5"),
        (
            "recipe: {steps: x, clip: y}\nfoo: 1\nrun: []\n",
            "foo is not known: no key is like it; `meshwright init` prints",
        ),
        ("recipe: {steps: x, clip: y}\nfoo: 1\nrun: []\n", "(and 3 more)"),
    ],
)
def test_mistakes_are_answered(plan_file: Path, text: str, line: str) -> None:
    plan_file.write_text(text)
    assert line in refusal(plan_file)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("recipe.stepz=5", "recipe.stepz is not known: the nearest known key is recipe.steps"),
        ("recipe", "recipe is not KEY=VALUE, such as recipe.steps=500"),
        ("=5", "is not KEY=VALUE"),
        ("recipe..steps=5", "is not KEY=VALUE"),
        ("a." * 50 + "b=1", "is not KEY=VALUE"),
        ("recipe.steps.x=5", "recipe.steps={...} must be a whole number"),
        ("recipe.batch_ramp.0.tokens=5", "recipe.batch_ramp.0 is not known"),
        ("model.moe={experts: 4", "{experts: 4: is not YAML"),
        ("data=", "data=(nothing) must be"),
        ("run=", "run=(nothing) must be text"),
        ("recipe=a\n\x1b[1mb", r"recipe='a\n\x1b[1mb' must be a mapping of keys"),
        ("recipe.a\nb=1", r"recipe.'a\nb' is not known"),
        ("run=a\udc80b", "run holds bytes that are no UTF-8 text"),
        ("resume=auto", "resume is not known: it belongs to `meshwright train`"),
        ("recipe.steps=" + "9" * 5000, "must be a whole number"),
        ("model.layers=100000000000", "model.layers=100000000000 must be"),
        ("model=a/b", "model='a/b' does not exist: give a preset, a run folder, or a Hugging Face directory. To use"),
    ],
)
def test_mistaken_overrides_are_answered(override: str, line: str) -> None:
    refusal_text = refusal(None, override)
    assert line in refusal_text
    assert len(refusal_text) < 300


def test_the_class_of_an_error_is_kept() -> None:
    with pytest.raises(IllegalLayout):
        read(None, ["layout.tp=0"])


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "plan.yaml: is empty"),
        (b"# only a comment\n", "plan.yaml: is empty"),
        (b"- a\n", "plan.yaml:1: a plan is a mapping"),
        (b"hello", "plan.yaml:1: a plan is a mapping"),
        (b"\xff\xfe\x00", "plan.yaml: byte 0 is not UTF-8 text"),
        (b"run: a\x00b\n", "plan.yaml: is not YAML"),
        (b"run: a\nrun: b\n", "plan.yaml:2: run is given twice (first in line 1)"),
        (b"recipe:\n  steps: 1\n  steps: 2\n", "plan.yaml:3: steps is given twice (first in line 2)"),
        (b"model: gpt2\n---\nmodel: gpt2\n", "plan.yaml:2: a second document begins"),
        (b"data: &a x\nrun: *a\n", "plan.yaml:1: &a is a YAML anchor"),
        (b"data: *a\n", "plan.yaml:1: *a is a YAML alias"),
        (b"data: *.txt\n", "needs quotes"),
        (
            b"data: !!python/object/apply:os.system [ls]\n",
            "plan.yaml:1: tag:yaml.org,2002:python/object/apply:os.system",
        ),
        (b"run: !mine x\n", "plan.yaml:1: !mine is a YAML tag"),
        (b"[" * 500, "nested more than 16 deep"),
        (b"[" * 5000, "nest"),  # libyaml refuses more than 1,000 itself (PyYAML 6.0.4)
        (b"{a: " * 5000, "nested more than 16 deep"),
        (b"a: [b\n", "is not YAML"),
        (b"? [a, b]\n: c\n", "plan.yaml:1: a key is missing or is not a word"),
        (b'run: "\\UFFFFFFFF"\n', "is not YAML"),
        (b"a" * (LARGEST_FILE_BYTES + 1), "larger than 1048576 bytes"),
    ],
)
def test_files_that_are_no_plan(plan_file: Path, data: bytes, line: str) -> None:
    plan_file.write_bytes(data)
    assert line in refusal(plan_file)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    assert "no such file or directory: make one with `meshwright init > plan.yaml`" in refusal(tmp_path / "plan.yaml")
    assert "is a directory" in refusal(tmp_path)
    assert "is no path" in refusal(tmp_path / "a\0b")


def test_a_byte_order_mark_is_no_mistake(plan_file: Path) -> None:
    plan_file.write_bytes(b"\xef\xbb\xbfrun: here\r\nrecipe:\r\n  steps: 5\r\n")
    assert (Path(read(plan_file).run).name, read(plan_file).recipe.steps) == ("here", 5)


def test_json_is_yaml(plan_file: Path) -> None:
    plan_file.write_text('{"model": "gpt2", "recipe": {"steps": 5, "learning_rate": 1e-4}}')
    assert read(plan_file).recipe.learning_rate == 1e-4


def test_a_full_size_file_is_refused_quickly(plan_file: Path) -> None:
    plan_file.write_text("".join(f"k{i}: 1\n" for i in range(20_000)))
    assert "(and 19999 more)" in refusal(plan_file)


def test_importing_it_needs_neither_torch_nor_pydantic() -> None:
    """Verbs that do not read a plan must not pay for it."""
    code = "import sys, meshwright.planfile; sys.exit(bool({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = "import sys, meshwright.planfile as p; p.read(None); sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_data_as_one_word_keeps_the_other_keys_of_data(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("data: {path: a.txt, tokenizer: bytes}\n")
    for overrides in (["data=b.txt"], ["data.tokenizer=bytes", "data=b.txt"], ["data=b.txt", "data.tokenizer=bytes"]):
        plan = read(file, overrides)
        assert (plan.data.path, plan.data.tokenizer) == ("b.txt", "bytes")


@pytest.mark.parametrize(
    ("words", "length"),
    [
        (["recipe.tokens=1e6"], (123, 0, 1_000_000)),
        (["recipe.epochs=3", "recipe.tokens=1e6"], (123, 0, 1_000_000)),
        (["recipe.tokens=1e6", "recipe.epochs=3"], (500, 3, 0)),
        (["recipe.tokens=1e6", "recipe.steps=7"], (7, 0, 0)),
        (["recipe.tokens=1e6", "recipe.sequence=128"], (245, 0, 1_000_000)),
    ],
)
def test_the_last_word_says_how_long_a_run_is(words: list[str], length: tuple[int, float, int]) -> None:
    notes: list[str] = []
    recipe = read(None, words, notes=notes).recipe
    assert (recipe.steps, recipe.epochs, recipe.tokens) == length
    lengths = [word for word in words if "sequence" not in word]
    assert notes == [
        f"{length} is not taken: {lengths[-1]} says how long the run is, and comes later" for length in lengths[:-1]
    ]


@pytest.mark.parametrize(
    ("words", "length"),
    [
        (["recipe.steps=40", "recipe.epochs=0"], (40, 0, 0)),
        (["recipe.epochs=0", "recipe.steps=40", "recipe.tokens=0.0"], (40, 0, 0)),
        (["recipe.tokens=1e6", "recipe.epochs=0"], (123, 0, 1_000_000)),
        (["recipe={steps: 40, epochs: 0}"], (40, 0, 0)),
    ],
)
def test_a_length_of_zero_leaves_the_others_as_they_are(words: list[str], length: tuple[int, float, int]) -> None:
    notes: list[str] = []
    recipe = read(None, words, notes=notes).recipe
    assert ((recipe.steps, recipe.epochs, recipe.tokens), notes) == (length, [])


def test_a_name_of_the_hub_is_said_to_bring_no_weights() -> None:
    notes: list[str] = []
    assert read(None, ["model=openai-community/gpt2"], notes=notes).model.name == "gpt2-124m"
    assert len(notes) == 1 and "weights are drawn anew" in notes[0] and "model=FOLDER" in notes[0]
    for words in (["model=gpt2-124m"], ["model=openai-community/gpt2", "model.init=random"]):
        read(None, words, notes=(silent := []))
        assert silent == []


def test_a_model_that_is_not_there_is_no_preset_either() -> None:
    with pytest.raises(PlanError, match="no folder of that name is here"):
        read(None, ["model=hf_folder"])
    with pytest.raises(PlanError, match="model='runs/mine' does not exist: give a preset, a run folder, or a"):
        read(None, ["model=runs/mine"])


def test_a_run_stands_for_what_it_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine" / "hf").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "hf" / "config.json").write_text("{}")
    folders = []

    def shape_of(folder: Path) -> FolderModel:
        folders.append(folder)
        return FolderModel(shape=presets.model("llama-tiny"))

    plan = read(None, ["model=runs/mine"], read_folder=shape_of)
    assert folders == [Path("runs/mine/hf")] and plan.init == str(Path("runs/mine/hf"))
